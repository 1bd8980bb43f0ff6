"""Conditions on item columns as a polars expression; types are checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from sparring.serving.http.schema import RequestError

Conditions = Sequence[tuple[str, str, Any]]  # (column, op, value); the value of "in" and "not in" is a list

_DIGITS = str.maketrans("123456789", "000000000")
_ORDER = {"<": pl.Expr.lt, "<=": pl.Expr.le, ">": pl.Expr.gt, ">=": pl.Expr.ge}


def expression(where: Conditions, schema: Mapping[str, Any]) -> pl.Expr:
    """The conjunction of all conditions. An item without a value passes only "!=" and "not in"."""
    parts = [_one(column, op, value, schema) for column, op, value in where]
    return pl.all_horizontal(parts) if parts else pl.lit(True)


def check_column(name: str, schema: Mapping[str, Any], status: int = 422) -> None:
    if name not in schema:
        raise RequestError(status, f"unknown item column {name[:200]!r}: the columns are {', '.join(schema)}")


def _one(column: str, op: str, value: Any, schema: Mapping[str, Any]) -> pl.Expr:
    check_column(column, schema)
    dtype, values = schema[column], pl.col(column)
    if isinstance(value, list) != (op in ("in", "not in")):
        raise RequestError(422, f"{column} {op}: give {'a list of values' if op in ('in', 'not in') else 'one value'}")
    if isinstance(dtype, (pl.List, pl.Array)):
        if op != "contains":
            raise RequestError(422, f"column {column!r} contains lists: use the operator contains, not {op}")
        lists = values.arr.to_list() if isinstance(dtype, pl.Array) else values
        return lists.list.contains(_literal(column, value, dtype.inner))
    if isinstance(dtype, pl.Struct):
        raise RequestError(422, f"column {column!r} of type {dtype} cannot be filtered")
    if dtype in (pl.Categorical, pl.Enum):
        values, dtype = values.cast(pl.String), pl.String()
    if op == "contains":
        if dtype != pl.String or not isinstance(value, str):
            message = f"{column} contains: needs a text column and a text, not {dtype} and {str(value)[:80]!r}"
            raise RequestError(422, message)
        return values.str.to_lowercase().str.contains(value.lower(), literal=True)
    if isinstance(value, list):
        choices = _choices(column, value, dtype)
        among = values.cast(choices.dtype).is_in(choices.implode()).fill_null(False)
        return among if op == "in" else ~among
    literal = _literal(column, value, dtype)
    if op == "=":
        return values == literal
    if op == "!=":
        return values.ne_missing(literal)
    return _ORDER[op](values, literal)


def _choices(column: str, values: list[Any], dtype: Any) -> pl.Series:
    """The values with the type of the column (floats for decimals), for one membership test of all of them.

    A filter may have 160,000 values: a Python loop over them would hold up the other threads.
    """
    kinds = set(map(type, values))
    if not all(_comparable(kind, dtype) for kind in kinds):
        raise _incomparable(column, next(value for value in values if not _comparable(type(value), dtype)), dtype)
    if dtype.is_temporal():
        shapes: dict[str, list[str]] = {}  # polars parses a series by the format of its first text
        for value in values:
            shapes.setdefault(value.translate(_DIGITS), []).append(value)
        return pl.concat([pl.Series([], dtype=dtype), *(_times(column, texts, dtype) for texts in shapes.values())])
    if dtype.is_integer() and kinds == {int}:  # of 64 bits; those that the column cannot hold become null
        return pl.Series(values, dtype=pl.Int64).cast(dtype, strict=False).drop_nulls()
    if dtype.is_integer():  # no other number equals one of the column
        bits = int(str(dtype).lstrip("UInt"))
        low, high = (0, 2**bits) if dtype.is_unsigned_integer() else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        values = [int(value) for value in values if value == int(value) and low <= value < high]
    elif dtype.is_numeric():
        floats = pl.Series(list(map(float, values)), dtype=pl.Float64)
        return floats.cast(dtype) if dtype.is_float() else floats
    return pl.Series(values, dtype=dtype)


def _literal(column: str, value: Any, dtype: Any) -> pl.Expr:
    """The value with a type that can be compared with the column."""
    if not _comparable(type(value), dtype):
        raise _incomparable(column, value, dtype)
    return pl.lit(_times(column, [value], dtype)[0], dtype) if dtype.is_temporal() else pl.lit(value)


def _comparable(kind: type, dtype: Any) -> bool:
    if kind is bool:
        return bool(dtype == pl.Boolean)
    if kind is str:
        return bool(dtype == pl.String or dtype.is_temporal())
    return bool(dtype.is_numeric())


def _incomparable(column: str, value: Any, dtype: Any) -> RequestError:
    return RequestError(422, f"column {column!r} has type {dtype}: it cannot be compared with {str(value)[:80]!r}")


def _times(column: str, texts: list[str], dtype: Any) -> pl.Series:
    """Times of one format."""
    try:
        times = pl.Series(texts).str.strptime(dtype, strict=False)
    except (pl.exceptions.PolarsError, ValueError):  # no known format, or a column of durations
        times = pl.Series([None] * len(texts))
    if times.has_nulls() or times.dtype != dtype:  # a text with a zone gives another type
        wrong = texts[int(times.is_null().arg_max() or 0)]
        how = "write it as 2026-11-15 or 2026-11-15T12:00:00"
        raise RequestError(422, f"{wrong[:80]!r} is not a {dtype} for column {column!r}: {how}")
    return times
