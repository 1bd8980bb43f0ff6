"""Train, validation and test parts of interactions: from the file, random per query, by time, or each query's last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from sparring.core.choices import SPLITS
from sparring.core.errors import UserError
from sparring.data.interactions import TEST, TRAIN, VALID, Interactions, Split
from sparring.data.pairs import CHUNK, chunks, is_canonical, pair_keys, undated, within
from sparring.data.prepared.format import Prepared

_GOLDEN = 0.6180339887498949


def split(data: Interactions, how: str = "auto", valid: float = 0.1, test: float = 0.2, seed: int = 0) -> Split:
    """Parts of the data; every row is in exactly one, decided by (data, how, shares, seed), not by the order of rows.

    "file": the parts in the file. "random": of a query's n items, round((1 - test) n) train, drawn at random (the XIR
    protocol). "temporal": the latest `test` share of all rows, by one cut in time; equal times stay together.
    "leave-last-out": each query's last item is test and the one before valid; queries with fewer than 3 items only
    train. "auto": the parts in the file if it has them, otherwise random. A row without a time counts as the earliest
    and trains.

    `valid` is the share of the training part held out for validation in the same way (at random for a file without a
    valid part), rounded for each query, leaving it at least one item; 0 gives none. Where rounding would leave nearly
    all queries out because they have few items, a tenth of 3 items is one item of 3 in 10 such queries. If no test
    query of the file trains, as with texts, complete queries are held out instead. A part without rows is None.

    Shown pairs go to the training part, except those that the file or the times place outside it. Prepared data is
    already split: "auto" and "file" return its parts, and any other arguments must be those of its preparation.

        parts = split(data, "random", valid=0, test=0.2, seed=10);  parts.train, parts.test
    """
    if isinstance(data, Prepared):
        return data.parts_for(how, valid, test, seed)
    check_split(how, valid, test, data.time is not None, data.split is not None, data.is_order)
    if how == "auto":
        how = "random" if data.split is None else "file"
    part, keep_shown = split_rule(data, how, valid, test, seed)(SplitRows.of(data))
    check_parts(how, np.bincount(part, minlength=3).tolist(), valid, test)
    return _parts(data, part, keep_shown)


def check_split(how: str, valid: float, test: float, timed: bool, parted: bool, order: bool) -> None:
    """Refuse an unknown way to split, a share outside [0, 1), and a way that needs a column which the data lacks."""
    if how not in SPLITS:
        raise UserError(f"no split called {how!r}; choose from {', '.join(SPLITS)}")
    for name, share in (("valid", valid), ("test", test)):
        if not 0 <= share < 1:
            raise UserError(f"{name} is {share}; a share must be at least 0 and below 1")
    if how in ("temporal", "leave-last-out") and not timed:
        raise UserError(
            f"the split {how!r} needs a time column, and the data has none: split at random, or name it", "time"
        )
    if how == "temporal" and order:
        reason = "the split 'temporal' needs times, and the data has positions within a query"
        raise UserError(f"{reason}: split leave-last-out, or name a column with times", "time")
    if how == "file" and not parted:
        raise UserError("the data has no split column: choose another split, or name it", "split")


def check_parts(how: str, sizes: Sequence[int], valid: float, test: float) -> None:
    """Refuse a split without training rows, and leave-last-out without held-out rows."""
    if how == "leave-last-out" and not any(sizes[1:]):
        raise UserError(
            "no query has 3 interactions or more, so leave-last-out has nothing to hold out; split another way"
        )
    if not sizes[TRAIN]:
        raise UserError(f"the split {how!r} with valid={valid}, test={test} leaves no row to train on")


@dataclass(frozen=True, eq=False)
class SplitRows:
    """All rows of consecutive queries, which a rule assigns to parts together. Queries are numbered from `first`."""

    queries: np.ndarray
    items: np.ndarray
    n_queries: int
    n_items: int
    time: np.ndarray | None = None
    split: np.ndarray | None = None
    shown: np.ndarray | None = None  # queries of the shown pairs
    shown_time: np.ndarray | None = None
    shown_split: np.ndarray | None = None
    first: int = 0

    @classmethod
    def of(cls, data: Interactions) -> SplitRows:
        shown = None if data.shown is None else data.shown[0]
        columns = (data.time, data.split, shown, data.shown_time, data.shown_split)
        return cls(data.queries, data.items, data.n_queries, data.n_items, *columns)


SplitRule = Callable[
    [SplitRows], tuple[np.ndarray, np.ndarray | None]
]  # -> part of each row, which shown pairs train (None: all)


def split_rule(data: Interactions, how: str, valid: float, test: float, seed: int) -> SplitRule:
    """The function that assigns rows to parts. The data may be memory-mapped: it is read a chunk at a time.

    The parts are the same if it is called on all rows at once or on successive queries in ascending order.
    """
    random, offset = np.random.default_rng(seed), float(np.random.default_rng((seed, 1)).random())
    if how == "file":
        return _file(data, valid, seed, random, offset)
    if how == "random":
        n_train = np.rint((1 - test) * _counts(data))
        held_out = partial(_n_held_out, share=valid, offset=None if _rounds(n_train, valid) else offset)
        return lambda rows: (_random(rows, test, random, held_out), None)
    if how == "temporal":
        assert data.time is not None
        return _temporal(data.time, valid, test)
    return lambda rows: _leave_last_out(rows, valid, test)


def _parts(data: Interactions, part: np.ndarray, keep_shown: np.ndarray | None) -> Split:
    bare = replace(data, shown=None, shown_time=None, shown_split=None, empty=0)
    train = bare.subset(part == TRAIN)
    if data.shown is not None:
        keep = slice(None) if keep_shown is None else keep_shown
        times, splits = data.shown_time, data.shown_split
        train = replace(
            train,
            shown=(data.shown[0][keep], data.shown[1][keep]),
            shown_time=None if times is None else times[keep],
            shown_split=None if splits is None else splits[keep],
        )
    held = [bare.subset(rows) if (rows := part == code).any() else None for code in (VALID, TEST)]
    if held[1] is not None:
        held[1] = replace(held[1], empty=data.empty)
    return Split(train, held[0], held[1])


def _file(data: Interactions, valid: float, seed: int, random: np.random.Generator, offset: float) -> SplitRule:
    assert data.split is not None
    trained, tests = np.zeros(data.n_queries, dtype=np.int64), np.zeros(data.n_queries, dtype=bool)
    has_valid = False
    for rows in chunks(len(data)):
        part, queries = data.split[rows], data.queries[rows]
        trained += np.bincount(queries[part == TRAIN], minlength=data.n_queries)
        tests[queries[part == TEST]] = True
        has_valid |= bool((part == VALID).any())
    trains = trained > 0
    held_out = partial(_n_held_out, share=valid, offset=None if _rounds(trained, valid) else offset)
    if not trains.any():
        raise UserError("the data's split column has no training rows")
    held: np.ndarray | None = None  # the queries held out completely for validation
    if valid and not has_valid and tests.any() and not (trains & tests).any():
        held = np.zeros(data.n_queries, dtype=bool)
        held[_sample_queries(np.flatnonzero(trains), valid, seed)] = True

    def assign(rows: SplitRows) -> tuple[np.ndarray, np.ndarray | None]:
        assert rows.split is not None
        part = np.array(rows.split)
        train = np.flatnonzero(part == TRAIN)
        if held is not None:
            part[train[held[rows.first + rows.queries[train]]]] = VALID
        elif valid and not has_valid:
            place, count = _shuffled(replace(rows, queries=rows.queries[train], items=rows.items[train]), random)
            part[train[place < held_out(count, rows.first + rows.queries[train])]] = VALID
        return part, None if rows.shown_split is None else rows.shown_split == TRAIN

    return assign


def _sample_queries(queries: np.ndarray, share: float, seed: int) -> np.ndarray:
    """A share of the queries, at random, but never all of them."""
    n = min(round(share * len(queries)), len(queries) - 1)
    return np.random.default_rng(seed).permutation(queries)[:n]


def _random(
    rows: SplitRows, test: float, random: np.random.Generator, held_out: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    place, count = _shuffled(rows, random)
    n_train = np.rint((1 - test) * count)
    part = np.full(len(place), TRAIN, dtype=np.uint8)
    part[place >= n_train] = TEST
    part[place < held_out(n_train, rows.first + rows.queries)] = VALID
    return part


def _counts(data: Interactions) -> np.ndarray:
    """The rows of each query."""
    total = np.zeros(data.n_queries, dtype=np.int64)
    for rows in chunks(len(data)):
        total += np.bincount(data.queries[rows], minlength=data.n_queries)
    return total


def _rounds(count: np.ndarray, share: float) -> bool:
    """Whether rounding the share of each query's rows holds out some of at least that share of the queries."""
    many = count > 1
    return not many.any() or bool((np.rint(share * count[many]) > 0).mean() >= share)


