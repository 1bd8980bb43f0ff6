"""Negatives by what the model itself retrieves, or what a batch knows: NearestItems (ANCE), BatchPositives (NGAME's classifiers)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparring.negatives.algebra import Exclusion, Negatives, check_choice, exclusion
from sparring.negatives.batch import zeros
from sparring.rank import top_k
from sparring.types import Bag, Candidates, Corpus, Step

_BLOCK = 8192  # queries encoded and ranked at a time


class NearestItems(Negatives):
    """Items near each query as the model ranked the whole catalogue some epochs ago (ANCE).

    Every `every` epochs, beginning with the epoch `start` counted from 0, all queries that have positives are encoded and their k best
    items, known positives left out, are listed, exactly; the first `skip` of them are dropped: some are right and only unknown.
    A step draws n of its query's list, with replacement. They are shared by all queries of the batch, or with per_query=True count
    against the query of the list alone. Before the first lists they count nothing. Lists take 4 k bytes a query.

        Union(InBatch(), NearestItems(n_queries, n=1, k=200))

    Xiong et al., Approximate Nearest Neighbor Negative Contrastive Learning for Dense Text Retrieval, ICLR 2021.
    """

    lists: Tensor

    def __init__(
        self,
        n_queries: int,
        n: int = 1,
        k: int = 200,
        skip: int = 0,
        every: int = 5,
        start: int = 0,
        per_query: bool = False,
        exclude: Exclusion = "known",
    ):
        super().__init__()
        check_choice("exclude", exclude, Exclusion)
        if min(n_queries, n, k, every) < 1 or min(skip, start) < 0:
            raise ValueError(
                f"NearestItems needs n, k, every >= 1 and skip, start >= 0, got n={n}, k={k}, every={every}, skip={skip}, start={start}"
            )
        self.n, self.skip, self.every, self.start, self.per_query, self.exclude = n, skip, every, start, per_query, exclude
        self.register_buffer("lists", torch.full((n_queries, k), -1, dtype=torch.int32))

    def forward(self, step: Step) -> Bag:
        lists = self.lists[step.query_ids]
        filled = (lists >= 0).sum(1, keepdim=True)  # places without an item are the last
        u = torch.rand(len(lists), self.n, dtype=torch.float64, generator=step.generator, device=lists.device)
        at = torch.minimum((u * filled).long(), (filled - 1).clamp(min=0))
        ids = lists.gather(1, at).long()
        if not self.per_query:
            ids = ids.flatten()
        log_w = torch.where(ids >= 0, 0.0, -math.inf)
        emb = step.encode(ids.clamp(min=0))
        return Bag((Candidates(ids, emb, log_w, exclusion(step, self.exclude), source="nearest items of each query"),))

    def refresh(self, corpus: Corpus) -> None:
        """New lists from the vectors as they are now, where it is time."""
        since = corpus.epoch - self.start
        if since < 0 or since % self.every:
            return
        some = torch.nonzero(corpus.positives.start.diff()).flatten()
        k = min(self.lists.shape[1] + self.skip, len(corpus.items))
        for ids in some.split(_BLOCK):
            found = top_k(corpus.encode_queries(ids).float(), corpus.items.float(), k, corpus.positives, ids)[1][:, self.skip :]
            self.lists[ids, : found.shape[1]] = found.to(torch.int32)


class BatchPositives(Negatives):
    """Every item that is positive for some query of the batch, once, whether drawn for it or not.

    A query's own known positives never count against it. Unlike InBatch, which has one positive of each query, duplicates and all.

        BatchPositives()

    Dahiya et al., NGAME: Negative Mining-aware Mini-batching for Extreme Classification, WSDM 2023, module 4.
    """

    encodes = True

    def __init__(self, exclude: Exclusion = "known"):
        super().__init__()
        check_choice("exclude", exclude, Exclusion)
        self.exclude = exclude

    def forward(self, step: Step) -> Bag:
        known = exclusion(step, "known")
        assert known is not None
        ids = torch.unique(torch.cat([known.ids, step.item_ids]))
        return Bag((Candidates(ids, step.encode(ids), zeros(step), exclusion(step, self.exclude), source="positives of the batch"),))
