"""Baselines beside a run: the figures of their own trainings, chosen on the validation part, within a bound of time."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparring import split as split_data
from sparring.cli import main
from sparring.data import Interactions, Split, make_world
from sparring.evaluation.ranking import Evaluation, evaluate
from sparring.evaluation.tfidf import TfIdf
from sparring.recipes.settings import build
from sparring.serving.checking import check
from sparring.training import baselines as module
from sparring.training.baselines import (
    HALF_LIVES,
    PERSONAL,
    baselines,
    behind,
    expected_seconds,
    headline,
    text_columns,
)
from sparring.training.fitting import fit
from support.settings import QUICK, quick_words
from support.texts import text_parts

CPU = torch.device("cpu")


def ranked(split: Split) -> Any:
    """Ranks the test part by recall@10 and ndcg@10."""
    assert split.test is not None
    test, seen = split.test, split.seen_for("test")
    return lambda model, listed: evaluate(model, test, seen, (10,), ("recall", "ndcg"), among=listed)


def beside(split: Split, **more: Any) -> dict[str, Evaluation]:
    assert split.test is not None
    return baselines(split, split.test, ranked(split), CPU, **more)


def alone(name: str, split: Split) -> tuple[float, dict[str, float]]:
    """The validation ndcg@10 and the test metrics of a baseline that is trained by itself."""
    fitted = fit(build(name, split.train, PERSONAL.get(name, {})), split, k=(10,), device="cpu")
    assert fitted.test is not None
    return fitted.history[-1]["ndcg@10"], fitted.test.metrics


def test_figures_are_those_of_the_baselines_own_trainings(parts: Split) -> None:
    """Popularity, and of the others the best on the validation part; each metric equals its own training's."""
    found = beside(parts)
    chosen = max(PERSONAL, key=lambda name: alone(name, parts)[0])
    assert list(found) == ["popularity", chosen]
    for name, result in found.items():
        metrics = alone(name, parts)[1]
        assert result.metrics == {key: metrics[key] for key in ("recall@10", "ndcg@10")}


def test_tf_idf_stands_beside_runs_over_texts() -> None:
    """Its lists are made of the columns that the run reads; a run whose towers read none has none."""
    split = text_parts()
    train, test = split.train, split.test
    assert test is not None
    assert train.query_table is not None
    assert train.item_table is not None
    queries, items = train.query_table["text"], train.item_table["text"]
    lists = TfIdf(items, queries, queries.gather(np.unique(train.queries)))
    expected = evaluate(lists, test, split.seen_for("test"), (10,), ("recall", "ndcg")).metrics
    assert beside(split, texts=(("text",), ("text",)))["tf-idf"].metrics == expected
    assert "tf-idf" not in beside(split)
    assert text_columns({"query_tower": "id", "item_tower": "text"}) is None
    assert text_columns({"query_tower": "text", "item_tower": "text", "item_text": ["title"]}) == ((), ("title",))


def test_popularity_counts(parts: Split) -> None:
    """Recall of popularity equals that of lists made by sorting counts."""
    counts, seen, test = parts.train.counts(), parts.seen_for("test"), parts.test
    assert test is not None
    values = []
    for query in np.unique(test.queries):
        taken = seen.items[seen.start[query] : seen.start[query + 1]].tolist()
        listed = [item for item in range(parts.train.n_items) if counts[item] and item not in taken]
        best = sorted(listed, key=lambda item: (-counts[item], item))[:10]
        relevant = set(test.items[test.queries == query].tolist())
        values.append(len(relevant & set(best)) / len(relevant))
    assert beside(parts)["popularity"].metrics["recall@10"] == pytest.approx(np.mean(values))


