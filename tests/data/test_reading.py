"""Readers: every format gives the same interactions, rows are cleaned as documented, bad input is one line."""

from __future__ import annotations

import gzip
import warnings
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.sparse
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparring.core.errors import UserError
from sparring.data import Interactions, describe, from_frame, read, show, split
from sparring.data.cache import load_array
from sparring.data.pairs import undated
from sparring.data.prepared.preparation import prepare
from sparring.data.reading import describe_roles

quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])

USERS, ITEMS, TIMES = ["b", "a", "b", "c"], [7, 5, 5, 9], [40, 10, 30, 20]
WANT = {("a", 5): 10, ("b", 5): 30, ("b", 7): 40, ("c", 9): 20}
SMALL = pl.DataFrame({"user_id": USERS, "item_id": ITEMS, "timestamp": TIMES})


def content(data: Interactions) -> dict[tuple, int | None]:
    """(query, item) -> time, in original ids."""
    times = [None] * len(data) if data.time is None else data.time.tolist()
    queries, items = data.query_ids.decode(data.queries).tolist(), data.item_ids.decode(data.items).tolist()
    return dict(zip(zip(queries, items, strict=True), times, strict=True))


def refusal(path: Path, **arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def test_parquet_csv_tsv_and_gzip_read_alike(tmp_path: Path) -> None:
    """The same table in any of five forms gives the same pairs and times, with integer items as integers."""
    SMALL.write_parquet(tmp_path / "a.parquet")
    SMALL.write_csv(tmp_path / "a.csv")
    SMALL.write_csv(tmp_path / "semi.csv", separator=";")
    SMALL.write_csv(tmp_path / "a.tsv", separator="\t")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    for name in ("a.parquet", "a.csv", "semi.csv", "a.tsv", "a.csv.gz"):
        data = read(tmp_path / name)
        assert content(data) == WANT, name
        assert data.queries.dtype == data.items.dtype == np.int32
        assert data.item_ids.kind == "int"
        assert data.notes == ()


@pytest.mark.parametrize("kind", ["polars", "lazy", "arrow", "pandas"])
def test_tables_in_memory_read_like_files(tmp_path: Path, kind: str) -> None:
    """A frame of polars or pandas, or an Arrow table, gives the pairs, tables, texts and notes of the file."""
    if kind in ("arrow", "pandas"):
        pytest.importorskip("pyarrow")

    def table(frame: pl.DataFrame) -> Any:
        if kind == "pandas":
            pandas = pytest.importorskip("pandas")
            return pandas.DataFrame(frame.to_dict(as_series=False), index=range(100, 100 + len(frame)))
        return frame.to_arrow() if kind == "arrow" else frame.lazy() if kind == "lazy" else frame

    assert content(read(table(SMALL))) == WANT
    rich = SMALL.with_columns(stars=pl.Series([5, 1, 4, 3]), title=pl.Series(["x", "y", "y", "z"]))
    rich.write_parquet(tmp_path / "a.parquet")
    for more in ({}, {"min_rating": 3}):
        ours, wanted = read(table(rich), **more), read(tmp_path / "a.parquet", **more)
        assert content(ours) == content(wanted)
        assert ours.notes == wanted.notes
        assert ours.item_table is not None
        assert ours.item_table.equals(wanted.item_table)
    names = table(pl.DataFrame({"item_id": [9, 5, 7], "title": ["nine", "five", "seven"]}))
    titles = read(table(SMALL), items=names).titles()
    assert titles is not None
    assert titles.tolist() == ["five", "seven", "nine"]


def test_what_is_no_table_is_one_line() -> None:
    """The error names the given type or the columns found, and the supported input."""
    for wrong, words in ((5, "int"), (pl.DataFrame({"x": [1]}), "the table has the columns x"), (object(), "object")):
        assert words in refusal(wrong)  # type: ignore[arg-type]


def test_a_folder_of_parts_equals_one_file(tmp_path: Path) -> None:
    """Parts, in subfolders and with other integer widths, read like their concatenation."""
    (tmp_path / "more").mkdir()
    SMALL[:1].with_columns(pl.col("item_id").cast(pl.Int16)).write_parquet(tmp_path / "0.parquet")
    SMALL[1:].write_parquet(tmp_path / "more" / "1.parquet")
    assert content(read(tmp_path)) == WANT
    SMALL.drop("timestamp").write_parquet(tmp_path / "more" / "2.parquet")
    assert "'timestamp'" in refusal(tmp_path)


@quick
@given(st.lists(st.tuples(*(st.integers(0, most) for most in (5, 6, 9, 4))), min_size=2, max_size=60), st.randoms())
def test_duplicates_merge_and_row_order_does_not_matter(found: list, shuffler: Random) -> None:
    """One row per pair remains, with the last time and the summed weight, in any row order."""
    if len({r[0] for r in found}) < 2 or len({r[1] for r in found}) < 2 or not any(r[3] for r in found):
        return
    want: dict[tuple[int, int], tuple[int, float]] = {}
    for query, item, time, weight in found:
        last, total = want.get((query, item), (-1, 0.0))
        want[query, item] = (max(last, time), total + weight)
    other = list(found)
    shuffler.shuffle(other)
    for version in (found, other):
        data = from_frame(pl.DataFrame(version, schema=["user", "item", "time", "weight"], orient="row"))
        assert data.weight is not None
        assert data.time is not None
        assert data.weight.dtype == np.float32
        queries, items = data.query_ids.decode(data.queries).tolist(), data.item_ids.decode(data.items).tolist()
        got = dict(
            zip(
                zip(queries, items, strict=True),
                zip(data.time.tolist(), data.weight.tolist(), strict=True),
                strict=True,
            )
        )
        assert got == want
        assert list(got) == sorted(want)
        assert (f"merged {len(found) - len(want)} duplicates" in data.notes) == (len(found) > len(want))


@quick
@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.integers(0, 4)), st.one_of(st.none(), st.sampled_from("xyz"))),
        min_size=1,
        max_size=40,
    )
)
def test_rows_without_ids_are_dropped_and_counted(found: list) -> None:
    """Exactly the rows with two ids remain, and the note counts the others; too few ids is an error."""
    frame = pl.DataFrame(found, schema={"user": pl.Int64, "item": pl.String}, orient="row")
    want = {(q, i) for q, i in found if q is not None and i is not None}
    if len({q for q, _ in want}) < 2 or len({i for _, i in want}) < 2:
        with pytest.raises(UserError, match=r"null or empty|only one"):
            from_frame(frame)
        return
    data = from_frame(frame)
    assert set(content(data)) == want
    lost = sum(q is None or i is None for q, i in found)
    assert (f"dropped {lost:,} rows with null or empty ids" in data.notes) == (lost > 0)


