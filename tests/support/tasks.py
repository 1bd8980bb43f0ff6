"""Tasks for the pool of processes, importable by its workers."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch


def square(say: Any, n: int) -> int:
    say(f"squaring {n}")
    return n * n


def threads(say: Any) -> int:
    return torch.get_num_threads()


def fail(say: Any, error: Exception) -> None:
    raise error


def die(say: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def linger(say: Any, path: str) -> None:
    """Say something, wait, and write a file when the task is ended early."""
    try:
        say(os.getpid())
        time.sleep(60)
    finally:
        with open(path, "w") as file:
            file.write("cleaned up")
