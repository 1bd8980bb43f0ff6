"""The service as a process: uvicorn, the watch on run folders, and a graceful shutdown."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from sparring.core.errors import UserError
from sparring.serving.http.app import Service
from sparring.serving.http.pages import ReadSplit
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.schema import Limits, RequestError
from sparring.serving.http.served_run import signature
from sparring.serving.http.telemetry import EventLog
from sparring.serving.http.threads import contained
from sparring.training.folder import is_held


class _Server(uvicorn.Server):
    """uvicorn with a callback for the moment when it accepts connections."""

    on_ready: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()


def configured(service: Service, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        service.gate,
        host=host,
        port=port,
        http="httptools",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=30,
    )


def run(
    registry: RunRegistry,
    host: str,
    port: int,
    limits: Limits,
    token: str | None = None,
    hosts: list[str] | None = None,
    log: EventLog | None = None,
    watch: float | None = None,
    read_split: ReadSplit | None = None,
    threads: int | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests in progress."""
    log = log or EventLog()
    service = Service(registry, limits, token, hosts, log, read_split, threads or len(os.sched_getaffinity(0)))
    config = configured(service, host, port)
    server = _Server(config)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # a signal may arrive before uvicorn installs its own handlers
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    try:
        listener = config.bind_socket()
    except SystemExit as error:
        why = "the address is in use or does not belong to this machine; choose another with --host or --port"
        raise UserError(f"cannot listen on {host}:{port}: {why}") from error
    name, bound_port = listener.getsockname()[:2]
    address = f"[{name}]" if ":" in name else name
    _log_notes(registry, log)
    names, items = [served.name for served in registry.runs], len(registry.served().index)
    server.on_ready = lambda: log(
        "serving", url=f"http://{address}:{bound_port}/", runs=names, items=items, pid=os.getpid()
    )
    if watch is not None:
        threading.Thread(target=_watch, args=(registry, watch, stop), name="watch", daemon=True).start()
    try:
        server.run(sockets=[listener])
    finally:
        stop.set()
        service.close()
        log("stopped")


def _log_notes(registry: RunRegistry, log: EventLog) -> None:
    """A function of its own: a local variable of `run` would keep a replaced run in memory."""
    for served in registry.runs:
        for note in served.notes:
            log("note", run=served.name, note=note)


def _watch(registry: RunRegistry, seconds: float, stop: threading.Event) -> None:
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
    registry: RunRegistry, name: str, rejected: dict[str, object], settle: float, stop: threading.Event
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
            rejected[name] = current
            raise
        registry.problems.pop(name, None)