def test_ratings_are_cut_only_when_asked() -> None:
    """Without a threshold every row is a positive; with one, lower and missing ratings go, with their ids."""
    frame = pl.DataFrame({"user": [1, 1, 2, 3], "item": [1, 2, 3, 4], "rating": [5.0, 3.5, 4.0, None]})
    assert len(from_frame(frame)) == 4
    data = from_frame(frame, min_rating=4)
    assert set(content(data)) == {(1, 1), (2, 3)}
    assert data.n_items == 2
    assert data.notes == ("dropped 2 rows with rating below 4",)
    with pytest.raises(UserError, match="'rating' of at least 9"):
        from_frame(frame, min_rating=9)
    with pytest.raises(UserError, match=r"which column is the rating.*user, item"):
        from_frame(frame.drop("rating"), min_rating=4)


def test_labels_split_positives_from_shown() -> None:
    """Label 1 is a positive, 0 is shown; a pair with both is a positive; the vocabulary has all ids."""
    frame = pl.DataFrame({"user": [1, 1, 1, 2, 2], "item": [1, 2, 1, 3, 9], "label": [1, 0, 0, 1, 0]})
    data = from_frame(frame)
    assert set(content(data)) == {(1, 1), (2, 3)}
    assert data.n_items == 4
    assert data.shown is not None
    assert list(zip(data.query_ids.decode(data.shown[0]), data.item_ids.decode(data.shown[1]), strict=True)) == [
        (1, 2),
        (2, 9),
    ]
    lists = data.shown_lists()
    assert lists is not None
    assert lists.start.tolist() == [0, 1, 2]
    assert lists.items.tolist() == [1, 3]
    assert len(from_frame(frame, label="")) == 4
    assert from_frame(frame, label="").shown is None
    with pytest.raises(UserError, match="labelled 1"):
        from_frame(frame.with_columns(label=0))
    with pytest.raises(UserError, match="'label' of the table holds '7'"):
        from_frame(frame.with_columns(label=pl.lit(7)))


