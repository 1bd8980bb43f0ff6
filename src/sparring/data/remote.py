"""Tables of object stores and lakes: s3, gs, az and hf addresses, Delta and Iceberg tables, by polars' own readers.

    s3://BUCKET/interactions.parquet    a Parquet or CSV file, or a glob of Parquet files
    s3://BUCKET/parts/                  a folder of Parquet files
    delta:s3://BUCKET/TABLE             a Delta table, also of a local folder (extra `delta`)
    iceberg:s3://BUCKET/v3.metadata.json   an Iceberg table (extra `iceberg`)

Credentials come from the environment, as polars and the cloud's own tools read them. The columns in use are copied once
into a temporary Parquet file, and everything else reads the copy: several scans would download them several times and
could see other rows. So the fingerprint of the data is that of the rows that were copied.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl

from sparring.core.errors import UserError, one_line
from sparring.core.extras import optional
from sparring.data.table import OpenTable, file_states, read_errors

_STORES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl", "hf", "file")
_REMOTE = re.compile(rf"(delta:|iceberg:|({'|'.join(_STORES)})://).+", re.DOTALL)
_TEXT = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")


def is_remote(place: object) -> bool:
    """Whether a place is an address that this module reads."""
    return isinstance(place, str) and _REMOTE.fullmatch(place) is not None


def check_scheme(place: object) -> None:
    """Refuse an address of another kind, which would be taken for a path."""
    if isinstance(place, str) and not is_remote(place) and re.match(r"[A-Za-z][\w+.-]+://", place):
        known = ", ".join(f"{name}://" for name in ("s3", "gs", "az", "hf"))
        raise UserError(f"{place}: no such kind of address; known are {known}, delta: and iceberg:")


def scan_remote(place: str) -> OpenTable:
    """The rows at an address, unread."""
    kind, _, where = place.partition(":")
    if kind == "delta":
        optional("deltalake", "delta", "a Delta table")
        return OpenTable(_known(pl.scan_delta, where, place), {}, source=place)
    if kind == "iceberg":
        optional("pyiceberg", "iceberg", "an Iceberg table")
        return OpenTable(_known(pl.scan_iceberg, where, place), {}, source=place)
    if place.lower().endswith(_TEXT):
        return OpenTable(_scan_text(place, infer=False), {}, source=place, text=True)
    return OpenTable(pl.scan_parquet(place), {}, source=place)


def _known(scan: Callable[[str], pl.LazyFrame], where: str, place: str) -> pl.LazyFrame:
    """The scan of a lake's table whose columns are known: its client raises errors of its own kinds."""
    with one_line(f"cannot read {place}", Exception):
        frame = scan(where)
        frame.collect_schema()
    return frame


def copied(table: OpenTable, names: list[str]) -> OpenTable:
    """A table whose columns of these names are in a temporary file, which goes with the table."""
    with read_errors(table.source):
        folder = tempfile.TemporaryDirectory(prefix="sparring-")
        file = Path(folder.name) / "rows.parquet"
        table.frame.select(names).sink_parquet(file, compression="lz4")
        if not pl.scan_parquet(file).select(pl.len()).collect().item():
            raise UserError(f"{table.source} is empty")
    return replace(table, frame=pl.scan_parquet(file), files=(file,), opened=file_states([file]), holder=folder)


def read_remote(place: str, key: str | None = None) -> pl.DataFrame:
    """A table that describes items or queries; the column `key` of a text file stays text."""
    with read_errors(place):
        if place.lower().endswith(_TEXT):
            return _scan_text(place, key=key).collect()
        return scan_remote(place).frame.collect()


def _scan_text(place: str, infer: bool = True, key: str | None = None) -> pl.LazyFrame:
    line = pl.scan_csv(place, has_header=False, separator="\x01", quote_char=None, infer_schema=False, n_rows=1)
    first = str(line.collect().item())
    separator = max("\t,;|", key=first.count)
    kinds = {key: pl.String} if key else {}
    return pl.scan_csv(
        place,
        separator=separator,
        infer_schema=infer,
        infer_schema_length=None,
        schema_overrides=kinds,
        encoding="utf8-lossy",
    )


def write_remote(table: pl.DataFrame, place: str) -> None:
    """Write a table to an address as Parquet; an object appears when it is complete."""
    with one_line(f"cannot write {place}", OSError, pl.exceptions.PolarsError):
        table.write_parquet(place)


def place_of(where: str | os.PathLike[str]) -> str | Path:
    """An address as it is, and a path as a Path."""
    check_scheme(where)
    return where if isinstance(where, str) and is_remote(where) else Path(where)
