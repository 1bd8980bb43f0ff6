"""The short way from a connection to a search: plain questions are read, handed over and answered without a task of their own.

What the application does for every request costs more than some searches do. So a connection looks first whether what came in is one whole
`POST /v1/recommend` or `/v1/similar` about known users or items, without filters. If so, the search is asked for at once, and its answer
written when it is there. Everything else goes the ordinary way, errors included: the application says what is wrong.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

import httptools
from pydantic import ValidationError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sparring.serving.http.gate import refusal
from sparring.serving.http.limits import Refused
from sparring.serving.http.schema import Recommend, Similar
from sparring.serving.http.search import Ask

if TYPE_CHECKING:
    from sparring.serving.http.app import Service

Question = type[Recommend] | type[Similar]
QUESTIONS: dict[bytes, Question] = {b"/v1/recommend": Recommend, b"/v1/similar": Similar}
_BEGINS = tuple(b"POST %s HTTP/1.1\r\n" % path for path in QUESTIONS)
_HEADS, _HEAD, _BODY = (
    1000,
    2000,
    65_536,
)  # heads that are remembered, and bytes of the longest one; of the longest body
_OTHERWISE = {
    b"transfer-encoding",
    b"expect",
    b"upgrade",
    b"x-forwarded-for",
    b"x-forwarded-proto",
}  # uvicorn knows what these mean
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"


class Shortcut:
    """What the connections of a service share: the heads of requests that were read before, and the requests that wait.

    A client sends the same head again and again, so it is read once, by the parser that reads all others, and then looked up.
    """

    def __init__(self, service: Service) -> None:
        self.gate, self.plain, self.submit = service.gate, service.answering.plain, service.searcher.submit
        self.waiting: dict[Connection, float] = {}  # since when
        self._seconds = service.limits.seconds
        self._heads: dict[bytes, tuple[Question, int]] = {}
        self._looking = False

    def head(self, head: bytes) -> tuple[Question, int] | None:
        """(what is asked, bytes of the body) of a request that is let in; None where the ordinary way has to see to it."""
        known = self._heads.get(head)
        if known is None and len(head) <= _HEAD:
            known = self._read(head)
            if known is not None:
                if len(self._heads) >= _HEADS:
                    self._heads.clear()
                self._heads[head] = known
        return known

    def _read(self, head: bytes) -> tuple[Question, int] | None:
        read = _Head()
        parser = httptools.HttpRequestParser(read)
        try:
            parser.feed_data(head + b"\r\n\r\n")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        headers = dict(read.headers)
        length, asked = headers.get(b"content-length", b""), QUESTIONS.get(read.url)
        if not read.whole or asked is None or not length.isdigit() or not 0 < int(length) <= _BODY:
            return None
        if not parser.should_keep_alive() or _OTHERWISE & headers.keys():
            return None
        try:
            self.gate.admit("POST", read.url.decode(), read.headers)
        except Refused:
            return None
        return asked, int(length)

    def question(self, asked: Question, body: bytes) -> Ask | None:
        """The search that answers it; None where the ordinary way has to see to it."""
        try:
            return self.plain(asked.model_validate_json(body))
        except (ValidationError, ValueError, Refused):
            return None

    def watch(self, connection: Connection) -> None:
        """Keep the time of its request. To look at all of them now and then costs less than a timer for each."""
        self.waiting[connection] = connection.began
        if not self._looking:
            self._look()

    def _look(self) -> None:
        late = time.perf_counter() - self._seconds
        for connection in [connection for connection, began in self.waiting.items() if began <= late]:
            connection.late()
        self._looking = bool(self.waiting)
        if self._looking:
            asyncio.get_running_loop().call_later(self._seconds / 40, self._look)


class _Head:
    """What the parser finds in the head of a request."""

    def __init__(self) -> None:
        self.url, self.headers, self.whole = b"", list[tuple[bytes, bytes]](), False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.whole = True


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with the short way. One request at a time: what comes in before the answer is out is kept for later."""

    shortcut: ClassVar[Shortcut]

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.inside = False  # in the midst of a request that goes the ordinary way
        self.part = b""  # the beginning of one that may not have to
        self.asked: Ask | None = None  # the search that its answer waits for
        self.request = self.later = b""  # what asked for it; what came in since
        self.began, self.last = 0.0, False

    def on_message_begin(self) -> None:
        self.inside = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self.inside = False
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self.asked is not None:
            self.later += data
            self.flow.pause_reading()
            return
        data, self.part = self.part + data, b""
        if self.inside or not data.startswith(_BEGINS) or not self._idle() or not self._short(data):
            self._ordinary(data)

    def _idle(self) -> bool:
        """Nothing of an earlier request is left to be sent."""
        return (self.cycle is None or self.cycle.response_complete) and not self.flow.write_paused

    def _ordinary(self, data: bytes) -> None:
        self.shortcut.waiting.pop(self, None)
        if data:
            super().data_received(data)

    def _short(self, data: bytes) -> bool:
        """Ask for the search, or wait for the rest of the request; False where it has to go the ordinary way."""
        head, end, body = data.partition(b"\r\n\r\n")
        known = self.shortcut.head(head) if end else None
        if known is None or len(body) > known[1]:
            return False
        if self not in self.shortcut.waiting:
            self.began = time.perf_counter()
        if len(body) < known[1]:
            self.part = data
            self.shortcut.watch(self)
            return True
        asked = self.shortcut.question(known[0], body)
        if asked is None:
            return False
        self._unset_keepalive_if_required()
        self.asked, self.request = asked, data
        self.shortcut.watch(self)
        try:
            self.shortcut.submit(asked, self._answered)
        except Refused as refused:
            self._refuse(refused)
        return True

    def _answered(self, answer: bytes | Exception) -> None:
        if isinstance(answer, bytes):
            self._send(200, _OK % len(answer), answer)
        else:  # the same fault is met again there, and told
            self._ordinary(self._ended())
            self._go_on()

    def late(self) -> None:
        """The time for an answer is over; that for the rest of a request begins anew on the ordinary way."""
        if self.asked is not None:
            self._refuse(self.shortcut.gate.late())
        else:
            data, self.part = self.part, b""
            self._ordinary(data)

    def _refuse(self, refused: Refused) -> None:
        headers, body = refusal(refused)
        head = b"HTTP/1.1 %d %s\r\n" % (refused.status, HTTPStatus(refused.status).phrase.encode())
        self._send(refused.status, head + b"".join(b"%s: %s\r\n" % header for header in headers), body)

    def _send(self, status: int, head: bytes, body: bytes) -> None:
        request = self._ended()
        path = request[5 : request.index(b" ", 5)].decode()
        if not self.transport.is_closing():
            self.transport.write(b"".join((head, b"connection: close\r\n\r\n" if self.last else b"\r\n", body)))
            if self.last:
                self.transport.close()
        self.shortcut.gate.answered(
            "POST", path, path, status, time.perf_counter() - self.began, self.client[0] if self.client else ""
        )
        self.on_response_complete()
        self._go_on()

    def _ended(self) -> bytes:
        """Nothing is asked for any more; the request that was."""
        if self.asked is not None:
            self.asked.given_up = True
        request, self.asked, self.request = self.request, None, b""
        self.shortcut.waiting.pop(self, None)
        return request

    def _go_on(self) -> None:
        if self.later and not self.transport.is_closing():
            data, self.later = self.later, b""
            self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close as soon as what has begun is answered."""
        if self.asked is not None:
            self.last = True
            return
        data, self.part = self.part, b""
        self._ordinary(data)
        super().shutdown()
