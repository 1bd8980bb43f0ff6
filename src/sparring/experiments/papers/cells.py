"""Ours beside theirs: the rows that every table of a reproduction is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparring.core.errors import UserError, first_line
from sparring.experiments.papers.plan import METRICS, Given, Method, Plan
from sparring.experiments.papers.published import XIR_DATA, Cells, Figure
from sparring.experiments.report.tables import Cell, Column, Table

NEAR = 0.02  # of the published figure
WITHIN, OUTSIDE, UNPUBLISHED, CHART = "within 2 %", "outside 2 %", "not published", "published as a chart"
TONES = {WITHIN: "good", OUTSIDE: "bad", UNPUBLISHED: "plain", CHART: "plain"}
NOT_GIVEN = "the data was not given"
Row = dict[str, Cell]


def named(*fields: str) -> tuple[Column, ...]:
    """Columns of words, each headed by the name of its field."""
    return tuple(Column(name, f"{{{name}}}", text=True) for name in fields)


MAIN = (
    *named("data", "metric", "method"),
    Column("ours", "{mean:.4f}[[ ± {std:.5f}]]"),
    Column("published", "{published:.4f}[[ ± {published_std:.5f}]]"),
    Column("difference", "{difference:+.1%}"),
    *named("verdict"),
    Column("standard metric", "{standard:.4f}[[ ± {standard_std:.5f}]]"),
    Column("seeds", "{seeds}"),
)


def beside(
    values: Sequence[float], published: Figure | None, why: str = "no run has ended", otherwise: str = UNPUBLISHED
) -> Row:
    """Mean and deviation (n - 1) of ours, the published figure, their relative difference, and whether it is within 2 %.

    `why` is told where nothing was run, `otherwise` where nothing is published.

    beside([0.152, 0.154], Figure(0.1523))  # mean 0.153, difference +0.46 %, "within 2 %"
    """
    row: Row = {
        "seeds": len(values),
        "mean": None,
        "std": None,
        "published": None,
        "published_std": None,
        "difference": None,
    }
    if published is not None:
        row |= {"published": published.value, "published_std": published.std}
    if not len(values):
        return row | {"verdict": f"not run: {why}"}
    mean = float(np.mean(values))
    row |= {"mean": mean, "std": deviation(values)}
    if published is None:
        return row | {"verdict": otherwise}
    difference = mean / published.value - 1
    return row | {"difference": difference, "verdict": WITHIN if abs(difference) <= NEAR + 1e-9 else OUTSIDE}


def mean_cells(name: str, values: Sequence[float]) -> Row:
    """The fields NAME and NAME_std of a row: mean and deviation (n - 1), None where there are too few values."""
    return {name: float(np.mean(values)) if len(values) else None, f"{name}_std": deviation(values)}


def deviation(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def field(metric: str) -> str:
    """The field of a metric in a row: p_at_1 for P@1."""
    return metric.lower().replace("@", "_at_")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run folder."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is corrupt: {first_line(error)}; delete its folder to train again") from error


def test_metrics(plan: Plan, given: Given, method: Method) -> list[dict[str, float]]:
    """The test metrics of each finished run."""
    return [read_json(folder / "result.json")["test"]["metrics"] for folder in plan.folders(given, method)]


def our_key(metric: str, release: bool = True) -> str:
    """Our name of a metric that the paper prints: NDCG@10 is ndcg_xir_release@10, by the formula of the released code."""
    name, _, k = metric.partition("@")
    return f"{name.lower()}{'_xir_release' if release else ''}@{k}"


def quality_rows(plan: Plan, metrics: Sequence[str], published: Cells) -> list[Row]:
    """One row per data set, metric of the paper and method: ours by the release's formula and by the standard one, and theirs."""
    rows: list[Row] = []
    for given in plan.data:
        found = {method.name: test_metrics(plan, given, method) for method in plan.methods[given.name]}
        for metric in plan.measured(given, metrics):
            for method in plan.methods[given.name]:
                rows.append(quality_row(plan, given, method, metric, found[method.name], published))
    return rows


