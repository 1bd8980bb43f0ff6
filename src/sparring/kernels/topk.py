"""Exact top k of inner products in Triton: the scores of all items exist only as tiles on the chip.

The first kernel writes only the largest score of each group of items, without seen items, from 16-bit floats with an
error of at most `slack`. The k best items are in the groups with the largest maxima. The second kernel computes the
scores of the chosen groups in full precision. All other items are then proven to score below the k-th, except for rare
queries, which the result marks as not `sure`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparring.kernels.tiles import GROUP, _powers

WIDTH = 64  # items of a group
SPARE = 24  # groups searched beyond the k that hold the answer without rounding
_LAST = tl.constexpr(2147483647)
_LIMIT = 1 << 26  # group maxima held at once


class Best(NamedTuple):
    """The k best items of each query, ordered by score and then id; -inf and -1 if there are fewer."""

    scores: Tensor  # (B, k)
    ids: Tensor  # (B, k) int64
    sure: Tensor  # (B,) bool: proven exact


@triton.jit
def _prepare(X, OUT, POWER, n, D, BD: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    _powers(X, OUT, POWER, n, D, tl.program_id(0), 1.0, BD, True, GROUP)


@triton.jit
def _maxima(  # type: ignore[no-untyped-def]
    QS, ES, QPOWER, EPOWER, START, SEEN, WHO, OUT, B, N, rows, columns,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BM
    row = first + tl.arange(0, BM)
    d = tl.arange(0, BD)
    q = tl.load(QS + row[:, None].to(tl.int64) * BD + d[None, :])
    q_power = tl.load(QPOWER + first // GROUP)
    if MASKED:
        who = tl.load(WHO + row, mask=row < B, other=0)
        at = tl.load(START + who)
        stop = tl.where(row < B, tl.load(START + who + 1), at)
        coming = tl.load(SEEN + at, mask=at < stop, other=_LAST).to(tl.int32)
    for begin in range(0, columns, BN):
        col = begin + tl.arange(0, BN)
        e = tl.load(ES + col[:, None].to(tl.int64) * BD + d[None, :])
        s = tl.dot(q, tl.trans(e)) * tl.exp2(q_power + tl.load(EPOWER + begin // GROUP))
        s = tl.where((col < N)[None, :], s, float("-inf"))
        if MASKED:
            # each query walks along its sorted list; an unsorted list makes a result unsure, never wrong
            while tl.min(coming, 0) < begin + BN:
                s = tl.where(col[None, :] == coming[:, None], float("-inf"), s)
                passed = coming < begin + BN
                at = tl.where(passed, at + 1, at)
                coming = tl.where(
                    passed, tl.load(SEEN + at, mask=passed & (at < stop), other=_LAST).to(tl.int32), coming
                )
        tl.store(OUT + begin // BN * rows + row, tl.max(s, 1))  # _LIMIT keeps this below 2^31


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    Q, E, CHOSEN, START, SEEN, WHO, OUT, N, D, m, BN: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Scores of one chosen group of one query in full precision, as keys that order by score and then smaller id."""
    row = tl.program_id(0)
    place = row.to(tl.int64) * m + tl.program_id(1)
    col = tl.load(CHOSEN + place) * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    q = tl.load(Q + row.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float64)
    e = tl.load(E + col[:, None].to(tl.int64) * D + d[None, :], mask=(col[:, None] < N) & (d[None, :] < D), other=0.0)
    # in float64, rounded once, as core/topk.inner_products: a score depends on its two vectors alone
    s = tl.where(col < N, tl.sum(e.to(tl.float64) * q[None, :], 1).to(tl.float32), float("-inf"))
    if MASKED:
        who = tl.load(WHO + row)
        stop = tl.load(START + who + 1)
        for at in range(tl.load(START + who), stop, BLOCK):
            place_seen = at + tl.arange(0, BLOCK)
            seen = tl.load(SEEN + place_seen, mask=place_seen < stop, other=-1)
            hit = tl.max((col[:, None] == seen[None, :]).to(tl.int32), 1)
            s = tl.where(hit > 0, float("-inf"), s)
    s = tl.where(s == 0, 0.0, s)  # -0 and 0 are equal scores
    bits = s.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    tl.store(OUT + place * BN + tl.arange(0, BN), (ordered << 32) | (0x7FFFFFFF - col).to(tl.int64))


