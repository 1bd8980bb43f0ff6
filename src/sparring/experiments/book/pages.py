"""The pages of a book: OUT/index.html, and a page for each set, method and claim, made from the figures alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.experiments.book.plan import SOLVED
from sparring.experiments.book.results import NOT_SHOWN, REVERSED, SHOWN, of_set
from sparring.experiments.report import figures
from sparring.experiments.report.figures import RenderedFigure
from sparring.experiments.report.html import Block, Code, Facts, Figures, Links, Page, Paragraph, Points, Section, Sheet
from sparring.experiments.report.tables import Column, Row, Table, text_columns
from sparring.experiments.report.wording import command_lines, in_words

TONES = {"better": "good", "worse": "bad", "reference": "plain", SHOWN: "good", REVERSED: "bad", NOT_SHOWN: "plain"}
QUALITY = (  # narrow screens cut a row: the verdict comes first
    *text_columns("method", "verdict"),
    Column("mean ± std", "{mean:.4f}[[ ± {std:.4f}]]"),
    Column("difference to the reference", "{difference:+.4f}[[ [{d_low:+.4f}, {d_high:+.4f}]]]"),
    Column("relative", "{relative:+.1%}"),
    Column("p (Holm)", "{p_holm:.2g}"),
    Column("repetitions", "{repetitions}"),
)
COST = (
    *text_columns("method"),
    Column("validation", "{validation:.4f}"),
    Column("at equal time", "{equal_time:.4f}"),
    Column("seconds", "{seconds:.1f}"),
    Column("epochs", "{epochs:.0f}"),
    Column("tuning seconds", "{tuning_seconds:.0f}"),
    Column("candidates in the loss", "{candidates:,.0f}"),
    Column("catalogue seen", "{catalogue_share:.1%}"),
)
READING = (
    "Every method has the same split and the same number of repetitions. A repetition is a complete tuning on the "
    "validation part, with a search of its own seed, and one training of its choice, with a seed of its own. All have "
    "the same number of trials: the recipe's defaults, strong settings, half and twice its temperature, a design that "
    "fills the space, then the choices of a sampler. Temperatures are searched in each method's own unit. One rule "
    "ends poor trials early, the same for every method; a method that learns slowly may lose a good setting by it. "
    "Training stops when the validation metric has stopped rising. The test part is ranked once by each final run.",
    "The difference has a 95 % interval over repetitions and queries together; the verdict rests on it, after Holm's "
    "correction over the methods of a chapter. It sees three kinds of noise: the settings that a search happens to "
    "choose, the seed of a training, and the queries. It does not see another split of the data. A verdict is about "
    "these sets, this size of model and this amount of tuning.",
    "At equal time: the best validation metric that a method has reached after the seconds that the reference needs "
    "for its best epoch. Seconds are of training alone, on the device that the page names; with several jobs they "
    "include contention.",
    "Candidates in the loss: those of one query in a step, after a method has kept the hardest. Catalogue seen: the "
    "share of all items among the candidates of all queries of a step. Near 100 % a sampled loss is a full softmax, "
    "and methods of sampling cannot differ.",
)
CAVEATS = (
    "Average ranks ignore how large a difference is. The critical difference assumes that sets are independent, and "
    "depends on the methods that are compared: adding a poor one can change it. With fewer than about ten sets it "
    "rarely shows anything, which is no proof of equality.",
    "The signed-rank test takes relative differences of sets as draws from one distribution. Our sets were chosen "
    "because they are public, not at random. With fewer than five sets it is too sure, and left out.",
    "The splits of one set share its queries, so a set counts once: its splits are averaged first.",
    "A set on which no method is shown to be ahead of popularity is left out of ranks and claims, and a claim leaves "
    "out the sets on which neither of its methods is.",
)


def write(out: Path, results: Mapping[str, Any]) -> Path:
    """Write all pages; the path of the first.

    write(Path("book"), json.loads(Path("book/book.json").read_text()))
    """
    links = _links(results)
    pages = {"index.html": _index(out, results, links)}
    for name in results["plan"]["sets"]:
        pages[links[name]] = _set_page(out, results, links, name)
    for name in results["plan"]["methods"]:
        pages[links[name]] = _method_page(out, results, links, name)
    for claim in results["claims"]:
        pages[_claim_file(claim["name"])] = _claim_page(results, links, claim)
    for file, page in pages.items():
        page.write(out / file)
    return out / "index.html"


def _links(results: Mapping[str, Any]) -> dict[str, str]:
    """The file of each set and method, by name."""
    found = {name: f"method-{_slug(name)}.html" for name in results["plan"]["methods"]}
    return found | {name: f"set-{_slug(name)}.html" for name in results["plan"]["sets"]}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _claim_file(name: str) -> str:
    return f"claim-{_slug(name)}.html"


def _lead(results: Mapping[str, Any], text: str, part: str = "", name: str = "") -> str:
    """The text and the commit of the runs of this set or method; of all runs without one, or if it has none."""
    commits = dict.fromkeys(run["commit"] for run in results["runs"] if part and run[part] == name)
    return f"{text} Commit {', '.join(commits or results['commits'])}."


def _home(results: Mapping[str, Any]) -> Section:
    pages = {"The book": "index.html"}
    pages |= {
        results["plan"]["claims"][each["name"]]["statement"]: _claim_file(each["name"]) for each in results["claims"]
    }
    return Section("Other pages", (Links(pages),))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


# The first page


def _index(out: Path, results: Mapping[str, Any], links: Mapping[str, str]) -> Page:
    plan = results["plan"]
    sections = [Section("In short", (Points(findings(results)), Facts(book_facts(results))))]
    for each in results["ranks"]:
        sections.append(_overall(out, each, plan, links))
    sections.append(Section("Claims", (_claims_sheet(results),)))
    sections.append(Section("Sets", (_sets_sheet(results, links),)))
    methods = [
        {"method": name, "text": _first_sentence(each["text"]), "unit": each["tau_unit"]}
        for name, each in plan["methods"].items()
    ]
    columns = (*text_columns("method"), Column("its negatives or its solution", "{text}", text=True))
    columns += (Column("unit of temperature", "{unit:g}"),)
    sections.append(Section("Methods", (Sheet(Table(columns, methods), links=links),)))
    sections.append(Section("Null methods", (Paragraph(null_sentence(results["null"])),)))
    sections.append(Section("How to read it", [Paragraph(text) for text in (*READING, *CAVEATS)]))
    if results["left"]:
        more = f"{len(results['left'])} cells are not done: the same command goes on with them."
        sections.append(Section("Left", (Paragraph(more), Code("\n".join(results["left"]), "The cells"))))
    if results["failures"]:
        lines = [f"{each['data']} {each['recipe']}: {each['error']}" for each in results["failures"]]
        sections.append(Section("Failed", (Points(lines),)))
    made: list[Block] = [Code(commands(results))] if results["command"] else []
    sections.append(Section("How it was made", (*made, Facts(results["environment"]))))
    chapters = {(row["set"], row["split"], row["model"]) for row in results["leaderboards"]}
    written = f"{len(chapters)} chapter{'s' * (len(chapters) != 1)}"
    text = f"Ways of choosing negatives, equally tuned: {len(plan['methods'])} methods, {written}."
    return Page("The book", _lead(results, text), sections)


def commands(results: Mapping[str, Any]) -> str:
    """The command that made a book; of a joined book those of all its parts."""
    return "\n".join(command_lines(line) for line in results["command"].splitlines())


def findings(results: Mapping[str, Any]) -> list[str]:
    """The best average rank of each model, every claim with its verdict, the null rate, the sets left out."""
    plan = results["plan"]
    lines = []
    for each in results["ranks"]:
        best = each["rows"][0]["rank"]
        first = [row["method"] for row in each["rows"] if row["rank"] == best]
        have = f"{' and '.join(first)} {'have' if len(first) > 1 else 'has'}"
        lines.append(
            f"{each['model']}: {have} the best average rank, {best:.2f} of "
            f"{len(each['rows'])} methods over {len(each['sets'])} set{'s' if len(each['sets']) > 1 else ''}."
        )
    for claim in results["claims"]:
        lines.append(f"{plan['claims'][claim['name']]['statement']}: {claim['verdict']}{_effect(claim)}.")
    lines.append(null_sentence(results["null"]))
    out = sorted({f"{row['set']} {row['split']} {row['model']}" for row in results["data"] if not row["usable"]})
    lines += [f"Nothing is shown to be above popularity, so left out of verdicts: {'; '.join(out)}."] if out else []
    return lines


def null_sentence(null: Mapping[str, Any]) -> str:
    """How often a method is called different from itself."""
    if not null["pairs"]:
        return "No repeated method has finished, so the rate of false verdicts is not measured."
    interval = f"95 % interval {null['low']:.0%} to {null['high']:.0%}"
    return (
        f"A method is called different from itself, tuned and trained again, in "
        f"{null['different']} of {null['pairs']} cases ({null['rate']:.1%}, {interval}); 5 % are expected."
    )


def _effect(claim: Mapping[str, Any]) -> str:
    if claim["effect"] is None:
        return ""
    interval = "" if claim["low"] is None else f" [{_percent(claim['low'])}, {_percent(claim['high'])}]"
    return (
        f", {_percent(claim['effect'])}{interval} over {len(claim['sets'])} set{'s' if len(claim['sets']) > 1 else ''}"
    )


def book_facts(results: Mapping[str, Any]) -> dict[str, str]:
    """The metric, the budget and the commit of a book."""
    plan = results["plan"]
    facts = {"metric": f"{plan['metric']}, of the complete catalogue"}
    facts |= {"repetitions": f"{plan['repetitions']} of each method", "trials": trials_in_words(plan, plan["sets"])}
    facts |= {"reference": plan["reference"], "runs": f"{len(results['runs']):,}"}
    if plan["changes"]:
        facts["changed"] = ", ".join(f"{name}={value}" for name, value in plan["changes"].items())
    return facts | {"commit": ", ".join(results["commits"]), "left": f"{len(results['left'])} cells"}


def trials_in_words(plan: Mapping[str, Any], sets: Iterable[str]) -> str:
    """The trials of a repetition, and the rungs that prune them; of each set where they differ.

    trials_in_words({"trials": 20, "rungs": [[8, 7]], "sets": {"shop": {}}}, ["shop"])
    # 20 in each repetition: all train 8 epochs, the best 7 train until they stop rising
    """
    alike: dict[str, list[str]] = {}
    for name in sets:
        alike.setdefault(_pruning(of_set(plan, name)["rungs"], plan["trials"]), []).append(name)
    told = [f"{words} ({', '.join(names)})" for words, names in alike.items()] if len(alike) > 1 else alike
    return f"{plan['trials']} in each repetition: {'; '.join(told)}"


def _pruning(rungs: Sequence[tuple[int, int]], trials: int) -> str:
    parts, going = [], "all"
    for epochs, kept in rungs:
        if kept < trials:
            parts.append(f"{going} train {epochs} epochs")
            going = f"the best {kept}" + " of them" * bool(len(parts) > 1)
    return ", ".join([*parts, f"{going} train until they stop rising"])


def _overall(out: Path, each: Mapping[str, Any], plan: Mapping[str, Any], links: Mapping[str, str]) -> Section:
    """The leaderboard of a model over sets."""
    reference, margin = plan["reference"], plan["margin"]
    chances = (
        Column(f"P(over {margin:.0%} better)", "{better:.2f}"),
        Column("P(equal)", "{equal:.2f}"),
        Column(f"P(over {margin:.0%} worse)", "{worse:.2f}"),
    )
    columns = (
        *text_columns("method"),
        Column("average rank", "{rank:.2f}"),
        Column("first on", "{wins}"),
        Column(f"mean difference to {reference}", "{relative:+.1%}"),
        *(chances if any(row["better"] is not None for row in each["rows"]) else ()),
        Column("against the first", "{tie}", text=True),
    )
    words = {True: "not shown to differ", False: "worse", None: None}
    rows = [
        {**row, "tie": words[row["tied"]] if row["rank"] > each["rows"][0]["rank"] else None} for row in each["rows"]
    ]
    caption = f"Test {plan['metric']} over {', '.join(each['sets'])}; chapters: {len(each['chapters'])}."
    drawn = figures.average_ranks({row["method"]: row["rank"] for row in each["rows"]}, each["distance"])
    text = "Average ranks" + (
        "; one set: nothing can be tested over sets."
        if each["distance"] is None
        else "; a bar joins methods that Nemenyi's test does not show to differ."
    )
    picture = figures.save(drawn, out / "figures", f"ranks-{each['model']}", text)
    return Section(
        f"Overall: {each['model']}",
        (
            Paragraph(plan["models"][each["model"]]["line"]),
            Sheet(Table(columns, rows, caption), tones={"worse": "bad"}, links=links),
            Figures((picture,)),
        ),
    )


def _claims_sheet(results: Mapping[str, Any]) -> Sheet:
    claims = results["plan"]["claims"]
    files = {claims[each["name"]]["statement"]: _claim_file(each["name"]) for each in results["claims"]}
    return Sheet(claims_table(results), tones=TONES, links=files)


def claims_table(results: Mapping[str, Any]) -> Table:
    """A row for each claim: its verdict, its effect with an interval, and where it holds."""
    claims = results["plan"]["claims"]
    rows = [
        {**each, "claim": claims[each["name"]]["statement"], "n": len(each["sets"]), "where": len(each["holds"])}
        for each in results["claims"]
    ]
    columns = (
        *text_columns("claim", "verdict"),
        Column("effect", "{effect:+.1%}[[ [{low:+.1%}, {high:+.1%}]]]"),
        Column("sets", "{n}"),
        Column("chapters where it holds", "{where}"),
    )
    return Table(columns, rows)


def _sets_sheet(results: Mapping[str, Any], links: Mapping[str, str]) -> Sheet:
    rows, metric = [], results["plan"]["metric"]
    for data in results["data"]:
        own = [row for row in results["leaderboards"] if _key(row) == _key(data) and row["metric"] == metric]
        first = _first(own, results["plan"])
        verdicts = "used" if data["usable"] else "left out: nothing is above popularity"
        rows.append({**data, "first": first["method"], "mean": first["mean"], "verdicts": verdicts})
    columns = (
        *text_columns("set", "split", "model"),
        Column("queries", "{queries:,}"),
        Column("items", "{items:,}"),
        Column("training pairs", "{train:,}"),
        *text_columns("first"),
        Column(metric, "{mean:.4f}"),
        *text_columns("verdicts"),
    )
    return Sheet(Table(columns, rows), links=links)


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["set"], row["split"], row["model"]


def _first(rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with the highest mean; a repeated method counts only where there is no other."""
    return max(rows, key=lambda row: (not plan["methods"][row["method"]]["repeats"], row["mean"]))


