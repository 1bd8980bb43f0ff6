"""Weighted log-sum-exp over shared candidates and mixtures of them on a CPU, in native blocks of queries.

The mixtures of a group exist in registers only. The forward pass leaves for each candidate and query the pull of the
candidate, (C, B): its exponential plus its shares in those of its mixtures. The gradients are two products with it. Up
to STORE elements it is kept; beyond that queries come in chunks, and each pass computes it again.

Inside `half_gradients(True)` the pull is bfloat16 on processors that multiply those, as in logsumexp.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparring.kernels import chunked
from sparring.kernels.native.library import function, plain
from sparring.kernels.reference import NEVER, ExcludedKeys, ExcludedPairs, Mix

_NAME = "mixtures", "ppplllplllfpplpppp"
_GRADIENTS = "mixtures_gradients", "pppllllpp"
_ROWS, _QUERIES = 8, 32  # multiples of the kernel's on every processor
_MEMBERS = 8  # of a group, at most


def weighted_logsumexp(q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None, mix: Mix) -> Tensor | None:
    """As in mixtures_chunked.py, in float32; None where the kernel does not apply."""
    floats = q.dtype == emb.dtype == log_w.dtype == mix.weights.dtype == torch.float32
    fits = floats and plain(q, emb, log_w, mix.weights) and emb.numel() > 0 and mix.weights.shape[2] <= _MEMBERS
    if not fits or function(*_NAME) is None:
        return None
    return _MixedLogSumExp.apply(q, emb, log_w, places, mix)  # type: ignore[no-untyped-call, no-any-return]


class _Problem:
    """Queries, candidates, weights and exclusions as the kernel takes them."""

    def __init__(self, q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None, mix: Mix):
        groups, _, size = mix.weights.shape
        assert len(emb) == groups * size
        more = -len(emb) % _ROWS
        weight = log_w.reshape(-1).clamp(min=NEVER).mul(chunked.LOG2E).expand(len(emb))
        self.q, self.emb = q.contiguous(), emb.contiguous()
        self.padded, self.weight = (
            (F.pad(self.emb, (0, 0, 0, more)), F.pad(weight, (0, more))) if more else (self.emb, weight.contiguous())
        )
        self.places, self.mix, self.shares = places, mix, mix.weights.contiguous()
        self.step = max(_QUERIES, chunked.STORE // len(emb) // _QUERIES * _QUERIES)

    def chunks(self) -> list[tuple[int, int]]:
        """The first query of each chunk, and the one after its last."""
        return [(low, min(low + self.step, len(self.q))) for low in range(0, len(self.q), self.step)]

    def pull(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Room for the pull of all candidates on so many queries; to be returned."""
        return chunked.spare.take(self.q.new_empty(0, dtype=dtype), len(self.padded), _up(rows))

    def sums(self, low: int, high: int, pull: Tensor | None) -> tuple[Tensor, Tensor]:
        """Totals and results (rows,) of queries low to high; fills the pull if it is given."""
        kernel = function(*_NAME)
        assert kernel is not None
        out, mixed_out = (
            _marks(which, low, high, n)
            for which, n in ((self.places, len(self.emb)), (self.mix.places, len(self.shares)))
        )
        total, result = self.q.new_empty(2, high - low)
        half = pull is not None and pull.dtype == torch.bfloat16
        kernel(
            *(self.q[low:high].data_ptr(), self.padded.data_ptr(), self.weight.data_ptr()),
            *(high - low, *self.padded.shape, self.shares.data_ptr(), *self.shares.shape),
            *(self.mix.offset * chunked.LOG2E, _at(out), _at(mixed_out), _up(high - low)),
            *(0 if half else _at(pull), _at(pull) if half else 0, total.data_ptr(), result.data_ptr()),
        )
        return total, result


class _MixedLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None, mix: Mix) -> Tensor:
        problem = _Problem(q, emb, log_w, places, mix)
        chunks, ctx.kept = problem.chunks(), None
        if len(chunks) == 1 and len(q) * len(emb) <= chunked.STORE and any(ctx.needs_input_grad[:2]):
            ctx.kept = problem.pull(len(q), torch.bfloat16 if chunked.halves() else torch.float32)
        total, result = q.new_empty(2, len(q))
        for low, high in chunks:
            total[low:high], result[low:high] = problem.sums(low, high, ctx.kept)
        ctx.problem, ctx.total = problem, total
        ctx.save_for_backward(q, emb)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors  # raises if they were changed in place
        problem, total = ctx.problem, ctx.total
        factor = torch.where(total > 0, grad / total, 0.0).unsqueeze(1)
        of_query, of_candidate = torch.empty_like(problem.q), None
        for low, high in problem.chunks():
            pull = ctx.kept
            if pull is None:
                pull = problem.pull(high - low, torch.float32)
                problem.sums(low, high, pull)
            rows = problem.q[low:high] * factor[low:high]
            part, more = (_halves if pull.dtype == torch.bfloat16 else _floats)(pull, problem.emb, rows)
            of_query[low:high] = part * factor[low:high]
            of_candidate = more if of_candidate is None else of_candidate.add_(more)
            chunked.spare.give(pull)
        ctx.kept = None  # a second backward pass computes the exponentials again
        return of_query, torch.zeros_like(problem.emb) if of_candidate is None else of_candidate, None, None, None


def _halves(pull: Tensor, emb: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The transpose of the pull times emb (rows, D), and the pull times rows (C, D), with products in bfloat16."""
    pull = pull[: len(emb), : len(rows)]
    return (pull.T @ emb.bfloat16()).float(), (pull @ rows.bfloat16()).float()


def _floats(pull: Tensor, emb: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same in float32."""
    kernel = function(*_GRADIENTS)
    assert kernel is not None
    d, more = emb.shape[1], -emb.shape[1] % _QUERIES
    emb, rows = (F.pad(x, (0, more)) if more else x for x in (emb, rows))
    of_query, of_candidate = rows.new_zeros(pull.shape[1], d + more), emb.new_zeros(len(pull), d + more)
    sizes = len(rows), len(emb), pull.shape[1], d + more
    given, made = (pull, emb, rows), (of_query, of_candidate)
    kernel(*(x.data_ptr() for x in given), *sizes, *(x.data_ptr() for x in made))
    return of_query[: len(rows), :d], of_candidate[: len(emb), :d]


def _marks(places: ExcludedPairs | None, low: int, high: int, columns: int) -> Tensor | None:
    """The excluded pairs of queries low to high as marks (columns, queries), with queries rounded up."""
    if places is None:
        return None
    marks = torch.empty(columns, _up(high - low), dtype=torch.bool)
    used = marks[:, : high - low]
    if isinstance(places, ExcludedKeys):
        torch.eq(places.columns.unsqueeze(1), places.rows[low:high], out=used)
    elif isinstance(places, Tensor):
        used.copy_(places[low:high].T)
    else:
        rows, chosen = places
        inside = (rows >= low) & (rows < high)
        used.fill_(False)[chosen[inside], rows[inside] - low] = True
    marks[:, high - low :] = False
    return marks


def _up(queries: int) -> int:
    return -(-queries // _QUERIES) * _QUERIES


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
