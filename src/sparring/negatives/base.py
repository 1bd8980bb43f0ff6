"""What negatives are, and how bags of them combine: Union, Resample."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sparring.core.types import Bag, Batch, Candidates, Exclude, Outcome, Step
from sparring.kernels import fuses, logits, reference

Correction = Literal["count", "negatives", "both", "refined", "none"]
Exclusion = Literal["positive", "known", "none"]
Draw = Literal["expected", "multinomial", "systematic", "rounded"]

_BLOCK = 1 << 18  # counts drawn at a time on a CPU


class Negatives(nn.Module):
    """Who a query is contrasted with, and with what weight.

    `forward(step)` gives the bag and never changes state. Where it is known, `log_count(ids, step)` is the log of how often each id is
    expected among the `size(step)` candidates; it is what a correction divides by and what Union adds up. A source whose counts depend
    on the query answers (B, C), for ids (C,) or (B, C).
    `observe(step, outcome)`, called after each step, updates buffers; a module that defines `refresh(corpus)` is called before each
    epoch with all item vectors, to rebuild what it keeps. `encodes` says that every vector of its bag is step.encode(id) and no other.
    """

    encodes: bool = False

    def forward(self, step: Step) -> Bag:
        raise TypeError(f"{type(self).__name__} must define forward(step)")

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        return None

    def size(self, step: Step) -> float | Tensor:
        raise TypeError(f"{type(self).__name__} defines log_count, so it must define size(step)")

    def observe(self, step: Step, outcome: Outcome) -> None:
        return None


def exclusion(step: Step, what: Exclusion) -> Exclude | None:
    """The pairs that never count: the query's own positive, all its known positives, or nothing."""
    if what == "none":
        return None
    if what == "positive":
        return Exclude(step.item_ids)
    if step.positives is None:
        raise ValueError('exclude="known" needs Step.positives: all known positives of each query')
    return step.positives.of(step.query_ids)


def check_choice(name: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}; got {value!r}")


