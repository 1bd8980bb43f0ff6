"""From a complete request to its response: token, host and type checks, time limits, the log and the metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from sparring.core.errors import UserError
from sparring.serving.http.schema import MAX_ITEM_KEYS, MAX_KEYS, MAX_LISTS, MAX_QUERY_VALUES, Limits, RequestError
from sparring.serving.http.telemetry import EventLog, Metrics

Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Plain = Callable[[bytes], Awaitable[bytes] | None]  # request body -> response body; None: ask the application
Follow = Callable[[], Awaitable[None] | None]

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz"})  # need no token: health, and the page, which asks for the token
OPEN_PREFIX = "/page/files/"
SLOW_PATHS = frozenset({"/v1/reload", "/v1/items"})  # have Limits.slow_seconds instead of Limits.seconds
GONE = 499  # in the log and the metrics: the client disconnected before its answer
INTERNAL_ERROR = RequestError(500, "internal error; see the log of the service")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: https:; font-src 'self'; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_JSON = (b"content-type", b"application/json")
_SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", POLICY.encode()),
]


class Head:
    """The head of a request: the facts of an ASGI scope, and those that `Gate.check` finds. Requests may share it."""

    has_body = continues = False
    length: int | None = 0  # of the body; None: chunked
    json: bool | None = None  # whether the body is; None if the head does not say

    def __init__(
        self, method: str, path: str, raw_path: bytes, query: bytes, headers: Headers, keep_alive: bool
    ) -> None:
        self.method, self.path, self.raw_path, self.query = method, path, raw_path, query
        self.headers, self.keep_alive = headers, keep_alive


class Request:
    """A request: its head, and its body when that is complete."""

    body = b""
    route = "other"  # in the metrics: ids must not become labels
    error: RequestError | None = None  # the response, if the head ruled the request out
    admitted = last = False  # counted by Connections.admit; the connection closes behind it
    lists = keys = values = 0  # counted by check_parts

    def __init__(self, head: Head, client: str) -> None:
        self.head, self.client = head, client
        self.began = time.perf_counter()


class Response(NamedTuple):
    status: int
    headers: Headers | None  # without the length; None: JSON
    body: bytes
    last: bool = False  # the connection closes behind it


class Gate:
    """The path of every request: `check` its head, `answer` it when its body is complete, `finish` the outcome.

    FastAPI costs more per request than a search does. `plain` has, by path, functions that answer valid queries without
    it. For all others they return None, and the application says what is wrong with them. `hosts` are the names that
    the service answers to; None: any. `follow` is asked before each answer what must be awaited first: changes that
    another worker has published; None: there are no others.

    The service runs it behind `Connections`. It is an ASGI application too, for tests and other servers.
    """

    def __init__(
        self,
        app: App,
        plain: Mapping[str, Plain],
        metrics: Metrics,
        log: EventLog,
        limits: Limits,
        token: str | None = None,
        hosts: Collection[str] | None = None,
        follow: Follow | None = None,
    ) -> None:
        self.follow = follow
        self.app, self.plain, self.metrics, self.log, self.limits = app, plain, metrics, log, limits
        self.token = None if token is None else f"Bearer {token}".encode()
        self.hosts = None if hosts is None else {host.lower().encode() for host in hosts}

    def seconds(self, request: Request) -> float:
        """The time limit of the answer."""
        return self.limits.slow_seconds if request.head.path in SLOW_PATHS else self.limits.seconds

    def check(self, head: Head) -> None:
        """Raise RequestError if the head alone rules the request out."""
        headers = dict(head.headers)
        get = headers.get
        host, length, content_type = get(b"host"), get(b"content-length"), get(b"content-type")
        head.json = None if content_type is None else _is_json(content_type)
        if b"transfer-encoding" in headers:
            head.has_body, head.length = True, None
        elif length is not None and length != b"0":
            head.has_body = True
            if not length.isdigit() or len(length) > 15 or int(length) > self.limits.body:
                raise self.too_large()
            head.length = int(length)
        if len(headers) < len(head.headers) and sum(name == b"host" for name, _ in head.headers) > 1:
            raise RequestError(400, "more than one Host header")
        if b"expect" in headers:
            head.continues = headers[b"expect"].lower() == b"100-continue"
        if self.hosts is not None:
            if host is not None and _without_port(host) not in self.hosts:
                raise RequestError(421, "unknown host name: give the names that the service answers to by --allow-host")
            origin, site = get(b"origin"), get(b"sec-fetch-site")
            if origin is not None or site is not None:
                self._check_site(head.method, host or b"", origin, site)
        path, token = head.path, get(b"authorization")
        if (
            self.token is not None
            and path not in OPEN_PATHS
            and not path.startswith(OPEN_PREFIX)
            and not hmac.compare_digest(token or b"", self.token)
        ):
            raise RequestError(401, "missing or wrong token: send the header Authorization: Bearer TOKEN")

    def _check_site(self, method: str, host: bytes, origin: bytes | None, site: bytes | None) -> None:
        """Refuse what a page of another site makes a browser send: it could reach a service without a token."""
        assert self.hosts is not None
        if origin is not None:
            name = origin.partition(b"://")[2].lower()
            published = _without_port(name) in self.hosts - _LOOPBACK
            foreign = name != host.lower() and not published
        else:
            foreign = site not in (b"same-origin", b"none") and method not in ("GET", "HEAD")
        if foreign:
            raise RequestError(403, "requests of pages on other sites are refused; see --allow-host")

    def check_parts(self, request: Request, chunk: bytes) -> None:
        """Raise RequestError if the body, of which `chunk` is the next part, has too many lists, objects and keys."""
        data = np.frombuffer(chunk, np.uint8)  # counts several times as fast as bytes do
        request.lists += _count(data == ord("[")) + _count(data == ord("{"))
        items = request.head.path == "/v1/items"
        keys, values = (MAX_ITEM_KEYS, self.limits.body) if items else (MAX_KEYS, MAX_QUERY_VALUES)
        if not items:
            request.values += _count(data == ord(","))
        if _count(data == ord(":")) > keys - request.keys:  # a key is a string before a colon or a space
            ends, behind = data[:-1] == ord('"'), data[1:]
            request.keys += _count(ends & ((behind == ord(":")) | (behind <= ord(" "))))
        if request.lists > MAX_LISTS or request.keys > keys or request.values > values:
            limit = f"{MAX_LISTS:,} lists and objects, {keys:,} keys and {values:,} values"
            raise RequestError(422, f"the JSON of the request exceeds the limit of {limit}")

    def answer(self, request: Request) -> asyncio.Future[Any]:
        """Start on a complete request that passed `check`: the future body of a 200, or the future Response."""
        if self.follow is not None and (behind := self.follow()) is not None:
            return asyncio.get_running_loop().create_task(self._answer_after(behind, request))
        head = request.head
        if not head.json and head.method in _WRITES and (request.body or head.json is not None):
            raise RequestError(415, "send JSON with the header Content-Type: application/json")
        plain = self.plain.get(head.path) if head.method == "POST" else None
        if plain is not None:
            request.route = head.path
            answer = plain(request.body)
            if answer is not None:
                return asyncio.ensure_future(answer)
        return asyncio.get_running_loop().create_task(self._ask_application(request))

    async def _answer_after(self, behind: Awaitable[None], request: Request) -> Any:
        await behind
        return await self.answer(request)

    def finish(self, request: Request, outcome: Any) -> Response:
        """The response to an outcome of `answer`, or to an exception; counted and logged."""
        if isinstance(outcome, bytes):
            response = Response(200, None, outcome)
        elif isinstance(outcome, Response):
            response = outcome
        else:
            response = error_response(self._request_error(request, outcome))
        status, seconds = response.status, time.perf_counter() - request.began
        self.metrics.count(request.route, status, seconds)
        if self.log.requests or status >= 500:
            self.log.request(request.head.method, request.head.path, status, seconds, request.client)
        return response

    def _request_error(self, request: Request, error: BaseException) -> RequestError:
        if isinstance(error, RequestError):
            return error
        if isinstance(error, UserError):
            return RequestError(422, " ".join(str(error).split()))
        if isinstance(error, TimeoutError):
            return RequestError(503, f"no answer within {self.seconds(request):g} seconds; try again later")
        if isinstance(error, asyncio.CancelledError):
            return RequestError(GONE, "the client disconnected")
        trace = "".join(traceback.format_exception(error))
        self.log("fault", method=request.head.method, path=request.head.path, trace=trace)
        return INTERNAL_ERROR

    async def _ask_application(self, request: Request) -> Response:
        """The response of the application, with the security headers that it lacks."""
        head = request.head
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "http",
            "method": head.method,
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "root_path": "",
            "headers": list(head.headers),
            "client": (request.client, 0),
            "server": None,
            "state": {},
        }
        messages = [{"type": "http.request", "body": request.body, "more_body": False}]
        status, headers, body = 500, list[tuple[bytes, bytes]](), list[bytes]()

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], [h for h in message["headers"] if h[0] != b"content-length"]
            else:
                body.append(message.get("body", b""))

        try:
            await self.app(scope, receive, send)
        finally:
            request.route = getattr(scope.get("route"), "path", request.route)
        present = {name for name, _ in headers}
        headers += (header for header in _SECURITY_HEADERS if header[0] not in present)
        return Response(status, headers, b"".join(body), (b"connection", b"close") in headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The gate as an ASGI application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        raw, query, headers = scope.get("raw_path") or b"", scope["query_string"], list(scope["headers"])
        client = (scope.get("client") or ("",))[0]
        request = Request(Head(scope["method"], scope["path"], raw, query, headers, True), client)
        try:
            self.check(request.head)
            request.body = await self._read_body(receive)
            self.check_parts(request, request.body)
            answer = self.answer(request)
            await asyncio.wait({answer}, timeout=self.seconds(request))
            if not answer.done():
                answer.cancel()
                raise TimeoutError
            outcome: Any = answer.exception() or answer.result()
        except Exception as error:
            outcome = error
        status, given, body, _ = self.finish(request, outcome)
        given = [*([_JSON] if given is None else given), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": given})
        await send({"type": "http.response.body", "body": body})

    async def _read_body(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError(GONE, "the client disconnected")
            body += message.get("body", b"")
            if len(body) > self.limits.body:
                raise self.too_large()
            if not message.get("more_body"):
                return bytes(body)

    def too_large(self) -> RequestError:
        return RequestError(413, f"the request body exceeds the limit of {self.limits.body:,} bytes")


_WRITES = frozenset({"POST", "PUT", "DELETE", "PATCH"})
_LOOPBACK = frozenset({b"127.0.0.1", b"localhost", b"[::1]"})


def error_response(error: RequestError) -> Response:
    headers = [_JSON, *_SECURITY_HEADERS]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status in (429, 503):
        headers.append((b"retry-after", b"1"))
    return Response(error.status, headers, orjson.dumps({"detail": error.message}))


def _count(flags: np.ndarray) -> int:
    return int(np.count_nonzero(flags))


def _without_port(host: bytes) -> bytes:
    return (host.partition(b"]")[0] + b"]" if host.startswith(b"[") else host.partition(b":")[0]).lower()


def _is_json(content_type: bytes) -> bool:
    media = content_type.partition(b";")[0].strip().lower()
    return media == b"application/json" or (media.startswith(b"application/") and media.endswith(b"+json"))
