"""What an engine makes of raw rows: ids numbered, and rows in buckets of whole queries, each small enough for memory.

Every engine (polars on one machine, Spark on many) leaves the same set of rows in the same buckets; their order within a bucket is the
engine's own, and nothing that is made of them depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from sparring.data.columns import find_columns
from sparring.data.interactions import Vocabulary
from sparring.data.table import check_ids, columns_of, reading, vocabulary_of

BUCKET = 1 << 22  # rows that are sorted at once
MOST = 1024  # buckets: more would be too many open files
Tell = Callable[[str, int, int | None], None]  # stage, done, total where known


@dataclass(frozen=True)
class Raw:
    """Where rows come from, and what their columns mean."""

    source: str  # for errors
    frame: pl.LazyFrame
    files: tuple[Path, ...]  # Parquet parts; empty where the frame is of another kind
    named: Mapping[str, str | None]  # role -> column, as given
    min_rating: float | None = None
    text: bool = False  # every column came as text
    items: pl.DataFrame | None = None
    queries: pl.DataFrame | None = None

    def found(self) -> dict[str, str]:
        """Role -> column, for the roles that the rows have."""
        with reading(self.source):
            names = self.frame.collect_schema().names()
        return find_columns(names, self.named, self.source, rated=self.min_rating is not None)


@dataclass(frozen=True)
class Encoded:
    """Numbered ids, and a folder with a Parquet folder `b=K` of rows (q, i, and t, w, s, l where known) for each bucket."""

    folder: Path
    query_ids: Vocabulary
    item_ids: Vocabulary
    first: np.ndarray  # (buckets + 1,) the first query of each bucket, and the number of queries
    found: dict[str, str]
    notes: list[str] = field(default_factory=list)
    items: pl.DataFrame | None = None  # tables, where the rows themselves hold texts
    queries: pl.DataFrame | None = None

    def bucket(self, k: int) -> dict[str, np.ndarray]:
        """The rows of a bucket, in any order."""
        rows = pl.read_parquet(self.folder / f"b={k}" / "*.parquet", hive_partitioning=False)
        return columns_of(rows.with_columns(pl.col(name).cast(pl.UInt8) for name in ("s", "l") if name in rows.columns))


@dataclass(frozen=True)
class Numbering:
    """Vocabularies of both sides and, for the engine to join with, the number of each raw id; queries with their bucket."""

    query_ids: Vocabulary
    item_ids: Vocabulary
    first: np.ndarray
    queries: pl.DataFrame  # q (raw), dense, b
    items: pl.DataFrame  # i (raw), dense


def numbered(queries: pl.DataFrame, items: pl.Series, raw: Raw, found: Mapping[str, str]) -> Numbering:
    """Number the distinct raw ids in ascending order, and cut the queries into buckets of about as many rows.

    `queries` has the columns q and n, how many rows each has: a bucket ends where the rows of its queries reach its size.
    """
    query_ids = vocabulary_of(queries["q"], found["query"], raw.text, None, raw.source)
    item_ids = vocabulary_of(items, found["item"], raw.text, None, raw.source)
    check_ids(query_ids, item_ids, raw.source)
    dense = query_ids.encode(queries["q"])
    rows = np.zeros(len(query_ids), dtype=np.int64)
    np.add.at(rows, dense, queries["n"].to_numpy())  # two raw ids may be one: 1 and 1.0
    ends = np.cumsum(rows)
    size = max(BUCKET, -(-int(ends[-1]) // MOST))
    bucket = np.unique((ends - 1) // size, return_inverse=True)[1].astype(np.int32)
    first = np.searchsorted(bucket, np.arange(int(bucket[-1]) + 2))
    return Numbering(
        query_ids,
        item_ids,
        first,
        pl.DataFrame({"q": queries["q"], "dense": dense.astype(np.int32), "b": bucket[dense]}),
        pl.DataFrame({"i": items, "dense": item_ids.encode(items).astype(np.int32)}),
    )
