"""One Triton kernel for the update of an embedding table's rows: sum the gradients of a row, move its moments, move the row.

The places of a batch are sorted by row first. The program at a row's first place walks over all its places, so repeated rows are summed
in batch order and written once: repeated runs agree bitwise, and nothing waits for the device.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _summed(ROW, ORDER, VALUES, row, p, n, D, d, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of the row whose places begin at p, summed in batch order."""
    total = tl.zeros([BD], tl.float32)
    k = p
    here = row
    while here == row:
        at = tl.load(ORDER + k)
        total += tl.load(VALUES + at * D + d, mask=d < D, other=0.0).to(tl.float32)
        k += 1
        here = tl.load(ROW + k, mask=k < n, other=-1)
    return total


@triton.jit
def _unbias(x):  # type: ignore[no-untyped-def]
    """1 - exp(x) for x < 0, without the cancellation close to 0."""
    return tl.where(x > -0.02, -x * (1 + x * (0.5 + x * (0.16666667 + x * 0.041666667))), 1 - tl.exp(x))


@triton.jit
def _adam(  # type: ignore[no-untyped-def]
    ROW, ORDER, VALUES, TABLE, MEAN, SQUARE, COUNT, LR, n, D, beta1, beta2, log_beta1, log_beta2, eps, decay,
    BD: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0)
    row = tl.load(ROW + p)
    before = tl.load(ROW + p - 1, mask=p > 0, other=-1)
    if row != before:
        d = tl.arange(0, BD)
        inside = d < D
        g = _summed(ROW, ORDER, VALUES, row, p, n, D, d, BD)
        lr = tl.load(LR)
        at = row * D + d
        mean = tl.load(MEAN + at, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(SQUARE + at, mask=inside, other=0.0).to(tl.float32)
        mean += (g - mean) * (1 - beta1)
        square = square * beta2 + g * g * (1 - beta2)
        if BY_ROW:
            count = tl.load(COUNT + row) + 1
            tl.store(COUNT + row, count)
        else:
            count = tl.load(COUNT)
        first = _unbias(count * log_beta1)
        second = _unbias(count * log_beta2)
        value = tl.load(TABLE + at, mask=inside, other=0.0).to(tl.float32)
        value = value * (1 - lr * decay) - lr / first * mean / (tl.sqrt(square / second) + eps)
        tl.store(MEAN + at, mean, mask=inside)
        tl.store(SQUARE + at, square, mask=inside)
        tl.store(TABLE + at, value, mask=inside)


@triton.jit
def _adagrad(ROW, ORDER, VALUES, TABLE, SUM, LR, n, D, eps, decay, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    p = tl.program_id(0)
    row = tl.load(ROW + p)
    before = tl.load(ROW + p - 1, mask=p > 0, other=-1)
    if row != before:
        d = tl.arange(0, BD)
        g = _summed(ROW, ORDER, VALUES, row, p, n, D, d, BD)
        lr = tl.load(LR)
        at = row * D + d
        total = tl.load(SUM + row) + tl.sum(g * g) / D
        tl.store(SUM + row, total)
        value = tl.load(TABLE + at, mask=d < D, other=0.0).to(tl.float32)
        value = value * (1 - lr * decay) - lr / (tl.sqrt(total) + eps) * g
        tl.store(TABLE + at, value, mask=d < D)


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
    """RowAdam (rows.py) on the rows `index` (n,) with gradients `values` (n, D), in place; lr () on the device."""
    rows, order = torch.sort(index, stable=True)
    n, d = values.shape
    logs = (math.log(beta) if beta else -math.inf for beta in betas)
    by_row = state["count"].dim() > 0
    _adam[(n,)](
        rows, order, values.contiguous(), table, state["mean"], state["square"], state["count"], lr, n, d, *betas, *logs, eps, weight_decay,
        triton.next_power_of_2(d), by_row, num_warps=1 if d <= 64 else 2,
    )  # fmt: skip


def row_adagrad(table: Tensor, index: Tensor, values: Tensor, total: Tensor, lr: Tensor, eps: float, weight_decay: float) -> None:
    """RowAdagrad (rows.py) on the rows `index` (n,) with gradients `values` (n, D), in place; lr () on the device."""
    rows, order = torch.sort(index, stable=True)
    n, d = values.shape
    _adagrad[(n,)](
        rows, order, values.contiguous(), table, total, lr, n, d, eps, weight_decay, triton.next_power_of_2(d),
        num_warps=1 if d <= 64 else 2,
    )  # fmt: skip
