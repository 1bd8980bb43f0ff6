"""Pairs of dense ids as arrays: sorted, merged, counted, with offsets by query; memory-mapped columns stay on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import torch

from sparring.core.errors import UserError
from sparring.core.types import Positives

CHUNK = 1 << 24  # rows per pass: a copy of an entire column may not fit into memory

NO_TIME = {"i": np.iinfo(np.int64).min, "f": -np.inf}  # by the kind of the column


def chunks(n: int, size: int | None = None) -> Iterator[slice]:
    """0..n in slices of at most `size` rows, CHUNK by default."""
    size = size or CHUNK
    return (slice(first, min(first + size, n)) for first in range(0, n, size))


def within(counts: np.ndarray) -> np.ndarray:
    """The place of each row in its group, for groups of these sizes: within([2, 3]) is [0, 1, 0, 1, 2]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def occurrences(ids: np.ndarray, n: int) -> np.ndarray:
    """(n,) int64: how often each of the ids 0..n-1 occurs."""
    if len(ids) <= CHUNK:
        return np.bincount(ids, minlength=n).astype(np.int64, copy=False)
    counts = np.zeros(n, dtype=np.int64)
    for rows in chunks(len(ids)):
        part = np.bincount(ids[rows])
        counts[: len(part)] += part
    return counts


def undated(time: np.ndarray) -> np.ndarray:
    """Which rows have no time: they hold the lowest value, so that they come before all others."""
    return time == NO_TIME[time.dtype.kind]


def offsets(counts: np.ndarray) -> np.ndarray:
    """(n + 1,) int64: where each of n lists begins, and the end of the last."""
    start = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=start[1:])
    return start


def csr(queries: np.ndarray, items: np.ndarray, n_queries: int, n_items: int) -> Positives:
    """Positives of dense pairs: sorted within each query, without duplicates; O(n) if sorted, else O(n log n)."""
    if not is_canonical(queries, items):
        key = pair_keys(queries, items, n_items)
        key.sort()
        key = key[np.concatenate([[True], key[1:] != key[:-1]])] if len(key) else key
        queries, items = unpack_keys(key, n_items)
    start = offsets(occurrences(queries, n_queries))
    return Positives(torch.from_numpy(start), torch.from_numpy(np.ascontiguousarray(items)))


def is_canonical(queries: np.ndarray, items: np.ndarray) -> bool:
    """Whether the pairs are strictly increasing by (query, item)."""
    for rows in chunks(len(queries) - 1):
        after = slice(rows.start + 1, rows.stop + 1)
        step = queries[after] - queries[rows]
        if not ((step > 0) | ((step == 0) & (items[after] > items[rows]))).all():
            return False
    return True


def pair_keys(queries: np.ndarray, items: np.ndarray, n_items: int) -> np.ndarray:
    """query * n_items + item: one int64 that orders pairs by (query, item)."""
    key = queries.astype(np.int64)
    key *= max(n_items, 1)
    key += items
    return key


