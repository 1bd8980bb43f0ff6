"""Weighted log-sum-exp over per-query candidates in Triton: vectors (B, C, D) are read once, gradients written once.

One program per query. The forward pass keeps the logits (B, C), 1 / D of its input, and the mean candidate, which is
the gradient of the query. The backward pass reads no candidate vector, since the gradient of each is a multiple of the
query.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


def weighted_logsumexp(
    q: Tensor,
    emb: Tensor,
    log_w: Tensor,
    mask: Tensor | None = None,
    draws: float | None = None,
    draw_counts: Tensor | None = None,
) -> Tensor:
    """As in reference.py, for emb (B, C, D), D <= 256, a log_w without gradient, a mask (B, C), draw_counts (B, C)."""
    return _Own.apply(q, emb, log_w, mask, draws, draw_counts)  # type: ignore[no-untyped-call, no-any-return]


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    Q, E, LW, MASK, LOGIT, LOGZ, LOGS, MEAN, VALUE, C, D, across, along, log_draws,
    BC: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr, EXPECTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    q = tl.load(Q + row * D + d, mask=d < D, other=0.0).to(tl.float32) * 1.4426950408889634
    top = -1e30
    total = 0.0
    top1 = -1e30
    total1 = 0.0
    mean = tl.zeros([BD], tl.float32)
    for begin in range(0, C, BC):
        col = begin + tl.arange(0, BC)
        inside = col < C
        e = tl.load(
            E + (row * C + col)[:, None] * D + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0
        ).to(tl.float32)
        s = tl.sum(e * q[None, :], 1)
        w = (
            tl.load(LW + row * across + col * along, mask=inside, other=float("-inf")).to(tl.float32)
            * 1.4426950408889634
        )
        if MASKED:
            w = tl.where(tl.load(MASK + row * C + col, mask=inside, other=0) != 0, float("-inf"), w)
        t = s + w
        if EXPECTED:
            new1 = tl.maximum(top1, tl.max(t, 0))
            total1 = total1 * tl.exp2(top1 - new1) + tl.sum(tl.exp2(t - new1), 0)
            top1 = new1
            tl.store(LOGIT + row * C + col, t, mask=inside)
            t += s
        new = tl.maximum(top, tl.max(t, 0))
        p = tl.exp2(t - new)
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(p, 0)
        mean = mean * fade + tl.sum(p[:, None] * e, 0)
        top = new
        # expected counts: twice the logit minus the weight; the backward pass needs both
        tl.store(LOGIT + (tl.num_programs(0).to(tl.int64) * C if EXPECTED else 0) + row * C + col, t, mask=inside)
    some = total > 0
    log_s = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("inf"))
    value = tl.where(some, log_s, float("-inf"))
    if EXPECTED:
        log_z = top1 + tl.log2(tl.where(total1 > 0, total1, 1.0))
        tl.store(LOGZ + row, tl.where(some, log_z, float("inf")))
        value = tl.where(some, log_s - log_z + log_draws, float("-inf"))
    tl.store(LOGS + row, log_s)
    tl.store(VALUE + row, value * 0.6931471805599453)
    tl.store(MEAN + row * D + d, mean / tl.where(some, total, 1.0), mask=d < D)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    Q, LOGIT, LOGS, GRAD, OUT, C, D, BC: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    q = tl.load(Q + row * D + d, mask=d < D, other=0.0).to(tl.float32) * tl.load(GRAD + row).to(tl.float32)
    log_s = tl.load(LOGS + row)
    for begin in range(0, C, BC):
        col = begin + tl.arange(0, BC)
        p = tl.exp2(tl.load(LOGIT + row * C + col, mask=col < C, other=float("-inf")) - log_s)
        inside = (col[:, None] < C) & (d[None, :] < D)
        tl.store(
            OUT + (row * C + col)[:, None] * D + d[None, :],
            (p[:, None] * q[None, :]).to(OUT.dtype.element_ty),
            mask=inside,
        )


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        emb: Tensor,
        log_w: Tensor,
        mask: Tensor | None,
        draws: float | None,
        draw_counts: Tensor | None,
    ) -> Tensor:
        b, c, d = emb.shape
        q, emb, log_w = q.contiguous(), emb.contiguous(), log_w.expand(b, c)
        logits = q.new_empty(1 if draws is None else 2, b, c, dtype=torch.float32)
        log_z, log_s, value = torch.empty(3, b, device=q.device, dtype=torch.float32).unbind()
        mean = torch.empty(b, d, device=q.device, dtype=torch.float32)
        dims = triton.next_power_of_2(d)
        rows = max(1, min(triton.next_power_of_2(c), 4096 // dims))
        _forward[(b,)](
            q, emb, log_w, q if mask is None else mask.contiguous().view(torch.uint8), logits, log_z, log_s, mean,
            value, c, d,
            *log_w.stride(), 0.0 if draws is None else math.log2(draws), rows, dims, mask is not None,
            draws is not None, num_warps=4,
        )  # fmt: skip
        if draw_counts is not None and draws is not None:
            draw_counts.copy_((logits[0] - log_z.unsqueeze(1)).exp2_() * draws)
        ctx.save_for_backward(q, logits[-1], log_s, mean)
        ctx.like, ctx.shape = emb.dtype, (b, c, d, rows, dims)
        return value.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, logits, log_s, mean = ctx.saved_tensors
        b, c, d, rows, dims = ctx.shape
        out = torch.empty(b, c, d, device=q.device, dtype=ctx.like)
        _backward[(b,)](q, logits, log_s, grad.contiguous(), out, c, d, rows, dims, num_warps=4)
        return (mean * grad.unsqueeze(1)).to(q.dtype), out, None, None, None, None
