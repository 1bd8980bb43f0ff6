"""Negatives from random buckets of queries and items with similar directions: HardestBucket (SCE)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, Provenance, Step
from sparring.kernels import reference
from sparring.negatives.base import UNKNOWN, ExcludeKind, Negatives, check_choice, drawable


class HardestBucket(Negatives):
    """For each query the n items of the hardest random bucket that contains the query (SCE, scalable cross-entropy).

        bucket b:   r_b ~ N(0, I)
        queries:    the `queries` of the batch with the largest q_i . r_b
        items:      the n of the catalogue with the largest e_j . r_b
        query i:    the items of its bucket with the largest sum_j exp(q_i . e_j / tau), without excluded items

    Cross-entropy grows with that sum, so sampled_softmax over this bag is the published loss: the largest cross-entropy
    over the query's buckets. A query in no bucket gets candidates that count nothing. The items are not a sample of the
    catalogue, so there is no correction. mix=True uses r_b = sum_i w_bi q_i, w ~ N(0, 1), which places buckets near the
    queries. Each step reads all item vectors without gradient; only items in a bucket are encoded with gradient.
    `buckets` and `queries` default to 2 sqrt(B); `among` are the items of the catalogue that a bucket may hold, by
    default all. On CUDA nothing synchronises, unless exclude="known".

        Term(1.0, HardestBucket(n_items, 256), sampled_softmax)

    Mezentsev et al., Scalable Cross-Entropy Loss for Sequential Recommendations with Large Item Catalogs, RecSys 2024.
    """

    log_count = UNKNOWN
    encodes = True
    n_items: int
    among: Tensor | None

    def __init__(
        self,
        n_items: int,
        n: int,
        buckets: int | None = None,
        queries: int | None = None,
        mix: bool = False,
        exclude: ExcludeKind = "positive",
        among: Tensor | None = None,
    ):
        super().__init__()
        check_choice("exclude", exclude, ExcludeKind)
        if min(n_items, n, 1 if buckets is None else buckets, 1 if queries is None else queries) < 1:
            raise ValueError(
                f"HardestBucket needs n_items, n, buckets and queries >= 1, got {n_items}, {n}, {buckets} and {queries}"
            )
        self.n_items, self.n, self.buckets = n_items, n, buckets
        self.queries, self.mix, self.exclude = queries, mix, exclude
        self.register_buffer("among", drawable(among, n_items), persistent=False)

    def forward(self, step: Step) -> Bag:
        with torch.no_grad():
            members, items = self.fill(step)
            never = _never(step, members, items, self.exclude)
        emb = step.encode(items.flatten()).unflatten(0, items.shape)
        with torch.no_grad():
            scores = torch.bmm(step.batch.gather(step.scaled)[members], emb.transpose(1, 2)).masked_fill_(
                never, -math.inf
            )
            place = step.batch.own(_best_place(reference.safe_logsumexp(scores), members, len(step.batch)))
            inside = place >= 0
            place = place.clamp(min=0)
            bucket = place // members.shape[1]
            ids = torch.where(inside.unsqueeze(1), items[bucket], -1)
            log_w = torch.where(inside.unsqueeze(1) & ~never.flatten(0, 1)[place], 0.0, -math.inf)
        # index_select: its backward pass adds complete buckets, that of plain indexing sorts first
        emb = emb.index_select(0, bucket)
        source = f"the hardest of {len(items):,} buckets of {members.shape[1]:,} queries"
        masked = {"none": "nothing", "positive": "own positive", "known": "all known positives"}[self.exclude]
        return Bag((Candidates(ids, emb, log_w, provenance=Provenance(source, masked=masked)),))

    def fill(self, step: Step) -> tuple[Tensor, Tensor]:
        """The rows of the batch (buckets, queries), over all ranks, and the items (buckets, n) in each bucket."""
        q = step.batch.q.detach()
        b, dim = q.shape
        usual = max(round(2 * math.sqrt(b)), 1)
        shape = (self.buckets or usual, b if self.mix else dim)
        centres = torch.randn(shape, generator=step.generator, device=q.device).to(q.dtype)
        if self.mix:
            centres = centres @ q
        ids = torch.arange(self.n_items, device=q.device) if self.among is None else self.among
        vectors = step.encode(ids).to(q.dtype)
        members = (centres @ q.T).topk(min(self.queries or usual, b), 1).indices
        places = (centres @ vectors.T).topk(min(self.n, len(ids)), 1).indices
        return members, places if self.among is None else self.among[places]


def _never(step: Step, members: Tensor, items: Tensor, exclude: ExcludeKind) -> Tensor:
    """(buckets, queries, n) bool: the items of a bucket that never count against a query."""
    if exclude == "none":
        return torch.zeros((), dtype=torch.bool, device=items.device).expand(*members.shape, items.shape[1])
    if exclude == "positive":
        return items.unsqueeze(1) == step.batch.item_ids[members].unsqueeze(2)
    pairs = step.known(step.batch.query_ids[members.flatten()])
    never = torch.zeros(members.numel(), items.shape[1], dtype=torch.bool, device=items.device)
    never[pairs.hits(items.repeat_interleave(members.shape[1], 0))] = True
    return never.view(*members.shape, -1)


def _best_place(sums: Tensor, members: Tensor, b: int) -> Tensor:
    """(B,): the place (buckets, queries) of the largest sum of each row of the batch; -1 if it has none above -inf."""
    table = torch.full((b, len(members)), -math.inf, dtype=sums.dtype, device=sums.device).scatter_(
        0, members.T, sums.T
    )
    places = torch.arange(members.numel(), device=sums.device).view_as(members)
    place = torch.zeros((b, len(members)), dtype=torch.long, device=sums.device).scatter_(0, members.T, places.T)
    best = table.max(1)
    return torch.where(torch.isneginf(best.values), -1, place.gather(1, best.indices.unsqueeze(1)).squeeze(1))
