"""The items of a run in Milvus: Milvus Lite in a file of its own, or a server or cluster by its address."""

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
    """A collection of items: id (whole numbers or text), vector, title; searched by inner product.

    `address` is a file that ends in .db, which Milvus Lite opens in this process, or a server's address. The collection is made where it
    is missing; one of other ids or another width is refused.

        store = MilvusItems("items.db", "items", dim=64, text_ids=True)
        store.upsert(ids, vectors);  store.search(q, k=10);  store.delete(ids)
    """

    def __init__(self, address: str, collection: str, dim: int, text_ids: bool, token: str = "") -> None:
        try:
            from pymilvus import MilvusClient, MilvusException
        except ImportError as error:
            raise UserError('Milvus needs pymilvus: pip install "sparring[milvus]"') from error
        for name in (
            "pymilvus",
            "grpc._server",
        ):  # errors are told in one line, and Milvus Lite complains of what only a cluster has
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
            raise self._told(error, f"cannot open collection {collection!r} of Milvus at {address}") from error

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
                f"collection {self.name!r} has the fields {', '.join(fields)}; id, vector and title are needed: name another"
            )
        if int(fields["vector"]["params"]["dim"]) != self.dim:
            width = fields["vector"]["params"]["dim"]
            raise UserError(
                f"collection {self.name!r} holds vectors of {width} dimensions, the run's have {self.dim}: name another"
            )
        if (fields["id"]["type"] == DataType.VARCHAR) != self.text_ids:
            kinds = ("whole numbers", "text") if self.text_ids else ("text", "whole numbers")
            raise UserError(
                f"the ids of collection {self.name!r} are {kinds[0]}, the run's are {kinds[1]}: name another"
            )

    def upsert(self, ids: pl.Series, vectors: np.ndarray, titles: pl.Series | None = None) -> None:
        """Put items in, or replace those that are there."""
        titles = pl.Series("title", [None] * len(ids), dtype=pl.String) if titles is None else titles.cast(pl.String)
        longest = max(ids.str.len_bytes().to_list(), default=0) if self.text_ids else 0
        if longest > _TEXT_ID:
            raise UserError(f"an id has {longest} bytes; in Milvus at most {_TEXT_ID} are kept")
        table = pl.DataFrame({"id": ids, "title": titles.str.slice(0, _TITLE // 4)})
        for begin in range(0, len(ids), _BATCH):
            part = slice(begin, begin + _BATCH)
            rows = [
                {**row, "vector": vector} for row, vector in zip(table[part].to_dicts(), vectors[part], strict=True)
            ]
            self._do("upsert", lambda rows=rows: self._client.upsert(self.name, rows))

    def delete(self, ids: pl.Series) -> int:
        """Delete items; how many of them there were."""
        there = 0
        for begin in range(0, len(ids), _BATCH):
            # written out here: with ids=... the client puts text between quotes as it is, and an id with a quote becomes an expression
            those = f"id in {json.dumps(ids[begin : begin + _BATCH].to_list(), ensure_ascii=False)}"
            there += len(
                self._do(
                    "delete", lambda those=those: self._client.query(self.name, filter=those, output_fields=["id"])
                )
            )
            self._do("delete", lambda those=those: self._client.delete(self.name, filter=those))
        return there

    def ids(self) -> pl.Series:
        """All ids that are there."""
        kind = pl.String if self.text_ids else pl.Int64
        found: list[Any] = []
        pages = self._do(
            "read ids", lambda: self._client.query_iterator(self.name, batch_size=_BATCH, output_fields=["id"])
        )
        while page := self._do("read ids", pages.next):
            found += [row["id"] for row in page]
        pages.close()
        return pl.Series("id", found, dtype=kind)

    def search(self, q: np.ndarray, k: int) -> list[list[tuple[Any, float]]]:
        """(id, score) of the k best items of each query (B, D), best first."""
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
            raise self._told(error, f"Milvus refused to {what} in {self.name!r}") from error

    @staticmethod
    def _told(error: Exception, what: str) -> UserError:
        return UserError(
            f"{what}: {(str(getattr(error, 'message', '') or error).splitlines() or ['unknown'])[0][:200]}"
        )
