"""The Triton kernels of the fused weighted log-sum-exp (fused.py): what each program does with its tiles.

Queries and candidates come to the loops in one form, made by `prepare`: rows filled up to whole groups of 128, dimensions to a power of 2,
queries times log2(e), and each group divided by a power of 2 that brings its largest entry below 1. So no loop needs a mask, everything is
in powers of 2, and 16-bit floats hold the entries with the 10 bits that TF32 keeps. The power of 2 of a group costs one number for a tile.
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
def prepare(  # type: ignore[no-untyped-def]
    Q, E, LW, ROW, COL, SEED, QS, ES, QPOWER, EPOWER, W, ROWKEY, COLKEY, B, C, D, q_groups, columns,
    BD: tl.constexpr, PAIRS: tl.constexpr, KEYED: tl.constexpr, DRAWN: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program a group of queries, then one a group of candidates: entries, powers, weights, keys and random keys."""
    pid = tl.program_id(0)
    if pid < q_groups:
        row = _powers(Q, QS, QPOWER, B, D, pid, 1.4426950408889634, BD, HALF, GROUP)
        if KEYED:
            tl.store(ROWKEY + row, tl.load(ROW + row, mask=row < B, other=-1).to(tl.int32))
        if DRAWN:
            tl.store(ROWKEY + q_groups * GROUP + row, tl.randint(tl.load(SEED), 2 * (row + tl.load(SEED + 1))).to(tl.int32, bitcast=True))
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
            tl.store(COLKEY + columns + col, tl.randint(tl.load(SEED), 2 * col.to(tl.int64) + 1).to(tl.int32, bitcast=True))


@triton.jit
def _uniform(own, each):  # type: ignore[no-untyped-def]
    """A number in [0, 1) from the random keys of a query and a candidate: their sum, mixed until each bit hangs on every bit."""
    x = (own + each).to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return (x >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    QS, ES, QPOWER, EPOWER, W, LW, ROWKEY, COLKEY, LOGZ, TOP, SUM, TOP1, SUM1, MEAN, B, C, rows, columns, span, log_draws,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PAIRS: tl.constexpr, KEYED: tl.constexpr, KIND: tl.constexpr,
    KEEP: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """A tile of queries against a span of the candidates: running maximum and sum of 2^t, and sum_j 2^(t - maximum) e_j."""
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
    if KEYED:
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
            t = tl.where(own[:, None] == each[None, :], float("-inf"), t)
        if KIND == 1:
            new1 = tl.maximum(top1, tl.max(t, 1))
            total1 = total1 * tl.exp2(top1 - new1) + tl.sum(tl.exp2(t - new1[:, None]), 1)
            top1 = new1
            t += s
        if KIND == 2:
            each_random = tl.load(COLKEY + columns + col)
            t = s + tl.log2(tl.floor(tl.exp2(t - log_z[:, None]) + _uniform(own_random[:, None], each_random[None, :])))
        # the power of the group goes into the unit that the sums are kept in
        new = tl.maximum(top, tl.max(t, 1) + power)
        p = tl.exp2(t - (new - power - SHIFT)[:, None])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(p, 1) * tl.exp2(-power)
        if KEEP:
            mean = tl.dot(p.to(e.dtype), e, mean * fade[:, None], input_precision=PRECISION)
        top = new
    at = part * rows + row
    tl.store(TOP + at, top)
    tl.store(SUM + at, total)
    if KIND == 1:
        tl.store(TOP1 + at, top1)
        tl.store(SUM1 + at, total1)
    if KEEP:
        tl.store(MEAN + at[:, None].to(tl.int64) * BD + d[None, :], mean)


@triton.jit
def _log_total(TOP, SUM, row, rows, parts, shift):  # type: ignore[no-untyped-def]
    """log2 of the sums of all parts together, -inf where they are 0."""
    top = tl.load(TOP + row)
    for part in range(1, parts):
        top = tl.maximum(top, tl.load(TOP + part * rows + row))
    total = tl.zeros_like(top)
    for part in range(parts):
        total += tl.load(SUM + part * rows + row) * tl.exp2(tl.load(TOP + part * rows + row) - top)
    return tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-37)) - shift, float("-inf"))


