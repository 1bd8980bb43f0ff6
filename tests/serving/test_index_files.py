"""An index on disk is complete or rejected after any kill, truncation, exchange or overwrite."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.core.errors import UserError
from sparring.core.manifest import file_hash, read_sealed, write_sealed
from sparring.serving.index import Effort, Index, faiss_backends, index_files
from sparring.serving.index.faiss_backends import GRAPHS
from support.cagra import pretend_gpu

N, D = 2000, 8
rng = np.random.default_rng(1)
VECTORS = rng.standard_normal((N, D)).astype(np.float32)
QUERIES = rng.standard_normal((5, D)).astype(np.float32)


def made(kind: str) -> Index:
    if kind == "exact":
        return Index(VECTORS, np.arange(N) * 3)
    pytest.importorskip("faiss")
    quantizer = None if kind in GRAPHS else faiss_backends.cells(VECTORS, 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_gpu(monkeypatch)
        ann = faiss_backends.make(kind, VECTORS, quantizer, code=4)
    return Index(
        VECTORS, np.arange(N) * 3, kind, ann, Effort(40, 1.0 if kind in (*GRAPHS, "ivf") else 2.0), {"note": "kept"}
    )


@pytest.mark.parametrize("kind", faiss_backends.KINDS)
def test_what_was_saved_is_read_back_mapped(tmp_path: Path, kind: str) -> None:
    """Lists, scores and effort are equal after loading; vectors are memory-mapped; one set of files remains."""
    index = made(kind)
    index_files.write(index, tmp_path / "index")
    index_files.write(index, tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    for a, b in zip(index.search(QUERIES, 10), loaded.search(QUERIES, 10), strict=True):
        assert (a == b).all()
    assert (loaded.kind, loaded.effort) == (kind, index.effort)
    names = {path.name.split("-")[0] for path in (tmp_path / "index").iterdir()}
    assert names == {"index.json", "vectors", "ids"} | ({"ann"} if kind != "exact" else set())
    assert len(list((tmp_path / "index").iterdir())) == len(names)
    assert isinstance(loaded.vectors, np.memmap)
    if kind != "exact":
        assert f"{tmp_path}/index/ann-" in Path("/proc/self/maps").read_text()
        assert loaded.meta["note"] == "kept"
    loaded.add([1], QUERIES[:1] * 100)
    assert loaded.search(QUERIES[:1], 1)[1][0, 0] == 1


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "one byte short": lambda whole: whole[:-1],
    "longer": lambda whole: whole + b"\0",
    "one bit": lambda whole: whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:],
    "zeros": lambda whole: b"\0" * len(whole),
}


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        *((part, damage) for part in ("vectors", "ids", "ann") for damage in sorted(DAMAGE)),
        *(("index.json", damage) for damage in ("empty", "half", "zeros")),  # its last bytes are white space and braces
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, part: str, damage: str) -> None:
    """Every file, truncated or with a flipped bit, raises one line with its path."""
    index_files.write(made("ivf"), tmp_path)
    path = next(tmp_path.glob(f"{part}*"))
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(UserError) as error:
        Index.load(tmp_path)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A folder without an index and an index without one of its files raise errors."""
    with pytest.raises(UserError, match="no index"):
        Index.load(tmp_path)
    index_files.write(made("exact"), tmp_path)
    path = next(tmp_path.glob("vectors-*"))
    path.unlink()
    with pytest.raises(UserError, match=path.name):
        Index.load(tmp_path)


@pytest.mark.parametrize(
    "change", [{"kind": "tree"}, {"format": 9}, {"files": {}}, {"effort": {"depth": 3}}, {"kind": "ivf"}]
)
def test_an_index_of_another_version_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """An index.json of another version and a kind without its file raise errors."""
    index_files.write(made("exact"), tmp_path)
    meta = read_sealed(tmp_path / "index.json", "")
    write_sealed(tmp_path / "index.json", {**meta, **change})
    with pytest.raises(UserError, match=r"index\.json"):
        Index.load(tmp_path)


def test_a_name_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    """A file name with a path in index.json is refused."""
    index_files.write(made("exact"), tmp_path / "a")
    index_files.write(made("exact"), tmp_path / "b")
    meta = read_sealed(tmp_path / "a" / "index.json", "")
    meta["files"]["vectors"]["name"] = f"../b/{next((tmp_path / 'b').glob('vectors-*')).name}"
    write_sealed(tmp_path / "a" / "index.json", meta)
    with pytest.raises(UserError, match="plain name"):
        Index.load(tmp_path / "a")


def _keep_saving(folder: Path, start: int, saved: Any) -> None:
    for version in range(start, start + 10_000):
        index_files.write(
            Index(np.full((20_000, D), version, np.float32), np.arange(20_000), meta={"version": version}), folder
        )
        saved.set()


