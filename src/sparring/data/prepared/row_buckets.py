"""Rows in buckets of complete queries: ids numbered, each bucket sorted and merged, every row assigned to its part.

An engine (polars on one machine, Spark on many) leaves the same rows in the same buckets. Their order within a bucket
is up to the engine, and no file written from them depends on it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import polars as pl

from sparring.core.errors import UserError
from sparring.data.columns import keeps_repeats
from sparring.data.interactions import TRAIN, VALID, Interactions, Vocabulary
from sparring.data.pairs import PartSizes, chunks, occurrences, offsets, positive_and_shown, repeated, repeats_note
from sparring.data.prepared.format import ColumnWriter
from sparring.data.splits import SplitRows, check_parts, split_rule
from sparring.data.table import OpenTable, check_ids, to_arrays, vocabulary_of
from sparring.data.weights import weight_note

BUCKET = 1 << 22  # rows sorted at once
MAX_BUCKETS = 1024  # more would be too many open files
StageProgress = Callable[[str, int, int | None], None]  # stage, done, total where known


@dataclass(frozen=True)
class Buckets:
    """Numbered ids, and for each bucket a Parquet folder `b=K` of rows: q, i, and t, w, s, l where present."""

    folder: Path
    query_ids: Vocabulary
    item_ids: Vocabulary
    first: np.ndarray  # (buckets + 1,) the first query of each bucket, and the number of queries
    roles: dict[str, str]
    notes: list[str] = field(default_factory=list)
    items: pl.DataFrame | None = None
    queries: pl.DataFrame | None = None

    def rows(self, bucket: int) -> dict[str, np.ndarray]:
        """The columns of a bucket, its rows in any order."""
        rows = pl.read_parquet(self.folder / f"b={bucket}" / "*.parquet", hive_partitioning=False)
        return to_arrays(rows.with_columns(pl.col(name).cast(pl.UInt8) for name in ("s", "l") if name in rows.columns))


@dataclass(frozen=True)
class Numbering:
    """Vocabularies of both sides, and tables for the engine to join: numbers of raw ids, buckets of queries."""

    query_ids: Vocabulary
    item_ids: Vocabulary
    first: np.ndarray
    queries: pl.DataFrame  # q (raw), dense, b
    items: pl.DataFrame  # i (raw), dense


def number_ids(queries: pl.DataFrame, items: pl.Series, table: OpenTable, roles: dict[str, str]) -> Numbering:
    """Number the distinct raw ids in ascending order, and cut the queries into buckets with about equally many rows.

    `queries` has the columns q and n, the number of rows of each query. A bucket ends where its rows reach its size.
    """
    query_ids = vocabulary_of(queries["q"], roles["query"], table.text, None, table.source)
    item_ids = vocabulary_of(items, roles["item"], table.text, table.more_items(roles["item"]), table.source)
    check_ids(query_ids, item_ids, table.source)
    dense = query_ids.encode(queries["q"])
    rows = np.zeros(len(query_ids), dtype=np.int64)
    np.add.at(rows, dense, queries["n"].to_numpy())  # two raw ids may be one: 1 and 1.0
    ends = np.cumsum(rows)
    size = max(BUCKET, -(-int(ends[-1]) // MAX_BUCKETS))
    bucket = np.unique((ends - 1) // size, return_inverse=True)[1].astype(np.int32)
    first = np.searchsorted(bucket, np.arange(int(bucket[-1]) + 2))
    return Numbering(
        query_ids,
        item_ids,
        first,
        pl.DataFrame({"q": queries["q"], "dense": dense.astype(np.int32), "b": bucket[dense]}),
        pl.DataFrame({"i": items, "dense": item_ids.encode(items).astype(np.int32)}),
    )


class MergedPairs:
    """Every pair once, or every row if repeats are kept, sorted by (query, item), in raw files, with the offset of
    each bucket."""

    def __init__(self, folder: Path, source: Buckets, repeats: bool) -> None:
        self.folder, self.source, self.repeats = folder, source, repeats
        self.files: dict[str, BinaryIO] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.begin: dict[str, list[int]] = {"": [0], "shown_": [0]}

    def add(self, rows: dict[str, np.ndarray] | None, kind: str = "") -> None:
        """Append the rows of the next bucket."""
        for name, column in (rows or {}).items():
            file = kind + name
            if file not in self.files:
                self.files[file], self.dtypes[file] = open(self.folder / file, "wb"), column.dtype  # noqa: SIM115
            self.files[file].write(np.ascontiguousarray(column).data)
        self.begin[kind].append(self.begin[kind][-1] + (0 if rows is None else len(rows["q"])))

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def column(self, name: str) -> np.ndarray | None:
        path = self.folder / name
        return np.memmap(path, self.dtypes[name], "r") if name in self.dtypes and path.stat().st_size else None

    @property
    def data(self) -> Interactions:
        """All pairs, memory-mapped."""
        q, i = self.column("q"), self.column("i")
        assert q is not None
        assert i is not None
        shown_q, shown_i = self.column("shown_q"), self.column("shown_i")
        shown = None if shown_q is None or shown_i is None else (shown_q, shown_i)
        named = {"time": self.column("t"), "weight": self.column("w"), "split": self.column("s"), "shown": shown}
        named |= {"shown_time": self.column("shown_t"), "shown_split": self.column("shown_s")}
        ids = self.source.query_ids, self.source.item_ids
        return Interactions(q, i, *ids, repeats=self.repeats, **named)  # type: ignore[arg-type]

    def buckets(self, data: Interactions) -> Iterator[tuple[int, SplitRows]]:
        """For each bucket, the number of shown pairs and the rows as a split rule reads them."""
        first = self.source.first.tolist()
        for k in range(len(first) - 1):
            rows, shown = (slice(begin[k], begin[k + 1]) for begin in self.begin.values())

            def of(column: np.ndarray | None, rows: slice = rows) -> np.ndarray | None:
                return None if column is None else np.asarray(column[rows])

            queries, items = np.asarray(data.queries[rows]) - np.int32(first[k]), np.asarray(data.items[rows])
            n_queries, time, part = first[k + 1] - first[k], of(data.time), of(data.split)
            bucket = SplitRows(queries, items, n_queries, data.n_items, time, part, first=first[k])
            if data.shown is not None:
                shown_queries = np.asarray(data.shown[0][shown]) - np.int32(first[k])
                times, parts = of(data.shown_time, shown), of(data.shown_split, shown)
                bucket = replace(bucket, shown=shown_queries, shown_time=times, shown_split=parts)
            yield shown.stop - shown.start, bucket


def merge(buckets: Buckets, folder: Path, table: OpenTable, progress: StageProgress) -> MergedPairs:
    """Sort each bucket, merge its duplicates unless repeats are kept, and delete it."""
    folder.mkdir()
    repeats = keeps_repeats(table.columns)
    merged, sizes = MergedPairs(folder, buckets, repeats), PartSizes()
    n_buckets, n_positive, n_repeats = len(buckets.first) - 1, 0, 0
    for k in range(n_buckets):
        progress("sorting", k, n_buckets)
        columns = buckets.rows(k)
        n_positive += int(columns["l"].sum()) if "l" in columns else len(columns["q"])
        positive, shown = positive_and_shown(columns, len(buckets.item_ids), sizes, repeats)
        n_repeats += repeated(positive["q"], positive["i"])
        merged.add(positive)
        merged.add(shown, "shown_")
        shutil.rmtree(buckets.folder / f"b={k}")
    merged.close()
    if not n_positive:
        raise UserError(f"no row of {table.source} is labelled 1: there are no positives")
    if repeats:
        buckets.notes.append(repeats_note(n_repeats))
    elif merged.begin[""][-1] < n_positive:
        buckets.notes.append(f"merged {n_positive - merged.begin[''][-1]:,} duplicates")
    buckets.notes.extend(sizes.notes(table.source))
    weight = merged.column("w")
    if weight is not None:
        named = bool(table.columns.get("weight"))
        buckets.notes.append(weight_note(weight, buckets.roles["weight"], named, table.source))
    return merged


def write_parts(
    merged: MergedPairs,
    data: Interactions,
    folder: Path,
    how: str,
    valid: float,
    test: float,
    seed: int,
    progress: StageProgress,
) -> dict[str, int]:
    """Write the columns in the order of parts, and the training part's offsets and counts; {part: number of rows}."""
    part, keep, sizes = _assign_parts(merged, data, how, valid, test, seed, progress)
    check_parts(how, sizes, valid, test)
    named = {"queries": data.queries, "items": data.items, "time": data.time, "weight": data.weight, "split": part}
    for done, (name, column) in enumerate(named.items()):
        progress("writing", done, len(named))
        if column is not None:
            _write_column(folder / f"{name}.npy", column, part, sizes, merged.begin[""])
    if sizes[VALID]:
        _write_pairs(folder, "seen", data, part, VALID)
    if data.repeats:
        _write_pairs(folder, "known", data, part, TRAIN)
    if data.shown is not None and keep is not None and keep.any():
        for name, values in zip(("queries", "items"), data.shown, strict=True):
            shown = ColumnWriter(folder / f"shown_{name}.npy", values.dtype, int(keep.sum()))
            for rows in chunks(len(values)):
                shown.append(values[rows][keep[rows]])
            shown.close()
    queries, items = (np.load(folder / f"{name}.npy", mmap_mode="r")[: sizes[TRAIN]] for name in ("queries", "items"))
    np.save(folder / "start.npy", offsets(occurrences(queries, data.n_queries)))
    np.save(folder / "counts.npy", occurrences(items, data.n_items))
    return dict(zip(("train", "valid", "test"), sizes, strict=True))


