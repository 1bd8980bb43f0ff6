"""Balanced hierarchical 2-means: clusters of equal size by repeated halving (used by NGAME and DEXA)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

GAIN = 1e-4  # least gain in mean cosine to the own centre for another step
STEPS = 100  # most steps: rounding could swap equal points forever
ASK = 4  # steps on a GPU between two checks for convergence
POINTS = {"cpu": 1 << 12, "cuda": 1 << 21}  # points held at once: on a CPU, small clusters stay in its cache


def balanced_2means(x: Tensor, n_clusters: int, generator: torch.Generator) -> Tensor:
    """(N,) int64: cluster of each point (N, D); 2^ceil(log2 n_clusters) clusters, their sizes at most 1 apart.

    All clusters are halved until there are enough. To halve a cluster, take two of its points as centres c_1, c_2.
    While the mean cosine to the own centre grows by at least 1e-4, order the points by x . c_2 - x . c_1, assign the
    first ceil(n / 2) to the first half and the rest to the second, and set the centres to the directions of the halves'
    means. A cluster of one point is left alone.

    Only the direction of a point counts; ties go by position. All clusters of a level are halved together, on a CPU in
    as many threads as PyTorch has. The result depends only on the points and the generator. Extra memory is at most one
    copy of the points.

        balanced_2means(vectors, len(vectors) // 8, torch.Generator().manual_seed(0))

    Dahiya et al., NGAME: Negative Mining-aware Mini-batching for Extreme Classification, WSDM 2023, section 3.
    """
    if x.dim() != 2 or not len(x):
        raise ValueError(f"points must be (N, D) with N >= 1, not {tuple(x.shape)}")
    if n_clusters < 1:
        raise ValueError(f"n_clusters must be at least 1, got {n_clusters}")
    scale = 1 / x.norm(dim=1).clamp(min=1e-12)
    groups = [torch.arange(len(x), device=x.device).unsqueeze(0)]  # of one level, by size: (clusters, size)
    for _ in range(math.ceil(math.log2(n_clusters))):
        halves: dict[int, list[Tensor]] = {}
        for points in groups:
            middle = -(-points.shape[1] // 2)
            ordered = torch.cat(list(_halved(x, scale, points, generator))) if points.shape[1] > 1 else points
            for half in (ordered[:, :middle], ordered[:, middle:]):
                if half.shape[1]:
                    halves.setdefault(half.shape[1], []).append(half)
        groups = [torch.cat(halves[size]) for size in sorted(halves, reverse=True)]
    labels = torch.empty(len(x), dtype=torch.long, device=x.device)
    first = 0
    for points in groups:
        labels[points] = torch.arange(first, first + len(points), device=x.device).unsqueeze(1)
        first += len(points)
    return labels


def _halved(x: Tensor, scale: Tensor, points: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """The points (clusters, n) of each cluster, first half first; several clusters at a time."""
    c, n = points.shape
    u = torch.rand(2, c, dtype=torch.float64, generator=generator, device=generator.device).to(x.device)
    one = (u[0] * n).long().clamp(max=n - 1)
    other = (one + 1 + (u[1] * (n - 1)).long().clamp(max=n - 2)) % n
    start = torch.stack([one, other], 1)
    at_once = max(1, POINTS.get(x.device.type, POINTS["cpu"]) // n)
    parts = list(zip(points.split(at_once), start.split(at_once), strict=True))

    def half(part: tuple[Tensor, Tensor]) -> Tensor:
        members, centres = part
        vectors = x.index_select(0, members.flatten()).mul_(scale[members.flatten()].unsqueeze(1))
        return members.gather(1, _order(vectors.view(*members.shape, -1), centres))

    if x.is_cuda or len(parts) == 1:
        yield from map(half, parts)
        return
    with _one_thread_each() as threads, ThreadPoolExecutor(threads) as pool:
        yield from pool.map(half, parts)


@contextmanager
def _one_thread_each() -> Iterator[int]:
    """PyTorch's number of threads; inside, each operation uses one, for a pool of that many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _order(x: Tensor, start: Tensor) -> Tensor:
    """(c, n): positions of unit points (c, n, D), each cluster's first half first."""
    c, n = x.shape[:2]
    half = -(-n // 2)
    centres = x[torch.arange(c, device=x.device).unsqueeze(1), start]
    second = _settled(x, centres, half) if x.is_cuda else _settled_by_moves(x, centres, half)
    return torch.cat([(~second).nonzero()[:, 1].view(c, half), second.nonzero()[:, 1].view(c, n - half)], 1)


def _settled(x: Tensor, centres: Tensor, half: int) -> Tensor:
    """(c, n) bool: the second half. Reads all points in every step, since a GPU would wait to count the moves."""
    whole, best = x.sum(1), x.new_full((len(x),), -math.inf)
    for step in range(STEPS):
        second = _upper(_products(x, centres[:, 1] - centres[:, 0]), half)
        upper = _sums(x, second)
        total = torch.stack([whole - upper, upper], 1)
        length = total.norm(dim=2)
        score = length.sum(1) / x.shape[1]
        centres = total / length.clamp(min=1e-12).unsqueeze(2)
        better, best = score - best >= GAIN, torch.maximum(best, score)
        if step % ASK == ASK - 1 and not bool(better.any()):
            break
    return second


def _sums(x: Tensor, some: Tensor) -> Tensor:
    """(c, D): sum of the points (c, n, D) of each cluster selected by `some` (c, n)."""
    if len(x) < 64:  # a product this small would leave most of a GPU idle
        return torch.where(some.unsqueeze(2), x, 0).sum(1)
    return torch.bmm(some.to(x.dtype).unsqueeze(1), x).squeeze(1)


def _settled_by_moves(x: Tensor, centres: Tensor, half: int) -> Tensor:
    """(c, n) bool: the second half. Reads only points that change sides, which are few after the first steps."""
    c, n, d = x.shape
    found = torch.zeros(c, n, dtype=torch.bool, device=x.device)
    second, going, best = found.clone(), torch.arange(c, device=x.device), x.new_full((c,), -math.inf)
    total = torch.stack([x.sum(1), torch.zeros_like(x[:, 0])], 1)  # sums of both halves
    for _ in range(STEPS):
        before, second = second, _upper(_products(x, centres[:, 1] - centres[:, 0]), half)
        found[going] = second
        row, at = torch.nonzero(before ^ second, as_tuple=True)
        sign = second[row, at].to(x.dtype) * 2 - 1
        begin = torch.searchsorted(row, torch.arange(len(x), device=x.device))
        moved = F.embedding_bag(row * n + at, x.view(-1, d), begin, mode="sum", per_sample_weights=sign)
        total[:, 0] -= moved
        total[:, 1] += moved
        length = total.norm(dim=2)
        score = length.sum(1) / n  # mean cosine to the own centre, which is the direction of the half's sum
        centres = total / length.clamp(min=1e-12).unsqueeze(2)
        better = score - best >= GAIN
        if not bool(better.any()):
            break
        best = score
        if int(better.sum()) < len(x) // 2:  # copying the unfinished clusters is cheaper than stepping all
            x, centres, best, going, second, total = (part[better] for part in (x, centres, best, going, second, total))
    return found


def _products(x: Tensor, w: Tensor) -> Tensor:
    """(c, n): inner products of points (c, n, D) with their cluster's vector (c, D)."""
    if len(x) == 1:
        return torch.mv(x[0], w[0]).unsqueeze(0)
    # On a CPU a batched product with single columns takes seven times as long (measured).
    return torch.bmm(x, w.unsqueeze(2)).squeeze(2) if x.is_cuda else (x * w.unsqueeze(1)).sum(2)


def _upper(along: Tensor, half: int) -> Tensor:
    """(c, n) bool: all but the `half` smallest values of each row; ties go by position."""
    limit = along.kthvalue(half, dim=1, keepdim=True).values
    equal, lower = along == limit, along < limit
    return ~(lower | (equal & (torch.cumsum(equal, 1) <= half - lower.sum(1, keepdim=True))))
