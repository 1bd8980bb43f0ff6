"""Weighted log-sum-exp over shared candidates, with one pass of exponentials, in blocks of queries.

A block of scores stays in the processor's cache between the product, the exponential and the sums. The backward pass is
two products: row scales are folded into q and column scales into the candidates, so the matrix of coefficients is never
formed. Up to STORE elements the (B, C) exponentials are kept for the backward pass; beyond that they are recomputed,
which bounds memory. Logits are in powers of 2: on a CPU exp2 takes a third of the time of exp.

On a CPU in float32 a native kernel takes its place (native/logsumexp.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparring.kernels.reference import ExcludedKeys, ExcludedPairs

STORE = 1 << 26  # elements of (B, C) kept for the backward pass: 256 MiB in float32
LOG2E = math.log2(math.e)
LN2 = math.log(2)
BLOCK = {"cpu": 1 << 19, "cuda": 1 << 27}  # scores per block
_half: ContextVar[bool] = ContextVar("half", default=False)


@contextmanager
def half_gradients(wanted: bool) -> Iterator[None]:
    """Inside the block, let the backward passes of sums computed on a CPU multiply in bfloat16, if that is faster."""
    before = _half.set(wanted)
    try:
        yield
    finally:
        _half.reset(before)


def halves() -> bool:
    """Whether backward passes multiply in bfloat16 here."""
    return _half.get() and multiplies_bfloat16()


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16 (AVX512-BF16, AMX)."""
    found: bool = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return found


def weighted_logsumexp(
    q: Tensor,
    emb: Tensor,
    log_w: Tensor,
    places: ExcludedPairs | None = None,
    draws: float | None = None,
    draw_counts: Tensor | None = None,
) -> Tensor:
    """As in reference.py, for shared emb (C, D) and a log_w without gradient; with `draws` one weight per candidate."""
    return _WeightedLogSumExp.apply(q, emb, log_w, places, draws, draw_counts)  # type: ignore[no-untyped-call, no-any-return]


class _Spare:
    """Freed (B, C) buffers on the CPU, for reuse: fresh pages would cost a tenth of the step."""

    def __init__(self, most: int) -> None:
        self.buffers: list[Tensor] = []
        self.most = most

    def take(self, like: Tensor, rows: int, columns: int) -> Tensor:
        fit = [
            b for b in self.buffers if b.dtype == like.dtype and b.device == like.device and b.numel() >= rows * columns
        ]
        if not fit:
            return like.new_empty(rows * columns).view(rows, columns)
        smallest = min(fit, key=torch.numel)
        self.buffers = [b for b in self.buffers if b is not smallest]
        return smallest[: rows * columns].view(rows, columns)

    def give(self, buffer: Tensor) -> None:
        if buffer.device.type == "cpu":
            whole = buffer.new_empty(0).set_(buffer.untyped_storage())  # type: ignore[call-overload]
            self.buffers = [whole, *self.buffers][: self.most]


spare = _Spare(most=4)


