"""Worker processes: a task that fails or is killed harms no other, and all end with their caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparring.core.workers import Ended, Failure, Listener, Task, TaskMessage, perform, run
from support import tasks

CALLER = """
import os, sys, time
from sparring.core.workers import Task, run


def work(say):
    say(os.getpid())
    time.sleep(600)


if __name__ == "__main__":
    for event in run([Task("a", work, ()), Task("b", work, ())], jobs=2):
        print(event.message, flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see which processes live")
def test_a_killed_caller_takes_its_processes_along(tmp_path: Path) -> None:
    """If the caller is killed with SIGKILL, none of its workers keeps running."""
    (tmp_path / "caller.py").write_text(CALLER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "caller.py")], stdout=subprocess.PIPE, text=True, env=environment
    ) as caller:
        assert caller.stdout is not None
        pids = [int(caller.stdout.readline()) for _ in range(2)]
        assert all(alive(pid) for pid in pids)
        caller.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, "they go on"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_every_task_ends_with_a_value_or_a_line() -> None:
    """Values and messages arrive; an error, a kill and a bug are one line each, and the other tasks are unharmed."""
    work = [
        Task("killed", tasks.die, ()),
        Task("refused", tasks.fail, (ValueError("k is 0\nmore"),)),
        Task("broken", tasks.fail, (KeyError("x"),)),
        Task("three", tasks.square, (3,)),
        Task("threads", tasks.threads, ()),
    ]
    events = list(run(work, jobs=2, threads=1))
    ended = {event.name: event for event in events if isinstance(event, Ended)}
    assert ended.keys() == {task.name for task in work}
    assert [event for event in events if isinstance(event, TaskMessage)] == [TaskMessage("three", "squaring 3")]
    assert (ended["three"].value, ended["three"].error) == (9, None)
    assert ended["threads"].value == 1
    assert ended["refused"].error == "k is 0"
    assert str(ended["broken"].error).startswith("KeyError")
    assert "-9" in str(ended["killed"].error)


def test_failures_are_named_and_listeners_notified() -> None:
    """`perform` returns the failures by data, recipe and seed, and tells a listener of every message and end."""
    said, ends, begun = list[object](), dict[str, str | None](), list[object]()
    listener = Listener(
        begin=lambda *facts: begun.append(facts),
        said=lambda *facts: said.append(facts),
        ended=lambda name, error: ends.update({name: error}),
    )
    work = {
        ("world", "ssl", "seed 1"): Task("one", tasks.square, (2,)),
        ("world", "xir", "seed 1"): Task("two", tasks.fail, (ValueError("no"),)),
    }
    failures = perform(work, total=5, phase="training", jobs=1, listener=listener)
    assert failures == [Failure("world", "xir", "seed 1", "no")]
    assert begun == [("training", 3, 5)]
    assert said == [("one", "squaring 2")]
    assert ends == {"one": None, "two": "no"}


def test_leaving_early_ends_the_running_tasks(tmp_path: Path) -> None:
    """A caller that stops listening ends its tasks, which clean up first."""
    events = run([Task("slow", tasks.linger, (str(tmp_path / "note"),))])
    event = next(events)
    assert isinstance(event, TaskMessage)
    events.close()
    assert not alive(event.message)
    assert (tmp_path / "note").read_text() == "cleaned up"


def test_a_deadline_ends_running_tasks(tmp_path: Path) -> None:
    """At the deadline the iteration ends, running tasks are ended with it, and waiting ones never start."""
    work = [Task(name, tasks.linger, (str(tmp_path / name),)) for name in ("a", "b")]
    began = time.monotonic()
    events = list(run(work, jobs=1, deadline=began + 2))
    assert time.monotonic() - began < 30
    assert not any(isinstance(event, Ended) for event in events)
    pids = [event.message for event in events if isinstance(event, TaskMessage)]
    assert not any(alive(pid) for pid in pids)
    assert not (tmp_path / "b").exists()
    assert list(run(work, jobs=1, deadline=time.monotonic() - 1)) == []
