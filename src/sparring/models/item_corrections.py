"""Corrections of item vectors: a vector shared by a cluster of items (DEXA), the mean of an item's queries (PRIME)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from sparring.core.part import Part
from sparring.core.types import Corpus
from sparring.models.clusters.balanced import balanced_2means
from sparring.models.clusters.clustered_batches import ClusteredBatches
from sparring.models.towers import IdTower

_BLOCK = 8192  # items encoded at a time


class Augmented(Part):
    """An item tower whose vectors are corrected by a free vector of the item's cluster (DEXA).

        w_l = E(z_l) + a_c(l),   before any scaling to length 1

    A tower that reads texts or features gives similar items similar vectors, although people may use them differently.
    Items of a cluster share a correction. Before the first epoch `refresh` gives each of the `private` most frequent
    items its own cluster and halves the rest (balanced_2means) by the tower's vectors, on the model's device. Until
    then items are assigned round-robin. "xavier" starts from vectors much shorter than a tower's, "zeros" from the
    tower itself. Row optimisers never decay them.

        item = Augmented(tower, vectors=4096, private=1000)

    Dahiya et al., Deep Encoders with Auxiliary Parameters for Extreme Classification, KDD 2023.
    """

    in_place = True  # refresh() updates buffers in place, so a captured CUDA graph stays valid
    cluster: Tensor

    def __init__(
        self,
        tower: nn.Module,
        vectors: int,
        init: Literal["xavier", "zeros"] = "xavier",
        sparse: bool = True,
        private: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.n, self.dim = int(tower.n), int(tower.dim)  # type: ignore[arg-type]
        if not 1 <= vectors <= self.n:
            raise ValueError(
                f"the number of auxiliary vectors must be between 1 and the {self.n:,} items, got {vectors}"
            )
        self.tower, self.private, self.seed = tower, private, seed
        self.auxiliary = IdTower(vectors, self.dim, 0.0, sparse)
        self.auxiliary.undecayed = True
        if init == "xavier":
            nn.init.xavier_uniform_(self.auxiliary.weight)
        self.register_buffer("cluster", torch.arange(self.n, dtype=torch.int32) % vectors)

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.tower(ids) + self.auxiliary(self.cluster[ids.long()])
        return vectors

    def inner(self) -> nn.Module:
        return self.tower

    def refresh(self, corpus: Corpus) -> None:
        """Build the clusters before the first epoch, from the tower's vectors and the item counts."""
        if not corpus.epoch:
            counts = torch.bincount(corpus.positives.items.long(), minlength=self.n)
            self.assign(counts, self.private, torch.Generator().manual_seed(self.seed))

    def assign(self, counts: Tensor, private: int, generator: torch.Generator) -> None:
        """Own vectors for the `private` most frequent items; the others share one per cluster."""
        vectors = self.auxiliary.n
        order = torch.sort(counts, descending=True, stable=True).indices
        private = min(private, vectors - (vectors < self.n))
        head, rest = order[:private], order[private:]
        self.cluster[head] = torch.arange(private, dtype=torch.int32, device=self.cluster.device)
        if not len(rest):
            return
        training = self.training
        self.eval()
        with torch.no_grad():
            points = torch.cat([self.tower(ids) for ids in rest.to(self.cluster.device).split(_BLOCK)])
        self.train(training)
        self.cluster[rest] = (private + balanced_2means(points, vectors - private, generator)).to(torch.int32)


class Centroids(Part):
    """An item tower corrected by the centroid of each item's queries (the label centroids of PRIME).

        w_l = E(z_l) + G m_l,   m_l = sum of the vectors of the training queries of l / (their number + `shrink`)

    G is a learned matrix that starts at 0, so training starts from the tower itself. The centroids m are constants,
    recomputed before each epoch but the first: from the queries' vectors in their last step if the batches keep them
    (`follow`), otherwise by encoding all training queries. A query contributes to the centroids of its own items and
    dominates that of a rare item, which makes training metrics optimistic; `shrink` reduces this but does not remove
    it. An item without queries has m = 0. The authors combine the three vectors with a shallow transformer; we sum
    them.

        item = Centroids(tower);   item.follow(batches)     # ClusteredBatches, of NGAME

    PRIME, NAACL 2025, as implemented in its successor ViXML.
    """

    in_place = True
    centroid: Tensor

    def __init__(self, tower: nn.Module, shrink: float = 1.0) -> None:
        super().__init__()
        self.n, self.dim = int(tower.n), int(tower.dim)  # type: ignore[arg-type]
        if not shrink >= 0:
            raise ValueError(f"shrink must be at least 0, got {shrink}")
        self.tower, self.shrink = tower, shrink
        self.mix = nn.Linear(self.dim, self.dim, bias=False)
        nn.init.zeros_(self.mix.weight)
        self.register_buffer("centroid", torch.zeros(self.n, self.dim))
        self._kept: list[ClusteredBatches] = []  # in a list, so that it is not a submodule

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.tower(ids) + self.mix(self.centroid[ids.long()])
        return vectors

    def inner(self) -> nn.Module:
        return self.tower

    def follow(self, batches: ClusteredBatches) -> None:
        """Read query vectors from the memory of these batches."""
        self._kept = [batches]

    def refresh(self, corpus: Corpus) -> None:
        """Recompute the centroids, except before the first epoch, when vectors are still random."""
        if not corpus.epoch:
            return
        start, items = corpus.positives.start.long(), corpus.positives.items
        total = torch.zeros_like(self.centroid)
        for ids in torch.nonzero(start.diff()).flatten().split(_BLOCK):
            vectors = self._kept[0].memory[ids] if self._kept else corpus.encode_queries(ids)
            count = start[ids + 1] - start[ids]
            first = torch.repeat_interleave(start[ids] - (torch.cumsum(count, 0) - count), count)
            pairs = torch.arange(len(first), device=first.device) + first
            total.index_add_(0, items[pairs].long(), vectors.to(total.dtype)[:, : self.dim].repeat_interleave(count, 0))
        number = torch.bincount(items.long(), minlength=self.n).unsqueeze(1)
        self.centroid.copy_(total / (number + self.shrink).clamp(min=1))


def shared_vectors(n_items: int, items: int, private: int) -> tuple[int, int]:
    """(shared, private) auxiliary vectors such that about `items` items share one; shared is a power of two."""
    private = min(private, n_items // 2)
    return 2 ** max(0, round(math.log2((n_items - private) / items))), private
