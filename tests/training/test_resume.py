"""A run stopped at any moment and resumed is bitwise identical to an uninterrupted run."""

from __future__ import annotations

import errno
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.losses import bpr, hinge
from sparring.negatives import InBatch, Sampled, Uniform
from sparring.recipes.run import Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup
from sparring.training import trained
from sparring.training.fitting import Fitted, fit
from sparring.training.folder import difference
from sparring.training.loop import TrainingProgress
from support.run_files import contents, flip
from support.settings import effort

SETTINGS: dict[str, dict[str, Any]] = {
    "xir": {"draw": "multinomial", "cache_size": 64},
    "xir release": {"form": "release", "cache_size": 64},
    "g_tower": {"alpha": 0.2},
    "cbns": {"opens": 3, "size": 100},
    "default": {"n": 16, "learn_tau": True, "clip": 1.0, "warmup": 5},
    "default history": {"n": 16, "query_tower": "history", "item_features": "category", "hidden": "8"},
    "shown": {"n": 2, "lr_decay": 0.5, "lr_decay_every": 1},
    "bpr": {"patience": 1, "eval_every": 2},
    "dns": {"n": 4, "warmup": 5, "schedule": "cosine"},
    "fairneg": {"n": 64, "every": 2, "groups": 4},
    "midx": {"n": 8, "words": 4, "every": 2},
    "ance": {"batch_size": 10, "k": 5, "skip": 1, "every": 1, "draw": "propensity"},
    "ngame": {"batch_size": 10, "size": 4, "every": 1, "grow": "2", "clf_epochs": 0},
    "dexa": {"batch_size": 10, "size": 4, "every": 2, "auxiliary": 4, "private": 3, "clf_epochs": 0},
    "prime": {"batch_size": 10, "size": 4, "every": 2, "clf_epochs": 0},
}


class Killed(BaseException):
    """Simulates a kill: nothing may catch it."""


def train(
    case: str,
    parts: Split,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: TrainingProgress | None = None,
    **more: Any,
) -> Fitted:
    """Train with a checkpoint after every epoch."""
    progress = progress or TrainingProgress(epoch=lambda record: True)
    settings = {"dim": 8, "epochs": 3, "batch_size": 64, "patience": None, **SETTINGS[case], **more}
    run = build(case.split()[0], parts.train, settings)
    return fit(run, parts, out, resume=resume, overwrite=overwrite, k=(10,), device="cpu", progress=progress)


def assert_same(one: Path, other: Path) -> None:
    first, second = contents(one), contents(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name], name


def killing(moments: set[int], checkpoints: random.Random) -> TrainingProgress:
    """Raise at these steps, 100 per epoch; checkpoints after about every third step and after every epoch."""

    def step(epoch: int, done: int, loss: Callable[[], float]) -> bool:
        save, now = checkpoints.random() < 0.3, epoch * 100 + done
        if now in moments:
            moments.remove(now)
            raise Killed
        return save

    return TrainingProgress(step=step, epoch=lambda record: True)


@pytest.mark.parametrize("optimizer", ["row-adam", "adam"])
@pytest.mark.parametrize("case", sorted(SETTINGS))
def test_stopped_at_any_step_and_resumed(case: str, optimizer: str, parts: Split, tmp_path: Path) -> None:
    """Stopped before the first checkpoint, inside epochs and at their ends, a resumed run is bitwise identical to an
    uninterrupted one.

    Covers sampler state (cache, memory, streaming gaps), both optimisers, a learned temperature, history and feature
    towers, warm-up, decay and early stopping."""
    train(case, parts, tmp_path / "whole", optimizer=optimizer)
    moments = {1, 3, 6, 102, 103, 201, 204}
    progress = killing(moments, random.Random(case))
    stops = 0
    while True:
        try:
            train(case, parts, tmp_path / "stopped", resume=stops > 0, progress=progress, optimizer=optimizer)
            break
        except Killed:
            stops += 1
    assert stops >= 4
    assert_same(tmp_path / "whole", tmp_path / "stopped")


TARGETS = ["model", "checkpoint", "checkpoint.previous", "seen"]


