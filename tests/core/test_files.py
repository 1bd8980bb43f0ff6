"""Atomic files: readers see the old version or the new one; errors are one line that names the file."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from sparring.core import files
from sparring.core.errors import UserError, did_you_mean, first_line, out_of_memory
from sparring.core.locks import HeldError, Lock, is_held


def test_a_failed_write_leaves_the_previous_version(tmp_path: Path) -> None:
    """After any failure of a write, the target has its old content and no temporary file remains."""
    path = tmp_path / "a.json"
    files.write_json(path, {"x": 1})

    def fail(beside: Path, error: BaseException) -> None:
        beside.write_text("half")
        raise error

    for error in (RuntimeError("broken"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            files.write(path, lambda beside, error=error: fail(beside, error))  # type: ignore[misc]
    with pytest.raises(UserError, match=r"a.json") as caught:
        files.write(path, lambda beside: fail(beside, OSError(28, "No space left on device")), "free some space")
    assert "free some space" in str(caught.value)
    assert files.read_json(path) == {"x": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """JSON, arrays, tables and tensors are read back unchanged, from folders that did not exist."""
    folder = tmp_path / "new" / "folder"
    files.write_json(folder / "v.json", {"a": [1, 2.5, "é"]})
    files.write_array(folder / "v.npy", np.arange(6).reshape(2, 3))
    files.write_table(pl.DataFrame({"id": [3, 1]}), folder / "v.parquet")
    files.write_tensors(folder / "v.safetensors", {"codes.x": torch.arange(3)}, {"codes": {"k": 2}})
    assert files.read_json(folder / "v.json") == {"a": [1, 2.5, "é"]}
    assert np.load(folder / "v.npy").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert files.read_table(folder / "v.parquet")["id"].to_list() == [3, 1]
    for read in (files.read_tensors, files.map_tensors):
        tensors, meta = read(folder / "v.safetensors")
        assert tensors["codes.x"].tolist() == [0, 1, 2]
        assert meta == {"codes": {"k": 2}}
    tensors, meta = files.read_section(folder / "v.safetensors", "codes")
    assert (tensors["x"].tolist(), meta) == ([0, 1, 2], {"k": 2})


@pytest.mark.parametrize("content", [None, "{", "[1", "3"])
def test_unreadable_json(tmp_path: Path, content: str | None) -> None:
    """A JSON file that is missing, torn or not an object raises a one-line error with the file and advice."""
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"a.json") as error:
        files.read_json(path, "train again")
    assert str(error.value).endswith("train again")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "read", [files.read_tensors, files.map_tensors, lambda path: files.read_section(path, "codes")]
)
def test_unreadable_tensors(tmp_path: Path, read) -> None:  # type: ignore[no-untyped-def]
    """A safetensors file that is missing or torn is an error that names it."""
    path = tmp_path / "a.safetensors"
    with pytest.raises(UserError, match=r"a.safetensors"):
        read(path)
    files.write_tensors(path, {"x": torch.arange(300)})
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"a.safetensors"):
        read(path)


def _try(path: Path, found: multiprocessing.Queue[str]) -> None:
    try:
        Lock(path)
        found.put("held")
    except HeldError as error:
        found.put(error.owner)


def test_a_lock_excludes_other_processes(tmp_path: Path) -> None:
    """A second process learns who holds a lock; after release, or death of the holder, the next process gets it."""
    path, context = tmp_path / ".lock", multiprocessing.get_context("spawn")
    found: multiprocessing.Queue[str] = context.Queue()

    def asked() -> str:
        process = context.Process(target=_try, args=(path, found))
        process.start()
        answer = found.get(timeout=60)
        process.join()
        return answer

    assert not is_held(path)
    lock = Lock(path)
    assert is_held(path)
    assert asked() == f"process {os.getpid()} on {socket.gethostname()}"
    lock.release()
    assert not is_held(path)
    assert asked() == "held"  # and its process ended without releasing it
    assert path.is_file()
    assert not is_held(path)
    Lock(path).release()


def test_hints_of_errors() -> None:
    """did_you_mean suggests the nearest choice or nothing; first_line is never empty and has a single line."""
    assert did_you_mean("bit", ["xir", "bir"]) == " (did you mean 'bir'?)"
    assert did_you_mean("XIR", ["xir", "bir"]) == " (did you mean 'xir'?)"
    assert did_you_mean("zzz", ["xir", "bir"]) == ""
    assert first_line(ValueError("  a\nb")) == "a"
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(ValueError("x" * 999))) == 200


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """Every kind of file can be read by those whom the umask lets, also one that safetensors writes."""
    before = os.umask(0o027)
    try:
        files.write_json(tmp_path / "a.json", {})
        files.write_array(tmp_path / "a.npy", np.arange(3))
        files.write_table(pl.DataFrame({"id": [1]}), tmp_path / "a.parquet")
        files.write_tensors(tmp_path / "a.safetensors", {"x": torch.arange(3)})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary name differs for every write, and one that exists, even as a link, is not written through."""
    names = []

    def write(beside: Path) -> None:
        names.append(beside.name)
        beside.write_text("new")

    for _ in range(20):
        files.write(tmp_path / "a", write)
    assert len(set(names)) == 20
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "0" * 2 * n)
    victim = tmp_path / "victim"
    victim.write_text("old")
    (tmp_path / ".a.00000000.tmp").symlink_to(victim)
    with pytest.raises(UserError, match="File exists"):
        files.write(tmp_path / "a", write)
    assert victim.read_text() == "old"


