"""Conditions on item columns as a polars expression; types are checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from sparring.serving.http.schema import RequestError

Conditions = tuple[tuple[str, str, Any], ...]  # (column, op, value), hashable

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
    if isinstance(value, tuple) != (op in ("in", "not in")):
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
    if isinstance(value, tuple):
        if len(value) > 64 and dtype == pl.String and all(isinstance(choice, str) for choice in value):
            among = values.is_in(list(value))
        elif value:
            among = pl.any_horizontal([values == _literal(column, choice, dtype) for choice in value])
        else:
            among = pl.lit(False)
        return among.fill_null(False) if op == "in" else ~among.fill_null(False)
    literal = _literal(column, value, dtype)
    if op == "=":
        return values == literal
    if op == "!=":
        return values.ne_missing(literal)
    return _ORDER[op](values, literal)


def _literal(column: str, value: Any, dtype: Any) -> pl.Expr:
    """The value with a type that can be compared with the column."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if (
        (dtype.is_numeric() and number)
        or (dtype == pl.String and isinstance(value, str))
        or (dtype == pl.Boolean and isinstance(value, bool))
    ):
        try:
            return pl.lit(pl.Series([value])[0]) if number else pl.lit(value)
        except (OverflowError, TypeError, pl.exceptions.PolarsError) as error:
            raise RequestError(422, f"{str(value)[:80]} is too large a number for column {column!r}") from error
    if dtype.is_temporal() and isinstance(value, str):
        try:
            return pl.lit(pl.Series([value]).str.strptime(dtype)[0], dtype)
        except pl.exceptions.PolarsError as error:
            how = "write it as 2026-11-15 or 2026-11-15T12:00:00"
            raise RequestError(422, f"{value[:80]!r} is not a {dtype} for column {column!r}: {how}") from error
    raise RequestError(422, f"column {column!r} has type {dtype}: it cannot be compared with {str(value)[:80]!r}")
