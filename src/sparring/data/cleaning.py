"""Rows as they come from a file: columns typed, rows that cannot be used dropped, and a note for each kind of dropped row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import polars as pl

from sparring.core.errors import UserError

PARTS = {
    "train": 0,
    "training": 0,
    "0": 0,
    "valid": 1,
    "val": 1,
    "validation": 1,
    "dev": 1,
    "1": 1,
    "test": 2,
    "testing": 2,
    "2": 2,
}
CLICKS = {"1": 1, "true": 1, "0": 0, "false": 0}
SHORT = {"query": "q", "item": "i", "time": "t", "weight": "w", "rating": "r", "split": "s", "label": "l"}


def clean(
    lazy: pl.LazyFrame, found: dict[str, str], min_rating: float | None, source: str, guessed_time: bool
) -> tuple[pl.LazyFrame, list[str]]:
    """Typed columns, rows without ids, times or a sufficient rating dropped, and a note for each kind of dropped row."""
    schema = lazy.collect_schema()
    for name in ("q", "i"):
        if schema[name].is_nested():
            raise UserError(
                f"column {found['query' if name == 'q' else 'item']!r} of {source} holds {schema[name]}, not ids"
            )
    lazy = lazy.with_columns(pl.col(name).fill_nan(None) for name in ("q", "i") if schema[name].is_float())
    if "time" in found:
        lazy = _typed_time(lazy, found["time"], source)
    for role in ("weight", "rating"):
        if role in found:
            lazy = _typed_number(lazy, SHORT[role], found[role], source)
    for role, codes in (("split", PARTS), ("label", CLICKS)):
        if role in found:
            lazy = _typed_codes(lazy, role, found[role], codes, source)
    no_id = pl.col("q").is_null() | pl.col("i").is_null()
    low = pl.col("r").is_null() | (pl.col("r") < min_rating) if min_rating is not None else pl.lit(False)
    timed = "time" in found
    no_time = pl.col("t").is_null() if timed else pl.lit(False)
    keep = ~no_id & ~low
    counts = lazy.select(
        pl.len().alias("rows"),
        no_id.sum().alias("without_id"),
        (~no_id & low).sum().alias("below"),
        (keep & no_time).sum().alias("untimed"),
        keep.sum().alias("left"),
        (keep & pl.col("w").is_null()).sum().alias("unweighted")
        if "weight" in found
        else pl.lit(0).alias("unweighted"),
    )
    notes, timed = tell_dropped(
        counts.collect(engine="streaming").row(0, named=True), found, min_rating, source, guessed_time
    )
    if timed:
        lazy = lazy.filter(keep & ~no_time)
    else:
        lazy = lazy.filter(keep).drop("t", strict=False)
    return lazy.drop("r", strict=False), notes


def tell_dropped(
    counts: Mapping[str, int], found: Mapping[str, str], min_rating: float | None, source: str, guessed_time: bool
) -> tuple[list[str], bool]:
    """A note for each kind of dropped row, and whether the rows have times after all; an error where no row is left."""
    if not counts["rows"]:
        raise UserError(f"{source} is empty: it has no rows")
    if counts["without_id"] == counts["rows"]:
        raise UserError(
            f"all {counts['rows']:,} rows of {source} have a null in {found['query']!r} or {found['item']!r}"
        )
    if not counts["left"]:
        raise UserError(f"no row of {source} has a {found['rating']!r} of at least {min_rating}")
    notes, timed = [], "time" in found
    if counts["without_id"]:
        notes.append(f"dropped {counts['without_id']:,} rows with null ids")
    if counts["below"]:
        notes.append(f"dropped {counts['below']:,} rows with {found['rating']} below {min_rating:g}")
    if timed and counts["untimed"] == counts["left"]:
        if not guessed_time:
            raise UserError(f"the time column {found['time']!r} of {source} holds nulls only")
        notes.append(f"ignored the column {found['time']}: it holds nulls only")
        timed = False
    elif counts["untimed"]:
        notes.append(f"dropped {counts['untimed']:,} rows with a null {found['time']}")
    if counts["unweighted"]:
        notes.append(f"counted {counts['unweighted']:,} rows with a null {found['weight']} as weight 1")
    return notes, timed


def _typed_time(lazy: pl.LazyFrame, column: str, source: str) -> pl.LazyFrame:
    kind = lazy.collect_schema()["t"]
    time = pl.col("t")
    if kind.is_integer():
        return lazy.with_columns(time.cast(pl.Int64))
    if kind.is_float():
        return lazy.with_columns(time.cast(pl.Float64).fill_nan(None))
    if isinstance(kind, (pl.Date, pl.Datetime)):
        return lazy.with_columns(time.dt.timestamp("us"))
    if kind == pl.Null:
        return lazy.with_columns(time.cast(pl.Int64))
    if kind != pl.String:
        raise UserError(f"the time column {column!r} of {source} holds {kind}; expected numbers or dates")
    moment = time.str.to_datetime(strict=False, time_unit="us", time_zone="UTC").dt.timestamp("us")
    readings = [time.cast(pl.Int64, strict=False), time.cast(pl.Float64, strict=False), moment]
    wrong = lazy.select((time.is_not_null() & each.is_null()).sum().alias(str(n)) for n, each in enumerate(readings))
    failures = wrong.collect(engine="streaming").row(0)
    if min(failures):
        best = readings[int(np.argmin(failures))]
        value = lazy.filter(time.is_not_null() & best.is_null()).select("t").head(1).collect().item()
        known = "write dates as 2022-02-23, 2022-02-23 14:05:00 or 23.02.2022"
        raise UserError(
            f"the time column {column!r} of {source} holds {value!r}, neither a number nor a date that is read: {known}"
        )
    return lazy.with_columns(readings[failures.index(0)])


def _typed_number(lazy: pl.LazyFrame, name: str, column: str, source: str) -> pl.LazyFrame:
    kind = lazy.collect_schema()[name]
    number = pl.col(name).cast(pl.Float64, strict=False).fill_nan(None)
    if not kind.is_numeric():
        wrong = lazy.filter(pl.col(name).is_not_null() & pl.col(name).cast(pl.Float64, strict=False).is_null())
        value = wrong.select(name).head(1).collect(engine="streaming")
        if len(value):
            raise UserError(f"column {column!r} of {source} holds {value.item()!r}, not a number")
    if name == "w":
        wrong = lazy.filter((number < 0) | number.is_infinite()).select(number).head(1)
        value = wrong.collect(engine="streaming")
        if len(value):
            raise UserError(
                f"the weight column {column!r} of {source} holds {value.item():g}; weights must be finite and not negative"
            )
    return lazy.with_columns(number)


def _typed_codes(lazy: pl.LazyFrame, role: str, column: str, codes: dict[str, int], source: str) -> pl.LazyFrame:
    name = SHORT[role]
    plain = pl.col(name).cast(pl.String).str.strip_chars().str.to_lowercase().str.replace(r"\.0$", "")
    lazy = lazy.with_columns(plain)
    values = lazy.select(name).unique().collect(engine="streaming")[name]
    check_codes(values.to_list(), role, column, codes, source)
    return lazy.with_columns(pl.col(name).replace_strict(codes, return_dtype=pl.UInt8))


def check_codes(values: Iterable[str | None], role: str, column: str, codes: Mapping[str, int], source: str) -> None:
    """Every distinct value of a column of parts or labels must be one of the words that say so."""
    unknown = sorted((value for value in values if value not in codes), key=lambda value: (value is not None, value))
    if unknown:
        shown = ", ".join("null" if value is None else repr(value) for value in unknown[:3]) + (
            ", ..." if len(unknown) > 3 else ""
        )
        expected = "train, valid, test or 0, 1, 2" if role == "split" else "1 (clicked) and 0 (shown, not clicked)"
        raise UserError(
            f'the {role} column {column!r} of {source} holds {shown}; expected {expected}, or pass {role}="" to leave it out'
        )
