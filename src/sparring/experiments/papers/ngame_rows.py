"""The rows of the tables of NGAME and DEXA: every ranking of every method, what was claimed, rare labels, what mining costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparring.core.files import read_table
from sparring.experiments.comparison_tables import Finished, values
from sparring.experiments.papers.cells import Row, field, mean_cells, named, read_json
from sparring.experiments.papers.esans_rows import Seeds, against, correct, gain_cells, gain_column, printed_gain
from sparring.experiments.papers.ngame_references import references
from sparring.experiments.papers.plan import Given, Method, Plan
from sparring.experiments.papers.published_ngame import DEXA_GAIN, METRICS, OVERHEAD, PRINTED
from sparring.experiments.report.tables import Column

RANDOM = "random in-batch"
RANKINGS = {"encoder": "knn", "classifiers": "clf", "fused": "fusion"}  # what we call a ranking: what stages.py does
KEYS = {"P": "precision_xc", "nDCG": "ndcg_xc", "PSP": "psp", "R": "recall_xc"}
SHOWN = (*METRICS, "R@100")
ABSENT = "not reproducible here: the data was not given"
MINED = ("cluster_seconds", "list_seconds")  # in the records of the epochs
CLAIMS = (("NGAME", RANDOM), ("ANCE", RANDOM), ("DEXA", "NGAME"))


def our_key(metric: str) -> str:
    """Our name of a metric as the papers print it: nDCG@5 is ndcg_xc@5."""
    name, _, k = metric.partition("@")
    return f"{KEYS[name]}@{k}"


def evaluations(folder: Path) -> dict[str, dict[str, Any]]:
    """What result.json says of each ranking of a finished run; of a run without stages, of its encoder alone."""
    result = read_json(folder / "result.json")
    stages = result.get("stages") or {"knn": result["test"]}
    return {shown: stages[name] for shown, name in RANKINGS.items() if name in stages}


def by_seed(plan: Plan, given: Given, method: Method, ranking: str, metric: str) -> Seeds:
    """The values of each test query in every finished run, by seed."""
    found: Seeds = {}
    for folder in plan.folders(given, method):
        own = evaluations(folder)
        if ranking in own:
            file = {"encoder": "per_query", "classifiers": "classifiers/per_query", "fused": "fusion_per_query"}[
                ranking
            ]
            run = Finished(int(folder.name), {"test": own[ranking]}, {}, read_table(folder / f"{file}.parquet"))
            found[run.seed] = values(run, our_key(metric))
    return found


def rankings(plan: Plan, given: Given) -> list[str]:
    """The rankings that some finished run has."""
    has = {
        name
        for method in plan.methods[given.name]
        for folder in plan.folders(given, method)
        for name in evaluations(folder)
    }
    return [name for name in RANKINGS if name in has] or ["encoder"]


def quality_rows(plan: Plan, given: Given) -> list[Row]:
    """One row per ranking and method: all metrics, P@1 tested against random batches, times, and the printed figure."""
    rows: list[Row] = []
    for name, found in references(plan, given, plan.methods[given.name][0]).items():
        row: Row = {"data": given.shown, "ranking": "reference", "method": name, "seeds": None, **_means([found])}
        rows.append(
            row | _costs([]) | _printed({}) | {"verdict": f"not run: {found['error']}" if "error" in found else ""}
        )
    for ranking in rankings(plan, given):
        some = [_row(plan, given, ranking, method) for method in plan.methods[given.name]]
        correct(some)
        rows += some
    return rows


def _row(plan: Plan, given: Given, ranking: str, method: Method) -> Row:
    first = next(each for each in plan.methods[given.name] if each.name == RANDOM)
    own, base = (by_seed(plan, given, each, ranking, "P@1") for each in (method, first))
    folders = plan.folders(given, method)
    found = [each[ranking] for folder in folders if ranking in (each := evaluations(folder))]
    row = against(own, base, method.name == RANDOM, "" if own else plan.error(given, method))
    row |= {"data": given.shown, "ranking": ranking, "method": method.name, **_means(found)}
    row |= _costs(folders, plan.folders(given, first)) if ranking == "encoder" else _costs([])
    return row | _printed(
        {metric: PRINTED.get(ranking, {}).get((given.name, metric, method.name)) for metric in METRICS}
    )


def _means(found: Sequence[Mapping[str, Any]]) -> Row:
    row: Row = {}
    for metric in SHOWN:
        each = [100 * run["metrics"][our_key(metric)] for run in found if our_key(metric) in run.get("metrics", {})]
        row |= mean_cells(field(metric), each)
    return row


def _costs(folders: Sequence[Path], base: Sequence[Path] = ()) -> Row:
    """Training time to that of random batches over the same seeds, and what mining added: its share of the rest of the same training."""
    row: Row = {"time": None, "mining": None, "train_seconds": None}
    if not folders:
        return row
    times, mined = {}, {}
    for folder in folders:
        times[folder.name] = float(read_json(folder / "result.json")["train_seconds"])
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        mined[folder.name] = sum(float(line.get(name, 0.0)) for line in lines for name in MINED)
    theirs = {
        folder.name: float(read_json(folder / "result.json")["train_seconds"])
        for folder in base
        if folder.name in times
    }
    row["train_seconds"] = float(np.mean([*times.values()]))
    row["mining"] = sum(mined.values()) / max(sum(times.values()) - sum(mined.values()), 1e-9)
    if theirs:
        row["time"] = sum(times[seed] for seed in theirs) / max(sum(theirs.values()), 1e-9)
    return row


def _printed(figures: Mapping[str, Any]) -> Row:
    return {
        f"published_{field(metric)}": figure.value if (figure := figures.get(metric)) else None for metric in METRICS
    }


def drawn_rows(rows: Sequence[Row]) -> list[Row]:
    """P@1 of every method by ranking, in the fields that drawing.ours_and_theirs takes."""
    names = {"mean": "p_at_1", "std": "p_at_1_std", "published": "published_p_at_1"}
    return [
        {"metric": f"P@1, {row['ranking']}", "method": row["method"], **{to: row[name] for to, name in names.items()}}
        for row in rows
        if row["ranking"] in RANKINGS
    ]


def absent_rows(plan: Plan) -> list[Row]:
    """What is printed of data that was not given: theirs alone."""
    given = {each.name for each in plan.data if plan.methods[each.name]}
    rows: list[Row] = []
    for ranking, printed in PRINTED.items():
        for data, method in dict.fromkeys((data, method) for data, _, method in printed):
            if data not in given:
                figures = {metric: printed.get((data, metric, method)) for metric in METRICS}
                row: Row = {"data": data, "ranking": ranking, "method": method, "seeds": 0, **_means([]), **_costs([])}
                rows.append(row | _printed(figures) | {"verdict": ABSENT})
    return rows


def claim_rows(plan: Plan, given: Given) -> list[Row]:
    """What the papers claim, each claim on each ranking and metric: the relative gain with its interval, tested, beside the printed one."""
    rows: list[Row] = []
    methods = {method.name: method for method in plan.methods[given.name]}
    for ranking in rankings(plan, given):
        for metric in plan.measured(given, SHOWN):
            for better, base in CLAIMS:
                own, theirs = (by_seed(plan, given, methods[name], ranking, metric) for name in (better, base))
                row = against(own, theirs, False, "" if own else plan.error(given, methods[better]))
                row |= {"data": given.shown, "ranking": ranking, "metric": metric, "claim": f"{better} over {base}"}
                gain = printed_gain(PRINTED.get(ranking, {}), metric, better, base, given.name)
                rows.append(row | gain_cells("published", gain))
    correct(rows)
    return rows


def bin_rows(plan: Plan, given: Given) -> list[Row]:
    """How many test pairs of frequent and of rare labels are found: ten bins of labels by training texts, the most frequent first."""
    k = max(plan.cutoffs(given))
    small = max(cut for cut in plan.cutoffs(given) if cut <= 5)
    rows: list[Row] = []
    for ranking in rankings(plan, given):
        for method in plan.methods[given.name]:
            runs = [
                found[ranking]["bins"]
                for folder in plan.folders(given, method)
                if ranking in (found := evaluations(folder))
            ]
            for bins in zip(*runs, strict=True):
                row: Row = {"data": given.shown, "ranking": ranking, "method": method.name, "seeds": len(bins)}
                row |= {name: bins[0][name] for name in ("items", "least", "most", "pairs")}
                row |= {"k": k, "small": small, "recall": float(np.mean([each[f"recall@{k}"] for each in bins]))}
                rows.append(row | {"added": 100 * float(np.mean([each[f"precision@{small}"] for each in bins]))})
    return rows


# In percent; deviations of the other metrics are in the fields.
QUALITY_COLUMNS = (
    *named("data", "ranking", "method"),
    Column("P@1", "{p_at_1:.2f}[[ ± {p_at_1_std:.2f}]]"),
    *(Column(metric, f"{{{field(metric)}:.2f}}") for metric in SHOWN[1:]),
    Column("P@1 to random", "{over:+.1%}[[ [{over_low:+.1%}, {over_high:+.1%}]]]"),
    Column("p (Holm)", "{p_holm:.2g}"),
    *named("verdict"),
    Column("time", "{time:.2f}"),
    Column("mining", "{mining:.1%}"),
    Column("published P@1", "{published_p_at_1:.2f}"),
    Column("seeds", "{seeds}"),
)
PRINTED_COLUMNS = (
    *named("data", "ranking", "method"),
    *(Column(metric, f"{{published_{field(metric)}:.2f}}") for metric in METRICS),
    Column("ours", "{verdict}", text=True),
)
CLAIM_COLUMNS = (
    *named("data", "ranking", "metric", "claim"),
    Column("ours", "{over:+.1%}[[ [{over_low:+.1%}, {over_high:+.1%}]]]"),
    gain_column("published", "published"),
    Column("p", "{p:.2g}"),
    Column("p (Holm)", "{p_holm:.2g}"),
    *named("verdict"),
    Column("seeds", "{seeds}"),
)
BIN_COLUMNS = (
    *named("data", "ranking", "method"),
    Column("training texts of a label", "{least:.0f} to {most:.0f}"),
    Column("labels", "{items:.0f}"),
    Column("test pairs", "{pairs:.0f}"),
    Column("of these found, %", "{recall:.1%} in {k}"),
    Column("adds to precision, points", "{added:.2f} at {small}"),
)


def said(quality: Sequence[Row], claims: Sequence[Row]) -> list[str]:
    """The claims in words: what of each holds on P@1, and what mining cost."""
    lines = []
    for row in claims:
        if row["metric"] == "P@1" and row["over"] is not None:
            printed = "" if row["published"] is None else f"; published {row['published']:+.1%}"
            if row["claim"] == "DEXA over NGAME":
                printed += f"; the slides say {DEXA_GAIN[0]:+.1%} to {DEXA_GAIN[1]:+.1%}"
            interval = "" if row["over_low"] is None else f" [{row['over_low']:+.1%}, {row['over_high']:+.1%}]"
            lines.append(
                f"{row['data']}, {row['ranking']}, P@1: {row['claim']} {row['over']:+.1%}{interval}, {row['verdict']}{printed}."
            )
    for row in quality:
        if row["mining"] is not None and row["method"] in OVERHEAD and row["ranking"] == "encoder":
            lines.append(
                f"{row['data']}: mining of {row['method']} adds {row['mining']:.1%} to the rest of its training; the slides say "
                f"{OVERHEAD[str(row['method'])]:.0%}."
            )
    return lines
