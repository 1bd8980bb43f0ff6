"""Item vectors from interactions, against a dense computation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split
from sparring.data.modalities import behaviour
from sparring.data.modalities.behaviour import cached_cooccurrence, cooccurrence
from sparring.data.splits import split
from sparring.data.synthetic_world import SyntheticWorld
from sparring.data.table import from_frame
from sparring.recipes import RECIPES
from sparring.recipes.setup import Setup
from sparring.training.fitting import fit
from sparring.training.trained import run_vectors


def ppmi_by_loop(data: Interactions) -> np.ndarray:
    """The matrix of the docstring, pair by pair."""
    baskets: dict[int, list[int]] = {}
    for query, item in zip(data.queries, data.items, strict=True):
        baskets.setdefault(int(query), []).append(int(item))
    together = np.zeros((data.n_items, data.n_items))
    for items in baskets.values():
        for i in items:
            for j in items:
                if i != j:
                    together[i, j] += 1 / (len(items) - 1)
    single = together.sum(1)
    made = np.zeros_like(together)
    for i, j in np.argwhere(together > 0):
        value = (
            math.log(together[i, j])
            + math.log((single**0.75).sum())
            - 0.875 * (math.log(single[i]) + math.log(single[j]))
        )
        made[i, j] = max(0.0, value)
    return made


def test_inner_products_are_the_best_of_their_rank(small_world: SyntheticWorld) -> None:
    """With their signs, the vectors' inner products are the best approximation of that rank by numpy's SVD."""
    data = small_world.interactions
    want = ppmi_by_loop(data)
    value, vector = np.linalg.eigh(want)
    best = np.argsort(-np.abs(value))[:8]
    vectors = cooccurrence(data, dim=8)
    assert vectors.shape == (data.n_items, 8)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.sort(np.square(vectors).sum(0))[::-1], np.abs(value[best]), rtol=0.02)
    magnitude = (vector[:, best] * np.abs(value[best])) @ vector[:, best].T
    np.testing.assert_allclose(vectors @ vectors.T, magnitude, atol=0.1 * np.abs(magnitude).max())


def test_all_dimensions_give_the_matrix_back(small_world: SyntheticWorld) -> None:
    """With as many dimensions as items, the absolute values of all eigenvalues are exact."""
    data = small_world.interactions
    vectors = cooccurrence(data, dim=data.n_items)
    want = np.sort(np.abs(np.linalg.eigvalsh(ppmi_by_loop(data))))[::-1]
    np.testing.assert_allclose(np.square(vectors).sum(0), want, atol=1e-3)


def test_blocks_do_not_change_it(small_world: SyntheticWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting a few co-occurrences at a time gives the same vectors as all at once."""
    whole = cooccurrence(small_world.interactions, dim=6)
    monkeypatch.setattr(behaviour, "_PAIRS", 50)
    seen: list[tuple[int, int]] = []
    pieces = cooccurrence(small_world.interactions, dim=6, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 5
    assert seen[-1] == (40, 40)
    np.testing.assert_allclose(pieces @ pieces.T, whole @ whole.T, atol=1e-4)


def test_items_taken_together_are_near_and_lonely_ones_missing() -> None:
    """Two groups that never share a query point apart; an item that shares no query has a zero row."""
    rows = [(u, i) for u in range(12) for i in ((0, 1, 2, 3) if u % 2 else (4, 5, 6, 7))] + [(99, 8)]
    data = from_frame(pl.DataFrame({"user": [u for u, _ in rows], "item": [i for _, i in rows]}))
    vectors = cooccurrence(data, dim=2)
    unit = vectors[:8] / np.linalg.norm(vectors[:8], axis=1, keepdims=True)
    near = unit @ unit.T
    assert near[:4, :4].min() > 0.9
    assert near[4:, 4:].min() > 0.9
    assert np.abs(near[:4, 4:]).max() < 0.1
    assert not vectors[8].any()


def test_of_a_long_history_the_latest_count() -> None:
    """With `longest` 2, a query with a, b, c, d in this order pairs only c and d; without times, any two of them."""
    rows = [(u, item, t) for u in range(5) for t, item in enumerate([3, 1, 0, 2])] + [
        (u, u % 4 + 4, 0) for u in range(5, 9)
    ]
    timed = from_frame(pl.DataFrame(rows, schema=["user", "item", "time"], orient="row"))
    vectors = cooccurrence(timed, dim=2, longest=2)
    assert np.flatnonzero(np.abs(vectors).sum(1)).tolist() == [0, 2]
    untimed = cooccurrence(replace(timed, time=None), dim=4, longest=2)
    assert np.abs(untimed).sum(1)[4:].tolist() == [0.0] * 4


def test_nothing_shared_is_one_line() -> None:
    """Interactions without a shared query have no behaviour, which is a one-line error."""
    data = from_frame(pl.DataFrame({"user": [1, 2, 3], "item": [1, 2, 3]}))
    with pytest.raises(UserError, match="no two items share a query"):
        cooccurrence(data)


def test_it_is_computed_once_per_content(parts: Split, tmp_path: Path) -> None:
    """The same training pairs are read from the cache; one pair less, or another width, is recomputed."""
    first, known = cached_cooccurrence(parts.train, tmp_path, dim=4)
    again, known_again = cached_cooccurrence(parts.train, tmp_path, dim=4)
    assert (known, known_again) == (False, True)
    assert np.array_equal(first, again)
    assert not cached_cooccurrence(parts.train.subset(np.arange(1, len(parts.train))), tmp_path, dim=4)[1]
    assert not cached_cooccurrence(parts.train, tmp_path, dim=5)[1]
    assert len(list(tmp_path.iterdir())) == 3


def test_vectors_of_a_run_are_matched_by_id_and_never_leak_the_test(
    small_world: SyntheticWorld, parts: Split, tmp_path: Path
) -> None:
    """A run's item vectors are matched by original id and have no bias; one trained on another split is refused, since
    it saw test pairs."""
    run = RECIPES["ssl"](parts.train, Setup.of(dim=4, epochs=1, batch_size=64))
    fitted = fit(run, parts, tmp_path / "run", k=(5, 10))
    vectors, at = run_vectors(tmp_path / "run", parts)
    assert np.allclose(vectors, fitted.run.model.item_vectors().detach().numpy())
    assert at.tolist() == list(range(parts.train.n_items))
    biased = RECIPES["ssl"](parts.train, Setup.of(dim=4, epochs=1, batch_size=64, item_bias=True))
    towers = fit(biased, parts, tmp_path / "biased", k=(5, 10)).run.model.with_bias(None)
    assert np.allclose(run_vectors(tmp_path / "biased", parts)[0], towers.item_vectors().detach().numpy())
    other = split(small_world.interactions, "random", valid=0.1, test=0.2, seed=2)
    with pytest.raises(UserError, match="trained on"):
        run_vectors(tmp_path / "run", other)
    with pytest.raises(UserError, match="no such run folder"):
        run_vectors(tmp_path / "none", parts)
