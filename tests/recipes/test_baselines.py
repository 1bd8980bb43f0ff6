"""Solved recipes as runs: folders, lists for queries and histories, resume, tuning, comparison, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring import recipes
from sparring.cli import main
from sparring.core import workers
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.data.pairs import NO_TIME
from sparring.evaluation.ranking import evaluate
from sparring.experiments.comparison import ComparedData, Comparison, compare
from sparring.experiments.comparison_tables import negatives, quality
from sparring.experiments.tuning import read_trials
from sparring.models.towers import IdTower
from sparring.negatives import Sampled, Uniform
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup
from sparring.serving.http.served_run import load_served
from sparring.training import fitting, trained
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress
from sparring.training.step import describe_batch
from support.run_files import contents

SETTINGS: dict[str, dict[str, Any]] = {
    "popularity": {},
    "item_knn": {"neighbours": 9, "shrink": 2.0},
    "ease": {"lam": 20.0},
    "ials": {"dim": 5, "epochs": 4, "alpha": 0.2, "reg": 0.02},
}


def made(name: str, parts: Split, **more: object) -> Run:
    return build(name, parts.train, {**SETTINGS[name], **more})


def table(run: Run, parts: Split) -> np.ndarray:
    """(U, N): every score, in numpy, from the tensors of the model alone."""
    state = {name: tensor.double().numpy() for name, tensor in run.model.state_dict().items()}
    n = parts.train.n_items
    if run.recipe == "popularity":
        return np.tile(state["item.weight"][:, 0], (parts.train.n_queries, 1))
    if run.recipe == "ials":
        return state["query.weight"] @ state["item.weight"].T
    matrix = state["query.weight"]
    if run.recipe == "item_knn":
        sparse, matrix = matrix, np.zeros((n, n))
        for i, (places, values) in enumerate(zip(state["query.neighbours"].astype(int), sparse, strict=True)):
            np.add.at(matrix[i], places, values)
    x = np.zeros((parts.train.n_queries, n))
    x[parts.train.queries, parts.train.items] = 1
    return x @ matrix


def best_of(scores: np.ndarray, taken: set[int], k: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda item: (-scores[item], item))
    return [item for item in order if item not in taken][:k]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_folder_recommends_what_numpy_ranks(name: str, parts: Split, tmp_path: Path) -> None:
    """Saved and loaded, lists of queries and of histories equal a sort of all scores; evaluation equals the test."""
    run = made(name, parts)
    fitted = fit(run, parts, tmp_path / name, k=(10,), device="cpu")
    loaded = trained.load(tmp_path / name)
    scores = table(replace(run, recipe=name), parts).astype(np.float32)
    counts = parts.train.counts()
    assert parts.valid is not None
    assert parts.test is not None
    items = loaded.ids.item_ids
    for query in (0, 7, 33):
        taken = {
            int(item) for part in (parts.train, parts.valid, parts.test) for item in part.items[part.queries == query]
        } | set(np.flatnonzero(counts == 0).tolist())
        found = loaded.recommend([loaded.ids.query_ids.decode([query])[0]], 5)
        np.testing.assert_allclose(
            found["score"].to_numpy(), scores[query][best_of(scores[query], taken, 5)], rtol=1e-4, atol=1e-5
        )
        assert not taken & set(items.encode(found["item"].to_list()).tolist())
        own = parts.train.items[parts.train.queries == query]
        again = loaded.recommend_history(items.decode(own).tolist(), 5, with_seen=True)
        unseen = best_of(scores[query], set(np.flatnonzero(counts == 0).tolist()), 5)
        np.testing.assert_allclose(again["score"].to_numpy(), scores[query][unseen], rtol=1e-3, atol=1e-4)
    assert fitted.test is not None
    after = evaluate(loaded.model, parts.test, parts.seen_for("test"), (10,), ("ndcg",))
    assert after.metrics["ndcg@10"] == pytest.approx(fitted.test.metrics["ndcg@10"], abs=1e-12)
    hits = []
    for query in np.unique(parts.test.queries):
        seen = {int(i) for part in (parts.train, parts.valid) for i in part.items[part.queries == query]}
        wanted = set(parts.test.items[parts.test.queries == query].tolist())
        hits.append(len(wanted & set(best_of(scores[query], seen, 10))) / len(wanted))
    assert fitted.test.metrics["recall@10"] == pytest.approx(np.mean(hits), abs=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_gpu_solves_what_a_cpu_solves(name: str, parts: Split) -> None:
    """The same scores, up to rounding, and the same test metrics."""
    runs = {device: made(name, parts, patience=None) for device in ("cpu", "cuda")}
    tests = {device: fit(run, parts, k=(10,), device=device).test for device, run in runs.items()}
    scores = [table(replace(run, model=run.model.cpu()), parts) for run in runs.values()]
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-3, atol=1e-4)
    assert tests["cpu"] is not None
    assert tests["cuda"] is not None
    assert tests["cuda"].metrics["recall@10"] == pytest.approx(tests["cpu"].metrics["recall@10"], abs=0.02)


def test_popularity_ranks_by_interactions_of_late(parts: Split) -> None:
    """Counts sum weights; with a half-life, each interaction counts 2^(-age / half-life), one without a time as much as
    the oldest."""
    assert parts.train.time is not None
    time = parts.train.time.copy()
    lost = np.arange(len(time)) % 7 == 0
    dates = [int(t) for t, gone in zip(time, lost, strict=True) if not gone]
    time[lost] = NO_TIME[time.dtype.kind]
    weights = np.random.default_rng(0).uniform(0.1, 2, len(time)).astype(np.float32)
    train = replace(parts.train, weight=weights, time=time)
    for half_life in (None, 0.1):
        expected = np.zeros(train.n_items)
        span = max(dates) - min(dates)
        for item, weight, moment, gone in zip(train.items, weights, time, lost, strict=True):
            known = min(dates) if gone else int(moment)
            age = 0.0 if half_life is None else (max(dates) - known) / (half_life * span)
            expected[item] += float(weight) * 2**-age
        run = build("popularity", train, {"half_life": half_life})
        fit(run, replace(parts, train=train), device="cpu", k=(10,))
        assert isinstance(run.model.item, IdTower)
        np.testing.assert_allclose(run.model.item.weight.detach()[:, 0].expm1().numpy(), expected, rtol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_is_bitwise_the_same(name: str, parts: Split, tmp_path: Path) -> None:
    """Stopped after two sweeps, or after a closed form was saved, and resumed: every file is equal."""

    class Killed(BaseException):
        pass

    def stop(record: dict[str, Any]) -> bool:
        if record["epoch"] == min(3, run.setup.training.epochs):
            raise Killed
        return True

    saving = TrainingProgress(epoch=lambda record: True)
    run = made(name, parts, patience=None)
    fit(run, parts, tmp_path / "whole", k=(10,), device="cpu", progress=saving)
    cut = made(name, parts, patience=None)
    with pytest.raises(Killed):
        fit(cut, parts, tmp_path / "cut", k=(10,), device="cpu", progress=TrainingProgress(epoch=stop))
    for _ in range(2):  # the second resumes a finished run
        again = made(name, parts, patience=None)
        fit(again, parts, tmp_path / "cut", resume=True, k=(10,), device="cpu", progress=saving)
    first, second = contents(tmp_path / "whole"), contents(tmp_path / "cut")
    assert first.keys() == second.keys()
    for file, value in first.items():
        assert torch.equal(value, second[file]) if isinstance(value, torch.Tensor) else value == second[file], file


def test_a_run_with_other_arguments_does_not_resume(parts: Split, tmp_path: Path) -> None:
    """The solver's arguments are part of the run."""
    fit(made("ease", parts), parts, tmp_path / "run", k=(10,), device="cpu")
    with pytest.raises(UserError, match="lam"):
        fit(made("ease", parts, lam=21.0), parts, tmp_path / "run", resume=True, k=(10,), device="cpu")


