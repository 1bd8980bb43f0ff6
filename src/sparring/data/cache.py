"""The cache: files computed once and found again by the content they were computed from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sparring.core import files
from sparring.core.errors import UserError, first_line
from sparring.core.manifest import file_hash, read_sealed, write_sealed

ItemProgress = Callable[[str, int, int], None]  # the name of the step, items done, items in all

log = logging.getLogger(__name__)
ADVICE = "choose another folder with --cache"
_SEGMENT = 16384  # rows encoded between two writes: the most that an interrupted encoding loses


def cache_folder() -> Path:
    """The folder of downloads and computed vectors: $SPARRING_HOME, otherwise ~/.cache/sparring."""
    return Path(os.environ.get("SPARRING_HOME") or Path.home() / ".cache" / "sparring")


def vectors_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder of computed vectors: the given one, otherwise `modalities` in the cache folder."""
    return Path(cache) if cache is not None else cache_folder() / "modalities"


class VectorCache:
    """A folder of vectors by the hash of the content they encode; one folder for each encoder and its settings.

    Vectors are in segments, `NAME.npy` with the hashes in `NAME.keys.npy` and the hashes of these two files in
    `NAME.seal`. A segment is complete or absent, so an interrupted encoding resumes where it was, and only new or
    changed content is ever encoded. A damaged segment is deleted and encoded again.

        cache = VectorCache(folder / encoder.fingerprint)
        parts, rows = cache.encode(hashes(texts), lambda missing: encoder.encode([texts[i] for i in missing]))
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.n_encoded = 0  # rows that were not in the cache
        self._checked = set[Path]()  # segments that were compared with their hashes

    def encode(
        self, keys: np.ndarray, encode: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Memory-mapped parts, and the row of each key (n, 2) in their concatenation; equal keys share a row.

        `encode(rows)` returns the (len(rows), width) vectors of some of the keys; it is called only for missing ones.
        """
        _, first = np.unique(keys, axis=0, return_index=True)
        first.sort()
        missing = first[_find_rows(keys[first], self._segments()) < 0]
        self.n_encoded = len(missing)
        for start in range(0, len(missing), _SEGMENT):
            rows = missing[start : start + _SEGMENT]
            self._add(keys[rows], encode(rows))
        segments = self._segments()  # listed once: another process may be adding to them
        parts = tuple(load_array(file.with_suffix("").with_suffix(".npy")) for file in segments)
        return parts, _find_rows(keys, segments)

    def _segments(self) -> list[Path]:
        """The files of keys of all undamaged segments."""
        return [seal.with_suffix(".keys.npy") for seal in sorted(self.folder.glob("*.seal")) if self._whole(seal)]

    def _whole(self, seal: Path) -> bool:
        if seal in self._checked:
            return True
        names = f"{seal.stem}.npy", f"{seal.stem}.keys.npy"
        try:
            hashes = read_sealed(seal, "")
            wrong = next((name for name in names if file_hash(self.folder / name) != hashes.get(name)), None)
        except (UserError, OSError):
            wrong = seal.name
        if wrong is not None:
            log.warning("%s is damaged: its vectors are computed again", self.folder / wrong)
            seal.unlink(missing_ok=True)
            return False
        self._checked.add(seal)
        return True

    def _add(self, keys: np.ndarray, vectors: np.ndarray) -> None:
        name = hash_of([np.ascontiguousarray(keys)])
        names = f"{name}.npy", f"{name}.keys.npy"
        for file, array in zip(names, (vectors, keys), strict=True):
            save_array(self.folder / file, array)
        write_sealed(self.folder / f"{name}.seal", {file: file_hash(self.folder / file) for file in names})  # last

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Write the settings of the encoder to encoder.json."""
        text = json.dumps(dict(settings), indent=2)
        files.write(self.folder / "encoder.json", lambda file: file.write_text(text), ADVICE)


def _find_rows(keys: np.ndarray, segments: list[Path]) -> np.ndarray:
    """The row of each key in the concatenated segments, -1 where it is in none."""
    if not segments:
        return np.full(len(keys), -1, dtype=np.int64)
    stored = np.concatenate([load_array(file) for file in segments])
    table = pl.DataFrame({"a": stored[:, 0], "b": stored[:, 1], "row": np.arange(len(stored))})
    wanted = pl.DataFrame({"a": keys[:, 0], "b": keys[:, 1]})
    joined = wanted.join(table.unique(["a", "b"], keep="first"), on=["a", "b"], how="left", maintain_order="left")
    return joined["row"].fill_null(-1).to_numpy(writable=True)


def hashes(contents: Iterable[str | bytes]) -> np.ndarray:
    """(n, 2) uint64: the 128-bit hash of each text or content."""
    raw = (content.encode() if isinstance(content, str) else content for content in contents)
    digests = [hashlib.blake2b(content, digest_size=16).digest() for content in raw]
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
    files.write_array(path, array, ADVICE)


def load_array(path: Path) -> np.ndarray:
    """A .npy file as a read-only memory map."""
    if not path.is_file():
        raise UserError(f"no such file: {path}; give a .npy file with one row per item")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        pickled = "pickle" in str(error) or "Python objects" in str(error)  # NumPy's advice is to load it unsafely
        why = "it holds no numbers that numpy.save wrote" if pickled else first_line(error)
        raise UserError(f"{path} is not a readable .npy array: {why}") from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"{path} holds several arrays: save one with numpy.save")
    return array
