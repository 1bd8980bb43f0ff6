"""Read interactions from files: Parquet, CSV, folders of parts, and the layouts of RecBole, LightGCN, BEIR and extreme classification."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from sparring.data.beir import is_beir, read_beir
from sparring.data.columns import find_column, text_columns
from sparring.data.frames import from_frame, reading
from sparring.data.interactions import Interactions
from sparring.data.texts import text_of
from sparring.data.xc import is_xc, read_xc
from sparring.errors import UserError

_PARQUET = (".parquet", ".pq")
_TEXT = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
_PARTS = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}


@dataclass(frozen=True)
class _Opened:
    frame: pl.LazyFrame
    text: bool  # every column came as text
    items: pl.DataFrame | None = None
    queries: pl.DataFrame | None = None


def read(
    path: str | os.PathLike[str],
    *,
    query: str | None = None,
    item: str | None = None,
    time: str | None = None,
    weight: str | None = None,
    rating: str | None = None,
    min_rating: float | None = None,
    split: str | None = None,
    label: str | None = None,
    items: str | os.PathLike[str] | pl.DataFrame | None = None,
    queries: str | os.PathLike[str] | pl.DataFrame | None = None,
    catalogue: bool = False,
) -> Interactions:
    """Interactions of a file or folder, with only the needed columns ever read.

    `path`: Parquet; CSV or TSV, gzipped or not; a folder of Parquet parts; a folder with `interactions.parquet` (or .csv) and
    perhaps `items.*` and `queries.*`; RecBole's `.inter` file or its folder (with `.item` and `.user`, or in `.train.inter`,
    `.valid.inter`, `.test.inter` parts); LightGCN's folder of `train.txt` and `test.txt`; BEIR's folder (see `read_beir`); a folder
    of the extreme-classification repository (see `read_xc`).

    Columns are guessed from common names; a name sets one, and "" leaves an optional one out. Rows with a null id are dropped;
    with `min_rating`, so are rows rated lower; without it every row is a positive. `label` 1 is a positive, 0 is shown and not
    clicked. A pair that occurs more than once is kept once, with its last time and summed weight. `items` and `queries` are
    tables (paths or frames) that describe them; items that only the table has join the catalogue when `catalogue` is true.
    Without such a table, a column of the interactions themselves that is named like a text of items (`title`, `item_text`, ...) or
    queries (`query_text`, ...) makes one. `notes` of the result tells what was dropped or merged.

        read("ratings.csv", min_rating=4, items="movies.csv")
    """
    path = Path(path)
    known = _layout(path)
    if known is not None:
        roles = {"query": query, "item": item, "time": time, "weight": weight, "rating": rating, "split": split, "label": label}
        roles |= {"min_rating": min_rating, "items": items, "queries": queries}  # type: ignore[dict-item]
        given = next((name for name, value in roles.items() if value is not None), None)
        if given is not None:
            raise UserError(f"{given} is for tables: the files of {path} are known")
        return known(path)
    with reading(str(path)):
        opened = _open(path)
        if items is None and opened.items is None:
            opened = replace(opened, items=_inner_table(opened.frame, "item", item, str(path)))
        if queries is None and opened.queries is None:
            opened = replace(opened, queries=_inner_table(opened.frame, "query", query, str(path)))
    return from_frame(
        opened.frame,
        query=query,
        item=item,
        time=time,
        weight=weight,
        rating=rating,
        min_rating=min_rating,
        split=split,
        label=label,
        items=opened.items if items is None else _table(items, "item", item),
        queries=opened.queries if queries is None else _table(queries, "query", query),
        catalogue=catalogue,
        source=str(path),
        text=opened.text,
    )


def show(path: str | os.PathLike[str], rows: int = 5) -> str:
    """What a file or folder holds: its columns with types, its first rows, its size where it reads as interactions."""
    path = Path(path)
    known = _layout(path)
    if known is not None:
        return f"{path}\n{describe(known(path))}"
    with reading(str(path)):
        frame = _open(path).frame
        head = frame.head(rows).collect()
    lines = [str(path), "columns: " + ", ".join(f"{name} ({kind})" for name, kind in head.schema.items()), _grid(head)]
    try:
        lines.append(describe(read(path)))
    except UserError as error:
        lines.append(f"does not read as interactions: {error}")
    return "\n".join(lines)


def describe(data: Interactions) -> str:
    """A few lines on interactions: sizes, density, items per query, what is known, what was dropped."""
    per_query = data.positives().start.diff()
    active = per_query[per_query > 0].double()
    density = len(data) / max(data.n_queries * data.n_items, 1)
    lines = [f"{data.n_queries:,} queries x {data.n_items:,} items, {len(data):,} interactions (density {density:.2g})"]
    if len(active):
        lines.append(f"items per query: median {active.median():g}, mean {active.mean():.1f}, most {active.max():g}")
    if data.time is not None:
        lines.append(f"time: {data.time.min()} to {data.time.max()}")
    if data.split is not None:
        parts = [f"{name} {int((data.split == code).sum()):,}" for code, name in enumerate(_PARTS)]
        lines.append("split of the file: " + ", ".join(parts))
    if data.shown is not None:
        lines.append(f"shown and not clicked: {len(data.shown[0]):,}")
    if data.hidden is not None:
        lines.append(f"pairs never recommended: {len(data.hidden[0]):,}")
    for name, table in (("items", data.item_table), ("queries", data.query_table)):
        if table is not None:
            lines.append(f"{name} table: " + ", ".join(table.columns))
    if len(data) and all(table is not None and "text" in table.columns for table in (data.query_table, data.item_table)):
        texts = (text_of(data, "query")[int(data.queries[0])], text_of(data, "item")[int(data.items[0])])
        lines.append("for example: " + " -> ".join(repr(text[:100]) for text in texts))
    return "\n".join([*lines, *data.notes])


def _layout(path: Path) -> Callable[[Path], Interactions] | None:
    """The reader of a folder whose layout is known as a whole."""
    if not path.is_dir():
        return None
    return read_xc if is_xc(path) else read_beir if is_beir(path) else None


def _inner_table(frame: pl.LazyFrame, role: str, named: str | None, source: str) -> pl.DataFrame | None:
    """The texts of items or queries that the interactions themselves repeat on every row, as a table; None where they have none."""
    names = frame.collect_schema().names()
    key = named or find_column(role, names, None, source)
    texts = [name for name in text_columns(role, names) if name != key and frame.collect_schema()[name] == pl.String]
    if key is None or key not in names or not texts:
        return None
    # The smallest text, where an id has several: not by order, since the rows are read in any.
    return frame.filter(pl.col(key).is_not_null()).group_by(key).agg(pl.col(name).min() for name in texts).collect(engine="streaming")


def _grid(head: pl.DataFrame) -> str:
    with pl.Config(tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True, tbl_formatting="ASCII_MARKDOWN", tbl_width_chars=120):
        return str(head)


def _open(path: Path) -> _Opened:
    if not path.exists():
        raise UserError(f"no such file or folder: {path}")
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
        return _Opened(pl.scan_parquet(path), text=False)
    if name.endswith(_TEXT):
        return _Opened(_scan_text(path), text=True)
    raise UserError(f"{path}: unknown kind of file; expected {', '.join((*_PARQUET, *_TEXT, '.inter'))} or a folder")


def _open_folder(folder: Path) -> _Opened:
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
        raise UserError(f"{folder} holds several .inter files ({', '.join(file.name for file in atomic)}); name one of them")
    if atomic:
        return _recbole(folder, {None: atomic[0]}, atomic[0].name[: -len(".inter")])
    main = _beside(folder, "interactions")
    if main is not None:
        opened = _open(main)
        tables = [_table(file, role) if (file := _first(folder, names)) else None for role, names in _TABLES.items()]
        return _Opened(opened.frame, opened.text, items=tables[0], queries=tables[1])
    files = sorted(file for kind in _PARQUET for file in folder.rglob(f"*{kind}") if not file.name.startswith((".", "_")))
    if not files:
        raise UserError(f"{folder} holds nothing to read; expected Parquet parts, interactions.parquet, train.txt or an .inter file")
    scans = [pl.scan_parquet(file) for file in files]
    for file, scan in zip(files, scans, strict=True):
        with reading(str(file)):
            missing = set(scans[0].collect_schema().names()) - set(scan.collect_schema().names())
        if missing:
            raise UserError(f"{file} lacks the column {min(missing)!r} that {files[0]} has; all parts must have the same columns")
    columns = scans[0].collect_schema().names()
    return _Opened(pl.concat([scan.select(columns) for scan in scans], how="vertical_relaxed"), text=False)


_TABLES = {"item": ("items",), "query": ("queries", "users")}


def _beside(folder: Path, stem: str) -> Path | None:
    return next((folder / f"{stem}{kind}" for kind in (*_PARQUET, *_TEXT) if (folder / f"{stem}{kind}").is_file()), None)


def _first(folder: Path, stems: tuple[str, ...]) -> Path | None:
    return next((file for stem in stems if (file := _beside(folder, stem))), None)


def _separator(path: Path) -> str:
    """The separator of a text table, from its first line."""
    try:
        with gzip.open(path, "rt", errors="replace") if path.name.endswith(".gz") else open(path, errors="replace") as file:
            line = file.readline()
    except (OSError, EOFError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not line.strip():
        raise UserError(f"{path} is empty: its first line should name the columns")
    return max("\t,;|", key=line.count)


def _scan_text(path: Path) -> pl.LazyFrame:
    return pl.scan_csv(path, separator=_separator(path), infer_schema=False, encoding="utf8-lossy")


def _scan_lines(path: Path) -> pl.LazyFrame:
    """Whole lines in a column `line`: the separator is a character that no text file has."""
    return pl.scan_csv(
        path, has_header=False, separator="\x01", quote_char=None, infer_schema=False, encoding="utf8-lossy", new_columns=["line"]
    )


def _table(table: str | os.PathLike[str] | pl.DataFrame, role: str, key: str | None = None) -> pl.DataFrame:
    """An items or queries table from a frame or a file; ids of a text file stay text."""
    if isinstance(table, pl.DataFrame):
        return table
    path = Path(table)
    if not path.is_file():
        raise UserError(f"no such {role} table: {path}")
    with reading(str(path)):
        if path.name.lower().endswith(_PARQUET):
            return pl.read_parquet(path)
        if path.suffix in (".item", ".user"):
            return _atomic(path).collect()
        separator = _separator(path)
        names = pl.scan_csv(path, separator=separator, infer_schema=False).collect_schema().names()
        name = key if key in names else find_column(role, names, None, str(path), required=True)
        kinds = {str(name): pl.String}
        return pl.read_csv(path, separator=separator, schema_overrides=kinds, infer_schema_length=None, encoding="utf8-lossy")


def _atomic(path: Path) -> pl.LazyFrame:
    """A RecBole atomic file: tab-separated, headers such as `user_id:token`; floats typed, all else text."""
    scan = pl.scan_csv(path, separator="\t", infer_schema=False, quote_char=None, encoding="utf8-lossy")
    headers = [(header, *header.partition(":")[::2]) for header in scan.collect_schema().names()]
    wrong = [header for header, _, kind in headers if kind not in ("token", "token_seq", "float", "float_seq")]
    if wrong:
        raise UserError(f"{path} has the header {wrong[0]!r}; RecBole's are NAME:token, NAME:token_seq, NAME:float or NAME:float_seq")
    floats = {"float"} if path.suffix != ".inter" else set()  # numbers of interactions are parsed later, with errors that name them
    return scan.select(pl.col(header).cast(pl.Float64 if kind in floats else pl.String).alias(name) for header, name, kind in headers)


def _recbole(folder: Path, parts: dict[str | None, Path], stem: str) -> _Opened:
    scans = []
    for part, file in parts.items():
        with reading(str(file)):
            scan = _atomic(file)
            scans.append(scan if part is None else scan.with_columns(pl.lit(part).alias("split")))
    tables: dict[str, pl.DataFrame | None] = {}
    for kind in ("item", "user"):
        file = folder / f"{stem}.{kind}"
        with reading(str(file)):
            tables[kind] = _atomic(file).collect() if file.is_file() else None
    return _Opened(pl.concat(scans), text=True, items=tables["item"], queries=tables["user"])


def _lightgcn(folder: Path) -> _Opened:
    """LightGCN's lists: each line `user item item ...`; the file's name is the part."""
    scans = []
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
    return _Opened(pl.concat(scans), text=True)
