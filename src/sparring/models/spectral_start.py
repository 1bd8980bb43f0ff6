"""Spectral initialisation of two id tables: a truncated SVD of the interaction matrix by block power iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.part import innermost
from sparring.core.types import Positives
from sparring.data.spectral import orthonormal_basis, sparse_product
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower


def start_from(positives: Positives, model: Retriever, seed: int = 0) -> None:
    """Initialise both id tables of a model from these positives."""
    table = innermost(model.item)  # under auxiliary vectors
    if not isinstance(model.query, IdTower) or not isinstance(table, IdTower):
        raise UserError("init=spectral needs id tables: use query_tower=id and no item_features")
    query, item = spectral(positives.start, positives.items, model.n_items, table.dim, seed=seed)
    with torch.no_grad():
        model.query.weight.copy_(query)
        table.weight.copy_(item)


def spectral(
    start: Tensor, items: Tensor, n_items: int, dim: int, rounds: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Tables (n_queries, dim) and (n_items, dim) whose inner products approximate the interactions.

        A = Dq^-1/2 R Di^-1/2 ~ U S V',   query = U S^1/2,   item = Di^1/4 V S^1/2,   mean row length scaled to 1

    R holds a one per known pair (CSR: start, items), Dq and Di its row and column sums. Di^1/4 gives popular items
    longer vectors, as inner products need. Two rounds are deliberate: more converge to directions that serve a few
    dense corners of R. Cost: 2 rounds + 1 sparse products with dim columns.

        query, item = spectral(positives.start, positives.items, n_items, dim=64)

    Halko, Martinsson, Tropp, Finding Structure with Randomness, SIAM Review 2011, algorithm 4.4.
    """
    n_queries = len(start) - 1
    degree_q = start.diff().clamp(min=1).float()
    columns = items.long()
    degree_i = torch.bincount(columns, minlength=n_items).clamp(min=1).float()
    rows = torch.repeat_interleave(torch.arange(n_queries), start.diff())
    value = (degree_q[rows] * degree_i[columns]).rsqrt()
    order = torch.argsort(columns, stable=True)
    count = torch.bincount(columns, minlength=n_items)
    turned = rows[order], torch.cumsum(count, 0) - count, value[order]
    matrix = columns, start[:-1].long(), value
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(n_items, dim, generator=generator)
    for _ in range(rounds):
        basis = orthonormal_basis(sparse_product(*turned, orthonormal_basis(sparse_product(*matrix, basis))))
    image = sparse_product(*matrix, basis)
    square, turn = torch.linalg.eigh(image.T @ image)
    root = square.clamp(min=1e-12) ** 0.25  # S^1/2
    query = image @ turn / root
    item = basis @ turn * root * degree_i.unsqueeze(1) ** 0.25
    return query / query.norm(dim=1).mean(), item / item.norm(dim=1).mean()
