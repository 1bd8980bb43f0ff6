"""Figures of a comparison: bars with errors, learning curves, quality against time, popularity of negatives.

A figure takes plain rows, such as those of a table. A recipe keeps its colour, marker and line style in all figures, by
its place in `names`. In a page the ink takes the colour of the text, so a figure reads well on light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparring.core import files
from sparring.core.figure_style import BASE, COLOURS, INK, LINES, MARKERS, blank, legend, style, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sparring.experiments.report.tables import Cell, TableRows

STRATA = {"head": "#08519c", "mid": "#4292c6", "tail": "#a6cdea", "synthetic": "#e6a23c"}


@dataclass(frozen=True)
class RenderedFigure:
    """A figure written as NAME.svg and NAME.png: its caption, and its SVG as markup for a page."""

    name: str
    caption: str
    svg: str


def save(figure: Figure, folder: Path, name: str, caption: str) -> RenderedFigure:
    """Write folder/name.svg and folder/name.png on white; return the figure for a page."""
    out = io.StringIO()
    with style():
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        files.write_text(folder / f"{name}.svg", out.getvalue())
        files.write(
            folder / f"{name}.png",
            lambda path: figure.savefig(path, format="png", dpi=150, metadata={"Software": None}),
        )
    return RenderedFigure(name, caption, inline(out.getvalue(), name))


def inline(svg: str, name: str) -> str:
    """An SVG file of matplotlib for a page: no prolog or background, ink in the colour of the text, unique ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="patch_1">.*?</g>\s*', "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{re.sub(r'[^a-zA-Z0-9-]', '-', name)}-", svg)
    return svg.replace(INK, "currentColor").strip()


def bars(rows: TableRows, names: Sequence[str], baseline: str) -> Figure:
    """Mean and deviation over seeds of every recipe, one panel per metric; grey bar and dotted line: the baseline.

    bars(quality(comparison).rows, comparison.names, comparison.baseline_name)
    """
    metrics = list(dict.fromkeys(str(row["metric"]) for row in rows))
    shown = [name for name in names if any(row["recipe"] == name for row in rows)]
    figure = blank(0.3 + len(metrics) * (0.75 + 0.3 * len(shown)))
    with style():
        figure.set_layout_engine("constrained", h_pad=0.1)
        panels = figure.subplots(len(metrics), 1, squeeze=False)[:, 0]
        for axes, metric in zip(panels, metrics, strict=True):
            _bars_of(axes, {str(row["recipe"]): row for row in rows if row["metric"] == metric}, shown, names, baseline)
            axes.set_title(metric, loc="left", fontsize=11, fontweight="bold")
    return figure


def _bars_of(
    axes: Axes, by_name: Mapping[str, Mapping[str, Cell]], shown: list[str], names: Sequence[str], baseline: str
) -> None:
    most = max((_number(row["mean"]) + _number(row["std"]) for row in by_name.values()), default=0.0) or 1.0
    right = 1.42 * most  # leaves room for the numbers beside the longest bar
    for y, name in enumerate(shown):
        if name not in by_name:
            continue
        mean, std = _number(by_name[name]["mean"]), by_name[name]["std"]
        axes.barh(y, mean, 0.62, color=_colour(name, names, baseline))
        if std is not None:
            axes.errorbar(mean, y, xerr=_number(std), color=INK, capsize=3, linewidth=1.1)
        label = f"{mean:.4f}" + (f" ± {_number(std):.4f}" if std is not None else "")
        axes.text(right, y, label, va="center", ha="right", fontsize=9)
    if baseline in by_name:
        axes.axvline(_number(by_name[baseline]["mean"]), color=INK, linestyle=":", linewidth=1)
    axes.set_yticks(range(len(shown)), [f"{name} (baseline)" if name == baseline else name for name in shown])
    axes.set(xlim=(0, right), ylim=(len(shown) - 0.4, -0.6))
    tidy(axes, "x")