def test_leftovers_of_killed_writers_are_swept(tmp_path: Path) -> None:
    """`sweep` deletes temporary files by their exact form, and nothing else."""
    kept = [".hidden.tmp", "a.tmp", ".a.0123.tmp", ".a.0123456g.tmp"]
    for name in [*kept, ".run.json.0123abcd.tmp"]:
        (tmp_path / name).write_text("")
    files.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_file_of_another_user_is_not_called_corrupt() -> None:
    """A file that the user may not read is an error of permission."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        folder, me = Path(place), os.geteuid()
        files.write_json(folder / "a.json", {})
        files.write_array(folder / "a.npy", np.arange(3))
        files.write_table(pl.DataFrame({"id": [1]}), folder / "a.parquet")
        files.write_tensors(folder / "a.safetensors", {"x": torch.arange(3)})
        for path in folder.iterdir():
            path.chmod(0)
        if me == 0:
            os.seteuid(65534)
        try:
            for read, name in (
                (files.read_json, "a.json"),
                (lambda path: files.read_array(path, np.int64), "a.npy"),
                (files.read_table, "a.parquet"),
                (files.read_tensors, "a.safetensors"),
                (files.map_tensors, "a.safetensors"),
            ):
                with pytest.raises(UserError, match="Permission denied") as error:
                    read(folder / name)  # type: ignore[operator]
                assert "corrupt" not in str(error.value)
        finally:
            os.seteuid(me)


@pytest.mark.parametrize("extra", [-1, 1, 2**36])
def test_tensors_have_the_length_of_their_header(tmp_path: Path, extra: int) -> None:
    """A safetensors file or an array that is shorter or longer than its header says is refused before it is read."""
    for name, write, read in (
        ("a.safetensors", lambda path: files.write_tensors(path, {"x": torch.arange(300)}), files.read_tensors),
        ("b.safetensors", lambda path: files.write_tensors(path, {"x": torch.arange(300)}), files.map_tensors),
        ("a.npy", lambda path: files.write_array(path, np.arange(300)), lambda path: files.read_array(path, np.int64)),
    ):
        path = tmp_path / name
        write(path)
        read(path)  # type: ignore[operator]
        os.truncate(path, path.stat().st_size + extra)
        with pytest.raises(UserError, match=name):
            read(path)  # type: ignore[operator]


def test_a_failed_allocation_is_recognised() -> None:
    """PyTorch raises a plain RuntimeError on the CPU; another one is not taken for it."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("shapes do not match"))


def test_an_error_of_the_disk_is_not_called_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing disk is named with the system's reason; nobody is told to restore a copy."""
    path = tmp_path / "a.json"
    files.write_json(path, {"x": 1})

    def fails(*_: object, **__: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_text", fails)
    with pytest.raises(UserError, match="Input/output error") as error:
        files.read_json(path)
    assert "corrupt" not in str(error.value)


def test_tensors_that_do_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file larger than the memory of the machine is refused before it is read."""
    path = tmp_path / "a.safetensors"
    files.write_tensors(path, {"x": torch.arange(300)})
    monkeypatch.setattr(files, "machine_bytes", lambda: 1000)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("it was read"))
    with pytest.raises(UserError, match="fit into memory"):
        files.read_tensors(path)


def test_a_file_without_the_wanted_section(tmp_path: Path) -> None:
    """Tensors of another kind, and a section without its description, name the section and the command."""
    path = tmp_path / "a.safetensors"
    for tensors, meta in (({"x": torch.ones(1)}, {"codes": {}}), ({"codes.x": torch.ones(1)}, {"codes": 3})):
        files.write_tensors(path, tensors, meta)
        with pytest.raises(UserError, match="holds no codes"):
            files.read_section(path, "codes")


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    """Links that lead to each other are an error that names one of them, not an endless walk."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UserError, match="cannot read"):
        files.check_folder(tmp_path)
