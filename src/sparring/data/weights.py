"""The spread of the weights of pairs: said before they count, and refused where it is large and nobody named them."""

from __future__ import annotations

import numpy as np

from sparring.core.errors import UserError
from sparring.data.pairs import CHUNK

SKEW = 100  # the largest weight over the median from which a guessed column has to be named


def spread(weight: np.ndarray) -> str:
    """The smallest, median and largest weight, and the share of the largest 1 % in their sum, as words."""
    low, median, high, top = _figures(weight)
    return f"{low:,g} to {high:,g}, median {median:,g}; the largest 1 % of the pairs have {100 * top:.0f} % of the sum"


def weight_note(weight: np.ndarray, column: str, named: bool, source: str) -> str:
    """A note on the weights of a column; an error where they are skewed and the caller has not named the column.

    A weight multiplies the loss of its pair. A column that happens to be called weight may hold counts or kilograms,
    and a few large ones would then decide the training.
    """
    low, median, high, _ = _figures(weight)
    if not high:
        raise UserError(f"column {column!r} of {source} holds no weight above 0: ignore it", "weight", "'none'")
    if high > SKEW * median and not named:
        large = f"weights up to {high:,g}, {high / median:,.0f} times the median"
        reason = f"column {column!r} of {source} holds {large}, and a weight multiplies the loss of its pair"
        raise UserError(f"{reason}: name it to use it, or ignore it", "weight", f"{column!r} or 'none'")
    if low == high:
        return f"{column} is {low:,g} for every pair, so it does not change the loss"
    return f"{column} multiplies the loss of each pair: {spread(weight)}"


def _figures(weight: np.ndarray) -> tuple[float, float, float, float]:
    """Smallest weight, median of those above 0, largest, and the share of the largest 1 %; of many rows by a sample."""
    sample = np.sort(weight[:: max(1, -(-len(weight) // CHUNK))].astype(np.float64))
    above = sample[sample > 0]
    if not len(above):
        return float(weight.min()), 0.0, float(weight.max()), 0.0
    top = sample[len(sample) - max(1, len(sample) // 100) :].sum() / sample.sum()
    return float(weight.min()), float(np.median(above)), float(weight.max()), float(top)
