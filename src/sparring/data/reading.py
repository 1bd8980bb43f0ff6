"""Reading interactions: files, folders and tables in memory, in every supported layout; and descriptions of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
import polars as pl
import torch

from sparring.core.errors import UserError
from sparring.data.columns import Columns, either, is_order, keeps_repeats, unused_ratings
from sparring.data.formats.beir import is_beir, read_beir
from sparring.data.formats.xc import is_xc, read_xc
from sparring.data.interactions import Interactions
from sparring.data.opening import open_rows, open_table
from sparring.data.pairs import occurrences, repeated, undated
from sparring.data.prepared.format import is_prepared, read_prepared
from sparring.data.remote import place_of
from sparring.data.table import AnyTable, as_frame, read_errors, to_interactions
from sparring.data.texts.texts import ROLES, find_texts, has_texts, text_of

_YEAR = 365.25 * 24 * 3600  # seconds


def read(
    source: str | os.PathLike[str] | AnyTable,
    *,
    items: str | os.PathLike[str] | AnyTable | None = None,
    queries: str | os.PathLike[str] | AnyTable | None = None,
    users: str | os.PathLike[str] | AnyTable | None = None,
    catalogue: bool = False,
    **columns: Unpack[Columns],
) -> Interactions:
    """Interactions of a file, a folder or a table in memory; only the columns in use are read.

    `source` is a table of polars, pandas or anything else that exports Arrow; a sparse matrix of scipy, users by items;
    an array of pairs, its columns user, item and perhaps value; or a path: Parquet; CSV or TSV, gzipped or not; a
    folder or a glob of Parquet parts; a folder with `interactions.parquet` (or .csv) and perhaps `items.*` and
    `queries.*`; RecBole's `.inter` file or its folder (with `.item` and `.user`, or in `.train.inter`, `.valid.inter`,
    `.test.inter` parts); LightGCN's folder of `train.txt` and `test.txt`; BEIR's folder (see `read_beir`); a folder of
    the extreme-classification repository (see `read_xc`); or a folder that `sparring prepare` wrote. An
    address (s3://, gs://, az://, hf://, delta:, iceberg:) is read as remote.py says.

    The columns `query`, `item`, `time`, `weight`, `rating`, `split` and `label` are guessed from common names. A name
    sets one, and "" or "none" leaves an optional one out. Rows with a null id are dropped. With `min_rating`, so are
    rows rated lower; without it every row is a positive. `label` is 1 for a positive and 0 for an item shown and not
    clicked. `user` and `users` are other names of `query` and `queries`. A pair that occurs more than once is kept
    once, with its last time, the sum of its weights and its first part; with repeats="keep" every row stays, with its
    own time, weight and part, and no evaluation masks seen items. A weight multiplies the loss of its pair; skewed ones
    have to be named.

    `items` and `queries` are tables (paths, or in memory) that describe them; with `catalogue`, items that only the
    table has are kept too. Without such a table, a column of the interactions that is named like a text of items
    (`title`, `item_text`, ...) or queries (`query_text`, ...) makes one. `notes` of the result lists the dropped and
    merged rows, and the spread of the weights. A file that changes while it is read is refused.

        read("ratings.csv", min_rating=4, items="movies.csv");  read(frame, query="customer", item="sku")
    """
    queries = either("queries", queries, users)
    rows = place_of(source) if isinstance(source, (str, os.PathLike)) else as_frame(source)
    if isinstance(rows, Path) and (layout := _layout(rows)) is not None:
        arguments = {**columns, "items": items, "queries": queries, "catalogue": catalogue or None, "repeats": None}
        given = next((name for name, value in arguments.items() if value is not None), None)
        if given is not None:
            raise UserError(f"{given} is for tables: the files of {rows} have a fixed layout")
        data = layout(rows)
        if columns.get("repeats") and keeps_repeats(columns) != data.repeats:
            fixed = "has its repeats" if data.repeats else "has each pair once"
            raise UserError(
                f"{rows} {fixed}, so repeats={columns['repeats']!r} is not possible: read the original file"
            )
        return data
    return to_interactions(replace(open_table(rows, columns, _table(items), _table(queries)), catalogue=catalogue))


def show(path: str | os.PathLike[str], rows: int = 5) -> str:
    """A summary of a file or folder: its columns with types, its first rows, and its size if it holds interactions."""
    path = place_of(path)
    layout = None if isinstance(path, str) else _layout(path)
    if layout is not None:
        return f"{path}\n{describe(layout(Path(path)))}"
    with read_errors(str(path)):
        head = open_rows(path).frame.head(rows).collect()
    lines = [str(path), "columns: " + ", ".join(f"{name} ({kind})" for name, kind in head.schema.items()), _grid(head)]
    try:
        lines += [*describe_roles(path, {}), describe(read(path))]
    except UserError as error:
        lines.append(f"does not read as interactions: {error}")
    return "\n".join(lines)


def describe_roles(path: Path | str, columns: Mapping[str, Any]) -> list[str]:
    """The role of each column when `read` gets these arguments, and a line on ratings that would be ignored."""
    if isinstance(path, Path) and _layout(path) is not None:
        return []
    given = cast(Columns, {name: value for name, value in columns.items() if name in Columns.__annotations__})
    table = replace(open_rows(path), columns=given)
    rated = given.get("min_rating") is not None
    names = {"time": "order"} if is_order(table.roles(), given) else {}
    roles = [
        f"{column} is the {names.get(role, role)}"
        for role, column in table.roles().items()
        if rated or role != "rating"
    ]
    unused = [] if rated else unused_ratings(table.frame.collect_schema().names(), given.get("rating"))
    lines = [f"columns: {', '.join(roles)}"]
    if unused:
        lines.append(f"ratings ({', '.join(unused)}) are ignored: every row is a positive, unless min_rating is given")
    return lines


def describe(data: Interactions) -> str:
    """A few lines on interactions: sizes, density, items per query, times, tables, texts, dropped rows."""
    per_query = torch.from_numpy(occurrences(data.queries, data.n_queries))
    active = per_query[per_query > 0].double()
    density = len(data) / max(data.n_queries * data.n_items, 1)
    lines = [f"{data.n_queries:,} queries x {data.n_items:,} items, {len(data):,} interactions (density {density:.2g})"]
    if len(active):
        lines.append(f"items per query: median {active.median():g}, mean {active.mean():.1f}, most {active.max():g}")
    if data.time is not None:
        lines.append(f"{'order' if data.is_order else 'time'}: {_span(data.time[~undated(data.time)])}")
    if data.split is not None:
        parts = [f"{name} {int((data.split == code).sum()):,}" for code, name in enumerate(("train", "valid", "test"))]
        lines.append("split of the file: " + ", ".join(parts))
    if data.repeats:
        n = repeated(data.queries, data.items)
        lines.append(f"repeats are kept: {n:,} interactions ({n / max(len(data), 1):.0%}) repeat an earlier pair")
    if data.shown is not None:
        lines.append(f"shown and not clicked: {len(data.shown[0]):,}")
    if data.hidden is not None:
        lines.append(f"pairs never recommended: {len(data.hidden[0]):,}")
    for name, table in (("items", data.item_table), ("queries", data.query_table)):
        if table is not None:
            lines.append(f"{name} table: " + ", ".join(table.columns))
    if len(data) and has_texts(data, "query") and has_texts(data, "item"):
        texts = (text_of(data, "query")[int(data.queries[0])], text_of(data, "item")[int(data.items[0])])
        names = (" and ".join(find_texts(data, role)) for role in ROLES)
        lines.append("read as texts, with an encoder: {} of the queries, {} of the items".format(*names))
        lines.append("for example: " + " -> ".join(repr(text[:100]) for text in texts))
    return "\n".join([*lines, *data.notes])


def _layout(path: Path) -> Callable[[Path], Interactions] | None:
    """The reader of a folder with a fixed layout."""
    if not path.is_dir():
        return None
    return read_prepared if is_prepared(path) else read_xc if is_xc(path) else read_beir if is_beir(path) else None


def _span(time: np.ndarray) -> str:
    """The first and the last time, as dates if some unit since 1970 puts both between 1980 and 2100."""
    low, high = float(time.min()), float(time.max())
    for unit, second in (("seconds", 1), ("milliseconds", 10**3), ("microseconds", 10**6), ("nanoseconds", 10**9)):
        if low / second > 10 * _YEAR and high / second < 130 * _YEAR:
            dates = [f"{datetime.fromtimestamp(value / second, UTC):%Y-%m-%d %H:%M}" for value in (low, high)]
            return f"{dates[0]} to {dates[1]} ({unit} since 1970, UTC)"
    return f"{time.min()} to {time.max()}"


def _table(table: str | os.PathLike[str] | AnyTable | None) -> str | os.PathLike[str] | pl.DataFrame | None:
    return table if table is None or isinstance(table, (str, os.PathLike)) else as_frame(table).collect()


def _grid(head: pl.DataFrame) -> str:
    with pl.Config(
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
        tbl_formatting="ASCII_MARKDOWN",
        tbl_width_chars=120,
    ):
        return str(head)
