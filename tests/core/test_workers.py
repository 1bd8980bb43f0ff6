"""Worker processes end with their caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
