"""Synthetic negatives: MixPositive (MixGCF), BatchMix (BMNS)."""

from __future__ import annotations

from typing import Literal

import torch

from sparring.core.types import Bag, Candidates, Provenance, Step
from sparring.kernels import reference
from sparring.negatives.algebra import merged
from sparring.negatives.base import UNKNOWN, Negatives, check_choice, zeros
from sparring.negatives.distributions import Frequency

MixPer = Literal["query", "candidate"]


class MixPositive(Negatives):
    """Every candidate moved towards the query's positive by a random share (positive mixing of MixGCF).

        e'_im = a v_i + (1 - a) e_m,   a ~ U(0, high),   one draw per query or per candidate (`mix`)

    So s'_im = a s_i+ + (1 - a) s_im: never harder than the positive if s_im is below it. One draw per query keeps the
    order of candidates, so Hardest(MixPositive(x), k) equals MixPositive(Hardest(x, k)), which mixes only k vectors per
    query. With one draw per candidate it does not. Exclusions still hold. Gradients flow to the positive, not through
    a.

        MixPositive(Hardest(Sampled(Uniform(n_items), 32, per_query=True), 1))

    Huang et al., MixGCF: An Improved Training Method for Graph Neural Network-based Recommender Systems, KDD 2021.
    """

    log_count = UNKNOWN

    def __init__(self, source: Negatives, mix: MixPer = "query", high: float = 1.0):
        super().__init__()
        check_choice("mix", mix, MixPer)
        if not 0 <= high <= 1:
            raise ValueError(f"MixPositive needs 0 <= high <= 1, got {high}")
        self.source, self.mix, self.high = source, mix, high

    def forward(self, step: Step) -> Bag:
        bag = self.source(step)
        block = merged(bag, step)
        shape = torch.Size((len(step.q), block.ids.shape[-1]))
        drawn = (len(step.batch), shape[1] if self.mix == "candidate" else 1)
        a = step.batch.own(torch.rand(drawn, generator=step.generator, device=step.q.device))
        a = (self.high * a).to(step.q.dtype).unsqueeze(-1)
        emb = torch.lerp(block.emb.expand(*shape, -1), step.v.unsqueeze(1).expand(*shape, -1), a.expand(*shape, 1))
        places = block.exclude.places(block.ids) if block.exclude else None
        log_w = reference.drop(block.log_w, shape, places)  # a mixture has no id to exclude
        ids = torch.full(shape, -1, device=block.ids.device)
        words = block.derived(f"positive mixed into {block.provenance.source}")
        return Bag((Candidates(ids, emb, log_w, provenance=words),), bag.log_w_positive)


class BatchMix(Negatives):
    """n random mixtures of all items of the batch, shared by the queries (the mixed negatives of BMNS).

        W_k = softmax_j((u_kj - log q_j) / temperature),   u ~ U(0, 1)
        e_k = sum_j W_kj v_j,   so q_i . e_k = (S W^T)_ik

    Unpopular items of the batch weigh more in each mixture. The weights W are constants. The positive's log weight is
    -log q_+. The mixtures weigh 1 and contain a share of every query's own positive, which is not masked. Mixing
    vectors is the same as mixing logits and costs n B D instead of n B B.

        BatchMix(Popularity(train.counts()), 2048)

    Fan et al., Batch-Mix Negative Sampling for Learning Recommendation Retrievers, CIKM 2023.
    """

    log_count = UNKNOWN

    def __init__(self, frequency: Frequency, n: int, temperature: float = 1.0):
        super().__init__()
        if n < 1:
            raise ValueError(f"BatchMix needs n >= 1, got {n}")
        if not temperature > 0:
            raise ValueError(f"BatchMix needs a temperature above 0, got {temperature}")
        self.frequency, self.n, self.temperature = frequency, n, temperature

    def forward(self, step: Step) -> Bag:
        log_q = self.frequency.log_prob(step.batch.item_ids)
        share = torch.softmax(-log_q / self.temperature, 0).to(step.v.dtype).unsqueeze(1)
        u = torch.rand(self.n, len(log_q), generator=step.generator, device=step.q.device).to(step.v.dtype)
        # the other factors of the softmax are the same for all mixtures: two products instead of a table
        u.div_(self.temperature).exp_()
        emb = (u @ (share * step.batch.v)) / (u @ share)
        ids = torch.full((self.n,), -1, device=step.q.device)
        words = Provenance(f"mixtures of {len(step.batch):,} in-batch items")
        block = Candidates(ids, emb, zeros(step), provenance=words)
        return Bag((block,), -step.batch.own(log_q))
