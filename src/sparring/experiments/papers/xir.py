"""The tables and figures of XIR: data, quality, learning curves, the cache, and sweeps over one setting."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import torch

from sparring.core.devices import pick_device
from sparring.data.interactions import Split
from sparring.experiments.papers import drawing
from sparring.experiments.papers.paper import (
    METRICS,
    Experiment,
    PaperDataset,
    PaperMethod,
    Reproduction,
    Results,
    Unsuited,
)
from sparring.experiments.papers.paper_tables import (
    CHART,
    NOT_GIVEN,
    OURS,
    SEEDS,
    TONES,
    UNPUBLISHED,
    agreement,
    beside,
    field,
    mean_cells,
    mean_of,
    render,
    save_figure,
    unsuited_lines,
)
from sparring.experiments.papers.printed import Cells, PublishedFigure, published, published_cells, published_counts
from sparring.experiments.report import figures
from sparring.experiments.report.figures import RenderedFigure
from sparring.experiments.report.html import Section, Sheet
from sparring.experiments.report.tables import Column, Row, Table, TableRows, text_columns
from sparring.experiments.report.wording import in_words
from sparring.experiments.study import read_json
from sparring.negatives import Cache
from sparring.recipes.run import Run
from sparring.recipes.setup import parse
from sparring.training.step import sample_steps

PAPER = "XIR (Chen et al., NeurIPS 2022)"
DATA, TUNED = published("xir")["data"], published("xir")["settings"]
TABLE_2_CELLS, TABLE_4_CELLS = published_cells("xir", "table2"), published_cells("xir", "table4")
RELEASE: dict[str, object] = {"form": "release"}
RECIPES = {"SSL": "ssl", "SSL-Pop": "ssl_pop", "MNS": "mns", "G-Tower": "g_tower", "BIR": "bir", "XIR": "xir"}
BY_COUNTS = (
    "A data set counts as one of the paper's if its numbers of queries, items and interactions are equal, "
    "regardless of its name."
)
NOTES = (
    "NDCG is computed as in the released code, which discounts every rank after the first equally; the paper's figures "
    "can only be matched that way. The standard metric is beside it.",
    "Semantics of the release: the query's positive stays among its negatives; d = 32, inner products, initialisation "
    "N(0, 1), batches of 2,048, Adam with coupled L2, learning rate 0.001 x 0.95 every 5 epochs, 100 epochs, the last "
    "epoch, no validation part.",
    "Each seed has its own random 80/20 split, as in the release; the rows of the release's files may be in another "
    "order, so its splits are matched in distribution, not pair by pair.",
    BY_COUNTS,
)
CLOSED = (
    "BIR and XIR use the expected number of draws in closed form; --set draw=multinomial draws as the release does."
)
NO_FIGURES = "The paper shows a chart without figures."
REASONS = {
    ("lam", "Gowalla"): "the release's script",
    ("lam", "Ta-feng"): "not published; an independent implementation matches the paper with it",
    ("alpha", "Gowalla"): "the release's script",
    ("alpha", "Ta-feng"): "not published; the figures depend on it, see docs/lab/results.md",
}
MAIN = (
    *text_columns("data", "metric", "method"),
    OURS,
    Column("published", "{published:.4f}[[ ± {published_std:.5f}]]"),
    Column("difference", "{difference:+.1%}"),
    *text_columns("verdict"),
    Column("standard metric", "{standard:.4f}[[ ± {standard_std:.5f}]]"),
    SEEDS,
)


def in_batch(dataset: PaperDataset, *names: str, **changes: object) -> list[PaperMethod]:
    """Methods of table 2 by name, all by default, each as released, with the settings that the paper tuned."""
    known = dataset.known_as
    shared = {**RELEASE, "weight_decay": TUNED["weight_decay"].get(known, 1e-5)}
    own = {"XIR": {"lam": TUNED["lam"].get(known, 0.5)}, "G-Tower": {"alpha": TUNED["alpha"].get(known, 1e-4)}}
    return [PaperMethod(name, RECIPES[name], {**shared, **own.get(name, {}), **changes}) for name in names or RECIPES]


def settings_lines(plan: Reproduction) -> list[str]:
    """Deviations from the paper's setting, and the lambda, alpha and weight decay of each data set."""
    lines = [f"Not the paper's setting: {in_words(plan.settings)}."] if plan.settings else []
    for dataset in plan.data:
        lam, decay, alpha = (_used(plan, dataset, name) for name in ("lam", "weight_decay", "alpha"))
        if lam:
            why = _reason(plan, dataset, "lam", "unknown for this data: the recipe's default")
            reason = f" ({why})" if "lam" not in plan.experiment.chosen else ""
            lines.append(f"{dataset.shown}: XIR with lambda {lam}{reason}; weight decay {decay}.")
        if alpha:
            why = _reason(plan, dataset, "alpha", "the release's for Gowalla")
            lines.append(f"{dataset.shown}: G-Tower with alpha {alpha} ({why}).")
    return lines + unsuited_lines(plan)


