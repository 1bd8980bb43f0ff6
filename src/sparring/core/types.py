"""The values that flow through training: a step, its bags of candidates, and its outcome.

Letters: B queries in a batch, C candidates, D dimensions, N items in the catalogue, K kept or returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparring.core.exclusion import Exclude, Positives
from sparring.kernels import ExcludedPairs
from sparring.kernels.vectors import row_dots

__all__ = [
    "ALONE",
    "Bag",
    "Batch",
    "Candidates",
    "Corpus",
    "DrawCounts",
    "Exclude",
    "Filtered",
    "LossOutput",
    "Mixtures",
    "Outcome",
    "Positives",
    "Provenance",
    "Ranks",
    "Step",
]


@dataclass(frozen=True)
class Mixtures:
    """Synthetic candidates of a block: each group of M consecutive candidates yields V mixtures of their vectors.

        logit of mixture v of group g = sum_m weights_gvm (q_i . e_gm / tau + log_w_igm) + offset

    Mixing vectors is the same as mixing logits, so no synthetic vector has to be computed. The log weight of a mixture
    is the mixture of its members' log weights: it counts nothing if a member with a share in it is dropped. The mixing
    weights are constants.
    """

    weights: Tensor  # (G, V, M) with C = G M, or (B, G, V, M) where each query has its own candidates; rows sum to 1
    groups: Tensor  # (G,) or (B, G): the class of each group
    exclude: Exclude | None = None  # for each query, the class whose mixtures never count
    offset: float = 0.0

    def places(self) -> ExcludedPairs | None:
        """The excluded (row, group) pairs, in the form of the kernels."""
        return self.exclude.places(self.groups) if self.exclude else None

    @property
    def count(self) -> int:
        """Mixtures per query."""
        return self.weights.shape[-3] * self.weights.shape[-2]


class Filtered(NamedTuple):
    """The work of a filter on a block, summed over the queries: candidates offered, and those of them dropped."""

    dropped: Tensor  # ()
    offered: Tensor  # ()


@dataclass(frozen=True)
class Provenance:
    """The origin of a block: words for describe(), and the sampler where its observe() must find its own blocks."""

    source: str = "candidates"  # where the candidates come from
    weighting: str = "none"  # the meaning of log_w
    masked: str = "nothing"  # the exclusion that is already written into log_w
    sampler: nn.Module | None = None
    filtered: Filtered | None = None


@dataclass(frozen=True)
class Candidates:
    """One block of negatives: candidate j contributes exp(q_i . e_j / tau + log_w_ij) to query i's partition function.

    `draws` selects the closed form of Resample: the block stands for that many draws per query in proportion to these
    terms, taken at their expectation, so the weights become the constants draws * softmax_j(q_i . e_j / tau +
    log_w_ij). With `mix`, mixtures of the candidates count in addition; `plain` turns them into vectors.
    """

    ids: Tensor  # (C,) shared by all queries, or (B, C); -1 = synthetic or empty
    emb: Tensor  # (C, D) or (B, C, D)
    log_w: Tensor  # broadcasts to (B, C): -log q corrects, log n counts, -inf drops
    exclude: Exclude | None = None  # items that never count against a query
    draws: float | None = None  # closed form: draws per query, taken at their expectation
    seed: Tensor | None = None  # (2,) draws inside the kernel: by this seed, and the number of the first row
    drawn: Tensor | None = None  # draws made already, as in DrawCounts; the weights are their logarithms
    mix: Mixtures | None = None
    provenance: Provenance = Provenance()

    def __post_init__(self) -> None:
        for name, value in (("ids", self.ids), ("emb", self.emb), ("log_w", self.log_w)):
            if not isinstance(value, Tensor):
                raise ValueError(f"Candidates.{name} must be a tensor, got {type(value).__name__}")
        ids, emb, log_w = self.ids.shape, self.emb.shape, self.log_w.shape
        if len(ids) not in (1, 2) or emb[:-1] != ids:
            raise ValueError(
                f"Candidates need ids (C,) and emb (C, D), or (B, C) and (B, C, D); got {tuple(ids)} and {tuple(emb)}"
            )
        if len(log_w) > 2 or (log_w and log_w[-1] not in (1, ids[-1])):
            raise ValueError(f"Candidates.log_w must fit (B, C) with C = {ids[-1]}, got shape {tuple(log_w)}")

    @property
    def shared(self) -> bool:
        """Whether all queries have the same candidates."""
        return self.ids.dim() == 1

    @property
    def masked(self) -> str:
        """The items that never count against a query, in words."""
        return self.provenance.masked if self.exclude is None else self.exclude.name

    def derived(self, source: str) -> Provenance:
        """The provenance of a block made from this one, with its exclusion written into the weights."""
        return Provenance(source, self.provenance.weighting, self.masked)

    def plain(self) -> tuple[Candidates, ...]:
        """The block without mixtures, followed by a block of the mixtures as vectors, with their exclusion in log_w."""
        if self.mix is None:
            return (self,)
        weights, m = self.mix.weights, self.mix.weights.shape[-1]
        emb = (weights @ self.emb.unflatten(-2, (-1, m))).flatten(-3, -2)
        # clamped: -inf times a weight of 0 would be nan
        log_w = self.log_w.expand(
            self.ids.shape if self.log_w.dim() < 2 else (*self.log_w.shape[:1], self.ids.shape[-1])
        )
        mixed = (weights @ log_w.clamp(min=-1e30).unflatten(-1, (-1, m)).unsqueeze(-1).to(weights.dtype)).squeeze(
            -1
        ) + self.mix.offset
        mixed = mixed.masked_fill(mixed < -1e15, -torch.inf)
        if self.mix.exclude is not None:
            mixed = torch.where(self.mix.exclude.mask(self.mix.groups).unsqueeze(-1), -torch.inf, mixed)
        ids = torch.full(emb.shape[:-1], -1, device=self.ids.device)
        masked = self.provenance.masked if self.mix.exclude is None else "own positive's cluster"
        words = Provenance(f"mixtures of {self.provenance.source}", self.provenance.weighting, masked)
        return replace(self, mix=None), Candidates(ids, emb, mixed.flatten(-2), provenance=words)


@dataclass(frozen=True)
class Bag:
    """Blocks of candidates that share one partition function, and the weight of the positive's own term."""

    blocks: tuple[Candidates, ...]
    log_w_positive: Tensor | None = None  # (B,); None = 0

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, tuple) or not all(isinstance(block, Candidates) for block in self.blocks):
            kinds = [type(block).__name__ for block in self.blocks] if isinstance(self.blocks, tuple) else []
            got = kinds or type(self.blocks).__name__
            raise ValueError(f"Bag.blocks must be a tuple of Candidates, as in Bag((candidates,)); got {got}")

    def plain(self) -> Bag:
        """The same bag with all mixtures as vectors, so that every candidate can be inspected."""
        if all(block.mix is None for block in self.blocks):
            return self
        return replace(self, blocks=tuple(part for block in self.blocks for part in block.plain()))

    def describe(self) -> str:
        """One line per block: its source, size, weights and exclusion."""
        lines = []
        for block in self.blocks:
            real = block.ids >= 0
            line = f"{block.provenance.source}: {block.ids.shape[-1]:,} candidates "
            line += "shared by all queries" if block.shared else "for each query"
            line += f", {block.ids[real].unique().numel():,} distinct items, {int((~real).sum()):,} synthetic or empty"
            line += (
                f"; candidate weight: {block.provenance.weighting}, {int(torch.isneginf(block.log_w).sum()):,} dropped"
            )
            line += f"; masked: {block.masked}"
            if block.exclude is not None:
                line += f", {len(block.exclude.hits(block.ids)[0]):,} places"
            if block.mix is not None:
                line += f"; and {block.mix.count:,} mixtures of {block.mix.weights.shape[-1]:,} neighbours each"
            kind = "expected" if block.seed is None else "rounded"
            lines.append(line + (f"; counted as {block.draws:,.0f} {kind} draws per query" if block.draws else ""))
        corrected = "uncorrected" if self.log_w_positive is None else "corrected"
        return "\n".join([*lines, f"positive: one per query, {corrected}"])


