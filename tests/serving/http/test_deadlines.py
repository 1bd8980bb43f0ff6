"""Deadlines: what takes too long is stopped in time, all else is left alone."""

from __future__ import annotations

import asyncio
import time

import pytest

from sparring.serving.http.deadlines import Deadlines


def test_what_takes_too_long_is_stopped_in_time_and_nothing_else() -> None:
    """Of tasks of 0.01, 0.5 and 30 s under a limit of 0.2 s the first ends; the others stop between 0.2 and 0.4 s, and only they."""
    deadlines = Deadlines()

    async def work(seconds: float) -> str:
        try:
            with deadlines.within(0.2):
                await asyncio.sleep(seconds)
        except TimeoutError:
            return "late"
        return "done"

    async def all_of_them() -> list[str]:
        return await asyncio.gather(work(0.01), work(0.5), work(30), work(0.01))

    began = time.perf_counter()
    assert asyncio.run(all_of_them()) == ["done", "late", "late", "done"]
    assert 0.19 < time.perf_counter() - began < 5
    assert not deadlines._due
    assert not deadlines._late


def test_a_later_batch_is_watched_too() -> None:
    """The watch rests while nothing is due, and begins again; a task that is stopped once can be stopped again."""
    deadlines = Deadlines()

    async def twice() -> int:
        late = 0
        for _ in range(2):
            await asyncio.sleep(0.1)
            try:
                with deadlines.within(0.05):
                    await asyncio.sleep(30)
            except TimeoutError:
                late += 1
        return late

    assert asyncio.run(twice()) == 2


def test_a_cancelled_request_is_not_taken_for_a_late_one() -> None:
    """A task that is cancelled from outside ends as cancelled."""
    deadlines = Deadlines()

    async def work() -> None:
        with deadlines.within(5):
            await asyncio.sleep(30)

    async def stop() -> None:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop())


def test_no_limit() -> None:
    """None sets none."""

    async def work() -> str:
        with Deadlines().within(None):
            return "done"

    assert asyncio.run(work()) == "done"
