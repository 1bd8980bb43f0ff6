"""Time limits of many requests, watched together: a timer for each would cost more than some searches do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Deadlines:
    """Cancels the task inside `within` when its seconds are over, at most a fortieth of them late, and raises TimeoutError there.

    with deadlines.within(5.0):
        await work
    """

    def __init__(self) -> None:
        self._due: dict[asyncio.Task[object], tuple[float, float]] = {}  # task -> when, and how often to look
        self._late: set[asyncio.Task[object]] = set()
        self._looking: asyncio.TimerHandle | None = None

    @contextmanager
    def within(self, seconds: float | None) -> Iterator[None]:
        task = asyncio.current_task()
        if seconds is None or task is None:
            yield
            return
        loop = asyncio.get_running_loop()
        self._due[task] = loop.time() + seconds, seconds / 40
        if self._looking is None:
            self._looking = loop.call_later(seconds / 40, self._look, loop)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._late or task.uncancel() > 0:  # someone else wants it stopped, too
                raise
            raise TimeoutError from None
        finally:
            del self._due[task]
            self._late.discard(task)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for task, (due, _) in self._due.items():
            if due <= now and task not in self._late:
                self._late.add(task)
                task.cancel()
        often = min((each for _, each in self._due.values()), default=None)
        self._looking = None if often is None else loop.call_later(often, self._look, loop)
