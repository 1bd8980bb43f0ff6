"""Cleaning rules: how raw rows become interactions, stated once for polars and Spark.

A rule is an SQL expression over the short column names q, i, t, w, r, s, l. Both engines evaluate the same expressions,
so a file is cleaned in the same way on one machine and on a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import polars as pl

from sparring.core.errors import UserError
from sparring.data.columns import Columns

SHORT = {"query": "q", "item": "i", "time": "t", "weight": "w", "rating": "r", "split": "s", "label": "l"}
CODES = {
    "split": {"train": 0, "training": 0, "0": 0, "valid": 1, "val": 1, "validation": 1, "dev": 1, "1": 1}
    | {"test": 2, "testing": 2, "2": 2},
    "label": {"1": 1, "true": 1, "0": 0, "false": 0},
}
_EXPECTED = {"split": "train, valid, test or 0, 1, 2", "label": "1 (clicked) and 0 (shown, not clicked)"}
_NAN = "CAST('NaN' AS DOUBLE)"
_NO_ID = "(q IS NULL OR i IS NULL)"


class RawRows(Protocol):
    """Unread rows of an engine, with short column names. Expressions and conditions are SQL."""

    id_kinds: ClassVar[tuple[str, ...]]  # kinds of columns that may hold ids
    microseconds: ClassVar[str]  # the expression for a date or timestamp `t` in microseconds since 1970

    def kind(self, name: str) -> tuple[str, object]:
        """integer, float, decimal, text, boolean, date, timestamp, null, nested or other; and the engine's own type."""
        ...

    def with_column(self, name: str, expression: str) -> Self: ...
    def with_parsed_text(self, name: str, holds: str) -> Self: ...
    def with_codes(self, name: str, codes: Mapping[str, int]) -> Self: ...
    def where(self, condition: str) -> Self: ...
    def drop(self, name: str) -> Self: ...

    def distinct(self, name: str) -> list[str | None]:
        """The distinct values of a column, as text."""
        ...

    def first(self, expression: str, condition: str) -> Any:
        """The value of an expression in some row that meets a condition; None where no row does."""
        ...

    def count(self, conditions: Mapping[str, str]) -> Mapping[str, int]:
        """The number of rows that meet each condition, and under `rows` that of all rows."""
        ...


Rows = TypeVar("Rows", bound=RawRows)


def clean(rows: Rows, roles: Mapping[str, str], columns: Columns, source: str) -> tuple[Rows, list[str]]:
    """Typed rows with ids and a sufficient rating, and notes on dropped rows, null times and null weights.

    `roles` maps each role to its column, `columns` are the caller's arguments, and `source` names the table in errors.
    """
    slashed = rows.first("t", "t LIKE '%/%/%'") if "time" in roles and rows.kind("t")[0] == "text" else None
    for role, column in roles.items():
        rows = _typed(rows, role, f"the {role} column {column!r} of {source} holds")
    keep = f"NOT {_NO_ID}"
    counted = {"without_id": _NO_ID}
    if (lowest := columns.get("min_rating")) is not None:
        low = f"(r IS NULL OR r < CAST('{float(lowest)!r}' AS DOUBLE))"
        counted["below"] = f"{keep} AND {low}"
        keep = f"{keep} AND NOT {low}"
    counted |= {f"without_{role}": f"{keep} AND {SHORT[role]} IS NULL" for role in ("time", "weight") if role in roles}
    counts = rows.count({**counted, "left": keep})
    notes, timed = _notes(counts, roles, columns, source)
    if slashed is not None and not slashed[:4].isdigit():
        notes.append(f"read dates such as {slashed} as day/month/year")
    rows = rows.where(keep)
    unused = ["t"] * ("time" in roles and not timed) + ["r"] * ("rating" in roles)
    for name in unused:
        rows = rows.drop(name)
    return rows, notes


def _typed(rows: Rows, role: str, holds: str) -> Rows:
    """The rows with the column of a role typed: ids (null for NaN and ""), int64 or float64 times, numbers, codes."""
    name = SHORT[role]
    kind, dtype = rows.kind(name)
    if role in ("query", "item"):
        if kind not in rows.id_kinds:
            raise UserError(f"{holds} {dtype}, not ids: give whole numbers or text")
        nothing = {"float": _NAN, "text": "''"}.get(kind)
        return rows if nothing is None else rows.with_column(name, f"NULLIF({name}, {nothing})")
    if role in CODES:
        return _coded(rows, role, holds)
    if kind == "text":
        rows = rows.with_parsed_text(name, holds)
        kind, dtype = rows.kind(name)
    if role == "time" and kind in ("date", "timestamp"):
        return rows.with_column(name, rows.microseconds)
    if role == "time" and kind in ("integer", "null"):
        return rows.with_column(name, f"CAST({name} AS BIGINT)")
    if role == "time" and kind != "float":
        raise UserError(f"{holds} {dtype}; expected numbers or dates")
    if kind not in ("integer", "float", "decimal", "boolean", "null"):
        raise UserError(f"{holds} {dtype}; expected numbers")
    rows = rows.with_column(name, f"NULLIF(CAST({name} AS DOUBLE), {_NAN})")
    if role == "time" and rows.first(name, f"ABS({name}) = CAST('Infinity' AS DOUBLE)") is not None:
        raise UserError(f"{holds} an infinite number; times must be finite, or null where unknown")
    if role == "weight":
        wrong = rows.first(name, f"{name} < 0 OR {name} = CAST('Infinity' AS DOUBLE)")
        if wrong is not None:
            raise UserError(f"{holds} {wrong:g}; weights must be finite and not negative")
    return rows


