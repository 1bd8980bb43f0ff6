"""Draws by cluster in Triton: one program per query, from the cluster of its positive to the drawn ids.

In PyTorch these are dozens of small launches over a few thousand numbers. Random numbers come from the counter (seed,
row of the batch, number of the draw), so all ranks with the same seed draw the same. negatives/clusters.py defines the
draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _distinct(seed, counter, size, m, slot):  # type: ignore[no-untyped-def]
    """m integers below size in the first m slots, uniform without replacement; with replacement if size < m."""
    enough = size >= m
    last = tl.maximum(tl.where(enough, size - m + slot, size - 1), 0)
    pick = tl.umulhi(tl.randint(seed, counter + slot), (last + 1).to(tl.uint32)).to(tl.int64)
    # Floyd's algorithm: the k-th draw is below size - m + k + 1; a duplicate is replaced by the last of that range
    for k in range(1, m):
        drawn = tl.sum(tl.where(slot == k, pick, 0), 0)
        before = tl.sum(((pick == drawn) & (slot < k)).to(tl.int32), 0) > 0
        pick = tl.where((slot == k) & before & enough, last, pick)
    return pick


@triton.jit
def _give(IDS, REAL, LW, CELLS, CELL, ORDER, to, at, inside):  # type: ignore[no-untyped-def]
    """Write the items at these places of the sorted catalogue; -1 if there is none."""
    item = tl.load(ORDER + at, mask=inside & (at >= 0), other=-1)
    tl.store(IDS + to, item, mask=inside)
    tl.store(REAL + to, tl.maximum(item, 0), mask=inside)
    tl.store(LW + to, tl.where(item >= 0, 0.0, float("-inf")), mask=inside)
    tl.store(CELLS + to, tl.load(CELL + tl.maximum(item, 0), mask=inside & (item >= 0), other=-1), mask=inside)


@triton.jit
def _others(  # type: ignore[no-untyped-def]
    ITEM, CELL, ORDER, START, CHANCE, SEED, IDS, REAL, LW, CELLS, OWN, CLUSTERS, B, K, k_secondary, m_c, m_o,
    KP: tl.constexpr, MP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cell = tl.load(CELL + tl.load(ITEM + row))
    own = cell // k_secondary
    tl.store(OWN + row, cell)
    tl.store(OWN + B + row, own)
    k = tl.arange(0, KP)
    slot = tl.arange(0, MP)
    chance = tl.load(CHANCE + own * K + k, mask=k < K, other=0.0)
    # exponential clocks: the first m_c to ring are drawn without replacement in proportion to their rates
    clock = -tl.log(tl.maximum(tl.rand(tl.load(SEED), row * KP + k), 1e-30))
    time = tl.where(chance > 0, clock / chance, float("inf"))
    for c in range(m_c):
        some = tl.min(time, 0) < float("inf")
        first = tl.argmin(time, 0)
        time = tl.where(k == first, float("inf"), time)
        begin = tl.load(START + first)
        size = tl.load(START + first + 1) - begin
        at = begin + _distinct(tl.load(SEED + 1), (row * m_c + c) * MP, size, m_o, slot)
        _give(IDS, REAL, LW, CELLS, CELL, ORDER, (row * m_c + c) * m_o + slot, tl.where(some, at, -1), slot < m_o)
        tl.store(CLUSTERS + row * m_c + c, tl.where(some, first, -1))


@triton.jit
def _same(  # type: ignore[no-untyped-def]
    ITEM, CELL, ORDER, POOL, SEED, IDS, REAL, LW, CELLS, OWN, B, k_secondary, m, MP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cell = tl.load(CELL + tl.load(ITEM + row))
    tl.store(OWN + row, cell)
    tl.store(OWN + B + row, cell // k_secondary)
    slot = tl.arange(0, MP)
    size = tl.load(POOL + 4 * cell + 1)
    at = tl.load(POOL + 4 * cell) + _distinct(tl.load(SEED), row * MP, size, m, slot)
    at += tl.where(at >= tl.load(POOL + 4 * cell + 2), tl.load(POOL + 4 * cell + 3), 0)
    _give(IDS, REAL, LW, CELLS, CELL, ORDER, row * m + slot, tl.where(size > 0, at, -1), slot < m)


# ids (B, C), ids with 0 for -1, log_w, cells, and (2, B) the cell and the primary cluster of each positive
DrawTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _room(items: Tensor, c: int) -> DrawTensors:
    b = len(items)
    ids, real, cells = torch.empty(3, b, c, dtype=torch.int64, device=items.device)
    return (
        ids,
        real,
        torch.empty(b, c, device=items.device),
        cells,
        torch.empty(2, b, dtype=torch.int64, device=items.device),
    )


def others(
    items: Tensor,
    cell: Tensor,
    order: Tensor,
    start: Tensor,
    chance: Tensor,
    k_secondary: int,
    m_c: int,
    m_o: int,
    seed: Tensor,
) -> tuple[DrawTensors, Tensor]:
    """m_o items of each of m_c clusters for positives (B,), and the clusters (B, m_c), drawn by `chance`.

    seed (2,) is on the device. An id is -1 where there was nothing to draw; to be encoded it is 0, and it weighs -inf.
    """
    room, clusters = _room(items, m_c * m_o), torch.empty(len(items), m_c, dtype=torch.int64, device=items.device)
    if len(items):
        sizes = triton.next_power_of_2(len(chance)), triton.next_power_of_2(m_o)
        _others[(len(items),)](
            items.contiguous(), cell, order, start, chance, seed, *room, clusters, len(items), len(chance),
            k_secondary, m_c, m_o, *sizes,
            num_warps=max(1, min(8, sizes[0] // 256)),
        )  # fmt: skip
    return room, clusters


def same(
    items: Tensor, cell: Tensor, order: Tensor, pool: Tensor, k_secondary: int, m: int, seed: Tensor
) -> DrawTensors:
    """m items for positives (B,), from the range of the sorted catalogue in `pool` of its cell; seed (1,)."""
    room = _room(items, m)
    if len(items):
        _same[(len(items),)](
            items.contiguous(),
            cell,
            order,
            pool,
            seed,
            *room,
            len(items),
            k_secondary,
            m,
            triton.next_power_of_2(m),
            num_warps=1,
        )
    return room
