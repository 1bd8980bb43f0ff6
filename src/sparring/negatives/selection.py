"""Candidates selected from a bag by their scores: Hardest, AmongHardest, NearestTo."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, Step
from sparring.kernels import ExcludedKeys, logits
from sparring.negatives.algebra import merged
from sparring.negatives.base import UNKNOWN, Negatives


class Selection(Negatives):
    """A subset of a bag for each query, with the weights of the bag, chosen by `choose(scores, step)`.

    `scores` (B, C) are q_i . e_j / tau, or -inf for an excluded candidate; `choose` returns columns (B, K). No gradient
    flows through the choice. An excluded candidate is chosen only if too few others are left, and counts nothing.
    """

    log_count = UNKNOWN
    name = "selected"
    # most vectors gathered per batch; beyond this a shared block keeps all columns and drops the others by weight
    gathered = 1 << 16

    def __init__(self, source: Negatives, k: int):
        super().__init__()
        if k < 1:
            raise ValueError(f"{type(self).__name__} needs k >= 1, got {k}")
        self.source, self.k = source, k

    def choose(self, scores: Tensor, step: Step) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define choose(scores, step)")

    def forward(self, step: Step) -> Bag:
        # encode only the selected items with gradient, if they can be encoded again: the others would get zero updates
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.source.encodes):
            bag = self.source(step)
            block = merged(bag, step)
        with torch.no_grad():
            scores = masked_logits(step.scaled, block)
            chosen = self.choose(scores, step)
            weights = block.log_w.expand(scores.shape).gather(1, chosen)
            weights = weights.masked_fill(torch.isneginf(scores.gather(1, chosen)), -math.inf)
        words = block.derived(f"{self.name} {chosen.shape[1]:,} of {block.provenance.source}")
        kept = replace(block, exclude=None, drawn=None, provenance=words)
        if block.shared and chosen.numel() > self.gathered:
            emb = step.encode(block.ids) if self.source.encodes else block.emb
            kept = replace(kept, emb=emb, log_w=scores.fill_(-math.inf).to(weights.dtype).scatter_(1, chosen, weights))
        else:
            ids = block.ids.expand(scores.shape).gather(1, chosen)
            kept = replace(
                kept,
                ids=ids,
                emb=step.encode(ids) if self.source.encodes else _columns(block.emb, chosen),
                log_w=weights,
            )
        return Bag((kept,), bag.log_w_positive)


def _columns(emb: Tensor, chosen: Tensor) -> Tensor:
    """(B, K, D): the chosen vectors of each query."""
    if emb.dim() == 2:
        # index_select: its backward pass adds rows in order, that of plain indexing sorts them first
        return emb.index_select(0, chosen.flatten()).view(*chosen.shape, -1)
    return emb[torch.arange(len(chosen), device=chosen.device).unsqueeze(1), chosen]


def masked_logits(q: Tensor, block: Candidates) -> Tensor:
    """(B, C): q_i . e_j, or -inf for a dropped or excluded candidate; in place, to save a (B, C) table of weights."""
    scores = logits(q, block.emb)
    scores.masked_fill_(torch.isneginf(block.log_w), -math.inf)
    places = block.exclude.places(block.ids) if block.exclude else None
    if isinstance(places, Tensor | ExcludedKeys):
        scores.masked_fill_(places.mask() if isinstance(places, ExcludedKeys) else places, -math.inf)
    elif places is not None:
        scores.index_put_(places, torch.tensor(-math.inf, dtype=scores.dtype, device=scores.device))
    return scores


class Hardest(Selection):
    """Keep the k highest-scoring candidates of each query, with their weights (online hard negatives, DNS, AMNS).

    Deterministic, unlike Resample: a candidate outside the top k is never used. Excluded candidates are kept only if
    fewer than k others are left, and count nothing.

        Hardest(Sampled(Uniform(n_items), 64, per_query=True), 1)

    Zhang et al., Optimizing Top-N Collaborative Filtering via Dynamic Negative Item Sampling, SIGIR 2013.
    """

    name = "hardest"

    def choose(self, scores: Tensor, step: Step) -> Tensor:
        return scores.topk(min(self.k, scores.shape[1]), dim=1).indices


class AmongHardest(Selection):
    """Keep k of the m highest-scoring candidates of each query, chosen uniformly without replacement (DNS(M, N)).

    m / (size of the bag) sets how hard the negatives are, and with bpr which part of the ROC curve is optimised; m = k
    is Hardest. If fewer than m candidates count, the choice is among those. An item drawn twice is two candidates.

        AmongHardest(Sampled(Uniform(n_items), 64, per_query=True), m=4)

    Shi et al., On the Theories Behind Hard Negative Sampling for Recommendation, WWW 2023.
    """

    name = "at random among the hardest,"

    def __init__(self, source: Negatives, m: int, k: int = 1):
        super().__init__(source, k)
        if m < k:
            raise ValueError(f"AmongHardest needs m >= k, got m={m}, k={k}")
        self.m = m

    def choose(self, scores: Tensor, step: Step) -> Tensor:
        top = scores.topk(min(self.m, scores.shape[1]), dim=1)
        order = torch.rand(len(step.batch), top.values.shape[1], generator=step.generator, device=scores.device)
        order = step.batch.own(order)
        order.masked_fill_(torch.isneginf(top.values), -1.0)
        return top.indices.gather(1, order.topk(min(self.k, order.shape[1]), dim=1).indices)


class NearestTo(Selection):
    """Keep the k candidates whose score is nearest to a target that falls as the positive's score grows (AHNS).

        target_i = beta (s_i+ + alpha)^(p + 1),   s = q . e without the temperature;   p = -2: beta / (s_i+ + alpha)

    A positive with a high score gets easier negatives, to avoid false negatives; one with a low score gets harder ones.
    If s_i+ + alpha <= 0 and p < -1, the target is its limit from above: the hardest candidates.

        NearestTo(Sampled(Uniform(n_items), 32, per_query=True), alpha=1.0, beta=0.1)

    Lai et al., Adaptive Hardness Negative Sampling for Collaborative Filtering, AAAI 2024.
    """

    name = "nearest to the target,"

    def __init__(self, source: Negatives, k: int = 1, alpha: float = 1.0, beta: float = 0.1, p: float = -2.0):
        super().__init__(source, k)
        if not beta >= 0:
            raise ValueError(f"NearestTo needs beta >= 0, got {beta}")
        self.alpha, self.beta, self.p = alpha, beta, p

    def choose(self, scores: Tensor, step: Step) -> Tensor:
        base = (step.q * step.v).sum(-1, keepdim=True) + self.alpha
        # in logits and at most the highest score: distances to a much higher target would round to ties
        target = self.beta * base.clamp(min=1e-12) ** (self.p + 1) / step.tau.reshape(-1, 1)
        high = scores.amax(1, keepdim=True)
        distance = (scores - torch.minimum(target, high.masked_fill(torch.isneginf(high), 0.0))).abs_()
        return distance.topk(min(self.k, scores.shape[1]), dim=1, largest=False).indices
