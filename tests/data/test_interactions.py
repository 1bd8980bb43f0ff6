"""Vocabularies, columns, positives and the id maps of a run folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.core.errors import UserError
from sparring.data import Ids, Interactions, Split, Vocabulary, from_frame

quick = settings(max_examples=60)
integers = st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=40)
texts = st.lists(st.one_of(st.none(), st.text(max_size=6)), min_size=1, max_size=40)
pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=1, max_size=80)


def brute(rows: list[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, set[int]] = {}
    for query, item in rows:
        found.setdefault(query, set()).add(item)
    return {query: sorted(items) for query, items in found.items()}


def plain(rows: list[tuple[int, int]], n_queries: int = 7, n_items: int = 9) -> Interactions:
    queries, items = np.array(rows, dtype=np.int32).reshape(-1, 2).T.copy()
    return Interactions(queries, items, Vocabulary(np.arange(n_queries)), Vocabulary(np.arange(n_items)))


@quick
@given(st.one_of(integers, texts))
def test_ids_survive_the_round_trip(ids: list) -> None:
    """decode(encode(x)) = x for every id; dense ids are the ranks of the sorted distinct ids; null is -1."""
    vocabulary = Vocabulary(ids)
    distinct = sorted({i for i in ids if i is not None}, key=lambda i: i.encode() if isinstance(i, str) else i)
    assert len(vocabulary) == len(distinct)
    dense = vocabulary.encode(ids)
    assert dense.dtype == np.int64
    assert dense.tolist() == [-1 if i is None else distinct.index(i) for i in ids]
    assert vocabulary.decode(dense[dense >= 0]).tolist() == [i for i in ids if i is not None]


def test_unknown_ids_are_minus_one_and_text_finds_integers() -> None:
    """An unknown id is -1; the text "7" finds the integer 7 and the integer 7 the text "7"."""
    assert Vocabulary([7, 3]).encode(["7", "x", "4", "3.5"]).tolist() == [1, -1, -1, -1]
    assert Vocabulary(["7", "b"]).encode([7, 8]).tolist() == [0, -1]
    assert Vocabulary([7, 3]).encode([]).tolist() == []


def test_ids_above_int64_and_float_ids() -> None:
    """Unsigned ids beyond int64 keep their value; integral floats are integers; fractions are errors."""
    big = Vocabulary(np.array([2**64 - 1, 5], dtype=np.uint64))
    assert big.decode([1, 0]).tolist() == [2**64 - 1, 5]
    assert Vocabulary(np.array([3.0, np.nan, 1.0])).decode([0, 1]).tolist() == [1, 3]
    with pytest.raises(UserError, match=r"1\.5"):
        Vocabulary([1.5, 2.0])


def test_decode_keeps_shape_and_refuses_what_is_outside() -> None:
    """decode keeps the shape and names a dense id outside the vocabulary."""
    vocabulary = Vocabulary(["a", "b", "c"])
    assert vocabulary.decode(torch.tensor([[0, 2], [1, 1]])).tolist() == [["a", "c"], ["b", "b"]]
    for wrong in (-1, 3):
        with pytest.raises(UserError, match=str(wrong)):
            vocabulary.decode([0, wrong])


@quick
@given(pairs)
def test_positives_equal_a_dict_of_sets(rows: list[tuple[int, int]]) -> None:
    """CSR rows are each query's distinct items, sorted, for any order and repetition of rows."""
    found = plain(rows).positives()
    start, items = found.start.tolist(), found.items.tolist()
    assert found.start.dtype == torch.int64
    assert len(start) == 8
    assert {q: items[start[q] : start[q + 1]] for q in range(7) if start[q] < start[q + 1]} == brute(rows)