def _first_sentence(text: str) -> str:
    return text.split("\n\n")[0].split("\n")[0]


# A page for each set


def _set_page(out: Path, results: Mapping[str, Any], links: Mapping[str, str], name: str) -> Page:
    plan, sections = results["plan"], []
    budget, own_settings = {"trials": trials_in_words(plan, [name])}, of_set(plan, name)["settings"]
    budget |= {"settings of this set": in_words(own_settings)} if own_settings else {}
    for data in (each for each in results["data"] if each["set"] == name):
        rows = sorted(
            (row for row in results["leaderboards"] if _key(row) == _key(data)), key=lambda row: -float(row["mean"])
        )
        own = [row for row in rows if row["metric"] == plan["metric"]]
        sizes = {part: f"{data[part]:,}" for part in ("queries", "items", "train", "valid", "test") if part in data}
        parts: list[Block] = [Points(told_of_set(data, own, plan)), Facts(sizes | budget)]
        for metric in plan["metrics"]:
            board = Table(QUALITY, [row for row in rows if row["metric"] == metric])
            parts.append(Sheet(board, f"Test {metric}", TONES, links))
        parts.append(Sheet(Table(COST, own, f"validation {plan['metric']}, and training"), "Cost", links=links))
        parts.append(Figures(_set_figures(out, results, data, own)))
        parts.append(_chosen_settings([run for row in own for run in _runs(results, row)], ("method",), links))
        failed = [f"{row['method']} {row['failed']} of {row['trials']}" for row in own if row["failed"]]
        parts += [Paragraph(f"Failed trials: {', '.join(failed)}.")] if failed else []
        commands = "\n".join(str(row["command"]) for row in own)
        parts.append(Code(commands, "Repeat each cell: tune and train again"))
        trained = "\n".join(str(row["train"]) for row in own)
        parts.append(Code(trained, "Train the first repetition of each alone, with the settings that it chose"))
        sections.append(Section(f"{data['split']}, {data['model']}", parts))
    if not sections:
        sections.append(Section("Nothing yet", (Paragraph("No cell of this set is done."),)))
    sections.append(Section("How to read it", [Paragraph(text) for text in READING]))
    sections.append(_home(results))
    return Page(name, _lead(results, plan["sets"][name]["line"], "set", name), sections)


