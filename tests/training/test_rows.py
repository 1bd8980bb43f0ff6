"""Rows of sequences and sets in training steps, against loops: contexts, known positives, frequencies, runs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data.histories import Before, Given, Windows, histories
from sparring.data.interactions import Interactions, Split
from sparring.data.splits import split
from sparring.data.table import from_frame
from sparring.evaluation.ranking import evaluate
from sparring.negatives import InBatch
from sparring.recipes.in_batch import item_frequency
from sparring.recipes.run import Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup, epoch_steps
from sparring.training.fitting import fit
from sparring.training.fusing import fuse
from sparring.training.loop import TrainingProgress
from sparring.training.step import TrainingRows, sample_steps
from sparring.training.trained import load

SMALL: dict[str, Any] = {"epochs": 2, "dim": 8, "batch_size": 24, "history": 6, "patience": None}
MODELS = ["history", "sets", "sasrec", "ligr", "hstu"]


def ordered(queries: int = 14, items: int = 20, rows: int = 160) -> Interactions:
    rng = np.random.default_rng(1)
    frame = {"user": rng.integers(0, queries, rows), "item": rng.integers(0, items, rows), "time": np.arange(rows)}
    return from_frame(pl.DataFrame(frame))


@pytest.fixture(scope="module")
def parts() -> Split:
    return split(ordered(), "leave-last-out")


@pytest.mark.parametrize("rows", ["sequences", "sets"])
def test_an_epoch_has_the_rows_that_frequencies_and_steps_promise(parts: Split, rows: str) -> None:
    """Positives occur in proportion to item_frequency; epoch_steps counts the steps."""
    setup = Setup.of(rows=rows, history=4, batch_size=10, query_tower="history", dim=8)
    run = compose(parts.train, setup, Term(1.0, InBatch(item_frequency(parts.train, setup))))
    training = TrainingRows(run, parts.train)
    assert len(training.batches) == epoch_steps(parts.train, setup)
    counts = torch.zeros(parts.train.n_items, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    epochs = 1 if rows == "sequences" else 800
    for epoch in range(epochs):
        for step in training.batches.steps(epoch):
            pairs, context = training.drawn(step, generator)
            assert len(pairs) == training.count(step)
            assert isinstance(context, Windows if rows == "sequences" else Given)
            counts += torch.bincount(training.ids(pairs)[1], minlength=len(counts))
    expected = item_frequency(parts.train, setup).log_prob(torch.arange(len(counts))).exp().double()
    found = counts / counts.sum()
    tolerance = 1e-6 if rows == "sequences" else 0.05 * float(expected.max())
    assert float((found - expected).abs().max()) < tolerance


def test_sets_give_a_part_and_ask_for_the_rest(parts: Split) -> None:
    """Given items and targets of a step are disjoint, and each target is asked of its own query's set."""
    run = build("ssl", parts.train, {**SMALL, "model": "sets", "given": 0.25})
    training, generator = TrainingRows(run, parts.train), torch.Generator().manual_seed(0)
    past = histories(parts.train)
    assert past.pairs is not None
    for step in training.batches.steps(0):
        pairs, context = training.drawn(step, generator)
        assert isinstance(context, Given)
        given = past.pairs[context.places]
        assert not set(given.tolist()) & set(pairs.tolist())
        assert len(given) == int(0.25 * len(step[0]))
        owner = {}
        sets = torch.cat([context.owners, context.rows]).tolist()
        for pair, which in zip(torch.cat([given, pairs]).tolist(), sets, strict=True):
            assert owner.setdefault(which, int(parts.train.queries[pair])) == int(parts.train.queries[pair])


@pytest.mark.parametrize("model", ["sets", "sasrec"])
def test_rows_of_one_query_never_count_against_each_other(parts: Split, model: str) -> None:
    """In-batch candidates that the query has taken are excluded, whichever row they come from; others count."""
    run = build("ssl", parts.train, {**SMALL, "model": model})
    known = {(int(q), int(i)) for q, i in zip(parts.train.queries, parts.train.items, strict=True)}
    for _, step, outcome in sample_steps(run, parts):
        (block,) = outcome.bags[0].blocks
        assert block.exclude is not None
        mask = torch.zeros(len(step.q), len(block.ids), dtype=torch.bool)
        mask[block.exclude.hits(block.ids)] = True
        for row, query in enumerate(step.query_ids.tolist()):
            want = [(query, item) in known for item in block.ids.tolist()]
            assert mask[row].tolist() == want


@pytest.mark.parametrize("model", MODELS)
def test_a_run_is_saved_loaded_and_resumed(parts: Split, model: str, tmp_path: Path) -> None:
    """A loaded run ranks the test part as its training did, validation items included; resuming changes no bit."""
    settings = {**SMALL, "model": model}
    whole = fit(build("ssl_pop", parts.train, settings), parts, tmp_path / "a", k=(5,), device="cpu")
    trained = load(tmp_path / "a")
    assert parts.test is not None
    again = evaluate(trained.model, parts.test, parts.seen_for("test"), (5,), ("ndcg",))
    assert whole.test is not None
    assert again.metrics["ndcg@5"] == whole.test.metrics["ndcg@5"]
    reader = trained.model.past_readers()[0]
    assert parts.valid is not None
    query = int(parts.valid.queries[0])
    assert int(reader.items[int(reader.start[query + 1]) - 1]) == int(parts.valid.items[0])
    assert len(trained.recommend_history([int(parts.train.item_ids.ids[0])], k=3)) == 3

    class Stop(Exception):
        pass

    def stop(record: dict[str, object]) -> bool:
        if record["epoch"] == 1:
            raise Stop
        return False

    with pytest.raises(Stop):
        fit(
            build("ssl_pop", parts.train, settings),
            parts,
            tmp_path / "b",
            k=(5,),
            device="cpu",
            progress=TrainingProgress(step=lambda epoch, step, loss: True, epoch=stop),
        )
    resumed = fit(build("ssl_pop", parts.train, settings), parts, tmp_path / "b", resume=True, k=(5,), device="cpu")
    assert [r["loss"] for r in resumed.history] == [r["loss"] for r in whole.history]
    for name, value in resumed.run.model.state_dict().items():
        assert torch.equal(value, whole.run.model.state_dict()[name]), name


