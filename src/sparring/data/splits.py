"""Train, validation and test parts of interactions: the file's own, random per query, by time, or each query's last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparring.core.choices import SPLITS
from sparring.core.errors import UserError
from sparring.data.interactions import TEST, TRAIN, VALID, Interactions, Split
from sparring.data.pairs import CHUNK, chunks, is_canonical, pair_keys
from sparring.data.prepared.format import Prepared


def split(data: Interactions, how: str = "auto", valid: float = 0.1, test: float = 0.2, seed: int = 0) -> Split:
    """Parts of the data; every row is in exactly one, and (data, how, shares, seed) decide which, not the order of rows.

    "file": the file's own parts. "random": of a query's n items, round((1 - test) n) train, drawn at random (the XIR
    protocol). "temporal": the latest `test` share of all rows, by one cut in time; equal times stay together. "leave-last-out":
    each query's last item is test and the one before valid; queries with fewer than 3 train. "auto": the file's own where it
    has one, else random. `valid` is the share of the training part held out for validation, in the same way (at random for a
    file without a valid part), leaving each query at least one item; 0 gives none. Where no test query of the file trains, as
    with texts, whole queries are held out instead. A part without rows is None.

    Shown pairs go to the training part, save those that the file or the times place outside it. Prepared data was split when it was
    prepared: "auto" and "file" give those parts, and anything else must be what they were made with.

        parts = split(data, "random", valid=0, test=0.2, seed=10);  parts.train, parts.test
    """
    if isinstance(data, Prepared):
        return data.parts_for(how, valid, test, seed)
    check_split(how, valid, test, data.time is not None, data.split is not None)
    if how == "auto":
        how = "random" if data.split is None else "file"
    part, keep_shown = rule(data, how, valid, test, seed)(Rows.of(data))
    check_parts(how, np.bincount(part, minlength=3).tolist(), valid, test)
    return _parts(data, part, keep_shown)


def check_split(how: str, valid: float, test: float, timed: bool, parted: bool) -> None:
    """What cannot be done is told in one line: an unknown way, a wrong share, a way that needs a column which the data has not."""
    if how not in SPLITS:
        raise UserError(f"no split called {how!r}; choose from {', '.join(SPLITS)}")
    for name, share in (("valid", valid), ("test", test)):
        if not 0 <= share < 1:
            raise UserError(f"{name} is {share}; a share must be at least 0 and below 1")
    if how in ("temporal", "leave-last-out") and not timed:
        raise UserError(
            f"the split {how!r} needs a time column, and the data has none: split at random, or name it", "time"
        )
    if how == "file" and not parted:
        raise UserError("the data has no split column: choose another split, or name it", "split")


def check_parts(how: str, sizes: Sequence[int], valid: float, test: float) -> None:
    """A split must leave something to train on; one that holds out each query's last, something held out."""
    if how == "leave-last-out" and not any(sizes[1:]):
        raise UserError(
            "no query has 3 interactions or more, so leave-last-out has nothing to hold out; split another way"
        )
    if not sizes[TRAIN]:
        raise UserError(f"the split {how!r} with valid={valid}, test={test} leaves no row to train on")


@dataclass(frozen=True, eq=False)
class Rows:
    """All rows of consecutive queries: what a rule assigns to parts at once. Queries count from `first`."""

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
    def of(cls, data: Interactions) -> Rows:
        shown = None if data.shown is None else data.shown[0]
        columns = (data.time, data.split, shown, data.shown_time, data.shown_split)
        return cls(data.queries, data.items, data.n_queries, data.n_items, *columns)


Rule = Callable[
    [Rows], tuple[np.ndarray, np.ndarray | None]
]  # -> part of each row, which shown pairs train (None: all)


def rule(data: Interactions, how: str, valid: float, test: float, seed: int) -> Rule:
    """What assigns rows to parts, given all of the data, which may lie in files: it is looked at a chunk at a time.

    Called on the rows of all queries, or on those of some after the other in ascending order: the parts are the same.
    """
    random = np.random.default_rng(seed)
    if how == "file":
        return _file(data, valid, seed, random)
    if how == "random":
        return lambda rows: (_random(rows, valid, test, random), None)
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


def _file(data: Interactions, valid: float, seed: int, random: np.random.Generator) -> Rule:
    assert data.split is not None
    trains, tests = np.zeros(data.n_queries, dtype=bool), np.zeros(data.n_queries, dtype=bool)
    has_valid = False
    for rows in chunks(len(data)):
        part, queries = data.split[rows], data.queries[rows]
        trains[queries[part == TRAIN]] = True
        tests[queries[part == TEST]] = True
        has_valid |= bool((part == VALID).any())
    if not trains.any():
        raise UserError("the data's split column has no training rows")
    held: np.ndarray | None = None  # whole queries that validate
    if valid and not has_valid and tests.any() and not (trains & tests).any():
        held = np.zeros(data.n_queries, dtype=bool)
        held[_some(np.flatnonzero(trains), valid, seed)] = True

    def assign(rows: Rows) -> tuple[np.ndarray, np.ndarray | None]:
        assert rows.split is not None
        part = np.array(rows.split)
        at = np.flatnonzero(part == TRAIN)
        if held is not None:
            part[at[held[rows.first + rows.queries[at]]]] = VALID
        elif valid and not has_valid:
            place, count = _shuffled(replace(rows, queries=rows.queries[at], items=rows.items[at]), random)
            part[at[place < _held(count, valid)]] = VALID
        return part, None if rows.shown_split is None else rows.shown_split == TRAIN

    return assign


