"""A truncated decomposition of the interactions by block power iteration: sparse products and orthonormal bases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 1 << 16  # rows of a Gram matrix summed at once, in float64


def sparse_product(columns: Tensor, start: Tensor, value: Tensor, dense: Tensor) -> Tensor:
    """The product of a sparse matrix (the columns and values of its entries, the start of each row) and a dense one."""
    return F.embedding_bag(columns, dense, start.to(columns.dtype), mode="sum", per_sample_weights=value)


def orthonormal_basis(tall: Tensor, passes: int = 1, floor: float = 1e-10) -> Tensor:
    """An orthonormal basis of the columns, from their Gram matrix: many times faster than QR for a million rows.

    A second pass corrects the rounding of the first. Directions with a relative eigenvalue below `floor` are damped;
    those of a zero matrix are zero.
    """
    for _ in range(passes):
        gram = torch.zeros((), dtype=torch.float64, device=tall.device)
        for rows in tall.split(_ROWS):
            exact = rows.double()
            gram = gram + exact.T @ exact
        square, turn = torch.linalg.eigh(gram)
        least = max(floor * float(square[-1]), torch.finfo(torch.float32).tiny)
        tall = tall @ (turn / square.clamp(min=least).sqrt()).float()
    return tall


def decomposed(
    start: Tensor, items: Tensor, n_items: int, dim: int, rounds: int, seed: int, item_power: float = 0.5
) -> tuple[Tensor, Tensor, Tensor]:
    """A B (n_queries, dim), the orthonormal basis B (n_items, dim) of the largest directions, and Di.

    A = Dq^-1/2 R Di^-item_power, on the device of the pairs.
    """
    n_queries, device = len(start) - 1, items.device
    degree_q = start.diff().clamp(min=1).float()
    columns = items.long()
    degree_i = torch.bincount(columns, minlength=n_items).clamp(min=1).float()
    rows = torch.repeat_interleave(torch.arange(n_queries, device=device), start.diff())
    value = degree_q[rows].rsqrt() * degree_i[columns] ** -item_power
    order = torch.argsort(columns, stable=True)
    count = torch.bincount(columns, minlength=n_items)
    turned = rows[order], torch.cumsum(count, 0) - count, value[order]
    matrix = columns, start[:-1].long(), value
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(n_items, dim, generator=generator).to(device)
    for _ in range(rounds):
        basis = orthonormal_basis(sparse_product(*turned, orthonormal_basis(sparse_product(*matrix, basis))))
    return sparse_product(*matrix, basis), basis, degree_i
