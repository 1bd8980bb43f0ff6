"""LightGCN: propagation over the graph of the training pairs, as towers, in training and in a run folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.data.interactions import Split
from sparring.evaluation.ranking import evaluate
from sparring.models import graph as module
from sparring.models.graph import Graph, GraphItems
from sparring.models.retriever import Retriever
from sparring.models.towers import evaluating
from sparring.recipes import RECIPES
from sparring.recipes.settings import build, is_solved
from sparring.testing import TowersContract
from sparring.training import loop as training
from sparring.training.cuda_graph import CudaGraphStep
from sparring.training.fitting import fit
from sparring.training.step import sample_steps
from sparring.training.trained import load
from support.settings import quick

N_QUERIES, N_ITEMS, DIM = 9, 7, 3
PAIRS = [[0, 1, 2, 3, 4, 5], [1, 1, 2], [], [5], [0, 5], [1, 2], [2, 1], [5, 0, 1], [2]]  # item 6 and query 2 have none


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the small graphs consist of several pieces."""
    monkeypatch.setattr(module, "_PIECE", 2)


def pairs() -> Positives:
    start = np.concatenate([[0], np.cumsum([len(items) for items in PAIRS])])
    return Positives(torch.from_numpy(start), torch.tensor([item for items in PAIRS for item in items]))


def model(layers: int, score: str = "dot") -> Retriever:
    torch.manual_seed(layers)
    graph = Graph(pairs(), N_ITEMS, DIM, layers)
    return Retriever(graph, GraphItems(graph), score)  # type: ignore[arg-type]


def powers(weight: Tensor, layers: int) -> list[Tensor]:
    """E^(0) to E^(L) by products with the dense matrix."""
    n = N_QUERIES + N_ITEMS
    joined = torch.zeros(n, n)
    for query, items in enumerate(PAIRS):
        for item in items:
            joined[query, N_QUERIES + item] = joined[N_QUERIES + item, query] = 1
    degree = joined.sum(1)
    root = torch.where(degree > 0, degree.clamp(min=1) ** -0.5, 0.0)
    found = [weight]
    for _ in range(layers):
        found.append(torch.diag(root) @ joined @ torch.diag(root) @ found[-1])
    return found


class TestGraph(TowersContract):
    """The query tower."""

    def make(self) -> nn.Module:
        return Graph(pairs(), N_ITEMS, DIM, 2)


class TestGraphItems(TowersContract):
    """The item tower, which holds the same graph."""

    def make(self) -> nn.Module:
        return GraphItems(Graph(pairs(), N_ITEMS, DIM, 2))


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_vectors_are_means_of_matrix_powers(layers: int) -> None:
    """Both sides equal the dense formula in training and in evaluation, with ids without pairs and repeated pairs."""
    towers = model(layers)
    assert isinstance(towers.query, Graph)
    expected = torch.stack(powers(towers.query.weight, layers)).mean(0)
    for mode in (True, False):
        towers.train(mode)
        torch.testing.assert_close(towers.encode_queries(torch.arange(N_QUERIES)), expected[:N_QUERIES])
        torch.testing.assert_close(towers.encode_items(torch.arange(N_ITEMS)), expected[N_QUERIES:])
        torch.testing.assert_close(towers.encode_items(torch.tensor([[4, 0], [6, 6]]))[1, 0], expected[N_QUERIES + 6])
    torch.testing.assert_close(towers.item_vectors(), expected[N_QUERIES:].detach())


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_the_dense_formula(layers: int, bias: bool) -> None:
    """A loss of queries, items and single layers has the gradient that autograd finds through the dense matrix."""
    towers = model(layers, "cosine")
    if bias:
        from sparring.models.towers import IdTower

        towers = Retriever(towers.query, towers.item, "cosine", item_bias=IdTower(N_ITEMS, 1, 0.5, sparse=False))
    graph = towers.query
    assert isinstance(graph, Graph)
    queries, items = torch.tensor([0, 4, 4, 2]), torch.tensor([[5, 1], [0, 6], [2, 2], [3, 4]])
    parts = towers.item_layers()
    assert parts is not None
    assert parts.count == layers + 1
    last = parts.encode(items, layers)
    joined = parts.join(torch.stack([parts.encode(items, layer) for layer in range(layers + 1)]).mean(0))
    torch.testing.assert_close(joined, towers.encode_items(items))
    q, v = towers.encode_queries(queries), towers.encode_items(items)
    loss = ((q.unsqueeze(1) * v).sum(-1).sin() + last[..., :DIM].square().sum(-1)).sum()
    loss.backward()
    assert graph.weight.grad is not None
    assert not graph.weight.grad.is_sparse

    weight = graph.weight.detach().clone().requires_grad_()
    dense = powers(weight, layers)
    unit = torch.nn.functional.normalize(torch.stack(dense).mean(0), dim=1)
    score = (unit[queries].unsqueeze(1) * unit[N_QUERIES + items]).sum(-1)
    if bias:
        assert towers.item_bias is not None
        score = score + towers.item_bias(items).squeeze(-1).detach()
    (score.sin() + dense[-1][N_QUERIES + items].square().sum(-1)).sum().backward()
    torch.testing.assert_close(graph.weight.grad, weight.grad)


