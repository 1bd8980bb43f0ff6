"""Additions to and removals from an index since it was built."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sparring.core.topk import in_order, top_k
from sparring.serving.index.filters import Hidden, Lists, pairs, positions


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

    def restored(self, ids: np.ndarray, rows: np.ndarray) -> Changes:
        """Bring back items, which are in these rows of the index."""
        kept = ~np.isin(self.ids, ids)
        return Changes(np.setdiff1d(self.gone, rows), self.ids[kept], self.vectors[kept])

    def joined(
        self,
        q: np.ndarray,
        scores: np.ndarray,
        labels: np.ndarray,
        exclude: Lists | None,
        allow: np.ndarray | None,
        denied: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Merge the added items into lists (B, k)."""
        ids, vectors = self.ids, self.vectors
        if allow is not None or len(denied):
            kept = np.ones(len(ids), bool) if allow is None else np.isin(ids, np.asarray(allow, dtype=np.int64))
            kept &= ~np.isin(ids, denied)
            ids, vectors = ids[kept], vectors[kept]
        if not len(ids):
            return scores, labels
        rows, items = pairs(exclude, len(q))
        hidden = Hidden(rows, positions(ids, items), len(q), len(ids)).positives(np.empty(0, np.int64))
        k, names = scores.shape[1], torch.from_numpy(ids)
        more, at = top_k(torch.from_numpy(q), torch.from_numpy(vectors), min(k, len(ids)), hidden, torch.arange(len(q)))
        found = torch.where(at >= 0, names[at.clamp(min=0)], -1)
        every = torch.cat([torch.from_numpy(scores), more], 1), torch.cat([torch.from_numpy(labels), found], 1)
        best, listed = in_order(*every, k)
        return best.numpy(), listed.numpy()