@quick
@given(pairs)
def test_counts_and_subset(rows: list[tuple[int, int]]) -> None:
    """counts() counts rows per item; a subset keeps the chosen rows and the vocabularies."""
    data = plain(rows)
    assert data.counts().tolist() == [sum(item == i for _, item in rows) for i in range(9)]
    part = data.subset(np.arange(len(rows)) % 2 == 0)
    assert list(zip(part.queries.tolist(), part.items.tolist(), strict=True)) == rows[::2]
    assert part.item_ids is data.item_ids
    assert part.n_items == 9


def test_pairs_share_memory_with_the_columns() -> None:
    """Tensors are views, not copies."""
    data = plain([(0, 1), (1, 2)])
    queries, items = data.pairs()
    assert queries.data_ptr() == data.queries.ctypes.data
    assert items.data_ptr() == data.items.ctypes.data
    assert data.positives().items.data_ptr() == data.items.ctypes.data


@quick
@given(pairs, pairs)
def test_seen_is_train_for_valid_and_both_for_test(train: list[tuple[int, int]], valid: list[tuple[int, int]]) -> None:
    """Validation masks the training part; the test masks training and validation."""
    parts = Split(plain(train), plain(valid), plain([(0, 0)]))
    for part, rows in (("valid", train), ("test", train + valid)):
        seen = parts.seen_for(part)
        lists = {q: seen.items[seen.start[q] : seen.start[q + 1]].tolist() for q in range(7)}
        assert {q: items for q, items in lists.items() if items} == brute(rows)
    with pytest.raises(UserError, match="'tset'"):
        parts.seen_for("tset")


def test_columns_of_different_lengths_are_refused() -> None:
    """A time column of another length, and a table of another length, are errors that give both lengths."""
    ids = Vocabulary([0, 1])
    one = np.zeros(3, dtype=np.int32)
    with pytest.raises(UserError, match="time has 2 rows, queries has 3"):
        Interactions(one, one, ids, ids, time=np.zeros(2))
    with pytest.raises(UserError, match="item_table has 5 rows"):
        Interactions(one, one, ids, ids, item_table=pl.DataFrame({"title": ["x"] * 5}))


@pytest.mark.parametrize("ids", [[5, -2, 9], ["x", "a", "é"]])
def test_id_maps_and_tables_survive_saving(tmp_path: Path, ids: list) -> None:
    """Ids.load gives back the vocabularies and tables that save_ids wrote, and no table where there is none."""
    frame = pl.DataFrame({"user": [1, 2, 2], "item": ids})
    data = from_frame(frame, items=pl.DataFrame({"item": ids, "name": ["one", "two", None]}))
    data.save_ids(tmp_path / "run")
    back = Ids.load(tmp_path / "run")
    assert back.item_ids.decode([0, 1, 2]).tolist() == data.item_ids.decode([0, 1, 2]).tolist() == sorted(ids)
    assert back.item_table is not None
    assert data.item_table is not None
    assert back.item_table.equals(data.item_table)
    assert "title" in back.item_table.columns
    assert back.query_table is None
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == [
        "item_ids.parquet",
        "item_table.parquet",
        "query_ids.parquet",
    ]


def test_a_damaged_or_missing_vocabulary_is_one_line(tmp_path: Path) -> None:
    """Loading garbage, the wrong table, or nothing names the file."""
    path = tmp_path / "item_ids.parquet"
    with pytest.raises(UserError, match=r"no such file.*item_ids"):
        Vocabulary.load(path)
    path.write_bytes(b"PAR1 no PAR1")
    with pytest.raises(UserError, match=r"item_ids\.parquet is not a readable") as caught:
        Vocabulary.load(path)
    assert "\n" not in str(caught.value)
    pl.DataFrame({"a": [1]}).write_parquet(path)
    with pytest.raises(UserError, match="columns are a"):
        Vocabulary.load(path)


def test_saving_where_nothing_can_be_written_is_one_line(tmp_path: Path) -> None:
    """A path below a file raises an error that names it."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        Vocabulary([1]).save(tmp_path / "file" / "ids.parquet")
