"""The ASGI entry point: size, token, host and time limits, the log and the metrics, in front of the application."""

from __future__ import annotations

import asyncio
import hmac
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

import orjson

from sparring.core.errors import UserError
from sparring.serving.http.schema import Limits, RequestError
from sparring.serving.http.telemetry import EventLog, Metrics

Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]
Plain = Callable[[bytes], Awaitable[bytes] | None]  # request body -> response body; None: ask the application

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz"})  # need no token: health, and the page, which asks for the token
OPEN_PREFIX = "/page/files/"
SLOW_PATHS = frozenset({"/v1/reload", "/v1/items"})  # have no time limit
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


class Gate:
    """The path of every request: check its head, read its body, answer it within the time limit, count and log it.

    FastAPI costs more per request than a search does. `plain` has, by path, functions that answer the most frequent
    requests (known users or items, no filters) without it. For other requests, malformed ones included, they return
    None and the application answers.
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
    ) -> None:
        self.app, self.plain, self.metrics, self.log, self.limits = app, plain, metrics, log, limits
        self.token = None if token is None else f"Bearer {token}".encode()
        self.hosts = None if hosts is None else {host.lower().encode() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, method, path, response = time.perf_counter(), scope["method"], scope["path"], ResponseRecorder(send)
        try:
            self._check_head(method, path, scope["headers"])
            async with asyncio.timeout(None if path in SLOW_PATHS else self.limits.seconds):
                body = await self._read_body(receive)
                plain = self.plain.get(path) if method == "POST" else None
                if plain:
                    response.route = path
                answer = plain(body) if plain else None
                if answer is None:
                    await self.app(scope, _replay(body, receive), response)
                else:
                    await response.send_json(200, await answer)
        except RequestError as error:
            await response.send_error(error)
        except UserError as error:
            await response.send_error(RequestError(422, " ".join(str(error).split())))
        except TimeoutError:
            await response.send_error(
                RequestError(503, f"no answer within {self.limits.seconds:g} seconds; try again later")
            )
        except Exception:
            self.log("fault", method=method, path=path, trace=traceback.format_exc())
            await response.send_error(INTERNAL_ERROR)
        finally:
            seconds = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", response.route)
            self.metrics.count(route, response.status, seconds)
            if self.log.requests or response.status >= 500:
                client = (scope.get("client") or ("", 0))[0]
                milliseconds = round(seconds * 1e3, 3)
                self.log("request", method=method, path=path, status=response.status, ms=milliseconds, client=client)

    def _check_head(self, method: str, path: str, headers: Headers) -> None:
        """Raise RequestError if the headers alone rule the request out."""
        length = token = host = content_type = None
        for name, value in headers:
            if name == b"content-length":
                length = value
            elif name == b"authorization":
                token = value
            elif name == b"host":
                host = value
            elif name == b"content-type":
                content_type = value
        if self.hosts is not None and host is not None and _without_port(host) not in self.hosts:
            raise RequestError(421, "unknown host name: start the service with --host and the address that you use")
        if (
            self.token is not None
            and path not in OPEN_PATHS
            and not path.startswith(OPEN_PREFIX)
            and not hmac.compare_digest(token or b"", self.token)
        ):
            raise RequestError(401, "missing or wrong token: send the header Authorization: Bearer TOKEN")
        if length is not None and (not length.isdigit() or int(length) > self.limits.body):
            raise self._too_large()
        if method in ("POST", "PUT", "DELETE", "PATCH") and content_type is not None and not _is_json(content_type):
            raise RequestError(415, "send JSON with the header Content-Type: application/json")

    async def _read_body(self, receive: Receive) -> bytes:
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError(400, "the client disconnected")
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self.limits.body:
                raise self._too_large()
            chunks.append(chunk)
            if not message.get("more_body"):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _too_large(self) -> RequestError:
        return RequestError(413, f"the request body exceeds the limit of {self.limits.body:,} bytes")


class ResponseRecorder:
    """Sends a response, adds the security headers to those of the application, and records status and route."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status, self.started, self.route = 500, False, "other"

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.started = message["status"], True
            present = {name for name, _ in message["headers"]}
            missing = (header for header in _SECURITY_HEADERS if header[0] not in present)
            message["headers"] = [*message["headers"], *missing]
        await self._send(message)

    async def send_json(self, status: int, body: bytes, headers: Headers = ()) -> None:
        self.status, self.started = status, True
        headers = [_JSON, (b"content-length", b"%d" % len(body)), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def send_error(self, error: RequestError) -> None:
        if not self.started:  # too late to change a response that has started
            body, headers = error_response(error)
            await self.send_json(error.status, body, [*headers, *_SECURITY_HEADERS])


def error_response(error: RequestError) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """(body, headers other than type and length) of an error."""
    headers = []
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status in (413, 421):  # the rest of the request is not read
        headers.append((b"connection", b"close"))
    if error.status == 503:
        headers.append((b"retry-after", b"1"))
    return orjson.dumps({"detail": error.message}), headers


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body that was already read."""
    sent = False

    async def replay() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _without_port(host: bytes) -> bytes:
    return (host.partition(b"]")[0] + b"]" if host.startswith(b"[") else host.partition(b":")[0]).lower()


def _is_json(content_type: bytes) -> bool:
    media = content_type.partition(b";")[0].strip().lower()
    return media == b"application/json" or (media.startswith(b"application/") and media.endswith(b"+json"))
