"""HTTP/1.1 over asyncio: limits and deadlines of a connection, and of all connections together.

ASGI servers hand a request to the application when its head is complete, so an application can limit neither heads nor
silent connections, and pays for a task and two writes per request. Here llhttp (httptools) parses, the gate answers
complete requests, and one sweep over all connections enforces every deadline: a timer per request would cost more than
some searches do.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections import Counter, deque
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools

from sparring.serving.http.gate import Gate, Head, Request, Response
from sparring.serving.http.schema import Limits, RequestError

try:
    import resource
except ImportError:  # Windows has no limit that a process must ask for
    resource = None  # type: ignore[assignment]

SWEEP_SECONDS = 0.1
WAITING, HEAD, BODY = range(3)  # the parser's position: before, in the head of, or in the body of a request
_TINY_BODY = 16 * 2**10  # bodies up to this size are parsed without a look at their parts
_HEADS, _HEAD = 1024, 4096  # heads that are remembered, and the bytes of the largest
_SMALL_BODY = 64 * 2**10  # bodies up to this size do not count towards Limits.buffered
_RATE, _RATE_AFTER = 1024, 5.0  # least bytes per second of a body, once it has taken this many seconds
_PIPELINED = 64  # requests that may wait behind another on their connection
_LINGER = 2.0  # seconds in which a client may read a refusal before its connection is cut
_LINGER_BYTES = 2**20  # bytes that it may send meanwhile
_STOP_IDLE, _STOP_UPLOAD = 0.5, 5.0  # seconds that idle connections and unfinished requests get when the service stops
_OTHER_FILES = 128  # descriptors kept for runs, stores and logs
_CLIENTS = 10_000  # addresses whose rate is remembered
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
_STATUS_LINES = {each.value: b"HTTP/1.1 %d %s\r\n" % (each.value, each.phrase.encode()) for each in HTTPStatus}


class Connections:
    """All connections of a service: how many there are, how long they may take, and how much memory their bodies hold.

    Where there is no room for a new connection, the one that has been idle for the longest is cut.
    """

    def __init__(self, gate: Gate, limits: Limits) -> None:
        self.gate, self.limits = gate, limits
        self.most = min(limits.connections, max(16, _open_files() - _OTHER_FILES))
        self.open: dict[Connection, None] = {}  # oldest first
        self.buffered = 0
        self.stopped: float | None = None  # since when
        self._heads: dict[bytes, Head] = {}  # clients repeat them, and to read one costs as much as the rest of HTTP
        self._of_client: Counter[str] = Counter()
        self._busy: Counter[str] = Counter()
        self._rates: dict[str, tuple[float, float]] = {}  # client -> (requests it may send now, time of the last one)

    def add(self, connection: Connection) -> None:
        self.open[connection] = None
        client = connection.client
        self._of_client[client] += 1
        if self._of_client[client] > (self.limits.client_connections or self.most):
            self._make_room([each for each in self.open if each.client == client], connection)
        elif len(self.open) > self.most:
            self._make_room(self.open, connection)

    def remove(self, connection: Connection) -> None:
        if connection in self.open:
            del self.open[connection]
            self._of_client[connection.client] -= 1
            if not self._of_client[connection.client]:
                del self._of_client[connection.client]

    def _make_room(self, among: Any, newest: Connection) -> None:
        idle = [each for each in among if each.request is None and each is not newest]
        longest = min(idle, key=lambda each: (each.reading, each.since), default=None)
        if longest is not None:
            longest.abort()
        else:
            newest.refuse(RequestError(503, "too many connections, all of them busy; try again later"))

    def hold(self, connection: Connection, size: int) -> None:
        """Count `size` more bytes of a body; beyond the limit, the oldest unfinished upload is cut."""
        self.buffered += size
        connection.held += size
        while self.buffered > self.limits.buffered:
            uploads = [each for each in self.open if each.held and each.request is None and each is not connection]
            if not uploads:
                raise RequestError(503, "too many large requests at once; try again later")
            min(uploads, key=lambda each: each.since).refuse(RequestError(408, "the upload took too long"))

    def release(self, connection: Connection) -> None:
        self.buffered -= connection.held
        connection.held = 0

    def admit(self, client: str, now: float) -> None:
        """Count a request that begins; raise RequestError if its client sends too many."""
        most, rate = self.limits.client_requests, self.limits.client_rate
        if most is not None and self._busy[client] >= most:
            raise RequestError(429, f"at most {most} requests of one client are answered at once; try again later")
        if rate is not None:
            allowed, last = self._rates.get(client, (max(rate, 1.0), now))
            allowed = min(max(rate, 1.0), allowed + (now - last) * rate)
            if allowed < 1:
                raise RequestError(429, f"a client may send {rate:g} requests per second; try again later")
            if len(self._rates) >= _CLIENTS:
                self._rates = {each: then for each, then in self._rates.items() if now - then[1] < 1 / rate}
            self._rates[client] = allowed - 1, now
        self._busy[client] += 1

    def done(self, client: str) -> None:
        """Count a request that ends, after `admit`."""
        self._busy[client] -= 1
        if not self._busy[client]:
            del self._busy[client]

    def head(self, data: bytes) -> tuple[Head, bytes] | None:
        """(head, body) of `data` if it is one whole request, by a head that was read and accepted before."""
        end = data.find(b"\r\n\r\n") + 4
        head = self._heads.get(data[:end])
        return None if head is None or head.length != len(data) - end else (head, data[end:])

    def remember(self, head: Head, data: bytes) -> None:
        """Remember an accepted head; `data` was one whole request."""
        end = data.find(b"\r\n\r\n") + 4
        if head.length == len(data) - end and end <= _HEAD and not head.continues:
            if len(self._heads) >= _HEADS:
                self._heads.clear()
            self._heads[data[:end]] = head

    def stop(self, now: float) -> None:
        """Answer the requests that have arrived and close every connection behind its last answer."""
        self.stopped = now

    def sweep(self, now: float) -> None:
        """End whatever has exceeded its time."""
        for each in list(self.open):
            if now >= each.due or (each.request is None and self._overdue(each, now)):
                each.late()

    def _overdue(self, each: Connection, now: float) -> bool:
        if self.stopped is not None and not each.blocked:
            return now >= self.stopped + (_STOP_IDLE if each.reading == WAITING else _STOP_UPLOAD)
        elapsed = now - each.since
        return each.reading == BODY and elapsed > _RATE_AFTER and each.size < _RATE * elapsed


class Connection(asyncio.Protocol):
    """One client. Its requests are answered one after another; `due` is the time at which it is cut or told so."""

    def __init__(self, everyone: Connections, loop: asyncio.AbstractEventLoop) -> None:
        self.everyone, self.gate, self.limits, self.time = everyone, everyone.gate, everyone.limits, loop.time
        self.limited = self.limits.client_requests is not None or self.limits.client_rate is not None
        self.parser: Any = httptools.HttpRequestParser(self)
        self.client = ""
        self.since = self.due = math.inf
        self.held = 0  # bytes counted towards Limits.buffered
        self.paused = False  # the transport does not read
        self.blocked = self.discarding = False  # the client does not read; the rest of its input is ignored
        # the request that is being answered, those behind it
        self.request: Request | None = None
        self.answer: asyncio.Future[Any] | None = None
        self.queue: deque[Request] = deque()
        # the request that is being read
        self.reading, self.begun, self.chunk, self.fed, self.size = WAITING, 0, 0, 0, 0
        self.url, self.headers, self.body = b"", list[tuple[bytes, bytes]](), list[bytes]()
        self.head: Head | None = None  # the last one that was accepted
        self.incoming: Request | None = None
        self.error: RequestError | None = None

    # called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        peer = transport.get_extra_info("peername")
        self.client = client_name(peer[0]) if peer else ""
        self.since = self.time()
        self.due = self.since + self.limits.head_seconds
        self.everyone.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.everyone.remove(self)
        self.everyone.release(self)
        self.queue.clear()
        self.discarding, self.parser = True, None  # the parser refers to this connection
        if self.request is not None:
            self._end(asyncio.CancelledError())

    def data_received(self, data: bytes) -> None:
        if self.discarding:
            self.fed += len(data)
            if self.fed > _LINGER_BYTES:
                self.abort()
            return
        begun, waiting, self.chunk = self.begun, self.reading == WAITING, len(data)
        alone = waiting and self.request is None and self.chunk <= _TINY_BODY
        if alone and (read := self.everyone.head(data)) is not None:
            request = Request(read[0], self.client)
            request.body = read[1]
            self._complete(request)
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # no other protocol is spoken here: answer the request, then close
            self.discarding = True
            if self.reading != WAITING:
                self.refuse(_malformed())
        except httptools.HttpParserError:
            self.refuse(self.error or _malformed())
        else:
            if self.reading != WAITING and self.begun == begun + waiting:  # all of `data` belongs to one request
                self.fed += len(data)
                if self.reading == HEAD and self.fed > self.limits.head:
                    self.refuse(self._head_too_large())
                elif self.fed > 2 * self.limits.body + self.limits.head:  # chunks and trailers count too
                    self.refuse(self.gate.too_large())
            elif alone and self.begun == begun + 1 and self.head is not None:
                self.everyone.remember(self.head, data)

    def pause_writing(self) -> None:
        self.blocked = True
        self.due = self.time() + self.limits.send_seconds

    def resume_writing(self) -> None:
        self.blocked = False
        if self.request is None:
            self._next()

    # called by the parser; an error raised here ends the parsing

    def on_message_begin(self) -> None:
        self.reading, self.begun = HEAD, self.begun + 1
        self.url, self.headers, self.body = b"", [], []
        self.fed = self.size = 0
        if self.request is None:
            self._wait(self.limits.head_seconds)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= self.limits.headers:
            self._fail(self._head_too_large())
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        headers, self.headers = self.headers, []  # trailers come later and are ignored
        if (
            self.fed + self.chunk > self.limits.head
            and len(self.url) + sum(len(name) + len(value) + 4 for name, value in headers) > self.limits.head
        ):
            self._fail(self._head_too_large())
        path, _, query = self.url.partition(b"?")
        if not path.startswith(b"/") and path != b"*":  # http://host/path
            try:
                path = httptools.parse_url(path).path or b"/"
            except httptools.HttpParserInvalidURLError:
                self._fail(_malformed())
        if not path.isascii():
            self._fail(_malformed())
        text = path.decode()
        head = Head(
            self.parser.get_method().decode(),
            unquote(text) if "%" in text else text,
            path,
            query,
            headers,
            self.parser.should_keep_alive()
            and self.parser.get_http_version() != "1.0"
            and not self.parser.should_upgrade(),
        )
        request = self.incoming = Request(head, self.client)
        self.reading, self.head = BODY, None
        try:
            self.gate.check(head)
            self.head = head
        except RequestError as error:
            if head.has_body:
                self._fail(error)
            request.error = error
        if self.request is None:
            self._wait(self.limits.body_seconds)
            if head.continues:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size > self.limits.body:
            self._fail(self.gate.too_large())
        if self.size > _TINY_BODY and self.incoming is not None:
            try:
                self.gate.check_parts(self.incoming, chunk)
                if self.size > _SMALL_BODY:
                    self.everyone.hold(self, len(chunk))
            except RequestError as error:
                self._fail(error)
        self.body.append(chunk)

    def on_message_complete(self) -> None:
        self.reading = WAITING
        request, self.incoming = self.incoming, None
        assert request is not None
        request.body = self.body[0] if len(self.body) == 1 else b"".join(self.body)
        self.body = []
        self._complete(request)

    # answers

    def _complete(self, request: Request) -> None:
        """Answer a request as soon as those before it are answered."""
        if self.request is None and not self.blocked:
            self._begin(request)
            return
        if len(self.queue) >= _PIPELINED and request.error is None:
            self._fail(RequestError(429, f"more than {_PIPELINED} requests are waiting on this connection"))
        self.queue.append(request)
        if not self.paused:
            self.paused = True
            self.transport.pause_reading()

    def _begin(self, request: Request) -> None:
        now = self.time()
        self.request, self.due = request, now + self.gate.seconds(request)
        if request.error is not None:
            self._respond(request.error)
            return
        try:
            if self.limited:
                self.everyone.admit(self.client, now)
                request.admitted = True
            self.answer = self.gate.answer(request)
        except Exception as error:
            self._respond(error)
        else:
            self.answer.add_done_callback(self._answered)

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if answer is self.answer:
            self._respond(error or answer.result())

    def _end(self, outcome: Any) -> Response:
        """Forget the request and its work; its outcome as a response."""
        request, answer, self.request, self.answer = self.request, self.answer, None, None
        assert request is not None
        if answer is not None and not answer.done():
            answer.cancel()
        if request.admitted:
            self.everyone.done(self.client)
        return self.gate.finish(request, outcome)

    def _respond(self, outcome: Any) -> None:
        request, response = self.request, self._end(outcome)
        assert request is not None
        if self.held:
            self.everyone.release(self)
        stops = self.everyone.stopped is not None and not self.queue and self.reading == WAITING
        last = stops or request.last or not request.head.keep_alive or response.last
        self.transport.write(_written(response, last, request.head.method == "HEAD"))
        if last:
            self._close()
        else:
            self._next()

    def _next(self) -> None:
        if self.blocked:  # until the client has read enough of the last answer
            return
        if self.queue:
            self._begin(self.queue.popleft())
            return
        self._read_on()
        self._wait((self.limits.idle_seconds, self.limits.head_seconds, self.limits.body_seconds)[self.reading])

    def _read_on(self) -> None:
        if self.paused:
            self.paused = False
            self.transport.resume_reading()

    def _wait(self, seconds: float) -> None:
        self.since = self.time()
        self.due = self.since + seconds

    # ends

    def refuse(self, error: RequestError) -> None:
        """Ignore all further input, and close the connection behind this error."""
        request = self.incoming or Request(Head("", "", b"", b"", [], False), self.client)
        self.incoming, self.body, self.reading, self.discarding, self.fed = None, [], WAITING, True, 0
        error.__traceback__ = self.error = None  # its frames refer to this connection
        request.error, request.last = error, True
        if self.request is None:
            self.everyone.release(self)
        self._complete(request)

    def late(self) -> None:
        """Its time is over."""
        if self.blocked or self.transport.is_closing() or (self.discarding and self.request is None):
            self.abort()
        elif self.request is not None:
            self._respond(TimeoutError())
        elif self.reading == WAITING:
            self.transport.close()
        else:
            self.refuse(RequestError(408, "the request did not arrive in time"))

    def abort(self) -> None:
        self.transport.abort()
        self.everyone.remove(self)  # connection_lost comes later

    def _close(self) -> None:
        self.queue.clear()
        self.due = self.time() + (_LINGER if self.discarding else self.limits.send_seconds)
        if self.discarding and self.transport.can_write_eof():
            self._read_on()  # to close on unread input could cost the client the answer
            self.transport.write_eof()
        else:
            self.transport.close()

    def _fail(self, error: RequestError) -> None:
        self.error = error
        raise error

    def _head_too_large(self) -> RequestError:
        most = f"{self.limits.headers} headers and {self.limits.head:,} bytes"
        return RequestError(431, f"the head of the request exceeds the limit of {most}")


def _open_files() -> int:
    """Files and sockets that this process may have open."""
    return 2**31 if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _malformed() -> RequestError:
    return RequestError(400, "malformed HTTP request")


def _written(response: Response, last: bool, without_body: bool) -> bytes:
    """A response as bytes, to be sent in one piece."""
    status, headers, body = response.status, response.headers, response.body
    if status == 200 and headers is None:
        head = _OK % len(body)
    else:
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        lines += [b"%s: %s\r\n" % header for header in headers or ()]
        if status not in (204, 304):
            lines.append(b"content-length: %d\r\n" % len(body))
        head = b"".join(lines)
    return b"".join((head, b"connection: close\r\n\r\n" if last else b"\r\n", b"" if without_body else body))


def client_name(address: str) -> str:
    """The address by which a client is known; of IPv6, the network of 64 bits that one client usually has."""
    if ":" not in address:
        return address
    full = ipaddress.IPv6Address(address.partition("%")[0])
    return str(full.ipv4_mapped or ipaddress.IPv6Network((full, 64), strict=False))
