"""Rows into buckets with polars, streaming on one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from sparring.core.errors import UserError, first_line, not_written
from sparring.data.cleaning import SHORT, clean
from sparring.data.prepared.encoding import Encoded, Raw, Tell, numbered
from sparring.data.table import reading


def encode(raw: Raw, folder: Path, tell: Tell, check_space: Callable[[int], None]) -> Encoded:
    """The rows of `raw` in buckets under `folder`. The rows are scanned a few times, and only the ids are ever held in memory."""
    found = raw.found()
    with _named(raw, folder):
        tell("counting rows", 0, None)
        lazy = raw.frame.select(pl.col(column).alias(SHORT[role]) for role, column in found.items())
        lazy, notes = clean(lazy, found, raw.min_rating, raw.source, guessed_time=raw.named.get("time") is None)
        schema = lazy.collect_schema()
        plain = [
            name
            for name in ("q", "i")
            if not (schema[name].is_integer() or schema[name].is_float() or schema[name] == pl.String)
        ]
        lazy = lazy.with_columns(pl.col(name).cast(pl.String) for name in plain)
        tell("numbering queries", 0, None)
        queries = lazy.group_by("q").agg(pl.len().alias("n")).collect(engine="streaming")
        tell("numbering items", 0, None)
        items = lazy.select("i").unique().collect(engine="streaming")["i"]
        numbers = numbered(queries, items, raw, found)
        check_space(int(queries["n"].sum()))
        tell("rows into buckets", 0, None)
        lazy = lazy.join(numbers.queries.lazy().rename({"dense": "dq"}), on="q").join(
            numbers.items.lazy().rename({"dense": "di"}), on="i"
        )
        others = [name for name in schema.names() if name not in ("q", "i")]
        lazy = lazy.select("b", pl.col("dq").alias("q"), pl.col("di").alias("i"), *others)
        buckets = pl.PartitionBy(folder, key="b", include_key=False)
        lazy.sink_parquet(buckets, compression="uncompressed", statistics=False, mkdir=True)
    return Encoded(folder, numbers.query_ids, numbers.item_ids, numbers.first, found, notes, raw.items, raw.queries)


@contextmanager
def _named(raw: Raw, folder: Path) -> Iterator[None]:
    """Where a scan of many parts fails, find the part that cannot be read: polars does not say which one it was, nor that it wrote."""
    try:
        with reading(raw.source):
            yield
    except UserError as error:
        if not isinstance(error.__cause__, (pl.exceptions.PolarsError, OSError)):
            raise
        if not_written(error.__cause__):
            raise UserError(
                f"cannot write into {folder.parent.parent}: {first_line(error.__cause__)}"
            ) from error.__cause__
        line = broken_part(raw)
        if line is None:
            raise
        raise UserError(line) from error.__cause__


def broken_part(raw: Raw) -> str | None:
    """What is wrong with the first part that cannot be read; None where all can."""
    for file in raw.files:
        try:
            pl.scan_parquet(file).select(pl.all().null_count()).collect(engine="streaming")
        except (pl.exceptions.PolarsError, OSError) as error:
            return f"cannot read {file}: {first_line(error)}"
    return None
