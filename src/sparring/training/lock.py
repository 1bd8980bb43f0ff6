"""Who writes into a run folder: one training at a time, and over what is there only where that was asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparring.core import locks
from sparring.core.errors import UserError
from sparring.core.locks import HeldError, Lock
from sparring.core.types import Ranks

NAME = ".lock"
SERVICE = (
    "serve"  # what a service keeps in a run folder: changes that it has acknowledged, which are not the run's to delete
)


@contextmanager
def claimed(folder: Path, resume: bool, overwrite: bool, ranks: Ranks) -> Iterator[None]:
    """Hold a folder for a training, if it may write there: rank 0 does, and what it is refused all ranks raise."""
    held: Lock | None = None
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
            held.release()


def hold(folder: Path) -> Lock:
    """Lock a folder for this process; the error names the process that holds it."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another folder for the run")
    try:
        return Lock(folder / NAME)
    except HeldError as error:
        raise UserError(
            f"another training ({error.owner}) writes to {folder}: wait for it, or choose another folder"
        ) from error
    except OSError as error:
        raise UserError(f"cannot write {folder / NAME}: {error.strerror}") from error


def is_held(folder: Path) -> bool:
    """Whether a training writes into a folder now."""
    return locks.is_held(folder / NAME)


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
