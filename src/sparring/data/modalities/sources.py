"""Where the modalities of a catalogue come from: NAME=SPEC, one line each, aligned to the items of the interactions."""

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
from sparring.data.interactions import Split
from sparring.data.modalities.behaviour import cached_cooccurrence
from sparring.data.modalities.cache import Encodings, Progress, encodings_folder, hashes
from sparring.data.modalities.images import ImageEncoder
from sparring.data.modalities.modalities import Modalities, Modality
from sparring.data.modalities.vector_files import array_rows, column_vectors
from sparring.data.texts.encoder import TextEncoder

SPECS = "FILE.npy, FILE.npy:IDS, FILE.parquet:COLUMN, text:COLUMN,COLUMN, images:FOLDER, images:COLUMN, behaviour or behaviour:RUN"
RunVectors = Callable[
    [str, Split], tuple[np.ndarray, np.ndarray]
]  # item vectors of a finished run, and the row of each item of the split
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")


def load_modalities(
    specs: Mapping[str, str],
    split: Split,
    *,
    text_encoder: str | Path = "minilm",
    cache: str | os.PathLike[str] | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    run_vectors: RunVectors | None = None,
) -> Modalities:
    """The modalities that specs name, in dense item order of a split's data.

        FILE.npy               a row per item: by the ids of an items table beside it, else row = id where ids count from 0, else sorted ids
        FILE.npy:IDS           rows in the order of ids in IDS: a .npy array, or a table with an item column
        FILE.parquet:COLUMN    a list of numbers for each id of the file's item column
        text:title,plot        columns of the items table, joined, through `text_encoder`
        images:FOLDER          pictures named by item id, through EfficientNet-Lite0; images:COLUMN where a column holds their paths
        behaviour              co-occurrence in the training part; behaviour:64 in 64 dimensions; behaviour:RUN vectors of a finished run

    `behaviour:RUN` needs `run_vectors` (sparring.training.run_vectors): data does not know how runs are read.

    What is computed is computed once: it is kept in `cache` by its content, the encoder and its settings. Items may lack any of
    them. `notes` of the result has a line for each, with what is missing.

        load_modalities({"text": "text:title", "behaviour": "behaviour"}, split)
    """
    loader = _Loader(
        split,
        str(text_encoder),
        encodings_folder(cache),
        device,
        progress or (lambda name, done, total: None),
        run_vectors,
    )
    modalities = [loader.load(name, spec) for name, spec in specs.items()]
    return Modalities(modalities, loader.notes)


