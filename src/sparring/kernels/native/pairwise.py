"""A pairwise loss over rows of two tables with its row-sparse gradients, in one pass."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparring.kernels.native.library import function, plain

Excluded = Literal["none", "positive", "known"]
_KINDS: tuple[Excluded, ...] = ("none", "positive", "known")
_NAME = "pairwise", "ppppplllllppififpppp"


def available(*tables: Tensor) -> bool:
    """Whether the kernel is there and takes these tables."""
    fits = plain(*tables) and all(t.dtype == torch.float32 and t.is_contiguous() for t in tables)
    return fits and function(*_NAME) is not None


def pairwise(
    queries: Tensor,
    items: Tensor,
    q: Tensor,
    positive: Tensor,
    negative: Tensor,
    scale: Tensor,
    tau: float,
    margin: float | None = None,
    exclude: Excluded = "none",
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (B,), and the gradients of sum_i scale_i loss_i by the rows of `queries` (B, D) and `items` (B + B n, D).

    The mean over the negatives (B, n) of each query of log(1 + exp(s_ij - s_i+)), or with a margin of the hinge
    max(0, margin + s_ij - s_i+); s = q . e / tau. Rows of items are the positives and then the negatives. `known` has
    the offsets (int64) and sorted items (int32) of every query.
    """
    kernel = function(*_NAME)
    assert kernel is not None
    b, n, d = *negative.shape, queries.shape[1]
    losses, by_query, by_item = queries.new_empty(b), queries.new_empty(b, d), queries.new_empty(b + b * n, d)
    start, listed = (0, 0) if known is None else (known[0].data_ptr(), known[1].data_ptr())
    ids = [each.long().contiguous() for each in (q, positive, negative)]
    failed = kernel(
        queries.data_ptr(),
        items.data_ptr(),
        *(each.data_ptr() for each in ids),
        *(b, n, d, len(queries), len(items)),
        *(start, listed, _KINDS.index(exclude)),
        *(1 / tau, margin is not None, margin or 0.0),
        *(scale.data_ptr(), losses.data_ptr(), by_query.data_ptr(), by_item.data_ptr()),
    )
    if failed:
        raise IndexError(f"an id is not a row of its table: {len(queries)} queries, {len(items)} items")
    return losses, by_query, by_item
