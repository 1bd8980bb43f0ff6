"""Negatives from the catalogue: Sampled, AllItems; and Shown, items that the query was shown and did not take."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, Positives, Provenance, Step
from sparring.negatives.base import (
    UNKNOWN,
    Correction,
    ExcludeKind,
    Negatives,
    check_choice,
    corrected,
    drawable,
    exclude_for,
    within,
    zeros,
)
from sparring.negatives.distributions import Distribution


class Sampled(Negatives):
    """n items drawn with replacement from a distribution, for all queries together or for each (UNS, PNS).

        expected count of j = n q_j

    Shared negatives are encoded once and cost one row of a matrix product each; per_query=True encodes B * n of them.
    In a small catalogue many of these are duplicates, whose rows are fetched and updated once.

        Sampled(Uniform(n_items), 1024)
    """

    encodes = True

    def __init__(
        self,
        distribution: Distribution,
        n: int,
        per_query: bool = False,
        correction: Correction = "count",
        exclude: ExcludeKind = "positive",
    ):
        super().__init__()
        check_choice("correction", correction, Correction)
        check_choice("exclude", exclude, ExcludeKind)
        if n < 1:
            raise ValueError(f"Sampled needs n >= 1, got {n}")
        self.distribution, self.n, self.per_query = distribution, n, per_query
        self.correction, self.exclude = correction, exclude

    def forward(self, step: Step) -> Bag:
        ids = self.distribution.sample((len(step.batch), self.n) if self.per_query else (self.n,), step.generator)
        ids = step.batch.own(ids) if self.per_query else ids
        exclude, words = exclude_for(step, self.exclude), Provenance(f"sampled from {self.distribution}")
        block = Candidates(ids, step.encode(ids), zeros(step), exclude, provenance=words)
        return corrected([block], step, self, self.correction)

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        return math.log(self.n) + self.distribution.log_prob(ids)

    def size(self, step: Step) -> float:
        return self.n


class AllItems(Negatives):
    """Every item of the catalogue, or of `among`, once: the full softmax.

    Affordable up to some 100,000 items; the oracle of the tests.

        AllItems(n_items)
    """

    n_items: int
    among: Tensor | None

    def __init__(self, n_items: int, exclude: ExcludeKind = "positive", among: Tensor | None = None):
        super().__init__()
        check_choice("exclude", exclude, ExcludeKind)
        self.n_items, self.exclude = n_items, exclude
        self.register_buffer("among", drawable(among, n_items), persistent=False)

    def forward(self, step: Step) -> Bag:
        ids = torch.arange(self.n_items, device=step.q.device) if self.among is None else self.among
        exclude, words = exclude_for(step, self.exclude), Provenance("all items")
        return Bag((Candidates(ids, step.encode(ids), zeros(step), exclude, provenance=words),))

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        return within(torch.zeros(ids.shape, device=ids.device), ids, self.among)

    def size(self, step: Step) -> float:
        return self.n_items if self.among is None else len(self.among)


class Shown(Negatives):
    """n items per query that it was shown and did not take (explicit negatives, impressions without a click).

    Drawn with replacement from the query's own list, each with weight 1; a query without a list gets candidates that
    count nothing. Usually one source of a Union, which then keeps each source's own weights: these items are not a
    sample of the catalogue.

        Union(InBatch(pop), Shown(train.shown_lists(), 4))
    """

    log_count = UNKNOWN
    start: Tensor
    items: Tensor

    def __init__(self, shown: Positives, n: int, exclude: ExcludeKind = "positive"):
        super().__init__()
        check_choice("exclude", exclude, ExcludeKind)
        if n < 1:
            raise ValueError(f"Shown needs n >= 1, got {n}")
        self.n, self.exclude = n, exclude
        self.register_buffer("start", shown.start, persistent=False)
        self.register_buffer("items", shown.items, persistent=False)

    def forward(self, step: Step) -> Bag:
        begin = self.start[step.query_ids].unsqueeze(1)
        count = self.start[step.query_ids + 1].unsqueeze(1) - begin
        u = torch.rand(len(step.batch), self.n, generator=step.generator, device=step.q.device, dtype=torch.float64)
        u = step.batch.own(u)
        within = torch.minimum((u * count).long(), (count - 1).clamp(min=0))
        place = (begin + within).clamp(max=max(len(self.items) - 1, 0))
        ids = torch.full_like(place, -1)
        if len(self.items):
            ids = torch.where(count > 0, self.items[place].long(), ids)
        log_w = torch.where(ids >= 0, 0.0, -math.inf)
        emb = step.encode(ids.clamp(min=0))
        exclude, words = exclude_for(step, self.exclude), Provenance("shown and not taken")
        return Bag((Candidates(ids, emb, log_w, exclude, provenance=words),))
