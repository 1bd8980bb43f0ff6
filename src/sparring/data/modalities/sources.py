"""Modalities of a catalogue by specification: NAME=SPEC, aligned to the items of the interactions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from sparring.core.errors import UserError
from sparring.data.cache import ItemProgress, VectorCache, hashes, vectors_folder
from sparring.data.interactions import Split
from sparring.data.modalities.behaviour import cached_cooccurrence
from sparring.data.modalities.images import ImageEncoder
from sparring.data.modalities.modalities import Modalities, Modality
from sparring.data.modalities.vector_files import array_rows, column_vectors
from sparring.data.texts.encoder import TextEncoder

SPECS = (
    "FILE.npy, FILE.npy:IDS, FILE.parquet:COLUMN, text:COLUMN,COLUMN, images:FOLDER, images:COLUMN, behaviour or "
    "behaviour:RUN"
)
# The item vectors of a finished run, and the row of each item of the split in them.
RunVectors = Callable[[str, Split], tuple[np.ndarray, np.ndarray]]
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")


def load_modalities(
    specs: Mapping[str, str],
    split: Split,
    *,
    text_encoder: str | Path = "minilm",
    cache: str | os.PathLike[str] | None = None,
    device: str = "auto",
    progress: ItemProgress | None = None,
    run_vectors: RunVectors | None = None,
) -> Modalities:
    """The modalities named by `specs`, in the dense item order of a split's data.

        FILE.npy             a row per item: by the ids of an items table beside it, else row = id for ids from 0 on,
                             else in the order of sorted ids
        FILE.npy:IDS         rows in the order of the ids in IDS: a .npy array, or a table with an item column
        FILE.parquet:COLUMN  a list of numbers for each id of the file's item column
        text:title,plot      columns of the items table, joined, through `text_encoder`
        images:FOLDER        pictures named by item id, through EfficientNet-Lite0; images:COLUMN for a column of paths
        behaviour            co-occurrence in the training part; behaviour:64 in 64 dimensions
        behaviour:RUN        the item vectors of a finished run, through `run_vectors` (sparring.training.run_vectors)

    Vectors are computed once and kept in `cache` by content, encoder and settings. Items may lack any modality. `notes`
    of the result has a line for each modality, with the number of items that lack it.

        load_modalities({"text": "text:title", "behaviour": "behaviour"}, split)
    """
    progress = progress or (lambda name, done, total: None)
    loader = _Loader(split, str(text_encoder), vectors_folder(cache), device, progress, run_vectors)
    modalities = [loader.load(name, spec) for name, spec in specs.items()]
    return Modalities(modalities, loader.notes)


def parse_modalities(given: list[str]) -> dict[str, str]:
    """{name: spec} from the words NAME=SPEC of a command line."""
    specs: dict[str, str] = {}
    for word in given:
        name, equals, spec = word.partition("=")
        if not (name and equals and spec):
            raise UserError(f"{word!r} is not a modality: write NAME=SPEC, where SPEC is {SPECS}")
        if name in specs:
            raise UserError(f"modality {name!r} is given twice: {specs[name]} and {spec}")
        specs[name] = spec
    return specs


@dataclass
class _Loader:
    split: Split
    text_encoder: str
    folder: Path
    device: str
    progress: ItemProgress
    run_vectors: RunVectors | None
    notes: list[str] = field(default_factory=list)

    def load(self, name: str, spec: str) -> Modality:
        kind, _, rest = spec.partition(":")
        file = re.fullmatch(r"(.+?\.(?:npy|parquet|pq))(?::(.+))?", spec)
        if kind == "text" and rest:
            modality, origin = self._text(name, rest.split(","))
        elif kind == "images" and rest:
            modality, origin = self._images(name, rest)
        elif kind == "behaviour":
            modality, origin = self._behaviour(name, rest)
        elif file is not None:
            modality, origin = self._file(name, Path(file[1]), file[2])
        else:
            raise UserError(f"{spec!r} is not a source of vectors for modality {name!r}: give {SPECS}")
        n_present, n_items = int(modality.present.sum()), len(modality)
        if not n_present:
            raise UserError(f"no item has modality {name!r} ({spec}): {origin}")
        lacking = f"{n_items - n_present:,} of {n_items:,} items lack it"
        self.notes.append(f"{name}: {modality.width} numbers from {spec} ({origin}); {lacking}")
        return modality

    def _file(self, name: str, path: Path, rest: str | None) -> tuple[Modality, str]:
        items = self.split.train.item_ids
        if path.suffix == ".npy":
            array, rows, matched = array_rows(path, Path(rest) if rest else None, items)
            return Modality(name, (array,), None if np.array_equal(rows, np.arange(len(array))) else rows), matched
        if not rest:
            raise UserError(f"which column of {path}? write {name}={path}:COLUMN")
        array, rows = column_vectors(path, rest, items, self.folder / "columns")
        return Modality(name, (array,), rows), "by the ids of the file"

    def _text(self, name: str, columns: list[str]) -> tuple[Modality, str]:
        table = self._item_table(columns)
        texts = table.select(_joined(table, columns).alias("text"))["text"]
        filled = np.flatnonzero((texts.is_not_null() & (texts != "")).fill_null(False).to_numpy())
        kept: list[str] = texts.gather(filled).to_list()
        encoder = TextEncoder(self.text_encoder, self.device)

        def encode(rows: np.ndarray, progress: Callable[[int], None]) -> np.ndarray:
            return encoder.encode([kept[i] for i in rows], progress)

        lacking = f"{len(table) - len(filled):,} without text"
        return self._encode(name, encoder, "text", filled, hashes(kept), encode, lacking)

    def _images(self, name: str, where: str) -> tuple[Modality, str]:
        files = self._picture_files(where)
        with ThreadPoolExecutor(4) as pool:
            digests = list(pool.map(_digest, files.values()))
        readable = [i for i, digest in enumerate(digests) if digest is not None]
        dense = np.array(list(files), dtype=np.int64)[readable]
        paths = [list(files.values())[i] for i in readable]
        keys = np.concatenate([np.zeros((0, 2), np.uint64), *(digest for digest in digests if digest is not None)])
        encoder = ImageEncoder(self.device)

        def encode(rows: np.ndarray, progress: Callable[[int], None]) -> np.ndarray:
            return encoder.encode([paths[i] for i in rows], progress)

        lacking = f"{self.split.train.n_items - len(dense):,} without a file"
        modality, origin = self._encode(name, encoder, "images", dense, keys, encode, lacking)
        broken = len(dense) - int(modality.present.sum())
        return modality, origin + (f", {broken:,} files that are not readable pictures" if broken else "")

    def _picture_files(self, where: str) -> dict[int, Path]:
        """{dense item: its picture}."""
        data = self.split.train
        table = data.item_table
        if table is not None and where in table.columns:
            paths = table[where].cast(pl.String)
            if paths.str.contains("^[a-z]+://").any():
                advice = "download the pictures, then give their folder"
                raise UserError(f"column {where!r} holds web addresses, not files: {advice}")
            return {i: Path(path) for i, path in enumerate(paths.to_list()) if path}
        if not Path(where).is_dir():
            columns = "there is no items table" if table is None else f"the items table has {', '.join(table.columns)}"
            raise UserError(f"images:{where} is neither a folder nor a column: {columns}")
        files = sorted(entry for entry in Path(where).iterdir() if entry.suffix.lower() in _PICTURES)
        dense = data.item_ids.encode([file.stem for file in files])
        return {int(i): file for i, file in reversed(list(zip(dense, files, strict=True))) if i >= 0}

    def _behaviour(self, name: str, rest: str) -> tuple[Modality, str]:
        train = self.split.train
        if rest and not rest.isdigit():
            if self.run_vectors is None:
                advice = "pass run_vectors=sparring.training.run_vectors"
                raise UserError(f"behaviour:{rest} reads a finished run: {advice}")
            vectors, rows = self.run_vectors(rest, self.split)
            return Modality(name, (vectors,), rows), "the item vectors of that run"
        if rest and not int(rest):
            raise UserError(f"behaviour:{rest} has no dimensions; give at least 1, such as behaviour:128")
        vectors, cached = cached_cooccurrence(
            train, self.folder / "behaviour", int(rest or 128), lambda done, total: self.progress(name, done, total)
        )
        origin = "from the cache" if cached else f"co-occurrence in {len(train):,} training interactions"
        return Modality(name, (vectors,)), origin

    def _encode(
        self,
        name: str,
        encoder: TextEncoder | ImageEncoder,
        kind: str,
        dense: np.ndarray,
        keys: np.ndarray,
        encode: Callable[[np.ndarray, Callable[[int], None]], np.ndarray],
        lacking: str,
    ) -> tuple[Modality, str]:
        """A modality of the items `dense` with these content keys; only content that is not cached is encoded."""
        if not len(dense):
            raise UserError(f"no item has modality {name!r}: {lacking}")
        cache = VectorCache(self.folder / kind / encoder.fingerprint)
        done = 0

        def encode_missing(rows: np.ndarray) -> np.ndarray:
            nonlocal done
            vectors = encode(rows, lambda n: self.progress(name, done + n, cache.n_encoded))
            done += len(rows)
            return vectors

        parts, cached_rows = cache.encode(keys, encode_missing)
        cache.describe(encoder.settings)
        rows = np.full(self.split.train.n_items, -1, dtype=np.int64)
        rows[dense] = cached_rows
        return Modality(name, parts, rows), f"{encoder.where}, {cache.n_encoded:,} encoded now, {lacking}"

    def _item_table(self, columns: list[str]) -> pl.DataFrame:
        table = self.split.train.item_table
        if table is None:
            raise UserError(f"text:{','.join(columns)} needs an items table: give one with --items")
        for column in columns:
            if column not in table.columns:
                raise UserError(f"the items table has no column {column!r}: it has {', '.join(table.columns)}")
        return table


def _joined(table: pl.DataFrame, columns: list[str]) -> pl.Expr:
    """The columns as one text, joined by ". ", without null or blank ones."""
    parts = []
    for name in columns:
        is_list = table.schema[name] == pl.List(pl.String)
        text = pl.col(name).list.join(", ") if is_list else pl.col(name).cast(pl.String)
        text = text.str.strip_chars()
        parts.append(pl.when(text != "").then(text))
    return pl.concat_str(parts, separator=". ", ignore_nulls=True)


def _digest(file: Path) -> np.ndarray | None:
    try:
        return hashes([file.read_bytes()])
    except OSError:
        return None
