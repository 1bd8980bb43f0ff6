"""Locks between processes: one holder at a time, and none once the file is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import sparring
from sparring.core import locks
from sparring.core.errors import UserError
from sparring.core.locks import HeldError, Lock, is_held, owner, writing


def test_a_released_lock_is_free(tmp_path: Path) -> None:
    """While held, a second lock is refused with the holder's name; after the release the file is gone and free."""
    path = tmp_path / "folder" / ".lock"
    assert not is_held(path)
    assert not path.exists(), "asking must not create it"
    first = Lock(path)
    assert is_held(path)
    with pytest.raises(HeldError) as refusal:
        Lock(path)
    assert str(os.getpid()) in refusal.value.owner
    first.release()
    assert not path.exists()
    assert not is_held(path)
    Lock(path).release()


def test_a_deleted_file_is_not_held(tmp_path: Path) -> None:
    """A lock file that was deleted guards no name: the path is free, and the next lock there is a lock of its own."""
    path = tmp_path / ".lock"
    first = Lock(path)
    path.unlink()
    assert not is_held(path)
    second = Lock(path)
    assert is_held(path)
    with pytest.raises(HeldError):
        Lock(path)
    second.release()
    first.release()


def test_a_stale_file_is_not_held(tmp_path: Path) -> None:
    """The file of a process that was killed holds nothing."""
    path = tmp_path / ".lock"
    code = "import sys, pathlib, time; from sparring.core.locks import Lock; lock = Lock(pathlib.Path(sys.argv[1])); "
    code += "print('held', flush=True); time.sleep(60)"
    environment = {**os.environ, "PYTHONPATH": str(Path(sparring.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert is_held(path)
        process.kill()
        process.wait()
    assert path.is_file()
    assert not is_held(path)
    Lock(path).release()


def test_waiters_never_hold_a_deleted_file(tmp_path: Path) -> None:
    """Threads that wait for the lock while its file is deleted and made again: never two holders at once."""
    path, holders, most, turns = tmp_path / ".lock", list[int](), list[int](), list[int]()

    def work(number: int) -> None:
        while turns.count(number) < 5:
            try:
                lock = Lock(path)
            except HeldError:
                continue
            holders.append(number)
            most.append(len(holders))
            time.sleep(0.001)
            holders.remove(number)
            turns.append(number)
            lock.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (max(most), len(turns)) == (1, 15)


def test_writers_of_one_file_exclude_each_other(tmp_path: Path) -> None:
    """A second writer is refused in one line with the holder's pid; the lock and its empty folder leave no trace."""
    target = tmp_path / "out" / "lists.csv"
    with writing(target):
        with pytest.raises(UserError, match=str(os.getpid())) as refusal, writing(target):
            pytest.fail("two writers")
        assert "lists.csv" in str(refusal.value)
    assert not target.parent.exists()
    with writing(target):
        target.write_text("a,b")
    assert [path.name for path in target.parent.iterdir()] == ["lists.csv"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A file in the way of the folder is one line that names the target."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"), writing(tmp_path / "file" / "lists.csv"):
        pytest.fail("it cannot be written")


def test_a_lock_whose_holder_left_no_name(tmp_path: Path) -> None:
    """An empty or missing lock file names nobody."""
    assert owner(tmp_path / "none") == "another process"
    (tmp_path / "empty").write_text("\n")
    assert owner(tmp_path / "empty") == "another process"


def test_a_lock_that_may_not_be_opened_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock file that this user may not open counts as free: readers do not wait for it."""
    path = tmp_path / ".lock"
    path.write_text("process 1 on host\n")

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(locks.FileLock, "acquire", forbidden)
    assert not is_held(path)