def unpack_keys(key: np.ndarray, n_items: int) -> tuple[np.ndarray, np.ndarray]:
    queries = (key // max(n_items, 1)).astype(np.int32)
    items = (key - queries.astype(np.int64) * max(n_items, 1)).astype(np.int32)
    return queries, items


def merge_pairs(columns: dict[str, np.ndarray], n_items: int) -> dict[str, np.ndarray]:
    """One row per (q, i), sorted: the last time `t`, the summed weight `w`, the parts `s` as bits. Empties `columns`.

    Weights are sorted before they are summed, so that not even rounding depends on the order of rows.
    """
    queries, items = columns.pop("q"), columns.pop("i")
    if "s" in columns:
        columns["s"] = np.left_shift(np.uint8(1), columns["s"].astype(np.uint8))
    if is_canonical(queries, items):
        merged = dict(columns)
    else:
        key = pair_keys(queries, items, n_items)
        del queries, items
        order = None
        if columns:
            order = np.lexsort((columns["w"], key)) if "w" in columns else pl.Series(key).arg_sort().to_numpy()
            key = key[order]
        else:
            key.sort()
        first = np.ones(len(key), dtype=bool)
        np.not_equal(key[1:], key[:-1], out=first[1:])
        start = None if first.all() else np.flatnonzero(first)
        merged = {}
        for name in list(columns):
            column = columns.pop(name)[order]
            merged[name] = column if start is None else _REDUCE[name](column, start)
        del order
        queries, items = unpack_keys(key if start is None else key[start], n_items)
    if "w" in merged:
        merged["w"] = merged["w"].astype(np.float32)
    return {"q": queries, "i": items, **merged}


def sort_pairs(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All rows sorted by (q, i) and every other column, so that nothing depends on the order they were read in."""
    order = np.lexsort([columns[name] for name in ("s", "w", "t", "i", "q") if name in columns])
    rows = {name: column[order] for name, column in columns.items()}
    return rows if "w" not in rows else {**rows, "w": rows["w"].astype(np.float32)}


def repeated(queries: np.ndarray, items: np.ndarray) -> int:
    """The number of rows, sorted by (query, item), that repeat the pair of the row before."""
    return int(((queries[1:] == queries[:-1]) & (items[1:] == items[:-1])).sum())


def repeats_note(n: int) -> str:
    """The note on n kept repeats."""
    return f"kept {n:,} repeats of a pair: an item that a query has taken can be recommended again"


_REDUCE = {"t": np.maximum.reduceat, "w": np.add.reduceat, "s": np.bitwise_or.reduceat}


@dataclass
class PartSizes:
    """Pairs of the train, valid and test part in a file, and the pairs that each lost because an earlier part has them.

    A pair counts in its first part only: a seen item is masked, so that it could never be found in a later one.
    """

    found: np.ndarray = field(default_factory=lambda: np.zeros(3, dtype=np.int64))
    lost: np.ndarray = field(default_factory=lambda: np.zeros(3, dtype=np.int64))

    def first(self, parts: np.ndarray) -> np.ndarray:
        """The first part of each pair, from its parts as bits; counted."""
        for code in range(3):
            inside = (parts >> np.uint8(code)) & 1 == 1
            self.found[code] += inside.sum()
            self.lost[code] += (inside & (parts & np.uint8((1 << code) - 1) != 0)).sum()
        return np.array([0, 0, 1, 0, 2, 0, 1, 0], dtype=np.uint8)[parts]

    def notes(self, source: str) -> list[str]:
        """Notes on a missing test part and on each part that lost pairs; an error where one lost all of them."""
        notes = []
        if self.found.any() and not self.found[2]:
            notes.append("the split column has no test rows, so there is no test part")
        for code, (name, earlier) in enumerate(_EARLIER.items()):
            found, lost = int(self.found[code]), int(self.lost[code])
            if lost and lost == found:
                reason = f"all {found:,} pairs of the {name} part of {source} are in the {earlier} part too"
                raise UserError(f"{reason}: remove them there, or ignore the split column", "split", "'none'")
            if lost:
                leak = f"{lost:,} pairs of the {name} part are in the {earlier} part too and count there"
                notes.append(f"{leak}: {name} shrank from {found:,} to {found - lost:,}")
        return notes


_EARLIER = {"train": "", "valid": "train", "test": "train or valid"}


def positive_and_shown(
    columns: dict[str, np.ndarray], n_items: int, sizes: PartSizes, repeats: bool = False
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None]:
    """The positives (all rows, without a label `l`) and the pairs only ever shown, each once; None where none were.

    The part `s` of a pair is its first; `sizes` counts the pairs that later parts lose by it. With `repeats`, the
    positives are rows instead of pairs, and each has its own part.
    """
    label, shown = columns.pop("l", None), None
    if label is not None and not label.all():
        shown = merge_pairs({name: column[label == 0] for name, column in columns.items() if name != "w"}, n_items)
        columns = {name: column[label == 1] for name, column in columns.items()}
    positive = sort_pairs(columns) if repeats else merge_pairs(columns, n_items)
    if "s" in positive and repeats:
        sizes.found += np.bincount(positive["s"], minlength=3)
    elif "s" in positive:
        positive["s"] = sizes.first(positive["s"])
    if shown is None:
        return positive, None
    if "s" in shown:
        shown["s"] = PartSizes().first(shown["s"])
    fresh = ~np.isin(pair_keys(shown["q"], shown["i"], n_items), pair_keys(positive["q"], positive["i"], n_items))
    return positive, {name: column[fresh] for name, column in shown.items()}
