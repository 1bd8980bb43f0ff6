"""A stand-in of the HTTP API of OpenSearch and Elasticsearch, as far as Sparring uses it: exact searches in memory."""

from __future__ import annotations

import fnmatch
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np


class _Index:
    def __init__(self, body: dict[str, Any]) -> None:
        self.mappings: dict[str, Any] = body["mappings"]
        self.documents: dict[str, dict[str, Any]] = {}
        vector = self.mappings["properties"]["vector"]
        self.dim = vector.get("dimension", vector.get("dims"))
        self.elastic = vector["type"] == "dense_vector"

    def values(self, document: dict[str, Any], field: str) -> list[Any]:
        kind = self.mappings["properties"][field]["type"]  # a KeyError for a field that was never mapped
        value = document.get(field)
        values = value if isinstance(value, list) else [] if value is None else [value]
        return [datetime.fromisoformat(one) for one in values] if kind == "date" else values

    def passes(self, document: dict[str, Any], query: dict[str, Any]) -> bool:
        ((kind, body),) = query.items()
        if kind == "bool":
            assert body.keys() <= {"filter", "must_not"}
            needed = all(self.passes(document, one) for one in body.get("filter", ()))
            return needed and not any(self.passes(document, one) for one in body.get("must_not", ()))
        ((field, wanted),) = body.items()
        values, date = self.values(document, field), self.mappings["properties"][field]["type"] == "date"
        read = datetime.fromisoformat if date else lambda value: value
        if kind == "term":
            return read(wanted) in values
        if kind == "terms":
            return any(read(one) in values for one in wanted)
        if kind == "wildcard":
            pattern = wanted["value"].lower().replace("\\*", "[*]").replace("\\?", "[?]").replace("\\\\", "\\")
            return any(fnmatch.fnmatchcase(one.lower(), pattern) for one in values)
        assert kind == "range"
        ((op, bound),) = wanted.items()
        bound = read(bound)
        check = {"lt": "__lt__", "lte": "__le__", "gt": "__gt__", "gte": "__ge__"}[op]
        return any(getattr(float(v) if isinstance(v, int) else v, check)(bound) is True for v in values)

    def search(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if "sort" in body:
            found = sorted(self.documents.values(), key=lambda document: document["id"])
            after = body.get("search_after", [None])[0]
            found = [one for one in found if after is None or one["id"] > after][: body["size"]]
            return [{"_source": {"id": one["id"]}, "sort": [one["id"]]} for one in found]
        asked = body["knn"] if self.elastic else body["query"]["knn"]["vector"]
        q = np.array(asked["query_vector" if self.elastic else "vector"])
        left = [one for one in self.documents.values() if self.passes(one, asked["filter"])]
        products = sorted(((float(q @ np.array(one["vector"])), one["id"]) for one in left), key=lambda pair: -pair[0])
        hits = products[: min(body["size"], asked["k"])]
        return [{"_source": {"id": id}, "_score": 1 + p if p >= 0 else 1 / (1 - p)} for p, id in hits]


class _Handler(BaseHTTPRequestHandler):
    indexes: dict[str, _Index]

    def _serve(self) -> None:
        path = urlsplit(self.path)
        name, _, action = path.path[1:].partition("/")
        name, body = unquote(name), self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        index = self.indexes.get(name)
        if self.command == "PUT":
            if index is not None:
                return self._answer(400, {"error": {"reason": "resource_already_exists_exception"}})
            self.indexes[name] = _Index(json.loads(body))
            return self._answer(200, {"acknowledged": True})
        if index is None:
            return self._answer(404, {"error": {"reason": f"no such index [{name}]"}})
        if action == "_mapping":
            return self._answer(200, {name: {"mappings": index.mappings}})
        if action == "_refresh":
            return self._answer(200, {})
        if action == "_search":
            return self._answer(200, {"hits": {"hits": index.search(json.loads(body))}})
        if action == "_delete_by_query":
            gone = [key for key, one in index.documents.items() if index.passes(one, json.loads(body)["query"])]
            for key in gone:
                del index.documents[key]
            return self._answer(200, {"deleted": len(gone)})
        assert action == "_bulk"
        assert self.headers["Content-Type"] == "application/x-ndjson"
        lines, items = body.splitlines(), []
        for head, document in zip(map(json.loads, lines[::2]), map(json.loads, lines[1::2]), strict=True):
            one = {"_id": head["index"]["_id"], "status": 200}
            if len(document["vector"]) == index.dim:
                index.documents[one["_id"]] = document
            else:
                one |= {"status": 400, "error": {"reason": f"[vector] must have {index.dim} dimensions"}}
            items.append({"index": one})
        return self._answer(200, {"errors": any("error" in one["index"] for one in items), "items": items})

    do_GET = do_PUT = do_POST = _serve

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def search_server() -> Iterator[str]:
    """The address of a new stand-in."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"indexes": {}}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
