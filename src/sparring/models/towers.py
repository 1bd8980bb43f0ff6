"""Towers: modules that turn ids of any shape into vectors.

A tower is any nn.Module with `forward(ids) -> (..., D)`. Tables have row-sparse gradients by default, so the cost of a
training step follows the batch and not the catalogue (training/row_optimizers.py).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core.part import Part
from sparring.core.sparse_rows import by_rows, lookup
from sparring.kernels import gather


class IdTower(Part):
    """One free vector per id: a table of (n, dim), drawn from N(0, init_std^2).

    By default init_std = 1 / sqrt(dim), for vectors of length about 1; the XIR release starts from init_std = 1. With
    `sparse` the gradient holds only the rows of the batch and needs a row optimiser (RowAdam, RowAdagrad); without it
    the gradient is dense, for dense Adam.

        IdTower(n=40_988, dim=32)(torch.tensor([3, 7]))     # (2, 32)
    """

    def __init__(self, n: int, dim: int, init_std: float | None = None, sparse: bool = True) -> None:
        super().__init__()
        if n < 1 or dim < 1:
            raise ValueError(f"a table needs at least one row and one column, not n={n}, dim={dim}")
        self.n, self.dim, self.sparse = n, dim, sparse
        self.weight = nn.Parameter(torch.empty(n, dim).normal_(0.0, dim**-0.5 if init_std is None else init_std))

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.long()
        return lookup(self.weight, ids) if self.sparse or by_rows(self.weight, ids) else gather(self.weight, ids)

    def extra_repr(self) -> str:
        return f"{self.n}, {self.dim}, sparse={self.sparse}"


class HistoryReader(Part, ABC):
    """A query tower that also encodes a history of items, so that it serves queries that arrive after training."""

    @abstractmethod
    def encode_history(self, items: Tensor) -> Tensor:
        """Item ids (B, L) in time order, padded with -1, to vectors (B, D)."""


class UnitTower(Part):
    """Item j as the j-th unit vector, for a query tower that scores all items itself (models/item_to_item.py)."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = self.dim = n

    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids.long(), self.n).float()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every submodule is back in its own mode."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def width_of(tower: nn.Module) -> int:
    """Dimensions of a tower's vectors, found by encoding id 0."""
    device = next(itertools.chain(tower.parameters(), tower.buffers()), torch.empty(0)).device
    with evaluating(tower), torch.no_grad():
        return int(tower(torch.zeros(1, dtype=torch.long, device=device)).shape[-1])
