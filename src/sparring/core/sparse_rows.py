"""Sparse row gradients: gather rows of a table, and sum the gradient of rows that occur more than once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """table[ids] (..., D); the backward pass adds a row for each place to the sparse gradient of the table (N, D), table.grad.

    Several lookups of one table, of positives and of negatives, are put one after another and summed by the row rules. PyTorch's own sum of
    sparse gradients sorts them once there are more places than numbers in the table, as with an item bias (N, 1), and that waits for
    the device. torch.autograd.grad by the table finds nothing: call backward().

        lookup(tower.weight, torch.tensor([3, 7]))
    """
    rows: Tensor = _Lookup.apply(table, ids)  # type: ignore[no-untyped-call]
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        table, (ids,) = ctx.table, ctx.saved_tensors
        index, values = ids.reshape(1, -1), grad.reshape(-1, grad.shape[-1])
        if table.grad is not None:
            index, values = torch.cat([table.grad._indices(), index], 1), torch.cat([table.grad._values(), values])
        table.grad = torch.sparse_coo_tensor(index, values, table.shape, check_invariants=False)
        return None, None


def sum_rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, gradients) of a sparse gradient, duplicated rows summed in batch order.

    On a CPU each row comes once, in ascending order. On other devices a row that occurs c times comes c times, each time with the
    whole sum: the number of distinct rows is then never needed on the host, and writing the same value c times is harmless.
    """
    index, values = grad._indices()[0], grad._values().contiguous()
    if grad.is_coalesced() or index.numel() < 2:
        return index, values
    return _once(index, values) if index.device.type == "cpu" else _repeated(index, values)


def _once(index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    ordered, order = torch.sort(index, stable=True)
    rows, count = torch.unique_consecutive(ordered, return_counts=True)
    # A bag per row: from about 8,000 places on faster than index_add_ and coalesce() (benchmarks/optimisers.py).
    return rows, F.embedding_bag(order, values, torch.cumsum(count, 0) - count, mode="sum")


def _repeated(index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    ordered, order = torch.sort(index, stable=True)
    new = torch.zeros_like(ordered)
    new[1:] = ordered[1:] != ordered[:-1]
    segment = torch.cumsum(new, 0)
    # As many bags as places, the last ones empty: a shape that the host knows. A bag is summed in order, unlike atomic additions.
    begin = torch.searchsorted(segment, torch.arange(len(segment), device=segment.device))
    return ordered, F.embedding_bag(order, values, begin, mode="sum").index_select(0, segment)