def test_recent_popularity_stands_beside_runs_on_later_parts() -> None:
    """Its half-life is the best on the validation part; lists are made by sorting counts that halve with age."""
    world = make_world(queries=200, items=60, seed=1).interactions
    time = np.random.default_rng(0).integers(0, 10_000, len(world))
    drawn = np.random.default_rng(1).normal(time / 10_000 * world.n_items, 6.0)
    items = np.clip(drawn, 0, world.n_items - 1).astype(world.items.dtype)
    order = np.lexsort((time, items, world.queries))
    split = split_data(replace(world, items=items[order], time=time[order]), "temporal", valid=0.2, test=0.2)

    def figure(share: float, part: str) -> float:
        assert split.train.time is not None
        age = (split.train.time.max() - split.train.time) / np.ptp(split.train.time)
        counts = np.bincount(split.train.items, 0.5 ** (age / share), world.n_items)
        best = np.argsort(-counts, kind="stable")
        seen, pairs = split.seen_for(part), getattr(split, part)
        found = []
        for query in np.unique(pairs.queries):
            taken = seen.items[seen.start[query] : seen.start[query + 1]].tolist()
            listed = [item for item in best if counts[item] and item not in taken][:10]
            relevant = set(pairs.items[pairs.queries == query].tolist())
            gains = sum(1 / np.log2(place + 2) for place, item in enumerate(listed) if item in relevant)
            found.append(gains / sum(1 / np.log2(place + 2) for place in range(min(len(relevant), 10))))
        return float(np.mean(found))

    chosen = max(HALF_LIVES, key=lambda share: figure(share, "valid"))
    found = beside(split)
    assert found["recent popularity"].metrics["ndcg@10"] == pytest.approx(figure(chosen, "test"))
    assert found["recent popularity"].metrics["ndcg@10"] > 1.2 * found["popularity"].metrics["ndcg@10"]
    assert "recent popularity" not in beside(split_data(split.joined().train, "random", valid=0.2, test=0.2))


def test_own_recipe_and_excluded_ones_are_left_out(parts: Split) -> None:
    """A run of popularity has no popularity beside it."""
    assert list(beside(parts, personal=["item_knn"], apart=("popularity",))) == ["item_knn"]


def test_without_validation_the_first_that_fits(parts: Split) -> None:
    """There is nothing to choose by, so the first baseline is taken and no other is solved."""
    assert list(beside(replace(parts, valid=None))) == ["popularity", next(iter(PERSONAL))]


def test_queries_without_training_pairs(parts: Split, caplog: pytest.LogCaptureFixture) -> None:
    """Where no ranked query trains, as with texts, only popularity has something to say, and the log says so."""
    assert parts.test is not None
    half = parts.train.n_queries // 2
    train, test = parts.train.subset(parts.train.queries < half), parts.test.subset(parts.test.queries >= half)
    with caplog.at_level(logging.INFO, "sparring"):
        assert list(beside(Split(train, None, test))) == ["popularity"]
    assert "training pair" in caplog.text


