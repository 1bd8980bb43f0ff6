"""The values that everything passes around: a step, a bag of candidates, what came of the step.

Letters: B queries in a batch, C candidates, D dimensions, N items in the catalogue, K kept or returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

_STRIDE = 1 << 40  # row * _STRIDE + item id is unique for every pair of a batch
_LOOKED_UP = 1 << 24  # pairs of query and candidate at most; with more, listing the known ones is cheaper than a mask


class Keys(NamedTuple):
    """Pairs that do not count, as keys: candidate j not for query i where columns_j = rows_i."""

    columns: Tensor  # (C,)
    rows: Tensor  # (B,)

    def mask(self, low: int = 0, high: int | None = None) -> Tensor:
        """The pairs of queries low to high as a mask (rows, C)."""
        return self.rows[low:high].unsqueeze(1) == self.columns


Places = tuple[Tensor, Tensor] | Tensor | Keys  # pairs that do not count: (rows, columns) with rows ascending, a (B, C) mask, or keys


@dataclass(frozen=True)
class Exclude:
    """Items that never count against a query: pairs (row of the batch, item id), or (row, class of items).

    `rows` ascend, or are None when there is exactly one id per query (its own positive), in row order. With `code` the ids are classes and
    every item of the class is excluded. `also` excludes more.
    """

    ids: Tensor  # (P,)
    rows: Tensor | None = None  # (P,), or None: P = B and rows = 0..B-1
    code: Tensor | None = None  # (N,) the class of each item; None: every item is its own
    also: Exclude | None = None

    @property
    def name(self) -> str:
        own = "all known positives" if self.rows is not None else "own positive" if self.code is None else "own positive and its cell"
        return own if self.also is None else f"{own}, {self.also.name}"

    def keyed(self, ids: Tensor) -> bool:
        """Whether `places` are keys: on a GPU, where each query excludes one item or class of the shared candidates."""
        return self.rows is None and self.also is None and ids.is_cuda and ids.dim() == 1

    def places(self, ids: Tensor) -> Places:
        """What the kernels take: `hits`; on a GPU, where counting hits would wait for the device, keys to compare, or a (B, C) mask."""
        if self.rows is not None or self.also is not None or not ids.is_cuda:
            return self.hits(ids)
        return Keys(self._keys(ids), self.ids) if ids.dim() == 1 else self.mask(ids)

    def mask(self, ids: Tensor) -> Tensor:
        """(B, C) bool: the excluded places among candidate ids (C,) or (B, C), where each query excludes one item or class."""
        return self._keys(ids) == self.ids.unsqueeze(1)

    def hits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, columns) of the excluded places among candidate ids (C,) or (B, C); O(P log C), never B x C x P."""
        if self.also is None:
            return self._hits(self._keys(ids))
        row, column = (torch.cat(both) for both in zip(self._hits(self._keys(ids)), self.also.hits(ids), strict=True))
        row, order = torch.sort(row, stable=True)
        return row, column[order]

    def _keys(self, ids: Tensor) -> Tensor:
        return ids if self.code is None else torch.where(ids >= 0, self.code[ids.clamp(min=0)], -1)

    def _hits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(self.ids), device=self.ids.device) if self.rows is None else self.rows
        if ids.dim() == 2:  # one list per query: look each candidate up among the pairs
            pairs = torch.sort(rows * _STRIDE + self.ids).values
            keys = torch.arange(len(ids), device=ids.device).unsqueeze(1) * _STRIDE + ids
            at = torch.searchsorted(pairs, keys).clamp_(max=max(len(pairs) - 1, 0))
            row, column = torch.nonzero((pairs[at] == keys) & (ids >= 0) if len(pairs) else torch.zeros_like(keys) > 0, as_tuple=True)
            return row, column
        ordered, order = torch.sort(ids)
        low = torch.searchsorted(ordered, self.ids)
        count = torch.searchsorted(ordered, self.ids, right=True) - low
        pair = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
        within = torch.arange(len(pair), device=count.device) - (torch.cumsum(count, 0) - count)[pair]
        return rows[pair], order[low[pair] + within]