def test_kill_at_any_moment_leaves_a_whole_index(tmp_path: Path) -> None:
    """A process that saves versions is killed 25 times: each time the folder loads with one consistent version."""
    index_files.write(Index(np.zeros((20_000, D), np.float32), np.arange(20_000), meta={"version": 0}), tmp_path)
    random, context, versions = np.random.default_rng(0), multiprocessing.get_context("fork"), []
    for attempt in range(25):
        saved = context.Event()
        child = context.Process(target=_keep_saving, args=(tmp_path, 1000 * (attempt + 1), saved))
        child.start()
        assert saved.wait(60)
        time.sleep(float(random.uniform(0.005, 0.08)))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        index = Index.load(tmp_path)
        assert (index.vectors == index.meta["version"]).all()
        versions.append(index.meta["version"])
    assert versions == sorted(set(versions))  # each child saved one at least


def test_a_reader_meets_whole_indexes_while_one_is_saved(tmp_path: Path) -> None:
    """Loading during saves gives one consistent version, and never an error."""
    index_files.write(Index(np.zeros((3000, D), np.float32), np.arange(3000), meta={"version": 0}), tmp_path)
    stop = threading.Event()

    def keep_saving() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            index_files.write(
                Index(np.full((3000, D), version, np.float32), np.arange(3000), meta={"version": version}), tmp_path
            )
            time.sleep(0.005)

    thread = threading.Thread(target=keep_saving)
    thread.start()
    found: set[int] = set()
    until = time.monotonic() + 20
    try:
        while len(found) < 20 and time.monotonic() < until:
            index = Index.load(tmp_path)
            assert (index.vectors == index.meta["version"]).all()
            found.add(index.meta["version"])
    finally:
        stop.set()
        thread.join()
    assert len(found) > 3


def test_what_a_killed_save_left_is_cleaned_later(tmp_path: Path) -> None:
    """Unlisted files are deleted by the next save once they are old; recent ones may belong to a save in progress."""
    for name, age in (("vectors-old.npy", 7200), ("ids-young.npy", 10)):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - age, time.time() - age))
    index_files.write(made("exact"), tmp_path)
    assert not (tmp_path / "vectors-old.npy").exists()
    assert (tmp_path / "ids-young.npy").exists()


def _rewrite(folder: Path, part: str, array: np.ndarray) -> None:
    """Exchange the array of an index and its entry in index.json, as a faulty writer would."""
    meta = read_sealed(folder / "index.json", "")
    path = folder / meta["files"][part]["name"]
    np.save(path, array)
    meta["files"][part] |= {"bytes": path.stat().st_size, "hash": file_hash(path)}
    write_sealed(folder / "index.json", meta)


@pytest.mark.parametrize(
    ("part", "array", "word"),
    [
        ("ids", np.arange(N - 1), f"{N - 1} ids"),
        ("ids", np.arange(N).astype(np.float32), "float32"),
        ("vectors", VECTORS[0], "corrupt"),
    ],
)
def test_arrays_that_do_not_fit_together(tmp_path: Path, part: str, array: np.ndarray, word: str) -> None:
    """Files with the right hashes and the wrong content are refused in one line."""
    index_files.write(made("exact"), tmp_path)
    _rewrite(tmp_path, part, array)
    with pytest.raises(UserError, match=word) as error:
        Index.load(tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_a_file_that_goes_after_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file deleted between its check and its use is read from the newer index, or named if there is none."""
    index_files.write(made("exact"), tmp_path)
    read_array, newer = index_files.disk.read_array, True

    def overtaken(path: Path, *given: Any, **more: Any) -> np.ndarray:
        if path.exists() and path.name.startswith("vectors"):
            path.unlink()
            if newer:
                monkeypatch.setattr(index_files.disk, "read_array", read_array)
                index_files.write(Index(VECTORS[:7], np.arange(7)), tmp_path)
        return read_array(path, *given, **more)

    monkeypatch.setattr(index_files.disk, "read_array", overtaken)
    assert len(Index.load(tmp_path)) == 7
    newer = False
    monkeypatch.setattr(index_files.disk, "read_array", overtaken)
    with pytest.raises(UserError, match=r"vectors-.* is missing"):
        Index.load(tmp_path)


def test_a_damaged_description_is_one_problem(tmp_path: Path) -> None:
    """The check of an index whose index.json is damaged names that file alone."""
    index_files.write(made("exact"), tmp_path)
    (tmp_path / "index.json").write_text("{}")
    (problem,) = index_files.check_index(tmp_path)
    assert (problem.path, problem.kind) == (tmp_path / "index.json", "damaged")


def test_a_full_disk_keeps_the_old_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAISS reports a full disk as a RuntimeError: the error is one line, and the earlier index still loads."""
    index_files.write(made("exact"), tmp_path)
    new = made("ivf")

    def full(*_: object) -> None:
        raise RuntimeError("Error in write_index: No space left on device\nmore")

    monkeypatch.setattr(faiss_backends.require_faiss(), "write_index", full)
    with pytest.raises(UserError, match="No space left") as error:
        index_files.write(new, tmp_path)
    assert len(str(error.value).splitlines()) == 1
    assert Index.load(tmp_path).kind == "exact"
    assert not list(tmp_path.glob(".*.tmp"))
