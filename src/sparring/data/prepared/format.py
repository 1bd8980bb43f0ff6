"""Prepared data: a folder of memory-mapped columns, already split, so that training never holds them in memory.

    prepared.json           format, sizes, columns, split
    manifest.json           length and hash of every file (core/manifest.py); written last
    queries.npy, items.npy  int32: one row per pair, sorted by (part, query, item); the parts are train, valid, test;
                            with repeats (prepared.json), one row per interaction
    split.npy               uint8: the part of each row
    time.npy, weight.npy    int64 or float64, float32; where the data has them
    start.npy, counts.npy   int64: offsets of each query's training rows; training pairs of each item
    seen_start.npy, seen_items.npy      pairs of train and valid, by query: masked when the test part is ranked
    known_start.npy, known_items.npy    with repeats, the distinct pairs of train, by query
    shown_queries.npy, shown_items.npy  pairs shown and not clicked, in the training part, where the data has labels
    *_ids.parquet, *_table.parquet      id maps, and tables of items and queries

Dense ids are positions in the ascending order of original ids. Row offsets are int64 everywhere; only ids are int32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparring.core import manifest
from sparring.core.errors import UserError, one_line
from sparring.core.files import check_folder, read_array, read_json, write_json
from sparring.core.manifest import Manifest
from sparring.core.types import Positives
from sparring.data.interactions import Ids, Interactions, Split

FORMAT = 2
NAME = "prepared.json"
ADVICE = "prepare the data again"
_DTYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("queries", "items", "seen_items", "known_items", "shown_queries", "shown_items"), (np.int32,)),
    **dict.fromkeys(("start", "counts", "seen_start", "known_start"), (np.int64,)),
    "time": (np.int64, np.float64),
    "weight": (np.float32,),
    "split": (np.uint8,),
}
SHARES = {"valid": 0.1, "test": 0.2}  # the defaults of `split`


@dataclass(frozen=True, eq=False, repr=False)
class Mapped(Interactions):
    """Interactions with memory-mapped columns, offsets and counts: nothing is copied or sorted."""

    start: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))  # (queries + 1,)
    known: np.ndarray | None = None  # the distinct items of each query, if the rows repeat some
    item_counts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)

    def counts(self) -> np.ndarray:
        return np.array(self.item_counts)

    def positives(self) -> Positives:
        return Positives(
            torch.from_numpy(self.start), torch.from_numpy(self.items if self.known is None else self.known)
        )

    def subset(self, rows: np.ndarray) -> Interactions:
        """The given rows, in memory."""
        return Interactions(**{column.name: getattr(self, column.name) for column in fields(Interactions)}).subset(rows)


@dataclass(frozen=True, eq=False, repr=False)
class Prepared(Interactions):
    """All rows of a prepared folder, as `read` returns them; `split` returns the parts fixed by the preparation.

    data = read("prepared");  parts = split(data);  parts.train.queries  # a memory-mapped column
    """

    parts: Split | None = None
    rule: Mapping[str, Any] = field(default_factory=dict)  # how, valid, test, seed
    checksum: str = ""

    def parts_for(self, how: str, valid: float, test: float, seed: int) -> Split:
        """The parts, if they match the arguments; prepared data cannot be split again."""
        assert self.parts is not None
        asked: dict[str, Any] = {"how": how, "valid": valid, "test": test, "seed": seed}
        wrong = {name: asked[name] for name in SHARES if asked[name] not in (SHARES[name], self.rule[name])}
        if how not in ("auto", "file"):
            wrong |= {name: value for name, value in asked.items() if value != self.rule[name]}
        if wrong:
            name, value = next(iter(wrong.items()))
            raise UserError(
                f"the data was split when it was prepared, with {name}={self.rule[name]}, not {value}: prepare it again"
            )
        return self.parts


def is_prepared(folder: Path) -> bool:
    return (folder / NAME).is_file()


def read_prepared(folder: str | os.PathLike[str]) -> Prepared:
    """Open a prepared folder; only the id maps and tables are read into memory.

    All files are read once to compare them with the manifest, at the speed of the disk.
    """
    folder = Path(folder)
    meta, listed = read_description(folder)
    ids = Ids.load(folder, listed)
    arrays = {name: _mapped(listed, name) for name in _DTYPES if f"{name}.npy" in listed.files}
    sizes = {"start": len(ids.query_ids) + 1, "counts": len(ids.item_ids)}
    repeats = meta.get("repeats") == "keep"
    if repeats:
        sizes |= {"known_start": sizes["start"], "known_items": int(arrays.get("known_start", [0])[-1])}
    for name in ("queries", "items", "split", *sizes):
        if name not in arrays or arrays[name].shape != (sizes.get(name, sum(meta["rows"].values())),):
            raise UserError(f"{folder / NAME} is corrupt: {name}.npy is missing or has another length; {ADVICE}")
    checksum = manifest.text_hash(" ".join(digest for name, (_, digest) in listed.files.items() if name != NAME))[:16]
    shared: dict[str, Any] = {
        "query_ids": ids.query_ids,
        "item_ids": ids.item_ids,
        "query_table": ids.query_table,
        "item_table": ids.item_table,
    }
    shared |= {"notes": tuple(meta["notes"]), "repeats": repeats}
    shown = (arrays["shown_queries"], arrays["shown_items"]) if "shown_queries" in arrays else None
    ends = np.cumsum([meta["rows"][name] for name in ("train", "valid", "test")]).tolist()

    def columns(first: int, last: int) -> dict[str, Any]:
        return {
            name: arrays[name][first:last] for name in ("queries", "items", "time", "weight", "split") if name in arrays
        }

    lists: dict[str, Any] = {"start": arrays["start"], "item_counts": arrays["counts"]}
    if repeats:
        lists |= {"start": arrays["known_start"], "known": arrays["known_items"]}
    train = Mapped(**columns(0, ends[0]), **shared, shown=shown, **lists)
    held = [Interactions(**columns(first, last), **shared) if last > first else None for first, last in pairwise(ends)]
    seen = None
    if "seen_items" in arrays:
        seen = Positives(torch.from_numpy(arrays["seen_start"]), torch.from_numpy(arrays["seen_items"]))
    parts = Split(train, held[0], held[1], seen)
    return Prepared(**columns(0, ends[2]), **shared, shown=shown, parts=parts, rule=meta["split"], checksum=checksum)


def read_description(folder: Path) -> tuple[dict[str, Any], Manifest]:
    """The content of prepared.json, and the manifest, with which the length of every file was compared."""
    path = folder / NAME
    check_folder(folder)
    if (folder / manifest.NAME).is_file():
        manifest.read_manifest(folder, ADVICE).path(NAME)
    meta = read_json(path, ADVICE)
    known = meta.get("format")
    if known != FORMAT:
        raise UserError(
            f"{folder} was prepared in format {known}, and this version reads format {FORMAT}: prepare the data again"
        )
    with one_line(f"{path} is corrupt", KeyError, TypeError, AttributeError, ValueError, then=ADVICE):
        _ = [int(meta["rows"][name]) for name in ("train", "valid", "test")]
        _ = meta["split"]["how"], list(meta["notes"])
    return meta, manifest.read_manifest(folder, ADVICE)


def write_description(folder: Path, meta: Mapping[str, Any]) -> None:
    """Flush all files of the folder to disk, then write prepared.json and the manifest of all."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    write_json(folder / NAME, {"format": FORMAT, **meta})
    manifest.write_manifest(folder)


def _mapped(listed: Manifest, name: str) -> np.ndarray:
    """A copy-on-write map: torch wants writable arrays, and the file must not change."""
    return read_array(listed.path(f"{name}.npy"), *_DTYPES[name], advice=ADVICE)


class ColumnWriter:
    """A .npy column of known length, written at several positions in turn. Plain writes, so a full disk is an error."""

    def __init__(self, path: Path, dtype: np.dtype[Any], n: int) -> None:
        self.dtype, self.file = dtype, open(path, "wb")  # noqa: SIM115
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (n,)}
        np.lib.format.write_array_header_1_0(self.file, header)
        self.head, self.end = self.file.tell(), 0

    def put(self, start: int, rows: np.ndarray) -> None:
        """Write rows from row `start` on."""
        self.file.seek(self.head + start * self.dtype.itemsize)
        self.file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
        self.end = start + len(rows)

    def append(self, rows: np.ndarray) -> None:
        """Write rows after the last ones written."""
        self.put(self.end, rows)

    def close(self) -> None:
        self.file.close()
