"""An index of item vectors: the best items of a query, exactly or nearly so, without those that it may not have."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparring.core.errors import UserError
from sparring.core.topk import top_k
from sparring.core.types import Positives
from sparring.serving.index import faiss_backends
from sparring.serving.index.changes import Changes
from sparring.serving.index.files import Stored, read, write
from sparring.serving.index.filters import Hidden, Lists, found, pairs, positions

_FEW = 8  # queries: below this a product with all items costs less than the exact ranking, which works on 64 at a time
_SMALL = 20_000  # an allow list up to this long, or a twentieth of the catalogue, is ranked exactly
_TOGETHER = 32  # hidden items up to which queries are searched together
_SCORED = 1 << 24  # numbers gathered at once when candidates are ranked again


@dataclass(eq=False)
class Index(Stored):
    """Item vectors by id, searched by inner product: exact, or through FAISS (hnsw, ivf, ivfsq, ivfpq).

    Filters are exact for every kind: an item that a query excludes, that is denied or not allowed, is never returned, and a list is
    shorter than k only where no more items are left. What was added is searched exactly beside the index, so that adding and removing
    take effect at once and for every kind; build the index anew when much has changed. Searches and changes may run in many threads.

        index = Index.load("runs/first/index")
        scores, ids = index.search(q, k=10, exclude=[[3, 17]], allow=ids_in_stock)      # (B, 10) each; -1 where no item is left

    Ids are whole numbers, for the items of a run their dense ids (`Trained.ids.item_ids` names them).
    """

    def __post_init__(self) -> None:
        if len(self.vectors) != len(self.ids):
            raise ValueError(f"there are {len(self.vectors)} vectors for {len(self.ids)} ids")
        if bool((self.ids[1:] <= self.ids[:-1]).any()):
            raise ValueError("ids must ascend, each once")
        self._lock = threading.Lock()
        self._selector: tuple[np.ndarray, Any] | None = None
        self._told: tuple[int, Any, Any] | None = None
        self._counted = (
            len(self.ids) > 0 and int(self.ids[0]) == 0 and int(self.ids[-1]) == len(self.ids) - 1
        )  # a row is its id
        self._changes = Changes.none(self.dim)

    @classmethod
    def load(cls, folder: str | Path, check: bool = True) -> Index:
        """Read a saved index, mapped into memory; with `check`, checksums of all its files are compared first."""
        return cls(**vars(read(Path(folder), check)))

    def save(self, folder: str | Path) -> None:
        """Write the index, whole or not at all, without what was added or removed since it was built."""
        write(self, Path(folder))

    def __len__(self) -> int:
        changes = self._changes
        return len(self.ids) - len(changes.gone) + len(changes.ids)

    def add(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Add items, or replace those that are there, from the next search on. In memory only."""
        ids, vectors = np.atleast_1d(np.asarray(ids, dtype=np.int64)), self._checked(np.atleast_2d(vectors))
        if len(ids) != len(vectors) or len(np.unique(ids)) < len(ids) or (len(ids) and ids.min() < 0):
            raise UserError(
                f"to add items, give distinct ids from 0 and one vector each, not {len(ids)} ids and {len(vectors)} vectors"
            )
        with self._lock:
            self._changes = self._changes.with_added(ids, vectors, found(self.ids, ids))

    def remove(self, ids: np.ndarray) -> int:
        """Remove items from the next search on; how many of them there were. In memory only."""
        ids = np.unique(np.asarray(ids, dtype=np.int64))
        with self._lock:
            before = len(self)
            self._changes = self._changes.without(ids, found(self.ids, ids))
            return before - len(self)

    def has(self, item: int) -> bool:
        """Whether a search may find an item."""
        asked, changes = np.array([item], dtype=np.int64), self._changes
        base = int(positions(self.ids, asked)[0])
        return int(positions(changes.ids, asked)[0]) >= 0 or (
            base >= 0 and int(positions(changes.gone, np.array([base]))[0]) < 0
        )

    def vectors_of(self, ids: np.ndarray) -> np.ndarray:
        """Vectors (n, D) of items, as they are now; an unknown id is an error that names it."""
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
        """The k best items of queries (B, D): scores (B, k), and ids (B, k) with -1 where no item is left.

        `exclude` has one list of ids for each query (or Positives, row i for query i); `allow` and `deny` hold for all of them. Ids
        that the index does not know are ignored.
        """
        if k < 1:
            raise UserError(f"k must be at least 1, not {k}")
        q, changes = self._checked(q), self._changes
        best = self._simply(q, k, exclude, changes.gone) if allow is None and deny is None else None
        denied = np.empty(0, np.int64) if deny is None else np.asarray(deny, dtype=np.int64)
        if best is None:
            rows, items = pairs(exclude, len(q))
            hidden = Hidden(rows, positions(self.ids, items), len(q), len(self.ids))
            scores, at = self._found(q, k, hidden, *self._scope(changes, allow, denied))
            best = scores, np.where(at >= 0, self.ids[at.clip(min=0)], -1) if len(self.ids) else at
        if len(changes.ids):
            best = changes.joined(q, *best, exclude, allow, denied)
        return best

    def _simply(
        self, q: np.ndarray, k: int, exclude: Lists | None, gone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """What most requests of a service ask: few queries, each hiding a few of all items. None where it is not as simple as that.

        Told apart in Python: for so few, each of the dozen calls of numpy that any other search takes would cost more.
        """
        if self.ann is None or self.effort.refine > 1 or not self._counted or len(q) > 2 * _TOGETHER:
            return None
        if isinstance(exclude, Positives) or (exclude is not None and len(exclude) != len(q)):
            return None
        hidden = [np.asarray(each).tolist() for each in exclude or ()]
        most = max(map(len, hidden), default=0)
        if most > _TOGETHER or k + most > len(self.ids) or 2 * len(gone) > len(self.ids):
            return None
        fetch = k + _TOGETHER if most else k
        scores, at = self.ann.search(
            faiss_backends.widened(q, self.ann.d), fetch, params=self._parameters(fetch, self._all_but(gone))
        )
        for row, listed in enumerate(at[:, :k].tolist()):
            if listed[-1] >= 0 and (not most or set(listed).isdisjoint(hidden[row])):
                continue
            kept = (
                [column for column, item in enumerate(at[row].tolist()) if item >= 0 and item not in hidden[row]][:k]
                if most
                else []
            )
            if len(kept) < k:
                return None
            scores[row, :k], at[row, :k] = scores[row, kept], at[row, kept]
        return scores[:, :k], at[:, :k]

    def _scope(
        self, changes: Changes, allow: np.ndarray | None, deny: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """(the only rows that may be found, or None for all; rows that may not be)."""
        gone = changes.with_gone(found(self.ids, deny)) if len(deny) else changes.gone
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
        """The selector of what is not gone; the last one is kept, since building it reads a bit for every item."""
        if not len(gone):
            return None
        kept = self._selector
        if kept is None or kept[0] is not gone:
            self._selector = kept = (gone, faiss_backends.all_but(gone, len(self.ids)))
        return kept[1]

    def _parameters(self, fetch: int, selector: Any) -> Any:
        """What FAISS is told; the last of it is kept."""
        kept = self._told
        if kept is None or kept[0] != fetch or kept[1] is not selector:
            self._told = kept = (fetch, selector, faiss_backends.parameters(self.kind, self.effort, fetch, selector))
        return kept[2]

    def _found_exactly(
        self, q: np.ndarray, k: int, hidden: Hidden, only: np.ndarray | None, gone: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if only is None:
            return _exact(q, k, self.vectors, hidden, gone)
        scores, at = _exact(q, k, self.vectors[only], hidden.within(only), np.empty(0, np.int64))
        return scores, np.where(at >= 0, only[at.clip(min=0)], -1) if len(only) else at

    def _nearly(self, q: np.ndarray, k: int, hidden: Hidden, selector: Any) -> tuple[np.ndarray, np.ndarray]:
        """Through FAISS: what each query hides is fetched on top and dropped, queries that hide about as much together."""
        n = len(self.ids)
        scores, at = np.full((len(q), k), -np.inf, np.float32), np.full((len(q), k), -1, np.int64)
        for more, rows in _alike(hidden):
            fetch = min(n, int(np.ceil((k + more) * self.effort.refine)))
            told = self._parameters(fetch, selector)
            score, found_at = self.ann.search(faiss_backends.widened(q[rows], self.ann.d), fetch, params=told)
            score[found_at < 0] = -np.inf
            dropped = hidden.of(rows).mask(found_at) if more else None
            if self.effort.refine > 1:
                score = self._rescored(q[rows], found_at, score)
            some = dropped is not None and bool(dropped.any())
            if some:
                score[dropped] = -np.inf
            if some or self.effort.refine > 1:
                order = np.argsort(-score, axis=1, kind="stable")[:, :k]
                score, found_at = np.take_along_axis(score, order, 1), np.take_along_axis(found_at, order, 1)
            kept = min(k, score.shape[1])
            scores[rows, :kept] = score[:, :kept]
            at[rows, :kept] = np.where(np.isneginf(score[:, :kept]), -1, found_at[:, :kept])
        return scores, at

    def _rescored(self, q: np.ndarray, at: np.ndarray, score: np.ndarray) -> np.ndarray:
        out = np.empty_like(score)
        step = max(1, _SCORED // max(1, at.shape[1] * self.dim))
        for begin in range(0, len(q), step):
            part = slice(begin, begin + step)
            vectors = torch.from_numpy(self.vectors[at[part].clip(min=0)])
            out[part] = torch.bmm(vectors, torch.from_numpy(q[part]).unsqueeze(2)).squeeze(2).numpy()
        out[at < 0] = -np.inf
        return out

    def _checked(self, q: np.ndarray) -> np.ndarray:
        q = np.ascontiguousarray(q, dtype=np.float32)
        if q.ndim != 2 or q.shape[1] != self.dim:
            raise UserError(
                f"vectors are {tuple(q.shape)}; this index holds vectors of {self.dim} dimensions: give (n, {self.dim})"
            )
        if not np.isfinite(q).all():
            raise UserError("the vectors hold NaN or infinite values")
        return q


def _alike(hidden: Hidden) -> Iterator[tuple[int, np.ndarray]]:
    """(at most so many hidden, rows): queries by how much they hide, up to powers of two."""
    count = hidden.counts()
    if not len(hidden):
        yield 0, np.arange(len(count))
        return
    extra = np.where(count > 0, 1 << np.ceil(np.log2(np.maximum(count, _TOGETHER))).astype(np.int64), 0)
    if (
        len(count) <= 4 * _TOGETHER and int(extra.max()) == _TOGETHER
    ):  # one search of few costs less than telling them apart
        yield _TOGETHER, np.arange(len(count))
        return
    for more in np.unique(extra).tolist():
        yield more, np.nonzero(extra == more)[0]


def _exact(
    q: np.ndarray, k: int, vectors: np.ndarray, hidden: Hidden, gone: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and rows of the k best of all vectors, without what is hidden from a query or gone for all."""
    if not len(vectors) or not len(q):
        return np.full((len(q), k), -np.inf, np.float32), np.full((len(q), k), -1, np.int64)
    asked, items = torch.from_numpy(q), torch.from_numpy(vectors)
    if len(q) >= _FEW:
        best, at = top_k(asked, items, k, hidden.positives(gone), torch.arange(len(q)))
        return best.numpy(), at.numpy()
    scores = asked @ items.T
    scores[torch.from_numpy(hidden.rows), torch.from_numpy(hidden.columns)] = -torch.inf
    scores[:, torch.from_numpy(gone)] = -torch.inf
    best, at = torch.topk(scores, min(k, len(items)), dim=1)
    short = (0, k - best.shape[1])
    best, at = torch.nn.functional.pad(best, short, value=-torch.inf), torch.nn.functional.pad(at, short, value=-1)
    return best.numpy(), at.masked_fill(torch.isneginf(best), -1).numpy()
