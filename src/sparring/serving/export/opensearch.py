"""Rows of a run in OpenSearch or Elasticsearch: over HTTP, or as files of mapping and bulk requests."""

from __future__ import annotations

import base64
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import polars as pl

from sparring.core import files
from sparring.core.errors import UserError, first_line
from sparring.serving.export.conditions import Where, checked
from sparring.serving.export.rows import TIME, Rows, payloads, vector_text
from sparring.serving.export.store import Found, check_columns, column_types, denied

_BYTES = 32 * 2**20  # of a bulk request: servers accept 100 MB by default
_PAGE = 10_000  # the most hits of one search
_KINDS = {pl.Boolean: "boolean", pl.Int64: "long", pl.Float64: "double", pl.String: "keyword", TIME: "date"}
_BOUNDS = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}


class OpenSearchItems:
    """An index of OpenSearch (see `Store`). User and password are in OPENSEARCH_USER and OPENSEARCH_PASSWORD.

    store = OpenSearchItems("https://localhost:9200", "items", rows.schema)
    store.upsert(rows.part(0, 1000))
    store.search(q, k=10, where=[("price", "<", 10)])
    """

    product = "OpenSearch"

    def __init__(self, address: str, table: str, schema: pl.Schema) -> None:
        if not re.match("https?://", address):
            raise UserError(f"{address!r} is not an address of {self.product}: write http://HOST:9200")
        self.name, self.schema, self._root = table, schema, address.rstrip("/")
        mapping = self.mapping(schema)
        found = self._ask("GET", "/_mapping", missing=None)
        if found is None:
            self._ask("PUT", "", mapping)
        else:
            fields = next(iter(found.values()))["mappings"].get("properties", {})
            check_columns(table, _types(fields), _types(mapping["mappings"]["properties"]))

    @classmethod
    def mapping(cls, schema: pl.Schema) -> dict[str, Any]:
        """The body of the request that creates an index."""
        size = schema["vector"].size  # type: ignore[attr-defined]
        method = {"name": "hnsw", "engine": "faiss", "space_type": "innerproduct"}
        fields = {"vector": {"type": "knn_vector", "dimension": size, "method": method}, **_fields(schema)}
        return {"settings": {"index": {"knn": True}}, "mappings": {"properties": fields}}

    def _knn(self, vector: list[float], k: int, condition: dict[str, Any]) -> dict[str, Any]:
        return {"query": {"knn": {"vector": {"vector": vector, "k": k, "filter": condition}}}}

    def _secret(self) -> str | None:
        user, password = os.environ.get("OPENSEARCH_USER"), os.environ.get("OPENSEARCH_PASSWORD")
        return None if not user else f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"

    def upsert(self, rows: pl.DataFrame) -> None:
        for lines in bulk(rows):
            answer = self._ask("POST", "/_bulk", lines)
            for one in answer["items"] if answer["errors"] else ():
                if error := one["index"].get("error"):
                    reason = str(error.get("reason", error))[:200]
                    raise UserError(f"{self.product} refused item {one['index']['_id']!r}: {reason}")

    def delete(self, ids: pl.Series) -> int:
        present = 0
        self._ask("POST", "/_refresh")
        for begin in range(0, len(ids), _PAGE):
            query = {"query": {"terms": {"id": ids[begin : begin + _PAGE].to_list()}}}
            present += self._ask("POST", "/_delete_by_query?refresh=true", query)["deleted"]
        return present

    def ids(self) -> pl.Series:
        ids, after = list[Any](), list[Any]()
        self._ask("POST", "/_refresh")
        while True:
            page: dict[str, Any] = {"size": _PAGE, "sort": [{"id": "asc"}], "_source": ["id"]}
            hits = self._ask("POST", "/_search", {**page, "search_after": after} if after else page)["hits"]["hits"]
            if not hits:
                return pl.Series("id", ids, dtype=self.schema["id"])
            ids += [hit["_source"]["id"] for hit in hits]
            after = hits[-1]["sort"]

    def finish(self) -> None:
        """Make all rows visible to searches."""
        self._ask("POST", "/_refresh")

    def search(self, q: np.ndarray, k: int, where: Where = (), deny: Sequence[Sequence[Any]] | None = None) -> Found:
        self._ask("POST", "/_refresh")
        conditions = [_condition(*one, self.schema[one[0]]) for one in checked(where, self.schema)]
        lists = Found()
        for vector, ids in zip(q.tolist(), denied(deny, len(q)), strict=True):
            without = [{"terms": {"id": list(ids)}}] if len(ids) else []
            asked = self._knn(vector, k, {"bool": {"filter": conditions, "must_not": without}})
            hits = self._ask("POST", "/_search", {"size": k, "_source": ["id"], **asked})["hits"]["hits"]
            lists.append([(hit["_source"]["id"], _inner_product(hit["_score"])) for hit in hits])
        return lists

    def close(self) -> None:
        """Nothing: every request is a connection of its own."""

    def _ask(self, method: str, path: str, body: object = None, missing: Any = ...) -> Any:
        """Send a request to the index; a 404 gives `missing`, if that is given."""
        lines = isinstance(body, str)
        data = body.encode() if isinstance(body, str) else None if body is None else json.dumps(body).encode()
        url = f"{self._root}/{quote(self.name, safe='')}{path}"
        request = urllib.request.Request(url, data, method=method)  # noqa: S310 (http or https: see __init__)
        request.add_header("Content-Type", "application/x-ndjson" if lines else "application/json")
        if secret := self._secret():
            request.add_header("Authorization", secret)
        what = f"{self.product} at {self._root} could not answer {method} {self.name}{path}"
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing is not ...:
                return missing
            raise UserError(f"{what}: {error.code}, {_reason(error.read())}") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{what}: {first_line(error)}") from error