@pytest.mark.parametrize(
    "values", [["train", "VAL", "test", "Train"], ["0", "1", "2", "0"], [0, 1, 2, 0], [0.0, 1.0, 2.0, 0.0]]
)
def test_split_columns_in_words_and_numbers(values: list) -> None:
    """Words in any case and the codes 0, 1, 2 mean train, valid, test."""
    data = from_frame(SMALL.with_columns(split=pl.Series(values)))
    assert data.split is not None
    assert data.split.dtype == np.uint8
    got = dict(zip(content(data), data.split.tolist(), strict=True))
    assert got == {("b", 7): 0, ("a", 5): 1, ("b", 5): 2, ("c", 9): 0}


def test_a_pair_in_train_and_test_is_train() -> None:
    """A repeated pair goes to the earliest part: a seen item could never be found."""
    frame = pl.DataFrame({"user": [1, 1, 2], "item": [1, 1, 2], "split": ["test", "train", "test"]})
    part = from_frame(frame).split
    assert part is not None
    assert part.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("values", "want"),
    [
        (["40", "10", "30", "20"], [10, 30, 40, 20]),
        (["4.5", "1", "3", "2"], [1.0, 3.0, 4.5, 2.0]),
        (
            ["2020-01-04", "2020-01-01", "2020-01-03", "2020-01-02"],
            [1577836800000000 + day * 86400000000 for day in (0, 2, 3, 1)],
        ),
        ([datetime(2020, 1, d) for d in (4, 1, 3, 2)], [1577836800000000 + day * 86400000000 for day in (0, 2, 3, 1)]),
    ],
)
def test_times_in_numbers_and_dates(values: list, want: list) -> None:
    """Numbers are kept; dates, as text or typed, become microseconds since 1970."""
    data = from_frame(SMALL.with_columns(timestamp=pl.Series(values)))
    assert data.time is not None
    assert data.time.tolist() == want


def test_null_times() -> None:
    """Rows without a time count as the earliest; a guessed column of nulls is ignored, a named one is an error."""
    data = from_frame(SMALL.with_columns(timestamp=pl.Series([None, 1, 2, 3])))
    assert len(data) == 4
    assert data.time is not None
    assert sorted(data.time.tolist())[1:] == [1, 2, 3]
    assert undated(data.time).sum() == 1
    assert "1 row without a timestamp" in data.notes[0]
    empty = SMALL.with_columns(timestamp=pl.lit(None, dtype=pl.Int64))
    data = from_frame(empty)
    assert data.time is None
    assert len(data) == 4
    assert "ignored the column timestamp" in data.notes[0]
    with pytest.raises(UserError, match=r"'timestamp'.*nulls only"):
        from_frame(empty, time="timestamp")


def test_text_ids_keep_leading_zeros(tmp_path: Path) -> None:
    """In a CSV, ids are integers only if all of them are written as integers."""
    (tmp_path / "a.csv").write_text("user,item\n007,1\n8,2\n7,-3\n")
    data = read(tmp_path / "a.csv")
    assert data.query_ids.ids.to_list() == ["007", "7", "8"]
    assert data.item_ids.ids.to_list() == [-3, 1, 2]


def test_categorical_and_float_ids() -> None:
    """Categories are read as text, integral floats as integers; fractions are errors."""
    frame = SMALL.with_columns(pl.col("user_id").cast(pl.Categorical), pl.col("item_id").cast(pl.Float64))
    assert content(from_frame(frame)) == WANT
    with pytest.raises(UserError, match=r"2\.5"):
        from_frame(pl.DataFrame({"user": [1.0, 2.5], "item": [1, 2]}))
    with pytest.raises(UserError, match="'user' of the table holds List"):
        from_frame(pl.DataFrame({"user": [[1], [2]], "item": [1, 2]}))


