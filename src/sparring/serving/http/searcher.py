"""Dynamic batching: requests that arrive while a search runs are searched together by the next one."""

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

from sparring.serving.http.schema import RequestError
from sparring.serving.http.served_run import ServedRun
from sparring.serving.http.threads import contained
from sparring.serving.index.scored import FusedItems, SourceFigures
from sparring.serving.index.staged import StagedItems

_MAX_BATCH = 64  # queries in one search
_MIN_SHARE = 8  # queries below which splitting the work over a second thread does not pay


@dataclass(eq=False)
class SearchJob:
    """The search behind one request: users by dense id, or query vectors; filters; and data for the response."""

    served: ServedRun
    queries: Sequence[Any]  # as given in the request
    users: Sequence[int] | None
    vectors: np.ndarray | None
    k: int
    exclude: Sequence[np.ndarray]
    allow: np.ndarray | None = None
    passing: np.ndarray | None = None  # the bits of the items that may be listed: many ids take 64 times the memory
    deny: np.ndarray | None = None
    filters: Any = None  # equal if allow, passing and deny are equal; None without filters
    fields: tuple[str, ...] = ()
    unknown: Sequence[int | str] = ()  # items of a history that the run does not know
    similar: bool = False  # items as queries, which are compared by the towers
    missing: frozenset[int | str] = frozenset()  # unknown queries; every field but `queries` skips them
    sources: Sequence[dict[str, Any]] = ()  # of a fused run, once it was searched: share and time of each source
    response: asyncio.Future[bytes] | None = None

    @property
    def batch_key(self) -> tuple[Any, ...]:
        return id(self.served), self.k, self.fields, self.filters, self.similar

    def __len__(self) -> int:
        return len(self.exclude)


Write = Callable[[Sequence[SearchJob], np.ndarray, np.ndarray], list[bytes]]  # (jobs, scores, dense ids) -> responses


