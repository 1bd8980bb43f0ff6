"""The service as a process: uvicorn, threads, the watch over the run folders, a clean stop."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from sparring.core.errors import UserError
from sparring.serving.http.access_log import Log
from sparring.serving.http.app import Service
from sparring.serving.http.limits import Limits, Refused
from sparring.serving.http.pages import Parts
from sparring.serving.http.quick import Connection, Shortcut
from sparring.serving.http.runs import Live
from sparring.serving.http.served_run import signature
from sparring.training.folder import is_held


class _Server(uvicorn.Server):
    """uvicorn that tells when it takes requests."""

    when_ready: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.when_ready()


def configured(service: Service, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        service.gate,
        host=host,
        port=port,
        http=type("Connection", (Connection,), {"shortcut": Shortcut(service)}),
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=30,
    )


def run(
    live: Live,
    host: str,
    port: int,
    limits: Limits,
    token: str | None = None,
    hosts: list[str] | None = None,
    log: Log | None = None,
    watch: float | None = None,
    parts: Parts | None = None,
    threads: int | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; requests that have begun are answered first."""
    log = log or Log()
    service = Service(live, limits, token, hosts, log, parts, threads or len(os.sched_getaffinity(0)))
    config = configured(service, host, port)
    server = _Server(config)
    stop = threading.Event()
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # uvicorn sees to them while it runs; one that comes earlier counts too
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    try:
        bound_to = config.bind_socket()
    except SystemExit as error:
        raise UserError(
            f"cannot listen on {host}:{port}: the address is in use, or not this machine's; give another with --port"
        ) from error
    name, bound = bound_to.getsockname()[:2]
    shown = f"[{name}]" if ":" in name else name
    _say_notes(live, log)
    facts = {"runs": [served.name for served in live.runs], "items": len(live.served().index), "pid": os.getpid()}
    server.when_ready = lambda: log.say("serving", url=f"http://{shown}:{bound}/", **facts)
    watcher = threading.Thread(target=_watch, args=(live, watch, stop), name="watch", daemon=True)
    if watch is not None:
        watcher.start()
    try:
        server.run(sockets=[bound_to])
    finally:
        stop.set()
        service.close()
        log.say("stopped")


def _say_notes(live: Live, log: Log) -> None:
    """By itself: a name in a function that lasts would keep the run in memory after another has taken its place."""
    for served in live.runs:
        for note in served.notes:
            log.say("note", run=served.name, note=note)


def _watch(live: Live, seconds: float, stop: threading.Event) -> None:
    """Reload runs whose files have changed, once no training writes there; one that is refused waits until it changes again."""
    refused: dict[str, object] = {}
    while not stop.wait(seconds):
        for name, folder, loaded in [(served.name, served.folder, served.sign) for served in live.runs]:
            sign = signature(folder)
            if (
                sign == loaded or refused.get(name) == sign or is_held(folder)
            ):  # the best epoch so far is no finished run
                continue
            if stop.wait(min(seconds, 1.0)) or signature(folder) != sign:  # still being written
                continue
            try:
                live.reload(None, name)
            except Refused:
                refused[name] = sign
