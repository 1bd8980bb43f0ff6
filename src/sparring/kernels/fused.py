"""Weighted log-sum-exp over shared candidates as Triton kernels: the (B, C) scores exist only as tiles on the chip.

The forward pass goes over the candidates once, with a running maximum and sum for each query, and keeps beside them the mean candidate
that the softmax points at, sum_j p_ij e_j. That mean is the gradient by the query, so the backward pass needs one more pass alone, for
the candidates: four products of the size of the scores in all, where writing them out takes three and moves (B, C) several times.

Pairs that do not count are found by comparing keys inside the kernel. Random counts come from a counter, (seed, query, candidate), so that
the backward pass makes the same ones again. Everything is in powers of 2: a query is scaled by log2(e) once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparring.kernels.reference import Keyed

WIDEST = 256  # dimensions of a vector that a tile holds
PLAIN, EXPECTED, DRAWN = 0, 1, 2
LOG2E = math.log2(math.e)
LN2 = math.log(2)


def weighted_logsumexp(
    q: Tensor,
    emb: Tensor,
    log_w: Tensor,
    keys: Keyed | None = None,
    draws: float | None = None,
    usage: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """As in reference.py, for emb (C, D) shared by all queries with D <= 256 and a log_w (C,) or (B, C) that needs no gradient.

    With `seed`, a whole number (1,) on the device, the `draws` are drawn instead of counted in expectation: n_ij = floor(n p_ij + u_ij)
    with u_ij uniform, so that its mean is n p_ij and it is never as far as 1 away. `usage` is filled by the backward pass, or
    at once where there will be none.
    """
    return _Fused.apply(q, emb, log_w, keys, draws, usage, seed)  # type: ignore[no-untyped-call, no-any-return]


def precision(dtype: torch.dtype) -> str:
    """How products of tiles are taken: as PyTorch would take a product of matrices of this type."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"


@triton.jit
def _tile(S, row, col, ROW, COL, B, C, PAIRS: tl.constexpr, KEYED: tl.constexpr, LW):  # type: ignore[no-untyped-def]
    """The weights of a tile, in powers of 2, -inf where a pair does not count."""
    if PAIRS:
        inside = (row[:, None] < B) & (col[None, :] < C)
        w = tl.load(LW + row[:, None].to(tl.int64) * C + col[None, :], mask=inside, other=float("-inf")) * 1.4426950408889634
    else:
        w = tl.broadcast_to(tl.load(LW + col, mask=col < C, other=float("-inf"))[None, :] * 1.4426950408889634, S.shape)
    if KEYED:
        own = tl.load(ROW + row, mask=row < B, other=-1)
        each = tl.load(COL + col, mask=col < C, other=-2)
        w = tl.where(own[:, None] == each[None, :], float("-inf"), w)
    return w


