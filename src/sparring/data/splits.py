"""Train, validation and test parts of interactions: the file's own, random per query, by time, or each query's last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparring.data.interactions import TEST, TRAIN, VALID, Interactions, Split, is_canonical, pair_keys
from sparring.errors import UserError

HOW = ("auto", "file", "random", "temporal", "leave-last-out")


def split(data: Interactions, how: str = "auto", valid: float = 0.1, test: float = 0.2, seed: int = 0) -> Split:
    """Parts of the data; every row is in exactly one, and (data, how, shares, seed) decide which, not the order of rows.

    "file": the file's own parts. "random": of a query's n items, round((1 - test) n) train, drawn at random (the XIR
    protocol). "temporal": the latest `test` share of all rows, by one cut in time; equal times stay together. "leave-last-out":
    each query's last item is test and the one before valid; queries with fewer than 3 train. "auto": the file's own where it
    has one, else random. `valid` is the share of the training part held out for validation, in the same way (at random for a
    file without a valid part), leaving each query at least one item; 0 gives none. Where no test query of the file trains, as
    with texts, whole queries are held out instead. A part without rows is None.

    Shown pairs go to the training part, save those that the file or the times place outside it.

        parts = split(data, "random", valid=0, test=0.2, seed=10);  parts.train, parts.test
    """
    if how not in HOW:
        raise UserError(f"no split called {how!r}; choose from {', '.join(HOW)}")
    for name, share in (("valid", valid), ("test", test)):
        if not 0 <= share < 1:
            raise UserError(f"{name} is {share}; a share must be at least 0 and below 1")
    if how == "auto":
        how = "random" if data.split is None else "file"
    if how in ("temporal", "leave-last-out") and data.time is None:
        raise UserError(f"the split {how!r} needs a time column, and the data has none; name it with time=..., or split at random")
    keep_shown: np.ndarray | None = None
    if how == "file":
        part, keep_shown = _file(data, valid, seed)
    elif how == "random":
        part = _random(data, valid, test, seed)
    elif how == "temporal":
        part, keep_shown = _temporal(data, valid, test)
    else:
        part, keep_shown = _leave_last_out(data, valid, test)
    if not (part == TRAIN).any():
        raise UserError(f"the split {how!r} with valid={valid}, test={test} leaves no row to train on")
    return _parts(data, part, keep_shown)


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


def _file(data: Interactions, valid: float, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
    if data.split is None:
        raise UserError("the data has no split column; name it with split=..., or choose another split")
    part = data.split.copy()
    if not (part == TRAIN).any():
        raise UserError("the data's split column has no training rows")
    if valid and not (part == VALID).any():
        rows = np.flatnonzero(part == TRAIN)
        trains, tests = (np.unique(data.queries[part == code]) for code in (TRAIN, TEST))
        if len(tests) and not np.isin(tests, trains, assume_unique=True).any():
            part[rows[np.isin(data.queries[rows], _some(trains, valid, seed))]] = VALID
        else:
            place, count = _shuffled(data.subset(rows), seed)
            part[rows[place < _held(count, valid)]] = VALID
    return part, None if data.shown_split is None else data.shown_split == TRAIN


def _some(queries: np.ndarray, share: float, seed: int) -> np.ndarray:
    """A share of the queries, at random, but never all of them."""
    n = min(round(share * len(queries)), len(queries) - 1)
    return np.random.default_rng(seed).permutation(queries)[:n]


def _random(data: Interactions, valid: float, test: float, seed: int) -> np.ndarray:
    place, count = _shuffled(data, seed)
    n_train = np.rint((1 - test) * count)
    part = np.full(len(data), TRAIN, dtype=np.uint8)
    part[place >= n_train] = TEST
    part[place < _held(n_train, valid)] = VALID
    return part


def _held(count: np.ndarray, share: float) -> np.ndarray:
    """How many of each query's items validate: their share, rounded, but never all of them."""
    return np.minimum(np.rint(share * count), np.maximum(count - 1, 0))


def _shuffled(data: Interactions, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Each row's place 0..n-1 in a random order of its query's rows, and n."""
    rows = None if is_canonical(data.queries, data.items) else np.argsort(pair_keys(data.queries, data.items, data.n_items), kind="stable")
    queries = data.queries if rows is None else data.queries[rows]
    # 32 random bits below the query: one sort orders rows by query and, within it, at random; ties fall to the row's rank.
    key = queries.astype(np.int64) << 32
    key |= np.random.default_rng(seed).integers(0, 2**32, len(key), dtype=np.uint32)
    order = np.argsort(key, kind="stable")
    del key
    return _places(data, order if rows is None else rows[order])


def _places(data: Interactions, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place within the query, and the query's count, of each row, for an order that sorts rows by query."""
    count = np.bincount(data.queries, minlength=data.n_queries)
    start = np.cumsum(count) - count
    place = np.empty(len(order), dtype=np.int32)
    place[order] = (np.arange(len(order)) - start[data.queries[order]]).astype(np.int32)
    return place, count.astype(np.int32)[data.queries]


def _temporal(data: Interactions, valid: float, test: float) -> tuple[np.ndarray, np.ndarray | None]:
    assert data.time is not None
    part = np.full(len(data), TRAIN, dtype=np.uint8)
    last = None
    for code, share in ((TEST, test), (VALID, valid)):
        rows = part == TRAIN
        times = data.time[rows]
        keep = round((1 - share) * len(times))
        if not share or keep == len(times):
            continue
        last = np.partition(times, max(keep - 1, 0))[max(keep - 1, 0)]
        if not (times > last).any():
            name = "test" if code == TEST else "valid"
            raise UserError(f"no row is later than the cut for {name}={share}: too many rows share the time {last}; split another way")
        part[rows & (data.time > last)] = code
    return part, None if data.shown_time is None or last is None else data.shown_time <= last


def _leave_last_out(data: Interactions, valid: float, test: float) -> tuple[np.ndarray, np.ndarray | None]:
    assert data.time is not None
    # Equal times are ordered by item, so that the order of rows never matters.
    place, count = _places(data, np.lexsort((data.items, data.time, data.queries)))
    part = np.full(len(data), TRAIN, dtype=np.uint8)
    last = count - 1
    if test:
        part[(count >= 3) & (place == last)] = TEST
        last = last - 1
    if valid:
        part[(count >= 3) & (place == last)] = VALID
    if not (part != TRAIN).any():
        raise UserError("no query has 3 interactions or more, so leave-last-out has nothing to hold out; split another way")
    if data.shown is None or data.shown_time is None:
        return part, None
    held = part != TRAIN
    cut = np.full(data.n_queries, np.inf)
    np.minimum.at(cut, data.queries[held], data.time[held])
    return part, data.shown_time < cut[data.shown[0]]