def test_item_tables_line_up_with_dense_ids(tmp_path: Path) -> None:
    """Row i of the table describes dense item i, null if unknown; only catalogue=True adds items; titles are found."""
    SMALL.write_parquet(tmp_path / "a.parquet")
    table = pl.DataFrame(
        {"item_id": [9, 5, 11, 5], "name": ["nine", "five", "eleven", "again"], "price": [1.5, 2.5, 3.5, 4.5]}
    )
    table.write_csv(tmp_path / "i.csv")
    data = read(tmp_path / "a.parquet", items=tmp_path / "i.csv")
    assert data.item_table is not None
    assert data.item_ids.ids.to_list() == [5, 7, 9]
    assert data.item_table["title"].to_list() == ["five", None, "nine"]
    assert data.item_table["price"].to_list() == [2.5, None, 1.5]
    assert "item_id" not in data.item_table.columns
    titles = data.titles()
    assert titles is not None
    assert titles.tolist() == ["five", None, "nine"]
    whole = read(tmp_path / "a.parquet", items=tmp_path / "i.csv", catalogue=True)
    assert whole.item_ids.ids.to_list() == [5, 7, 9, 11]
    assert whole.counts().tolist() == [2, 1, 1, 0]
    assert "no id of the item table's column 'item_id'" in refusal(
        tmp_path / "a.parquet", items=pl.DataFrame({"item_id": [77], "a": [1]})
    )
    assert "no such item table" in refusal(tmp_path / "a.parquet", items=tmp_path / "nothing.csv")
    people = read(tmp_path / "a.parquet", queries=pl.DataFrame({"user_id": ["c", "a"], "age": [3, 1]}))
    assert people.query_table is not None
    assert people.query_table["age"].to_list() == [1, None, 3]


def test_an_item_table_with_an_id_twice(tmp_path: Path) -> None:
    """The first row of each id counts, and a note counts the others."""
    pl.DataFrame({"user_id": [1, 2, 1], "item_id": [5, 6, 7]}).write_parquet(tmp_path / "pairs.parquet")
    table = pl.DataFrame(
        {"item_id": [5, 6, 5, 5, 7, 9, 9], "title": ["five", "six", "again", "and again", "seven", "nine", "unknown"]}
    )
    table.write_parquet(tmp_path / "items.parquet")
    data = read(tmp_path / "pairs.parquet", items=tmp_path / "items.parquet")
    assert data.item_table is not None
    assert data.item_table["title"].to_list() == ["five", "six", "seven"]
    assert ["2 rows" in note for note in data.notes] == [True, True]
    assert "no interactions" in data.notes[0]
    assert "earlier row" in data.notes[1]


def test_dates_that_are_not_read_name_those_that_are(tmp_path: Path) -> None:
    """The error lists supported date formats."""
    (tmp_path / "bad.csv").write_text("user_id,item_id,time\n1,5,02/23/2022\n2,6,02/23/2022\n")
    with pytest.raises(UserError, match="'02/23/2022', neither a number nor a date") as told:
        read(tmp_path / "bad.csv")
    for written in ("2022-02-23", "2022-02-23 14:05:00", "23.02.2022"):
        assert written in str(told.value)
        pl.DataFrame({"user_id": [1, 2], "item_id": [5, 6], "time": [written] * 2}).write_csv(tmp_path / "good.csv")
        time = read(tmp_path / "good.csv").time
        assert time is not None
        assert str(np.datetime64(int(time[0]), "us"))[:10] == "2022-02-23"


def test_a_folder_with_its_tables(tmp_path: Path) -> None:
    """interactions.parquet is read with items.* and users.* of the same folder."""
    SMALL.write_parquet(tmp_path / "interactions.parquet")
    pl.DataFrame({"item_id": [5, 7, 9], "title": list("xyz")}).write_parquet(tmp_path / "items.parquet")
    pl.DataFrame({"user_id": list("abc"), "age": [1, 2, 3]}).write_csv(tmp_path / "users.csv")
    data = read(tmp_path)
    assert content(data) == WANT
    assert data.item_table is not None
    assert data.query_table is not None
    assert data.item_table["title"].to_list() == list("xyz")
    assert data.query_table["age"].to_list() == [1, 2, 3]


