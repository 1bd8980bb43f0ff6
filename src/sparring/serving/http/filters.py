"""Conditions on item columns, as a polars expression: checked against the columns' types before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from sparring.serving.http.limits import Refused

Conditions = tuple[tuple[str, str, Any], ...]  # (column, op, value); values are hashable

_ORDER = {"<": pl.Expr.lt, "<=": pl.Expr.le, ">": pl.Expr.gt, ">=": pl.Expr.ge}


def expression(where: Conditions, schema: Mapping[str, Any]) -> pl.Expr:
    """All conditions at once. An item without a value passes only "!=" and "not in"."""
    parts = [_one(column, op, value, schema) for column, op, value in where]
    return pl.all_horizontal(parts) if parts else pl.lit(True)


def _one(column: str, op: str, value: Any, schema: Mapping[str, Any]) -> pl.Expr:
    if column not in schema:
        raise Refused(422, f"there is no item column {column!r}: there are {', '.join(schema)}")
    dtype, own = schema[column], pl.col(column)
    if isinstance(value, tuple) != (op in ("in", "not in")):
        raise Refused(422, f"{column} {op}: give {'a list of values' if op in ('in', 'not in') else 'one value'}")
    if isinstance(dtype, (pl.List, pl.Array)):
        if op != "contains":
            raise Refused(422, f"column {column!r} holds lists: the condition on it is contains, not {op}")
        lists = own.arr.to_list() if isinstance(dtype, pl.Array) else own
        return lists.list.contains(_literal(column, value, dtype.inner))
    if isinstance(dtype, pl.Struct):
        raise Refused(422, f"column {column!r} of type {dtype} cannot be filtered")
    if dtype in (pl.Categorical, pl.Enum):
        own, dtype = own.cast(pl.String), pl.String()
    if op == "contains":
        if dtype != pl.String or not isinstance(value, str):
            raise Refused(
                422, f"{column} contains: needs a column of text and a text, not {dtype} and {str(value)[:80]!r}"
            )
        return own.str.to_lowercase().str.contains(value.lower(), literal=True)
    if isinstance(value, tuple):
        among = pl.any_horizontal([own == _literal(column, each, dtype) for each in value]) if value else pl.lit(False)
        if len(value) > 64 and dtype == pl.String and all(isinstance(each, str) for each in value):
            among = own.is_in(list(value))
        return among.fill_null(False) if op == "in" else ~among.fill_null(False)
    literal = _literal(column, value, dtype)
    if op == "=":
        return own == literal
    if op == "!=":
        return own.ne_missing(literal)
    return _ORDER[op](own, literal)


def _literal(column: str, value: Any, dtype: Any) -> pl.Expr:
    """The value in a type that compares with the column's."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if (
        (dtype.is_numeric() and number)
        or (dtype == pl.String and isinstance(value, str))
        or (dtype == pl.Boolean and isinstance(value, bool))
    ):
        try:
            return pl.lit(pl.Series([value])[0]) if number else pl.lit(value)
        except (OverflowError, TypeError, pl.exceptions.PolarsError) as error:
            raise Refused(422, f"{str(value)[:80]} is too large a number for column {column!r}") from error
    if dtype.is_temporal() and isinstance(value, str):
        try:
            return pl.lit(pl.Series([value]).str.strptime(dtype)[0], dtype)
        except pl.exceptions.PolarsError as error:
            raise Refused(
                422,
                f"{value[:80]!r} is no {dtype} for column {column!r}: write it as 2026-11-15 or 2026-11-15T12:00:00",
            ) from error
    raise Refused(422, f"column {column!r} holds {dtype}: {str(value)[:80]!r} cannot be compared with it")
