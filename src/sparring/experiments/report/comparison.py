"""The page and the figures of a comparison: OUT/report.html, OUT/figures/*.svg and *.png, made of its run folders and tables."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.core.errors import UserError, first_line
from sparring.core.workers import Failure
from sparring.experiments import comparison_tables
from sparring.experiments.comparison import Data, Plan, finished
from sparring.experiments.report import figures
from sparring.experiments.report.figures import Drawn
from sparring.experiments.report.html import Code, Facts, Figures, Page, Points, Section, Sheet, Text
from sparring.experiments.report.tables import Cell, Column, Table
from sparring.recipes.setup import flat
from sparring.training import trained

TONES = {"better": "good", "worse": "bad", "baseline": "plain"}
Rows = list[Mapping[str, Cell]]


def write(plan: Plan, tables: Sequence[Table], failures: Sequence[Failure], command: str = "") -> Path:
    """Draw the figures and write the page; `tables` are those that results.write gave. Where the page is.

    write(plan, results.write(plan, failures), failures)
    """
    quality, cost, *tuned = tables
    metas = _metas(plan)
    sections = [Section("In short", (Points(findings(plan, quality.rows)), Facts(_facts(plan, metas))))]
    for data in plan.data:
        sections += _data_sections(plan, data, quality, cost)
    if tuned:
        sections.append(Section("Tuning", (Sheet(tuned[0]),)))
    if failures:
        sections.append(
            Section("Failed", (Points([f"{bad.data} {bad.recipe} {bad.what}: {bad.error}" for bad in failures]),))
        )
    reading = " ".join(comparison_tables.READING.split()).removeprefix("How to read it. ").replace(" %", "\u00a0%")
    sections.append(Section("How to read it", (Text(reading),)))
    sections.append(_made(plan, metas, command))
    names = ", ".join(data.name for data in plan.data)
    lead = f"{len(plan.recipes)} recipes, {plan.seeds} seed{'s' if plan.seeds > 1 else ''} each, on {names}; baseline {plan.against}."
    path = plan.out / "report.html"
    Page(f"Comparison on {names}", lead, sections).write(path)
    return path


def findings(plan: Plan, rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    """One sentence per data set and metric: who has the highest mean, and what is shown against the baseline."""
    said = []
    for data in plan.data:
        for metric in plan.metrics:
            some = [row for row in rows if row["data"] == data.name and row["metric"] == metric]
            if not some:
                continue
            top = max(some, key=lambda row: float(row["mean"] or 0))
            where = f"{metric} on {data.name}" if len(plan.data) > 1 else metric
            parts = [f"{where}: {top['recipe']} has the highest mean, {top['mean']:.4f}"]
            for verdict, words in (
                ("better", "better than"),
                ("worse", "worse than"),
                ("no difference shown", "no difference shown to"),
            ):
                names = [str(row["recipe"]) for row in some if row["verdict"] == verdict]
                parts += [f"{words} {plan.against}: {', '.join(names)}"] if names else []
            said.append("; ".join(parts) + ".")
    return said or ["No training has ended, so there is nothing to compare yet."]


def _data_sections(plan: Plan, data: Data, quality: Table, cost: Table) -> list[Section]:
    rows = [row for row in quality.rows if row["data"] == data.name]
    costs = [row for row in cost.rows if row["data"] == data.name]
    if not rows:
        return []
    on = f" on {data.name}" if len(plan.data) > 1 else ""
    kept = [column for column in quality.columns if column.title not in ("data", "metric")]
    columns = tuple(
        sorted(kept, key=lambda column: not column.text)
    )  # the verdict is seen first, where a narrow screen cuts a row
    sheets = [
        Sheet(Table(columns, [row for row in rows if row["metric"] == metric]), f"Test {metric}", TONES)
        for metric in plan.metrics
        if any(row["metric"] == metric for row in rows)
    ]
    costs_table = Table(tuple(column for column in cost.columns if column.title != "data"), costs, cost.caption)
    first, second = _draw(plan, data, rows, costs)
    return [
        Section(f"Quality{on}", (*sheets, Figures(first))),
        Section(f"Cost and negatives{on}", (Sheet(costs_table), Figures(second))),
    ]


def _draw(plan: Plan, data: Data, rows: Rows, costs: Rows) -> tuple[list[Drawn], list[Drawn]]:
    """The figures of one data set, written: those of quality, and those of cost and negatives."""
    folder, names, against = plan.out / "figures", plan.recipes, plan.against
    several = plan.seeds > 1
    deviation = "; the lines are one standard deviation over seeds" if several else ""
    caption = (
        f"Test quality on {data.name}: the mean of each recipe{deviation}; the dotted line is the baseline's mean."
    )
    first = [figures.save(figures.bars(rows, names, against), folder, f"{data.name}-quality", caption)]
    histories = {recipe: [read_history(folder) for folder in _folders(plan, data.name, recipe)] for recipe in names}
    metric = _validated(plan, histories)
    if metric:
        band = ": the mean over seeds with one standard deviation, as far as all seeds were trained" if several else ""
        caption = f"Validation {metric} on {data.name} by epoch{band}."
        first.append(
            figures.save(figures.curves(histories, metric, names, against), folder, f"{data.name}-learning", caption)
        )
    seconds = {row["recipe"]: row["seconds"] for row in costs}
    main = str(rows[0]["metric"])
    points = [{**row, "seconds": seconds[row["recipe"]]} for row in rows if row["metric"] == main]
    caption = (
        f"Test {main} on {data.name} against the time of training, without validation; up and to the left is better."
    )
    second = [figures.save(figures.quality_by_time(points, names, against, main), folder, f"{data.name}-time", caption)]
    caption = (
        f"What each recipe draws on {data.name}. Head, mid and tail items each took a third of the interactions, "
        "so negatives as popular as what people take would show three equal parts."
    )
    second.append(figures.save(figures.popularity(costs, names, against), folder, f"{data.name}-negatives", caption))
    return first, second


def _validated(plan: Plan, histories: Mapping[str, list[list[dict[str, Any]]]]) -> str:
    """The validation metric that most recipes have in common, a compared one where equal; "" where nothing was validated."""
    found = Counter(
        name
        for each in histories.values()
        for name in {
            key
            for history in each
            for row in history
            for key, value in row.items()
            if "@" in key and isinstance(value, float)
        }
    )
    return max(sorted(found), key=lambda name: (found[name], name in plan.metrics, "ndcg" in name), default="")


def _folders(plan: Plan, data: str, recipe: str) -> list[Path]:
    folders = (plan.folder(data, recipe, seed) for seed in range(plan.seeds))
    return [folder for folder in folders if finished(folder)]


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, one per epoch."""
    path = folder / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is corrupt: {first_line(error)}; delete its folder to train again") from error


