"""Who writes into a run folder: one training at a time, and over what is there only where that was asked for."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from sparring.core.errors import UserError
from sparring.core.types import Ranks

NAME = ".lock"
SERVICE = (
    "serve"  # what a service keeps in a run folder: changes that it has acknowledged, which are not the run's to delete
)


@contextmanager
def claimed(folder: Path, resume: bool, overwrite: bool, ranks: Ranks) -> Iterator[None]:
    """Hold a folder for a training, if it may write there: rank 0 does, and what it is refused all ranks raise."""
    held: IO[str] | None = None
    refused: UserError | None = None
    if ranks.rank == 0:
        try:
            held = hold(folder)
            check_free(folder, resume, overwrite)
        except UserError as error:
            refused = error
    refused = ranks.share(refused)
    try:
        if refused is not None:
            raise refused
        yield
    finally:
        if held is not None:
            release(folder, held)


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


def check_free(folder: Path, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that holds anything, unless a run in it is to go on or is to be deleted."""
    if resume and overwrite:
        raise UserError("resume and overwrite cannot go together")
    if resume or is_free(folder):
        return
    if not overwrite:
        raise UserError(
            f"{folder} is not empty: choose another folder, or use resume=True to go on or overwrite=True to start again"
        )
    if not (folder / "run.json").is_file():
        raise UserError(f"{folder} is not a run folder (no run.json): overwrite will not delete it")


def is_free(folder: Path) -> bool:
    """Whether a folder holds nothing of a run; what a service keeps there may stay beside a new one."""
    return all(path.name in (NAME, SERVICE) for path in folder.iterdir())


def delete_run(folder: Path) -> str | None:
    """Delete all that a run folder holds, its index too, but for what a service keeps there; nothing of a folder that is none.

    Stopped halfway, what is left is still the old run's. What was done, in words.
    """
    if not (folder / "run.json").is_file():
        return None
    also = " and its index" if (folder / "index").is_dir() else ""
    kept = f"; what a service keeps in {folder / SERVICE} stays" if (folder / SERVICE).is_dir() else ""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "run.json"):
        if path.name == SERVICE:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != NAME:
            path.unlink()
    return f"deleted the run that was in {folder}{also}{kept}"
