"""The items of a run in Milvus: in a file by Milvus Lite, or on a server or cluster."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import polars as pl

from sparring.core.errors import UserError

_TEXT_ID, _TITLE = 512, 4096  # bytes of a text id and of a title
_BATCH = 1000


class MilvusItems:
    """A collection of items: id (integer or text), vector, title; searched by inner product.

    `address` is a file that ends in .db, which Milvus Lite opens in this process, or the address of a server. A missing
    collection is created; one with another type of ids or another dimension raises UserError.

        store = MilvusItems("items.db", "items", dim=64, text_ids=True)
        store.upsert(ids, vectors)
        store.search(q, k=10)
    """

    def __init__(self, address: str, collection: str, dim: int, text_ids: bool, token: str = "") -> None:
        try:
            from pymilvus import MilvusClient, MilvusException
        except ImportError as error:
            raise UserError('Milvus needs pymilvus: pip install "sparring[milvus]"') from error
        for name in ("pymilvus", "grpc._server"):  # Milvus Lite logs errors about features that only a cluster has
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._error, self.name, self.dim, self.text_ids = MilvusException, collection, dim, text_ids
        try:
            self._client = MilvusClient(uri=address, token=token)
            if not self._client.has_collection(collection):
                self._create()
            self._check(self._client.describe_collection(collection))
            self._client.load_collection(collection)
        except UserError:
            raise
        except Exception as error:  # a wrong address, file or token raises many kinds
            raise self._user_error(error, f"cannot open collection {collection!r} of Milvus at {address}") from error

    def _create(self) -> None:
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        if self.text_ids:
            schema.add_field("id", DataType.VARCHAR, max_length=_TEXT_ID, is_primary=True)
        else:
            schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=self.dim)
        schema.add_field("title", DataType.VARCHAR, max_length=_TITLE, nullable=True)
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="AUTOINDEX", metric_type="IP")
        self._client.create_collection(self.name, schema=schema, index_params=index, consistency_level="Strong")

    def _check(self, about: dict[str, Any]) -> None:
        from pymilvus import DataType

        fields = {field["name"]: field for field in about["fields"]}
        if not {"id", "vector", "title"} <= fields.keys():
            raise UserError(
                f"collection {self.name!r} has fields {', '.join(fields)}, not id, vector and title: choose another"
            )
        if int(fields["vector"]["params"]["dim"]) != self.dim:
            width = fields["vector"]["params"]["dim"]
            raise UserError(f"collection {self.name!r} has {width} dimensions, the run has {self.dim}: choose another")
        if (fields["id"]["type"] == DataType.VARCHAR) != self.text_ids:
            kinds = ("integers", "text") if self.text_ids else ("text", "integers")
            raise UserError(
                f"the ids of collection {self.name!r} are {kinds[0]}, the run has {kinds[1]}: choose another"
            )

    def upsert(self, ids: pl.Series, vectors: np.ndarray, titles: pl.Series | None = None) -> None:
        """Insert or replace items."""
        titles = pl.Series("title", [None] * len(ids), dtype=pl.String) if titles is None else titles.cast(pl.String)
        longest = max(ids.str.len_bytes().to_list(), default=0) if self.text_ids else 0
        if longest > _TEXT_ID:
            raise UserError(f"an id has {longest} bytes; the limit in Milvus is {_TEXT_ID}")
        table = pl.DataFrame({"id": ids, "title": titles.str.slice(0, _TITLE // 4)})
        for begin in range(0, len(ids), _BATCH):
            part = slice(begin, begin + _BATCH)
            rows = [
                {**row, "vector": vector} for row, vector in zip(table[part].to_dicts(), vectors[part], strict=True)
            ]
            self._do("upsert", lambda rows=rows: self._client.upsert(self.name, rows))

    def delete(self, ids: pl.Series) -> int:
        """Delete items; returns how many were present."""
        present = 0
        for begin in range(0, len(ids), _BATCH):
            # not ids=...: the client does not escape quotes, so an id with a quote would become an expression
            expression = f"id in {json.dumps(ids[begin : begin + _BATCH].to_list(), ensure_ascii=False)}"
            present += len(
                self._do(
                    "delete",
                    lambda expression=expression: self._client.query(
                        self.name, filter=expression, output_fields=["id"]
                    ),
                )
            )
            self._do("delete", lambda expression=expression: self._client.delete(self.name, filter=expression))
        return present

    def ids(self) -> pl.Series:
        """All ids in the collection."""
        kind = pl.String if self.text_ids else pl.Int64
        ids: list[Any] = []
        pages = self._do(
            "read ids", lambda: self._client.query_iterator(self.name, batch_size=_BATCH, output_fields=["id"])
        )
        while page := self._do("read ids", pages.next):
            ids += [row["id"] for row in page]
        pages.close()
        return pl.Series("id", ids, dtype=kind)

    def search(self, q: np.ndarray, k: int) -> list[list[tuple[Any, float]]]:
        """(id, score) of the k best items for each query (B, D), best first."""
        hits = self._do(
            "search",
            lambda: self._client.search(self.name, data=q.tolist(), limit=k, search_params={"metric_type": "IP"}),
        )
        return [[(hit["id"], float(hit["distance"])) for hit in row] for row in hits]

    def close(self) -> None:
        self._client.close()

    def _do(self, what: str, call: Any) -> Any:
        try:
            return call()
        except self._error as error:
            raise self._user_error(error, f"Milvus could not {what} in {self.name!r}") from error

    @staticmethod
    def _user_error(error: Exception, what: str) -> UserError:
        return UserError(
            f"{what}: {(str(getattr(error, 'message', '') or error).splitlines() or ['unknown'])[0][:200]}"
        )
