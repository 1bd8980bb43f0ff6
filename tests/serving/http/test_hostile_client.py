"""Clients that send too much, too slowly, nothing or garbage: each is refused or cut, and others are answered."""

from __future__ import annotations

import gc
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from sparring.serving.http import connection as module
from sparring.serving.http.app import Service
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.schema import Limits, RequestError
from sparring.serving.http.store import Store
from support.made_run import make_run
from support.sockets import Connection, Listening, request

QUERY = {"user": "user-01", "k": 3}
GOOD = request(QUERY)
HEAD = b"POST /v1/recommend HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
SHORT = Limits(
    head_seconds=0.4, body_seconds=0.8, idle_seconds=0.6, send_seconds=0.5, head=4096, headers=20, body=200_000
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    """One service with short limits, for all tests that need no others."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    make_run(folder)
    registry = RunRegistry([folder], Store(folder / "serve" / "items.sqlite"))
    listening = Listening(Service(registry, SHORT, hosts=["127.0.0.1"]))
    yield listening
    listening.stop()


def refused(connection: Connection) -> int:
    """The status of the last response; the connection ends behind it."""
    status, headers, body = connection.response()
    assert headers["connection"] == "close"
    assert len(json.loads(body)["detail"].splitlines()) == 1
    with pytest.raises(ConnectionError):
        connection.response()
    return status


def cut_after(connection: Connection) -> float:
    """Seconds until the service closes a connection without a word."""
    began = time.perf_counter()
    with pytest.raises(ConnectionError):
        connection.read()
    return time.perf_counter() - began


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"X: " + b"x" * 4096 + b"\r\n\r\n{}",
        HEAD + b"X: " + b"x" * 1_000_000,
        b"GET /" + b"x" * 1_000_000,
        HEAD + b"".join(b"X-%d: 1\r\n" % number for number in range(21)) + b"\r\n",
        HEAD + b"X" * 1_000_000,
    ],
)
def test_a_large_head_is_refused(service: Listening, data: bytes) -> None:
    """Long lines, long values and many headers get 431, and no more of them is read than the limit and one buffer."""
    with service.connect() as connection:
        threading.Thread(target=_send, args=(connection, data), daemon=True).start()
        assert refused(connection) == 431


def _send(connection: Connection, data: bytes) -> None:
    try:
        for start in range(0, len(data), 50_000):
            connection.send(data[start : start + 50_000])
    except OSError:
        pass


def test_the_largest_head_is_taken(service: Listening) -> None:
    """A head just below the limits is answered, at once and byte for byte in pieces."""
    head = HEAD + b"".join(b"X-%02d: %s\r\n" % (number, b"x" * 200) for number in range(17))
    body = json.dumps(QUERY).encode()
    data = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert service.ask(data)[0] == 200
    assert service.ask(*(data[start : start + 500] for start in range(0, len(data), 500)))[0] == 200


def test_silent_and_slow_clients_are_cut(service: Listening) -> None:
    """Silence is cut without a word; half a head or half a body gets 408; each within its own time, all at once."""
    parts = {
        "silent": b"",
        "blank lines": b"\r\n\r\n",
        "half a head": HEAD,
        "half a body": HEAD + b'Content-Length: 100\r\n\r\n{"user"',
        "half a chunk": HEAD + b'Transfer-Encoding: chunked\r\n\r\n10\r\n{"user"',
        "idle": GOOD,
    }
    limits = {"half a body": 0.8, "half a chunk": 0.8, "idle": 0.6}
    connections = {name: service.connect() for name in parts}
    began = time.perf_counter()
    for name, data in parts.items():
        connections[name].send(data)
    connections["idle"].response()
    for name in sorted(parts, key=lambda name: limits.get(name, 0.4)):
        with connections[name] as connection:
            if name.startswith("half"):
                assert refused(connection) == 408
            else:
                cut_after(connection)
        assert time.perf_counter() - began > limits.get(name, 0.4) - 0.05, name
    assert time.perf_counter() - began < 10


def test_a_byte_now_and_then_extends_no_deadline(service: Listening) -> None:
    """A head that arrives byte by byte gets 408 as soon as a silent one."""
    with service.connect() as connection:
        began = time.perf_counter()
        for byte in HEAD:
            connection.send(bytes([byte]))
            time.sleep(0.05)
            if time.perf_counter() - began > 1.5:
                break
        assert connection.responses() == [408]


def test_a_body_needs_a_least_rate(service: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that trickles is refused before its deadline."""
    monkeypatch.setattr(module, "_RATE_AFTER", 0.1)
    with service.connect() as connection:
        began = time.perf_counter()
        connection.send(HEAD + b"Content-Length: 1000\r\n\r\n{")
        assert refused(connection) == 408
        assert time.perf_counter() - began < 0.7


@pytest.mark.parametrize(
    ("garbage", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET \xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400),
        (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Content-Length: -1\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 200001\r\n\r\n{", 413),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n30D41\r\n" + b" " * 200_001, 413),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * 600_000, 413),
        (HEAD + b"Host: other\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 2\r\n\r\n{}", 421),
    ],
)
def test_garbage_behind_a_request(service: Listening, garbage: bytes, status: int) -> None:
    """The request before the garbage is answered, the garbage gets one 4xx, and the connection ends."""
    with service.connect() as connection:
        threading.Thread(target=_send, args=(connection, GOOD + garbage), daemon=True).start()
        assert connection.response()[0] == 200
        assert refused(connection) == status


