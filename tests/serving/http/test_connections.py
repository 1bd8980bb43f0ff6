"""Requests over real sockets: in pieces, pipelined, too large, too slow, malformed, and during shutdown."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from sparring.serving.http.schema import Limits
from sparring.serving.http.telemetry import EventLog
from support.made_run import MadeRun
from support.sockets import Listening, request

QUERY = {"user": "user-01", "k": 3}


@pytest.fixture
def in_application(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the requests that reached FastAPI."""
    from fastapi import FastAPI

    paths: list[str] = []
    call = FastAPI.__call__

    async def recorded(self: FastAPI, scope: Any, receive: Any, send: Any) -> None:
        paths.extend([scope["path"]] if scope["type"] == "http" else [])
        await call(self, scope, receive, send)

    monkeypatch.setattr(FastAPI, "__call__", recorded)
    return paths


def held_search(service: Listening, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make searches wait until the event is set."""
    index, release = service.service.registry.served().index, threading.Event()
    search = index.search
    monkeypatch.setattr(index, "search", lambda *arguments: (release.wait(20), search(*arguments))[1])
    return release


def expected(truth: MadeRun, row: int, k: int) -> list[int]:
    return [item for item, _ in truth.best(truth.users[row], k, truth.seen[row].tolist())]


def ids(body: bytes, query: int = 0) -> list[int]:
    return [item["id"] for item in json.loads(body)["results"][query]["items"]]


def test_plain_requests_skip_the_application(
    truth: MadeRun, listening: Callable[..., Listening], in_application: list[str]
) -> None:
    """Plain requests on one connection bypass FastAPI and get the brute-force lists."""
    with listening().connect() as connection:
        for row in range(20):
            k = 1 + row % 5
            connection.send(request({"user": truth.user(row), "k": k}))
            status, headers, body = connection.response()
            assert (status, headers["content-type"], ids(body)) == (200, "application/json", expected(truth, row, k))
        connection.send(request({"users": [truth.user(3), truth.user(9)], "k": 4, "fields": ["year"]}))
        body = connection.response()[2]
        assert [ids(body, 0), ids(body, 1)] == [expected(truth, 3, 4), expected(truth, 9, 4)]
        assert all("year" in item for item in json.loads(body)["results"][0]["items"])
        connection.send(request({"item": truth.item_ids[7], "k": 4}, path="/v1/similar"))
        assert ids(connection.response()[2]) == [item for item, _ in truth.best(truth.items[7], 4, {7})]
    assert not in_application


def test_filters_and_histories_between_plain_requests(truth: MadeRun, listening: Callable[..., Listening]) -> None:
    """Filters and histories, which threads resolve, are answered in turn with plain requests on one connection."""
    others: list[dict[str, Any]] = [
        QUERY | {"deny": [truth.item_ids[0]]},
        QUERY | {"where": [{"column": "year", "op": ">", "value": 2030}]},
        {"history": truth.item_ids[:2], "k": 3},
    ]
    with listening().connect() as connection:
        for query in others:
            connection.send(request(query))
            assert connection.response()[0] == 200
            connection.send(request(QUERY))
            assert ids(connection.response()[2]) == expected(truth, 1, 3)


def test_a_head_that_repeats_is_read_like_the_first(truth: MadeRun, listening: Callable[..., Listening]) -> None:
    """Whole, cut anywhere, or before another: a request gets its own answer, however often its head came before."""
    key = "Authorization: Bearer secret"
    whole = [request({"user": truth.user(row), "k": 2}, key) for row in (11, 12)]
    wrong = b"GET /v1/info HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    end = whole[0].index(b"\r\n\r\n") + 4
    assert whole[0][:end] == whole[1][:end]
    cuts = [1, end - 3, end, len(whole[0]) - 1, len(whole[0])]
    with listening(token="secret").connect() as connection:
        for cut in [None, None, *cuts, None]:
            parts = whole if cut is None else [whole[0][:cut], whole[0][cut:] + whole[1]]
            for part in parts:
                connection.send(part)
                time.sleep(0.02)
            for row in (11, 12):
                status, _, body = connection.response()
                assert (status, ids(body)) == (200, expected(truth, row, 2))
            connection.send(wrong)
            assert connection.response()[0] == 401


BODIES: list[bytes] = [
    b'{"user": "user-01", "k": 0}',
    b'{"user": "nobody"}',
    b'{"user": "user-01", "run": "none"}',
    b'{"user": "user-01", "fields": ["none"]}',
    b'{"user": "user-01", "users": ["user-01"]}',
    b'{"user": "user-01", "text": "x"}',
    b'{"user": "user-01", "more": 1}',
    b'{"history": ["nothing"]}',
    b'{"user": 1e999}',
    b'{"user"',
    b"[]",
    b"\xff",
]


def test_a_bad_request_leaves_the_connection_usable(listening: Callable[..., Listening]) -> None:
    """A 4xx has one line, and a good request on the same connection still works."""
    with listening().connect() as connection:
        for bad in BODIES:
            connection.send(request(bad))
            status, _, body = connection.response()
            assert status in (400, 404, 422), body
            assert len(json.loads(body)["detail"].splitlines()) == 1
            connection.send(request(QUERY))
            assert connection.response()[0] == 200


def test_a_request_may_arrive_in_pieces(truth: MadeRun, listening: Callable[..., Listening]) -> None:
    """A request cut at any byte gets the same response."""
    service, data = listening(), request(QUERY)
    head = data.index(b"\r\n\r\n") + 4
    assert ids(service.ask(data[:head], data[head : head + 4], data[head + 4 :])[2]) == expected(truth, 1, 3)
    for cut in (1, 10, head - 6, head - 2, head):
        assert ids(service.ask(data[:cut], data[cut:])[2]) == expected(truth, 1, 3), cut


def test_pipelined_requests_are_answered_in_order(
    truth: MadeRun, listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain and filtered requests, sent in one piece or several, are answered in order."""
    service = listening()
    index = service.service.registry.served().index
    search = index.search
    monkeypatch.setattr(index, "search", lambda *arguments: (time.sleep(0.03), search(*arguments))[1])
    queries = [{"user": truth.user(row), "k": 2, "deny": [] if row % 3 else [truth.item_ids[-1]]} for row in range(9)]
    for pieces in (1, 3, 9):
        with service.connect() as connection:
            for start in range(0, 9, 9 // pieces):
                connection.send(b"".join(request(query) for query in queries[start : start + 9 // pieces]))
                time.sleep(0.005)
            for query in queries:
                assert json.loads(connection.response()[2])["results"][0]["query"] == query["user"], pieces


def test_a_body_is_never_parsed_as_a_request(listening: Callable[..., Listening]) -> None:
    """A body that looks like a request, and arrives after its head was rejected, is not executed."""
    service = listening(token="secret")
    inner = request(QUERY, "Authorization: Bearer secret")
    with service.connect() as connection:
        connection.send(request(b"", length=len(inner)))
        assert connection.response()[0] == 401
        connection.send(inner)
        with pytest.raises(ConnectionError):
            connection.response()
    assert b'"/v1/recommend",status="200"' not in service.service.metrics.text()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Authorization: Bearer secret"], 200),
        (["Authorization: Bearer wrong"], 401),
        (["X-Nothing: 1"], 401),
        (["Authorization: Bearer secret", "Host: evil.example"], 400),
        (["Authorization: Bearer secret", "Origin: http://evil.example"], 403),
        (["Authorization: Bearer secret", "Content-Type: text/plain"], 415),
    ],
)
def test_headers_are_checked_for_every_request(
    listening: Callable[..., Listening], headers: list[str], status: int
) -> None:
    """Token, host and content type are checked, also after a good request."""
    service = listening(token="secret", hosts=["127.0.0.1"])
    assert service.ask(request(QUERY, "Authorization: Bearer secret"))[0] == 200
    assert service.ask(request(QUERY, *headers))[0] == status


def test_body_size_and_chunked_bodies(listening: Callable[..., Listening]) -> None:
    """A body that is too large gets 413; a chunked body is read."""
    service = listening(limits=Limits(body=100))
    assert service.ask(request(json.dumps(QUERY).encode().ljust(101)))[0] == 413
    head = b"POST /v1/recommend HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    body = json.dumps(QUERY).encode()
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    assert service.ask(head + chunked)[0] == 200


def test_time_and_queue_limits(listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow searches and a full queue get 503 with Retry-After within the time limit."""
    service = listening(limits=Limits(seconds=0.4, waiting=3))
    release = held_search(service, monkeypatch)
    with service.connect() as connection:
        for query, word in ((QUERY, "0.4 seconds"), ({"users": ["user-01"] * 4}, "waiting")):
            began = time.perf_counter()
            connection.send(request(query))
            status, headers, body = connection.response()
            assert (status, headers["retry-after"], word in json.loads(body)["detail"]) == (503, "1", True)
            assert time.perf_counter() - began < 10
        release.set()
        connection.send(request(QUERY))
        assert connection.response()[0] == 200


def test_an_internal_error_is_logged_not_shown(
    listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gets 500 without details, the log gets the traceback, and the connection stays usable."""
    lines = io.BytesIO()
    service = listening(log=EventLog(lines, requests=False))
    index = service.service.registry.served().index
    with service.connect() as connection:
        with monkeypatch.context() as patch:
            patch.setattr(index, "search", lambda *arguments: 1 / 0)
            connection.send(request(QUERY))
            status, _, body = connection.response()
        assert (status, "zero" in body.decode(), list(json.loads(body))) == (500, False, ["detail"])
        connection.send(request(QUERY))
        assert connection.response()[0] == 200
        assert b"ZeroDivisionError" in lines.getvalue()


def test_every_request_is_counted_and_logged_once(listening: Callable[..., Listening]) -> None:
    """Each request has one log line and one count, with the client's address."""
    lines = io.BytesIO()
    service = listening(log=EventLog(lines))
    service.ask(request(QUERY))
    service.ask(request(QUERY | {"user": "nobody"}))
    logged = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["method"], line["path"], line["status"], line["client"]) for line in logged] == [
        ("POST", "/v1/recommend", 200, "127.0.0.1"),
        ("POST", "/v1/recommend", 404, "127.0.0.1"),
    ]
    assert 'sparring_requests_total{path="/v1/recommend",status="200"} 1.0' in service.service.metrics.text().decode()


def test_shutdown_finishes_requests_in_progress(
    truth: MadeRun, listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response arrives, then the connection closes; a client that has disconnected does no harm."""
    service = listening()
    release = held_search(service, monkeypatch)
    with service.connect() as gone:
        gone.send(request(QUERY))
        time.sleep(0.1)
    with service.connect() as connection:
        connection.send(request(QUERY))
        time.sleep(0.2)
        service.server.should_exit = True
        time.sleep(0.4)
        release.set()
        status, _, body = connection.response()
        assert (status, ids(body)) == (200, expected(truth, 1, 3))
        with pytest.raises(ConnectionError):
            connection.read()
    service.thread.join(20)
    assert not service.thread.is_alive()


def test_a_client_that_does_not_read_fills_no_memory(listening: Callable[..., Listening]) -> None:
    """Of 40 responses of half a megabyte only a few are buffered; all arrive once the client reads."""
    service = listening()
    with service.connect() as connection:
        buffered, large = 0, request({"users": ["user-01"] * 256, "k": 50})
        for _ in range(40):
            connection.send(large)
            time.sleep(0.05)
            sizes = [c.transport.get_write_buffer_size() for c in list(service.server.connections.open)]
            buffered = max([buffered, *sizes])
        responses = [connection.response() for _ in range(40)]
    assert {status for status, _, _ in responses} == {200}
    assert len(responses[0][2]) > 400_000
    assert 0 < buffered < 3 * len(responses[0][2])
