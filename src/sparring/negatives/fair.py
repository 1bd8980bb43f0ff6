"""Group fairness: GroupShares (FairNeg), and Tilted, which weights a pool by the query's scores."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sparring.core.types import Bag, Outcome, Provenance, Step
from sparring.negatives.algebra import merged
from sparring.negatives.base import UNKNOWN, Negatives, drawable, within
from sparring.negatives.distributions import Distribution, draw_from_cdf
from sparring.negatives.selection import masked_logits


class GroupShares(Distribution):
    """Draw a group of items by its share, then an item of the group; a group with a high loss loses share (FairNeg).

        q_j = p_z(j) / |z(j)|
        every `every` steps   m_z <- momentum m_z + (1 - momentum) (L_z - mean L),   p <- project(p - lr m)

    L_z is the mean loss of the positives in group z, with a weight that decays by `decay` per step. The projection is
    the nearest point with shares that sum to 1, none below floor / groups. Shares start at each group's part of the
    catalogue, which is uniform sampling. `groups` (N,) is the group of each item: a column, or cluster ids. With
    `among`, groups consist of these items alone. A
    correction by log_prob would cancel the effect of the shares on the expected gradient: use correction="none".

        Sampled(GroupShares(category_ids), 2048, correction="none")

    Chen et al., Fairly Adaptive Negative Sampling for Recommendations, WWW 2023; running losses instead of a pass over
    all pairs.
    """

    among: Tensor | None
    group: Tensor
    items: Tensor
    start: Tensor
    size: Tensor
    shares: Tensor
    drift: Tensor
    loss: Tensor
    rows: Tensor
    steps: Tensor

    def __init__(
        self,
        groups: Tensor,
        lr: float = 0.2,
        momentum: float = 0.9,
        decay: float = 0.99,
        every: int = 1000,
        floor: float = 0.1,
        among: Tensor | None = None,
    ):
        super().__init__()
        groups = torch.as_tensor(groups)
        if groups.dim() != 1 or len(groups) < 1 or groups.is_floating_point():
            raise ValueError(
                f"GroupShares needs one integer per item, got {groups.dtype} of shape {tuple(groups.shape)}"
            )
        if not lr >= 0 or not 0 <= momentum < 1 or not 0 <= decay < 1 or every < 1 or not 0 <= floor <= 1:
            raise ValueError(
                "GroupShares needs lr >= 0, momentum and decay in [0, 1), every >= 1 and floor in [0, 1]; "
                f"got {lr}, {momentum}, {decay}, {every}, {floor}"
            )
        self.lr, self.momentum, self.decay, self.every, self.floor = lr, momentum, decay, every, floor
        self.register_buffer("among", drawable(among, len(groups)), persistent=False)
        if self.among is None:
            group = torch.unique(groups, return_inverse=True)[1]
            size, items = torch.bincount(group), torch.argsort(group, stable=True)
        else:
            inside = torch.unique(groups[self.among], return_inverse=True)[1]
            size, items = torch.bincount(inside), self.among[torch.argsort(inside, stable=True)]
            group = torch.zeros_like(groups, dtype=torch.long)  # of other items: never read but by log_prob
            group[self.among] = inside
        self.register_buffer("group", group, persistent=False)
        self.register_buffer("items", items, persistent=False)
        self.register_buffer("start", torch.cumsum(size, 0) - size, persistent=False)
        self.register_buffer("size", size, persistent=False)
        self.register_buffer("shares", size.double() / size.sum())
        for name in ("drift", "loss", "rows"):
            self.register_buffer(name, torch.zeros(len(size), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def log_prob(self, ids: Tensor) -> Tensor:
        z = self.group[ids]
        return within((self.shares[z] / self.size[z]).log().float(), ids, self.among)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        z = draw_from_cdf(torch.cumsum(self.shares, 0), shape, generator)
        size = self.size[z]
        u = torch.rand(shape, dtype=torch.float64, generator=generator, device=z.device)
        return self.items[self.start[z] + torch.minimum((u * size).long(), size - 1)]

    def observe(self, step: Step, outcome: Outcome) -> None:
        z = self.group[step.batch.item_ids]
        self.steps += 1
        # both sums decay at the same rate, so their ratio is a mean from the first step on, also for a group absent
        # from the batch
        self.loss.mul_(self.decay).index_add_(0, z, step.batch.gather(outcome.loss).double())
        self.rows.mul_(self.decay).index_add_(0, z, torch.ones_like(z, dtype=torch.float64))
        seen = self.rows > 0
        mean = self.loss / torch.where(seen, self.rows, 1.0)
        gradient = torch.where(seen, mean - mean.sum() / seen.sum().clamp(min=1), 0.0)
        drift = self.momentum * self.drift + (1 - self.momentum) * gradient
        now = self.steps % self.every == 0  # a tensor: reading it would synchronise
        self.drift.copy_(torch.where(now, drift, self.drift))
        self.shares.copy_(
            torch.where(now, to_simplex(self.shares - self.lr * drift, self.floor / len(drift)), self.shares)
        )

    def extra_repr(self) -> str:
        return f"{len(self.group)} items in {len(self.size)} groups"


def to_simplex(x: Tensor, floor: float) -> Tensor:
    """The nearest point whose coordinates sum to 1 and are at least `floor`: max(floor, x - t) for the right t."""
    free = 1 - floor * len(x)
    ordered = torch.sort(x - floor, descending=True).values
    excess = (torch.cumsum(ordered, 0) - free) / torch.arange(1, len(x) + 1, device=x.device)
    last = (ordered > excess).sum().clamp(min=1) - 1
    return floor + (x - floor - excess.index_select(0, last[None])).clamp(min=0)  # no sync


class Tilted(Negatives):
    """The candidates of a pool, weighted in part by the query's scores (the importance part of FairNeg).

        w'_ij = w_ij (1 - share + share C_i softmax_j(q_i . e_j / temperature)),   C_i = number of candidates that count

    The weights are the expected counts of C_i draws from the pool, each from the softmax with probability `share` and
    uniform otherwise. Scores are divided by `temperature`, not by the temperature of the loss. No gradient flows
    through the weights. share = 0 is the pool itself.

        Tilted(Sampled(GroupShares(category_ids), 2048, correction="none"), share=0.1)

    Chen et al., Fairly Adaptive Negative Sampling for Recommendations, WWW 2023; the softmax over a pool instead of the
    catalogue.
    """

    log_count = UNKNOWN

    def __init__(self, source: Negatives, share: float = 0.1, temperature: float = 0.4):
        super().__init__()
        if not 0 <= share <= 1 or not temperature > 0:
            raise ValueError(f"Tilted needs a share in [0, 1] and a temperature above 0, got {share} and {temperature}")
        self.source, self.share, self.temperature = source, share, temperature

    def forward(self, step: Step) -> Bag:
        bag: Bag = self.source(step)
        if self.share == 0:
            return bag
        block = merged(bag, step)
        with torch.no_grad():
            tilt = masked_logits(step.q / self.temperature, block)
            dropped = torch.isneginf(tilt)
            counts = dropped.shape[1] - dropped.to(tilt.dtype).sum(1, keepdim=True)
            tilt = torch.softmax(tilt, 1).mul_(self.share * counts).add_(1 - self.share).log_()
            log_w = tilt.add_(block.log_w).masked_fill_(dropped, -math.inf)
        old = block.provenance
        weighting = "score" if old.weighting == "none" else f"{old.weighting} + score"
        words = Provenance(f"{old.source}, {self.share:.0%} by score", weighting, block.masked)
        return Bag((replace(block, log_w=log_w, exclude=None, provenance=words),), bag.log_w_positive)
