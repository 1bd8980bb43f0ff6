"""Sequence models: a causal network over the items of a query, in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparring.data.histories import Histories
from sparring.kernels import gather
from sparring.models.histories import PastReader, filled
from sparring.models.towers import width_of


class SequenceTower(PastReader):
    """A query as the output of causal blocks at its last item.

        x_j = sqrt(D) item_j + position_j,   q = norm(blocks(dropout(x)))_last

    `item` is the tower that items are compared with, or a separate table. A position counts from the newest item
    backwards: the newest has the last of `last` positions, in training the newest that predicts another. A block
    (attention.py) is called with x, who may read whom, positions and times. A query without history has a vector of
    its own, which no step trains: it is fitted after training (trend.py).

        SequenceTower(item, histories(train), 50, [SasRecBlock(64, 1, 0.2)])(query_ids)

    Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018.
    """

    def __init__(
        self,
        item: nn.Module,
        past: Histories,
        last: int,
        blocks: Sequence[nn.Module],
        dropout: float = 0.1,
        positions: bool = True,
    ) -> None:
        super().__init__(past, last)
        self.item, self.dim = item, width_of(item)
        std = self.dim**-0.5
        self.position = nn.Parameter(torch.empty(last, self.dim).normal_(0.0, std)) if positions else None
        self.empty = nn.Parameter(torch.empty(self.dim).normal_(0.0, std))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(self.dim)

    def encode_windows(self, items: Tensor, age: Tensor, allowed: Tensor, places: Tensor) -> Tensor:
        time = None if self.time is None else self.time[places.clamp(min=0)]
        return self._encoded(items, self.last - 1 - age, allowed, time)

    def encode_places(self, places: Tensor) -> Tensor:
        place = places.clamp(min=0)
        time = None if self.time is None else self.time[place]
        return self._last(torch.where(places >= 0, self.items[place], -1), time)

    def encode_history(self, items: Tensor) -> Tensor:
        """Item ids (B, L) in time order, padded with -1, to vectors (B, D) of the last `last` items of each row."""
        order = torch.argsort((items >= 0).to(torch.uint8), dim=1, stable=True)  # present items last, in order
        return self._last(items.gather(1, order)[:, -self.last :], None)

    def _last(self, items: Tensor, time: Tensor | None) -> Tensor:
        """Vectors (B, D) of histories (B, L) that end in their newest item, -1 before the oldest."""
        length = items.shape[1]
        if not length:
            return self.empty.expand(len(items), self.dim)
        inside = items >= 0
        column = torch.arange(length, device=items.device)
        allowed = inside.unsqueeze(1) & inside.unsqueeze(2) & (column.unsqueeze(1) >= column)
        position = (column + self.last - length).expand_as(items)
        return torch.where(inside[:, -1:], self._encoded(items, position, allowed, time)[:, -1], self.empty)

    def _encoded(self, items: Tensor, position: Tensor, allowed: Tensor, time: Tensor | None) -> Tensor:
        x = self.item(filled(items)) * self.dim**0.5
        position = position.clamp(0, self.last - 1)
        if self.position is not None:
            x = x + gather(self.position, position)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, allowed, position, time)
        encoded: Tensor = self.norm(x)
        return encoded
