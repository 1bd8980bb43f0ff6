"""The short way through a real connection: the same answers as the ordinary way, whatever comes in and however it is cut."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from sparring.serving.http.access_log import Log
from sparring.serving.http.app import Service
from sparring.serving.http.limits import Limits
from sparring.serving.http.quick import Connection
from sparring.serving.http.runs import Live
from sparring.serving.http.server import configured
from sparring.serving.http.store import Store
from support.made_run import MadeRun

ASK = {"user": "user-01", "k": 3}


class Here:
    """A service that listens, in a thread of this process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        config = configured(service, "127.0.0.1", 0)
        self.bound = config.bind_socket()
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.bound],), daemon=True)
        self.address: tuple[str, int] = self.bound.getsockname()
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def connect(self) -> Wire:
        return Wire(self.address)

    def ask(self, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
        with self.connect() as wire:
            for part in parts:
                wire.send(part)
                time.sleep(0.02 if len(parts) > 1 else 0)
            return wire.answer()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.service.close()


class Wire:
    """One connection, byte by byte."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=20)
        self.left = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def more(self) -> None:
        data = self.socket.recv(65_536)
        if not data:
            raise ConnectionError("closed")
        self.left += data

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of the next answer."""
        while b"\r\n\r\n" not in self.left:
            self.more()
        head, _, rest = self.left.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        length = int(headers["content-length"])
        while len(rest) < length:
            self.more()
            rest = self.left.partition(b"\r\n\r\n")[2]
        self.left = rest[length:]
        return int(lines[0].split()[1]), headers, rest[:length]


def request(body: bytes | dict[str, Any], path: str = "/v1/recommend", *more: str, length: int | None = None) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(data) if length is None else length
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {size}",
        *more,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@pytest.fixture
def here(truth: MadeRun) -> Iterator[Callable[..., Here]]:
    started: list[Here] = []

    def start(**options: Any) -> Here:
        live = Live([truth.folder], Store(truth.folder / "serve" / "items.sqlite"))
        started.append(Here(Service(live, **options)))
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What went the ordinary way."""
    went: list[bytes] = []
    way = Connection._ordinary
    monkeypatch.setattr(
        Connection, "_ordinary", lambda self, data: (went.append(data), way(self, data))[1] if data else way(self, data)
    )
    return went


def expected(truth: MadeRun, row: int, k: int) -> list[int]:
    return [item for item, _ in truth.best(truth.users[row], k, truth.seen[row].tolist())]


def ids(body: bytes, at: int = 0) -> list[int]:
    return [item["id"] for item in json.loads(body)["results"][at]["items"]]


def test_plain_questions_go_the_short_way(truth: MadeRun, here: Callable[..., Here], ordinary: list[bytes]) -> None:
    """Of one user, of several, of items; many on one connection. The answers are those of brute force."""
    with here().connect() as wire:
        for row in range(20):
            wire.send(request({"user": truth.user(row), "k": 1 + row % 5}))
            status, headers, body = wire.answer()
            assert (status, headers["content-type"], ids(body)) == (
                200,
                "application/json",
                expected(truth, row, 1 + row % 5),
            )
        wire.send(request({"users": [truth.user(3), truth.user(9)], "k": 4, "fields": ["year"]}))
        body = wire.answer()[2]
        assert [ids(body, at) for at in (0, 1)] == [expected(truth, 3, 4), expected(truth, 9, 4)]
        assert all("year" in item for item in json.loads(body)["results"][0]["items"])
        wire.send(request({"item": truth.item_ids[7], "k": 4}, "/v1/similar"))
        assert ids(wire.answer()[2]) == [item for item, _ in truth.best(truth.items[7], 4, {7})]
    assert not ordinary


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


@pytest.mark.parametrize("body", BODIES)
def test_what_is_wrong_is_told_by_the_application(
    here: Callable[..., Here], ordinary: list[bytes], body: bytes
) -> None:
    """A 4xx of one line, and the connection goes on."""
    with here().connect() as wire:
        wire.send(request(body))
        status, _, said = wire.answer()
        assert status in (400, 404, 422), said
        assert len(json.loads(said)["detail"].splitlines()) == 1
        assert ordinary == [request(body)]
        wire.send(request(ASK))
        assert wire.answer()[0] == 200
        assert len(ordinary) == 1


def test_questions_with_more_to_work_out_go_the_ordinary_way(
    truth: MadeRun, here: Callable[..., Here], ordinary: list[bytes]
) -> None:
    """Filters and histories, between plain ones on the same connection."""
    with here().connect() as wire:
        for number, more in enumerate(
            [{"deny": [truth.item_ids[0]]}, {"where": [{"column": "year", "op": ">", "value": 2030}]}], 1
        ):
            wire.send(request(ASK | more))
            assert wire.answer()[0] == 200
            assert len(ordinary) == number
            wire.send(request(ASK))
            assert ids(wire.answer()[2]) == expected(truth, 1, 3)
        wire.send(request({"history": truth.item_ids[:2], "k": 3}))
        assert wire.answer()[0] == 200
    assert len(ordinary) == 3


def test_a_request_may_come_in_pieces(truth: MadeRun, here: Callable[..., Here], ordinary: list[bytes]) -> None:
    """Cut anywhere, it gets the same answer; cut between head and body, as many clients do, it still goes the short way."""
    service, whole = here(), request(ASK)
    head = whole.index(b"\r\n\r\n") + 4
    assert ids(service.ask(whole[:head], whole[head:])[2]) == expected(truth, 1, 3)
    assert ids(service.ask(whole[:head], whole[head : head + 4], whole[head + 4 :])[2]) == expected(truth, 1, 3)
    assert not ordinary
    for at in (1, 10, head - 6, head - 2):
        assert ids(service.ask(whole[:at], whole[at:])[2]) == expected(truth, 1, 3), at


def test_requests_may_follow_one_another_unanswered(
    truth: MadeRun, here: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short and ordinary ones mixed, in one piece or in several, are answered in their order."""
    service = here()
    index = service.service.live.served().index
    search = index.search
    monkeypatch.setattr(index, "search", lambda *given: (time.sleep(0.03), search(*given))[1])
    asks = [
        {"user": truth.user(row), "k": 2, **({"deny": []} if row % 3 else {"deny": [truth.item_ids[-1]]})}
        for row in range(9)
    ]
    for pieces in (1, 3, 9):
        with service.connect() as wire:
            for at in range(0, 9, 9 // pieces):
                wire.send(b"".join(request(ask) for ask in asks[at : at + 9 // pieces]))
                time.sleep(0.005)
            for ask in asks:
                assert json.loads(wire.answer()[2])["results"][0]["query"] == ask["user"], pieces


def test_a_body_is_never_taken_for_a_request(here: Callable[..., Here]) -> None:
    """One that reads like a request, and arrives by itself after the head was refused, is a body all the same."""
    service = here(token="secret")
    inner = request(ASK, "/v1/recommend", "Authorization: Bearer secret")
    with service.connect() as wire:
        wire.send(request(b"", "/v1/recommend", length=len(inner)))
        assert wire.answer()[0] == 401
        wire.send(inner)
        wire.send(request(ASK, "/v1/recommend", "Authorization: Bearer secret"))
        assert wire.answer()[0] == 200
        wire.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            wire.answer()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Authorization: Bearer secret", 200),
        ("Authorization: Bearer wrong", 401),
        ("X-Nothing: 1", 401),
        ("Authorization: Bearer secret\r\nHost: evil.example", 421),
        ("Authorization: Bearer secret\r\nContent-Type: text/plain", 415),
    ],
)
def test_limits_hold_on_the_short_way(here: Callable[..., Here], header: str, status: int) -> None:
    """Token, host and type are looked at as ever, also when a good head was seen before."""
    service = here(token="secret", hosts=["127.0.0.1"])
    for line in ("Authorization: Bearer secret", header):
        given = service.ask(request(ASK, "/v1/recommend", *line.split("\r\n")))[0]
        assert given == (200 if line != header else status)


def test_a_body_too_large_or_in_chunks(here: Callable[..., Here], ordinary: list[bytes]) -> None:
    """413 for one, the ordinary way for the other."""
    service = here(limits=Limits(body=100))
    assert service.ask(request(json.dumps(ASK).encode().ljust(101)))[0] == 413
    head = b"POST /v1/recommend HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = json.dumps(ASK).encode()
    assert service.ask(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))[0] == 200
    assert len(ordinary) == 2


def test_time_and_queue_are_limited(here: Callable[..., Here], monkeypatch: pytest.MonkeyPatch) -> None:
    """503 in time with Retry-After, the connection goes on; half a request is not waited for without end."""
    service = here(limits=Limits(seconds=0.4, waiting=3))
    index, hold = service.service.live.served().index, threading.Event()
    search = index.search
    monkeypatch.setattr(index, "search", lambda *given: (hold.wait(20), search(*given))[1])
    with service.connect() as wire:
        wire.send(request(ASK))
        status, headers, body = wire.answer()
        assert (status, headers["retry-after"], "0.4 seconds" in json.loads(body)["detail"]) == (503, "1", True)
        wire.send(request({"users": ["user-01"] * 4}))
        status, headers, body = wire.answer()
        assert (status, headers["retry-after"], "wait already" in json.loads(body)["detail"]) == (503, "1", True)
        hold.set()
        wire.send(request(ASK))
        assert wire.answer()[0] == 200
    half = request(ASK)[:-5]
    assert service.ask(half)[0] == 503


def test_a_fault_is_told_and_logged(here: Callable[..., Here], monkeypatch: pytest.MonkeyPatch) -> None:
    """500 in one line without what went wrong inside; the connection goes on."""
    lines = io.BytesIO()
    service = here(log=Log(lines, requests=False))
    index = service.service.live.served().index
    with service.connect() as wire:
        with monkeypatch.context() as patch:
            patch.setattr(index, "search", lambda *given: 1 / 0)
            wire.send(request(ASK))
            status, _, body = wire.answer()
        assert (status, "zero" in body.decode(), list(json.loads(body))) == (500, False, ["detail"])
        wire.send(request(ASK))
        assert wire.answer()[0] == 200
        assert b"ZeroDivisionError" in lines.getvalue()


def test_requests_are_counted_and_logged_alike(here: Callable[..., Here]) -> None:
    """One line and one count for each, whichever way it went."""
    lines = io.BytesIO()
    service = here(log=Log(lines))
    service.ask(request(ASK))
    service.ask(request(ASK | {"user": "nobody"}))
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["method"], line["path"], line["status"], line["client"]) for line in told] == [
        ("POST", "/v1/recommend", 200, "127.0.0.1"),
        ("POST", "/v1/recommend", 404, "127.0.0.1"),
    ]
    assert 'sparring_requests_total{path="/v1/recommend",status="200"} 1.0' in service.service.metrics.text().decode()


