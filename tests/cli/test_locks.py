"""Two commands never write the same place at once: the second one names the process that holds it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from sparring.cli import main
from sparring.core.errors import UserError
from sparring.core.locks import LOCK, HeldError, Lock, is_held, writing
from sparring.data.synthetic_world import SyntheticWorld
from support.settings import quick_words


@pytest.fixture(scope="module")
def places(small_world: SyntheticWorld, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of interactions and a finished run."""
    folder = tmp_path_factory.mktemp("locks")
    data = small_world.interactions
    pl.DataFrame({"user_id": data.queries, "item_id": data.items}).write_parquet(folder / "pairs.parquet")
    words = ["train", "--data", str(folder / "pairs.parquet"), "--recipe", "ssl", "--out", str(folder / "run")]
    assert main([*words, "--quiet", *quick_words()]) == 0
    return {"data": folder / "pairs.parquet", "run": folder / "run"}


# The words of a command, its target and the lock of that target.
COMMANDS = {
    "recommend --all": ("recommend RUN --all --out TARGET", "lists.parquet", ".lists.parquet.lock"),
    "export parquet": ("export RUN --to parquet --out TARGET", "vectors", "vectors/.lock"),
    "export onnx": ("export RUN --to onnx --out TARGET", "onnx", "onnx/.lock"),
    "prepare": ("prepare DATA --out TARGET", "prepared", ".prepared.lock"),
    "cluster": ("cluster --data DATA --modality b=behaviour --out TARGET", "c.safetensors", ".c.safetensors.lock"),
    "compare": ("compare --data DATA --recipes ssl,uns --seeds 1 --out TARGET", "study", "study/.lock"),
    "book": ("book --sets world --methods uns --out TARGET", "book", "book/.lock"),
    "diagnose": ("diagnose RUN --queries 10 --draws 2 --out TARGET", "page", "page/.lock"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_holder_is_named(
    command: str, places: dict[str, Path], tmp_path: Path, refused: Callable[..., str]
) -> None:
    """One line names the holder's pid, and the target is not touched; the lock file is all that there is."""
    words, target, lock = COMMANDS[command]
    named = {"RUN": places["run"], "DATA": places["data"], "TARGET": tmp_path / target}
    held = Lock(tmp_path / lock)
    refused([named.get(word, word) for word in words.split()], f"process {os.getpid()} on ", target)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / lock]
    held.release()


def test_an_index_is_built_by_one(places: dict[str, Path], refused: Callable[..., str]) -> None:
    """A second build is refused, and so is a training that would delete the index under construction."""
    held = Lock(places["run"] / "index" / LOCK)
    before = (places["run"] / "run.json").read_bytes()
    refused(["index", places["run"], "--kind", "exact"], f"process {os.getpid()} on ", "index")
    words = ["train", "--data", places["data"], "--recipe", "ssl", "--out", places["run"], "--overwrite"]
    refused([*words, *quick_words()], f"process {os.getpid()} on ", "index")
    assert (places["run"] / "run.json").read_bytes() == before
    held.release()
    assert main(["index", str(places["run"]), "--kind", "exact", "--quiet"]) == 0
    assert not list(places["run"].rglob(f"*{LOCK}"))


def test_a_deleted_lock_file_is_not_held(tmp_path: Path) -> None:
    """Once its holder has deleted the file, the lock counts as free, although the holder has not let go of it yet."""
    lock = Lock(tmp_path / LOCK)
    lock.path.unlink()
    assert not is_held(tmp_path / LOCK)
    assert not (tmp_path / LOCK).exists()
    other = Lock(tmp_path / LOCK)
    assert is_held(tmp_path / LOCK)
    other.release()
    assert not is_held(tmp_path / LOCK)
    assert not (tmp_path / LOCK).exists()


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    """After an error nothing is left, not even the folder that only the lock needed; a folder with files stays."""
    folder = tmp_path / "new"
    for failure in (UserError("bad"), KeyboardInterrupt()):
        with pytest.raises(type(failure)), writing(folder, folder / LOCK):
            raise failure
        assert not folder.exists()
    with writing(folder, folder / LOCK):
        (folder / "file").touch()
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    """Many threads that take turns at one lock never hold it together."""
    inside: list[int] = []
    turns: list[int] = []

    def work() -> None:
        while len(turns) < 40:
            try:
                lock = Lock(tmp_path / LOCK)
            except HeldError:
                continue
            inside.append(1)
            turns.append(len(inside))
            inside.pop()
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(turns) == {1}


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A lock below a file, or in a folder that vanished, is a one-line error."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"), writing(tmp_path / "file" / "lists.parquet"):
        pass
