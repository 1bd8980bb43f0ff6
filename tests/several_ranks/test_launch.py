"""Several processes from the command line: bad input, faults, and output."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor

from sparring.cli import main
from sparring.cli.train import _report, without_launcher
from sparring.core import files, ranks
from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.types import ALONE
from sparring.data.interactions import Split
from sparring.data.synthetic_world import make_world
from sparring.models import rowwise_tables
from sparring.recipes import run as runs
from sparring.recipes.settings import build
from sparring.training import checkpoint
from sparring.training.fitting import fit
from sparring.training.folder import read_meta
from sparring.training.loop import TrainingProgress
from support.settings import quick_words

KILLS = Path(__file__).parents[2] / "benchmarks" / "kills.py"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    data = make_world(60, 40, exposure=0.5, relevant=0.4, seed=3).interactions
    pl.DataFrame({"user_id": data.queries, "item_id": data.items}).write_parquet(tmp_path / "pairs.parquet")
    return tmp_path / "pairs.parquet"


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    def check(words: list[object], *expected: str) -> None:
        capfd.readouterr()
        assert main([str(word) for word in words]) == 2
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1
        for word in expected:
            assert word in lines[0]

    return check


def test_bad_input_is_told_before_any_process_starts(pairs: Path, tmp_path: Path, refused: Callable[..., None]) -> None:
    """Bad counts, recipes, settings, folders and missing data exit with code 2 and one line."""
    words = ["train", "--data", pairs, "--out", tmp_path / "run"]
    refused([*words, "--nproc", 0], "--nproc", "0")
    refused([*words, "--nproc", "two"], "two")
    refused([*words, "--nproc", 2, "--recipe", "xirr"], "xirr", "xir")
    refused([*words, "--nproc", 2, "--set", "lrr=1"], "lrr")
    refused(["train", "--nproc", 2, "--out", tmp_path / "run"], "--data")
    refused([*words, "--restarts", 3], "--restarts", "--nproc")
    refused([*words, "--save-seconds", "often"], "often")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("")
    refused([*words, "--nproc", 2], "not empty")


def test_processes_do_not_start_processes(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., None]
) -> None:
    """--nproc under torchrun is a one-line error."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    refused(["train", "--data", pairs, "--out", tmp_path / "run", "--nproc", 2], "torchrun")


