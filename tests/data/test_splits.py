"""Splits: every row in exactly one part, the right number of rows, the same parts for the same data."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.core.errors import UserError
from sparring.data import Interactions, Split, from_frame, split

quick = settings(max_examples=50)
row = st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 30))
rows = st.lists(row, min_size=4, max_size=60, unique_by=lambda r: r[:2]).filter(
    lambda found: len({r[0] for r in found}) > 1 and len({r[1] for r in found}) > 1
)
shares = st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.4])


def made(found: list[tuple[int, int, int]]) -> Interactions:
    return from_frame(pl.DataFrame(found, schema=["user", "item", "time"], orient="row"))


def pairs_of(part: Interactions | None) -> list[tuple[int, int]]:
    if part is None:
        return []
    return list(
        zip(part.query_ids.decode(part.queries).tolist(), part.item_ids.decode(part.items).tolist(), strict=True)
    )


def parts_of(parts: Split) -> list[list[tuple[int, int]]]:
    return [pairs_of(part) for part in (parts.train, parts.valid, parts.test)]


@quick
@given(rows, st.sampled_from(["random", "temporal", "leave-last-out"]), shares, shares, st.integers(0, 5))
def test_every_row_is_in_exactly_one_part(found: list, how: str, valid: float, test: float, seed: int) -> None:
    """Train, valid and test partition the rows; an empty part is None."""
    try:
        parts = split(made(found), how, valid, test, seed)
    except UserError:
        assert how != "random"  # too few rows or times: covered by its own test
        return
    assert sorted(pair for part in parts_of(parts) for pair in part) == sorted((q, i) for q, i, _ in found)
    assert all(part is None or len(part) for part in (parts.valid, parts.test))


@quick
@given(rows, shares, shares, st.integers(0, 5))
def test_random_takes_the_share_of_each_query(found: list, valid: float, test: float, seed: int) -> None:
    """Of a query's n rows round((1 - test) n) are not test; of those round(valid n_train) validate, never all.

    Where that leaves out more than 1 - valid of the queries with two rows, valid n_train is rounded up or down.
    """
    train, val, tested = parts_of(split(made(found), "random", valid, test, seed))
    total = Counter(q for q, _, _ in found)
    trained = {query: round((1 - test) * n) for query, n in total.items()}
    many = [n for n in trained.values() if n > 1]
    rounds = not many or sum(round(valid * n) > 0 for n in many) >= valid * len(many)
    for query, n in total.items():
        n_train = trained[query]
        counts = [sum(q == query for q, _ in part) for part in (train, val, tested)]
        assert [counts[0] + counts[1], counts[2]] == [n_train, n - n_train]
        share, most = valid * n_train, max(n_train - 1, 0)
        allowed = {round(share)} if rounds else {math.floor(share), math.ceil(share)}
        assert counts[1] in {min(each, most) for each in allowed}


@pytest.mark.parametrize("how", ["random", "file"])
@pytest.mark.parametrize("seed", [0, 3])
def test_queries_with_few_items_validate_where_few_have_many(how: str, seed: int) -> None:
    """A tenth of the pairs of queries with 3 training items is held out, one pair of 3 in 10 of these queries."""
    n = 2000
    items = np.tile(np.arange(4), n) + np.repeat(np.arange(n) % 7, 4)
    frame = pl.DataFrame({"user": np.repeat(np.arange(n), 4), "item": items})
    if how == "file":
        frame = frame.with_columns(split=pl.Series(["train", "train", "train", "test"] * n))
    parts = split(from_frame(frame), how, valid=0.1, test=0.25, seed=seed)
    assert parts.valid is not None
    assert abs(len(parts.valid) - 0.3 * n) < 0.01 * n
    assert len(np.unique(parts.valid.queries)) == len(parts.valid)
    other = split(from_frame(frame), how, valid=0.1, test=0.25, seed=seed + 1)
    assert other.valid is not None
    assert set(parts.valid.queries) != set(other.valid.queries)


@quick
@given(rows, st.sampled_from(["random", "temporal", "leave-last-out"]), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(found: list, how: str, shuffler: Random) -> None:
    """The same rows in another order give the same parts for the same seed."""
    other = list(found)
    shuffler.shuffle(other)
    outcomes: list[object] = []
    for version in (found, other):
        try:
            outcomes.append(parts_of(split(made(version), how, 0.2, 0.3, seed=3)))
        except UserError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_unsorted_interactions_split_like_sorted_ones() -> None:
    """Interactions whose rows are not in (query, item) order get the same random parts."""
    data = made([(q, i, 0) for q in range(4) for i in range(9)])
    shuffled = data.subset(np.random.default_rng(0).permutation(len(data)))
    for one, other in zip(parts_of(split(data, "random")), parts_of(split(shuffled, "random")), strict=True):
        assert sorted(one) == sorted(other)


def test_seeds_differ_and_every_item_gets_its_turn() -> None:
    """Two seeds differ; over 400 seeds each of 10 items is test about 20 % of the time (within 5 standard errors)."""
    data = made([(q, i, 0) for q in range(2) for i in range(10)])
    first, second = (parts_of(split(data, "random", 0, 0.2, seed)) for seed in (0, 1))
    assert first != second
    hits = Counter(item for seed in range(400) for _, item in parts_of(split(data, "random", 0, 0.2, seed))[2])
    error = np.sqrt(800 * 0.2 * 0.8)
    assert all(abs(hits[item] - 160) < 5 * error for item in range(10))


def test_temporal_cuts_time_once() -> None:
    """Training times precede validation times, which precede test times, with the requested shares."""
    random = np.random.default_rng(0)
    found = [
        (int(q), n, int(t))
        for n, (q, t) in enumerate(zip(random.integers(0, 5, 100), random.permutation(100), strict=True))
    ]
    parts = split(made(found), "temporal", valid=0.25, test=0.2)
    assert parts.valid is not None
    assert parts.test is not None
    times = [sorted(part.time.tolist()) for part in (parts.train, parts.valid, parts.test) if part.time is not None]
    assert times == [list(range(60)), list(range(60, 80)), list(range(80, 100))]


def test_leave_last_out_holds_out_the_last_two() -> None:
    """A query's latest item is test, the one before valid; item ids break ties; two rows are too few."""
    found = [(1, 10, 5), (1, 11, 3), (1, 12, 9), (1, 13, 9), (2, 10, 1), (2, 11, 2), (3, 10, 7), (3, 13, 1), (3, 12, 2)]
    train, valid, test = parts_of(split(made(found), "leave-last-out"))
    assert test == [(1, 13), (3, 10)]
    assert valid == [(1, 12), (3, 12)]
    assert sorted(train) == [(1, 10), (1, 11), (2, 10), (2, 11), (3, 13)]


