"""Figures of a reproduction, in the common style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sparring.core.drawing import COLOURS, INK, LINES, MARKERS, blank, legend, style, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sparring.experiments.report.tables import Cell


def ours_and_theirs(rows: Sequence[Mapping[str, Cell]], form: str = ".4f") -> Figure:
    """Bars of ours with one deviation over seeds, diamonds at the published figures; one panel per metric."""
    metrics = list(dict.fromkeys(str(row["metric"]) for row in rows))
    figure = blank(0.6 + sum(0.75 + 0.3 * sum(row["metric"] == metric for row in rows) for metric in metrics))
    with style():
        panels = figure.subplots(len(metrics), 1, squeeze=False)[:, 0]
        for axes, metric in zip(panels, metrics, strict=True):
            shown = [row for row in rows if row["metric"] == metric]
            most = max([float(row[name] or 0) for row in shown for name in ("mean", "published")]) or 1.0
            for y, row in enumerate(shown):
                label = []
                if row["mean"] is not None:
                    axes.barh(y, float(row["mean"]), 0.62, color=COLOURS[0])
                    label.append(format(float(row["mean"]), form))
                if row["std"] is not None:
                    axes.errorbar(
                        float(row["mean"] or 0), y, xerr=float(row["std"]), color=INK, capsize=3, linewidth=1.1
                    )
                if row["published"] is not None:
                    axes.plot(float(row["published"]), y, "D", color=COLOURS[1], markersize=6, markeredgecolor="white")
                    label.append(f"({format(float(row['published']), form)})")
                axes.text(1.42 * most, y, " ".join(label), va="center", ha="right", fontsize=9)
            axes.set_yticks(range(len(shown)), [str(row["method"]) for row in shown])
            axes.set(xlim=(0, 1.42 * most), ylim=(len(shown) - 0.4, -0.6))
            axes.set_title(metric, loc="left", fontsize=11, fontweight="bold")
            tidy(axes, "x")
    return figure


def gains(rows: Sequence[Mapping[str, Cell]], to: str) -> Figure:
    """Ours relative to a reference in percent with intervals, and diamonds at the published gains with their range."""
    metrics = list(dict.fromkeys(str(row["metric"]) for row in rows))
    figure = blank(0.7 + sum(0.85 + 0.3 * sum(row["metric"] == metric for row in rows) for metric in metrics))
    with style():
        panels = figure.subplots(len(metrics), 1, squeeze=False)[:, 0]
        for axes, metric in zip(panels, metrics, strict=True):
            shown = [row for row in rows if row["metric"] == metric]
            for y, row in enumerate(shown):
                for name, shift, colour, marker in (
                    ("over", -0.13, COLOURS[0], "o"),
                    ("published", 0.13, COLOURS[1], "D"),
                ):
                    value, low, high = (row[field] for field in (name, f"{name}_low", f"{name}_high"))
                    if value is not None:
                        axes.plot(
                            100 * float(value), y + shift, marker, color=colour, markersize=6, markeredgecolor="white"
                        )
                    if low is not None and high is not None:
                        axes.plot(
                            [100 * float(low), 100 * float(high)],
                            [y + shift] * 2,
                            color=colour,
                            linewidth=1.4,
                            zorder=0,
                        )
            axes.axvline(0, color=INK, linestyle=":", linewidth=1)
            axes.set_yticks(range(len(shown)), [str(row["method"]) for row in shown])
            axes.set(ylim=(len(shown) - 0.4, -0.6), xlabel=f"{metric} relative to {to}, %")
            tidy(axes, "x")
    return figure


def lines(
    series: Mapping[str, Mapping[float, Sequence[float]]], x: str, y: str, *, log2: bool = False, zero: bool = False
) -> Figure:
    """Lines of means with one deviation: series -> place on the x axis -> values over seeds.

    `log2` scales the x axis by doublings; `zero` draws the line of no difference.
    """
    figure = blank(3.6)
    with style():
        axes = figure.subplots()
        for number, (name, points) in enumerate(series.items()):
            places = sorted(points)
            mean = [float(np.mean(points[place])) for place in places]
            std = [float(np.std(points[place], ddof=1)) if len(points[place]) > 1 else 0.0 for place in places]
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            line = LINES[number // len(COLOURS) % len(LINES)]
            axes.errorbar(
                places,
                mean,
                yerr=std,
                color=colour,
                marker=marker,
                linestyle=line,
                label=name,
                capsize=3,
                linewidth=1.6,
            )
        if log2:
            places = sorted({place for points in series.values() for place in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [f"{place:g}" if place >= 1 else f"1/{1 / place:g}" for place in places])
            axes.minorticks_off()
        if zero:
            axes.axhline(0, color=INK, linestyle=":", linewidth=1)
        axes.set(xlabel=x, ylabel=y)
        tidy(axes, "both")
        if len(series) > 1:
            legend(figure, axes)
    return figure


def shares(series: Mapping[str, Sequence[float]], x: str, y: str) -> Figure:
    """Shares by bin of items, on a logarithmic axis, one line per series; an empty bin has no point."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = blank(3.6)
    with style():
        axes = figure.subplots()
        for number, (name, values) in enumerate(series.items()):
            share = np.array(values, dtype=float)
            places = 100 * (np.arange(len(share)) + 0.5) / len(share)
            axes.plot(
                places,
                np.where(share > 0, share, np.nan),
                LINES[number % len(LINES)],
                color=COLOURS[number % len(COLOURS)],
                label=name,
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel=x, ylabel=y, xlim=(0, 100))
        tidy(axes, "both")
        legend(figure, axes)
    return figure
