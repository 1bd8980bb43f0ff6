"""Candidates that a guide takes for positives count nothing: Unless."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, Filtered, Outcome, Step
from sparring.negatives.base import Negatives
from sparring.negatives.guides import Guide, OwnScores


@dataclass(frozen=True)
class Bounds:
    """The scores from which a candidate is too near the positive, by a guide's scores g_ij and g_i+.

        relative=r   g_ij >= g_i+ - (1 - r) |g_i+|: r g_i+ for a positive that scores above 0
        margin=m     g_ij >= g_i+ - m
        most=a       g_ij >= a

    The bound of `relative` is below the positive's score whatever its sign: r g_i+ alone would lie above a negative
    one. Nothing reaches a bound if one of its two scores is nan.
    """

    relative: float | None = None
    margin: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        if self.relative is not None and not 0 < self.relative <= 1:
            raise ValueError(f"relative is a share of the positive's score, above 0 and at most 1; got {self.relative}")
        if any(bound is not None and not math.isfinite(bound) for bound in (self.margin, self.most)):
            raise ValueError(f"margin and most must be finite, got {self.margin} and {self.most}")

    @property
    def compares(self) -> bool:
        """Whether a bound depends on the positive's score."""
        return self.relative is not None or self.margin is not None

    def reached(self, scores: Tensor, positive: Tensor) -> dict[str, Tensor]:
        """{bound: (B, C) bool} of scores (B, C) and those of the positives (B, 1)."""
        reached = {}
        if self.relative is not None:
            reached["relative"] = scores >= positive - (1 - self.relative) * positive.abs()
        if self.margin is not None:
            reached["margin"] = scores >= positive - self.margin
        if self.most is not None:
            reached["most"] = scores >= self.most
        return reached


def first_left(order: Tensor, left: Tensor, ids: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n ids (B, C) of the largest `order` among those that are `left`, -1 for none, and their places."""
    found = order.masked_fill(~left, -torch.inf).topk(min(n, ids.shape[1]), dim=1)
    return torch.where(torch.isneginf(found.values), -1, ids.gather(1, found.indices)), found.indices


class Unless(Negatives):
    """The candidates of a source, less those that a guide puts too near the positive (false negatives).

        relative=r   drops j where g_ij >= r g_i+ (see Bounds for positives below 0)
        margin=m     drops j where g_ij >= g_i+ - m
        most=a       drops j where g_ij >= a

    g are the guide's scores, by default the model's own (guides.py). With several bounds a candidate must stay below
    each. A dropped candidate has weight 0, all others keep theirs; no gradient flows through the decision. A nan, a
    score that the guide does not have, drops nothing. The query's own positive is the business of the source's
    `exclude`, so it is never dropped here.

    It works on the bag, so on any source: in-batch, drawn, mined, cached. The source's counts become 0 where the guide
    drops the item. Guides that score by tensors do not synchronise a GPU; the decision takes a (B, C) table. Unless
    belongs inside Resample and Hardest, so that they choose among what is left: Resample(Unless(InBatch())). Each epoch
    reports `dropped`, the share of the offered candidates that was dropped.

        Unless(Union(InBatch(), NearestItems(n_queries)), relative=0.95)
        Unless(InBatch(), VectorScores(query_vectors, item_vectors), margin=0.0)

    Moreira et al., NV-Retriever, arXiv 2407.15831 (TopK-PercPos, TopK-MarginPos); Solatorio, GISTEmbed, arXiv
    2402.16829; Qu et al., RocketQA, NAACL 2021.
    """

    dropped: Tensor
    offered: Tensor

    def __init__(
        self,
        source: Negatives,
        guide: Guide | None = None,
        *,
        relative: float | None = None,
        margin: float | None = None,
        most: float | None = None,
    ):
        super().__init__()
        if relative is None and margin is None and most is None:
            raise ValueError("Unless needs a bound: relative, such as 0.95, margin, or most")
        self.bounds = Bounds(relative, margin, most)
        self.source, self.guide = source, OwnScores() if guide is None else guide
        self.encodes = source.encodes
        self.register_buffer("dropped", torch.zeros((), dtype=torch.float64))
        self.register_buffer("offered", torch.zeros((), dtype=torch.float64))

    def forward(self, step: Step) -> Bag:
        bag: Bag = self.source(step)
        return replace(bag, blocks=tuple(self._filtered(step, block) for block in bag.blocks))

    @torch.no_grad()
    def near(self, step: Step, ids: Tensor, emb: Tensor | None = None) -> Tensor:
        """(B, C) bool: the candidates (C,) or (B, C) that the guide puts too near the positive."""
        scores = positive = self.guide(step, ids, emb)
        if self.bounds.compares:
            positive = self.guide(step, step.item_ids.unsqueeze(1), step.v.unsqueeze(1))
        near = torch.stack(list(self.bounds.reached(scores, positive).values())).any(0)
        return near & (ids != step.item_ids.unsqueeze(1))

    @torch.no_grad()
    def _filtered(self, step: Step, block: Candidates) -> Candidates:
        if block.seed is not None:
            raise ValueError("Unless cannot filter draws that a kernel makes: write Resample(Unless(...))")
        near = self.near(step, block.ids, block.emb)
        offered = ~torch.isneginf(block.log_w).expand(near.shape)
        count = Filtered((near & offered).sum(), offered.sum())
        log_w = block.log_w.expand(near.shape).masked_fill(near, -math.inf)
        drawn = block.drawn
        if drawn is not None:  # the weights are the logarithms of the draws
            drawn = log_w.exp().sum(0) if block.shared else log_w.exp()
        words = replace(
            block.provenance, source=f"{block.provenance.source}, less those near by {self.guide.name}", filtered=count
        )
        return replace(block, log_w=log_w, drawn=drawn, provenance=words)

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        count = self.source.log_count(ids, step)
        return None if count is None else torch.where(self.near(step, ids), -math.inf, count)

    def size(self, step: Step) -> float | Tensor:
        """The candidates that the source offers, before any is dropped: how many are left depends on the query."""
        return self.source.size(step)

    def observe(self, step: Step, outcome: Outcome) -> None:
        for block in (block for bag in outcome.bags for block in bag.blocks):
            if block.provenance.filtered is not None:
                self.dropped += step.batch.sum(block.provenance.filtered.dropped)
                self.offered += step.batch.sum(block.provenance.filtered.offered)

    def report(self) -> dict[str, float]:
        """The share of candidates dropped by all filters of the run since the last report."""
        share = float(self.dropped / self.offered.clamp(min=1))
        self.dropped.zero_()
        self.offered.zero_()
        return {"dropped": round(share, 6)}
