"""Parts of the service: id lookup, the store, cached vectors of text towers."""

from __future__ import annotations

import datetime
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.interactions import Ids, Vocabulary
from sparring.models.retriever import Retriever
from sparring.recipes.settings import build
from sparring.serving.http import catalogue, conditions
from sparring.serving.http.answers import _json_value
from sparring.serving.http.catalogue import Catalogue, IdLookup
from sparring.serving.http.schema import RequestError
from sparring.serving.http.store import Change, Store
from sparring.training import trained
from sparring.training.fitting import fit
from support.run_files import change_tensors
from support.texts import text_parts, tiny_bert


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30, unique=True),
    st.lists(st.integers(-(2**70), 2**70), max_size=10),
)
def test_numbers_are_found_where_the_vocabulary_has_them(ids: list[int], others: list[int]) -> None:
    """Numbers and their texts are found; others give -1."""
    names, order = IdLookup(Vocabulary(ids)), sorted(ids)
    for asked in [*ids, *others]:
        expected = order.index(asked) if asked in order else -1
        assert names.find_one(asked) == names.find_one(str(asked)) == expected
    assert names.original(np.arange(len(ids))) == order
    assert names.find(["x", "", "-", "1.0", " 1", "007", "\u0663", "1_0"]).tolist() == [-1] * 8


@given(st.lists(st.text(max_size=6), min_size=1, max_size=30, unique=True), st.lists(st.text(max_size=6), max_size=10))
def test_texts_are_found_where_the_vocabulary_has_them(ids: list[str], others: list[str]) -> None:
    """Any text is found; a number finds the text that spells it."""
    names = IdLookup(Vocabulary([*ids, "5x", "17"]))
    known = Vocabulary([*ids, "5x", "17"]).ids.to_list()
    for asked in [*known, *others]:
        assert names.find_one(asked) == (known.index(asked) if asked in known else -1)
    assert names.original(np.arange(len(known))) == known
    assert names.find_one(17) == known.index("17")


@given(st.lists(st.none() | st.text(max_size=8), min_size=1, max_size=6), st.booleans())
def test_items_of_a_list_are_the_json_of_id_and_title(titles: list[str | None], texts: bool) -> None:
    """Of the run, changed, added, and as they were after a change is forgotten."""
    names = [f'"{row}' if texts else 7 * row for row in range(len(titles))]
    table = pl.DataFrame({"title": pl.Series(titles, dtype=pl.String)})
    items = Catalogue(Ids(Vocabulary([]), Vocabulary(names), item_table=table))
    kept = items.base.original(np.arange(len(names)))
    assert kept == names
    expected = dict(enumerate(titles))

    def check() -> None:
        dense = np.array([*expected])
        parts = b"".join(part + b"0" for part in items.listed(dense))
        assert json.loads(b"[" + parts[2:] + b"}]") == [
            {"id": name, "title": title, "score": 0}
            for name, title in zip(items.original(dense), expected.values(), strict=True)
        ]

    check()
    assert items.put(str(names[0]), {"title": "changed"}) == 0
    added = items.put("new", {"title": "added"})
    expected |= {0: "changed", added: "added"}
    check()
    items.forget(0)
    expected[0] = titles[0]
    check()


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (pl.Series([5.95, None, 7.5], dtype=pl.Float32), ["5.95", None, "7.5"]),
        (pl.Series([["red", None, "hat"], None, ["shoe"]]), ["red, hat", None, "shoe"]),
        (pl.Series([[1, 2], None, [3, 4]], dtype=pl.Array(pl.Int64, 2)), ["1, 2", None, "3, 4"]),
    ],
)
def test_titles_of_any_type_are_texts(column: pl.Series, texts: list[str | None]) -> None:
    """Of the run and of an item whose other columns were changed, in a list and by themselves."""
    table = pl.DataFrame({"title": column, "price": [1, 2, 3]})
    items = Catalogue(Ids(Vocabulary([]), Vocabulary(["a", "b", "c"]), item_table=table))
    for row in range(-1, 3):
        if row >= 0:
            items.put("abc"[row], {"price": 4})
        assert items.values(np.arange(3), "title") == texts
        parts = b"".join(part + b"0" for part in items.listed(np.arange(3)))
        assert [item["title"] for item in json.loads(b"[" + parts[2:] + b"}]")] == texts


def test_the_store_keeps_the_last_word_on_every_item(tmp_path: Path) -> None:
    """Items are ordered by last change, with bit-exact vectors; synchronous=FULL and WAL are on."""
    store = Store(tmp_path / "s" / "items.sqlite")
    vector = np.array([0.1, -3e-20, 7.0], np.float32)
    assert (
        store.write([Change("a", {"title": "A"}), Change("b", vector=vector, model="m"), Change(5, like=["a", 7])]) == 3
    )
    assert store.write([Change("a", deleted=True)]) == 4
    assert [(change.id, change.deleted) for change in store.since(0)] == [("b", False), (5, False), ("a", True)]
    assert [change.id for change in store.since(2)] == [5, "a"]
    kept = store.get("b")
    assert kept is not None
    assert kept.vector is not None
    assert kept.vector.tobytes() == vector.tobytes()
    assert store.get(5) == Change(5, like=["a", 7])
    assert store.get("zzz") is None
    assert store.counts() == (2, 1)
    assert store._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert store._db.execute("PRAGMA synchronous").fetchone()[0] == 2
    with pytest.raises(UserError, match="in use"):
        Store(tmp_path / "s" / "items.sqlite")
    store.close()
    again = Store(tmp_path / "s" / "items.sqlite")
    assert again.sequence == 4
    again.close()