class Ranks:
    """The processes that train together; this class is a single process. core.ranks.Group is a process group."""

    rank: int = 0
    world: int = 1

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of a tensor (n, ...) that every rank holds: equal parts, in the order of ranks."""
        return x

    def gather(self, x: Tensor, n: int) -> Tensor:
        """Concatenate the parts of all ranks to (n, ...); gradients flow back to the rank that holds the row."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, without gradient."""
        return x

    def share(self, value: Any) -> Any:
        """The value of rank 0."""
        return value

    def equalise(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite these tensors on every rank with the values of rank 0."""


ALONE: Ranks = Ranks()


class Batch:
    """The batch of all ranks; a step holds the rows of one rank. In a single process the two are the same.

    Every rank knows all ids. Vectors are gathered with their gradient when they are first read. Draws are made for the
    rows of all ranks, and `own` selects this rank's, so that no draw depends on the number of ranks and the generators
    of all ranks stay in step.
    """

    def __init__(
        self, query_ids: Tensor, item_ids: Tensor, q: Tensor, v: Tensor, ranks: Ranks = ALONE, grouped: bool = False
    ):
        self.query_ids, self.item_ids, self.ranks = query_ids, item_ids, ranks
        self.grouped = grouped  # rows of one query share the batch, as those of a sequence do
        self._q, self._v = q, v  # of this rank

    def __len__(self) -> int:
        return len(self.item_ids)

    @cached_property
    def q(self) -> Tensor:
        """(rows of all ranks, D)"""
        with torch.enable_grad():  # the first reader may need no gradient, a later one may
            return self.gather(self._q)

    @cached_property
    def v(self) -> Tensor:
        """(rows of all ranks, D) vectors of the positives"""
        with torch.enable_grad():
            return self.gather(self._v)

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of a tensor over all rows."""
        return self.ranks.own(x)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks, from a tensor over this rank's rows."""
        return self.ranks.gather(x, len(self))

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, without gradient."""
        return self.ranks.sum(x)


@dataclass(frozen=True)
class ItemLayers:
    """The layers of a graph's item tower, whose mean is an item's vector."""

    count: int
    encode: Callable[[Tensor, int], Tensor]  # item ids, layer -> (..., D), before any scaling
    join: Callable[[Tensor], Tensor]  # the mean over the layers (..., D) -> a vector as it is compared


class SharedQueries(NamedTuple):
    """The queries of rows that share them: each distinct vector once, and the one that each row has."""

    q: Tensor  # (S, D)
    ids: Tensor  # (S,) query ids
    rows: Tensor  # (B,) the place of each row's query among the S


@dataclass(frozen=True)
class Step:
    """The inputs of one training step: the rows of this rank, and through `batch` those of all ranks."""

    query_ids: Tensor  # (B,)
    item_ids: Tensor  # (B,) the positives
    q: Tensor  # (B, D)
    v: Tensor  # (B, D) vectors of the positives
    tau: Tensor  # () or (B,)
    # item ids -> vectors (..., D); ids (C,) must be the same on all ranks, which share the work
    encode: Callable[[Tensor], Tensor]
    generator: torch.Generator
    positives: Positives | None = None  # all known positives of every query; training always provides them
    encode_mixtures: Callable[[Tensor, Tensor, int], Tensor] | None = None  # Retriever.encode_mixtures
    whole: Batch | None = None  # the batch of all ranks; None: a single process
    layers: ItemLayers | None = None  # Retriever.item_layers
    shared: SharedQueries | None = None  # where rows share queries and scoring each once is cheaper
    biased: bool = False  # item vectors end in an item bias (Retriever.item_bias)

    @property
    def batch(self) -> Batch:
        """The batch of all ranks."""
        return Batch(self.query_ids, self.item_ids, self.q, self.v) if self.whole is None else self.whole

    @property
    def scaled(self) -> Tensor:
        """q / tau, so that a logit is a plain inner product."""
        return self.q / self.tau.unsqueeze(-1)

    def unbiased(self, emb: Tensor) -> Tensor:
        """Item vectors (..., D) without their item bias, which is popularity and no direction: to compare items."""
        return emb[..., :-1] if self.biased else emb

    def known(self, query_ids: Tensor | None = None) -> Exclude:
        """All known positives of these queries, by default the step's own, as pairs (row, item)."""
        if self.positives is None:
            raise ValueError('exclude="known" needs Step.positives: all known positives of each query')
        return self.positives.of(self.query_ids if query_ids is None else query_ids)

    @property
    def positive_logits(self) -> Tensor:
        """q_i . v_i / tau_i, (B,)."""
        dots = row_dots(self.q, self.v)
        return (self.scaled * self.v).sum(-1) if dots is None else dots / self.tau


@dataclass(frozen=True)
class Corpus:
    """A snapshot of the catalogue for refresh(): all vectors under the current model, without gradient."""

    epoch: int  # the epoch about to start, from 0
    item_vectors: Tensor | Callable[[], Tensor]  # (N, D), or a function that encodes them
    encode_queries: Callable[[Tensor], Tensor]  # query ids -> (B, D)
    positives: Positives  # all known positives of every query
    generator: torch.Generator
    ranks: Ranks = ALONE  # the ranks that may share the work
    # the same snapshot by a copy of the model on a device, which stays valid while training continues
    copied: Callable[[torch.device], Corpus] | None = None

    @cached_property
    def items(self) -> Tensor:
        """(N, D), encoded when first read: a catalogue of texts takes long."""
        return self.item_vectors if isinstance(self.item_vectors, Tensor) else self.item_vectors()


DrawCounts = tuple[Tensor | None, ...]
"""Draws of each candidate: one tensor per block, shaped like its ids; shared candidates are summed over the queries."""


class LossOutput(NamedTuple):
    """The losses of the queries of a step, and by-products of computing them."""

    losses: Tensor  # (B,)
    draw_counts: DrawCounts | None = None  # None: the loss does not count draws
    notes: Mapping[nn.Module, Tensor] = MappingProxyType({})  # values for observe(), by the module that reads them


@dataclass(frozen=True)
class Outcome:
    """The result of a training step, without gradient, as every module that observes receives it."""

    loss: Tensor  # (B,) summed over the terms
    bags: tuple[Bag, ...]  # one per term of the run
    outputs: tuple[LossOutput, ...] = ()  # one per term