def _used(plan: Reproduction, dataset: PaperDataset, name: str) -> str:
    chosen = (method.settings for method in plan.methods[dataset.name])
    return ", ".join(dict.fromkeys(str(values[name]) for values in chosen if name in values))


def _reason(plan: Reproduction, dataset: PaperDataset, name: str, default: str) -> str:
    return "as requested" if name in plan.settings else REASONS.get((name, dataset.known_as), default)


def our_metric(metric: str, release: bool = True) -> str:
    """Our name of a metric in the paper: NDCG@10 is ndcg_xir_release@10, by the formula of the released code."""
    name, _, k = metric.partition("@")
    return f"{name.lower()}{'_xir_release' if release else ''}@{k}"


def _metrics(plan: Reproduction, dataset: PaperDataset, method: PaperMethod) -> list[dict[str, float]]:
    return [run.test_metrics for run in plan.runs(dataset, method)]


# Tables 2 and 4: quality.


def quality_results(plan: Reproduction, metrics: Sequence[str], cells: Cells) -> Results:
    """The main table, every cutoff, and a figure per data set."""
    rows: list[Row] = []
    for dataset in plan.data:
        measured = {method.name: _metrics(plan, dataset, method) for method in plan.methods[dataset.name]}
        for metric in plan.measured(dataset, metrics):
            for method in plan.methods[dataset.name]:
                runs = measured[method.name]
                ours = [values[our_metric(metric)] for values in runs]
                theirs = cells.get((dataset.known_as, metric, method.name))
                row: Row = {"data": dataset.shown, "metric": metric, "method": method.name}
                row |= beside(ours, theirs, "" if runs else plan.error(dataset, method))
                standard = [values[our_metric(metric, release=False)] for values in runs]
                rows.append(row | mean_cells("standard", standard))
    absent = absent_rows(plan, metrics, cells)
    caption = "ours (bars, with one deviation over seeds) and the published figures (diamonds, in brackets)."
    drawn = {}
    for dataset in plan.data:
        own = [row for row in rows if row["data"] == dataset.shown]
        if any(row["mean"] is not None for row in own):
            figure = drawing.ours_and_theirs(own)
            drawn[dataset.name] = [save_figure(plan, dataset, "quality", figure, caption)]
    cutoffs = cutoffs_table(plan)
    more = [Section("Every cutoff", (Sheet(cutoffs),))] if cutoffs.rows else []
    if absent:
        published_only = ("data", "metric", "method", "published", "verdict")
        columns = tuple(column for column in MAIN if column.title in published_only)
        more.append(Section("Published, not run here", (Sheet(Table(columns, absent)),)))
    findings = [*agreement(rows), *settings_lines(plan)]
    tables = {"": Table(MAIN, rows)}
    return render(plan, tables, findings, drawn, absent=absent, more=more, others={"cutoffs": cutoffs})


def absent_rows(plan: Reproduction, metrics: Sequence[str], cells: Cells) -> list[Row]:
    """The published figures on data that was not given, or on which the experiment cannot be run."""
    reasons = {dataset.known_as: plan.unsuited[dataset.name] for dataset in plan.data if dataset.name in plan.unsuited}
    run = {dataset.known_as for dataset in plan.suited}
    names, _, methods = (list(dict.fromkeys(part)) for part in zip(*cells, strict=True))
    rows: list[Row] = []
    for data, metric, method in itertools.product(names, metrics, methods):
        if data not in run and (data, metric, method) in cells:
            row: Row = {"data": data, "metric": metric, "method": method}
            row |= beside([], cells[data, metric, method], reasons.get(data, NOT_GIVEN))
            rows.append(row | mean_cells("standard", []))
    return rows


