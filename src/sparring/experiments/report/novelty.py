"""The report of a novelty curve: a figure, a table and a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparring.core.figure_style import COLOURS, INK, MARKERS, blank, style, tidy
from sparring.experiments.novelty import KEPT, NoveltyCurve, largest
from sparring.experiments.report import figures
from sparring.experiments.report.figures import RenderedFigure
from sparring.experiments.report.html import Facts, Figures, Page, Paragraph, Section, Sheet

_READING = (
    "Novelty subtracts the logarithm of an item's popularity, standardised, from its score, in units of the spread of "
    "a query's best scores. Training does not change. Recall of mid and tail items counts test items of those items "
    "only; each of head, mid and tail has a third of the training interactions."
)


def draw(curve: NoveltyCurve, folder: Path) -> RenderedFigure:
    """Three panels by novelty: quality kept, the range of the lists, recall by popularity."""
    rows = curve.table().rows
    at = [float(row["novelty"] or 0) for row in rows]
    first = {name: float(rows[0][name] or 0) or 1.0 for name in ("recall", "ndcg")}
    panels: dict[str, dict[str, list[float]]] = {
        "quality kept": {f"{name}@{curve.k}": [float(row[name] or 0) / first[name] for row in rows] for name in first},
        "lists": {
            "share of head items": [float(row["head_share"] or 0) for row in rows],
            f"coverage@{curve.k}": [float(row["coverage"] or 0) for row in rows],
        },
        f"recall@{curve.k}": {f"{name} items": [float(row[name] or 0) for row in rows] for name in ("mid", "tail")},
    }
    figure = blank(3.2, 9)
    with style():
        for axes, (title, lines) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            for place, (name, values) in enumerate(lines.items()):
                axes.plot(at, values, color=COLOURS[place], marker=MARKERS[place], markersize=4, label=name)
            axes.axvline(curve.largest(), color=INK, linestyle=":", linewidth=1)
            axes.set_ylim(bottom=0)
            axes.set(xlabel="novelty")
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
            axes.legend(fontsize=8, loc="best")
            tidy(axes, "both")
    caption = f"Dotted line: the largest novelty that keeps {KEPT:.0%} of ndcg@{curve.k}."
    return figures.save(figure, folder, "novelty", caption)


def write(curve: NoveltyCurve, folder: Path, facts: Mapping[str, str]) -> Path:
    """report.html, the figure, and the table as .md, .csv, .tex and .json; the page's path."""
    drawn, table = draw(curve, folder), curve.table()
    table.write(folder, "novelty")
    sections = (
        Section("What it costs and buys", (Figures((drawn,)), Sheet(table))),
        Section("How to read it", (Paragraph(_READING), Facts(facts))),
    )
    path = folder / "report.html"
    Page("Novelty", in_short(curve), sections).write(path)
    return path


def in_short(curve: NoveltyCurve) -> str:
    """One sentence: the largest novelty that keeps 95 % of NDCG, and what it buys."""
    rows = curve.table().rows
    first, row = rows[0], largest(rows)
    if row is first:
        return f"Each of these values costs more than {1 - KEPT:.0%} of ndcg@{curve.k}."
    buys = f"coverage {first['coverage']:.4f} to {row['coverage']:.4f}"
    if row["head_share"] is not None:
        buys += f", head items {first['head_share']:.1%} to {row['head_share']:.1%} of lists"
    kept = f"keeps {KEPT:.0%} of ndcg@{curve.k} ({row['kept']:.1%})"
    return f"Novelty {row['novelty']:g} is the largest of these that {kept}: {buys}."
