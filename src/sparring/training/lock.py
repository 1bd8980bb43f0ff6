"""The lock of a run folder: one training writes to it at a time."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from sparring.core.errors import UserError

NAME = ".lock"


def hold(folder: Path) -> IO[str]:
    """Lock a folder for this process, or say which one has it. The lock is the system's, so it ends with the process, however that ends."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another folder for the run")
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            file = open(path, "a+")  # noqa: SIM115
            if not _lock(file):
                file.seek(0)
                who = file.read().strip() or "another process"
                file.close()
                raise UserError(f"another training ({who}) writes to {folder}: wait for it, or choose another folder")
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                break
            file.close()  # its holder deleted it when it was done: this lock is on nothing
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return file


def is_held(folder: Path) -> bool:
    """Whether a training writes into a folder now."""
    try:
        with open(folder / NAME) as file:
            return not _lock(file)
    except OSError:
        return False


def release(folder: Path, file: IO[str]) -> None:
    """Undo `hold`."""
    with suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)
    file.close()


def _lock(file: IO[str]) -> bool:
    """Whether this process now has the file; also true where the system, or the file system, knows no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True
