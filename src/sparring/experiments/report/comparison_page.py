"""The page and the figures of a comparison: OUT/report.html, OUT/figures/*.svg and *.png."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.core.workers import Failure
from sparring.experiments.comparison import ComparedData, Comparison
from sparring.experiments.comparison_tables import CHEAP, READING, notes
from sparring.experiments.report import figures
from sparring.experiments.report.figures import RenderedFigure
from sparring.experiments.report.html import Code, Facts, Figures, Page, Paragraph, Points, Section, Sheet
from sparring.experiments.report.study_parts import environment, failed_section, settings_of
from sparring.experiments.report.tables import Row, Table, TableRows, text_columns
from sparring.experiments.report.wording import command_lines, in_words
from sparring.experiments.study import FinishedRun

TONES = {"better": "good", "worse": "bad", "baseline": "plain"}
Runs = dict[tuple[str, str], list[FinishedRun]]  # by data set and recipe


def write(comparison: Comparison, tables: Sequence[Table], failures: Sequence[Failure], command: str = "") -> Path:
    """Draw the figures and write the page; `tables` are those of comparison_tables.write. Returns the page's path.

    write(comparison, comparison_tables.write(comparison, failures), failures)
    """
    quality, cost, *tuned = tables
    runs: Runs = {
        (data.name, name): comparison.study.runs(data.name, method)
        for data in comparison.data
        for name, method in comparison.methods.items()
    }
    lines = [*findings(comparison, quality.rows), *(f"{line}." for line in notes(comparison, quality.rows))]
    facts = _facts(comparison, sum(map(len, runs.values())))
    sections = [Section("In short", (Points(lines), Facts(facts)))]
    for data in comparison.data:
        sections += _data_sections(comparison, data, quality, cost, runs)
    if tuned:
        sections.append(Section("Tuning", (Sheet(tuned[0]),)))
    sections += failed_section(failures)
    reading = " ".join(READING.split()).removeprefix("How to read it. ").replace(" %", "\u00a0%")
    sections.append(Section("How to read it", (Paragraph(reading),)))
    sections.append(_made(comparison, runs, command))
    names = ", ".join(data.name for data in comparison.data)
    seeds = f"{comparison.seeds} seed{'s' if comparison.seeds > 1 else ''}"
    lead = f"{len(comparison.names)} recipes, {seeds} each, on {names}; baseline {comparison.baseline_name}."
    path = comparison.out / "report.html"
    Page(f"Comparison on {names}", lead, sections).write(path)
    return path


def findings(comparison: Comparison, rows: TableRows) -> list[str]:
    """One sentence per data set and metric: the highest mean, and the verdicts against the baseline."""
    lines = []
    baseline = comparison.baseline_name
    verdicts = {
        "better": f"better than {baseline}",
        "worse": f"worse than {baseline}",
        "no difference shown": f"no difference shown to {baseline}",
    }
    for data in comparison.data:
        for metric in comparison.metrics:
            compared = [row for row in rows if row["data"] == data.name and row["metric"] == metric]
            if not compared:
                continue
            top = max(compared, key=lambda row: float(row["mean"] or 0))
            where = f"{metric} on {data.name}" if len(comparison.data) > 1 else metric
            kind = ", a cheap baseline," if top["verdict"] == CHEAP else ""
            parts = [f"{where}: {top['recipe']}{kind} has the highest mean, {top['mean']:.4f}"]
            for verdict, words in verdicts.items():
                names = [str(row["recipe"]) for row in compared if row["verdict"] == verdict]
                parts += [f"{words}: {', '.join(names)}"] if names else []
            lines.append("; ".join(parts) + ".")
    return lines or ["No training has finished, so there is nothing to compare yet."]


def _data_sections(
    comparison: Comparison, data: ComparedData, quality: Table, cost: Table, runs: Runs
) -> list[Section]:
    rows = [row for row in quality.rows if row["data"] == data.name]
    costs = [row for row in cost.rows if row["data"] == data.name]
    if not rows:
        return []
    on = f" on {data.name}" if len(comparison.data) > 1 else ""
    columns = [column for column in quality.columns if column.title not in ("data", "metric")]
    columns.sort(key=lambda column: not column.text)  # narrow screens cut a row: the verdict comes first
    sheets = [
        Sheet(Table(tuple(columns), [row for row in rows if row["metric"] == metric]), f"Test {metric}", TONES)
        for metric in comparison.metrics
        if any(row["metric"] == metric for row in rows)
    ]
    costs_table = Table(tuple(column for column in cost.columns if column.title != "data"), costs, cost.caption)
    trained = [row for row in rows if row["verdict"] != CHEAP]
    if not trained:
        return [Section(f"Quality{on}", tuple(sheets))]
    first, second = _draw(comparison, data, trained, costs, runs)
    return [
        Section(f"Quality{on}", (*sheets, Figures(first))),
        Section(f"Cost and negatives{on}", (Sheet(costs_table), Figures(second))),
    ]


def _draw(
    comparison: Comparison, data: ComparedData, rows: TableRows, costs: TableRows, runs: Runs
) -> tuple[list[RenderedFigure], list[RenderedFigure]]:
    """Write the figures of one data set: those of quality, and those of cost and negatives."""
    folder, names, baseline = comparison.out / "figures", comparison.names, comparison.baseline_name
    several = comparison.seeds > 1
    deviation = "; the error bars are one standard deviation over seeds" if several else ""
    caption = (
        f"Test quality on {data.name}: the mean of each recipe{deviation}; the dotted line is the baseline's mean."
    )
    first = [figures.save(figures.bars(rows, names, baseline), folder, f"{data.name}-quality", caption)]
    histories = {name: [run.history for run in runs[data.name, name]] for name in names}
    metric = _validated(comparison, histories)
    if metric:
        band = ": the mean over seeds with one standard deviation, up to the last epoch of all seeds" if several else ""
        caption = f"Validation {metric} on {data.name} by epoch{band}."
        curves = figures.curves(histories, metric, names, baseline)
        first.append(figures.save(curves, folder, f"{data.name}-learning", caption))
    seconds = {row["recipe"]: row["seconds"] for row in costs}
    main = str(rows[0]["metric"])
    points = [{**row, "seconds": seconds[row["recipe"]]} for row in rows if row["metric"] == main]
    caption = f"Test {main} on {data.name} against training time without validation; up and to the left is better."
    scatter = figures.quality_by_time(points, names, baseline, main)
    second = [figures.save(scatter, folder, f"{data.name}-time", caption)]
    caption = (
        f"The negatives of each recipe on {data.name}. Head, mid and tail items each have a third of the training "
        "interactions, so negatives as popular as training positives would show three equal parts."
    )
    second.append(figures.save(figures.popularity(costs, names, baseline), folder, f"{data.name}-negatives", caption))
    return first, second


def _validated(comparison: Comparison, histories: Mapping[str, list[list[dict[str, Any]]]]) -> str:
    """The validation metric that most recipes share, preferably a compared one; "" where nothing was validated."""
    counts = Counter(
        name
        for records in histories.values()
        for name in {
            key
            for history in records
            for record in history
            for key, value in record.items()
            if "@" in key and isinstance(value, float)
        }
    )
    return max(sorted(counts), key=lambda name: (counts[name], name in comparison.metrics, "ndcg" in name), default="")


def _facts(comparison: Comparison, trained: int) -> dict[str, str]:
    facts = {}
    for data in comparison.data:
        split = data.split
        parts = {"train": split.train, "validation": split.valid, "test": split.test}
        sizes = ", ".join(f"{len(part):,} {name}" for name, part in parts.items() if part is not None)
        facts[data.name] = f"{split.train.n_queries:,} queries x {split.train.n_items:,} items; interactions: {sizes}"
    if comparison.refit:
        facts["refit"] = "each run was trained again on train and validation, for the epochs that validation chose"
    facts["trained"] = f"{trained} of {comparison.study.total} runs"
    tuning = f"{comparison.trials} trials of each recipe on the validation part"
    facts["tuning"] = tuning if comparison.trials else "none: default settings of the recipes"
    return facts


def _made(comparison: Comparison, runs: Runs, command: str) -> Section:
    """The command, versions and hardware of the runs, the split, the settings."""
    facts = {"seeds": ", ".join(map(str, range(comparison.seeds)))}
    facts |= environment([run for finished in runs.values() for run in finished])
    for data in comparison.data:
        if how := data.source.get("split"):
            facts[f"split of {data.name}"] = ", ".join(f"{name} {value}" for name, value in how.items())
    parts: list[Code | Facts | Sheet] = [Code(command_lines(command))] if command else []
    parts.append(Facts({name: words for name, words in facts.items() if words}))
    first = {key: finished[0] for key, finished in runs.items() if finished}
    several = len(comparison.data) > 1
    if first:
        rows, shared = _settings(first)
        columns = text_columns(*(["data"] if several else []), "recipe", "settings")
        parts.append(Sheet(Table(columns, rows, "the settings that differ between recipes"), "Settings"))
        parts.append(Code(shared, "Settings that all recipes share"))
    batches = [
        f"{f'{recipe} on {data}' if several else recipe}\n"
        + "\n".join(f"  {line}" for line in run.meta.get("batch", []))
        for (data, recipe), run in first.items()
    ]
    if batches:
        parts.append(Code("\n\n".join(batches), "Candidates of a query in a batch"))
    return Section("How it was made", parts)


def _settings(runs: Mapping[tuple[str, str], FinishedRun]) -> tuple[list[Row], str]:
    """The settings that differ between runs, by data set and recipe, and those that all share."""
    settings = {key: settings_of(run) for key, run in runs.items()}
    common = {
        name: value
        for name, value in next(iter(settings.values())).items()
        if all(name in other and other[name] == value for other in settings.values())
    }
    rows: list[Row] = []
    for (data, recipe), values in settings.items():
        differing = {name: value for name, value in values.items() if name not in common}
        rows.append({"data": data, "recipe": recipe, "settings": in_words(differing) or "none"})
    return rows, in_words(common)
