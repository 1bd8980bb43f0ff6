"""Files and folders of many layouts as one unread table, with the tables of items and queries beside them."""

from __future__ import annotations

import gzip
import os
from dataclasses import replace
from glob import glob
from pathlib import Path

import polars as pl

from sparring.core.errors import UserError
from sparring.data.columns import Columns, find_column, inline_text_columns
from sparring.data.lines import check_utf8
from sparring.data.remote import copied, place_of, read_remote, scan_remote
from sparring.data.table import OpenTable, file_states, read_errors, unchanged

_PARQUET = (".parquet", ".pq")
_TEXT = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
_PARTS = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}


def open_table(
    source: Path | str | pl.LazyFrame,
    columns: Columns,
    items: str | os.PathLike[str] | pl.DataFrame | None = None,
    queries: str | os.PathLike[str] | pl.DataFrame | None = None,
    inline: bool = True,
) -> OpenTable:
    """The rows of a file, folder, address or frame, unread, with their tables of items and queries.

    The columns in use are copied from an address (remote.py). A table of items or queries is the given one, otherwise
    the one beside the rows, otherwise, with `inline`, the texts in the rows.
    """
    opened = OpenTable(source, {}) if isinstance(source, pl.LazyFrame) else open_rows(source)
    opened = replace(opened, columns=columns)
    if isinstance(source, str):
        with read_errors(source):
            texts = [name for role in ("item", "query") for name in inline_texts(opened, role)[1]]
        opened = copied(opened, list(dict.fromkeys([*opened.roles().values(), *texts])))
    with read_errors(opened.source):
        tables: dict[str, pl.DataFrame | None] = {}
        for role, given, beside in (("item", items, opened.items), ("query", queries, opened.queries)):
            tables[role] = beside if given is None else _table(given, role, opened.columns.get(role))  # type: ignore[arg-type]
            if inline and tables[role] is None:
                tables[role] = _inline_table(opened, role)
    return replace(opened, items=tables["item"], queries=tables["query"])


def _inline_table(table: OpenTable, role: str) -> pl.DataFrame | None:
    """The texts that interactions repeat on every row for an item or a query, as a table; None where there are none."""
    key, texts = inline_texts(table, role)
    if not texts:
        return None
    # An id with several texts gets the smallest: rows are read in any order.
    rows = table.frame.filter(pl.col(key).is_not_null())
    return rows.group_by(key).agg(pl.col(name).min() for name in texts).collect(engine="streaming")


def inline_texts(table: OpenTable, role: str) -> tuple[str, list[str]]:
    """The id column of a role, and the columns that repeat its texts; empty where there are none."""
    schema = table.frame.collect_schema()
    names = schema.names()
    key = table.columns.get(role) or find_column(role, names, None, table.source)  # type: ignore[call-overload]
    if key is None or key not in names:
        return "", []
    return key, [name for name in inline_text_columns(role, names) if name != key and schema[name] == pl.String]


def open_rows(path: Path | str) -> OpenTable:
    """The rows of a file, a folder, a glob or an address, unread, and the tables beside them."""
    with read_errors(str(path)):
        if isinstance(path, str):
            return scan_remote(path)
        opened = _open(path)
        return replace(opened, source=str(path), opened=file_states(opened.files))


def _open(path: Path) -> OpenTable:
    if not path.exists():
        files = [Path(file) for file in sorted(glob(str(path)))]
        if not files:
            raise UserError(f"no such file or folder: {path}")
        wrong = next((file for file in files if not file.name.lower().endswith(_PARQUET)), None)
        if wrong is not None:
            raise UserError(f"{path} matches {wrong}, which is not a Parquet file ({' or '.join(_PARQUET)})")
        return _open_parts(files)
    if path.is_dir():
        return _open_folder(path)
    name = path.name.lower()
    if not path.stat().st_size:
        raise UserError(f"{path} is empty")
    if name.endswith(".inter"):
        stem = path.name[: -len(".inter")]
        return _recbole(path.parent, {None: path}, stem)
    if name == "train.txt":
        return _lightgcn(path.parent)
    if name.endswith(_PARQUET):
        return OpenTable(pl.scan_parquet(path), {}, files=(path,))
    if name.endswith(_TEXT):
        return OpenTable(_scan_text(path), {}, text=True, files=(path,))
    raise UserError(f"{path}: unknown kind of file; expected {', '.join((*_PARQUET, *_TEXT, '.inter'))} or a folder")