def test_a_store_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    """A folder and a table of another schema raise errors."""
    with pytest.raises(UserError, match="cannot"):
        Store(tmp_path)
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE items (id TEXT)")
    other.close()
    with pytest.raises(UserError, match=r"other\.sqlite"):
        Store(tmp_path / "other.sqlite")


def test_a_change_is_on_the_disk_when_it_is_acknowledged(tmp_path: Path) -> None:
    """SQLite syncs its log with every commit (synchronous=FULL is 2); with OFF a power cut would lose changes."""
    store = Store(tmp_path / "items.sqlite")
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


def test_item_vectors_of_a_transformer_are_computed_once(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors are cached; another model or a damaged file recomputes them; an unwritable folder is no error."""
    pytest.importorskip("transformers")
    parts = text_parts()
    bert = tiny_bert(tmp_path_factory.mktemp("bert"))
    settings = {"encoder": str(bert), "epochs": 1, "query_tower": "text", "item_tower": "text", "warmup": 2}
    fit(build("ssl_pop", parts.train, settings), parts, tmp_path / "run", k=(10,), device="cpu")
    truth = trained.load(tmp_path / "run").model.item_vectors()
    calls: list[int] = []
    compute = Retriever.item_vectors
    monkeypatch.setattr(Retriever, "item_vectors", lambda self, *given: (calls.append(1), compute(self, *given))[1])
    first = trained.load(tmp_path / "run").recommend_text(["some words"], 3)
    assert len(calls) == 1
    second = trained.load(tmp_path / "run")
    assert second.recommend_text(["some words"], 3).equals(first)
    assert len(calls) == 1
    np.testing.assert_allclose(second.item_vectors().numpy(), truth.numpy(), rtol=1e-5, atol=1e-6)
    path = next((tmp_path / "run" / "cache").iterdir())
    path.write_bytes(path.read_bytes()[:200])
    assert trained.load(tmp_path / "run").recommend_text(["some words"], 3).equals(first)
    assert len(calls) == 2
    monkeypatch.setattr(os, "replace", _full)
    path.unlink()
    assert trained.load(tmp_path / "run").recommend_text(["some words"], 3).equals(first)
    assert len(calls) == 3
    monkeypatch.undo()
    monkeypatch.setattr(Retriever, "item_vectors", lambda self, *given: (calls.append(1), compute(self, *given))[1])
    model = trained.load(tmp_path / "run")
    tensors, _ = files.read_tensors(tmp_path / "run" / "model.safetensors")
    key = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    change_tensors(tmp_path / "run", "model", **{key: tensors[key] + 0.5})
    trained.load(tmp_path / "run").item_vectors()
    assert len(calls) == 4
    assert model is not None
    assert len(list((tmp_path / "run" / "cache").glob("items-*"))) == 1


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_texts_of_equal_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several ids have one hash, each finds itself, and an unknown one of that hash finds none."""
    monkeypatch.setattr(catalogue, "hash", len, raising=False)
    ids = ["aa", "bb", "cc", "d"]
    names = IdLookup(Vocabulary(ids))
    assert names.find([*ids, "zz", "q", "long"]).tolist() == [0, 1, 2, 3, -1, -1, -1]


def test_a_store_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """An error of SQLite while reading is one line with the path."""
    store = Store(tmp_path / "items.sqlite")
    store._db.execute("DROP TABLE state")
    with pytest.raises(UserError, match=r"items\.sqlite cannot be read"):
        store.read_state("swapped")
    store.close()


def test_a_change_that_fails_half_way_is_undone(tmp_path: Path) -> None:
    """Of several items of which one cannot be stored none is, and the next change is."""
    store = Store(tmp_path / "items.sqlite")
    store._db.execute(
        "CREATE TEMP TRIGGER full BEFORE INSERT ON items WHEN new.id = 'b' BEGIN SELECT RAISE(ABORT, 'disk full'); END"
    )
    with pytest.raises(RequestError) as caught:
        store.write([Change("a", {"title": "A"}), Change("b", {"title": "B"})])
    assert caught.value.status == 507
    assert list(store.since(0)) == []
    store.write([Change("c", {"title": "C"})])
    assert [change.id for change in store.since(0)] == ["c"]
    store.close()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        (True, True),
        (datetime.date(2026, 11, 15), "2026-11-15"),
        ([1.5, float("nan")], [1.5, None]),
        (list(range(100)), list(range(64))),
    ],
)
def test_values_as_json(value: Any, written: Any) -> None:
    """Numbers that JSON lacks are null, dates are text, long lists are cut."""
    assert _json_value(value) == written


def test_columns_of_lists_and_structs() -> None:
    """Arrays and lists are searched for a value; structs cannot be filtered; durations have no texts."""
    table = pl.DataFrame(
        {"array": [[1, 2], [3, 4]], "about": [{"x": 1}] * 2, "wait": [datetime.timedelta(1)] * 2},
        schema_overrides={"array": pl.Array(pl.Int64, 2)},
    )
    test = conditions.expression([("array", "contains", 3)], table.schema)
    assert table.select(test).to_series().to_list() == [False, True]
    for column, op, value in (("about", "=", 1), ("array", "=", 1), ("wait", "=", "1 day")):
        with pytest.raises(RequestError) as caught:
            conditions.expression([(column, op, value)], table.schema)
        assert (caught.value.status, column in caught.value.message) == (422, True)
