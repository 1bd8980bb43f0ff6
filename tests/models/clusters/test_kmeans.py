"""k-means and the nearest centre."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from sparring.models.clusters.kmeans import k_means, lloyd, nearest, plus_plus


def test_nearest_is_the_argmin_of_a_loop() -> None:
    """Each point gets its nearest live centre, over several blocks."""
    generator = torch.Generator().manual_seed(0)
    points, centres = (torch.randn(n, 6, generator=generator) for n in (50, 9))
    alive = torch.tensor([True, False, True, True, False, True, True, True, True])
    plain, limited = nearest(points, centres, block=7), nearest(points, centres, alive)
    for i in range(50):
        distances = [float((points[i] - centres[k]).square().sum()) for k in range(9)]
        assert int(plain[i]) == int(np.argmin(distances))
        assert int(limited[i]) == int(np.argmin([d if alive[k] else np.inf for k, d in enumerate(distances)]))
    assert len(set(plain.tolist()) - set(limited.tolist())) > 0


def test_k_means_ends_where_each_centre_is_the_mean_of_its_points() -> None:
    """On separate clouds the centres are the means of the clouds, each found once."""
    rng = np.random.default_rng(1)
    truth = 20 * rng.normal(size=(8, 5))
    points = np.repeat(truth, 40, axis=0) + rng.normal(size=(320, 5)) * 0.1
    centres = k_means(torch.from_numpy(points), 8, torch.Generator().manual_seed(2)).numpy()
    for cloud in range(8):
        mean = points[40 * cloud : 40 * cloud + 40].mean(0)
        assert np.abs(centres - mean).sum(1).min() < 1e-9


def test_the_start_draws_by_squared_distance() -> None:
    """The second seed is drawn in proportion to the squared distance from the first (chi-square, 4,000 starts)."""
    points = torch.tensor([[0.0], [1.0], [2.0], [4.0]], dtype=torch.float64)
    expected, counts = np.zeros((4, 4)), np.zeros((4, 4))
    for a in range(4):
        weight = [float((points[a] - points[b]).square()) for b in range(4)]
        expected[a] = 0.25 * np.array(weight) / sum(weight)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4000):
        first, second = plus_plus(points, 2, generator)
        counts[points.flatten().tolist().index(float(first)), points.flatten().tolist().index(float(second))] += 1
    shown = expected > 0
    assert counts[~shown].sum() == 0
    assert stats.chisquare(counts[shown], 4000 * expected[shown]).pvalue > 1e-4


def test_fewer_distinct_points_than_centres() -> None:
    """Repeated points give repeated centres, all of them points."""
    points = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).repeat(10, 1)
    centres = k_means(points, 5, torch.Generator().manual_seed(0))
    assert {tuple(row) for row in centres.tolist()} == {(1.0, 0.0), (0.0, 3.0)}
    with pytest.raises(ValueError, match="got 21"):
        k_means(points, 21, torch.Generator())


def test_lloyd_moves_centres_to_the_means_of_their_clumps() -> None:
    """Started in one point of each of five separate clumps, the centres become the clumps' means, in order."""
    clump = torch.arange(200) % 5
    points = 100.0 * torch.eye(5)[clump] + torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    means = torch.stack([points[clump == z].mean(0) for z in range(5)])
    torch.testing.assert_close(lloyd(points, points[:5], steps=3), means, rtol=1e-4, atol=1e-4)