def test_random_bytes_never_raise(service: Listening) -> None:
    """Mutated requests get a 2xx or 4xx, or nothing; no fault is counted."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        data = bytearray(GOOD * 2)
        for place in rng.integers(0, len(data), rng.integers(1, 8)):
            data[place] = rng.integers(0, 256)
        with service.connect() as connection:
            connection.socket.settimeout(3)
            connection.send(bytes(data))
            connection.socket.shutdown(socket.SHUT_WR)
            with suppress(OSError, KeyError, ValueError):
                assert all(status < 500 for status in connection.responses())
    assert service.ask(GOOD)[0] == 200
    assert b'status="500"' not in service.service.metrics.text()


def test_refused_clients_leave_nothing_behind(service: Listening) -> None:
    """A connection that was refused or cut is freed at once, without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        for data in (HEAD + b"X: " + b"x" * 5000, b"garbage\r\n\r\n", HEAD + b"Content-Length: 200001\r\n\r\n"):
            for _ in range(5):
                with service.connect() as connection:
                    connection.send(data)
                    connection.response()
        time.sleep(0.3)
        assert sum(type(each) is module.Connection for each in gc.get_objects()) == 0
    finally:
        gc.enable()


def test_trailers_are_not_headers(service: Listening) -> None:
    """A trailer cannot name a host after the check of the hosts, and the next request is read."""
    body = json.dumps(QUERY).encode()
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nHost: evil.example\r\n\r\n" % (len(body), body)
    with service.connect() as connection:
        connection.send(data + GOOD)
        assert [connection.response()[0] for _ in range(2)] == [200, 200]