def cutoffs_table(plan: Reproduction) -> Table:
    """One row per data set and method: every metric at every cutoff, by the release's formula and the standard one."""
    ks = sorted({k for dataset in plan.data for k in plan.cutoffs(dataset)})
    names = [f"{metric}@{k}" for metric in METRICS for k in ks]
    rows: list[Row] = []
    for dataset in plan.data:
        for method in plan.methods[dataset.name]:
            runs = _metrics(plan, dataset, method)
            row: Row = {"data": dataset.shown, "method": method.name, "seeds": len(runs)}
            for name in names:
                row |= mean_cells(field(name), [values[name] for values in runs if name in values])
            rows.append(row)
    columns = [Column(_cutoff_title(name), f"{{{field(name)}:.4f}}[[ ± {{{field(name)}_std:.4f}}]]") for name in names]
    caption = "Every cutoff, by the formula of the XIR release and by the standard one"
    return Table((*text_columns("data", "method"), *columns), rows, caption)


def _cutoff_title(name: str) -> str:
    """NDCG@10 by the release's formula, standard ndcg@10 by the usual one."""
    return f"{name.split('_')[0].upper()}@{name.split('@')[1]}" if "_" in name else f"standard {name}"


def table_4_methods(dataset: PaperDataset, asked: Mapping[str, object]) -> Sequence[PaperMethod]:
    table = dataset.data.item_table
    columns = asked.get("item_features") or ",".join(feature_columns(table))
    if not columns:
        why = "it has no item table (--items FILE)" if table is None else "its item table has no column of categories"
        raise Unsuited(f"{why}; --set item_features=COLUMN,COLUMN names columns")
    # layers of 32 and 16 units over vectors of 32: the towers compare 16 numbers
    tower = {"item_features": columns, "feature_dim": 32, "hidden": "32", "dim": 16}
    return in_batch(dataset, "SSL", "SSL-Pop", "BIR", "XIR", **tower)


def feature_columns(table: pl.DataFrame | None) -> list[str]:
    """The categorical columns of an item table: text or integers, with two items or more per value on average."""
    if table is None:
        return []
    categorical = (pl.String, pl.Boolean, pl.Categorical)
    names = [name for name, kind in table.schema.items() if kind in categorical or kind.is_integer()]
    return [name for name in names if 2 <= table[name].n_unique() <= len(table) / 2]


# Table 1: the data sets.


def table_1(plan: Reproduction) -> Results:
    """Counts and density of each data set, ours and as printed; nothing is trained."""
    rows: list[Row] = []
    for dataset in plan.data:
        data = dataset.data
        density = len(data) / max(data.n_queries * data.n_items, 1)
        rows += _count_rows(dataset.shown, (data.n_queries, data.n_items, len(data), density), dataset.known_as)
    for name in DATA:
        if name not in {dataset.known_as for dataset in plan.data}:
            rows += _count_rows(name, None, name)
    columns = (
        *text_columns("data"),
        Column("quantity", "{metric}", text=True),
        Column("ours", "{ours}"),
        Column("published", "{theirs}"),
        Column("difference", "{difference:+.1%}"),
        *text_columns("verdict", "note"),
    )
    table = Table(columns, rows, plan.caption)
    findings = agreement(rows) + [f"{row['data']}: {row['note']}." for row in rows if row["note"]]
    return Results(table, findings, [Section("Data", (Sheet(table, "", TONES),))])


def _count_rows(shown: str, ours: tuple[int, int, int, float] | None, known_as: str) -> list[Row]:
    printed = DATA.get(known_as)
    names = {"#User": "queries", "#Item": "items", "#Interaction": "interactions", "Density": "density"}
    rows: list[Row] = []
    for place, (name, key) in enumerate(names.items()):
        value, figure = None if ours is None else ours[place], None if printed is None else printed[key]
        row: Row = {"data": shown, "metric": name, "method": ""}
        row |= beside([] if value is None else [value], None if figure is None else PublishedFigure(figure), NOT_GIVEN)
        form = ".2e" if name == "Density" else ",d"
        row |= {"ours": "" if value is None else format(value, form)}
        rows.append(row | {"theirs": "" if figure is None else format(figure, form), "note": ""})
    if printed:
        queries, items, interactions = published_counts("xir")[known_as]
        density = interactions / (queries * items)
        if abs(printed["density"] / density - 1) > 0.02:
            misprint = f"the printed density {printed['density']:.2e} is a misprint"
            rows[-1]["note"] = f"{misprint}: the printed counts give {density:.2e}"
    return rows


