"""Ids in a table of a fixed size, which new ids do not change."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import xxhash
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.part import Part
from sparring.models.towers import IdTower

HASHES = 3


class HashedIds(Part):
    """Ids that share the rows of a table: two hashes choose the rows of an id, a third its learned mixture of them.

        v(id) = p[h2, 0] t[h0] + p[h2, 1] t[h1]      t (buckets, dim), p (buckets, 2), h: hashes of the original id

    A table has `buckets` rows, however many ids there are, and in any other data the same id has the same rows: a warm
    start goes on with the complete table. Two ids have one vector only if all three hashes agree. To share one row is
    frequent, and costs quality: give several times as many buckets as ids that matter. The vector of an id that was
    never trained is one of others, so it is no better than a guess.

        HashedIds(interactions.item_ids.ids, buckets=65_536, dim=64)

    Svenstrup et al., Hash Embeddings for Efficient Word Representations, NeurIPS 2017; their mixture has a row per id.
    """

    codes: Tensor

    def __init__(
        self, ids: Iterable[object], buckets: int, dim: int, init_std: float | None = None, sparse: bool = True
    ) -> None:
        super().__init__()
        if buckets < 2:
            raise UserError(f"buckets is {buckets}; hashed ids need at least 2")
        codes = hash_codes(ids, buckets)
        self.n, self.dim, self.buckets = len(codes), dim, buckets
        self.values = IdTower(buckets, dim, init_std, sparse)
        self.mixture = IdTower(buckets, 2, 0.0, sparse)
        with torch.no_grad():
            self.mixture.weight.fill_(0.5**0.5)  # vectors start as long as those of a table
        self.register_buffer("codes", torch.from_numpy(codes), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        codes = self.codes[ids.long()]
        vectors: Tensor = self.values(codes[..., :2])
        weights: Tensor = self.mixture(codes[..., 2])
        return (vectors * weights.unsqueeze(-1)).sum(-2)

    def extra_repr(self) -> str:
        return f"{self.n}, {self.dim}, buckets={self.buckets}"


def hash_codes(ids: Iterable[object], buckets: int) -> np.ndarray:
    """(n, 3) buckets of the original ids by XXH3 of their text: the same in every process and on every machine."""
    texts = [str(id).encode() for id in ids]
    digests = [[xxhash.xxh3_64_intdigest(text, seed) % buckets for seed in range(HASHES)] for text in texts]
    return np.array(digests, dtype=np.int32).reshape(-1, HASHES)
