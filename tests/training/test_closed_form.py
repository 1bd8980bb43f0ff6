"""The closed form of `default`: chosen by the validation part, saved, loaded, resumed and refitted with the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparring import build, fit, load, split
from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.data import Split
from sparring.data.synthetic_world import make_world
from sparring.evaluation import evaluate
from sparring.models.histories import HistoryTower
from sparring.models.retriever import Retriever
from sparring.recipes.run import Run
from sparring.training import closed_form
from sparring.training.closed_form import FEW, LAMS, QUERIES, UNCHOSEN, WEIGHTS, ClosedFormChoice, add_closed_form

SMALL = {"dim": 8, "epochs": 3, "eval_every": 1, "tau": 0.2, "select": "ndcg@10", "n": 64, "closed_form": 16}


@pytest.fixture(scope="module")
def parts() -> Split:
    return split(make_world(queries=300, items=80, seed=1).interactions, "random", valid=0.2, test=0.2, seed=0)


def made(parts: Split, **changes: object) -> Run:
    return build("default", parts.train, {**SMALL, **changes})


def ranking(figures: dict[tuple[float, float], list[float]], without: list[float]):  # type: ignore[no-untyped-def]
    """A ranking of the validation part with these values per query, by lam and weight; those tried are noted."""
    tried: list[tuple[tuple[float, float] | None, int]] = []

    def rank(model: Retriever, queries: int):  # type: ignore[no-untyped-def]
        key = getattr(model, "asked", None)
        tried.append((key, queries))
        values = np.array(without if key is None else figures[key])
        return SimpleNamespace(metrics={"ndcg@10": float(values.mean())}, per_query={"ndcg@10": values})

    return rank, tried


@pytest.mark.parametrize(("gain", "kept"), [(0.2, True), (0.0, False), (0.01, False)])
def test_the_best_lam_at_one_half_then_the_best_weight(
    gain: float, kept: bool, parts: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few queries choose both; more of them decide, and a gain within a standard error of the difference is none."""
    without = [0.3, 0.1, 0.6, 0.2]
    noise = np.array([0.2, -0.2, 0.1, -0.1])
    figures = {(lam, weight): [0.0] * 4 for lam in LAMS for weight in WEIGHTS}
    figures[10.0, 0.5] = [0.01] * 4
    figures[10.0, 0.25] = (np.array(without) + noise + gain).tolist()
    figures[1.0, 0.25] = [9.0] * 4  # never seen: lam 10 was better at one half
    rank, tried = ranking(figures, without)

    def named(model: Retriever, found: object, lam: float, weight: float) -> object:
        return SimpleNamespace(asked=(lam, weight))

    monkeypatch.setattr(closed_form, "_unit", lambda model, found, lam, pairs: 1.0)
    monkeypatch.setattr(closed_form, "_joined", named)
    model = made(parts).model
    joined, choice = add_closed_form(model, parts.train.positives(), 16, None, rank, "ndcg@10")
    assert choice.lam == 10.0
    assert choice.weight == (0.25 if kept else 0.0)
    assert (joined is model) is not kept
    chosen = [(3.0, 0.5), (10.0, 0.5), (30.0, 0.5), (10.0, 1.0), (10.0, 0.25), (10.0, 0.125)]
    assert sorted(tried, key=str) == sorted(
        [(each, FEW) for each in chosen] + [(None, QUERIES), ((10.0, 0.25), QUERIES)], key=str
    )
    expected = np.mean(figures[10.0, 0.25]) if kept else np.mean(without)
    assert (choice.towers, choice.both) == pytest.approx((np.mean(without), expected))


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


def test_a_refit_keeps_the_choice(parts: Split) -> None:
    """lam and weight are the selection's; the directions are those of all pairs."""
    fitted = fit(made(parts), parts, k=(10,), device="cpu", refit=True)
    assert fitted.selection is not None
    assert fitted.closed_form == fitted.selection.closed_form
    form, first = fitted.run.model.closed_form, fitted.selection.run.model.closed_form
    assert form is not None
    assert first is not None
    assert not torch.equal(form.directions, first.directions)


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