def test_odd_but_valid_requests(service: Listening) -> None:
    """HTTP/1.0, an absolute URL, an upgrade, 100-continue and HEAD are answered as HTTP/1.1 wants it."""
    status, headers, _ = service.ask(b"GET /healthz HTTP/1.0\r\n\r\n")
    assert (status, headers["connection"]) == (200, "close")
    assert service.ask(b"GET http://127.0.0.1/healthz?x=1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")[0] == 200
    upgrade = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with service.connect() as connection:
        connection.send(upgrade + b"\x00\xffnot HTTP")
        assert connection.responses() == [200]
    with service.connect() as connection:
        body = json.dumps(QUERY).encode()
        connection.send(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        connection.read()
        assert connection.buffer == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.buffer = b""
        connection.send(body)
        assert connection.response()[0] == 200
        connection.send(b"HEAD /page/files/page.css HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        while b"\r\n\r\n" not in connection.buffer:
            connection.read()
        cut_after(connection)
    assert connection.buffer.endswith(b"\r\n\r\n")


def test_pipelining_has_an_end(listening: Callable[..., Listening]) -> None:
    """Of a thousand requests in one piece some are answered in order, then one gets 429, and the connection ends."""
    with listening().connect() as connection:
        threading.Thread(target=_send, args=(connection, GOOD * 1000), daemon=True).start()
        statuses = connection.responses()
    assert set(statuses[:-1]) == {200}
    assert len(statuses) > 64
    assert statuses[-1] in (200, 429)


def test_idle_connections_make_room(listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where descriptors are few, the longest idle connection is cut for a new one; a busy one is not."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (module._OTHER_FILES + 30, 4096))
    service = listening()
    assert service.server.connections.most == 30
    with service.connect() as busy:
        busy.send(GOOD)
        busy.response()
        busy.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(json.dumps(QUERY)))
        crowd = [service.connect() for _ in range(80)]
        try:
            assert service.ask(GOOD)[0] == 200
            assert len(service.server.connections.open) <= 30
            busy.send(json.dumps(QUERY).encode())
            assert busy.response()[0] == 200
            for oldest in crowd[:40]:
                cut_after(oldest)
            crowd[-1].send(GOOD)
            assert crowd[-1].response()[0] == 200
        finally:
            for each in crowd:
                each.__exit__()


def test_limits_of_one_client(listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of one address, its requests at once and its rate are limited; a 429 has Retry-After."""
    service = listening(limits=Limits(client_connections=3, client_requests=1, client_rate=4.0))
    index, hold = service.service.registry.served().index, threading.Event()
    search = index.search
    with service.connect() as first, service.connect() as second, service.connect() as third:
        with monkeypatch.context() as patch:
            patch.setattr(index, "search", lambda *given: (hold.wait(20), search(*given))[1])
            first.send(GOOD)
            time.sleep(0.2)
            second.send(GOOD)
            status, headers, _ = second.response()
            assert (status, headers["retry-after"]) == (429, "1")
            hold.set()
            assert first.response()[0] == 200
        statuses = []
        for _ in range(10):
            third.send(GOOD)
            statuses.append(third.response()[0])
        assert 200 in statuses
        assert statuses[-1] == 429
        assert service.ask(GOOD)[0] in (200, 429)  # a fourth connection: the longest idle one makes room
        assert sum(_is_cut(each) for each in (first, second, third)) == 1


def _is_cut(connection: Connection) -> bool:
    connection.socket.settimeout(0.2)
    try:
        connection.read()
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return False


def test_unfinished_uploads_share_a_limit(listening: Callable[..., Listening]) -> None:
    """Beyond the limit of all bodies together the oldest upload gets 408; small requests are always read."""
    service = listening(limits=Limits(buffered=400_000))
    head = HEAD.replace(b"POST /v1/recommend", b"PUT /v1/items") + b"Content-Length: 1000000\r\n\r\n"
    uploads = []
    for _ in range(6):
        uploads.append(service.connect())
        uploads[-1].send(head + b" " * 200_000)
        time.sleep(0.1)
        assert service.server.connections.buffered <= 400_000
    for oldest in uploads[:3]:
        assert refused(oldest) == 408
    assert service.ask(GOOD)[0] == 200
    for each in uploads:
        each.__exit__()
    time.sleep(0.3)
    assert service.server.connections.buffered == 0


def test_a_client_that_does_not_read_is_cut(listening: Callable[..., Listening]) -> None:
    """A response that nobody reads is given up after its time."""
    service = listening(limits=Limits(send_seconds=0.4))
    with service.connect() as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):
            connection.send(request({"users": ["user-01"] * 256, "k": 50}))
        deadline = time.perf_counter() + 10
        while service.server.connections.open and time.perf_counter() < deadline:
            time.sleep(0.05)
        assert not service.server.connections.open


def test_a_stop_answers_what_has_arrived(listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load every request that was sent is answered, unfinished uploads are cut, and new clients are refused."""
    monkeypatch.setattr(module, "_STOP_UPLOAD", 0.8)
    service = listening()
    lost: list[Any] = []
    answered = [0] * 8

    def load(number: int) -> None:
        with service.connect() as connection:
            while True:
                connection.send(GOOD)
                try:
                    status, headers, _ = connection.response()
                except OSError as error:
                    lost.append(error)
                    return
                answered[number] += status == 200
                if headers.get("connection") == "close":
                    return

    uploads = [service.connect() for _ in range(40)]
    for upload in uploads:
        upload.send(HEAD + b"Content-Length: 100000\r\n\r\n" + b" " * 70_000)
    clients = [threading.Thread(target=load, args=(number,)) for number in range(8)]
    for client in clients:
        client.start()
    time.sleep(0.5)
    service.server.should_exit = True
    for client in clients:
        client.join(20)
    began = time.perf_counter()
    service.thread.join(20)
    assert not lost
    assert min(answered) > 0
    assert time.perf_counter() - began < 5
    with pytest.raises(ConnectionError):
        service.connect()
    for upload in uploads:
        assert refused(upload) == 408
        upload.__exit__()


def test_the_longest_idle_client_makes_room_for_another(listening: Callable[..., Listening]) -> None:
    """With all connections in use by several clients, the longest idle one is cut, whoever it belongs to."""
    service = listening(limits=Limits(connections=3))
    first = [service.connect("127.0.0.2"), service.connect("127.0.0.2")]
    with service.connect("127.0.0.3") as third, service.connect("127.0.0.4") as fourth:
        cut_after(first[0])
        for other in (first[1], third, fourth):
            other.send(GOOD)
            assert other.response()[0] == 200
    for each in first:
        each.__exit__()


def held_search(service: Listening, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let every search of the service wait for an event."""
    index, hold = service.service.registry.served().index, threading.Event()
    search = index.search
    monkeypatch.setattr(index, "search", lambda *given: (hold.wait(20), search(*given))[1])
    return hold


def test_a_newcomer_is_refused_where_all_are_busy(
    listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every connection waits for an answer, a new one gets 503, and the answers arrive."""
    service = listening(limits=Limits(connections=1))
    hold = held_search(service, monkeypatch)
    with service.connect() as busy:
        busy.send(GOOD)
        time.sleep(0.2)
        with service.connect() as late:
            assert refused(late) == 503
        hold.set()
        assert busy.response()[0] == 200


def test_one_body_beyond_the_memory_of_all(listening: Callable[..., Listening]) -> None:
    """An upload that alone exceeds the memory for bodies gets 503, and its bytes are released."""
    service = listening(limits=Limits(buffered=100_000))
    head = HEAD.replace(b"POST /v1/recommend", b"PUT /v1/items") + b"Content-Length: 1000000\r\n\r\n"
    with service.connect() as connection:
        connection.send(head + b" " * 300_000)
        assert refused(connection) == 503
    assert service.server.connections.buffered == 0


def test_a_refused_client_that_keeps_sending_is_cut(service: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    """Input behind an error is ignored up to a limit; then the connection is reset."""
    monkeypatch.setattr(module, "_LINGER_BYTES", 50_000)
    with service.connect() as connection:
        connection.send(b"nonsense\r\n\r\n")
        assert connection.response()[0] == 400
        sent = 0
        with suppress(OSError):
            while sent < 1_000_000:
                connection.send(b"x" * 10_000)
                sent += 10_000
                time.sleep(0.01)
        assert 50_000 <= sent < 1_000_000


def test_a_refused_request_without_a_body_leaves_the_connection_open(listening: Callable[..., Listening]) -> None:
    """A wrong token gets 401, and the next request on the connection is answered."""
    with listening(token="secret").connect() as connection:
        for header, status in ((b"", 401), (b"Authorization: Bearer secret\r\n", 200)):
            connection.send(b"GET /v1/info HTTP/1.1\r\nHost: 127.0.0.1\r\n" + header + b"\r\n")
            assert connection.response()[0] == status


def test_rates_of_many_clients_take_bounded_memory(service: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients whose rate has recovered are forgotten once there are many; one that has not is still refused."""
    monkeypatch.setattr(module, "_CLIENTS", 10)
    connections = module.Connections(service.service.gate, Limits(client_rate=1.0))
    for n in range(100):
        connections.admit(f"client {n}", now=n / 4)
        connections.done(f"client {n}")
    assert len(connections._rates) <= 10
    with pytest.raises(RequestError) as caught:
        connections.admit("client 99", now=100 / 4)
    assert caught.value.status == 429
    assert not connections._busy


def test_requests_at_once_without_a_rate(service: Listening) -> None:
    """A client with two requests in progress may send a third when one of them has ended."""
    connections = module.Connections(service.service.gate, Limits(client_requests=2))
    for _ in range(2):
        connections.admit("a", now=0.0)
    with pytest.raises(RequestError):
        connections.admit("a", now=0.0)
    connections.admit("b", now=0.0)
    connections.done("a")
    connections.admit("a", now=0.0)


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
    ],
)
def test_clients_by_address(address: str, client: str) -> None:
    """A client of IPv6 is its network of 64 bits; an IPv4 address is the same client in both notations."""
    assert module.client_name(address) == client


@pytest.mark.parametrize(("status", "has_length"), [(200, True), (204, False), (304, False), (404, True)])
def test_the_length_of_a_response(status: int, has_length: bool) -> None:
    """Responses that must not have a body have no length either."""
    written = module._written(module.Response(status, [], b"", False), last=False, without_body=False)
    assert written.startswith(b"HTTP/1.1 %d " % status)
    assert (b"content-length: 0\r\n" in written) == has_length


def test_a_second_signal_does_not_wait(listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first signal waits for the request in progress; the second one cuts its connection."""
    service = listening()
    hold = held_search(service, monkeypatch)
    with service.connect() as busy:
        busy.send(GOOD)
        time.sleep(0.2)
        service.server.exit()
        service.thread.join(0.5)
        assert service.thread.is_alive()
        service.server.exit()
        service.thread.join(5)
        assert not service.thread.is_alive()
        hold.set()
        with pytest.raises(OSError):
            busy.read()
