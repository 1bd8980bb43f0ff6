"""The rows of ESANS' tables: ours, relative to a reference and tested against it, beside the relative gain of the printed figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparring.core.files import read_table
from sparring.evaluation.statistics import Summary, equal_variance_t, holm, seeds_and_queries, summary
from sparring.experiments.comparison_tables import LEVEL, Finished, values
from sparring.experiments.papers.cells import Row, named, read_json
from sparring.experiments.papers.plan import Given, Method, Plan
from sparring.experiments.papers.published import Cells
from sparring.experiments.report.tables import Column

BETTER, WORSE, SAME, ONE, REFERENCE = "better", "worse", "no difference shown", "one seed: no verdict", "the reference"
TONES = {BETTER: "good", WORSE: "bad", SAME: "plain", ONE: "plain", REFERENCE: "plain"}
FIELDS = ("mean", "std", "over", "over_low", "over_high", "p", "p_holm", "p_equal_variance")
Seeds = dict[int, np.ndarray]  # seed -> value of each query


@dataclass(frozen=True)
class Gain:
    """What printed figures say of a method relative to another: of their means over data sets, and least and most of single sets."""

    value: float
    low: float | None = None  # None where there is one data set
    high: float | None = None


def printed_gain(printed: Cells, metric: str, method: str, base: str, known_as: str = "") -> Gain | None:
    """The relative gain that the printed figures give, on the set `known_as` alone where it is one of the paper's; None where none does.

    printed_gain(TABLE_2, "Recall@50", "ESANS", "UNS")  # +15.3 %, the average that the paper names; +8.2 % to +30.7 %
    """
    sets = [data for data, name, who in printed if (name, who) == (metric, method) and (data, metric, base) in printed]
    sets = [known_as] if known_as in sets else sets
    if not sets:
        return None
    ours, theirs = ([printed[data, metric, who].value for data in sets] for who in (method, base))
    each = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    return Gain(sum(ours) / sum(theirs) - 1, *((min(each), max(each)) if len(each) > 1 else (None, None)))


def gain_cells(name: str, gain: Gain | None) -> Row:
    """The fields NAME, NAME_low and NAME_high of a row."""
    if gain is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: gain.value, f"{name}_low": gain.low, f"{name}_high": gain.high}


def gain_column(title: str, name: str) -> Column:
    return Column(title, f"{{{name}:+.1%}}[[ ({{{name}_low:+.1%}} to {{{name}_high:+.1%}})]]")


def by_seed(plan: Plan, given: Given, method: Method, metric: str) -> Seeds:
    """The values of each query, of every finished run."""
    found: Seeds = {}
    for folder in plan.folders(given, method):
        run = Finished(
            int(folder.name), read_json(folder / "result.json"), {}, read_table(folder / "per_query.parquet")
        )
        found[run.seed] = values(run, metric.lower())
    return found


def relative_rows(
    plan: Plan,
    given: Given,
    metric: str,
    printed: Cells,
    printed_name: Mapping[str, str] | None = None,
    absent: Mapping[str, str] | None = None,
) -> list[Row]:
    """One row per method: mean and deviation, relative difference to the first method with its interval, tests, verdict, the printed gain.

    p is over seeds and queries, paired (stats.seeds_and_queries); p_holm corrects it for all methods of the table; p_equal_variance is
    the unpaired test over seeds that the authors used. `printed_name` translates names of rows to those in print; `absent` are rows that
    cannot be run, and why.
    """
    methods = plan.methods[given.name]
    known_by = {method.name: (printed_name or {}).get(method.name, method.name) for method in methods}
    found = {method.name: by_seed(plan, given, method, metric) for method in methods}
    first = methods[0].name
    rows: list[Row] = []
    for method in methods:
        why = "" if found[method.name] else plan.error(given, method)
        row = against(found[method.name], found[first], method.name == first, why)
        gain = (
            None
            if method.name == first
            else printed_gain(printed, metric, known_by[method.name], known_by[first], given.known_as)
        )
        rows.append(
            {"data": given.shown, "metric": metric, "method": method.name, **row, **gain_cells("published", gain)}
        )
    for name, why in (absent or {}).items():
        gain = printed_gain(printed, metric, (printed_name or {}).get(name, name), known_by[first], given.known_as)
        row = against({}, {}, False, why)
        rows.append({"data": given.shown, "metric": metric, "method": name, **row, **gain_cells("published", gain)})
    correct(rows)
    return rows


def correct(rows: Sequence[Row]) -> None:
    """Holm's correction of all tests among these rows, and the verdicts that rest on it."""
    tested = [row for row in rows if row["p"] is not None]
    for row, adjusted in zip(tested, holm([float(row["p"] or 0) for row in tested]), strict=True):
        row["p_holm"] = adjusted
        row["verdict"] = SAME if adjusted >= LEVEL else BETTER if float(row["over"] or 0) > 0 else WORSE


