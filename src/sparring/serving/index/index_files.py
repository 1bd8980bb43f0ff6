"""An index on disk: files with unique names, and index.json, which lists them and is written last.

    index.json           kind, effort, measurements; name, size and hash of each file; its own seal (core/manifest.py)
    vectors-*.npy        (N, D) float32
    ids-*.npy            (N,) int64
    ann-*.faiss          the FAISS index; absent if the index is exact
    neighbours-*.npy     kind lists, of an item-item matrix: (N, M) int32 ids; then vectors-*.npy has their weights

A save that is killed at any moment leaves the old index.json and its files intact. A damaged file is refused. The
folder report/, if the command line wrote one, has a manifest of its own.
"""

from __future__ import annotations

import errno
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparring.core import files as disk
from sparring.core.errors import UserError, first_line, one_line
from sparring.core.manifest import (
    HashProgress,
    Manifest,
    Problem,
    check_folder,
    file_hash,
    read_sealed,
    reason,
    write_sealed,
)
from sparring.serving.index.faiss_backends import KINDS, Effort, require_faiss

META = "index.json"
FORMAT = 2
LISTS = "lists"  # the kind of an index of an item-item matrix
_PARTS = ("vectors", "ids", "ann", "neighbours")
_DTYPES = {"vectors": np.float32, "ids": np.int64}
_ADVICE = "build the index again with `sparring index`"
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
    neighbours: np.ndarray | None = None  # (N, M) int32: the items that row i of `vectors` has the weights of

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
    if index.neighbours is not None:
        neighbours = index.neighbours
        paths["neighbours"] = folder / f"neighbours-{token}.npy"
        disk.write(paths["neighbours"], lambda path: _save(path, neighbours))
    if index.ann is not None:
        paths["ann"] = folder / f"ann-{token}.faiss"
        disk.write(paths["ann"], lambda path: _save_ann(path, index.ann))
    files = {
        part: {"name": path.name, "bytes": path.stat().st_size, "hash": file_hash(path)} for part, path in paths.items()
    }
    about = {
        "format": FORMAT,
        "kind": index.kind,
        "effort": asdict(index.effort),
        "items": len(index.ids),
        "dim": index.dim,
    }
    write_sealed(folder / META, {**about, **index.meta, "files": files})
    _clean(folder, before | _abandoned(folder), {path.name for path in paths.values()})


def read(folder: Path, check: bool = True) -> Stored:
    """The index of a folder, memory-mapped."""
    meta = read_meta(folder)
    while True:
        try:
            return _read(folder, meta, check)
        except FileNotFoundError as error:
            meta, before = read_meta(folder), meta
            if meta == before:  # no newer index has replaced it
                raise UserError(f"{error.filename} is missing: build the index again with `sparring index`") from error


def read_meta(folder: Path) -> dict[str, Any]:
    """The content of index.json."""
    path = folder / META
    if not path.is_file():
        raise UserError(f"{folder} contains no index: build one with `sparring index`")
    disk.check_folder(folder)
    meta = read_sealed(path, _ADVICE)
    with one_line(f"{path} is corrupt", KeyError, TypeError, AttributeError, then=_ADVICE):
        known = meta["format"] == FORMAT and meta["kind"] in (*KINDS, LISTS)
        Effort(**meta["effort"])
        complete = {"vectors", "ids"} <= meta["files"].keys()
        complete &= all({"name", "bytes", "hash"} <= entry.keys() for entry in meta["files"].values())
    needed = {"exact": "ids", LISTS: "neighbours"}.get(meta["kind"], "ann")
    if not known or not complete or needed not in meta["files"]:
        raise UserError(f"{path} is not an index that this version can read: build it again with `sparring index`")
    return meta


def _read(folder: Path, meta: dict[str, Any], check: bool) -> Stored:
    paths = {}
    for part, about in meta["files"].items():
        path = disk.inside(folder, about["name"])
        if path.stat().st_size != about["bytes"] or (check and file_hash(path) != about["hash"]):
            raise UserError(
                f"{path} is corrupt: its checksum does not match; build the index again with `sparring index`"
            )
        paths[part] = path
    try:
        vectors, ids = (disk.read_array(paths[part], kind, advice=_ADVICE) for part, kind in _DTYPES.items())
        ids = np.array(ids)
        ann = neighbours = None
        if meta["kind"] == LISTS:
            neighbours = disk.read_array(paths["neighbours"], np.int32, advice=_ADVICE)
            if neighbours.shape != vectors.shape or not 0 <= neighbours.min(initial=0) <= neighbours.max(
                initial=0
            ) < len(ids):
                raise ValueError("its neighbours do not fit its items")
        elif meta["kind"] != "exact":
            faiss = require_faiss()
            ann = faiss.read_index(str(paths["ann"]), faiss.IO_FLAG_MMAP_IFC)
        if vectors.ndim != 2 or ids.shape != (len(vectors),) or (ann is not None and ann.ntotal != len(vectors)):
            raise ValueError(f"{len(ids)} ids for {len(vectors)} vectors")
    except (ValueError, RuntimeError, EOFError, MemoryError) as error:
        for path in paths.values():
            if not path.exists():  # deleted since its checksum was read
                raise FileNotFoundError(errno.ENOENT, "missing", str(path)) from error
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder} is corrupt: {first_line(error)}; {_ADVICE}") from error
    return Stored(vectors, ids, meta["kind"], ann, Effort(**meta["effort"]), meta, neighbours)


def check_index(folder: Path, progress: HashProgress | None = None) -> list[Problem]:
    """All differences between the files of an index and index.json."""
    try:
        meta = read_meta(folder)
    except UserError as error:
        return [Problem(folder / META, "damaged", reason(error))]
    listed = {
        Path(str(entry["name"])).name: (int(entry["bytes"]), str(entry["hash"])) for entry in meta["files"].values()
    }
    found = [Manifest(folder, True, listed).problem(name, progress) for name in listed]
    problems = [problem for problem in found if problem is not None]
    own = {META, *listed}
    extra = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in own)
    problems += [Problem(path, "additional", f"it is not in {META}") for path in extra if path.suffix != ".tmp"]
    return problems + (check_folder(folder / "report", progress) if (folder / "report").is_dir() else [])


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, np.asarray(array), allow_pickle=False)


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
