"""From any polars frame to Interactions: columns found, rows cleaned, ids encoded, duplicates merged.

The frame is scanned a few times in polars' streaming engine, and only the dense columns are ever held: 4 + 4 bytes a row,
8 more for a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import polars as pl

from sparring.core.errors import UserError, first_line
from sparring.data.cleaning import SHORT, clean
from sparring.data.columns import find_column, find_columns, with_title
from sparring.data.formats.lines import check_utf8
from sparring.data.interactions import Interactions, Vocabulary
from sparring.data.pairs import taken_and_shown


class Arrow(Protocol):
    """A table that gives its columns as Arrow does: of polars, pandas, PyArrow, DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Table = pl.DataFrame | pl.LazyFrame | Arrow


def as_frame(table: Table) -> pl.LazyFrame:
    """A table in memory as polars reads it; the index of a pandas table is left out."""
    if isinstance(table, (pl.DataFrame, pl.LazyFrame)):
        return table.lazy()
    try:
        return pl.DataFrame(table).lazy()
    except (
        ImportError,
        TypeError,
        ValueError,
        OSError,
        pl.exceptions.PolarsError,
    ) as error:  # such as: pandas without pyarrow
        what = f"cannot read the {type(table).__name__} as a table: {first_line(error)}"
        raise UserError(f"{what}; give a path, or a table of polars, pandas or Arrow") from error


def from_frame(
    frame: pl.DataFrame | pl.LazyFrame,
    *,
    query: str | None = None,
    item: str | None = None,
    time: str | None = None,
    weight: str | None = None,
    rating: str | None = None,
    min_rating: float | None = None,
    split: str | None = None,
    label: str | None = None,
    items: pl.DataFrame | None = None,
    queries: pl.DataFrame | None = None,
    catalogue: bool = False,
    source: str = "the table",
    text: bool = False,
) -> Interactions:
    """Interactions of a polars frame; the arguments are those of `read`.

    `source` names the table in errors. `text` says that every column came as text (a CSV file): ids that all spell integers
    become integers, and times and numbers are parsed.

        from_frame(pl.DataFrame({"user": ["a", "b"], "item": [1, 2]}))
    """
    lazy = frame.lazy()
    with reading(source):
        schema = lazy.collect_schema()
        named = {
            "query": query,
            "item": item,
            "time": time,
            "weight": weight,
            "rating": rating,
            "split": split,
            "label": label,
        }
        found = find_columns(schema.names(), named, source, rated=min_rating is not None)
        lazy = lazy.select(pl.col(column).alias(SHORT[role]) for role, column in found.items())
        lazy, notes = clean(lazy, found, min_rating, source, guessed_time=time is None)
        query_ids, lazy = _encode(lazy, "q", found["query"], text, None, source)
        extra = None if items is None or not catalogue else items[table_key(items, "item", found["item"], source)]
        item_ids, lazy = _encode(lazy, "i", found["item"], text, extra, source)
        check_ids(query_ids, item_ids, source)
        rows = lazy.collect(engine="streaming")
    columns = columns_of(rows)
    del rows
    data = _assemble(columns, query_ids, item_ids, notes, source)
    tables: dict[str, pl.DataFrame | None] = {"query": None, "item": None}
    for role, table, ids in (("query", queries, query_ids), ("item", items, item_ids)):
        if table is not None:
            tables[role] = align(table, role, found[role], ids, source, notes)
    return Interactions(**data, item_table=tables["item"], query_table=tables["query"], notes=tuple(notes))


