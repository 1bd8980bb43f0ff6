"""Propensities: the probability that a relevant item is known to be relevant, estimated from its frequency."""

from __future__ import annotations

import numpy as np

from sparring.core.errors import UserError

# Jain et al., KDD 2016: the constants (A, B) of the literature, by a word in the name of the data set.
_PROPENSITY = {"amazon": (0.6, 2.6), "wikipedia": (0.5, 0.4), "wikititles": (0.5, 0.4)}


def inverse_propensities(counts: np.ndarray, n: int, a: float = 0.55, b: float = 1.5) -> np.ndarray:
    """(N,) inverse propensities of items, from the number of training queries, of n, that each is relevant to.

        w_i = 1 + c (counts_i + b)^-a,   c = (ln n - 1) (b + 1)^a

    The relevance of a rare item is more often unknown, so finding it counts more. The literature takes a = 0.6, b = 2.6
    for products of Amazon, 0.5 and 0.4 for articles of Wikipedia, and 0.55 and 1.5 otherwise.

    Jain et al., Extreme Multi-label Loss Functions for Recommendation, Tagging, Ranking and Other Missing Label
    Applications, KDD 2016, section 4.
    """
    if n < 3 or b < 0:  # with fewer, weights would fall below 1
        raise UserError(f"inverse propensities need at least 3 training queries and b of at least 0, not {n} and {b:g}")
    if b == 0 and not counts.all():
        raise UserError("b = 0 gives items without a training query an infinite weight: choose a larger one")
    weight: np.ndarray = 1 + (np.log(n) - 1) * (b + 1) ** a * (counts + b) ** -a
    return weight


def propensity_constants(name: str) -> tuple[float, float]:
    """The constants (a, b) of the literature for a data set with this name; 0.55 and 1.5 by default.

    >>> propensity_constants("LF-AmazonTitles-131K"), propensity_constants("EURLex-4K")
    ((0.6, 2.6), (0.55, 1.5))
    """
    return next((both for word, both in _PROPENSITY.items() if word in name.lower()), (0.55, 1.5))
