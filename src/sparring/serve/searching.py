"""Searches of many requests at once: what has come in while one search ran is searched together next."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparring.serve.limits import Refused
from sparring.serve.served import Served

_TOGETHER = 64  # queries of one search


@dataclass(eq=False)
class Ask:
    """Queries of one request, as they were asked: users by dense id, or vectors; what may be found for them, and what to tell of it."""

    served: Served
    queries: Sequence[Any]
    users: np.ndarray | None
    vectors: np.ndarray | None
    k: int
    exclude: Sequence[np.ndarray]
    allow: np.ndarray | None = None
    deny: np.ndarray | None = None
    filters: Any = None  # equal where allow and deny are equal; None where there are none
    fields: tuple[str, ...] = ()
    done: asyncio.Future[bytes] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return id(self.served), self.k, self.fields, self.filters

    def __len__(self) -> int:
        return len(self.queries)


Write = Callable[
    [Sequence[Ask], np.ndarray, np.ndarray], list[bytes]
]  # (asks, scores, dense ids of all their queries) -> an answer for each


class Searcher:
    """A thread that searches and writes the answers; requests wait on the event loop.

    Requests that ask for the same k under the same filters, of the same generation of a run, are searched as one batch: the towers are
    asked, and titles looked up, once for all of them, and FAISS spreads them over its own threads. Nothing is held back to fill a batch: a
    lone request is searched at once. More threads here would mostly wait for each other, since all but FAISS needs the interpreter.
    """

    def __init__(self, write: Write, threads: int = 1, waiting: int = 4096) -> None:
        self._write, self._threads = write, threads
        self._queue: deque[Ask] = deque()
        self._waiting, self._most = 0, waiting
        self._wake = threading.Condition()
        self._closed = False
        self.batches = self.searched = 0
        self._thread = threading.Thread(target=self._work, name="search", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Queries that wait to be searched."""
        return self._waiting

    @property
    def alive(self) -> bool:
        return not self._closed and self._thread.is_alive()

    async def search(self, ask: Ask) -> bytes:
        """The finished answer to one request."""
        ask.done = asyncio.get_running_loop().create_future()
        with self._wake:
            if self._closed:
                raise Refused(503, "the service is stopping")
            if self._waiting + len(ask) > self._most:
                raise Refused(503, f"{self._waiting} queries wait already: try again later")
            self._waiting += len(ask)
            self._queue.append(ask)
            self._wake.notify()
        return await ask.done

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(5)

    def _work(self) -> None:
        _use(self._threads)
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if not self._queue:
                    return
                batch = self._taken()
            batch = [ask for ask in batch if ask.done is not None and not ask.done.cancelled()]  # whose client has gone, or timed out
            if batch:
                self._answer(batch)
            del batch  # while nothing is asked for, no run may be kept in memory that another has taken the place of

    def _taken(self) -> list[Ask]:
        """The oldest ask, and those that can be searched with it."""
        first = self._queue.popleft()
        batch, rows, left = [first], len(first), deque[Ask]()
        while self._queue and rows < _TOGETHER:
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
        loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[bytes], bytes | Exception]]] = {}
        for ask, answer in zip(batch, answers, strict=True):
            if ask.done is not None:
                loops.setdefault(ask.done.get_loop(), []).append((ask.done, answer))
        for loop, done in loops.items():
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
                loop.call_soon_threadsafe(_deliver, done)

    def _searched(self, batch: list[Ask]) -> list[bytes]:
        first, q = batch[0], _joined(batch)
        exclude = [each for ask in batch for each in ask.exclude]
        scores, found = first.served.index.search(q, first.k, exclude, first.allow, first.deny)
        self.batches += 1
        self.searched += len(q)
        return self._write(batch, scores, found)


def _use(threads: int) -> None:
    """How many threads torch and FAISS may use for what this thread asks of them; OpenMP keeps the number for each thread."""
    torch.set_num_threads(threads)
    with suppress(ImportError):
        import faiss

        faiss.omp_set_num_threads(threads)


def _joined(batch: list[Ask]) -> np.ndarray:
    """Vectors of all queries of a batch in order; users are encoded together."""
    served = batch[0].served
    users = [ask.users for ask in batch if ask.users is not None]
    if len(users) == len(batch):
        return served.user_vectors(np.concatenate(users))
    encoded = served.user_vectors(np.concatenate(users)) if users else np.empty((0, served.index.dim), np.float32)
    parts, at = [], 0
    for ask in batch:
        if ask.vectors is not None:
            parts.append(ask.vectors)
        else:
            parts.append(encoded[at : at + len(ask)])
            at += len(ask)
    return np.concatenate(parts)


def _deliver(done: Sequence[tuple[asyncio.Future[bytes], bytes | Exception]]) -> None:
    for future, answer in done:
        if future.done():  # given up
            continue
        if isinstance(answer, bytes):
            future.set_result(answer)
        else:
            future.set_exception(answer)
