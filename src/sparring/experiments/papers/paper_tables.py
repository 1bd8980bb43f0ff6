"""Ours beside theirs: the rows of every table of a reproduction, and the one renderer of tables and sections.

An absolute row (`beside`) says whether our mean is within 2 % of the published figure. A relative row (`relative_row`)
has the difference to a reference method, tested over seeds and queries, beside the gain that the printed figures give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sparring.evaluation.statistics import Summary, equal_variance_t, holm, seeds_and_queries, summary
from sparring.experiments.comparison_tables import LEVEL
from sparring.experiments.papers.paper import PaperDataset, PaperMethod, Reproduction, Results
from sparring.experiments.papers.printed import Cells, PublishedFigure
from sparring.experiments.report import figures
from sparring.experiments.report.figures import RenderedFigure
from sparring.experiments.report.html import Figures, Section, Sheet
from sparring.experiments.report.tables import Column, Row, Table, TableRows, text_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEAR = 0.02  # of the published figure
WITHIN, OUTSIDE, UNPUBLISHED, CHART = "within 2 %", "outside 2 %", "not published", "published as a chart"
BETTER, WORSE, SAME, ONE, REFERENCE = "better", "worse", "no difference shown", "one seed: no verdict", "the reference"
TONES = dict.fromkeys((UNPUBLISHED, CHART, SAME, ONE, REFERENCE), "plain")
TONES |= {WITHIN: "good", OUTSIDE: "bad", BETTER: "good", WORSE: "bad"}
NOT_GIVEN = "the data was not given"
OURS = Column("ours", "{mean:.4f}[[ ± {std:.5f}]]")
SEEDS = Column("seeds", "{seeds}")
OVER = "{over:+.1%}[[ [{over_low:+.1%}, {over_high:+.1%}]]]"
Values = dict[int, np.ndarray]  # seed -> the value of each query


def beside(
    values: Sequence[float], published: PublishedFigure | None, why: str = "", otherwise: str = UNPUBLISHED
) -> Row:
    """Mean and deviation (n - 1) of ours, the published figure, their relative difference, and a verdict.

    `why` is the reason if nothing was run, `otherwise` the verdict if nothing is published.

        beside([0.152, 0.154], PublishedFigure(0.1523))  # mean 0.153, difference +0.46 %, "within 2 %"
    """
    row: Row = {"seeds": len(values), **mean_cells("mean", values)}
    row["std"] = row.pop("mean_std")
    row |= {"published": None, "published_std": None, "difference": None}
    if published is not None:
        row |= {"published": published.value, "published_std": published.std}
    if not len(values):
        return row | {"verdict": f"not run: {why or 'no run has finished'}"}
    if published is None:
        return row | {"verdict": otherwise}
    difference = float(np.mean(values)) / published.value - 1
    return row | {"difference": difference, "verdict": WITHIN if abs(difference) <= NEAR + 1e-9 else OUTSIDE}


def mean_cells(name: str, values: Sequence[float]) -> Row:
    """The fields NAME and NAME_std: mean and deviation (n - 1); None if there are too few values."""
    return {
        name: float(np.mean(values)) if len(values) else None,
        f"{name}_std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
    }


def mean_of(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def field(metric: str) -> str:
    """The field of a metric in a row: p_at_1 for P@1."""
    return metric.lower().replace("@", "_at_")


def agreement(rows: TableRows) -> list[str]:
    """One sentence per data set: how many figures are within 2 % of the published ones, and the largest difference."""
    lines = []
    for data in dict.fromkeys(str(row["data"]) for row in rows):
        both = [row for row in rows if row["data"] == data and row["difference"] is not None]
        if not both:
            continue
        near = sum(row["verdict"] == WITHIN for row in both)
        far = max(both, key=lambda row: abs(float(row["difference"] or 0)))
        lines.append(
            f"{data}: {near} of {len(both)} figures within 2 % of the published ones; the largest difference is "
            f"{far['difference']:+.1%}, {' '.join(filter(None, (str(far['method']), str(far['metric']))))}."
        )
    return lines


@dataclass(frozen=True)
class Gain:
    """The gain of a method over another in print: of their means over data sets, and the range over single sets."""

    value: float
    low: float | None = None  # None for a single data set
    high: float | None = None


def published_gain(cells: Cells, metric: str, method: str, base: str, known_as: str = "") -> Gain | None:
    """The relative gain that the printed figures give, on the set `known_as` alone if it is one of the paper's.

    published_gain(TABLE_2, "Recall@50", "ESANS", "UNS")  # +15.3 %, the paper's average; +8.2 % to +30.7 %
    """
    sets = [data for data, name, who in cells if (name, who) == (metric, method) and (data, metric, base) in cells]
    sets = [known_as] if known_as in sets else sets
    if not sets:
        return None
    ours, theirs = ([cells[data, metric, who].value for data in sets] for who in (method, base))
    gains = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    return Gain(sum(ours) / sum(theirs) - 1, *((min(gains), max(gains)) if len(gains) > 1 else (None, None)))


def gain_cells(name: str, gain: Gain | None) -> Row:
    """The fields NAME, NAME_low and NAME_high."""
    values = (None,) * 3 if gain is None else (gain.value, gain.low, gain.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def gain_column(title: str, name: str) -> Column:
    return Column(title, f"{{{name}:+.1%}}[[ ({{{name}_low:+.1%}} to {{{name}_high:+.1%}})]]")


def relative_row(values: Values, base: Values, is_base: bool, why: str) -> Row:
    """Mean and deviation over seeds, the relative difference to `base` with its interval, p-values and a verdict.

    p is paired over seeds and queries (statistics.seeds_and_queries); p_equal_variance is the unpaired t-test over
    seeds. `why` is the reason if nothing was run. `correct` fills in p_holm and the verdict of tested rows.
    """
    fields = ("mean", "std", "over", "over_low", "over_high", "p", "p_holm", "p_equal_variance")
    row: Row = {"seeds": len(values), **dict.fromkeys(fields), "verdict": f"not run: {why}"}
    if not values:
        return row
    over_seeds = _over_seeds(values)
    row |= {"mean": over_seeds.mean, "std": over_seeds.std, "verdict": REFERENCE if is_base else ONE}
    common = [seed for seed in values if seed in base]
    if is_base or not common:
        return row if is_base else row | {"verdict": "the reference was not run"}
    differences = np.stack([values[seed] - base[seed] for seed in common])
    mean = float(np.mean([base[seed].mean() for seed in common]))
    if not mean:
        return row
    row["over"] = float(differences.mean()) / mean
    if len(common) > 1:
        test = seeds_and_queries(differences)
        row |= {"over_low": test.low / mean, "over_high": test.high / mean, "p": test.p}
    if len(values) > 1 and len(base) > 1:
        row["p_equal_variance"] = equal_variance_t(over_seeds, _over_seeds(base)).p
    return row


def _over_seeds(values: Values) -> Summary:
    return summary([float(value.mean()) for value in values.values()])


def correct(rows: Sequence[Row]) -> None:
    """Holm's correction of all tests among these rows, and the verdicts that rest on it."""
    tested = [row for row in rows if row["p"] is not None]
    for row, adjusted in zip(tested, holm([float(row["p"] or 0) for row in tested]), strict=True):
        row["p_holm"] = adjusted
        row["verdict"] = SAME if adjusted >= LEVEL else BETTER if float(row["over"] or 0) > 0 else WORSE


