"""BM25 lists equal the formula, with seen items, ties and empty texts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.evaluation.bm25 import bm25

pytest.importorskip("bm25s")
ITEMS = ["red shoes red", "blue shoes", "green hat", "", "red hat and blue hat", "shoes blue"]
QUERIES = ["Red hat", "shoes", "", "unknown", "blue blue shoes"]


def score(query: str, item: str, k1: float = 1.5, b: float = 0.75) -> float:
    """Compute the formula in a loop; a repeated query word counts once per repetition."""
    words = [text.lower().split() for text in ITEMS]
    mean = sum(map(len, words)) / len(words)
    total = 0.0
    for word in query.lower().split():
        f, n = item.split().count(word), sum(word in each for each in words)
        idf = math.log(1 + (len(words) - n + 0.5) / (n + 0.5))
        total += idf * f / (f + k1 * (1 - b + b * len(item.split()) / mean))
    return total


def expected(query: str, k: int, left_out: set[int]) -> tuple[list[int], list[float]]:
    every = sorted((-score(query, item), i) for i, item in enumerate(ITEMS) if i not in left_out)
    found = [(i, -value) for value, i in every if value < 0][:k]
    return [i for i, _ in found] + [-1] * (k - len(found)), [value for _, value in found] + [0.0] * (k - len(found))


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("block", [1, 1 << 24])
def test_lists_follow_the_formula(k: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, order, tie-breaking by id and empty places follow the formula for every query batch size."""
    monkeypatch.setattr("sparring.evaluation.bm25._BLOCK", block)
    lists, scores = bm25(ITEMS, QUERIES, k, stopwords=None)
    for row, query in enumerate(QUERIES):
        ids, values = expected(query, k, set())
        assert lists[row].tolist() == ids
        np.testing.assert_allclose(scores[row], values, rtol=1e-5)


def test_seen_items_are_left_out() -> None:
    """A list leaves out the items its query has seen, matched by query id."""
    seen = Positives(torch.tensor([0, 0, 2, 2, 3]), torch.tensor([1, 4, 0]))
    lists, _ = bm25(ITEMS, ["red hat", "shoes"], 4, seen, np.array([3, 1]), stopwords=None)
    assert lists[0].tolist() == expected("red hat", 4, {0})[0]
    assert lists[1].tolist() == expected("shoes", 4, {1, 4})[0]


def test_what_cannot_be_ranked_is_refused() -> None:
    """A cutoff larger than the catalogue and items without any word raise one-line errors."""
    with pytest.raises(UserError, match="between 1 and the 6 items"):
        bm25(ITEMS, QUERIES, 7)
    with pytest.raises(UserError, match="no item has a word"):
        bm25(["", "the"], QUERIES, 1)
