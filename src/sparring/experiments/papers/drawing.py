"""Figures of a reproduction, in the common style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sparring.core.figure_style import COLOURS, INK, LINES, MARKERS, blank, legend, style, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sparring.experiments.report.tables import TableRows

FIELDS = ("mean", "std", "published")


def _panels(rows: TableRows, margin: float, height: float) -> tuple[Figure, list[tuple[Axes, str, TableRows]]]:
    """A figure with one panel per metric and one line per method; the panels with their metrics and rows."""
    by_metric = {
        metric: [row for row in rows if row["metric"] == metric]
        for metric in dict.fromkeys(str(row["metric"]) for row in rows)
    }
    figure = blank(margin + sum(height + 0.3 * len(shown) for shown in by_metric.values()))
    panels: list[tuple[Axes, str, TableRows]] = []
    column = figure.subplots(len(by_metric), 1, squeeze=False)[:, 0]
    for axes, (metric, shown) in zip(column, by_metric.items(), strict=True):
        axes.set_yticks(range(len(shown)), [str(row["method"]) for row in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        tidy(axes, "x")
        panels.append((axes, metric, shown))
    return figure, panels


def ours_and_theirs(rows: TableRows, form: str = ".4f") -> Figure:
    """Bars of ours with one deviation over seeds, diamonds at the published figures; one panel per metric."""
    with style():
        figure, panels = _panels(rows, 0.6, 0.75)
        for axes, metric, shown in panels:
            right = 1.42 * (max(float(row[name] or 0) for row in shown for name in ("mean", "published")) or 1.0)
            for y, row in enumerate(shown):
                mean, std, published = (None if row[name] is None else float(row[name] or 0) for name in FIELDS)
                label = []
                if mean is not None:
                    axes.barh(y, mean, 0.62, color=COLOURS[0])
                    label.append(format(mean, form))
                if std is not None:
                    axes.errorbar(mean or 0.0, y, xerr=std, color=INK, capsize=3, linewidth=1.1)
                if published is not None:
                    axes.plot(published, y, "D", color=COLOURS[1], markersize=6, markeredgecolor="white")
                    label.append(f"({format(published, form)})")
                axes.text(right, y, " ".join(label), va="center", ha="right", fontsize=9)
            axes.set_xlim(0, right)
            axes.set_title(metric, loc="left", fontsize=11, fontweight="bold")
    return figure


def gains(rows: TableRows, to: str) -> Figure:
    """Ours relative to a reference in percent with intervals, and diamonds at the published gains with their range."""
    marks = (("over", -0.13, COLOURS[0], "o"), ("published", 0.13, COLOURS[1], "D"))
    with style():
        figure, panels = _panels(rows, 0.7, 0.85)
        for axes, metric, shown in panels:
            for y, row in enumerate(shown):
                for name, shift, colour, marker in marks:
                    value, low, high = (row[field] for field in (name, f"{name}_low", f"{name}_high"))
                    if value is not None:
                        place = 100 * float(value), y + shift
                        axes.plot(*place, marker, color=colour, markersize=6, markeredgecolor="white")
                    if low is not None and high is not None:
                        ends = [100 * float(low), 100 * float(high)]
                        axes.plot(ends, [y + shift] * 2, color=colour, linewidth=1.4, zorder=0)
            axes.axvline(0, color=INK, linestyle=":", linewidth=1)
            axes.set_xlabel(f"{metric} relative to {to}, %")
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
            fmt = f"{marker}{LINES[number // len(COLOURS) % len(LINES)]}"
            axes.errorbar(places, mean, yerr=std, fmt=fmt, color=colour, label=name, capsize=3, linewidth=1.6)
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
            line, colour = LINES[number % len(LINES)], COLOURS[number % len(COLOURS)]
            axes.plot(places, np.where(share > 0, share, np.nan), line, color=colour, label=name)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel=x, ylabel=y, xlim=(0, 100))
        tidy(axes, "both")
        legend(figure, axes)
    return figure
