"""Work in threads: dropped if its request ends before it starts, and safe from panics of compiled code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

_T = TypeVar("_T")


async def in_thread(pool: Executor, work: Callable[..., _T], *arguments: Any) -> _T:
    """Run work in a thread of the pool.

    If the request ends first, by its time limit or by the client, work that has not started is dropped; work that has
    started is finished.
    """
    return await asyncio.get_running_loop().run_in_executor(pool, contained, work, *arguments)


def contained(work: Callable[..., _T], *arguments: Any) -> _T:
    """Call `work`; a panic of polars, which is a BaseException and would end the thread, becomes a RuntimeError."""
    try:
        return work(*arguments)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
