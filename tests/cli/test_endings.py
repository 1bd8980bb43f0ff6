"""Commands that are stopped, or whose disk fails: one line, an exit code, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import sparring
from sparring.cli import main
from sparring.core import files
from sparring.data.synthetic_world import make_world
from support.settings import quick_words

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(sparring.__file__).parents[1])}
# Waits when a file whose name begins with the first word is complete under its temporary name.
IN_A_FILE = """
import sys, time
from sparring.core import files
real, name = files.write, sys.argv.pop(1)
def write(path, write_to, *rest, **more):
    def wait(beside):
        write_to(beside)
        if path.name.startswith(name):
            print("here", flush=True)
            time.sleep(10)
    real(path, wait, *rest, **more)
files.write = write
"""
# Takes a second for each block of lists.
IN_A_RANKING = """
import sys, time
from sparring.training.eligibility import Ranking
real = Ranking.best
def best(*arguments):
    print("here", flush=True)
    time.sleep(1)
    return real(*arguments)
Ranking.best = best
"""
MAIN = """
from sparring.cli import main
sys.exit(main())
"""
COMMANDS = {
    "recommend": (IN_A_FILE, "lists", "recommend RUN --all --out OUT/lists.parquet", signal.SIGTERM),
    "recommend, csv": (IN_A_FILE, "lists", "recommend RUN --all --out OUT/lists.csv", signal.SIGINT),
    "export": (IN_A_FILE, "queries", "export RUN --to parquet --out OUT", signal.SIGTERM),
    "export onnx": (IN_A_FILE, "item.onnx", "export RUN --to onnx --out OUT", signal.SIGTERM),
    "index": (IN_A_FILE, "ids", "index COPY --kind exact", signal.SIGTERM),
    "prepare": (IN_A_FILE, "", "prepare DATA --out OUT/prepared", signal.SIGTERM),
    "train": (IN_A_FILE, "checkpoint", "train --data DATA --recipe ssl --device cpu --out OUT/run", signal.SIGTERM),
}
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of interactions and a finished run on 300 queries."""
    folder = tmp_path_factory.mktemp("endings")
    data = make_world(300, 40, exposure=0.5, relevant=0.4, seed=3).interactions
    pl.DataFrame({"user_id": data.queries, "item_id": data.items}).write_parquet(folder / "pairs.parquet")
    words = ["train", "--data", str(folder / "pairs.parquet"), "--recipe", "ssl", "--out", str(folder / "run")]
    assert main([*words, "--quiet", *quick_words()]) == 0
    return {"DATA": folder / "pairs.parquet", "RUN": folder / "run"}


def words_of(command: str, places: dict[str, Path], out: Path) -> list[str]:
    for name, path in {**places, "OUT": out, "COPY": out / "copy"}.items():
        command = command.replace(name, str(path))
    return command.split()


def stopped(code: str, words: list[str], number: signal.Signals) -> list[str]:
    """Stop a command where it prints "here"; the lines of stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "here\n":
        assert line, process.stderr.read() if process.stderr else ""
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == CODES[number], told
    return told.splitlines()


def left(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_leaves_no_trace(command: str, places: dict[str, Path], tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM during a write give one line and 130 or 143; no temporary file and no lock stays."""
    code, name, words, number = COMMANDS[command]
    shutil.copytree(places["RUN"], tmp_path / "copy")
    before = left(tmp_path)
    lines = stopped(code + MAIN, [name, *words_of(words, places, tmp_path)], number)
    assert len(lines) == 1, lines
    assert ("terminated" if number == signal.SIGTERM else "interrupted") in lines[0]
    new = left(tmp_path) - before
    assert not [path for path in new if "tmp" in path or "lock" in path or "preparing" in path]
    if command == "train":
        assert "--resume" in lines[0]
    else:
        assert new <= {"items.parquet", "query.onnx"} | {path for path in new if path.startswith("copy/index/vectors-")}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_lists_stop_between_blocks(number: signal.Signals, places: dict[str, Path], tmp_path: Path) -> None:
    """A signal reaches `recommend --all` while its lists are streamed, long before the last of them."""
    words = words_of("recommend RUN --all --out OUT/lists.parquet", places, tmp_path)
    assert len(stopped(IN_A_RANKING + MAIN, words, number)) == 1
    assert left(tmp_path) == set()