@triton.jit
def _counts(t, log_z, row, col, seed, draws):  # type: ignore[no-untyped-def]
    """Drawn counts of a tile: floor(n p + u), u from (seed, query, candidate)."""
    c0 = tl.broadcast_to(col[None, :], t.shape)
    c1 = tl.broadcast_to(row[:, None], t.shape)
    bits, _, _, _ = tl.philox(seed, c0, c1, tl.zeros_like(c0), tl.zeros_like(c0))
    u = tl.uint_to_uniform_float(bits)
    return tl.floor(tl.exp2(t - log_z[:, None]) * draws + u)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    Q, E, LW, ROW, COL, SEED, LOGZ, TOP, SUM, TOP1, SUM1, MEAN, B, C, D, span, draws,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PAIRS: tl.constexpr, KEYED: tl.constexpr, KIND: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    d = tl.arange(0, BD)
    held = (row[:, None] < B) & (d[None, :] < D)
    q = tl.load(Q + row[:, None].to(tl.int64) * D + d[None, :], mask=held, other=0.0)
    q = (q * 1.4426950408889634).to(Q.dtype.element_ty)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    top1 = tl.full([BM], float("-inf"), tl.float32)
    total1 = tl.zeros([BM], tl.float32)
    mean = tl.zeros([BM, BD], tl.float32)
    if KIND == 2:
        seed = tl.load(SEED)
        log_z = tl.load(LOGZ + row, mask=row < B, other=float("inf"))
    low = part * span
    for begin in range(low, min(low + span, C), BN):
        col = begin + tl.arange(0, BN)
        inside = (col[:, None] < C) & (d[None, :] < D)
        e = tl.load(E + col[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(e), input_precision=PRECISION)
        t = s + _tile(s, row, col, ROW, COL, B, C, PAIRS, KEYED, LW)
        if KIND == 1:
            new1 = tl.maximum(top1, tl.max(t, 1))
            safe1 = tl.where(new1 == float("-inf"), 0.0, new1)
            total1 = total1 * tl.exp2(top1 - safe1) + tl.sum(tl.exp2(t - safe1[:, None]), 1)
            top1 = new1
            t += s
        if KIND == 2:
            t = s + tl.log2(_counts(t, log_z, row, col, seed, draws))
        new = tl.maximum(top, tl.max(t, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(t - safe[:, None])
        fade = tl.exp2(top - safe)
        total = total * fade + tl.sum(p, 1)
        if KEEP:
            mean = mean * fade[:, None] + tl.dot(p.to(e.dtype), e, input_precision=PRECISION)
        top = new
    at = part * B + row
    tl.store(TOP + at, top, mask=row < B)
    tl.store(SUM + at, total, mask=row < B)
    if KIND == 1:
        tl.store(TOP1 + at, top1, mask=row < B)
        tl.store(SUM1 + at, total1, mask=row < B)
    if KEEP:
        tl.store(MEAN + at[:, None].to(tl.int64) * D + d[None, :], mean, mask=held)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    Q, E, LW, ROW, COL, SEED, LOGZ, LOGS, GRAD, OUT, USAGE, B, C, D, span, draws,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PAIRS: tl.constexpr, KEYED: tl.constexpr, KIND: tl.constexpr, PULL: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    d = tl.arange(0, BD)
    held = (col[:, None] < C) & (d[None, :] < D)
    e = tl.load(E + col[:, None].to(tl.int64) * D + d[None, :], mask=held, other=0.0)
    pulled = tl.zeros([BN, BD], tl.float32)
    used = tl.zeros([BN], tl.float32)
    if KIND == 2:
        seed = tl.load(SEED)
    low = part * span
    for begin in range(low, min(low + span, B), BM):
        row = begin + tl.arange(0, BM)
        inside = (row[:, None] < B) & (d[None, :] < D)
        q = tl.load(Q + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
        scaled = (q * 1.4426950408889634).to(Q.dtype.element_ty)
        s = tl.dot(scaled, tl.trans(e), input_precision=PRECISION)
        t = s + _tile(s, row, col, ROW, COL, B, C, PAIRS, KEYED, LW)
        if KIND > 0:
            log_z = tl.load(LOGZ + row, mask=row < B, other=float("inf"))
        if KIND == 1:
            if COUNT:
                used += tl.sum(tl.exp2(t - log_z[:, None]), 0) * draws
            t += s
        if KIND == 2:
            n = _counts(t, log_z, row, col, seed, draws)
            if COUNT:
                used += tl.sum(n, 0)
            t = s + tl.log2(n)
        if PULL:
            log_s = tl.load(LOGS + row, mask=row < B, other=float("inf"))
            grad = tl.load(GRAD + row, mask=row < B, other=0.0)
            p = tl.exp2(t - log_s[:, None]) * grad[:, None]
            pulled += tl.dot(tl.trans(p.to(q.dtype)), q, input_precision=PRECISION)
    if PULL:
        at = (part * C + col).to(tl.int64)
        tl.store(OUT + at[:, None] * D + d[None, :], pulled, mask=held)
    if COUNT:
        tl.store(USAGE + part * C + col, used, mask=col < C)


class _Plan:
    """Shapes of tiles, and into how many parts the inner loop is split so that a small problem still fills the device."""

    def __init__(self, b: int, c: int, d: int, device: torch.device):
        self.dims = max(16, triton.next_power_of_2(d))
        wide = self.dims >= 128
        self.rows, self.columns = (64, 64) if min(b, c) <= 8192 or self.dims > 128 else (128, 64) if wide else (128, 128)
        self.warps = 8 if self.rows == 128 else 4
        self.stages = 2 if wide else 3
        if device.type == "cpu":  # the interpreter: as few steps as can be, but more than one
            self.rows = self.columns = 32
        self.busy = 1 if device.type == "cpu" else 2 * torch.cuda.get_device_properties(device).multi_processor_count

    def parts(self, outer: int, inner: int, step: int) -> tuple[int, int]:
        """Parts of the inner loop, and how long each is."""
        wanted = max(1, min(self.busy // max(outer, 1), triton.cdiv(inner, 2 * step)))
        span = triton.cdiv(triton.cdiv(inner, wanted), step) * step
        return triton.cdiv(inner, span), span


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, emb: Tensor, log_w: Tensor, keys: Keyed | None, draws: float | None, usage: Tensor | None, seed: Tensor | None
    ) -> Tensor:
        q, emb = q.contiguous(), emb.contiguous()
        pairs = log_w.dim() == 2 and len(log_w) > 1
        log_w = (log_w.expand(len(q), len(emb)) if pairs else log_w.reshape(-1).expand(len(emb))).contiguous().float()
        kind = PLAIN if draws is None else EXPECTED if seed is None else DRAWN
        problem = _Problem(q, emb, log_w, keys, draws or 0.0, seed, kind)
        keep = any(ctx.needs_input_grad[:2])
        log_z = None
        if kind == DRAWN:  # the chances must be known before anything is drawn
            top, total, *_ = _Problem(q, emb, log_w, keys, 0.0, None, PLAIN).forward(None, keep=False)
            log_z = _log2(top, total)
        top, total, top1, total1, mean = problem.forward(log_z, keep)
        log_s = _log2(top, total)
        if kind == EXPECTED:
            log_z = _log2(top1, total1)
        if mean is not None:
            mean = mean / torch.where(total > 0, total, 1.0).unsqueeze(1)
        wanted = usage is not None and kind != PLAIN
        if wanted and not keep:
            problem.backward(log_z, None, None, usage)
        ctx.problem, ctx.mean, ctx.log_z, ctx.log_s, ctx.usage = problem, mean, log_z, log_s, usage if wanted else None
        if kind != EXPECTED:
            return log_s * LN2
        assert log_z is not None
        some = torch.isfinite(log_z)
        return torch.where(some, (log_s - log_z) * LN2 + math.log(problem.draws), log_s)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad = grad.contiguous()
        grad_q = (ctx.mean * grad.unsqueeze(1)).to(ctx.problem.q.dtype)
        grad_emb = ctx.problem.backward(ctx.log_z, ctx.log_s, grad, ctx.usage)
        return grad_q, grad_emb, None, None, None, None, None


def _log2(top: Tensor, total: Tensor) -> Tensor:
    return torch.where(total > 0, top + total.log2(), -math.inf)


class _Problem:
    """The tensors that every kernel reads."""

    def __init__(self, q: Tensor, emb: Tensor, log_w: Tensor, keys: Keyed | None, draws: float, seed: Tensor | None, kind: int):
        self.q, self.emb, self.log_w, self.draws, self.kind = q, emb, log_w, draws, kind
        self.columns, self.rows = (q, q) if keys is None else (keys.columns.contiguous(), keys.rows.contiguous())
        self.keyed, self.seed = keys is not None, q if seed is None else seed
        self.plan = _Plan(len(q), len(emb), q.shape[1], q.device)

    def forward(self, log_z: Tensor | None, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Maximum and sum of 2^t for each query, both of the plain logits too where counts are expected, and sum_j 2^(t - max) e_j."""
        q, plan = self.q, self.plan
        b, c, d = len(q), len(self.emb), q.shape[1]
        outer = triton.cdiv(b, plan.rows)
        parts, span = plan.parts(outer, c, plan.columns)
        top, total, top1, total1 = torch.empty(4, parts, b, device=q.device, dtype=torch.float32).unbind()
        mean = torch.empty(parts, b, d, device=q.device, dtype=torch.float32) if keep else top
        _forward[(outer, parts)](
            q, self.emb, self.log_w, self.rows, self.columns, self.seed, top if log_z is None else _beyond(log_z),
            top, total, top1, total1, mean, b, c, d, span, self.draws, plan.rows, plan.columns, plan.dims,
            self.log_w.dim() == 2, self.keyed, self.kind, keep, precision(q.dtype), num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
        joined, share = _joined(top, total)
        first, _ = _joined(top1, total1) if self.kind == EXPECTED else (joined, share)
        if not keep:
            return *joined, *first, None
        whole = mean[0] if parts == 1 else torch.einsum("pb,pbd->bd", share, mean)
        return *joined, *first, whole

    def backward(self, log_z: Tensor | None, log_s: Tensor | None, grad: Tensor | None, usage: Tensor | None) -> Tensor | None:
        """The gradient by the candidates, where `grad` is given; fills `usage`, where given."""
        q, plan = self.q, self.plan
        b, c, d = len(q), len(self.emb), q.shape[1]
        outer = triton.cdiv(c, plan.columns)
        parts, span = plan.parts(outer, b, plan.rows)
        out = torch.empty(parts, c, d, device=q.device, dtype=torch.float32) if grad is not None else q
        used = torch.empty(parts, c, device=q.device, dtype=torch.float32) if usage is not None else q
        _backward[(outer, parts)](
            q, self.emb, self.log_w, self.rows, self.columns, self.seed, q if log_z is None else _beyond(log_z),
            q if log_s is None else _beyond(log_s), q if grad is None else grad, out, used,
            b, c, d, span, self.draws, plan.rows, plan.columns, plan.dims,
            self.log_w.dim() == 2, self.keyed, self.kind, grad is not None, usage is not None, precision(q.dtype),
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
        if usage is not None:
            usage.copy_(used[0] if parts == 1 else used.sum(0))
        if grad is None:
            return None
        return (out[0] if parts == 1 else out.sum(0)).to(self.emb.dtype)


def _joined(top: Tensor, total: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Maxima and sums of all parts together, and the factor (P, B) on what each part summed."""
    if len(top) == 1:
        return (top[0], total[0]), total
    highest = top.amax(0)
    safe = torch.where(torch.isfinite(highest), highest, 0.0)
    share = (top - safe).exp2()
    return (safe, (total * share).sum(0)), share


def _beyond(log: Tensor) -> Tensor:
    """Where nothing counts, a value that makes every share 0."""
    return torch.where(torch.isneginf(log), math.inf, log)
