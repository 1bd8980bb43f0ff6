"""Training, evaluation and lists with repeats kept: every row trains, and seen items can come again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.histories import histories
from sparring.data.interactions import Interactions, Split
from sparring.data.reading import read
from sparring.data.splits import split
from sparring.negatives import Sampled, Uniform
from sparring.recipes.run import Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup
from sparring.serving.export.lists import write_lists
from sparring.testing.bag_reading import dense
from sparring.training import trained
from sparring.training.fitting import fit
from sparring.training.fusing import fuse
from sparring.training.loop import TrainingProgress
from sparring.training.step import TrainingRows, sample_steps
from sparring.training.trained import leaked_pairs
from support.run_files import contents
from support.settings import quick, quick_words

QUERIES, ITEMS, ROWS = 40, 25, 700


def log() -> pl.DataFrame:
    """A log in which queries return to a few items of their own."""
    random = np.random.default_rng(0)
    query = random.integers(0, QUERIES, ROWS)
    item = (3 * query + random.geometric(0.3, ROWS)) % ITEMS
    return pl.DataFrame({"user_id": query, "item_id": item, "timestamp": random.permutation(ROWS)})


@pytest.fixture(scope="module")
def parts() -> Split:
    return split(read(log(), repeats="keep"), "leave-last-out")


def pairs_of(data: Interactions) -> Counter[tuple[int, int]]:
    return Counter(zip(data.queries.tolist(), data.items.tolist(), strict=True))


def test_every_row_is_a_target(parts: Split) -> None:
    """An epoch of pairs has each row once; an epoch of sequences has every position after the first, each predicted
    from all rows before it, repeats included."""
    run = build("uns", parts.train, quick(n=4))
    met = Counter[tuple[int, int]]()
    for _, step, _ in sample_steps(run, parts):
        met.update(zip(step.query_ids.tolist(), step.item_ids.tolist(), strict=True))
    assert met == pairs_of(parts.train)
    assert max(met.values()) > 3
    run = build("uns", parts.train, quick(n=4, model="sasrec", history=1000))
    rows, past = TrainingRows(run, parts.train), histories(parts.train)
    targets = []
    for places, slots, windows in rows.batches.steps(0):
        assert torch.equal(windows.flatten()[slots], places - 1), "read up to the row before"
        targets += places.tolist()
    assert sorted(targets) == sorted(set(range(len(parts.train))) - set(past.start[:-1].tolist()))


def test_counts_are_of_rows(parts: Split) -> None:
    """Popularity and its correction count every row, and the solver of squares weighs a pair by its rows."""
    taken = Counter(parts.train.items.tolist())
    model = fit(build("popularity", parts.train), parts, k=(10,), device="cpu").run.model
    expected = np.log1p([taken[item] for item in range(ITEMS)])
    np.testing.assert_allclose(model.item_vectors().flatten().numpy(), expected, rtol=1e-6)
    kept = fit(build("ials", parts.train, {"dim": 4, "epochs": 3}), Split(parts.train), device="cpu").run.model
    pairs = pairs_of(parts.train)
    queries, items = (np.array(column, dtype=np.int32) for column in zip(*sorted(pairs), strict=True))
    weight = np.array([pairs[pair] for pair in sorted(pairs)], dtype=np.float32)
    merged = Interactions(queries, items, parts.train.query_ids, parts.train.item_ids, weight=weight)
    weighed = fit(build("ials", merged, {"dim": 4, "epochs": 3}), Split(merged), device="cpu").run.model
    for name, tensor in files.tensors_of(kept).items():
        torch.testing.assert_close(tensor, files.tensors_of(weighed)[name], rtol=1e-3, atol=1e-5)


def test_known_positives_are_still_excluded(parts: Split) -> None:
    """exclude=known keeps a query's own items from its negatives, however often it took them."""
    term = Term(1.0, Sampled(Uniform(ITEMS), 20, exclude="known"))
    run = compose(parts.train, Setup.of(**quick()), term)
    pairs, masked = pairs_of(parts.train), 0
    for _, step, outcome in sample_steps(run, parts):
        weight, drawn = dense(outcome.bags[0], step, ITEMS), outcome.bags[0].blocks[0].ids.unique().tolist()
        for row, query in enumerate(step.query_ids.tolist()):
            for item in drawn:
                assert bool(weight[row, item] > 0) == ((query, item) not in pairs)
                masked += (query, item) in pairs
    assert masked


