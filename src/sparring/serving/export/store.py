"""A vector store: its protocol, and helpers that the modules of all stores share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import polars as pl

from sparring.core.errors import UserError
from sparring.serving.export.conditions import Where

Found = list[list[tuple[Any, float]]]  # (id, score) of each query's items, best first


class Store(Protocol):
    """A table of rows (rows.py) by id, opened as `Kind(address, table, schema)`, searched by inner product.

    A missing table is created; one with other columns raises UserError, and so does every failure of the store.
    """

    def upsert(self, rows: pl.DataFrame) -> None:
        """Insert or replace rows."""

    def delete(self, ids: pl.Series) -> int:
        """Delete rows; returns how many were present."""

    def ids(self) -> pl.Series:
        """All ids."""

    def finish(self) -> None:
        """Build the indexes that the store needs; called after the last upsert."""

    def search(self, q: np.ndarray, k: int, where: Where = (), deny: Sequence[Sequence[Any]] | None = None) -> Found:
        """The k best rows for each query (B, D) that meet all conditions and are not among its denied ids."""

    def close(self) -> None: ...


def check_columns(table: str, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise UserError unless a table has these columns, of these types; it may have more."""
    for name, kind in expected.items():
        if found.get(name) != kind:
            has = f"has {name} {found[name]}" if name in found else f"has no column {name}"
            raise UserError(f"table {table!r} {has}, expected {kind}: choose another table")


def column_types(schema: Mapping[str, Any], names: Mapping[Any, str], lists: str) -> dict[str, str]:
    """The types of the columns besides id and vector in a store's own names; `lists` is the format of a list's type."""
    return {
        name: lists.format(names[kind.inner]) if isinstance(kind, pl.List) else names[kind]
        for name, kind in schema.items()
        if name not in ("id", "vector")
    }


def denied(deny: Sequence[Sequence[Any]] | None, n: int) -> Sequence[Sequence[Any]]:
    return [()] * n if deny is None else deny
