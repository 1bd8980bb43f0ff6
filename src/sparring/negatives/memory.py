"""Negatives that remember earlier steps: Memory keeps vectors, Cache keeps items."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.partition import drawn_blocks
from sparring.core.types import Bag, Candidates, Outcome, Provenance, Step
from sparring.negatives.base import UNKNOWN, Correction, ExcludeKind, Negatives, check_choice, corrected, exclude_for
from sparring.negatives.distributions import Distribution, Frequency, draw_from_cdf


class Memory(Negatives):
    """The last `size` positives of past steps with the vectors they had then, without gradient (CBNS).

    A first-in first-out ring; empty slots count nothing. It starts to fill after `warmup` steps, because vectors change
    quickly at first. Unlike Cache it stores vectors, so nothing is encoded again, but they grow stale. `dim` is the
    dimension of the compared vectors, `width` of models.build, which includes an item bias and hidden layers.

        Union(InBatch(pop), Memory(2432, setup.model.dim, pop))

    Wang et al., Cross-Batch Negative Sampling, SIGIR 2021.
    """

    ids: Tensor
    emb: Tensor
    cursor: Tensor
    steps: Tensor

    def __init__(
        self,
        size: int,
        dim: int,
        frequency: Frequency,
        warmup: int = 0,
        correction: Correction = "count",
        exclude: ExcludeKind = "positive",
    ):
        super().__init__()
        check_choice("correction", correction, Correction)
        check_choice("exclude", exclude, ExcludeKind)
        if size < 1:
            raise ValueError(f"Memory needs size >= 1, got {size}")
        self.frequency, self.warmup, self.correction, self.exclude = frequency, warmup, correction, exclude
        self.register_buffer("ids", torch.full((size,), -1))
        self.register_buffer("emb", torch.zeros(size, dim))
        self.register_buffer("cursor", torch.zeros((), dtype=torch.long))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, step: Step) -> Bag:
        if step.q.shape[-1] != self.emb.shape[1]:
            widths = f"holds vectors of {self.emb.shape[1]} dimensions, but the model compares {step.q.shape[-1]}"
            raise UserError(
                f"Memory {widths}: pass dim=models.build.width(...), which includes an item bias and hidden layers"
            )
        empty = torch.where(self.ids < 0, -math.inf, 0.0)
        # a copy: the caller may hold a loss whose backward pass comes after the next write
        exclude, words = exclude_for(step, self.exclude), Provenance("memory")
        block = Candidates(self.ids.clone(), self.emb.clone(), empty, exclude, provenance=words)
        return corrected([block], step, self, self.correction)

    def log_count(self, ids: Tensor, step: Step) -> Tensor | None:
        return torch.as_tensor(self.size(step)).log() + self.frequency.log_prob(ids)

    def size(self, step: Step) -> Tensor:
        return (self.ids >= 0).sum().float()

    def observe(self, step: Step, outcome: Outcome) -> None:
        self.steps += 1
        new = step.batch.item_ids[-len(self.ids) :]
        slots = (self.cursor + torch.arange(len(new), device=new.device)) % len(self.ids)
        filling = self.steps > self.warmup
        self.ids[slots] = torch.where(filling, new, self.ids[slots])
        self.emb[slots] = torch.where(filling, step.batch.v[-len(new) :].detach().to(self.emb.dtype), self.emb[slots])
        self.cursor += filling * len(new)


class Cache(Negatives):
    """Items that past queries drew most often, encoded again at each step (the cache of XIR).

        o_j += draws of j in this step;   the next cache: `size` draws with replacement, P(j) proportional to o_j

    Draws of every Resample in the run count. pool="all" draws the next cache from the complete catalogue, as in the
    paper's algorithm 2. pool="drawn" draws it only from the items drawn in this step, as in the release: an item stays
    only if it is drawn again, and the cache shrinks to a few hundred distinct items. `start` is the initial occurrence
    count of every item: 0 in the paper (the first caches are then uniform), 1 in the release. The weight is -log q of
    the frequency; an item of frequency 0 never enters.

        Resample(Cache(2048, pop, n_items), n=1024)

    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, algorithm 2.
    """

    log_count = UNKNOWN
    ids: Tensor
    occurrences: Tensor
    sums: Tensor

    def __init__(
        self,
        size: int,
        frequency: Distribution,
        n_items: int,
        pool: Literal["all", "drawn"] = "all",
        start: float = 0.0,
        exclude: ExcludeKind = "positive",
        seed: int = 0,
    ):
        super().__init__()
        check_choice("pool", pool, Literal["all", "drawn"])
        check_choice("exclude", exclude, ExcludeKind)
        if size < 1:
            raise ValueError(f"Cache needs size >= 1, got {size}")
        self.frequency, self.pool, self.exclude = frequency, pool, exclude
        device = next(frequency.buffers(), torch.empty(0)).device
        possible = torch.isfinite(frequency.log_prob(torch.arange(n_items, device=device)))
        generator = torch.Generator().manual_seed(seed)  # on the CPU: a seed gives the same cache on every device
        self.register_buffer(
            "ids", draw_from_cdf(torch.cumsum(possible.double().cpu(), 0), (size,), generator).to(device)
        )
        self.register_buffer("occurrences", possible.double() * start)
        # Occurrences summed over blocks of items, so that the cost of a step depends on its batch and not on the
        # catalogue. A step reads a few thousand blocks and adds up the sums of all, which is cheapest for blocks of
        # about sqrt(N / 6000) items. A small catalogue needs no blocks.
        self.block = 2 ** round(math.log2(n_items / 6000) / 2) if n_items > 1 << 18 else 1
        blocks = torch.arange(-(-n_items // self.block) if self.block > 1 else 0, device=device)
        self.register_buffer("sums", self._of_blocks(blocks).sum(1))

    def forward(self, step: Step) -> Bag:
        log_w = -self.frequency.log_prob(self.ids)
        ids = self.ids.clone()
        exclude, words = exclude_for(step, self.exclude), Provenance("cache", "-log q")
        return Bag((Candidates(ids, step.encode(ids), log_w, exclude, provenance=words),))

    def observe(self, step: Step, outcome: Outcome) -> None:
        ids, count = self._drawn(step, outcome)
        self.occurrences.index_add_(0, ids, count)
        if self.block > 1:
            # unique() would synchronise a GPU
            changed = (ids // self.block).unique() if ids.device.type == "cpu" else ids // self.block
            self.sums[changed] = self._of_blocks(changed).sum(1)
        fresh, possible = (
            self._draw(step.generator) if self.pool == "all" else self._draw_from(ids, count, step.generator)
        )
        self.ids.copy_(torch.where(possible, fresh, self.ids))

    def _drawn(self, step: Step, outcome: Outcome) -> tuple[Tensor, Tensor]:
        """The candidates of all blocks that were resampled, and the draws of each over all ranks."""
        ids, counts = [self.ids[:1]], [torch.zeros_like(self.occurrences[:1])]
        for block, drawn in drawn_blocks(step, outcome):
            if drawn is not None:
                ids.append((block.ids if block.shared else step.batch.gather(block.ids)).flatten())
                counts.append((step.batch.sum(drawn) if block.shared else step.batch.gather(drawn)).flatten().double())
        which, count = torch.cat(ids), torch.cat(counts)
        # another term may draw items of frequency 0: their weight here would be infinite
        possible = (which >= 0) & torch.isfinite(self.frequency.log_prob(which.clamp(min=0)))
        return which.clamp(min=0), torch.where(possible, count, 0.0)

    def _of_blocks(self, blocks: Tensor) -> Tensor:
        """(n, block): the occurrences of the items of these blocks."""
        n_full, over = divmod(len(self.occurrences), self.block)
        full, rest = self.occurrences.split([n_full * self.block, over])
        rows = full.view(n_full, self.block).index_select(0, blocks.clamp(max=n_full - 1))
        return torch.where((blocks == n_full).unsqueeze(1), F.pad(rest, (0, self.block - over)), rows) if over else rows

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Items drawn in proportion to their occurrences, a block and then an item of it; and whether any occurred."""
        if self.block == 1:
            cdf = torch.cumsum(self.occurrences, 0)
            return draw_from_cdf(cdf, (len(self.ids),), generator), cdf[-1] > 0
        cdf = torch.cumsum(self.sums, 0)
        u = torch.rand(len(self.ids), dtype=cdf.dtype, generator=generator, device=cdf.device) * cdf[-1]
        block = torch.minimum(torch.searchsorted(cdf, u, right=True), torch.searchsorted(cdf, cdf[-1:]))
        inside = torch.cumsum(self._of_blocks(block), 1)
        rest = (u - (cdf[block] - self.sums[block])).unsqueeze(1)
        within = torch.minimum(
            torch.searchsorted(inside, rest, right=True), torch.searchsorted(inside, inside[:, -1:].contiguous())
        )
        return (block * self.block + within.squeeze(1)).clamp(max=len(self.occurrences) - 1), cdf[-1] > 0

    def _draw_from(self, ids: Tensor, count: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The same among the items drawn in this step."""
        n = len(self.occurrences)
        drawn = torch.sort(torch.where(count > 0, ids, n)).values
        first = torch.ones_like(drawn, dtype=torch.bool)
        first[1:] = drawn[1:] != drawn[:-1]
        cdf = torch.cumsum(torch.where(first & (drawn < n), self.occurrences[drawn.clamp(max=n - 1)], 0.0), 0)
        return drawn[draw_from_cdf(cdf, (len(self.ids),), generator)].clamp(max=n - 1), cdf[-1] > 0
