"""Ridge regressions of many rows on one table, on a CPU, by conjugate gradients."""

from __future__ import annotations

from torch import Tensor, empty, float32, float64

from sparring.kernels.native.library import function, plain

TOLERANCE = 1e-5  # of the residual, relative to the right side, both in the norm of the preconditioner


def ridge(
    table: Tensor, start: Tensor, others: Tensor, weight: Tensor | None, shared: Tensor, added: Tensor, out: Tensor
) -> Tensor | None:
    """Solve (diag(shared + added_r) + sum w x x^T) u = sum w x over the pairs of each row; None if not applicable.

    Row r has the pairs start[r] to start[r + 1] of `others` (int32 rows of the table) and `weight`. `out` (n, D) holds
    the start and takes the solutions. Returns u . (sum w x + residual) (n,) in float64.
    """
    floats = [table, shared, added, out, *(() if weight is None else (weight,))]
    if not (plain(*floats) and all(t.dtype == float32 and t.is_contiguous() for t in floats)):
        return None
    kernel = function("ridge", "ppppppppllld")
    if kernel is None:
        return None
    n, d = out.shape
    explained = empty(n, dtype=float64)
    pairs = start.data_ptr(), others.data_ptr(), None if weight is None else weight.data_ptr()
    numbers = [t.data_ptr() for t in (shared, added, out, explained)]
    kernel(table.data_ptr(), *pairs, *numbers, n, d, 4 * d, TOLERANCE)
    return explained
