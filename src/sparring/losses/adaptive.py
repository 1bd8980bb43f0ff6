"""Ada-tau: a temperature per query that follows how well the model fits it, and its loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sparring.core.part import Part
from sparring.core.types import Bag, Batch, Corpus, Outcome, Step
from sparring.losses.softmax import Loss, PartitionLoss, above, softmax_loss

_BLOCK = 8192  # queries encoded at a time


class AdaTau(Part):
    """A temperature for each query, larger for queries that the model fits badly (Adap-tau).

        tau_0 = (mu_+ - mu) / log(n m / (2 |D|)),   mu_+, mu = mean score of known pairs, of all pairs          (eq. 14)
        tau_u = tau_0 exp(W(max(-1/e, (L(u) - centre) / (2 beta)))),   W = Lambert's function               (eq. 15, 16)

    For cosine scores. L(u) is the mean softmax_loss of u at temperature 1 over the previous epoch; `centre` is the mean
    of L, or its `quantile`. A query not seen yet has tau_0. n queries, m items and |D| pairs refer to the queries whose
    `counts` (interactions per query) are above the 20 % quantile. For the first `settle` epochs mu_+ - mu is `gap`,
    because the scores of an untrained model say nothing. After that, means="epoch" measures it on all pairs before each
    epoch, and "running" averages over batches, which needs no pass over the data. tau_0 is at least `low`. No gradient
    flows through a temperature.

        temperature = AdaTau(counts, n_items);   Term(1.0, negatives, adaptive_softmax(temperature))

    Chen et al., Adap-tau: Adaptively Modulating Embedding Magnitude for Recommendation, WWW 2023, equations 14 to 16.
    """

    tau: Tensor
    tau_0: Tensor
    gap: Tensor
    loss: Tensor
    loss_sum: Tensor
    rows: Tensor
    active: Tensor

    def __init__(
        self,
        counts: Tensor,
        n_items: int,
        beta: float = 1.0,
        quantile: float | None = None,
        gap: float = 0.7,
        settle: int = 100,
        means: Literal["epoch", "running"] = "epoch",
        momentum: float = 0.99,
        low: float = 0.02,
    ):
        super().__init__()
        if not beta > 0 or not gap > 0 or not low > 0:
            raise ValueError(f"Ada-tau needs positive beta, gap and low, got {beta}, {gap}, {low}")
        if quantile is not None and not 0 < quantile <= 1:
            raise ValueError(f"quantile must be in (0, 1], got {quantile}")
        if means not in ("epoch", "running"):
            raise ValueError(f"means must be one of epoch, running; got {means!r}")
        active = counts > float(np.quantile(counts.numpy(), 0.2))
        active = active if bool(active.any()) else counts > 0
        ratio = float(active.sum()) * n_items / (2 * max(float(counts[active].sum()), 1.0))
        if ratio <= 1:
            raise ValueError("Ada-tau is for sparse data: here more than half of all (query, item) pairs are positive")
        self.beta, self.quantile, self.settle = beta, quantile, settle
        self.means, self.momentum, self.low = means, momentum, low
        self.log_ratio = math.log(ratio)
        n = len(counts)
        self.register_buffer("active", active, persistent=False)
        self.register_buffer("gap", torch.tensor(gap))
        self.register_buffer("tau_0", torch.tensor(max(gap / self.log_ratio, low)))
        self.register_buffer("tau", self.tau_0.repeat(n))
        self.register_buffer("loss", torch.full((n,), math.nan))  # L(u)
        self.register_buffer("loss_sum", torch.zeros(n))  # of the epoch so far
        self.register_buffer("rows", torch.zeros(n))

    def forward(self, query_ids: Tensor) -> Tensor:
        return self.tau[query_ids]

    def observe(self, step: Step, outcome: Outcome) -> None:
        # without draws, which belong to the temperature of the step
        bag = Bag(
            tuple(replace(block, draws=None, seed=None) for block in outcome.bags[0].blocks),
            outcome.bags[0].log_w_positive,
        )
        common = softmax_loss(replace(step, tau=torch.ones_like(self.tau_0)), bag)
        batch = step.batch
        common = batch.gather(common)
        self.loss_sum.index_add_(0, batch.query_ids, common.to(self.loss_sum.dtype))
        self.rows.index_add_(0, batch.query_ids, torch.ones_like(common, dtype=self.rows.dtype))
        if self.means == "running":
            positive = batch.sum((step.q * step.v).sum(-1).sum()) / len(batch)
            self.gap.lerp_((positive - _mean_score(step.q, bag, batch)).to(self.gap.dtype), 1 - self.momentum)

    def refresh(self, corpus: Corpus) -> None:
        self.loss.copy_(torch.where(self.rows > 0, self.loss_sum / self.rows, self.loss))
        self.loss_sum.zero_()
        self.rows.zero_()
        if corpus.epoch >= self.settle:
            if self.means == "epoch":
                self.gap.copy_(self._gap(corpus))
            self.tau_0.copy_((self.gap / self.log_ratio).clamp(min=self.low))
        known = self.loss[torch.isfinite(self.loss)]
        if not len(known):
            self.tau.copy_(self.tau_0.expand_as(self.tau))
            return
        centre = known.mean() if self.quantile is None else known.kthvalue(math.ceil(self.quantile * len(known))).values
        excess = ((self.loss - centre) / (2 * self.beta)).nan_to_num(0.0).clamp(min=-1 / math.e)
        self.tau.copy_(self.tau_0 * lambert_w(excess).exp())

    def _gap(self, corpus: Corpus) -> Tensor:
        """mu_+ - mu over the active queries, exactly."""
        known, pairs, everywhere = corpus.items.new_zeros(()), 0, corpus.items.new_zeros(())
        middle = corpus.items.mean(0)
        for ids in corpus.ranks.own(torch.nonzero(self.active).flatten()).split(_BLOCK):
            q, exclude = corpus.encode_queries(ids).to(corpus.items.dtype), corpus.positives.of(ids)
            known += (q[exclude.rows] * corpus.items[exclude.ids]).sum()
            pairs += len(exclude.ids)
            everywhere += (q @ middle).sum()
        count = corpus.ranks.sum(torch.tensor(pairs, device=known.device)).clamp(min=1)
        return corpus.ranks.sum(known) / count - corpus.ranks.sum(everywhere) / self.active.sum()


def adaptive_softmax(temperature: AdaTau) -> Loss:
    """The softmax loss with the common temperature for positives and a query's own for negatives (loss of Adap-tau).

        loss_i = -q_i . v_i / tau_0 + log sum_j exp(q_i . e_j / tau_u + log_w_ij)

    The form of the authors' code. A weight w counts a candidate w times. If everything in the bag is excluded, the loss
    is 0. The run must use the same temperature object.

        adaptive_softmax(temperature)

    Chen et al., Adap-tau: Adaptively Modulating Embedding Magnitude for Recommendation, WWW 2023.
    """

    @PartitionLoss
    def adaptive_softmax(step: Step, bag: Bag, log_z: Tensor) -> Tensor:
        positive = (step.q * step.v).sum(-1) / temperature.tau_0
        if bag.log_w_positive is not None:
            positive = positive + bag.log_w_positive
        return above(log_z, positive)

    return adaptive_softmax


def lambert_w(x: Tensor) -> Tensor:
    """The principal branch of w exp(w) = x for x >= -1/e, by Halley's iteration in float64.

    lambert_w(torch.tensor([-1 / math.e, 0.0, math.e]))     # -1, 0, 1
    """
    wide = x.double()
    # initial values: a series in p near the branch point -1/e, where W has a vertical tangent, and a logarithm
    # elsewhere
    p = (2 * (math.e * wide + 1)).clamp(min=0).sqrt()
    log = wide.clamp(min=0).log1p()
    w = torch.where(wide < 0.25, -1 + p - p**2 / 3 + 11 / 72 * p**3, log * (1 - log.log1p() / (2 + log)))
    for _ in range(4):
        e = w.exp()
        error = w * e - wide
        slope = e * (w + 1)
        update = error / (slope - (w + 2) * error / (2 * w + 2))
        # nearer to the branch point the series is exact and the slope vanishes
        w = torch.where(p > 1e-5, w - update, w)
    return w.to(x.dtype)


def _mean_score(q: Tensor, bag: Bag, batch: Batch) -> Tensor:
    """The weighted mean score of the batch and the bag, treating queries and candidates as independent."""
    total, mass, middle = q.new_zeros(()), q.new_zeros(()), batch.sum(q.sum(0)) / len(batch)
    for block in bag.plain().blocks:
        weights = block.log_w.exp().to(block.emb.dtype)
        if block.shared:
            weights = (
                batch.sum(weights.expand(len(q), -1).sum(0)) / len(batch) if weights.dim() == 2 else weights
            ).expand(block.ids.shape)
            total = total + middle @ (weights @ block.emb)
            mass = mass + weights.sum()
        else:
            weights = weights.expand(block.ids.shape)
            total = total + batch.sum(torch.einsum("bd,bc,bcd->", q, weights, block.emb)) / len(batch)
            mass = mass + batch.sum(weights.sum()) / len(batch)
    return total / mass.clamp(min=torch.finfo(mass.dtype).tiny)
