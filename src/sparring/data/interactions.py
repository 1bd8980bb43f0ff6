"""Interactions as dense columns, and the maps between original and dense ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.files import read_table, write_table
from sparring.core.manifest import Manifest
from sparring.core.types import Positives
from sparring.data.pairs import csr, occurrences, undated

TRAIN, VALID, TEST = 0, 1, 2  # codes of the split column


class Vocabulary:
    """Original ids, sorted, and their dense ids 0..n-1.

    Because they are sorted, dense ids depend on the set of ids only, never on the order of rows. Integers stay
    integers, everything else is text. Text that spells an integer matches it ("1042" matches 1042) and vice versa,
    because a command line has text only.

        ids = Vocabulary(["b", "a"]);  ids.encode(["a", "z"])  -> [0, -1];  ids.decode([1])  -> ["b"]
    """

    def __init__(self, ids: pl.Series | np.ndarray | Sequence[Any]) -> None:
        series = _id_series(ids).drop_nulls()
        unsorted = len(series) > 1 and not bool((series.slice(1) > series.slice(0, len(series) - 1)).all())
        self._ids = (series.unique().sort() if unsorted else series).rechunk().alias("id")

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self):,} ids, {self.kind})"

    @property
    def kind(self) -> str:
        """ "int" or "text"."""
        return "text" if self._ids.dtype == pl.String else "int"

    @property
    def ids(self) -> pl.Series:
        """Original ids in dense order."""
        return self._ids

    def encode(self, ids: pl.Series | np.ndarray | Sequence[Any]) -> np.ndarray:
        """Dense int64 ids of original ids, -1 where unknown or null."""
        wanted = _id_series(ids).alias("id")
        if wanted.dtype != self._ids.dtype:
            wanted = wanted.cast(pl.String).cast(self._ids.dtype, strict=False)
        known = pl.DataFrame({"id": self._ids, "dense": np.arange(len(self), dtype=np.int64)})
        joined = wanted.to_frame().join(known, on="id", how="left", maintain_order="left")
        return joined["dense"].fill_null(-1).to_numpy(writable=True)

    def decode(self, dense: np.ndarray | Tensor | Sequence[int]) -> np.ndarray:
        """Original ids of dense ids, in the same shape: an integer array, or an object array of text."""
        index = np.asarray(dense, dtype=np.int64)
        if index.size and (index.min() < 0 or index.max() >= len(self)):
            wrong = index.min() if index.min() < 0 else index.max()
            raise UserError(f"dense id {wrong} is outside 0..{len(self) - 1}")
        return self._ids.gather(index.ravel()).to_numpy().reshape(index.shape)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as Parquet, one column `id` in dense order; atomic."""
        write_table(self._ids.to_frame(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        table = read_table(path)
        if table.columns != ["id"]:
            raise UserError(
                f"{path} is not a saved vocabulary: its columns are {', '.join(table.columns)}; expected id"
            )
        ids = table["id"]
        if ids.dtype not in (pl.Int64, pl.UInt64, pl.String):
            raise UserError(f"{path} is corrupt: its ids are {ids.dtype}, not integers or text")
        vocabulary = cls(ids)
        if not vocabulary.ids.equals(ids):  # sorting them would give every row another name
            raise UserError(f"{path} is corrupt: its ids are not in ascending order, each once; restore it from a copy")
        return vocabulary


_EXACT = 2**53  # below, a float64 holds every integer


def _series(ids: list[Any]) -> pl.Series:
    """Ids of Python as a series; all as text where one is an integer beyond 64 bits, which polars would make null."""
    nested = next((value for value in ids if isinstance(value, (list, tuple, dict, set, np.ndarray, pl.Series))), None)
    if nested is not None:
        raise UserError(f"ids must be integers or text, not {nested!r}: give a flat list")
    if any(isinstance(value, int) and not -(2**63) <= value < 2**64 for value in ids):
        return pl.Series([None if value is None else str(value) for value in ids], dtype=pl.String)
    return pl.Series(ids, strict=False)


def _id_series(ids: pl.Series | np.ndarray | Sequence[Any]) -> pl.Series:
    """Ids as Int64, UInt64 (only where Int64 cannot hold them) or String, nulls kept."""
    if isinstance(ids, np.ndarray):
        ids = ids.ravel()
        series = _series(ids.tolist()) if ids.dtype == object else pl.Series(ids)
    elif isinstance(ids, pl.Series):
        series = ids
    else:
        series = _series(list(ids))
    if series.dtype.is_nested() or series.dtype == pl.Object:
        raise UserError(f"ids must be integers or text, not {series.dtype}: give a flat list")
    if series.dtype.is_float():
        series = series.fill_nan(None)
        fractions = series.filter(series % 1 != 0)  # infinite ones too: their remainder is NaN
        if len(fractions):
            raise UserError(f"ids must be integers or text, not fractions such as {fractions[0]}")
        large = series.filter(series.abs() > _EXACT)
        if len(large):
            raise UserError(f"the id {large[0]:.0f} is a float above 2^53, so its last digits are lost: give integers")
        return series.cast(pl.Int64)
    if series.dtype == pl.UInt64:
        return series if (series.max() or 0) > np.iinfo(np.int64).max else series.cast(pl.Int64)  # type: ignore[operator]
    if series.dtype.is_integer() and series.dtype not in (pl.Int128, pl.UInt128):
        return series.cast(pl.Int64)
    return series.cast(pl.String)


@dataclass(frozen=True, eq=False)
class Interactions:
    """(query, item) pairs in dense ids, with times, weights, parts, and tables of items and queries.

    `read` and `from_frame` return each pair once, sorted by (query, item), so no result depends on the order of rows in
    a file. With `repeats` a pair has a row for each time that it occurs, sorted by time. The columns are plain
    contiguous arrays: `pairs()` passes them to torch without a copy.

        data = read("interactions.parquet");  data.n_queries, data.n_items, len(data);  data.positives()
    """

    queries: np.ndarray  # (n,) int32
    items: np.ndarray  # (n,) int32
    query_ids: Vocabulary
    item_ids: Vocabulary
    time: np.ndarray | None = None  # (n,) int64 or float64; dates become microseconds since 1970; see pairs.NO_TIME
    weight: np.ndarray | None = None  # (n,) float32
    split: np.ndarray | None = None  # (n,) uint8: 0 train, 1 valid, 2 test, where the file has one
    grade: np.ndarray | None = (
        None  # (n,) float32 above 0: how relevant the item is, for ndcg; training does not read it
    )
    shown: tuple[np.ndarray, np.ndarray] | None = None  # (queries, items) shown and not clicked, int32
    shown_time: np.ndarray | None = None  # of the shown pairs, like time
    shown_split: np.ndarray | None = None  # of the shown pairs, like split
    item_table: pl.DataFrame | None = None  # row i describes dense item i
    query_table: pl.DataFrame | None = None
    hidden: tuple[np.ndarray, np.ndarray] | None = None  # (queries, items) never recommended nor scored, int32
    empty: int = 0  # test queries without any item, which some metrics count as 0
    propensity: np.ndarray | None = None  # (N,) inverse propensities, where the data has a convention for them
    repeats: bool = False  # a pair may occur more than once, so what a query has taken can be taken again
    is_order: bool = False  # the time is a position among the query's items, which no two queries share
    notes: tuple[str, ...] = ()  # the rows that the reader dropped or merged, and the spread of the weights

    def __post_init__(self) -> None:
        for name in ("items", "time", "weight", "split", "grade"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.queries):
                raise UserError(f"{name} has {len(column):,} rows, queries has {len(self.queries):,}")
        if self.repeats and self.hidden is not None:
            raise UserError("data with hidden pairs cannot keep repeats: what was seen is masked in it")
        for table, n, name in (
            (self.item_table, self.n_items, "item_table"),
            (self.query_table, self.n_queries, "query_table"),
        ):
            if table is not None and len(table) != n:
                raise UserError(f"{name} has {len(table):,} rows for {n:,} dense ids")

    def __len__(self) -> int:
        return len(self.queries)

    def __repr__(self) -> str:
        return f"Interactions({self.n_queries:,} queries x {self.n_items:,} items, {len(self):,} pairs)"

    @property
    def n_queries(self) -> int:
        return len(self.query_ids)

    @property
    def n_items(self) -> int:
        return len(self.item_ids)

    def counts(self) -> np.ndarray:
        """(N,) int64 interactions per item."""
        return occurrences(self.items, self.n_items)

    def recent_counts(self, half_life: float | None) -> np.ndarray:
        """(N,): the weights of each item's interactions, halved for each `half_life` of the time span, and summed.

        Without a half-life, or without times, all ages count alike; an interaction without a time is the oldest.
        """
        weight = np.ones(len(self)) if self.weight is None else self.weight.astype(np.float64)
        if half_life is not None and self.time is not None and len(self):
            known, newest = ~undated(self.time), self.time.max()
            age = (newest - np.where(known, self.time, self.time[known].min(initial=newest))).astype(np.float64)
            weight = weight * 2.0 ** (-age / max(half_life * age.max(), 1e-300))
        return np.bincount(self.items, weights=weight, minlength=self.n_items)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """(queries, items) as int32 tensors that share memory with the columns."""
        return torch.from_numpy(self.queries), torch.from_numpy(self.items)

    def positives(self) -> Positives:
        """Every query's items, sorted and distinct: start (queries + 1,) int64, items int32.

        Shares memory with `items` when the rows are already sorted by (query, item); otherwise costs one sort.
        """
        return csr(self.queries, self.items, self.n_queries, self.n_items)

    def shown_lists(self) -> Positives | None:
        """Every query's shown and not clicked items, in the same form as `positives()`; None where unknown."""
        return None if self.shown is None else csr(*self.shown, self.n_queries, self.n_items)

    def subset(self, rows: np.ndarray) -> Interactions:
        """The given rows (a mask or indices), with the same vocabularies and tables."""
        rows = np.asarray(rows)
        if rows.dtype == bool and rows.shape != self.queries.shape:
            raise UserError(f"the mask has {len(rows):,} rows, the interactions have {len(self):,}")
        names = ("queries", "items", "time", "weight", "split", "grade")
        columns: dict[str, Any] = {name: _take(getattr(self, name), rows) for name in names}
        return replace(self, **columns)

    def titles(self) -> np.ndarray | None:
        """(N,) object array of item titles (None where unknown), or None when the item table has none."""
        if self.item_table is None or "title" not in self.item_table.columns:
            return None
        return np.array(self.item_table["title"].cast(pl.String).to_list(), dtype=object)

    def save_ids(self, folder: str | os.PathLike[str]) -> None:
        """Write the id maps and tables, as Parquet, into a run folder; `Ids.load` reads them back."""
        Ids(self.query_ids, self.item_ids, self.query_table, self.item_table).save(folder)


@dataclass(frozen=True, eq=False)
class Ids:
    """The id maps and tables of a run folder: they name queries and items without the interactions.

    data.save_ids("runs/a");  ids = Ids.load("runs/a");  ids.item_ids.decode([3, 1]);  ids.item_table
    """

    query_ids: Vocabulary
    item_ids: Vocabulary
    query_table: pl.DataFrame | None = None
    item_table: pl.DataFrame | None = None

    def save(self, folder: str | os.PathLike[str]) -> None:
        for vocabulary, name in ((self.query_ids, "query_ids"), (self.item_ids, "item_ids")):
            vocabulary.save(Path(folder) / f"{name}.parquet")
        for table, name in ((self.query_table, "query_table"), (self.item_table, "item_table")):
            path = Path(folder) / f"{name}.parquet"
            if table is None:
                path.unlink(missing_ok=True)
            else:
                write_table(table, path)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], manifest: Manifest | None = None) -> Ids:
        """Read the maps and tables, after comparing them with the manifest of their folder, if given."""
        listed = manifest or Manifest(Path(folder), finished=False, files={})
        query, item = (Vocabulary.load(listed.path(f"{side}_ids.parquet")) for side in ("query", "item"))
        names = [f"{side}_table.parquet" for side in ("query", "item")]
        return cls(query, item, *(read_table(listed.path(name)) if listed.lists(name) else None for name in names))


