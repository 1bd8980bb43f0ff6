"""Rows of a run in Qdrant: in a folder of this machine, or on a server."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl

from sparring.core.errors import UserError, one_line
from sparring.core.extras import optional
from sparring.serving.export.conditions import Where, checked, no_substrings
from sparring.serving.export.rows import TIME, payloads, vector_lists
from sparring.serving.export.store import Found, check_columns, column_types, denied

_BATCH = 1000
_INDEXES = {pl.Boolean: "bool", pl.Int64: "integer", pl.Float64: "float", pl.String: "keyword", TIME: "datetime"}
_BOUNDS = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}


class QdrantItems:
    """A collection of Qdrant (see `Store`); the payload of a point is its row, with the original id as `id`.

    `address` is that of a server, with the key in QDRANT_API_KEY; or a folder, which the client opens in this process,
    for tests and small catalogues; or ":memory:". Point ids are the ids themselves if they are whole numbers, and the
    UUID of `point` otherwise.

        store = QdrantItems("http://localhost:6333", "items", rows.schema)
        store.upsert(rows.part(0, 1000))
        store.search(q, k=10, where=[("price", "<", 10)])
    """

    def __init__(self, address: str, table: str, schema: pl.Schema) -> None:
        client = optional("qdrant_client", "qdrant", "Qdrant")
        self._models, self.name, self.schema = client.models, table, schema
        self._served = "://" in address
        key = os.environ.get("QDRANT_API_KEY")
        where = {"url": address, "api_key": key, "check_compatibility": False} if self._served else {"path": address}
        with one_line(f"cannot open collection {table!r} of Qdrant at {address}", Exception):  # it raises many kinds
            self._client = client.QdrantClient(**({"location": address} if address == ":memory:" else where))
            try:
                self._create()
            except BaseException:
                self.close()
                raise

    def _create(self) -> None:
        m, size = self._models, self.schema["vector"].size  # type: ignore[attr-defined]
        if not self._client.collection_exists(self.name):
            config = m.VectorParams(size=size, distance=m.Distance.DOT)
            self._client.create_collection(self.name, vectors_config=config)
        vectors = self._client.get_collection(self.name).config.params.vectors
        if not isinstance(vectors, m.VectorParams):
            raise UserError(f"collection {self.name!r} has several vectors: choose another table")
        first = self._client.scroll(self.name, limit=1, with_payload=["id"])[0]
        found = [str(pl.String) if isinstance(point.payload.get("id"), str) else str(pl.Int64) for point in first]
        key = str(self.schema["id"])
        expected = {"id": key, "vector": f"Dot {size}"}
        found_columns = {"id": (found or [key])[0], "vector": f"{vectors.distance.value} {vectors.size}"}
        check_columns(self.name, found_columns, expected)

    def upsert(self, rows: pl.DataFrame) -> None:
        for begin in range(0, len(rows), _BATCH):
            part = rows[begin : begin + _BATCH]
            whole = zip(part["id"], vector_lists(part), payloads(part), strict=True)
            points = [
                self._models.PointStruct(id=point(id), vector=vector, payload={"id": id, **more})
                for id, vector, more in whole
            ]
            with self._asking("upsert"):
                self._client.upsert(self.name, points, wait=True)

    def delete(self, ids: pl.Series) -> int:
        present = 0
        for begin in range(0, len(ids), _BATCH):
            points = [point(id) for id in ids[begin : begin + _BATCH]]
            with self._asking("delete"):
                present += len(self._client.retrieve(self.name, points, with_payload=False))
                self._client.delete(self.name, self._models.PointIdsList(points=points), wait=True)
        return present

    def ids(self) -> pl.Series:
        ids, after = list[Any](), None
        with self._asking("read ids"):
            while True:
                page, after = self._client.scroll(self.name, limit=10 * _BATCH, offset=after, with_payload=["id"])
                ids += [point.payload["id"] for point in page]
                if after is None:
                    return pl.Series("id", ids, dtype=self.schema["id"])

    def finish(self) -> None:
        """Index the columns, so that a server's filters are fast."""
        if self._served:
            for name, kind in column_types(self.schema, _INDEXES, "{}").items():
                with self._asking("index"):
                    self._client.create_payload_index(self.name, name, kind)

    def search(self, q: np.ndarray, k: int, where: Where = (), deny: Sequence[Sequence[Any]] | None = None) -> Found:
        m, lists = self._models, Found()
        conditions = [self._condition(*one, self.schema[one[0]]) for one in checked(where, self.schema)]
        for vector, ids in zip(q.tolist(), denied(deny, len(q)), strict=True):
            without = [m.HasIdCondition(has_id=[point(id) for id in ids])] if len(ids) else None
            with self._asking("search"):
                found = self._client.query_points(
                    self.name,
                    query=vector,
                    limit=k,
                    query_filter=m.Filter(must=conditions, must_not=without),
                    with_payload=["id"],
                )
            lists.append([(hit.payload["id"], float(hit.score)) for hit in found.points])
        return lists

    def _condition(self, column: str, op: str, value: Any, kind: Any) -> Any:
        m = self._models
        if op in ("!=", "not in"):
            return m.Filter(must_not=[self._condition(column, "=" if op == "!=" else "in", value, kind)])
        if op == "in":  # none of no values is met
            same = [self._condition(column, "=", one, kind) for one in value]
            return m.Filter(should=same) if same else m.HasIdCondition(has_id=[])
        if op == "contains" and not isinstance(kind, pl.List):
            raise no_substrings("Qdrant", column)
        bounds = {_BOUNDS[op]: value} if op in _BOUNDS else {"gte": value, "lte": value}
        if isinstance(value, datetime):
            return m.FieldCondition(key=column, range=m.DatetimeRange(**bounds))
        if op in _BOUNDS and isinstance(value, str):
            raise UserError(f"Qdrant has no order of texts: {column} {op} {value!r} cannot be asked")
        if op in _BOUNDS or isinstance(value, float) or kind == pl.Float64:
            return m.FieldCondition(key=column, range=m.Range(**bounds))
        return m.FieldCondition(key=column, match=m.MatchValue(value=value))

    def close(self) -> None:
        self._client.close()

    def _asking(self, what: str) -> Any:
        warnings.filterwarnings("ignore", "Local mode is not recommended", UserWarning)
        return one_line(f"Qdrant could not {what} in {self.name!r}", Exception)


def point(id: int | str) -> int | str:
    """The id of a point: Qdrant knows whole numbers from 0 and UUIDs only."""
    return id if isinstance(id, int) and id >= 0 else str(uuid.uuid5(uuid.NAMESPACE_OID, str(id)))
