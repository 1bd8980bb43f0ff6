"""Locks between processes: a file that one process holds, released by the system when that process ends."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout, has_fcntl

from sparring.core.errors import UserError, first_line

LOCK = ".lock"  # the lock of a folder, inside it
_WAIT = 0.1  # seconds: a process that only asks whether a lock is held has it for a moment


class HeldError(Exception):
    """Another holder has the lock; `owner` names it."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


class Lock:
    """A file that this process holds until `release`.

    try: lock = Lock(folder / ".lock")
    except HeldError as error: print(error.owner)     # process 4711 on host
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, FileLock(path, thread_local=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=_WAIT, poll_interval=_WAIT / 4)
        except Timeout as error:
            raise HeldError(owner(path)) from error
        if has_fcntl:  # Windows lets nobody read a locked file, and a lock without the system has written this itself
            with suppress(OSError):
                path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")

    def release(self) -> None:
        """Delete the file, then release the lock: a process that opened the file sees that it is gone and retries."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        self._lock.release()


@contextmanager
def writing(target: Path, lock: Path | None = None) -> Iterator[None]:
    """Keep other processes from writing a file, or a folder with its `lock` inside; the error names the holder.

    with writing(Path("lists.parquet")): ...
    with writing(folder, folder / LOCK): ...
    """
    lock = lock or target.with_name(f".{target.name}{LOCK}")
    new = not lock.parent.exists()
    try:
        held = Lock(lock)
    except HeldError as error:
        raise UserError(f"{error.owner} writes to {target}: wait for it, or choose another place") from error
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or first_line(error)}") from error
    try:
        yield
    finally:
        held.release()
        if new:
            with suppress(OSError):  # it is not empty: something was written
                lock.parent.rmdir()


def is_held(path: Path) -> bool:
    """Whether any process holds the lock at this path."""
    if not path.is_file():
        return False
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return False
    lock.release()
    return False


def owner(path: Path) -> str:
    """The holder that a lock file names in its first two lines, its process and its host."""
    with suppress(OSError, UnicodeDecodeError):
        lines = path.read_text().split("\n")
        if len(lines) > 1 and lines[0].isdigit():
            return f"process {lines[0]} on {lines[1]}"
    return "another process"
