"""sparring prepare: its output, its one-line errors, and interruptions, which leave nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest

from sparring.cli import main
from sparring.data import read, split
from sparring.data.prepared import row_buckets
from sparring.data.prepared.format import ColumnWriter
from support.settings import quick_words

QUICK = ["--quiet", *quick_words(dim=4, n=8)]


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A folder of three Parquet parts."""
    random = np.random.default_rng(0)
    folder = tmp_path / "parts"
    folder.mkdir()
    for k in range(3):
        columns = {
            "user_id": random.integers(0, 40, 300),
            "item_id": random.integers(0, 60, 300),
            "timestamp": random.integers(0, 99, 300),
        }
        pl.DataFrame(columns).write_parquet(folder / f"{k}.parquet")
    return folder


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "parts")


def test_prepare_train_evaluate_resume(parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """train, evaluate and --resume take the folder; the last line has the sizes; data show describes it."""
    out, run = tmp_path / "out", tmp_path / "run"
    assert main(["prepare", str(parts), "--out", str(out), "--split", "leave-last-out"]) == 0
    said = capfd.readouterr().out
    whole = split(read(parts), "leave-last-out")
    assert (
        f"train {len(whole.train):,}, valid {len(whole.valid or []):,}, test {len(whole.test or []):,} interactions"
        in said
    )
    assert "merged" in said
    assert main(["train", "--data", str(out), "--out", str(run), *QUICK]) == 0
    assert (
        main(["train", "--data", str(parts), "--split", "leave-last-out", "--out", str(tmp_path / "memory"), *QUICK])
        == 0
    )
    results = [
        json.loads((folder / "result.json").read_text())["test"]["metrics"] for folder in (run, tmp_path / "memory")
    ]
    assert results[0] == results[1]
    capfd.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["metrics"]["recall@20"] == pytest.approx(results[0]["recall@20"])
    assert main(["train", "--resume", "--out", str(run), "--quiet", "--device", "cpu"]) == 0
    capfd.readouterr()
    assert main(["data", "show", str(out)]) == 0
    assert "split of the file: train" in capfd.readouterr().out


def test_refused_input(parts: Path, tmp_path: Path, refused: Callable[..., None]) -> None:
    """Missing columns, missing or empty files and parts that do not match are refused, and nothing is left behind."""
    out = ["--out", tmp_path / "out"]
    refused(["prepare", parts, "--query-column", "who", *out], "no column 'who' for the query")
    refused(["prepare", parts, "--split", "file", *out], "no split column", "--split-column")
    refused(["prepare", parts, "--time-column", "", "--split", "temporal", *out], "--time-column")
    refused(["prepare", tmp_path / "nowhere", *out], "no such file or folder")
    refused(["prepare", tmp_path / "parts" / "*.pq", *out], "no such file or folder")
    refused(["prepare", parts, "--valid", "1.5", *out], "not a share")
    refused(["prepare", parts, "--engine", "dask", *out], "polars, spark")
    refused(["prepare", parts], "--out")
    empty = tmp_path / "parts" / "empty.parquet"
    pl.DataFrame(schema={"user_id": pl.Int64, "item_id": pl.Int64, "timestamp": pl.Int64}).write_parquet(empty)
    refused(["prepare", empty, *out], "empty.parquet is empty")
    pl.DataFrame({"user_id": [None, None], "item_id": [1, 2]}, schema_overrides={"user_id": pl.Int64}).write_parquet(
        empty
    )
    refused(["prepare", empty, *out], "all 2 rows", "null or empty 'user_id'")
    pl.DataFrame({"user_id": [1, 2], "item_id": [1, 2], "label": [0, 0]}).write_parquet(empty)
    refused(["prepare", empty, *out], "labelled 1")
    pl.DataFrame({"user_id": range(10), "item_id": range(10), "timestamp": [5] * 10}).write_parquet(empty)
    refused(["prepare", empty, "--split", "temporal", *out], "too many rows share the time 5")
    refused(["prepare", empty, "--split", "leave-last-out", *out], "3 interactions or more")
    pl.DataFrame({"user_id": [1, 2], "goods": [1, 2]}).write_parquet(empty)
    refused(["prepare", parts, *out], "empty.parquet lacks the column")
    assert left(tmp_path) == []


def test_some_null_ids_are_dropped_and_told(parts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rows with a null id are dropped, as in training from the file, and counted in the output and in prepared.json."""
    frame = pl.read_parquet(parts / "0.parquet").with_columns(
        pl.when(pl.col("user_id") > 2).then("user_id").alias("user_id")
    )
    frame.write_parquet(parts / "0.parquet")
    missing = frame["user_id"].null_count()
    assert main(["prepare", str(parts), "--out", str(tmp_path / "out")]) == 0
    line = f"dropped {missing} rows with null or empty ids"
    assert line in capfd.readouterr().out
    assert line in json.loads((tmp_path / "out" / "prepared.json").read_text())["notes"]


@pytest.mark.parametrize("how", ["cut", "garbled", "not parquet"])
def test_a_corrupt_part_is_named(how: str, parts: Path, tmp_path: Path, refused: Callable[..., None]) -> None:
    """A part that is truncated, overwritten or not Parquet is named."""
    path = parts / "1.parquet"
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "garbled":
        path.write_bytes(content[:4] + b"\xff" * (len(content) - 1200) + content[-1196:])
        assert pl.scan_parquet(path).collect_schema().names() == [
            "user_id",
            "item_id",
            "timestamp",
        ]  # only its pages are bad
    else:
        path.write_bytes(b"user_id,item_id\n1,2\n")
    refused(["prepare", parts, "--out", tmp_path / "out"], str(path))
    assert left(tmp_path) == []


def test_existing_folders(parts: Path, tmp_path: Path, refused: Callable[..., None]) -> None:
    """An existing folder is kept, unless it holds prepared data and --overwrite is given."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    refused(["prepare", parts, "--out", out], "not empty", "--overwrite")
    refused(["prepare", parts, "--out", out, "--overwrite"], "does not hold prepared data")
    assert (out / "mine.txt").read_text() == "precious"
    refused(["prepare", parts, "--out", out / "mine.txt"], "is a file")
    shutil.rmtree(out)
    out.mkdir()
    assert main(["prepare", str(parts), "--out", str(out), "--quiet"]) == 0
    refused(["prepare", parts, "--out", out], "not empty", "--overwrite")
    refused(["prepare", out, "--out", tmp_path / "twice"], "no preparation")
    assert main(["prepare", str(parts), "--out", str(out), "--overwrite", "--seed", "4", "--quiet"]) == 0
    assert json.loads((out / "prepared.json").read_text())["split"]["seed"] == 4


def test_prepared_data_that_cannot_be_used(parts: Path, tmp_path: Path, refused: Callable[..., None]) -> None:
    """Another format, a corrupt description, a missing column, another split and named columns are refused."""
    out, train = tmp_path / "out", ["train", "--data", tmp_path / "out", "--out", tmp_path / "run", *QUICK]
    assert main(["prepare", str(parts), "--out", str(out), "--quiet"]) == 0
    refused([*train, "--split", "temporal"], "was split when it was prepared", "how=random")
    refused([*train, "--test", "0.5"], "was split when it was prepared", "test=0.2")
    refused([*train, "--query-column", "user_id"], "is for tables")
    meta = json.loads((out / "prepared.json").read_text())
    (out / "start.npy").rename(tmp_path / "start.npy")
    refused(train, "start.npy is missing")
    (out / "prepared.json").write_text("{")
    refused(train, "prepared.json is corrupt")
    (out / "manifest.json").unlink()
    (out / "prepared.json").write_text(json.dumps(meta | {"format": 1}))
    refused(train, "format 1", "prepare the data again")
    (out / "prepared.json").write_text(json.dumps(meta))
    refused(train, "manifest.json is missing", "prepare the data again")
    (out / "prepared.json").unlink()
    refused(train, "out")  # a partial copy is not prepared data


class _Usage(NamedTuple):
    total: int = 10
    used: int = 9
    free: int = 1


def test_not_enough_disk(
    parts: Path, tmp_path: Path, refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too small a disk is refused before rows are copied; if it fills up later, nothing is left behind."""
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: _Usage())
        refused(["prepare", parts, "--out", tmp_path / "out"], "0.0 GB free", "900 rows")
    assert left(tmp_path) == []

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for where, name in ((ColumnWriter, "put"), (row_buckets.MergedPairs, "add")):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, full)
            refused(["prepare", parts, "--out", tmp_path / "out"], "is full", "prepare again")
        assert left(tmp_path) == []
    assert main(["prepare", str(parts), "--out", str(tmp_path / "out"), "--quiet"]) == 0


def test_a_write_that_polars_cannot_do(
    parts: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the buckets cannot be written, the error says so and does not blame the input."""

    def too_large(*_: Any, **__: Any) -> None:
        raise pl.exceptions.ComputeError("underlying IO error: File too large (os error 27)")

    monkeypatch.setattr(pl.LazyFrame, "sink_parquet", too_large)
    refused(["prepare", parts, "--out", tmp_path / "out"], f"cannot write into {tmp_path}", "File too large")
    assert left(tmp_path) == []


def test_killed_and_run_again(parts: Path, tmp_path: Path) -> None:
    """A kill leaves no folder that looks like prepared data; the same command then writes the complete files."""
    words = ["-m", "sparring", "prepare", str(parts), "--out", str(tmp_path / "out"), "--quiet"]
    slow = "import sys, time; from sparring.data.prepared import preparation as p; old = p.write_parts\n"
    slow += "def wait(*a):\n    done = old(*a); print('here', flush=True); time.sleep(60); return done\n"
    slow += f"p.write_parts = wait; p.prepare({str(parts)!r}, {str(tmp_path / 'out')!r})"
    child = subprocess.Popen([sys.executable, "-c", slow], stdout=subprocess.PIPE, env=os.environ)
    assert child.stdout is not None
    assert child.stdout.readline() == b"here\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert left(tmp_path) == [".out.lock", ".out.preparing"]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    assert main(["prepare", str(parts), "--out", str(tmp_path / "whole"), "--quiet"]) == 0
    assert left(tmp_path) == ["out", "whole"]
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_interrupted(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves nothing."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ColumnWriter, "close", interrupt)
    assert main(["prepare", str(parts), "--out", str(tmp_path / "out")]) == 130
    assert left(tmp_path) == []


def test_help_is_clear(capsys: pytest.CaptureFixture[str]) -> None:
    """The help names the input, the output and the next command."""
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", "--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("a folder of Parquet parts", "sparring train --data FOLDER", "--engine", "example: sparring prepare"):
        assert words in text
