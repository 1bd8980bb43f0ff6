"""Rows of a run in Milvus: in a file by Milvus Lite, or on a server or cluster."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl

from sparring.core.errors import UserError, one_line
from sparring.core.extras import optional
from sparring.serving.export.conditions import Dialect, Where
from sparring.serving.export.rows import TIME, payloads, vector_lists
from sparring.serving.export.store import Found, check_columns, column_types, denied

_TEXT_ID, _TEXT, _LIST = 512, 65_535, 4096  # bytes of a text id and of a text, values of a list
_BATCH = 1000
_KINDS = {pl.Boolean: "BOOL", pl.Int64: "INT64", pl.Float64: "DOUBLE", pl.String: "VARCHAR", TIME: "VARCHAR"}


def _literal(value: Any) -> str:
    value = value.isoformat(timespec="microseconds") if isinstance(value, datetime) else value
    return json.dumps(value, ensure_ascii=False)


_FILTERS = Dialect("Milvus", str, _literal, "array_contains({0}, {1})", None, "==", "[{}]", "id in []")


class MilvusItems:
    """A collection of Milvus (see `Store`). Times are texts, and texts and lists are cut at Milvus' limits.

    `address` is a file that ends in .db, which Milvus Lite opens in this process, or the address of a server, with the
    token in MILVUS_TOKEN.

        store = MilvusItems("items.db", "items", rows.schema)
        store.upsert(rows.part(0, 1000))
        store.search(q, k=10, where=[("price", "<", 10)])
    """

    def __init__(self, address: str, table: str, schema: pl.Schema) -> None:
        client = optional("pymilvus", "milvus", "Milvus")
        for name in ("pymilvus", "grpc._server"):  # Milvus Lite logs errors about features that only a cluster has
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._milvus, self.name, self.schema = client, table, schema
        self._columns = column_types(schema, _KINDS, "ARRAY {}")
        with one_line(f"cannot open collection {table!r} of Milvus at {address}", Exception):  # it raises many kinds
            self._client = client.MilvusClient(uri=address, token=os.environ.get("MILVUS_TOKEN", ""))
            if not self._client.has_collection(table):
                self._create()
            self._check(self._client.describe_collection(table)["fields"])
            self._client.load_collection(table)

    def _create(self) -> None:
        kinds, schema = self._milvus.DataType, self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        text = {"max_length": _TEXT_ID} if self.schema["id"] == pl.String else {}
        schema.add_field("id", kinds.VARCHAR if text else kinds.INT64, is_primary=True, **text)
        schema.add_field("vector", kinds.FLOAT_VECTOR, dim=self._dim)
        for name, kind in self._columns.items():
            first, *inner = kind.split()
            more: dict[str, Any] = {"element_type": kinds[inner[0]], "max_capacity": _LIST} if inner else {}
            more |= {"max_length": _TEXT} if "VARCHAR" in kind else {}
            schema.add_field(name, kinds[first], nullable=True, **more)
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="AUTOINDEX", metric_type="IP")
        self._client.create_collection(self.name, schema=schema, index_params=index, consistency_level="Strong")

    def _check(self, fields: list[dict[str, Any]]) -> None:
        kinds, found = self._milvus.DataType, {}
        for field in fields:
            more = field["params"].get("dim", kinds(field["element_type"]).name if field.get("element_type") else "")
            found[field["name"]] = f"{kinds(field['type']).name} {more}".strip()
        key = "VARCHAR" if self.schema["id"] == pl.String else "INT64"
        check_columns(self.name, found, {"id": key, "vector": f"FLOAT_VECTOR {self._dim}", **self._columns})

    @property
    def _dim(self) -> int:
        return self.schema["vector"].size  # type: ignore[attr-defined,no-any-return]

    def upsert(self, rows: pl.DataFrame) -> None:
        if rows["id"].dtype == pl.String and (longest := max(rows["id"].str.len_bytes(), default=0)) > _TEXT_ID:
            raise UserError(f"an id has {longest} bytes; the limit in Milvus is {_TEXT_ID}")
        cut = [pl.col(pl.String).exclude("id").str.slice(0, _TEXT // 4)]
        cut += [pl.col(name).list.head(_LIST) for name, kind in rows.schema.items() if isinstance(kind, pl.List)]
        rows = rows.with_columns(cut)
        for begin in range(0, len(rows), _BATCH):
            part = rows[begin : begin + _BATCH]
            whole = zip(part["id"], vector_lists(part), payloads(part), strict=True)
            with self._asking("upsert"):
                self._client.upsert(self.name, [{"id": id, "vector": v, **more} for id, v, more in whole])

    def delete(self, ids: pl.Series) -> int:
        present = 0
        for begin in range(0, len(ids), _BATCH):
            # not ids=...: the client does not escape quotes, so an id with a quote would become an expression
            among = f"id in {_literal(ids[begin : begin + _BATCH].to_list())}"
            with self._asking("delete"):
                present += len(self._client.query(self.name, filter=among, output_fields=["id"]))
                self._client.delete(self.name, filter=among)
        return present

    def ids(self) -> pl.Series:
        ids: list[Any] = []
        with self._asking("read ids"):
            pages = self._client.query_iterator(self.name, batch_size=_BATCH, output_fields=["id"])
            while page := pages.next():
                ids += [row["id"] for row in page]
            pages.close()
        return pl.Series("id", ids, dtype=self.schema["id"])

    def finish(self) -> None:
        """Nothing: Milvus indexes by itself."""

    def search(self, q: np.ndarray, k: int, where: Where = (), deny: Sequence[Sequence[Any]] | None = None) -> Found:
        condition, lists = _FILTERS.all(where, self.schema), Found()
        for vector, ids in zip(q.tolist(), denied(deny, len(q)), strict=True):
            parts = [condition, f"id not in {_literal(list(ids))}" if len(ids) else ""]
            with self._asking("search"):
                hits = self._client.search(
                    self.name,
                    data=[vector],
                    limit=k,
                    filter=" and ".join(filter(None, parts)),
                    search_params={"metric_type": "IP"},
                )[0]
            lists.append([(hit["id"], float(hit["distance"])) for hit in hits])
        return lists

    def close(self) -> None:
        self._client.close()

    def _asking(self, what: str) -> Any:
        return one_line(f"Milvus could not {what} in {self.name!r}", self._milvus.MilvusException)
