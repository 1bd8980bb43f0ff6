"""From a polars frame to Interactions: columns found, rows cleaned, ids encoded, duplicates merged.

The frame is scanned a few times in polars' streaming engine, and only the dense columns are held: 8 bytes a row, and 8
more for a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Unpack, runtime_checkable

import numpy as np
import polars as pl

from sparring.core.errors import UserError, first_line
from sparring.data.cleaning import SHORT, PolarsRows, clean, row_count
from sparring.data.columns import (
    Columns,
    by_role,
    find_column,
    find_roles,
    is_order,
    keeps_repeats,
    order_notes,
    with_title,
)
from sparring.data.interactions import Interactions, Vocabulary
from sparring.data.lines import check_utf8
from sparring.data.pairs import NO_TIME, PartSizes, positive_and_shown, repeated, repeats_note
from sparring.data.weights import weight_note


class Arrow(Protocol):
    """A table that exports its columns through the Arrow C stream: polars, pandas, PyArrow, DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


@runtime_checkable
class SparseMatrix(Protocol):
    """A sparse matrix or array of scipy, in any format."""

    def tocoo(self) -> Any: ...


# A panic is no Exception: it would pass any other handler.
READ_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)
AnyTable = pl.DataFrame | pl.LazyFrame | Arrow | SparseMatrix | np.ndarray
FileState = tuple[int, int]  # size and time of change; (-1, -1) of a file that is gone


@dataclass(frozen=True)
class OpenTable:
    """Interactions of a file, a folder or a frame before they are read, and the tables that describe their ids."""

    frame: pl.LazyFrame
    columns: Columns
    source: str = "the table"  # its name in errors
    text: bool = False  # every column is text, as in a CSV file
    items: pl.DataFrame | None = None
    queries: pl.DataFrame | None = None
    files: tuple[Path, ...] = ()  # Parquet parts, or text files where `text` is set; empty for a frame
    opened: Mapping[Path, FileState] = field(default_factory=dict)  # the state of each file when it was opened
    catalogue: bool = False  # items that only the items table has are kept too
    holder: object = None  # deletes the files when the table goes, if they are copies

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", by_role(self.columns))

    def roles(self) -> dict[str, str]:
        """{role: column} for the roles that the rows have."""
        with read_errors(self.source):
            return find_roles(self.frame.collect_schema().names(), self.columns, self.source)

    def more_items(self, name: str) -> pl.Series | None:
        """The ids of the items table if they all join the catalogue; `name` is the item column of the rows."""
        if not self.catalogue:
            return None
        if self.items is None:
            raise UserError("the complete catalogue needs an items table: give one", "items", "FILE")
        return self.items[table_key(self.items, "item", name, self.source)]


def as_frame(table: AnyTable) -> pl.LazyFrame:
    """A table in memory as a polars frame; the index of a pandas table is left out.

    An array of pairs has the columns user, item and, if it has a third one, value; a sparse matrix of scipy has users
    as rows and items as columns, and a value for each entry that is not 0, unless all of them are 1.
    """
    if isinstance(table, (pl.DataFrame, pl.LazyFrame)):
        return table.lazy()
    if isinstance(table, np.ndarray) and table.dtype.names is None:
        return _array_frame(table).lazy()
    if isinstance(table, SparseMatrix):
        return _matrix_frame(table).lazy()
    try:
        return pl.DataFrame(table).lazy()
    except (ImportError, TypeError, ValueError, OSError, pl.exceptions.PolarsError) as error:  # pandas without pyarrow
        reason = f"cannot read the {type(table).__name__} as a table: {first_line(error)}"
        raise UserError(f"{reason}; give a path, or a table of polars, pandas or Arrow") from error


