"""Weighted log-sum-exp over shared candidates on a CPU, in native tiles.

The forward pass computes a block of scores, their exponentials and sums, and the candidates weighted by the
exponentials, which is the gradient by query up to one factor per query, while the block is in the cache. Up to STORE
elements the exponentials are kept for the gradient by candidate; beyond that they are computed again.

Inside `half_gradients(True)` the kept exponentials are bfloat16 on processors that multiply those, and so are the
products of both gradients: the values stay those of float32, and gradients have a relative error of about 2e-3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparring.kernels import chunked
from sparring.kernels.native.library import function, plain
from sparring.kernels.reference import ExcludedKeys, ExcludedPairs

_PACK, _SUMS = ("logsumexp_pack", "pllpppl"), ("logsumexp", "pppllllpldppllpplppppp")
_COLUMNS, _TURN = ("logsumexp_columns", "pplllp"), ("logsumexp_rows", "plllpp")
_ROWS, _PANEL, _LANES = 8, 48, 16  # multiples of the tile's on every processor
_SHAPES = 32  # queries of the products in bfloat16 are a multiple: oneDNN compiles a kernel for every new shape
AGAIN = 64  # queries whose exponentials are computed again at a time, if they are at most STORE


def weighted_logsumexp(
    q: Tensor,
    emb: Tensor,
    log_w: Tensor,
    places: ExcludedPairs | None = None,
    draws: float | None = None,
    draw_counts: Tensor | None = None,
) -> Tensor | None:
    """As in chunked.py, in float32; None where the kernel does not apply."""
    floats = q.dtype == emb.dtype == log_w.dtype == torch.float32
    if not floats or not plain(q, emb, log_w) or not emb.numel() or function(*_SUMS) is None:
        return None
    return _WeightedLogSumExp.apply(q, emb, log_w, places, draws, draw_counts)  # type: ignore[no-untyped-call, no-any-return]


class _Problem:
    """Queries, candidates, weights and exclusions as the kernel takes them."""

    def __init__(self, q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None, draws: float | None):
        self.q, self.emb, self.draws = q.contiguous(), emb.contiguous(), draws
        n, c = len(q), len(emb)
        self.stride = _up(c, _PANEL)
        # expected counts weight each exponential once and then square it, so the weights stay outside as a column scale
        self.scale: Tensor | None = None
        if draws is not None:
            flat = log_w.expand(c)
            self.scale = (flat - flat.amax()).exp().nan_to_num(0.0)
            self.weights = self.scale
        else:
            by_query = log_w.dim() == 2 and len(log_w) > 1
            self.weights = (log_w.expand(n, c) if by_query else log_w.reshape(-1).expand(c)) * chunked.LOG2E
        self.weights = self.weights.contiguous()
        self.panels, self.rows = self._packed()
        self.places = places
        if isinstance(places, tuple) and not isinstance(places, ExcludedKeys):
            self.places = (places[0].long().contiguous(), places[1].long().contiguous())
            assert not len(places[1]) or int(places[1].max()) < c

    def _packed(self) -> tuple[Tensor, Tensor]:
        """The candidates in panels, and in rows of whole vectors times their scale."""
        kernel = function(*_PACK)
        assert kernel is not None
        c, d = self.emb.shape
        panels, width = self.emb.new_empty(self.stride, d), _up(d, _LANES)
        rows = self.emb if width == d and self.scale is None else self.emb.new_empty(c, width)
        written = 0 if rows is self.emb else rows.data_ptr()
        kernel(self.emb.data_ptr(), c, d, _at(self.scale), panels.data_ptr(), written, width)
        return panels, rows

    def sums(
        self,
        low: int,
        high: int,
        kept: Tensor | None,
        half: Tensor | None = None,
        gradient: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Totals and results (rows,) of queries low to high; fills the tensors that are given."""
        kernel = function(*_SUMS)
        assert kernel is not None
        places, pairs, mask = self.places, (0, 0, 0), None
        if isinstance(places, ExcludedKeys):
            mask = places.mask(low, high)
        elif isinstance(places, Tensor):
            mask = places[low:high].contiguous()
        elif places is not None:
            pairs = places[0].data_ptr(), places[1].data_ptr(), len(places[0])
        assert mask is None or mask.shape == (high - low, len(self.emb))
        total, result = self.q.new_empty(2, high - low)
        q, weights = self.q[low:high], self.weights if self.weights.dim() == 1 else self.weights[low:high]
        kernel(
            *(q.data_ptr(), self.panels.data_ptr(), self.rows.data_ptr()),
            *(high - low, *self.emb.shape, self.rows.shape[1]),
            *(weights.data_ptr(), weights.shape[1] if weights.dim() == 2 else 0, self.draws or 0.0),
            *(*pairs, low, _at(mask), _at(kept), self.stride, _at(half), _at(gradient), _at(counted)),
            *(total.data_ptr(), result.data_ptr()),
        )
        return total, result

    def room(self, rows: int) -> tuple[int, int]:
        """The shape of the exponentials of so many rows."""
        return _up(rows, _ROWS), self.stride


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
        problem = _Problem(q, emb, log_w, places, draws)
        n, c = len(q), len(emb)
        by_query, by_candidate = ctx.needs_input_grad[:2]
        keep = n * c <= chunked.STORE and (by_query or by_candidate)
        half = keep and chunked.halves()
        kept = halved = gradient = None
        if half:
            halved = chunked.spare.take(q.new_empty(0, dtype=torch.bfloat16), _up(n, _SHAPES), c)
            halved[n:] = 0
        elif keep and by_candidate:
            kept = chunked.spare.take(q, *problem.room(n))
        if by_query and not half:
            gradient = torch.empty_like(problem.q)
        counted = None if draw_counts is None or problem.scale is None else q.new_zeros(c)
        ctx.total, result = problem.sums(0, n, kept, halved, gradient, counted)
        if draw_counts is not None and counted is not None and problem.scale is not None:
            draw_counts.copy_(counted * problem.scale)
        ctx.problem, ctx.kept, ctx.gradient = problem, halved if half else kept, gradient
        ctx.save_for_backward(q, emb)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors  # raises if they were changed in place
        problem, kept, total = ctx.problem, ctx.kept, ctx.total
        by_query, by_candidate = ctx.needs_input_grad[:2]
        factor = torch.where(total > 0, grad / total, 0.0)
        if kept is not None and kept.dtype == torch.bfloat16:
            scale = None if problem.scale is None else problem.scale.unsqueeze(1)
            emb = (problem.emb if scale is None else problem.emb * scale).bfloat16()
            of_query = (kept @ emb)[: len(problem.q)].float()
            rows = kept.new_zeros(len(kept), problem.q.shape[1])
            torch.mul(problem.q, factor.unsqueeze(1), out=rows[: len(problem.q)])
            of_candidate = (kept.T @ rows).float()
            if scale is not None:
                of_candidate *= scale
        else:
            of_query = _of_query(ctx) if by_query else None
            of_candidate = _of_candidate(problem, kept, factor) if by_candidate else None
        if of_query is not None:
            of_query = of_query * factor.unsqueeze(1)
        if kept is not None:
            chunked.spare.give(kept)
            ctx.kept = None  # a second backward pass computes the exponentials again
        return of_query, of_candidate, None, None, None, None