# Charts: figures 1 to 3, and sections 4.6 and 4.7.


def absent_charts(plan: Reproduction) -> list[Row]:
    """One row without figures for each of the paper's data sets that was not given."""
    given = {dataset.known_as for dataset in plan.data}
    return [
        {"data": data, "metric": "", "method": "", **beside([], None, NOT_GIVEN)} for data in DATA if data not in given
    ]


def chart_results(
    plan: Reproduction,
    rows: TableRows,
    columns: Sequence[Column],
    findings: Sequence[str],
    drawn: Mapping[str, Sequence[RenderedFigure]],
    *,
    title: str = "",
    absent: TableRows | None = None,
    others: Mapping[str, Table] | None = None,
) -> Results:
    absent = absent_charts(plan) if absent is None else absent
    sheet = Sheet(Table(text_columns("data", "verdict"), absent))
    more = [Section("Published as a chart, not run here", (sheet,))] if absent else []
    lines = [*findings, *settings_lines(plan)]
    return render(plan, {title: Table(tuple(columns), rows)}, lines, drawn, absent=absent, more=more, others=others)


def curve_results(plan: Reproduction) -> Results:
    """NDCG at every measured epoch, with the published figure of the last one, which table 2 prints."""
    ends: list[Row] = []
    points: list[Row] = []
    drawn = {}
    for dataset in plan.data:
        metric = f"NDCG@{min(10, dataset.data.n_items)}"
        key = f"test_{our_metric(metric)}"
        methods = plan.methods[dataset.name]
        histories = {method.name: [run.history for run in plan.runs(dataset, method)] for method in methods}
        for method in methods:
            curve = _curve(histories[method.name], key)
            head: Row = {"data": dataset.shown, "metric": metric, "method": method.name}
            for epoch, values in curve.items():
                row = beside(values, None)
                points.append({**head, "epoch": epoch, **{name: row[name] for name in ("mean", "std", "seeds")}})
            published_figure = TABLE_2_CELLS.get((dataset.known_as, metric, method.name))
            row = beside(curve[max(curve)] if curve else [], published_figure, plan.error(dataset, method))
            ends.append({**head, "epoch": max(curve, default=None), **row, "near": _near(curve)})
        if any(histories.values()):
            figure = figures.curves(histories, key, [method.name for method in methods], "", f"test {metric}")
            caption = f"test {metric} by epoch, by the release's formula, the mean over seeds with one deviation."
            drawn[dataset.name] = [save_figure(plan, dataset, "curve", figure, caption)]
    head_columns = (*text_columns("data", "metric", "method"), Column("epoch", "{epoch}"), OURS)
    columns = (
        *head_columns,
        Column("published (table 2)", "{published:.4f}[[ ± {published_std:.5f}]]"),
        Column("difference", "{difference:+.1%}"),
        *text_columns("verdict"),
        Column("90 % of it by epoch", "{near}"),
        SEEDS,
    )
    curve_table = Table((*head_columns, SEEDS), points, "Test NDCG by epoch, by the release's formula")
    others = {"curve": curve_table}
    return chart_results(plan, ends, columns, agreement(ends), drawn, title="The last epoch", others=others)


def _curve(histories: Sequence[Sequence[Mapping[str, Any]]], key: str) -> dict[int, list[float]]:
    """Epoch -> values over seeds, at the epochs that all of them measured."""
    measured = [{int(row["epoch"]): float(row[key]) for row in history if key in row} for history in histories]
    epochs = sorted(set.intersection(*map(set, measured))) if measured else []
    return {epoch: [values[epoch] for values in measured] for epoch in epochs}


def _near(curve: Mapping[int, Sequence[float]]) -> int | None:
    """The first measured epoch whose mean is at least 90 % of the last one's."""
    means = {epoch: float(np.mean(values)) for epoch, values in curve.items()}
    return next((epoch for epoch, mean in means.items() if mean >= 0.9 * means[max(means)]), None)