def test_recbole_atomic_files(tmp_path: Path) -> None:
    """Typed headers are understood, .item and .user become tables, and parts of a benchmark become the split."""
    inter = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    rows = ["1\t10\t5\t100\n", "2\t11\t3\t200\n", "1\t12\t4\t300\n"]
    one = tmp_path / "one"
    one.mkdir()
    (one / "ml.inter").write_text(inter + "".join(rows))
    (one / "ml.item").write_text(
        'item_id:token\tmovie_title:token_seq\tyear:float\n12\tTwelve "12"\t1999\n10\tTen\t2000\n'
    )
    (one / "ml.user").write_text("user_id:token\tage:float\n1\t20\n2\t30\n")
    assert content(read(one / "ml.inter")) == {(1, 10): 100, (2, 11): 200, (1, 12): 300}
    data = read(one)
    assert content(data) == {(1, 10): 100, (2, 11): 200, (1, 12): 300}
    assert data.item_table is not None
    assert data.item_table["title"].to_list() == ["Ten", None, 'Twelve "12"']
    assert data.item_table["year"].to_list() == [2000.0, None, 1999.0]
    assert data.query_table is not None
    assert data.query_table["age"].to_list() == [20.0, 30.0]
    parts = tmp_path / "parts"
    parts.mkdir()
    for part, row in zip(("train", "valid", "test"), rows, strict=True):
        (parts / f"ml.{part}.inter").write_text(inter + row)
    data = read(parts)
    assert data.split is not None
    assert dict(zip(content(data), data.split.tolist(), strict=True)) == {(1, 10): 0, (2, 11): 1, (1, 12): 2}
    (one / "bad.inter").write_text("user_id\titem_id:token\n1\t2\n")
    assert "'user_id'" in refusal(one / "bad.inter")
    assert "several .inter files" in refusal(one)


def test_lightgcn_lists(tmp_path: Path) -> None:
    """Lines `user item item ...` become pairs, file names the split; users without items are skipped."""
    (tmp_path / "train.txt").write_text("0 5 3\n1 3 \n2\n10 7  5\n")
    (tmp_path / "test.txt").write_text("0 7\n1\n10 3\n")
    want = {(0, 5): 0, (0, 3): 0, (1, 3): 0, (10, 7): 0, (10, 5): 0, (0, 7): 2, (10, 3): 2}
    for path in (tmp_path, tmp_path / "train.txt"):
        data = read(path)
        assert data.split is not None
        assert dict(zip(content(data), data.split.tolist(), strict=True)) == want
        assert data.query_ids.ids.to_list() == [0, 1, 10]


@pytest.mark.parametrize(
    ("columns", "query", "item"),
    [
        (["userId", "movieId", "rating", "timestamp"], "userId", "movieId"),
        (["customer_id", "sku", "date"], "customer_id", "sku"),
        (["session_id", "user_id", "product_id"], "user_id", "product_id"),
        (["SessionID", "item"], "SessionID", "item"),
        (["user_id", "user", "asin", "parent_asin"], "user_id", "asin"),
    ],
)
def test_columns_are_guessed(columns: list[str], query: str, item: str) -> None:
    """Common names in any spelling are found; ids beat names, users beat sessions."""
    frame = pl.DataFrame({name: [n * 2 + 1, n * 2 + 2] for n, name in enumerate(columns)})
    data = from_frame(frame)
    assert data.query_ids.ids.to_list() == frame[query].to_list()
    assert data.item_ids.ids.to_list() == frame[item].to_list()


