"""Triton kernels for the vectors of a step: rows scaled to length 1, and inner products of rows, one pass each.

The same functions as those for CPUs in native/vectors.py, whose formulas they share: a few rows per program, all
dimensions of a row in one tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-6  # NORM_EPS of models/retriever.py: a shorter row is divided by this
_NONE, _ONES, _BIAS = 0, 1, 2  # the last column


@triton.jit
def _unit(  # type: ignore[no-untyped-def]
    X, IDS, BIAS, UNIFORM, OUT, NORMS, n, D, rate, eps,
    R: tl.constexpr, BD: tl.constexpr, BY_ID: tl.constexpr, LAST: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, BD)
    here = row < n
    inside = here[:, None] & (d[None, :] < D)
    at = tl.load(IDS + row, mask=here, other=0) if BY_ID else row.to(tl.int64)
    x = tl.load(X + at[:, None] * D + d[None, :], mask=inside, other=0.0)
    if DROPS:
        uniform = tl.load(UNIFORM + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
        x = tl.where(uniform >= rate, x * (1 / (1 - rate)), 0.0)
    norm = tl.sqrt(tl.sum(x * x, 1))
    x = x / tl.maximum(norm, eps)[:, None]
    width = D + (1 if LAST else 0)
    to = OUT + row.to(tl.int64) * width
    tl.store(to[:, None] + d[None, :], x, mask=inside)
    tl.store(NORMS + row, norm, mask=here)
    if LAST == 1:
        tl.store(to + D, tl.full([R], 1.0, tl.float32), mask=here)
    if LAST == 2:
        tl.store(to + D, tl.load(BIAS + at, mask=here, other=0.0), mask=here)


@triton.jit
def _unit_gradient(  # type: ignore[no-untyped-def]
    GRAD, OUT, NORMS, UNIFORM, ROWS, n, D, extra, rate, eps, R: tl.constexpr, BD: tl.constexpr, DROPS: tl.constexpr
):
    row = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, BD)
    here = row < n
    inside = here[:, None] & (d[None, :] < D)
    at = row[:, None].to(tl.int64) * (D + extra) + d[None, :]
    g = tl.load(GRAD + at, mask=inside, other=0.0)
    y = tl.load(OUT + at, mask=inside, other=0.0)
    norm = tl.load(NORMS + row, mask=here, other=1.0)
    along = tl.where(norm > eps, tl.sum(g * y, 1), 0.0)
    g = (g - along[:, None] * y) / tl.maximum(norm, eps)[:, None]
    to = row[:, None].to(tl.int64) * D + d[None, :]
    if DROPS:
        g = tl.where(tl.load(UNIFORM + to, mask=inside, other=0.0) >= rate, g * (1 / (1 - rate)), 0.0)
    tl.store(ROWS + to, g, mask=inside)


@triton.jit
def _dots(A, B, OUT, n, D, R: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, BD)
    inside = (row < n)[:, None] & (d[None, :] < D)
    at = row[:, None].to(tl.int64) * D + d[None, :]
    a = tl.load(A + at, mask=inside, other=0.0)
    tl.store(OUT + row, tl.sum(a * tl.load(B + at, mask=inside, other=0.0), 1), mask=row < n)


@triton.jit
def _dots_gradient(GRAD, A, B, BY_A, BY_B, n, D, R: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, BD)
    inside = (row < n)[:, None] & (d[None, :] < D)
    at = row[:, None].to(tl.int64) * D + d[None, :]
    g = tl.load(GRAD + row, mask=row < n, other=0.0)[:, None]
    tl.store(BY_A + at, g * tl.load(B + at, mask=inside, other=0.0), mask=inside)
    tl.store(BY_B + at, g * tl.load(A + at, mask=inside, other=0.0), mask=inside)


def _tile(d: int) -> tuple[int, int]:
    """Rows and dimensions of a tile: a thread of four warps holds 8 to 16 numbers."""
    dims = triton.next_power_of_2(d)
    return max(1, 1024 // dims), dims


def _programs(n: int, rows: int) -> tuple[int]:
    return (max(1, -(-n // rows)),)


def unit_rows(
    x: Tensor, ids: Tensor | None, bias: Tensor | None, extra: int, uniform: Tensor | None = None, rate: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As in native/vectors.py; ids outside the table are not found, as in PyTorch's own kernels."""
    n, d = len(x) if ids is None else len(ids), x.shape[1]
    out, norms = x.new_empty(n, d + extra), x.new_empty(n)
    last = _BIAS if bias is not None else _ONES if extra else _NONE
    rows, dims = _tile(d)
    unused = norms
    _unit[_programs(n, rows)](
        x, unused if ids is None else ids, unused if bias is None else bias, unused if uniform is None else uniform,
        out, norms, n, d, rate, EPS, rows, dims, ids is not None, last, uniform is not None,
    )  # fmt: skip
    return out, norms


def unit_rows_gradient(
    grad: Tensor, out: Tensor, norms: Tensor, extra: int, uniform: Tensor | None = None, rate: float = 0.0
) -> Tensor:
    """As in native/vectors.py."""
    d = out.shape[1] - extra
    found = out.new_empty(len(out), d)
    rows, dims = _tile(d)
    _unit_gradient[_programs(len(out), rows)](
        grad, out, norms, norms if uniform is None else uniform, found, len(out), d, extra, rate, EPS, rows, dims,
        uniform is not None,
    )  # fmt: skip
    return found


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Inner products (n,) of the rows of a and b (n, D)."""
    dots = a.new_empty(len(a))
    rows, dims = _tile(a.shape[1])
    _dots[_programs(len(a), rows)](a, b, dots, *a.shape, rows, dims)
    return dots


def row_dots_gradient(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients (n, D) of the inner products by a and by b."""
    by_a, by_b = torch.empty_like(a), torch.empty_like(b)
    rows, dims = _tile(a.shape[1])
    _dots_gradient[_programs(len(a), rows)](grad, a, b, by_a, by_b, *a.shape, rows, dims)
    return by_a, by_b