def test_weights_that_do_not_count_are_announced(parts: Split) -> None:
    """iALS and popularity use weights; EASE and kNN read pairs as 0 or 1 and say so."""
    train = replace(parts.train, weight=np.full(len(parts.train), 2.0, dtype=np.float32))
    weighted = replace(parts, train=train)
    said = {name: "weights" in describe_batch(made(name, weighted), weighted) for name in SETTINGS}
    assert said == {"popularity": False, "item_knn": True, "ease": True, "ials": False}
    assert not any("weights" in describe_batch(made(name, parts), parts) for name in SETTINGS)


def test_a_setup_gives_what_a_solver_reads(parts: Split) -> None:
    """Seed, validation and, for sweeps, width are taken from any Setup; optimiser, score and towers are not."""
    given = Setup.of(seed=7, dim=12, lr=0.5, select="recall@5", score="cosine", item_bias=True, batch_size=16)
    run = recipes.ials(parts.train, given)
    assert (run.setup.seed, run.setup.model.dim, run.setup.validation.select) == (7, 12, "recall@5")
    assert (run.setup.model.score, run.setup.model.item_bias, run.setup.training.optimizer) == ("dot", False, "solver")
    based = build("ials", parts.train, {}, given.replaced(epochs=99))
    assert (based.setup.model.dim, based.setup.training.epochs) == (12, 16)