def curves(
    histories: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    metric: str,
    names: Sequence[str],
    baseline: str,
    label: str = "",
) -> Figure:
    """A metric by epoch: the mean over seeds with a band of one deviation, up to the last epoch of all seeds.

    curves({"uns": [history of seed 0, history of seed 1]}, "ndcg@10", ("uns",), "uns")
    """
    from matplotlib.ticker import MaxNLocator

    figure = blank(max(3.6, 0.8 + 0.2 * len(names)))
    with style():
        axes = figure.subplots()
        for name in names:
            values = [
                {int(row["epoch"]): float(row[metric]) for row in history if metric in row}
                for history in histories.get(name, ())
            ]
            epochs = sorted(set.intersection(*map(set, values))) if values else []
            if not epochs:
                continue
            over = np.array([[value[epoch] for epoch in epochs] for value in values])
            mean, std, colour = (
                over.mean(0),
                over.std(0, ddof=1) if len(over) > 1 else 0.0,
                _colour(name, names, baseline),
            )
            line = LINES[names.index(name) // len(COLOURS) % len(LINES)]
            marker = _marker(name, names) if len(epochs) < 16 else None
            shown = f"{name} (baseline)" if name == baseline else name
            axes.plot(epochs, mean, line, color=colour, label=shown, linewidth=1.7, marker=marker, markersize=3.5)
            axes.fill_between(epochs, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel="epoch", ylabel=label or f"validation {metric}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes, "both")
        legend(figure, axes)
    return figure


def quality_by_time(rows: TableRows, names: Sequence[str], baseline: str, metric: str) -> Figure:
    """Each recipe's quality (mean and deviation) against its training time; rows have recipe, mean, std and seconds.

    The time axis is logarithmic if the slowest recipe takes more than eight times as long as the fastest.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = blank(max(3.6, 0.8 + 0.2 * len(rows)))
    with style():
        axes = figure.subplots()
        for row in rows:
            name = str(row["recipe"])
            label = f"{name} (baseline)" if name == baseline else name
            axes.errorbar(
                _number(row["seconds"]),
                _number(row["mean"]),
                yerr=_number(row["std"]),
                color=_colour(name, names, baseline),
                marker=_marker(name, names),
                markersize=8,
                capsize=3,
                linestyle="none",
                label=label,
            )
        times = [_number(row["seconds"]) for row in rows]
        if min(times) > 0 and max(times) > 8 * min(times):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_xlim(0, 1.08 * max(times) or 1)
        axes.margins(y=0.15)
        axes.set(xlabel="seconds of training", ylabel=f"test {metric}")
        tidy(axes, "both")
        legend(figure, axes)
    return figure


def popularity(rows: TableRows, names: Sequence[str], baseline: str) -> Figure:
    """Shares of head, mid and tail items and of synthetic vectors among each recipe's negatives, as stacked bars."""
    by_name = {str(row["recipe"]): row for row in rows}
    shown = [name for name in names if name in by_name]
    synthetic = any(by_name[name]["synthetic"] for name in shown)
    figure = blank(1.15 + 0.4 * len(shown))
    with style():
        axes = figure.subplots()
        left = np.zeros(len(shown))
        for part, colour in STRATA.items():
            if part == "synthetic" and not synthetic:
                continue
            share = np.array([_share(by_name[name], part) for name in shown])
            axes.barh(range(len(shown)), share, 0.66, left=left, color=colour, label=part)
            for y, (start, width) in enumerate(zip(left, share, strict=True)):
                if width >= 0.06:
                    tone = "#ffffff" if part in ("head", "mid") else "#111111"
                    axes.text(start + width / 2, y, f"{width:.0%}", ha="center", va="center", color=tone, fontsize=9)
            left += share
        axes.set_yticks(range(len(shown)), [f"{name} (baseline)" if name == baseline else name for name in shown])
        axes.set(xlim=(0, 1), ylim=(len(shown) - 0.4, -0.6))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        tidy(axes, "none")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(STRATA), fontsize=9)
    return figure


def average_ranks(ranks: Mapping[str, float], distance: float | None) -> Figure:
    """A critical-difference diagram: average ranks, the best first; bars join methods that are not shown to differ.

    average_ranks({"xir": 1.8, "uns": 2.1, "ssl": 2.9}, distance=0.9)
    """
    ordered = sorted(ranks.items(), key=lambda pair: pair[1])
    groups = _groups([rank for _, rank in ordered], distance)
    figure = blank(0.9 + 0.26 * len(ordered) + 0.16 * len(groups))
    with style():
        axes = figure.subplots()
        for y, (_, rank) in enumerate(ordered):
            axes.plot([1, rank], [y, y], color="#808080", alpha=0.35, linewidth=1)
            axes.plot(rank, y, "o", color=COLOURS[0], markersize=6)
            axes.annotate(f"{rank:.2f}", (rank, y), (7, 0), textcoords="offset points", va="center", fontsize=9)
        for place, (first, last) in enumerate(groups):
            below = len(ordered) + 0.6 * place
            axes.plot(
                [ordered[first][1], ordered[last][1]], [below, below], color=INK, linewidth=3, solid_capstyle="butt"
            )
        axes.set_yticks(range(len(ordered)), [name for name, _ in ordered])
        axes.set(xlim=(0.8, max(ranks.values()) + 0.8), ylim=(len(ordered) + 0.6 * len(groups), -0.8))
        axes.set_xlabel("average rank" + ("" if distance is None else f"; critical difference {distance:.2f}"))
        tidy(axes, "x")
    return figure


def _groups(ranks: Sequence[float], distance: float | None) -> list[tuple[int, int]]:
    """First and last place of each longest run of methods, in order of rank, that lie within the distance."""
    if distance is None:
        return []
    ends = [max(j for j in range(len(ranks)) if ranks[j] - ranks[i] <= distance) for i in range(len(ranks))]
    return [(i, j) for i, j in enumerate(ends) if j > i and (i == 0 or ends[i - 1] < j)]


def _share(row: Mapping[str, Cell], part: str) -> float:
    """A share of all negatives; the strata of a row are shares of real items."""
    synthetic = _number(row["synthetic"])
    return synthetic if part == "synthetic" else _number(row[part]) * (1 - synthetic)


def _colour(name: str, names: Sequence[str], baseline: str) -> str:
    others = [other for other in names if other != baseline]
    return BASE if name == baseline else COLOURS[others.index(name) % len(COLOURS)]


def _marker(name: str, names: Sequence[str]) -> str:
    place = names.index(name)
    return MARKERS[(place + place // len(MARKERS)) % len(MARKERS)]  # a repeated colour has another marker


def _number(value: Cell) -> float:
    return 0.0 if value is None else float(value)
