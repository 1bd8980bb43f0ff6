"""The closed form of `default`: chosen by the validation part, saved, loaded, resumed and refitted with the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch

from sparring import build, fit, load, split
from sparring.core import files, manifest
from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.data import Split
from sparring.data.synthetic_world import make_world
from sparring.data.table import from_frame
from sparring.evaluation import evaluate
from sparring.models.histories import HistoryTower
from sparring.models.retriever import Retriever
from sparring.models.thinned_ease import thinned_ease
from sparring.recipes.run import Run
from sparring.serving.index.run_index import build_index, open_index
from sparring.training import closed_form
from sparring.training.closed_form import (
    FEW,
    LAMS,
    QUERIES,
    THINNED,
    UNCHOSEN,
    WEIGHTS,
    ClosedFormChoice,
    add_closed_form,
)
from sparring.training.folder import APART
from support.onnx_files import check_onnx

SMALL = {"dim": 8, "epochs": 3, "eval_every": 1, "tau": 0.2, "select": "ndcg@10", "n": 64, "closed_form": 16}


@pytest.fixture(scope="module")
def parts() -> Split:
    return split(make_world(queries=300, items=80, seed=1).interactions, "random", valid=0.2, test=0.2, seed=0)


def made(parts: Split, **changes: object) -> Run:
    return build("default", parts.train, {**SMALL, **changes})


Kind = tuple[float, float, int | None]  # lam, weight and neighbours of a closed form


def ranking(figures: dict[Kind, list[float]], without: list[float]):  # type: ignore[no-untyped-def]
    """A ranking of the validation part with these values per query, by closed form; those tried are noted."""
    tried: list[tuple[Kind | None, int]] = []

    def rank(model: Retriever, queries: int):  # type: ignore[no-untyped-def]
        key = getattr(model, "asked", None)
        tried.append((key, queries))
        values = np.array(without if key is None else figures[key])
        return SimpleNamespace(metrics={"ndcg@10": float(values.mean())}, per_query={"ndcg@10": values})

    return rank, tried


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed forms that are no more than their names."""

    def low_rank(*_: object) -> object:
        return SimpleNamespace(ease=lambda lam, weight: (lam, weight, None))

    def thinned(pairs: object, n_items: int, dim: int, lam: float, neighbours: int, seed: int) -> object:
        return SimpleNamespace(times=lambda weight: (lam, weight, neighbours))

    monkeypatch.setattr(closed_form, "decompose", low_rank)
    monkeypatch.setattr(closed_form, "thinned_ease", thinned)
    monkeypatch.setattr(closed_form, "_unit", lambda model, form, pairs: 1.0)
    monkeypatch.setattr(closed_form, "_joined", lambda model, form: SimpleNamespace(asked=form))


def ordered(tried: list[tuple[Kind | None, int]]) -> list[tuple[Kind | None, int]]:
    return sorted(tried, key=str)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(("gain", "kept"), [(0.2, True), (0.0, False), (0.01, False)])