def corrected(blocks: list[Candidates], step: Step, source: Negatives, correction: Correction) -> Bag:
    """Weigh candidates by how often the source offers them: count_j = source.log_count, q_j = count_j / source.size.

        count      log_w_j = -log count_j                              sums are right: E sum_j w_j e^s_j = sum over the catalogue
        negatives  log_w_j = -log q_j                                  the same without log n: the negatives weigh n times too much
        both       log_w_j = -log q_j, positive too -log q_+           the textbook logQ (Yi et al. 2019)
        refined    as count, positive -log(1 - q_+)                    the negatives come from a catalogue without the positive
        none       log_w_j = 0

    The gradient of `refined` is that of the published -sg(1 - P)[s_+ - log sum_j exp(s_j - log Q'_j)], Q' = Q / (1 - Q_+).
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
    for block in blocks:
        log_w = shift - log_count(block.ids)
        log_w = torch.where(torch.isneginf(block.log_w), block.log_w, log_w)
        weighed.append(replace(block, log_w=log_w, weighting=names[correction]))
    positive = None
    if correction in ("both", "refined"):
        own_count = log_count(step.item_ids.unsqueeze(1)).squeeze(1)  # a column: a source may answer for each query
    if correction == "both":
        positive = log_size - own_count
    elif correction == "refined":
        # the published form divides by the negatives that are left when those equal to the positive are taken out
        kept = torch.zeros(len(step.q), device=step.q.device)
        for block in blocks:
            hit = torch.bincount(Exclude(step.item_ids).hits(block.ids)[0], minlength=len(kept))
            kept += (~torch.isneginf(block.log_w)).expand(block.ids.shape).sum(-1) - hit
        log_kept = kept.clamp(min=1).log() - log_size
        positive = log_kept - torch.log1p(-(own_count - log_size).exp().clamp(max=1 - 1e-6))
    if positive is not None:  # nan: a source that holds nothing yet has no frequency
        positive = positive.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    return Bag(tuple(weighed), positive)


class Union(Negatives):
    """Candidates of several sources under one partition function (MNS, CBNS).

        log_w_j = -log sum_s E[count of j in source s]     (correction="count"; the other corrections as in `corrected`)

    A candidate's weight depends on how often all sources together offer it, not on the source it came from. Where a source does not
    know its counts (Resample, Hardest, an uncorrected InBatch), each source keeps its own weights. `positive` replaces the
    mixture as the frequency that weighs the positive under correction="both", as the XIR release does.

        Union(InBatch(Popularity(counts)), Sampled(Uniform(n_items), 1024))

    Yang et al., Mixed Negative Sampling, WWW 2020 companion, equation 5.
    """

    def __init__(self, *sources: Negatives, correction: Correction = "count", positive: nn.Module | None = None):
        super().__init__()
        if len(sources) < 2:
            raise ValueError(f"Union needs at least two sources, got {len(sources)}")
        check_choice("correction", correction, Correction)
        self.sources = nn.ModuleList(sources)
        self.correction: Correction = correction
        self.positive = positive

    def forward(self, step: Step) -> Bag:
        bags = [source(step) for source in self.sources]
        blocks = [block for bag in bags for block in bag.blocks]
        if self.log_count(step.item_ids, step) is None:
            weighed = [bag.log_w_positive for bag in bags if bag.log_w_positive is not None]
            if len(weighed) > 1:
                raise ValueError(
                    "two sources of a Union both weigh the positive: give at most one of them correction='both' or 'refined'"
                )
            return Bag(tuple(blocks), weighed[0] if weighed else None)
        bag = corrected(blocks, step, self, self.correction)
        if self.positive is not None and bag.log_w_positive is not None:
            bag = replace(bag, log_w_positive=-self.positive.log_prob(step.item_ids))  # type: ignore[operator]
        return bag

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        counts = [source.log_count(ids, step) for source in self.sources]  # type: ignore[operator]
        if any(count is None for count in counts):
            return None
        counts = list(torch.broadcast_tensors(*counts))
        return torch.logsumexp(torch.stack(counts), 0)

    def size(self, step: Step) -> float | Tensor:
        return sum(source.size(step) for source in self.sources)  # type: ignore[operator, misc]


class Resample(Negatives):
    """Keep n candidates per query, drawn in proportion to their corrected scores (BIR).

        p_ij = softmax_j(q_i . e_j / tau + log_w_ij),   n_i ~ Multinomial(n, p_i),   log_w'_ij = log n_ij

    The drawn multiset follows the query's softmax restricted to the bag. No gradient flows through the draw. Unlike Hardest, every
    candidate keeps a chance of being drawn. draw="expected" puts E n_ij = n p_ij in place of the counts, which needs no draw
    at all and removes its noise; the gradient is then softmax(2 s + log_w): the published estimator, which weighs drawn items by
    e^s once more, is in-batch softmax at half the temperature. "systematic" draws counts within 1 of n p_ij by one uniform
    number per query; "rounded" by one for each pair, n_ij = floor(n p_ij + u_ij), which on a GPU are made inside the kernel, so that
    no (B, C) matrix is written: their sum is n on average. n=None draws as many as the bag holds. Drawn items are no longer weighed by the
    source's correction, so the positive is not either, as published.

        Resample(InBatch(Popularity(counts)), n=1024)

    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, section 3.1.
    """

    def __init__(self, source: Negatives, n: int | None = None, draw: Draw = "expected"):
        super().__init__()
        check_choice("draw", draw, Draw)
        if n is not None and n < 1:
            raise ValueError(f"Resample needs n >= 1, got {n}")
        self.source, self.n, self.draw = source, n, draw

    def forward(self, step: Step) -> Bag:
        bag = self.source(step)
        block = merged(bag, step)
        n = self.n or block.ids.shape[-1]
        name = f"{n:,} of {block.source} by {self.draw} draws"
        if self.draw == "expected":
            usage = torch.zeros(block.ids.shape, device=step.q.device)
            return Bag((replace(block, draws=float(n), usage=usage, source=name),))
        if self.draw == "rounded" and fuses(
            step.q, block.emb, block.log_w, block.exclude is None or block.exclude.keyed(block.ids)
        ):
            seed = torch.randint(1 << 62, (2,), generator=step.generator, device=step.q.device)
            seed[1:].fill_(step.batch.ranks.rank * len(step.q))  # seed[1] = ... would wait for the device
            usage = torch.zeros(block.ids.shape, device=step.q.device)
            return Bag((replace(block, draws=float(n), usage=usage, source=name, seed=seed),))
        with torch.no_grad():
            scores = logits(step.scaled, block.emb)
            places = block.exclude.places(block.ids) if block.exclude else None
            scores = scores + reference.drop(block.log_w, scores.shape, places)
            scores -= reference.safe_logsumexp(scores).nan_to_num(neginf=0.0).unsqueeze(-1)
            counts = _DRAWS[self.draw](scores.exp(), n, step.generator, step.batch)
            usage = counts.sum(0) if block.shared else counts
        log_w = (counts - 1).log1p_()  # the logarithm of 0 is slow on a CPU
        drawn = replace(block, log_w=log_w, exclude=None, usage=usage, masked=mask_of(block))
        return Bag((replace(drawn, source=name, weighting="log drawn count"),))


def multinomial_counts(p: Tensor, n: int, generator: torch.Generator, batch: Batch | None = None) -> Tensor:
    """Counts (B, C) of n independent draws from each row; a row of zeros draws nothing. `batch`: whose rows these are."""
    cdf = torch.cumsum(p.double(), -1)
    some = cdf[:, -1:] > 0
    u = _uniform(len(p), n, generator, batch) * cdf[:, -1:]
    # as in draw_from_cdf: right=True skips what has no probability, the bound guards the rounding of u * total up to the total
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
    drawn = torch.minimum(torch.searchsorted(cdf, u, right=True), last)
    counts = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))  # 8 bits count to 256
    return counts.scatter_add_(1, drawn, torch.ones((), dtype=counts.dtype, device=p.device).expand(drawn.shape)) * some


def systematic_counts(p: Tensor, n: int, generator: torch.Generator, batch: Batch | None = None) -> Tensor:
    """Counts (B, C) with mean n * p and less than 1 away from it: floor(n F_j + u) - floor(n F_{j-1} + u), F the row's CDF."""
    u = _uniform(len(p), 1, generator, batch)
    counts = torch.empty_like(p)
    rows = max(
        1, (_BLOCK if p.device.type == "cpu" else p.numel()) // p.shape[1]
    )  # of a CPU's cache: many times as fast as all at once
    for some, start, out in zip(p.split(rows), u.split(rows), counts.split(rows), strict=True):
        # float64: at float32 the CDF of a few thousand candidates loses whole counts
        cdf = torch.cumsum(some, -1, dtype=torch.float64)
        cdf /= cdf[:, -1:].clone().clamp_(min=1e-300)
        edges = torch.floor(cdf * n + start)
        out[:, :1] = edges[:, :1]
        out[:, 1:] = edges[:, 1:] - edges[:, :-1]
    return counts


