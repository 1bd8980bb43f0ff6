"""The common style of all figures: colours, markers, frame and legend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK = "#20242b"  # stands for the colour of the text around a figure
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5569a", "#b08a00", "#3f9fd8", "#8c564b", "#7a68c4")
BASE = "#868e96"  # the baseline's
MARKERS, LINES = "osD^vPX<", ("-", "--", ":", "-.")
WIDTH = 6.4  # inches


def style() -> AbstractContextManager[Any]:
    """The style in which a figure is drawn and saved.

    Lines take our colours in their order, text stays text in SVG, "$" is literal, ids are deterministic.
    """
    import matplotlib
    from matplotlib.rcsetup import cycler

    settings: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    )
    settings |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "sparring",
        "text.parse_math": False,
        "font.size": 10,
        "legend.frameon": False,
        "axes.prop_cycle": cycler(color=COLOURS),
    }
    return matplotlib.rc_context(settings)


def blank(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, of the common width by default."""
    # imported late because matplotlib takes half a second; not pyplot, which holds global state
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def legend(figure: Figure, axes: Axes) -> None:
    """A legend to the right of the axes."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", fontsize=9)


def tidy(axes: Axes, grid: str) -> None:
    """The common frame; `grid` is "x", "y", "both" or "none"."""
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if grid != "none":
        axes.grid(axis=grid, color="#808080", alpha=0.25, linewidth=0.8)  # type: ignore[arg-type]


def by_decades(axis: Axis) -> None:
    """Labels at 1, 2 and 5 times the powers of ten, so that a short logarithmic axis has some too."""
    for put in (axis.set_major_formatter, axis.set_minor_formatter):
        put(lambda value, _: (f"{value:,.0f}" if value >= 1 else f"{value:g}") if f"{value:e}"[0] in "125" else "")
