"""With repeats="keep" every row of a file stays an interaction, in its order, when read, split and joined."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from sparring.core.errors import UserError
from sparring.data import pairs, splits
from sparring.data.histories import histories, past_of
from sparring.data.interactions import Interactions
from sparring.data.prepared import row_buckets
from sparring.data.prepared.preparation import prepare
from sparring.data.reading import describe, read
from sparring.data.splits import split

Row = tuple[int, int, int]  # query, item, time

random = np.random.default_rng(0)
LOG: list[Row] = [
    (int(query), int(item), int(time))
    for query, item, time in zip(*(random.integers(0, n, 400) for n in (30, 12, 200)), strict=True)
]
LOG += LOG[:7]  # the same row twice


def frame(rows: list[Row], **columns: Any) -> pl.DataFrame:
    names = ("user_id", "item_id", "timestamp")
    return pl.DataFrame({name: [row[i] for row in rows] for i, name in enumerate(names)} | columns)


def rows_of(data: Interactions) -> list[Row]:
    assert data.time is not None
    queries, items = data.query_ids.decode(data.queries), data.item_ids.decode(data.items)
    return list(zip(queries.tolist(), items.tolist(), data.time.tolist(), strict=True))


def kept() -> Interactions:
    return read(frame(LOG), repeats="keep")


def in_time(rows: list[Row]) -> dict[int, list[Row]]:
    """The rows of each query, the oldest first; equal times by item."""
    found: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row[0], row[2], row[1])):
        found[row[0]].append(row)
    return found


def test_every_row_stays() -> None:
    """All rows are there, repeats included; counts count rows, positives are distinct pairs, and a note counts repeats;
    the order of the file does not matter."""
    data = kept()
    assert Counter(rows_of(data)) == Counter(LOG)
    taken = Counter(row[1] for row in LOG)
    assert data.counts().tolist() == [taken[item] for item in data.item_ids.ids]
    positives = data.positives()
    lists = [positives.items[a:b].tolist() for a, b in zip(positives.start, positives.start[1:], strict=False)]
    expected = [sorted({row[1] for row in LOG if row[0] == query}) for query in data.query_ids.ids]
    assert [data.item_ids.decode(items).tolist() for items in lists] == expected
    repeats = len(LOG) - len({row[:2] for row in LOG})
    assert any(f"{repeats:,} repeats" in note for note in data.notes)
    assert f"{repeats:,} interactions" in describe(data)
    shuffled = read(frame([LOG[row] for row in np.random.default_rng(1).permutation(len(LOG))]), repeats="keep")
    assert rows_of(shuffled) == rows_of(data)
    assert len(read(frame(LOG))) == len({row[:2] for row in LOG}), "merged by default"


def test_weights_stay_with_their_rows() -> None:
    """Each row keeps its own weight; the order of the file does not matter."""
    weights = np.random.default_rng(2).integers(1, 5, len(LOG)).astype(float)
    data = read(frame(LOG, weight=weights), repeats="keep", weight="weight")
    assert data.weight is not None
    expected = Counter((*row, weight) for row, weight in zip(LOG, weights.tolist(), strict=True))
    assert Counter((*row, weight) for row, weight in zip(rows_of(data), data.weight.tolist(), strict=True)) == expected
    back = read(frame(LOG[::-1], weight=weights[::-1]), repeats="keep", weight="weight")
    assert back.weight is not None
    assert rows_of(back) == rows_of(data)
    assert back.weight.tolist() == data.weight.tolist()


def test_histories_hold_repeats_in_time_order() -> None:
    """A history is every item of a query in time order, as often as it was taken."""
    data = kept()
    past, expected = histories(data), in_time(LOG)
    for place, query in enumerate(data.query_ids.ids):
        items = past.items[int(past.start[place]) : int(past.start[place + 1])]
        assert data.item_ids.decode(items).tolist() == [row[1] for row in expected[query]]


def test_leave_last_out_takes_the_last_row() -> None:
    """The last interaction of a query tests and the one before validates, also where they repeat an earlier item; the
    histories of the test hold all others."""
    parts, expected = split(kept(), "leave-last-out"), in_time(LOG)
    assert parts.valid is not None
    assert parts.test is not None
    held = {query: rows for query, rows in expected.items() if len(rows) >= 3}
    assert sorted(rows_of(parts.test)) == sorted(rows[-1] for rows in held.values())
    assert sorted(rows_of(parts.valid)) == sorted(rows[-2] for rows in held.values())
    again = sum(rows[-1][1] in {row[1] for row in rows[:-1]} for rows in held.values())
    assert again > 5, "some test items were taken before"
    past = past_of(parts, "test")
    for place, query in enumerate(parts.train.query_ids.ids):
        items = past.items[int(past.start[place]) : int(past.start[place + 1])]
        rows = expected[query][:-1] if query in held else expected[query]
        assert parts.train.item_ids.decode(items).tolist() == [row[1] for row in rows]


@pytest.mark.parametrize("how", ["random", "temporal", "leave-last-out"])
def test_parts_hold_every_row_once(how: str) -> None:
    """Every row is in one part; nothing is masked, though the pairs before a part are known; train and valid joined are
    the rows that do not test."""
    parts = split(kept(), how, seed=3)
    assert parts.valid is not None
    assert parts.test is not None
    assert Counter(rows_of(parts.train) + rows_of(parts.valid) + rows_of(parts.test)) == Counter(LOG)
    for part, earlier in (("valid", [parts.train]), ("test", [parts.train, parts.valid])):
        assert not len(parts.seen_for(part).items)
        assert len(parts.seen_for(part).start) == parts.train.n_queries + 1
        known = {(int(q), int(i)) for each in earlier for q, i in zip(each.queries, each.items, strict=True)}
        before = parts.before(part)
        owners = np.repeat(np.arange(parts.train.n_queries), before.start.diff().numpy())
        assert list(zip(owners.tolist(), before.items.tolist(), strict=True)) == sorted(known)
    joined = parts.joined().train
    assert joined.repeats
    assert Counter(rows_of(joined)) == Counter(LOG) - Counter(rows_of(parts.test))
    assert rows_of(joined) == sorted(rows_of(joined)), "in the order of `read`"


def test_a_row_keeps_the_part_of_the_file() -> None:
    """A pair may train and test; merged, it would count in its first part alone."""
    parts = ["train", "test", "valid", "test"]
    rows = [(0, 0, 1), (0, 0, 2), (1, 0, 3), (1, 1, 4)]
    found = split(read(frame([*rows, (1, 1, 1)], split=[*parts, "train"]), repeats="keep"), "file")
    assert found.test is not None
    assert rows_of(found.train) == [(0, 0, 1), (1, 1, 1)]
    assert rows_of(found.test) == [(0, 0, 2), (1, 1, 4)]


def test_shown_pairs_stay_apart() -> None:
    """Rows labelled 0 are shown pairs, each once, unless the pair was taken at some time."""
    rows = [(0, 0, 1), (0, 0, 2), (0, 1, 3), (0, 1, 4), (1, 1, 5), (1, 1, 6)]
    data = read(frame(rows, label=[1, 1, 0, 0, 0, 1]), repeats="keep", label="label")
    assert rows_of(data) == [(0, 0, 1), (0, 0, 2), (1, 1, 6)]
    assert data.shown is not None
    assert list(zip(*(column.tolist() for column in data.shown), strict=True)) == [(0, 1)]


@pytest.mark.parametrize("how", ["random", "temporal", "leave-last-out"])
def test_prepared_parts_are_those_of_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A folder prepared with repeats has the rows, parts, counts, pairs, histories and notes of `read` and `split`,
    with many small buckets and chunks; without them it has each pair once."""
    monkeypatch.setattr(row_buckets, "BUCKET", 40)
    monkeypatch.setattr(pairs, "CHUNK", 16)
    monkeypatch.setattr(splits, "CHUNK", 16)
    frame(LOG).write_parquet(tmp_path / "log.parquet")
    prepare(tmp_path / "log.parquet", tmp_path / "out", how=how, seed=3, repeats="keep")
    found, data = read(tmp_path / "out", repeats="keep"), kept()
    assert found.repeats
    assert found.notes == data.notes
    one, other = split(found), split(data, how, seed=3)
    for name in ("train", "valid", "test"):
        mapped, held = getattr(one, name), getattr(other, name)
        assert mapped.repeats
        assert rows_of(mapped) == rows_of(held)
    taken = Counter(other.train.items.tolist())
    assert one.train.counts().tolist() == [taken[item] for item in range(data.n_items)]
    for ours, theirs in (
        (one.train.positives(), other.train.positives()),
        (one.before("test"), other.before("test")),
        (past_of(one, "test"), past_of(other, "test")),
        (histories(one.train), histories(other.train)),
    ):
        assert ours.start.tolist() == theirs.start.tolist()
        assert ours.items.tolist() == theirs.items.tolist()
    assert not len(one.seen_for("test").items)


def test_refusals(tmp_path: Path) -> None:
    """Another word, and another choice than that of prepared data, are refused in one line."""
    with pytest.raises(UserError, match="'twice'"):
        read(frame(LOG), repeats="twice")  # type: ignore[arg-type]
    frame(LOG).write_parquet(tmp_path / "log.parquet")
    prepare(tmp_path / "log.parquet", tmp_path / "kept", repeats="keep")
    with pytest.raises(UserError, match="repeats"):
        read(tmp_path / "kept", repeats="merge")
    prepare(tmp_path / "log.parquet", tmp_path / "out")
    with pytest.raises(UserError, match="repeats"):
        read(tmp_path / "out", repeats="keep")
    assert len(read(tmp_path / "out", repeats="merge")) == len({row[:2] for row in LOG})
    data = kept()
    with pytest.raises(UserError, match="hidden"):
        Interactions(data.queries, data.items, data.query_ids, data.item_ids, repeats=True, hidden=data.shown or (0, 0))  # type: ignore[arg-type]
