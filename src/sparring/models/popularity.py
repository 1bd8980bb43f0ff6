"""Popularity: every query has the same list, the items with the most interactions first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions
from sparring.models.retriever import Retriever
from sparring.models.towers import HistoryReader, IdTower


class ConstantTower(HistoryReader):
    """Every query as the number 1."""

    one: Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.dim = n, 1
        self.register_buffer("one", torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.one.expand(*ids.shape, 1)

    def encode_history(self, items: Tensor) -> Tensor:
        return self.one.expand(len(items), 1)


@dataclass(frozen=True)
class ItemCounts:
    """The score of an item is log(1 + c), where c sums the weights of its interactions.

        weight of an interaction of age t = w 2^(-t / (half_life span))

    `half_life` is a share of the time span of the training part, so it needs no unit; None counts all ages alike. An
    interaction without a time is as old as the oldest. The loss is the mean of -log(c_i / sum c) over the interactions.
    """

    half_life: float | None = None
    closed_form = True
    weighted = True

    def __post_init__(self) -> None:
        if self.half_life is not None and not 0 < self.half_life < math.inf:
            raise UserError(f"half_life must be positive and finite, or none; got {self.half_life}")

    def check(self, data: Interactions) -> None:
        """Refuse a half-life where the data has no times."""
        if self.half_life is not None and (data.time is None or data.is_order):
            has = "none" if data.time is None else "only the order of each query's items"
            raise UserError(f"half_life needs times, and the data has {has}: name their column with --time-column")

    def sweeps(self, model: Retriever, data: Interactions) -> Iterator[float]:
        assert isinstance(model.item, IdTower)
        self.check(data)
        counts = data.recent_counts(self.half_life)
        model.item.weight.copy_(torch.from_numpy(np.log1p(counts)).unsqueeze(1))
        share = counts[data.items] / max(counts.sum(), 1e-300)
        yield float(-np.log(np.maximum(share, 1e-300)).mean())


def popularity_model(n_queries: int, n_items: int) -> Retriever:
    """A constant query and a table of one number per item, still zero."""
    item = IdTower(n_items, 1, 0.0)
    nn.init.zeros_(item.weight)
    return Retriever(ConstantTower(n_queries), item, "dot")
