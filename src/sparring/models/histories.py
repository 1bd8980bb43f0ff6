"""Query towers that read histories: a query is made of the items that it has taken."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.core.errors import UserError
from sparring.core.part import n_ids
from sparring.core.sparse_rows import bag_sums
from sparring.data.histories import Before, Context, Given, Histories, Windows
from sparring.kernels import fuses_rows
from sparring.models.parts import fixed_shapes
from sparring.models.towers import HistoryReader, IdTower, width_of

Pooling = Literal["sum", "mean", "attention"]


class PastReader(HistoryReader):
    """A tower that encodes queries from their histories, with a context for the rows of a training step.

    `forward(ids)` reads the last items of each query. With a context it reads only what may predict the row: where
    histories are ordered, what came before it; where they are sets, all but the item itself (data/histories.py). The
    histories are buffers that no state dict holds: a run folder has them in a file of its own.
    """

    reads: Context | None = None  # the context of `reading`, for a call without one
    item: nn.Module  # encodes the items of histories
    start: Tensor
    items: Tensor
    time: Tensor | None
    past: Histories

    def __init__(self, past: Histories, last: int) -> None:
        super().__init__()
        if last < 1:
            raise ValueError(f"last must be at least 1, got {last}")
        self.last = last
        self.remember(past)

    def remember(self, past: Histories) -> None:
        """Read these histories from now on."""
        device = self.start.device if "start" in self._buffers else torch.device("cpu")
        self.past, self.n = past, len(past.start) - 1
        self.register_buffer("start", past.start.long().to(device), persistent=False)
        self.register_buffer("items", past.items.int().to(device), persistent=False)
        time = None if past.time is None else past.time.to(device)
        self.register_buffer("time", time, persistent=False)
        self.longest = int(past.start.diff().max()) if self.n and len(past.items) else 0

    def forward(self, ids: Tensor, context: Context | None = None) -> Tensor:
        context = self.reads if context is None else context
        if isinstance(context, Windows):
            vectors = self.encode_windows(*self._window(context.places), context.places)
            return vectors.flatten(0, 1).index_select(0, context.slots)
        if isinstance(context, Given):
            sets = self.encode_sets(self.items[context.places], context.owners, context.sets)
            return sets.index_select(0, context.rows)
        flat = ids.reshape(-1)
        return self.encode_places(self._recent(flat, context)).reshape(*ids.shape, -1)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The last items (G,) of queries (B,), the place in `ids` of each one's query, and the number of each query."""
        end = self.start[ids + 1]
        length = (end - self.start[ids]).clamp(max=self.last)
        begin = torch.cumsum(length, 0) - length
        owners = torch.repeat_interleave(torch.arange(len(ids), device=ids.device), length)
        places = torch.arange(len(owners), device=ids.device) + (end - length - begin)[owners]
        return self.items[places], owners, length

    def _recent(self, ids: Tensor, context: Before | None) -> Tensor:
        """(B, L) places of the items that each query is made of, oldest first, -1 where there is none."""
        sets = context is not None and not self.past.ordered
        begin, end = self.start[ids], self.start[ids + 1] if context is None or sets else context.places
        reach = min(self.last + sets, self.longest)  # one more: the item itself may be among the last
        place = end.unsqueeze(1) - torch.arange(reach, 0, -1, device=ids.device)
        inside = place >= begin.unsqueeze(1)
        if context is not None and sets:
            inside &= self.items[place.clamp(min=0)] != self.items[context.places].unsqueeze(1)
        return torch.where(inside, place, -1)

    def _window(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Items, age among the items of their query (0 = the last that is read), and who may read whom, of windows.

        In training the last item of a query is never read, only predicted.
        """
        inside = places >= 0
        place = places.clamp(min=0)
        owner = torch.searchsorted(self.start, place, right=True) - 1
        age = self.start[owner + 1] - 2 - place
        items = torch.where(inside, self.items[place], -1)
        column = torch.arange(places.shape[1], device=places.device)
        allowed = (owner.unsqueeze(2) == owner.unsqueeze(1)) & (column.unsqueeze(1) >= column)
        return items, age, allowed & inside.unsqueeze(1) & inside.unsqueeze(2)

    @abstractmethod
    def encode_windows(self, items: Tensor, age: Tensor, allowed: Tensor, places: Tensor) -> Tensor:
        """Vectors (W, L, D) of the queries at every slot of windows (W, L): each reads the slots that it is allowed.

        A slot has its item, its age (slots before the newest that its query reads) and its place; items and places are
        -1 where a window is empty.
        """

    @abstractmethod
    def encode_places(self, places: Tensor) -> Tensor:
        """Vectors (B, D) of queries made of the items at these places (B, L), oldest first, -1 where there is none."""

    def encode_sets(self, items: Tensor, owners: Tensor, sets: int) -> Tensor:
        """Vectors (sets, D) of sets of items (G,), each of the set `owners` (G,)."""
        raise UserError(f"rows=sets needs a tower that sums or averages items, not {type(self).__name__}")


def past_readers(tower: nn.Module) -> list[PastReader]:
    """The parts of a tower that read histories."""
    return [part for part in tower.modules() if isinstance(part, PastReader)]


@contextmanager
def reading(tower: nn.Module, context: Context) -> Iterator[None]:
    """Inside the block the parts of a tower read histories with this context, whatever the modules around them pass."""
    readers = past_readers(tower)
    for part in readers:
        part.reads = context
    try:
        yield
    finally:
        for part in readers:
            part.reads = None


def filled(items: Tensor) -> Tensor:
    """Items with -1 replaced by one of the others, so that an empty slot adds no row to a sparse gradient."""
    return torch.where(items >= 0, items, items.amax().clamp(min=0)).long()


def by_distance(recency: Tensor, length: int) -> Tensor:
    """(length, length) values recency_(i - j), the last one from there on; 0 where j is after i.

    Each row is the one below it, one place to the left: rows of equal copies, read with a stride that is one shorter.
    So the gradient is a sum over copies, which indexing would have to sort for.
    """
    known = recency[:length]
    by_age = torch.cat([known, known[-1:].expand(length - len(known))])
    copies = F.pad(by_age.flip(0), (0, length)).expand(length, 2 * length).reshape(-1)
    return copies[length - 1 : -1].view(length, 2 * length - 1)[:, :length]


class HistoryTower(PastReader):
    """A query as the sum, the mean, or an attention-weighted mean of the vectors of its last items.

        q_u = sum_j a_j x_j,   a_j = 1 (sum), 1 / n (mean)
                               a = softmax_j(c . tanh(A x_j + b) + recency_age(j)) (attention)

    x_j are vectors of the tower `item`: the Retriever's item tower, or a separate table. A query without history has a
    vector of its own: learned where steps predict first items, else fitted after training (trend.py). There is no
    vector per query, so `encode_history` serves users who arrive after training. Attention starts as the mean (c = 0).

        HistoryTower(item_tower, histories(train), last=50)(query_ids, Before(places))

    The mean is Covington et al., Deep Neural Networks for YouTube Recommendations, RecSys 2016, section 3.2.
    """

    def __init__(self, item: nn.Module, past: Histories, last: int = 50, pooling: Pooling = "mean") -> None:
        super().__init__(past, last)
        if pooling not in ("sum", "mean", "attention"):
            raise ValueError(f"unknown pooling {pooling!r}: use 'sum', 'mean' or 'attention'")
        self.item, self.pooling, self.dim = item, pooling, width_of(item)
        self.empty = nn.Parameter(torch.empty(self.dim).normal_(0.0, self.dim**-0.5))
        if pooling == "attention":
            self.key = nn.Linear(self.dim, self.dim)
            self.context = nn.Parameter(torch.zeros(self.dim))
            self.recency = nn.Parameter(torch.zeros(last))

    def forward(self, ids: Tensor, context: Context | None = None) -> Tensor:
        known = context is None and self.reads is None and not torch.is_grad_enabled()
        if known and self.pooling != "attention" and isinstance(self.item, IdTower):
            return self._known(ids.reshape(-1)).reshape(*ids.shape, -1)
        return super().forward(ids, context)

    def _known(self, ids: Tensor) -> Tensor:
        """(B, D) of known queries, without gradient: nothing is padded to the longest history."""
        items, owners, length = self.read(ids)
        begin = torch.cumsum(length, 0) - length
        weights = torch.ones_like(length) if self.pooling == "sum" else 1.0 / length
        table: Tensor = self.item.weight  # type: ignore[assignment]
        pooled = F.embedding_bag(items.long(), table, begin, mode="sum", per_sample_weights=weights.to(table)[owners])
        return torch.where(length.unsqueeze(1) > 0, pooled, self.empty)

    def encode_places(self, places: Tensor) -> Tensor:
        if self._fuses(places):
            return self._by_slots(places, self.items)
        return self.encode_history(torch.where(places >= 0, self.items[places.clamp(min=0)], -1))

    def encode_history(self, items: Tensor) -> Tensor:
        """Item ids (B, L) in time order, padded with -1, to vectors (B, D) of the last `last` items of each row."""
        if not items.numel():
            return self.empty.expand(len(items), self.dim)
        if self._fuses(items):
            return self._by_slots(items)
        present = items >= 0
        age = present.flip(1).cumsum(1).flip(1) - 1  # 0 = the most recent item; meaningless where absent
        present = present & (age < self.last)
        if items.is_cuda and isinstance(self.item, IdTower):  # padded: nothing waits for the number of items
            x = self.item(filled(items))
            logits = None
            if self.pooling == "attention":
                logits = (self._scores(x) + self.recency[age.clamp(0, self.last - 1)]).unsqueeze(1)
            return self._pooled(x, logits, present.unsqueeze(1)).squeeze(1)
        length = present.sum(1)
        ids, begin = items[present].long(), torch.cumsum(length, 0) - length
        if self.pooling != "attention" and isinstance(self.item, IdTower) and self.item.sparse:
            owners = torch.repeat_interleave(torch.arange(len(items)), length)
            weights = torch.ones(len(ids)) if self.pooling == "sum" else (1.0 / length)[owners]
            pooled = bag_sums(self.item.weight, ids, owners, begin, weights.to(self.item.weight))
            return torch.where(length.unsqueeze(1) > 0, pooled, self.empty)
        distinct, which = torch.unique(ids, return_inverse=True)  # each item is encoded once
        x = self.item(distinct)
        if self.pooling == "attention":
            score = self._scores(x)[which] + self.recency[age[present]]
            # A row of -inf has a NaN softmax; a row without history reads no weights, so any finite value will do.
            logits = torch.full(present.shape, torch.finfo(score.dtype).min, dtype=score.dtype, device=score.device)
            weights = torch.softmax(logits.masked_scatter(present, score), 1)[present]
            pooled = F.embedding_bag(which, x, begin, mode="sum", per_sample_weights=weights)
        else:
            pooled = F.embedding_bag(which, x, begin, mode=self.pooling)
        return torch.where(length.unsqueeze(1) > 0, pooled, self.empty)

    def _fuses(self, places: Tensor) -> bool:
        """Whether the Triton kernels can pool these places (B, L): slots cost little where shapes are fixed."""
        static = n_ids(self.item) is not None and fixed_shapes(self.item)
        return places.numel() > 0 and static and fuses_rows(self.empty.unsqueeze(0))

    def _by_slots(self, places: Tensor, items: Tensor | None = None) -> Tensor:
        """Vectors of ids (B, L), or of the items at these places: each item is encoded about once."""
        from sparring.kernels.bags import bags, pooled

        n = n_ids(self.item)
        assert n is not None
        found = bags(places, n, self.last, items)
        x = self.item(found.rows).float()  # layers may give bfloat16
        score, recency = (self._scores(x).float(), self.recency) if self.pooling == "attention" else (None, None)
        vectors = pooled(x, found, self.pooling == "mean", score, recency)
        return torch.where(found.length.unsqueeze(1) > 0, vectors, self.empty)

    def encode_windows(self, items: Tensor, age: Tensor, allowed: Tensor, places: Tensor) -> Tensor:
        x = self.item(filled(items))
        if self.pooling != "attention":
            return self._pooled(x, None, allowed)
        return self._pooled(x, self._scores(x).unsqueeze(1) + by_distance(self.recency, items.shape[1]), allowed)

    def encode_sets(self, items: Tensor, owners: Tensor, sets: int) -> Tensor:
        if self.pooling == "attention":
            raise UserError(
                "rows=sets has no order, which pooling=attention reads: set rows=pairs or sequences, or pooling=mean"
            )
        x = self.item(items.long())
        total = x.new_zeros(sets, self.dim).index_add(0, owners, x)
        count = x.new_zeros(sets, 1).index_add(0, owners, x.new_ones(len(items), 1))
        return torch.where(count > 0, total / count if self.pooling == "mean" else total, self.empty)

    def _scores(self, x: Tensor) -> Tensor:
        """Logits of attention to items (...) with vectors x (..., D), apart from their age."""
        return torch.tanh(self.key(x)) @ self.context

    def _pooled(self, x: Tensor, logits: Tensor | None, allowed: Tensor) -> Tensor:
        """(B, M, D) from vectors x (B, L, D): each of M queries pools the items that it is allowed (B, M, L)."""
        count = allowed.sum(-1, keepdim=True)
        if logits is None:
            weights = allowed.to(x) if self.pooling == "sum" else allowed / count.clamp(min=1)
        else:
            weights = torch.softmax(logits.masked_fill(~allowed, torch.finfo(x.dtype).min), -1)
        return torch.where(count > 0, weights.to(x) @ x, self.empty)
