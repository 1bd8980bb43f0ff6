"""The values that everything passes around: a step, a bag of candidates, what came of the step.

Letters: B queries in a batch, C candidates, D dimensions, N items in the catalogue, K kept or returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_STRIDE = 1 << 40  # row * _STRIDE + item id is unique for every pair of a batch


@dataclass(frozen=True)
class Exclude:
    """Items that never count against a query: pairs (row of the batch, item id).

    `rows` ascend, or are None when there is exactly one id per query (its own positive), in row order.
    """

    ids: Tensor  # (P,)
    rows: Tensor | None = None  # (P,), or None: P = B and rows = 0..B-1

    @property
    def name(self) -> str:
        return "own positive" if self.rows is None else "all known positives"

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        """What the kernels take: `hits`, or on a GPU, where counting hits would wait for the device, a (B, C) mask."""
        if self.rows is None and ids.is_cuda:
            return ids == self.ids.unsqueeze(1)
        return self.hits(ids)

    def hits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, columns) of the excluded places among candidate ids (C,) or (B, C); O(P log C), never B x C x P."""
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
        begin, count = self.start[query_ids], self.start[query_ids + 1] - self.start[query_ids]
        rows = torch.repeat_interleave(torch.arange(len(query_ids), device=count.device), count)
        first = torch.cumsum(count, 0) - count
        within = torch.arange(len(rows), device=count.device) - first[rows]
        return Exclude(self.items[begin[rows] + within].long(), rows)


@dataclass(frozen=True)
class Candidates:
    """One block of what the queries are contrasted with; a candidate j counts exp(q_i . e_j / tau + log_w_ij).

    With `draws` set, the block stands for that many draws per query in proportion to those terms, taken at their
    expectation (the closed form of Resample): the weights become the constants draws * softmax_j(q_i . e_j / tau + log_w_ij).
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

    @property
    def shared(self) -> bool:
        return self.ids.dim() == 1


@dataclass(frozen=True)
class Bag:
    """Blocks of candidates that share one partition function, and the weight of the positive's own term."""

    blocks: tuple[Candidates, ...]
    log_w_positive: Tensor | None = None  # (B,); None = 0

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
            lines.append(line + (f"; counted as {block.draws:,.0f} expected draws per query" if block.draws else ""))
        corrected = "uncorrected" if self.log_w_positive is None else "corrected"
        return "\n".join([*lines, f"positive: one per query, {corrected}"])


def _masked(block: Candidates) -> str:
    if block.exclude is None:
        return block.masked
    return f"{block.exclude.name}, {len(block.exclude.hits(block.ids)[0]):,} places"


@dataclass(frozen=True)
class Step:
    """All that one training step knows."""

    query_ids: Tensor  # (B,)
    item_ids: Tensor  # (B,) the positives
    q: Tensor  # (B, D)
    v: Tensor  # (B, D) vectors of the positives
    tau: Tensor  # () or (B,)
    encode: Callable[[Tensor], Tensor]  # item ids of any shape -> their vectors, (..., D)
    generator: torch.Generator
    positives: Positives | None = None  # all known positives of every query

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
    items: Tensor  # (N, D)
    encode_queries: Callable[[Tensor], Tensor]  # query ids -> (B, D)
    positives: Positives  # all known positives of every query
    generator: torch.Generator


@dataclass(frozen=True)
class Outcome:
    """What came of a step: handed, detached, to every module that observes."""

    loss: Tensor  # (B,)
    bags: tuple[Bag, ...]  # one per term of the run
