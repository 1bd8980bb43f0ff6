"""iALS against dense normal equations: one half sweep, the objective, weights, blocks, histories."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split
from sparring.kernels.native import library
from sparring.kernels.native.library import function
from sparring.models import least_squares as module
from sparring.models.least_squares import Ials, RidgeTower, Rows, ridge
from sparring.recipes.settings import build

ALPHA, REG = 0.2, 0.05


def weighted(parts: Split, by: str) -> Interactions:
    """The training part without weights, or with random ones."""
    values = np.random.default_rng(0).uniform(0.2, 3, len(parts.train)).astype(np.float32)
    return replace(parts.train, weight=values if by == "weights" else None)


def tables(data: Interactions) -> tuple[np.ndarray, np.ndarray]:
    """(U, N): 1 for every pair, and its weight."""
    shape = data.n_queries, data.n_items
    pairs, weight = np.zeros(shape), np.zeros(shape)
    pairs[data.queries, data.items] = 1
    weight[data.queries, data.items] = 1 if data.weight is None else data.weight
    return pairs, weight


def by_hand(pairs: np.ndarray, weight: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The rows that minimise the objective for a fixed other side: the normal equations of each, written out."""
    n, rows = len(v), []
    for x, w in zip(pairs, weight, strict=True):
        left = REG * (w.sum() + ALPHA * n) * np.eye(v.shape[1])
        right = np.zeros(v.shape[1])
        for j in range(n):
            left += (w[j] * x[j] + ALPHA) * np.outer(v[j], v[j])
            right += w[j] * x[j] * v[j]
        rows.append(np.linalg.solve(left, right))
    return np.stack(rows)


def value(pairs: np.ndarray, weight: np.ndarray, u: np.ndarray, v: np.ndarray) -> float:
    """The objective, term by term over all pairs."""
    scores = u @ v.T
    fit = (weight * (1 - scores) ** 2).sum() + ALPHA * (scores**2).sum()
    of_queries = ((weight.sum(1) + ALPHA * len(v)) * (u**2).sum(1)).sum()
    of_items = ((weight.sum(0) + ALPHA * len(u)) * (v**2).sum(1)).sum()
    return float(fit + REG * (of_queries + of_items))


