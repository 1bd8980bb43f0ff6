"""What every request passes first: size, token, host and time limits, the log and the counters."""

from __future__ import annotations

import hmac
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

import orjson

from sparring.serving.http.access_log import Log
from sparring.serving.http.deadlines import Deadlines
from sparring.serving.http.limits import Limits, Refused
from sparring.serving.http.metrics import Metrics

Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

OPEN = frozenset({"/", "/healthz", "/readyz"})  # without a token: state, and the page, which asks for it
OPEN_UNDER = "/page/files/"
FAULT = Refused(500, "the service has a fault: its log says more")
_JSON = (b"content-type", b"application/json")
_SNIFF = (b"x-content-type-options", b"nosniff")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: https:; font-src 'self'; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_ALWAYS = [_SNIFF, (b"referrer-policy", b"no-referrer"), (b"content-security-policy", POLICY.encode())]


class Gate:
    """ASGI around the application."""

    def __init__(
        self,
        app: App,
        metrics: Metrics,
        log: Log,
        limits: Limits,
        token: str | None = None,
        hosts: Collection[str] | None = None,
        slow_paths: Collection[str] = ("/v1/reload", "/v1/items"),
    ) -> None:
        self.app, self.metrics, self.log, self.limits = app, metrics, log, limits
        self.token = None if token is None else f"Bearer {token}".encode()
        self.hosts = None if hosts is None else {host.lower().encode() for host in hosts}
        self.slow_paths = frozenset(slow_paths)
        self.deadlines = Deadlines()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, path, told = time.perf_counter(), scope["path"], _Told(send)
        try:
            self.admit(scope["method"], path, scope["headers"])
            with self.deadlines.within(None if path in self.slow_paths else self.limits.seconds):
                body = await self._body(receive)
                await self.app(scope, _replay(body, receive), told)
        except Refused as refused:
            await _refuse(told, refused)
        except TimeoutError:
            await _refuse(told, self.late())
        except Exception:
            self.log.say("fault", method=scope["method"], path=path, trace=traceback.format_exc())
            await _refuse(told, FAULT)
        finally:
            route = getattr(scope.get("route"), "path", None) or "other"
            client = scope.get("client") or ("", 0)
            self.answered(scope["method"], path, route, told.status, time.perf_counter() - began, client[0])

    def answered(self, method: str, path: str, route: str, status: int, seconds: float, client: str) -> None:
        """Count a request, and write its line."""
        self.metrics.answered(route, status, seconds)
        if self.log.requests or status >= 500:
            self.log.say("request", method=method, path=path, status=status, ms=round(seconds * 1e3, 3), client=client)

    def late(self) -> Refused:
        return Refused(503, f"no answer within {self.limits.seconds:g} seconds: try again later")

    def admit(self, method: str, path: str, headers: Headers) -> None:
        """Refuse a request for what its head says."""
        length = token = host = kind = None
        for name, value in headers:
            if name == b"content-length":
                length = value
            elif name == b"authorization":
                token = value
            elif name == b"host":
                host = value
            elif name == b"content-type":
                kind = value
        if self.hosts is not None and host is not None and _bare(host) not in self.hosts:
            raise Refused(
                421, "this service answers to its own address only: bind it with --host to the address that you use"
            )
        if (
            self.token is not None
            and path not in OPEN
            and not path.startswith(OPEN_UNDER)
            and not hmac.compare_digest(token or b"", self.token)
        ):
            raise Refused(401, "give the right token: Authorization: Bearer TOKEN")
        if length is not None and (not length.isdigit() or int(length) > self.limits.body):
            raise Refused(413, f"the body is larger than the {self.limits.body:,} bytes that are taken")
        if method in ("POST", "PUT", "DELETE", "PATCH") and kind is not None and not _is_json(kind):
            raise Refused(415, "send JSON: Content-Type: application/json")

    async def _body(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, "the client has gone")
            part = message.get("body", b"")
            size += len(part)
            if size > self.limits.body:
                raise Refused(413, f"the body is larger than the {self.limits.body:,} bytes that are taken")
            parts.append(part)
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)


class _Told:
    """What is sent, with the headers that every answer of the application gets, and the status that it had."""

    def __init__(self, send: Send) -> None:
        self.send, self.status, self.begun = send, 500, False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.begun = message["status"], True
            here = {name for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(pair for pair in _ALWAYS if pair[0] not in here)]
        await self.send(message)


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def refusal(refused: Refused) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """(headers, body) of a refusal."""
    body = orjson.dumps({"detail": refused.line})
    headers = [_JSON, (b"content-length", b"%d" % len(body))]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status in (413, 421):  # what is left of the request is not read
        headers.append((b"connection", b"close"))
    if refused.status == 503:
        headers.append((b"retry-after", b"1"))
    return headers, body


async def _refuse(send: _Told, refused: Refused) -> None:
    if send.begun:  # an answer that has begun cannot be taken back
        return
    headers, body = refusal(refused)
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _bare(host: bytes) -> bytes:
    """A Host header without its port."""
    return (host.partition(b"]")[0] + b"]" if host.startswith(b"[") else host.partition(b":")[0]).lower()


def _is_json(kind: bytes) -> bool:
    plain = kind.partition(b";")[0].strip().lower()
    return plain == b"application/json" or (plain.startswith(b"application/") and plain.endswith(b"+json"))