def parse_modalities(given: list[str]) -> dict[str, str]:
    """{name: spec} of the words NAME=SPEC of a command line."""
    specs: dict[str, str] = {}
    for word in given:
        name, equals, spec = word.partition("=")
        if not (name and equals and spec):
            raise UserError(f"{word!r} is no modality: write NAME=SPEC, where SPEC is {SPECS}")
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
    progress: Progress
    run_vectors: RunVectors | None
    notes: list[str] = field(default_factory=list)

    def load(self, name: str, spec: str) -> Modality:
        kind, _, rest = spec.partition(":")
        file = re.fullmatch(r"(.+?\.(?:npy|parquet|pq))(?::(.+))?", spec)
        if kind == "text" and rest:
            modality, how = self._text(name, rest.split(","))
        elif kind == "images" and rest:
            modality, how = self._images(name, rest)
        elif kind == "behaviour":
            modality, how = self._behaviour(name, rest)
        elif file is not None:
            modality, how = self._file(name, Path(file[1]), file[2])
        else:
            raise UserError(f"{spec!r} is no source of vectors for modality {name!r}: give {SPECS}")
        present, n_items = int(modality.present.sum()), len(modality)
        if not present:
            raise UserError(f"no item has modality {name!r} ({spec}): {how}")
        self.notes.append(
            f"{name}: {modality.width} numbers from {spec} ({how}); {n_items - present:,} of {n_items:,} items lack it"
        )
        return modality

    def _file(self, name: str, path: Path, rest: str | None) -> tuple[Modality, str]:
        items = self.split.train.item_ids
        if path.suffix == ".npy":
            array, at, how = array_rows(path, Path(rest) if rest else None, items)
            return Modality(name, (array,), None if np.array_equal(at, np.arange(len(array))) else at), how
        if not rest:
            raise UserError(f"which column of {path}? write {name}={path}:COLUMN")
        array, at = column_vectors(path, rest, items, self.folder / "columns")
        return Modality(name, (array,), at), "by the ids of the file"

    def _text(self, name: str, columns: list[str]) -> tuple[Modality, str]:
        table = self._table(columns, "text")
        texts = table.select(_joined(table, columns).alias("text"))["text"]
        filled = np.flatnonzero((texts.is_not_null() & (texts != "")).fill_null(False).to_numpy())
        kept: list[str] = texts.gather(filled).to_list()
        encoder = TextEncoder(self.text_encoder, self.device)

        def encode(rows: np.ndarray, told: Callable[[int], None]) -> np.ndarray:
            return encoder.encode([kept[i] for i in rows], told)

        return self._encoded(
            name, encoder, "text", filled, hashes(kept), encode, f"{len(table) - len(filled):,} without text"
        )

    def _images(self, name: str, where: str) -> tuple[Modality, str]:
        files = self._picture_files(where)
        with ThreadPoolExecutor(4) as pool:
            contents = list(pool.map(_digest, files.values()))
        readable = [i for i, digest in enumerate(contents) if digest is not None]
        dense = np.array(list(files), dtype=np.int64)[readable]
        paths = [list(files.values())[i] for i in readable]
        encoder = ImageEncoder(self.device)
        lost = f"{self.split.train.n_items - len(dense):,} without a file"
        modality, how = self._encoded(
            name,
            encoder,
            "images",
            dense,
            np.concatenate([np.zeros((0, 2), np.uint64), *(digest for digest in contents if digest is not None)]),
            lambda rows, told: encoder.encode([paths[i] for i in rows], told),
            lost,
        )
        broken = len(dense) - int(modality.present.sum())
        return modality, how + (f", {broken:,} files that are no readable picture" if broken else "")

    def _picture_files(self, where: str) -> dict[int, Path]:
        """Dense item -> its picture."""
        data = self.split.train
        table = data.item_table
        if table is not None and where in table.columns:
            paths = table[where].cast(pl.String)
            if paths.str.contains("^[a-z]+://").any():
                raise UserError(
                    f"column {where!r} holds web addresses, not files: fetch the pictures, then give their folder"
                )
            return {i: Path(path) for i, path in enumerate(paths.to_list()) if path}
        if not Path(where).is_dir():
            columns = (
                f"the items table has {', '.join(table.columns)}" if table is not None else "there is no items table"
            )
            raise UserError(f"images:{where} is neither a folder nor a column: {columns}")
        found = sorted(entry for entry in Path(where).iterdir() if entry.suffix.lower() in _PICTURES)
        dense = data.item_ids.encode([file.stem for file in found])
        return {int(i): file for i, file in reversed(list(zip(dense, found, strict=True))) if i >= 0}

    def _behaviour(self, name: str, rest: str) -> tuple[Modality, str]:
        train = self.split.train
        if rest and not rest.isdigit():
            if self.run_vectors is None:
                raise UserError(
                    f"behaviour:{rest} reads a finished run: pass run_vectors=sparring.training.run_vectors"
                )
            vectors, at = self.run_vectors(rest, self.split)
            return Modality(name, (vectors,), at), "the item vectors of that run"
        if rest and not int(rest):
            raise UserError(f"behaviour:{rest} has no dimensions; give at least 1, such as behaviour:128")
        vectors, known = cached_cooccurrence(
            train, self.folder / "behaviour", int(rest or 128), lambda done, total: self.progress(name, done, total)
        )
        return Modality(
            name, (vectors,)
        ), "from the cache" if known else f"co-occurrence in {len(train):,} training interactions"

    def _encoded(
        self,
        name: str,
        encoder: TextEncoder | ImageEncoder,
        kind: str,
        dense: np.ndarray,
        keys: np.ndarray,
        encode: Callable[[np.ndarray, Callable[[int], None]], np.ndarray],
        lost: str,
    ) -> tuple[Modality, str]:
        """A modality of the items `dense` whose contents have these keys, with what is not in the cache encoded now."""
        if not len(dense):
            raise UserError(f"no item has modality {name!r}: {lost}")
        store = Encodings(self.folder / kind / encoder.fingerprint)
        done = 0

        def encode_and_tell(rows: np.ndarray) -> np.ndarray:
            nonlocal done
            vectors = encode(rows, lambda finished: self.progress(name, done + finished, store.encoded))
            done += len(rows)
            return vectors

        parts, found = store.encode(keys, encode_and_tell)
        store.describe(encoder.settings)
        at = np.full(self.split.train.n_items, -1, dtype=np.int64)
        at[dense] = found
        return Modality(name, parts, at), f"{encoder.where}, {store.encoded:,} encoded now, {lost}"

    def _table(self, columns: list[str], kind: str) -> pl.DataFrame:
        table = self.split.train.item_table
        if table is None:
            raise UserError(f"{kind}:{','.join(columns)} needs an items table: give one with --items")
        for column in columns:
            if column not in table.columns:
                raise UserError(f"the items table has no column {column!r}: it has {', '.join(table.columns)}")
        return table


def _joined(table: pl.DataFrame, columns: list[str]) -> pl.Expr:
    """The columns as one text, ". " between them, what is null or blank left out."""
    parts = []
    for name in columns:
        text = (
            pl.col(name).list.join(", ") if table.schema[name] == pl.List(pl.String) else pl.col(name).cast(pl.String)
        )
        text = text.str.strip_chars()
        parts.append(pl.when(text != "").then(text))
    return pl.concat_str(parts, separator=". ", ignore_nulls=True)


def _digest(file: Path) -> np.ndarray | None:
    try:
        return hashes([file.read_bytes()])
    except OSError:
        return None
