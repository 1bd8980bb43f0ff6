"""Weighted sums of items over padded bags in Triton: no vector per place of a bag is written, in either pass.

`bags` sorts the places of all bags by item and cuts the list into slots: runs of one item, of at most PIECE places. A
slot is encoded once, so x has about one row per distinct item. `pooled` reads x for each bag in the forward pass; in
the backward pass one program sums the gradient of a slot in the order of its places. A popular item has several slots,
so no program is long. The number of slots depends on shapes alone, sums have a fixed order: nothing waits for the
device, and repeated runs agree bitwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PIECE = 64  # places of a slot, at most
_BLOCK = 1024  # places or slots of a program that only counts or copies


class Bags(NamedTuple):
    """Places of bags (B, L), and the slots (M,) that they read; spare slots repeat items of others."""

    rows: Tensor  # (M,) the item of each slot
    slot: Tensor  # (B, L) the slot of each place, -1 where a bag has no item
    age: Tensor  # (B, L) items of the bag after this place
    length: Tensor  # (B,) items of each bag
    order: Tensor  # (B L,) places by slot
    begin: Tensor  # (M,) of each slot within `order`
    end: Tensor  # (M,)


@triton.jit
def _keys(PLACES, ITEMS, KEY, AGE, COUNT, L, n, last, BL: tl.constexpr, INDIRECT: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    left = 0
    for begin in range(0, L, BL):
        col = begin + tl.arange(0, BL)
        left += tl.sum((tl.load(PLACES + row * L + col, mask=col < L, other=-1) >= 0).to(tl.int32), 0)
    tl.store(COUNT + row, tl.minimum(left, last))
    for begin in range(0, L, BL):
        col = begin + tl.arange(0, BL)
        place = tl.load(PLACES + row * L + col, mask=col < L, other=-1)
        present = (place >= 0).to(tl.int32)
        age = left - tl.cumsum(present, 0)
        left -= tl.sum(present, 0)
        kept = (place >= 0) & (age < last)
        if INDIRECT:
            item = tl.load(ITEMS + place, mask=kept, other=0).to(tl.int32)
        else:
            item = place.to(tl.int32)
        tl.store(KEY + row * L + col, tl.where(kept, item, n).to(KEY.dtype.element_ty), mask=col < L)
        tl.store(AGE + row * L + col, age, mask=col < L)


@triton.jit
def _first(KEY, p, size, n, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The item at sorted places p, n for none, and whether a slot begins there."""
    key = tl.load(KEY + p, mask=p < size, other=n).to(tl.int32)
    before = tl.load(KEY + p - 1, mask=(p > 0) & (p <= size), other=-1).to(tl.int32)
    return key, (key < n) & ((key != before) | (p % PIECE == 0))


