"""The items of a run with towers and classifiers: one index lists them, and both scores rank the list."""

from __future__ import annotations

import copy
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sparring.core.topk import in_order, inner_products
from sparring.models.fusion import Fused, unit
from sparring.serving.index.filters import Lists, positions
from sparring.serving.index.search import Index


class StagedItems:
    """Items ranked by the classifiers alone, or by towers and classifiers fused (models/fusion.py).

    `Searchable`, with additions; queries and added items are vectors of the towers. `listing` indexes the classifiers,
    or for the fused ranking the vectors of its shortlist, whose items are then scored exactly: with an exact listing
    the lists are those of `Fused.lists`. `towers` (N, D) are the item vectors; they find similar items, exactly.

    An added item has no classifier. It gets the one that training starts from, its vector by the towers, and counts as
    one of the rarest items.

        StagedItems(open_index("runs/dexa"), trained.item_vectors(), trained.fused).search(q, k=10)
    """

    def __init__(
        self, listing: Index, towers: Tensor, fused: Fused, how: Literal["classifiers", "fused"] = "fused"
    ) -> None:
        self.listing, self.fused, self.how = listing, fused, how
        self.ids, self.kind, self.meta = listing.ids, listing.kind, listing.meta
        self.knn = towers.float().contiguous()
        self.clf = fused.clf.item_vectors().float().contiguous() if how == "fused" else torch.empty(0)
        self.towers = Index(self.knn.numpy(), listing.ids)
        self.near = fused.near if how == "fused" else 0.0

    def over(self, listing: Index) -> StagedItems:
        """The same items, shared, listed by another index of the same vectors."""
        other = copy.copy(self)
        other.listing, other.kind, other.meta = listing, listing.kind, listing.meta
        return other

    @property
    def dim(self) -> int:
        return self.towers.dim

    @property
    def vectors(self) -> np.ndarray:
        """(N, D) by the towers, without additions."""
        return self.towers.vectors

    @property
    def memory(self) -> int:
        """Bytes of the vectors beside the listing."""
        return 4 * (self.knn.numel() + self.clf.numel())

    def __len__(self) -> int:
        return len(self.listing)

    def has(self, item: int) -> bool:
        return self.listing.has(item)

    def vectors_of(self, ids: np.ndarray) -> np.ndarray:
        """Current vectors (n, D) of items by the towers; an unknown id raises UserError."""
        return self.towers.vectors_of(ids)

    def add(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Add or replace items by their tower vectors, from the next search on. In memory only."""
        self.towers.add(ids, vectors)  # first: a search that lists an item needs its vector
        added = torch.from_numpy(np.atleast_2d(vectors)).float()
        self.listing.add(ids, (unit(added) + self.near * added).numpy())

    def remove(self, ids: np.ndarray) -> int:
        """Remove items, from the next search on; returns how many were present. In memory only."""
        removed = self.listing.remove(ids)
        self.towers.remove(ids)
        return removed

    def restore(self, ids: np.ndarray) -> None:
        """Undo the removal or the replacement of items of the run."""
        self.towers.restore(ids)
        self.listing.restore(ids)

    def search(
        self,
        q: np.ndarray,
        k: int,
        exclude: Lists | None = None,
        allow: np.ndarray | None = None,
        deny: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores and ids (B, k) of the best items; see `Index.search`."""
        asked = torch.from_numpy(np.ascontiguousarray(q, dtype=np.float32))
        depth = k if self.how == "classifiers" else max(k, self.fused.shortlist)
        found = self.listing.search(unit(asked).numpy(), depth, exclude, allow, deny)
        if self.how == "classifiers":
            return found
        items, clf, knn = self._scored(asked, torch.from_numpy(found[1]))
        scores, items = in_order(self.fused.scores(items, clf, knn), items, k)
        return scores.numpy(), items.numpy()

    def _scored(self, q: Tensor, items: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Listed items (B, n) with their scores by classifiers and towers; -1 for one that was removed meanwhile."""
        n, ids, vectors = len(self.knn), *self.towers.added
        rows = items.clamp(0, n - 1)
        clf, knn = inner_products(unit(q), self.clf, rows), inner_products(q, self.knn, rows)
        if not len(ids):
            return items.masked_fill(items >= n, -1), clf, knn
        at = torch.from_numpy(positions(ids, items.numpy().ravel())).view(items.shape)
        items = items.masked_fill((items >= n) & (at < 0), -1)
        if bool((at >= 0).any()):
            new, place = torch.from_numpy(vectors), at.clamp(min=0)
            clf = torch.where(at >= 0, inner_products(unit(q), unit(new), place), clf)
            knn = torch.where(at >= 0, inner_products(q, new, place), knn)
        return items, clf, knn


def listing_vectors(
    towers: Tensor, fused: Fused, how: Literal["classifiers", "fused"], rows: Tensor | None = None
) -> np.ndarray:
    """Vectors (N, D) that a listing of all items, or of some rows, indexes."""
    knn, clf = towers.float(), fused.clf.item_vectors().float()
    knn, clf = (knn, clf) if rows is None else (knn[rows], clf[rows])
    vectors: np.ndarray = (clf if how == "classifiers" else fused.listing(knn, clf)).contiguous().numpy()
    return vectors