@triton.jit
def join(  # type: ignore[no-untyped-def]
    TOP, SUM, TOP1, SUM1, MEAN, LOGS, LOGZ, VALUE, OUT, B, D, rows, parts, log_draws,
    BM: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, KEEP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The parts of each query put together: its value, the logarithms that the backward pass needs, and the mean candidate (B, D)."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = row < B
    log_s = _log_total(TOP, SUM, row, rows, parts, SHIFT)
    value = log_s
    if KIND == 1:
        log_z = _log_total(TOP1, SUM1, row, rows, parts, 0)
        value = tl.where(log_z == float("-inf"), float("-inf"), log_s - log_z + log_draws)
        # where nothing counts, what makes every share 0
        tl.store(LOGZ + row, tl.where((log_z == float("-inf")) | (row >= B), float("inf"), log_z))
    log_s = tl.where((log_s == float("-inf")) | (row >= B), float("inf"), log_s)
    tl.store(LOGS + row, log_s)
    tl.store(VALUE + row, value * 0.6931471805599453, mask=inside)
    if KEEP:
        d = tl.arange(0, BD)
        mean = tl.zeros([BM, BD], tl.float32)
        for part in range(parts):
            at = part * rows + row
            share = tl.exp2(tl.load(TOP + at) - log_s - SHIFT)
            mean += tl.load(MEAN + at[:, None].to(tl.int64) * BD + d[None, :]) * share[:, None]
        tl.store(OUT + row[:, None].to(tl.int64) * D + d[None, :], mean, mask=inside[:, None] & (d[None, :] < D))


@triton.jit
def fractions(GRAD, QPOWER, OUT, LARGEST, B, rows, BLOCK: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of each query's value times the power of its group, as a fraction of the largest: one program."""
    largest = 0.0
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        g = tl.load(GRAD + row, mask=row < B, other=0.0).to(tl.float32) * tl.exp2(tl.load(QPOWER + row // GROUP, mask=row < B, other=0.0))
        largest = tl.maximum(largest, tl.max(tl.abs(g), 0))
    tl.store(LARGEST, largest)
    scale = 1.0 / tl.where(largest > 0, largest, 1.0)
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        g = tl.load(GRAD + row, mask=row < B, other=0.0).to(tl.float32) * tl.exp2(tl.load(QPOWER + row // GROUP, mask=row < B, other=0.0))
        tl.store(OUT + row, g * scale, mask=row < rows)


@triton.jit
def backward(  # type: ignore[no-untyped-def]
    QS, ES, QPOWER, EPOWER, W, LW, ROWKEY, COLKEY, LOGZ, LOGS, GRAD, LARGEST, OUT, USAGE, B, C, D, rows, columns, span, log_draws,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PAIRS: tl.constexpr, KEYED: tl.constexpr, KIND: tl.constexpr,
    PULL: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """A tile of candidates against a span of the queries: sum_i g_i p_ij q_i, and how often each candidate was drawn."""
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
            t = tl.where(own[None, :] == each[:, None], float("-inf"), t)
        if KIND == 1:
            if COUNT:
                used += tl.sum(tl.exp2(t - (tl.load(LOGZ + row) - log_draws)[None, :]), 1)
            t += s
        if KIND == 2:
            own_random = tl.load(ROWKEY + rows + row)
            log_z = tl.load(LOGZ + row) - log_draws
            n = tl.floor(tl.exp2(t - log_z[None, :]) + _uniform(own_random[None, :], each_random[:, None]))
            if COUNT:
                used += tl.sum(n, 1)
        if PULL:
            log_s = tl.load(LOGS + row) - SHIFT
            g = tl.load(GRAD + row)
            if KIND == 2:
                p = tl.exp2(s - log_s[None, :]) * (n * g[None, :])
            else:
                p = tl.exp2(t - log_s[None, :]) * g[None, :]
            pulled = tl.dot(p.to(q.dtype), q, pulled, input_precision=PRECISION)
    at = (part * C + col).to(tl.int64)
    if PULL:
        pulled *= tl.load(LARGEST) * 0.6931471805599453 * tl.exp2(0.0 - SHIFT)
        tl.store(OUT + at[:, None] * D + d[None, :], pulled.to(OUT.dtype.element_ty), mask=(col[:, None] < C) & (d[None, :] < D))
    if COUNT:
        tl.store(USAGE + at, used, mask=col < C)
