"""Prepared data equals reading and splitting in memory, for any order of rows and any partition into files."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring.core.errors import UserError
from sparring.core.manifest import write_manifest
from sparring.data import batches, pairs, read, splits
from sparring.data.interactions import Interactions
from sparring.data.prepared import row_buckets
from sparring.data.prepared.format import Prepared
from sparring.data.prepared.preparation import prepare
from sparring.data.splits import kth_smallest, split
from sparring.negatives import InBatch, Popularity
from sparring.recipes.run import Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress

HOWS: dict[str, dict[str, Any]] = {
    "random": {"how": "random", "valid": 0.2, "test": 0.3, "seed": 7},
    "no valid": {"how": "random", "valid": 0.0, "test": 0.3},
    "temporal": {"how": "temporal", "valid": 0.1, "test": 0.2},
    "leave-last-out": {"how": "leave-last-out"},
    "file": {"how": "file"},
    "auto": {},
}


@pytest.fixture(autouse=True)
def _many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data in many buckets and chunks."""
    monkeypatch.setattr(row_buckets, "BUCKET", 40)
    monkeypatch.setattr(pairs, "CHUNK", 64)
    monkeypatch.setattr(splits, "CHUNK", 64)


def rows(seed: int, n: int = 700, **dropped: Any) -> pl.DataFrame:
    """Users by name, items by number, every kind of column, duplicates, some nulls."""
    random = np.random.default_rng(seed)
    names = np.array([f"u{k}" for k in random.permutation(80)] + ["é", "Z", "a b", "100", "9"])
    frame = pl.DataFrame(
        {
            "user_id": names[random.integers(0, len(names), n)],
            "item_id": (random.zipf(1.4, n) % 60) * 1_000_003 - 7,
            "timestamp": random.integers(-500, 500, n),
            "weight": random.integers(0, 9, n) / 7,
            "rating": random.integers(1, 6, n),
            "split": random.choice(["train", "train", "train", "test"], n),
        }
    )
    missing = pl.int_range(pl.len()) % 97 == 5
    return frame.with_columns(pl.when(missing).then(None).otherwise(pl.col("user_id")).alias("user_id")).drop(*dropped)


def parts_of(frame: pl.DataFrame, folder: Path, n: int = 3) -> Path:
    folder.mkdir(parents=True)
    for k in range(n):
        frame.gather_every(n, k).write_parquet(folder / f"part-{k}.parquet")
    return folder


def same(one: Interactions | None, other: Interactions | None) -> None:
    assert (one is None) == (other is None)
    if one is None or other is None:
        return
    for name in ("queries", "items", "time", "weight"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and np.array_equal(a, b)), name
    assert one.query_ids.ids.equals(other.query_ids.ids)
    assert one.item_ids.ids.equals(other.item_ids.ids)


@pytest.mark.parametrize("case", HOWS)
def test_the_parts_are_those_of_reading_in_memory(case: str, tmp_path: Path) -> None:
    """Rows, ids, times, weights, parts, counts, positives and seen items equal those of `read` and `split`."""
    frame = rows(1) if case in ("file", "auto") else rows(1).drop("split")
    data = prepare(parts_of(frame, tmp_path / "parts"), tmp_path / "out", **HOWS[case])
    whole = split(read(tmp_path / "parts"), **HOWS[case])
    made = split(read(tmp_path / "out"))
    assert isinstance(made.train.queries, np.memmap)
    for part in ("train", "valid", "test"):
        same(getattr(whole, part), getattr(made, part))
    assert np.array_equal(whole.train.counts(), made.train.counts())
    lists = [(whole.train.positives(), made.train.positives())]
    lists += [(whole.seen_for(part), made.seen_for(part)) for part in ("valid", "test")]
    for one, other in lists:
        assert torch.equal(one.start, other.start)
        assert torch.equal(one.items, other.items)
    assert data.notes == read(tmp_path / "parts").notes


