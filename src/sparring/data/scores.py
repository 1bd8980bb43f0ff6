"""Scores of (query, item) pairs and item graphs in files, as dense ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from sparring.core.errors import UserError
from sparring.data.columns import find_column
from sparring.data.interactions import Ids, Interactions
from sparring.data.opening import open_rows
from sparring.data.table import read_errors

SCORE = "score"
RELATED = "related"


def read_scores(path: Path, data: Interactions | Ids) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Dense queries, dense items and scores of a table with the columns of a query, an item and `score`.

    Rows with an id that the data do not have are left out; a score that is missing or no number is an error.
    """
    rows = _rows(path)
    for name in (SCORE,):
        if name not in rows.columns:
            raise UserError(f"{path} has no column {name!r}: its columns are {', '.join(rows.columns)}")
    query, item = (find_column(role, rows.columns, None, str(path), required=True) for role in ("query", "item"))
    scores = rows[SCORE].cast(pl.Float64, strict=False).fill_nan(None)
    if scores.null_count():
        row = rows.row(int(scores.is_null().arg_max() or 0), named=True)
        pair = f"query {row[str(query)]} and item {row[str(item)]}"
        raise UserError(f"{path} has no number in {SCORE!r} for {pair}: give every listed pair a score")
    queries, items = data.query_ids.encode(rows[str(query)]), data.item_ids.encode(rows[str(item)])
    known = (queries >= 0) & (items >= 0)
    if not known.any():
        raise UserError(f"no pair of {path} has a query and an item of the data: are these its ids?")
    return queries[known], items[known], scores.to_numpy()[known]


def read_graph(path: Path, data: Interactions | Ids) -> tuple[np.ndarray, np.ndarray]:
    """The edges of an item graph: a table with an item column and `related`, the item that it is related to."""
    rows = _rows(path)
    item = find_column("item", rows.columns, None, str(path), required=True)
    ends = [data.item_ids.encode(rows[str(name)]) for name in (item, RELATED)]
    known = (ends[0] >= 0) & (ends[1] >= 0)
    if not known.any():
        raise UserError(f"no edge of {path} joins two items of the data: are these its ids?")
    return ends[0][known], ends[1][known]


def is_graph(path: Path) -> bool:
    """Whether a table is an item graph: it has the column `related`."""
    return RELATED in open_rows(path).frame.collect_schema().names()


def _rows(path: Path) -> pl.DataFrame:
    with read_errors(str(path)):
        return open_rows(path).frame.collect()
