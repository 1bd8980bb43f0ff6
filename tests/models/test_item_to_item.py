"""EASE and item kNN against explicit regressions and loops; sums of rows against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparring.core import memory_usage
from sparring.core.errors import UserError
from sparring.data.histories import Histories
from sparring.data.interactions import Split
from sparring.models import item_to_item as module
from sparring.models.item_to_item import Ease, ItemKnn, ItemSums, check_square, co_counts, item_to_item, square_fits
from sparring.recipes.settings import build


def dense(parts: Split) -> np.ndarray:
    """(U, N) 1 for every training pair."""
    matrix = np.zeros((parts.train.n_queries, parts.train.n_items))
    matrix[parts.train.queries, parts.train.items] = 1
    return matrix


def solved(name: str, parts: Split, **arguments: object) -> tuple[ItemSums, float]:
    """The query tower of a recipe after its only sweep, and the loss."""
    run = build(name, parts.train, arguments)
    assert run.solver is not None
    with torch.no_grad():
        (loss,) = run.solver.sweeps(run.model, parts.train)
    assert isinstance(run.model.query, ItemSums)
    return run.model.query, loss


@pytest.mark.parametrize("lam", [3.0, 300.0])
def test_ease_is_the_ridge_regression_of_each_item_on_the_others(lam: float, parts: Split) -> None:
    """Each column solves its own normal equations without the item itself; the loss is the objective per pair."""
    x = dense(parts)
    n = x.shape[1]
    expected = np.zeros((n, n))
    for j in range(n):
        others = [i for i in range(n) if i != j]
        left = x[:, others].T @ x[:, others] + lam * np.eye(n - 1)
        expected[others, j] = np.linalg.solve(left, x[:, others].T @ x[:, j])
    tower, loss = solved("ease", parts, lam=lam)
    np.testing.assert_allclose(tower.weight.detach().numpy(), expected, rtol=1e-5, atol=1e-7)
    objective = ((x - x @ expected) ** 2).sum() + lam * (expected**2).sum()
    assert loss == pytest.approx(objective / len(parts.train), rel=1e-9)


@pytest.mark.parametrize(("neighbours", "shrink"), [(5, 0.0), (5, 10.0), (200, 2.5)])
def test_item_knn_is_a_double_loop_over_items(neighbours: int, shrink: float, parts: Split) -> None:
    """Cosines with shrinkage, each item's largest by (similarity, id); an item is not its own neighbour."""
    x = dense(parts)
    n = x.shape[1]
    expected = np.zeros((n, n), dtype=np.float32)
    for i in range(n):
        similar = {}
        for j in range(n):
            both, norms = float((x[:, i] * x[:, j]).sum()), math.sqrt(x[:, i].sum() * x[:, j].sum())
            if i != j and both:
                similar[j] = np.float32(both / (norms + shrink))
        for j in sorted(similar, key=lambda j: (-similar[j], j))[:neighbours]:
            expected[i, j] = similar[j]
    tower, loss = solved("item_knn", parts, neighbours=neighbours, shrink=shrink)
    assert tower.neighbours is not None
    assert tower.weight.shape == (n, min(neighbours, n - 1))
    found = np.zeros((n, n), dtype=np.float32)
    for i in range(n):
        for j, value in zip(tower.neighbours[i].tolist(), tower.weight[i].tolist(), strict=True):
            found[i, j] += value
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert loss == pytest.approx(1 - expected.sum() / tower.weight.numel(), rel=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_query_is_the_sum_of_its_items_rows(sparse: bool, parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """For training queries of any shape and for histories with repeats and padding; an empty history scores 0."""
    monkeypatch.setattr(module, "_EXPANDED", 20)
    tower, _ = solved("item_knn", parts, neighbours=7) if sparse else solved("ease", parts)
    n = parts.train.n_items
    matrix = np.zeros((n, n))
    for i in range(n):
        columns = range(n) if tower.neighbours is None else tower.neighbours[i].tolist()
        for j, value in zip(columns, tower.weight[i].tolist(), strict=True):
            matrix[i, j] += value
    with torch.no_grad():
        queries = torch.tensor([[5, 0, 59], [5, 17, 3]])
        np.testing.assert_allclose(tower(queries).numpy(), (dense(parts) @ matrix)[queries.numpy()], atol=1e-6)
        found = tower.encode_history(torch.tensor([[-1, 3, 9, 3], [-1, -1, -1, -1], [8, 2, 1, 0]]))
    expected = [matrix[3] + matrix[9], np.zeros(n), matrix[[8, 2, 1, 0]].sum(0)]
    np.testing.assert_allclose(found.numpy(), np.stack(expected), atol=1e-6)


@pytest.mark.parametrize("cells", [1 << 24, 90, 1])
def test_blocks_change_no_count(cells: int, parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of pairs of items equal X^T X, however few are held at once."""
    monkeypatch.setattr(module, "_CELLS", cells)
    x = dense(parts)
    blocks = list(co_counts(parts.train.positives(), parts.train.n_items))
    assert [low for low, _ in blocks] == list(np.cumsum([0, *(len(counts) for _, counts in blocks[:-1])]))
    np.testing.assert_array_equal(torch.cat([counts for _, counts in blocks]).numpy(), x.T @ x)


def test_a_catalogue_whose_square_does_not_fit_is_refused(parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before memory is taken; the line names the largest catalogue that would fit, and that one is accepted."""
    monkeypatch.setattr(module, "available_bytes", lambda: 24 * 39**2 + 23)
    monkeypatch.setattr("sparring.recipes.baselines.pick_device", lambda name: torch.device("cpu"))
    with pytest.raises(UserError, match="39 items") as error:
        build("ease", parts.train)
    assert "\n" not in str(error.value)
    check_square(39, torch.device("cpu"))
    assert square_fits(39, torch.device("cpu"))
    assert not square_fits(40, torch.device("cpu"))
    assert not square_fits(39, torch.device("cpu"), processes=2)


def test_available_memory_is_less_than_the_machine_has() -> None:
    """It is positive and below the total."""
    assert 0 < memory_usage.available_bytes() < memory_usage.machine_bytes()


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Ease(0.0), "lam"),
        (lambda: Ease(math.inf), "lam"),
        (lambda: ItemKnn(0, 1.0), "neighbours"),
        (lambda: ItemKnn(5, -1.0), "shrink"),
    ],
)
def test_arguments_out_of_range_are_refused(make: object, word: str) -> None:
    """With one line that names the argument."""
    with pytest.raises(UserError, match=word):
        make()  # type: ignore[operator]


