"""Item frequencies: samplers draw from them, and corrections divide by them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparring.core.part import Part
from sparring.core.types import Outcome, Step
from sparring.kernels.native.draws import randint
from sparring.negatives.base import drawable, within


class Frequency(Part):
    """An estimate of how likely each item is to be the next candidate: `log_prob(ids)`."""

    def log_prob(self, ids: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define log_prob(ids)")


class Distribution(Frequency):
    """A frequency that can also be drawn from: `sample(shape, generator)`."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define sample(shape, generator)")


class Uniform(Distribution):
    """The uniform distribution: q_j = 1 / N; with `among`, 1 / len(among) for these items and 0 for all others.

    Sampled(Uniform(n_items), 1024)
    """

    n_items: int
    among: Tensor | None

    def __init__(self, n_items: int, among: Tensor | None = None):
        super().__init__()
        if n_items < 1:
            raise ValueError(f"Uniform needs at least one item, got {n_items}")
        self.n_items = n_items
        self.register_buffer("among", drawable(among, n_items), persistent=False)
        self.size = n_items if self.among is None else len(self.among)

    def log_prob(self, ids: Tensor) -> Tensor:
        return within(torch.full(ids.shape, -math.log(self.size), device=ids.device), ids, self.among)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        places = randint(self.size, shape, generator)
        return places if self.among is None else self.among[places]

    def extra_repr(self) -> str:
        return f"{self.n_items}" if self.among is None else f"{self.size} of {self.n_items}"


class Popularity(Distribution):
    """Items by how often they occur in the training data: q_j = count_j^alpha / sum_k count_k^alpha (PNS).

    An item that never occurs has q_j = 0 and log_prob -inf, and is never drawn. alpha = 1 is the distribution of items
    in a batch of training pairs, 0.75 the word2vec convention, and 0 uniform over the items that occur.

        InBatch(Popularity(train.counts()))
    """

    log_p: Tensor
    cdf: Tensor

    def __init__(self, counts: Tensor, alpha: float = 1.0):
        super().__init__()
        counts = torch.as_tensor(counts, dtype=torch.float64)
        if not bool((counts >= 0).all()) or float(counts.sum()) <= 0:
            raise ValueError("Popularity needs non-negative counts with a positive sum")
        mass = torch.where(counts > 0, counts**alpha, 0.0)
        self.alpha, self.n_items = alpha, len(counts)
        self.register_buffer("log_p", (mass / mass.sum()).log().float(), persistent=False)
        self.register_buffer("cdf", torch.cumsum(mass, 0) / mass.sum(), persistent=False)

    def log_prob(self, ids: Tensor) -> Tensor:
        return self.log_p[ids]

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return draw_from_cdf(self.cdf, shape, generator)

    def extra_repr(self) -> str:
        return f"{self.n_items} items, alpha={self.alpha:g}"


class Streaming(Frequency):
    """Item frequency from the gaps between its occurrences, with no counting pass over the data (G-Tower).

        at step t, for every item of the batch and every array h:
            gap_h <- (1 - alpha) gap_h + alpha (t - last_h),   last_h <- t
        q_j = 1 / max_h gap_h(j)

    gap_h and last_h are arrays indexed by (id + 1) mod size_h; a collision can only shorten a gap, hence the maximum. A
    gap counts steps, so 1 / gap is a probability per batch; log_prob divides by the batch size to get the probability
    per draw. Early estimates are poor: every gap starts at `start`.

        InBatch(Streaming(sizes=(n_items,), alpha=0.01))

    Yi et al., Sampling-Bias-Corrected Neural Modeling, RecSys 2019, algorithms 2 and 3.
    """

    sizes: Tensor
    offsets: Tensor
    gap: Tensor
    last: Tensor
    time: Tensor
    draws: Tensor

    def __init__(self, sizes: tuple[int, ...], alpha: float = 0.01, start: float = 1.0):
        super().__init__()
        if not sizes or min(sizes) < 1:
            raise ValueError(f"Streaming needs at least one hash array with at least one bucket, got sizes {sizes}")
        if not 0 < alpha <= 1:
            raise ValueError(f"Streaming needs 0 < alpha <= 1, got {alpha}")
        self.alpha = alpha
        self.register_buffer("sizes", torch.tensor(sizes), persistent=False)
        self.register_buffer("offsets", torch.tensor([sum(sizes[:h]) for h in range(len(sizes))]), persistent=False)
        self.register_buffer("gap", torch.full((sum(sizes),), float(start)))
        self.register_buffer("last", torch.zeros(sum(sizes), dtype=torch.float64))
        self.register_buffer("time", torch.zeros((), dtype=torch.float64))
        self.register_buffer("draws", torch.ones(()))

    def buckets(self, ids: Tensor) -> Tensor:
        """One bucket per hash array: (..., arrays)."""
        return (ids.unsqueeze(-1) + 1) % self.sizes + self.offsets

    def log_prob(self, ids: Tensor) -> Tensor:
        return -self.gap[self.buckets(ids)].amax(-1).log() - self.draws.log()

    def observe(self, step: Step, outcome: Outcome) -> None:
        self.time += 1
        bucket = self.buckets(step.batch.item_ids).flatten()
        # items of one bucket write the same value, so duplicates in the batch are harmless
        self.gap[bucket] = (1 - self.alpha) * self.gap[bucket] + self.alpha * (self.time - self.last[bucket]).float()
        self.last[bucket] = self.time
        self.draws.clamp_(min=len(step.batch))

    def extra_repr(self) -> str:
        return f"{len(self.sizes)} arrays, alpha={self.alpha:g}"


def draw_from_cdf(cdf: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Indices drawn in proportion to the increments of a cumulative sum (float64); an increment of 0 is never drawn."""
    u = torch.rand(shape, dtype=cdf.dtype, generator=generator, device=cdf.device) * cdf[-1]
    # right=True skips increments of 0; the minimum guards against u * cdf[-1] rounding up to cdf[-1]
    last = torch.searchsorted(cdf, cdf[-1:])
    return torch.minimum(torch.searchsorted(cdf, u, right=True), last)
