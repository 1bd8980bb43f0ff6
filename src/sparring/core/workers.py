"""A pool of processes, one fresh process per task: a task that fails or is killed harms no other."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from sparring.core.devices import sleep_for_gpus
from sparring.core.errors import first_line
from sparring.core.processes import raise_on_termination

Say = Callable[[object], None]
# Slow imports without threads, done once by the fork server. Not polars: its threads would be missing in
# every forked process.
_PRELOADED = ["torch", "torch._dynamo", "matplotlib.figure", "matplotlib.backends.backend_agg"]


@dataclass(frozen=True)
class Task:
    """A module-level function, called as work(say, *arguments); messages passed to say() reach the caller at once."""

    name: str
    work: Callable[..., Any]
    arguments: tuple[Any, ...]


Tasks = dict[tuple[str, str, str], Task]  # by data, recipe, and "seed 3" or "tuning"


@dataclass(frozen=True)
class TaskMessage:
    """A message of a running task."""

    name: str
    message: Any


@dataclass(frozen=True)
class Ended:
    """The value that a task returned, or a one-line error."""

    name: str
    value: Any
    error: str | None


@dataclass(frozen=True)
class Failure:
    """A training or tuning that failed."""

    data: str
    recipe: str
    what: str  # "seed 3" or "tuning"
    error: str


@dataclass
class Listener:
    """Callbacks on the progress of tasks; each does nothing by default."""

    begin: Callable[[str, int, int], None] = lambda phase, done, total: None
    said: Callable[[str, Any], None] = lambda task, message: None
    ended: Callable[[str, str | None], None] = lambda task, error: None


def run(
    tasks: Iterable[Task], jobs: int = 1, threads: int | None = None, deadline: float | None = None
) -> Iterator[TaskMessage | Ended]:
    """Run every task, at most `jobs` at once, and yield their messages and results as they arrive.

    A task is taken from `tasks` when a process is free, so an iterator may decide late.

    A task is forked from a server that has only imported libraries: it starts at once and inherits neither memory of an
    earlier task nor a broken thread pool. Where there is no fork, on Windows, it is a new Python. `threads` limits the
    CPU threads of each task, which then sleeps while it waits for a GPU. Leaving the iteration early (Ctrl-C) ends all
    running tasks, and so does the death of the caller. At `deadline`, a time.monotonic(), the iteration ends, and the
    running tasks with it.

        for event in run([Task("a", train_one, (1,)), Task("b", train_one, (2,))], jobs=2): ...
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(_PRELOADED)
    waiting = iter(tasks)
    running: dict[Connection, tuple[Task, BaseProcess]] = {}
    try:
        while True:
            while len(running) < jobs and (task := next(waiting, None)) is not None:
                here, there = context.Pipe(duplex=False)
                child = context.Process(target=_begin, args=(there, threads, task), daemon=True)
                child.start()
                there.close()
                running[here] = (task, child)
            if not running:
                return
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            for pipe in wait(list(running), left):
                assert isinstance(pipe, Connection)
                task, child = running[pipe]
                try:
                    event = pipe.recv()
                except EOFError:  # it died without a message: out of memory, or a signal
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

    raise_on_termination()
    threading.Thread(target=_end_with_caller, daemon=True).start()
    if threads is not None:
        torch.set_num_threads(threads)
        sleep_for_gpus()
    try:
        value = task.work(lambda message: pipe.send(TaskMessage(task.name, message)), *task.arguments)
        pipe.send(Ended(task.name, value, None))
    except KeyboardInterrupt:  # the caller was interrupted too, or ended this task
        os._exit(130)
    except Exception as error:
        if os.environ.get("SPARRING_DEBUG", "") not in ("", "0"):
            import traceback

            traceback.print_exc()
        text = first_line(error)
        pipe.send(Ended(task.name, None, text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"))


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def perform(tasks: Tasks, total: int, phase: str, jobs: int, listener: Listener) -> list[Failure]:
    """Run tasks, notify the listener, and return the failures; `total` includes tasks finished earlier."""
    failures: list[Failure] = []
    where = {task.name: key for key, task in tasks.items()}
    listener.begin(phase, total - len(tasks), total)
    for event in run(list(tasks.values()), jobs, 1 if jobs > 1 else None):
        if isinstance(event, TaskMessage):
            listener.said(event.name, event.message)
            continue
        if event.error is not None:
            failures.append(Failure(*where[event.name], event.error))
        listener.ended(event.name, event.error)
    return failures
