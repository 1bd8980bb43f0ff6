"""Lines of text files, gzipped or not, with any bytes; and the JSON objects or numbers in them, with errors by line."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import polars as pl

from sparring.core.errors import UserError

_CHUNK = 1 << 26  # bytes decoded at once


def find_file(folder: Path, *names: str) -> Path | None:
    """The first of the files that exists in the folder, plain or with .gz."""
    return next((file for name in names for end in ("", ".gz") if (file := folder / (name + end)).is_file()), None)


def read_lines(file: Path) -> tuple[pl.Series, str | None]:
    """The lines of a file, and a note where bytes had to be replaced.

    Only a line feed ends a line, so control characters and odd spaces stay inside a text. A carriage return before it
    and a byte order mark are dropped. Bytes that are not UTF-8 become U+FFFD.
    """
    parts: list[pl.Series] = []
    wrong: list[int] = []  # lines with invalid UTF-8, from 1
    done, rest = 0, b""
    try:
        with gzip.open(file, "rb") if file.name.endswith(".gz") else open(file, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                whole, newline, tail = (rest + chunk).rpartition(b"\n")
                rest = tail
                if newline:
                    parts.append(_decoded(whole, done, wrong))
                    done += len(parts[-1])
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if rest:
        parts.append(_decoded(rest, done, wrong))
    if not parts:
        return pl.Series("line", [], dtype=pl.String), None
    note = (
        f"replaced invalid UTF-8 in {len(wrong):,} lines of {file.name}, first in line {wrong[0]:,}" if wrong else None
    )
    lines = pl.concat(parts).rechunk()
    if lines[0].startswith("\ufeff"):
        lines = pl.concat([pl.Series("line", [lines[0][1:]]), lines[1:]]).rechunk()
    return lines, note


def check_utf8(ids: pl.Series, column: str, source: str) -> None:
    """Refuse ids with bytes that became U+FFFD because they were not UTF-8: ids that differ only there would be equal.

    `source` is their file or folder. A UTF-8 file that itself holds U+FFFD is accepted.
    """
    wrong = ids.filter(ids.str.contains("\ufffd", literal=True))
    if not len(wrong):
        return
    path = Path(source)
    files = sorted(path.glob("*")) if path.is_dir() else [path]
    for file in (file for file in files if file.is_file() and not file.name.endswith((".parquet", ".pq"))):
        line = _first_invalid(file)
        if line is not None:
            why = f"ids in column {column!r} could not be told apart (such as {wrong.min()!r})"
            raise UserError(
                f"{file} line {line:,} is not UTF-8, so that {why}: convert the file, as iconv -f LATIN1 -t UTF-8 does"
            )


def _first_invalid(file: Path) -> int | None:
    """The first line, from 1, that is not UTF-8; None where all are."""
    with gzip.open(file, "rb") if file.name.endswith(".gz") else open(file, "rb") as stream:
        return next((number for number, line in enumerate(stream, 1) if not _valid(line)), None)


def _decoded(block: bytes, before: int, wrong: list[int]) -> pl.Series:
    try:
        text = block.decode()
    except UnicodeDecodeError:
        text = block.decode(errors="replace")
        wrong += [before + place for place, line in enumerate(block.split(b"\n"), 1) if not _valid(line)]
    return pl.Series("line", text.split("\n"), dtype=pl.String).str.strip_suffix("\r")


def _valid(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_json_lines(
    file: Path, fields: dict[str, pl.DataType | type[pl.DataType]], required: str
) -> tuple[pl.DataFrame, str | None]:
    """The fields of the JSON object on each line, null where absent; one is required. Blank lines are skipped."""
    lines, note = read_lines(file)
    number = (lines.str.strip_chars() != "").arg_true()
    lines = lines.gather(number)
    if not len(lines):
        raise UserError(f"{file} is empty")
    try:
        table = lines.str.json_decode(pl.Struct(fields)).struct.unnest()
    except pl.exceptions.PolarsError:
        raise UserError(_first_bad(file, lines, number, fields)) from None
    if table[required].null_count():
        place = int(number[int(table[required].is_null().arg_true()[0])]) + 1
        raise UserError(f"{file} line {place:,} has no {required!r}")
    return table, note


def _first_bad(
    file: Path, lines: pl.Series, number: pl.Series, fields: dict[str, pl.DataType | type[pl.DataType]]
) -> str:
    """An error line for the first line that cannot be read, found by bisection: the reader does not name it."""
    low, high = 0, len(lines)  # the first bad line is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            lines[low:middle].str.json_decode(pl.Struct(fields))
            low = middle
        except pl.exceptions.PolarsError:
            high = middle
    shown = lines[low][:60] + ("..." if len(lines[low]) > 60 else "")
    return f"{file} line {int(number[low]) + 1:,} is not a JSON object with {', '.join(fields)}: {shown!r}"


def read_pairs(file: Path, n_rows: int, n_columns: int) -> np.ndarray:
    """(n, 2) int64 pairs "row column" of a file, one per line, within the shape; an empty file has none."""
    lines, _ = read_lines(file)
    numbers = lines.str.strip_chars().str.extract_groups(r"^(\d+)\s+(\d+)$").struct.unnest()
    if not numbers.width:
        return np.zeros((0, 2), dtype=np.int64)
    pairs = numbers.select(pl.all().cast(pl.Int64, strict=False))
    rows, columns = pairs.to_series(0), pairs.to_series(1)
    wrong = (rows.is_null() | columns.is_null() | (rows >= n_rows) | (columns >= n_columns)) & (
        lines.str.strip_chars() != ""
    )
    if wrong.any():
        place = int(wrong.arg_true()[0])
        within = f"a row below {n_rows:,} and a label below {n_columns:,}"
        raise UserError(f"{file} line {place + 1:,} is {lines[place][:60]!r}; expected two numbers, {within}")
    return pairs.drop_nulls().to_numpy()
