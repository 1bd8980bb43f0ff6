"""Weighted log-sum-exp over shared candidates in Triton: the (B, C) scores exist only as tiles on the chip.

The forward pass reads the candidates once, with a running maximum and sum per query, and accumulates the mean candidate
of the softmax, sum_j p_ij e_j. That mean is the gradient of the query, so the backward pass only has to visit the
candidates. The total is four products of the size of the scores; storing the scores takes three and moves (B, C)
several times.

Where PyTorch would multiply in TF32, tiles are multiplied as 16-bit floats that share a power of 2 (tiles.py): the same
10 bits, twice as fast. Excluded pairs are found by comparing keys inside the kernel. Random counts come from the
counter (seed, query, candidate), so the backward pass reproduces them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.runtime.errors import OutOfResources

from sparring.kernels import tiles
from sparring.kernels.reference import ExcludedKeys
from sparring.kernels.tiles import GROUP

PLAIN, EXPECTED, DRAWN = 0, 1, 2
T = TypeVar("T")
SHIFT = 14.0  # 16-bit floats hold shares down to 2^-28 in full: 2^14 times a share is at most 2^14


def weighted_logsumexp(
    q: Tensor,
    emb: Tensor,
    log_w: Tensor,
    keys: ExcludedKeys | None = None,
    draws: float | None = None,
    draw_counts: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """As in reference.py, for shared emb (C, D) with D <= 256 and a log_w (C,) or (B, C) without gradient.

    With `seed`, integers (2,) on the device, the seed and the number of the first query, the `draws` are random instead
    of expected: n_ij = floor(n p_ij + u_ij) with u_ij uniform, within 1 of its mean n p_ij. `draw_counts` is filled by
    the backward pass, or at once if there is none. Keys are below 2^31.
    """
    return _Fused.apply(q, emb, log_w, keys, draws, draw_counts, seed)  # type: ignore[no-untyped-call, no-any-return]


def halves(dtype: torch.dtype) -> bool:
    """Whether tiles are multiplied as 16-bit floats: if PyTorch's own product would keep at most 10 bits."""
    return dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"


class _Shape(NamedTuple):
    """A tile: rows held, rows streamed, warps, pipeline stages."""

    stay: int
    by: int
    warps: int
    stages: int