def _uniform(rows: int, n: int, generator: torch.Generator, batch: Batch | None) -> Tensor:
    """(rows, n) numbers from [0, 1), float64; drawn for the rows of all ranks."""
    u = torch.rand(
        rows if batch is None else len(batch), n, dtype=torch.float64, generator=generator, device=generator.device
    )
    return u if batch is None else batch.own(u)


def rounded_counts(p: Tensor, n: int, generator: torch.Generator, batch: Batch | None = None) -> Tensor:
    """Counts (B, C) with mean n * p and less than 1 away from it, each by itself: floor(n p_ij + u_ij)."""
    return torch.floor(p * n + _uniform(len(p), p.shape[1], generator, batch)).to(p.dtype)


_DRAWS = {"multinomial": multinomial_counts, "systematic": systematic_counts, "rounded": rounded_counts}


def merged(bag: Bag, step: Step) -> Candidates:
    """The bag as one block, so that candidates of several sources can be drawn or ranked together."""
    if any(block.draws is not None for block in bag.blocks):
        raise ValueError(
            "expected draws cannot be drawn or ranked again: give the inner Resample draw='multinomial' or 'systematic'"
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
        # sources that mask differently: write each mask into its weights
        dropped = [block.exclude.places(block.ids) if block.exclude else None for block in bag.blocks]
        weights = [
            reference.drop(w, torch.Size((b, c)), places) for w, c, places in zip(weights, rows, dropped, strict=True)
        ]
        exclude, masked = None, " + ".join(mask_of(block) for block in bag.blocks)
    if not all(w.dim() == 1 for w in weights):
        weights = [w.expand(b, c) for w, c in zip(weights, rows, strict=True)]
    ids = [block.ids if shared else block.ids.expand(b, -1) for block in bag.blocks]
    emb = [block.emb if shared else block.emb.expand(b, -1, -1) for block in bag.blocks]
    source = " + ".join(block.source for block in bag.blocks)
    weighting = " + ".join(dict.fromkeys(block.weighting for block in bag.blocks))
    return Candidates(
        torch.cat(ids, -1),
        torch.cat(emb, -2),
        torch.cat(weights, -1),
        exclude,
        source=source,
        weighting=weighting,
        masked=masked,
    )


def mask_of(block: Candidates) -> str:
    return block.masked if block.exclude is None else block.exclude.name


def _kind(exclude: Exclude | None) -> str:
    return "none" if exclude is None else f"{exclude.name} {id(exclude.code)}"
