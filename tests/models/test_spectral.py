"""The spectral start of two id tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparring
from sparring.core.errors import UserError
from sparring.data.synthetic_world import make_world
from sparring.evaluation.ranking import evaluate
from sparring.models.spectral_start import spectral
from sparring.training.temperature import with_tau


def test_products_of_the_tables_follow_the_truncated_svd() -> None:
    """With enough rounds, query . item / Di^1/4 is, up to scale, the best rank-D approximation of A (numpy's SVD)."""
    rng = np.random.default_rng(0)
    matrix = (rng.random((60, 40)) < 0.2).astype(np.float64)
    matrix[matrix.sum(1) == 0, 0] = 1
    matrix[0, matrix.sum(0) == 0] = 1
    rows, columns = np.nonzero(matrix)
    start = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=60))])
    query, item = spectral(torch.from_numpy(start), torch.from_numpy(columns), 40, dim=5, rounds=200)
    normal = matrix / np.sqrt(matrix.sum(1, keepdims=True) * matrix.sum(0, keepdims=True))
    u, s, v = np.linalg.svd(normal, full_matrices=False)
    best = (u[:, :5] * s[:5]) @ v[:5]
    ours = (query @ item.T).double().numpy() / matrix.sum(0) ** 0.25
    scale = (ours * best).sum() / (ours**2).sum()
    assert np.linalg.norm(scale * ours - best) < 1e-3 * np.linalg.norm(best)


def test_quick_ranks_before_its_first_epoch() -> None:
    """In a world with structure, untrained spectral tables rank held-out items better than popularity does."""
    parts = sparring.split(
        make_world(queries=300, items=120, seed=3).interactions, "random", valid=0.0, test=0.3, seed=0
    )
    run = sparring.build("quick", parts.train, {"dim": 8})
    assert parts.test is not None
    seen = parts.seen_for("test")

    class Popular:
        def encode_queries(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.ones(len(ids), 1)

        def item_vectors(self) -> torch.Tensor:
            return torch.from_numpy(parts.train.counts()).float().unsqueeze(1)

    ours, popular = (
        evaluate(model, parts.test, seen, (10,), ("ndcg",)).metrics["ndcg@10"] for model in (run.model, Popular())
    )
    assert ours > 1.1 * popular


def test_spectral_needs_id_tables() -> None:
    """A tower that reads columns has no table to initialise, which is a one-line error where a user asks for it."""
    rows = {"user": [0, 0, 1, 1], "item": ["a", "b", "b", "c"]}
    data = sparring.read(rows, items={"item": ["a", "b", "c"], "kind": ["x", "y", "x"]})
    with pytest.raises(UserError, match="item_features"):
        sparring.build("quick", data, {"item_features": "kind", "init": "spectral"})
    assert sparring.build("quick", data, {"item_features": "kind"}).setup.model.init == "normal"


def test_sums_of_items_start_from_the_directions_of_items() -> None:
    """Both tables hold the leading right singular vectors, up to a rotation and one factor each."""
    data = make_world(queries=60, items=40, seed=0).interactions
    run = sparring.build("default", data, {"dim": 6})
    taken = np.zeros((data.n_queries, data.n_items))
    taken[data.queries, data.items] = 1
    normal = taken / np.sqrt(np.maximum(taken.sum(1, keepdims=True), 1) * np.maximum(taken.sum(0, keepdims=True), 1))
    for table in (run.model.query.item.weight, run.model.item.weight):  # type: ignore[union-attr]
        basis, _ = np.linalg.qr(table.detach().double().numpy())
        caught = np.linalg.norm(normal @ basis)
        assert caught > 0.95 * np.linalg.norm(np.linalg.svd(normal, compute_uv=False)[:6])


def test_an_item_bias_starts_at_half_the_log_of_counts_in_units_of_the_temperature() -> None:
    """Also under a temperature that is chosen after the towers are built; tables of random numbers start without."""
    data = make_world(queries=60, items=40, seed=0).interactions
    logs = np.log(1 + np.bincount(data.items, minlength=data.n_items))
    expected = 0.5 * (logs - logs.mean())

    def started(run: sparring.Run) -> np.ndarray:
        assert run.model.item_bias is not None
        return run.model.item_bias(torch.arange(data.n_items)).detach().flatten().double().numpy()

    np.testing.assert_allclose(started(sparring.build("default", data, {"tau": 0.3})), 0.3 * expected, atol=1e-6)
    unchosen = sparring.build("default", data)
    np.testing.assert_allclose(started(with_tau(unchosen, 0.07)), 0.07 * expected, atol=1e-6)
    assert not started(sparring.build("tables", data)).any()