def _n_held_out(count: np.ndarray, queries: np.ndarray, share: float, offset: float | None) -> np.ndarray:
    """The number of each query's items that are held out: their share, but never all of them.

    It is rounded. With an offset it is rounded up for some queries and down for others, in proportion: multiples of the
    golden ratio spread evenly over [0, 1), whatever the order of the queries.
    """
    exact = share * count
    whole = np.rint(exact) if offset is None else np.floor(exact + (queries * _GOLDEN + offset) % 1.0)
    return np.minimum(whole, np.maximum(count - 1, 0))


def _shuffled(rows: SplitRows, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Each row's position 0..n-1 in a random order of its query's rows, and n."""
    queries, items = rows.queries, rows.items
    by_pair = (
        None if is_canonical(queries, items) else np.argsort(pair_keys(queries, items, rows.n_items), kind="stable")
    )
    # 32 random bits below the query: one sort orders rows by query and, within it, at random; ties keep the order.
    key = (queries if by_pair is None else queries[by_pair]).astype(np.int64) << 32
    key |= random.integers(0, 2**32, len(key), dtype=np.uint32)
    order = np.argsort(key, kind="stable")
    del key
    return _places(rows, order if by_pair is None else by_pair[order])


def _places(rows: SplitRows, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row's position within its query, and the query's count, for an order that sorts rows by query."""
    count = np.bincount(rows.queries, minlength=rows.n_queries)
    place = np.empty(len(order), dtype=np.int32)
    place[order] = within(count)
    return place, count.astype(np.int32)[rows.queries]


def _temporal(time: np.ndarray, valid: float, test: float) -> SplitRule:
    cuts: list[tuple[int, np.generic]] = []
    n, latest = len(time), time.max()  # of the rows not yet held out
    for code, name, share in ((TEST, "test", test), (VALID, "valid", valid)):
        keep = round((1 - share) * n)
        if not share or keep == n:
            continue
        last = kth_smallest(time, max(keep - 1, 0))
        if not latest > last:
            shared = f"too many rows share the time {last}"
            raise UserError(f"no row is later than the cut for {name}={share}: {shared}; split another way")
        cuts.append((code, last))
        n, latest = sum(int((time[rows] <= last).sum()) for rows in chunks(len(time))), last

    def assign(rows: SplitRows) -> tuple[np.ndarray, np.ndarray | None]:
        assert rows.time is not None
        part = np.full(len(rows.time), TRAIN, dtype=np.uint8)
        for code, last in reversed(cuts):
            part[rows.time > last] = code
        return part, None if rows.shown_time is None or not cuts else rows.shown_time <= cuts[-1][1]

    return assign


def kth_smallest(values: np.ndarray, k: int) -> np.generic:
    """The k-th smallest, from 0, of int64 or float64 values, without a copy: each of four passes fixes 16 bits."""
    if len(values) <= CHUNK:
        return np.partition(values, k)[k]
    sign, prefix = np.uint64(1 << 63), np.uint64(0)
    floats = values.dtype.kind == "f"
    for shift in (48, 32, 16, 0):
        histogram = np.zeros(1 << 16, dtype=np.int64)
        for rows in chunks(len(values)):
            key = values[rows].view(np.uint64)
            # An order-preserving code: the bits of negative floats descend, any other value needs its sign bit flipped.
            key = np.where(key >= sign, ~key, key | sign) if floats else key ^ sign
            if shift < 48:
                key = key[key >> np.uint64(shift + 16) == prefix]
            digits = ((key >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
            histogram += np.bincount(digits, minlength=1 << 16)
        below = np.cumsum(histogram)
        digit = int(np.searchsorted(below, k, side="right"))
        k -= int(below[digit - 1]) if digit else 0
        prefix = np.uint64((int(prefix) << 16) | digit)
    code = (prefix ^ sign if prefix >= sign else ~prefix) if floats else prefix ^ sign
    return np.array([code]).view(values.dtype)[0]


def _leave_last_out(rows: SplitRows, valid: float, test: float) -> tuple[np.ndarray, np.ndarray | None]:
    assert rows.time is not None
    # Equal times are ordered by item, so that the order of rows never matters.
    place, count = _places(rows, np.lexsort((rows.items, rows.time, rows.queries)))
    part = np.full(len(place), TRAIN, dtype=np.uint8)
    last = count - 1
    if test:
        part[(count >= 3) & (place == last)] = TEST
        last = last - 1
    if valid:
        part[(count >= 3) & (place == last)] = VALID
    part[undated(rows.time)] = TRAIN
    if rows.shown is None or rows.shown_time is None:
        return part, None
    held = part != TRAIN
    cut = np.full(rows.n_queries, np.inf)
    np.minimum.at(cut, rows.queries[held], rows.time[held])
    return part, rows.shown_time < cut[rows.shown]