def quality_row(
    plan: Plan, given: Given, method: Method, metric: str, found: Sequence[Mapping[str, float]], published: Cells
) -> Row:
    row: Row = {"data": given.shown, "metric": metric, "method": method.name}
    row |= beside(
        [each[our_key(metric)] for each in found],
        published.get((given.known_as, metric, method.name)),
        "" if found else plan.error(given, method),
    )
    return row | mean_cells("standard", [each[our_key(metric, release=False)] for each in found])


def absent_rows(plan: Plan, metrics: Sequence[str], published: Cells) -> list[Row]:
    """What is published on data that was not given, or on which the experiment cannot be run: theirs alone."""
    reasons = {given.known_as: plan.unsuited()[given.name] for given in plan.data if given.name in plan.unsuited()}
    run = {given.known_as for given in plan.data} - set(reasons)
    return [
        {"data": data, "metric": metric, "method": method, **beside([], figure, reasons.get(data, NOT_GIVEN))}
        | mean_cells("standard", [])
        for (data, metric, method), figure in sorted(
            published.items(), key=lambda cell: _place(cell[0], published, metrics)
        )
        if data not in run and metric in metrics
    ]


def absent_charts(plan: Plan) -> list[Row]:
    """The paper's data sets that were not given, for what it shows as a chart: one row each, without figures."""
    given = {each.known_as for each in plan.data}
    return [
        {"data": data, "metric": "", "method": "", **beside([], None, NOT_GIVEN)}
        for data in XIR_DATA
        if data not in given
    ]


def _place(key: tuple[str, str, str], published: Cells, metrics: Sequence[str]) -> tuple[int, int, int]:
    order = [list(dict.fromkeys(names)) for names in zip(*published, strict=True)]
    return order[0].index(key[0]), [*metrics, key[1]].index(key[1]), order[2].index(key[2])


def cutoffs_table(plan: Plan) -> Table:
    """One row per data set and method: every metric at every cutoff, by the release's formula and by the standard one."""
    ks = sorted({k for given in plan.data for k in plan.cutoffs(given)})
    names = [f"{label}@{k}" for label in METRICS for k in ks]
    rows: list[Row] = []
    for given, method in _each(plan):
        found = test_metrics(plan, given, method)
        row: Row = {"data": given.shown, "method": method.name, "seeds": len(found)}
        for key in names:
            row |= mean_cells(field(key), [each[key] for each in found if key in each])
        rows.append(row)
    columns = [Column(_titled(key), f"{{{field(key)}:.4f}}[[ ± {{{field(key)}_std:.4f}}]]") for key in names]
    return Table(
        (*named("data", "method"), *columns),
        rows,
        "Every cutoff, by the formula of the XIR release and by the standard one",
    )


def _titled(key: str) -> str:
    """NDCG@10 as the release has it, standard ndcg@10 as everyone else."""
    return f"{key.split('_')[0].upper()}@{key.split('@')[1]}" if "_" in key else f"standard {key}"


def _each(plan: Plan) -> Iterator[tuple[Given, Method]]:
    return ((given, method) for given in plan.data for method in plan.methods[given.name])


def agreement(rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    """One sentence per data set: how many figures are within 2 % of the published ones, and the largest difference."""
    said = []
    for data in dict.fromkeys(str(row["data"]) for row in rows):
        both = [row for row in rows if row["data"] == data and row["difference"] is not None]
        if not both:
            continue
        near = sum(row["verdict"] == WITHIN for row in both)
        far = max(both, key=lambda row: abs(float(row["difference"] or 0)))
        said.append(
            f"{data}: {near} of {len(both)} figures within 2 % of the published ones; the largest difference is "
            f"{far['difference']:+.1%}, {' '.join(filter(None, (str(far['method']), str(far['metric']))))}."
        )
    return said
