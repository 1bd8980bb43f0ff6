"""The service as a process: its listening socket, the watch on run folders, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from sparring.core.devices import usable_cores
from sparring.core.errors import UserError
from sparring.serving.http.app import Service
from sparring.serving.http.connection import SWEEP_SECONDS, Connection, Connections
from sparring.serving.http.pages import ReadSplit
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.schema import Limits, RequestError
from sparring.serving.http.served_run import signature
from sparring.serving.http.telemetry import EventLog
from sparring.serving.http.threads import contained
from sparring.training.folder import is_held

try:
    from uvloop import new_event_loop
except ImportError:  # it does not exist for Windows
    from asyncio import new_event_loop  # type: ignore[assignment]

STOP_SECONDS = 30.0  # the longest time to finish requests after a signal
_BACKLOG = 2048


class Closing(Protocol):
    def close(self) -> None: ...


class Server:
    """Accepts connections until `should_exit`; then finishes the requests that have arrived, at most for 30 seconds."""

    def __init__(self, service: Service, listener: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
        self.connections = Connections(service.gate, service.limits)
        self.started = self.should_exit = self.force_exit = False
        self._app, self._listener, self._on_ready = service.app, listener, on_ready

    def run(self) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self.serve())

    def exit(self, *_: object) -> None:
        """Handle a signal: the first one asks for an end, a second one does not wait for it."""
        self.force_exit, self.should_exit = self.should_exit, True

    async def serve(self) -> None:
        loop, connections = asyncio.get_running_loop(), self.connections
        async with self._app.router.lifespan_context(self._app):
            accepting = await self._accept(loop)
            self.started = True
            self._on_ready()
            while not self.should_exit:
                await self._sweep(loop)
            accepting.close()
            connections.stop(loop.time())
            end = loop.time() + STOP_SECONDS
            while self.unfinished and loop.time() < end and not self.force_exit:
                await self._sweep(loop)
            for connection in list(connections.open):
                connection.abort()

    @property
    def unfinished(self) -> bool:
        """Whether a connection is open."""
        return bool(self.connections.open)

    async def _accept(self, loop: asyncio.AbstractEventLoop) -> Closing:
        return await loop.create_server(
            lambda: Connection(self.connections, loop), sock=self._listener, backlog=_BACKLOG
        )

    async def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        await asyncio.sleep(SWEEP_SECONDS)
        self.connections.sweep(loop.time())


def host_names(host: str, published: Sequence[str], token: str | None) -> list[str] | None:
    """The names that a service on this address answers to; None for any. An address that others reach needs a token."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if local:
        return ["127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host, *published]
    if token is None:
        how = "set SPARRING_TOKEN or --token-file, or listen on 127.0.0.1"
        raise UserError(f"whoever reaches {host} could change items and load runs: {how}")
    return list(published) or None


def run(
    registry: RunRegistry,
    host: str,
    port: int,
    limits: Limits,
    token: str | None = None,
    published: Sequence[str] = (),
    log: EventLog | None = None,
    watch: float | None = None,
    read_split: ReadSplit | None = None,
    threads: int | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests in progress.

    `published` are names under which a proxy publishes the service.
    """
    names = host_names(host, published, token)
    log = log or EventLog()
    listener, url = listen(host, port)
    service = Service(registry, limits, token, names, log, read_split, threads or usable_cores())
    log_notes(registry, log)
    run_names, items = [served.name for served in registry.runs], len(registry.served().index)
    server = Server(service, listener, lambda: log("serving", url=url, runs=run_names, items=items, pid=os.getpid()))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.exit)
    if watch is not None:
        start_watch(registry, watch, stop)
    try:
        server.run()
    finally:
        stop.set()
        service.close()
        log("stopped")


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens, and the address of the service."""
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
        )
    except OSError as error:
        why = "the address is in use or does not belong to this machine; choose another with --host or --port"
        raise UserError(f"cannot listen on {host}:{port}: {why}") from error
    name, bound_port = listener.getsockname()[:2]
    address = f"[{name}]" if ":" in name else name
    return listener, f"http://{address}:{bound_port}/"


def log_notes(registry: RunRegistry, log: EventLog) -> None:
    """A function of its own: a local variable of `run` would keep a replaced run in memory."""
    for served in registry.runs:
        for note in served.notes:
            log("note", run=served.name, note=note)


class Watched(Protocol):
    """A run that is served, as the watch sees it."""

    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path: ...
    @property
    def signature(self) -> tuple[Any, ...]: ...


class Reloading(Protocol):
    """Runs that can be reloaded: those of a registry, or of all workers."""

    problems: dict[str, str]

    @property
    def log(self) -> Callable[..., None]: ...

    @property
    def runs(self) -> Sequence[Watched]: ...

    def served(self, name: str | None = None) -> Watched: ...

    def reload(self, run: str | None = None, name: str | None = None) -> object: ...


def start_watch(registry: Reloading, seconds: float, stop: threading.Event) -> None:
    threading.Thread(target=_watch, args=(registry, seconds, stop), name="watch", daemon=True).start()


def _watch(registry: Reloading, seconds: float, stop: threading.Event) -> None:
    """Reload runs whose files change, unless training is in progress. A rejected run waits for its next change.

    A failure of any kind is logged and shown by /readyz until the run is reloaded, and the watch goes on.
    """
    rejected: dict[str, object] = {}
    while not stop.wait(seconds):
        for name in [served.name for served in registry.runs]:
            try:
                contained(_reload_changed, registry, name, rejected, min(seconds, 1.0), stop)
            except Exception as error:
                why = " ".join(str(error).split()) or type(error).__name__
                why = why.replace(str(registry.served(name).folder), name)  # /readyz needs no token
                if registry.problems.get(name) != why:  # a lasting failure is logged once
                    registry.log("watch failed", run=name, why=why)
                registry.problems[name] = why


def _reload_changed(
    registry: Reloading, name: str, rejected: dict[str, object], settle: float, stop: threading.Event
) -> None:
    folder, loaded = registry.served(name).folder, registry.served(name).signature
    current = signature(folder)
    if current == loaded:
        registry.problems.pop(name, None)
    elif rejected.get(name) != current and not is_held(folder):  # held: training is in progress
        if stop.wait(settle) or signature(folder) != current:  # still being written
            return
        try:
            registry.reload(None, name)
        except RequestError as error:
            if error.status == 409:  # another reload is in progress: look again after it
                return
            if error.status != 503:  # a worker ended: try again
                rejected[name] = current
            raise
        registry.problems.pop(name, None)