def _assign_parts(
    merged: MergedPairs, data: Interactions, how: str, valid: float, test: float, seed: int, progress: StageProgress
) -> tuple[np.ndarray, np.ndarray | None, list[int]]:
    """The part of each row and the mask of shown pairs that train (None without any), in files; the parts' sizes."""
    assign, sizes = split_rule(data, how, valid, test, seed), np.zeros(3, dtype=np.int64)
    paths = merged.folder / "parts", merged.folder / "keep"
    with open(paths[0], "wb") as parts, open(paths[1], "wb") as keeps:
        for k, (shown, rows) in enumerate(merged.buckets(data)):
            progress("splitting", k, len(merged.begin[""]) - 1)
            part, keep = assign(rows)
            sizes += np.bincount(part, minlength=3)
            parts.write(part.data)
            keeps.write(np.ones(shown, dtype=bool).data if keep is None else np.ascontiguousarray(keep).data)
    kept = np.memmap(paths[1], bool, "r") if paths[1].stat().st_size else None
    return np.memmap(paths[0], np.uint8, "r"), kept, sizes.tolist()


def _write_pairs(folder: Path, name: str, data: Interactions, part: np.ndarray, last: int) -> None:
    """Write each query's distinct items in the parts up to `last`, and their offsets."""

    def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        before = -1, -1
        for rows in chunks(len(data)):
            chosen = part[rows] <= last
            queries, items = data.queries[rows][chosen], data.items[rows][chosen]
            if not len(queries):
                continue
            new = (queries != np.r_[before[0], queries[:-1]]) | (items != np.r_[before[1], items[:-1]])
            before = int(queries[-1]), int(items[-1])
            yield queries[new], items[new]

    counts = np.zeros(data.n_queries, dtype=np.int64)
    for queries, _ in pairs():
        np.add.at(counts, queries, 1)
    column = ColumnWriter(folder / f"{name}_items.npy", data.items.dtype, int(counts.sum()))
    for _, items in pairs():
        column.append(items)
    column.close()
    np.save(folder / f"{name}_start.npy", offsets(counts))


def _write_column(path: Path, values: np.ndarray, part: np.ndarray, sizes: list[int], begin: list[int]) -> None:
    """Write the values in the order of parts, keeping their order within each part."""
    column = ColumnWriter(path, values.dtype, len(values))
    position = [0, sizes[TRAIN], sizes[TRAIN] + sizes[VALID]]
    for first, last in pairwise(begin):
        block, codes = np.asarray(values[first:last]), np.asarray(part[first:last])
        for code in range(3):
            chosen = block[codes == code]
            column.put(position[code], chosen)
            position[code] += len(chosen)
    column.close()