def test_what_has_begun_is_answered_before_it_stops(
    truth: MadeRun, here: Callable[..., Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer says that the connection closes, and it does; a client that has gone is no fault."""
    service = here()
    index, hold = service.service.live.served().index, threading.Event()
    search = index.search
    monkeypatch.setattr(index, "search", lambda *given: (hold.wait(20), search(*given))[1])
    with service.connect() as gone:
        gone.send(request(ASK))
        time.sleep(0.1)
    with service.connect() as wire:
        wire.send(request(ASK))
        time.sleep(0.2)
        service.server.should_exit = True
        time.sleep(0.4)
        hold.set()
        status, headers, body = wire.answer()
        assert (status, headers["connection"], ids(body)) == (200, "close", expected(truth, 1, 3))
        with pytest.raises(ConnectionError):
            wire.more()
    service.thread.join(20)
    assert not service.thread.is_alive()


def test_a_client_that_does_not_read_is_not_written_to_without_end(here: Callable[..., Here]) -> None:
    """Of 40 answers of half a megabyte no more than a few are held for it; all come when it reads."""
    service = here()
    with service.connect() as wire:
        most, large = 0, request({"users": ["user-01"] * 256, "k": 50})
        for _ in range(40):
            wire.send(large)
            time.sleep(0.05)
            most = max(
                [
                    most,
                    *(each.transport.get_write_buffer_size() for each in list(service.server.server_state.connections)),
                ]
            )
        answers = [wire.answer() for _ in range(40)]
    assert {status for status, _, _ in answers} == {200}
    assert len(answers[0][2]) > 400_000
    assert 0 < most < 3 * len(answers[0][2])
