"""Items ranked by scores: for a model whose query vectors hold a score of every item, and for several fused sources."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparring.core.list_fusion import Pool, shares
from sparring.core.topk import top_k
from sparring.serving.index.filters import Hidden, Lists, pairs, positions, present
from sparring.serving.index.search import Index
from sparring.training.sources import Sources

_NONE = np.empty(0, np.int64)


class ScoredItems:
    """The items of an item-item matrix: a query (B, N) is its score of every item. Searches and removals are exact.

    `Searchable`, without additions: such a model scores the items that it was trained on.

        ScoredItems(n_items).search(model.query_vectors(queries).numpy(), k=10, exclude=seen)
    """

    def __init__(self, n_items: int, kind: str = "exact", meta: dict[str, Any] | None = None) -> None:
        self.ids, self.dim, self.kind, self.meta = np.arange(n_items), n_items, kind, meta or {}
        self._gone = _NONE
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.ids) - len(self._gone)

    @property
    def gone(self) -> np.ndarray:
        """Removed items, ascending."""
        return self._gone

    def has(self, item: int) -> bool:
        return 0 <= item < len(self.ids) and int(positions(self._gone, np.array([item]))[0]) < 0

    def remove(self, ids: np.ndarray) -> int:
        """Remove items, from the next search on; returns how many were present."""
        with self._lock:
            before = len(self)
            self._gone = np.union1d(self._gone, present(self.ids, np.asarray(ids, np.int64)))
            return before - len(self)

    def restore(self, ids: np.ndarray) -> None:
        """Undo the removal of items."""
        with self._lock:
            self._gone = np.setdiff1d(self._gone, ids)

    def search(
        self,
        q: np.ndarray,
        k: int,
        exclude: Lists | None = None,
        allow: np.ndarray | None = None,
        deny: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores and ids (B, k) of the best items; see `Index.search`."""
        rows, items = pairs(exclude, len(q))
        hidden = Hidden(rows, positions(self.ids, items), len(q), len(self.ids))
        gone = self._gone if deny is None else np.union1d(self._gone, present(self.ids, np.asarray(deny, np.int64)))
        if allow is None and not len(gone):
            return _ranked(q, k, hidden.positives(_NONE))
        kept = np.full(len(self.ids), allow is None)
        if allow is not None:
            kept[present(self.ids, np.asarray(allow, np.int64))] = True
        kept[gone] = False
        only = np.flatnonzero(kept)
        scores, at = _ranked(np.ascontiguousarray(q[:, only]), k, hidden.within(only).positives(_NONE))
        return scores, np.where(at >= 0, only[at.clip(min=0)], -1) if len(only) else at

    def scores_of(self, q: Tensor, items: Tensor) -> Tensor:
        """Scores (B, U) of items (B, U), NaN for removed ones."""
        gone = torch.isin(items, torch.from_numpy(self._gone))
        return q.gather(1, items.clamp(min=0)).masked_fill(gone, torch.nan)


def _ranked(q: np.ndarray, k: int, hidden: Any) -> tuple[np.ndarray, np.ndarray]:
    scores, at = top_k(torch.from_numpy(q), None, k, hidden, torch.arange(len(q)))
    return scores.numpy(), at.numpy()


@dataclass(frozen=True)
class SourceFigures:
    """The part of each source in the answers of one search."""

    names: list[str]
    shares: np.ndarray  # (B, S) share of a list that the source has among its own best
    seconds: list[float]  # that its search took, for the whole batch


class FusedItems:
    """The items of several sources, each with an index of its own; their lists are fused (`Sources`).

    `Searchable`, without additions. Shares and seconds of the sources are counted for the metrics.
    """

    kind = "fused"

    def __init__(self, model: Sources, indexes: Sequence[Index | ScoredItems]) -> None:
        self.model, self.indexes = model, list(indexes)
        self.names = [source.name for source in model.sources]
        self.ids, self.dim, self.meta = np.arange(model.n_items), model.dim, dict[str, Any]()
        self.seconds, self.found, self.listed = np.zeros(len(indexes)), np.zeros(len(indexes)), 0
        self._lock = threading.Lock()
        for index, source in zip(self.indexes, model.sources, strict=True):
            index.remove(source.eligibility.items.numpy())

    def __len__(self) -> int:
        return len(self.ids) - len(reduce(np.intersect1d, [index.gone for index in self.indexes]))

    def has(self, item: int) -> bool:
        return any(index.has(item) for index in self.indexes)

    def remove(self, ids: np.ndarray) -> int:
        """Remove items from all sources, from the next search on; returns how many were present."""
        removed = [index.remove(ids) for index in self.indexes]
        return max(removed)

    def restore(self, ids: np.ndarray) -> None:
        """Undo the removal of items from the sources that know them."""
        for index, source in zip(self.indexes, self.model.sources, strict=True):
            index.restore(np.setdiff1d(ids, source.eligibility.items.numpy()))

    def search(
        self,
        q: np.ndarray,
        k: int,
        exclude: Lists | None = None,
        allow: np.ndarray | None = None,
        deny: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores and ids (B, k) of the best items; see `Index.search`."""
        return self.search_sources(q, k, exclude, allow, deny)[:2]

    def search_sources(
        self, q: np.ndarray, k: int, exclude: Lists | None, allow: np.ndarray | None, deny: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, SourceFigures]:
        """`search`, and the part of each source in the lists."""
        model = self.model
        parts = model.parted(torch.from_numpy(np.ascontiguousarray(q)))
        weights = model.weights_of(parts)
        used = weights.any(0).tolist()  # a source without weight is not searched
        lists, seconds = [], []
        for index, part, wanted in zip(self.indexes, parts, used, strict=True):
            began = time.perf_counter()
            n = max(k, model.depth)
            found = index.search(part.contiguous().numpy(), n, exclude, allow, deny) if wanted else _empty(len(q))
            lists.append((torch.from_numpy(found[0]), torch.from_numpy(found[1])))
            seconds.append(time.perf_counter() - began if wanted else 0.0)

        def score(source: int, items: Tensor) -> Tensor:
            if not used[source]:
                return torch.full(items.shape, torch.nan)
            began = time.perf_counter()
            values = self.indexes[source].scores_of(parts[source], items)
            seconds[source] += time.perf_counter() - began
            return values

        scores, items = Pool.of(lists, model.depth, score if model.by == "scores" else None).best(weights, k)
        share = shares(items, [listed for _, listed in lists]).numpy()
        count = (items >= 0).sum(1).numpy()
        with self._lock:
            self.seconds += seconds
            self.found += count @ share
            self.listed += int(count.sum())
        return scores.numpy(), items.numpy(), SourceFigures(self.names, share, seconds)


def _empty(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((n, 1), -np.inf, np.float32), np.full((n, 1), -1, np.int64)
