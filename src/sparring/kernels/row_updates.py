"""Triton kernels that update an embedding table: sum the gradients of each row, and update the row and its moments.

One program per place of the batch. The program of a row's first place does the work for all its places, in batch order,
and writes the row once: repeated runs agree bitwise, and nothing synchronises. In a small batch the places of a row are
found by a linear search; a large batch is first sorted by row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

SEARCHED = 2048  # places up to which a search is cheaper than sorting
_WARPS = 1  # a second warp could read the count of a row after the first wrote it


@triton.jit
def _part(ROW, ORDER, VALUES, row, at, n, D, d, SOME: tl.constexpr, SORTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The summed gradients of the row among the places from `at` on, and their number."""
    place = at + tl.arange(0, SOME)
    here = tl.load(ROW + place, mask=place < n, other=-1) == row
    if SORTED:
        place = tl.load(ORDER + place, mask=here, other=0)
    inside = here[:, None] & (d[None, :] < D)
    values = tl.load(VALUES + place.to(tl.int64)[:, None] * D + d[None, :], mask=inside, other=0.0)
    return tl.sum(values.to(tl.float32), 0), tl.sum(here.to(tl.int32), 0)


@triton.jit
def _summed(ROW, ORDER, VALUES, row, p, n, D, d, BD: tl.constexpr, SOME: tl.constexpr, SORTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of the row at place p, summed over its places from p on, and whether p is the first."""
    total = tl.zeros([BD], tl.float32)
    if SORTED:
        first = tl.load(ROW + p - 1, mask=p > 0, other=-1) != row
        at = p
        more = first
        while more:
            part, hits = _part(ROW, ORDER, VALUES, row, at, n, D, d, SOME, True)
            total += part
            at += SOME
            more = hits == SOME
    else:
        earlier = 0
        for begin in range(0, p, 128):
            place = begin + tl.arange(0, 128)
            earlier += tl.sum((tl.load(ROW + place, mask=place < p, other=-1) == row).to(tl.int32), 0)
        first = earlier == 0
        for begin in range(p, tl.where(first, n, p), 128):
            place = begin + tl.arange(0, 128)
            if tl.sum((tl.load(ROW + place, mask=place < n, other=-1) == row).to(tl.int32), 0) > 0:
                for at in range(begin, begin + 128, SOME):
                    part, hits = _part(ROW, ORDER, VALUES, row, at, n, D, d, SOME, False)
                    total += part
    return total, first


@triton.jit
def _unbias(x):  # type: ignore[no-untyped-def]
    """1 - exp(x) for x < 0, without cancellation near 0."""
    return tl.where(x > -0.02, -x * (1 + x * (0.5 + x * (0.16666667 + x * 0.041666667))), 1 - tl.exp(x))


@triton.jit
def _adam(  # type: ignore[no-untyped-def]
    ROW, ORDER, VALUES, TABLE, MEAN, SQUARE, COUNT, LR, n, D, beta1, beta2, log_beta1, log_beta2, eps, decay,
    BD: tl.constexpr, SOME: tl.constexpr, BY_ROW: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0)
    row = tl.load(ROW + p)
    d = tl.arange(0, BD)
    inside = d < D
    g, first = _summed(ROW, ORDER, VALUES, row, p, n, D, d, BD, SOME, SORTED)
    if first:
        lr = tl.load(LR)
        at = row.to(tl.int64) * D + d
        mean = tl.load(MEAN + at, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(SQUARE + at, mask=inside, other=0.0).to(tl.float32)
        mean += (g - mean) * (1 - beta1)
        square = square * beta2 + g * g * (1 - beta2)
        if BY_ROW:
            count = tl.load(COUNT + row) + 1
            tl.store(COUNT + row, count)
        else:
            count = tl.load(COUNT)
        unbias1 = _unbias(count * log_beta1)
        unbias2 = _unbias(count * log_beta2)
        value = tl.load(TABLE + at, mask=inside, other=0.0).to(tl.float32)
        value = value * (1 - lr * decay) - lr / unbias1 * mean / (tl.sqrt(square / unbias2) + eps)
        tl.store(MEAN + at, mean, mask=inside)
        tl.store(SQUARE + at, square, mask=inside)
        tl.store(TABLE + at, value, mask=inside)


@triton.jit
def _adagrad(  # type: ignore[no-untyped-def]
    ROW, ORDER, VALUES, TABLE, SUM, LR, n, D, eps, decay, BD: tl.constexpr, SOME: tl.constexpr, SORTED: tl.constexpr
):
    p = tl.program_id(0)
    row = tl.load(ROW + p)
    d = tl.arange(0, BD)
    g, first = _summed(ROW, ORDER, VALUES, row, p, n, D, d, BD, SOME, SORTED)
    if first:
        lr = tl.load(LR)
        at = row.to(tl.int64) * D + d
        total = tl.load(SUM + row) + tl.sum(g * g) / D
        tl.store(SUM + row, total)
        value = tl.load(TABLE + at, mask=d < D, other=0.0).to(tl.float32)
        value = value * (1 - lr * decay) - lr / (tl.sqrt(total) + eps) * g
        tl.store(TABLE + at, value, mask=d < D)


@triton.jit
def _scatter(ROW, ORDER, VALUES, OUT, n, D, BD: tl.constexpr, SOME: tl.constexpr, SORTED: tl.constexpr):  # type: ignore[no-untyped-def]
    p = tl.program_id(0)
    row = tl.load(ROW + p)
    d = tl.arange(0, BD)
    g, first = _summed(ROW, ORDER, VALUES, row, p, n, D, d, BD, SOME, SORTED)
    if first:
        tl.store(OUT + row.to(tl.int64) * D + d, g, mask=d < D)


def _places(index: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Rows and, if sorted, their original places."""
    if len(index) <= SEARCHED:
        return index.contiguous(), index, False
    rows, order = torch.sort(index.int(), stable=True)  # a table has fewer than 2^31 rows
    return rows, order, True


def _tile(d: int) -> tuple[int, int]:
    """Dimensions of a tile, and the number of rows summed at once: as many as the registers of one warp hold."""
    dims = triton.next_power_of_2(d)
    return dims, max(4, min(32, 1024 // dims))


def row_adam(
    table: Tensor,
    index: Tensor,
    values: Tensor,
    state: dict[str, Tensor],
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """RowAdam on the rows `index` (n,) with gradients `values` (n, D), in place; lr () is on the device."""
    rows, order, by_row = _places(index)
    n, d = values.shape
    logs = (math.log(beta) if beta else -math.inf for beta in betas)
    _adam[(n,)](
        rows, order, values.contiguous(), table, state["mean"], state["square"], state["count"], lr, n, d, *betas,
        *logs, eps, weight_decay,
        *_tile(d), state["count"].dim() > 0, by_row, num_warps=_WARPS,
    )  # fmt: skip


def row_adagrad(
    table: Tensor, index: Tensor, values: Tensor, total: Tensor, lr: Tensor, eps: float, weight_decay: float
) -> None:
    """RowAdagrad on the rows `index` (n,) with gradients `values` (n, D), in place; lr () is on the device."""
    rows, order, by_row = _places(index)
    n, d = values.shape
    _adagrad[(n,)](
        rows, order, values.contiguous(), table, total, lr, n, d, eps, weight_decay, *_tile(d), by_row, num_warps=_WARPS
    )


def gather(table: Tensor, ids: Tensor) -> Tensor:
    """table[ids] (..., D) with a dense gradient, summed in batch order: repeated runs agree bitwise."""
    return _RowGather.apply(table, ids)  # type: ignore[no-untyped-call, no-any-return]


class _RowGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ids)
        ctx.like = table
        return table.index_select(0, ids.reshape(-1)).view(*ids.shape, table.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        (ids,) = ctx.saved_tensors
        out = torch.zeros_like(ctx.like)
        if ids.numel():
            rows, order, by_row = _places(ids.reshape(-1))
            values = grad.reshape(len(rows), -1).contiguous()
            n, d = values.shape
            _scatter[(n,)](rows, order, values, out, n, d, *_tile(d), by_row, num_warps=_WARPS)
        return out, None
