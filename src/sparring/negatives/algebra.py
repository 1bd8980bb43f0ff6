"""Combinations of bags: Union joins several, Resample draws from one, `merged` makes one block of a bag."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from sparring.core.types import Bag, Batch, Candidates, Exclude, Provenance, Step
from sparring.kernels import fuses, logits, reference
from sparring.negatives.base import UNKNOWN, Correction, Negatives, check_choice, corrected
from sparring.negatives.distributions import Frequency

DrawMethod = Literal["expected", "multinomial", "systematic", "rounded"]

_BLOCK = 1 << 18  # counts drawn at a time on a CPU


class Union(Negatives):
    """Candidates of several sources under one partition function (MNS, CBNS).

        log_w_j = -log sum_s E[count of j in source s]     (correction="count"; the other corrections as in `corrected`)

    A candidate's weight depends on how often all sources together offer it, not on the source it came from. If a source
    does not know its counts (Resample, Hardest, an uncorrected InBatch), every source keeps its own weights. `positive`
    replaces the mixture as the frequency that weights the positive under correction="both", as in the XIR release.

        Union(InBatch(Popularity(counts)), Sampled(Uniform(n_items), 1024))

    Yang et al., Mixed Negative Sampling, WWW 2020 companion, equation 5.
    """

    def __init__(self, *sources: Negatives, correction: Correction = "count", positive: Frequency | None = None):
        super().__init__()
        if len(sources) < 2:
            raise ValueError(f"Union needs at least two sources, got {len(sources)}")
        check_choice("correction", correction, Correction)
        self.sources = nn.ModuleList(sources)
        self.correction: Correction = correction
        self.positive = positive

    @property
    def _sources(self) -> list[Negatives]:
        return [source for source in self.sources if isinstance(source, Negatives)]

    def forward(self, step: Step) -> Bag:
        bags = [source(step) for source in self._sources]
        blocks = [block for bag in bags for block in bag.blocks]
        if self.log_count(step.item_ids, step) is None:
            weighed = [bag.log_w_positive for bag in bags if bag.log_w_positive is not None]
            if len(weighed) > 1:
                raise ValueError(
                    "two sources of a Union weight the positive: give at most one correction='both' or 'refined'"
                )
            return Bag(tuple(blocks), weighed[0] if weighed else None)
        bag = corrected(blocks, step, self, self.correction)
        if self.positive is not None and bag.log_w_positive is not None:
            bag = replace(bag, log_w_positive=-self.positive.log_prob(step.item_ids))
        return bag

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        counts = [source.log_count(ids, step) for source in self._sources]
        known = [count for count in counts if count is not None]
        return torch.logsumexp(torch.stack(torch.broadcast_tensors(*known)), 0) if len(known) == len(counts) else None

    def size(self, step: Step) -> float | Tensor:
        return sum(source.size(step) for source in self._sources)


class Resample(Negatives):
    """Keep n candidates per query, drawn in proportion to their corrected scores (BIR).

        p_ij = softmax_j(q_i . e_j / tau + log_w_ij),   n_i ~ Multinomial(n, p_i),   log_w'_ij = log n_ij

    The drawn multiset follows the query's softmax restricted to the bag. No gradient flows through the draw. Unlike
    Hardest, every candidate keeps a chance of being drawn. n=None draws as many as the bag holds. Drawn items lose the
    source's correction, and so does the positive, as published.

    draw="expected" replaces the counts by E n_ij = n p_ij: no draw, no noise. The gradient is then softmax(2 s +
    log_w): the published estimator, which weights drawn items by e^s once more, is in-batch softmax at half the
    temperature. "systematic" draws counts within 1 of n p_ij by one uniform number per query. "rounded" uses one number
    per pair, n_ij = floor(n p_ij + u_ij), with a sum of n on average; on a GPU the kernel draws them and stores no (B,
    C) matrix.

        Resample(InBatch(Popularity(counts)), n=1024)

    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, section 3.1.
    """

    log_count = UNKNOWN

    def __init__(self, source: Negatives, n: int | None = None, draw: DrawMethod = "expected"):
        super().__init__()
        check_choice("draw", draw, DrawMethod)
        if n is not None and n < 1:
            raise ValueError(f"Resample needs n >= 1, got {n}")
        self.source, self.n, self.draw = source, n, draw

    def forward(self, step: Step) -> Bag:
        bag = self.source(step)
        block = merged(bag, step)
        n = self.n or block.ids.shape[-1]
        source = f"{n:,} of {block.provenance.source} by {self.draw} draws"
        closed = replace(block, draws=float(n), provenance=block.derived(source))
        if self.draw == "expected":
            return Bag((closed,))
        if self.draw == "rounded" and fuses(
            step.q, block.emb, block.log_w, block.exclude is None or block.exclude.keyed(block.ids)
        ):
            seed = torch.randint(1 << 62, (2,), generator=step.generator, device=step.q.device)
            seed[1:].fill_(step.batch.ranks.rank * len(step.q))  # seed[1] = ... would synchronise
            return Bag((replace(closed, seed=seed),))
        with torch.no_grad():
            scores = logits(step.scaled, block.emb)
            places = block.exclude.places(block.ids) if block.exclude else None
            scores = scores + reference.drop(block.log_w, scores.shape, places)
            scores -= reference.safe_logsumexp(scores).nan_to_num(neginf=0.0).unsqueeze(-1)
            counts = _DRAWS[self.draw](scores.exp(), n, step.generator, step.batch)
            drawn = counts.sum(0) if block.shared else counts
        log_w = (counts - 1).log1p_()  # the logarithm of 0 is slow on a CPU
        words = Provenance(source, "log drawn count", block.masked)
        return Bag((replace(block, log_w=log_w, exclude=None, drawn=drawn, provenance=words),))


def multinomial_counts(p: Tensor, n: int, generator: torch.Generator, batch: Batch | None = None) -> Tensor:
    """Counts (B, C) of n independent draws from each row; a row of zeros draws nothing. `batch`: their batch."""
    cdf = torch.cumsum(p.double(), -1)
    possible = cdf[:, -1:] > 0
    u = _uniform(len(p), n, generator, batch) * cdf[:, -1:]
    # as in draw_from_cdf: right=True skips entries of probability 0, the bound guards against rounding up to the total
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
    drawn = torch.minimum(torch.searchsorted(cdf, u, right=True), last)
    counts = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))  # bfloat16 counts to 256
    return (
        counts.scatter_add_(1, drawn, torch.ones((), dtype=counts.dtype, device=p.device).expand(drawn.shape))
        * possible
    )


def systematic_counts(p: Tensor, n: int, generator: torch.Generator, batch: Batch | None = None) -> Tensor:
    """Counts (B, C) within 1 of their mean n p: floor(n F_j + u) - floor(n F_{j-1} + u), F the CDF of the row."""
    u = _uniform(len(p), 1, generator, batch)
    counts = torch.empty_like(p)
    # blocks that fit the cache of a CPU are many times as fast as all rows at once
    rows = max(1, (_BLOCK if p.device.type == "cpu" else p.numel()) // p.shape[1])
    for part, start, out in zip(p.split(rows), u.split(rows), counts.split(rows), strict=True):
        # float64: in float32 the CDF of a few thousand candidates is off by whole counts
        cdf = torch.cumsum(part, -1, dtype=torch.float64)
        cdf /= cdf[:, -1:].clone().clamp_(min=1e-300)
        edges = torch.floor(cdf * n + start)
        out[:, :1] = edges[:, :1]
        out[:, 1:] = edges[:, 1:] - edges[:, :-1]
    return counts


def _uniform(rows: int, n: int, generator: torch.Generator, batch: Batch | None) -> Tensor:
    """(rows, n) uniform numbers in float64, drawn for the rows of all ranks."""
    u = torch.rand(
        rows if batch is None else len(batch), n, dtype=torch.float64, generator=generator, device=generator.device
    )
    return u if batch is None else batch.own(u)


def rounded_counts(p: Tensor, n: int, generator: torch.Generator, batch: Batch | None = None) -> Tensor:
    """Counts (B, C) within 1 of their mean n p, independent of each other: floor(n p_ij + u_ij)."""
    return torch.floor(p * n + _uniform(len(p), p.shape[1], generator, batch)).to(p.dtype)


_DRAWS = {"multinomial": multinomial_counts, "systematic": systematic_counts, "rounded": rounded_counts}


def merged(bag: Bag, step: Step) -> Candidates:
    """The bag as one block, so that candidates of several sources can be resampled or ranked together."""
    if any(block.draws is not None for block in bag.blocks):
        raise ValueError(
            "expected draws cannot be resampled or ranked: give the inner Resample draw='multinomial' or 'systematic'"
        )
    bag = bag.plain()
    if len(bag.blocks) == 1:
        return bag.blocks[0]
    b = len(step.q)
    shared = all(block.shared for block in bag.blocks)
    rows = [block.ids.shape[-1] for block in bag.blocks]
    weights = [
        torch.broadcast_to(block.log_w, (c,) if block.log_w.dim() < 2 else (b, c))
        for block, c in zip(bag.blocks, rows, strict=True)
    ]
    exclude, masked = bag.blocks[0].exclude, "nothing"
    if any(_kind(block.exclude) != _kind(exclude) for block in bag.blocks):
        # the sources have different exclusions: write each into the weights
        dropped = [block.exclude.places(block.ids) if block.exclude else None for block in bag.blocks]
        weights = [
            reference.drop(w, torch.Size((b, c)), places) for w, c, places in zip(weights, rows, dropped, strict=True)
        ]
        exclude, masked = None, " + ".join(block.masked for block in bag.blocks)
    if not all(w.dim() == 1 for w in weights):
        weights = [w.expand(b, c) for w, c in zip(weights, rows, strict=True)]
    ids = [block.ids if shared else block.ids.expand(b, -1) for block in bag.blocks]
    emb = [block.emb if shared else block.emb.expand(b, -1, -1) for block in bag.blocks]
    words = [block.provenance for block in bag.blocks]
    source, weighting = " + ".join(word.source for word in words), " + ".join(dict.fromkeys(w.weighting for w in words))
    return Candidates(
        torch.cat(ids, -1),
        torch.cat(emb, -2),
        torch.cat(weights, -1),
        exclude,
        provenance=Provenance(source, weighting, masked),
    )


def _kind(exclude: Exclude | None) -> str:
    return "none" if exclude is None else f"{exclude.name} {id(exclude.code)}"
