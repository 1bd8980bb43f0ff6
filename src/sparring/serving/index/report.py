"""The report of an index tuning: a table, a figure of recall against speed, and a page."""

from __future__ import annotations

from pathlib import Path

from sparring.core.figure_style import COLOURS, INK, MARKERS, blank, by_decades, legend, style, tidy
from sparring.core.manifest import write_manifest
from sparring.experiments.report import figures
from sparring.experiments.report.figures import RenderedFigure
from sparring.experiments.report.html import Facts, Figures, Page, Points, Section, Sheet
from sparring.experiments.report.tables import Cell, Column, Table
from sparring.serving.index.faiss_backends import KINDS
from sparring.serving.index.recall_tuning import Point, Tuned

_COLUMNS = (
    Column("kind", "{kind}", text=True),
    Column("effort", "{setting}", text=True),
    Column("recall", "{recall:.4f}"),
    Column("queries/s", "{speed:,.0f}"),
    Column("x exact", "{times:.1f}"),
    Column("MB", "{megabytes:,.1f}"),
    Column("verdict", "{verdict}", text=True),
)


def table(tuned: Tuned, target: float, best_only: bool = False) -> Table:
    """All measured points by kind and effort; with `best_only` the fastest sufficient one of each kind, or its best."""
    order = sorted(
        tuned.points, key=lambda point: (KINDS.index(point.kind), point.memory, point.effort.refine, point.effort.width)
    )
    points = _best(tuned.points, target, tuned.chosen) if best_only else order
    exact = next((point.speed for point in tuned.points if point.kind == "exact"), None)
    rows: list[dict[str, Cell]] = []
    for point in points:
        verdict = "chosen" if point == tuned.chosen else "" if point.recall >= target else "below the target"
        times = None if exact is None else point.speed / exact
        row: dict[str, Cell] = {
            "kind": point.kind,
            "setting": point.setting,
            "recall": point.recall,
            "speed": point.speed,
            "times": times,
        }
        rows.append({**row, "megabytes": point.memory / 1e6, "verdict": verdict})
    return Table(_COLUMNS, rows)


def _best(points: tuple[Point, ...], target: float, chosen: Point) -> list[Point]:
    best = []
    for kind in KINDS:
        own = [point for point in points if point.kind == kind]
        good = [point for point in own if point.recall >= target]
        if chosen in own:
            best.append(chosen)
        elif own:
            best.append(max(good, key=lambda point: point.speed) if good else max(own, key=lambda point: point.recall))
    return best


def draw(tuned: Tuned, target: float, folder: Path, k: int) -> RenderedFigure:
    """Recall against queries per second, one line per kind, the chosen point ringed."""

    figure = blank(3.8)
    with style():
        axes = figure.subplots()
        for at, kind in enumerate(KINDS):
            for refine in sorted({point.effort.refine for point in tuned.points if point.kind == kind}):
                own = [point for point in tuned.points if point.kind == kind and point.effort.refine == refine]
                own.sort(key=lambda point: point.recall)
                label = kind if refine == 1 else f"{kind}, {refine:g} k refined"
                line = "-" if refine in (1.0, 2.0) else "--"
                colour = COLOURS[at % len(COLOURS)]
                recalls, speeds = [point.recall for point in own], [point.speed for point in own]
                axes.plot(
                    recalls, speeds, line, color=colour, marker=MARKERS[at], markersize=4, linewidth=1.4, label=label
                )
        ring = axes.plot(
            tuned.chosen.recall, tuned.chosen.speed, "o", color=INK, fillstyle="none", markersize=13, label="chosen"
        )[0]
        ring.set(linestyle="none", clip_on=False, zorder=5)
        axes.axvline(target, color=INK, linestyle=":", linewidth=1)
        axes.set_yscale("log")
        by_decades(axes.yaxis)
        axes.set_xlim(max(min(point.recall for point in tuned.points) - 0.01, 1 - 20 * (1 - min(target, 0.995))), 1.003)
        axes.set(xlabel=f"recall@{k} of the exact answer", ylabel="queries per second")
        tidy(axes, "both")
        legend(figure, axes)
    caption = f"Recall@{k} against speed of every measured index; dotted line: the requested recall."
    return figures.save(figure, folder, "recall_speed", caption)


def write(tuned: Tuned, target: float, memory: int | None, k: int, folder: Path, facts: dict[str, str]) -> Path:
    """report.html, the figure, and the table as .md, .csv, .tex and .json; the page's path."""
    drawn = draw(tuned, target, folder, k)
    points = table(tuned, target)
    points.write(folder, "points")
    chosen = tuned.chosen
    asked = f"recall@{k} of at least {target:g}" + ("" if memory is None else f" within {memory / 1e6:,.0f} MB")
    lead = f"Requested: {asked}. Chosen: {describe(chosen)}, recall {tuned.recall:.4f} on held-out queries."
    how = [
        "Half of the sampled queries tuned the effort of each index; the other half confirmed the recall.",
        "Speed: batches of 64 queries, all threads, no filters. Memory: without vectors that are read from disk.",
        *(f"not tried: {line}" for line in tuned.left_out),
    ]
    sections = (
        Section("Recall against speed", (Figures((drawn,)),)),
        Section("Every point", (Sheet(points, tones={"chosen": "good", "below the target": "plain"}),)),
        Section("How it was measured", (Points(how), Facts(facts))),
    )
    path = folder / "report.html"
    Page("Index", lead, sections).write(path)
    write_manifest(folder)
    return path


def describe(point: Point) -> str:
    """One line about a point."""
    setting = f" ({point.setting})" if point.setting else ""
    return f"{point.kind}{setting}, {point.speed:,.0f} queries/s, {point.memory / 1e6:,.1f} MB"