FAILING = {
    "recommend": "recommend RUN --all --out OUT/lists.parquet",
    "recommend, csv": "recommend RUN --all --out OUT/lists.csv",
    "export": "export RUN --to parquet --out OUT",
    "export onnx": "export RUN --to onnx --out OUT",
    "index": "index COPY --kind hnsw",
    "prepare": "prepare DATA --out OUT/prepared",
    "cluster": "cluster --data DATA --modality b=behaviour --k-primary 4 --steps 2 --out OUT/c.safetensors",
    "train": "train --data DATA --recipe ssl --device cpu --epochs 1 --out OUT/run",
}
# Runs each command on a small file system of its own, which then is full or read-only; prints code, lines and files.
ON_A_DISK = """
import contextlib, io, json, pathlib, subprocess, sys
from sparring.cli import main
options, commands = sys.argv[1], json.loads(sys.argv[2])
for name, (words, place) in commands.items():
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words)
        except Exception as error:
            code = repr(error)
    left = [str(path) for path in pathlib.Path(place).rglob("*") if path.is_file()]
    print("result", json.dumps([name, code, told.getvalue().splitlines(), left]), flush=True)
    subprocess.run(["umount", place], check=True)
"""


@pytest.mark.parametrize("options", ["size=4k", "ro,size=1m"])
def test_a_disk_that_takes_nothing(options: str, places: dict[str, Path], tmp_path: Path) -> None:
    """On a full and on a read-only disk every command says so in one line, exits with 2 and leaves nothing."""
    tool = shutil.which("unshare")
    if os.geteuid() != 0 or tool is None or subprocess.run([tool, "-m", "true"], check=False).returncode:
        pytest.skip("cannot mount a small file system here")
    shutil.copytree(places["RUN"], tmp_path / "copy")
    for folder in ("out", "copy/index"):
        (tmp_path / folder).mkdir()
    commands = {}
    for name, command in FAILING.items():
        words = words_of(command.replace("COPY", str(tmp_path / "copy")), places, tmp_path / "out")
        commands[name] = (words, str(tmp_path / ("copy/index" if name == "index" else "out")))
    script = [tool, "-m", sys.executable, "-c", ON_A_DISK, options, json.dumps(commands)]
    done = subprocess.run(script, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=True)
    results = [json.loads(line.removeprefix("result ")) for line in done.stdout.splitlines() if "result " in line]
    assert [result[0] for result in results] == list(FAILING)
    for name, code, lines, files_left in results:
        assert (name, code) == (name, 2)
        assert len([line for line in lines if "error: " in line]) == 1, (name, lines)
        assert not [line for line in lines if "Traceback" in line], (name, lines)
        assert not [path for path in files_left if "tmp" in path or "lock" in path], (name, files_left)


@pytest.mark.parametrize("command", [name for name in FAILING if name != "prepare"])
def test_a_folder_that_vanishes(
    command: str,
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Callable[..., str],
) -> None:
    """A folder that disappears while a file is written is a one-line error."""
    real = files.write
    shutil.copytree(places["RUN"], tmp_path / "copy")

    def write(path: Path, write_to: Callable[[Path], object], *rest: Any, **more: Any) -> None:
        def vanish(beside: Path) -> None:
            write_to(beside)
            shutil.rmtree(path.parent)

        real(path, vanish, *rest, **more)

    monkeypatch.setattr(files, "write", write)
    words = words_of(FAILING[command].replace("COPY", str(tmp_path / "copy")), places, tmp_path / "out")
    refused([*words, *([] if "recommend" in command else ["--quiet"])], "cannot write")