def test_against_dictionaries(tmp_path: Path) -> None:
    """Pairs, last times, summed weights, item counts and each query's items, from plain dictionaries over the rows."""
    frame = rows(2).drop("split", "rating")
    prepare(parts_of(frame, tmp_path / "parts"), tmp_path / "out")
    time: dict[tuple[str, int], int] = {}
    weight: dict[tuple[str, int], float] = defaultdict(float)
    for user, item, when, much in sorted(frame.drop_nulls("user_id").iter_rows(), key=lambda row: row[3]):
        time[user, item] = max(time.get((user, item), when), when)
        weight[user, item] += much
    users, items = (
        sorted({user for user, _ in time}, key=lambda name: name.encode()),
        sorted({item for _, item in time}),
    )
    data = read(tmp_path / "out")
    assert isinstance(data, Prepared)
    assert data.query_ids.ids.to_list() == users
    assert data.item_ids.ids.to_list() == items
    assert data.time is not None
    assert data.weight is not None
    found = {}
    for q, i, t, w in zip(
        data.queries.tolist(), data.items.tolist(), data.time.tolist(), data.weight.tolist(), strict=True
    ):
        assert (users[q], items[i]) not in found
        found[users[q], items[i]] = (t, w)
    assert found == {pair: (time[pair], float(np.float32(weight[pair]))) for pair in time}
    parts = split(data)
    taken = defaultdict(list)
    counts = [0] * len(items)
    for q, i in zip(parts.train.queries.tolist(), parts.train.items.tolist(), strict=True):
        taken[q].append(i)
        counts[i] += 1
    assert parts.train.counts().tolist() == counts
    positives = parts.train.positives()
    for q in range(len(users)):
        assert positives.items[positives.start[q] : positives.start[q + 1]].tolist() == sorted(taken[q])
    assert parts.valid is not None
    assert len(parts.train) + len(parts.valid) + len(parts.test or []) == len(time)


