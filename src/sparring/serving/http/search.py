"""Searches of many requests at once: what has come in while one search ran is searched together next."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sparring.serving.http.limits import Refused
from sparring.serving.http.served_run import Served

_TOGETHER = 64  # queries of one search
_APART = 8  # queries up to which a second thread is not worth its while
Tell = Callable[["bytes | Exception"], None]


@dataclass(eq=False)
class Ask:
    """Queries of one request, as they were asked: users by dense id, or vectors; what may be found for them, and what to tell of it."""

    served: Served
    queries: Sequence[Any]
    users: Sequence[int] | None
    vectors: np.ndarray | None
    k: int
    exclude: Sequence[np.ndarray]
    allow: np.ndarray | None = None
    deny: np.ndarray | None = None
    filters: Any = None  # equal where allow and deny are equal; None where there are none
    fields: tuple[str, ...] = ()
    unknown: Sequence[int | str] = ()  # of a history, left out of it
    missing: frozenset[int | str] = frozenset()  # queries that are not known: all but `queries` is of the others
    tell: Tell | None = None  # called on the event loop with the answer
    loop: asyncio.AbstractEventLoop | None = None
    given_up: bool = False  # nobody waits for it any more

    @property
    def key(self) -> tuple[Any, ...]:
        return id(self.served), self.k, self.fields, self.filters

    def __len__(self) -> int:
        return len(self.exclude)


Write = Callable[
    [Sequence[Ask], np.ndarray, np.ndarray], list[bytes]
]  # (asks, scores, dense ids of all their queries) -> an answer for each


class Searcher:
    """Threads that search and write the answers; requests wait on the event loop.

    Requests that ask for the same k under the same filters, of the same generation of a run, are searched as one batch: the towers are
    asked, and titles looked up, once for all of them. Nothing is held back to fill a batch: a lone request is searched at once. All but
    FAISS needs the interpreter, so a thread searches by itself, and FAISS and torch do not split what it asks of them further.
    """

    def __init__(self, write: Write, threads: int = 1, waiting: int = 4096) -> None:
        self._write = write
        self._queue: deque[Ask] = deque()
        self._waiting, self._most = 0, waiting
        self._wake = threading.Condition()
        self._free = threads
        self._turn: asyncio.AbstractEventLoop | None = None  # the loop that wakes the threads at the end of its turn
        self._closed = False
        self.batches = self.searched = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"search-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Queries that wait to be searched."""
        return self._waiting

    @property
    def alive(self) -> bool:
        return not self._closed and all(thread.is_alive() for thread in self._threads)

    def submit(self, ask: Ask, tell: Tell) -> None:
        """Have a request searched; `tell` is called with its answer. On the event loop."""
        ask.tell, ask.loop = tell, asyncio.get_running_loop()
        with self._wake:
            if self._closed:
                raise Refused(503, "the service is stopping")
            if self._waiting + len(ask) > self._most:
                raise Refused(503, f"{self._waiting} queries wait already: try again later")
            self._waiting += len(ask)
            self._queue.append(ask)
        if (
            self._turn is not ask.loop
        ):  # what else came in by now is read first: threads would only fight it for the interpreter
            self._turn = ask.loop
            ask.loop.call_soon(self._call)

    def _call(self) -> None:
        self._turn = None
        with self._wake:
            self._wake.notify(-(-self._waiting // _APART))

    async def search(self, ask: Ask) -> bytes:
        """The finished answer to one request."""
        done = asyncio.get_running_loop().create_future()
        self.submit(ask, partial(_settle, done))
        try:
            return await done
        finally:
            ask.given_up = True

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(5)

    def _work(self) -> None:
        _use_one_thread()
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if not self._queue:
                    return
                batch = self._taken()
                self._free -= 1
            batch = [ask for ask in batch if not ask.given_up]
            if batch:
                self._answer(batch)
            del batch  # while nothing is asked for, no run may be kept in memory that another has taken the place of
            with self._wake:
                self._free += 1

    def _taken(self) -> list[Ask]:
        """The oldest ask, and those that can be searched with it: its share of what waits, where other threads are free."""
        first = self._queue.popleft()
        most = min(_TOGETHER, max(_APART, -(-self._waiting // self._free)))
        batch, rows, left = [first], len(first), deque[Ask]()
        while self._queue and rows < most:
            ask = self._queue.popleft()
            if ask.key == first.key:
                batch.append(ask)
                rows += len(ask)
            else:
                left.append(ask)
        self._queue.extendleft(reversed(left))
        self._waiting -= rows
        return batch

    def _answer(self, batch: list[Ask]) -> None:
        answers: Sequence[bytes | Exception]
        try:
            answers = self._searched(batch)
        except Exception as error:
            answers = [error] * len(batch)
        loops: dict[asyncio.AbstractEventLoop | None, list[tuple[Ask, bytes | Exception]]] = {}
        for ask, answer in zip(batch, answers, strict=True):
            loops.setdefault(ask.loop, []).append((ask, answer))
        for loop, told in loops.items():
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
                loop.call_soon_threadsafe(_tell, told)  # type: ignore[union-attr]

    def _searched(self, batch: list[Ask]) -> list[bytes]:
        first, q = batch[0], _joined(batch)
        exclude = [each for ask in batch for each in ask.exclude]
        scores, found = first.served.index.search(q, first.k, exclude, first.allow, first.deny)
        with self._wake:
            self.batches += 1
            self.searched += len(q)
        return self._write(batch, scores, found)


def _use_one_thread() -> None:
    """For what this thread asks of torch and FAISS; OpenMP keeps the number for each thread."""
    torch.set_num_threads(1)
    with suppress(ImportError):
        import faiss

        faiss.omp_set_num_threads(1)


def _joined(batch: list[Ask]) -> np.ndarray:
    """Vectors of all queries of a batch in order; users are encoded together."""
    served = batch[0].served
    users = np.array([user for ask in batch if ask.users is not None for user in ask.users], np.int64)
    if all(ask.users is not None for ask in batch):
        return served.user_vectors(users)
    encoded = served.user_vectors(users) if len(users) else np.empty((0, served.index.dim), np.float32)
    parts, at = [], 0
    for ask in batch:
        if ask.vectors is not None:
            parts.append(ask.vectors)
        else:
            parts.append(encoded[at : at + len(ask)])
            at += len(ask)
    return np.concatenate(parts)


def _tell(told: Sequence[tuple[Ask, bytes | Exception]]) -> None:
    for ask, answer in told:
        if not ask.given_up and ask.tell is not None:
            ask.tell(answer)


def _settle(done: asyncio.Future[bytes], answer: bytes | Exception) -> None:
    if done.done():
        return
    if isinstance(answer, bytes):
        done.set_result(answer)
    else:
        done.set_exception(answer)
