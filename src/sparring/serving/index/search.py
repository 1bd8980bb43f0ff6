"""An index of item vectors: the best items for a query, exact or approximate, with exact filters."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparring.core.errors import UserError
from sparring.core.topk import Prepared, in_order, inner_products, prepare, top_k
from sparring.core.types import Positives
from sparring.serving.index import faiss_backends
from sparring.serving.index.changes import Changes
from sparring.serving.index.filters import Hidden, Lists, pairs, positions, present
from sparring.serving.index.index_files import Stored, read, write

_SMALL = 20_000  # an allow list of this length, or of a twentieth of the items, is ranked exactly
_EXTRA = 32  # hidden items up to which queries are searched in one batch


@dataclass(eq=False)
class Index(Stored):
    """Item vectors by id, searched by inner product: exact, or through FAISS (hnsw, cagra, ivf, ...).

    Filters are exact for every kind: an excluded, denied or not allowed item is never returned, and a list is shorter
    than k only if there are no more items. Added items are searched exactly, besides the index, so additions and
    removals take effect at once; rebuild the index after many changes. Searches and changes are thread-safe. An exact
    index orders items by (score descending, id ascending), and a list depends on neither the other queries of the batch
    nor on whether an item was added later.

        index = Index.load("runs/first/index")
        scores, ids = index.search(q, k=10, exclude=[[3, 17]], allow=ids_in_stock)     # (B, 10) each

    Ids are integers; for the items of a run they are dense ids (`Trained.ids.item_ids` has the original ones).
    """

    def __post_init__(self) -> None:
        if len(self.vectors) != len(self.ids):
            raise ValueError(f"{len(self.vectors)} vectors for {len(self.ids)} ids")
        if bool((self.ids[1:] <= self.ids[:-1]).any()):
            raise ValueError("ids must be distinct and ascend")
        self._lock = threading.Lock()
        self._selector: tuple[np.ndarray, Any] | None = None
        self._cached_parameters: tuple[int, Any, Any] | None = None
        n = len(self.ids)
        self._ids_are_rows = n > 0 and int(self.ids[0]) == 0 and int(self.ids[-1]) == n - 1
        self._changes = Changes.none(self.dim)

    @classmethod
    def load(cls, folder: str | Path, check: bool = True) -> Index:
        """Memory-map a saved index; with `check`, verify the checksums of all its files first."""
        return cls(**vars(read(Path(folder), check)))

    def save(self, folder: str | Path) -> None:
        """Write the index atomically, without additions and removals since it was built."""
        write(self, Path(folder))

    def __len__(self) -> int:
        changes = self._changes
        return len(self.ids) - len(changes.gone) + len(changes.ids)

    def add(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Add or replace items, from the next search on. In memory only."""
        ids, vectors = np.atleast_1d(np.asarray(ids, dtype=np.int64)), self._checked(np.atleast_2d(vectors))
        if len(ids) != len(vectors) or len(np.unique(ids)) < len(ids) or (len(ids) and ids.min() < 0):
            raise UserError(
                f"cannot add {len(ids)} ids with {len(vectors)} vectors: give distinct ids from 0 and one vector each"
            )
        with self._lock:
            self._changes = self._changes.with_added(ids, vectors, present(self.ids, ids))

    def remove(self, ids: np.ndarray) -> int:
        """Remove items, from the next search on; returns how many were present. In memory only."""
        ids = np.unique(np.asarray(ids, dtype=np.int64))
        with self._lock:
            before = len(self)
            self._changes = self._changes.without(ids, present(self.ids, ids))
            return before - len(self)

    @property
    def gone(self) -> np.ndarray:
        """Removed items of the index, ascending."""
        return self.ids[self._changes.gone]

    @property
    def added(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the added items, ascending, and their vectors (n, D)."""
        changes = self._changes
        return changes.ids, changes.vectors

    def restore(self, ids: np.ndarray) -> None:
        """Undo the removal or the replacement of items of the index."""
        at = present(self.ids, np.asarray(ids, dtype=np.int64))
        with self._lock:
            self._changes = self._changes.restored(self.ids[at], at)

    def scores_of(self, q: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Scores (B, U) of items (B, U) of the index, without additions; NaN for removed ones."""
        at = positions(self.ids, items.numpy().ravel())
        gone = (at < 0) | np.isin(at, self._changes.gone)
        rows = torch.from_numpy(at.clip(min=0)).view(items.shape)
        scores = inner_products(q, torch.from_numpy(self.vectors), rows)
        return scores.masked_fill(torch.from_numpy(gone).view(items.shape), torch.nan)

    def has(self, item: int) -> bool:
        """Whether a search can find an item."""
        one, changes = np.array([item], dtype=np.int64), self._changes
        base = int(positions(self.ids, one)[0])
        return int(positions(changes.ids, one)[0]) >= 0 or (
            base >= 0 and int(positions(changes.gone, np.array([base]))[0]) < 0
        )

    def vectors_of(self, ids: np.ndarray) -> np.ndarray:
        """Current vectors (n, D) of items; an unknown id raises UserError."""
        ids, changes = np.asarray(ids, dtype=np.int64), self._changes
        base, new = positions(self.ids, ids), positions(changes.ids, ids)
        for item in ids[(new < 0) & ((base < 0) | np.isin(base, changes.gone))].tolist():
            raise UserError(f"item {item} is not in the index")
        out = np.asarray(self.vectors[base.clip(min=0)])
        out[new >= 0] = changes.vectors[new[new >= 0]]
        return out

    def search(
        self,
        q: np.ndarray,
        k: int,
        exclude: Lists | None = None,
        allow: np.ndarray | None = None,
        deny: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best items for queries (B, D): scores (B, k), and ids (B, k), -1 where there are no more items.

        `exclude` has one list of ids per query (or Positives, row i for query i); `allow` and `deny` apply to all.
        Unknown ids are ignored.
        """
        if k < 1:
            raise UserError(f"k must be at least 1, not {k}")
        q, changes = self._checked(q), self._changes
        best = self._search_few(q, k, exclude, changes.gone) if allow is None and deny is None else None
        denied = np.empty(0, np.int64) if deny is None else np.asarray(deny, dtype=np.int64)
        if best is None:
            rows, items = pairs(exclude, len(q))
            hidden = Hidden(rows, positions(self.ids, items), len(q), len(self.ids))
            scores, at = self._found(q, k, hidden, *self._scope(changes, allow, denied))
            best = scores, np.where(at >= 0, self.ids[at.clip(min=0)], -1) if len(self.ids) else at
        if len(changes.ids):
            best = changes.joined(q, *best, exclude, allow, denied)
        return best

    def _search_few(
        self, q: np.ndarray, k: int, exclude: Lists | None, gone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """The most frequent search of a service: few queries, each with few excluded items. None if it does not apply.

        The general search calls numpy a dozen times more, about 0.1 ms per batch: as much as FAISS takes for a query.
        Hidden items are dropped before the exact scores: refine x k items get one, as many as if none were hidden.
        """
        if self.ann is None or not self._ids_are_rows or not 0 < len(q) <= 2 * _EXTRA:
            return None
        if isinstance(exclude, Positives) or (exclude is not None and len(exclude) != len(q)):
            return None
        hidden = [np.asarray(items).tolist() for items in exclude or ()]
        most, wanted = max(map(len, hidden), default=0), math.ceil(k * self.effort.refine)
        if most > _EXTRA or wanted + _EXTRA > len(self.ids) or 2 * len(gone) > len(self.ids):
            return None
        fetch = wanted + _EXTRA if most else wanted
        scores, at = self.ann.search(
            faiss_backends.widened(q, self.ann.d), fetch, params=self._parameters(fetch, self._all_but(gone))
        )
        for row, listed in enumerate(at[:, :wanted].tolist()):
            if listed[-1] >= 0 and (not most or set(listed).isdisjoint(hidden[row])):
                continue
            kept = (
                [column for column, item in enumerate(at[row].tolist()) if item >= 0 and item not in hidden[row]]
                if most
                else []
            )[:wanted]
            if len(kept) < wanted:
                return None
            scores[row, :wanted], at[row, :wanted] = scores[row, kept], at[row, kept]
        scores, at = scores[:, :wanted], at[:, :wanted]
        if self.effort.refine > 1:
            at = np.ascontiguousarray(at)
            scores = inner_products(torch.from_numpy(q), self._table, torch.from_numpy(at)).numpy()
            order = np.lexsort((at, -scores))[:, :k]  # the order of `in_order`
            scores, at = np.take_along_axis(scores, order, 1), np.take_along_axis(at, order, 1)
        return scores, at

    def _scope(
        self, changes: Changes, allow: np.ndarray | None, deny: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """(rows that may be found, None for all; rows that may not be found)."""
        gone = changes.with_gone(present(self.ids, deny)) if len(deny) else changes.gone
        if allow is None and 2 * len(gone) <= len(self.ids):
            return None, gone
        kept = np.full(len(self.ids), allow is None)
        if allow is not None:
            at = positions(self.ids, np.asarray(allow, dtype=np.int64))
            kept[at[at >= 0]] = True
        kept[gone] = False
        return np.flatnonzero(kept), gone

    def _found(
        self, q: np.ndarray, k: int, hidden: Hidden, only: np.ndarray | None, gone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        few = only is not None and len(only) <= max(_SMALL, len(self.ids) // 20)
        if self.ann is None or few:
            return self._found_exactly(q, k, hidden, only, gone)
        n = len(self.ids)
        if only is not None:
            selector, left = faiss_backends.only_these(only, n), len(only) - hidden.within(only).counts()
        else:
            selector = self._all_but(gone)
            left = n - len(gone) - hidden.without(gone).counts()
        scores, at = self._nearly(q, k, hidden, selector)
        wanted = np.minimum(k, left)
        short = np.nonzero((at >= 0).sum(1) < wanted)[0]
        if len(short):
            scores[short], at[short] = self._found_exactly(q[short], k, hidden.of(short), only, gone)
        return scores, at

    def _all_but(self, gone: np.ndarray) -> Any:
        """The FAISS selector of all rows but these; cached, since it has a bit per item."""
        if not len(gone):
            return None
        kept = self._selector
        if kept is None or kept[0] is not gone:
            self._selector = kept = (gone, faiss_backends.all_but(gone, len(self.ids)))
        return kept[1]

    def _parameters(self, fetch: int, selector: Any) -> Any:
        """The FAISS search parameters; the last ones are cached."""
        kept = self._cached_parameters
        if kept is None or kept[0] != fetch or kept[1] is not selector:
            self._cached_parameters = kept = (
                fetch,
                selector,
                faiss_backends.parameters(self.kind, self.effort, fetch, selector),
            )
        return kept[2]

    def _found_exactly(
        self, q: np.ndarray, k: int, hidden: Hidden, only: np.ndarray | None, gone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores and rows of the k best vectors, without rows hidden from a query or removed; equal scores by row."""
        if only is None:
            return self._ranked(q, k, self.vectors, hidden.positives(gone), self._prepared)
        scores, at = self._ranked(q, k, self.vectors[only], hidden.within(only).positives(np.empty(0, np.int64)))
        return scores, np.where(at >= 0, only[at.clip(min=0)], -1) if len(only) else at

    def _ranked(
        self, q: np.ndarray, k: int, vectors: np.ndarray, hidden: Positives | None, prepared: Prepared | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        asked, items = torch.from_numpy(q), torch.from_numpy(vectors)
        scores, at = top_k(asked, items, k, hidden, torch.arange(len(q)), prepared=prepared)
        return scores.numpy(), at.numpy()

    @cached_property
    def _table(self) -> torch.Tensor:
        return torch.from_numpy(self.vectors)

    @cached_property
    def _prepared(self) -> Prepared:
        return prepare(self._table)

    def _nearly(self, q: np.ndarray, k: int, hidden: Hidden, selector: Any) -> tuple[np.ndarray, np.ndarray]:
        """Search with FAISS: fetch k plus the number of hidden items, then drop the hidden ones; by similar numbers."""
        n = len(self.ids)
        scores, at = np.full((len(q), k), -np.inf, np.float32), np.full((len(q), k), -1, np.int64)
        for extra, rows in _by_hidden_count(hidden):
            fetch = min(n, int(np.ceil((k + extra) * self.effort.refine)))
            parameters = self._parameters(fetch, selector)
            score, found_at = self.ann.search(faiss_backends.widened(q[rows], self.ann.d), fetch, params=parameters)
            score[found_at < 0] = -np.inf
            dropped = hidden.of(rows).mask(found_at) if extra else None
            if self.effort.refine > 1:
                score = self._rescored(q[rows], found_at)
            drops = dropped is not None and bool(dropped.any())
            if drops:
                score[dropped] = -np.inf
            if drops or self.effort.refine > 1:
                score, found_at = (x.numpy() for x in in_order(torch.from_numpy(score), torch.from_numpy(found_at), k))
            kept = min(k, score.shape[1])
            scores[rows, :kept] = score[:, :kept]
            at[rows, :kept] = np.where(np.isneginf(score[:, :kept]), -1, found_at[:, :kept])
        return scores, at

    def _rescored(self, q: np.ndarray, at: np.ndarray) -> np.ndarray:
        rows = torch.from_numpy(at.clip(min=0))
        out = inner_products(torch.from_numpy(q), torch.from_numpy(self.vectors), rows).numpy()
        out[at < 0] = -np.inf
        return out

    def _checked(self, q: np.ndarray) -> np.ndarray:
        q = np.ascontiguousarray(q, dtype=np.float32)
        if q.ndim != 2 or q.shape[1] != self.dim:
            raise UserError(f"vectors have shape {tuple(q.shape)}; this index needs (n, {self.dim})")
        if not np.isfinite(q).all():
            raise UserError("the vectors contain NaN or infinite values")
        return q


def _by_hidden_count(hidden: Hidden) -> Iterator[tuple[int, np.ndarray]]:
    """(bound on the hidden items, rows): queries grouped by their number of hidden items, in powers of two."""
    count = hidden.counts()
    if not len(hidden):
        yield 0, np.arange(len(count))
        return
    extra = np.where(count > 0, 1 << np.ceil(np.log2(np.maximum(count, _EXTRA))).astype(np.int64), 0)
    if len(count) <= 4 * _EXTRA and int(extra.max()) == _EXTRA:  # for few queries one search is faster than two
        yield _EXTRA, np.arange(len(count))
        return
    for bound in np.unique(extra).tolist():
        yield bound, np.nonzero(extra == bound)[0]
