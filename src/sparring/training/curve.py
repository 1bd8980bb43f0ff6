"""The training curve of a run as a PNG file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.core import files
from sparring.core.figure_style import COLOURS, INK, blank, style, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN_METRICS = 4  # more lines than this are hard to distinguish


def training_curve(
    history: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], title: str = "", select: str = "ndcg@10"
) -> None:
    """Draw the loss and the validation metrics of every epoch, and mark the best epoch by `select`.

    `history` has one mapping per epoch, as metrics.jsonl: `epoch`, `loss`, and validation metrics such as "recall@20".
    Epochs without validation have no point.

        training_curve(fitted.history, "runs/a/curve.png", "xir", select="ndcg@10")
    """
    from matplotlib.ticker import MaxNLocator  # imported late because matplotlib takes half a second

    figure = blank(3.6, 9)
    with style():
        left, right = figure.subplots(1, 2)
        _draw(left, right, history, title, select)
        for axes in figure.axes:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            tidy(axes, "both")
        files.write(Path(path), lambda file: figure.savefig(file, format="png", dpi=120, metadata={"Software": None}))


def _draw(left: Axes, right: Axes, history: Sequence[Mapping[str, Any]], title: str, select: str) -> None:
    epochs, losses = _series(history, "loss")
    left.plot(epochs, losses, color=INK, marker="o" if len(epochs) < 30 else None, markersize=3)
    left.set(xlabel="epoch", ylabel="training loss", title=title)
    for name, colour in zip(metric_names(history, select)[:_SHOWN_METRICS], COLOURS, strict=False):
        epochs, values = _series(history, name)
        (line,) = right.plot(
            epochs, values, color=colour, label=name, marker="o" if len(epochs) < 30 else None, markersize=3
        )
        if name == select and values:
            best = max(range(len(values)), key=values.__getitem__)
            line.set_label(f"{name}, best {values[best]:.4f} in epoch {epochs[best]}")
            right.axvline(epochs[best], color=colour, linestyle=":", linewidth=1)
    right.set(xlabel="epoch", ylabel="validation")
    if right.lines:
        right.legend(fontsize=8, loc="best")


def metric_names(history: Sequence[Mapping[str, Any]], select: str) -> list[str]:
    """The validation metrics of a history in order of appearance, `select` first."""
    names = dict.fromkeys(
        name for row in history for name, value in row.items() if "@" in name and isinstance(value, (int, float))
    )
    return sorted(names, key=lambda name: name != select)


def _series(history: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    rows = [(int(row.get("epoch", i)), float(row[name])) for i, row in enumerate(history) if row.get(name) is not None]
    return [epoch for epoch, _ in rows], [value for _, value in rows]