def test_file_split_is_kept_and_auto_prefers_it() -> None:
    """The file's parts are used; without a valid part one is drawn from train; valid=0 gives none."""
    frame = pl.DataFrame(
        {"user": [1] * 10 + [2] * 10, "item": list(range(10)) * 2, "split": (["train"] * 8 + ["test"] * 2) * 2}
    )
    want = sorted((u, i) for u in (1, 2) for i in (8, 9))
    for how in ("auto", "file"):
        parts = split(from_frame(frame), how, valid=0.25)
        assert sorted(pairs_of(parts.test)) == want
        assert Counter(q for q, _ in pairs_of(parts.valid)) == {1: 2, 2: 2}
        assert len(parts.train) == 12
    assert split(from_frame(frame), "file", valid=0).valid is None
    own = frame.with_columns(split=pl.Series((["train"] * 7 + ["val"] + ["test"] * 2) * 2))
    assert sorted(pairs_of(split(from_frame(own), valid=0.5).valid)) == [(1, 7), (2, 7)]


def test_shown_pairs_of_the_future_do_not_train() -> None:
    """Shown pairs join the training part, except those after the cut or in another part of the file."""
    frame = pl.DataFrame(
        {
            "user": [1, 1, 1, 1, 2, 2, 2, 2],
            "item": range(8),
            "time": [1, 2, 3, 9, 4, 5, 6, 8],
            "label": [1, 1, 1, 0, 1, 0, 1, 1],
        }
    )
    data = from_frame(frame)
    parts = split(data, "temporal", valid=0, test=0.34)
    assert parts.train.shown is not None
    assert parts.train.shown[1].tolist() == []
    assert parts.test is not None
    assert parts.test.shown is None
    everything = split(data, "random").train.shown
    assert everything is not None
    assert everything[1].tolist() == [3, 5]
    parts = split(from_frame(frame.with_columns(split=pl.Series([0, 0, 2, 0, 0, 2, 0, 0]))), "file", valid=0)
    assert parts.train.shown is not None
    assert parts.train.shown[1].tolist() == [3]
    parts = split(data, "leave-last-out", valid=0)
    assert parts.train.shown is not None
    assert parts.train.shown[1].tolist() == [5]


@pytest.mark.parametrize(
    ("how", "valid", "test", "message"),
    [
        ("weekly", 0.1, 0.2, "'weekly'"),
        ("random", 1.0, 0.2, "valid is 1.0"),
        ("random", 0.1, -0.5, "test is -0.5"),
        ("file", 0.1, 0.2, "no split"),
    ],
)
def test_bad_splits_name_the_bad_value(how: str, valid: float, test: float, message: str) -> None:
    """An unknown method, a share out of range and a missing split column raise one-line errors."""
    with pytest.raises(UserError, match=message):
        split(made([(0, 0, 0), (1, 1, 1)]), how, valid, test)


def test_splits_by_time_need_time() -> None:
    """A missing time column, or one that cannot be cut, raises an error for temporal splits."""
    untimed = from_frame(pl.DataFrame({"user": [1, 2], "item": [1, 2]}))
    for how in ("temporal", "leave-last-out"):
        with pytest.raises(UserError, match=f"'{how}' needs a time column"):
            split(untimed, how)
    with pytest.raises(UserError, match="share the time 7"):
        split(made([(0, 0, 7), (1, 1, 7), (1, 2, 7), (0, 3, 7)]), "temporal", 0, 0.5)
    with pytest.raises(UserError, match="3 interactions"):
        split(made([(0, 0, 7), (1, 1, 7)]), "leave-last-out")
    train_only = pl.DataFrame({"user": [1, 2], "item": [1, 2], "split": ["test", "valid"]})
    with pytest.raises(UserError, match="no training rows"):
        split(from_frame(train_only))