def _some(queries: np.ndarray, share: float, seed: int) -> np.ndarray:
    """A share of the queries, at random, but never all of them."""
    n = min(round(share * len(queries)), len(queries) - 1)
    return np.random.default_rng(seed).permutation(queries)[:n]


def _random(rows: Rows, valid: float, test: float, random: np.random.Generator) -> np.ndarray:
    place, count = _shuffled(rows, random)
    n_train = np.rint((1 - test) * count)
    part = np.full(len(place), TRAIN, dtype=np.uint8)
    part[place >= n_train] = TEST
    part[place < _held(n_train, valid)] = VALID
    return part


def _held(count: np.ndarray, share: float) -> np.ndarray:
    """How many of each query's items validate: their share, rounded, but never all of them."""
    return np.minimum(np.rint(share * count), np.maximum(count - 1, 0))


def _shuffled(rows: Rows, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Each row's place 0..n-1 in a random order of its query's rows, and n."""
    queries, items = rows.queries, rows.items
    by_pair = (
        None if is_canonical(queries, items) else np.argsort(pair_keys(queries, items, rows.n_items), kind="stable")
    )
    # 32 random bits below the query: one sort orders rows by query and, within it, at random; ties fall to the row's rank.
    key = (queries if by_pair is None else queries[by_pair]).astype(np.int64) << 32
    key |= random.integers(0, 2**32, len(key), dtype=np.uint32)
    order = np.argsort(key, kind="stable")
    del key
    return _places(rows, order if by_pair is None else by_pair[order])


def _places(rows: Rows, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place within the query, and the query's count, of each row, for an order that sorts rows by query."""
    count = np.bincount(rows.queries, minlength=rows.n_queries)
    start = np.cumsum(count) - count
    place = np.empty(len(order), dtype=np.int32)
    place[order] = (np.arange(len(order)) - start[rows.queries[order]]).astype(np.int32)
    return place, count.astype(np.int32)[rows.queries]


def _temporal(time: np.ndarray, valid: float, test: float) -> Rule:
    cuts: list[tuple[int, np.generic]] = []
    n, latest = len(time), time.max()  # of the rows that train so far
    for code, name, share in ((TEST, "test", test), (VALID, "valid", valid)):
        keep = round((1 - share) * n)
        if not share or keep == n:
            continue
        last = kth_smallest(time, max(keep - 1, 0))
        if not latest > last:
            raise UserError(
                f"no row is later than the cut for {name}={share}: too many rows share the time {last}; split another way"
            )
        cuts.append((code, last))
        n, latest = sum(int((time[rows] <= last).sum()) for rows in chunks(len(time))), last

    def assign(rows: Rows) -> tuple[np.ndarray, np.ndarray | None]:
        assert rows.time is not None
        part = np.full(len(rows.time), TRAIN, dtype=np.uint8)
        for code, last in reversed(cuts):
            part[rows.time > last] = code
        return part, None if rows.shown_time is None or not cuts else rows.shown_time <= cuts[-1][1]

    return assign


def kth_smallest(values: np.ndarray, k: int) -> np.generic:
    """The k-th smallest, from 0, of many int64 or float64 values without a copy of them: 16 bits are settled in each of four passes."""
    if len(values) <= CHUNK:
        return np.partition(values, k)[k]
    sign, prefix = np.uint64(1 << 63), np.uint64(0)
    floats = values.dtype.kind == "f"
    for shift in (48, 32, 16, 0):
        found = np.zeros(1 << 16, dtype=np.int64)
        for rows in chunks(len(values)):
            key = values[rows].view(np.uint64)
            # an order-preserving code: negative floats descend in their bits, all else needs its sign turned
            key = np.where(key >= sign, ~key, key | sign) if floats else key ^ sign
            if shift < 48:
                key = key[key >> np.uint64(shift + 16) == prefix]
            found += np.bincount((key >> np.uint64(shift)) & np.uint64(0xFFFF), minlength=1 << 16)
        below = np.cumsum(found)
        digit = int(np.searchsorted(below, k, side="right"))
        k -= int(below[digit - 1]) if digit else 0
        prefix = np.uint64((int(prefix) << 16) | digit)
    code = (prefix ^ sign if prefix >= sign else ~prefix) if floats else prefix ^ sign
    return np.array([code]).view(values.dtype)[0]


def _leave_last_out(rows: Rows, valid: float, test: float) -> tuple[np.ndarray, np.ndarray | None]:
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
    if rows.shown is None or rows.shown_time is None:
        return part, None
    held = part != TRAIN
    cut = np.full(rows.n_queries, np.inf)
    np.minimum.at(cut, rows.queries[held], rows.time[held])
    return part, rows.shown_time < cut[rows.shown]
