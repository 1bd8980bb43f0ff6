"""Towers: modules that turn ids of any shape into vectors.

A tower is any nn.Module with `forward(ids) -> (..., D)`. Tables have row-sparse gradients by default, so the cost of a
training step follows the batch and not the catalogue (training/row_optimizers.py).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core.part import Part
from sparring.core.sparse_rows import lookup
from sparring.kernels import gather

if TYPE_CHECKING:
    from sparring.data.features import Features


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
        return lookup(self.weight, ids.long()) if self.sparse else gather(self.weight, ids.long())

    def extra_repr(self) -> str:
        return f"{self.n}, {self.dim}, sparse={self.sparse}"


class FeatureTower(nn.Module):
    """Ids with categorical and dense features, concatenated and passed through fully connected layers.

        x = [id vector | one vector of `dim` per categorical column | dense features]
        layers of `hidden` units with ReLU between them

    The last layer is linear, so scores can be negative; the output has hidden[-1] dimensions. Code 0 of a column
    (missing or rare) has its own learned vector. Without `with_id` an item is known by its features alone, so the tower
    can encode items it was never trained on. The features are buffers of the module.

        FeatureTower(n=len(table), dim=32, features=Features.from_table(table, ["seller", "category"]))

    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, section 4.5.
    """

    categorical: Tensor
    dense: Tensor

    def __init__(
        self,
        n: int,
        dim: int,
        features: Features,
        hidden: Sequence[int] = (32, 16),
        with_id: bool = True,
        init_std: float | None = None,
        sparse: bool = True,
    ) -> None:
        super().__init__()
        if len(features) != n:
            raise ValueError(f"features of {len(features):,} ids do not fit a tower of {n:,} ids")
        if not hidden or min(hidden) < 1:
            raise ValueError(f"hidden must list at least one layer of at least one unit, got {tuple(hidden)}")
        columns = len(features.cardinalities)
        width = dim * (with_id + columns) + features.dense.shape[1]
        if width == 0:
            raise ValueError("a tower without ids needs at least one feature: pass features or with_id=True")
        self.n, self.dim = n, hidden[-1]
        self.id = IdTower(n, dim, init_std, sparse) if with_id else None
        # One table for all columns, each at its own offset: one gather instead of one per column.
        self.values = IdTower(sum(features.cardinalities), dim, init_std, sparse) if columns else None
        offsets = torch.tensor([0, *itertools.accumulate(features.cardinalities)][:columns], dtype=torch.int32)
        self.register_buffer("categorical", torch.as_tensor(features.categorical, dtype=torch.int32) + offsets)
        self.register_buffer("dense", torch.as_tensor(features.dense, dtype=torch.float32))
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([width, *hidden]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, ids: Tensor) -> Tensor:
        joined: Tensor = self.layers(self._joined(ids.reshape(-1)))
        return joined.unflatten(0, ids.shape) if ids.dim() else joined.squeeze(0)

    def mixtures(self, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        """(..., V, D): items (..., M) mixed by weights (..., V, M) after `layer` layers, then sent through the rest."""
        starts = [index for index, part in enumerate(self.layers) if isinstance(part, nn.Linear)]
        if not 0 <= layer < len(starts):
            raise ValueError(f"layer={layer} is not inside the item tower: choose 0 to {len(starts) - 1}")
        hidden = self.layers[: starts[layer]](self._joined(ids.reshape(-1))).unflatten(0, ids.shape)
        mixed: Tensor = self.layers[starts[layer] :](weights @ hidden)
        return mixed

    def _joined(self, flat: Tensor) -> Tensor:
        parts = [] if self.id is None else [self.id(flat)]
        if self.values is not None:
            parts.append(self.values(self.categorical.index_select(0, flat)).flatten(1))
        if self.dense.shape[1]:
            parts.append(self.dense.index_select(0, flat))
        return torch.cat(parts, 1)


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