@dataclass(frozen=True)
class Positives:
    """All known positives of every query, as one flat array with offsets (CSR)."""

    start: Tensor  # (queries + 1,)
    items: Tensor  # (interactions,), sorted within each query

    def of(self, query_ids: Tensor) -> Exclude:
        """Pairs (row, item) of all known positives of these queries."""
        return Known(self, query_ids)

    @cached_property
    def keys(self) -> Tensor:
        """(interactions,) query * _STRIDE + item, ascending."""
        queries = torch.repeat_interleave(torch.arange(len(self.start) - 1, device=self.start.device), self.start.long().diff())
        return queries * _STRIDE + self.items


class Known(Exclude):
    """All known positives of some queries; the pairs are listed only where someone asks for them.

    On a GPU, where listing them would wait for the device, `places` looks each candidate up instead, a mask (B, C).
    """

    name = "all known positives"

    def __init__(self, positives: Positives, query_ids: Tensor) -> None:
        self.positives, self.query_ids = positives, query_ids

    def _listed(self) -> tuple[Tensor, Tensor]:
        start, items = self.positives.start, self.positives.items
        begin, count = start[self.query_ids], start[self.query_ids + 1] - start[self.query_ids]
        rows = torch.repeat_interleave(torch.arange(len(self.query_ids), device=count.device), count)
        first = torch.cumsum(count, 0) - count
        within = torch.arange(len(rows), device=count.device) - first[rows]
        return items[begin[rows] + within].long(), rows

    _pairs = cached_property(_listed)

    @property
    def ids(self) -> Tensor:  # type: ignore[override]
        return self._pairs[0]

    @property
    def rows(self) -> Tensor:  # type: ignore[override]
        return self._pairs[1]

    def keyed(self, ids: Tensor) -> bool:
        return False

    def places(self, ids: Tensor) -> Places:
        if not ids.is_cuda or len(self.query_ids) * ids.shape[-1] > _LOOKED_UP:
            return self.hits(ids)
        return self.mask(ids)

    def mask(self, ids: Tensor) -> Tensor:
        keys = self.query_ids.long().unsqueeze(1) * _STRIDE + ids
        known = self.positives.keys
        if not len(known):
            return torch.zeros_like(keys, dtype=torch.bool)
        return known[torch.searchsorted(known, keys).clamp_(max=len(known) - 1)] == keys


@dataclass(frozen=True)
class Mixtures:
    """Made-up candidates of a block: each group of M consecutive candidates gives V mixtures of their vectors (dense interpolation).

        logit of mixture v of group g = sum_m weights_gvm (q_i . e_gm / tau + log_w_igm) + offset

    A mixture of vectors is the same mixture of logits, so no made-up vector need exist; its weight is the mixture of its members' weights,
    and it counts nothing where a member with a share in it has none. The weights are constants.
    """

    weights: Tensor  # (G, V, M) with C = G M, or (B, G, V, M) where each query has its own candidates; rows sum to 1
    groups: Tensor  # (G,) or (B, G): the class of each group
    exclude: Exclude | None = None  # the class whose mixtures never count against a query, one for each
    offset: float = 0.0

    def places(self) -> Places | None:
        """(row, group) pairs that do not count, as the kernels take them."""
        return self.exclude.places(self.groups) if self.exclude else None

    @property
    def count(self) -> int:
        """Mixtures that a query meets."""
        return self.weights.shape[-3] * self.weights.shape[-2]