def _open_folder(folder: Path) -> OpenTable:
    if (folder / "train.txt").exists():
        return _lightgcn(folder)
    atomic = sorted(folder.glob("*.inter"))
    parts: dict[str | None, Path] = {}
    for part, names in _PARTS.items():
        files = [file for file in atomic if file.name.endswith(tuple(f".{name}.inter" for name in names))]
        if files:
            parts[part] = files[0]
    if "train" in parts:
        return _recbole(folder, parts, parts["train"].name[: -len(".train.inter")])
    if len(atomic) > 1:
        raise UserError(
            f"{folder} holds several .inter files ({', '.join(file.name for file in atomic)}); name one of them"
        )
    if atomic:
        return _recbole(folder, {None: atomic[0]}, atomic[0].name[: -len(".inter")])
    main = _beside(folder, "interactions")
    if main is not None:
        opened = _open(main)
        tables = [_table(file, role) if (file := _first(folder, names)) else None for role, names in _TABLES.items()]
        return replace(opened, items=tables[0], queries=tables[1])
    files = sorted(
        file for kind in _PARQUET for file in folder.rglob(f"*{kind}") if not file.name.startswith((".", "_"))
    )
    if not files:
        raise UserError(
            f"{folder} holds nothing to read; expected Parquet parts, interactions.parquet, train.txt or an .inter file"
        )
    return _open_parts(files)


def _open_parts(files: list[Path]) -> OpenTable:
    scans = [pl.scan_parquet(file) for file in files]
    for file, scan in zip(files, scans, strict=True):
        with read_errors(str(file)):
            missing = set(scans[0].collect_schema().names()) - set(scan.collect_schema().names())
        if missing:
            raise UserError(
                f"{file} lacks the column {min(missing)!r} that {files[0]} has; all parts must have the same columns"
            )
    columns = scans[0].collect_schema().names()
    frame = pl.concat([scan.select(columns) for scan in scans], how="vertical_relaxed")
    return OpenTable(frame, {}, files=tuple(files))


_TABLES = {"item": ("items",), "query": ("queries", "users")}


def _beside(folder: Path, stem: str) -> Path | None:
    return next(
        (folder / f"{stem}{kind}" for kind in (*_PARQUET, *_TEXT) if (folder / f"{stem}{kind}").is_file()), None
    )


def _first(folder: Path, stems: tuple[str, ...]) -> Path | None:
    return next((file for stem in stems if (file := _beside(folder, stem))), None)


