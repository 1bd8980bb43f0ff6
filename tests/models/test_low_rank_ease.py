"""The closed form beside towers: EASE by brute force, vectors with its dimensions, and queries by id and by history."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparring.core.types import Positives
from sparring.data.histories import Histories
from sparring.models.histories import HistoryTower
from sparring.models.low_rank_ease import Decomposition, LowRankEase, decompose
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower

QUERIES, ITEMS = 60, 12


def pairs(seed: int = 0) -> tuple[np.ndarray, Positives]:
    """A random matrix of zeros and ones, two kinds of queries apart, and its pairs; query 0 has none."""
    random = np.random.default_rng(seed)
    chance = np.where((np.arange(QUERIES)[:, None] % 2) == (np.arange(ITEMS) % 2), 0.5, 0.1)
    matrix = (random.random((QUERIES, ITEMS)) < chance).astype(np.float64)
    matrix[0] = 0.0
    rows, columns = np.nonzero(matrix)
    start = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=QUERIES))])
    return matrix, Positives(torch.from_numpy(start), torch.from_numpy(columns).int())


def model_of(known: Positives, bias: bool = True) -> Retriever:
    tower = HistoryTower(IdTower(ITEMS, 4), Histories(known.start, known.items), last=50)
    return Retriever(tower, IdTower(ITEMS, 4), item_bias=IdTower(ITEMS, 1) if bias else None)


@pytest.mark.parametrize("lam", [0.5, 4.0])
def test_with_all_directions_it_ranks_as_ease(lam: float) -> None:
    """Scores of items that a query has not taken are those of EASE on the scaled matrix, up to a factor per query."""
    matrix, known = pairs()
    scaled = matrix / np.sqrt(np.maximum(matrix.sum(1, keepdims=True), 1))
    gram = scaled.T @ scaled
    strength = lam * np.trace(gram) / ITEMS  # lam times the mean square of the singular values
    inverse = np.linalg.inv(gram + strength * np.eye(ITEMS))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0.0)
    form = decompose(known, ITEMS, ITEMS).ease(lam, 1.0)
    queries = torch.arange(1, QUERIES)
    model = model_of(known, bias=False).with_closed_form(form)
    q, items = model.query_vectors(queries)[:, 4:].double(), model.item_vectors()[:, 4:].double()
    for row, query in enumerate(queries.tolist()):
        new = matrix[query] == 0
        ours, ease = (q[row] @ items.T).numpy()[new], (matrix[query] @ weights)[new]
        np.testing.assert_allclose(ours / np.abs(ours).max(), ease / np.abs(ease).max(), atol=2e-4)


def test_dimensions_are_towers_then_closed_form_then_bias() -> None:
    """The score is the sum of the three; a query without items has no closed form."""
    _, known = pairs()
    model, form = model_of(known), decompose(known, ITEMS, 5).ease(2.0, 0.7)
    both = model.with_closed_form(form)
    assert (model.dim, both.dim, both.width) == (5, 10, 4)
    ids = torch.tensor([3, 0, 7])
    q, items = both.query_vectors(ids), both.item_vectors()
    alone, plain = model.query_vectors(ids), model.item_vectors()
    torch.testing.assert_close(q[:, :4], alone[:, :4])
    torch.testing.assert_close(items[:, :4], plain[:, :4])
    assert (q[:, -1] == 1).all()
    torch.testing.assert_close(items[:, -1], plain[:, -1])
    assert not q[1, 4:9].any()
    for row, query in ((0, 3), (2, 7)):
        taken = known.items[known.start[query] : known.start[query + 1]].long()
        summed = (form.directions[taken] * form.gains).sum(0)
        torch.testing.assert_close(q[row, 4:9], summed / summed.norm())
    torch.testing.assert_close(items[:, 4:9], form.directions * form.outputs[:, None])
    torch.testing.assert_close(q @ items.T, alone @ plain.T + q[:, 4:9] @ items[:, 4:9].T)


def test_a_history_is_encoded_like_the_query_that_has_it() -> None:
    """Also with padding, in any shape of ids, and cut to the last items that the tower reads."""
    _, known = pairs()
    model = model_of(known).with_closed_form(decompose(known, ITEMS, 5).ease(1.0, 1.0))
    assert isinstance(model.query, HistoryTower)
    for last in (50, 2):
        model.query.last = last
        longest = int(known.start.diff().max())
        padded = torch.full((QUERIES, longest + 2), -1)
        for query in range(QUERIES):
            own = known.items[known.start[query] : known.start[query + 1]]
            padded[query, len(padded[0]) - len(own) :] = own.long()
        with torch.no_grad():
            by_history = model.encode_histories(padded)
            by_id = model.encode_queries(torch.arange(QUERIES))
            shaped = model.encode_queries(torch.arange(QUERIES).reshape(6, 10))
        torch.testing.assert_close(by_history, by_id)
        torch.testing.assert_close(shaped.reshape(QUERIES, -1), by_id)


def test_the_largest_directions_are_those_of_an_svd() -> None:
    matrix, known = pairs(3)
    scaled = matrix / np.sqrt(np.maximum(matrix.sum(1, keepdims=True), 1))
    _, values, turned = np.linalg.svd(scaled)
    found = decompose(known, ITEMS, 4)
    np.testing.assert_allclose(np.sort(found.squares.numpy())[::-1], values[:4] ** 2, rtol=1e-4)
    expected = turned[:4].T @ turned[:4]
    np.testing.assert_allclose((found.directions @ found.directions.T).numpy(), expected, atol=1e-3)


def test_a_tower_without_histories_is_refused() -> None:
    model = Retriever(IdTower(QUERIES, 4), IdTower(ITEMS, 4))
    with pytest.raises(ValueError, match="reads histories, and the query tower IdTower has none"):
        model.with_closed_form(LowRankEase.empty(ITEMS, 3))


def test_no_singular_value_is_no_error() -> None:
    """A decomposition of nothing scores nothing."""
    form = Decomposition(torch.zeros(ITEMS, 3), torch.zeros(3)).ease(1.0, 1.0)
    assert torch.isfinite(form.items(torch.arange(ITEMS))).all()
    assert not form.queries(torch.tensor([1, 2]), torch.tensor([0, 0]), 1).any()