def test_the_order_of_rows_and_parts_does_not_matter(tmp_path: Path) -> None:
    """Shuffled rows in another number of parts give identical files, except for the source in prepared.json."""
    frame = rows(3)
    prepare(parts_of(frame, tmp_path / "a"), tmp_path / "one")
    parts_of(frame.sample(fraction=1, shuffle=True, seed=4), tmp_path / "b", 5)
    prepare(str(tmp_path / "b" / "part-*.parquet"), tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        if name not in ("prepared.json", "manifest.json"):  # the first names the source
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert isinstance(one, Prepared)
    assert isinstance(two, Prepared)
    assert one.checksum == two.checksum


@pytest.mark.parametrize("case", ["random", "temporal", "leave-last-out", "auto"])
def test_shown_pairs(case: str, tmp_path: Path) -> None:
    """Rows labelled 0 become shown pairs of the training part, as in memory."""
    frame = rows(5) if case == "auto" else rows(5).drop("split")
    label = pl.Series("label", np.random.default_rng(0).integers(0, 2, len(frame)))
    prepare(parts_of(frame.with_columns(label), tmp_path / "parts"), tmp_path / "out", **HOWS[case])
    whole, made = split(read(tmp_path / "parts"), **HOWS[case]), split(read(tmp_path / "out"))
    same(whole.train, made.train)
    assert whole.train.shown is not None
    assert made.train.shown is not None
    for one, other in zip(whole.train.shown, made.train.shown, strict=True):
        assert np.array_equal(one, other)
    assert len(whole.train.shown[0])


def test_whole_queries_are_held_out_where_no_test_query_trains(tmp_path: Path) -> None:
    """If no test query trains, complete queries are held out for validation, as in memory."""
    frame = rows(6).drop("split").drop_nulls("user_id")
    frame = frame.with_columns(
        pl.when(pl.col("user_id").str.ends_with("3")).then(pl.lit("test")).otherwise(pl.lit("train")).alias("split")
    )
    prepare(parts_of(frame, tmp_path / "parts"), tmp_path / "out")
    whole, made = split(read(tmp_path / "parts")), split(read(tmp_path / "out"))
    assert made.valid is not None
    same(whole.valid, made.valid)
    same(whole.train, made.train)
    assert not np.isin(made.valid.queries, made.train.queries).any()


def test_tables_and_titles(tmp_path: Path) -> None:
    """The item table and titles repeated on the rows are stored in dense order."""
    frame = rows(7)
    table = frame.select("item_id").unique().with_columns(pl.format("Item {}", "item_id").alias("title"))
    table.write_parquet(tmp_path / "items.parquet")
    parts_of(frame, tmp_path / "parts")
    prepare(tmp_path / "parts", tmp_path / "out", items=tmp_path / "items.parquet")
    data = read(tmp_path / "out")
    assert data.titles() is not None
    assert data.titles().tolist() == [f"Item {item}" for item in data.item_ids.ids]  # type: ignore[union-attr]
    parts_of(frame.join(table, on="item_id"), tmp_path / "titled")
    prepare(tmp_path / "titled", tmp_path / "again")
    assert read(tmp_path / "again").titles().tolist() == data.titles().tolist()  # type: ignore[union-attr]


def test_a_text_file(tmp_path: Path) -> None:
    """A CSV file is read like `read` does: ids that are all integers become integers."""
    rows(8).select(pl.col("item_id").alias("user_id"), pl.col("user_id").alias("item_id"), "timestamp").write_csv(
        tmp_path / "rows.csv"
    )
    prepare(tmp_path / "rows.csv", tmp_path / "out")
    whole, made = split(read(tmp_path / "rows.csv")), split(read(tmp_path / "out"))
    assert made.train.query_ids.kind == "int"
    same(whole.train, made.train)


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """A run on prepared data that fits into one window ends with the tensors of the run in memory."""
    parts_of(rows(9, 2000), tmp_path / "parts")
    prepare(tmp_path / "parts", tmp_path / "out")
    models = []
    for where in ("parts", "out"):
        parts = split(read(tmp_path / where))
        popular = Popularity(torch.from_numpy(parts.train.counts()))
        run = compose(
            parts.train, Setup.of(dim=4, batch_size=64, epochs=2), Term(1.0, InBatch(popular, exclude="known"))
        )
        fitted = fit(run, parts, device="cpu")
        assert fitted.test is not None
        models.append((fitted.run.model.state_dict(), fitted.test.metrics))
    assert models[0][1] == models[1][1]
    assert all(torch.equal(tensor, models[1][0][name]) for name, tensor in models[0][0].items())


class _Stop(BaseException):
    """Simulates a kill."""


def test_resumed_within_an_epoch_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run stopped inside an epoch of many windows and resumed has the tensors of an uninterrupted run."""
    monkeypatch.setattr(batches, "BLOCK", 16)
    monkeypatch.setattr(batches, "WINDOW", 4)
    parts_of(rows(10, 2000), tmp_path / "parts")
    prepare(tmp_path / "parts", tmp_path / "out")
    parts = split(read(tmp_path / "out"))
    settings = {"dim": 4, "n": 8, "batch_size": 50, "epochs": 2}

    def stop(epoch: int, step: int, loss: object) -> None:
        if (epoch, step) == (1, 3):
            raise _Stop

    fit(build("default", parts.train, settings), parts, tmp_path / "whole", device="cpu")
    with pytest.raises(_Stop):
        fit(
            build("default", parts.train, settings),
            parts,
            tmp_path / "stopped",
            device="cpu",
            progress=TrainingProgress(step=stop),
            save_seconds=-1.0,
        )
    fit(build("default", parts.train, settings), parts, tmp_path / "stopped", device="cpu", resume=True)
    one, other = (_tensors(tmp_path / name) for name in ("whole", "stopped"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from sparring.core.files import read_tensors

    return read_tensors(folder / "model.safetensors")[0]


def test_weights_sum_the_same_in_every_order_of_rows() -> None:
    """Weights whose float32 sum depends on the order give one sum for every order of rows."""
    weights = [
        1 + 2.0**-24,
        2.0**-53,
        2.0**-53,
    ]  # halfway between two float32 numbers, plus two that together round it up
    assert np.float32((weights[0] + weights[1]) + weights[2]) != np.float32(weights[0] + (weights[1] + weights[2]))
    found = set()
    for order in permutations(weights):
        columns = {"q": np.zeros(4, np.int32), "i": np.array([3, 3, 3, 1], np.int32), "w": np.array([*order, 5.0])}
        merged = pairs.merge_pairs(columns, 9)
        assert merged["i"].tolist() == [1, 3]
        assert merged["w"][0] == 5.0
        found.add(float(merged["w"][1]))
    assert len(found) == 1


@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_kth_smallest_in_chunks(kind: type) -> None:
    """Every order statistic of values with both signs, ties and extremes is found without a full sort."""
    random = np.random.default_rng(0)
    values = random.integers(-50, 50, 200).astype(kind)
    values[:4] = np.array([2**62, -(2**62), 0, -1], dtype=kind)
    if kind is np.float64:
        values[4:8] = [-0.5, 1e-300, -1e300, np.inf]
    ordered = sorted(values.tolist())
    assert [float(kth_smallest(values, k)) for k in range(200)] == [float(value) for value in ordered]


def test_checksums_notice_a_change(tmp_path: Path) -> None:
    """A changed byte and a file of another size are found when the folder is opened."""
    parts_of(rows(11), tmp_path / "parts")
    prepare(tmp_path / "parts", tmp_path / "out")
    content = bytearray((tmp_path / "out" / "items.npy").read_bytes())
    content[-1] ^= 1
    (tmp_path / "out" / "items.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"items\.npy is corrupt"):
        read(tmp_path / "out")
    (tmp_path / "out" / "items.npy").write_bytes(content[:-4])
    with pytest.raises(UserError, match=r"items\.npy .* bytes, expected"):
        read(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")


def test_training_data_that_changes_order_is_not_taken_for_sorted(tmp_path: Path) -> None:
    """A subset of a memory-mapped part has the counts and positives of its own rows."""
    parts_of(rows(12), tmp_path / "parts")
    train = split(prepare(tmp_path / "parts", tmp_path / "out")).train
    some = train.subset(np.arange(len(train))[::-3])
    assert type(some) is Interactions
    counts = np.zeros(train.n_items, dtype=np.int64)
    np.add.at(counts, train.items[::-3], 1)
    assert some.counts().tolist() == counts.tolist()
    assert len(some.positives().items) == len(some)


@pytest.mark.parametrize(
    "change",
    [{"rows": {"train": 1}}, {"rows": None}, {"notes": 5}, {"split": 3}],
    ids=["train", "rows", "notes", "split"],
)
def test_a_description_of_another_kind_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    """A prepared.json that its manifest lists, with parts that are missing or no numbers, is one line."""
    rows(0).write_parquet(tmp_path / "rows.parquet")
    prepare(tmp_path / "rows.parquet", tmp_path / "out")
    path = tmp_path / "out" / "prepared.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    write_manifest(tmp_path / "out")
    with pytest.raises(UserError, match=r"prepared\.json is corrupt"):
        read(tmp_path / "out")


def test_columns_of_another_length_are_named(tmp_path: Path) -> None:
    """An array that is too short for the rows is refused before anything is indexed by it."""
    rows(0).write_parquet(tmp_path / "rows.parquet")
    prepare(tmp_path / "rows.parquet", tmp_path / "out")
    items = np.load(tmp_path / "out" / "items.npy")
    np.save(tmp_path / "out" / "items.npy", items[:-1])
    write_manifest(tmp_path / "out")
    with pytest.raises(UserError, match=r"items\.npy"):
        read(tmp_path / "out")


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    """The error names the engines."""
    rows(0).write_parquet(tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="polars, spark"):
        prepare(tmp_path / "rows.parquet", tmp_path / "out", engine="duck")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