def _separator(path: Path) -> str:
    """The separator of a text table, guessed from its first line."""
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb") as file:
            start = file.readline()
    except (OSError, EOFError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if b"\0" in start:
        raise UserError(f"{path} is not UTF-8 text: convert it, as iconv -f UTF-16 -t UTF-8 does")
    line = start.decode(errors="replace")
    if not line.strip():
        raise UserError(f"{path} is empty: its first line should name the columns")
    return max("\t,;|", key=line.count)


def _scan_text(path: Path) -> pl.LazyFrame:
    scan = pl.scan_csv(path, separator=_separator(path), infer_schema=False, encoding="utf8-lossy")
    repeated = next((name for name in scan.collect_schema().names() if "_duplicated_" in name), None)
    if repeated is not None:
        raise UserError(f"{path} has two columns called {repeated.partition('_duplicated_')[0]!r}: rename one of them")
    return scan


def _scan_lines(path: Path) -> pl.LazyFrame:
    """Complete lines in a column `line`: the separator is a character that no text file has."""
    return pl.scan_csv(
        path,
        has_header=False,
        separator="\x01",
        quote_char=None,
        infer_schema=False,
        encoding="utf8-lossy",
        new_columns=["line"],
    )


def _table(table: str | os.PathLike[str] | pl.DataFrame, role: str, key: str | None = None) -> pl.DataFrame:
    """An items or queries table from a frame or a file; ids of a text file stay text."""
    if isinstance(table, pl.DataFrame):
        return table
    path = place_of(table)
    if isinstance(path, str):
        return read_remote(path, key)
    if not path.is_file():
        raise UserError(f"no such {role} table: {path}")
    with unchanged(file_states([path])), read_errors(str(path)):
        if path.name.lower().endswith(_PARQUET):
            return pl.read_parquet(path)
        if path.suffix in (".item", ".user"):
            return _atomic(path).collect()
        separator = _separator(path)
        names = pl.scan_csv(path, separator=separator, infer_schema=False).collect_schema().names()
        name = key if key in names else find_column(role, names, None, str(path), required=True)
        kinds = {str(name): pl.String}
        rows = pl.read_csv(
            path, separator=separator, schema_overrides=kinds, infer_schema_length=None, encoding="utf8-lossy"
        )
        check_utf8(rows[str(name)], str(name), str(path))
        return rows


def _atomic(path: Path) -> pl.LazyFrame:
    """A RecBole atomic file: tab-separated, headers such as `user_id:token`; floats are numbers, the rest text."""
    scan = pl.scan_csv(path, separator="\t", infer_schema=False, quote_char=None, encoding="utf8-lossy")
    headers = [(header, *header.partition(":")[::2]) for header in scan.collect_schema().names()]
    wrong = [header for header, _, kind in headers if kind not in ("token", "token_seq", "float", "float_seq")]
    if wrong:
        known = "NAME:token, NAME:token_seq, NAME:float or NAME:float_seq"
        raise UserError(f"{path} has the header {wrong[0]!r}; RecBole's are {known}")
    # Numbers of interactions are parsed later, with errors that name them.
    numbers = {"float"} if path.suffix != ".inter" else set()
    return scan.select(
        pl.col(header).cast(pl.Float64 if kind in numbers else pl.String).alias(name) for header, name, kind in headers
    )


def _recbole(folder: Path, parts: dict[str | None, Path], stem: str) -> OpenTable:
    scans = []
    for part, file in parts.items():
        with read_errors(str(file)):
            scan = _atomic(file)
            scans.append(scan if part is None else scan.with_columns(pl.lit(part).alias("split")))
    tables: dict[str, pl.DataFrame | None] = {}
    for kind in ("item", "user"):
        file = folder / f"{stem}.{kind}"
        tables[kind] = _table(file, kind) if file.is_file() else None
    files = tuple(parts.values())
    return OpenTable(pl.concat(scans), {}, text=True, items=tables["item"], queries=tables["user"], files=files)


def _lightgcn(folder: Path) -> OpenTable:
    """LightGCN's lists: lines of `user item item ...`; the name of the file is the part."""
    scans, files = [], []
    for part, names in _PARTS.items():
        file = next((folder / f"{name}.txt" for name in names if (folder / f"{name}.txt").is_file()), None)
        if file is None:
            continue
        if not file.stat().st_size:
            raise UserError(f"{file} is empty")
        ids = _scan_lines(file).select(pl.col("line").str.strip_chars().str.replace_all(r"\s+", " ").str.split(" "))
        ids = ids.filter(pl.col("line").list.len() > 1)
        pairs = ids.select(pl.col("line").list.first().alias("user_id"), pl.col("line").list.slice(1).alias("item_id"))
        scans.append(pairs.explode("item_id").with_columns(pl.lit(part).alias("split")))
        files.append(file)
    return OpenTable(pl.concat(scans), {}, text=True, files=tuple(files))
