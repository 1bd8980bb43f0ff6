"""SL@K: a softmax loss focused on positives near the top of each query's list."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparring.core.part import Part
from sparring.core.types import Bag, Corpus, LossOutput, Positives, Step
from sparring.losses.softmax import softmax_loss

_BLOCK = 1 << 22  # scores worked on at a time


class SLatK(Part):
    """The softmax loss with each positive weighted by its distance to the query's top K (SL@K).

        loss_i = sigmoid((s_i+ - beta_i) / tau_w) * log sum_j exp((s_ij - s_i+) / tau + log_w_ij),   s = q . e
        beta_i = the K-th largest score among all positives of query i and n other items drawn uniformly

    The thresholds beta are rebuilt before every `every`-th epoch, for all queries from one draw of n items; with n = N
    they are exact. No gradient flows through them. It flows through the weight, as in the formula, and pulls a positive
    down by L / tau_w times the slope of the sigmoid, where L is the logarithm. If L stays large compared with tau_w /
    tau (a small dense data set, many negatives), the loss can fall by giving positives up; constant_weight=True treats
    the weight as a constant. A query with fewer than K scores, and every query before the first refresh, has weight 1:
    softmax_loss, with its weights and exclusion. A factor common to all weights matters here, through L.

        Term(1.0, Sampled(Uniform(n_items), 1000, correction="none"), SLatK(n_queries, k=20))

    Yang et al., Breaking the Top-K Barrier: Advancing Top-K Ranking Metrics Optimization in Recommender Systems, KDD
    2025.
    """

    beta: Tensor

    def __init__(
        self,
        n_queries: int,
        k: int = 20,
        n: int = 1000,
        every: int = 5,
        tau_w: float = 1.0,
        constant_weight: bool = False,
    ):
        super().__init__()
        if not 1 <= k <= n:
            raise ValueError(f"SL@K needs 1 <= k <= n, got k={k}, n={n}")
        if every < 1 or not tau_w > 0:
            raise ValueError(f"SL@K needs every >= 1 and tau_w > 0, got every={every}, tau_w={tau_w}")
        self.k, self.n, self.every, self.tau_w, self.constant_weight = k, n, every, tau_w, constant_weight
        self.register_buffer("beta", torch.full((n_queries,), -math.inf))

    def forward(self, step: Step, bag: Bag) -> Tensor:
        return self.detailed(step, bag).losses

    def detailed(self, step: Step, bag: Bag) -> LossOutput:
        score = (step.q * step.v).sum(-1)
        weight = torch.sigmoid((score - self.beta[step.query_ids]) / self.tau_w)
        output = softmax_loss.detailed(step, bag)
        return output._replace(losses=(weight.detach() if self.constant_weight else weight) * output.losses)

    def refresh(self, corpus: Corpus) -> None:
        if corpus.epoch % self.every:
            return
        drawn = torch.randperm(len(corpus.items), generator=corpus.generator, device=corpus.items.device)[: self.n]
        queries = corpus.ranks.own(torch.arange(len(self.beta), device=self.beta.device))
        beta = [
            _thresholds(
                corpus.encode_queries(ids).to(corpus.items.dtype), ids, corpus.items, drawn, corpus.positives, self.k
            )
            for ids in queries.split(max(1, _BLOCK // len(drawn)))
        ]
        self.beta.copy_(corpus.ranks.gather(torch.cat(beta), len(self.beta)))


def _thresholds(q: Tensor, ids: Tensor, items: Tensor, drawn: Tensor, positives: Positives, k: int) -> Tensor:
    """The k-th largest score of each query over its positives and the other drawn items; -inf if there are fewer."""
    known = positives.of(ids)
    assert known.rows is not None
    others = q @ items[drawn].T
    others[known.hits(drawn)] = -math.inf
    scores = (q[known.rows] * items[known.ids]).sum(-1)
    order = scores.argsort(descending=True)
    order = order[known.rows[order].argsort(stable=True)]  # by query, the best first
    rows = known.rows[order]
    count = torch.bincount(rows, minlength=len(q))
    rank = torch.arange(len(rows), device=rows.device) - (torch.cumsum(count, 0) - count)[rows]
    best = q.new_full((len(q), k), -math.inf)
    kept = rank < k
    best[rows[kept], rank[kept]] = scores[order[kept]]
    return torch.cat([best, others], 1).topk(k, 1).values[:, -1]
