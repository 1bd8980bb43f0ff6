"""Interpolated negatives (EDIS): Interpolated, between items of a cluster; TowardsPositive, towards the positive."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sparring.core.types import Bag, Batch, Candidates, Exclude, Mixtures, Outcome, Step
from sparring.kernels import fuses_mixtures, logits, reference
from sparring.negatives.base import UNKNOWN, Negatives, check_choice
from sparring.negatives.clusters import OtherClusters, SameCluster

Normalisation = Literal["minmax_block", "minmax_set", "affine", "dirichlet"]
LamRule = Literal["adaptive", "learned"]


class Interpolated(Negatives):
    """Simple negatives and, for each cluster drawn, mixtures of its m_o items (simple interpolation of EDIS).

        for n = 2..m_o, one random set of n items, and each anchor a in it
        e'_a = sum_i alpha_i e_i,   alpha_i ~ d(e_a, e_i)^eta

    That is (m_o + 2)(m_o - 1) / 2 mixtures per cluster. d is the inner product scaled to [0, 1]: by the range over all
    m_o items ("minmax_block") or over the set ("minmax_set": every pair then repeats its anchors), as (1 + cos) / 2
    ("affine": nearly all mixtures are the mean), or random shares ("dirichlet", not in the paper). The shares are
    constants. An item bias takes no part in d or in lengths, only in the mixture. On a CPU scores are mixed instead of
    vectors, which is equivalent, unless `renorm` scales each mixture to the mean length of its members or `layer` mixes
    the hidden state of the item tower after that many layers. A mixture is never harder than its hardest member.
    Mixtures of a query's own primary cluster are masked. `offset` is added to the logits of mixtures: log(5 / 14) gives
    14 of them the weight of 5.

        Interpolated(OtherClusters(codes, m_c=2, m_o=5), eta=0.6)

    Xing et al., ESANS, WWW 2025, equations 11 and 12.
    """

    log_count = UNKNOWN
    sizes: Tensor
    slots: Tensor

    def __init__(
        self,
        source: OtherClusters,
        eta: float = 0.6,
        normalisation: Normalisation = "minmax_block",
        renorm: bool = False,
        offset: float = 0.0,
        layer: int | None = None,
    ):
        super().__init__()
        check_choice("normalisation", normalisation, Normalisation)
        if source.m_o < 2:
            raise ValueError(f"mixtures need at least 2 items of a cluster, got m_o={source.m_o}")
        if not eta >= 0:
            raise ValueError(f"eta must not be negative, got {eta}")
        self.source, self.eta, self.renorm, self.offset, self.layer = source, eta, renorm, offset, layer
        self.normalisation: Normalisation = normalisation
        sizes = range(2, source.m_o + 1)
        self.register_buffer("sizes", torch.tensor([n for n in sizes for _ in range(n)]), persistent=False)
        self.register_buffer("slots", torch.tensor([i for n in sizes for i in range(n)]), persistent=False)

    def forward(self, step: Step) -> Bag:
        drawn, clusters = self.source.draw(step)
        block = self.source.offer(step, drawn)
        m_o = self.source.m_o
        with torch.no_grad():
            members = step.unbiased(block.emb.detach()).unflatten(-2, (-1, m_o))
            weights = self.shares(members, step.generator, None if block.shared else step.batch)
        own = step.batch.own(drawn.primary)
        exclude = Exclude(own) if self.source.shared and self.source.exclude != "none" else None
        groups = clusters.flatten() if block.shared else step.batch.own(clusters)
        block = replace(block, mix=Mixtures(weights, groups, exclude, self.offset))
        if self.layer is None and not self.renorm:
            return Bag((block,))
        real, mixed = block.plain()
        if self.layer is not None:
            ids = block.ids.clamp(min=0).unflatten(-1, (-1, m_o))
            mixed = replace(mixed, emb=hidden_mixtures(step, ids, weights, self.layer).flatten(-3, -2))
        if self.renorm:
            length = step.unbiased(real.emb).norm(dim=-1).unflatten(-1, (-1, m_o))
            mixed = replace(mixed, emb=rescaled(step, mixed.emb, (weights @ length.unsqueeze(-1)).flatten(-3)))
        return Bag((real, mixed))

    def shares(self, emb: Tensor, generator: torch.Generator, batch: Batch | None = None) -> Tensor:
        """(..., V, M): the shares of the M vectors (..., M, D) of a group in its mixtures; rows sum to 1.

        With `batch` the first dimension is the rows of this rank, and draws are made for those of all ranks.
        """
        m = emb.shape[-2]
        if fuses_mixtures(emb, m):
            from sparring.kernels import mixtures

            seed = torch.randint(1 << 62, (1,), generator=generator, device=emb.device)
            first = 0 if batch is None else batch.ranks.rank * emb.shape[:-2].numel()
            return mixtures.shares(emb, seed, first, self.eta, self.normalisation).to(emb.dtype)
        groups = emb.shape[:-2] if batch is None else (len(batch), *emb.shape[1:-2])
        # one random order for each n; doubles have no ties, so a rank is a count, which is cheaper than a sort
        key = torch.rand(*groups, m - 1, m, dtype=torch.float64, generator=generator, device=emb.device)
        key = key if batch is None else batch.own(key)
        rank = (key.unsqueeze(-1) > key.unsqueeze(-2)).sum(-1)
        of = rank[..., self.sizes - 2, :]
        anchor, member = of == self.slots.unsqueeze(-1), of < self.sizes.unsqueeze(-1)  # (..., V, M)
        if self.normalisation == "dirichlet":
            d = (
                torch.empty(*groups, *member.shape[-2:], device=emb.device)
                .exponential_(generator=generator)
                .to(emb.dtype)
            )
            d = d if batch is None else batch.own(d)
        else:
            gram = emb @ emb.transpose(-1, -2)
            if self.normalisation == "affine":
                length = gram.diagonal(dim1=-2, dim2=-1).clamp(min=1e-12).sqrt()
                gram = (1 + gram / (length.unsqueeze(-1) * length.unsqueeze(-2))) / 2
            elif self.normalisation == "minmax_block":
                gram = _to_unit(gram, gram.amin((-2, -1), keepdim=True), gram.amax((-2, -1), keepdim=True))
            else:
                size = torch.arange(2, m + 1, device=emb.device).view(-1, 1)
                both = (rank < size).unsqueeze(-1) & (rank < size).unsqueeze(-2)  # (..., n, M, M)
                gram = gram.unsqueeze(-3)
                low = gram.masked_fill(~both, math.inf).amin((-2, -1), keepdim=True)
                high = gram.masked_fill(~both, -math.inf).amax((-2, -1), keepdim=True)
                gram = _to_unit(gram, low, high)[..., self.sizes - 2, :, :]  # (..., V, M, M)
            near = gram.clamp(min=1e-6) ** self.eta
            pick = anchor.to(near.dtype)  # the row of the anchor
            d = pick @ near if near.dim() == pick.dim() else (pick.unsqueeze(-2) @ near).squeeze(-2)
        d = d * member
        return d / d.sum(-1, keepdim=True)


def _to_unit(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return (x - low) / (high - low + 1e-6)


class TowardsPositive(Negatives):
    """Hard negatives and, for each, a mixture with the query's positive (hard interpolation of EDIS).

        e'_ih = lam v_i + (1 - lam) e_ih,   so that   s'_ih = lam s_i+ + (1 - lam) s_ih

    0 < lam < 1 makes them harder, lam < 0 easier. A mixture weakens the pull on the positive by lam times its own share
    of the softmax; detach_positive=True keeps the pull. `renorm`, `offset` and `layer` as in Interpolated. A mixture
    has the weight of its candidate, and counts nothing where that one is excluded. With a shared source every query
    meets the candidates of all, each mixed with the positive that it was drawn for, not with the query's own.

    lam="adaptive" keeps the mean advantage of the mixtures at `margin` nats: lam = margin / mean(s_i+ - s_ih), a
    running mean of logits. A fixed lam adds lam (s_i+ - s_ih), which grows from zero to many nats as the model learns:
    too little at first, and with 0.5 too much later. margin = log 2 lets a mixture count about twice as much as the
    negative it was made from; lam stays below `high`. lam="learned" fits one lam per primary cluster, by running least
    squares of lam (s_i+ - s_ih) to margin. The training loss itself cannot teach lam, since easier negatives always
    lower it.

        TowardsPositive(SameCluster(codes, m_h=5), lam=0.1)

    Xing et al., ESANS, WWW 2025, equation 13; the rules for lam are ours.
    """

    log_count = UNKNOWN
    lam: Tensor
    gap: Tensor

    def __init__(
        self,
        source: SameCluster,
        lam: float | LamRule = 0.1,
        detach_positive: bool = False,
        renorm: bool = False,
        offset: float = 0.0,
        layer: int | None = None,
        margin: float = math.log(2),
        high: float = 0.3,
        momentum: float = 0.99,
    ):
        super().__init__()
        if isinstance(lam, str):
            check_choice("lam", lam, LamRule)
        elif not -1 <= lam <= 1:
            raise ValueError(f"lam must be between -1 and 1, or adaptive or learned; got {lam}")
        if not 0 < high <= 1 or not 0 <= momentum < 1 or not abs(margin) > 0:
            raise ValueError(
                f"needs high in (0, 1], momentum in [0, 1) and a non-zero margin; got {high}, {momentum}, {margin}"
            )
        self.source, self.detach_positive, self.renorm = source, detach_positive, renorm
        self.offset, self.layer = offset, layer
        self.rule = lam if isinstance(lam, str) else None
        self.margin, self.high, self.momentum = margin, high, momentum
        initial = lam if not isinstance(lam, str) else math.copysign(min(0.1, high), margin)
        self.register_buffer("lam", torch.full((source.k_primary if lam == "learned" else 1,), float(initial)))
        gap = abs(margin) / min(0.1, high)
        # running means of the gap and its square
        self.register_buffer("gap", torch.tensor([[gap], [gap**2]]).repeat(1, len(self.lam)))

    def forward(self, step: Step) -> Bag:
        """The candidates, then the mixture of each: one block of a query's own, two blocks of shared ones."""
        ((block,), lam) = self.source(step).blocks, self.lam_of(step)
        rows = step.batch if block.shared else step  # whose positives are mixed
        v = rows.v.detach() if self.detach_positive else rows.v
        words = replace(block.provenance, source=f"{block.provenance.source}, then each mixed with the positive")
        if (
            self.layer is None
            and not self.renorm
            and not block.shared
            and block.exclude is None
            and fuses_mixtures(block.emb, self.source.m_h)
        ):
            from sparring.kernels import mixtures

            emb, log_w, ids = mixtures.towards(block.emb, v, lam, block.log_w, block.ids, self.offset)
            return Bag((replace(block, ids=ids, emb=emb, log_w=log_w, provenance=words),))
        hard, positive = block.emb.view(len(v), self.source.m_h, -1), v.unsqueeze(1)
        lam = lam.view(-1, 1, 1).to(hard.dtype)
        if self.layer is None:
            emb = torch.lerp(hard, positive, lam)
        else:
            own = rows.item_ids.unsqueeze(1).expand(hard.shape[:2])
            ids = torch.stack([own, block.ids.view_as(own).clamp(min=0)], -1)
            both = torch.stack([lam, 1 - lam], -1).expand(*ids.shape[:-1], 1, 2)
            if block.shared:  # ranks share the work
                ids, both = ids.flatten(0, 1), both.flatten(0, 1)
            emb = hidden_mixtures(step, ids, both, self.layer).view_as(hard)
        if self.renorm:
            lengths = step.unbiased(hard).norm(dim=-1), step.unbiased(positive).norm(dim=-1)
            emb = rescaled(step, emb, lengths[0] + lam.squeeze(-1) * (lengths[1] - lengths[0]))
        # a mixture has no id to exclude: it counts nothing where its candidate does not
        shape = torch.Size((len(step.q), block.ids.shape[-1]))
        log_w = block.log_w
        if block.exclude is not None:
            log_w = reference.drop(log_w, shape, block.exclude.places(block.ids))
        ids, emb, log_w = torch.full_like(block.ids, -1), emb.view_as(block.emb), log_w + self.offset
        if block.shared:
            made = block.derived(f"{block.provenance.source}, mixed with the positive that it was drawn for")
            return Bag((block, Candidates(ids, emb, log_w, provenance=made)))
        ids, emb, log_w = (torch.cat(both, 1) for both in ((block.ids, ids), (block.emb, emb), (block.log_w, log_w)))
        return Bag((replace(block, ids=ids, emb=emb, log_w=log_w, provenance=words),))

    def lam_of(self, step: Step) -> Tensor:
        """The share of the positive, (1,) or one for each positive that is mixed."""
        if self.rule == "learned":
            return self.lam[self.source.primary((step.batch if self.source.shared else step).item_ids)]
        return self.lam if self.rule is None else self.lam.clone()  # it may change before a second backward pass

    def observe(self, step: Step, outcome: Outcome) -> None:
        if self.rule is not None:
            with torch.no_grad():
                self.adapt(step, outcome)

    def adapt(self, step: Step, outcome: Outcome) -> None:
        """Update lam from the gap between positives and hard negatives of this step."""
        cluster = self.source.primary(step.item_ids) if self.rule == "learned" else torch.zeros_like(step.item_ids)
        sign, sums = (
            math.copysign(1.0, self.margin),
            torch.zeros(3, len(self.lam), dtype=self.gap.dtype, device=self.lam.device),
        )
        real = slice(self.source.m_h)
        for block in (block for bag in outcome.bags for block in bag.blocks):
            if block.provenance.sampler is not self.source:
                continue
            emb, log_w = block.emb, block.log_w
            if block.shared:  # those that were drawn for this rank's queries
                emb, log_w = (step.batch.own(x.unflatten(0, (-1, self.source.m_h))) for x in (emb, log_w))
            counts = ~torch.isneginf(log_w[:, real])
            gap = torch.where(counts, step.positive_logits.unsqueeze(1) - logits(step.scaled, emb[:, real]), 0.0)
            sums.index_add_(1, cluster, torch.stack([counts.sum(1), gap.sum(1), gap.square().sum(1)]).to(sums.dtype))
        sums = step.batch.sum(sums)
        means = sums[1:] / sums[0].clamp(min=1)
        self.gap.copy_(torch.where(sums[0] > 0, torch.lerp(self.gap, means, 1 - self.momentum), self.gap))
        gap, square = self.gap
        if self.rule == "learned":
            share = abs(self.margin) * gap / square.clamp(min=1e-12)
        else:
            share = abs(self.margin) / gap.clamp(min=abs(self.margin) / self.high)
        self.lam.copy_(sign * share.clamp(0.0, self.high))


def hidden_mixtures(step: Step, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
    """(..., V, D): items (..., M) mixed by weights (..., V, M) after `layer` layers of the item tower."""
    if step.encode_mixtures is None:
        raise ValueError(
            f"layer={layer} mixes inside the item tower and needs Step.encode_mixtures, which this step lacks"
        )
    return step.encode_mixtures(ids, weights, layer)


def rescaled(step: Step, emb: Tensor, length: Tensor) -> Tensor:
    """Item vectors (..., D) with these lengths (...); an item bias stays as it is and has no length."""
    own = step.unbiased(emb)
    scale: Tensor = length / own.norm(dim=-1).clamp(min=1e-12)
    return torch.cat([own * scale.unsqueeze(-1), emb[..., own.shape[-1] :]], -1)
