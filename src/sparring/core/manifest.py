"""Manifests: the length and hash of every file of a folder, in manifest.json, which is written last.

    {"format": 1, "hash": "xxh3_128", "finished": true, "apart": ["index"],
     "files": {"run.json": [2048, "9f..."], ...}, "seal": "c4..."}

The seal is the hash of the manifest's own text. Readers compare a file with the manifest before they use it, so a
damaged, exchanged or missing file is an error that names it, never a wrong result. XXH3 is as fast as a disk; it finds
accidents, not forgeries: whoever can write the folder can write the manifest too.

Of a folder inside that has a manifest of its own, only that manifest is listed. Folders in `apart` hold files that
come and go, and check themselves. Names that start with a dot or end in .tmp belong to no manifest.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash
from torch import Tensor

from sparring.core import files
from sparring.core.errors import UserError, first_line, one_line

NAME = "manifest.json"
FORMAT = 1
_BLANK = "0" * 32  # in the place of the seal while the text is hashed
_BLOCK = 1 << 20

HashProgress = Callable[[int], None]  # bytes hashed since the last call


@dataclass(frozen=True)
class Problem:
    """A file that does not agree with its manifest."""

    path: Path
    kind: Literal["damaged", "missing", "additional"]
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.path} ({self.detail})"


@dataclass(frozen=True)
class Manifest:
    """The files that a folder should have; `finished` unless their writer was still at work.

    read_manifest(folder, "train again").path("model.safetensors")  # its path, if its bytes are the right ones
    """

    folder: Path
    finished: bool
    files: Mapping[str, tuple[int, str]]  # length and hash by name
    apart: tuple[str, ...] = ()
    advice: str = "restore it from a copy"

    def lists(self, name: str) -> bool:
        """Whether the folder has a file, listed or, while unfinished, present. A finished folder has no other files."""
        if name in self.files or not os.path.lexists(self.folder / name):
            return name in self.files
        if self.finished:
            raise UserError(f"{self.folder / name} is not in {NAME}: delete the file, or {self.advice}")
        return True

    def path(self, name: str) -> Path:
        """The path of a file whose length and hash are those of the manifest; otherwise an error that names it."""
        for inner in PurePosixPath(name).parents:
            if inner.name and f"{inner}/{NAME}" in self.files and name != f"{inner}/{NAME}":
                listed = read_manifest(self.path(f"{inner}/{NAME}").parent, self.advice)
                return listed.path(str(PurePosixPath(name).relative_to(inner)))
        path = self.folder / name
        if not self.lists(name):
            raise UserError(f"{path} is missing; {self.advice}")
        problem = self.problem(name) if name in self.files else None
        if problem is not None:
            kind = "missing" if problem.kind == "missing" else "corrupt"
            raise UserError(f"{path} is {kind}: {problem.detail}; {self.advice}")
        return path

    def tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """`files.read_tensors` of a file, checked as it is read: by this manifest, or else by the hash inside it."""
        path = self.folder / name
        if self.lists(name) and name in self.files:
            return files.read_tensors(path, self.files[name][1])
        return files.read_tensors(path)

    def check(self, under: str, but: Collection[str] = ()) -> None:
        """Compare all files of a folder inside this one, except those named in `but`."""
        listed = {name for name in self.files if name.startswith(f"{under}/")}
        found = {f"{under}/{name}" for name in _names(self.folder / under, ())}
        for name in sorted(listed | found):
            if PurePosixPath(name).name not in but:
                self.path(name)

    def problem(self, name: str, progress: HashProgress | None = None) -> Problem | None:
        """The difference between a listed file and the manifest."""
        path, (length, digest) = self.folder / name, self.files[name]
        try:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                return Problem(path, "damaged", "it is not a file")
            if found.st_size != length:
                return Problem(path, "damaged", f"it has {found.st_size:,} bytes, expected {length:,}")
            return None if file_hash(path, progress) == digest else Problem(path, "damaged", "its hash does not match")
        except FileNotFoundError:
            return Problem(path, "missing", "it is in the manifest")
        except OSError as error:
            return Problem(path, "damaged", error.strerror or first_line(error))


def write_manifest(
    folder: Path,
    finished: bool = True,
    names: Collection[str] | None = None,
    keep: Collection[str] = (),
    apart: Sequence[str] = (),
) -> None:
    """Hash files of a folder, by default all of them but those in the folders `apart`, and write its manifest.

    Entries of the present manifest whose names are in `keep` stay as they are, because their files should not have
    changed: to hash them again would approve of any damage since.
    """
    before = read_manifest(folder).files if keep else {}
    kept = {name: before[name] for name in keep if name in before}
    names = list(_names(folder, apart)) if names is None else names
    new = {name: _entry(folder / name) for name in names if name not in kept}
    _write(folder, finished, apart, kept | new)


def add_files(folder: Path, *names: str) -> None:
    """Enter files into the manifest of a folder that were written after it; all other entries stay."""
    before = read_manifest(folder)
    _write(folder, before.finished, before.apart, {**before.files, **{name: _entry(folder / name) for name in names}})


def read_manifest(folder: Path, advice: str = "restore it from a copy") -> Manifest:
    """The manifest of a folder, after a check of its seal."""
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"{path} is missing: its writer was killed, or another version wrote the folder; {advice}")
    value = read_sealed(path, advice)
    with one_line(f"{path} is corrupt", KeyError, TypeError, ValueError, AttributeError, then=advice):
        known = value["format"] == FORMAT and value["hash"] == "xxh3_128"
        listed = {str(name): (int(length), str(digest)) for name, (length, digest) in value["files"].items()}
        finished, apart = value["finished"] is True, tuple(map(str, value["apart"]))
    if not known:
        raise UserError(f"{path} was written by another version of Sparring; {advice}")
    for name in listed:
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(f"{path} lists {name!r}, which is not in the folder; {advice}")
    return Manifest(folder, finished, listed, apart, advice)


def is_finished(folder: Path) -> bool:
    """Whether the writer of a folder came to its end; False without a manifest. A damaged manifest is an error."""
    return (folder / NAME).is_file() and read_manifest(folder).finished


def check_folder(folder: Path, progress: HashProgress | None = None) -> list[Problem]:
    """All differences between a folder and its manifest. While it is unfinished, additional files are none."""
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        kind: Literal["damaged", "missing"] = "damaged" if (folder / NAME).is_file() else "missing"
        return [Problem(folder / NAME, kind, reason(error))]
    found = [manifest.problem(name, progress) for name in manifest.files]
    problems = [problem for problem in found if problem is not None]
    if manifest.finished:
        extra = sorted(set(_names(folder, manifest.apart)) - manifest.files.keys())
        problems += [Problem(folder / name, "additional", "it is not in the manifest") for name in extra]
    return problems


def reason(error: UserError) -> str:
    """The part of "FILE is corrupt: REASON; ADVICE" that says what is wrong."""
    return error.message.split(": ", 1)[-1].split(";")[0]


# Sealed JSON


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with the hash of its text under the key `seal`."""
    head, blank, tail = (json.dumps({**value, "seal": _BLANK}, indent=2, default=str) + "\n").rpartition(_BLANK)
    files.write_text(path, head + text_hash(head + blank + tail) + tail)


