"""Vectors of a step on a CPU: rows of a table, scaled to length 1, and inner products, one pass each.

The kernels read raw memory, so callers ask `serves` first; kernels/vectors.py adds autograd and the other devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparring.kernels.native.library import function, plain

_ROWS = "rows", "plplpl"
_UNIT, _UNIT_BACKWARD = ("unit_rows", "pplllpipfpp"), ("unit_rows_backward", "pppllipfp")
_DOTS, _DOTS_BACKWARD = ("row_dots", "ppllp"), ("row_dots_backward", "pppllpp")


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors."""
    return plain(*tensors) and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def serves(*tensors: Tensor) -> bool:
    """Whether there is a library, and its kernels take these tensors."""
    return fits(*tensors) and function(*_UNIT) is not None


def rows(table: Tensor, ids: Tensor) -> Tensor | None:
    """table[ids] (n, D) for ids (n,), without autograd."""
    kernel = function(*_ROWS)
    if kernel is None or table.dim() != 2 or not fits(table) or not plain(ids) or ids.dtype != torch.int64:
        return None
    ids = ids.contiguous()
    out = table.new_empty(len(ids), table.shape[1])
    if kernel(table.data_ptr(), len(table), ids.data_ptr(), len(ids), out.data_ptr(), table.shape[1]):
        raise IndexError(f"an id is not a row of a table of {len(table)}")
    return out


def unit_rows(
    x: Tensor, ids: Tensor | None, bias: Tensor | None, extra: int, uniform: Tensor | None = None, rate: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Rows x[ids] (n, D), or x itself, scaled to length 1, and their lengths before that; without autograd.

    With `extra` a last column holds bias[ids], or ones without a bias. A number in `uniform` (n, D) below `rate` drops
    its element, and the others are divided by 1 - rate, before the scaling.
    """
    kernel = function(*_UNIT)
    assert kernel is not None
    n, d = len(x) if ids is None else len(ids), x.shape[1]
    out, norms = x.new_empty(n, d + extra), x.new_empty(n)
    places = x.data_ptr(), _at(ids), n, d, len(x)
    if kernel(*places, _at(bias), extra, _at(uniform), rate, out.data_ptr(), norms.data_ptr()):
        raise IndexError(f"an id is not a row of a table of {len(x)}")
    return out, norms


def unit_rows_gradient(
    grad: Tensor, out: Tensor, norms: Tensor, extra: int, uniform: Tensor | None = None, rate: float = 0.0
) -> Tensor:
    """The gradient (n, D) by the rows of `unit_rows`, from that by its output."""
    kernel = function(*_UNIT_BACKWARD)
    assert kernel is not None
    d = out.shape[1] - extra
    rows = out.new_empty(len(out), d)
    sizes = len(out), d, extra
    kernel(grad.data_ptr(), out.data_ptr(), norms.data_ptr(), *sizes, _at(uniform), rate, rows.data_ptr())
    return rows


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Inner products (n,) of the rows of a and b (n, D); without autograd, like its gradient."""
    kernel = function(*_DOTS)
    assert kernel is not None
    dots = a.new_empty(len(a))
    kernel(a.data_ptr(), b.data_ptr(), *a.shape, dots.data_ptr())
    return dots


def row_dots_gradient(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients (n, D) of the inner products by a and by b."""
    kernel = function(*_DOTS_BACKWARD)
    assert kernel is not None
    by_a, by_b = torch.empty_like(a), torch.empty_like(b)
    kernel(grad.data_ptr(), a.data_ptr(), b.data_ptr(), *a.shape, by_a.data_ptr(), by_b.data_ptr())
    return by_a, by_b


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
