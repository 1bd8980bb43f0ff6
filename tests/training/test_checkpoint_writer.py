"""Checkpoints are written during training and hold its state at the moment of the snapshot."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.recipes.settings import build
from sparring.training import checkpoint_writer
from sparring.training.checkpoint_writer import BackgroundWriter, Copies
from sparring.training.fitting import Fitted, fit
from sparring.training.loop import TrainingProgress

CASES: dict[str, dict[str, Any]] = {
    "xir": {"cache_size": 64, "draw": "multinomial"},
    "tables": {"n": 16, "optimizer": "adam", "learn_tau": True},
    "bpr": {"optimizer": "row-adagrad", "tables": "sharded", "weight_decay": 0.0},
}


class Killed(BaseException):
    """Simulates a kill: nothing may catch it."""


def train(
    case: str, parts: Split, out: Path, resume: bool = False, step: Callable[[int], bool] = lambda step: True
) -> Fitted:
    """Train with a checkpoint after every epoch, and after each step for which `step` returns True."""
    run = build(case, parts.train, {"dim": 8, "epochs": 3, "batch_size": 64, "patience": None, **CASES[case]})
    taken = [0]

    def count(epoch: int, done: int, loss: Callable[[], float]) -> bool:
        taken[0] += 1
        return step(taken[0])

    progress = TrainingProgress(step=count, epoch=lambda record: True)
    return fit(run, parts, out, resume=resume, k=(10,), device="cpu", progress=progress)


def same(one: Path, other: Path) -> bool:
    """Whether the models and all state of two runs are equal bit by bit."""
    pairs = [
        [files.read_tensors(folder / f"{name}.safetensors")[0] for folder in (one, other)]
        for name in ("model", "checkpoint")
    ]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def test_training_goes_on_while_a_checkpoint_is_written(
    parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk accepts no byte until two more steps are done, the steps are done."""
    begun, moved, held, real = threading.Event(), threading.Event(), [], os.fsync

    def fsync(file: int) -> None:
        if threading.current_thread() is not threading.main_thread() and not held:
            begun.set()
            held.append(moved.wait(60))
        real(file)

    def step(number: int) -> bool:
        if number == 3:
            assert begun.wait(60)
        if number == 4:
            moved.set()
        return number == 2

    monkeypatch.setattr(os, "fsync", fsync)
    train("xir", parts, tmp_path / "run", step=step)
    assert held == [True]


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_checkpoint_is_what_training_was_when_it_was_taken(
    case: str, parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps taken while tensors wait for a slow disk do not change the checkpoint: a resumed run is bitwise identical
    to an uninterrupted one."""
    if case == "bpr":
        pytest.importorskip("torchrec")
    train(case, parts, tmp_path / "whole", step=lambda number: False)
    real, stops = files.write_tensors, [2, 5, 3, 4]

    def slow(*arguments: Any) -> None:
        time.sleep(0.03)
        real(*arguments)

    def step(number: int) -> bool:
        if stops and number == stops[0]:
            stops.pop(0)
            raise Killed
        return number % 3 == 1

    monkeypatch.setattr(files, "write_tensors", slow)
    resume = False
    while stops:
        with pytest.raises(Killed):
            train(case, parts, tmp_path / "stopped", resume, step)
        resume = True
    train(case, parts, tmp_path / "stopped", True, lambda number: False)
    assert same(tmp_path / "whole", tmp_path / "stopped")


def test_without_room_for_copies_training_waits(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If copies would exceed their share of memory, checkpoints are written synchronously; the run is the same."""
    train("xir", parts, tmp_path / "beside")
    started: list[object] = []
    monkeypatch.setattr(checkpoint_writer, "machine_bytes", lambda: 1000)
    monkeypatch.setattr(BackgroundWriter, "start", lambda self, work: started.append(work))
    train("xir", parts, tmp_path / "waiting")
    assert not started
    assert same(tmp_path / "beside", tmp_path / "waiting")


def test_an_error_beside_training_is_told_soon(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up during a checkpoint stops training at its next step with a one-line error; the previous
    checkpoint stays."""
    real, full, failed, after = os.replace, threading.Event(), threading.Event(), []

    def replace(source: Path, to: Path) -> None:
        if Path(to).name == "checkpoint.safetensors" and full.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to))
        real(source, to)

    def step(number: int) -> bool:
        if number == 3:
            while not (tmp_path / "run" / "checkpoint.safetensors").exists():
                time.sleep(0.005)
            full.set()
        if number > 3:
            after.append(number)
            assert failed.wait(60)
            time.sleep(0.05)  # for the thread to end
        return number <= 3  # no further save raises the error

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(UserError, match=r"checkpoint\.safetensors: No space") as error:
        train("xir", parts, tmp_path / "run", step=step)
    assert len(str(error.value).splitlines()) == 1
    assert len(after) <= 2
    assert files.read_tensors(tmp_path / "run" / "checkpoint.safetensors")[1]["step"] <= 3


def test_one_at_a_time_and_errors_once() -> None:
    """Work waits for the previous work; its error is raised once, by the next call."""
    work, order = BackgroundWriter(), []
    for number in range(3):
        work.start(lambda number=number: (time.sleep(0.01), order.append(number)))  # type: ignore[misc]
        assert order == list(range(number))
    work.wait()
    assert order == [0, 1, 2]
    work.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        work.wait()
    work.check()


def test_copies_keep_their_memory_on_a_cpu() -> None:
    """The second copy reuses the memory of the first, unless its shape differs; nothing is shared with the tensor."""
    copies, tensor = Copies(), torch.arange(6.0)
    first = copies.take({"x": tensor}, "memory")["x"]
    tensor += 1
    assert first.tolist() == [0, 1, 2, 3, 4, 5]
    second = copies.take({"x": tensor}, "memory")["x"]
    assert second.tolist() == [1, 2, 3, 4, 5, 6]
    assert second.data_ptr() == first.data_ptr()
    assert copies.take({"x": torch.ones(2, 2)}, "memory")["x"].shape == (2, 2)
