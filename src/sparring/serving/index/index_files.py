"""An index on disk: files with unique names, and index.json, which lists them and is written last.

    index.json           kind, effort, measurements; name, size and SHA-256 of each file
    vectors-*.npy        (N, D) float32
    ids-*.npy            (N,) int64
    ann-*.faiss          the FAISS index; absent if the index is exact

A save that is killed at any moment leaves the old index.json and its files intact. A damaged file fails its checksum.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparring.core import files as disk
from sparring.core.errors import UserError, first_line
from sparring.serving.index.faiss_backends import KINDS, Effort, require_faiss

META = "index.json"
_PARTS = ("vectors", "ids", "ann")
_ABANDONED = 3600.0  # seconds after which a file that is not in index.json belongs to an interrupted save


@dataclass(eq=False)
class Stored:
    """The parts of an index that are saved."""

    vectors: np.ndarray  # (N, D) float32, possibly memory-mapped
    ids: np.ndarray  # (N,) int64, ascending
    kind: str = "exact"
    ann: Any = None  # the FAISS index over rows 0..N-1; None if exact
    effort: Effort = field(default_factory=Effort)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])


def write(index: Stored, folder: Path) -> None:
    """Save an index as it was built. Readers see either the old index or the new one, never a mix."""
    token = secrets.token_hex(4)
    paths = {"vectors": folder / f"vectors-{token}.npy", "ids": folder / f"ids-{token}.npy"}
    before = _named_files(folder)
    disk.write(paths["vectors"], lambda path: _save(path, index.vectors))
    disk.write(paths["ids"], lambda path: _save(path, index.ids))
    if index.ann is not None:
        paths["ann"] = folder / f"ann-{token}.faiss"
        disk.write(paths["ann"], lambda path: _save_ann(path, index.ann))
    files = {
        part: {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)} for part, path in paths.items()
    }
    about = {"format": 1, "kind": index.kind, "effort": asdict(index.effort), "items": len(index.ids), "dim": index.dim}
    disk.write_json(folder / META, {**about, **index.meta, "files": files})
    _clean(folder, before | _abandoned(folder), {path.name for path in paths.values()})


def read(folder: Path, check: bool = True) -> Stored:
    """The index of a folder, memory-mapped."""
    for attempt in (1, 2):
        meta = read_meta(folder)
        try:
            return _read(folder, meta, check)
        except FileNotFoundError as error:  # a newer index may have replaced it since index.json was read
            if attempt == 2:
                raise UserError(f"{error.filename} is missing: build the index again with `sparring index`") from error
    raise AssertionError


def read_meta(folder: Path) -> dict[str, Any]:
    """The content of index.json."""
    path = folder / META
    if not path.is_file():
        raise UserError(f"{folder} contains no index: build one with `sparring index`")
    meta = disk.read_json(path, "build the index again with `sparring index`")
    try:
        known = meta["format"] == 1 and meta["kind"] in KINDS
        Effort(**meta["effort"])
        complete = {"vectors", "ids"} <= meta["files"].keys()
        complete &= all({"name", "bytes", "sha256"} <= entry.keys() for entry in meta["files"].values())
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is corrupt: {first_line(error)}; build the index again with `sparring index`"
        ) from error
    if not known or not complete or (meta["kind"] != "exact" and "ann" not in meta["files"]):
        raise UserError(f"{path} is not an index that this version can read: build it again with `sparring index`")
    return meta


def _read(folder: Path, meta: dict[str, Any], check: bool) -> Stored:
    paths = {}
    for part, about in meta["files"].items():
        path = folder / Path(str(about["name"])).name
        if path.stat().st_size != about["bytes"] or (check and sha256(path) != about["sha256"]):
            raise UserError(
                f"{path} is corrupt: its checksum does not match; build the index again with `sparring index`"
            )
        paths[part] = path
    try:
        # "c" (copy on write): torch rejects read-only arrays, and nothing writes to this one
        vectors, ids = np.load(paths["vectors"], mmap_mode="c"), np.load(paths["ids"])
        ann = None
        if meta["kind"] != "exact":
            faiss = require_faiss()
            ann = faiss.read_index(str(paths["ann"]), faiss.IO_FLAG_MMAP_IFC)
        if len(ids) != len(vectors) or (ann is not None and ann.ntotal != len(vectors)):
            raise ValueError(f"{len(ids)} ids for {len(vectors)} vectors")
    except (ValueError, RuntimeError, EOFError) as error:
        for path in paths.values():
            if not path.exists():  # deleted since its checksum was read
                raise FileNotFoundError(errno.ENOENT, "missing", str(path)) from error
        raise UserError(
            f"{folder} is corrupt: {first_line(error)}; build the index again with `sparring index`"
        ) from error
    return Stored(vectors, ids, meta["kind"], ann, Effort(**meta["effort"]), meta)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, np.asarray(array))


def _save_ann(path: Path, ann: Any) -> None:
    try:
        require_faiss().write_index(ann, str(path))
    except RuntimeError as error:  # a full disk, among others
        raise OSError(first_line(error)) from error


def _named_files(folder: Path) -> set[str]:
    with suppress(UserError):
        return {str(about["name"]) for about in read_meta(folder)["files"].values()}
    return set()


def _abandoned(folder: Path) -> set[str]:
    return {
        path.name
        for part in _PARTS
        for path in folder.glob(f"{part}-*")
        if time.time() - path.stat().st_mtime > _ABANDONED
    }


def _clean(folder: Path, names: set[str], kept: set[str]) -> None:
    for name in names - kept:
        with suppress(OSError):
            (folder / Path(name).name).unlink()
