"""Checks on every request: token, size, type, host and time; and monitoring: health, metrics, log."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from sparring.core.errors import UserError
from sparring.serving.http.schema import Limits
from sparring.serving.http.telemetry import EventLog
from support.made_run import MadeRun

ASK = {"user": "user-01", "k": 3}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer secret2",
        "Basic secret",
        "secret",
        "bearer secret",
        "Bearer s\u00e9cret",
    ],
)
def test_a_wrong_token_is_refused(truth: MadeRun, serving: Callable[..., TestClient], header: str | None) -> None:
    """Every wrong header gets 401 on every path except health and the files of the page."""
    client = serving(truth.folder, token="secret")
    headers = {} if header is None else {"Authorization": header.encode()}
    for method, path in (
        ("POST", "/v1/recommend"),
        ("GET", "/v1/info"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("PUT", "/v1/items"),
        ("GET", "/nothing"),
    ):
        answer = client.request(method, path, headers=headers, json=ASK if method == "POST" else None)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
    for path in ("/healthz", "/readyz", "/"):
        assert client.get(path, headers=headers).status_code == 200, path


def test_the_right_token_is_let_in(truth: MadeRun, serving: Callable[..., TestClient]) -> None:
    """With the right token every path works."""
    client = serving(truth.folder, token="secret")
    assert client.post("/v1/recommend", json=ASK, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_body_may_not_be_too_large(truth: MadeRun, serving: Callable[..., TestClient]) -> None:
    """A body above the limit gets 413, with and without Content-Length; one of exactly the limit is accepted."""
    client = serving(truth.folder, limits=Limits(body=1000))
    assert (
        client.post("/v1/recommend", content=b" " * 1001, headers={"content-type": "application/json"}).status_code
        == 413
    )
    parts = iter([b" " * 600, b" " * 600])
    assert client.post("/v1/recommend", content=parts, headers={"content-type": "application/json"}).status_code == 413
    padded = json.dumps(ASK).encode().ljust(1000)
    assert client.post("/v1/recommend", content=padded, headers={"content-type": "application/json"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"1",
        b"\xff\xfe",
        b"{}" * 100,
        b'{"user": NaN}',
        b'{"user":"\\ud800"}',
        b"[" * 5000,
        b'{"user":1e999}',
    ],
)
def test_a_body_that_is_no_question_is_refused(client: TestClient, body: bytes) -> None:
    """A malformed body gets 422 and one line on every path that takes a body."""
    for method, path in (
        ("POST", "/v1/recommend"),
        ("POST", "/v1/similar"),
        ("PUT", "/v1/items"),
        ("DELETE", "/v1/items"),
        ("POST", "/v1/reload"),
    ):
        answer = client.request(method, path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 422), (path, answer.text)
        assert len(answer.json()["detail"].splitlines()) == 1


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/json",
        "application/jsonx",
    ],
)
def test_only_json_is_taken(client: TestClient, kind: str) -> None:
    """Other content types are rejected, since a form on another site could send them without a preflight request."""
    assert client.post("/v1/reload", content=b"{}", headers={"content-type": kind}).status_code == 415


def test_another_host_is_refused_where_hosts_are_known(truth: MadeRun, serving: Callable[..., TestClient]) -> None:
    """A foreign host name that resolves to this machine (DNS rebinding) is rejected."""
    client = serving(truth.folder, hosts=["127.0.0.1", "localhost", "[::1]"])
    for host, status in (
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LocalHost:1", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil", 421),
    ):
        assert client.get("/v1/info", headers={"host": host}).status_code == status, host


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "https://shop.example", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://localhost:8000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "https://evil.example", "sec-fetch-site": "same-origin"}, 403),
        ({"origin": "https://shop.example.evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused(
    truth: MadeRun, serving: Callable[..., TestClient], headers: dict[str, str], status: int
) -> None:
    """A browser's cross-site request to a local service is refused; its own page and a published one are not."""
    client = serving(truth.folder, hosts=["127.0.0.1", "localhost", "[::1]", "shop.example"])
    headers = {"host": "127.0.0.1:8000", **headers}
    assert client.post("/v1/recommend", json=ASK, headers=headers).status_code == status
    assert client.request("DELETE", "/v1/items", json={"ids": [1]}, headers=headers).status_code in (404, status)
    plain = {name: value for name, value in headers.items() if name != "origin"}
    assert client.get("/", headers=plain).status_code == 200, "a link on another site may lead here"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_a_body_needs_a_content_type(client: TestClient, method: str) -> None:
    """A body without a content type, or with a wrong one, gets 415 from every method; without a body there is none."""
    path = "/v1/recommend" if method == "POST" else "/v1/items"
    assert client.request(method, path, content=b'{"ids": [1]}').status_code == 415
    assert client.request(method, path, content=iter([b'{"ids": [1]}'])).status_code == 415
    for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
        assert client.request(method, path, content=b"{}", headers={"content-type": kind}).status_code == 415
    assert client.request(method, path).status_code in (405, 422)


