"""Vectors that were computed once, on disk by the content they were computed from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sparring.core import files
from sparring.core.errors import UserError, first_line
from sparring.data.download import cache_folder

Progress = Callable[[str, int, int], None]  # what is encoded, how many so far, how many in all

ADVICE = "choose another folder with --cache"
_SEGMENT = 16384  # rows encoded between two writes: what a stopped encoding loses at most


class Encodings:
    """A folder of vectors by the hash of what they encode; one folder for each encoder and its settings.

    Vectors lie in segments, `NAME.npy` with the hashes in `NAME.keys.npy`. A segment is complete or not there, so an encoding that
    was stopped goes on where it was; and only what is new or has changed is ever encoded.

        store = Encodings(folder / encoder.fingerprint)
        parts, at = store.encode(hashes(texts), lambda rows: encoder.encode([texts[i] for i in rows]))
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.encoded = 0  # rows that were not found and had to be encoded

    def encode(
        self, keys: np.ndarray, encode: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Memory-mapped parts, and the row of each key (n, 2) in the parts put one after the other; equal keys share a row.

        `encode(rows)` gives the (len(rows), width) vectors of some of the keys; it is asked only for what is not on disk.
        """
        _, first = np.unique(keys, axis=0, return_index=True)
        first.sort()
        missing = first[_find(keys[first], self._segments()) < 0]
        self.encoded = len(missing)
        for start in range(0, len(missing), _SEGMENT):
            rows = missing[start : start + _SEGMENT]
            self._add(keys[rows], encode(rows))
        segments = self._segments()  # once, for both: another process may be adding to them
        return tuple(load_array(file.with_suffix("").with_suffix(".npy")) for file in segments), _find(keys, segments)

    def _segments(self) -> list[Path]:
        return sorted(self.folder.glob("*.keys.npy"))

    def _add(self, keys: np.ndarray, vectors: np.ndarray) -> None:
        name = hash_of([np.ascontiguousarray(keys)])
        save_array(self.folder / f"{name}.npy", vectors)
        save_array(self.folder / f"{name}.keys.npy", keys)  # last: it says that the segment is complete

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Say in encoder.json whose vectors these are."""
        text = json.dumps(dict(settings), indent=2)
        files.write(self.folder / "encoder.json", lambda file: file.write_text(text), ADVICE, shared=True)


def _find(keys: np.ndarray, segments: list[Path]) -> np.ndarray:
    """The row of each key in the segments put one after the other, -1 where it is in none."""
    if not segments:
        return np.full(len(keys), -1, dtype=np.int64)
    known = np.concatenate([load_array(file) for file in segments])
    table = pl.DataFrame({"a": known[:, 0], "b": known[:, 1], "row": np.arange(len(known))}).unique(
        ["a", "b"], keep="first"
    )
    asked = pl.DataFrame({"a": keys[:, 0], "b": keys[:, 1]})
    return (
        asked.join(table, on=["a", "b"], how="left", maintain_order="left")["row"].fill_null(-1).to_numpy(writable=True)
    )


def encodings_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Where vectors are kept: the folder given, else `modalities` in the cache folder ($SPARRING_HOME, else ~/.cache/sparring)."""
    return Path(cache) if cache is not None else cache_folder() / "modalities"


def hashes(contents: Iterable[str | bytes]) -> np.ndarray:
    """(n, 2) uint64: the 128-bit hash of each text or content."""
    encoded = (content.encode() if isinstance(content, str) else content for content in contents)
    digests = [hashlib.blake2b(content, digest_size=16).digest() for content in encoded]
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


def hash_of(contents: Iterable[str | bytes | np.ndarray | Path]) -> str:
    """A short hash of texts, contiguous arrays and the contents of files, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for content in contents:
        if isinstance(content, Path):
            with open(content, "rb") as file:
                digest.update(hashlib.file_digest(file, hashlib.blake2b).digest())
        elif isinstance(content, np.ndarray):
            digest.update(f"{content.dtype} {content.shape}".encode() + content.tobytes())
        else:
            digest.update(hashlib.blake2b(content.encode() if isinstance(content, str) else content).digest())
    return digest.hexdigest()


def save_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file atomically; several processes may write the same one."""
    files.write_array(path, array, ADVICE, shared=True)


def load_array(path: Path) -> np.ndarray:
    """A .npy file as a read-only memory map."""
    if not path.is_file():
        raise UserError(f"no such file: {path}; give a .npy file with one row per item")
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is no readable .npy array: {first_line(error)}") from error
    if not isinstance(loaded, np.ndarray):
        raise UserError(f"{path} holds several arrays: save one with numpy.save")
    return loaded
