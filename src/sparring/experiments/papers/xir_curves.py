"""What XIR shows of training: NDCG by epoch (figure 1), and what the cache of XIR holds at its end (figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparring.data.interactions import Split
from sparring.experiments.papers import drawing
from sparring.experiments.papers.cells import (
    CHART,
    TONES,
    UNPUBLISHED,
    Row,
    absent_charts,
    agreement,
    beside,
    named,
    our_key,
    read_json,
)
from sparring.experiments.papers.plan import Experiment, Given, Method, Plan, Results
from sparring.experiments.papers.published import XIR_TABLE_2
from sparring.experiments.papers.xir import CLOSED, NOTES, PAPER, in_batch, settings_said
from sparring.experiments.report import figures
from sparring.experiments.report.comparison import read_history
from sparring.experiments.report.html import Figures, Section, Sheet
from sparring.experiments.report.tables import Column, Table
from sparring.negatives import Cache
from sparring.recipes.run import Run

BINS = 50  # of items by popularity
FIFTHS = ("most popular fifth", "second", "third", "fourth", "least popular fifth")
GROUPS = len(FIFTHS)


def curve_methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    return [Method(each.name, each.recipe, {**each.settings, "eval_every": 5}) for each in in_batch(given)]


def curve_results(plan: Plan) -> Results:
    """NDCG at every measured epoch; of the last one, which table 2 prints, the published figure too."""
    ends: list[Row] = []
    points: list[Row] = []
    sections = []
    for given in plan.data:
        metric = f"NDCG@{min(10, given.data.n_items)}"
        key = f"test_{our_key(metric)}"
        methods = plan.methods[given.name]
        histories = {
            method.name: [read_history(folder) for folder in plan.folders(given, method)] for method in methods
        }
        some = []
        for method in methods:
            curve = _curve(histories[method.name], key)
            points += [
                {"data": given.shown, "metric": metric, "method": method.name, "epoch": epoch, **_short(values)}
                for epoch, values in curve.items()
            ]
            last = curve[max(curve)] if curve else []
            row: Row = {"data": given.shown, "metric": metric, "method": method.name, "epoch": max(curve, default=None)}
            row |= beside(last, XIR_TABLE_2.get((given.known_as, metric, method.name)), plan.error(given, method))
            some.append(row | {"near": _near(curve)})
        ends += some
        drawn = []
        if any(histories.values()):
            made = figures.curves(histories, key, [method.name for method in methods], "", f"test {metric}")
            words = f"{given.shown}: test {metric} by epoch, by the release's formula, the mean over seeds with one deviation."
            drawn = [figures.save(made, plan.out / "figures", f"{given.name}-curve", words)]
        sections.append(Section(given.shown, (Sheet(Table(ENDS[1:], some), "The last epoch", TONES), Figures(drawn))))
    absent = absent_charts(plan)
    if absent:
        sections.append(
            Section("Published as a chart, not run here", (Sheet(Table(named("data", "verdict"), absent)),))
        )
    table = Table(ENDS, [*ends, *absent], plan.caption)
    every = Table(
        (
            *named("data", "metric", "method"),
            Column("epoch", "{epoch}"),
            Column("ours", "{mean:.4f}[[ ± {std:.5f}]]"),
            Column("seeds", "{seeds}"),
        ),
        points,
        "Test NDCG by epoch, by the release's formula",
    )
    return Results(table, [*agreement(ends), *settings_said(plan)], sections, {"curve": every})


ENDS = (
    *named("data", "metric", "method"),
    Column("epoch", "{epoch}"),
    Column("ours", "{mean:.4f}[[ ± {std:.5f}]]"),
    Column("published (table 2)", "{published:.4f}[[ ± {published_std:.5f}]]"),
    Column("difference", "{difference:+.1%}"),
    *named("verdict"),
    Column("90 % of it by epoch", "{near}"),
    Column("seeds", "{seeds}"),
)


def _curve(histories: Sequence[Sequence[Mapping[str, Any]]], key: str) -> dict[int, list[float]]:
    """Epoch -> values over seeds, at the epochs that all of them measured."""
    each = [{int(row["epoch"]): float(row[key]) for row in history if key in row} for history in histories]
    epochs = sorted(set.intersection(*map(set, each))) if each else []
    return {epoch: [values[epoch] for values in each] for epoch in epochs}


def _near(curve: Mapping[int, Sequence[float]]) -> int | None:
    """The first measured epoch at which the mean is 90 % of the last."""
    means = {epoch: float(np.mean(values)) for epoch, values in curve.items()}
    return next((epoch for epoch, mean in means.items() if mean >= 0.9 * means[max(means)]), None)


def _short(values: Sequence[float]) -> Row:
    row = beside(values, None)
    return {name: row[name] for name in ("mean", "std", "seeds")}


def cache_methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    return in_batch(given, "XIR")


def occurrence(run: Run, parts: Split, device: str) -> dict[str, Any]:
    """Shares of the occurrence vector and of the interactions by item, items from the most popular, in equal bins and in fifths."""
    (cache,) = [module for module in run.modules().modules() if isinstance(module, Cache)]
    counts = parts.train.counts()
    order = np.argsort(-counts, kind="stable")
    found: dict[str, Any] = {"distinct": len(cache.ids.unique())}
    for name, mass in (("occurrence", cache.occurrences.cpu().numpy()), ("interactions", counts.astype(float))):
        share = (mass / max(mass.sum(), 1e-300))[order]
        found[name] = [float(part.sum()) for part in np.array_split(share, min(BINS, len(share)))]
        found[f"{name}_fifths"] = [float(part.sum()) for part in np.array_split(share, GROUPS)]
    return found


def cache_results(plan: Plan) -> Results:
    """How often items of each popularity were drawn, against how often people took them."""
    rows: list[Row] = []
    sections, said = [], []
    for given in plan.data:
        (method,) = plan.methods[given.name]
        found = [read_json(folder / "measured.json") for folder in plan.folders(given, method)]
        some = [_fifth_row(plan, given, method, found, at) for at in range(GROUPS)]
        rows += some
        drawn = []
        if found:
            mean = {
                name: np.mean([each[name] for each in found], axis=0).tolist()
                for name in ("occurrence", "interactions")
            }
            made = drawing.shares(
                mean, "items by popularity, % (most popular first)", f"share of each {100 // BINS} % of items"
            )
            words = f"{given.shown}: share of the occurrence vector of XIR after training, and of the interactions, by popularity of items."
            drawn = [figures.save(made, plan.out / "figures", f"{given.name}-occurrence", words)]
            kept = float(np.mean([each["distinct"] for each in found]))
            said.append(
                f"{given.shown}: the most popular fifth of the items has {some[0]['interactions']:.0%} of the interactions and "
                f"{some[0]['mean']:.0%} of the occurrences; the last cache holds {kept:,.0f} distinct items."
            )
        sections.append(Section(given.shown, (Sheet(Table(SHARES[1:], some), "", TONES), Figures(drawn))))
    absent = [row for row in absent_charts(plan) if row["data"] == "Gowalla"]
    if absent:
        sections.append(
            Section("Published as a chart, not run here", (Sheet(Table(named("data", "verdict"), absent)),))
        )
    return Results(Table(SHARES, [*rows, *absent], plan.caption), [*said, *settings_said(plan)], sections)


def _fifth_row(plan: Plan, given: Given, method: Method, found: Sequence[Mapping[str, Any]], at: int) -> Row:
    row: Row = {"data": given.shown, "metric": "share of occurrences", "method": FIFTHS[at]}
    published = CHART if given.known_as == "Gowalla" else UNPUBLISHED
    row |= beside([each["occurrence_fifths"][at] for each in found], None, plan.error(given, method), published)
    taken = beside([each["interactions_fifths"][at] for each in found], None)["mean"]
    return row | {
        "interactions": taken,
        "ratio": float(row["mean"]) / float(taken) if row["mean"] is not None and taken else None,
    }


SHARES = (
    *named("data"),
    Column("items", "{method}", text=True),
    Column("share of occurrences", "{mean:.2%}[[ ± {std:.2%}]]"),
    Column("share of interactions", "{interactions:.2%}"),
    Column("ratio", "{ratio:.2f}"),
    *named("verdict"),
    Column("seeds", "{seeds}"),
)


FIGURE_1 = Experiment(
    "xir-figure1",
    "NDCG@10 by epoch",
    f"{PAPER}, figure 1",
    curve_methods,
    curve_results,
    (
        *NOTES,
        CLOSED,
        "The paper draws Amazon and Tmall. The test part is measured every 5 epochs (--set eval_every=N), as in the release.",
    ),
    curve=True,
)
FIGURE_2 = Experiment(
    "xir-figure2",
    "Occurrence of items in the cache by popularity",
    f"{PAPER}, figure 2",
    cache_methods,
    cache_results,
    (
        *NOTES,
        CLOSED,
        "The paper draws Gowalla. The cache is the release's: the next one is drawn from the items of the last step, and occurrences begin "
        "at 1; --set form=paper trains algorithm 2 as printed.",
    ),
    measure=occurrence,
)