@pytest.mark.parametrize("by", ["pairs", "weights"])
@pytest.mark.parametrize(("dim", "start"), [(3, "spectral"), (24, "normal")])
@pytest.mark.parametrize("numbers", [1 << 20, 1, None])
def test_a_sweep_solves_dense_normal_equations(
    by: str, dim: int, start: str, numbers: int | None, parts: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows shorter or longer than the vectors are wide, in blocks of any size, or by the native kernel (None)."""
    if numbers is not None:
        monkeypatch.setattr(library, "active", False)
        monkeypatch.setattr(module, "_NUMBERS", numbers)
    data = weighted(parts, by)
    run = build("ials", data, {"dim": dim, "alpha": ALPHA, "reg": REG, "init": start})
    u = run.model.query.weight.detach().double().numpy()  # type: ignore[union-attr, operator]
    assert run.solver is not None
    with torch.no_grad():
        loss = next(run.solver.sweeps(run.model, data))
    pairs, weight = tables(data)
    v = by_hand(pairs.T, weight.T, u)
    u = by_hand(pairs, weight, v)
    np.testing.assert_allclose(run.model.item.weight.detach().numpy(), v, rtol=1e-3, atol=1e-5)  # type: ignore[union-attr, operator]
    np.testing.assert_allclose(run.model.query.weight.detach().numpy(), u, rtol=1e-3, atol=1e-5)  # type: ignore[union-attr, operator]
    assert loss == pytest.approx(value(pairs, weight, u, v) / len(data), rel=1e-5)


def test_the_objective_falls_at_every_half_sweep(parts: Split) -> None:
    """Over five sweeps; what a half sweep returns is its value, summed over all pairs."""
    data = weighted(parts, "weights")
    queries, items = (column.long() for column in data.pairs())
    weight = torch.from_numpy(data.weight)
    by_query = Rows(queries, items, weight, data.n_queries, data.n_items, 6)
    by_item = Rows(items, queries, weight, data.n_items, data.n_queries, 6)
    u = torch.empty(data.n_queries, 6).normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    v = torch.zeros(data.n_items, 6)
    found, values = [], [value(*tables(data), u.double().numpy(), v.double().numpy())]
    for _ in range(5):
        for rows, other, given, mine in ((by_item, by_query, u, v), (by_query, by_item, v, u)):
            found.append(rows.solve(given, ALPHA, REG, mine) + other.penalty(given, ALPHA, REG))
            values.append(value(*tables(data), u.double().numpy(), v.double().numpy()))
    assert found == pytest.approx(values[1:], rel=1e-5)
    assert all(after < before for before, after in itertools.pairwise(values))


@pytest.mark.skipif(function("ridge", "ppppppppllld") is None, reason="needs the native kernels: a C++ compiler")
@pytest.mark.parametrize("by", ["pairs", "weights"])
def test_the_native_kernel_agrees_from_any_start_and_on_any_threads(by: str, parts: Split) -> None:
    """A start far from the solution changes only the steps; another number of threads changes no bit."""
    data, threads = weighted(parts, by), torch.get_num_threads()
    queries, items = (column.long() for column in data.pairs())
    weight = None if data.weight is None else torch.from_numpy(data.weight)
    rows = Rows(queries, items, weight, data.n_queries, data.n_items, 9)
    generator = torch.Generator().manual_seed(0)
    v = torch.empty(data.n_items, 9).normal_(0, 0.5, generator=generator)
    expected = by_hand(*tables(data), v.double().numpy())
    found = []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            for size in (0.0, 30.0):
                u = torch.empty(data.n_queries, 9).normal_(0, 1, generator=generator.manual_seed(1)) * size
                found.append((rows.solve(v, ALPHA, REG, u), u))
    finally:
        torch.set_num_threads(threads)
    for _, u in found:
        np.testing.assert_allclose(u.numpy(), expected, rtol=1e-3, atol=3e-5)
    for (one, u), (two, other) in zip(found[:2], found[2:], strict=True):
        assert one == two
        assert torch.equal(u, other)


def test_rows_without_pairs_are_zero(parts: Split) -> None:
    """A query and an item that no pair has get zero vectors."""
    kept = parts.train.subset((parts.train.queries != 4) & (parts.train.items != 7))
    run = build("ials", kept, {"dim": 4})
    assert run.solver is not None
    with torch.no_grad():
        next(run.solver.sweeps(run.model, kept))
    assert not bool(run.model.query.weight[4].any())  # type: ignore[union-attr, index]
    assert not bool(run.model.item.weight[7].any())  # type: ignore[union-attr, index]
    assert bool(run.model.query.weight[5].any())  # type: ignore[union-attr, index]


def test_a_history_of_a_querys_items_is_that_query(parts: Split) -> None:
    """Folding in solves the query's own regression, in any order, with repeats and padding."""
    run = build("ials", parts.train, {"dim": 6, "alpha": ALPHA, "reg": REG})
    tower = run.model.query
    assert isinstance(tower, RidgeTower)
    assert run.solver is not None
    with torch.no_grad():
        sweeps = run.solver.sweeps(run.model, parts.train)
        next(sweeps), next(sweeps)
    items = [parts.train.items[parts.train.queries == query].tolist() for query in (3, 11)]
    longest = max(map(len, items)) + 2
    padded = [[-1] * (longest - len(row) - 1) + row[::-1] + row[:1] for row in items]
    found = run.model.encode_histories(torch.tensor(padded))
    torch.testing.assert_close(found, tower.weight[[3, 11]].detach(), rtol=1e-3, atol=1e-5)
    assert not bool(run.model.encode_histories(torch.full((1, 3), -1)).any())


@pytest.mark.parametrize(("length", "dim"), [(3, 8), (8, 8), (9, 4)])
def test_ridge_solves_both_forms(length: int, dim: int) -> None:
    """Short and long rows solve the same equations."""
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(5, length, *rest, generator=generator) for rest in ((dim,), ()))
    diagonal = torch.rand(5, dim, generator=generator) + 0.3
    for row in range(5):
        left = np.diag(diagonal[row].double().numpy()) + (x[row].T @ x[row]).double().numpy()
        expected = np.linalg.solve(left, (x[row].T @ target[row]).double().numpy())
        np.testing.assert_allclose(ridge(x, target, diagonal)[0][row].numpy(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("alpha", "reg", "word"), [(0.0, 1.0, "alpha"), (1.0, -1.0, "reg"), (1.0, np.inf, "reg")])
def test_arguments_out_of_range_are_refused(alpha: float, reg: float, word: str) -> None:
    """With one line that names the argument."""
    with pytest.raises(UserError, match=word):
        Ials(alpha, reg)
