"""The trend of `default`: chosen by a later validation part, saved, loaded, resumed and refitted with the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparring import build, fit, load, split
from sparring.data import Split
from sparring.data.synthetic_world import make_world
from sparring.evaluation import evaluate
from sparring.models.retriever import Retriever
from sparring.recipes.run import Run
from sparring.training.closed_form import FEW, QUERIES
from sparring.training.fusing import fuse
from sparring.training.sources import Sources
from sparring.training.trend import HALF_LIVES, WEIGHTS, TrendChoice, add_trend, know
from support.onnx_files import check_onnx

SMALL = {"dim": 8, "epochs": 3, "eval_every": 1, "tau": 0.2, "select": "ndcg@10", "n": 64, "closed_form": 0}


@pytest.fixture(scope="module")
def parts() -> Split:
    """A world in which demand moves from the first items to the last; a fifth of the queries come late."""
    world = make_world(queries=300, items=80, seed=1).interactions
    random = np.random.default_rng(0)
    time = random.integers(0, 10_000, len(world))
    late = world.queries % 5 == 0
    time[late] = 9_000 + time[late] // 10
    items = np.clip(random.normal(time / 10_000 * world.n_items, 6.0), 0, world.n_items - 1).astype(world.items.dtype)
    order = np.lexsort((time, items, world.queries))
    data = replace(world, queries=world.queries[order], items=items[order], time=time[order])
    return split(data, "temporal", valid=0.2, test=0.2)


def made(parts: Split, **changes: object) -> Run:
    return build("default", parts.train, {**SMALL, **changes})


@pytest.mark.parametrize(("gain", "kept"), [(0.2, True), (0.0, False), (0.01, False)])
def test_the_best_half_life_at_one_half_then_the_best_weight(
    gain: float, kept: bool, parts: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few queries choose both; more of them decide, and a gain within a standard error of the difference is none."""
    without, noise = np.array([0.3, 0.1, 0.6, 0.2]), np.array([0.2, -0.2, 0.1, -0.1])
    figures = {(half_life, weight): np.zeros(4) for half_life in HALF_LIVES for weight in WEIGHTS}
    figures[0.03, 0.5] = np.full(4, 0.01)
    figures[0.03, 1.0] = without + noise + gain
    figures[0.1, 1.0] = np.full(4, 9.0)  # never seen: 0.03 was better at one half
    tried: list[tuple[float, float, int]] = []

    def rank(model: Retriever, queries: int) -> SimpleNamespace:
        assert model.trend is not None
        half_life, weight, _ = model.trend.settings.tolist()
        tried.append((half_life, weight, queries))
        values = figures[half_life, weight] if weight else without
        return SimpleNamespace(metrics={"ndcg@10": float(values.mean())}, per_query={"ndcg@10": values})

    _, choice = add_trend(made(parts).model, parts, 0.2, None, rank, "ndcg@10")  # type: ignore[arg-type]
    assert (choice.half_life, choice.weight) == ((0.03, 1.0) if kept else (None, 0.0))
    expected = figures[0.03, 1.0] if kept else without
    assert (choice.without, choice.both) == pytest.approx((without.mean(), expected.mean()))
    chosen = [(0.1, 0.5), (0.03, 0.5), (0.01, 0.5), (0.03, 1.0), (0.03, 2.0)]
    assert sorted(tried) == sorted([(*each, FEW) for each in chosen] + [(np.inf, 0.0, QUERIES), (0.03, 1.0, QUERIES)])


def test_a_validation_part_at_random_chooses_no_trend(parts: Split) -> None:
    """It says nothing of what comes later."""
    assert parts.valid is not None
    mixed = split(parts.joined().train, "random", valid=0.2, test=0.2, seed=0)
    fitted = fit(made(mixed), mixed, k=(10,), device="cpu")
    assert fitted.trend == TrendChoice()


def test_recent_demand_is_followed_and_newcomers_get_it(parts: Split) -> None:
    """In this world it is worth more than what towers learn of the past, to known queries and to newcomers."""
    with_trend, without = (fit(made(parts, trend=each), parts, k=(10,), device="cpu") for each in (True, False))
    assert with_trend.trend is not None
    assert without.trend is None
    assert with_trend.trend.weight > 0
    assert with_trend.test is not None
    assert without.test is not None
    assert parts.test is not None
    assert parts.valid is not None
    gain = with_trend.test.per_query["ndcg@10"] - without.test.per_query["ndcg@10"]
    queries = np.unique(parts.test.queries)
    new = ~np.isin(queries, np.concatenate([parts.train.queries, parts.valid.queries]))
    assert new.sum() > 10
    assert gain[~new].mean() > 0.05
    assert gain[new].mean() > 0.05


@pytest.mark.parametrize(("model", "rows"), [("sasrec", "sequences"), ("sets", "sets")])
def test_newcomers_of_any_recipe_get_what_is_taken_most(parts: Split, model: str, rows: str) -> None:
    """No trained query is nearer to the counts of the items than the vector of newcomers, which no step trains."""
    changes = {"dim": 8, "epochs": 2, "tau": 0.2, "rows": rows}
    fitted = fit(build("full_softmax", parts.train, changes, model=model), parts, k=(10,), device="cpu")
    assert fitted.trend is None
    trained = fitted.run.model
    share = torch.from_numpy(parts.joined().train.counts()).float()
    known = trained.query_vectors(torch.unique(parts.train.pairs()[0]).long())
    newcomer = trained.encode_histories(torch.full((1, 3), -1)).detach()
    scores = torch.cat([newcomer, known]) @ trained.item_vectors().T / 0.2
    losses = -(torch.log_softmax(scores, 1) @ (share / share.sum()))
    assert float(losses[0]) < float(losses[1:].min())


