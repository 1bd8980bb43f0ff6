"""Balanced 2-means: the same halves as a loop that halves one cluster after another by its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparring.models.clusters import balanced
from sparring.models.clusters.balanced import balanced_2means


def cloud(n: int, d: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def halve(x: np.ndarray, one: int, other: int) -> tuple[list[int], list[int]]:
    """Indices of the two halves of unit vectors, from these two centres, in float64 and point by point."""
    centres = [x[one], x[other]]
    best = -math.inf
    while True:
        along = [float(v @ centres[1] - v @ centres[0]) for v in x]
        order = sorted(range(len(x)), key=lambda i: along[i])
        half = math.ceil(len(x) / 2)
        sides = sorted(order[:half]), sorted(order[half:])
        means = [x[side].mean(0) for side in sides]
        centres = [mean / max(np.linalg.norm(mean), 1e-12) for mean in means]
        score = sum(float(x[i] @ centre) for side, centre in zip(sides, centres, strict=True) for i in side) / len(x)
        if score - best < 1e-4:
            return sides
        best = score


def in_a_loop(x: torch.Tensor, n_clusters: int, generator: torch.Generator) -> set[frozenset[int]]:
    """Halve clusters one after another, larger ones first within a level, then in order."""
    unit = (x / x.norm(dim=1, keepdim=True)).double().numpy()
    level = [list(range(len(x)))]
    for _ in range(math.ceil(math.log2(n_clusters))):
        halves: list[tuple[int, list[int]]] = []
        for size in sorted({len(c) for c in level}, reverse=True):
            same = [c for c in level if len(c) == size]
            if size == 1:
                halves += [(0, c) for c in same]
                continue
            u = torch.rand(2, len(same), dtype=torch.float64, generator=generator)
            split = []
            for at, points in enumerate(same):
                one = int(u[0, at] * size)
                other = (one + 1 + int(u[1, at] * (size - 1))) % size
                split.append([[points[i] for i in side] for side in halve(unit[points], one, other)])
            halves += [(0, pair[0]) for pair in split] + [(0, pair[1]) for pair in split]
        level = [
            points
            for size in sorted({len(p) for _, p in halves}, reverse=True)
            for _, points in halves
            if len(points) == size
        ]
    return {frozenset(c) for c in level}


def sets(labels: torch.Tensor) -> set[frozenset[int]]:
    return {frozenset(torch.nonzero(labels == c).flatten().tolist()) for c in labels.unique()}


@pytest.mark.parametrize(("n", "k"), [(2, 2), (3, 2), (7, 4), (32, 8), (45, 8), (61, 16), (50, 3)])
def test_the_clusters_are_those_of_a_loop(n: int, k: int) -> None:
    """Halving all clusters at once or one by one gives the same clusters from the same draws."""
    for seed in range(3):
        x = cloud(n, seed=seed)
        found = balanced_2means(x, k, torch.Generator().manual_seed(seed))
        assert sets(found) == in_a_loop(x, k, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 17, 64, 100, 1000])
@pytest.mark.parametrize("k", [1, 2, 3, 8, 20])
def test_every_point_is_in_one_of_equal_clusters(n: int, k: int) -> None:
    """2^ceil(log2 k) clusters, numbered from 0, whose sizes differ by at most 1; with fewer points, one each."""
    labels = balanced_2means(cloud(n), k, torch.Generator().manual_seed(1))
    sizes = torch.bincount(labels)
    wanted = min(n, 2 ** math.ceil(math.log2(k)))
    assert len(sizes) == wanted
    assert int(sizes.max() - sizes.min()) <= 1
    assert int(sizes.sum()) == n


def test_the_same_generator_gives_the_same_clusters_however_many_points_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result is deterministic and independent of the chunk size."""
    x = cloud(500)
    first = balanced_2means(x, 64, torch.Generator().manual_seed(3))
    assert torch.equal(first, balanced_2means(x, 64, torch.Generator().manual_seed(3)))
    assert not torch.equal(first, balanced_2means(x, 64, torch.Generator().manual_seed(4)))
    monkeypatch.setitem(balanced.POINTS, "cpu", 16)
    assert torch.equal(first, balanced_2means(x, 64, torch.Generator().manual_seed(3)))


def test_only_directions_count() -> None:
    """Scaling a point by two changes nothing."""
    x = cloud(64)
    scale = 2.0 ** torch.arange(64).remainder(5).unsqueeze(1)
    found = [balanced_2means(points, 8, torch.Generator().manual_seed(0)) for points in (x, x * scale)]
    assert torch.equal(*found)


def test_separate_groups_are_found() -> None:
    """Eight distant groups of 16 points are the eight clusters from most starts."""
    centres = 10 * torch.eye(8)
    truth = torch.arange(8).repeat_interleave(16)
    x = centres[truth] + 0.1 * cloud(128, 8)
    found = [sets(balanced_2means(x, 8, torch.Generator().manual_seed(seed))) == sets(truth) for seed in range(20)]
    assert sum(found) >= 10


def test_equal_points_and_zeros_are_split_too() -> None:
    """Identical points still give equal halves."""
    for x in (torch.ones(10, 3), torch.zeros(10, 3)):
        assert torch.bincount(balanced_2means(x, 4, torch.Generator().manual_seed(0))).tolist() == [3, 3, 2, 2]


def test_nonsense_is_refused() -> None:
    """No points and no clusters raise errors."""
    with pytest.raises(ValueError, match="N >= 1"):
        balanced_2means(torch.zeros(0, 3), 2, torch.Generator())
    with pytest.raises(ValueError, match="at least 1"):
        balanced_2means(torch.zeros(4, 3), 0, torch.Generator())


def test_threads_change_nothing() -> None:
    """One thread and three give the same clusters, and PyTorch's number of threads is restored."""
    x = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(0))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(balanced_2means(x, 512, torch.Generator().manual_seed(1)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