@pytest.mark.parametrize(
    ("codes", "code", "word"),
    [
        ((-signal.SIGTERM, 2), 2, ""),  # the launcher ends the ranks that are left
        ((2, 2), 2, ""),
        ((-signal.SIGKILL, 2), 128 + signal.SIGKILL, "rank 0 was killed by SIGKILL"),
        ((1, -signal.SIGTERM), 128 + signal.SIGTERM, "rank 1 was killed by SIGTERM"),
        ((1, 1), 1, "rank 0 ended with code 1"),
    ],
)
def test_the_rank_that_ended_a_training_is_named(
    codes: tuple[int, ...], code: int, word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that was killed comes before those that only lost it; after bad input nothing more is said."""
    failures: list[Any] = [
        SimpleNamespace(local_rank=rank, exitcode=each, timestamp=rank) for rank, each in enumerate(codes)
    ]
    assert _report(failures) == code
    said = capfd.readouterr().err
    assert word in said
    assert bool(said) == bool(word)


def test_the_launchers_words_are_its_own() -> None:
    """The processes get all options but --nproc, --restarts, --overwrite and --resume, in any spelling."""
    words = [
        "train",
        "--nproc",
        "2",
        "--set",
        "n=4",
        "--restarts=3",
        "--overwrite",
        "--out",
        "x",
        "--resume",
        "--quiet",
    ]
    assert without_launcher(words) == ["train", "--set", "n=4", "--out", "x", "--quiet"]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("optimizer=row-adam", "row-adagrad"),
        ("weight_decay=0.1", "weight_decay"),
        ("clip=1", "clip"),
        ("dim=6", "multiple of 4"),
    ],
)
def test_what_sharded_tables_cannot_do_is_told(
    pairs: Path, tmp_path: Path, refused: Callable[..., None], setting: str, named: str
) -> None:
    """One line names the setting and its allowed values."""
    words = ["train", "--data", pairs, "--recipe", "bpr", "--shard-tables", "--out", tmp_path / "run", "--set", setting]
    refused(words, "tables=sharded", named)


def test_a_process_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process gets the GPU of its local rank; too few GPUs are an error; without GPUs all use the CPU."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == torch.device("cuda:1")
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"2 processes .* has 1"):
        pick_device("auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(("device", "backend"), [("cuda:1", "cpu:gloo,cuda:nccl"), ("cpu", "gloo")])
def test_gpus_talk_through_nccl(monkeypatch: pytest.MonkeyPatch, device: str, backend: str) -> None:
    """The device decides the backend of the process group, and becomes the current device."""
    chosen: list[object] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda name, **_: chosen.append(name))
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda *_: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    ranks.join(torch.device(device))
    assert chosen == ([torch.device(device)] if device != "cpu" else []) + [backend]


def test_a_missing_torchrec_is_named(parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """A one-line error names the extra to install."""
    monkeypatch.setattr(rowwise_tables.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"sparring\[scale\]"):
        build("bpr", parts.train, {"tables": "sharded"})


def test_tables_that_do_not_fit_are_told_or_sharded(parts: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """tables=auto shards tables that do not fit over the ranks; a single rank gets a one-line error with sizes."""
    assert build("bpr", parts.train, {}).setup.model.tables == "auto"
    monkeypatch.setattr(runs, "device_bytes", lambda device: 1000)
    with pytest.raises(UserError, match=r"the tables take .* start several ranks"):
        build("bpr", parts.train, {})
    with pytest.raises(UserError, match="row-adagrad"):
        build("uns", parts.train, {})
    pytest.importorskip("torchrec")
    monkeypatch.setattr(runs, "launched", lambda: 2)
    replicated = build("bpr", parts.train, {"tables": "replicated"}).setup
    assert runs.with_tables(replicated, 10**9, 10**9) == replicated
    setup = build("bpr", parts.train, {"tables": "sharded"}).setup
    assert runs.with_tables(setup.replaced(tables="auto"), 10**6, 10**6) == setup


def test_ranks_refit_as_one_process_does(pairs: Path, tmp_path: Path) -> None:
    """Two processes choose the epoch and refit the run as one process does."""
    words = ["train", "--data", str(pairs), "--recipe", "bpr", "--refit", "--quiet", "--out"]
    rest = quick_words(epochs=2, lr=0.02, precision="float32")
    assert main([*words, str(tmp_path / "one"), *rest]) == 0
    command = [sys.executable, "-m", "sparring", *words, str(tmp_path / "two"), *rest, "--nproc", "2"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, check=True)
    one, two = (read_meta(tmp_path / name)["refit"] for name in ("one", "two"))
    assert one == {**two, "value": pytest.approx(two["value"])}
    alone, ranks = (files.read_tensors(tmp_path / name / "model.safetensors")[0] for name in ("one", "two"))
    for name, tensor in alone.items():
        torch.testing.assert_close(ranks[name], tensor, atol=1e-6, rtol=1e-5)


def test_a_torn_checkpoint_costs_one_checkpoint(
    parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torn checkpoint is replaced by the previous one with a warning; two damaged ones are an error."""
    run = build("xir", parts.train, {"dim": 8, "batch_size": 61, "epochs": 3, "cache_size": 16, "patience": None})
    linked: list[bool] = []
    real = files.write_tensors

    def write(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, object] | None = None) -> None:
        if path.name == checkpoint.NAME:
            before = path.with_name(checkpoint.PREVIOUS)
            linked.append(before.exists() and files.read_tensors(before)[1]["epoch"] == len(linked))
        real(path, tensors, meta)

    monkeypatch.setattr(files, "write_tensors", write)
    fit(run, parts, tmp_path / "run", k=(10,), device="cpu", progress=TrainingProgress(epoch=lambda record: True))
    folder, path, previous = (
        tmp_path / "run",
        tmp_path / "run" / checkpoint.NAME,
        tmp_path / "run" / checkpoint.PREVIOUS,
    )
    assert linked == [False, True, True]  # the previous checkpoint is kept intact while the next is written
    assert not previous.exists()  # the training is done
    whole = path.read_bytes()
    for torn in (whole[: len(whole) // 2], b"", b"\xff" * 100):
        previous.write_bytes(whole)
        path.write_bytes(torn)
        caplog.clear()
        assert checkpoint.find_checkpoint(folder, ALONE) == path
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "previous" in caplog.messages[0]
        assert path.read_bytes() == whole
        assert not previous.exists()  # nor can the torn one replace it
        assert checkpoint.find_checkpoint(folder, ALONE) == path
        assert len(caplog.records) == 1
    path.write_bytes(whole[:50])
    previous.write_bytes(whole[:50])
    with pytest.raises(UserError, match="corrupt"):
        checkpoint.find_checkpoint(folder, ALONE)


FAULTS = {
    "two ranks, one of them with half a checkpoint": "--kills 2 --torn 1 --epochs 4",
    "a machine, which comes back": "--agents 2 --nproc 1 --kills 1 --torn 0 --epochs 3",
    "a machine, for good": "--agents 2 --nproc 1 --kills 1 --torn 0 --epochs 3 --gone",
    "a disk that is full for a while, and a rank": "--disk --kills 1 --torn 0 --epochs 3",
    "a rank with tables in shards": "--sharded --kills 2 --torn 1 --epochs 4",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_cost_nothing(fault: str) -> None:
    """A killed training restarts and ends bitwise like an uninterrupted one, or up to rounding if a machine stays away.
    benchmarks/kills.py covers more cases."""
    if "--sharded" in FAULTS[fault]:
        pytest.importorskip("torchrec")
    if "--disk" in FAULTS[fault] and not may_mount():
        pytest.skip("cannot mount a small file system here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(KILLS), *FAULTS[fault].split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("of the uninterrupted run" if "--gone" in FAULTS[fault] else "equal bit by bit") in done.stdout


STOPS = {
    "the launcher": (signal.SIGKILL, -signal.SIGKILL, ""),
    "a rank": (signal.SIGKILL, 128 + signal.SIGKILL, "rank 1 was killed by SIGKILL"),
    "the launcher, gently": (signal.SIGTERM, 128 + signal.SIGTERM, "terminated"),
}


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="finds the ranks in /proc")
@pytest.mark.parametrize("whom", STOPS)
def test_no_rank_outlives_its_launcher(whom: str, pairs: Path, tmp_path: Path) -> None:
    """A killed launcher takes its ranks with it; a killed rank ends the run with one line, even under --quiet."""
    number, code, told = STOPS[whom]
    words = ["train", "--data", str(pairs), "--recipe", "ssl", "--device", "cpu", "--epochs", "100000", "--quiet"]
    words += ["--set", "patience=none", "--set", "dim=8", "--nproc", "2", "--out", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-m", "sparring", *words], env=environment, stderr=subprocess.PIPE, text=True
    ) as launcher:
        wait_until((tmp_path / "run" / "metrics.jsonl").is_file, 120)
        ranks = children(launcher.pid)
        assert len(ranks) == 2
        os.kill(ranks[1] if whom == "a rank" else launcher.pid, number)
        wait_until(lambda: not any(map(alive, ranks)), 20)
        assert launcher.wait(timeout=20) == code
        assert launcher.stderr is not None
        lines = launcher.stderr.read().splitlines()
    assert len(lines) == bool(told), lines
    assert told in "".join(lines)
    assert not list((tmp_path / "run").rglob("*.tmp"))


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def fields(pid: int | str) -> list[str]:
    """State, parent and more of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    return bool(fields(pid)) and fields(pid)[0] != "Z"


def children(pid: int) -> list[int]:
    return sorted(int(path.name) for path in Path("/proc").glob("[0-9]*") if fields(path.name)[1:2] == [str(pid)])


def may_mount() -> bool:
    tool = shutil.which("unshare")
    return (
        os.geteuid() == 0
        and tool is not None
        and not subprocess.run([tool, "-m", "true"], capture_output=True, check=False).returncode
    )