def test_a_run_remembers_whether_its_histories_have_an_order(parts: Split, tmp_path: Path) -> None:
    """The histories of a loaded run are those of train and valid together, in time order or as sets."""
    assert parts.valid is not None
    untimed = Split(replace(parts.train, time=None), replace(parts.valid, time=None))
    for given, ordered in ((parts, True), (untimed, False)):
        assert given.valid is not None
        folder = tmp_path / str(ordered)
        fit(build("ssl", given.train, {**SMALL, "model": "history"}), given, folder, k=(5,), device="cpu")
        (reader,) = load(folder).model.past_readers()
        assert reader.past.ordered == ordered
        taken = np.bincount([*given.train.queries, *given.valid.queries])
        assert len(reader.past.items) == np.minimum(taken, SMALL["history"]).sum()


def test_order_is_needed_where_it_is_read(parts: Split) -> None:
    """Sequence models and rows of sequences refuse data without an order, in one line that says so."""
    unordered = replace(parts.train, time=None)
    for ask in (
        lambda: build("ssl", unordered, {**SMALL, "model": "ligr"}),
        lambda: TrainingRows(build("ssl", unordered, {**SMALL, "rows": "sequences"}), unordered),
    ):
        with pytest.raises(UserError, match="order") as error:
            ask()
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("recipe", ["uns", "ssl", "xir"])
def test_sequences_of_one_item_are_refused(recipe: str) -> None:
    """Where no query has two training items there is nothing to predict, and one line says so, in any recipe."""
    rows = pl.DataFrame({"user": range(9), "item": [n % 4 for n in range(9)], "time": range(9)})
    data = from_frame(rows)
    with pytest.raises(UserError, match="at least two items in the training part, and none has"):
        TrainingRows(build(recipe, data, {**SMALL, "model": "sasrec"}), data)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"history": 1}, "two items"),
        ({"model.blocks": 0}, "block"),
        ({"model.heads": 3}, "heads"),
        ({"model.inner_dropout": 1.0}, "inner_dropout"),
        ({"model.multiplier": 0}, "multiplier"),
    ],
)
def test_options_of_sequence_models_are_checked(change: dict[str, Any], word: str, parts: Split) -> None:
    """A history of one item, and options that make no block, are one-line errors."""
    with pytest.raises(UserError, match=word):
        build("ssl", parts.train, {**SMALL, **change}, model="ligr")


def test_histories_under_rows_of_pairs_are_causal(parts: Split) -> None:
    """Each pair of a batch is read with exactly the items that came before it."""
    run = build("ssl", parts.train, {**SMALL, "model": "history"})
    training, generator = TrainingRows(run, parts.train), torch.Generator().manual_seed(0)
    past = histories(parts.train)
    seen: Counter[int] = Counter()
    for step in training.batches.steps(0):
        pairs, context = training.drawn(step, generator)
        assert isinstance(context, Before)
        for pair, place in zip(pairs.tolist(), context.places.tolist(), strict=True):
            assert past.pairs is not None
            assert int(past.pairs[place]) == pair
            seen[pair] += 1
    assert set(seen.values()) == {1}
    assert len(seen) == len(parts.train)


def test_weights_are_chosen_by_lists_that_do_not_know_the_validation_part(parts: Split, tmp_path: Path) -> None:
    """Fusing reports the validation figure that training saw, although a finished run has read the validation part."""
    best = {}
    for name, settings in {"ligr": {**SMALL, "model": "ligr"}, "popularity": {}}.items():
        recipe = "popularity" if name == "popularity" else "ssl_pop"
        fitted = fit(build(recipe, parts.train, settings), parts, tmp_path / name, k=(5,), device="cpu")
        best[name] = max(record["ndcg@10"] for record in fitted.history)
    fused = fuse([tmp_path / name for name in best], parts, select="ndcg@10", depth=20, k=(5,), device="cpu")
    for name, value in best.items():
        assert fused.valid[name] == pytest.approx(value, abs=1e-6)


def test_evaluating_the_validation_part_forgets_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`evaluate --part valid` prints the figure that training chose its epoch by."""
    rng = np.random.default_rng(1)
    rows = {"user": rng.integers(0, 14, 160), "item": rng.integers(0, 20, 160), "time": np.arange(160)}
    pl.DataFrame(rows).write_parquet(tmp_path / "pairs.parquet")
    words = [
        "train",
        "--data",
        str(tmp_path / "pairs.parquet"),
        "--split",
        "leave-last-out",
        "--out",
        str(tmp_path / "run"),
    ]
    words += ["--recipe", "ssl_pop", "--model", "sasrec", "--epochs", "2", "--device", "cpu", "--k", "5"]
    assert main([*words, "--set", "dim=8", "--set", "batch_size=24", "--set", "history=6"]) == 0
    capsys.readouterr()
    chosen = [json.loads(line)["ndcg@10"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert main(["evaluate", str(tmp_path / "run"), "--part", "valid", "--k", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["ndcg@10"] == pytest.approx(max(chosen), abs=1e-9)