BINS = 50  # of items by popularity
FIFTHS = ("most popular fifth", "second", "third", "fourth", "least popular fifth")


def occurrence(run: Run, split: Split, device: str) -> dict[str, Any]:
    """Shares of the occurrence vector and of the interactions by item popularity, in equal bins and in fifths."""
    (cache,) = [module for module in run.modules().modules() if isinstance(module, Cache)]
    counts = split.train.counts()
    order = np.argsort(-counts, kind="stable")
    shares: dict[str, Any] = {"distinct": len(cache.ids.unique())}
    for name, mass in (("occurrence", cache.occurrences.cpu().numpy()), ("interactions", counts.astype(float))):
        share = (mass / max(mass.sum(), 1e-300))[order]
        shares[name] = [float(part.sum()) for part in np.array_split(share, min(BINS, len(share)))]
        shares[f"{name}_fifths"] = [float(part.sum()) for part in np.array_split(share, len(FIFTHS))]
    return shares


def occurrence_results(plan: Reproduction) -> Results:
    """The share of each popularity bin among the drawn items, beside its share of the interactions."""
    rows: list[Row] = []
    findings = []
    drawn = {}
    for dataset in plan.data:
        (method,) = plan.methods[dataset.name]
        measured = [run.measured for run in plan.runs(dataset, method)]
        fifths = [_fifth_row(plan, dataset, method, measured, place) for place in range(len(FIFTHS))]
        rows += fifths
        if measured:
            names = ("occurrence", "interactions")
            mean = {name: np.mean([shares[name] for shares in measured], axis=0).tolist() for name in names}
            x, y = "items by popularity, % (most popular first)", f"share of each {100 // BINS} % of items"
            caption = "share of XIR's occurrence vector after training, and of the interactions, by item popularity."
            drawn[dataset.name] = [save_figure(plan, dataset, "occurrence", drawing.shares(mean, x, y), caption)]
            kept = float(np.mean([shares["distinct"] for shares in measured]))
            findings.append(
                f"{dataset.shown}: the most popular fifth of the items has {fifths[0]['interactions']:.0%} of the "
                f"interactions and {fifths[0]['mean']:.0%} of the occurrences; the last cache holds {kept:,.0f} "
                "distinct items."
            )
    columns = (
        *text_columns("data"),
        Column("items", "{method}", text=True),
        Column("share of occurrences", "{mean:.2%}[[ ± {std:.2%}]]"),
        Column("share of interactions", "{interactions:.2%}"),
        Column("ratio", "{ratio:.2f}"),
        *text_columns("verdict"),
        SEEDS,
    )
    absent = [row for row in absent_charts(plan) if row["data"] == "Gowalla"]
    return chart_results(plan, rows, columns, findings, drawn, absent=absent)


def _fifth_row(
    plan: Reproduction, dataset: PaperDataset, method: PaperMethod, measured: Sequence[Mapping[str, Any]], place: int
) -> Row:
    row: Row = {"data": dataset.shown, "metric": "share of occurrences", "method": FIFTHS[place]}
    otherwise = CHART if dataset.known_as == "Gowalla" else UNPUBLISHED
    values = [shares["occurrence_fifths"][place] for shares in measured]
    row |= beside(values, None, plan.error(dataset, method), otherwise)
    taken = mean_of([shares["interactions_fifths"][place] for shares in measured])
    ratio = float(row["mean"]) / taken if row["mean"] is not None and taken else None
    return row | {"interactions": taken, "ratio": ratio}


CACHES = (0.5, 1.0, 2.0, 4.0)  # times the batch
LAMS = (0.0, 0.2, 0.5, 0.8, 1.0)
DRAWN = (64, 32, 16, 8, 4, 2, 1)  # divisors of the batch
CHARTED = ("NDCG@10", "RECALL@10")


def _batch_size(asked: Mapping[str, object]) -> int:
    return int(parse("batch_size", asked.get("batch_size", 2048), int))


