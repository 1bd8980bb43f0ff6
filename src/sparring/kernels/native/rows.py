"""Updates of tables from row-sparse gradients on a CPU: the sum of duplicate rows and the update in one pass.

They compute the same function as `_update` in training/row_optimizers.py, or as torch.optim.Adam, up to rounding. Each
answers False where it does not apply: no library, another type than float32, or memory that is not contiguous.
"""

from __future__ import annotations

import ctypes

from torch import Tensor, int64

from sparring.kernels.native.library import function, plain
from sparring.kernels.native.vectors import fits

_ADAM = "adam", "ppppplll" + "d" * 6
_MOST = 1 << 31  # places of a batch are 32-bit numbers


class Rule(ctypes.Structure):  # `Rule` in row_rules.h
    """The row rule of a table, for kernels that update rows themselves; tensors must outlive it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("table", "first", "square", "count")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_double) for name in ("lr", "eps", "decay", "beta1", "beta2")),
        *((name, ctypes.c_int32) for name in ("adam", "by_row")),
    ]


def adagrad_rule(table: Tensor, total: Tensor, lr: float, eps: float, decay: float) -> Rule:
    """Row-wise Adagrad on a table (N, D)."""
    return Rule(table.data_ptr(), total.data_ptr(), 0, 0, *table.shape, lr, eps, decay)


def adam_rule(
    table: Tensor, state: dict[str, Tensor], lr: float, betas: tuple[float, float], eps: float, decay: float
) -> Rule:
    """Adam on the rows of a table (N, D)."""
    tensors = table, state["mean"], state["square"], state["count"]
    by_row = state["count"].dim()
    return Rule(*(t.data_ptr() for t in tensors), *table.shape, lr, eps, decay, *betas, 1, by_row)


def _fits(index: Tensor, *tensors: Tensor) -> bool:
    return plain(index) and index.dtype == int64 and len(index) < _MOST and fits(*tensors)


def row_adam(
    table: Tensor,
    index: Tensor,
    values: Tensor,
    state: dict[str, Tensor],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> bool:
    """Adam on the rows `index` (n,) of a table (N, D), which may repeat, with gradients `values` (n, D)."""
    mean, square, count = state["mean"], state["square"], state["count"]
    if not _fits(index, table, values, mean, square, count):
        return False
    kernel = function("row_adam", "ppppipplllddddd")
    if kernel is None:
        return False
    index = index.contiguous()
    pointers = [t.data_ptr() for t in (table, mean, square, count)]
    n, d = values.shape
    places = index.data_ptr(), values.data_ptr(), n, d, len(table)
    _check(kernel(*pointers, count.dim(), *places, lr, *betas, eps, decay), table)
    return True


def row_adagrad(
    table: Tensor, index: Tensor, values: Tensor, total: Tensor, lr: float, eps: float, decay: float
) -> bool:
    """Row-wise Adagrad on the rows `index` (n,) of a table (N, D), which may repeat, with gradients `values` (n, D)."""
    if not _fits(index, table, values, total):
        return False
    kernel = function("row_adagrad", "pppplllddd")
    if kernel is None:
        return False
    index = index.contiguous()
    pointers = [t.data_ptr() for t in (table, total, index, values)]
    _check(kernel(*pointers, *values.shape, len(table), lr, eps, decay), table)
    return True


def adam(
    table: Tensor,
    index: Tensor,
    values: Tensor,
    state: dict[str, Tensor],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> bool:
    """Adam with coupled decay on all rows of a table (N, D), whose gradient is `values` (n, D) at the rows `index`."""
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    kernel = function(*_ADAM)
    if kernel is None or not _fits(index, table, values, mean, square):
        return False
    index = index.contiguous()
    pointers = [t.data_ptr() for t in (table, mean, square, index, values)]
    _check(kernel(*pointers, *values.shape, len(table), lr, *betas, eps, decay, float(state["step"]) + 1), table)
    state["step"] += 1
    return True


def takes_rows(table: Tensor) -> bool:
    """Whether `adam` applies to a table, so that its gradient need not be dense."""
    return fits(table) and function(*_ADAM) is not None


def _check(code: int, table: Tensor) -> None:
    if code:
        raise IndexError(f"a gradient names a row outside the {len(table)} of its table")
