"""Item vectors from behaviour: co-occurrence of items in the training interactions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.data.cache import hash_of, load_array, save_array
from sparring.data.histories import histories
from sparring.data.interactions import Interactions
from sparring.data.spectral import orthonormal_basis, sparse_product

_PAIRS = 20_000_000  # co-occurrences counted at once
_EXTRA = 16  # columns beyond those kept: the last ones of a power iteration converge slowly
_ROUNDS = 6


def cooccurrence(
    train: Interactions,
    dim: int = 128,
    *,
    longest: int = 200,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """(N, dim) float32 item vectors: a truncated SVD of the items' positive pointwise mutual information.

        C_ij = sum over queries with i and j of 1 / (n - 1),   c_i = sum_j C_ij,   n = items of the query
        M_ij = max(0, log C_ij + log sum_k c_k^a - (1 + a)/2 (log c_i + log c_j)),  a = 0.75
        M ~ U S U',   vectors = U |S|^1/2

    A query counts in proportion to its items, not to its pairs; a < 1 keeps rare items from being everyone's neighbour.
    Of a query with more than `longest` items the latest count (random ones without times). An item that shares no query
    has a row of zeros. Use training interactions only: pairs of the test part must not be in them.

        cooccurrence(split.train, dim=128)

    Levy and Goldberg, Neural Word Embedding as Implicit Matrix Factorization, NIPS 2014, section 5; Levy et al., TACL
    2015, section 3.
    """
    generator = torch.Generator().manual_seed(seed)
    start, items = _baskets(train, longest, generator)
    columns, begin, value = _ppmi(start, items, train.n_items, progress)
    basis = torch.randn(train.n_items, min(dim + _EXTRA, train.n_items), generator=generator)
    for _ in range(_ROUNDS):
        basis = orthonormal_basis(sparse_product(columns, begin, value, basis), passes=2, floor=1e-14)
    square, turn = torch.linalg.eigh((basis.T @ sparse_product(columns, begin, value, basis)).double())
    best = square.abs().argsort(descending=True)[:dim]
    vectors = basis @ (turn[:, best] * square[best].abs().sqrt()).float()
    lonely = begin.diff(append=torch.tensor([len(columns)])) == 0
    vectors[lonely] = 0.0  # exactly zero, which marks a missing vector
    return vectors.numpy()


def _baskets(train: Interactions, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The items of each query as (start, items), at most `longest` of each."""
    if train.time is None:  # rows are in the order of ids: the last ones would favour some items
        train = train.subset(torch.randperm(len(train), generator=generator).numpy())
    latest = histories(train, longest)
    return latest.start, latest.items.long()


def _ppmi(
    start: Tensor, items: Tensor, n_items: int, progress: Callable[[int, int], None] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sparse matrix M: columns, row starts, values."""
    size = start.diff()
    query = torch.repeat_interleave(torch.arange(len(size)), size)
    other = (size - 1)[query]
    paired = other > 0
    query, items, other = query[paired], items[paired], other[paired]
    count = torch.bincount(items, minlength=n_items).float()
    smoothed, log_count = count.pow(0.75).sum().log(), count.clamp(min=1e-30).log()
    matrix = torch.sparse_coo_tensor(
        torch.stack([query, items]), torch.ones(len(items)), (len(size), n_items), check_invariants=False
    )
    matrix = matrix.coalesce()
    row_sizes, all_columns, all_values = [], [], []
    for first, last, block in _transposed_blocks(query, items, other, n_items, len(size)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns once that sparse products are in beta
            product = torch.sparse.mm(block, matrix).coalesce()
        (row, column), value = product.indices(), product.values()
        row = row + first
        value = value.log() + smoothed - 0.875 * (log_count[row] + log_count[column])
        keep = (value > 0) & (row != column)
        row_sizes.append(torch.bincount(row[keep] - first, minlength=last - first))
        all_columns.append(column[keep].int())
        all_values.append(value[keep])
        if progress is not None:
            progress(last, n_items)
    per_row = torch.cat(row_sizes)
    columns = torch.cat(all_columns)
    if not len(columns):
        raise UserError("no two items share a query more often than by chance: leave the modality behaviour out")
    return columns, torch.cumsum(per_row, 0) - per_row, torch.cat(all_values)


def _transposed_blocks(
    query: Tensor, items: Tensor, other: Tensor, n_items: int, n_queries: int
) -> Iterator[tuple[int, int, Tensor]]:
    """(first item, end, block) of the transposed matrix of weights 1 / (n - 1), at most _PAIRS co-occurrences each."""
    order = torch.argsort(items, stable=True)
    query, items, other = query[order], items[order], other[order]
    work = torch.bincount(items, weights=other.double(), minlength=n_items).cumsum(0)
    edge = torch.bincount(items, minlength=n_items).cumsum(0)
    first = done = 0
    while first < n_items:
        reached = 0.0 if first == 0 else float(work[first - 1])
        last = min(n_items, max(first + 1, int(torch.searchsorted(work, reached + _PAIRS, right=True))))
        end = int(edge[last - 1])
        index = torch.stack([items[done:end] - first, query[done:end]])
        block = torch.sparse_coo_tensor(
            index, 1.0 / other[done:end].float(), (last - first, n_queries), check_invariants=False
        )
        yield first, last, block.coalesce()
        first, done = last, end


def cached_cooccurrence(
    train: Interactions, folder: Path, dim: int = 128, progress: Callable[[int, int], None] | None = None
) -> tuple[np.ndarray, bool]:
    """`cooccurrence`, read from the cache for interactions seen before; and whether it was cached."""
    time = [] if train.time is None else [train.time]
    path = folder / f"{hash_of([f'behaviour 1 {train.n_items} {dim}', train.queries, train.items, *time])}.npy"
    cached = path.is_file()
    if not cached:
        save_array(path, cooccurrence(train, dim, progress=progress))
    return load_array(path), cached