class ElasticsearchItems(OpenSearchItems):
    """An index of Elasticsearch 8.11 or later (see `Store`), with an API key in ELASTICSEARCH_API_KEY.

    store = ElasticsearchItems("https://localhost:9200", "items", rows.schema)
    """

    product = "Elasticsearch"

    @classmethod
    def mapping(cls, schema: pl.Schema) -> dict[str, Any]:
        size = schema["vector"].size  # type: ignore[attr-defined]
        vector = {"type": "dense_vector", "dims": size, "index": True, "similarity": "max_inner_product"}
        # without the option, Elasticsearch would keep one byte or less per dimension
        return {
            "mappings": {"properties": {"vector": {**vector, "index_options": {"type": "hnsw"}}, **_fields(schema)}}
        }

    def _knn(self, vector: list[float], k: int, condition: dict[str, Any]) -> dict[str, Any]:
        more = min(_PAGE, max(100, 2 * k))
        return {"knn": {"field": "vector", "query_vector": vector, "k": k, "num_candidates": more, "filter": condition}}

    def _secret(self) -> str | None:
        key = os.environ.get("ELASTICSEARCH_API_KEY")
        return f"ApiKey {key}" if key else None


def write_opensearch(rows: Rows, folder: Path, table: str, elastic: bool = False) -> list[Path]:
    """Write TABLE.mapping.json, and TABLE-00001.ndjson and so on with bulk requests of at most 32 MiB each.

    curl -X PUT HOST:9200/items -H 'Content-Type: application/json' --data-binary @items.mapping.json
    curl HOST:9200/items/_bulk -H 'Content-Type: application/x-ndjson' --data-binary @items-00001.ndjson
    """
    mapping = (ElasticsearchItems if elastic else OpenSearchItems).mapping(rows.schema)
    paths = [folder / f"{table}.mapping.json"]
    files.write(paths[0], lambda path: path.write_text(json.dumps(mapping, indent=2) + "\n"))
    for begin in range(0, len(rows), _PAGE):
        for lines in bulk(rows.part(begin, begin + _PAGE)):
            paths.append(folder / f"{table}-{len(paths):05}.ndjson")
            files.write(paths[-1], lambda path, lines=lines: path.write_text(lines, encoding="utf-8"))  # type: ignore[misc]
    return paths


def bulk(rows: pl.DataFrame) -> Iterator[str]:
    """Bodies of bulk requests that index rows: an action line and a document line for each."""
    lines, length = list[str](), 0
    for id, vector, more in zip(rows["id"], vector_text(rows), payloads(rows), strict=True):
        known = json.dumps({"id": id, **{name: value for name, value in more.items() if value is not None}})
        lines.append(f'{json.dumps({"index": {"_id": str(id)}})}\n{known[:-1]}, "vector": {vector}}}\n')
        length += len(lines[-1])
        if length > _BYTES:
            yield "".join(lines)
            lines, length = [], 0
    if lines:
        yield "".join(lines)


def _fields(schema: pl.Schema) -> dict[str, dict[str, Any]]:
    key = {"type": "keyword" if schema["id"] == pl.String else "long"}
    kinds = column_types(schema, _KINDS, "{}")  # a field of any type may hold several values
    # Lucene refuses keywords of more than 32,766 bytes
    return {
        "id": key,
        **{n: {"type": t, **({"ignore_above": 8191} if t == "keyword" else {})} for n, t in kinds.items()},
    }


def _types(fields: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {n: f"{f.get('type')} {f.get('dimension', f.get('dims', ''))}".strip() for n, f in fields.items()}


def _condition(column: str, op: str, value: Any, kind: Any) -> dict[str, Any]:
    if op in ("!=", "not in"):
        return {"bool": {"must_not": [_condition(column, "=" if op == "!=" else "in", value, kind)]}}
    if op == "in":
        return {"terms": {column: [_text(one) for one in value]}}
    if op in _BOUNDS:
        return {"range": {column: {_BOUNDS[op]: _text(value)}}}
    if op == "contains" and not isinstance(kind, pl.List):
        pattern = re.sub(r"([*?\\])", r"\\\1", value)
        return {"wildcard": {column: {"value": f"*{pattern}*", "case_insensitive": True}}}
    return {"term": {column: _text(value)}}


def _text(value: Any) -> Any:
    return value.isoformat(timespec="microseconds") if isinstance(value, datetime) else value


def _inner_product(score: float) -> float:
    """The inner product behind a score: 1 + p from 0 on, 1 / (1 - p) below."""
    return score - 1 if score >= 1 else 1 - 1 / score


def _reason(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["reason"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip() or "no reason given"