def _array_frame(pairs: np.ndarray) -> pl.DataFrame:
    """An array of shape (n, 2) or (n, 3) as columns."""
    if pairs.ndim != 2 or pairs.shape[1] not in (2, 3):
        reason = f"an array of pairs has the shape (n, 2) or (n, 3), not {pairs.shape}"
        raise UserError(f"{reason}; for a matrix of users and items give scipy.sparse.csr_array(matrix)")
    listed = [column.tolist() if pairs.dtype == object else np.ascontiguousarray(column) for column in pairs.T]
    return pl.DataFrame(dict(zip(("user", "item", "value"), listed, strict=False)), strict=False)


def _matrix_frame(matrix: SparseMatrix) -> pl.DataFrame:
    """The entries of a sparse matrix that are not 0, as rows."""
    entries = matrix.tocoo()
    kept = entries.data != 0
    frame = pl.DataFrame({"user": entries.row[kept], "item": entries.col[kept]})
    values = entries.data[kept]
    return frame if (values == 1).all() else frame.with_columns(value=pl.Series(values))


def from_frame(
    frame: pl.DataFrame | pl.LazyFrame,
    *,
    items: pl.DataFrame | None = None,
    queries: pl.DataFrame | None = None,
    catalogue: bool = False,
    source: str = "the table",
    text: bool = False,
    **columns: Unpack[Columns],
) -> Interactions:
    """Interactions of a polars frame; the arguments are those of `read`.

    `source` names the table in errors. `text` says that every column is text (a CSV file): ids that all spell integers
    become integers, and times and numbers are parsed.

        from_frame(pl.DataFrame({"user": ["a", "b"], "item": [1, 2]}))
    """
    opened = OpenTable(frame.lazy(), columns, source, text, items, queries, catalogue=catalogue and items is not None)
    return to_interactions(opened)


def to_interactions(table: OpenTable) -> Interactions:
    """Interactions of a table."""
    source = table.source
    with unchanged(table.opened), read_errors(source):
        lazy, roles, notes = clean_frame(table)
        query_ids, lazy = _encode(lazy, "q", roles["query"], table.text, None, source)
        item_ids, lazy = _encode(lazy, "i", roles["item"], table.text, table.more_items(roles["item"]), source)
        check_ids(query_ids, item_ids, source)
        notes += id_notes(query_ids, item_ids)
        rows = lazy.collect(engine="streaming")
    columns = to_arrays(rows)
    del rows
    data = _assemble(columns, query_ids, item_ids, notes, table)
    data["is_order"] = is_order(roles, table.columns) and data["time"] is not None
    described: dict[str, pl.DataFrame | None] = {}
    for role, given, ids in (("query", table.queries, query_ids), ("item", table.items, item_ids)):
        described[role] = None if given is None else align_table(given, role, roles[role], ids, source, notes)
    return Interactions(**data, item_table=described["item"], query_table=described["query"], notes=tuple(notes))


def clean_frame(table: OpenTable) -> tuple[pl.LazyFrame, dict[str, str], list[str]]:
    """The cleaned rows with short column names and ids that are numbers or text, {role: column}, and the notes."""
    roles = table.roles()
    short = table.frame.select(pl.col(column).alias(SHORT[role]) for role, column in roles.items())
    rows, notes = clean(PolarsRows(short), roles, table.columns, table.source)
    notes += order_notes(roles, table.columns)
    others = [name for name in ("q", "i") if rows.kind(name)[0] not in ("integer", "float", "text")]
    return rows.frame.with_columns(pl.col(name).cast(pl.String) for name in others), roles, notes


_MISSING = ("nan", "na", "n/a", "null", "none", "nil", "undefined", "unknown", "-")


def id_notes(query_ids: Vocabulary, item_ids: Vocabulary) -> list[str]:
    """Notes on text ids that may be mistakes: some look alike, or spell a missing value."""
    notes = []
    for vocabulary, name, plural in ((query_ids, "query", "queries"), (item_ids, "item", "items")):
        if vocabulary.kind != "text":
            continue
        ids = vocabulary.ids
        plain = ids.str.normalize("NFC").str.strip_chars()
        odd = ids.filter(plain.is_duplicated())
        if len(odd):
            shown = " and ".join(map(ascii, odd[:2]))
            notes.append(f"{len(odd):,} {name} ids differ from another in spaces or Unicode form only: {shown}")
        spelt = ids.filter(ids.str.to_lowercase().is_in(_MISSING)).to_list()
        if spelt:
            are = f"are {plural}" if len(spelt) > 1 else f"is a {name}"
            notes.append(f"the {name} ids have {', '.join(map(repr, spelt))}, which {are} like any other")
    return notes


