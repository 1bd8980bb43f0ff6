"""Weighted log-sum-exp over shared candidates and mixtures of them, a block of candidates at a time.

Scores are stored candidates first, (C, B): the mixtures of all groups are one batched product, and the real and mixed
scores of a block are contiguous, with one maximum, one exponential and one sum. Weights are one more dimension of the
vectors, so the same product mixes them. The exponentials of a block are added back onto the real candidates while they
are in the processor's cache, so the backward pass needs only (C, B) of them and no mixture; beyond STORE elements they
are recomputed. Logits are in powers of 2: on a CPU exp2 takes a third of the time of exp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparring.kernels.chunked import LN2, LOG2E, STORE, spare
from sparring.kernels.reference import ALIVE, NEVER, ExcludedKeys, ExcludedPairs, Mix

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 27}  # scores per block


def weighted_logsumexp(q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None, mix: Mix) -> Tensor:
    """As in reference.py, for shared emb (C, D) and a log_w (C,) without gradient."""
    return _MixedLogSumExp.apply(q, emb, log_w, places, mix)  # type: ignore[no-untyped-call, no-any-return]


class _MixtureBlocks:
    """The blocks of groups: scores of candidates and mixtures, and their pull on each candidate."""

    def __init__(self, q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None, mix: Mix):
        weight = log_w.clamp(min=NEVER).mul(LOG2E).expand(len(emb)).unsqueeze(1).to(emb.dtype)
        self.emb = torch.cat([emb, weight], 1)
        self.q = torch.cat([q * LOG2E, torch.ones_like(q[:, :1])], 1).T
        self.weights, self.offset = mix.weights.to(q.dtype), mix.offset * LOG2E
        self.groups, self.made, self.size = mix.weights.shape
        self.step = max(
            1, min(self.groups, BLOCK.get(q.device.type, 1 << 18) // max((self.size + self.made) * len(q), 1))
        )
        self.starts = list(range(0, self.groups, self.step))
        self.places = _Dropped(places, [at * self.size for at in self.starts])
        self.mixed_places = _Dropped(mix.places, self.starts)

    def columns(self, b: int) -> slice:
        """The candidates of block b."""
        return slice(self.starts[b] * self.size, min(self.starts[b] + self.step, self.groups) * self.size)

    def scratch(self) -> tuple[Tensor, Tensor]:
        """A buffer for the real and mixed scores of a block; to be returned."""
        b = self.q.shape[1]
        return spare.take(self.q, self.step * self.size, b), spare.take(self.q, self.step * self.made, b)

    def block(self, b: int, real: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
        """The maximum of block b for each query, and the sum of its exponentials relative to it, (B,) both.

        `real` (columns, B) is left with how much of the sum each candidate carries, itself and by its shares in
        mixtures.
        """
        columns = self.columns(b)
        n = (columns.stop - columns.start) // self.size
        weights = self.weights[self.starts[b] : self.starts[b] + n]
        real, made = real[: n * self.size], made[: n * self.made]
        grouped, mixed = real.view(n, self.size, -1), made.view(n, self.made, -1)
        torch.mm(self.emb[columns], self.q, out=real)
        torch.bmm(weights, grouped, out=mixed)
        if self.offset:
            made += self.offset
        self.places.fill(b, real)
        self.mixed_places.fill(b, mixed)
        top = torch.maximum(real.amax(0), made.amax(0))
        top = torch.where(top > ALIVE, top, torch.zeros_like(top))
        total = real.sub_(top).exp2_().sum(0) + made.sub_(top).exp2_().sum(0)
        grouped.baddbmm_(weights.transpose(1, 2), mixed)
        return top, total


class _Dropped:
    """Excluded pairs (row, column) by block of columns, or a mask (B, columns)."""

    def __init__(self, places: ExcludedPairs | None, starts: list[int]):
        self.starts, self.places = starts, places
        if places is None or isinstance(places, Tensor | ExcludedKeys):
            return
        columns, order = torch.sort(places[1])
        self.places = places[0][order], columns
        edges = torch.tensor(starts[1:], device=columns.device, dtype=columns.dtype)
        self.bounds = [0, *torch.searchsorted(columns, edges).tolist(), len(columns)]

    def fill(self, b: int, scores: Tensor) -> None:
        """Write -inf into the scores (columns, B) or (columns, V, B) of block b."""
        if self.places is None:
            return
        low = self.starts[b]
        if isinstance(self.places, Tensor | ExcludedKeys):
            some = slice(low, low + len(scores))
            mask = (
                self.places[:, some].T
                if isinstance(self.places, Tensor)
                else self.places.columns[some].unsqueeze(1) == self.places.rows
            )
            scores.masked_fill_(mask if scores.dim() == 2 else mask.unsqueeze(1), -math.inf)
            return
        begin, end = self.bounds[b], self.bounds[b + 1]
        rows, columns = self.places[0][begin:end], self.places[1][begin:end] - low
        if scores.dim() == 2:
            scores[columns, rows] = -math.inf
        else:
            scores[columns, :, rows] = -math.inf


class _MixedLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None, mix: Mix) -> Tensor:
        blocks = _MixtureBlocks(q, emb, log_w, places, mix)
        kept = (
            spare.take(q, len(emb), len(q))
            if q.shape[0] * len(emb) <= STORE and any(ctx.needs_input_grad[:2])
            else None
        )
        tops, totals = q.new_empty(len(blocks.starts), len(q)), q.new_empty(len(blocks.starts), len(q))
        real, made = blocks.scratch()
        for b in range(len(blocks.starts)):
            tops[b], totals[b] = blocks.block(b, real if kept is None else kept[blocks.columns(b)], made)
        spare.give(real)
        spare.give(made)
        top = torch.where(totals > 0, tops, -math.inf).amax(0)
        top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        scale = torch.where(totals > 0, (tops - top).exp2(), torch.zeros_like(tops))
        total = (totals * scale).sum(0)
        ctx.blocks, ctx.kept = blocks, kept
        ctx.scale = scale / torch.where(total > 0, total, torch.ones_like(total))
        return (top + total.log2()) * LN2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        blocks, scale = ctx.blocks, ctx.scale * grad
        q, emb = blocks.q[:-1], blocks.emb[:, :-1]
        grad_q, grad_emb = torch.zeros_like(q), torch.empty_like(emb)
        again = blocks.scratch() if ctx.kept is None else None
        for b in range(len(blocks.starts)):
            columns = blocks.columns(b)
            if again is None:
                pull = ctx.kept[columns]
            else:
                blocks.block(b, *again)
                pull = again[0][: columns.stop - columns.start]
            torch.mm(pull, (q * (scale[b] * LN2)).T, out=grad_emb[columns])
            grad_q.addcmul_(emb[columns].T @ pull, scale[b])
        for buffer in again or (ctx.kept,):
            spare.give(buffer)
        ctx.kept = None  # a second backward pass recomputes the exponentials
        return grad_q.T.contiguous(), grad_emb, None, None, None
