"""The Triton programs of the fused weighted log-sum-exp (fused.py), tile by tile.

`prepare` brings queries and candidates into one form: rows padded to groups of 128, dimensions to a power of 2, queries
times log2(e), and each group divided by a power of 2 that brings its largest entry below 1. So no loop needs a mask,
logits are in powers of 2, and 16-bit floats hold the entries with the 10 bits of TF32. The power of 2 of a group is one
number per tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = 128  # rows that share a power of 2; a tile holds one group or an even part of one


@triton.jit
def _powers(X, OUT, POWER, n, D, group, factor, BD: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of one group as fractions of a power of 2, and the power."""
    row = group * GROUP + tl.arange(0, GROUP)
    d = tl.arange(0, BD)
    inside = (row[:, None] < n) & (d[None, :] < D)
    x = tl.load(X + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0).to(tl.float32) * factor
    power = 0.0
    if HALF:
        largest = tl.max(tl.max(tl.abs(x), 1), 0)
        power = tl.where(largest > 0, tl.ceil(tl.log2(tl.maximum(largest, 1e-35))), 0.0)
        x = x * tl.exp2(-power)
    tl.store(OUT + row[:, None].to(tl.int64) * BD + d[None, :], x.to(OUT.dtype.element_ty))
    tl.store(POWER + group, power)
    return row


@triton.jit
def _odd(seed, counter):  # type: ignore[no-untyped-def]
    return tl.randint(seed, counter).to(tl.int32, bitcast=True) | 1


@triton.jit
def _unweighted(w):  # type: ignore[no-untyped-def]
    """The factor that removes the weight from a probability. Weights more than 2^80 apart are not drawn together."""
    return tl.exp2(tl.minimum(tl.maximum(-w, -80.0), 80.0))


@triton.jit
def _count(chance, own, each):  # type: ignore[no-untyped-def]
    """floor(chance + u) with u in [0, 1) from the random keys of a query and a candidate, two odd numbers.

    The product of two odd 32-bit numbers is uniform over odd numbers for any first factor, so u is uniform, and the u
    of any three pairs are independent. u - 1/2 is added, and adding 1.5 x 2^23, beyond which a float32 has no fraction,
    rounds.
    """
    return (chance + (own * each).to(tl.float32) * 2.3283064365386963e-10 + 12582912.0) - 12582912.0


