"""Batches of similar queries (NGAME): rows that share a cluster share a batch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.types import Corpus, Outcome, Step
from sparring.data.batches import RandomBatches
from sparring.models.clusters.balanced import balanced_2means


class ClusteredBatches(RandomBatches):
    """Batches of complete clusters of similar queries, in random order: they have hard negatives for each other.

        order of an epoch = a random permutation of the clusters, each with its rows together, cut into slices

    Clusters come from balanced_2means over the vectors that the queries had in their last step. Training keeps these
    vectors, so no query is encoded for clustering. Before epoch `start` (from 0) every row is its own cluster, which is
    bitwise equal to RandomBatches. Then clusters of about `size` rows (a power of two of clusters) are rebuilt every
    `every` epochs, and their size doubles at each epoch in `grow`. With `vectors` (n_queries, dim) those are clustered,
    and none are kept. A cluster at the edge of a batch may be cut. Each epoch's record has `cluster_seconds`, which is
    part of its seconds.

        ClusteredBatches(query_of_row, n_queries, dim=256, batch_size=1024, size=8, start=1, every=5, grow=(25, 50))

    Dahiya et al., NGAME: Negative Mining-aware Mini-batching for Extreme Classification, WSDM 2023, section 3.
    """

    in_place = True  # refresh() updates buffers in place, so a captured CUDA graph stays valid
    cluster: Tensor
    memory: Tensor
    queries: Tensor

    def __init__(
        self,
        queries: Tensor,
        n_queries: int,
        dim: int,
        batch_size: int,
        seed: int = 0,
        size: int = 8,
        start: int = 1,
        every: int = 5,
        grow: Sequence[int] = (),
        vectors: Tensor | None = None,
    ) -> None:
        super().__init__(len(queries), batch_size, seed)
        if size < 1 or every < 1 or start < 0 or min(grow, default=0) < 0:
            raise UserError(
                f"clusters need size, every >= 1 and start, grow >= 0; got {size}, {every}, {start}, {tuple(grow)}"
            )
        self.size, self.start, self.every, self.grow, self.keeps = size, start, every, tuple(grow), vectors is None
        self.register_buffer("queries", queries, persistent=False)  # (rows,) the query of each row
        self.register_buffer("cluster", torch.arange(self.n_rows, dtype=torch.int32))
        kept = torch.zeros(n_queries, dim) if vectors is None else vectors
        self.register_buffer("memory", kept, persistent=self.keeps)
        self.seconds = 0.0

    def size_at(self, epoch: int) -> int:
        """About how many rows a cluster built in this epoch has; 1 before epoch `start`."""
        return 1 if epoch < self.start else self.size * 2 ** sum(epoch >= when for when in self.grow)

    def observe(self, step: Step, outcome: Outcome) -> None:
        if self.keeps:
            self.memory[step.batch.query_ids] = step.batch.q.detach().to(self.memory.dtype)

    def refresh(self, corpus: Corpus) -> None:
        size, since = self.size_at(corpus.epoch), corpus.epoch - self.start
        if size == 1 or (since % self.every and size == self.size_at(corpus.epoch - 1)):
            return
        began = time.perf_counter()
        wanted = 2 ** max(0, round(math.log2(self.n_rows / size)))
        self.cluster.copy_(balanced_2means(self.memory[self.queries.long()], wanted, corpus.generator))
        self.seconds += time.perf_counter() - began

    def report(self) -> dict[str, float]:
        """Seconds spent on clustering since the last report: the cost of mining."""
        spent, self.seconds = self.seconds, 0.0
        return {"cluster_seconds": round(spent, 3)}

    def around(self, rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Row indices of a batch that starts with `rows`, then the rest of their clusters, then other clusters."""
        cluster = self.cluster.long().cpu()
        place = torch.randperm(self.n_rows, generator=generator)
        place[cluster[rows]] -= self.n_rows
        order = torch.sort(place[cluster], stable=True).indices
        return torch.cat([rows, order[~torch.isin(order, rows)]])[: max(size, len(rows))]

    @property
    def largest_group(self) -> int:
        return int(torch.bincount(self.cluster.long()).max())

    def _order(self, epoch: int) -> Tensor:
        order = super()._order(epoch)
        rank = torch.empty_like(order)
        rank[order.long()] = torch.arange(self.n_rows, dtype=order.dtype)
        return torch.sort(rank[self.cluster.long().cpu()], stable=True).indices