HUGE = 2**63
DEEP = b"[" * 100_000 + b"]" * 100_000
BAD_JSON = [
    b'{"user": %d}' % HUGE,
    b'{"users": ["user-01", %d]}' % 2**70,
    b'{"history": [%d]}' % (-HUGE - 1),
    b'{"user": "user-01", "deny": [%d]}' % 2**64,
    b'{"items": [{"id": %d, "like": [1000]}]}' % 2**64,
    b'{"user": %s}' % (b"9" * 5000),
    b'{"user": %s}' % DEEP,
    b'{"user": "user-01", "x": %s}' % DEEP,
    b'{"x":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"users": [%s]}' % b",".join([b"[]"] * 200_000),
    b'{"user": "%s"}' % (b"x" * 2_000_000),
    b'{"users": [%s]}' % b",".join([b'""'] * 250_002),
    b'{"user": 1, %s}' % b",".join(b'"%x":1' % number for number in range(90_000)),
    b'{"items": [%s]}' % b",".join([b'{"id": 1, "vector": [%s]}' % b",".join([b'""'] * 900)] * 900),
]


@pytest.mark.parametrize("body", BAD_JSON, ids=range(len(BAD_JSON)))
def test_large_numbers_and_deep_json_are_refused(client: TestClient, body: bytes) -> None:
    """Integers beyond 64 bits, deep nesting and long lists get a one-line 4xx on every path that takes JSON."""
    for method, path in (("POST", "/v1/recommend"), ("POST", "/v1/similar"), ("PUT", "/v1/items")):
        answer = client.request(method, path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 422), answer.text[:300]
        assert len(answer.json()["detail"].splitlines()) == 1


def test_the_largest_queries_are_taken(client: TestClient) -> None:
    """Long lists of ids with colons and brackets, and texts with quotes, are no structure."""
    ids = [f"sku:{number:05}[a]" for number in range(9_000)]
    wide = {"user": "user-01", "k": 3, "deny": ids, "allow": [*ids, 1000, 1007, 1014]}
    answer = client.post("/v1/recommend", json=wide)
    assert answer.status_code == 200, answer.text
    assert {item["id"] for item in answer.json()["results"][0]["items"]} <= {1000, 1007, 1014}
    quotes = client.post("/v1/recommend", json={"texts": ['say "this": ' * 800] * 2})
    assert "limit" not in quotes.json()["detail"]


def test_integers_of_64_bits_are_ids(client: TestClient) -> None:
    """The largest and the smallest integer of 64 bits are looked up like any other."""
    for id in (HUGE - 1, -HUGE):
        assert client.post("/v1/recommend", json={"user": id}).status_code == 404
    item = {"id": HUGE, "like": [1000]}
    assert client.put("/v1/items", json={"items": [item]}).status_code == 422
    assert client.request("DELETE", "/v1/items", json={"ids": [HUGE]}).status_code == 422