def cache_methods(dataset: PaperDataset, asked: Mapping[str, object]) -> Sequence[PaperMethod]:
    bir, xir = in_batch(dataset, "BIR", "XIR")
    size = _batch_size(asked)
    sweep = [
        replace(xir, name=_cache(factor), settings={**xir.settings, "n": max(size // 2, 1), "cache_size": cached})
        for factor in CACHES
        for cached in [max(int(factor * size), 1)]
    ]
    return [bir, *sweep]


def _cache(factor: float) -> str:
    return f"XIR, cache {factor:g}x"


def lam_methods(dataset: PaperDataset, asked: Mapping[str, object]) -> Sequence[PaperMethod]:
    (xir,) = in_batch(dataset, "XIR")
    return [replace(xir, name=_lam(lam), settings={**xir.settings, "lam": lam}) for lam in LAMS]


def _lam(lam: float) -> str:
    return f"lambda {lam:g}"


def drawn_methods(dataset: PaperDataset, asked: Mapping[str, object]) -> Sequence[PaperMethod]:
    pop, bir = in_batch(dataset, "SSL-Pop", "BIR")
    size, drawn = _batch_size(asked), {**bir.settings, "draw": "multinomial"}
    return [pop, *(replace(bir, name=_drawn(part), settings={**drawn, "n": max(size // part, 1)}) for part in DRAWN)]


def _drawn(part: int) -> str:
    return "BIR, B" if part == 1 else f"BIR, B/{part}"


def gradient_time(run: Run, split: Split, device: str) -> dict[str, Any]:
    """Milliseconds of the backward pass of one batch on a trained model: the mean of 20 after 3 for warm-up."""
    where = pick_device(device)
    run.modules().to(where)
    steps = itertools.chain.from_iterable(sample_steps(run, split, epoch) for epoch in itertools.count())
    times = []
    for losses, _, _ in itertools.islice(steps, 23):
        times.append(_timed(losses.mean().backward, where))
        run.model.zero_grad(set_to_none=True)
    return {"gradient_ms": 1000 * sum(times[3:]) / len(times[3:])}


def _timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _by_seed(plan: Reproduction, dataset: PaperDataset, method: PaperMethod, metric: str) -> dict[int, float]:
    return {run.seed: float(run.test_metrics[our_metric(metric)]) for run in plan.runs(dataset, method)}


def _relative(values: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """The improvement over a baseline on the same split, seed by seed."""
    return [values[seed] / base[seed] - 1 for seed in values if base.get(seed)]


def sweep_rows(plan: Reproduction, baseline: str = "") -> list[Row]:
    """One row per data set, metric and method: its value and its relative improvement over the baseline, if any."""
    rows: list[Row] = []
    for dataset in plan.data:
        for metric in plan.measured(dataset, CHARTED):
            methods = plan.methods[dataset.name]
            values = {method.name: _by_seed(plan, dataset, method, metric) for method in methods}
            for method in methods:
                own, otherwise = values[method.name], CHART if dataset.known_as else UNPUBLISHED
                row: Row = {"data": dataset.shown, "metric": metric, "method": method.name}
                row |= beside(list(own.values()), None, plan.error(dataset, method), otherwise)
                if baseline:
                    row |= mean_cells("over", _relative(own, values[baseline]) if method.name != baseline else [])
                rows.append(row)
    return rows


def _sweep_columns(baseline: str, *more: Column) -> tuple[Column, ...]:
    over = [Column(f"over {baseline}", "{over:+.2%}[[ ± {over_std:.2%}]]")] if baseline else []
    return (*text_columns("data", "metric", "method"), OURS, *over, *more, *text_columns("verdict"), SEEDS)


def _points(plan: Reproduction, dataset: PaperDataset, places: Mapping[str, float], baseline: str) -> dict[str, Any]:
    """Metric -> place on the axis -> values over seeds; in percent over the baseline, if one is named."""
    series: dict[str, dict[float, list[float]]] = {}
    methods = {method.name: method for method in plan.methods[dataset.name]}
    for metric in plan.measured(dataset, CHARTED):
        base = _by_seed(plan, dataset, methods[baseline], metric) if baseline else {}
        for name, place in places.items():
            values = _by_seed(plan, dataset, methods[name], metric)
            points = [100 * value for value in _relative(values, base)] if baseline else list(values.values())
            if points:
                series.setdefault(metric, {})[place] = points
    return series


def sweep_results(
    plan: Reproduction,
    places: Mapping[str, float],
    baseline: str,
    x: str,
    y: str,
    *,
    log2: bool = False,
    notes: Sequence[str] = (),
) -> Results:
    rows = sweep_rows(plan, baseline)
    drawn = {}
    for dataset in plan.data:
        if series := _points(plan, dataset, places, baseline):
            figure = drawing.lines(series, x, y, log2=log2, zero=bool(baseline))
            caption = f"{y} by {x}, the mean over seeds with one deviation."
            drawn[dataset.name] = [save_figure(plan, dataset, plan.experiment.name, figure, caption)]
    return chart_results(plan, rows, _sweep_columns(baseline), [*_best(plan, rows), *notes], drawn)


def _best(plan: Reproduction, rows: TableRows) -> list[str]:
    lines = []
    for dataset in plan.data:
        known = [row for row in rows if (row["data"], row["metric"]) == (dataset.shown, CHARTED[0])]
        known = [row for row in known if row["mean"] is not None]
        if known:
            top = max(known, key=lambda row: float(row["mean"] or 0))
            lines.append(f"{dataset.shown}: {top['method']} has the highest NDCG@10, {top['mean']:.4f}.")
    return lines


def lam_results(plan: Reproduction) -> Results:
    names = [dataset.known_as for dataset in plan.data if dataset.known_as]
    printed = {name: TABLE_2_CELLS[name, CHARTED[0], "XIR"].value for name in names}
    notes = [f"{name}: table 2 prints {value:.4f} for XIR, and not its lambda." for name, value in printed.items()]
    return sweep_results(plan, {_lam(lam): lam for lam in LAMS}, "", "lambda", "test quality", notes=notes)


def drawn_results(plan: Reproduction) -> Results:
    """Quality over SSL-Pop, and the time of the gradient as a ratio to it."""
    baseline, x = "SSL-Pop", "|R_u| / batch size"
    rows = sweep_rows(plan, baseline)
    drawn: dict[str, list[RenderedFigure]] = {}
    places = {_drawn(part): 1 / part for part in DRAWN}
    findings = []
    for dataset in plan.data:
        times = {method.name: _gradient_times(plan, dataset, method) for method in plan.methods[dataset.name]}
        ratios = {name: [1 + value for value in _relative(own, times[baseline])] for name, own in times.items()}
        for row in rows:
            if row["data"] == dataset.shown:
                name = str(row["method"])
                row["gradient_ms"] = mean_of(list(times[name].values()))
                row |= mean_cells("gradient_ratio", ratios[name])
        saved = drawn[dataset.name] = []
        if quality := _points(plan, dataset, places, baseline):
            figure = drawing.lines(quality, x, f"improvement over {baseline}, %", log2=True, zero=True)
            caption = f"improvement of BIR over {baseline} by the number of items drawn for each query."
            saved.append(save_figure(plan, dataset, "quality", figure, caption))
        if speed := {place: ratios[name] for name, place in places.items() if ratios[name]}:
            figure = drawing.lines({"gradient": speed}, x, f"time / {baseline}", log2=True)
            caption = f"time of the backward pass as a ratio to that of {baseline}."
            saved.append(save_figure(plan, dataset, "gradient", figure, caption))
        findings += _enough(dataset, rows)
    milliseconds, ratio = (
        Column("gradient, ms", "{gradient_ms:.2f}"),
        Column(f"time / {baseline}", "{gradient_ratio:.2f}"),
    )
    return chart_results(plan, rows, _sweep_columns(baseline, milliseconds, ratio), findings, drawn)


def _gradient_times(plan: Reproduction, dataset: PaperDataset, method: PaperMethod) -> dict[int, float]:
    paths = {run.seed: run.folder / "after.json" for run in plan.runs(dataset, method)}
    return {seed: float(read_json(path)["gradient_ms"]) for seed, path in paths.items() if path.is_file()}


def _enough(dataset: PaperDataset, rows: TableRows) -> list[str]:
    """The fewest items with which BIR is at least as good as SSL-Pop: the paper says about B/64."""
    own = [row for row in rows if (row["data"], row["metric"]) == (dataset.shown, CHARTED[0])]
    over = {str(row["method"]): row["over"] for row in own}
    if all(value is None for value in over.values()):
        return []
    claim = "the paper says that about B/64 is comparable"
    for name in map(_drawn, DRAWN):
        if (value := over.get(name)) is not None and float(value) >= 0:
            fewest = f"the fewest items with which BIR is as good as SSL-Pop (NDCG@10) are those of {name}"
            return [f"{dataset.shown}: {fewest}; {claim}."]
    return [f"{dataset.shown}: BIR is not as good as SSL-Pop with any number of items; {claim}."]


TABLE_1 = Experiment(
    "xir-table1", "Statistics of the data sets", f"{PAPER}, table 1", lambda dataset, asked: (), table_1, (BY_COUNTS,)
)
TABLE_2 = Experiment(
    "xir-table2",
    "SSL, SSL-Pop, MNS, G-Tower, BIR and XIR",
    f"{PAPER}, table 2",
    lambda dataset, asked: in_batch(dataset),
    lambda plan: quality_results(plan, ("NDCG@10", "RECALL@10"), TABLE_2_CELLS),
    (*NOTES, CLOSED, "The paper prints cutoff 10 only; 20 and 50 are ours alone."),
)
TABLE_4 = Experiment(
    "xir-table4",
    "Features in the item tower",
    f"{PAPER}, section 4.5, table 4 (captioned figure 4)",
    table_4_methods,
    lambda plan: quality_results(plan, ("NDCG@10", "RECALL@10", "NDCG@20", "RECALL@20"), TABLE_4_CELLS),
    (
        *NOTES,
        CLOSED,
        "The paper joins SellerID and CateID of Tmall to the item's id before two layers of 32 and 16 units. On other "
        "data the columns are the categorical ones of the item table, or those that --set item_features names; the "
        "query table has 16 dimensions.",
    ),
)
TABLE_5 = Experiment(
    "xir-table5",
    "Effect of the cache size",
    f"{PAPER}, section 4.6 (figure 5)",
    cache_methods,
    lambda plan: sweep_results(
        plan,
        {_cache(factor): factor for factor in CACHES},
        "BIR",
        "cache size / batch size",
        "improvement over BIR, %",
        log2=True,
    ),
    (
        *NOTES,
        CLOSED,
        "Half a batch is drawn from the batch, and as many from a cache of any size, as the text says.",
        NO_FIGURES,
    ),
    chosen=("cache_size", "n"),
)
TABLE_6 = Experiment(
    "xir-table6",
    "Effect of lambda",
    f"{PAPER}, section 4.7 (figure 6)",
    lam_methods,
    lam_results,
    (*NOTES, CLOSED, NO_FIGURES),
    chosen=("lam",),
)
FIGURE_1 = Experiment(
    "xir-figure1",
    "NDCG@10 by epoch",
    f"{PAPER}, figure 1",
    lambda dataset, asked: in_batch(dataset, eval_every=5),
    curve_results,
    (
        *NOTES,
        CLOSED,
        "The paper draws Amazon and Tmall. The test part is measured every 5 epochs (--set eval_every=N), as in the "
        "release.",
    ),
    curve=True,
)
FIGURE_2 = Experiment(
    "xir-figure2",
    "Occurrence of items in the cache by popularity",
    f"{PAPER}, figure 2",
    lambda dataset, asked: in_batch(dataset, "XIR"),
    occurrence_results,
    (
        *NOTES,
        CLOSED,
        "The paper draws Gowalla. The cache is the release's: the next one is drawn from the items of the last step, "
        "and occurrences start at 1; --set form=paper trains algorithm 2 as printed.",
    ),
    measure=occurrence,
)
FIGURE_3 = Experiment(
    "xir-figure3",
    "Quality and gradient time by |R_u|, the items resampled for each query",
    f"{PAPER}, section 4.4, figure 3",
    drawn_methods,
    drawn_results,
    (
        *NOTES,
        f"BIR draws here, as in the paper: in closed form |R_u| is only a weight. {NO_FIGURES}",
        "The time is that of the backward pass alone, of trained models, one at a time; the release times the same "
        "without waiting for the GPU. Our counts are a matrix as wide as the batch for any |R_u|.",
    ),
    chosen=("n", "draw"),
    after=gradient_time,
)
EXPERIMENTS = (TABLE_1, TABLE_2, TABLE_4, TABLE_5, TABLE_6, FIGURE_1, FIGURE_2, FIGURE_3)