@pytest.mark.parametrize(
    ("name", "settings", "word"),
    [
        ("ease", {"lr": 0.1}, "lr"),
        ("ease", {"epochs": 5}, "epochs"),
        ("ease", {"lam": -1.0}, "lam"),
        ("ials", {"query_tower": "history"}, "query_tower"),
        ("ials", {"optimizer": "adam"}, "optimizer"),
        ("ials", {"encoder": "bag"}, "encoder"),
        ("ials", {"reg": 0.0}, "reg"),
        ("item_knn", {"neighbours": 0}, "neighbours"),
        ("popularity", {"half_life": 0.0}, "half_life"),
        ("popularity", {"model.dim": 3}, "model.dim"),
        ("default", {"optimizer": "solver"}, "solver"),
        ("uns", {"query_tower": "items"}, "items"),
    ],
)
def test_settings_that_a_recipe_cannot_have_are_refused(
    name: str, settings: dict[str, object], word: str, parts: Split
) -> None:
    """With one line that names the setting."""
    with pytest.raises(UserError, match=word) as error:
        build(name, parts.train, settings)
    assert "\n" not in str(error.value)


def test_a_half_life_needs_times(parts: Split, file: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """Data without times, or with positions in their place, gets one line, and nothing is written."""
    for data in (replace(parts.train, time=None), replace(parts.train, is_order=True)):
        with pytest.raises(UserError, match="times"):
            build("popularity", data, {"half_life": 0.1})
        run = build("popularity", parts.train, {"half_life": 0.1})
        with pytest.raises(UserError, match="times"):
            fit(run, Split(data), device="cpu")
    words = ["train", "--data", str(file), "--recipe", "popularity", "--set", "half_life=0.1", "--device", "cpu"]
    refused([*words, "--out", str(tmp_path / "run")], "half_life", "--time-column")
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused(parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process solves."""
    monkeypatch.setattr(fitting, "launched", lambda: 2)
    with pytest.raises(UserError, match="one process"):
        fit(made("ials", parts), parts, device="cpu")


def test_a_custom_run_has_terms(parts: Split) -> None:
    """compose refuses the settings of solvers."""
    term = Term(1.0, Sampled(Uniform(parts.train.n_items), 4))
    with pytest.raises(UserError, match="solver"):
        compose(parts.train, Setup.of(optimizer="solver"), term)


@pytest.fixture(scope="module")
def file(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small world's pairs as a file."""
    path = tmp_path_factory.mktemp("baselines") / "pairs.parquet"
    data = parts.train
    pl.DataFrame({"user_id": data.queries, "item_id": data.items}).write_parquet(path)
    return path


def test_the_command_line_solves_and_lists(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """train, evaluate, recommend for a query, a history and all queries; one item is an item-to-item list."""
    out = str(tmp_path / "ease")
    assert main(["train", "--data", str(file), "--recipe", "ease", "--out", out, "--device", "cpu", "--quiet"]) == 0
    assert main(["evaluate", out]) == 0
    capsys.readouterr()
    assert main(["recommend", out, "--history", "3", "-k", "4", "--json", "--with-seen"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    row = trained.load(out).model.query.weight.detach()[trained.load(out).ids.item_ids.encode([3])[0]]  # type: ignore[union-attr, index]
    best = torch.topk(row, 4)
    assert [line["score"] for line in listed] == pytest.approx(best.values.tolist(), rel=1e-5)
    assert main(["recommend", out, "--all", "--out", str(tmp_path / "lists.parquet"), "-k", "3"]) == 0
    assert pl.read_parquet(tmp_path / "lists.parquet")["rank"].max() == 3


def test_what_needs_vectors_or_negatives_is_refused(file: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """An item-item matrix has no vectors for FAISS, ONNX or a database, and no solver has negatives to diagnose."""
    out = tmp_path / "ease"
    words = ["train", "--data", file, "--recipe", "ease", "--out", out, "--device", "cpu", "--quiet"]
    assert main([str(word) for word in words]) == 0
    refused(["index", out, "--kind", "hnsw"], "item-item")
    refused(["export", out, "--to", "onnx", "--out", tmp_path / "vectors"], "item-item")
    refused(["export", out, "--to", "milvus", "--address", tmp_path / "items.db"], "item-item")
    refused(["recommend", out, "--all", "--index", "--out", tmp_path / "lists.csv"], "no index")
    refused(["diagnose", out, "--device", "cpu"], "no negatives")


def test_solved_and_trained_recipes_are_compared(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comparison with tuning: each recipe tunes its own settings; a solver has no profile of negatives."""
    pytest.importorskip("optuna")

    def at_once(tasks: list[workers.Task], *_: object) -> Iterator[workers.Ended]:  # starting processes takes a minute
        for task in tasks:
            yield workers.Ended(task.name, task.work(lambda message: None, *task.arguments), None)

    monkeypatch.setattr(workers, "run", at_once)
    names = ("popularity", "ease", "ials", "default")
    shared: dict[str, object] = {"epochs": 2, "n": 16, "batch_size": 128}
    data = (ComparedData("world", parts),)
    comparison = Comparison(tmp_path, data, names, 1, "ease", ("ndcg@10",), shared=shared, trials=2, device="cpu")
    assert compare(comparison) == []
    assert {row["recipe"] for row in quality(comparison).rows} == set(names)
    trials = {name: read_trials(tmp_path / "world" / name / "tune" / "trials.jsonl") for name in names}
    assert {name: len(each) for name, each in trials.items()} == {"popularity": 1, "ease": 2, "ials": 2, "default": 2}
    assert trials["ease"][0].settings == {"lam": 300.0}
    assert trials["ials"][0].settings == {"dim": 64, "alpha": 0.1, "reg": 0.003}
    drawn = {row["recipe"]: row["popularity"] for row in negatives(comparison).rows}
    assert [name for name in names if drawn[name] is not None] == ["default"]


@pytest.mark.parametrize("name", SETTINGS)
def test_solved_models_are_served(name: str, parts: Split, tmp_path: Path) -> None:
    """A served run lists for a user and for a history what the folder recommends."""
    fit(made(name, parts), parts, tmp_path / name, k=(10,), device="cpu")
    served, loaded = load_served(tmp_path / name, name), trained.load(tmp_path / name)
    query, items = loaded.ids.query_ids.decode([3])[0], loaded.ids.item_ids
    listed = items.decode(served.index.search(served.user_vectors(np.array([3])), 5)[1][0])
    assert listed.tolist() == loaded.recommend([query], 5, with_seen=True)["item"].to_list()
    listed = items.decode(served.index.search(served.history_vector(np.array([1, 2])), 5)[1][0])
    assert (
        listed.tolist() == loaded.recommend_history(items.decode([1, 2]).tolist(), 5, with_seen=True)["item"].to_list()
    )