def _over(n: int, step: int) -> int:
    """n / step, rounded up; triton.cdiv costs as much as an allocation."""
    return -(-n // step)


class _Plan:
    """Tile shapes, and the number of parts of the inner loop, so that a small problem still fills the device."""

    def __init__(self, d: int, half: bool, device: torch.device):
        self.dims = max(16, 1 << (d - 1).bit_length())
        self.on_gpu = device.type == "cuda"
        self.cores = torch.cuda.get_device_properties(device).multi_processor_count if self.on_gpu else 1
        self.half = half

        wide = self.dims > 128
        by = (64 if wide else 128) if half else (32 if wide else 64)
        # measured on an H200: larger tiles run out of registers, more stages reduce occupancy
        self.shapes = [_Shape(64, by, 4, 2), _Shape(64, by, 4, 1), _Shape(64, by // 2, 4, 1), _Shape(32, 16, 4, 1)]
        self.fits: dict[Hashable, int] = {}  # the first that fits this device

    def fitted(self, what: Hashable, work: Callable[[_Shape], T]) -> T:
        """Run `work` with the largest tiles that fit the shared memory: a kernel that needs more is not launched."""
        first = self.fits.get(what, 0)
        for at, shape in enumerate(self.shapes[first:], first):
            try:
                found = work(shape)
            except OutOfResources:
                if at + 1 == len(self.shapes):
                    raise
            else:
                self.fits[what] = at
                break
        return found

    def parts(self, outer: int, inner: int, step: int) -> tuple[int, int]:
        """The number of parts of the inner loop and their length, given `outer` parallel programs."""
        most = _over(inner, 2 * step) if self.on_gpu else min(2, _over(inner, GROUP))
        wanted = max(1, min(2 * self.cores // max(outer, 1) if self.on_gpu else 2, most))
        span = _over(_over(inner, wanted), step) * step
        return _over(inner, span), span


_plan = lru_cache(_Plan)  # querying device properties is slow


class _Problem:
    """The inputs of all kernels in the form of `tiles.prepare`."""

    def __init__(self, q: Tensor, emb: Tensor, log_w: Tensor, keys: ExcludedKeys | None, seed: Tensor | None):
        self.b, self.c, self.d = len(q), len(emb), q.shape[1]
        self.half = halves(q.dtype)
        self.plan = _plan(self.d, self.half, q.device)
        self.shift = SHIFT if self.half else 0.0
        self.precision = "ieee" if self.half or not self.plan.on_gpu else "tf32x3"
        self.pairs = log_w.dim() == 2
        # mixtures.py has two keys per query: the second is for the candidates from `split` on
        self.keyed, self.split = (0, 0) if keys is None else (keys.rows.dim(), keys.split)
        self.log_w = log_w
        groups = _over(self.b, GROUP), _over(self.c, GROUP)
        self.rows, self.columns = (n * GROUP for n in groups)
        dims = self.plan.dims
        kind = torch.float16 if self.half else torch.float32
        self.q, self.emb = q.new_empty(self.rows, dims, dtype=kind), q.new_empty(self.columns, dims, dtype=kind)
        floats = q.new_empty(2 * self.columns + groups[0] + groups[1], dtype=torch.float32)
        self.w, self.q_power, self.e_power = floats.split(
            [2 * self.columns, *groups]
        )  # log weights, and the factors that undo them
        keys_of = q.new_empty(
            2 * (self.rows + self.columns), dtype=torch.int32
        )  # keys for exclusion, and for random draws
        self.row_keys, self.column_keys = keys_of.split([2 * self.rows, 2 * self.columns])
        row, column = (q, q) if keys is None else (keys.rows.contiguous(), keys.columns.contiguous())
        tiles.prepare[(sum(groups),)](
            q.contiguous(), emb.contiguous(), log_w, row, column, q if seed is None else seed, self.q, self.emb,
            self.q_power, self.e_power,
            self.w, self.row_keys, self.column_keys, self.b, self.c, self.d, groups[0], self.columns,
            dims, self.pairs, self.keyed, seed is not None, self.half, GROUP, num_warps=8,
        )  # fmt: skip

    def forward(
        self, kind: int, draws: float, log_z: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The value (B,), log2 sums of 2^t and, for expected counts, of the plain logits (+inf if nothing counts).

        With `keep`, also the mean candidate (B, D).
        """
        what = ("forward", self.pairs, self.keyed, kind, keep)
        return self.plan.fitted(what, lambda shape: self._forward(shape, kind, draws, log_z, keep))

    def _forward(
        self, shape: _Shape, kind: int, draws: float, log_z: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        plan = self.plan
        outer = self.rows // shape.stay
        parts, span = plan.parts(outer, self.columns, shape.by)
        sums = self.w.new_empty(4, parts, self.rows)
        mean = self.w.new_empty(parts, self.rows, plan.dims) if keep else sums
        log_draws = math.log2(draws) if draws else 0.0
        tiles.forward[(outer, parts)](
            self.q, self.emb, self.q_power, self.e_power, self.w, self.log_w, self.row_keys, self.column_keys,
            sums if log_z is None else log_z, sums, mean, self.b, self.c, self.rows, self.columns, span, self.split,
            log_draws,
            shape.stay, shape.by, plan.dims, self.pairs, self.keyed, kind, keep, self.precision, GROUP, self.shift,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        value, log_s = self.w.new_empty(self.b), self.w.new_empty(self.rows)
        if kind == EXPECTED:
            log_z = self.w.new_empty(self.rows)
        in_place = parts == 1 and plan.dims == self.d  # a tile is read completely before it is written
        out = (mean[0, : self.b] if in_place else self.w.new_empty(self.b, self.d)) if keep else None
        size = max(1, min(64, 4096 // plan.dims))
        tiles.join[(self.rows // size,)](
            sums, mean, log_s, sums if log_z is None else log_z, value, sums if out is None else out, self.b, self.d,
            self.rows,
            parts, log_draws, size, plan.dims, kind, keep, self.shift, num_warps=4,
        )  # fmt: skip
        return value, log_s, log_z, out

    def backward(
        self,
        kind: int,
        draws: float,
        log_z: Tensor | None,
        log_s: Tensor,
        grad: Tensor | None,
        draw_counts: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """The gradient of the candidates if `grad` is given; fills `draw_counts` if given."""
        what = ("backward", self.pairs, self.keyed, kind, grad is not None, draw_counts is not None)
        return self.plan.fitted(
            what, lambda shape: self._backward(shape, kind, draws, log_z, log_s, grad, draw_counts, dtype)
        )

    def _backward(
        self,
        shape: _Shape,
        kind: int,
        draws: float,
        log_z: Tensor | None,
        log_s: Tensor,
        grad: Tensor | None,
        draw_counts: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor | None:
        plan = self.plan
        outer = self.columns // shape.stay
        parts, span = plan.parts(outer, self.rows, shape.by)
        scratch = self.w.new_empty(self.rows + 1)
        out = used = scratch
        log_draws = math.log2(draws) if draws else 0.0
        if grad is not None:
            out = self.w.new_empty(parts, self.c, self.d, dtype=dtype if parts == 1 else torch.float32)
            block = min(4096, 1 << (self.rows - 1).bit_length())
            tiles.fractions[(1,)](
                grad, self.q_power, log_s if log_z is None else log_z, log_s, scratch, scratch[self.rows :], self.b,
                self.rows, log_draws,
                kind == DRAWN, block, GROUP, num_warps=8,
            )  # fmt: skip
        if draw_counts is not None:
            used = self.w.new_empty(parts, self.c)
        tiles.backward[(outer, parts)](
            self.q, self.emb, self.q_power, self.e_power, self.w, self.log_w, self.row_keys, self.column_keys,
            log_s if log_z is None else log_z, log_s, scratch, scratch[self.rows :], out, used,
            self.b, self.c, self.d, self.rows, self.columns, span, self.split, log_draws,
            shape.stay, shape.by, plan.dims, self.pairs, self.keyed, kind, grad is not None, draw_counts is not None,
            self.precision, GROUP,
            self.shift, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        if draw_counts is not None:
            draw_counts.copy_(used[0] if parts == 1 else used.sum(0))
        if grad is None:
            return None
        return out[0] if parts == 1 else out.sum(0).to(dtype)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        emb: Tensor,
        log_w: Tensor,
        keys: ExcludedKeys | None,
        draws: float | None,
        draw_counts: Tensor | None,
        seed: Tensor | None,
    ) -> Tensor:
        pairs = log_w.dim() == 2 and len(log_w) > 1
        log_w = (log_w.expand(len(q), len(emb)) if pairs else log_w.reshape(-1).expand(len(emb))).contiguous()
        kind = PLAIN if draws is None else EXPECTED if seed is None else DRAWN
        problem = _Problem(q, emb, log_w, keys, seed)
        keep = any(ctx.needs_input_grad[:2])
        log_z = None
        if kind == DRAWN:  # probabilities must be known before drawing
            _, log_z, _, _ = problem.forward(PLAIN, 0.0, None, keep=False)
        value, log_s, log_z, mean = problem.forward(kind, draws or 0.0, log_z, keep)
        wanted = draw_counts if kind != PLAIN else None
        if wanted is not None and not keep:
            problem.backward(kind, draws or 0.0, log_z, log_s, None, wanted, emb.dtype)
        ctx.problem, ctx.kind, ctx.draws, ctx.log_z, ctx.log_s, ctx.mean, ctx.draw_counts = (
            problem,
            kind,
            draws,
            log_z,
            log_s,
            mean,
            wanted,
        )
        ctx.dtypes = q.dtype, emb.dtype
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_q = (ctx.mean * grad.unsqueeze(1)).to(ctx.dtypes[0])
        grad_emb = ctx.problem.backward(
            ctx.kind, ctx.draws or 0.0, ctx.log_z, ctx.log_s, grad.contiguous(), ctx.draw_counts, ctx.dtypes[1]
        )
        return grad_q, grad_emb, None, None, None, None, None