def relative_rows(
    plan: Reproduction,
    dataset: PaperDataset,
    metric: str,
    published: Cells,
    printed_names: Mapping[str, str] | None = None,
    absent: Mapping[str, str] | None = None,
) -> list[Row]:
    """One row per method, relative to the first, with Holm's correction over all of them and the published gain.

    `printed_names` translates names of rows to those in print; `absent` are rows that cannot be run, with the reason.
    """
    methods, names = plan.methods[dataset.name], printed_names or {}
    values = {method.name: by_seed(plan, dataset, method, metric) for method in methods}
    first = methods[0].name

    def row(name: str, relative: Row) -> Row:
        gain = None
        if name != first:
            in_print, base = names.get(name, name), names.get(first, first)
            gain = published_gain(published, metric, in_print, base, dataset.known_as)
        return {"data": dataset.shown, "metric": metric, "method": name, **relative, **gain_cells("published", gain)}

    rows = []
    for method in methods:
        why = "" if values[method.name] else plan.error(dataset, method)
        relative = relative_row(values[method.name], values[first], method.name == first, why)
        rows.append(row(method.name, relative))
    rows += [row(name, relative_row({}, {}, False, why)) for name, why in (absent or {}).items()]
    correct(rows)
    return rows


def by_seed(plan: Reproduction, dataset: PaperDataset, method: PaperMethod, metric: str) -> Values:
    """The values of each query in every finished run."""
    return {run.seed: run.values(metric.lower()) for run in plan.runs(dataset, method)}


