"""Rows of a run in LanceDB: in a folder of this machine or of an object store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl

from sparring.core.errors import one_line
from sparring.core.extras import optional
from sparring.serving.export.conditions import Dialect, Where
from sparring.serving.export.store import Found, check_columns, denied

_BATCH = 10_000
_INDEXED = 100_000  # rows from which on an approximate index is built


def _literal(value: Any) -> str:
    if isinstance(value, datetime):
        return f"timestamp '{value.isoformat(sep=' ', timespec='microseconds')}'"
    return "'{}'".format(value.replace("'", "''")) if isinstance(value, str) else str(value).lower()


_FILTERS = Dialect(
    "LanceDB",
    "`{}`".format,
    _literal,
    "array_has({0}, {1})",
    "contains(lower({0}), {1})",
    as_float="cast({} as double)",
)


class LanceItems:
    """A table of LanceDB (see `Store`); searches are exact up to 100,000 rows.

    `address` is a folder, also one of an object store (s3://, gs://, az://), with credentials from the environment.

        store = LanceItems("vectors", "items", rows.schema)
        store.upsert(rows.part(0, 1000))
        store.search(q, k=10, where=[("price", "<", 10)])
    """

    def __init__(self, address: str, table: str, schema: pl.Schema) -> None:
        os.environ.setdefault("LANCE_LOG", "error")
        client = optional("lancedb", "lancedb", "LanceDB")
        self.name, self.schema = table, schema
        with one_line(f"cannot open table {table!r} of LanceDB at {address}", Exception):  # it raises many kinds
            arrow = pl.DataFrame(schema=schema).to_arrow(compat_level=pl.CompatLevel.oldest()).schema
            self._table = client.connect(address).create_table(table, schema=arrow, exist_ok=True)
        found = {field.name: str(field.type).replace("large_", "") for field in self._table.schema}
        check_columns(table, found, {field.name: str(field.type).replace("large_", "") for field in arrow})

    def upsert(self, rows: pl.DataFrame) -> None:
        merge = self._table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        with self._asking("upsert"):
            merge.execute(rows.to_arrow(compat_level=pl.CompatLevel.oldest()))

    def delete(self, ids: pl.Series) -> int:
        before = self._table.count_rows()
        for begin in range(0, len(ids), _BATCH):
            with self._asking("delete"):
                self._table.delete(f"id in ({', '.join(map(_literal, ids[begin : begin + _BATCH]))})")
        return int(before - self._table.count_rows())

    def ids(self) -> pl.Series:
        with self._asking("read ids"):
            found = self._table.search().select(["id"]).to_arrow()
        return pl.Series("id", found["id"].to_pylist(), dtype=self.schema["id"])

    def finish(self) -> None:
        """Join the fragments that upserts have left; above 100,000 rows build the approximate index (ivf)."""
        with self._asking("build an index"):
            if self._table.count_rows() > _INDEXED:
                self._table.create_index(metric="dot", index_type="IVF_FLAT", replace=True)
            self._table.optimize()

    def search(self, q: np.ndarray, k: int, where: Where = (), deny: Sequence[Sequence[Any]] | None = None) -> Found:
        condition, lists = _FILTERS.all(where, self.schema), Found()
        for vector, ids in zip(np.asarray(q, np.float32), denied(deny, len(q)), strict=True):
            parts = [condition, f"id not in ({', '.join(map(_literal, ids))})" if len(ids) else ""]
            with self._asking("search"):
                search = self._table.search(vector).distance_type("dot").select(["id", "_distance"]).limit(k)
                if any(parts):
                    search = search.where(" and ".join(filter(None, parts)), prefilter=True)
                lists.append([(row["id"], 1 - row["_distance"]) for row in search.to_list()])
        return lists

    def close(self) -> None:
        """Nothing: LanceDB keeps no connection."""

    def _asking(self, what: str) -> Any:
        return one_line(f"LanceDB could not {what} in {self.name!r}", Exception)