def test_bad_input_is_one_line_that_names_it(tmp_path: Path) -> None:
    """Bad files, columns, ids, splits and numbers raise one-line errors that name them."""
    assert "nowhere.parquet" in refusal(tmp_path / "nowhere.parquet")
    good = tmp_path / "good.parquet"
    SMALL.write_parquet(good)
    assert "'buyer'" in (said := refusal(good, query="buyer"))
    assert "user_id, item_id, timestamp" in said
    assert "'user_id' cannot be both" in refusal(good, item="user_id")
    assert "'query'" in refusal(good, qery="user_id")
    for name, text in (("empty.csv", ""), ("blank.csv", "\n"), ("header.csv", "user,item\n")):
        (tmp_path / name).write_text(text)
        assert "is empty" in (said := refusal(tmp_path / name))
        assert name in said
    pl.DataFrame({"user": [], "item": []}, schema={"user": pl.Int64, "item": pl.Int64}).write_parquet(
        tmp_path / "none.parquet"
    )
    assert "none.parquet is empty" in refusal(tmp_path / "none.parquet")
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(good.read_bytes()[:-200])
    assert "damaged.parquet" in refusal(damaged)
    (tmp_path / "odd.xls").write_text("x")
    assert "unknown kind of file" in refusal(tmp_path / "odd.xls")
    (tmp_path / "bare").mkdir()
    assert "nothing to read" in refusal(tmp_path / "bare")
    for frame, message in (
        (pl.DataFrame({"user": [None, None], "item": [1, 2]}), "all 2 rows.*'user'"),
        (pl.DataFrame({"user": ["me", "me"], "item": [1, 2]}), "only one query .'me'"),
        (pl.DataFrame({"user": [1, 2], "item": [4, 4]}), "only one item .4"),
        (pl.DataFrame({"a": [1], "b": [2]}), "which column is the query.*a, b"),
        (
            pl.DataFrame({"user_id": [1], "query_id": [2], "item": [3]}),
            "'user_id' and 'query_id' could each be the query",
        ),
        (pl.DataFrame({"user": [1, 2], "item": [4, 5], "split": ["train", "holdout"]}), "'holdout'"),
        (pl.DataFrame({"user": [1, 2], "item": [4, 5], "split": ["train", None]}), "holds null"),
        (pl.DataFrame({"user": [1, 2], "item": [4, 5], "weight": ["1", "much"]}), "'much'"),
        (pl.DataFrame({"user": [1, 2], "item": [4, 5], "weight": [1.0, -3.0]}), "holds -3"),
        (pl.DataFrame({"user": [1, 2], "item": [4, 5], "time": ["5", "noon"]}), "'noon'"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            from_frame(frame)
        assert "\n" not in str(caught.value)


ACCENTS = "user,item,title\n" + "".join(
    f"u{u},{name}{i},x\n" for name in ("caf\u00e9", "caf\u00e8") for u in range(4) for i in range(5)
)


@pytest.mark.parametrize("kind", ["csv", "gz", "inter", "lists"])
def test_ids_that_are_not_utf8_are_refused(tmp_path: Path, kind: str) -> None:
    """Ids that are not UTF-8 could become equal, so they raise an error with file, line, column and advice."""
    pairs = [line.split(",")[:2] for line in ACCENTS.splitlines()[1:]]
    text, name, column = {
        "csv": (ACCENTS, "a.csv", "item"),
        "gz": (ACCENTS, "a.csv.gz", "item"),
        "inter": ("user_id:token\titem_id:token\n" + "".join(f"{u}\t{i}\n" for u, i in pairs), "a.inter", "item_id"),
        "lists": ("u0 a b\n" + "".join(f"{u} {i}\n" for u, i in pairs), "train.txt", "item_id"),
    }[kind]
    for encoding in ("latin1", "utf8"):
        folder = tmp_path / encoding
        folder.mkdir()
        content = text.encode(encoding)
        (folder / name).write_bytes(gzip.compress(content) if kind == "gz" else content)
        where = folder if kind == "lists" else folder / name
        if encoding == "utf8":
            assert read(where).n_items == (12 if kind == "lists" else 10)
        else:
            said = refusal(where)
            for mention in (f"{folder / name} line 2 ", repr(column), "UTF-8", "iconv"):
                assert mention in said


def test_what_else_is_not_utf8(tmp_path: Path) -> None:
    """An items table with such ids is refused; such texts are read, with a note; U+FFFD in a UTF-8 file is accepted."""
    (tmp_path / "a.csv").write_text(ACCENTS.replace(",title", ",kind"))
    (tmp_path / "items.csv").write_bytes("item,name\ncaf\u00e90,x\ncaf\u00e80,y\n".encode("latin1"))
    assert f"{tmp_path / 'items.csv'} line 2 " in refusal(tmp_path / "a.csv", items=tmp_path / "items.csv")
    (tmp_path / "titles.csv").write_bytes("user,item,title\n1,1,caf\u00e9\n2,2,tea\n".encode("latin1"))
    assert any("'title'" in note and "not UTF-8" in note for note in read(tmp_path / "titles.csv").notes)
    (tmp_path / "own.csv").write_text(ACCENTS.replace("\u00e9", "\ufffd"))
    assert read(tmp_path / "own.csv").n_items == 10


def test_a_damaged_gzip_is_one_line(tmp_path: Path) -> None:
    """Text that calls itself gzip is refused by name."""
    (tmp_path / "a.csv.gz").write_text("user,item\n1,2\n")
    assert "a.csv.gz" in refusal(tmp_path / "a.csv.gz")


def test_arrays_reach_torch_without_warnings(tmp_path: Path) -> None:
    """Columns are writable and contiguous, so torch takes them without a copy or a warning."""
    SMALL.write_parquet(tmp_path / "a.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = read(tmp_path / "a.parquet")
        assert data.time is not None
        for column in (data.queries, data.items, data.time):
            assert column.flags.writeable
            assert column.flags.c_contiguous
            torch.from_numpy(column)


def test_show_tells_what_a_file_holds(tmp_path: Path) -> None:
    """show() lists columns, rows and sizes, also of other tables; describe() counts."""
    SMALL.write_parquet(tmp_path / "a.parquet")
    said = show(tmp_path / "a.parquet")
    assert "user_id (String)" in said
    assert "3 queries x 3 items, 4 interactions" in said
    pl.DataFrame({"x": [1]}).write_parquet(tmp_path / "b.parquet")
    assert "does not read as interactions" in show(tmp_path / "b.parquet")
    frame = pl.DataFrame({"user": [1, 1, 2], "item": [1, 2, 3], "label": [1, 0, 1], "split": [0, 0, 2]})
    assert "shown and not clicked: 1" in (said := describe(from_frame(frame)))
    assert "train 1, valid 0, test 1" in said


def test_show_tells_which_column_is_what(tmp_path: Path) -> None:
    """show() lists guessed and named roles, and ratings as unused without a threshold."""
    rows = {"customer": ["a", "b", "a"], "sku": [1, 2, 3], "day": [1, 2, 3], "ts": [4, 5, 6], "stars": [1, 5, 4]}
    path = tmp_path / "a.parquet"
    pl.DataFrame(rows).write_parquet(path)
    plain = describe_roles(path, {})
    assert plain[0] == "columns: customer is the query, sku is the item, ts is the time"
    assert "stars" in plain[1]
    assert "min_rating" in plain[1]
    assert all(line in show(path) for line in plain)
    assert describe_roles(path, {"time": "day", "min_rating": 4}) == [
        "columns: customer is the query, sku is the item, day is the time, stars is the rating"
    ]
    assert describe_roles(path, {"rating": ""}) == plain[:1]


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
def test_times_are_shown_as_dates(unit: int) -> None:
    """Numbers that are recent times in some unit since 1970 are shown as dates, others as numbers."""
    first, last = (int(datetime(year, 3, 5, 6, 7, tzinfo=UTC).timestamp()) * unit for year in (1999, 2024))
    frame = pl.DataFrame({"user": ["a", "b", "c"], "item": [1, 2, 3], "ts": [last, first, first + 1]})
    assert "time: 1999-03-05 06:07 to 2024-03-05 06:07" in describe(from_frame(frame))
    for low, high in ((0, last), (17, 20240131), (first // 10**3, last)):
        mixed = frame.with_columns(ts=pl.Series([low, high, high]))
        assert f"time: {low} to {high}\n" in describe(from_frame(mixed)) + "\n"


@pytest.mark.parametrize(
    ("name", "sizes", "train"),
    [("gowalla_xir", (29858, 40988, 1027464), 822358), ("gowalla_lightgcn", (29858, 40981, 1027370), 810128)],
)
def test_real_sets_have_their_published_sizes(
    real_data: Path, name: str, sizes: tuple[int, int, int], train: int
) -> None:
    """Gowalla has the papers' numbers of queries, items, pairs and training rows, split 80/20 or by file."""
    if not (real_data / name).is_dir():
        pytest.skip(f"{real_data} does not hold {name}")
    data = read(real_data / name)
    assert (data.n_queries, data.n_items, len(data)) == sizes
    assert len(split(data, valid=0, test=0.2, seed=10).train) == train


@pytest.mark.parametrize("name", ["items.parquet", "items.csv"])
def test_an_items_table_that_changes_while_it_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of items whose file grows during the read is refused, as rows of interactions are."""
    rows, items = pl.DataFrame({"user": [1, 2], "item": [1, 2]}), pl.DataFrame({"item": [1, 2], "title": ["a", "b"]})
    rows.write_parquet(tmp_path / "interactions.parquet")
    write = pl.DataFrame.write_parquet if name.endswith("parquet") else pl.DataFrame.write_csv
    write(items, tmp_path / name)
    read_file = f"read_{name.rpartition('.')[2]}"
    original = getattr(pl, read_file)

    def growing(path: Path, *arguments: Any, **options: Any) -> pl.DataFrame:
        table = original(path, *arguments, **options)
        write(pl.concat([items] * 2), path)
        return table

    monkeypatch.setattr(pl, read_file, growing)
    with pytest.raises(UserError, match="changed while") as caught:
        read(tmp_path)
    assert name in str(caught.value)


def test_files_that_hold_no_table(tmp_path: Path) -> None:
    """A glob that matches other files, an empty part and an archive of arrays are each one line with the file."""
    SMALL.write_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("x")
    assert "b.txt" in refusal(tmp_path / "[ab].*")
    (tmp_path / "train.txt").write_text("0 1 2\n1 2\n")
    (tmp_path / "test.txt").write_text("")
    assert "test.txt is empty" in refusal(tmp_path / "train.txt")
    np.savez(tmp_path / "several.npz", a=np.ones(2), b=np.ones(2))
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    with pytest.raises(UserError, match="several arrays"):
        load_array(tmp_path / "several.npy")


def test_matrices_and_arrays_hold_pairs() -> None:
    """A sparse matrix in any format and an array of pairs read as the table of their entries; zeros are no pairs."""
    dense = np.array([[0, 1, 5], [2, 0, 0], [0, 0, 3]])
    want = {(int(user), int(item)): None for user, item in np.argwhere(dense)}
    explicit = scipy.sparse.csr_array(dense)
    explicit.data[explicit.data == 3] = 0
    for matrix in (scipy.sparse.csr_array(dense), scipy.sparse.coo_matrix(dense), scipy.sparse.lil_array(dense)):
        assert content(read(matrix)) == want
    assert content(read(explicit)) == {pair: None for pair in want if pair != (2, 2)}
    rated = read(scipy.sparse.csc_array(dense), rating="value", min_rating=2)
    assert content(rated) == {pair: None for pair in want if dense[pair] >= 2}
    assert content(read(np.argwhere(dense))) == want
    timed = np.array(list(zip(USERS, ITEMS, TIMES, strict=True)), dtype=object)
    assert content(read(timed, time="value")) == WANT
    with pytest.raises(UserError, match=r"\(3, 4\).*csr_array"):
        read(np.ones((3, 4)))


def test_user_is_another_name_of_query(tmp_path: Path) -> None:
    """`user` and `users` name what `query` and `queries` name; both together are refused."""
    named = SMALL.rename({"user_id": "who", "item_id": "what"})
    about = pl.DataFrame({"who": ["a", "b", "c"], "city": ["x", "y", "z"]})
    data = read(named, user="who", item="what", users=about)
    assert content(data) == WANT
    assert data.query_table is not None
    assert data.query_table["city"].to_list() == ["x", "y", "z"]
    assert content(from_frame(named, user="who", item="what")) == WANT
    named.write_parquet(tmp_path / "rows.parquet")
    assert prepare(tmp_path / "rows.parquet", tmp_path / "out", user="who", item="what").query_ids.ids.to_list() == [
        "a",
        "b",
        "c",
    ]
    for both in ({"user": "who", "query": "who"}, {"users": about, "queries": about}):
        with pytest.raises(UserError, match="two names of one argument"):
            read(named, item="what", **both)  # type: ignore[arg-type]