def test_one_propagation_in_a_step_and_in_an_evaluation(parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step propagates once forwards and once backwards however often it encodes; an evaluation once."""
    calls: list[int] = []
    before = Graph.neighbours
    monkeypatch.setattr(Graph, "neighbours", lambda self, x: (calls.append(1), before(self, x))[1])
    run = build("dns", parts.train, quick(), model="lightgcn")  # scores candidates without gradient, then encodes some
    calls.clear()
    losses, _, _ = next(sample_steps(run, parts))
    assert len(calls) == 3
    losses.sum().backward()
    assert len(calls) == 6
    calls.clear()
    assert parts.test is not None
    monkeypatch.setattr("sparring.evaluation.ranking._CHUNK", 7)
    evaluate(run.model, parts.test, parts.seen_for("test"), (10,), ("recall",))
    assert len(calls) == 3


def test_vectors_follow_the_weights() -> None:
    """Updates, loaded weights and changes that leave no trace in a tensor's version are seen at the next evaluation."""
    towers = model(2)
    graph = towers.query
    assert isinstance(graph, Graph)

    def right() -> bool:
        expected = torch.stack(powers(graph.weight, 2)).mean(0)
        return torch.allclose(towers.item_vectors(), expected[N_QUERIES:], atol=1e-6)

    assert right()
    optimizer = torch.optim.Adam(towers.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        towers.encode_items(torch.arange(3)).square().sum().backward()
        towers.encode_items(torch.arange(3)).sum().backward()  # a second pass needs no second encoding of queries
        optimizer.step()
        assert right()
    with evaluating(towers):
        first = towers.item_vectors()
        graph.weight.data.mul_(2)  # data hides the change from the version, as a recorded step does
    assert right()
    other = model(2)
    other.load_state_dict({name: tensor * 3 for name, tensor in towers.state_dict().items() if "weight" in name}, False)
    assert not torch.allclose(other.item_vectors(), first)
    towers.encode_queries(torch.arange(2))  # the vectors of a step are not copied
    assert torch.equal(copy.deepcopy(towers).item_vectors(), towers.item_vectors())


def test_a_run_with_a_graph(parts: Split, tmp_path: Path) -> None:
    """A run trains, lists what its test measured, and loads from its folder without the interactions."""
    run = build("default", parts.train, quick(epochs=2, n=16), model="lightgcn")
    assert run.setup.training.optimizer == "adam"
    fitted = fit(run, parts, tmp_path / "run", k=(10,), device="cpu")
    trained = load(tmp_path / "run")
    assert torch.equal(trained.model.item_vectors(), fitted.run.model.item_vectors())
    assert parts.test is not None
    again = evaluate(
        trained.model,
        parts.test,
        parts.seen_for("test"),
        (10,),
        ("recall",),
        among=trained.eligibility.listed(parts.train.n_items),
    )
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert again.metrics["recall@10"] == pytest.approx(result["test"]["metrics"]["recall@10"])
    absent = sorted(set(range(parts.train.n_items)) - set(parts.train.items.tolist()))
    assert trained.eligibility.items.tolist() == absent
    assert len(trained.recommend([parts.train.query_ids.ids[0]], k=5)) == 5
    assert main(["check", str(tmp_path / "run")]) == 0


def test_resumed_bitwise(parts: Split, tmp_path: Path) -> None:
    """A stopped run continues to the bits of an uninterrupted one."""
    settings = quick(epochs=2, n=16)
    whole = fit(build("mixgcf", parts.train, settings, model="lightgcn"), parts, tmp_path / "a", k=(10,), device="cpu")

    class Stopped(Exception):
        pass

    def step(epoch: int, step: int, loss: object) -> None:
        if epoch == 1 and step == 2:
            raise Stopped

    progress = training.TrainingProgress(step=step)
    with pytest.raises(Stopped):
        fit(
            build("mixgcf", parts.train, settings, model="lightgcn"),
            parts,
            tmp_path / "b",
            device="cpu",
            k=(10,),
            progress=progress,
            save_seconds=0,
        )
    again = fit(
        build("mixgcf", parts.train, settings, model="lightgcn"),
        parts,
        tmp_path / "b",
        k=(10,),
        device="cpu",
        resume=True,
    )
    assert torch.equal(again.run.model.query.weight, whole.run.model.query.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "shown" and not is_solved(RECIPES[name])])
def test_every_recipe_takes_a_step_with_it(name: str, parts: Split) -> None:
    """Loss and gradient are finite, or one line says why the two do not fit."""
    run = build(name, parts.train, quick(batch_size=16), model="lightgcn")
    losses, _, _ = next(sample_steps(run, parts))
    losses.sum().backward()
    gradient = run.model.query.weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, Tensor)
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient != 0).any())


