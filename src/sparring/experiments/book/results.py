"""The figures of a book, read from its run folders: every run, leaderboards, ranks over sets, claims, the null rate.

    OUT/book.json    everything that the pages show, and every run
    OUT/runs.csv     every run, one line each

A chapter is one split of a set under one model. Solved methods have no model and stand in every chapter of their split.
All tests are those of evaluation/statistics.py, over repetitions and queries together. A repetition is a complete
tuning and one training, so a test sees the noise of both (benchmarks/null_book.py).
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.workers import Failure
from sparring.evaluation.statistics import (
    SignedRank,
    TestResult,
    bayesian_signed_rank,
    critical_difference,
    holm,
    paired_t,
    ranks,
    seeds_and_queries,
    share_interval,
    summary,
)
from sparring.experiments.book.plan import SOLVED, BookMethod, Claim
from sparring.experiments.book.running import Book, Cell, commit, stale
from sparring.experiments.papers.printed import published, published_cells
from sparring.experiments.report.study_parts import environment
from sparring.experiments.report.tables import Row, Table
from sparring.experiments.report.wording import distinct, in_words
from sparring.experiments.study import FinishedRun
from sparring.recipes import finding, settings
from sparring.recipes.setup import SETTINGS, flat

FORMAT = 3
LEVEL = 0.05
LEAST_SETS = 5  # of the signed-rank test: with fewer it is sure of differences that it saw twice
SHOWN, NOT_SHOWN, REVERSED = "shown", "not shown", "reversed"
Chapter = tuple[str, str, str]  # set, split, model


@dataclass(frozen=True)
class Values:
    """The runs of a cell and their values, by repetition."""

    cell: Cell
    runs: Sequence[FinishedRun]
    by_metric: Mapping[str, Mapping[int, np.ndarray]]

    def means(self, metric: str) -> list[float]:
        return [float(values.mean()) for values in self.by_metric[metric].values()]

    @property
    def hardware(self) -> set[str]:
        return {str(run.measured["device"]) for run in self.runs}

    @cached_property
    def curves(self) -> list[list[tuple[int, float, float]]]:
        """Epoch, seconds of training and validation metric of every validation, by repetition."""
        return [_curve(run) for run in self.runs]


def _curve(run: FinishedRun) -> list[tuple[int, float, float]]:
    select = run.meta["setup"]["validation"]["select"]
    return [(row["epoch"], row["seconds"], round(row[select], 6)) for row in run.history if select in row]


def compared(a: Mapping[int, np.ndarray], b: Mapping[int, np.ndarray]) -> tuple[TestResult | None, float, float]:
    """The test of a - b over repetitions and queries, the mean difference, and the mean of b; None with one of both.

    A method with nothing to tune and no seed has one repetition, which is paired with every one of the other.
    """
    common = sorted(a.keys() & b.keys())
    pairs = [(r, r) for r in common] if min(len(a), len(b)) > 1 else [(r, s) for r in a for s in b]
    d = np.stack([a[r] - b[s] for r, s in pairs])
    test = seeds_and_queries(d) if len(d) > 1 else None
    return test, float(d.mean()), float(np.mean([b[s].mean() for _, s in pairs]))


def equal_time(curves: Sequence[Sequence[tuple[int, float, float]]], seconds: float) -> float | None:
    """The best validation metric that trainings have reached after some seconds, their mean; None if one has none."""
    reached = [[value for _, at, value in curve if at <= seconds] for curve in curves]
    return float(np.mean([max(values) for values in reached])) if reached and all(reached) else None


def reached(values: Values, other: Values) -> float | None:
    """The best validation metric after the seconds that `other` needs for its best; None on other hardware."""
    seconds = seconds_to_best(other.curves)
    if seconds is None or values.hardware != other.hardware:
        return None
    return equal_time(values.curves, seconds)


def seconds_to_best(curves: Sequence[Sequence[tuple[int, float, float]]]) -> float | None:
    """Seconds of training until the best validation, mean over repetitions."""
    best = [max(curve, key=lambda point: (point[2], -point[1]))[1] for curve in curves if curve]
    return float(np.mean(best)) if best else None


# Reading


def read_values(book: Book) -> dict[tuple[str, str, str, str], Values]:
    """The finished cells by set, split, model and method; a cell with fewer repetitions than planned is left out."""
    found = {}
    for cell in book.cells:
        runs = book.runs(cell)
        if len(runs) == len(book.repetitions(cell)):
            by_metric = {metric: {r: run.values(metric) for r, run in enumerate(runs)} for metric in book.plan.metrics}
            found[cell.where.name, cell.split, cell.model, cell.method.name] = Values(cell, runs, by_metric)
    return found


def chapters(book: Book, values: Mapping[tuple[str, str, str, str], Values]) -> dict[Chapter, dict[str, Values]]:
    """The finished cells of every chapter by method; solved methods stand in the chapters of all models."""
    found: dict[Chapter, dict[str, Values]] = {}
    for where in book.plan.sets.values():
        models = dict.fromkeys(cell.model for cell in book.cells if cell.where == where and cell.model != SOLVED)
        for how in where.splits:
            for model in models or {SOLVED: None}:
                own = {
                    name: values[key]
                    for name in book.plan.methods
                    for key in ((where.name, how, model, name), (where.name, how, SOLVED, name))
                    if key in values
                }
                if own:
                    found[where.name, how, model] = own
    return found


def collect(book: Book, failures: Sequence[Failure], left: Sequence[Cell], command: str = "") -> dict[str, Any]:
    """Everything that the pages show, ready for JSON."""
    values = read_values(book)
    by_chapter = chapters(book, values)
    usable = {key for key, own in by_chapter.items() if above_popularity(book, own)}
    runs = [run for each in values.values() for run in each.runs]
    claims = book.plan.claims.values()
    return summarised(
        {
            "format": FORMAT,
            "commits": list(dict.fromkeys(run.measured["commit"] for run in runs)) or [commit()],
            "environment": environment(runs),
            "command": command,
            "plan": plan_record(book),
            "defaults": book.defaults,
            "data": [_data(key, own, key in usable) for key, own in by_chapter.items()],
            "leaderboards": [row for key, own in by_chapter.items() for row in leaderboard(book, key, own)],
            "claims": [{"name": each.name, "rows": claim_rows(book, each, by_chapter, usable)} for each in claims],
            "null": {"rows": null_rows(book, by_chapter)},
            "left": [cell.name for cell in left],
            "failures": [asdict(failure) for failure in failures],
            "runs": [_run(book, each, run, place) for each in values.values() for place, run in enumerate(each.runs)],
        }
    )


def summarised(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results with ranks, verdicts over sets, the null rate and printed figures, from those of single chapters."""
    plan = results["plan"]
    every = (over_sets(results, model) for model in plan["models"])
    return {
        **results,
        "ranks": [each for each in every if each],
        "claims": [{"name": each["name"], **judged(plan, each["rows"])} for each in results["claims"]],
        "null": null_rate(results["null"]["rows"]),
        "published": _published(plan, results["runs"]),
    }