def fits(q: Tensor, items: Tensor, k: int) -> bool:
    """Whether this kernel applies: float32 on a GPU, enough queries to fill it, few of many groups to search."""
    many = len(q) >= 512 and len(items) >= 8 * WIDTH * (k + SPARE)
    return many and q.is_cuda and q.dtype == torch.float32 and q.shape[1] <= 256 and len(items) < 2**31 - WIDTH


def top_k(q: Tensor, items: Tensor, k: int, start: Tensor | None, seen: Tensor | None, who: Tensor | None) -> Best:
    """The k largest inner products of each query with items (N, D), without seen[start[who] : start[who + 1]]."""
    prepared = _halves(items)
    longest = float(torch.linalg.vector_norm(items, dim=1).max())
    block = max(GROUP, min(len(q), _LIMIT // triton.cdiv(len(items), WIDTH)) // GROUP * GROUP)
    parts = []
    for low in range(0, len(q), block):
        own = None
        if start is not None and seen is not None and who is not None:
            own = start, seen, who[low : low + block].contiguous()
        parts.append(_block(q[low : low + block].contiguous(), items, prepared, longest, k, own))
    return Best(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    n, d = x.shape
    groups, dims = triton.cdiv(n, GROUP), max(16, triton.next_power_of_2(d))
    out, power = x.new_empty(groups * GROUP, dims, dtype=torch.float16), x.new_empty(groups)
    _prepare[(groups,)](x, out, power, n, d, dims, GROUP, num_warps=8)
    return out, power


def _block(
    q: Tensor,
    items: Tensor,
    prepared: tuple[Tensor, Tensor],
    longest: float,
    k: int,
    lists: tuple[Tensor, Tensor, Tensor] | None,
) -> Best:
    (b, d), n = q.shape, len(items)
    (halves, power), (q_halves, q_power) = prepared, _halves(q)
    rows, columns, dims = len(q_halves), len(halves), halves.shape[1]
    masked, lists = lists is not None, lists or (q, q, q)
    highest = q.new_empty(columns // WIDTH, rows)
    _maxima[(rows // 64,)](
        q_halves,
        halves,
        q_power,
        power,
        *lists,
        highest,
        b,
        n,
        rows,
        columns,
        64,
        WIDTH,
        dims,
        masked,
        GROUP,
        num_warps=4,
        num_stages=3,
    )
    m = min(k + SPARE, columns // WIDTH)
    best, chosen = torch.topk(highest[:, :b].T.contiguous(), m, dim=1)
    keys = torch.empty(b, m * WIDTH, dtype=torch.int64, device=q.device)
    _scores[(b, m)](q, items, chosen, *lists, keys, n, d, m, WIDTH, dims, 64, masked, num_warps=2)
    top = torch.topk(keys, min(k, m * WIDTH), dim=1).values
    high = (top >> 32).int()
    scores = torch.where(high < 0, high ^ 0x7FFFFFFF, high).view(torch.float32)
    ids = torch.where(torch.isneginf(scores), -1, 0x7FFFFFFF - (top & 0xFFFFFFFF))
    # half a unit in the last of 11 bits per factor, plus a margin for the sum and for numbers too small for 16 bits
    slack = torch.linalg.vector_norm(q, dim=1) * (longest * 1.05 * 2**-10)
    sure = (
        best[:, -1] + slack < scores[:, -1] if m * WIDTH < columns else torch.ones(b, dtype=torch.bool, device=q.device)
    )
    return Best(scores, ids, sure)
