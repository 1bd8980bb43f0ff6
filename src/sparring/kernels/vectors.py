"""Vectors of a step: rows scaled to length 1 and inner products of rows, with gradients, by the kernel of the device.

Each function answers None where no kernel applies: another kind of tensor than float32 in contiguous memory, no
compiler, no Triton; the caller then runs its torch code.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparring.kernels import TRITON
from sparring.kernels.native import vectors as native

_WIDEST = 1024  # dimensions of a tile


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """The module with unit_rows, row_dots and their gradients for these tensors."""
    if all(t.is_cuda for t in tensors):
        plain = all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        if not TRITON or not plain or not 0 < tensors[0].shape[-1] <= _WIDEST:
            return None
        from sparring.kernels import vector_rows

        return vector_rows
    return native if native.serves(*tensors) else None


def unit(x: Tensor, extra: int, uniform: Tensor | None = None, rate: float = 0.0) -> Tensor | None:
    """Vectors x (..., D) scaled to length 1, with a last column of ones if `extra`, and a gradient by x.

    A number in `uniform` (..., D) below `rate` drops its element, and the others are divided by 1 - rate, before the
    scaling.
    """
    given = None if uniform is None else uniform.reshape(-1, x.shape[-1]).contiguous()
    tensors = (x,) if given is None else (x, given)
    kernels = kernels_for(*tensors) if torch.is_grad_enabled() and x.requires_grad else None
    if kernels is None:
        return None
    flat: Tensor = _Unit.apply(x.reshape(-1, x.shape[-1]), extra, given, rate, kernels)  # type: ignore[no-untyped-call]
    return flat.reshape(*x.shape[:-1], -1)


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: int, uniform: Tensor | None, rate: float, kernels: ModuleType) -> Tensor:
        out, norms = kernels.unit_rows(x, None, None, extra, uniform, rate)
        ctx.save_for_backward(out, norms)
        ctx.extra, ctx.uniform, ctx.rate, ctx.kernels = extra, uniform, rate, kernels
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, norms = ctx.saved_tensors
        rows = ctx.kernels.unit_rows_gradient(grad.contiguous(), out, norms, ctx.extra, ctx.uniform, ctx.rate)
        return rows, None, None, None, None


def row_dots(a: Tensor, b: Tensor) -> Tensor | None:
    """Inner products (n,) of the rows of a and b (n, D)."""
    kernels = kernels_for(a, b) if a.dim() == 2 and a.shape == b.shape else None
    return None if kernels is None else _RowDots.apply(a, b, kernels)  # type: ignore[no-untyped-call, no-any-return]


class _RowDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, kernels: ModuleType) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.kernels = kernels
        return kernels.row_dots(a, b)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        by_a, by_b = ctx.kernels.row_dots_gradient(grad.contiguous(), *ctx.saved_tensors)
        return by_a, by_b, None