def test_a_run_is_saved_loaded_and_resumed_with_it(parts: Split, tmp_path: Path) -> None:
    """The folder's model has the test metrics, and those of validation once it forgets that part."""
    folder = tmp_path / "run"
    fitted = fit(made(parts), parts, folder, k=(10,), device="cpu")
    assert fitted.trend is not None
    assert fitted.trend.weight > 0
    assert json.loads((folder / "result.json").read_text())["trend"] == fitted.trend.to_dict()
    assert f"recent demand too: weight {fitted.trend.weight:g}, " in (folder / "README.md").read_text()
    assert parts.test is not None
    assert parts.valid is not None
    assert fitted.test is not None
    loaded = load(folder)
    model, listed = loaded.model, loaded.eligibility.listed(parts.train.n_items)
    again = evaluate(model, parts.test, parts.seen_for("test"), (10,), ("ndcg",), among=listed)
    assert again.metrics["ndcg@10"] == pytest.approx(fitted.test.metrics["ndcg@10"], rel=1e-6)
    know(model, parts, "valid")
    record = fitted.history[fitted.best_epoch - 1]
    valid = evaluate(model, parts.valid, parts.seen_for("valid"), (10,), ("ndcg",), among=listed)
    assert valid.metrics["ndcg@10"] == pytest.approx(record["ndcg@10"], rel=1e-6)
    assert record["ndcg@10"] > record["towers"]
    before = (folder / "model.safetensors").read_bytes()
    resumed = fit(made(parts), parts, folder, k=(10,), device="cpu", resume=True)
    assert (resumed.trend, resumed.test.metrics if resumed.test else None) == (fitted.trend, fitted.test.metrics)
    assert (folder / "model.safetensors").read_bytes() == before


def test_killed_after_it_was_written_a_run_has_the_same_tensors(
    parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trend is not counted twice."""
    whole = fit(made(parts), parts, tmp_path / "whole", k=(10,), device="cpu")
    with monkeypatch.context() as patched:
        patched.setattr("sparring.training.fitting._test", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fit(made(parts), parts, tmp_path / "killed", k=(10,), device="cpu")
    resumed = fit(made(parts), parts, tmp_path / "killed", k=(10,), device="cpu", resume=True)
    assert resumed.trend == whole.trend
    one, other = (load(tmp_path / name).model.state_dict() for name in ("whole", "killed"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_refit_keeps_the_choice_and_counts_both_parts(parts: Split, tmp_path: Path) -> None:
    fitted = fit(made(parts), parts, tmp_path / "run", k=(10,), device="cpu", refit=True)
    assert fitted.selection is not None
    assert fitted.trend == fitted.selection.trend
    assert fitted.trend is not None
    assert fitted.trend.half_life is not None
    model = load(tmp_path / "run").model
    expected = fitted.trend.weight * 0.2 * np.log1p(parts.joined().train.recent_counts(fitted.trend.half_life))
    assert model.trend is not None
    np.testing.assert_allclose(model.trend.shift.numpy(), expected, rtol=1e-5)


def test_sources_of_a_fused_run_forget_the_validation_part(parts: Split, tmp_path: Path) -> None:
    """Known before the validation part are the training counts alone, of every source that has a trend."""
    fit(made(parts), parts, tmp_path / "one", k=(10,), device="cpu")
    fit(made(parts, seed=1), parts, tmp_path / "two", k=(10,), device="cpu")
    fused = fuse([tmp_path / "one", tmp_path / "two"], parts, tmp_path / "fused", device="cpu")
    model = load(tmp_path / "fused").model
    assert isinstance(model, Sources)
    assert fused.test is not None
    assert parts.test is not None
    again = evaluate(model, parts.test, parts.seen_for("test"), (10,), ("ndcg",))
    assert again.metrics["ndcg@10"] == pytest.approx(fused.test.metrics["ndcg@10"], rel=1e-6)
    for part, data in (("test", parts.joined().train), ("valid", parts.train)):
        know(model, parts, part)
        assert data.time is not None
        for source in model.sources:
            assert source.model.trend is not None
            half_life, weight, tau = source.model.trend.settings.tolist()
            age = (data.time.max() - data.time) / np.ptp(data.time)
            counts = np.bincount(data.items, 0.5 ** (age / half_life), data.n_items)
            np.testing.assert_allclose(source.model.trend.shift.numpy(), weight * tau * np.log1p(counts), rtol=1e-5)
            assert weight > 0


def test_onnx_gives_vectors_with_it(parts: Split, tmp_path: Path) -> None:
    """The item's bias includes the trend, and a query without items is a newcomer."""
    fit(made(parts), parts, tmp_path / "run", k=(10,), device="cpu")
    check_onnx(tmp_path / "run", tmp_path / "onnx")