def test_the_best_lam_at_one_half_then_the_best_weight(
    gain: float, kept: bool, parts: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few queries choose both; more of them decide, and a gain within a standard error of the difference is none."""
    monkeypatch.setattr(closed_form, "LARGEST", 0)
    without = [0.3, 0.1, 0.6, 0.2]
    noise = np.array([0.2, -0.2, 0.1, -0.1])
    figures: dict[Kind, list[float]] = {(lam, weight, None): [0.0] * 4 for lam in LAMS for weight in WEIGHTS}
    figures[10.0, 0.5, None] = [0.01] * 4
    figures[10.0, 0.25, None] = (np.array(without) + noise + gain).tolist()
    figures[1.0, 0.25, None] = [9.0] * 4  # never seen: lam 10 was better at one half
    rank, tried = ranking(figures, without)
    model = made(parts).model
    joined, choice = add_closed_form(model, parts.train.positives(), 16, None, rank, "ndcg@10")
    assert choice.lam == 10.0
    assert choice.weight == (0.25 if kept else 0.0)
    assert (joined is model) is not kept
    chosen = [(3.0, 0.5), (10.0, 0.5), (30.0, 0.5), (10.0, 1.0), (10.0, 0.25), (10.0, 0.125)]
    assert ordered(tried) == ordered(
        [((*each, None), FEW) for each in chosen] + [(None, QUERIES), ((10.0, 0.25, None), QUERIES)]
    )
    expected = np.mean(figures[10.0, 0.25, None]) if kept else np.mean(without)
    assert (choice.towers, choice.both) == pytest.approx((np.mean(without), expected))


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("more", "taken"), [([0.1, 0.1, 0.1, 0.2], True), ([0.2, -0.2, 0.1, 0.0], False), ([-0.1] * 4, False)]
)
def test_few_weights_instead_where_they_are_ahead(more: list[float], taken: bool, parts: Split) -> None:
    """Their weight is chosen on few queries; a gain over EASE at low rank within a standard error is none."""
    without = [0.3, 0.1, 0.6, 0.2]
    low_rank = np.add(without, [0.1, 0.2, 0.1, 0.1]).tolist()
    lam, few = THINNED
    figures: dict[Kind, list[float]] = {(lam, weight, None): [0.0] * 4 for lam in LAMS for weight in WEIGHTS}
    figures |= {(lam, weight, few): [0.0] * 4 for weight in WEIGHTS}
    figures[3.0, 0.5, None] = low_rank
    figures[lam, 0.5, few] = [0.01] * 4
    figures[lam, 1.0, few] = np.add(low_rank, more).tolist()
    rank, tried = ranking(figures, without)
    joined, choice = add_closed_form(made(parts).model, parts.train.positives(), 16, None, rank, "ndcg@10")
    best = (lam, 1.0, few) if taken else (3.0, 0.5, None)
    assert (choice.lam, choice.weight, choice.neighbours) == best
    assert joined.asked == best
    assert (choice.towers, choice.both) == pytest.approx((np.mean(without), np.mean(figures[best])))
    thinned = [each for each in tried if each[0] is not None and each[0][2] is not None]
    expected = [((lam, 0.5, few), FEW), ((lam, 1.0, few), FEW), ((lam, 2.0, few), FEW), ((lam, 1.0, few), QUERIES)]
    assert ordered(thinned) == ordered(expected)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(("gain", "taken"), [(0.1, True), (-0.1, False)])
def test_few_weights_beside_towers_that_low_rank_does_not_help(gain: float, taken: bool, parts: Split) -> None:
    """Where EASE at low rank is left out, few weights must be ahead of the towers alone."""
    without = [0.3, 0.1, 0.6, 0.2]
    lam, few = THINNED
    figures: dict[Kind, list[float]] = {(lam, weight, None): [0.05] * 4 for lam in LAMS for weight in WEIGHTS}
    figures |= {(lam, weight, few): [0.0] * 4 for weight in WEIGHTS}
    figures[lam, 0.5, few] = np.add(without, gain).tolist()
    rank, _ = ranking(figures, without)
    model = made(parts).model
    joined, choice = add_closed_form(model, parts.train.positives(), 16, None, rank, "ndcg@10")
    assert (choice.weight, choice.neighbours) == ((0.5, few) if taken else (0.0, None))
    assert (joined is model) is not taken
    assert (choice.towers, choice.both) == pytest.approx((np.mean(without), np.mean(without) + max(gain, 0.0)))


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("why", ["items", "memory"])
def test_where_few_weights_are_not_tried(why: str, parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a large catalogue, and where its square does not fit."""
    n_items = parts.train.n_items
    figures: dict[Kind, list[float]] = {(lam, weight, None): [0.0] * 4 for lam in LAMS for weight in WEIGHTS}
    figures[3.0, 0.5, None] = [0.9] * 4
    room = 24 * n_items**2
    monkeypatch.setattr(closed_form, "LARGEST", n_items - (why == "items"))
    monkeypatch.setattr("sparring.models.item_to_item.available_bytes", lambda: room - (why == "memory"))
    rank, tried = ranking(figures, [0.3, 0.1, 0.6, 0.2])
    model, known = made(parts).model, parts.train.positives()
    _, choice = add_closed_form(model, known, 16, None, rank, "ndcg@10")
    assert (choice.weight, choice.neighbours) == (0.5, None)
    assert all(form is None or form[2] is None for form, _ in tried)
    monkeypatch.setattr(closed_form, "LARGEST", n_items)
    monkeypatch.setattr("sparring.models.item_to_item.available_bytes", lambda: room)
    with pytest.raises(KeyError):  # nothing else held them back
        add_closed_form(model, known, 16, None, rank, "ndcg@10")


def test_without_a_validation_part_it_has_the_usual_weight(parts: Split) -> None:
    fitted = fit(made(parts), Split(parts.train, None, parts.test), k=(10,), device="cpu")
    assert fitted.closed_form == ClosedFormChoice(*UNCHOSEN)
    assert fitted.run.model.closed_form is not None


def test_weight_one_spreads_as_the_towers_do(parts: Split) -> None:
    """The mean deviation over the items of the scores of both, on the queries that are looked at."""
    model, known = made(parts).model, parts.train.positives()
    joined, _ = add_closed_form(model, known, 16, ClosedFormChoice(3.0, 1.0), None, "ndcg@10")
    some = torch.nonzero(known.start.diff()).flatten()
    some = some[torch.arange(min(256, len(some))) * len(some) // min(256, len(some))]
    q, items = joined.query_vectors(some), joined.item_vectors()
    inside = slice(model.width, model.width + 16)
    closed = q[:, inside] @ items[:, inside].T
    torch.testing.assert_close((q @ items.T - closed).std(1).mean(), closed.std(1).mean(), rtol=1e-4, atol=0.0)


def test_a_run_is_saved_loaded_and_resumed_with_it(parts: Split, tmp_path: Path) -> None:
    """The folder's model has the metrics that training reported; a second `resume` changes nothing."""
    folder = tmp_path / "run"
    fitted = fit(made(parts), parts, folder, k=(10,), device="cpu")
    assert fitted.closed_form is not None
    assert fitted.closed_form.weight > 0, "this world no longer needs the closed form: choose another one"
    record = fitted.history[fitted.best_epoch - 1]
    assert record["ndcg@10"] > record["towers"]
    assert fitted.test is not None
    loaded = load(folder)
    assert loaded.model.dim == 8 + 16 + 1
    assert parts.test is not None
    again = evaluate(loaded.model, parts.test, parts.seen_for("test"), (10,), ("ndcg",))
    assert again.metrics["ndcg@10"] == pytest.approx(fitted.test.metrics["ndcg@10"], rel=1e-6)
    query = parts.train.query_ids.ids[5]
    assert fitted.recommend([query], 5).equals(loaded.recommend([query], 5))
    before = (folder / "model.safetensors").read_bytes()
    resumed = fit(made(parts), parts, folder, k=(10,), device="cpu", resume=True)
    assert resumed.closed_form == fitted.closed_form
    assert (folder / "model.safetensors").read_bytes() == before
    assert resumed.test is not None
    assert resumed.test.metrics == fitted.test.metrics


def test_queries_of_one_item_leave_no_weights() -> None:
    """Where no query has two training items EASE is diagonal: with few weights it scores nothing, and is not taken."""
    items = np.random.default_rng(0).permuted(np.tile(np.arange(40), (150, 1)), axis=1)[:, :3]
    frame = {"user": np.arange(150).repeat(3), "item": items.flatten(), "time": np.tile(np.arange(3), 150)}
    alone = split(from_frame(pl.DataFrame(frame)), "leave-last-out")
    assert np.bincount(alone.train.queries).max() == 1
    form = thinned_ease(alone.train.positives(), alone.train.n_items, 8)
    assert not form.gains.any()
    assert torch.isfinite(form.items(torch.arange(40))).all()
    fitted = fit(made(alone), alone, k=(10,), device="cpu")
    assert fitted.closed_form is not None
    assert fitted.closed_form.neighbours is None


def test_a_refit_keeps_the_choice(parts: Split) -> None:
    """lam and weight are the selection's; the directions are those of all pairs."""
    fitted = fit(made(parts), parts, k=(10,), device="cpu", refit=True)
    assert fitted.selection is not None
    assert fitted.closed_form == fitted.selection.closed_form
    form, first = fitted.run.model.closed_form, fitted.selection.run.model.closed_form
    assert form is not None
    assert first is not None
    assert not torch.equal(form.directions, first.directions)


@pytest.fixture
def thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thinned form is always taken."""
    real = closed_form._choose

    def taken(*given: object) -> ClosedFormChoice:
        monkeypatch.setattr(closed_form, "ERRORS", -1e9)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(closed_form, "_choose", taken)


@pytest.mark.usefixtures("thinned")
def test_a_run_is_saved_loaded_resumed_and_indexed_with_few_weights(parts: Split, tmp_path: Path) -> None:
    """The result records the form; vectors have twice the dimensions, at most half as many as items with pairs."""
    folder = tmp_path / "run"
    fitted = fit(made(parts), parts, folder, k=(10,), device="cpu")
    assert fitted.closed_form is not None
    assert fitted.closed_form.neighbours == THINNED[1]
    assert json.loads((folder / "result.json").read_text())["closed_form"] == fitted.closed_form.to_dict()
    loaded = load(folder)
    assert loaded.model.dim == 8 + 2 * 16 + 1
    assert fitted.test is not None
    assert parts.test is not None
    again = evaluate(loaded.model, parts.test, parts.seen_for("test"), (10,), ("ndcg",))
    assert again.metrics["ndcg@10"] == pytest.approx(fitted.test.metrics["ndcg@10"], rel=1e-6)
    before = (folder / "model.safetensors").read_bytes()
    resumed = fit(made(parts), parts, folder, k=(10,), device="cpu", resume=True)
    assert resumed.closed_form == fitted.closed_form
    assert (folder / "model.safetensors").read_bytes() == before
    queries = list(parts.train.query_ids.ids[:3])
    build_index(loaded)
    q = loaded.model.query_vectors(torch.arange(3))
    found = open_index(folder).search(q.numpy(), 5)[1]
    assert found.tolist() == torch.topk(q @ loaded.model.item_vectors().T, 5).indices.tolist()
    wide = fit(made(parts, closed_form=4000), parts, k=(10,), device="cpu")
    assert wide.run.model.closed_form is not None
    assert wide.run.model.closed_form.dim == len(np.unique(parts.train.items)) // 2
    assert len(wide.recommend(queries, 5)) == 15


@pytest.mark.usefixtures("thinned")
def test_onnx_gives_vectors_with_few_weights(parts: Split, tmp_path: Path) -> None:
    """Of both towers, the dimensions of the closed form included."""
    fit(made(parts), parts, tmp_path / "run", k=(10,), device="cpu")
    check_onnx(tmp_path / "run", tmp_path / "onnx")


@pytest.mark.usefixtures("thinned")
def test_a_refit_keeps_few_weights(parts: Split, tmp_path: Path) -> None:
    """Its choice is the selection's, also where that was read from its folder; the inverse is that of all pairs."""
    whole = fit(made(parts), parts, tmp_path / "run", k=(10,), device="cpu", refit=True)
    assert whole.selection is not None
    assert whole.closed_form == whole.selection.closed_form
    form, first = whole.run.model.closed_form, whole.selection.run.model.closed_form
    assert whole.closed_form is not None
    assert form is not None
    assert first is not None
    assert whole.closed_form.neighbours == THINNED[1]
    assert form.dim == first.dim == 32
    both = parts.joined().train.positives()
    lam, few = THINNED
    expected = thinned_ease(both, parts.train.n_items, 32, lam, few, made(parts).setup.seed)
    torch.testing.assert_close(form.directions, expected.directions)
    before = files.tensors_of(whole.run.model)
    resumed = fit(made(parts), parts, tmp_path / "run", k=(10,), device="cpu", refit=True, resume=True)
    assert resumed.closed_form == whole.closed_form
    after = files.tensors_of(resumed.run.model)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_result_without_the_field_is_of_low_rank(parts: Split, tmp_path: Path) -> None:
    """A finished selection of an earlier version is read: its closed form is EASE at low rank."""
    place = tmp_path / "run" / "selection"
    fit(made(parts), Split(parts.train, parts.valid), place, device="cpu")
    path = place / "result.json"
    result = json.loads(path.read_text())
    assert result["closed_form"].pop("neighbours") is None
    path.write_text(json.dumps(result))
    manifest.write_manifest(place, apart=APART)
    found = fit(made(parts), parts, tmp_path / "run", k=(10,), device="cpu", refit=True, resume=True)
    assert found.closed_form is not None
    assert found.closed_form.neighbours is None
    assert found.closed_form.weight == result["closed_form"]["weight"]


@pytest.mark.parametrize(
    ("changes", "dim"),
    [({}, 16), ({"closed_form": 0}, 0), ({"closed_form": 4000}, 40), ({"pooling": "attention", "rows": "pairs"}, 0)],
)
def test_its_width_follows_the_data_and_the_model(changes: dict[str, object], dim: int, parts: Split) -> None:
    """At most half the items; none beside towers that do not sum items."""
    assert made(parts, **changes).closed_form == dim


def test_a_table_of_a_gigabyte_is_the_largest(parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparring.recipes.in_batch.MOST_NUMBERS", 800)
    assert made(parts).closed_form == 10
    with pytest.raises((ValueError, UserError), match="at least 0; got -1"):
        made(parts, closed_form=-1)


def test_queries_without_pairs_are_no_error(parts: Split) -> None:
    """A model with queries that have no items still has finite vectors."""
    model = made(parts).model
    assert isinstance(model.query, HistoryTower)
    start = torch.cat([parts.train.positives().start, parts.train.positives().start[-1:]])
    known = Positives(start, parts.train.positives().items)
    model.remember(replace(model.query.past, start=start))
    joined, _ = add_closed_form(model, known, 8, ClosedFormChoice(1.0, 1.0), None, "ndcg@10")
    assert torch.isfinite(joined.query_vectors(torch.tensor([parts.train.n_queries]))).all()