def test_too_large_for_the_time(
    parts: Split, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Baselines that would take too long are not started, unless the training took long enough."""
    cost = {"ease": 50.0, "ials": 8.0, "item_knn": 9.0}
    monkeypatch.setattr(module, "expected_seconds", lambda name, *_: cost[name])
    with caplog.at_level(logging.INFO, "sparring"):
        assert list(beside(parts)) == ["popularity"]
    assert "ease, ials, item_knn" in caplog.text
    assert list(beside(parts, seconds=31.0)) == ["popularity", "ials"]


def test_expected_seconds_grow_as_the_solvers_do() -> None:
    """EASE is for small catalogues: 4,000 items take seconds and 40,000 hours, where ials takes seconds."""

    def world(n_items: int) -> Split:
        rng = np.random.default_rng(0)
        queries, items = rng.integers(0, 2000, 50_000), rng.integers(0, n_items, 50_000)
        small = make_world(20, 20, seed=0).interactions
        vocabularies = [type(small.query_ids)(np.arange(n)) for n in (2000, n_items)]
        data = Interactions(queries.astype(np.int32), items.astype(np.int32), *vocabularies)
        return Split(data, None, data)

    def seconds(name: str, n_items: int, device: str = "cpu") -> float:
        split = world(n_items)
        threads = 1 if device == "cuda" else torch.get_num_threads() / 2
        return expected_seconds(name, split, split.train, torch.device(device)) * threads

    assert seconds("ease", 4_000) < 5 < 600 < seconds("ease", 40_000)
    assert seconds("ials", 40_000) < 5 < seconds("item_knn", 40_000)
    assert seconds("ease", 20_000, "cuda") < 5


def test_a_failure_costs_no_run(
    parts: Split, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A baseline that cannot be solved is one line of the log; the run and the other baselines are whole."""

    def build_but_ease(name: str, *args: Any) -> Any:
        if name != "ials":
            raise MemoryError(f"no room for {name}\nand more")
        return build(name, *args)

    monkeypatch.setattr(module, "build", build_but_ease)
    fitted = fit(build("uns", parts.train, QUICK), parts, tmp_path / "run", k=(10,), device="cpu", baselines=True)
    assert list(fitted.baselines) == ["ials"]
    assert "no room for ease" in caplog.text
    assert "and more" not in caplog.text
    assert check(tmp_path / "run").problems == []


def test_behind_says_which() -> None:
    """Only clearly better baselines are named, by the metric at the middle cutoff."""
    metrics = {f"{name}@{k}": 0.5 for name in ("recall", "ndcg") for k in (10, 20, 50)}
    assert headline(metrics) == "ndcg@20"
    assert headline({"precision@1": 0.1, "precision@5": 0.2}) == "precision@5"
    (line,) = behind("ndcg@20", 0.2, {"popularity": 0.1, "ease": 0.3})
    assert "ease" in line
    assert "0.3000" in line
    assert behind("ndcg@20", 0.2, {"popularity": 0.2, "ease": 0.201}) == []  # a tie is no defeat


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a small world."""
    import polars as pl

    world = make_world(60, 40, exposure=0.5, relevant=0.4, seed=3).interactions
    path = tmp_path_factory.mktemp("data") / "pairs.csv"
    pl.DataFrame({"user_id": world.queries, "item_id": world.items}).write_csv(path)
    return path


def test_train_and_evaluate_show_them(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both commands print the same baselines; result.json and the model card keep them; --no-baselines leaves them out.

    A run of one epoch is behind popularity and its best epoch is the last: both are said.
    """
    out, words = tmp_path / "run", quick_words(lr=1e-6)
    assert main(["train", "--data", str(data), "--recipe", "uns", "--out", str(out), *words]) == 0
    shown = capsys.readouterr().out
    result = json.loads((out / "result.json").read_text())
    assert len(result["baselines"]) == 2
    assert result["best_is_last"]
    assert "the best epoch is the last" in shown
    assert "behind popularity" in shown
    for name, each in result["baselines"].items():
        row = next(line for line in shown.splitlines() if line.startswith(f"{name} (baseline)"))
        names = ("recall@10", "ndcg@10", "recall@20", "ndcg@20")
        assert row.split()[2:] == [f"{each['metrics'][key]:.4f}" for key in names]
        assert f"| {name} |" in (out / "README.md").read_text()
    assert main(["evaluate", str(out), "--json", "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    for name, each in result["baselines"].items():
        assert {key: record["baselines"][name]["metrics"][key] for key in each["metrics"]} == each["metrics"]
    assert main(["evaluate", str(out), "--part", "valid", "--no-baselines"]) == 0
    assert "baseline" not in capsys.readouterr().out
    assert main(["train", "--data", str(data), "--out", str(tmp_path / "bare"), "--no-baselines", *words]) == 0
    assert "baseline" not in capsys.readouterr().out
    assert "baselines" not in json.loads((tmp_path / "bare" / "result.json").read_text())


def test_other_data_has_baselines_too(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On other data they are solved on the pairs that the run knows."""
    import polars as pl

    out, pairs = tmp_path / "run", pl.read_csv(data)
    known, other = tmp_path / "known.csv", tmp_path / "other.csv"
    pairs[::2].write_csv(known)
    pairs[1::2].write_csv(other)
    assert main(["train", "--data", str(known), "--out", str(out), "--no-baselines", "--quiet", *quick_words()]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(out), "--data", str(other), "--json", "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record["baselines"]) == ["popularity", next(iter(PERSONAL))]
    assert record["baselines"]["popularity"]["queries"] == record["queries"]


def test_a_closed_form_has_no_more_epochs(parts: Split) -> None:
    """The one epoch of a closed form is its last and best, and no more would help; sweeps and steps have more."""
    settings = {"popularity": {}, "ials": {"epochs": 1}, "uns": QUICK}
    last = {
        name: fit(build(name, parts.train, given), parts, k=(10,), device="cpu").best_is_last
        for name, given in settings.items()
    }
    assert last == {"popularity": False, "ials": True, "uns": True}
    assert not fit(build("uns", parts.train, QUICK), Split(parts.train), device="cpu").best_is_last