def test_settings_that_it_would_not_read_are_refused(parts: Split) -> None:
    """Columns, vectors and other towers are one line that names the setting, not ignored."""
    for name, value in (
        ("item_features", "genre"),
        ("query_features", "age"),
        ("item_vectors", "images.npy"),
        ("query_vectors", "faces.npy"),
        ("query_tower", "history"),
    ):
        with pytest.raises(UserError, match=f"lightgcn.*{name}"):
            build("uns", parts.train, {name: value}, model="lightgcn")


def test_row_optimisers_are_refused(parts: Split) -> None:
    """One line that names optimizer=adam; so is a negative number of layers."""
    with pytest.raises(UserError, match="optimizer=adam"):
        build("default", parts.train, {"optimizer": "row-adam"}, model="lightgcn")
    with pytest.raises(UserError, match="layers"):
        build("default", parts.train, {"model.layers": -1}, model="lightgcn")
    deep = build("default", parts.train, {"model.layers": 5, "dim": 8}, model="lightgcn").model
    assert deep.item_layers().count == 6  # type: ignore[union-attr]
    assert len(parts.train) == len(deep.query.items)  # type: ignore[arg-type, union-attr]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["default", "mixgcf"])
def test_a_recorded_training_equals_a_plain_one(name: str, parts: Split) -> None:
    """The step is captured, trains like an eager one, and evaluations between its replays see the new weights."""
    found = []
    for recorded in (True, False):
        run = build(name, parts.train, quick(epochs=3, batch_size=16, patience=None, n=32), model="lightgcn")
        trainer = training.Trainer(run, parts, torch.device("cuda"), None, training.TrainingProgress())
        assert isinstance(trainer.step, CudaGraphStep)
        step = trainer.step
        if not recorded:
            trainer.step = trainer.work
        trainer.train()
        assert not recorded or step.why is None, step.why
        found.append((trainer.state.history, run.model.item_vectors()))
    (ours, vectors), (plain, expected) = found
    for key in ("loss", "ndcg@20"):
        if key in plain[0]:
            assert [record[key] for record in ours] == pytest.approx([record[key] for record in plain], rel=0.02)
    assert torch.nn.functional.cosine_similarity(vectors.flatten(), expected.flatten(), dim=0) > 0.99
