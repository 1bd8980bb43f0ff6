"""A closed form beside trained towers: EASE at low rank, as more dimensions of the vectors of queries and items."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core.types import Positives
from sparring.data.spectral import decomposed

_MORE = 32  # directions that are computed and dropped: the last ones are not exact
_FLOOR = 0.05  # the least 1 - m_j


class LowRankEase(nn.Module):
    """EASE of a matrix of low rank, for queries that are sums of their items.

        A = D^-1/2 R ~ U S V',   h = s^2 / (s^2 + lam mean(s^2)),   m_j = sum_k h_k V_jk^2
        query = unit(sum_j h * V_j),   item = weight V_j / (1 - m_j)

    R holds a one per known pair, D its row sums: a query with many items has no more say than another. With all
    directions the inner products rank as EASE does on A, whose matrix is B = M / (1 - diag M), M = V h V': its
    diagonal, which EASE sets to zero, only scores items that the query has already taken. thinned_ease.py fills the
    same three tensors from another matrix.

        model = model.with_closed_form(decompose(positives, n_items, dim=512).ease(lam=3.0, weight=0.5))

    Steck, Embarrassingly Shallow Autoencoders for Sparse Data, WWW 2019.
    """

    directions: Tensor
    gains: Tensor
    outputs: Tensor

    def __init__(self, directions: Tensor, gains: Tensor, outputs: Tensor) -> None:
        super().__init__()
        self.dim = len(gains)
        self.register_buffer("directions", directions)  # (N, dim): V
        self.register_buffer("gains", gains)  # (dim,): h
        self.register_buffer("outputs", outputs)  # (N,): weight / (1 - m)

    @classmethod
    def empty(cls, n_items: int, dim: int) -> LowRankEase:
        """Zeros, to be filled from a file."""
        return cls(torch.zeros(n_items, dim), torch.zeros(dim), torch.zeros(n_items))

    def queries(self, items: Tensor, owners: Tensor, n: int) -> Tensor:
        """(n, dim): n queries, made of items (G,) that belong to the queries `owners` (G,), in ascending order.

        A query without items is zero.
        """
        start = torch.searchsorted(owners, torch.arange(n, device=owners.device))
        sums = F.embedding_bag(items.long(), self.directions, start, mode="sum")
        return F.normalize(sums * self.gains, dim=1, eps=1e-12)

    def items(self, ids: Tensor) -> Tensor:
        """(..., dim) of items."""
        return self.directions[ids] * self.outputs[ids].unsqueeze(-1)

    def times(self, weight: float) -> LowRankEase:
        """The closed form with its scores times a weight; it shares the directions."""
        return LowRankEase(self.directions, self.gains, weight * self.outputs)


@dataclass(frozen=True)
class Decomposition:
    """The largest directions of the interactions, with the squares of their singular values."""

    directions: Tensor  # (N, dim)
    squares: Tensor  # (dim,)

    def ease(self, lam: float, weight: float) -> LowRankEase:
        """The closed form with this regularisation and weight; it shares the directions."""
        gains = self.squares / (self.squares + lam * self.squares.mean()).clamp(min=1e-30)
        own = (self.directions.square() @ gains).clamp(max=1 - _FLOOR)
        return LowRankEase(self.directions, gains, weight / (1 - own))


def decompose(positives: Positives, n_items: int, dim: int, seed: int = 0) -> Decomposition:
    """The `dim` largest directions of the items in these pairs, on the device of the pairs."""
    image, basis, _ = decomposed(
        positives.start, positives.items, n_items, dim + _MORE, rounds=3, seed=seed, item_power=0.0
    )
    squares, turn = torch.linalg.eigh(image.T @ image)
    return Decomposition(basis @ turn[:, -dim:], squares[-dim:].clamp(min=0))
