"""Exact top k on a CPU: bounds from 8-bit integers, then the scores of the few items that may belong to a list.

`rank` gives the lists of `core.topk.top_k`, and `inner_products` its scores. Both answer None where they do not apply:
no library, a processor without AVX-512 VNNI (for `rank`), another type than float32, or another device than a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparring.kernels.native.library import function, plain
from sparring.kernels.native.vectors import fits

_PANEL = 16  # items
_WIDEST = 1024  # dimensions whose sums a float32 holds exactly
_MOST = (1 << 31) - 64  # items


class Packed(NamedTuple):
    """Item vectors as 8-bit integers, sorted by norm, the largest first; a quarter of their memory."""

    integers: Tensor  # (panels, D / 4, 16, 4) uint8
    floats: Tensor  # (4, 16 panels): scale, size, error and norm of each item
    order: Tensor  # (N,) int32
    largest: float  # norm


class Best(NamedTuple):
    """The k best items of each query, ordered by score and then id; -inf and -1 if there are fewer."""

    scores: Tensor  # (B, k)
    ids: Tensor  # (B, k) int64
    sure: Tensor  # (B,) bool: False where numbers are too large or small, and the list is missing


def pack(items: Tensor) -> Packed | None:
    """Prepare item vectors (N, D), all finite, for `rank`."""
    n, d = items.shape
    if not fits(items) or not 0 < n < _MOST or not 0 < d <= _WIDEST:
        return None
    ranks, measure, kernel = function("ranks", ""), function("norms", "pllp"), function("rank_pack", "ppllldppppp")
    if ranks is None or measure is None or kernel is None or not ranks():
        return None
    norms = torch.empty(n, dtype=torch.float64)
    measure(items.data_ptr(), n, d, norms.data_ptr())
    order = torch.argsort(norms, descending=True, stable=True).int()
    largest = float(norms[order[0].long()])
    panels = -(-n // (2 * _PANEL)) * 2  # the kernel takes two at a time
    integers = torch.empty(panels, -(-d // 4), _PANEL, 4, dtype=torch.uint8)
    floats = torch.empty(4, panels * _PANEL)
    pointers = [row.data_ptr() for row in floats]
    kernel(items.data_ptr(), order.data_ptr(), n, d, panels, largest, integers.data_ptr(), *pointers)
    return Packed(integers, floats, order, largest)


def rank(
    q: Tensor, items: Tensor, packed: Packed, k: int, start: Tensor | None, seen: Tensor | None, who: Tensor | None
) -> Best | None:
    """The k largest inner products of queries (B, D) with items, without seen[start[who] : start[who + 1]]."""
    kernel = function("rank", "ppllllppppppldpppppp")
    if kernel is None or not fits(q, items):
        return None
    if len(packed.order) != len(items) or packed.integers.shape[1] != -(-q.shape[1] // 4):
        raise ValueError(f"items of shape {tuple(items.shape)} are not those that were packed")
    lists: tuple[int | None, ...] = (None, None, None)
    if start is not None and seen is not None and who is not None:
        kept = start.long().contiguous(), seen.int().contiguous(), who.long().contiguous()
        lists = tuple(x.data_ptr() for x in kept)
    scores, ids = q.new_empty(len(q), k), torch.empty(len(q), k, dtype=torch.int64)
    sure = torch.empty(len(q), dtype=torch.bool)
    pointers = [packed.integers.data_ptr(), *(row.data_ptr() for row in packed.floats), packed.order.data_ptr()]
    out = scores.data_ptr(), ids.data_ptr(), sure.data_ptr()
    code = kernel(
        q.data_ptr(),
        items.data_ptr(),
        len(q),
        *items.shape,
        k,
        *pointers,
        len(packed.integers),
        packed.largest,
        *lists,
        *out,
    )
    if code:
        raise IndexError(f"a seen item is outside the {len(items)} items")
    return Best(scores, ids, sure)


def inner_products(q: Tensor, items: Tensor, ids: Tensor) -> Tensor | None:
    """(B, C): the inner products of queries (B, D) with items[ids], summed in float64 and rounded once."""
    kernel = function("inner_products", "ppppllll")
    shapes = q.shape[1] == items.shape[1] and len(q) == len(ids)
    if kernel is None or not shapes or not fits(q, items) or not plain(ids):
        return None
    ids = ids.long().contiguous()
    out = q.new_empty(ids.shape)
    if kernel(q.data_ptr(), items.data_ptr(), ids.data_ptr(), out.data_ptr(), *ids.shape, *items.shape):
        raise IndexError(f"an id is outside the {len(items)} items")
    return out