@dataclass(frozen=True, eq=False)
class Split:
    """Train, validation and test parts that share vocabularies; every row of the data is in exactly one part."""

    train: Interactions
    valid: Interactions | None = None
    test: Interactions | None = None
    seen: Positives | None = None  # of train and valid together, where precomputed (prepared data)

    @property
    def ordered(self) -> bool:
        """Whether nearly all that queries take in the validation part came after their training part."""
        train, valid = self.train, self.valid
        if valid is None or train.time is None or valid.time is None or not len(train):
            return False
        last = np.full(train.n_queries, -np.inf)
        np.maximum.at(last, train.queries, train.time.astype(np.float64))
        return bool((valid.time.astype(np.float64) >= last[valid.queries]).mean() > 0.95)

    @property
    def timed(self) -> bool:
        """Whether that order is one of times that queries share, not of positions within a query."""
        return self.ordered and not self.train.is_order

    def seen_for(self, part: str) -> Positives:
        """The pairs masked when `part` is ranked: those before it and hidden ones; none where repeats are kept."""
        before = self.before(part)
        return Positives(torch.zeros_like(before.start), before.items[:0]) if self.train.repeats else before

    def before(self, part: str) -> Positives:
        """The pairs before a part: train for "valid", train and valid for "test"; and hidden pairs."""
        if part not in ("valid", "test"):
            raise UserError(f'part is {part!r}; it must be "valid" or "test"')
        if part == "test" and self.seen is not None:
            return self.seen
        pairs = [(self.train.queries, self.train.items)]
        if part == "test" and self.valid is not None:
            pairs.append((self.valid.queries, self.valid.items))
        if self.train.hidden is not None:
            pairs.append(self.train.hidden)
        if len(pairs) == 1:
            return self.train.positives()
        queries, items = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
        return csr(queries, items, self.train.n_queries, self.train.n_items)

    def joined(self) -> Split:
        """Train and valid as one training part, sorted as `read` sorts; the test part stays as it is."""
        train, valid = self.train, self.valid
        if valid is None:
            return self
        columns: dict[str, np.ndarray | None] = {}
        for name in ("queries", "items", "time", "weight", "split", "grade"):
            parts = [getattr(part, name) for part in (train, valid)]
            columns[name] = None if any(part is None for part in parts) else np.concatenate(parts)
        keys = [column for name in ("weight", "time", "items", "queries") if (column := columns[name]) is not None]
        order = np.lexsort(keys)
        sorted_columns = {name: _take(column, order) for name, column in columns.items()}
        other = {column.name: getattr(train, column.name) for column in fields(Interactions)}
        return Split(Interactions(**{**other, **sorted_columns}), None, self.test, self.seen)


def _take(column: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    return None if column is None else column[rows]