@triton.jit
def _counts(KEY, COUNTS, size, n, PIECE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    _, first = _first(KEY, block * BLOCK + tl.arange(0, BLOCK), size, n, PIECE)
    tl.store(COUNTS + block, tl.sum(first.to(tl.int32), 0))


@triton.jit
def _slots(  # type: ignore[no-untyped-def]
    KEY, ORDER, COUNTS, ROWS, SLOT, BEGIN, END, USED, size, n, PIECE: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    earlier = 0
    for begin in range(0, block, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        earlier += tl.sum(tl.load(COUNTS + other, mask=other < block, other=0), 0)
    p = block * BLOCK + tl.arange(0, BLOCK)
    key, first = _first(KEY, p, size, n, PIECE)
    slot = earlier + tl.cumsum(first.to(tl.int32), 0) - 1
    tl.store(ROWS + slot, key.to(tl.int64), mask=first)
    tl.store(BEGIN + slot, p, mask=first)
    after = tl.load(KEY + p + 1, mask=p + 1 < size, other=n).to(tl.int32)
    final = (key < n) & ((key != after) | ((p + 1) % PIECE == 0))
    tl.store(END + slot, p + 1, mask=final)
    place = tl.load(ORDER + p, mask=p < size, other=0)
    tl.store(SLOT + place, tl.where(key < n, slot, -1), mask=p < size)
    if block == tl.num_programs(0) - 1:
        tl.store(USED, earlier + tl.sum(first.to(tl.int32), 0))


@triton.jit
def _spare(ROWS, BEGIN, END, USED, slots, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Give spare slots the items of others in turn: their gradients are 0, and no item gets many more rows of them."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = tl.load(USED)
    spare = (slot >= used) & (slot < slots)
    row = tl.load(ROWS + slot % tl.maximum(used, 1), mask=spare, other=0)
    tl.store(ROWS + slot, tl.where(used > 0, row, 0), mask=spare)
    tl.store(BEGIN + slot, 0, mask=spare)
    tl.store(END + slot, 0, mask=spare)


def bags(places: Tensor, n: int, last: int, items: Tensor | None = None) -> Bags:
    """The last `last` items of each row of `places` (B, L): ids below n, or places in `items`; -1 where there is none.

    B and L are at least 1. There are min(B L, n + B L / PIECE) slots, rounded up: enough for any items.
    """
    b, length = places.shape
    size, device = b * length, places.device
    places, slots, blocks = places.contiguous(), min(size, n + triton.cdiv(size, PIECE)), triton.cdiv(size, _BLOCK)
    # the fewer bits a key has, the fewer passes the sort takes
    key = torch.empty(size, dtype=torch.int16 if n < 1 << 15 else torch.int32, device=device)
    slot, age = torch.empty(2, b, length, dtype=torch.int32, device=device).unbind()
    count = torch.empty(b, dtype=torch.int32, device=device)
    rows = torch.empty(slots, dtype=torch.int64, device=device)
    begin, end = torch.empty(2, slots, dtype=torch.int32, device=device).unbind()
    counts = torch.empty(blocks + 1, dtype=torch.int32, device=device)
    used = counts[blocks:]
    wide = min(triton.next_power_of_2(length), _BLOCK)
    _keys[(b,)](
        places, places if items is None else items, key, age, count, length, n, last, wide, items is not None,
        num_warps=max(1, min(4, wide // 64)),
    )  # fmt: skip
    key, order = torch.sort(key, stable=True)
    _counts[(blocks,)](key, counts, size, n, PIECE, _BLOCK, num_warps=4)
    _slots[(blocks,)](key, order, counts, rows, slot, begin, end, used, size, n, PIECE, _BLOCK, num_warps=4)
    _spare[(triton.cdiv(slots, _BLOCK),)](rows, begin, end, used, slots, _BLOCK, num_warps=4)
    return Bags(rows, slot, age, count, order, begin, end)


@triton.jit
def _pool(  # type: ignore[no-untyped-def]
    X, SLOT, AGE, COUNT, SCORE, RECENCY, OUT, NORM, L, D,
    BL: tl.constexpr, BD: tl.constexpr, SCORED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    total = tl.zeros([BD], tl.float32)
    top = -1e30
    mass = 0.0
    for begin in range(0, L, BL):
        col = begin + tl.arange(0, BL)
        slot = tl.load(SLOT + row * L + col, mask=col < L, other=-1)
        here = slot >= 0
        inside = here[:, None] & (d[None, :] < D)
        x = tl.load(X + slot.to(tl.int64)[:, None] * D + d[None, :], mask=inside, other=0.0)
        if SCORED:
            age = tl.load(AGE + row * L + col, mask=here, other=0)
            score = tl.load(SCORE + slot, mask=here, other=0.0) + tl.load(RECENCY + age, mask=here, other=0.0)
            score = tl.where(here, score, float("-inf"))
            new = tl.maximum(top, tl.max(score, 0))
            weight = tl.exp(score - new)
            fade = tl.exp(top - new)
            mass = mass * fade + tl.sum(weight, 0)
            total = total * fade + tl.sum(weight[:, None] * x, 0)
            top = new
        else:
            total += tl.sum(x, 0)
    if SCORED:
        some = mass > 0
        total /= tl.where(some, mass, 1.0)
        tl.store(NORM + row, tl.where(some, top + tl.log(tl.where(some, mass, 1.0)), float("inf")))
    elif MEAN:
        total /= tl.maximum(tl.load(COUNT + row), 1).to(tl.float32)
    tl.store(OUT + row * D + d, total, mask=d < D)


@triton.jit
def _pool_gradient(  # type: ignore[no-untyped-def]
    GRAD, ORDER, BEGIN, END, AGE, COUNT, X, SCORE, RECENCY, OUT, NORM, TO_X, TO_SCORE, TO_RECENCY, L, D, A,
    SOME: tl.constexpr, BD: tl.constexpr, SCORED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    begin = tl.load(BEGIN + slot)
    end = tl.load(END + slot)
    to_x = tl.zeros([BD], tl.float32)
    to_score = 0.0
    if SCORED:
        x = tl.load(X + slot * D + d, mask=d < D, other=0.0)
        own = tl.load(SCORE + slot)
    for at in range(begin, end, SOME):
        p = at + tl.arange(0, SOME)
        here = p < end
        place = tl.load(ORDER + p, mask=here, other=0).to(tl.int32)
        row = (place // L).to(tl.int64)
        inside = here[:, None] & (d[None, :] < D)
        grad = tl.load(GRAD + row[:, None] * D + d[None, :], mask=inside, other=0.0)
        if SCORED:
            age = tl.load(AGE + place, mask=here, other=0)
            norm = tl.load(NORM + row, mask=here, other=float("inf"))
            weight = tl.exp(own + tl.load(RECENCY + age, mask=here, other=0.0) - norm)
            out = tl.load(OUT + row[:, None] * D + d[None, :], mask=inside, other=0.0)
            logit = weight * tl.sum(grad * (x[None, :] - out), 1)
            tl.store(TO_RECENCY + row * A + age, logit, mask=here)
            to_score += tl.sum(logit, 0)
            to_x += tl.sum(weight[:, None] * grad, 0)
        elif MEAN:
            count = tl.load(COUNT + row, mask=here, other=1).to(tl.float32)
            to_x += tl.sum(grad / count[:, None], 0)
        else:
            to_x += tl.sum(grad, 0)
    tl.store(TO_X + slot * D + d, to_x, mask=d < D)
    if SCORED:
        tl.store(TO_SCORE + slot, to_score)


def pooled(
    x: Tensor, bags: Bags, mean: bool = False, score: Tensor | None = None, recency: Tensor | None = None
) -> Tensor:
    """sum_j a_j x_slot(j) over each bag (B, D), from the vectors x (M, D) of the slots; 0 where a bag is empty.

        a_j = 1, or 1 / n (mean), or softmax_j(score_slot(j) + recency_age(j)) with score (M,) and recency (last,)

    All numbers are float32. x, score and recency get gradients.

        found = bags(items, n, last=50);   pooled(tower(found.rows), found, mean=True)
    """
    return _Pooled.apply(x, score, recency, bags, mean)  # type: ignore[no-untyped-call, no-any-return]


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, score: Tensor | None, recency: Tensor | None, bags: Bags, mean: bool) -> Tensor:
        (b, length), d = bags.slot.shape, x.shape[1]
        x, scored = x.contiguous(), score is not None
        score, recency = (x if score is None else score.contiguous()), (x if recency is None else recency.contiguous())
        out = torch.empty(b, d, device=x.device)
        norm = torch.empty(b, device=x.device)
        dims = triton.next_power_of_2(d)
        wide = max(1, min(triton.next_power_of_2(length), 4096 // dims))
        _pool[(b,)](
            x, bags.slot, bags.age, bags.length, score, recency, out, norm, length, d, wide, dims, scored, mean,
            num_warps=4,
        )  # fmt: skip
        ctx.bags, ctx.scored, ctx.mean = bags, scored, mean
        if scored:
            ctx.save_for_backward(x, score, recency, out, norm)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        bags, grad = ctx.bags, grad.contiguous()
        (b, length), d, m = bags.slot.shape, grad.shape[1], len(bags.rows)
        to_x = torch.empty(m, d, device=grad.device)
        x, score, recency, out, norm = ctx.saved_tensors if ctx.scored else (grad,) * 5
        to_score, ages = to_x, min(length, len(recency))
        to_recency = to_x
        if ctx.scored:
            to_score = torch.empty(m, device=grad.device)
            to_recency = torch.zeros(b, ages, device=grad.device)
        dims = triton.next_power_of_2(d)
        _pool_gradient[(m,)](
            grad, bags.order, bags.begin, bags.end, bags.age, bags.length, x, score, recency, out, norm, to_x, to_score,
            to_recency, length, d, ages, max(4, min(32, 2048 // dims)), dims, ctx.scored, ctx.mean,
            num_warps=2,
        )  # fmt: skip
        if not ctx.scored:
            return to_x, None, None, None, None
        by_age = torch.zeros_like(recency)
        by_age[:ages] = to_recency.sum(0)  # a bag has one item of each age
        return to_x, to_score, by_age, None, None
