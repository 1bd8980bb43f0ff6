"""The polars engine: rows into buckets on one machine, streaming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from sparring.core.errors import UserError, first_line, not_written
from sparring.data.prepared.row_buckets import Buckets, StageProgress, number_ids
from sparring.data.table import READ_ERRORS, OpenTable, clean_frame, read_errors


def fill_buckets(
    table: OpenTable, folder: Path, progress: StageProgress, check_space: Callable[[int], None]
) -> Buckets:
    """Write the rows of a table into buckets under `folder`. Rows are scanned a few times; only ids stay in memory."""
    with _part_errors(table, folder):
        progress("counting rows", 0, None)
        lazy, roles, notes = clean_frame(table)
        progress("numbering queries", 0, None)
        queries = lazy.group_by("q").agg(pl.len().alias("n")).collect(engine="streaming")
        progress("numbering items", 0, None)
        items = lazy.select("i").unique().collect(engine="streaming")["i"]
        numbers = number_ids(queries, items, table, roles)
        check_space(int(queries["n"].sum()))
        progress("rows into buckets", 0, None)
        others = [name for name in lazy.collect_schema().names() if name not in ("q", "i")]
        lazy = lazy.join(numbers.queries.lazy().rename({"dense": "dq"}), on="q")
        lazy = lazy.join(numbers.items.lazy().rename({"dense": "di"}), on="i")
        lazy = lazy.select("b", pl.col("dq").alias("q"), pl.col("di").alias("i"), *others)
        partition = pl.PartitionBy(folder, key="b", include_key=False)
        lazy.sink_parquet(partition, compression="uncompressed", statistics=False, mkdir=True)
    ids = numbers.query_ids, numbers.item_ids
    return Buckets(folder, *ids, numbers.first, roles, notes, table.items, table.queries)


@contextmanager
def _part_errors(table: OpenTable, folder: Path) -> Iterator[None]:
    """Name the part that cannot be read, or the folder that cannot be written: polars says neither."""
    try:
        with read_errors(table.source):
            yield
    except UserError as error:
        if not isinstance(error.__cause__, READ_ERRORS):
            raise
        if not_written(error.__cause__):
            reason = f"cannot write into {folder.parent.parent}: {first_line(error.__cause__)}"
            raise UserError(reason) from error.__cause__
        line = broken_part(table)
        if line is None:
            raise
        raise UserError(line) from error.__cause__


def broken_part(table: OpenTable) -> str | None:
    """An error line for the first Parquet part that cannot be read; None where all can."""
    for file in () if table.text else table.files:
        try:
            pl.scan_parquet(file).select(pl.all().null_count()).collect(engine="streaming")
        except READ_ERRORS as error:
            return f"cannot read {file}: {first_line(error)}"
    return None
