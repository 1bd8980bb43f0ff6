"""A service of several processes: a parent that accepts connections, and workers that answer them (worker.py).

The parent holds the listening socket and the lock of the store, and hands each connection to the worker that has the
fewest. Every worker has the whole service: its own event loop, its own searcher, and the same index, mapped from the
same files. Why their answers are those of one process:

- Changes. The store is the only truth. One worker at a time has the turn to write: it commits to the store and
  applies the change; then all others apply it while they go on answering; then the parent publishes its sequence
  number in memory that all processes share; then it is acknowledged, and the next turn begins. A worker compares that
  number before every answer, and applies what it lacks first. So a change that was acknowledged is in every answer that
  begins later, even that of a worker which was too late for the turn. All of them apply the same changes one by one,
  so they place an item alike. A worker that starts later reads the last change of each item only: an item that is like
  another stands where the other is now, and not where it was.
- Swaps. Every worker loads the run, checks it and applies the changes. If one refuses, or they read different files,
  all drop it. Otherwise the parent publishes the next generation beside the sequence number, within a turn, and each
  worker swaps before its next answer. A request keeps the run that it began with.
- Deaths. A turn ends with its worker; a change that it committed is published by the parent. A new worker loads the
  runs of the others, compares what it read with them, and takes over all changes within a turn before it gets
  connections. If the parent dies, the workers finish their requests and end.

A worker that does not respond for ten seconds is not waited for again, and gets no connections, until it does. It
still compares before it answers. After a minute, or if the others have swapped meanwhile, it is started again.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from sparring.core.errors import UserError
from sparring.serving.http.connection import client_name
from sparring.serving.http.runs import remember_swap
from sparring.serving.http.schema import MAX_QUERIES, Limits, RequestError
from sparring.serving.http.server import STOP_SECONDS, listen, start_watch
from sparring.serving.http.store import Store
from sparring.serving.http.telemetry import EventLog, Figures
from sparring.serving.http.worker import CLOSED, GENERATION, SEQUENCE, Job, Loaded, portable, settle, work

_PATIENCE = 10.0  # seconds that a turn waits for a worker
_LOST = 60.0  # and after which it is ended
_SOON = 2.0  # seconds that /metrics waits for one
_RETRY = 0.2, 10.0  # seconds until a worker is started again: at first, and at most
_ACCEPTED = 64  # connections accepted before anything else is done


class Ended(Exception):
    """The process of a worker has ended."""


@dataclass(eq=False)
class _Worker:
    """A worker process, as its parent sees it."""

    number: int
    process: BaseProcess
    pipe: Pipe
    arrivals: socket.socket
    handed: int = 0  # connections
    state: Literal["loading", "ready", "late", "leaving"] = "loading"
    figures: Figures = field(default_factory=Figures)  # as of the last request for them
    asked: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)

    def ask(self, what: str, *about: Any) -> asyncio.Future[Any]:
        number, answer = next(self.numbers), asyncio.get_running_loop().create_future()
        self.asked[number] = answer
        self.send("ask", number, what, about)
        return answer

    def send(self, *message: Any) -> None:
        with suppress(OSError):  # it has ended, and its parent will read that
            self.pipe.send(message)


def share_of(limits: Limits, workers: int) -> Limits:
    """The limits of one worker, so that those of all workers together are `limits`.

    A client always meets the same worker if it is limited, so the limits of one client are those of the service.
    """
    if limits.connections < workers or limits.waiting < workers:
        raise UserError(f"--workers {workers} needs limits of at least {workers} connections and {workers} waiting")
    return replace(
        limits,
        connections=limits.connections // workers,
        waiting=max(limits.waiting // workers, min(limits.waiting, MAX_QUERIES)),  # room for the largest request
        buffered=max(limits.buffered // workers, limits.body),
    )


class Workers:
    """The parent of the workers of a service. `run` serves until SIGINT or SIGTERM."""

    def __init__(
        self, job: Job, workers: int, given: Sequence[Path], store: Store, listener: socket.socket, log: EventLog
    ) -> None:
        self._job, self._given, self._store, self._listener, self.log = job, given, store, listener, log
        self._context: Any = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self._shared: Any = self._context.RawArray("q", CLOSED + workers)
        self._shared[SEQUENCE] = store.last()
        self._workers: list[_Worker | None] = [None] * workers
        self._runs: dict[str, Loaded] = {}  # as every worker must have loaded them
        self._gone = Figures()  # of workers that have ended
        self._stopping = self._accepting = False
        self._limited = any(
            limit is not None
            for limit in (job.limits.client_connections, job.limits.client_requests, job.limits.client_rate)
        )
        self.problems: dict[str, str] = {}  # of the watch

    def run(self, url: str, watch: float | None) -> None:
        asyncio.run(self._serve(url, watch))

    # the start and the end

    async def _serve(self, url: str, watch: float | None) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._writing, self._loading = asyncio.Lock(), asyncio.Lock()
        self._holder: _Worker | None = None
        self._failure: asyncio.Future[str] = self._loop.create_future()
        self._full = asyncio.Event()  # every worker is ready
        for name in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(name, self._end)
        self._tasks: set[asyncio.Task[Any]] = set()
        stop_watch = threading.Event()
        self._listener.setblocking(False)
        try:
            for number in range(len(self._workers)):
                try:
                    self._start(number)
                except OSError as error:
                    raise UserError(f"cannot start worker {number}: {error}") from error
            first = [asyncio.ensure_future(each) for each in (self._full.wait(), self._stop.wait(), self._failure)]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise UserError(self._failure.result())
            if not self._stopping:
                self._failure.cancel()
                items = next(iter(self._runs.values())).items
                pids = [worker.process.pid for worker in self._ready()]
                self.log("serving", url=url, runs=list(self._runs), items=items, pid=os.getpid(), workers=pids)
                if watch is not None:
                    start_watch(self, watch, stop_watch)
                await self._stop.wait()
        finally:
            stop_watch.set()
            self._stopping = True
            await self._end_all()

    def _end(self) -> None:
        """Handle a signal: the first one asks for an end, a second one does not wait for it."""
        for worker in self._live() if self._stopping else ():
            worker.ask("stop", True)
        self._stopping = True
        self._stop.set()

    async def _end_all(self) -> None:
        self._accept_no_more()
        self._listener.close()
        for worker in self._live():
            if worker.state == "loading":  # it does not listen
                worker.process.kill()
            else:
                worker.ask("stop", False)
        end = self._loop.time() + STOP_SECONDS + 5
        while self._live() and self._loop.time() < end:
            await asyncio.sleep(0.02)
        for worker in self._live():
            worker.process.kill()
            worker.process.join()

    def _start(self, number: int, wait: float = _RETRY[0]) -> None:
        with ExitStack() as opened:
            here, there = map(opened.enter_context, self._context.Pipe())
            arrivals, far = map(opened.enter_context, socket.socketpair())
            arrivals.setblocking(False)
            self._shared[CLOSED + number] = 0
            current = {name: (run.folder, run.generation) for name, run in self._runs.items()} or None
            process = self._context.Process(
                target=work, args=(there, far, self._shared, number, self._job, current), name=f"worker {number}"
            )
            process.start()
            opened.pop_all()
        there.close()
        far.close()
        worker = self._workers[number] = _Worker(number, process, here, arrivals)
        self._loop.add_reader(here.fileno(), self._read, worker, wait)

    def _ended(self, worker: _Worker, wait: float, why: str | None = None) -> None:
        if self._workers[worker.number] is not worker:
            return
        self._loop.remove_reader(worker.pipe.fileno())
        worker.pipe.close()
        worker.arrivals.close()
        worker.process.join(5)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        self._workers[worker.number] = None
        self._gone.add(worker.figures)
        self._gone.pop(("waiting",), None)
        for answer in worker.asked.values():
            settle(answer, False, Ended())
        if not self._ready():
            self._accept_no_more()
        if self._holder is worker:
            self._spawn(self._end_turn(worker))
        if self._stopping:
            return
        facts = {"worker": worker.number, "pid": worker.process.pid, "code": worker.process.exitcode}
        if not self._full.is_set():
            code = worker.process.exitcode or 0
            said = why or f"a worker ended with code {code}" + (": killed, or out of memory" if code < 0 else "")
            if not self._failure.done():
                self._failure.set_result(said)
            return
        self.log("worker ended", **facts, **({} if why is None else {"why": why}))
        wait = min(2 * wait, _RETRY[1]) if worker.state == "loading" else _RETRY[0]
        self._loop.call_later(wait, self._restart, worker.number, wait)

    def _restart(self, number: int, wait: float) -> None:
        if self._stopping:
            return
        try:
            self._start(number, wait)
        except OSError as error:  # no descriptors or no memory now
            self.log("worker not started", worker=number, why=str(error))
            wait = min(2 * wait, _RETRY[1])
            self._loop.call_later(wait, self._restart, number, wait)

    def _live(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker is not None]

    def _ready(self) -> list[_Worker]:
        return [worker for worker in self._live() if worker.state == "ready"]

    # connections

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # no descriptors left, among others
                self.log("cannot accept", why=str(error))
                self._accept_no_more()
                self._loop.call_later(0.5, self._accept_on)
                return
            with connection:
                self._hand_over(connection, address[0])

    def _hand_over(self, connection: socket.socket, address: str) -> None:
        ready = self._ready()
        if self._limited:  # a client always meets the same worker
            ready = [ready[hash(client_name(address)) % len(ready)]]
        for worker in sorted(ready, key=self._open):
            with suppress(OSError):  # it has ended, or takes no connections
                socket.send_fds(worker.arrivals, [b"\0"], [connection.fileno()])
                worker.handed += 1
                return

    def _open(self, worker: _Worker) -> int:
        return worker.handed - int(self._shared[CLOSED + worker.number])

    def _accept_on(self) -> None:
        if not self._accepting and not self._stopping and self._ready():
            self._accepting = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept_no_more(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.fileno())

    # questions of workers

    def _read(self, worker: _Worker, wait: float) -> None:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._ended(worker, wait)
            return
        kind, *rest = message
        if kind == "failed":
            self._ended(worker, wait, rest[0])
        elif kind == "loaded":
            self._spawn(self._admit(worker, rest[0], wait))
        elif kind == "leaving":
            worker.state = "leaving"
            with suppress(OSError):
                worker.arrivals.shutdown(socket.SHUT_WR)  # it answers what was handed over before
            if not self._ready():
                self._accept_no_more()
        elif kind == "answer":
            number, right, value = rest
            settle(worker.asked.pop(number), right, value)
        else:
            self._spawn(self._answer(worker, *rest))

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, worker: _Worker, number: int, what: str, about: tuple[Any, ...]) -> None:
        answers: dict[str, Callable[..., Any]] = {
            "turn": lambda: self._give_turn(worker),
            "done": lambda: self._end_turn(worker),
            "reload": self._reload,
            "problems": self._problems,
            "figures": self._figures,
        }
        try:
            answer = True, await answers[what](*about)
        except Exception as error:
            answer = False, portable(error)
        worker.send("answer", number, *answer)

    async def _problems(self) -> dict[str, str]:
        ready = len(self._ready())
        if ready < len(self._workers):
            raise RequestError(503, f"{ready} of {len(self._workers)} workers are ready")
        return dict(self.problems)

    async def _figures(self) -> Figures:
        await asyncio.gather(
            *(self._look_at(worker) for worker in self._live() if worker.state in ("ready", "leaving"))
        )
        total = Figures(self._gone)
        for worker in self._live():
            total.add(worker.figures)
        return total

    async def _look_at(self, worker: _Worker) -> None:
        with suppress(Ended, TimeoutError):
            worker.figures = await asyncio.wait_for(worker.ask("figures"), _SOON)

    # turns

    async def _give_turn(self, worker: _Worker) -> None:
        await self._writing.acquire()
        if worker.process.exitcode is None and self._workers[worker.number] is worker:
            self._holder = worker
        else:
            self._writing.release()

    async def _end_turn(self, worker: _Worker) -> None:
        """End the turn of a worker, dead or alive, when all have applied its changes."""
        if self._holder is not worker:
            return
        self._holder = None
        try:
            last = self._store.last()
            await self._all_catch_up(last)
            self._shared[SEQUENCE] = last
        finally:
            self._writing.release()

    async def _all_catch_up(self, sequence: int = 0) -> None:
        await asyncio.gather(*(self._catch_up(worker, sequence) for worker in self._ready()))

    async def _catch_up(self, worker: _Worker, sequence: int = 0) -> None:
        answer = worker.ask("catch up", sequence)
        try:
            await asyncio.wait_for(asyncio.shield(answer), _PATIENCE)
        except TimeoutError:
            worker.state = "late"
            self._spawn(self._wait_for_late(worker, answer))
        except Ended:
            pass
        except RequestError as error:
            self.log("worker cannot catch up", worker=worker.number, pid=worker.process.pid, why=error.message)

    async def _wait_for_late(self, worker: _Worker, answer: asyncio.Future[Any]) -> None:
        """Let a worker take part again when it has answered, unless that takes too long or the others have swapped."""
        generation = int(self._shared[GENERATION])
        why = f"no answer for {_PATIENCE:g} s"
        self.log("worker is late", worker=worker.number, pid=worker.process.pid, why=why)
        if not self._ready():
            self._accept_no_more()
        await asyncio.wait([answer], timeout=_LOST)
        if self._workers[worker.number] is not worker or worker.state != "late":
            return
        if answer.done() and answer.exception() is None and generation == self._shared[GENERATION]:
            self._is_ready(worker)
        else:
            worker.process.kill()

    def _is_ready(self, worker: _Worker) -> None:
        worker.state = "ready"
        if self._full.is_set():
            self.log("worker ready", worker=worker.number, pid=worker.process.pid)
        elif len(self._ready()) == len(self._workers):
            self._full.set()
        if self._full.is_set():
            self._accept_on()

    async def _admit(self, worker: _Worker, loaded: list[Loaded], wait: float) -> None:
        """Let a worker that has loaded its runs answer connections, if they are those of the others."""
        async with self._loading, self._writing:
            if self._workers[worker.number] is not worker:  # it has ended
                return
            if not self._ready():  # nobody to disagree with
                self._runs = {run.name: run for run in loaded}
                self._shared[GENERATION] = max(run.generation for run in loaded)
            if why := next((why for run in loaded if (why := _difference(run, self._runs[run.name]))), None):
                worker.process.kill()
                self._ended(worker, wait, why)
                return
            await self._catch_up(worker)
            if self._workers[worker.number] is worker and worker.state == "loading":  # neither ended nor late
                self._is_ready(worker)

    # swaps

    @property
    def runs(self) -> list[Loaded]:
        return list(self._runs.values())

    def served(self, name: str | None = None) -> Loaded:
        return next(iter(self._runs.values())) if name is None else self._runs[name]

    def reload(self, run: str | None = None, name: str | None = None) -> float:
        """Reload a run in every worker; for the watch, which has a thread of its own."""
        served = self.served(name)
        return asyncio.run_coroutine_threadsafe(self._reload(served.name, served.folder), self._loop).result()

    async def _reload(self, name: str, folder: Path) -> float:
        """Load a run in every worker, then swap it in for all of them, or for none: seconds."""
        if self._loading.locked():
            raise RequestError(409, "another run is being loaded; try again when it is done")
        began = time.perf_counter()
        async with self._loading:
            workers, generation = self._ready(), int(self._shared[GENERATION]) + 1
            asked = [worker.ask("prepare", generation, name, folder) for worker in workers]
            answers: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
            try:
                _check(answers)
                async with self._writing:
                    await self._all_catch_up()
                    remember_swap(self._store, self._given[list(self._runs).index(name)], folder)
                    self._runs[name] = replace(
                        self._runs[name], folder=folder, signature=answers[0], generation=generation
                    )
                    self._shared[GENERATION] = generation
                    await self._all_catch_up()
            except RequestError as error:
                await asyncio.gather(*(worker.ask("drop") for worker in self._ready()), return_exceptions=True)
                self.log("reload failed", run=name, folder=str(folder), why=error.message)
                message = f"could not load {folder}; still serving the previous run: {error.message}"
                raise RequestError(error.status, message) from error
        seconds = time.perf_counter() - began
        self.log("reloaded", run=name, folder=str(folder), generation=generation, seconds=round(seconds, 3))
        return seconds


def _difference(one: Loaded, other: Loaded) -> str | None:
    """The reason why a worker cannot answer beside others; None if it has the same run."""
    if (one.folder.resolve(), one.generation) != (other.folder.resolve(), other.generation):
        return "another run was swapped in while it started"
    if one.signature != other.signature:
        return f"run {one.name} has changed on the disk since the others loaded it: reload it"
    return None


def _check(signatures: Sequence[Any]) -> None:
    """Raise unless every worker has loaded the same run."""
    for each in signatures:
        if isinstance(each, BaseException):
            if isinstance(each, Ended):
                raise RequestError(503, "a worker ended while it loaded the run")
            raise RequestError(422, str(each))
    if not signatures:
        raise RequestError(503, "no worker is ready")
    if any(each != signatures[0] for each in signatures):
        raise RequestError(422, "it was written while it was read")


def run_workers(
    job: Job, workers: int, given: Sequence[Path], host: str, port: int, log: EventLog, watch: float | None = None
) -> None:
    """Serve by several processes until SIGINT or SIGTERM, then finish the requests in progress."""
    if not hasattr(socket, "send_fds"):
        raise UserError("--workers needs Linux or macOS: leave it out, one process serves with --threads")
    job = replace(job, limits=share_of(job.limits, workers))
    store = Store(job.store)
    try:
        listener, url = listen(host, port)
        with listener:
            Workers(job, workers, given, store, listener, log).run(url, watch)
    finally:
        store.close()
    log("stopped")
