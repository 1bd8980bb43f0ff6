"""A learned item bias: score = q . v + b in every place that computes a score."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sparring.data.interactions import Split
from sparring.evaluation.ranking import evaluate
from sparring.experiments.diagnose.measures import diagnose, exact
from sparring.models.histories import HistoryTower
from sparring.models.retriever import Retriever
from sparring.recipes.settings import build
from sparring.training import trained as runs
from sparring.training.fitting import fit
from sparring.training.step import training_step
from support.settings import quick

SMALL = quick(dim=6, batch_size=32, epochs=2, item_bias=True, init_std=0.7)


def with_bias(model: Retriever) -> Tensor:
    """Give the items random biases; return all scores (Q, N) computed by hand from the tables."""
    assert model.item_bias is not None
    bias = torch.randn(model.n_items, 1, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.item_bias.weight.copy_(bias)  # type: ignore[union-attr,operator]
    users, items = (tower.weight.detach().double() for tower in (model.query, model.item))  # type: ignore[union-attr,operator]
    if model.score == "cosine":
        users, items = users / users.norm(dim=1, keepdim=True), items / items.norm(dim=1, keepdim=True)
    return users @ items.T + bias.squeeze(1).double()


@pytest.mark.parametrize("score", ["cosine", "dot"])
def test_a_score_is_the_inner_product_and_the_bias(parts: Split, score: str) -> None:
    """Vectors gain one dimension; inner products are q . v + b with unchanged q and v, of length 1 under cosine."""
    model = build("uns", parts.train, {**SMALL, "score": score}).model
    want = with_bias(model)
    found = model.query_vectors(torch.arange(parts.train.n_queries)) @ model.item_vectors().T
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    assert model.dim == model.item_vectors().shape[1] == 7
    assert model.encode_items(torch.zeros(3, 2, dtype=torch.long)).shape == (3, 2, 7)
    plain = build("uns", parts.train, {**SMALL, "score": score, "item_bias": False}).model
    torch.testing.assert_close(model.item_vectors()[:, :-1], plain.item_vectors())


def test_it_begins_at_nothing(parts: Split) -> None:
    """A new bias changes no score."""
    with_one, without = (build("uns", parts.train, {**SMALL, "item_bias": bias}).model for bias in (True, False))
    scores = [model.query_vectors(torch.arange(9)) @ model.item_vectors().T for model in (with_one, without)]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", ["cosine", "dot"])
def test_a_steps_loss_and_gradient(parts: Split, score: str) -> None:
    """The loss over all items is the cross-entropy of (q . v + b) / tau, and the bias receives its gradient."""
    run = build("full_softmax", parts.train, {**SMALL, "score": score, "tau": 0.4, "optimizer": "adam"})
    scores = with_bias(run.model)
    rows = np.random.default_rng(0).choice(len(parts.train), 24, replace=False)
    queries, items = (
        torch.from_numpy(parts.train.queries[rows]).long(),
        torch.from_numpy(parts.train.items[rows]).long(),
    )
    losses, _, _ = training_step(run, queries, items, torch.Generator().manual_seed(0))
    logits = scores[queries] / 0.4
    torch.testing.assert_close(
        losses.detach().double(), -logits.log_softmax(1)[torch.arange(24), items], rtol=1e-4, atol=1e-5
    )
    losses.sum().backward()
    chance = logits.softmax(1)
    chance[torch.arange(24), items] -= 1
    gradient = run.model.item_bias.weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, Tensor)
    torch.testing.assert_close(gradient.double().squeeze(1), chance.sum(0) / 0.4, rtol=1e-3, atol=1e-4)


def test_ranking_and_diagnosis_know_it(parts: Split) -> None:
    """evaluate ranks by q . v + b, and the exact gradient of diagnose is that of its softmax."""
    run = build("uns", parts.train, {**SMALL, "tau": 0.5})
    scores = with_bias(run.model)
    assert parts.test is not None
    found = evaluate(run.model, parts.test, parts.seen_for("test"), (5,), ("recall",))
    seen = parts.seen_for("test")
    recalls = []
    for query in np.unique(parts.test.queries):
        row = scores[query].clone()
        row[seen.items[seen.start[query] : seen.start[query + 1]].long()] = -torch.inf
        liked = set(parts.test.items[parts.test.queries == query].tolist())
        recalls.append(len(liked & set(row.topk(5).indices.tolist())) / len(liked))
    assert found.metrics["recall@5"] == pytest.approx(np.mean(recalls), abs=1e-6)
    rows = torch.arange(20)
    gradient, _ = exact(run, parts, rows)
    queries, items = (torch.from_numpy(column[:20]).long() for column in (parts.train.queries, parts.train.items))
    vectors = run.model.item_vectors().double()
    chance = (scores[queries] / 0.5).softmax(1)
    torch.testing.assert_close(gradient, (chance @ vectors - vectors[items]) / 0.5, rtol=1e-4, atol=1e-5)
    assert diagnose("own", run, parts, queries=16, draws=3).gradient.cosine > 0.5


@pytest.mark.parametrize("recipe", ["default", "cbns", "midx", "sce", "mixgcf", "bmns", "xir", "slatk"])
def test_recipes_train_it(parts: Split, recipe: str) -> None:
    """All kinds of negatives, those that store vectors included, train with a bias and move it."""
    run = build(recipe, parts.train, {**SMALL, **({"opens": 0} if recipe == "cbns" else {})})
    fit(run, parts, k=(10,), device="cpu")
    assert run.model.item_bias is not None
    assert bool((run.model.item_bias.weight != 0).any())  # type: ignore[union-attr,operator]


def test_a_saved_run_recommends_by_it(parts: Split, tmp_path: Path) -> None:
    """A saved and loaded run scores by its trained tables and biases, also with features and histories."""
    for more in ({}, {"item_features": "category", "init": "normal"}, {"query_tower": "history"}, {"init": "spectral"}):
        run = build("uns", parts.train, {**SMALL, "optimizer": "row-adagrad", "lr": 0.3, **more})
        fit(run, parts, tmp_path / "run", overwrite=True, k=(10,), device="cpu")
        trained = runs.load(tmp_path / "run")
        query = parts.train.query_ids.decode(np.array([4]))[0]
        best = trained.recommend([query], k=3, with_seen=True)
        scores = run.model.query_vectors(torch.tensor([4])) @ run.model.item_vectors().T
        assert best["item"].to_list() == parts.train.item_ids.decode(scores[0].topk(3).indices.numpy()).tolist()
        bias = run.model.item_bias.weight.detach()  # type: ignore[union-attr,operator]
        assert float(bias.abs().max()) > 0.01
        torch.testing.assert_close(trained.model.item_bias.weight, bias)  # type: ignore[union-attr,operator]
        if isinstance(run.model.query, HistoryTower):
            history = parts.train.item_ids.decode(np.array([1, 2, 3])).tolist()
            vector = run.model.encode_histories(torch.tensor([[1, 2, 3]]))
            assert vector.shape == (1, 7)
            assert bool((vector[:, -1] == 1).all())
            assert len(trained.recommend_history(history, k=3)) == 3


def test_it_takes_up_popularity(parts: Split) -> None:
    """With one-dimensional vectors only the bias can tell items apart: after training it rises with item frequency."""
    run = build(
        "full_softmax",
        parts.train,
        {"dim": 1, "item_bias": True, "score": "cosine", "tau": 0.3, "epochs": 30, "lr": 0.02},
    )
    fit(run, Split(parts.train, None, None), k=(10,), device="cpu")
    bias = run.model.item_bias.weight.detach().squeeze(1).numpy()  # type: ignore[union-attr,operator]
    ranks = [np.argsort(np.argsort(column)) for column in (bias, parts.train.counts())]
    assert np.corrcoef(*ranks)[0, 1] > 0.7