def best_items(model: trained.Retriever, query: int, k: int, without: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
    scores = model.query_vectors(torch.tensor([query])) @ model.item_vectors().T
    order = np.argsort(-scores[0].detach().numpy(), kind="stable")
    return [int(item) for item in order if item not in without][:k]


@pytest.fixture(scope="module")
def run(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repeats") / "run"
    fit(build("bpr", parts.train, quick(epochs=4, lr=0.05)), parts, folder, k=(5,), device="cpu")
    return folder


def test_the_ranking_masks_nothing(run: Path, parts: Split) -> None:
    """Validation and test rank all items, so that an item can be found again: recall by brute force; run.json and the
    model card say so."""
    assert parts.test is not None
    assert parts.valid is not None
    model = trained.load(run).model
    hits, repeated = [], 0
    for query, item in zip(parts.test.queries.tolist(), parts.test.items.tolist(), strict=True):
        found = item in best_items(model, query, 5)
        hits.append(found)
        repeated += found and (query, item) in pairs_of(parts.train)
    assert json.loads((run / "result.json").read_text())["test"]["metrics"]["recall@5"] == pytest.approx(np.mean(hits))
    assert repeated, "a test item that was taken before is found"
    assert json.loads((run / "run.json").read_text())["repeats"] == "keep"
    card = (run / "README.md").read_text()
    assert "Repeats of a pair are kept" in card
    assert "with the items they had already taken" in card
    best = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    chosen = max(best, key=lambda record: record["ndcg@10"])
    ten = [
        item in best_items(model, query, 10)
        for query, item in zip(parts.valid.queries.tolist(), parts.valid.items.tolist(), strict=True)
    ]
    assert chosen["recall@10"] == pytest.approx(np.mean(ten))


def test_lists_hold_seen_items(run: Path, parts: Split, tmp_path: Path) -> None:
    """Lists of queries and histories, and written lists, hold seen items unless with_seen is false."""
    loaded = trained.load(run)
    taken = {query: set() for query in range(QUERIES)}  # type: dict[int, set[int]]
    for part in (parts.train, parts.valid, parts.test):
        assert part is not None
        for query, item in pairs_of(part):
            taken[query].add(item)
    write_lists(loaded, tmp_path / "lists.parquet", 5)
    lists = pl.read_parquet(tmp_path / "lists.parquet")
    for query in range(QUERIES):
        name = loaded.ids.query_ids.decode([query])[0]
        expected = loaded.ids.item_ids.decode(best_items(loaded.model, query, 5)).tolist()
        assert loaded.recommend([name], k=5)["item"].to_list() == expected
        assert lists.filter(pl.col("query") == name)["item"].to_list() == expected
        new = loaded.ids.item_ids.decode(best_items(loaded.model, query, 5, taken[query])).tolist()
        assert loaded.recommend([name], k=5, with_seen=False)["item"].to_list() == new
    asked = loaded.ids.item_ids.decode([1, 2]).tolist()
    everything = set(loaded.recommend_history(asked, k=ITEMS)["item"].to_list())
    assert everything >= set(asked)
    assert not set(loaded.recommend_history(asked, k=ITEMS, with_seen=False)["item"].to_list()) & set(asked)


def test_a_split_is_no_leak(run: Path, parts: Split, tmp_path: Path) -> None:
    """A repeat in the test part is no leak; test pairs that were never taken before are one."""
    assert parts.test is not None
    assert leaked_pairs(trained.load(run), parts) == 0
    everything = read(log(), repeats="keep")
    fit(build("popularity", everything), Split(everything), tmp_path / "all", device="cpu")
    earlier = pairs_of(parts.joined().train)
    new = sum(pair not in earlier for pair in pairs_of(parts.test).elements())
    assert 0 < new < len(parts.test)
    assert leaked_pairs(trained.load(tmp_path / "all"), parts) == new


class Killed(BaseException):
    """Simulates a kill: nothing may catch it."""


def test_stopped_and_resumed(parts: Split, tmp_path: Path) -> None:
    """A run with repeats resumes bitwise, with a refit too; resuming it on merged data is refused."""

    def train(out: str, resume: bool, moments: set[int], data: Split = parts) -> None:
        calls = 0

        def step(epoch: int, done: int, loss: Callable[[], float]) -> bool:
            nonlocal calls
            calls += 1
            if calls in moments:
                moments.remove(calls)
                raise Killed
            return calls % 3 == 0

        settings = quick(epochs=2, query_tower="history", patience=None, n=8)
        progress = TrainingProgress(step=step, epoch=lambda record: True)
        built = build("uns", data.train, settings)
        fit(built, data, tmp_path / out, k=(5,), device="cpu", resume=resume, progress=progress, refit=True)

    train("whole", False, set())
    for first, moments in ((False, {5}), (True, {4, 9})):
        with pytest.raises(Killed):
            train("stopped", first, moments)
    train("stopped", True, set())
    one, other = contents(tmp_path / "whole"), contents(tmp_path / "stopped")
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name
    merged = Split(*(None if part is None else _merged(part) for part in (parts.train, parts.valid, parts.test)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="resume cannot change"):
        train("whole", True, set(), merged)


def _merged(part: Interactions) -> Interactions:
    """The same rows, without the mark that pairs may repeat."""
    return Interactions(part.queries, part.items, part.query_ids, part.item_ids, part.time)


def test_fused_runs_keep_repeats(run: Path, parts: Split, tmp_path: Path) -> None:
    """Runs over data with repeats are fused, and the fused run lists seen items too."""
    fit(build("popularity", parts.train), parts, tmp_path / "popularity", k=(5,), device="cpu")
    fuse([run, tmp_path / "popularity"], parts, tmp_path / "fused", k=(5,), device="cpu")
    loaded = trained.load(tmp_path / "fused")
    assert loaded.repeats
    assert len(loaded.recommend([int(loaded.ids.query_ids.ids[0])], k=ITEMS)) == ITEMS


def test_from_the_command_line(tmp_path: Path, refused: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    """train --repeats keep records it, resumes without it, and evaluate, recommend and data show read it back."""
    log().write_parquet(tmp_path / "log.parquet")
    data, out = str(tmp_path / "log.parquet"), str(tmp_path / "run")
    words = ["train", "--data", data, "--recipe", "bpr", "--split", "leave-last-out", "--out", out, *quick_words()]
    assert main([*words, "--repeats", "keep"]) == 0
    assert "repeats of a pair" in capfd.readouterr().out
    assert main(["train", "--resume", "--out", out, "--device", "cpu", "--quiet"]) == 0
    capfd.readouterr()
    assert main(["evaluate", out, "--k", "5", "--json", "--device", "cpu"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["repeats"] == "keep"
    assert shown["queries"] == QUERIES
    assert main(["evaluate", out, "--k", "5", "--device", "cpu"]) == 0
    assert "seen items are ranked too" in capfd.readouterr().out
    log().head(50).write_parquet(tmp_path / "new.parquet")
    again = ["evaluate", out, "--data", str(tmp_path / "new.parquet"), "--repeats", "keep", "--k", "5", "--json"]
    assert main(again) == 0
    assert json.loads(capfd.readouterr().out)["left_out"]["trained"] == 0
    assert main(["recommend", out, "--query", "1", "-k", str(ITEMS), "--json"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == ITEMS
    assert main(["data", "show", data, "--repeats", "keep"]) == 0
    assert f"{ROWS} interactions" in capfd.readouterr().out
    prepared = str(tmp_path / "prepared")
    assert main(["prepare", data, "--out", prepared, "--repeats", "keep"]) == 0
    words = ["train", "--data", prepared, "--recipe", "bpr", "--out", str(tmp_path / "mapped"), *quick_words()]
    assert main(words) == 0
    assert json.loads((tmp_path / "mapped" / "run.json").read_text())["repeats"] == "keep"
    assert main(["prepare", data, "--out", str(tmp_path / "merged")]) == 0
    refused(["train", "--data", tmp_path / "merged", "--repeats", "keep", "--out", tmp_path / "x"], "each pair once")
