"""Towers: modules that turn ids of any shape into vectors.

A tower is any nn.Module with `forward(ids) -> (..., D)`. Tables have row-sparse gradients by default, so the cost of a
training step follows the batch and not the catalogue (training/row_optimizers.py).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core.part import Part
from sparring.core.sparse_rows import lookup
from sparring.kernels import gather

if TYPE_CHECKING:
    from sparring.data.features import Histories


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


class HistoryReader(Part, ABC):
    """A query tower that also encodes a history of items, so that it serves queries that arrive after training."""

    @abstractmethod
    def encode_history(self, items: Tensor) -> Tensor:
        """Item ids (B, L) in time order, padded with -1, to vectors (B, D)."""


class HistoryTower(HistoryReader):
    """A query as the mean, or an attention-weighted mean, of the vectors of its last items.

        q_u = sum_j a_j x_j,   a_j = 1 / n (mean)   or   a = softmax_j(c . tanh(A x_j + b) + recency_age(j)) (attention)

    x_j are vectors of the tower `item`: the Retriever's item tower, or a separate table. A query without history gets a
    learned vector. There is no vector per query, so `encode_history` serves users who arrive after training. In
    training, pass the positives as `exclude_items`: every occurrence of the positive is removed from the history that
    must predict it; otherwise the model learns to copy. Attention starts as the mean (c = 0). Vectors are gathered once
    per distinct item and never padded.

        HistoryTower(item_tower, histories(train, last=51), last=50)(query_ids, exclude_items=item_ids)

    The mean is Covington et al., Deep Neural Networks for YouTube Recommendations, RecSys 2016, section 3.2.
    """

    start: Tensor
    items: Tensor

    def __init__(
        self, item: nn.Module, histories: Histories, last: int = 50, pooling: Literal["mean", "attention"] = "mean"
    ) -> None:
        super().__init__()
        if last < 1:
            raise ValueError(f"last must be at least 1, got {last}")
        if pooling not in ("mean", "attention"):
            raise ValueError(f"unknown pooling {pooling!r}: use 'mean' or 'attention'")
        self.item, self.last, self.pooling = item, last, pooling
        self.n, self.dim = len(histories.start) - 1, width_of(item)
        self.register_buffer("start", histories.start.long())
        self.register_buffer("items", histories.items.int())
        longest = int(self.start.diff().max()) if self.n else 0
        self._reach = min(last + 1, longest)  # one more than used: the positive may be among the last
        self.empty = nn.Parameter(torch.empty(self.dim).normal_(0.0, self.dim**-0.5))
        if pooling == "attention":
            self.key = nn.Linear(self.dim, self.dim)
            self.context = nn.Parameter(torch.zeros(self.dim))
            self.recency = nn.Parameter(torch.zeros(last))

    def forward(self, query_ids: Tensor, exclude_items: Tensor | None = None) -> Tensor:
        flat = query_ids.reshape(-1)
        begin, end = self.start[flat].unsqueeze(1), self.start[flat + 1].unsqueeze(1)
        position = end - torch.arange(self._reach, 0, -1, device=flat.device)  # oldest first
        inside = position >= begin
        items = self.items[position.clamp(min=0)] if self._reach else position.int()
        if exclude_items is not None:
            inside &= items != exclude_items.reshape(-1, 1)
        return self.encode_history(items.masked_fill(~inside, -1)).reshape(*query_ids.shape, self.dim)

    def encode_history(self, items: Tensor) -> Tensor:
        """Item ids (B, L) in time order, padded with -1, to vectors (B, D) of the last `last` items of each row."""
        present = items >= 0
        age = present.flip(1).cumsum(1).flip(1) - 1  # 0 = the most recent item; meaningless where absent
        present = present & (age < self.last)
        length = present.sum(1)
        distinct, which = torch.unique(items[present], return_inverse=True)
        if not len(distinct):
            return self.empty.expand(len(items), self.dim)
        vectors = self.item(distinct.long())
        begin = torch.cumsum(length, 0) - length
        if self.pooling == "mean":
            pooled = F.embedding_bag(which, vectors, begin, mode="mean")
        else:
            # A row of -inf has a NaN softmax; a row without history reads no weights, so any finite value will do.
            logits = torch.full(
                present.shape, torch.finfo(vectors.dtype).min, dtype=vectors.dtype, device=vectors.device
            )
            score = torch.tanh(self.key(vectors)) @ self.context
            logits = logits.masked_scatter(present, score[which] + self.recency[age[present]])
            weights = torch.softmax(logits, 1)[present]
            pooled = F.embedding_bag(which, vectors, begin, mode="sum", per_sample_weights=weights)
        return torch.where(length.unsqueeze(1) > 0, pooled, self.empty)


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
