"""Rows of a run for other systems: id, vector and all columns of its items or queries, in a few plain types."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from torch import Tensor

from sparring.models.fusion import unit
from sparring.serving.index.staged import listing_vectors
from sparring.training.trained import How, Trained

TIME = pl.Datetime("us")


@dataclass(frozen=True)
class Rows:
    """Rows to export. The score of an item for a query is the inner product of their vectors; for the fused ranking it
    orders the shortlist.

    `schema` is id (Int64 or String), vector (an array of D float32), then the columns of the run's table: Boolean,
    Int64, Float64, String, Datetime in UTC, or lists of these. Vectors are computed a part at a time.

        rows = item_rows(load("runs/first"));  rows.part(0, 1000)
    """

    ids: pl.Series
    columns: pl.DataFrame
    dim: int
    vectors: Callable[[slice], torch.Tensor]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def schema(self) -> pl.Schema:
        vector = pl.Array(pl.Float32, self.dim)
        return pl.Schema({"id": self.ids.dtype, "vector": vector, **self.columns.schema})

    def part(self, begin: int, end: int) -> pl.DataFrame:
        """Rows from `begin` to `end`."""
        part = slice(begin, min(end, len(self)))
        numbers = self.vectors(part).float().cpu().numpy()
        vectors = pl.Series("vector", numbers, dtype=pl.Array(pl.Float32, self.dim))
        return pl.DataFrame([self.ids[part], vectors, *self.columns[part].get_columns()])


def ranked_vectors(trained: Trained, how: How = "towers") -> Tensor:
    """Item vectors (N, D) whose inner product with `ranked_queries` orders lists by a ranking; fused: its shortlist."""
    vectors = trained.item_vectors()
    if how == "towers" or trained.fused is None:
        return vectors
    return torch.from_numpy(listing_vectors(vectors.cpu(), trained.fused, how))


def ranked_queries(trained: Trained, rows: Tensor, how: How = "towers") -> Tensor:
    """Vectors (n, D) of queries: as the towers have them, and at length 1 for the other rankings."""
    q = trained.model.query_vectors(rows)
    return q if how == "towers" else unit(q)


def item_rows(trained: Trained, how: How = "towers") -> Rows:
    """The items that lists may hold: those without a trained vector are left out (training/eligibility.py)."""
    listed, vectors = trained.eligibility.listed(len(trained.ids.item_ids)), ranked_vectors(trained, how)
    ids, table = plain_ids(trained.ids.item_ids.ids), trained.ids.item_table
    if listed is not None:
        vectors, ids = vectors[listed.to(vectors.device)], ids.gather(listed.numpy())
        table = None if table is None else table[listed.numpy()]
    return Rows(ids, plain(table), vectors.shape[1], lambda part: vectors[part])


def query_rows(trained: Trained, how: How = "towers") -> Rows:
    """All queries of the training data."""
    ids, table = plain_ids(trained.ids.query_ids.ids), plain(trained.ids.query_table)
    dim = trained.model.query_vectors(torch.arange(min(1, len(ids)))).shape[1]
    return Rows(ids, table, dim, lambda part: ranked_queries(trained, torch.arange(part.start, part.stop), how))


def plain_ids(ids: pl.Series) -> pl.Series:
    """Int64, else text (also for integers beyond Int64)."""
    return (ids if ids.dtype == pl.Int64 else ids.cast(pl.String)).alias("id")


def plain(table: pl.DataFrame | None) -> pl.DataFrame:
    """The columns in the types of `Rows`, with names of ASCII letters, digits and underscores.

    A column that is called id or vector gets an underscore. Numbers that are not finite become null, and columns of
    other types (nested ones, durations) become text. Binary columns are left out.
    """
    names: dict[str, pl.Series] = {}
    for at, column in enumerate([] if table is None else table.get_columns()):
        if column.dtype not in (pl.Binary, pl.Object, pl.Null):
            name = re.sub(r"\W", "_", column.name, flags=re.ASCII)
            name = name if re.search("[A-Za-z0-9]", name) else f"column_{at + 1}"
            name = f"_{name}" if name[0].isdigit() else name
            while name in names or name in ("id", "vector"):
                name += "_"
            names[name] = _plain(column).alias(name)
    return pl.DataFrame(list(names.values()))


def _plain(column: pl.Series) -> pl.Series:
    kind: Any = column.dtype
    if isinstance(kind, pl.Array):
        return _plain(column.cast(pl.List(kind.inner)))
    if isinstance(kind, pl.List) and not isinstance(kind.inner, pl.List | pl.Array | pl.Struct):
        inner = _plain(column.explode(empty_as_null=False, keep_nulls=False))
        return column.cast(pl.List(inner.dtype)) if inner.dtype != TIME else column.cast(pl.List(pl.String))
    if isinstance(kind, pl.List | pl.Struct):
        return pl.Series(column.name, [None if value is None else str(value) for value in column], dtype=pl.String)
    if kind.is_integer():
        whole = column.cast(pl.Int64, strict=False)
        return whole if whole.null_count() == column.null_count() else column.cast(pl.Float64)
    if kind.is_float() or kind.is_decimal():
        numbers = column.cast(pl.Float64)
        return numbers.set(~numbers.is_finite(), None)
    if kind in (pl.Date, pl.Datetime):
        zoned = isinstance(kind, pl.Datetime) and kind.time_zone is not None
        return (column.dt.convert_time_zone("UTC").dt.replace_time_zone(None) if zoned else column).cast(TIME)
    return column if kind == pl.Boolean else column.cast(pl.String)


def vector_text(rows: pl.DataFrame) -> pl.Series:
    """The vectors as text, [0.25,-1.5], which gives each float32 back to the last bit."""
    joined = pl.col("vector").arr.to_list().cast(pl.List(pl.String)).list.join(",")
    return rows.select(pl.format("[{}]", joined).alias("vector")).to_series()


def payloads(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """The columns of each row as plain values; times are texts such as 2026-11-15T12:00:00.000000."""
    return with_time_texts(rows.drop("id", "vector")).to_dicts() or [{} for _ in range(len(rows))]


def with_time_texts(rows: pl.DataFrame) -> pl.DataFrame:
    """Times as texts of one length, so that texts are in the order of times."""
    times = [pl.col(name).dt.to_string("%Y-%m-%dT%H:%M:%S%.6f") for name, kind in rows.schema.items() if kind == TIME]
    return rows.with_columns(times)


def vector_lists(rows: pl.DataFrame) -> Sequence[Sequence[float]]:
    return rows["vector"].to_numpy().tolist()  # type: ignore[no-any-return]