def joined(results: Mapping[str, Any], other: Mapping[str, Any], source: str = "the other book") -> dict[str, Any]:
    """The results with the chapters of another book that was made alike, before its own.

    A chapter that both have is taken from the book with more finished methods of it, from `results` if they have as
    many. A book can so grow over machines and over time, without its runs, and loses nothing.

        joined(collect(book, [], []), json.loads(Path("docs/book/book.json").read_text()), "docs/book/book.json")
    """
    check_alike(results["plan"], results["defaults"], other, source)
    ours, theirs = (Counter(map(_chapter, each["leaderboards"])) for each in (results, other))
    taken = {key for key in theirs if theirs[key] > ours[key]}

    def chapters_of(mine: Sequence[Row], more: Sequence[Row]) -> list[Row]:
        return [*(row for row in more if _chapter(row) in taken), *(row for row in mine if _chapter(row) not in taken)]

    known = {_cell_name(run) for run in results["runs"]}
    solved = [run for run in other["runs"] if run["model"] == SOLVED and _cell_name(run) not in known]
    runs = [*solved, *chapters_of(results["runs"], other["runs"])]
    done = {_cell_name(run) for run in runs}
    tested, more = ({each["name"]: each["rows"] for each in book["claims"]} for book in (results, other))
    parts = {part: {**other["plan"][part], **results["plan"][part]} for part in ("sets", "models", "methods", "claims")}
    return summarised(
        {
            **results,
            "commits": list(dict.fromkeys([*other["commits"], *results["commits"]])),
            "environment": _both(other["environment"], results["environment"]),
            "command": "\n".join(filter(None, (other["command"], results["command"]))),
            "plan": {**results["plan"], **parts},
            "defaults": {**other["defaults"], **results["defaults"]},
            "data": chapters_of(results["data"], other["data"]),
            "leaderboards": chapters_of(results["leaderboards"], other["leaderboards"]),
            "claims": [
                {"name": name, "rows": chapters_of(tested.get(name, []), more.get(name, []))}
                for name in parts["claims"]
            ],
            "null": {"rows": chapters_of(results["null"]["rows"], other["null"]["rows"])},
            "left": list(dict.fromkeys(name for name in (*other["left"], *results["left"]) if name not in done)),
            "failures": [*other["failures"], *results["failures"]],
            "runs": runs,
        }
    )