def check_ids(query_ids: Vocabulary, item_ids: Vocabulary, source: str) -> None:
    """Refuse data with a single query or item: there is nothing to rank."""
    for ids, name in ((query_ids, "query"), (item_ids, "item")):
        if len(ids) < 2:
            raise UserError(f"{source} has only one {name} ({ids.ids[0]!r}); training needs at least two")


@contextmanager
def read_errors(source: str) -> Iterator[None]:
    """Turn an error or a panic of polars, or an error of the system, into one line that names the source."""
    try:
        yield
    except pl.exceptions.NoDataError as error:
        raise UserError(f"{source} is empty") from error
    except READ_ERRORS as error:
        raise UserError(f"cannot read {source}: {first_line(error)}") from error


@contextmanager
def unchanged(opened: Mapping[Path, FileState]) -> Iterator[None]:
    """Refuse what was read from files that have changed since they were opened: several scans would see other rows."""
    try:
        yield
    except UserError as error:
        _check_unchanged(opened, error)  # the change may be the cause
        raise
    _check_unchanged(opened)


def _check_unchanged(opened: Mapping[Path, FileState], cause: Exception | None = None) -> None:
    for file, state in file_states(opened).items():
        if state != opened[file]:
            raise UserError(f"{file} changed while it was read: read it again when it is complete") from cause


def file_states(files: Iterable[Path]) -> dict[Path, FileState]:
    stats = {file: file.stat() if file.is_file() else None for file in files}
    return {file: (-1, -1) if stat is None else (stat.st_size, stat.st_mtime_ns) for file, stat in stats.items()}


def _encode(
    lazy: pl.LazyFrame, name: str, column: str, text: bool, extra: pl.Series | None, source: str
) -> tuple[Vocabulary, pl.LazyFrame]:
    """The vocabulary of an id column, and the frame with the column replaced by dense int32 ids."""
    known = lazy.select(name).unique().collect(engine="streaming")[name]
    vocabulary = vocabulary_of(known, column, text, extra, source)
    dense = pl.DataFrame({name: vocabulary.ids, "dense": np.arange(len(vocabulary), dtype=np.int32)}).lazy()
    # The order of rows does not matter: pairs are sorted afterwards.
    lazy = lazy.with_columns(pl.col(name).cast(vocabulary.ids.dtype)).join(dense, on=name)
    return vocabulary, lazy.drop(name).rename({"dense": name})


def vocabulary_of(known: pl.Series, column: str, text: bool, extra: pl.Series | None, source: str) -> Vocabulary:
    """The vocabulary of the distinct values of an id column and of `extra` ids, which must be of the same kind."""
    if text:
        check_utf8(known, column, source)
    if text and bool(known.str.contains(r"^(0|-?[1-9][0-9]{0,17})$").all()):
        known = known.cast(pl.Int64)
    vocabulary = Vocabulary(known)
    if extra is not None:
        more = extra.drop_nulls().cast(pl.String).cast(vocabulary.ids.dtype, strict=False)
        if more.null_count():
            wrong = extra.drop_nulls().filter(more.is_null())[0]
            raise UserError(f"the items table has the id {wrong!r}, but {column!r} of {source} holds integers")
        vocabulary = Vocabulary(pl.concat([vocabulary.ids, more.alias("id")]))
    if len(vocabulary) >= 2**31:
        raise UserError(f"column {column!r} of {source} has {len(vocabulary):,} ids; at most 2,147,483,647 fit")
    return vocabulary