def relative_columns(first: str, sets: str) -> tuple[Column, ...]:
    """The columns of relative rows whose reference is `first`, published for the data sets `sets`."""
    return (
        *text_columns("data", "metric", "method"),
        Column("ours", "{mean:.4f}[[ ± {std:.4f}]]"),
        Column(f"to {first}", OVER),
        gain_column(f"published, on {sets}", "published"),
        Column("p", "{p:.2g}"),
        Column("p (Holm)", "{p_holm:.2g}"),
        Column("p (equal-variance t)", "{p_equal_variance:.2g}"),
        *text_columns("verdict"),
        SEEDS,
    )


def verdicts(rows: TableRows, first: str) -> list[str]:
    """One sentence per data set and metric: the methods better and worse than the reference, and the undecided ones."""
    lines = []
    words = {BETTER: "better", WORSE: "worse", SAME: "no difference shown", ONE: "one seed"}
    for data, metric in dict.fromkeys((str(row["data"]), str(row["metric"])) for row in rows):
        known = [row for row in rows if (row["data"], row["metric"]) == (data, metric) and row["over"] is not None]
        groups = {words[verdict]: [row for row in known if row["verdict"] == verdict] for verdict in words}
        parts = [f"{word}: {', '.join(map(_with_gain, group))}" for word, group in groups.items() if group]
        if parts:
            lines.append(f"{data}, {metric}, against {first}: {'; '.join(parts)}.")
    return lines


def _with_gain(row: Mapping[str, object]) -> str:
    printed = "" if row["published"] is None else f", published {row['published']:+.1%}"
    return f"{row['method']} ({row['over']:+.1%}{printed})"


def unsuited_lines(plan: Reproduction) -> list[str]:
    return [f"{name}: not run: {why}." for name, why in plan.unsuited.items()]


def save_figure(plan: Reproduction, dataset: PaperDataset, kind: str, figure: Figure, caption: str) -> RenderedFigure:
    """Write a figure of a data set; its caption starts with the data set's name."""
    folder = plan.out / "figures"
    return figures.save(figure, folder, f"{dataset.name}-{kind}", f"{dataset.shown}: {caption}")


def render(
    plan: Reproduction,
    tables: Mapping[str, Table],
    findings: Sequence[str],
    drawn: Mapping[str, Sequence[RenderedFigure]],
    *,
    absent: TableRows = (),
    more: Sequence[Section] = (),
    others: Mapping[str, Table] | None = None,
) -> Results:
    """The results of an experiment: one section per data set with its part of each table and its figures, then `more`.

    The first of `tables`, by their titles on the page, is the main one, to which the `absent` rows are added; the first
    column of each is the data set. `drawn` are figures by data set.
    """
    main = next(iter(tables.values()))
    sections = []
    for dataset in plan.data:
        parts = {
            title: Table(table.columns[1:], [row for row in table.rows if row["data"] == dataset.shown])
            for title, table in tables.items()
        }
        if next(iter(parts.values())).rows:
            sheets = [Sheet(table, title, TONES) for title, table in parts.items()]
            sections.append(Section(dataset.shown, (*sheets, Figures(drawn.get(dataset.name, ())))))
    complete = replace(main, rows=[*main.rows, *absent], caption=main.caption or plan.caption)
    return Results(complete, findings, [*sections, *more], others or {})