def check_alike(plan: Mapping[str, Any], defaults: Mapping[str, Any], other: Mapping[str, Any], source: str) -> None:
    """Raise unless another book was made with the settings of this one, so that they can be joined."""
    if other.get("format") != FORMAT:
        raise UserError(
            f"{source} is of another version of Sparring: it has format {other.get('format')}, not {FORMAT}"
        )
    plan, before = json.loads(json.dumps(plan)), other["plan"]
    names = ("metric", "metrics", "repetitions", "trials", "design", "rungs", "reference", "changes")
    pairs = {name: (before[name], plan[name]) for name in names}
    for each in (name for name in plan["sets"] if name in before["sets"]):
        old, new = of_set(before, each), of_set(plan, each)
        pairs |= {f"sets.{each}.{name}": (old[name], new[name]) for name in new}
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise UserError(f"{source} was made with {name}={theirs}, this book with {ours}: they cannot be joined")
    shared = defaults.keys() & other["defaults"].keys()
    changed = stale({name: other["defaults"][name] for name in shared}, defaults)
    if changed:
        raise UserError(f"{source} was made with other defaults: {changed[0]}")


def of_set(plan: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The rungs and the settings of a set; those of the plan where its record has none."""
    return {part: plan["sets"][name].get(part, usual) for part, usual in (("rungs", plan["rungs"]), ("settings", {}))}


def _chapter(row: Row) -> Chapter:
    return str(row["set"]), str(row["split"]), str(row["model"])


def _cell_name(run: Row) -> str:
    return f"{run['set']} {run['split']} {run['model']} {run['method']}"


def _both(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """Facts of two books, each distinct value once."""
    names = dict.fromkeys((*first, *second))
    return {
        name: distinct(part for facts in (first, second) if name in facts for part in facts[name].split("; "))
        for name in names
    }


def write(book: Book, results: Mapping[str, Any]) -> None:
    """Write book.json and runs.csv."""
    files.write_json(book.out / "book.json", results)
    rows = [
        {name: value for name, value in run.items() if not isinstance(value, list | dict)}
        | run["test"]
        | {"settings": in_words(run["settings"])}
        for run in results["runs"]
    ]
    files.write_text(book.out / "runs.csv", Table((), rows).csv())


def plan_record(book: Book) -> dict[str, Any]:
    plan = book.plan
    names = ("metric", "metrics", "repetitions", "trials", "design", "rungs", "reference", "margin")
    record = {name: getattr(plan, name) for name in names} | {"changes": dict(book.changes)}
    record |= {
        part: {name: asdict(each) for name, each in getattr(plan, part).items()} for part in ("models", "claims")
    }
    record["sets"] = {name: {**asdict(each), "rungs": plan.rungs_of(each)} for name, each in plan.sets.items()}
    record["methods"] = {
        name: {**asdict(each), "text": inspect.getdoc(finding.find(each.recipe)) or ""}
        for name, each in plan.methods.items()
    }
    return record


def _data(key: Chapter, own: Mapping[str, Values], usable: bool) -> Row:
    run = next(iter(own.values())).runs[0]
    return {"set": key[0], "split": key[1], "model": key[2], **run.meta["data"], "usable": usable}


def _run(book: Book, values: Values, run: FinishedRun, place: int) -> dict[str, Any]:
    cell, curve = values.cell, values.curves[place]
    metric = book.plan.metric
    over = values.by_metric[metric][place]
    tuned = book.study(cell).tuned_settings(cell.chapter, book.method(cell, place))
    return {
        "set": cell.where.name,
        "split": cell.split,
        "model": cell.model,
        "method": cell.method.name,
        "repetition": place,
        "seed": run.meta["setup"]["seed"],
        "validation": max((value for _, _, value in curve), default=None),
        "queries": len(over),
        "query_std": float(over.std(ddof=1)),
        "train_seconds": run.result["train_seconds"],
        "best_seconds": seconds_to_best([curve]),
        "epochs": run.result["epochs"],
        "best_epoch": run.result["best_epoch"],
        "best_is_last": run.result["best_is_last"],
        "candidates": run.measured.get("candidates"),
        "catalogue_share": run.measured.get("catalogue_share"),
        "peak_bytes": run.measured["peak_bytes"],
        "device": str(run.measured["device"]),
        "commit": run.measured["commit"],
        **{name: run.meta["versions"][name] for name in ("sparring", "torch")},
        "settings": tuned,
        "test": run.test_metrics,
        "negatives": run.measured["negatives"],
        "curve": curve,
    }


# Leaderboards


def leaderboard(book: Book, key: Chapter, own: Mapping[str, Values]) -> list[Row]:
    """A row for each metric and method of a chapter: quality against the reference, cost, settings, commands."""
    plan, rows = book.plan, []
    reference = own.get(plan.reference)
    for metric in plan.metrics:
        tested: list[Row] = []
        for name, values in own.items():
            over = summary(values.means(metric))
            row: Row = {"set": key[0], "split": key[1], "model": key[2], "method": name, "metric": metric}
            row |= {"repetitions": over.n, "mean": over.mean, "std": over.std, "low": over.low, "high": over.high}
            row |= dict.fromkeys(("difference", "d_low", "d_high", "relative", "p", "p_holm"))
            row["verdict"] = "reference" if name == plan.reference else "no reference"
            if reference is not None and name != plan.reference:
                test, mean, base = compared(values.by_metric[metric], reference.by_metric[metric])
                row |= {
                    "difference": mean,
                    "relative": mean / base if base else None,
                    "verdict": "one repetition: no verdict",
                }
                if test is not None:
                    row |= {"d_low": test.low, "d_high": test.high, "p": test.p}
            row |= {"equal_time": None if reference is None else reached(values, reference)}
            tested.append(row | _cost(book, values))
        _judge(tested, plan.methods)
        rows += tested
    return rows


def _judge(rows: list[Row], methods: Mapping[str, BookMethod]) -> None:
    """Set the verdicts of one chapter and metric, after Holm's correction; a repeated method is judged apart."""
    tested = [row for row in rows if row["p"] is not None and not methods[str(row["method"])].repeats]
    for row, p in zip(tested, holm([float(row["p"] or 0) for row in tested]), strict=True):
        ahead = float(row["difference"] or 0) > 0
        row["p_holm"], row["verdict"] = p, ("better" if ahead else "worse") if p < LEVEL else "no difference shown"
    for row in rows:
        if repeats := methods[str(row["method"])].repeats:
            row["verdict"] = f"repeats {repeats}"


def _cost(book: Book, values: Values) -> Row:
    cell, runs = values.cell, values.runs
    own = book.study(cell)
    trials = [trial for r in range(len(runs)) for trial in own.read_trials(cell.chapter, book.method(cell, r))]
    shares = [run.measured.get("catalogue_share") for run in runs]
    return {
        "solved": cell.model == SOLVED,
        "validation": float(np.mean([max((v for _, _, v in curve), default=np.nan) for curve in values.curves])),
        "seconds": float(np.mean([run.result["train_seconds"] for run in runs])),
        "best_seconds": seconds_to_best(values.curves),
        "epochs": float(np.mean([run.result["epochs"] for run in runs])),
        "best_is_last": any(run.result["best_is_last"] for run in runs),
        "trials": len(trials),
        "failed": sum(trial.error is not None for trial in trials),
        "tuning_seconds": sum(trial.seconds for trial in trials),
        "candidates": runs[0].measured.get("candidates"),
        "catalogue_share": None if None in shares else float(np.mean(shares)),  # type: ignore[arg-type]
        "command": cell_command(book, cell),
        "train": train_command(cell, runs[0]),
    }


def cell_command(book: Book, cell: Cell) -> str:
    """The command that tunes and trains a cell again."""
    words = ["sparring", "book", *(["--plan", str(book.plan_file)] if book.plan_file is not None else [])]
    words += ["--sets", cell.where.name, "--splits", cell.split]
    words += [] if cell.model == SOLVED else ["--models", cell.model]
    words += ["--methods", cell.method.repeats or cell.method.name]
    words += ["--trials", str(book.plan.trials), "--repetitions", str(book.plan.repetitions)]
    for name, value in book.changes.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join([*words, "--out", "again"])


def train_command(cell: Cell, run: FinishedRun) -> str:
    """The command that trains a run of a cell alone, with the settings that tuning chose."""
    recipe = finding.find(cell.method.recipe)
    setup, read = settings.own_setup(recipe).flat(), settings.settings_of(recipe) - {"model_name", "model_options"}
    usual = {SETTINGS[name].path: setup[name] for name in read}  # a recipe may have an argument of a setting's name
    used = {SETTINGS[name].path: value for name, value in flat(run.meta["setup"]).items() if name in read}
    usual |= {name: default for name, (_, default) in settings.own_arguments(recipe).items()}
    used |= run.meta["arguments"]
    place = cell.where.place
    place = place if place == "demo" or place.startswith("world:") else f"DATA/{place}"
    words = ["sparring", "train", "--data", place, "--split", cell.split, "--recipe", cell.method.recipe]
    for name, value in used.items():
        if _word(value) != _word(usual[name]):
            words += ["--set", f"{name}={_word(value)}"]
    return shlex.join([*words, "--out", f"runs/{cell.method.name.replace(' ', '-')}"])


def _word(value: Any) -> str:
    """A value as --set takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "empty"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def above_popularity(book: Book, own: Mapping[str, Values]) -> bool:
    """Whether a method of a chapter is ahead of popularity, after Holm's correction; yes until both have been run.

    The test is over queries: whether these very models are ahead, not whether newly trained ones would be.
    """
    metric = book.plan.metric
    floor = next((each for each in own.values() if each.cell.method.recipe == "popularity"), None)
    others = [each for each in own.values() if each is not floor and not each.cell.method.repeats]
    if floor is None or not others:
        return True
    least = floor.by_metric[metric][0]
    tests = [paired_t(np.mean(list(each.by_metric[metric].values()), 0) - least) for each in others]
    adjusted = holm([test.p for test in tests])
    return any(p < LEVEL and test.mean > 0 for p, test in zip(adjusted, tests, strict=True))


# Over sets


def over_sets(results: Mapping[str, Any], model: str) -> dict[str, Any] | None:
    """Average ranks of the methods of a model over sets, Nemenyi's critical difference, and the signed-rank test.

    A set counts once: ranks and differences are averaged over its splits first. Only sets count on which all ranked
    methods are finished; those methods are chosen that give the most figures.
    """
    plan = results["plan"]
    usable = {_chapter(row) for row in results["data"] if row["usable"]}
    own: dict[Chapter, dict[str, Row]] = {}
    for row in results["leaderboards"]:
        key, name = _chapter(row), row["method"]
        if row["metric"] == plan["metric"] and key[2] == model and key in usable and not _repeats(plan, name):
            own.setdefault(key, {})[name] = row
    ranked, keys = complete({key: set(rows) for key, rows in own.items()})
    if len(ranked) < 2:
        return None
    methods = [name for name in plan["methods"] if name in ranked]
    means = {key: [float(own[key][name]["mean"]) for name in methods] for key in keys}  # type: ignore[arg-type]
    sets = list(dict.fromkeys(key[0] for key in keys))
    per_set = np.stack([np.mean([ranks(np.array(means[key])) for key in keys if key[0] == each], 0) for each in sets])
    average = per_set.mean(0)
    distance = critical_difference(len(methods), len(sets)) if len(sets) > 1 else None
    rows: list[Row] = []
    for place in np.argsort(average, kind="stable"):
        name = methods[place]
        row = {"method": name, "rank": float(average[place]), "sets": len(sets)}
        row["wins"] = sum(int(np.argmax(means[key])) == int(place) for key in keys)
        row["tied"] = None if distance is None else bool(average[place] - average.min() <= distance)
        effects = by_set([own[key][name] for key in keys])
        chances = _chances(plan, effects)
        row |= {"relative": float(np.mean(list(effects.values()))) if effects else None}
        row |= {"better": None, "equal": None, "worse": None} if chances is None else asdict(chances)
        rows.append(row)
    return {"model": model, "sets": sets, "chapters": [list(key) for key in keys], "distance": distance, "rows": rows}


def _repeats(plan: Mapping[str, Any], method: object) -> str:
    return str(plan["methods"][method]["repeats"])


def complete(names: Mapping[Chapter, set[str]]) -> tuple[set[str], list[Chapter]]:
    """Methods, and the chapters that have all of them: the choice with the most figures.

    complete({("a", "random", "tables"): {"uns", "xir"}, ("b", "random", "tables"): {"uns"}})  # both methods, on a
    """
    every = set.intersection(*names.values()) if names else set()
    best: tuple[set[str], list[Chapter]] = (set(), [])
    for chosen in (*names.values(), every):
        keys = [key for key, own in names.items() if chosen <= own]
        if len(chosen) * len(keys) > len(best[0]) * len(best[1]):
            best = (chosen, keys)
    return best


def by_set(rows: Sequence[Row]) -> dict[str, float]:
    """The relative difference on each set, averaged over its chapters; nothing where there is none."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["relative"] is not None:
            found.setdefault(str(row["set"]), []).append(float(row["relative"]))  # type: ignore[arg-type]
    return {each: float(np.mean(values)) for each, values in found.items()}


def _chances(plan: Mapping[str, Any], effects: Mapping[str, float]) -> SignedRank | None:
    """The signed-rank test of relative differences by set; None with few sets."""
    if len(effects) < LEAST_SETS:
        return None
    return bayesian_signed_rank(list(effects.values()), plan["margin"])


# Claims


def claim_rows(
    book: Book, claim: Claim, by_chapter: Mapping[Chapter, Mapping[str, Values]], usable: set[Chapter]
) -> list[Row]:
    """A claim in every chapter that has both methods.

    A chapter counts if it is usable and one of the two is ahead of popularity: where both learn nothing, their
    difference says nothing.
    """
    metric = book.plan.metric
    rows: list[Row] = []
    for key, each in by_chapter.items():
        if not {claim.better, claim.worse} <= each.keys() or (claim.models and key[2] not in claim.models):
            continue
        test, mean, base = compared(each[claim.better].by_metric[metric], each[claim.worse].by_metric[metric])
        scale = 1 / base if base else 0.0
        row: Row = {"set": key[0], "split": key[1], "model": key[2], "relative": mean * scale}
        row |= dict.fromkeys(("low", "high", "p"))
        row["usable"] = key in usable and above_popularity(book, _with_popularity(claim, each))
        if test is not None:
            row |= {"low": test.low * scale, "high": test.high * scale, "p": test.p}
        rows.append(row | {"equal_time": _at_equal_time(each[claim.better], each[claim.worse])})
    return rows


def _with_popularity(claim: Claim, own: Mapping[str, Values]) -> dict[str, Values]:
    """The two methods of a claim, and popularity."""
    pair = (claim.better, claim.worse)
    return {name: each for name, each in own.items() if name in pair or each.cell.method.recipe == "popularity"}


def judged(plan: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The verdict on a claim over sets, and in each of its chapters after Holm's correction over them."""
    out = "left out: neither is above popularity"
    rows = [{**row, "p_holm": None, "verdict": "one repetition" if row["usable"] else out} for row in rows]
    tested = [row for row in rows if row["usable"] and row["p"] is not None]
    for row, p in zip(tested, holm([float(row["p"] or 0) for row in tested]), strict=True):
        ahead = float(row["relative"] or 0) > 0
        row["p_holm"], row["verdict"] = p, (SHOWN if ahead else REVERSED) if p < LEVEL else NOT_SHOWN
    effects = by_set([row for row in rows if row["usable"]])
    verdict, low, high = verdict_over_sets(effects, [str(row["verdict"]) for row in tested])
    if len(tested) == 1 and len(effects) == 1:  # the interval over repetitions and queries of the only chapter
        low, high = (float(str(tested[0][end])) for end in ("low", "high"))
    chances = _chances(plan, effects)
    return {
        "verdict": verdict,
        "effect": float(np.mean(list(effects.values()))) if effects else None,
        "low": low,
        "high": high,
        "sets": list(effects),
        "signed_rank": None if chances is None else asdict(chances),
        "holds": [f"{row['set']}, {row['split']}, {row['model']}" for row in tested if row["verdict"] == SHOWN],
        "rows": rows,
    }


def verdict_over_sets(effects: Mapping[str, float], own: Sequence[str]) -> tuple[str, float | None, float | None]:
    """The verdict on a claim, and the interval of its mean effect over sets.

    With several sets it is shown if the t interval over sets is above zero, reversed if it is below. With one set the
    chapters of that set decide, if they agree; this says nothing about other sets.
    """
    if len(effects) > 1:
        test = paired_t(np.array(list(effects.values())))
        return SHOWN if test.low > 0 else REVERSED if test.high < 0 else NOT_SHOWN, test.low, test.high
    agreed = set(own)
    return (own[0] if len(agreed) == 1 else NOT_SHOWN) if own else "not tested", None, None


def _at_equal_time(better: Values, worse: Values) -> float | None:
    """The relative difference on the validation part after the seconds that the worse method needs for its best."""
    a, b = reached(better, worse), reached(worse, worse)
    return None if a is None or not b else a / b - 1


def null_rows(book: Book, by_chapter: Mapping[Chapter, Mapping[str, Values]]) -> list[Row]:
    """Every repeated method against its first repetitions: how likely a larger difference is."""
    metric, rows = book.plan.metric, list[Row]()
    for key, own in by_chapter.items():
        for name, values in own.items():
            first = own.get(values.cell.method.repeats)
            test = None if first is None else compared(values.by_metric[metric], first.by_metric[metric])[0]
            if test is not None:
                rows.append({"set": key[0], "split": key[1], "model": key[2], "method": name, "p": test.p})
    return rows


def null_rate(rows: Sequence[Row]) -> dict[str, Any]:
    """How often a method is called different from itself, tuned and trained again in as many repetitions."""
    hits = sum(float(row["p"] or 0) < LEVEL for row in rows)
    low, high = share_interval(hits, len(rows)) if rows else (None, None)
    return {
        "pairs": len(rows),
        "different": hits,
        "rate": hits / len(rows) if rows else None,
        "low": low,
        "high": high,
        "rows": list(rows),
    }


# Published figures


def _published(plan: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The printed figures of every method that a paper has, with ours on the same set and split at random."""
    rows: list[Row] = []
    for name, method in plan["methods"].items():
        if not method["published"] or method["repeats"]:
            continue
        paper, table, printed_as = (method["published"][key] for key in ("paper", "table", "name"))
        known = {each["published"][paper]: key for key, each in plan["sets"].items() if paper in each["published"]}
        for (data, metric, row), figure in published_cells(paper, table).items():
            if row != printed_as:
                continue
            ours = _ours(runs, known.get(data), name, metric.lower())
            place = f"{paper.upper()}, {published(paper)[table].get('where', table)}"
            printed: Row = {"method": name, "place": place, "data": data, "metric": metric}
            printed |= {"published": figure.value, "set": known.get(data), **(ours or {"ours": None, "model": None})}
            rows.append(printed)
    return rows


def _ours(runs: Sequence[Mapping[str, Any]], where: str | None, method: str, metric: str) -> Row | None:
    """Our best mean over models on a set, split at random, of a metric that runs have."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if (run["set"], run["split"], run["method"]) == (where, "random", method) and metric in run["test"]:
            found.setdefault(run["model"], []).append(run["test"][metric])
    if not found:
        return None
    model = max(found, key=lambda name: np.mean(found[name]))
    return {"ours": float(np.mean(found[model])), "model": model}