def against(own: Seeds, base: Seeds, is_base: bool, why: str) -> Row:
    row: Row = {"seeds": len(own), **dict.fromkeys(FIELDS), "verdict": f"not run: {why}"}
    if not own:
        return row
    over_seeds = _summary(own)
    row |= {"mean": over_seeds.mean, "std": over_seeds.std, "verdict": REFERENCE if is_base else ONE}
    common = [seed for seed in own if seed in base]
    if is_base or not common:
        return row if is_base else row | {"verdict": "the reference was not run"}
    d = np.stack([own[seed] - base[seed] for seed in common])
    mean = float(np.mean([base[seed].mean() for seed in common]))
    if not mean:
        return row
    row["over"] = float(d.mean()) / mean
    if len(common) > 1:
        test = seeds_and_queries(d)
        row |= {"over_low": test.low / mean, "over_high": test.high / mean, "p": test.p}
    if len(own) > 1 and len(base) > 1:
        row["p_equal_variance"] = equal_variance_t(over_seeds, _summary(base)).p
    return row


def _summary(seeds: Seeds) -> Summary:
    return summary([float(value.mean()) for value in seeds.values()])


def columns(first: str, where: str) -> tuple[Column, ...]:
    """How people see the rows of a table whose reference is `first`, printed for the sets `where`."""
    return (
        *named("data", "metric", "method"),
        Column("ours", "{mean:.4f}[[ ± {std:.4f}]]"),
        Column(f"to {first}", "{over:+.1%}[[ [{over_low:+.1%}, {over_high:+.1%}]]]"),
        gain_column(f"published, on {where}", "published"),
        *TESTS,
    )


TESTS = (
    Column("p", "{p:.2g}"),
    Column("p (Holm)", "{p_holm:.2g}"),
    Column("p (equal-variance t)", "{p_equal_variance:.2g}"),
    *named("verdict"),
    Column("seeds", "{seeds}"),
)


def said(rows: Sequence[Row], first: str) -> list[str]:
    """One sentence per data set and metric: what is better and worse than the reference, and what cannot be told from it."""
    lines = []
    for data, metric in dict.fromkeys((str(row["data"]), str(row["metric"])) for row in rows):
        some = [row for row in rows if (row["data"], row["metric"]) == (data, metric) and row["over"] is not None]
        parts = [
            f"{words}: {', '.join(_with_gain(row) for row in group)}"
            for verdict, words in (
                (BETTER, "better"),
                (WORSE, "worse"),
                (SAME, "no difference shown"),
                (ONE, "one seed"),
            )
            if (group := [row for row in some if row["verdict"] == verdict])
        ]
        if parts:
            lines.append(f"{data}, {metric}, against {first}: {'; '.join(parts)}.")
    return lines


def _with_gain(row: Row) -> str:
    printed = "" if row["published"] is None else f", published {row['published']:+.1%}"
    return f"{row['method']} ({row['over']:+.1%}{printed})"