@pytest.mark.parametrize(
    "target", [*(f"{name}.safetensors" for name in TARGETS), "metrics.jsonl", "run.json", "manifest.json"]
)
@pytest.mark.parametrize("renamed", [False, True])
def test_stopped_while_saving(
    target: str, renamed: bool, parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before a file is renamed, half-written, or right after, the resumed run is bitwise identical."""
    train("xir", parts, tmp_path / "whole")
    real, calls = os.replace, 0

    def replace(source: Path, to: Path) -> None:
        nonlocal calls
        if Path(to).name == target and Path(to).parent.name == "stopped":
            calls += 1
            if calls % 2:
                if renamed:
                    real(source, to)
                elif os.stat(source).st_nlink == 1:
                    os.truncate(source, os.path.getsize(source) // 2)
                raise Killed
        real(source, to)

    monkeypatch.setattr(os, "replace", replace)
    stops = 0
    while True:
        try:
            train("xir", parts, tmp_path / "stopped", resume=stops > 0)
            break
        except Killed:
            stops += 1
            assert stops < 20
    assert stops >= 1
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    assert {path.name for path in (tmp_path / "stopped").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


SERVER = """
import os, sys, time
import matplotlib.figure
import torch
import sparring.cli.train
from sparring.cli import main
torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()  # has imports of its own
flush = os.fsync
os.fsync = lambda file: (time.sleep(0.01), flush(file))  # a slow disk, so that a kill often falls into saving
for out in sys.stdin:  # a process for each line: the imports, most of a short run's time, are done once
    pid = os.fork()
    if not pid:
        os.dup2(2, 1)
        code = 1
        try:
            code = main([*sys.argv[1:], out.strip()])
        finally:
            os._exit(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Server:
    """Starts trainings as separate processes, one at a time."""

    def __init__(self, words: list[str], errors: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.errors = errors
        with open(errors, "wb") as file:
            command = [sys.executable, "-c", SERVER, *words]
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, bufsize=0
            )

    def run(self, out: Path, until: Callable[[], bool] | None = None, delay: float = 0.0) -> int:
        """The exit code of a training; -9 if it was killed, `delay` seconds after `until` became true."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{out}\n".encode())
        pid = int(self.process.stdout.readline())
        if until is not None:
            while not until() and not self._ended(0.0005):
                pass
            if not self._ended(delay):
                os.kill(pid, signal.SIGKILL)
        return int(self.process.stdout.readline())

    def _ended(self, seconds: float) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], seconds)[0])


def test_killed_by_the_system_and_resumed(parts: Split, tmp_path: Path) -> None:
    """`sparring train --resume`, killed with SIGKILL at its start, inside epochs and while files are written, is
    bitwise identical to an uninterrupted run."""
    rows = {"user_id": parts.train.queries, "item_id": parts.train.items, "timestamp": parts.train.time}
    pl.DataFrame(rows).write_parquet(tmp_path / "pairs.parquet")
    words = ["train", "--data", str(tmp_path / "pairs.parquet"), "--recipe", "xir", "--quiet", "--resume"]
    words += ["--save-seconds", "0.03"]
    for setting in (
        "draw=multinomial",
        "optimizer=row-adam",
        "cache_size=32",
        "dim=8",
        "batch_size=16",
        "patience=none",
        "lr=0.02",
    ):
        words += ["--set", setting]
    server = Server([*words, "--epochs", "8", "--device", "cpu", "--out"], tmp_path / "errors")
    try:
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        assert server.run(whole) == 0, server.errors.read_text()
        draw = random.Random(0)
        checkpoint, before, codes = killed / "checkpoint.safetensors", 0.0, []

        def saved() -> bool:
            return checkpoint.exists() and checkpoint.stat().st_mtime != before

        def writing(name: str) -> bool:
            return any(killed.glob(f".{name}.*.tmp"))

        moments: list[tuple[Callable[[], bool], float]] = [
            (lambda: (killed / "query_ids.parquet").exists(), 0.0),
            (lambda: writing("checkpoint.safetensors"), 0.0),
            (saved, draw.uniform(0, 0.06)),
            (lambda: saved() and writing("model.safetensors"), 0.0),
            (saved, draw.uniform(0, 0.06)),
            (lambda: saved() and writing("checkpoint.safetensors"), draw.uniform(0, 0.01)),
        ]
        for until, delay in moments[:4] + effort(1, 4) * moments[4:]:
            before = checkpoint.stat().st_mtime if checkpoint.exists() else 0.0
            codes.append(server.run(killed, until, delay))
        assert codes.count(-signal.SIGKILL) >= len(codes) // 2, (codes, server.errors.read_text())
        assert set(codes) <= {-signal.SIGKILL, 0}, (codes, server.errors.read_text())
        assert server.run(killed) == 0, server.errors.read_text()
    finally:
        server.process.kill()
        server.process.wait()
    assert_same(whole, killed)
    assert not list(killed.glob("*.tmp"))


def test_a_folder_without_a_run_is_begun(parts: Split, tmp_path: Path) -> None:
    """resume in a new folder, or in one without run.json, trains a complete run."""
    train("xir", parts, tmp_path / "whole")
    train("xir", parts, tmp_path / "fresh", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "fresh")
    assert {path.name for path in (tmp_path / "fresh").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


def test_resuming_a_finished_run_changes_nothing(parts: Split, tmp_path: Path) -> None:
    """Resuming a finished run takes no step and returns its result."""
    first = train("xir", parts, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    steps: list[int] = []
    again = train(
        "xir",
        parts,
        tmp_path / "run",
        resume=True,
        progress=TrainingProgress(step=lambda epoch, step, loss: steps.append(step)),
    )
    assert not steps
    assert again.best_epoch == first.best_epoch
    assert again.seconds == pytest.approx(first.seconds)
    assert_same(tmp_path / "run", tmp_path / "before")


def test_a_new_run_never_goes_on_from_an_old_ones_checkpoint(parts: Split, tmp_path: Path) -> None:
    """In a reused folder, a run stopped before its first checkpoint starts from scratch, not from an old one."""
    train("xir", parts, tmp_path / "whole", seed=5)
    train("xir", parts, tmp_path / "run", seed=4)
    with pytest.raises(Killed):
        train("xir", parts, tmp_path / "run", seed=5, overwrite=True, progress=killing({2}, random.Random(1)))
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        trained.load(tmp_path / "run", unfinished=True)
    train("xir", parts, tmp_path / "run", seed=5, resume=True)
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_resume_keeps_the_time_spent(parts: Split, tmp_path: Path) -> None:
    """The training time sums all parts of a run, including an epoch that was interrupted."""

    def slow(epoch: int, done: int, loss: Callable[[], float]) -> bool:
        time.sleep(0.02)
        if (epoch, done) == (0, 5):
            raise Killed
        return True

    with pytest.raises(Killed):
        train("xir", parts, tmp_path / "run", progress=TrainingProgress(step=slow), epochs=1)
    found = train("xir", parts, tmp_path / "run", resume=True, epochs=1)
    assert found.seconds > 4 * 0.02


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("xir", {"lr": 0.5}, "lr=0.001, not 0.5"),
        ("xir", {"batch_size": 32}, "batch_size=64, not 32"),
        ("xir", {"cache_size": 32}, "cache_size=64, not 32"),
        ("xir", {"optimizer": "row-adam"}, "optimizer=adam, not row-adam"),
        ("g_tower", {}, "recipe=xir, not g_tower"),
    ],
)
def test_resume_cannot_change_a_run(
    parts: Split, tmp_path: Path, case: str, changes: dict[str, Any], words: str
) -> None:
    """Resuming with other settings raises one line with both values."""
    train("xir", parts, tmp_path / "run", epochs=1)
    with pytest.raises(UserError, match=words):
        train(case, parts, tmp_path / "run", resume=True, **{"epochs": 1, **changes})


def stopped(parts: Split, out: Path, *terms: Term) -> None:
    """A custom run stopped in its second epoch, after a checkpoint."""

    def step(epoch: int, done: int, loss: Callable[[], float]) -> None:
        if epoch == 1:
            raise Killed

    progress = TrainingProgress(step=step, epoch=lambda record: True)
    with pytest.raises(Killed):
        fit(compose(parts.train, OWN, *terms), parts, out, k=(10,), device="cpu", progress=progress)


OWN = Setup.of(dim=8, epochs=3, batch_size=64)
CHANGED: dict[str, tuple[Callable[[], Term], list[str]]] = {
    "another sampler": (lambda: Term(1.0, InBatch()), ["term 1", "n=8", "InBatch"]),
    "another n": (lambda: Term(1.0, Sampled(Uniform(40), 9)), ["n=8", "n=9"]),
    "another weight": (lambda: Term(0.5, Sampled(Uniform(40), 8)), ["term 1=1 x", "not 0.5 x"]),
    "another loss": (lambda: Term(1.0, Sampled(Uniform(40), 8), bpr), ["sampled_softmax", "bpr"]),
}


@pytest.mark.parametrize("case", CHANGED)
def test_resume_cannot_change_the_terms(parts: Split, tmp_path: Path, case: str) -> None:
    """A custom run resumes only with its original terms."""
    term, mentions = CHANGED[case]
    stopped(parts, tmp_path / "run", Term(1.0, Sampled(Uniform(40), 8)))
    before = (tmp_path / "run" / "checkpoint.safetensors").read_bytes()
    with pytest.raises(UserError) as error:
        fit(compose(parts.train, OWN, term()), parts, tmp_path / "run", resume=True, k=(10,), device="cpu")
    for mention in [*mentions, "resume cannot change it"]:
        assert mention in str(error.value)
    assert (tmp_path / "run" / "checkpoint.safetensors").read_bytes() == before
    more = compose(parts.train, OWN, Term(1.0, Sampled(Uniform(40), 8)), Term(1.0, InBatch()))
    with pytest.raises(UserError, match=r"without term 2=1 x .*InBatch"):
        fit(more, parts, tmp_path / "run", resume=True, k=(10,), device="cpu")


def test_a_custom_run_resumes(parts: Split, tmp_path: Path) -> None:
    """The same terms, composed again, continue the run."""
    whole = fit(compose(parts.train, OWN, Term(1.0, InBatch(), hinge(0.4))), parts, k=(10,), device="cpu")
    stopped(parts, tmp_path / "run", Term(1.0, InBatch(), hinge(0.4)))
    meta = json.loads((tmp_path / "run" / "run.json").read_text())
    assert meta["method"]["term 1"].startswith("1 x hinge(margin=0.4) over InBatch(")
    again = compose(parts.train, OWN, Term(1.0, InBatch(), hinge(0.4)))
    resumed = fit(again, parts, tmp_path / "run", resume=True, k=(10,), device="cpu")
    assert [record["loss"] for record in resumed.history] == [record["loss"] for record in whole.history]


def test_resume_cannot_change_the_data(parts: Split, tmp_path: Path) -> None:
    """A different number of interactions raises an error."""
    train("xir", parts, tmp_path / "run", epochs=1)
    fewer = Split(parts.train.subset(np.arange(200)), parts.valid, parts.test)
    with pytest.raises(UserError, match=f"train={len(parts.train)}, not 200"):
        train("xir", fewer, tmp_path / "run", resume=True, epochs=1)


def test_resume_needs_a_folder(parts: Split) -> None:
    """Without a folder there is nothing to resume."""
    with pytest.raises(UserError, match="`out`"):
        fit(build("ssl", parts.train), parts, resume=True, k=(10,), device="cpu")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "two bytes short": lambda whole: whole[:-2],
    "header overwritten": lambda whole: whole[:8] + b"\xff" * 64 + whole[72:],
    "no safetensors": lambda whole: b"nothing of the kind",
}


@pytest.fixture(scope="module")
def finished(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume") / "run"
    train("xir", parts, folder, epochs=1)
    return folder


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "model.safetensors", "run.json"])
@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_a_damaged_file_is_named(finished: Path, parts: Split, tmp_path: Path, name: str, damage: str) -> None:
    """A torn or overwritten file that resuming needs is one line with its path, without a traceback."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / name).write_bytes(DAMAGE[damage]((folder / name).read_bytes()))
    with pytest.raises(UserError) as error:
        train("xir", parts, folder, resume=True, epochs=1)
    assert str(folder / name) in str(error.value)
    assert "corrupt" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_checkpoint_of_something_else_is_named(finished: Path, parts: Split, tmp_path: Path) -> None:
    """A readable checkpoint with missing or extra tensors raises one line with the path and the first difference."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    path = folder / "checkpoint.safetensors"
    tensors, state = files.read_tensors(path)

    def refused(words: str, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        files.write_tensors(path, tensors, state)
        with pytest.raises(UserError, match=words) as error:
            train("xir", parts, folder, resume=True, epochs=1)
        assert str(path) in str(error.value)
        assert len(str(error.value).splitlines()) == 1

    for gone in ("generator", "module.model.item.weight", "module.term1.source.ids", "optimizer.0.rate.0"):
        refused(
            gone.removeprefix("module.").removeprefix("optimizer."),
            {k: v for k, v in tensors.items() if k != gone},
            state,
        )
    refused("unknown", {**tensors, "module.unknown": torch.zeros(1)}, state)
    refused("weight", {**tensors, "module.model.item.weight": torch.zeros(3, 3)}, state)
    refused("optimiser state", {**tensors, "optimizer.0.state.0.exp_avg": torch.zeros(3, 3)}, state)
    refused("does not fit", {**tensors, "generator": torch.zeros(7, dtype=torch.uint8)}, state)
    refused("momentum", tensors, {**state, "momentum": 1})
    train("xir", parts, _restored(path, tensors, state), resume=True, epochs=1)


def _restored(path: Path, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
    files.write_tensors(path, tensors, state)
    return path.parent


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(where)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small file system here: " + mounted.stderr.decode().strip())
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=False)


def fill(folder: Path) -> None:
    """Write until nothing more fits."""
    with open(folder / "filler", "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


@pytest.mark.parametrize("when", ["mid epoch", "model", "checkpoint"])
@pytest.mark.skipif(shutil.which("mount") is None, reason="needs mount")
def test_a_full_disk_loses_nothing(small_disk: Path, parts: Split, tmp_path: Path, when: str) -> None:
    """A full disk during a save raises one line with the file; the last checkpoint still loads, and with free space the
    resumed run is identical to an uninterrupted one."""
    out = small_disk / "run"

    def fill_up() -> None:
        deadline = time.monotonic() + 60
        while not (out / "checkpoint.safetensors").exists() and time.monotonic() < deadline:
            time.sleep(0.005)  # the first epoch's checkpoint may still be in progress
        fill(small_disk)

    def step(epoch: int, done: int, loss: Callable[[], float]) -> bool:
        if (epoch, done) == (1, 3) and when != "checkpoint":
            fill_up()
        return (epoch, done) == (1, 3) and when == "mid epoch"

    def epoch(record: dict[str, Any]) -> bool:
        if record["epoch"] == 2 and when == "checkpoint":
            fill_up()
        return True

    with pytest.raises(UserError) as error:
        train("xir", parts, out, progress=TrainingProgress(step=step, epoch=epoch))
    assert str(out) in str(error.value)
    assert "No space left on device" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not list(out.glob("*.tmp"))
    assert files.read_tensors(out / "checkpoint.safetensors")[1]["epoch"] == 1
    (small_disk / "filler").unlink()
    train("xir", parts, out, resume=True)
    train("xir", parts, tmp_path / "whole")
    assert_same(tmp_path / "whole", out)


@pytest.mark.parametrize(
    "target", ["checkpoint.safetensors", "model.safetensors", "metrics.jsonl", "result.json", "curve.png", "README.md"]
)
def test_a_file_that_cannot_be_written_is_named(
    parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A file that does not fit on the disk is named, leaves no temporary file, and resuming completes the run."""
    train("xir", parts, tmp_path / "whole")
    real = os.replace

    def replace(source: Path, to: Path) -> None:
        if Path(to).name == target:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to))
        real(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(UserError) as error:
            train("xir", parts, tmp_path / "run")
    assert str(tmp_path / "run" / target) in str(error.value)
    assert "No space left on device" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not list((tmp_path / "run").glob("*.tmp*"))
    train("xir", parts, tmp_path / "run", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    parts: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one flipped bit in the newest checkpoint, the run resumes from the previous one, says so, and ends alike."""
    train("xir", parts, tmp_path / "whole")
    folder = tmp_path / "stopped"
    with pytest.raises(Killed):
        train("xir", parts, folder, progress=killing({203}, random.Random(0)))
    assert (folder / "checkpoint.previous.safetensors").is_file()
    flip(folder / "checkpoint.safetensors", 8 * 5000)
    train("xir", parts, folder, resume=True)
    assert "falling back" in caplog.text
    assert_same(tmp_path / "whole", folder)


def test_resume_says_that_the_file_of_its_recipe_has_changed(
    parts: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A recipe that was edited since the run started is named in a warning; the run goes on."""
    file, recipe = tmp_path / "mine.py", f"{tmp_path}/mine.py:mine"
    text = "from sparring.recipes import RECIPES\nfrom sparring.recipes.setup import Setup\n\n\n"
    text += "def mine(data, setup=Setup()):\n    return RECIPES['bpr'](data, setup)\n"
    file.write_text(text)

    def trained_on(resume: bool) -> None:
        run = build(recipe, parts.train, {"dim": 8, "epochs": 1, "batch_size": 64})
        fit(run, parts, tmp_path / "run", resume=resume, k=(10,), device="cpu")

    trained_on(resume=False)
    trained_on(resume=True)
    assert "has changed" not in caplog.text
    file.write_text(text + "# edited\n")
    trained_on(resume=True)
    assert "mine.py has changed" in caplog.text


def test_a_setting_that_is_missing_now() -> None:
    """A run that was started with a setting which the resumed one lacks names it."""
    assert "cache=3, which is missing now" in difference("arguments", {"n": 1, "cache": 3}, {"n": 1})
