"""The interface of all samplers, and the correction of candidates by how often they are offered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sparring.core.part import Part
from sparring.core.subset import checked
from sparring.core.types import Bag, Candidates, Exclude, Step

Correction = Literal["count", "negatives", "both", "refined", "none"]
ExcludeKind = Literal["positive", "known", "none"]


class Unknown:
    """The type of UNKNOWN."""

    def __call__(self, *arguments: object) -> None:
        return None

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Any = Unknown()  # `log_count = UNKNOWN` in a sampler: how often it offers an item is not known


class Negatives(Part):
    """A sampler: the candidates that each query is contrasted with, and their weights.

    `forward(step)` returns the bag and never changes state. State changes only in the events of Part: `observe` after
    each step, `refresh` before each epoch.

        class FirstItems(Negatives):
            def forward(self, step):
                ids = torch.arange(100, device=step.q.device)
                return Bag((Candidates(ids, step.encode(ids), step.q.new_zeros(()), Exclude(step.item_ids)),))
    """

    encodes: bool = False  # every vector of the bag is step.encode(id)

    def forward(self, step: Step) -> Bag:
        raise TypeError(f"{type(self).__name__} must define forward(step)")

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        """Log of the expected number of occurrences of each id among the `size(step)` candidates; None if unknown.

        Corrections divide by the count, and Union adds counts up. If it depends on the query, the result is (B, C), for
        ids (C,) or (B, C). A sampler that cannot tell declares `log_count = UNKNOWN`.
        """
        return None

    def size(self, step: Step) -> float | Tensor:
        """The number of candidates of a query; needed with log_count."""
        raise TypeError(f"{type(self).__name__} defines log_count, so it must define size(step)")


def exclude_for(step: Step, kind: ExcludeKind) -> Exclude | None:
    """The exclusion of a step: each query's own positive, all its known positives, or nothing."""
    if kind == "none":
        return None
    if kind == "positive":
        return Exclude(step.item_ids)
    return step.known()


def zeros(step: Step) -> Tensor:
    """No weight: log_w = 0 for every candidate."""
    return torch.zeros((), device=step.q.device)


def check_choice(name: str, value: str, choices: object) -> None:
    """Raise ValueError unless the value is one of the choices of a Literal."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}; got {value!r}")


def drawable(among: Tensor | None, n_items: int) -> Tensor | None:
    """The items that a sampler may draw, in ascending order; None for the complete catalogue.

    An item without a training pair is never a positive. A sampler that draws it all the same teaches towers over
    features or texts to rank it last, so recipes leave such items out (`recipes.in_batch.with_pairs`).
    """
    ids = None if among is None else checked(among, n_items)
    return None if ids is None or len(ids) == n_items else ids


def within(log_count: Tensor, ids: Tensor, among: Tensor | None) -> Tensor:
    """Log counts of ids, -inf where a sampler never draws the id; `among` is in ascending order."""
    if among is None:
        return log_count
    place = torch.searchsorted(among, ids).clamp(max=len(among) - 1)
    return torch.where(among[place] == ids, log_count, -math.inf)


def corrected(blocks: list[Candidates], step: Step, source: Negatives, correction: Correction) -> Bag:
    """Weight candidates by how often the source offers them: count_j from log_count, q_j = count_j / size.

        count      log_w_j = -log count_j                      unbiased: E sum_j w_j e^s_j = the sum over the catalogue
        negatives  log_w_j = -log q_j                          count without log n: negatives weigh n times too much
        both       log_w_j = -log q_j, positive -log q_+       the textbook logQ (Yi et al. 2019)
        refined    as count, positive -log(1 - q_+)            negatives from a catalogue without the positive
        none       log_w_j = 0

    The gradient of `refined` equals that of the published -sg(1 - P)[s_+ - log sum_j exp(s_j - log Q'_j)] with
    Q' = Q / (1 - Q_+).
    """
    if correction == "none":
        return Bag(tuple(blocks))

    def log_count(ids: Tensor) -> Tensor:
        known = source.log_count(ids.clamp(min=0), step)
        assert known is not None
        return known

    size = source.size(step)
    log_size = size.log() if isinstance(size, Tensor) else math.log(size)
    shift = log_size if correction in ("negatives", "both") else 0.0
    names = {"count": "-log expected count", "refined": "-log expected count", "negatives": "-log q", "both": "-log q"}
    weighed = []
    positive_count: Tensor | None = None
    for block in blocks:
        count = log_count(block.ids)
        if block.ids is step.item_ids and count.dim() == 1:
            positive_count = count
        log_w = shift - count
        log_w = torch.where(torch.isneginf(block.log_w), block.log_w, log_w)
        words = replace(block.provenance, weighting=names[correction])
        weighed.append(replace(block, log_w=log_w, provenance=words))
    positive = None
    if correction in ("both", "refined") and positive_count is None:
        # a column, since counts may depend on the query
        positive_count = log_count(step.item_ids.unsqueeze(1)).squeeze(1)
    if correction == "both":
        assert positive_count is not None
        positive = log_size - positive_count
    elif correction == "refined":
        assert positive_count is not None
        # the published form divides by the number of negatives that differ from the positive
        kept = torch.zeros(len(step.q), device=step.q.device)
        for block in blocks:
            hit = torch.bincount(Exclude(step.item_ids).hits(block.ids)[0], minlength=len(kept))
            kept += (~torch.isneginf(block.log_w)).expand(block.ids.shape).sum(-1) - hit
        log_kept = kept.clamp(min=1).log() - log_size
        positive = log_kept - torch.log1p(-(positive_count - log_size).exp().clamp(max=1 - 1e-6))
    if positive is not None:  # nan: an empty source has no frequency
        positive = positive.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    return Bag(tuple(weighed), positive)