def _coded(rows: Rows, role: str, holds: str) -> Rows:
    """The rows with the words of a split or label column as codes; case, spaces and a final .0 do not matter."""
    words = rows.distinct(SHORT[role])
    codes = {word: CODES[role].get(word.strip().lower().removesuffix(".0")) for word in words if word is not None}
    unknown = ["null"] * (None in words) + sorted(repr(word) for word, code in codes.items() if code is None)
    if unknown:
        shown = ", ".join(unknown[:3]) + ", ..." * (len(unknown) > 3)
        raise UserError(f"{holds} {shown}; expected {_EXPECTED[role]}, or ignore the column", role, "'none'")
    return rows.with_codes(SHORT[role], {word: code for word, code in codes.items() if code is not None})


def _notes(
    counts: Mapping[str, int], roles: Mapping[str, str], columns: Columns, source: str
) -> tuple[list[str], bool]:
    """A note for each kind of dropped or filled row, and whether any has a time; an error where no row is left."""
    lowest = columns.get("min_rating")
    if not counts["rows"]:
        raise UserError(f"{source} is empty: it has no rows")
    if counts["without_id"] == counts["rows"]:
        raise UserError(
            f"all {counts['rows']:,} rows of {source} have a null or empty {roles['query']!r} or {roles['item']!r}"
        )
    if not counts["left"]:
        raise UserError(f"no row of {source} has a {roles['rating']!r} of at least {lowest}")
    notes, timed = [], "time" in roles
    if counts["without_id"]:
        notes.append(f"dropped {row_count(counts['without_id'])} with null or empty ids")
    if counts.get("below"):
        notes.append(f"dropped {row_count(counts['below'])} with {roles['rating']} below {lowest:g}")
    if timed and counts["without_time"] == counts["left"]:
        if columns.get("time") is not None:
            raise UserError(f"the time column {roles['time']!r} of {source} holds nulls only")
        notes.append(f"ignored the column {roles['time']}: it holds nulls only")
        timed = False
    elif counts.get("without_time"):
        notes.append(f"counted {row_count(counts['without_time'])} without a {roles['time']} as the earliest")
    if counts.get("without_weight"):
        notes.append(f"counted {row_count(counts['without_weight'])} with a null {roles['weight']} as weight 1")
    return notes, timed


def row_count(n: int) -> str:
    return f"{n:,} row{'s' if n != 1 else ''}"


@dataclass(frozen=True)
class PolarsRows:
    """Unread rows of polars; every probe is one pass of the streaming engine."""

    frame: pl.LazyFrame

    id_kinds: ClassVar[tuple[str, ...]] = (
        "integer",
        "float",
        "decimal",
        "text",
        "boolean",
        "date",
        "timestamp",
        "null",
        "other",
    )
    microseconds: ClassVar[str] = "CAST(CAST(t AS TIMESTAMP) AS BIGINT)"

    def kind(self, name: str) -> tuple[str, object]:
        dtype = self.frame.collect_schema()[name]
        kinds = {pl.String: "text", pl.Boolean: "boolean", pl.Date: "date", pl.Datetime: "timestamp", pl.Null: "null"}
        if dtype.is_integer() or dtype.is_float() or dtype.is_decimal():
            return "integer" if dtype.is_integer() else "float" if dtype.is_float() else "decimal", dtype
        return "nested" if dtype.is_nested() else kinds.get(dtype.base_type(), "other"), dtype

    def with_column(self, name: str, expression: str) -> PolarsRows:
        return PolarsRows(self.frame.with_columns(pl.sql_expr(expression).alias(name)))

    def with_parsed_text(self, name: str, holds: str) -> PolarsRows:
        """Text in the first form that fits every row: times are whole numbers, numbers or dates; the rest numbers."""
        text = pl.col(name)
        forms = [text.cast(pl.Float64, strict=False)]
        if name == "t":
            moment = text.str.to_datetime(strict=False, time_unit="us", time_zone="UTC").dt.timestamp("us")
            forms = [text.cast(pl.Int64, strict=False), *forms, moment]
        failed = [text.is_not_null() & form.is_null() for form in forms]
        sums = self.frame.select(wrong.sum().alias(str(n)) for n, wrong in enumerate(failed))
        failures = sums.collect(engine="streaming").row(0)
        if min(failures):
            value = self.frame.filter(failed[int(np.argmin(failures))]).select(name).head(1).collect().item()
            dates = ", neither a number nor a date: write dates as 2022-02-23, 2022-02-23 14:05:00 or 23.02.2022"
            raise UserError(f"{holds} {value!r}{dates if name == 't' else ', not a number'}")
        return PolarsRows(self.frame.with_columns(forms[failures.index(0)]))

    def with_codes(self, name: str, codes: Mapping[str, int]) -> PolarsRows:
        coded = pl.col(name).cast(pl.String).replace_strict(dict(codes), return_dtype=pl.UInt8)
        return PolarsRows(self.frame.with_columns(coded))

    def where(self, condition: str) -> PolarsRows:
        return PolarsRows(self.frame.filter(pl.sql_expr(condition)))

    def drop(self, name: str) -> PolarsRows:
        return PolarsRows(self.frame.drop(name))

    def distinct(self, name: str) -> list[str | None]:
        return self.frame.select(pl.col(name).cast(pl.String)).unique().collect(engine="streaming")[name].to_list()

    def first(self, expression: str, condition: str) -> Any:
        rows = self.frame.filter(pl.sql_expr(condition)).select(pl.sql_expr(expression).alias("value")).head(1)
        value = rows.collect(engine="streaming")
        return value.item() if len(value) else None

    def count(self, conditions: Mapping[str, str]) -> Mapping[str, int]:
        sums = (pl.sql_expr(condition).sum().alias(name) for name, condition in conditions.items())
        return self.frame.select(pl.len().alias("rows"), *sums).collect(engine="streaming").row(0, named=True)
