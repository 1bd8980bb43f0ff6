"""Vectors in files, and the row of each item in them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.cache import ADVICE, hash_of, load_array
from sparring.data.columns import find_column
from sparring.data.interactions import Vocabulary
from sparring.data.table import read_errors
from sparring.data.texts.texts import Role

log = logging.getLogger(__name__)
_ROWS = 32768  # rows of a Parquet file held at once (polars also holds their row groups)
_TABLES = (".parquet", ".pq", ".csv", ".tsv")


def id_vectors(place: str, vocabulary: Vocabulary, role: Role) -> np.ndarray:
    """(n, D) float32: the vectors of a file, FILE.npy or FILE.npy:IDS, one row per id; 0 for an id without one."""
    name, colon, ids = place.partition(".npy:")
    path = Path(f"{name}.npy" if colon else place)
    array, rows, matched = array_rows(path, Path(ids) if ids else None, vocabulary, role)
    known = np.flatnonzero(rows >= 0)
    vectors = np.zeros((len(vocabulary), array.shape[1]), np.float32)
    with np.errstate(over="ignore"):  # a number too large for float32 is refused below
        vectors[known] = array[rows[known]]
    if not np.isfinite(vectors).all():
        row = int(np.flatnonzero(~np.isfinite(vectors).all(1))[0])
        named = f"the vector of {role} {vocabulary.ids[row]} in {path}"
        raise UserError(f"{named} has a value that is not finite: fill it first, for instance with 0")
    missing = f"; {len(rows) - len(known):,} of {len(rows):,} have none" if len(known) < len(rows) else ""
    log.info("vectors of %s are matched %s%s", path, matched, missing)
    return vectors


def array_rows(
    path: Path, ids: Path | None, items: Vocabulary, role: Role = "item"
) -> tuple[np.ndarray, np.ndarray, str]:
    """A .npy file as a memory map, the row of each item in it (-1 for none), and a phrase on how they were matched.

    By `ids` where given; by an items table with as many rows in the same folder; row = id for ids from 0 on; by the
    order of sorted ids for as many rows as items. Anything else is an error: a guess would pair items with wrong
    vectors. With the role "query", the same for queries.
    """
    array = load_array(path)
    if array.ndim != 2 or not array.shape[1]:
        raise UserError(f"{path} has the shape {array.shape}; it must have one row of numbers per {role}")
    if array.dtype.kind not in "fiub":
        raise UserError(f"{path} holds {array.dtype}, not numbers: save float32")
    n_rows = len(array)
    if ids is not None:
        named = _read_ids(ids, role)
        if len(named) != n_rows:
            raise UserError(f"{path} has {n_rows:,} rows, {ids} has {len(named):,} ids; they must agree")
        return array, _item_rows(named, items, ids, role), f"by the ids of {ids.name}"
    tables = "queries" if role == "query" else "items"
    beside = next((file for kind in _TABLES if (file := path.parent / f"{tables}{kind}").is_file()), None)
    if beside is not None and len(named := _read_ids(beside, role)) == n_rows:
        return array, _item_rows(named, items, beside, role), f"by the ids of {beside.name}"
    if items.kind == "int" and items.ids.min() == 0 and int(items.ids.max()) < n_rows:  # type: ignore[arg-type]
        return array, items.ids.to_numpy().astype(np.int64), "row = id"
    if n_rows == len(items):
        return array, np.arange(n_rows), "in the order of sorted ids"
    advice = f"name their ids with {path.name}:IDS (.npy or a table)"
    raise UserError(f"{path} has {n_rows:,} rows for {len(items):,} {tables}: {advice}")


def column_vectors(path: Path, column: str, items: Vocabulary, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """A Parquet column of lists of numbers as a memory map, NaN where null, and each item's row in it (-1 for none).

    The lists are copied once, a block at a time, into a .npy file in `folder` with the hash of the file as its name.
    """
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    with read_errors(str(path)):
        scan = pl.scan_parquet(path)
        schema = scan.collect_schema()
        if column not in schema:
            raise UserError(f"{path} has no column {column!r}: its columns are {', '.join(schema.names())}")
        kind: Any = schema[column]
        if not isinstance(kind, (pl.List, pl.Array)) or not kind.inner.is_numeric():
            raise UserError(f"column {column!r} of {path} holds {kind}, not lists of numbers")
        rows = _item_rows(_read_ids(path), items, path)
        stored = folder / f"{hash_of([f'column 1 {column}', path])}.npy"
        if not stored.is_file():
            _copy(scan.select(pl.col(column).cast(pl.List(pl.Float32))), stored, f"column {column!r} of {path}")
    return load_array(stored), rows


def _copy(scan: pl.LazyFrame, target: Path, source: str) -> None:
    """Write a column of lists to a .npy file, a block at a time."""
    name = scan.collect_schema().names()[0]
    size = pl.col(name).list.len()
    counted = scan.select(pl.len().alias("rows"), size.min().alias("shortest"), size.max().alias("longest"))
    n_rows, shortest, longest = counted.collect(engine="streaming").row(0)
    if not longest:
        raise UserError(f"{source} holds no vector")
    if shortest != longest:
        raise UserError(f"{source} holds lists of {shortest} to {longest} numbers; give vectors of one length")

    def write_blocks(path: Path) -> None:
        with open(path, "wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (n_rows, longest)}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, n_rows, _ROWS):
                lists = scan.slice(start, _ROWS).collect()[name]
                block = np.full((len(lists), longest), np.nan, dtype="<f4")
                numbers = lists.drop_nulls().list.explode().fill_null(float("nan")).to_numpy()
                block[lists.is_not_null().to_numpy()] = numbers.reshape(-1, longest)
                file.write(block.data)

    files.write(target, write_blocks, ADVICE)


def _read_ids(path: Path, role: Role = "item") -> pl.Series | np.ndarray:
    """The ids in a .npy array, or in the item or query column of a table."""
    if path.suffix == ".npy":
        ids = load_array(path)
        if ids.ndim != 1 or ids.dtype.kind not in "iuU":
            raise UserError(f"{path} holds {ids.dtype} of shape {ids.shape}, not one id per row")
        return np.array(ids)
    if not path.is_file() or path.suffix not in _TABLES:
        kinds = f"a .npy array or a table ({', '.join(_TABLES)}) with a column of {role} ids"
        raise UserError(f"cannot read ids from {path}: give {kinds}")
    with read_errors(str(path)):
        if path.suffix in (".parquet", ".pq"):
            scan = pl.scan_parquet(path)
        else:
            scan = pl.scan_csv(path, separator="\t" if path.suffix == ".tsv" else ",", infer_schema=False)
        names = scan.collect_schema().names()
        # An items table often has ids of other catalogues too, which makes the guess ambiguous.
        usual = f"{role}_id"
        column = find_column(role, names, usual if usual in names else None, str(path), required=True)
        return scan.select(str(column)).collect().to_series()


def _item_rows(ids: pl.Series | np.ndarray, items: Vocabulary, source: Path, role: Role = "item") -> np.ndarray:
    """The row of each item among ids, -1 where it is absent."""
    dense = items.encode(ids)
    known = np.flatnonzero(dense >= 0)
    count = np.bincount(dense[known], minlength=len(items))
    if count.max(initial=0) > 1:
        owner = f"{role} {items.ids[int(count.argmax())]}"
        raise UserError(f"{owner} has {count.max()} rows in {source}; give one per {role}")
    if not len(known):
        examples = f"the first is {ids[0]}, one in the interactions is {items.ids[0]}"
        raise UserError(f"none of the ids in {source} is that of a {role} of the interactions: {examples}")
    rows = np.full(len(items), -1, dtype=np.int64)
    rows[dense[known]] = known
    return rows
