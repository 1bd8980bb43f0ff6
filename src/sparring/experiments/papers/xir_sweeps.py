"""What XIR shows as charts over one setting: cache size, lambda, and the number of items drawn again for each query."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparring.data.batches import RandomBatches
from sparring.data.interactions import Split
from sparring.experiments.papers import drawing
from sparring.experiments.papers.cells import (
    CHART,
    TONES,
    UNPUBLISHED,
    Row,
    absent_charts,
    beside,
    mean_cells,
    named,
    our_key,
    read_json,
)
from sparring.experiments.papers.plan import Experiment, Given, Method, Plan, Results
from sparring.experiments.papers.published import XIR_TABLE_2
from sparring.experiments.papers.xir import CLOSED, NOTES, PAPER, in_batch, settings_said
from sparring.experiments.report import figures
from sparring.experiments.report.html import Figures, Section, Sheet
from sparring.experiments.report.tables import Cell, Column, Table
from sparring.recipes.run import Run
from sparring.recipes.setup import parse
from sparring.training.step import contrast

CACHES = (0.5, 1.0, 2.0, 4.0)  # times the batch
LAMS = (0.0, 0.2, 0.5, 0.8, 1.0)
DRAWN = (64, 32, 16, 8, 4, 2, 1)  # the batch divided by these
CHARTED = ("NDCG@10", "RECALL@10")


def _batch(asked: Mapping[str, object]) -> int:
    return int(parse("batch_size", asked.get("batch_size", 2048), int))


def cache_methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    bir, xir = in_batch(given, "BIR", "XIR")
    size = _batch(asked)
    kept: dict[str, object] = {**xir.settings, "n": max(size // 2, 1)}
    return [
        bir,
        *(Method(_cache(factor), "xir", {**kept, "cache_size": max(int(factor * size), 1)}) for factor in CACHES),
    ]


def _cache(factor: float) -> str:
    return f"XIR, cache {factor:g}x"


def lam_methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    (xir,) = in_batch(given, "XIR")
    return [Method(_lam(lam), "xir", {**xir.settings, "lam": lam}) for lam in LAMS]


def _lam(lam: float) -> str:
    return f"lambda {lam:g}"


def drawn_methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    pop, bir = in_batch(given, "SSL-Pop", "BIR")
    drawn: dict[str, object] = {**bir.settings, "draw": "multinomial"}
    return [pop, *(Method(_drawn(part), "bir", {**drawn, "n": max(_batch(asked) // part, 1)}) for part in DRAWN)]


def _drawn(part: int) -> str:
    return "BIR, B" if part == 1 else f"BIR, B/{part}"


def gradient_time(run: Run, parts: Split, device: str) -> dict[str, Any]:
    """Milliseconds of the backward pass of one batch, on a trained model: the mean of 20 after 3 to warm up."""
    from sparring.core.devices import pick_device

    where = pick_device(device)
    run.modules().to(where)
    queries, items = (column.long().to(where) for column in parts.train.pairs())
    generator = torch.Generator(where).manual_seed(run.setup.seed)
    batches = RandomBatches(len(parts.train), run.setup.batches.batch_size, run.setup.seed)
    rows = itertools.chain.from_iterable(batches.epoch(epoch) for epoch in itertools.count())
    times = []
    for index in itertools.islice(rows, 23):
        at = index.to(where)
        losses, _, _ = contrast(run, queries[at], items[at], generator)
        loss = losses.mean()
        times.append(_timed(loss.backward, where))
        run.model.zero_grad(set_to_none=True)
    return {"gradient_ms": 1000 * sum(times[3:]) / len(times[3:])}


def _timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _by_seed(plan: Plan, given: Given, method: Method, metric: str) -> dict[int, float]:
    folders = plan.folders(given, method)
    return {
        int(folder.name): float(read_json(folder / "result.json")["test"]["metrics"][our_key(metric)])
        for folder in folders
    }


def _relative(values: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """Improvement over a baseline on the same split, seed by seed."""
    return [values[seed] / base[seed] - 1 for seed in values if base.get(seed)]


def sweep_rows(plan: Plan, baseline: str = "") -> list[Row]:
    """One row per data set, metric and method: its value and, where there is a baseline, its relative improvement over it."""
    rows: list[Row] = []
    for given in plan.data:
        for metric in plan.measured(given, CHARTED):
            found = {method.name: _by_seed(plan, given, method, metric) for method in plan.methods[given.name]}
            for method in plan.methods[given.name]:
                row: Row = {"data": given.shown, "metric": metric, "method": method.name}
                row |= beside(
                    list(found[method.name].values()),
                    None,
                    plan.error(given, method),
                    CHART if given.known_as else UNPUBLISHED,
                )
                if baseline:
                    row |= mean_cells(
                        "over", _relative(found[method.name], found[baseline]) if method.name != baseline else []
                    )
                rows.append(row)
    return rows


def columns(*more: Column) -> tuple[Column, ...]:
    return (
        *named("data", "metric", "method"),
        Column("ours", "{mean:.4f}[[ ± {std:.5f}]]"),
        *more,
        *named("verdict"),
        Column("seeds", "{seeds}"),
    )


def over(baseline: str) -> Column:
    return Column(f"over {baseline}", "{over:+.2%}[[ ± {over_std:.2%}]]")


def _page(
    plan: Plan, rows: list[Row], shown: tuple[Column, ...], found: Sequence[str], drawn: Mapping[str, Sequence[Any]]
) -> Results:
    sections = []
    for given in plan.data:
        some = [row for row in rows if row["data"] == given.shown]
        sheet = Sheet(Table(tuple(column for column in shown if column.title != "data"), some), "", TONES)
        sections.append(Section(given.shown, (sheet, Figures(drawn.get(given.name, ())))))
    absent = absent_charts(plan)
    if absent:
        sections.append(
            Section("Published as a chart, not run here", (Sheet(Table(named("data", "verdict"), absent)),))
        )
    return Results(Table(shown, [*rows, *absent], plan.caption), [*found, *settings_said(plan)], sections)


def _points(
    rows: Sequence[Mapping[str, Cell]], plan: Plan, given: Given, places: Mapping[str, float], baseline: str
) -> dict[str, Any]:
    """Metric -> place on the axis -> values over seeds; relative to a baseline, in percent, where one is named."""
    series: dict[str, dict[float, list[float]]] = {}
    methods = {method.name: method for method in plan.methods[given.name]}
    for metric in dict.fromkeys(str(row["metric"]) for row in rows if row["data"] == given.shown):
        base = _by_seed(plan, given, methods[baseline], metric) if baseline else {}
        for name, place in places.items():
            values = _by_seed(plan, given, methods[name], metric)
            points = [100 * value for value in _relative(values, base)] if baseline else list(values.values())
            if points:
                series.setdefault(metric, {})[place] = points
    return series


def _sweep(
    plan: Plan, places: Mapping[str, float], baseline: str, x: str, y: str, log2: bool, found: Callable[..., list[str]]
) -> Results:
    rows = sweep_rows(plan, baseline)
    drawn = {}
    for given in plan.data:
        series = _points(rows, plan, given, places, baseline)
        if series:
            figure = drawing.lines(series, x, y, log2=log2, zero=bool(baseline))
            words = f"{given.shown}: {y} by {x}, the mean over seeds with one deviation."
            drawn[given.name] = [
                figures.save(figure, plan.out / "figures", f"{given.name}-{plan.experiment.name}", words)
            ]
    return _page(plan, rows, columns(*([over(baseline)] if baseline else [])), found(plan, rows), drawn)


def _best(plan: Plan, rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    said = []
    for given in plan.data:
        some = [
            row
            for row in rows
            if row["data"] == given.shown and row["metric"] == CHARTED[0] and row["mean"] is not None
        ]
        if some:
            top = max(some, key=lambda row: float(row["mean"] or 0))
            said.append(f"{given.shown}: {top['method']} has the highest NDCG@10, {top['mean']:.4f}.")
    return said


def _best_lam(plan: Plan, rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    printed = {
        data: figure.value
        for (data, metric, method), figure in XIR_TABLE_2.items()
        if (metric, method) == (CHARTED[0], "XIR")
    }
    names = [given.known_as for given in plan.data if given.known_as]
    return _best(plan, rows) + [
        f"{name}: table 2 prints {printed[name]:.4f} for XIR, and not its lambda." for name in names
    ]


def cache_results(plan: Plan) -> Results:
    places = {_cache(factor): factor for factor in CACHES}
    return _sweep(plan, places, "BIR", "cache size / batch size", "improvement over BIR, %", True, _best)


def lam_results(plan: Plan) -> Results:
    return _sweep(plan, {_lam(lam): lam for lam in LAMS}, "", "lambda", "test quality", False, _best_lam)


def drawn_results(plan: Plan) -> Results:
    """Quality over SSL-Pop, and the time of the gradient as a ratio to it."""
    rows = sweep_rows(plan, "SSL-Pop")
    drawn: dict[str, list[Any]] = {}
    places = {_drawn(part): 1 / part for part in DRAWN}
    found = []
    for given in plan.data:
        times = {method.name: _times(plan, given, method) for method in plan.methods[given.name]}
        ratios = {name: _relative(each, times["SSL-Pop"]) for name, each in times.items()}
        for row in rows:
            if row["data"] == given.shown:
                ms = beside(list(times[str(row["method"])].values()), None)
                row |= {
                    "gradient_ms": ms["mean"],
                    **mean_cells("gradient_ratio", [1 + value for value in ratios[str(row["method"])]]),
                }
        x = "|R_u| / batch size"
        quality = _points(rows, plan, given, places, "SSL-Pop")
        speed = {
            "gradient": {place: [1 + value for value in ratios[name]] for name, place in places.items() if ratios[name]}
        }
        folder, shown = plan.out / "figures", []
        if quality:
            made = drawing.lines(quality, x, "improvement over SSL-Pop, %", log2=True, zero=True)
            words = f"{given.shown}: improvement of BIR over SSL-Pop by the number of items drawn for each query."
            shown.append(figures.save(made, folder, f"{given.name}-quality", words))
        if speed["gradient"]:
            made = drawing.lines(speed, x, "time / SSL-Pop", log2=True)
            words = f"{given.shown}: time of the backward pass as a ratio to that of SSL-Pop."
            shown.append(figures.save(made, folder, f"{given.name}-gradient", words))
        drawn[given.name] = shown
        found += _enough(given, rows)
    more = (
        over("SSL-Pop"),
        Column("gradient, ms", "{gradient_ms:.2f}"),
        Column("time / SSL-Pop", "{gradient_ratio:.2f}"),
    )
    return _page(plan, rows, columns(*more), found, drawn)


def _times(plan: Plan, given: Given, method: Method) -> dict[int, float]:
    paths = [folder / "after.json" for folder in plan.folders(given, method)]
    return {int(path.parent.name): float(read_json(path)["gradient_ms"]) for path in paths if path.is_file()}


def _enough(given: Given, rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    """The fewest items with which BIR is at least as good as SSL-Pop: the paper says about B/64."""
    of = {str(row["method"]): row["over"] for row in rows if row["data"] == given.shown and row["metric"] == CHARTED[0]}
    first = next(
        (_drawn(part) for part in DRAWN if (value := of.get(_drawn(part))) is not None and float(value) >= 0), None
    )
    if all(value is None for value in of.values()):
        return []
    claim = "the paper says that about B/64 is comparable"
    if first is None:
        return [f"{given.shown}: with no number of items is BIR as good as SSL-Pop; {claim}."]
    return [
        f"{given.shown}: the fewest items with which BIR is as good as SSL-Pop (NDCG@10) are those of {first}; {claim}."
    ]


TABLE_5 = Experiment(
    "xir-table5",
    "Effect of the cache size",
    f"{PAPER}, section 4.6 (figure 5)",
    cache_methods,
    cache_results,
    (
        *NOTES,
        CLOSED,
        "Half a batch is drawn from the batch, and as many from the cache whatever its size, as the text says.",
        "The paper shows a chart without figures.",
    ),
    chosen=("cache_size", "n"),
)
TABLE_6 = Experiment(
    "xir-table6",
    "Effect of lambda",
    f"{PAPER}, section 4.7 (figure 6)",
    lam_methods,
    lam_results,
    (*NOTES, CLOSED, "The paper shows a chart without figures."),
    chosen=("lam",),
)
FIGURE_3 = Experiment(
    "xir-figure3",
    "Quality and gradient time by |R_u|, the items drawn again for each query",
    f"{PAPER}, section 4.4, figure 3",
    drawn_methods,
    drawn_results,
    (
        *NOTES,
        "BIR draws here, as the paper does: in the closed form |R_u| is no more than a weight. The paper shows a chart without figures.",
        "The time is that of the backward pass alone, of trained models, one at a time; the release times the same without waiting for the "
        "GPU. Our counts stand in a matrix as wide as the batch, whatever |R_u| is.",
    ),
    chosen=("n", "draw"),
    after=gradient_time,
)
