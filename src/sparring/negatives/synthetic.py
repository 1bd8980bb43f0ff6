"""Synthetic negatives: MixPositive and MixHops (MixGCF), BatchMix (BMNS)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, ItemLayers, Provenance, Step
from sparring.kernels import reference
from sparring.negatives.algebra import merged
from sparring.negatives.base import UNKNOWN, Negatives, check_choice, zeros
from sparring.negatives.distributions import Frequency
from sparring.negatives.selection import Hardest, masked_logits

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


class MixHops(Negatives):
    """The hardest candidates of every layer, each mixed with the positive, and averaged over the layers (MixGCF).

        e'_im(l) = a_il v_i(l) + (1 - a_il) e_m(l),   a ~ U(0, 1)            positive mixing, in each layer l
        e_i = mean over l of e'_im(l) with the largest q_i . e'_im(l)        hop mixing

    For the item tower of a graph (Step.layers). A negative then consists of a different item in each layer. One share
    per query and layer keeps the order of candidates, so the hardest are chosen before they are mixed. k > 1 averages
    the j-th hardest of each layer; the authors divide the candidates into k groups instead. A model without layers has
    one, and this is MixPositive(Hardest(source, k)).

        MixHops(Sampled(Uniform(n_items), 32, per_query=True))

    Huang et al., MixGCF: An Improved Training Method for Graph Neural Network-based Recommender Systems, KDD 2021.
    """

    log_count = UNKNOWN

    def __init__(self, source: Negatives, k: int = 1):
        super().__init__()
        if not source.encodes:
            raise ValueError(f"MixHops needs a source of items, such as Sampled, not {type(source).__name__}")
        self.k, self.source = k, source
        self.plain = MixPositive(Hardest(source, k))

    def forward(self, step: Step) -> Bag:
        if step.layers is None:
            bag: Bag = self.plain(step)
            return bag
        layers = range(step.layers.count)
        with torch.no_grad():
            bag = self.source(step)
            block = merged(bag, step)
            hardest = [self._hardest(step, block, step.layers, layer) for layer in layers]
        share = torch.rand(len(step.batch), step.layers.count, generator=step.generator, device=step.q.device)
        share = step.batch.own(share).to(step.q.dtype)
        total: Tensor | None = None
        for layer, (ids, _) in zip(layers, hardest, strict=True):
            positive = step.layers.encode(step.item_ids, layer).unsqueeze(1)
            mixed = torch.lerp(step.layers.encode(ids, layer), positive, share[:, layer].view(-1, 1, 1))
            total = mixed if total is None else total + mixed
        assert total is not None
        emb = step.layers.join(total / len(layers)).to(step.q.dtype)
        log_w = torch.stack([weights for _, weights in hardest]).mean(0)
        words = block.derived(f"positive mixed into the hardest of each layer of {block.provenance.source}")
        return Bag((Candidates(torch.full_like(hardest[0][0], -1), emb, log_w, provenance=words),), bag.log_w_positive)

    def _hardest(self, step: Step, block: Candidates, layers: ItemLayers, layer: int) -> tuple[Tensor, Tensor]:
        """(B, k) each: the hardest candidates by the vectors of a layer, and their weights, -inf for excluded ones."""
        emb = layers.encode(block.ids, layer).to(step.q.dtype)
        scores = masked_logits(step.scaled, replace(block, emb=emb))
        best = scores.topk(min(self.k, scores.shape[1]), dim=1)
        weights = block.log_w.expand(scores.shape).gather(1, best.indices)
        return block.ids.expand(scores.shape).gather(1, best.indices), torch.where(
            torch.isneginf(best.values), best.values, weights
        )


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
