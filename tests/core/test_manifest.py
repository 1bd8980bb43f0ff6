"""Manifests: every byte of every listed file counts, and so does every byte of the manifest itself."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from sparring.core import files, manifest
from sparring.core.errors import UserError
from sparring.core.manifest import (
    Manifest,
    add_files,
    check_folder,
    file_hash,
    is_finished,
    read_manifest,
    read_sealed,
    write_manifest,
    write_sealed,
)
from support.run_files import flip
from support.settings import effort


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files, one of them empty and one in a folder, with their manifest."""
    (tmp_path / "a" / "deep").mkdir(parents=True)
    for name, content in (("one.txt", b"some text"), ("empty", b""), ("deep/two.bin", bytes(range(256)))):
        (tmp_path / "a" / name).write_bytes(content)
    write_manifest(tmp_path / "a")
    return tmp_path / "a"


def refused(manifest: Manifest, name: str, word: str) -> None:
    with pytest.raises(UserError, match=word) as error:
        manifest.path(name)
    assert name in error.value.message


def test_each_bit_of_each_file_counts(folder: Path) -> None:
    """Any flipped bit of any file, the manifest included, is found, and a reader is refused."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size * 8
        for bit in random.Random(0).sample(range(size), min(size, 150)):
            whole = flip(path, bit)
            assert [problem.path for problem in check_folder(folder)] == [path], bit
            with pytest.raises(UserError, match=path.name):
                read_manifest(folder).path(path.relative_to(folder).as_posix())
            path.write_bytes(whole)
    assert check_folder(folder) == []


def test_missing_additional_and_exchanged_files(folder: Path) -> None:
    """A missing file, one that no manifest lists, one of another length and a folder in its place are told apart."""
    (folder / "one.txt").unlink()
    (folder / "new.txt").write_text("new")
    (folder / "empty").write_text("longer")
    shutil.rmtree(folder / "deep")
    (folder / "deep" / "two.bin").mkdir(parents=True)
    found = {problem.path.relative_to(folder).as_posix(): problem.kind for problem in check_folder(folder)}
    assert found == {"one.txt": "missing", "new.txt": "additional", "empty": "damaged", "deep/two.bin": "damaged"}
    manifest = read_manifest(folder)
    for name, word in (("one.txt", "missing"), ("new.txt", "not in"), ("empty", "bytes"), ("deep/two.bin", "corrupt")):
        refused(manifest, name, word)
    refused(manifest, "never", "missing")


def test_an_unfinished_folder_may_grow(folder: Path) -> None:
    """While a folder is unfinished, more files are none of its problems; those it lists are checked all the same."""
    write_manifest(folder, finished=False, names=["one.txt"])
    assert not is_finished(folder)
    assert check_folder(folder) == []
    assert read_manifest(folder).path("empty") == folder / "empty"
    flip(folder / "one.txt", 3)
    assert [problem.path.name for problem in check_folder(folder)] == ["one.txt"]


def test_a_new_manifest_does_not_approve_of_damage(folder: Path) -> None:
    """Entries that are kept, and all entries when a file is added, still have the hash of the undamaged file."""
    flip(folder / "one.txt", 5)
    flip(folder / "deep" / "two.bin", 5)
    write_manifest(folder, keep=["one.txt", "absent"])
    assert [problem.path.name for problem in check_folder(folder)] == ["one.txt"]
    (folder / "later.txt").write_text("later")
    add_files(folder, "later.txt")
    assert [problem.path.name for problem in check_folder(folder)] == ["one.txt"]


def test_a_folder_inside_with_its_own_manifest_is_pinned_by_it(folder: Path) -> None:
    """Only the manifest of such a folder is listed; another one in its place is damage. Folders apart are left out."""
    (folder / "apart").mkdir()
    (folder / "apart" / "x").write_text("x")
    write_manifest(folder / "deep")
    write_manifest(folder, apart=["apart"])
    assert set(read_manifest(folder).files) == {"one.txt", "empty", "deep/manifest.json"}
    (folder / "apart" / "y").write_text("y")
    assert check_folder(folder) == []
    (folder / "deep" / "two.bin").write_text("other")
    assert check_folder(folder) == []
    write_manifest(folder / "deep")
    assert [problem.path for problem in check_folder(folder)] == [folder / "deep" / "manifest.json"]


def test_locks_and_temporary_files_belong_to_no_manifest(folder: Path) -> None:
    """Names that start with a dot or end in .tmp are neither listed nor additional."""
    for name in (".lock", "one.txt.tmp", ".one.txt.0a.tmp"):
        (folder / name).write_text("")
    assert check_folder(folder) == []
    write_manifest(folder)
    assert set(read_manifest(folder).files) == {"one.txt", "empty", "deep/two.bin"}


def test_a_folder_without_a_manifest_is_not_finished(tmp_path: Path) -> None:
    """No manifest means unfinished; readers get one line, and a check names the missing manifest."""
    assert not is_finished(tmp_path)
    with pytest.raises(UserError, match="train it again"):
        read_manifest(tmp_path, "train it again")
    assert [(problem.path.name, problem.kind) for problem in check_folder(tmp_path)] == [("manifest.json", "missing")]


@pytest.mark.parametrize("change", [{"format": 2}, {"hash": "md5"}, {"files": 3}, {"files": {"../x": [0, ""]}}])
def test_a_manifest_that_is_not_ours_is_refused(folder: Path, change: dict[str, object]) -> None:
    """Another format, another hash, no list and a name outside the folder are errors, though the seal fits."""
    content = read_sealed(folder / "manifest.json", "")
    write_sealed(folder / "manifest.json", {**content, **change})
    with pytest.raises(UserError, match=r"manifest\.json"):
        read_manifest(folder)


def test_a_fifo_is_not_waited_for(folder: Path) -> None:
    """A FIFO in the place of a listed file is damage, and nothing reads from it."""
    (folder / "one.txt").unlink()
    os.mkfifo(folder / "one.txt")
    assert [problem.path.name for problem in check_folder(folder)] == ["one.txt"]


def test_progress_counts_every_byte(folder: Path) -> None:
    """The reported bytes add up to the length of the listed files."""
    seen: list[int] = []
    check_folder(folder, seen.append)
    assert sum(seen) == 9 + 256


def test_sealed_json(tmp_path: Path) -> None:
    """A sealed object is read back unchanged and is plain JSON; a file without a seal is refused."""
    value = {"a": [1, 2.5, "é"], "zeros": "0" * 40}
    write_sealed(tmp_path / "x.json", value)
    assert read_sealed(tmp_path / "x.json", "") == value
    assert json.loads((tmp_path / "x.json").read_text())["a"] == value["a"]
    (tmp_path / "y.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match=r"y\.json is corrupt"):
        read_sealed(tmp_path / "y.json", "")
    with pytest.raises(UserError, match=r"z\.json"):
        read_sealed(tmp_path / "z.json", "")


TENSORS = {
    "floats": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "half": torch.ones(5).bfloat16(),
    "none": torch.zeros(0, 4),
    "one": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "spread": torch.ones(1).expand(1),
}


def test_each_bit_of_a_file_of_tensors_counts(tmp_path: Path) -> None:
    """Any flipped bit of data, header, JSON value or padding is found by every reader, without a manifest."""
    path = tmp_path / "x.safetensors"
    files.write_tensors(path, TENSORS, {"epoch": 3})
    bits = range(path.stat().st_size * 8)
    for bit in random.Random(0).sample(bits, effort(300, len(bits))):
        whole = flip(path, bit)
        for read in (files.read_tensors, files.map_tensors):
            with pytest.raises(UserError, match=r"x\.safetensors"):
                read(path)
        path.write_bytes(whole)
    tensors, state = files.read_tensors(path)
    assert state == {"epoch": 3}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_tensors_are_checked_by_the_manifest_as_they_are_read(tmp_path: Path) -> None:
    """Another valid file in the place of a listed one is refused; while unfinished, its own hash is enough."""
    files.write_tensors(tmp_path / "x.safetensors", TENSORS, {"epoch": 3})
    write_manifest(tmp_path)
    assert read_manifest(tmp_path).tensors("x.safetensors")[1] == {"epoch": 3}
    files.write_tensors(tmp_path / "x.safetensors", TENSORS, {"epoch": 4})
    with pytest.raises(UserError, match=r"x\.safetensors is corrupt"):
        read_manifest(tmp_path).tensors("x.safetensors")
    write_manifest(tmp_path, finished=False, names=())
    assert read_manifest(tmp_path).tensors("x.safetensors")[1] == {"epoch": 4}


def test_blocks_of_rows_make_the_same_file_content(tmp_path: Path) -> None:
    """Tensors that arrive as blocks are read back equal, with their value and hash, and each bit of the file counts."""
    wanted = {"bool": torch.tensor([True, False, True]), "a": torch.arange(12.0).reshape(6, 2)}
    wanted |= {"half": torch.ones(5, 1).half(), "none": torch.zeros(0, 2), "b": torch.arange(3), "one": torch.tensor(7)}
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in wanted.items()}
    blocks = {name: tensor.split(4) if tensor.ndim else [tensor] for name, tensor in wanted.items()}
    digest = files.write_tensor_blocks(tmp_path / "x.safetensors", shapes, blocks, {"epoch": 1})
    files.write_tensors(tmp_path / "whole.safetensors", wanted, {"epoch": 1})
    tensors, state = files.read_tensors(tmp_path / "x.safetensors")
    assert state == {"epoch": 1}
    assert (
        digest == files.tensors_hash(tmp_path / "whole.safetensors") == files.tensors_hash(tmp_path / "x.safetensors")
    )
    for found in (tensors, safetensors.torch.load_file(tmp_path / "x.safetensors")):
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    for bit in random.Random(1).sample(range((tmp_path / "x.safetensors").stat().st_size * 8), 100):
        whole = flip(tmp_path / "x.safetensors", bit)
        with pytest.raises(UserError, match="corrupt"):
            files.read_tensors(tmp_path / "x.safetensors")
        (tmp_path / "x.safetensors").write_bytes(whole)


def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    """Block by block or at once, the hash is XXH3-128."""
    import xxhash

    content = random.Random(2).randbytes((1 << 20) + 17)
    (tmp_path / "x").write_bytes(content)
    assert file_hash(tmp_path / "x") == xxhash.xxh3_128(content).hexdigest()


def test_a_file_of_a_folder_inside(tmp_path: Path) -> None:
    """A file below a folder with a manifest of its own is compared with that one, and that one with the outer."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "a").write_text("a")
    write_manifest(inner)
    write_manifest(tmp_path)
    listed = read_manifest(tmp_path)
    assert listed.path("inner/a") == inner / "a"
    (inner / "a").write_text("b")
    with pytest.raises(UserError, match="hash"):
        listed.path("inner/a")
    write_manifest(inner)  # whole in itself, but not the one that was listed
    with pytest.raises(UserError, match=r"inner.manifest\.json"):
        listed.path("inner/a")


def test_a_file_that_the_disk_does_not_give_is_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system while a file is hashed is a problem of that file, with the system's reason."""

    def fails(path: Path, *_: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(manifest, "file_hash", fails)
    found = manifest.check_folder(folder)
    assert found
    assert {problem.kind for problem in found} == {"damaged"}
    assert all("Input/output" in str(problem) for problem in found)
