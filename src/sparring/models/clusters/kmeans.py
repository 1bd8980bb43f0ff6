"""k-means with k-means++ seeding."""

from __future__ import annotations

import torch
from torch import Tensor

SEEDED = 32  # points per centre used for seeding, which reads them k times


def k_means(points: Tensor, k: int, generator: torch.Generator, steps: int = 20) -> Tensor:
    """(k, D) centres of points (N, D) after Lloyd's iterations from k-means++ seeds; an empty cluster keeps its centre.

        centres = k_means(vectors, 300, torch.Generator().manual_seed(0));  codes = nearest(vectors, centres)

    Arthur and Vassilvitskii, k-means++: the advantages of careful seeding, SODA 2007.
    """
    if not 1 <= k <= len(points):
        raise ValueError(f"k must be between 1 and the {len(points):,} points, got {k}")
    seeds = points[torch.randperm(len(points), generator=generator)[: k * SEEDED].to(points.device)]
    return lloyd(points, plus_plus(seeds, k, generator), steps)


def lloyd(points: Tensor, centres: Tensor, steps: int) -> Tensor:
    """(k, D) centres after Lloyd's iterations from these; an empty cluster keeps its centre."""
    k = len(centres)
    for _ in range(steps):
        own = nearest(points, centres)
        total = torch.zeros_like(centres).index_add_(0, own, points)
        count = torch.zeros(k, dtype=points.dtype, device=points.device).index_add_(
            0, own, torch.ones_like(points[:, 0])
        )
        centres = torch.where(count.unsqueeze(1) > 0, total / count.clamp(min=1).unsqueeze(1), centres)
    return centres


def plus_plus(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """(k, D) of the points, each drawn in proportion to its squared distance from those already drawn.

    Seeds repeat if there are fewer than k distinct points.
    """
    chosen = torch.empty(k, points.shape[1], dtype=points.dtype, device=points.device)
    draws = torch.rand(k, generator=generator, dtype=torch.float64).to(points.device)
    square = points.square().sum(1)
    far = torch.ones_like(square)
    for at in range(k):
        cdf = far.double().cumsum(0)
        row = torch.searchsorted(cdf, draws[at] * cdf[-1], right=True).clamp(max=len(points) - 1)
        chosen[at] = points[row]
        # rounding leaves a point at a small distance from itself, which would be drawn again where all others are as
        # near
        distance = (square - 2 * (points @ chosen[at]) + square[row]).clamp(min=0)
        distance = torch.where(distance > 1e-6 * (square + square[row]), distance, 0)
        far = distance if at == 0 else torch.minimum(far, distance)
    return chosen


def nearest(points: Tensor, centres: Tensor, alive: Tensor | None = None, block: int = 1 << 14) -> Tensor:
    """(N,) int64: the nearest centre of each point among those alive; ties go to the first."""
    half = centres.square().sum(1) / 2
    if alive is not None:
        half = half.masked_fill(~alive, torch.inf)
    return torch.cat([torch.addmm(half, part, centres.T, alpha=-1).argmin(1) for part in points.split(block)])