def check_ids(query_ids: Vocabulary, item_ids: Vocabulary, source: str) -> None:
    """Nothing can be ranked with a single query or item."""
    for ids, name in ((query_ids, "query"), (item_ids, "item")):
        if len(ids) < 2:
            raise UserError(f"{source} has only one {name} ({ids.ids[0]!r}); training needs at least two")


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn what polars or the system says about a bad file into one line that names it."""
    try:
        yield
    except pl.exceptions.NoDataError as error:
        raise UserError(f"{source} is empty") from error
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"cannot read {source}: {first_line(error)}") from error


def _encode(
    lazy: pl.LazyFrame, name: str, column: str, text: bool, extra: pl.Series | None, source: str
) -> tuple[Vocabulary, pl.LazyFrame]:
    """The vocabulary of an id column, and the frame with the column replaced by dense int32 ids."""
    kind = lazy.collect_schema()[name]
    if not (kind.is_integer() or kind.is_float() or kind == pl.String):
        lazy = lazy.with_columns(pl.col(name).cast(pl.String))
    known = lazy.select(name).unique().collect(engine="streaming")[name]
    vocabulary = vocabulary_of(known, column, text, extra, source)
    dense = pl.DataFrame({name: vocabulary.ids, "dense": np.arange(len(vocabulary), dtype=np.int32)}).lazy()
    # The order of rows does not matter: pairs are sorted afterwards.
    lazy = lazy.with_columns(pl.col(name).cast(vocabulary.ids.dtype)).join(dense, on=name)
    return vocabulary, lazy.drop(name).rename({"dense": name})


def vocabulary_of(known: pl.Series, column: str, text: bool, extra: pl.Series | None, source: str) -> Vocabulary:
    """The vocabulary of the distinct values of an id column, and of `extra` ids, which must be of the same kind."""
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


def columns_of(rows: pl.DataFrame) -> dict[str, np.ndarray]:
    if "w" in rows.columns:
        rows = rows.with_columns(pl.col("w").fill_null(1.0))
    # One column at a time leaves the frame, so that both forms of only one are held.
    return {name: rows.drop_in_place(name).to_numpy(writable=True) for name in rows.columns}


def _assemble(
    columns: dict[str, np.ndarray], query_ids: Vocabulary, item_ids: Vocabulary, notes: list[str], source: str
) -> dict:
    """Fields of Interactions: clicked and shown rows apart, each pair once."""
    before = int(columns["l"].sum()) if "l" in columns else len(columns["q"])
    if not before:
        raise UserError(f"no row of {source} is labelled 1: there are no positives")
    taken, shown = taken_and_shown(columns, len(item_ids))
    if len(taken["q"]) < before:
        notes.append(f"merged {before - len(taken['q']):,} duplicates")
    fields: dict = {"queries": taken["q"], "items": taken["i"], "query_ids": query_ids, "item_ids": item_ids}
    fields |= {"time": taken.get("t"), "weight": taken.get("w"), "split": taken.get("s")}
    if shown is not None:
        fields |= {"shown": (shown["q"], shown["i"]), "shown_time": shown.get("t"), "shown_split": shown.get("s")}
    return fields


def table_key(table: pl.DataFrame, role: str, name: str, source: str) -> str:
    """The id column of an items or queries table: the interactions' own name for it, else the best guess."""
    if name in table.columns:
        return name
    found = find_column(role, table.columns, None, f"the {role} table of {source}", required=True)
    assert found is not None
    return found


def align(table: pl.DataFrame, role: str, name: str, ids: Vocabulary, source: str, notes: list[str]) -> pl.DataFrame:
    """The table with one row per dense id, null where it says nothing; the id column goes, because `ids` has it."""
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
    again = int((dense >= 0).sum()) - len(known)
    if again:
        notes.append(f"{again:,} rows of the {role} table have an id that an earlier row has: the first of each counts")
    if len(known) < len(ids):
        notes.append(
            f"{len(ids) - len(known):,} of {len(ids):,} {'items' if role == 'item' else 'queries'} are not in the {role} table"
        )
    for column in (column for column in table.get_columns() if column.dtype == pl.String and column.name != key):
        lossy = int(column.str.contains("\ufffd", literal=True).sum())
        if lossy:
            notes.append(
                f"{column.name!r} of the {role} table has \ufffd where bytes were not UTF-8, in {lossy:,} rows"
            )
    at = pl.Series(rows).replace(-1, None)
    aligned = table.drop(key).select(pl.all().gather(at)) if table.width > 1 else pl.DataFrame({key: ids.ids})
    return with_title(aligned)
