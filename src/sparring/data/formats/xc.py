"""Extreme-classification data sets: texts, the labels that belong to them, and the texts of the labels."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from sparring.core.errors import UserError, one_line
from sparring.core.memory_usage import machine_bytes
from sparring.data.columns import with_title
from sparring.data.interactions import TEST, TRAIN, Interactions, Vocabulary
from sparring.data.lines import find_file, read_json_lines, read_lines, read_pairs
from sparring.data.pairs import csr
from sparring.data.propensity import inverse_propensities, propensity_constants

_LABELS = {"trn": ("Y.trn.npz", "trn_X_Y.txt"), "tst": ("Y.tst.npz", "tst_X_Y.txt")}
_TEXTS = {
    "trn": ("trn_X.txt", "X.trn.txt"),
    "tst": ("tst_X.txt", "X.tst.txt"),
    "lbl": ("Y.txt", "lbl_X.txt", "output-items.txt"),
}
_FILTERS = {
    "trn": ("filter_labels_train.txt", "trn_filter_labels.txt"),
    "tst": ("filter_labels_test.txt", "tst_filter_labels.txt"),
}
_WORDS = {"trn": "training", "tst": "test", "lbl": "label"}


@dataclass(frozen=True)
class Labels:
    """A sparse matrix of labels: sorted, distinct pairs (row, label) and its shape."""

    rows: np.ndarray  # (n,) int32
    labels: np.ndarray  # (n,) int32
    n_rows: int
    n_labels: int

    @classmethod
    def of(cls, rows: np.ndarray, labels: np.ndarray, n_rows: int, n_labels: int) -> Labels:
        """From pairs in any order, with or without duplicates."""
        merged = csr(rows, labels, n_rows, n_labels)
        sorted_rows = np.repeat(np.arange(n_rows, dtype=np.int32), merged.start.diff())
        return cls(sorted_rows, merged.items.numpy(), n_rows, n_labels)


def is_xc(folder: Path) -> bool:
    """Whether a folder holds an extreme-classification data set."""
    return (
        find_file(folder, *_LABELS["trn"], "trn.json") is not None
        or find_file(folder, *_LABELS["tst"], "tst.json") is not None
    )


def read_xc(folder: str | Path) -> Interactions:
    """The data set of a folder in a layout of the extreme-classification repository, with its split, texts and filters.

    Labels come from `Y.trn.npz` and `Y.tst.npz`, else `trn_X_Y.txt` and `tst_X_Y.txt`, else the `target_ind` of
    `trn.json` and `tst.json`; texts from `trn_X.txt`, `tst_X.txt` and `Y.txt`, one per line, else from the titles and
    contents of `trn.json`, `tst.json` and `lbl.json`. Text files may be gzipped. Queries are the points, numbered by
    line, the test points after the training points; items are the labels. The pairs of `filter_labels_train.txt` and
    `filter_labels_test.txt` (or `trn_filter_labels.txt`, `tst_filter_labels.txt`) are hidden: never recommended,
    relevant or not.

        data = read_xc("LF-AmazonTitles-131K");  parts = split(data);  parts.test
    """
    folder = Path(folder)
    notes: list[str] = []
    tables = {name: _texts(folder, name, notes) for name in ("trn", "tst", "lbl")}
    n_labels = None if tables["lbl"] is None else len(tables["lbl"])
    train, test = (_part_labels(folder, name, tables[name], n_labels) for name in ("trn", "tst"))
    if train is None:
        raise UserError(
            f"{folder} has no training labels: it needs {', '.join(_LABELS['trn'])} or trn.json with target_ind"
        )
    n_labels = n_labels or train.n_labels
    for name, labels in (("trn", train), ("tst", test)):
        _check(folder, name, tables[name], labels, n_labels)
    if test is None:
        test = Labels(np.zeros(0, np.int32), np.zeros(0, np.int32), 0, n_labels)
    n_queries = train.n_rows + test.n_rows
    hidden = _filters(folder, train.n_rows, test.n_rows, n_labels)
    empty = test.n_rows - len(np.unique(test.rows))
    if empty:
        notes.append(f"{empty:,} test points have no label")
    counts = np.bincount(train.labels, minlength=n_labels)
    return Interactions(
        queries=np.concatenate([train.rows, test.rows + train.n_rows]).astype(np.int32),
        items=np.concatenate([train.labels, test.labels]),
        query_ids=Vocabulary(np.arange(n_queries)),
        item_ids=Vocabulary(np.arange(n_labels)),
        split=np.repeat(np.array([TRAIN, TEST], dtype=np.uint8), [len(train.rows), len(test.rows)])
        if test.n_rows
        else None,
        item_table=None if tables["lbl"] is None else with_title(tables["lbl"]),
        query_table=_stacked(tables["trn"], tables["tst"], test.n_rows),
        hidden=hidden,
        empty=empty,
        propensity=inverse_propensities(counts, train.n_rows, *propensity_constants(folder.resolve().name)),
        notes=tuple(notes),
    )


def read_labels(file: Path) -> Labels:
    """Labels of a .npz file of scipy, or of a text file: a line "rows labels", then a line of "label:value" per row."""
    return _npz(file) if file.name.endswith(".npz") else _sparse_text(file)


def _npz(file: Path) -> Labels:
    kinds = OSError, ValueError, KeyError, IndexError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error
    with one_line(f"{file} is not a sparse matrix written by scipy.sparse.save_npz", *kinds):
        _check_sizes(file)
        with np.load(file, allow_pickle=False) as saved:
            fields: Mapping[str, np.ndarray] = {name: saved[name] for name in saved.files}
        kind = (
            bytes(fields["format"].item()).decode()
            if fields["format"].dtype.kind == "S"
            else str(fields["format"].item())
        )
        n_rows, n_labels = (int(size) for size in fields["shape"])
        if kind == "coo":
            rows, columns = fields["row"], fields["col"]
        else:
            major = np.repeat(np.arange(len(fields["indptr"]) - 1), np.diff(fields["indptr"]))
            rows, columns = {"csr": (major, fields["indices"]), "csc": (fields["indices"], major)}[kind]
        known = fields["data"] != 0
        rows, columns = rows[known].astype(np.int32), columns[known].astype(np.int32)
        if len(rows) and (min(rows.min(), columns.min()) < 0 or rows.max() >= n_rows or columns.max() >= n_labels):
            raise ValueError(f"an index is outside its shape of {n_rows:,} x {n_labels:,}")
        return Labels.of(rows, columns, n_rows, n_labels)


def _check_sizes(file: Path) -> None:
    """Raise unless the arrays of an .npz file have the sizes of their headers, and fit into memory together."""
    total = 0
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            with archive.open(member) as stream:
                version = np.lib.format.read_magic(stream)
                header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, _, dtype = header[version](stream)
                size = stream.tell() + math.prod(shape) * dtype.itemsize
            total += size
            if size != member.file_size or not 0 <= total <= machine_bytes():
                raise ValueError(f"{member.filename} promises {size:,} bytes")


def _sparse_text(file: Path) -> Labels:
    lines, _ = read_lines(file)
    header = lines[0].split() if len(lines) else []
    if len(header) != 2 or not all(number.isdigit() for number in header):
        raise UserError(
            f"{file} line 1 is {lines[0][:60] if len(lines) else ''!r}; expected the numbers of rows and of labels"
        )
    n_rows, n_labels = (int(number) for number in header)
    body = lines[1:]
    while len(body) > n_rows and not body[-1].strip():
        body = body[:-1]
    if len(body) != n_rows:
        raise UserError(f"{file} says {n_rows:,} rows, but {len(body):,} lines follow its first")
    row_pairs = body.str.strip_chars().str.replace_all(r"\s+", " ").str.split(" ")
    pairs = (
        pl.DataFrame({"row": np.arange(n_rows, dtype=np.int32), "pair": row_pairs})
        .explode("pair")
        .filter(pl.col("pair") != "")
    )
    label, value = pl.col("pair").str.extract(r"^(\d+)(?::|$)"), pl.col("pair").str.extract(r":(.+)$")
    pairs = pairs.with_columns(
        label.cast(pl.Int32, strict=False).alias("label"),
        pl.when(value.is_null()).then(1.0).otherwise(value.cast(pl.Float64, strict=False)).alias("value"),
    )
    wrong = pairs.filter(pl.col("label").is_null() | (pl.col("label") >= n_labels) | pl.col("value").is_null())
    if len(wrong):
        row, pair = wrong["row"][0], wrong["pair"][0]
        raise UserError(
            f"{file} line {row + 2:,} has {pair[:40]!r}; expected label:value, with a label below {n_labels:,}"
        )
    pairs = pairs.filter(pl.col("value") != 0)
    return Labels.of(pairs["row"].to_numpy(), pairs["label"].to_numpy(writable=True), n_rows, n_labels)


def _part_labels(folder: Path, name: str, table: pl.DataFrame | None, n_labels: int | None) -> Labels | None:
    file = find_file(folder, *_LABELS[name])
    if file is not None:
        return read_labels(file)
    if table is None or "target_ind" not in table.columns:
        return None
    pairs = table.select(row=pl.int_range(pl.len(), dtype=pl.Int32), label="target_ind").explode("label").drop_nulls()
    most = n_labels if n_labels is not None else int(pairs["label"].to_numpy().max(initial=-1)) + 1
    wrong = pairs.filter((pl.col("label") < 0) | (pl.col("label") >= most))
    if len(wrong):
        row, label = wrong["row"][0], wrong["label"][0]
        raise UserError(
            f"{folder / name}.json has the label {label} in its point {row + 1:,}, but there are {most:,} labels"
        )
    return Labels.of(pairs["row"].to_numpy(), pairs["label"].cast(pl.Int32).to_numpy(writable=True), len(table), most)


def _texts(folder: Path, name: str, notes: list[str]) -> pl.DataFrame | None:
    """One row per point or label, with its text and its other fields; None where there are no texts."""
    file = next((file for place in (folder, folder / "raw") if (file := find_file(place, *_TEXTS[name]))), None)
    if file is not None:
        lines, note = read_lines(file)
        notes += [note] if note else []
        return pl.DataFrame({"text": lines})
    file = find_file(folder, f"{name}.json")
    if file is None:
        return None
    kinds: dict[str, pl.DataType | type[pl.DataType]] = {"uid": pl.String, "title": pl.String, "content": pl.String}
    table, note = read_json_lines(file, kinds | {"target_ind": pl.List(pl.Int64)}, "title")
    notes += [note] if note else []
    text = pl.concat_str(
        [pl.col("title"), pl.col("content").str.strip_chars().replace("", None)], separator=" ", ignore_nulls=True
    )
    table = table.with_columns(text.str.strip_chars().alias("text"))
    return table.drop(column for column in table.columns if table[column].null_count() == len(table))


def _check(folder: Path, name: str, table: pl.DataFrame | None, labels: Labels | None, n_labels: int) -> None:
    if labels is None:
        return
    if labels.n_labels != n_labels:
        columns = f"the {_WORDS[name]} labels are columns 0..{labels.n_labels - 1:,}"
        raise UserError(f"{folder}: {columns}, but there are {n_labels:,} labels")
    if table is not None and len(table) != labels.n_rows:
        raise UserError(
            f"{folder} has {len(table):,} {_WORDS[name]} texts and {labels.n_rows:,} rows of {_WORDS[name]} labels"
        )


def _filters(folder: Path, n_train: int, n_test: int, n_labels: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Hidden pairs in dense ids: those of the training points, then those of the test points."""
    hidden = []
    for name, n_rows, before in (("trn", n_train, 0), ("tst", n_test, n_train)):
        file = find_file(folder, *_FILTERS[name])
        if file is not None:
            hidden.append(read_pairs(file, n_rows, n_labels) + np.array([before, 0]))
    pairs = np.concatenate(hidden) if hidden else np.zeros((0, 2), dtype=np.int64)
    return (pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32)) if len(pairs) else None


def _stacked(train: pl.DataFrame | None, test: pl.DataFrame | None, n_test: int) -> pl.DataFrame | None:
    if train is None or (test is None and n_test):
        return None
    tables = [table.drop("target_ind", strict=False) for table in (train, test) if table is not None]
    return pl.concat(tables[: 2 if n_test else 1], how="diagonal")
