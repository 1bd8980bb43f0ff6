"""Row-sparse gradients: look up rows of a table, and sum the gradients of rows that occur more than once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from sparring.kernels.native import vectors as native
from sparring.kernels.native.rows import takes_rows
from sparring.kernels.vectors import kernels_for

_rows: ContextVar[bool] = ContextVar("rows", default=False)


@contextmanager
def row_gradients(wanted: bool) -> Iterator[None]:
    """Inside the block, let tables with dense gradients have row-sparse ones where a native optimiser takes those."""
    before = _rows.set(wanted)
    try:
        yield
    finally:
        _rows.reset(before)


def by_rows(table: Tensor, ids: Tensor) -> bool:
    """Whether the gradient of table[ids] is to be row-sparse although the table's are dense."""
    return _rows.get() and ids.numel() < len(table) and takes_rows(table)


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """table[ids] (..., D); the backward pass appends one row per id to the sparse gradient of the table (N, D).

    Several lookups of one table, such as positives and negatives, are concatenated; the row optimisers sum duplicates.
    PyTorch's own sum of sparse gradients sorts them if they have more rows than the table has numbers, as with an item
    bias (N, 1), and that synchronises. torch.autograd.grad finds no gradient of the table: call backward().

        lookup(tower.weight, torch.tensor([3, 7]))
    """
    rows: Tensor = _Lookup.apply(table, ids)  # type: ignore[no-untyped-call]
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table
        found = native.rows(table.detach(), ids.reshape(-1))
        return F.embedding(ids, table) if found is None else found.reshape(*ids.shape, table.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        (ids,) = ctx.saved_tensors
        _append(ctx.table, ids.reshape(1, -1), grad.reshape(-1, grad.shape[-1]))
        return None, None


def unit_lookup(table: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """lookup(table, ids) scaled to length 1, followed by bias[ids] (..., D + 1) where there is one, in one pass.

    None where no kernel applies, or no gradient is wanted: then look up and scale.

        unit_lookup(tower.weight, torch.tensor([3, 7]))
    """
    tables = (table,) if bias is None else (table, bias)
    kernels = kernels_for(*tables) if torch.is_grad_enabled() and all(t.requires_grad for t in tables) else None
    if kernels is None:
        return None
    flat = ids.reshape(-1).contiguous()
    made = kernels.unit_rows(table.detach(), flat, None if bias is None else bias.detach(), int(bias is not None))
    rows: Tensor = _UnitLookup.apply(kernels, *tables, flat, *made)  # type: ignore[no-untyped-call]
    return rows.reshape(*ids.shape, -1)


class _UnitLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, *given: Tensor) -> Tensor:
        *tables, ids, out, norms = given
        ctx.kernels, ctx.tables = kernels, tables
        ctx.save_for_backward(ids, out, norms)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ids, out, norms = ctx.saved_tensors
        table, *biases = ctx.tables
        rows = ctx.kernels.unit_rows_gradient(grad.contiguous(), out, norms, len(biases))
        _append(table, ids.unsqueeze(0), rows)
        for bias in biases:
            _append(bias, ids.unsqueeze(0), grad[:, -1:])
        return (None,) * (5 + len(biases))


def _append(table: Tensor, index: Tensor, values: Tensor) -> None:
    """Append rows (1, n) to the sparse gradient of a table, or add them to its dense one."""
    if table.grad is not None and not table.grad.is_sparse:
        table.grad.index_add_(0, index[0], values)
        return
    if table.grad is not None:
        index, values = torch.cat([table.grad._indices(), index], 1), torch.cat([table.grad._values(), values])
    table.grad = torch.sparse_coo_tensor(index, values, table.shape, check_invariants=False)


def bag_sums(table: Tensor, ids: Tensor, owners: Tensor, begin: Tensor, weights: Tensor) -> Tensor:
    """sum_j weights_j table[ids_j] over each bag (B, D); the gradient of the table has one row per distinct id.

    Bag b holds the ids from begin_b on; `owners` is the bag of each id, in ascending order. Neither pass writes a
    vector per id. It waits for the number of distinct ids, so it is for CPUs. Weights get no gradient.

        bag_sums(tower.weight, items, torch.tensor([0, 0, 1]), torch.tensor([0, 2]), torch.ones(3))
    """
    sums: Tensor = _BagSums.apply(table, ids, owners, begin, weights)  # type: ignore[no-untyped-call]
    return sums


class _BagSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, owners: Tensor, begin: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(ids, owners, weights)
        ctx.table = table
        return F.embedding_bag(ids, table, begin, mode="sum", per_sample_weights=weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        ids, owners, weights = ctx.saved_tensors
        ordered, order = torch.sort(ids, stable=True)
        rows, count = torch.unique_consecutive(ordered, return_counts=True)
        begin = torch.cumsum(count, 0) - count
        values = F.embedding_bag(owners[order], grad, begin, mode="sum", per_sample_weights=weights[order])
        _append(ctx.table, rows.unsqueeze(0), values)
        return None, None, None, None, None


def sum_rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, gradients) of a sparse gradient, with duplicate rows summed in batch order.

    On a CPU each row appears once, in ascending order. On other devices a row that occurs c times appears c times, each
    time with the full sum: the host never needs the number of distinct rows, and writing one value c times is harmless.
    """
    index, values = grad._indices()[0], grad._values().contiguous()
    if grad.is_coalesced() or index.numel() < 2:
        return index, values
    return _once(index, values) if index.device.type == "cpu" else _repeated(index, values)


def _once(index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    ordered, order = torch.sort(index, stable=True)
    rows, count = torch.unique_consecutive(ordered, return_counts=True)
    # One bag per row: faster than index_add_ and coalesce() from about 8,000 ids on (benchmarks/optimisers.py).
    return rows, F.embedding_bag(order, values, torch.cumsum(count, 0) - count, mode="sum")


def _repeated(index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    ordered, order = torch.sort(index, stable=True)
    new = torch.zeros_like(ordered)
    new[1:] = ordered[1:] != ordered[:-1]
    segment = torch.cumsum(new, 0)
    # As many bags as ids, the last ones empty: the host knows the shape. A bag is summed in order, unlike atomic
    # additions.
    begin = torch.searchsorted(segment, torch.arange(len(segment), device=segment.device))
    return ordered, F.embedding_bag(order, values, begin, mode="sum").index_select(0, segment)