@dataclass(frozen=True)
class Candidates:
    """One block of what the queries are contrasted with; a candidate j counts exp(q_i . e_j / tau + log_w_ij).

    With `draws` set, the block stands for that many draws per query in proportion to those terms, taken at their
    expectation (the closed form of Resample): the weights become the constants draws * softmax_j(q_i . e_j / tau + log_w_ij).
    With `mix` set, mixtures of the candidates count beside them; `plain` gives them as vectors.
    """

    ids: Tensor  # (C,) shared by all queries, or (B, C); -1 = synthetic or empty
    emb: Tensor  # (C, D) or (B, C, D)
    log_w: Tensor  # broadcasts to (B, C): -log q corrects, log n counts, -inf drops
    exclude: Exclude | None = None  # what never counts against a query
    draws: float | None = None
    usage: Tensor | None = None  # shaped as ids, out: how often each was drawn, over all queries if shared; filled by the draw or the loss
    source: str = "candidates"  # for describe(): where they come from
    weighting: str = "none"  # for describe(): what log_w holds
    masked: str = "nothing"  # for describe(): what was masked before and is written into log_w
    mix: Mixtures | None = None
    seed: Tensor | None = None  # (2,) with `draws`: they are drawn inside the kernel, by this seed and the number of the first row

    @property
    def shared(self) -> bool:
        return self.ids.dim() == 1

    def plain(self) -> tuple[Candidates, ...]:
        """The block without mixtures and, where it has any, a second block that holds them as vectors with their masks written out."""
        if self.mix is None:
            return (self,)
        weights, m = self.mix.weights, self.mix.weights.shape[-1]
        emb = (weights @ self.emb.unflatten(-2, (-1, m))).flatten(-3, -2)
        # -inf times a weight of 0 would be nan
        log_w = self.log_w.expand(self.ids.shape if self.log_w.dim() < 2 else (*self.log_w.shape[:1], self.ids.shape[-1]))
        mixed = (weights @ log_w.clamp(min=-1e30).unflatten(-1, (-1, m)).unsqueeze(-1).to(weights.dtype)).squeeze(-1) + self.mix.offset
        mixed = mixed.masked_fill(mixed < -1e15, -torch.inf)
        if self.mix.exclude is not None:
            mixed = torch.where(self.mix.exclude.mask(self.mix.groups).unsqueeze(-1), -torch.inf, mixed)
        ids = torch.full(emb.shape[:-1], -1, device=self.ids.device)
        masked = self.masked if self.mix.exclude is None else "own positive's cluster"
        source = f"mixtures of {self.source}"
        return replace(self, mix=None), Candidates(ids, emb, mixed.flatten(-2), source=source, weighting=self.weighting, masked=masked)


@dataclass(frozen=True)
class Bag:
    """Blocks of candidates that share one partition function, and the weight of the positive's own term."""

    blocks: tuple[Candidates, ...]
    log_w_positive: Tensor | None = None  # (B,); None = 0

    def plain(self) -> Bag:
        """The same bag with mixtures as vectors: for whoever looks at single candidates."""
        if all(block.mix is None for block in self.blocks):
            return self
        return replace(self, blocks=tuple(part for block in self.blocks for part in block.plain()))

    def describe(self) -> str:
        """What the queries of this step are contrasted with: one line per block."""
        lines = []
        for block in self.blocks:
            real = block.ids >= 0
            line = f"{block.source}: {block.ids.shape[-1]:,} candidates "
            line += "shared by all queries" if block.shared else "for each query"
            line += f", {block.ids[real].unique().numel():,} distinct items, {int((~real).sum()):,} synthetic or empty"
            line += f"; weight: {block.weighting}, {int(torch.isneginf(block.log_w).sum()):,} dropped"
            line += f"; masked: {_masked(block)}"
            if block.mix is not None:
                line += f"; and {block.mix.count:,} mixtures of {block.mix.weights.shape[-1]:,} neighbours each"
            kind = "expected" if block.seed is None else "rounded"
            lines.append(line + (f"; counted as {block.draws:,.0f} {kind} draws per query" if block.draws else ""))
        corrected = "uncorrected" if self.log_w_positive is None else "corrected"
        return "\n".join([*lines, f"positive: one per query, {corrected}"])


def _masked(block: Candidates) -> str:
    if block.exclude is None:
        return block.masked
    return f"{block.exclude.name}, {len(block.exclude.hits(block.ids)[0]):,} places"


