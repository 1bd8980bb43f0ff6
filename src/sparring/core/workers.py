"""Work in processes of its own: one fresh process per task, some at once; a task that fails, or is killed, harms no other."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

Say = Callable[[object], None]
# Imported once by the server: what takes seconds to import (torch._dynamo comes with the first optimiser) and starts no threads. Not
# polars: its threads would be missing in every process that the server forks.
_PRELOADED = ["torch", "torch._dynamo", "matplotlib.figure", "matplotlib.backends.backend_agg"]


@dataclass(frozen=True)
class Task:
    """A function at the top level of a module, called as work(say, *arguments); what it says reaches the caller while it runs."""

    name: str
    work: Callable[..., Any]
    arguments: tuple[Any, ...]


Tasks = dict[tuple[str, str, str], Task]  # by data, recipe, and "seed 3" or "tuning"


@dataclass(frozen=True)
class Said:
    """A message of a running task."""

    name: str
    message: Any


@dataclass(frozen=True)
class Ended:
    """The value that a task returned, or in one line why it did not."""

    name: str
    value: Any
    error: str | None


@dataclass(frozen=True)
class Failure:
    """A training or tuning that did not end well."""

    data: str
    recipe: str
    what: str  # "seed 3" or "tuning"
    error: str


@dataclass
class Listener:
    """Called as tasks go on; every method does nothing unless replaced."""

    begin: Callable[[str, int, int], None] = lambda phase, done, total: None
    said: Callable[[str, Any], None] = lambda task, message: None
    ended: Callable[[str, str | None], None] = lambda task, error: None


def run(tasks: Sequence[Task], jobs: int = 1, threads: int | None = None) -> Iterator[Said | Ended]:
    """Run every task, at most `jobs` at once, and tell what they say and how they end, as it happens.

    A task starts from a server that has only imported libraries, so it starts in a moment and holds no memory of an earlier one and no
    half-used thread pool. `threads` is what each may use of the CPU. Leaving the iteration early (Ctrl-C) ends what still runs, and so does
    a caller that is killed.

        for event in run([Task("a", train_one, (1,)), Task("b", train_one, (2,))], jobs=2): ...
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    waiting = list(reversed(tasks))
    running: dict[Connection, tuple[Task, ForkServerProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop()
                here, there = context.Pipe(duplex=False)
                child = context.Process(target=_begin, args=(there, threads, task), daemon=True)
                child.start()
                there.close()
                running[here] = (task, child)
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                task, child = running[pipe]
                try:
                    event = pipe.recv()
                except EOFError:  # it died without a word: out of memory, a signal
                    child.join()
                    event = Ended(
                        task.name, None, f"its process ended with code {child.exitcode}: killed, or out of memory"
                    )
                if isinstance(event, Ended):
                    del running[pipe]
                    pipe.close()
                    child.join()
                yield event
    finally:
        for _, child in running.values():
            child.terminate()
        for _, child in running.values():
            child.join()


def _begin(pipe: Connection, threads: int | None, task: Task) -> None:
    import torch

    threading.Thread(target=_end_with_caller, daemon=True).start()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        value = task.work(lambda message: pipe.send(Said(task.name, message)), *task.arguments)
        pipe.send(Ended(task.name, value, None))
    except KeyboardInterrupt:  # the caller has been interrupted too, and says so
        os._exit(130)
    except Exception as error:
        if os.environ.get("SPARRING_DEBUG", "") not in ("", "0"):
            import traceback

            traceback.print_exc()
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        pipe.send(Ended(task.name, None, text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"))


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def perform(tasks: Tasks, total: int, phase: str, jobs: int, listener: Listener) -> list[Failure]:
    """Run tasks in processes of their own, tell the listener, and give back what failed; `total` counts those done before too."""
    failures: list[Failure] = []
    where = {task.name: key for key, task in tasks.items()}
    listener.begin(phase, total - len(tasks), total)
    for event in run(list(tasks.values()), jobs, 1 if jobs > 1 else None):
        if isinstance(event, Said):
            listener.said(event.name, event.message)
            continue
        if event.error is not None:
            failures.append(Failure(*where[event.name], event.error))
        listener.ended(event.name, event.error)
    return failures