def to_arrays(rows: pl.DataFrame) -> dict[str, np.ndarray]:
    """The columns as arrays, a null weight as 1 and a null time as NO_TIME. The frame is emptied."""
    if "w" in rows.columns:
        rows = rows.with_columns(pl.col("w").fill_null(1.0))
    if "t" in rows.columns:
        rows = rows.with_columns(pl.col("t").fill_null(NO_TIME["i" if rows["t"].dtype.is_integer() else "f"]))
    # Columns leave the frame one at a time, so that only one is held in both forms.
    return {name: rows.drop_in_place(name).to_numpy(writable=True) for name in rows.columns}


def _assemble(
    columns: dict[str, np.ndarray], query_ids: Vocabulary, item_ids: Vocabulary, notes: list[str], table: OpenTable
) -> dict:
    """The fields of Interactions: positives and shown pairs apart, each pair once."""
    source, sizes = table.source, PartSizes()
    before = int(columns["l"].sum()) if "l" in columns else len(columns["q"])
    if not before:
        raise UserError(f"no row of {source} is labelled 1: there are no positives")
    repeats = keeps_repeats(table.columns)
    positive, shown = positive_and_shown(columns, len(item_ids), sizes, repeats)
    if repeats:
        notes.append(repeats_note(repeated(positive["q"], positive["i"])))
    elif len(positive["q"]) < before:
        notes.append(f"merged {before - len(positive['q']):,} duplicates")
    notes += sizes.notes(source)
    if "w" in positive:
        notes.append(weight_note(positive["w"], table.roles()["weight"], bool(table.columns.get("weight")), source))
    fields: dict = {"queries": positive["q"], "items": positive["i"], "query_ids": query_ids, "item_ids": item_ids}
    fields |= {"time": positive.get("t"), "weight": positive.get("w"), "split": positive.get("s")}
    fields["repeats"] = repeats
    if shown is not None:
        fields |= {"shown": (shown["q"], shown["i"]), "shown_time": shown.get("t"), "shown_split": shown.get("s")}
    return fields


def table_key(table: pl.DataFrame, role: str, name: str, source: str) -> str:
    """The id column of an items or queries table: the one named as in the interactions, otherwise the best guess."""
    if name in table.columns:
        return name
    key = find_column(role, table.columns, None, f"the {role} table of {source}", required=True)
    assert key is not None
    return key


def align_table(
    table: pl.DataFrame, role: str, name: str, ids: Vocabulary, source: str, notes: list[str]
) -> pl.DataFrame:
    """The table with one row per dense id, null where it has none; the id column is dropped, because `ids` has it."""
    key = table_key(table, role, name, source)
    dense = ids.encode(table[key])
    known, first = np.unique(dense, return_index=True)
    first = first[known >= 0]
    known = known[known >= 0]
    if not len(known):
        example = table[key].drop_nulls().head(1).to_list()
        raise UserError(f"no id of the {role} table's column {key!r} (such as {example}) occurs in {source}")
    rows = np.full(len(ids), -1, dtype=np.int64)
    rows[known] = first
    repeated = int((dense >= 0).sum()) - len(known)
    strange = int((dense < 0).sum())
    if strange:
        notes.append(f"ignored {row_count(strange)} of the {role} table whose id has no interactions")
    if repeated:
        notes.append(f"ignored {row_count(repeated)} of the {role} table with the id of an earlier row")
    if len(known) < len(ids):
        plural = "items" if role == "item" else "queries"
        notes.append(f"{len(ids) - len(known):,} of {len(ids):,} {plural} are not in the {role} table")
    for column in (column for column in table.get_columns() if column.dtype == pl.String and column.name != key):
        lossy = int(column.str.contains("\ufffd", literal=True).sum())
        if lossy:
            note = f"{column.name!r} of the {role} table has \ufffd where bytes were not UTF-8, in {row_count(lossy)}"
            notes.append(note)
    if table.width == 1:
        return with_title(pl.DataFrame({key: ids.ids}))
    return with_title(table.drop(key).select(pl.all().gather(pl.Series(rows).replace(-1, None))))
