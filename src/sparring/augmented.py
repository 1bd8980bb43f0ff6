"""Free vectors that groups of items share, added to what a tower says of each item (DEXA)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from sparring.clusters.balanced import balanced_2means
from sparring.towers import IdTower

_BLOCK = 8192  # items encoded at a time


class Augmented(nn.Module):
    """An item tower whose vectors are corrected by a free vector of the item's cluster (DEXA).

        w_l = E(z_l) + a_c(l),   before any scaling to length 1

    A tower that reads texts or features gives alike items alike vectors; what people take them for may differ in a way that it
    cannot see. The clusters say what items share such a correction: `assign` gives the most frequent items one of their own and halves
    the others (balanced_2means) by the tower's vectors, once, before training. Until then items are dealt out in turn. "xavier" starts
    from vectors much shorter than a tower's, "zeros" from the tower itself. Under the row rules they never decay.

        item = Augmented(tower, vectors=4096);   item.assign(counts, private=1000, generator=generator)

    Dahiya et al., Deep Encoders with Auxiliary Parameters for Extreme Classification, KDD 2023.
    """

    cluster: Tensor

    def __init__(self, tower: nn.Module, vectors: int, init: Literal["xavier", "zeros"] = "xavier", sparse: bool = True) -> None:
        super().__init__()
        self.n, self.dim = int(tower.n), int(tower.dim)  # type: ignore[arg-type]
        if not 1 <= vectors <= self.n:
            raise ValueError(f"auxiliary vectors must number between 1 and the {self.n:,} items, got {vectors}")
        self.tower = tower
        self.auxiliary = IdTower(vectors, self.dim, 0.0, sparse)
        self.auxiliary.undecayed = True
        if init == "xavier":
            nn.init.xavier_uniform_(self.auxiliary.weight)
        self.register_buffer("cluster", torch.arange(self.n, dtype=torch.int32) % vectors)

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.tower(ids) + self.auxiliary(self.cluster[ids.long()])
        return vectors

    def assign(self, counts: Tensor, private: int, generator: torch.Generator) -> None:
        """A vector of its own for each of the `private` most frequent items, and the others by clusters of the tower's vectors."""
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


def shared_vectors(n_items: int, items: int, private: int) -> tuple[int, int]:
    """How many auxiliary vectors so that about `items` items share one: (shared ones, a power of two; and private ones)."""
    private = min(private, n_items // 2)
    return 2 ** max(0, round(math.log2((n_items - private) / items))), private
