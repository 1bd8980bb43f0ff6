"""A worker of a service: the process that answers the connections its parent hands to it (workers.py)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from sparring.core.errors import UserError
from sparring.serving.http.app import Service
from sparring.serving.http.connection import Connection, Connections
from sparring.serving.http.pages import ReadSplit
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.schema import Limits, RequestError
from sparring.serving.http.server import Server, log_notes
from sparring.serving.http.store import Store
from sparring.serving.http.telemetry import EventLog, Figures

# places in the memory that all processes share; CLOSED + n: the connections that worker n has closed
SEQUENCE, GENERATION, CLOSED = range(3)
LINES = 4096  # bytes of log lines written at once: a pipe does not mix them with those of another process

Shared = MutableSequence[int]


@dataclass(frozen=True)
class Job:
    """All that a worker needs to know of its service."""

    build: Callable[..., RunRegistry]
    store: Path
    limits: Limits  # of this worker
    token: str | None
    names: Sequence[str] | None
    requests: bool  # whether they are logged
    read_split: ReadSplit | None
    threads: int


@dataclass(frozen=True)
class Loaded:
    """A run as a worker has loaded it: equal in all workers, or they would not answer alike."""

    name: str
    folder: Path
    signature: tuple[Any, ...]
    generation: int
    items: int


class Link:
    """The parent, as a worker sees it: questions with answers in both directions over one pipe.

    It is `Peers` for the registry and `Whole` for the service.
    """

    def __init__(self, pipe: Pipe, shared: Shared) -> None:
        self._pipe, self._shared = pipe, shared
        self._sending, self._numbers = threading.Lock(), count()
        self._asked: dict[int, Future[Any]] = {}
        self.ended = False

    def published(self) -> tuple[int, int]:
        return self._shared[SEQUENCE], self._shared[GENERATION]

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.ask("turn").result()
        try:
            yield
        finally:
            self.ask("done").result()

    def reload(self, name: str, folder: Path) -> float:
        seconds: float = self.ask("reload", name, folder).result()
        return seconds

    async def problems(self) -> dict[str, str]:
        found: dict[str, str] = await asyncio.wrap_future(self.ask("problems"))
        return found

    async def figures(self) -> Figures:
        found: Figures = await asyncio.wrap_future(self.ask("figures"))
        return found

    def tell(self, what: str, *about: Any) -> None:
        self._send(what, *about)

    def ask(self, what: str, *about: Any) -> Future[Any]:
        number, answer = next(self._numbers), Future[Any]()
        answer.set_running_or_notify_cancel()  # a request that ends must not cancel what `follow` completes
        self._asked[number] = answer
        self._send("ask", number, what, about)
        if self.ended:
            self._refuse(answer)
        return answer

    def follow(self, handlers: dict[str, Callable[..., Any]]) -> None:
        """Answer the parent in this thread, and "prepare" in one of its own, until the parent ends."""
        while True:
            try:
                kind, number, what, about = self._pipe.recv()
            except (EOFError, OSError):
                break
            if kind == "answer":
                settle(self._asked.pop(number), what, about)
            elif what == "prepare":
                threading.Thread(target=self._answer, args=(number, handlers[what], about), daemon=True).start()
            else:
                self._answer(number, handlers[what], about)
        self.ended = True
        for answer in list(self._asked.values()):
            self._refuse(answer)

    def _refuse(self, answer: Future[Any]) -> None:
        with suppress(InvalidStateError):  # it was refused by another thread
            answer.set_exception(RequestError(503, "the service is stopping"))

    def _answer(self, number: int, handler: Callable[..., Any], about: tuple[Any, ...]) -> None:
        try:
            answer = True, handler(*about)
        except Exception as error:
            answer = False, portable(error)
        self._send("answer", number, *answer)

    def _send(self, *message: Any) -> None:
        with self._sending, suppress(OSError):  # the parent has ended: `follow` notices
            self._pipe.send(message)


def settle(answer: Any, right: bool, value: Any) -> None:
    """Complete a future, unless nobody waits for it."""
    if not answer.done():
        answer.set_result(value) if right else answer.set_exception(value)


def portable(error: Exception) -> Exception:
    """An error that another process can raise."""
    if isinstance(error, RequestError):
        return error
    return RequestError(422, " ".join(str(error).split()) or type(error).__name__)


class WorkerServer(Server):
    """Takes connections from the parent, which arrive with one byte each over a socket; calls `closed` for each end."""

    def __init__(
        self,
        service: Service,
        arrivals: socket.socket,
        closed: Callable[[], None],
        on_ready: Callable[[], None],
        on_leaving: Callable[[], None],
    ) -> None:
        super().__init__(service, arrivals, on_ready)
        self._closed, self._on_leaving = closed, on_leaving
        self._begun: set[asyncio.Task[None]] = set()
        self._more = True  # connections may arrive

    async def _accept(self, loop: asyncio.AbstractEventLoop) -> WorkerServer:
        self._loop = loop
        self._listener.setblocking(False)
        loop.add_reader(self._listener.fileno(), self._receive)
        return self

    def close(self) -> None:
        """Take the connections that were handed over until the parent knows, and no more."""
        self._on_leaving()

    @property
    def unfinished(self) -> bool:
        return self._more or bool(self._begun) or super().unfinished

    def _receive(self) -> None:
        while True:
            try:
                data, files, _, _ = socket.recv_fds(self._listener, 1, 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, files = b"", []
            if not data:  # the last has arrived, or the parent has ended
                self._more = False
                self._loop.remove_reader(self._listener.fileno())
                return
            if not files:  # no descriptor was left for it
                self._closed()
            for file in files:
                task = self._loop.create_task(self._begin(socket.socket(fileno=file)))
                self._begun.add(task)
                task.add_done_callback(self._begun.discard)

    async def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                lambda: _Counted(self.connections, self._loop, self._closed), connection
            )
        except OSError:
            connection.close()
            self._closed()


class _Counted(Connection):
    """A connection whose end the parent learns of: it hands new ones to the worker that has the fewest."""

    def __init__(self, everyone: Connections, loop: asyncio.AbstractEventLoop, closed: Callable[[], None]) -> None:
        super().__init__(everyone, loop)
        self._closed = closed

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._closed()


def work(
    pipe: Pipe,
    arrivals: socket.socket,
    shared: Shared,
    number: int,
    job: Job,
    current: dict[str, tuple[Path, int]] | None,
) -> None:
    """Load the runs, tell the parent, and answer until it says stop or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent handles it
    log = EventLog(os.fdopen(os.dup(2), "wb", LINES), requests=job.requests)
    link = Link(pipe, shared)
    gc.freeze()
    try:
        store = Store(job.store, held=True)
        # one worker speaks for all
        said: Any = log if number == 0 else lambda event, **facts: None
        registry = job.build(store=store, log=said, peers=link, current=current)
    except UserError as error:
        link.tell("failed", str(error))
        return
    log_notes(registry, said)
    service = Service(registry, job.limits, job.token, job.names, log, job.read_split, job.threads, link)

    def closed() -> None:
        shared[CLOSED + number] += 1

    def ready() -> None:
        link.tell("loaded", [Loaded(r.name, r.folder, r.signature, r.generation, len(r.index)) for r in registry.runs])

    server = WorkerServer(service, arrivals, closed, ready, lambda: link.tell("leaving"))

    def stop(force: bool) -> None:
        server.should_exit, server.force_exit = True, server.force_exit or force

    signal.signal(signal.SIGTERM, lambda *_: stop(False))

    def prepare(generation: int, name: str, folder: Path) -> tuple[Any, ...]:
        return registry.prepare(generation, name, folder).signature

    handlers: dict[str, Callable[..., Any]] = {
        "catch up": registry.catch_up,
        "prepare": prepare,
        "drop": registry.drop_prepared,
        "figures": service.metrics.figures,
        "stop": stop,
    }

    def follow() -> None:
        link.follow(handlers)
        stop(False)

    threading.Thread(target=follow, name="link", daemon=True).start()
    try:
        server.run()
    finally:
        service.close()
        log.flush()