@triton.jit
def prepare(  # type: ignore[no-untyped-def]
    Q, E, LW, ROW, COL, SEED, QS, ES, QPOWER, EPOWER, W, ROWKEY, COLKEY, B, C, D, q_groups, columns,
    BD: tl.constexpr, PAIRS: tl.constexpr, KEYED: tl.constexpr, DRAWN: tl.constexpr, HALF: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One program per group of queries, then of candidates: entries, powers, weights, keys and random keys."""
    pid = tl.program_id(0)
    if pid < q_groups:
        row = _powers(Q, QS, QPOWER, B, D, pid, 1.4426950408889634, BD, HALF, GROUP)
        if KEYED:
            tl.store(ROWKEY + row, tl.load(ROW + row, mask=row < B, other=-1).to(tl.int32))
        if KEYED == 2:
            tl.store(ROWKEY + q_groups * GROUP + row, tl.load(ROW + B + row, mask=row < B, other=-1).to(tl.int32))
        if DRAWN:
            tl.store(ROWKEY + q_groups * GROUP + row, _odd(tl.load(SEED), 2 * (row + tl.load(SEED + 1))))
    else:
        col = _powers(E, ES, EPOWER, C, D, pid - q_groups, 1.0, BD, HALF, GROUP)
        inside = col < C
        if PAIRS:
            w = tl.where(inside, 0.0, float("-inf"))
        else:
            w = tl.load(LW + col, mask=inside, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        tl.store(W + col, w)
        if KEYED:
            tl.store(COLKEY + col, tl.load(COL + col, mask=inside, other=-1).to(tl.int32))
        if DRAWN:
            tl.store(COLKEY + columns + col, _odd(tl.load(SEED), 2 * col.to(tl.int64) + 1))
            tl.store(W + columns + col, _unweighted(w))


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    QS, ES, QPOWER, EPOWER, W, LW, ROWKEY, COLKEY, LOGZ, SUMS, MEAN, B, C, rows, columns, span, split, log_draws,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PAIRS: tl.constexpr, KEYED: tl.constexpr, KIND: tl.constexpr,
    KEEP: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """A tile of queries against a span of candidates: running maximum and sum of 2^t, and sum_j 2^(t - maximum) e_j."""
    first = tl.program_id(0) * BM
    row = first + tl.arange(0, BM)
    part = tl.program_id(1)
    d = tl.arange(0, BD)
    q = tl.load(QS + row[:, None].to(tl.int64) * BD + d[None, :])
    q_power = tl.load(QPOWER + first // GROUP)
    # a finite start: differences of it are never nan
    top = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    top1 = tl.full([BM], -1e30, tl.float32)
    total1 = tl.zeros([BM], tl.float32)
    mean = tl.zeros([BM, BD], tl.float32)
    if KEYED == 1:
        own = tl.load(ROWKEY + row)
    if KIND == 2:
        own_random = tl.load(ROWKEY + rows + row)
        log_z = tl.load(LOGZ + row) - log_draws
    low = part * span
    for begin in range(low, min(low + span, columns), BN):
        col = begin + tl.arange(0, BN)
        e = tl.load(ES + col[:, None].to(tl.int64) * BD + d[None, :])
        power = tl.load(EPOWER + begin // GROUP)
        s = tl.dot(q, tl.trans(e), input_precision=PRECISION) * tl.exp2(q_power + power)
        t = s + tl.load(W + col)[None, :]
        if PAIRS:
            inside = (row[:, None] < B) & (col[None, :] < C)
            t += tl.load(LW + row[:, None].to(tl.int64) * C + col[None, :], mask=inside, other=0.0) * 1.4426950408889634
        if KEYED:
            each = tl.load(COLKEY + col)
            if KEYED == 2:  # the second key, for candidates from the split on
                own = tl.load(ROWKEY + tl.where(begin < split, 0, rows) + row)
            t = tl.where(own[:, None] == each[None, :], float("-inf"), t)
        if KIND == 1:
            new1 = tl.maximum(top1, tl.max(t, 1))
            total1 = total1 * tl.exp2(top1 - new1) + tl.sum(tl.exp2(t - new1[:, None]), 1)
            top1 = new1
            t += s
        if KIND == 2:
            each_random = tl.load(COLKEY + columns + col)
            chance = tl.exp2(t - log_z[:, None])
            # 2^s times the count, in units of 2^log_z: no logarithm of a count is taken
            drawn = (
                chance * tl.load(W + columns + col)[None, :] * _count(chance, own_random[:, None], each_random[None, :])
            )
            if PAIRS:
                drawn *= _unweighted(t - s)
            new = tl.maximum(top, tl.log2(tl.max(drawn, 1)) + power)
            p = drawn * tl.exp2(tl.minimum(power + SHIFT - new, 126.0))[:, None]
        else:
            # the power of the group becomes part of the unit of the sums
            new = tl.maximum(top, tl.max(t, 1) + power)
            p = tl.exp2(t - (new - power - SHIFT)[:, None])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(p, 1) * tl.exp2(-power)
        if KEEP:
            mean = tl.dot(p.to(e.dtype), e, mean * fade[:, None], input_precision=PRECISION)
        top = new
    if KIND == 2:
        top = tl.where(total > 0, top + log_z, -1e30)
    at = part * rows + row
    parts = tl.num_programs(1)
    tl.store(SUMS + at, top)
    tl.store(SUMS + parts * rows + at, total)
    if KIND == 1:
        tl.store(SUMS + 2 * parts * rows + at, top1)
        tl.store(SUMS + 3 * parts * rows + at, total1)
    if KEEP:
        tl.store(MEAN + at[:, None].to(tl.int64) * BD + d[None, :], mean)


@triton.jit
def _log_total(SUMS, row, rows, parts, shift):  # type: ignore[no-untyped-def]
    """log2 of the total over all parts, -inf for 0; the maxima of all parts come first, then the sums."""
    top = tl.load(SUMS + row)
    for part in range(1, parts):
        top = tl.maximum(top, tl.load(SUMS + part * rows + row))
    total = tl.zeros_like(top)
    for part in range(parts):
        total += tl.load(SUMS + (parts + part) * rows + row) * tl.exp2(tl.load(SUMS + part * rows + row) - top)
    return tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-37)) - shift, float("-inf"))


@triton.jit
def join(  # type: ignore[no-untyped-def]
    SUMS, MEAN, LOGS, LOGZ, VALUE, OUT, B, D, rows, parts, log_draws,
    BM: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, KEEP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Join the parts of each query: its value, the logarithms for the backward pass, and the mean candidate (B, D)."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = row < B
    log_s = _log_total(SUMS, row, rows, parts, SHIFT)
    value = log_s
    if KIND == 1:
        log_z = _log_total(SUMS + 2 * parts * rows, row, rows, parts, 0)
        value = tl.where(log_z == float("-inf"), float("-inf"), log_s - log_z + log_draws)
        # if nothing counts, a value that makes every share 0
        tl.store(LOGZ + row, tl.where((log_z == float("-inf")) | (row >= B), float("inf"), log_z))
    log_s = tl.where((log_s == float("-inf")) | (row >= B), float("inf"), log_s)
    tl.store(LOGS + row, log_s)
    tl.store(VALUE + row, value * 0.6931471805599453, mask=inside)
    if KEEP:
        d = tl.arange(0, BD)
        mean = tl.zeros([BM, BD], tl.float32)
        for part in range(parts):
            at = part * rows + row
            share = tl.exp2(tl.load(SUMS + at) - log_s - SHIFT)
            mean += tl.load(MEAN + at[:, None].to(tl.int64) * BD + d[None, :]) * share[:, None]
        tl.store(OUT + row[:, None].to(tl.int64) * D + d[None, :], mean, mask=inside[:, None] & (d[None, :] < D))


@triton.jit
def fractions(  # type: ignore[no-untyped-def]
    GRAD, QPOWER, LOGZ, LOGS, OUT, LARGEST, B, rows, log_draws, DRAWN: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr
):  # fmt: skip
    """The gradient of each query's value times the power of its group, as a fraction of the largest: one program.

    With drawn counts, also times the factor that turns an unweighted probability times its count into a share."""
    largest = 0.0
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        g = tl.load(GRAD + row, mask=row < B, other=0.0).to(tl.float32) * tl.exp2(
            tl.load(QPOWER + row // GROUP, mask=row < B, other=0.0)
        )
        largest = tl.maximum(largest, tl.max(tl.abs(g), 0))
    tl.store(LARGEST, largest)
    scale = 1.0 / tl.where(largest > 0, largest, 1.0)
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        g = tl.load(GRAD + row, mask=row < B, other=0.0).to(tl.float32) * tl.exp2(
            tl.load(QPOWER + row // GROUP, mask=row < B, other=0.0)
        )
        if DRAWN:
            log_z = tl.load(LOGZ + row, mask=row < rows, other=float("inf"))
            share = tl.exp2(log_z - log_draws - tl.load(LOGS + row, mask=row < rows, other=0.0))
            g = tl.where(log_z == float("inf"), 0.0, g * share)
        tl.store(OUT + row, g * scale, mask=row < rows)


@triton.jit
def backward(  # type: ignore[no-untyped-def]
    QS, ES, QPOWER, EPOWER, W, LW, ROWKEY, COLKEY, LOGZ, LOGS, GRAD, LARGEST, OUT, COUNTS, B, C, D, rows, columns, span,
    split, log_draws,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PAIRS: tl.constexpr, KEYED: tl.constexpr, KIND: tl.constexpr,
    PULL: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """A tile of candidates against a span of queries: sum_i g_i p_ij q_i, and the draws of each candidate."""
    first = tl.program_id(0) * BM
    col = first + tl.arange(0, BM)
    part = tl.program_id(1)
    d = tl.arange(0, BD)
    e = tl.load(ES + col[:, None].to(tl.int64) * BD + d[None, :])
    power = tl.load(EPOWER + first // GROUP)
    w = tl.load(W + col)
    pulled = tl.zeros([BM, BD], tl.float32)
    used = tl.zeros([BM], tl.float32)
    if KEYED:
        each = tl.load(COLKEY + col)
    if KIND == 2:
        each_random = tl.load(COLKEY + columns + col)
        unweighted = (tl.load(W + columns + col) * tl.exp2(SHIFT + 0.0))[:, None]
    low = part * span
    for begin in range(low, min(low + span, rows), BN):
        row = begin + tl.arange(0, BN)
        q = tl.load(QS + row[:, None].to(tl.int64) * BD + d[None, :])
        q_power = tl.load(QPOWER + begin // GROUP)
        s = tl.dot(e, tl.trans(q), input_precision=PRECISION) * tl.exp2(q_power + power)
        t = s + w[:, None]
        if PAIRS:
            inside = (row[None, :] < B) & (col[:, None] < C)
            t += tl.load(LW + row[None, :].to(tl.int64) * C + col[:, None], mask=inside, other=0.0) * 1.4426950408889634
        if KEYED:
            own = tl.load(ROWKEY + row)
            if KEYED == 2:
                own = tl.load(ROWKEY + tl.where(first < split, 0, rows) + row)
            t = tl.where(own[None, :] == each[:, None], float("-inf"), t)
        if KIND == 1:
            if COUNT:
                used += tl.sum(tl.exp2(t - (tl.load(LOGZ + row) - log_draws)[None, :]), 1)
            t += s
        if KIND == 2:
            own_random = tl.load(ROWKEY + rows + row)
            log_z = tl.load(LOGZ + row) - log_draws
            chance = tl.exp2(t - log_z[None, :])
            n = _count(chance, own_random[None, :], each_random[:, None])
            if COUNT:
                used += tl.sum(n, 1)
        if PULL:
            g = tl.load(GRAD + row)
            if KIND == 2:
                if PAIRS:
                    n *= _unweighted(t - s)
                p = (n * unweighted) * (chance * g[None, :])
            else:
                log_s = tl.load(LOGS + row) - SHIFT
                p = tl.exp2(t - log_s[None, :]) * g[None, :]
            pulled = tl.dot(p.to(q.dtype), q, pulled, input_precision=PRECISION)
    at = (part * C + col).to(tl.int64)
    if PULL:
        pulled *= tl.load(LARGEST) * 0.6931471805599453 * tl.exp2(0.0 - SHIFT)
        tl.store(
            OUT + at[:, None] * D + d[None, :],
            pulled.to(OUT.dtype.element_ty),
            mask=(col[:, None] < C) & (d[None, :] < D),
        )
    if COUNT:
        tl.store(COUNTS + at, used, mask=col < C)