def _metas(plan: Plan) -> dict[tuple[str, str, int], dict[str, Any]]:
    """run.json and the device of every finished run, by data, recipe and seed."""
    found = {}
    for data in plan.data:
        for recipe in plan.recipes:
            for folder in _folders(plan, data.name, recipe):
                device = json.loads((folder / "measured.json").read_text())["device"]
                found[data.name, recipe, int(folder.name)] = {**trained.read_meta(folder), "device": device}
    return found


def _facts(plan: Plan, metas: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> dict[str, str]:
    facts = {}
    for data in plan.data:
        split = data.split
        parts = {"train": split.train, "validation": split.valid, "test": split.test}
        sizes = ", ".join(f"{len(part):,} {name}" for name, part in parts.items() if part is not None)
        facts[data.name] = f"{split.train.n_queries:,} queries x {split.train.n_items:,} items; interactions: {sizes}"
    expected = len(plan.data) * len(plan.recipes) * plan.seeds
    facts["trained"] = f"{len(metas)} of {expected} runs"
    facts["tuning"] = (
        f"{plan.trials} trials of each recipe on the validation part"
        if plan.trials
        else "none: settings as the recipes come"
    )
    return facts


def _made(plan: Plan, metas: Mapping[tuple[str, str, int], Mapping[str, Any]], command: str) -> Section:
    """The command, versions and hardware of the runs, the split, the settings."""
    facts: dict[str, str] = {"seeds": ", ".join(map(str, range(plan.seeds)))}
    facts["hardware"] = distinct(str(meta["device"]) for meta in metas.values())
    for name in dict.fromkeys(key for meta in metas.values() for key in meta.get("versions", {})):
        facts[name] = distinct(str(meta.get("versions", {}).get(name, "unknown")) for meta in metas.values())
    for data in plan.data:
        how = data.source.get("split")
        if how:
            facts[f"split of {data.name}"] = ", ".join(f"{name} {value}" for name, value in how.items())
    parts: list[Code | Facts | Sheet] = [Code(command_lines(command))] if command else []
    parts.append(Facts({name: words for name, words in facts.items() if words}))
    rows, shared = _settings(plan, metas)
    if rows:
        columns = (Column("recipe", "{recipe}", text=True), Column("own settings", "{settings}", text=True))
        data_column = (Column("data", "{data}", text=True),) if len(plan.data) > 1 else ()
        parts.append(Sheet(Table((*data_column, *columns), rows, "what is not the same for all"), "Settings"))
        parts.append(Code(shared, "Settings that all recipes share"))
    batches = [f"{name}\n" + "\n".join(f"  {line}" for line in batch) for name, batch in _batches(plan, metas).items()]
    if batches:
        parts.append(Code("\n\n".join(batches), "What a query of a batch is contrasted with"))
    return Section("How it was made", parts)


def _settings(plan: Plan, metas: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> tuple[Rows, str]:
    """Settings by data and recipe that differ or are a recipe's own, and those that all share; the seed is neither."""
    each: dict[tuple[str, str], dict[str, Any]] = {}
    for (data, recipe, _), meta in metas.items():
        each.setdefault((data, recipe), {**meta.get("arguments", {}), **flat(meta["setup"])})
    common = {
        name: value
        for name, value in next(iter(each.values()), {}).items()
        if name != "seed" and all(name in other and other[name] == value for other in each.values())
    }
    rows: Rows = []
    for (data, recipe), settings in each.items():
        own = {name: value for name, value in settings.items() if name not in common and name != "seed"}
        rows.append({"data": data, "recipe": recipe, "settings": in_words(own) or "none"})
    return rows, in_words(common)


def _batches(plan: Plan, metas: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for (data, recipe, _), meta in metas.items():
        found.setdefault(f"{recipe} on {data}" if len(plan.data) > 1 else recipe, meta.get("batch", []))
    return found


def in_words(settings: Mapping[str, Any]) -> str:
    """Settings as name=value."""
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in settings.items()
    )


def command_lines(command: str) -> str:
    """A command with every option on a line of its own, as a shell still reads it; browsers break long lines inside an option."""
    words = [shlex.quote(word) for word in shlex.split(command)]
    return "".join(
        (" \\\n    " if word.startswith("--") else " " if at else "") + word for at, word in enumerate(words)
    )


def distinct(values: Any) -> str:
    """Each value once, in order of appearance."""
    return "; ".join(dict.fromkeys(values))