def read_sealed(path: Path, advice: str) -> dict[str, Any]:
    """The JSON object of `write_sealed`, without its seal; a file that differs in any byte is an error."""
    text = files.read_text(path, advice)
    with one_line(f"{path} is corrupt", ValueError, TypeError, KeyError, RecursionError, then=advice):
        value = dict(json.loads(text))
        seal = str(value.pop("seal"))
    head, found, tail = text.rpartition(seal)
    if not found or text_hash(head + _BLANK + tail) != seal:
        raise UserError(f"{path} is corrupt: its seal does not fit its text; {advice}")
    return value


# Hashes


def text_hash(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def file_hash(path: Path, progress: HashProgress | None = None) -> str:
    """The XXH3-128 of a file, read block by block: a map could be cut under the reader, which ends the process."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(block):
            digest.update(block[:n])
            if progress is not None:
                progress(n)
    return digest.hexdigest()


def _entry(path: Path) -> tuple[int, str]:
    return path.stat().st_size, file_hash(path)


def _write(folder: Path, finished: bool, apart: Sequence[str], entries: Mapping[str, tuple[int, str]]) -> None:
    listed = {name: list(entries[name]) for name in sorted(entries)}
    about = {"format": FORMAT, "hash": "xxh3_128", "finished": finished, "apart": list(apart)}
    write_sealed(folder / NAME, {**about, "files": listed})


def _names(folder: Path, apart: Sequence[str]) -> Iterator[str]:
    """The relative names of all files that belong to the manifest of a folder."""
    for found, folders, names in os.walk(folder):
        place = PurePosixPath(Path(found).relative_to(folder).as_posix())
        if place.parts and NAME in names:
            yield str(place / NAME)
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and str(place / name) not in apart]
        for name in names:
            if not name.startswith(".") and not name.endswith(".tmp") and str(place / name) != NAME:
                yield str(place / name)