def _of_query(ctx: Any) -> Tensor:
    """The gradient by query (n, D) up to its factor, computed now if the forward pass did not."""
    if ctx.gradient is None:
        ctx.gradient = torch.empty_like(ctx.problem.q)
        ctx.problem.sums(0, len(ctx.gradient), None, gradient=ctx.gradient)
    gradient: Tensor = ctx.gradient
    return gradient


def _of_candidate(problem: _Problem, kept: Tensor | None, factor: Tensor) -> Tensor:
    """(C, D): the transpose of the exponentials, as they are kept or computed now in blocks, times factor q."""
    kernel, turn = function(*_COLUMNS), function(*_TURN)
    assert kernel is not None
    assert turn is not None
    q, (c, d), stride = problem.q, problem.emb.shape, problem.stride
    width = _up(d, _ROWS)
    rows = q * factor.unsqueeze(1)
    if width != d:
        rows = F.pad(rows, (0, width - d))
    columns, out = q.new_zeros(width, stride), torch.empty_like(problem.emb)
    step = max(1, len(q)) if kept is not None else max(_ROWS, min(AGAIN, chunked.STORE // stride))
    for low in range(0, len(q), step):
        high, part = min(low + step, len(q)), kept
        if part is None:
            part = q.new_empty(problem.room(high - low))
            problem.sums(low, high, part)
        kernel(part.data_ptr(), rows[low:high].data_ptr(), high - low, stride, width, columns.data_ptr())
    turn(columns.data_ptr(), stride, c, d, _at(problem.scale), out.data_ptr())
    return out


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