class Ranks:
    """The processes that train together: here one, which has everything. dist.py has those of a process group."""

    rank: int = 0
    world: int = 1

    def own(self, x: Tensor) -> Tensor:
        """The part of a tensor that every rank has whole (n, ...) that is this rank's to work on: equal parts, in order of rank."""
        return x

    def gather(self, x: Tensor, n: int) -> Tensor:
        """The whole (n, ...) of which every rank has its part; gradients flow back to the rank that each row came from."""
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, without gradient."""
        return x

    def share(self, value: Any) -> Any:
        """What rank 0 has."""
        return value

    def equalise(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values of rank 0, in place."""


ALONE = Ranks()


class Batch:
    """The whole batch, of which a step has the rows of one rank; in one process the step's own rows.

    What all queries share is drawn and encoded for this: every rank knows the ids, vectors come with gradient from the ranks that encoded
    them when first asked for. What each query draws for itself is drawn for all rows, and `own` takes those of this rank, so that no draw
    depends on the number of ranks and the generators of all ranks stay in step.
    """

    def __init__(self, query_ids: Tensor, item_ids: Tensor, q: Tensor, v: Tensor, ranks: Ranks = ALONE):
        self.query_ids, self.item_ids, self.ranks = query_ids, item_ids, ranks
        self._q, self._v = q, v  # of this rank's rows

    def __len__(self) -> int:
        return len(self.item_ids)

    @cached_property
    def q(self) -> Tensor:
        """(rows of all ranks, D)"""
        with torch.enable_grad():  # whoever asks first, others may need the gradient
            return self.gather(self._q)

    @cached_property
    def v(self) -> Tensor:
        """(rows of all ranks, D) vectors of the positives"""
        with torch.enable_grad():
            return self.gather(self._v)

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of what all rows have."""
        return self.ranks.own(x)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks, of what each has for its own."""
        return self.ranks.gather(x, len(self))

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, without gradient."""
        return self.ranks.sum(x)


@dataclass(frozen=True)
class Step:
    """All that one training step knows: of its own rows, and through `batch` of those of all ranks."""

    query_ids: Tensor  # (B,)
    item_ids: Tensor  # (B,) the positives
    q: Tensor  # (B, D)
    v: Tensor  # (B, D) vectors of the positives
    tau: Tensor  # () or (B,)
    encode: Callable[[Tensor], Tensor]  # item ids -> their vectors (..., D); ids (C,) must be the same on all ranks, which share the work
    generator: torch.Generator
    positives: Positives | None = None  # all known positives of every query
    encode_mixtures: Callable[[Tensor, Tensor, int], Tensor] | None = None  # as Retriever.encode_mixtures
    whole: Batch | None = None  # the batch of all ranks; None: these rows are all

    @property
    def batch(self) -> Batch:
        """The batch of all ranks."""
        return Batch(self.query_ids, self.item_ids, self.q, self.v) if self.whole is None else self.whole

    @property
    def scaled(self) -> Tensor:
        """q / tau, so that a logit is a plain inner product."""
        return self.q / self.tau.unsqueeze(-1)

    @property
    def positive_logits(self) -> Tensor:
        return (self.scaled * self.v).sum(-1)


@dataclass(frozen=True)
class Corpus:
    """The whole catalogue as the model sees it now: handed, without gradient, to every module that refreshes."""

    epoch: int  # about to begin, from 0
    item_vectors: Tensor | Callable[[], Tensor]  # (N, D), or what encodes them
    encode_queries: Callable[[Tensor], Tensor]  # query ids -> (B, D)
    positives: Positives  # all known positives of every query
    generator: torch.Generator
    ranks: Ranks = ALONE  # who may share the work
    copied: Callable[[torch.device], Corpus] | None = None  # the same of a copy of the model on a device: it stays while training goes on

    @cached_property
    def items(self) -> Tensor:
        """(N, D): encoded when first asked for, since a catalogue of texts takes long."""
        return self.item_vectors if isinstance(self.item_vectors, Tensor) else self.item_vectors()


@dataclass(frozen=True)
class Outcome:
    """What came of a step: handed, detached, to every module that observes."""

    loss: Tensor  # (B,)
    bags: tuple[Bag, ...]  # one per term of the run
