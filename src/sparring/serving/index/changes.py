"""Additions to and removals from an index since it was built."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sparring.serving.index.filters import Hidden, Lists, pairs, positions

_SCORES = 1 << 22  # scores of added items in memory at once


@dataclass(frozen=True)
class Changes:
    """Removed rows and added items; immutable, so that a search sees one state."""

    gone: np.ndarray  # removed or replaced rows of the index, ascending
    ids: np.ndarray  # added items, ascending
    vectors: np.ndarray  # of the added items

    @classmethod
    def none(cls, dim: int) -> Changes:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, dim), np.float32))

    def with_gone(self, rows: np.ndarray) -> np.ndarray:
        return np.union1d(self.gone, rows) if len(rows) else self.gone

    def without(self, ids: np.ndarray, rows: np.ndarray) -> Changes:
        """Remove items, which are in these rows of the index, if any."""
        kept = ~np.isin(self.ids, ids)
        return Changes(self.with_gone(rows), self.ids[kept], self.vectors[kept])

    def with_added(self, ids: np.ndarray, vectors: np.ndarray, rows: np.ndarray) -> Changes:
        """Add items, replacing those in these rows of the index."""
        rest = self.without(ids, rows)
        joined = np.concatenate([rest.ids, ids])
        order = np.argsort(joined)
        return Changes(rest.gone, joined[order], np.concatenate([rest.vectors, vectors])[order])

    def joined(
        self,
        q: np.ndarray,
        scores: np.ndarray,
        labels: np.ndarray,
        exclude: Lists | None,
        allow: np.ndarray | None,
        denied: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Merge the added items into lists (B, k). Only items that beat the last of a list are considered further."""
        ids, vectors = self.ids, self.vectors
        if allow is not None or len(denied):
            kept = np.ones(len(ids), bool) if allow is None else np.isin(ids, np.asarray(allow, dtype=np.int64))
            kept &= ~np.isin(ids, denied)
            ids, vectors = ids[kept], vectors[kept]
        k, step = scores.shape[1], max(1, _SCORES // max(1, len(q)))
        for begin in range(0, len(ids), step):
            # torch: the threads of numpy's BLAS spin while they wait, which costs more than this small product
            more = (torch.from_numpy(q) @ torch.from_numpy(vectors[begin : begin + step]).T).numpy()
            better = np.flatnonzero((more > scores[:, -1:]).any(0))
            if not len(better):
                continue
            more, new = more[:, better], ids[begin + better]
            rows, items = pairs(exclude, len(q))
            hidden = Hidden(rows, positions(new, items), len(q), len(new))
            more[hidden.rows, hidden.columns] = -np.inf
            every = np.concatenate([scores, more], 1)
            order = np.argsort(-every, axis=1, kind="stable")[:, :k]
            names = np.concatenate([labels, np.where(np.isneginf(more), -1, new)], 1)
            scores, labels = np.take_along_axis(every, order, 1), np.take_along_axis(names, order, 1)
        return scores, labels