class _Blocks:
    """The exponentials of the blocks of rows, and the scales folded out of them.

    exponentials[i, j] = exp(s_ij (+ log_w_ij)) / 2^top_i, squared when the weights are expected counts of draws.
    """

    def __init__(self, q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None, draws: float | None):
        self.q, self.log_w, self.places, self.draws = q * LOG2E, log_w * LOG2E, places, draws
        self.columns = emb.T
        n, c = len(q), len(emb)
        self.rows = max(1, min(n, BLOCK.get(q.device.type, 1 << 19) // max(c, 1)))
        self.starts = list(range(0, n, self.rows))
        # expected counts weight each exponential once and then square it, so the weights stay outside as a column scale
        self.column_scale: Tensor | None = None
        if draws is not None:
            flat = log_w.expand(c)
            self.column_scale = (flat - flat.amax()).exp().nan_to_num(0.0).to(q.dtype)
            # a dropped column must not set the maximum of a row: all other terms could underflow
            dead = torch.isneginf(flat)
            self.dead = dead if q.device.type != "cpu" or bool(dead.any()) else None
        self.bounds = None
        if places is not None and not isinstance(places, Tensor | ExcludedKeys):
            self.places = places = (places[0].long().contiguous(), places[1].long().contiguous())
            edges = torch.tensor([*self.starts, n], device=q.device)
            self.bounds = torch.searchsorted(places[0], edges).tolist() if len(self.starts) > 1 else [0, len(places[0])]

    def bounds_of(self, b: int) -> tuple[int, int]:
        """The first query of block b, and the one after its last."""
        return self.starts[b], min(self.starts[b] + self.rows, len(self.q))

    def block(self, b: int, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Masked logits of block b in powers of 2 (rows, C), minus their row maximum, and the maximum (rows,)."""
        low, high = self.bounds_of(b)
        part = self.q[low:high]
        scores = torch.mm(part, self.columns, out=out) if out is not None else part @ self.columns
        if self.column_scale is None:
            scores += self.log_w[low:high] if self.log_w.dim() == 2 and len(self.log_w) > 1 else self.log_w
        elif self.dead is not None:
            scores.masked_fill_(self.dead, -math.inf)
        if isinstance(self.places, ExcludedKeys):
            scores.masked_fill_(self.places.mask(low, high), -math.inf)
        elif isinstance(self.places, Tensor):
            scores.masked_fill_(self.places[low:high], -math.inf)
        elif self.places is not None and self.bounds is not None:
            begin, end = self.bounds[b], self.bounds[b + 1]
            scores[self.places[0][begin:end] - low, self.places[1][begin:end]] = -math.inf
        top = scores.amax(1, keepdim=True)
        top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        return scores.sub_(top), top.squeeze(1)

    def exponentials(self, b: int) -> Tensor:
        """The exponentials of block b, computed again."""
        part = self.block(b, None)[0].exp2_()
        return part if self.draws is None else _normal_squares(part).square_()


def _normal_squares(part: Tensor) -> Tensor:
    """Zero, in place, numbers whose square is denormal: on a CPU products with those are several times slower."""
    return F.threshold(part, 1e-19, 0.0, inplace=True)


class _WeightedLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        emb: Tensor,
        log_w: Tensor,
        places: ExcludedPairs | None,
        draws: float | None,
        draw_counts: Tensor | None,
    ) -> Tensor:
        blocks = _Blocks(q, emb, log_w, places, draws)
        n, c = len(q), len(emb)
        keep = n * c <= STORE and any(ctx.needs_input_grad[:2])
        kept = spare.take(q, n, c) if keep else None
        room = q.new_empty(blocks.rows, c) if kept is None else None
        total, result = q.new_empty(n), q.new_empty(n)
        counted = q.new_zeros(c) if draw_counts is not None and draws is not None else None
        for b, low in enumerate(blocks.starts):
            high = min(low + blocks.rows, n)
            place = room[: high - low] if room is not None else kept[low:high]  # type: ignore[index]
            scores, top = blocks.block(b, place)
            part = scores.exp2_()
            if draws is None:
                part_total = part.sum(1)
                result[low:high] = (top + part_total.log2()) * LN2
            else:
                scale = blocks.column_scale
                assert scale is not None
                first = _normal_squares(part) @ scale
                share = torch.where(first > 0, draws / first, torch.zeros_like(first))
                if counted is not None:
                    counted.addmv_(part.T, share)
                part_total = part.square_() @ scale
                result[low:high] = (top + (part_total * share).log2()) * LN2
            total[low:high] = part_total
        if draw_counts is not None and counted is not None and blocks.column_scale is not None:
            draw_counts.copy_(counted * blocks.column_scale)
        ctx.blocks, ctx.kept, ctx.total = blocks, kept, total
        ctx.save_for_backward(q, emb)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, emb = ctx.saved_tensors
        blocks, total = ctx.blocks, ctx.total
        scale = torch.where(total > 0, grad / total, torch.zeros_like(total)).unsqueeze(1)
        scaled_q = q * scale
        scaled_emb = emb if blocks.column_scale is None else emb * blocks.column_scale.unsqueeze(1)
        grad_q, columns = (
            torch.empty_like(q),
            q.new_zeros(q.shape[1], len(emb)),
        )  # (D, C): the product runs faster this way round
        for b, low in enumerate(blocks.starts):
            high = min(low + blocks.rows, len(q))
            if ctx.kept is not None:
                part = ctx.kept[low:high]
            else:
                part = blocks.exponentials(b)
            torch.mm(part, scaled_emb, out=grad_q[low:high])
            columns.addmm_(scaled_q[low:high].T, part)
        if blocks.column_scale is not None:
            columns.mul_(blocks.column_scale)
        if ctx.kept is not None:
            spare.give(ctx.kept)
            ctx.kept = None  # a second backward pass recomputes the exponentials
        return grad_q.mul_(scale), columns.T.contiguous(), None, None, None, None
