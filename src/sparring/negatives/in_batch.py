"""Negatives from the batch: InBatch, its positives; BatchPositives, all known positives of its queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, Provenance, Step
from sparring.negatives.base import (
    UNKNOWN,
    Correction,
    ExcludeKind,
    Negatives,
    check_choice,
    corrected,
    exclude_for,
    zeros,
)
from sparring.negatives.distributions import Frequency


class InBatch(Negatives):
    """The positives of the other queries in the batch (SSL; with a frequency SSL-Pop, with Streaming G-Tower).

        expected count of j = (B - 1) q_j,   since the query's own column never counts against it

    Without a frequency the candidates are uncorrected: popular items are over-represented. Where rows of one query
    share the batch (sequences, sets), those rows never count against each other: the expected count holds for others.

        InBatch(Popularity(train.counts()))

    Yi et al., Sampling-Bias-Corrected Neural Modeling, RecSys 2019.
    """

    def __init__(
        self, frequency: Frequency | None = None, correction: Correction = "count", exclude: ExcludeKind = "positive"
    ):
        super().__init__()
        check_choice("correction", correction, Correction)
        check_choice("exclude", exclude, ExcludeKind)
        self.frequency, self.correction, self.exclude = frequency, correction, exclude
        if frequency is None:
            self.log_count = UNKNOWN  # type: ignore[method-assign]

    def forward(self, step: Step) -> Bag:
        grouped = step.batch.grouped and self.exclude == "positive"
        exclude, words = exclude_for(step, "known" if grouped else self.exclude), Provenance("in-batch")
        block = Candidates(step.batch.item_ids, step.batch.v, zeros(step), exclude, provenance=words)
        return corrected([block], step, self, "none" if self.frequency is None else self.correction)

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        return None if self.frequency is None else math.log(self.size(step)) + self.frequency.log_prob(ids)

    def size(self, step: Step) -> float:
        # a query's own column does not count, unless nothing is excluded
        return max(len(step.batch) - 1, 1) if self.exclude != "none" else len(step.batch)


class BatchPositives(Negatives):
    """All known positives of the queries in the batch, each item once.

    A query's own known positives never count against it. InBatch instead holds one positive per query, with duplicates.

        BatchPositives()

    Dahiya et al., NGAME: Negative Mining-aware Mini-batching for Extreme Classification, WSDM 2023, module 4.
    """

    log_count = UNKNOWN
    encodes = True

    def __init__(self, exclude: ExcludeKind = "known"):
        super().__init__()
        check_choice("exclude", exclude, ExcludeKind)
        self.exclude = exclude

    def forward(self, step: Step) -> Bag:
        known = step.known(step.batch.query_ids).ids
        ids = torch.unique(torch.cat([known, step.batch.item_ids]))
        exclude, words = exclude_for(step, self.exclude), Provenance("positives of the batch")
        return Bag((Candidates(ids, step.encode(ids), zeros(step), exclude, provenance=words),))