class Searcher:
    """Worker threads that search and write responses, while requests wait on the event loop.

    Requests with the same run, k, fields and filters form one batch: users are encoded and titles looked up once for
    all of them. No request is delayed to fill a batch. All work but that of FAISS needs the interpreter lock, so each
    worker searches with one thread. A batch that fails is searched again in halves, down to the request that fails
    by itself, so that it fails alone.
    """

    def __init__(self, write: Write, threads: int = 1, max_waiting: int = 4096) -> None:
        self._write = write
        self._queue: deque[SearchJob] = deque()
        self._waiting, self._max_waiting = 0, max_waiting
        self._wake = threading.Condition()
        self._idle = threads
        self._notifying: asyncio.AbstractEventLoop | None = None  # the loop that is about to wake the workers
        self._closed = False
        self.batches = self.searched = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"search-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """The number of queries waiting to be searched."""
        return self._waiting

    @property
    def alive(self) -> bool:
        return not self._closed and all(thread.is_alive() for thread in self._threads)

    def submit(self, job: SearchJob) -> asyncio.Future[bytes]:
        """Queue a search and return the future response. Call it on the event loop; cancelling drops the job."""
        loop = asyncio.get_running_loop()
        job.response = loop.create_future()
        with self._wake:
            if self._closed:
                raise RequestError(503, "the service is stopping")
            if self._waiting + len(job) > self._max_waiting:
                raise RequestError(503, f"overloaded: {self._waiting} queries are waiting; try again later")
            self._waiting += len(job)
            self._queue.append(job)
        if self._notifying is not loop:  # read the other requests first: the workers would compete for the interpreter
            self._notifying = loop
            loop.call_soon(self._notify)
        return job.response

    def _notify(self) -> None:
        self._notifying = None
        with self._wake:
            self._wake.notify(-(-self._waiting // _MIN_SHARE))

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
                batch = self._next_batch()
                self._idle -= 1
            batch = [job for job in batch if job.response is not None and not job.response.cancelled()]
            if batch:
                self._answer(batch)
            del batch  # an idle worker must not keep a replaced run in memory
            with self._wake:
                self._idle += 1

    def _next_batch(self) -> list[SearchJob]:
        """The oldest job and those that can be searched with it: this worker's share of the queue."""
        first = self._queue.popleft()
        share = min(_MAX_BATCH, max(_MIN_SHARE, -(-self._waiting // self._idle)))
        batch, rows, skipped = [first], len(first), deque[SearchJob]()
        while self._queue and rows < share:
            job = self._queue.popleft()
            if job.batch_key == first.batch_key:
                batch.append(job)
                rows += len(job)
            else:
                skipped.append(job)
        self._queue.extendleft(reversed(skipped))
        self._waiting -= rows
        return batch

    def _answer(self, batch: list[SearchJob]) -> None:
        responses: Sequence[bytes | Exception]
        try:
            responses = contained(self._search, batch)
        except Exception as error:
            if len(batch) > 1:
                middle = len(batch) // 2
                self._answer(batch[:middle])
                self._answer(batch[middle:])
                return
            responses = [error]
        loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[bytes], bytes | Exception]]] = {}
        for job, response in zip(batch, responses, strict=True):
            if job.response is not None:
                loops.setdefault(job.response.get_loop(), []).append((job.response, response))
        for loop, pairs in loops.items():
            with suppress(RuntimeError):  # the loop is closed: no client is waiting
                loop.call_soon_threadsafe(_deliver, pairs)

    def _search(self, batch: list[SearchJob]) -> list[bytes]:
        first, q = batch[0], _query_vectors(batch)
        exclude = [items for job in batch for items in job.exclude]
        allow = first.allow if first.passing is None else np.flatnonzero(np.unpackbits(first.passing))
        index = first.served.index
        if isinstance(index, FusedItems):
            scores, items, figures = index.search_sources(q, first.k, exclude, allow, first.deny)
            _set_sources(batch, figures)
        else:
            search = index.towers.search if first.similar and isinstance(index, StagedItems) else index.search
            scores, items = search(q, first.k, exclude, allow, first.deny)
        with self._wake:
            self.batches += 1
            self.searched += len(q)
        return self._write(batch, scores, items)


def _set_sources(batch: list[SearchJob], figures: SourceFigures) -> None:
    """Give each job the mean share of each source in its lists, and the time that the batch spent in the source."""
    row = 0
    for job in batch:
        share = figures.shares[row : row + len(job)].mean(0).tolist()
        row += len(job)
        job.sources = [
            {"name": name, "share": round(part, 4), "ms": round(seconds * 1e3, 3)}
            for name, part, seconds in zip(figures.names, share, figures.seconds, strict=True)
        ]


def _use_one_thread() -> None:
    """Limit torch and FAISS to one thread when called from this worker; OpenMP keeps the setting per thread."""
    torch.set_num_threads(1)
    with suppress(ImportError):
        import faiss

        faiss.omp_set_num_threads(1)


def _query_vectors(batch: list[SearchJob]) -> np.ndarray:
    """Vectors of all queries of a batch, in order; users are encoded together."""
    served = batch[0].served
    users = np.array([user for job in batch if job.users is not None for user in job.users], np.int64)
    if all(job.users is not None for job in batch):
        return served.user_vectors(users)
    encoded = served.user_vectors(users) if len(users) else np.empty((0, served.index.dim), np.float32)
    parts, row = [], 0
    for job in batch:
        if job.vectors is not None:
            parts.append(job.vectors)
        else:
            parts.append(encoded[row : row + len(job)])
            row += len(job)
    return np.concatenate(parts)


def _deliver(pairs: Sequence[tuple[asyncio.Future[bytes], bytes | Exception]]) -> None:
    for future, response in pairs:
        if future.done():
            continue
        if isinstance(response, bytes):
            future.set_result(response)
        else:
            future.set_exception(response)
