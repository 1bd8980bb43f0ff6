"""Spectral initialisation of tables: a truncated SVD of the interaction matrix by block power iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.part import innermost
from sparring.core.types import Positives
from sparring.data.spectral import decomposed
from sparring.models.histories import HistoryTower
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower

POPULARITY = 0.5  # of log counts, in the start of an item bias: the vectors learn the rest


def start_from(positives: Positives, model: Retriever, seed: int = 0, tau: float = 1.0) -> None:
    """Initialise the tables of a model from these positives: queries and items, or items as input and as output.

    Where a query is a sum of items, both tables start at the items' singular vectors, with rows as long as they were.
    An item bias starts at tau log(1 + count) / 2, less its mean. Softmax over biases alone, divided by tau, learns
    tau log(count): from zero it takes epochs to get there.
    """
    query, table = model.query, innermost(model.item)  # under auxiliary vectors
    read = query.item if isinstance(query, HistoryTower) else query
    if not isinstance(read, IdTower) or not isinstance(table, IdTower):
        raise UserError("init=spectral needs id tables: use query_tower=id or history, and no item_features")
    start, items = positives.start, positives.items
    with torch.no_grad():
        if isinstance(query, HistoryTower):
            vectors = item_directions(start, items, model.n_items, table.dim, seed)
            for each in {table.weight, read.weight}:
                each.copy_(vectors * (each.norm() / vectors.norm()))
        else:
            of_queries, of_items = spectral(start, items, model.n_items, table.dim, seed=seed)
            read.weight.copy_(of_queries)
            table.weight.copy_(of_items)
        if isinstance(model.item_bias, IdTower):
            logs = torch.log1p(torch.bincount(items.long(), minlength=model.n_items).float())
            model.item_bias.weight.copy_((POPULARITY * tau * (logs - logs.mean())).unsqueeze(1))


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
    image, basis, degree_i = decomposed(start, items, n_items, dim, rounds, seed)
    square, turn = torch.linalg.eigh(image.T @ image)
    root = square.clamp(min=1e-12) ** 0.25  # S^1/2
    query = image @ turn / root
    item = basis @ turn * root * degree_i.unsqueeze(1) ** 0.25
    return query / query.norm(dim=1).mean(), item / item.norm(dim=1).mean()


def item_directions(start: Tensor, items: Tensor, n_items: int, dim: int, seed: int = 0) -> Tensor:
    """(n_items, dim) V of `spectral`, up to a rotation: items by the queries that they share."""
    return decomposed(start, items, n_items, dim, rounds=3, seed=seed)[1]
