"""The lock of a run folder, and overwriting."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest

import sparring
from sparring.cli import main
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.data.synthetic_world import SyntheticWorld
from sparring.recipes.run import Run
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.folder import LOCK, delete_run
from sparring.training.loop import TrainingProgress
from support.settings import quick

QUICK = quick(epochs=2)


@pytest.fixture
def run(parts: Split) -> Run:
    return build("ssl", parts.train, QUICK)


@pytest.fixture
def pairs(small_world: SyntheticWorld, tmp_path: Path) -> Path:
    data = small_world.interactions
    pl.DataFrame({"user_id": data.queries, "item_id": data.items}).write_parquet(tmp_path / "pairs.parquet")
    return tmp_path / "pairs.parquet"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of tmp_path/run."""
    code = "import pathlib, sys, time; from sparring.training.folder import hold; "
    code += "kept = hold(pathlib.Path(sys.argv[1])); print('held', flush=True); "
    environment = {**os.environ, "PYTHONPATH": str(Path(sparring.__file__).parents[1])}
    words = [sys.executable, "-c", code + "time.sleep(120)", str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_run_is_not_replaced_unasked(run: Run, parts: Split, tmp_path: Path) -> None:
    """A second fit into a non-empty folder raises and changes nothing; overwrite replaces a run only."""
    out = tmp_path / "run"
    fit(run, parts, out, k=(10,), device="cpu")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UserError, match="not empty"):
        fit(run, parts, out, k=(10,), device="cpu")
    with pytest.raises(UserError, match="overwrite"):
        fit(run, parts, out, k=(10,), device="cpu", resume=True, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "old").mkdir()
    (out / "old" / "index").write_text("of the run before")
    fit(build("uns", parts.train, {**QUICK, "n": 8}), parts, out, k=(10,), device="cpu", overwrite=True)
    assert json.loads((out / "run.json").read_text())["recipe"] == "uns"
    assert {path.name for path in out.iterdir()} == before.keys()

    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1").write_text("precious")
    with pytest.raises(UserError, match="not empty"):
        fit(run, parts, other, k=(10,), device="cpu")
    with pytest.raises(UserError, match="not a run folder"):
        fit(run, parts, other, k=(10,), device="cpu", overwrite=True)
    assert [path.name for path in other.iterdir()] == ["chapter1"]
    fit(run, parts, other, k=(10,), device="cpu", resume=True)  # a run stopped before its run.json was written
    assert (other / "chapter1").read_text() == "precious"


def test_what_a_service_keeps_outlives_its_run(
    run: Run, parts: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Overwriting deletes the run and its index, and logs it; the folder `serve` stays, even before run.json is
    written."""
    out = tmp_path / "run"
    fit(run, parts, out, k=(10,), device="cpu")
    for name in ("serve", "index"):
        (out / name).mkdir()
        (out / name / "items.sqlite").write_text(name)
    with caplog.at_level(logging.INFO, "sparring"):
        fit(run, parts, out, k=(10,), device="cpu", overwrite=True)
    assert (out / "serve" / "items.sqlite").read_text() == "serve"
    assert not (out / "index").exists()
    (message,) = [message for message in caplog.messages if "deleted" in message]
    assert str(out) in message
    assert "its index" in message
    assert str(out / "serve") in message
    delete_run(out)
    assert [path.name for path in out.iterdir()] == ["serve"]
    fit(run, parts, out, k=(10,), device="cpu")
    assert (out / "serve" / "items.sqlite").read_text() == "serve"


def test_a_run_that_cannot_be_trained_replaces_none(parts: Split, tmp_path: Path) -> None:
    """An invalid run raises before the run in the folder is deleted."""
    out = tmp_path / "run"
    fit(build("ssl", parts.train, QUICK), parts, out, k=(10,), device="cpu")
    bad = build("ssl", parts.train, QUICK)
    object.__setattr__(bad.terms[0], "loss", lambda step, bag: step.positive_logits.mean())
    with pytest.raises(UserError, match="one value per query"):
        fit(bad, parts, out, k=(10,), device="cpu", overwrite=True)
    assert (out / "result.json").is_file()


def test_overwrite_needs_a_folder(run: Run, parts: Split) -> None:
    """overwrite without a folder raises an error."""
    with pytest.raises(UserError, match="`out`"):
        fit(run, parts, overwrite=True, k=(10,), device="cpu")


def test_a_second_training_is_told_who_writes(run: Run, parts: Split, tmp_path: Path) -> None:
    """While one training writes, another into its folder raises and changes nothing; afterwards no lock is left."""
    out, told = tmp_path / "run", []

    def step(epoch: int, done: int, loss: Callable[[], float]) -> None:
        if not told:
            with pytest.raises(UserError) as error:
                fit(build("ssl", parts.train, QUICK), parts, out, k=(10,), device="cpu", resume=True)
            told.append(str(error.value))

    fit(run, parts, out, k=(10,), device="cpu", progress=TrainingProgress(step=step))
    assert f"process {os.getpid()} on " in told[0]
    assert str(out) in told[0]
    assert (out / "result.json").is_file()
    assert not (out / LOCK).exists()


def test_the_command_line_says_who_writes(
    pairs: Path, tmp_path: Path, holder: subprocess.Popen[str], refused: Callable[..., str]
) -> None:
    """One line names the holder of the folder, for train, --resume and --overwrite, on one or several ranks."""
    (tmp_path / "run" / "run.json").write_text("{}")
    words = ["train", "--data", pairs, "--out", tmp_path / "run", "--recipe", "ssl", "--epochs", "1", "--quiet"]
    for more in ([], ["--overwrite"], ["--nproc", "2"], ["--nproc", "2", "--overwrite"]):
        refused([*words, *more], f"process {holder.pid} on ", "run")
    (tmp_path / "run" / "run.json").unlink()
    refused([*words, "--resume"], f"process {holder.pid} on ")


def test_a_lock_dies_with_its_process(pairs: Path, tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    """After kill -9 the lock file remains but blocks nobody."""
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / LOCK).is_file()
    words = [
        "train",
        "--data",
        str(pairs),
        "--out",
        str(tmp_path / "run"),
        "--recipe",
        "ssl",
        "--epochs",
        "1",
        "--quiet",
    ]
    assert main(words) == 0
    assert not (tmp_path / "run" / LOCK).exists()


def test_one_of_many_has_the_lock(tmp_path: Path) -> None:
    """Processes that compete for one folder never hold it at the same time."""
    code = """
import sys, time, pathlib
from sparring.training.folder import hold
from sparring.core.errors import UserError
print("ready", flush=True)
sys.stdin.readline()
folder, end, had = pathlib.Path(sys.argv[1]), time.time() + 1, 0
while time.time() < end:
    try:
        held = hold(folder)
    except UserError:
        continue
    mark = folder / "mark"
    mark.touch(exist_ok=False)
    mark.unlink()
    held.release()
    had += 1
print(had)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(sparring.__file__).parents[1])}
    words = [sys.executable, "-c", code, str(tmp_path / "run")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(words, text=True, env=environment, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("begin\n")
        process.stdin.flush()
    counts = [int(process.communicate(timeout=120)[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sum(counts) > 10
