"""Fusion of ranked lists, against plain Python over dictionaries."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparring.core.list_fusion import Pool, query_weights, shares

NEVER = float("-inf")
QUERIES, ITEMS, DEPTH = 7, 30, 6


def made(seed: int, n: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Scores (S, B, N) of three sources, coarse enough to tie, and the n best items of each."""
    scores = torch.from_numpy(np.random.default_rng(seed).integers(0, 12, (3, QUERIES, ITEMS))).float()
    scores[2, 0] = 4.0  # a source that has one score for all
    lists = []
    for source in scores:
        order = sorted_items(source)[:, :n]
        lists.append((source.gather(1, order), order))
    lists[1][0][3, 4:], lists[1][1][3, 4:] = NEVER, -1  # a short list
    return scores, lists


def sorted_items(scores: torch.Tensor) -> torch.Tensor:
    return torch.tensor([sorted(range(len(row)), key=lambda i: (-row[i], i)) for row in scores.tolist()])


def fused_by_hand(
    scores: torch.Tensor, lists: list[tuple[torch.Tensor, torch.Tensor]], weights: list[float], row: int, by: str
) -> list[tuple[int, float]]:
    """(item, score) of all candidates of a query, best first."""
    listed = [[int(i) for i in items[row] if i >= 0] for _, items in lists]
    candidates = {item for items, weight in zip(listed, weights, strict=True) if weight for item in items}
    total = dict.fromkeys(candidates, 0.0)
    for source, items in enumerate(listed):
        own = [float(value) for value in lists[source][0][row, :DEPTH] if math.isfinite(value)]
        mean = sum(own) / len(own)
        spread = math.sqrt(sum((value - mean) ** 2 for value in own) / len(own))
        for item in candidates:
            if by == "ranks":
                value = 1 / (60 + items.index(item) + 1) if item in items else 0.0
            else:
                value = (float(scores[source, row, item]) - mean) / spread if spread else 0.0
            total[item] += weights[source] * value
    return sorted(total.items(), key=lambda pair: (-round(pair[1], 6), pair[0]))


@pytest.mark.parametrize("by", ["scores", "ranks"])
@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.0, 0.6, 0.4]])
def test_the_best_candidates_are_those_of_a_plain_sum(by: str, weights: list[float]) -> None:
    """Weighted sums over the candidates of sources with a weight, ties by id, -1 where none is left."""
    scores, lists = made(1, 8)
    score = (lambda source, items: scores[source].gather(1, items.clamp(min=0))) if by == "scores" else None
    found, items = Pool.of(lists, DEPTH, score).best(torch.tensor([weights] * QUERIES), 40)
    for row in range(QUERIES):
        expected = fused_by_hand(scores, lists, weights, row, by)
        n = len(expected)
        np.testing.assert_allclose(found[row, :n], [value for _, value in expected], atol=1e-5)
        assert sorted(items[row, :n].tolist()) == sorted(item for item, _ in expected)
        assert items[row, n:].tolist() == [-1] * (40 - n)


def test_an_item_that_a_source_does_not_know_is_as_good_as_its_last() -> None:
    """NaN counts as the lowest score of the list."""
    listed = (torch.tensor([[5.0, 3.0, 1.0]]), torch.tensor([[0, 1, 2]]))
    other = (torch.tensor([[9.0]]), torch.tensor([[7]]))

    def score(source: int, items: torch.Tensor) -> torch.Tensor:
        known = {0: {0: 5.0, 1: 3.0, 2: 1.0}, 1: dict.fromkeys((0, 1, 2, 7), 0.0)}[source]
        return torch.tensor([[known.get(item, math.nan) for item in row] for row in items.tolist()])

    pool = Pool.of([listed, other], 3, score)
    values = dict(zip(pool.items[0].tolist(), pool.scores[0, :, 0].tolist(), strict=True))  # type: ignore[index]
    assert values[7] == pytest.approx(values[2])
    assert values[2] == pytest.approx(-2 / math.sqrt(8 / 3))


def test_weights_go_to_the_sources_that_know_a_query() -> None:
    """Without such a source with a weight, all that know the query count alike; without any, all sources."""
    known = torch.tensor([[True, True, True], [False, True, True], [False, False, True], [False, False, False]])
    found = query_weights(torch.tensor([0.7, 0.3, 0.0]), known)
    assert torch.equal(found, torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.3, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]]))


def test_a_share_counts_the_items_among_the_own_best() -> None:
    """Of a list of k items, those that a source has in its own first k."""
    final = torch.tensor([[4, 2, 9], [1, -1, -1]])
    lists = [torch.tensor([[2, 9, 7, 4], [3, 1, 0, 5]]), torch.tensor([[8, 6, 4, 2], [7, 8, 9, 1]])]
    np.testing.assert_allclose(shares(final, lists), [[2 / 3, 1 / 3], [1.0, 0.0]])
