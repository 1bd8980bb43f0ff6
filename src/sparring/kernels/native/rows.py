"""Row updates on a CPU: the sum of duplicate rows and the update of each row in one pass.

They compute the same function as `_update` in training/row_optimizers.py, up to rounding. Each answers False where it
does not apply: no library, another type than float32, or memory that is not contiguous.
"""

from __future__ import annotations

from torch import Tensor, float32, int64

from sparring.kernels.native.library import function, plain

_MOST = 1 << 31  # places of a batch are 32-bit numbers


def _fits(index: Tensor, *tensors: Tensor) -> bool:
    return (
        plain(index, *tensors)
        and index.dtype == int64
        and len(index) < _MOST
        and all(t.dtype == float32 and t.is_contiguous() for t in tensors)
    )


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


def _check(code: int, table: Tensor) -> None:
    if code:
        raise IndexError(f"a gradient names a row outside the {len(table)} of its table")
