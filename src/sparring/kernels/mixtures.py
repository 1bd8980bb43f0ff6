"""Mixtures in Triton: shares of group members, and real and mixed vectors as one block for fused.py or per_query.py.

On a GPU mixing vectors is cheaper than mixing logits, which needs passes over (queries, mixtures): one launch mixes a
few thousand vectors, and the fused kernel stores no scores. One more launch adds the gradients of mixtures to their
members. Random sets come from the counter (seed, group, size, member).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparring.kernels import fused
from sparring.kernels.reference import ExcludedKeys, Mix
from sparring.kernels.tiles import GROUP

KINDS = {"minmax_block": 0, "minmax_set": 1, "affine": 2, "dirichlet": 3}


@triton.jit
def _shares(  # type: ignore[no-untyped-def]
    E, SEED, OUT, first, M, D, V, eta, NP: tl.constexpr, MP: tl.constexpr, DC: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """One program per group: for each size n a random order of the members; the first n form a set of anchors."""
    g = tl.program_id(0).to(tl.int64)
    n = 2 + tl.arange(0, NP)
    i = tl.arange(0, MP)
    there = i < M
    seed = tl.load(SEED)
    counter = ((first + g) * NP + n[:, None] - 2) * MP + i[None, :]  # of (size, member)
    key = tl.randint(seed, counter * (MP + 1) + MP)
    ahead = (key[:, None, :] < key[:, :, None]) | (
        (key[:, None, :] == key[:, :, None]) & (i[None, None, :] < i[None, :, None])
    )
    rank = tl.sum((ahead & there[None, None, :]).to(tl.int32), 2)
    member = (rank < n[:, None]) & there[None, :]  # (sizes, members)
    if KIND == 3:
        u = tl.rand(seed, counter[:, :, None] * (MP + 1) + i[None, None, :])
        near = -tl.log(tl.maximum(u, 1e-10))
    else:
        gram = tl.zeros([MP, MP], tl.float32)
        for begin in range(0, D, DC):
            d = begin + tl.arange(0, DC)
            inside = there[:, None] & (d[None, :] < D)
            e = tl.load(E + (g * M + i)[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
            gram += tl.sum(e[:, None, :] * e[None, :, :], 2)
        pairs = (there[:, None] & there[None, :])[None, :, :] & (n[:, None, None] > 0)
        if KIND == 1:
            pairs = member[:, :, None] & member[:, None, :]
        x = tl.broadcast_to(gram[None, :, :], [NP, MP, MP])
        if KIND == 2:
            own = i[:, None] == i[None, :]
            across = tl.sqrt(tl.maximum(tl.sum(tl.where(own, gram, 0.0), 1), 1e-12))
            along = tl.sqrt(tl.maximum(tl.sum(tl.where(own, gram, 0.0), 0), 1e-12))
            x = (1 + x / (across[None, :, None] * along[None, None, :])) / 2
        else:
            low = tl.min(tl.min(tl.where(pairs, x, float("inf")), 2), 1)
            high = tl.max(tl.max(tl.where(pairs, x, float("-inf")), 2), 1)
            # nothing is stored for sets larger than the group
            low = tl.where(n <= M, low, 0.0)
            high = tl.where(n <= M, high, 1.0)
            x = (x - low[:, None, None]) / (high - low + 1e-6)[:, None, None]
        near = tl.exp2(eta * tl.log2(tl.maximum(x, 1e-6)))
    near = tl.where(member[:, None, :], near, 0.0)
    share = near / tl.sum(near, 2)[:, :, None]
    row = (n * (n - 1) // 2 - 1)[:, None] + rank  # sets of 2, 3, ... one after another, anchors in the set's order
    at = (g * V + row)[:, :, None] * M + i[None, None, :]
    tl.store(OUT + at, share, mask=(member & (n[:, None] <= M))[:, :, None] & there[None, None, :])


def shares(emb: Tensor, seed: Tensor, first: int, eta: float, kind: str) -> Tensor:
    """(..., V, M) float32: the shares of the M <= 16 vectors (..., M, D) of a group in its V mixtures; rows sum to 1.

    Defined in negatives/interpolation.py. `seed` (1,) is on the device; `first` is the number of the first group, so
    that groups drawn in parts get the same draws.
    """
    m, d = emb.shape[-2:]
    v = (m + 2) * (m - 1) // 2
    emb = emb.contiguous()
    out = emb.new_empty(*emb.shape[:-2], v, m, dtype=torch.float32)
    groups = emb.numel() // max(m * d, 1)
    members = triton.next_power_of_2(m)
    dims = max(1, min(triton.next_power_of_2(d), 4096 // members**2))
    if groups:
        sizes = triton.next_power_of_2(m - 1)
        _shares[(groups,)](
            emb, seed, out, first, m, d, v, eta, sizes, members, dims, KINDS[kind], num_warps=1 if m <= 8 else 4
        )
    return out


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    E, LW, SHARE, KEY, CLASS, OUT, OUT_LW, OUT_KEY, groups, split, M, D, V, offset,
    MP: tl.constexpr, VP: tl.constexpr, BD: tl.constexpr, KEYED: tl.constexpr, CLASSED: tl.constexpr,
):  # fmt: skip
    """One program per group: vectors, weights and keys of its members and mixtures; the last pads to the split."""
    g = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, MP)
    d = tl.arange(0, BD)
    wide = d[None, :] < D
    if g == groups:
        for begin in range(groups * M, split, MP):
            row = begin + i
            nothing = tl.zeros([MP, BD], OUT.dtype.element_ty)
            tl.store(OUT + row[:, None].to(tl.int64) * D + d[None, :], nothing, mask=(row[:, None] < split) & wide)
            tl.store(OUT_LW + row, tl.full([MP], float("-inf"), tl.float32), mask=row < split)
            tl.store(OUT_KEY + row, tl.full([MP], -2, tl.int32), mask=row < split)
    else:
        row = g * M + i
        e = tl.load(E + row[:, None] * D + d[None, :], mask=(i[:, None] < M) & wide, other=0.0)
        tl.store(OUT + row[:, None] * D + d[None, :], e, mask=(i[:, None] < M) & wide)
        tl.store(OUT_LW + row, tl.load(LW + row, mask=i < M, other=0.0), mask=i < M)
        key = tl.full([MP], -2, tl.int32)
        if KEYED:
            key = tl.load(KEY + row, mask=i < M, other=-2).to(tl.int32)
        tl.store(OUT_KEY + row, key, mask=i < M)
        own = tl.full([VP], -2, tl.int32)
        if CLASSED:
            own = tl.zeros([VP], tl.int32) + tl.load(CLASS + g).to(tl.int32)
        for begin in range(0, V, VP):
            v = begin + tl.arange(0, VP)
            made = tl.zeros([VP, BD], tl.float32)
            log_w = tl.zeros([VP], tl.float32) + offset
            for m in range(M):
                share = tl.load(SHARE + (g * V + v) * M + m, mask=v < V, other=0.0)
                member = tl.load(E + (g * M + m) * D + d, mask=d < D, other=0.0).to(tl.float32)
                made += share[:, None] * member[None, :]
                log_w += share * tl.maximum(tl.load(LW + g * M + m), -1e30)  # 0 times -inf would be nan
            at = split + g * V + v
            tl.store(OUT + at[:, None] * D + d[None, :], made.to(OUT.dtype.element_ty), mask=(v[:, None] < V) & wide)
            tl.store(OUT_LW + at, tl.where(log_w < -1e15, float("-inf"), log_w), mask=v < V)
            tl.store(OUT_KEY + at, own, mask=v < V)


@triton.jit
def _join_backward(  # type: ignore[no-untyped-def]
    GRAD, SHARE, OUT, split, M, D, V, MP: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """One program per group: the gradient of each member, its own plus its share in those of its mixtures."""
    g = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, MP)
    d = tl.arange(0, BD)
    inside = (i[:, None] < M) & (d[None, :] < D)
    at = (g * M + i)[:, None] * D + d[None, :]
    grad = tl.load(GRAD + at, mask=inside, other=0.0).to(tl.float32)
    for v in range(V):
        share = tl.load(SHARE + (g * V + v) * M + i, mask=i < M, other=0.0)
        of_made = tl.load(GRAD + (split + g * V + v) * D + d, mask=d < D, other=0.0).to(tl.float32)
        grad += share[:, None] * of_made[None, :]
    tl.store(OUT + at, grad.to(OUT.dtype.element_ty), mask=inside)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        emb: Tensor,
        log_w: Tensor,
        weights: Tensor,
        keys: Tensor | None,
        classes: Tensor | None,
        offset: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        (groups, v, m), d = weights.shape, emb.shape[1]
        split = triton.cdiv(len(emb), GROUP) * GROUP
        c = split + groups * v
        emb, log_w, weights = (
            emb.contiguous(),
            log_w.float().expand(len(emb)).contiguous(),
            weights.float().contiguous(),
        )
        out, out_w = emb.new_empty(c, d), emb.new_empty(c, dtype=torch.float32)
        out_keys = torch.empty(c, dtype=torch.int32, device=emb.device)
        members, dims = triton.next_power_of_2(m), triton.next_power_of_2(d)
        _join[(groups + 1,)](
            emb, log_w, weights, weights if keys is None else keys.contiguous(),
            weights if classes is None else classes.contiguous(),
            out, out_w, out_keys, groups, split, m, d, v, offset, members, 16, dims, keys is not None,
            classes is not None,
            num_warps=_warps(16 * dims),
        )  # fmt: skip
        ctx.save_for_backward(weights)
        ctx.split, ctx.like = split, emb.dtype
        ctx.set_materialize_grads(False)  # weights and keys have no gradient
        ctx.mark_non_differentiable(out_w, out_keys)
        return out, out_w, out_keys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (weights,) = ctx.saved_tensors
        (groups, v, m), d = weights.shape, grad.shape[1]
        out = torch.empty(groups * m, d, dtype=ctx.like, device=grad.device)
        members, dims = triton.next_power_of_2(m), triton.next_power_of_2(d)
        _join_backward[(groups,)](
            grad.contiguous(), weights, out, ctx.split, m, d, v, members, dims, num_warps=_warps(members * dims)
        )
        return out, None, None, None, None, None


def _warps(size: int) -> int:
    """Warps of a program that holds `size` numbers."""
    return max(1, min(8, size // 1024))


def weighted_logsumexp(q: Tensor, emb: Tensor, log_w: Tensor, keys: ExcludedKeys | None, mix: Mix) -> Tensor:
    """As in reference.py, for shared emb (C, D) with D <= 256, a log_w (C,) without gradient, and keys."""
    classes = mix.places
    assert classes is None or isinstance(classes, ExcludedKeys)
    columns = (None if keys is None else keys.columns), (None if classes is None else classes.columns)
    joined = _Join.apply(emb, log_w, mix.weights, *columns, mix.offset)  # type: ignore[no-untyped-call]
    vectors, weights, keyed = joined
    both: ExcludedKeys | None = None
    if keys is not None or classes is not None:
        rows = [of.rows for of in (keys or classes, classes or keys) if of is not None]
        both = ExcludedKeys(keyed, torch.stack(rows), len(weights) - mix.weights.shape[0] * mix.weights.shape[1])
    return fused.weighted_logsumexp(q, vectors, weights, both)


@triton.jit
def _towards(  # type: ignore[no-untyped-def]
    E, V, LAM, LW, IDS, OUT, OUT_LW, OUT_IDS, m, D, of_row, offset, MP: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """One program per query: its candidates, then each mixed with the positive."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, MP)
    d = tl.arange(0, BD)
    inside = (i[:, None] < m) & (d[None, :] < D)
    e = tl.load(E + (row * m + i)[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    v = tl.load(V + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    lam = tl.load(LAM + row * of_row)
    to = 2 * row * m + i
    tl.store(OUT + to[:, None] * D + d[None, :], e.to(OUT.dtype.element_ty), mask=inside)
    tl.store(
        OUT + (to + m)[:, None] * D + d[None, :], (e + lam * (v[None, :] - e)).to(OUT.dtype.element_ty), mask=inside
    )
    w = tl.load(LW + row * m + i, mask=i < m, other=0.0)
    tl.store(OUT_LW + to, w, mask=i < m)
    tl.store(OUT_LW + to + m, w + offset, mask=i < m)
    tl.store(OUT_IDS + to, tl.load(IDS + row * m + i, mask=i < m, other=-1), mask=i < m)
    tl.store(OUT_IDS + to + m, tl.full([MP], -1, tl.int64), mask=i < m)


@triton.jit
def _towards_backward(  # type: ignore[no-untyped-def]
    GRAD, LAM, OUT, OUT_V, m, D, of_row, MP: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, MP)
    d = tl.arange(0, BD)
    inside = (i[:, None] < m) & (d[None, :] < D)
    at = (2 * row * m + i)[:, None] * D + d[None, :]
    real = tl.load(GRAD + at, mask=inside, other=0.0).to(tl.float32)
    made = tl.load(GRAD + at + m * D, mask=inside, other=0.0).to(tl.float32)
    lam = tl.load(LAM + row * of_row)
    tl.store(
        OUT + (row * m + i)[:, None] * D + d[None, :], (real + (1 - lam) * made).to(OUT.dtype.element_ty), mask=inside
    )
    tl.store(OUT_V + row * D + d, (lam * tl.sum(made, 0)).to(OUT_V.dtype.element_ty), mask=d < D)


class _Towards(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, emb: Tensor, v: Tensor, lam: Tensor, log_w: Tensor, ids: Tensor, offset: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        b, m, d = emb.shape
        emb, v, lam = emb.contiguous(), v.contiguous(), lam.float().contiguous()
        out, out_w = emb.new_empty(b, 2 * m, d), torch.empty(b, 2 * m, device=emb.device)
        out_ids = torch.empty(b, 2 * m, dtype=torch.int64, device=emb.device)
        ctx.tile = triton.next_power_of_2(m), triton.next_power_of_2(d)
        ctx.of_row = 0 if lam.numel() == 1 else 1
        if b:
            _towards[(b,)](
                emb, v, lam, log_w.float().contiguous(), ids.contiguous(), out, out_w, out_ids, m, d, ctx.of_row,
                offset, *ctx.tile,
                num_warps=_warps(math.prod(ctx.tile)),
            )  # fmt: skip
        ctx.save_for_backward(lam)
        ctx.dtypes = emb.dtype, v.dtype
        ctx.set_materialize_grads(False)  # weights and keys have no gradient
        ctx.mark_non_differentiable(out_w, out_ids)
        return out, out_w, out_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (lam,) = ctx.saved_tensors
        b, twice, d = grad.shape
        of_emb = torch.empty(b, twice // 2, d, dtype=ctx.dtypes[0], device=grad.device)
        of_v = torch.empty(b, d, dtype=ctx.dtypes[1], device=grad.device)
        if b:
            _towards_backward[(b,)](
                grad.contiguous(),
                lam,
                of_emb,
                of_v,
                twice // 2,
                d,
                ctx.of_row,
                *ctx.tile,
                num_warps=_warps(math.prod(ctx.tile)),
            )
        return of_emb, of_v, None, None, None, None


def towards(
    emb: Tensor, v: Tensor, lam: Tensor, log_w: Tensor, ids: Tensor, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Each query's candidates (B, M, D), then lam v + (1 - lam) e of each, with weights and ids: 2 M per query.

    lam () or (B,). A mixture has the weight of its candidate times e^offset, and the id -1.
    """
    return _Towards.apply(emb, v, lam, log_w.expand(ids.shape), ids, offset)  # type: ignore[no-untyped-call, no-any-return]