def test_items_are_unit_vectors() -> None:
    """The model is an ordinary retriever: inner products of its vectors are the scores of its query tower."""
    model = item_to_item(Histories(torch.tensor([0, 2, 2]), torch.tensor([0, 2])), 3)
    assert isinstance(model.query, ItemSums)
    torch.nn.init.normal_(model.query.weight)
    assert model.scores_items
    q = model.query_vectors(torch.arange(2))
    assert torch.equal(q @ model.item_vectors().T, q)
    assert torch.equal(q[1], torch.zeros(3))


@pytest.mark.parametrize(("neighbours", "columns"), [(3, 1024), (3, 7), (10_000, 1024)])
def test_ease_keeps_the_strongest_neighbours_of_each_item(
    neighbours: int, columns: int, parts: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each column the weights that are largest in absolute value stay, and no other, in blocks of any width."""
    monkeypatch.setattr("sparring.models.item_to_item._COLUMNS", columns)
    whole = solved("ease", parts, lam=30.0)[0].weight.detach().numpy()
    kept = solved("ease", parts, lam=30.0, neighbours=neighbours)[0].weight.detach().numpy()
    for j in range(whole.shape[1]):
        strongest = np.argsort(-np.abs(whole[:, j]))[:neighbours]
        expected = np.zeros(len(whole), dtype=whole.dtype)
        expected[strongest] = whole[strongest, j]
        np.testing.assert_array_equal(kept[:, j], expected)