def told_of_set(data: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> list[str]:
    """The main points of a chapter: the first method, verdicts, and reasons for doubt."""
    first = _first(rows, plan)
    lines = [f"{first['method']} has the highest mean, {first['mean']:.4f}."]
    for verdict in ("better", "worse"):
        names = [row["method"] for row in rows if row["verdict"] == verdict]
        lines += [f"{verdict.capitalize()} than {plan['reference']}: {', '.join(names)}."] if names else []
    if not data["usable"]:
        lines.append("No method is shown to be ahead of popularity: this chapter is left out of verdicts.")
    last = [row["method"] for row in rows if row["best_is_last"]]
    lines += [f"The best epoch is the last that was allowed, so more may do better: {', '.join(last)}."] if last else []
    full = [row["method"] for row in rows if (row["catalogue_share"] or 0) > 0.5 and row["method"] != "full_softmax"]
    lines += [f"A step sees more than half of the catalogue: {', '.join(full)}."] if full else []
    return lines


def _set_figures(
    out: Path, results: Mapping[str, Any], data: Mapping[str, Any], rows: Sequence[Row]
) -> list[RenderedFigure]:
    plan, key = results["plan"], "-".join(_key(data))
    names = [str(row["method"]) for row in rows]
    shown = [{**row, "recipe": row["method"]} for row in rows]
    reference = plan["reference"]
    bars = figures.bars(shown, names, reference)
    drawn = [
        figures.save(bars, out / "figures", f"{key}-quality", "Test quality: mean and one deviation over repetitions.")
    ]
    stepped = [str(row["method"]) for row in rows if not row["solved"]]
    histories = {name: _histories(results, data, name) for name in stepped}
    if any(histories.values()):
        curves = figures.curves(histories, plan["metric"], stepped, reference)
        caption = f"Validation {plan['metric']} by epoch: the mean over repetitions with one deviation."
        drawn.append(figures.save(curves, out / "figures", f"{key}-learning", caption))
    return drawn


def _runs(results: Mapping[str, Any], row: Mapping[str, Any]) -> list[Row]:
    """The runs of a row of a leaderboard, by repetition."""
    model = SOLVED if row["solved"] else row["model"]
    key = (row["set"], row["split"], model, row["method"])
    return [run for run in results["runs"] if (*_key(run), run["method"]) == key]


def _chosen_settings(runs: Sequence[Row], first: Sequence[str], links: Mapping[str, str]) -> Sheet:
    """The settings that the search of each repetition chose."""
    rows = [{**run, "words": in_words(run["settings"])} for run in runs]  # type: ignore[arg-type]
    columns = (
        *text_columns(*first),
        Column("repetition", "{repetition}"),
        Column("validation", "{validation:.4f}"),
        Column("settings", "{words}", text=True),
    )
    return Sheet(Table(columns, rows), "Tuned settings", links=links)


def _histories(results: Mapping[str, Any], data: Mapping[str, Any], method: str) -> list[list[dict[str, Any]]]:
    """The curves of a method in a chapter, as records by epoch."""
    metric = results["plan"]["metric"]
    return [
        [{"epoch": epoch, "seconds": seconds, metric: value} for epoch, seconds, value in run["curve"]]
        for run in results["runs"]
        if _key(run) == _key(data) and run["method"] == method
    ]


# A page for each method


def _method_page(out: Path, results: Mapping[str, Any], links: Mapping[str, str], name: str) -> Page:
    plan = results["plan"]
    method = plan["methods"][name]
    rows = [row for row in results["leaderboards"] if row["method"] == name and row["metric"] == plan["metric"]]
    unit = f"{method['tau_unit']:g}: a temperature of {method['tau_unit']:g} is as sharp as 1 in other methods"
    facts = {"recipe": method["recipe"], "unit of temperature": unit}
    facts |= {"defined by": ", ".join(f"{key}={value}" for key, value in method["settings"].items())}
    facts |= {"repeats": method["repeats"], "draws": _draws(results, name)}
    formula = [Code(method["formula"].strip())] if method["formula"] else []
    about = Section(
        "The method", (Code(method["text"]), *formula, Facts({key: text for key, text in facts.items() if text}))
    )
    sections = [about]
    if rows:
        won = [f"{row['set']}, {row['split']}, {row['model']}" for row in rows if row["verdict"] == "better"]
        lost = [f"{row['set']}, {row['split']}, {row['model']}" for row in rows if row["verdict"] == "worse"]
        lines = [f"Better than {plan['reference']}: {'; '.join(won)}."] if won else []
        lines += [f"Worse than {plan['reference']}: {'; '.join(lost)}."] if lost else []
        columns = (*text_columns("set", "split", "model"), *QUALITY[1:])
        table = Sheet(Table(columns, rows), f"Test {plan['metric']}", TONES, links)
        own = {id(run): run for row in rows for run in _runs(results, row)}  # a solved method is in several chapters
        tuned = _chosen_settings(list(own.values()), ("set", "split", "model"), links)
        sections.append(Section("Where it wins and loses", (*([Points(lines)] if lines else []), table, tuned)))
        sections += _cost_section(out, results, name, rows)
        commands = [str(row["command"]) for row in rows if not row["solved"] or row["model"] == rows[0]["model"]]
        sections.append(Section("Repeat it", (Code("\n".join(commands)),)))
    else:
        sections.append(Section("Nothing yet", (Paragraph("No cell of this method is done."),)))
    printed = [row for row in results["published"] if row["method"] == name]
    if printed:
        columns = (
            *text_columns("data", "metric"),
            Column("published", "{published:.4f}"),
            Column("ours", "{ours:.4f}"),
            *text_columns("model", "place"),
        )
        note = (
            "The published figures have other splits, models and tuning, and XIR another formula of NDCG: read the "
            "order of methods, not the values. `sparring reproduce` repeats the papers' own settings."
        )
        sections.append(Section("Published", (Paragraph(note), Sheet(Table(columns, printed)))))
    sections.append(_home(results))
    return Page(name, _lead(results, _first_sentence(method["text"]), "method", name), sections)


def _draws(results: Mapping[str, Any], name: str) -> str:
    """The negatives that a method draws, from its first run."""
    run = next((each for each in results["runs"] if each["method"] == name and each["negatives"]), None)
    if run is None:
        return ""
    shares = run["negatives"]
    words = [f"{run['candidates']:,.0f} candidates a query, {run['catalogue_share']:.1%} of the catalogue a step"]
    words += [f"{part} {shares[part]:.0%}" for part in ("head", "mid", "tail", "synthetic") if shares.get(part)]
    words += [f"known positives {shares['accidental']:.2%}"] if "accidental" in shares else []
    words += [f"false negatives {shares['false_negatives']:.2%}"] if "false_negatives" in shares else []
    return f"{', '.join(words)} (on {run['set']}, {run['split']}, {run['model']})"


def _cost_section(out: Path, results: Mapping[str, Any], name: str, rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """The cost of a method beside the reference, and its validation by epoch on every set."""
    plan = results["plan"]
    every = [row for row in results["leaderboards"] if row["metric"] == plan["metric"]]
    reference = {_key(row): row["seconds"] for row in every if row["method"] == plan["reference"]}
    ratios: list[Row] = [
        {**row, "ratio": row["seconds"] / base if (base := reference.get(_key(row))) else None} for row in rows
    ]
    columns = (
        *text_columns("set", "split", "model"),
        *COST[1:3],
        Column("seconds", "{seconds:.1f}"),
        Column(f"time / {plan['reference']}", "{ratio:.2f}"),
        Column("to the best epoch", "{best_seconds:.1f}"),
        *COST[4:],
    )
    parts: list[Block] = [Sheet(Table(columns, ratios))]
    histories = {"-".join(_key(row)): _histories(results, row, name) for row in rows if not row["solved"]}
    if any(histories.values()):
        drawn = figures.curves(histories, plan["metric"], list(histories), "")
        caption = f"Validation {plan['metric']} by epoch: the mean over repetitions with one deviation."
        parts.append(Figures((figures.save(drawn, out / "figures", f"{_slug(name)}-learning", caption),)))
    return [Section("Cost and curve", parts)]


# A page for each claim


def _claim_page(results: Mapping[str, Any], links: Mapping[str, str], claim: Mapping[str, Any]) -> Page:
    plan = results["plan"]
    stated = plan["claims"][claim["name"]]
    lines = [f"Verdict: {claim['verdict']}{_effect(claim)}."]
    if chances := claim["signed_rank"]:
        lines.append(
            f"Signed-rank test over sets: better with probability {chances['better']:.2f}, equal within "
            f"{plan['margin']:.0%} {chances['equal']:.2f}, worse {chances['worse']:.2f}."
        )
    lines += [f"It holds on: {'; '.join(claim['holds'])}."] if claim["holds"] else ["It holds in no chapter."]
    if len(claim["sets"]) == 1:
        lines.append("One set: nothing is known about others.")
    lines += [stated["note"]] if stated.get("note") else []
    columns = (
        *text_columns("set", "split", "model", "verdict"),
        Column("effect", "{relative:+.1%}[[ [{low:+.1%}, {high:+.1%}]]]"),
        Column("p", "{p:.2g}"),
        Column("p (Holm)", "{p_holm:.2g}"),
        Column("at equal time", "{equal_time:+.1%}"),
    )
    about = (
        f"The claim: {stated['better']} is ahead of {stated['worse']} ({stated['paper']}). The effect is the relative "
        f"difference of {plan['metric']} with a 95 % interval over repetitions and queries; Holm's correction is over "
        "the chapters of the claim. Over sets it is shown if the t interval of the mean effect is above zero, and "
        "reversed if it is below. At equal time: the same on the validation part, after the seconds that "
        f"{stated['worse']} needs for its best epoch."
    )
    pair = {name: links[name] for name in (stated["better"], stated["worse"])}
    parts: list[Block] = [Points(lines), Paragraph(about), Links(pair)]
    parts += [Sheet(Table(columns, claim["rows"]), tones=TONES, links=links)] if claim["rows"] else []
    sections = [Section("Verdict", parts), Section("Tested with", (_tested(results, stated),))]
    sections.append(Section("Caveats", [Paragraph(text) for text in CAVEATS]))
    sections.append(_home(results))
    return Page(
        stated["statement"],
        _lead(results, f"{claim['verdict'].capitalize()}. {stated['paper'].removesuffix('.')}."),
        sections,
    )


def _tested(results: Mapping[str, Any], stated: Mapping[str, Any]) -> Sheet:
    """The settings under which both methods were compared."""
    metric = results["plan"]["metric"]
    both = (stated["better"], stated["worse"])
    rows = [row for row in results["leaderboards"] if row["metric"] == metric and row["method"] in both]
    columns = (
        *text_columns("set", "split", "model", "method"),
        Column("mean ± std", "{mean:.4f}[[ ± {std:.4f}]]"),
        Column("candidates", "{candidates:,.0f}"),
        Column("catalogue seen", "{catalogue_share:.1%}"),
    )
    return Sheet(Table(columns, rows))