def test_slow_routes_have_a_time_limit_too(
    truth: MadeRun, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload or a change of items that takes too long gets 503; others keep their own limit."""
    client = serving(truth.folder, limits=Limits(slow_seconds=0.3))
    registry, hold = client.service.registry, threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "reload", lambda *_: hold.wait(20))
    monkeypatch.setattr(registry, "delete", lambda *_: hold.wait(20))
    try:
        for method, path, body in (("POST", "/v1/reload", {}), ("DELETE", "/v1/items", {"ids": [1]})):
            answer = client.request(method, path, json=body)
            assert (answer.status_code, "0.3 seconds" in answer.text) == (503, True)
    finally:
        hold.set()


PATHS = [
    "/v1/items/..%2f..%2fetc%2fpasswd",
    "/page/files/..%2f..%2fpages.py",
    "/page/files/%2e%2e/app.py",
    "/../../etc/passwd",
    "/v1/item?id=..%2f..",
    "//etc/passwd",
    "/v1/users/%00",
    "/page/files/index.html%00.js",
    "/v1/items/%ff",
]


@pytest.mark.parametrize("path", PATHS)
def test_path_tricks_find_nothing(client: TestClient, path: str) -> None:
    """Ids and files are looked up, never opened, so path tricks get 404."""
    answer = client.get(path)
    assert answer.status_code == 404, answer.text
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/recommend"),
        ("POST", "/v1/info"),
        ("DELETE", "/v1/recommend"),
        ("PATCH", "/v1/items"),
        ("TRACE", "/healthz"),
    ],
)
def test_a_wrong_method_is_refused(client: TestClient, method: str, path: str) -> None:
    """A wrong method gets 405 with the allowed methods."""
    answer = client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"]


def test_an_answer_that_takes_too_long_is_given_up(
    truth: MadeRun, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow answer gets 503 within the limit and a full queue at once; the service keeps working."""
    client = serving(truth.folder, limits=Limits(seconds=0.3, waiting=5))
    index, hold = client.service.registry.served().index, threading.Event()  # type: ignore[attr-defined]
    search = index.search
    monkeypatch.setattr(index, "search", lambda *given: (hold.wait(20), search(*given))[1])
    slow = client.post("/v1/recommend", json=ASK)
    assert (slow.status_code, slow.headers["retry-after"]) == (503, "1")
    assert "0.3 seconds" in slow.json()["detail"]
    many = client.post("/v1/recommend", json={"users": ["user-01"] * 6})
    assert (many.status_code, "waiting" in many.json()["detail"]) == (503, True)
    hold.set()
    assert client.post("/v1/recommend", json=ASK).status_code == 200


def test_a_fault_of_ours_is_told_as_such(
    truth: MadeRun, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An internal error gets 500, the log gets the details, and the next request works."""
    lines = io.BytesIO()
    client = serving(truth.folder, log=EventLog(lines, requests=False))
    index = client.service.registry.served().index  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(index, "search", lambda *given: np.linalg.inv(np.zeros((2, 2))))
        answer = client.post("/v1/recommend", json=ASK)
    assert (answer.status_code, "ingular" in answer.text) == (500, False)
    assert b"ingular" in lines.getvalue()
    assert client.post("/v1/recommend", json=ASK).status_code == 200


def test_metrics_count_what_was_answered(truth: MadeRun, client: TestClient) -> None:
    """Metrics have requests by path and status, seconds, items and generation; ids never become labels."""
    for _ in range(3):
        client.post("/v1/recommend", json=ASK)
    client.post("/v1/recommend", json={"user": "nobody"})
    client.get("/v1/items/some-id")
    client.get("/v1/unknown/some-id")
    text = client.get("/metrics").text
    for line in (
        'sparring_requests_total{path="/v1/recommend",status="200"} 3.0',
        'sparring_requests_total{path="/v1/recommend",status="404"} 1.0',
        'sparring_request_seconds_count{path="/v1/recommend"} 4.0',
        'sparring_requests_total{path="other",status="404"} 1.0',
        'sparring_items{run="first"} 60.0',
        'sparring_generation{run="first"} 1.0',
        "sparring_queries_searched_total 3.0",
    ):
        assert line in text, text
    assert "some-id" not in text
    buckets = [int(float(each)) for each in re.findall(r'seconds_bucket{le="[^"]+",path="/v1/recommend"} (\S+)', text)]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 4


def test_the_log_is_json_a_line(truth: MadeRun, serving: Callable[..., TestClient]) -> None:
    """Every request logs method, path, status and milliseconds; never a body or a token."""
    lines = io.BytesIO()
    client = serving(truth.folder, log=EventLog(lines), token="secret-token")
    client.post("/v1/recommend", json=ASK, headers={"Authorization": "Bearer secret-token"})
    client.post("/v1/recommend", json=ASK, headers={"Authorization": "Bearer guessed-token"})
    told: list[dict[str, Any]] = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["event"], line["method"], line["path"], line["status"]) for line in told] == [
        ("request", "POST", "/v1/recommend", 200),
        ("request", "POST", "/v1/recommend", 401),
    ]
    assert all(line["ms"] > 0 and line["time"].startswith("20") for line in told)
    assert b"token" not in lines.getvalue()
    assert b"user-01" not in lines.getvalue()


def test_the_page_comes_with_a_strict_policy(client: TestClient) -> None:
    """The page allows only its own scripts, no foreign frame and no type sniffing."""
    headers = client.get("/").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_the_guide_lists_every_limit() -> None:
    """The table of the guide has the names and defaults of all limits, in their order."""
    text = (Path(__file__).parents[3] / "docs" / "guide" / "security.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)` \| (\S+) \|", text)
    known = [(field.name, "none" if field.default is None else f"{field.default:g}") for field in fields(Limits)]
    assert [(name, value if value == "none" else f"{float(value):g}") for name, value in rows] == known


def test_a_service_whose_threads_have_stopped_is_not_ready(truth: MadeRun, serving: Callable[..., TestClient]) -> None:
    """Without search threads /readyz is 503, so that a balancer sends no requests, and a request gets 503 at once."""
    client = serving(truth.folder)
    client.service.searcher.close()  # type: ignore[attr-defined]
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200
    assert client.post("/v1/recommend", json=ASK).status_code == 503


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/recommend", ASK), ("/v1/similar", {"item": 1000, "k": 3}), ("/v1/recommend", {"k": 3})]
)
def test_the_application_answers_as_the_gate_does(client: TestClient, path: str, body: dict[str, Any]) -> None:
    """A query answered without FastAPI and the same query through it give the same status and the same bytes."""
    plain = client.post(path, json=body)
    through = TestClient(client.service.app).post(path, json=body)  # type: ignore[attr-defined]
    assert (plain.status_code, plain.content) == (through.status_code, through.content)


@pytest.mark.parametrize(("error", "status"), [(UserError("no such thing"), 422), (KeyError("inner"), 500)])
def test_errors_inside_the_application(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    """An error for the user is its line; a fault shows nothing of itself."""

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(client.service.registry, "put", fails)  # type: ignore[attr-defined]
    answer = client.put("/v1/items", json={"items": [{"id": 1000, "price": 1.0}]})
    assert answer.status_code == status
    assert ("no such thing" in answer.text) == (status == 422)
    assert "inner" not in answer.text


def test_a_client_that_leaves_before_its_body_is_complete(client: TestClient) -> None:
    """As an ASGI application, the gate gives up a body whose sender has gone, and counts it."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    head = [(b"host", b"testserver"), (b"content-type", b"application/json"), (b"content-length", b"50")]
    scope = {"type": "http", "method": "POST", "path": "/v1/recommend", "query_string": b"", "headers": head}
    asyncio.run(client.service.gate(scope, receive, send))  # type: ignore[attr-defined]
    assert sent[0]["status"] == 499
    assert 'status="499"} 1.0' in client.get("/metrics").text
