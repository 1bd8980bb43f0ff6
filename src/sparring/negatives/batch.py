"""Negatives that cost no further encoding or come from steps before: InBatch, Memory, Cache."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from sparring.negatives.algebra import Correction, Exclusion, Negatives, check_choice, corrected, exclusion
from sparring.negatives.distributions import Distribution, Frequency, draw_from_cdf
from sparring.types import Bag, Candidates, Outcome, Step


def zeros(step: Step) -> Tensor:
    return torch.zeros((), device=step.q.device)


class InBatch(Negatives):
    """The positives of the other queries in the batch (SSL; with a frequency SSL-Pop, or G-Tower when that is Streaming).

        expected count of j = (B - 1) q_j,   since the query's own column never counts against it

    Without a frequency the candidates are uncorrected, and popular items are over-represented by how often they occur.

        InBatch(Popularity(train.counts()))

    Yi et al., Sampling-Bias-Corrected Neural Modeling, RecSys 2019.
    """

    def __init__(self, frequency: Frequency | None = None, correction: Correction = "count", exclude: Exclusion = "positive"):
        super().__init__()
        check_choice("correction", correction, Correction)
        check_choice("exclude", exclude, Exclusion)
        self.frequency, self.correction, self.exclude = frequency, correction, exclude

    def forward(self, step: Step) -> Bag:
        block = Candidates(step.item_ids, step.v, zeros(step), exclusion(step, self.exclude), source="in-batch")
        return corrected([block], step, self, "none" if self.frequency is None else self.correction)

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        return None if self.frequency is None else math.log(self.size(step)) + self.frequency.log_prob(ids)

    def size(self, step: Step) -> float:
        # its own column never counts against a query, unless nothing is excluded
        return max(len(step.item_ids) - 1, 1) if self.exclude != "none" else len(step.item_ids)


class Memory(Negatives):
    """The last `size` positives of past steps, with the vectors they had then and no gradient (CBNS).

    A first-in first-out ring; slots not filled yet count nothing. `warmup` steps pass before it starts to fill, because vectors change
    quickly at first. Unlike Cache the vectors are kept, so nothing is encoded again, but they grow stale.

        Union(InBatch(pop), Memory(2432, dim, pop))

    Wang et al., Cross-Batch Negative Sampling, SIGIR 2021.
    """

    ids: Tensor
    emb: Tensor
    cursor: Tensor
    steps: Tensor

    def __init__(
        self,
        size: int,
        dim: int,
        frequency: Frequency,
        warmup: int = 0,
        correction: Correction = "count",
        exclude: Exclusion = "positive",
    ):
        super().__init__()
        check_choice("correction", correction, Correction)
        check_choice("exclude", exclude, Exclusion)
        if size < 1:
            raise ValueError(f"Memory needs size >= 1, got {size}")
        self.frequency, self.warmup, self.correction, self.exclude = frequency, warmup, correction, exclude
        self.register_buffer("ids", torch.full((size,), -1))
        self.register_buffer("emb", torch.zeros(size, dim))
        self.register_buffer("cursor", torch.zeros((), dtype=torch.long))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, step: Step) -> Bag:
        empty = torch.where(self.ids < 0, -math.inf, 0.0)
        # a copy: the ring is written before the backward pass of a loss that the caller may still hold
        block = Candidates(self.ids.clone(), self.emb.clone(), empty, exclusion(step, self.exclude), source="memory")
        return corrected([block], step, self, self.correction)

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        return torch.as_tensor(self.size(step)).log() + self.frequency.log_prob(ids)

    def size(self, step: Step) -> Tensor:
        return (self.ids >= 0).sum().float()

    def observe(self, step: Step, outcome: Outcome) -> None:
        self.steps += 1
        new = step.item_ids[-len(self.ids) :]
        at = (self.cursor + torch.arange(len(new), device=new.device)) % len(self.ids)
        open_now = self.steps > self.warmup
        self.ids[at] = torch.where(open_now, new, self.ids[at])
        self.emb[at] = torch.where(open_now, step.v[-len(new) :].detach().to(self.emb.dtype), self.emb[at])
        self.cursor += open_now * len(new)


class Cache(Negatives):
    """Items that past queries drew most often, encoded anew at each step (the cache of XIR).

        o_j += number of times j was drawn in this step;   the next cache: `size` draws with replacement, P(j) proportional to o_j

    The draws are those of every Resample in the run. pool="all" draws the next cache from the whole catalogue, as the paper's
    algorithm 2 says; pool="drawn" only from the items drawn in this step, as its release does, where an item stays only by being
    drawn again and the cache shrinks to a few hundred distinct items. `start` is every item's first occurrence count: 0 in the
    paper (then the first caches are uniform), 1 in the release. The weight is -log q of the frequency; an item the frequency
    calls impossible never enters.

        Resample(Cache(2048, pop, n_items), n=1024)

    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, algorithm 2.
    """

    ids: Tensor
    occurrences: Tensor

    def __init__(
        self,
        size: int,
        frequency: Distribution,
        n_items: int,
        pool: Literal["all", "drawn"] = "all",
        start: float = 0.0,
        exclude: Exclusion = "positive",
        seed: int = 0,
    ):
        super().__init__()
        check_choice("pool", pool, Literal["all", "drawn"])
        check_choice("exclude", exclude, Exclusion)
        if size < 1:
            raise ValueError(f"Cache needs size >= 1, got {size}")
        self.frequency, self.pool, self.exclude = frequency, pool, exclude
        possible = torch.isfinite(frequency.log_prob(torch.arange(n_items)))
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("ids", draw_from_cdf(torch.cumsum(possible.double(), 0), (size,), generator))
        self.register_buffer("occurrences", possible.double() * start)

    def forward(self, step: Step) -> Bag:
        log_w = -self.frequency.log_prob(self.ids)
        ids = self.ids.clone()
        return Bag((Candidates(ids, step.encode(ids), log_w, exclusion(step, self.exclude), source="cache", weighting="-log q"),))

    def observe(self, step: Step, outcome: Outcome) -> None:
        drawn = torch.zeros_like(self.occurrences)
        for bag in outcome.bags:
            for block in bag.blocks:
                if block.usage is not None:
                    ids, usage = block.ids.flatten(), block.usage.double().flatten()
                    drawn.index_add_(0, ids.clamp(min=0), torch.where(ids >= 0, usage, 0.0))
        # a term may draw what the frequency calls impossible: its weight here would be infinite
        drawn *= torch.isfinite(self.frequency.log_prob(torch.arange(len(drawn), device=drawn.device)))
        self.occurrences += drawn
        mass = self.occurrences if self.pool == "all" else torch.where(drawn > 0, self.occurrences, 0.0)
        cdf = torch.cumsum(mass, 0)
        fresh = draw_from_cdf(cdf, (len(self.ids),), step.generator)
        self.ids.copy_(torch.where(cdf[-1] > 0, fresh, self.ids))
