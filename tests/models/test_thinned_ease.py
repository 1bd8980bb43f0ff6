"""The thinned closed form beside towers: EASE with few weights per item by brute force, its rank and its files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.data.histories import Histories
from sparring.models import item_to_item
from sparring.models.histories import HistoryTower
from sparring.models.retriever import Retriever
from sparring.models.thinned_ease import thinned_ease
from sparring.models.towers import IdTower

QUERIES, ITEMS = 90, 14
KEPT = 3  # weights per item
LAM = 2.0


def pairs(seed: int = 0) -> tuple[np.ndarray, Positives]:
    """A random matrix of zeros and ones, two kinds of queries apart, and its pairs; no query has the last item."""
    random = np.random.default_rng(seed)
    chance = np.where((np.arange(QUERIES)[:, None] % 2) == (np.arange(ITEMS) % 2), 0.5, 0.1)
    matrix = (random.random((QUERIES, ITEMS)) < chance).astype(np.float64)
    matrix[:, -1] = 0.0
    matrix[1:, 0] = np.maximum(matrix[1:, 0], matrix[1:, 2] * (random.random(QUERIES - 1) < 0.8))
    rows, columns = np.nonzero(matrix)
    start = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=QUERIES))])
    return matrix, Positives(torch.from_numpy(start), torch.from_numpy(columns).int())


def kept_cells(inverse: np.ndarray) -> set[tuple[int, int]]:
    """The cells off the diagonal that are among the KEPT largest of their row or of their column."""
    cells = set()
    for item in range(ITEMS):
        others = sorted((i for i in range(ITEMS) if i != item), key=lambda i: -abs(inverse[i, item]))
        for other in others[:KEPT]:
            cells |= {(other, item), (item, other)}
    return cells


def inverse_of(matrix: np.ndarray) -> np.ndarray:
    return np.linalg.inv(matrix.T @ matrix + LAM * np.eye(ITEMS))


def test_with_all_directions_it_scores_as_ease_with_few_weights() -> None:
    """Scores of all items are those of EASE with the kept cells, up to a factor per query; its column's largest
    weights are among them."""
    matrix, known = pairs()
    inverse = inverse_of(matrix)
    weights = np.zeros((ITEMS, ITEMS))
    for i, j in kept_cells(inverse):
        weights[i, j] = -inverse[i, j] / inverse[j, j]
    assert (np.count_nonzero(weights[:-1, :-1], axis=0) >= KEPT).all()
    assert np.count_nonzero(weights) < ITEMS * (ITEMS - 1) / 2
    form = thinned_ease(known, ITEMS, ITEMS, LAM, KEPT)
    tower = HistoryTower(IdTower(ITEMS, 4), Histories(known.start, known.items), last=50)
    model = Retriever(tower, IdTower(ITEMS, 4)).with_closed_form(form)
    queries = torch.from_numpy(np.flatnonzero(matrix.sum(1)))
    q, items = model.query_vectors(queries)[:, 4:].double(), model.item_vectors()[:, 4:].double()
    for row, query in enumerate(queries.tolist()):
        ours, ease = (q[row] @ items.T).numpy(), matrix[query] @ weights
        np.testing.assert_allclose(ours / np.abs(ours).max(), ease / np.abs(ease).max(), atol=1e-5)


def test_few_directions_are_those_with_the_largest_eigenvalues() -> None:
    """Positive or negative; the products of items and directions are the best approximation of the correlations."""
    matrix, known = pairs(1)
    inverse = inverse_of(matrix)
    correlations = np.zeros((ITEMS, ITEMS))
    for i, j in kept_cells(inverse):
        correlations[i, j] = -inverse[i, j] / np.sqrt(inverse[i, i] * inverse[j, j])
    values, vectors = np.linalg.eigh(correlations)
    order = np.argsort(-np.abs(values))[:5]
    assert (values[order] < 0).any()
    form = thinned_ease(known, ITEMS, 5, LAM, KEPT)
    np.testing.assert_allclose(form.gains.numpy(), values[order], atol=1e-5)
    scale = np.sqrt(np.diag(inverse))
    expected = (vectors[:, order] * values[order]) @ vectors[:, order].T * scale[:, None] / scale
    found = (form.directions * form.gains) @ form.items(torch.arange(ITEMS)).T
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_a_weight_scales_items_alone() -> None:
    _, known = pairs()
    form, ids = thinned_ease(known, ITEMS, 5, LAM, KEPT), torch.arange(ITEMS)
    other = form.times(0.25)
    torch.testing.assert_close(other.items(ids), 0.25 * form.items(ids))
    asked = torch.tensor([1, 2]), torch.tensor([0, 0]), 1
    assert torch.equal(other.queries(*asked), form.queries(*asked))
    assert other.directions is form.directions


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, known = pairs()
    whole = thinned_ease(known, ITEMS, 5, LAM, KEPT)
    monkeypatch.setattr("sparring.models.thinned_ease._ROWS", 4)
    assert torch.equal(thinned_ease(known, ITEMS, 5, LAM, KEPT).directions, whole.directions)


def test_a_catalogue_whose_square_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, known = pairs()
    monkeypatch.setattr(item_to_item, "available_bytes", lambda: 24 * ITEMS**2 - 1)
    with pytest.raises(UserError, match=f"{ITEMS - 1} items"):
        thinned_ease(known, ITEMS, 5)
