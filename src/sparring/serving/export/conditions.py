"""Conditions on item columns for other stores: checked once, then written in the language of each store.

They mean what they mean in the service (serving/http/conditions.py): all must hold, and an item without a value passes
only "!=" and "not in".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import polars as pl

from sparring.core.errors import UserError, did_you_mean

OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "in", "not in", "contains")
Where = Sequence[tuple[str, str, Any]]  # (column, op, value); the value of "in" and "not in" is a list


def checked(where: Where, schema: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """The conditions, with times in place of texts for columns of times; UserError for one that does not fit."""
    result = []
    for column, op, value in where:
        if column not in schema or column == "vector":
            known = [name for name in schema if name != "vector"]
            hint = did_you_mean(column, known) or f": the columns are {', '.join(known)}"
            raise UserError(f"unknown item column {column!r}{hint}")
        if op not in OPERATORS:
            raise UserError(f"unknown operator {op!r}: the operators are {', '.join(OPERATORS)}")
        if isinstance(value, list) != (op in ("in", "not in")):
            raise UserError(f"{column} {op}: give {'a list of values' if op in ('in', 'not in') else 'one value'}")
        kind = schema[column]
        if isinstance(kind, pl.List) and op != "contains":
            raise UserError(f"column {column!r} contains lists: use the operator contains, not {op}")
        if op == "contains" and not isinstance(kind, pl.List) and kind != pl.String:
            raise UserError(f"{column} contains: needs a column of texts or lists, not {kind}")
        inner = kind.inner if isinstance(kind, pl.List) else kind
        if isinstance(value, list):
            result.append((column, op, [_value(column, one, inner) for one in value]))
        else:
            result.append((column, op, _value(column, value, inner)))
    return result


def _value(column: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, pl.Datetime):
        try:
            return datetime.fromisoformat(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{value!r} is not a time for column {column!r}: write it as 2026-11-15T12:00:00"
            ) from error
    fits = {bool: kind == pl.Boolean, str: kind == pl.String}.get(type(value), kind.is_numeric())
    if not fits or not isinstance(value, bool | str | int | float):
        raise UserError(f"column {column!r} has type {kind}: it cannot be compared with {str(value)[:80]!r}")
    return value


@dataclass(frozen=True)
class Dialect:
    """How a store writes a condition. `has` and `part` are formats of column {0} and value {1}."""

    store: str
    name: Callable[[str], str]
    literal: Callable[[Any], str]
    has: str  # a list holds a value
    part: str | None  # a text holds another one, given in lower case; None: the store cannot ignore case
    equal: str = "="
    lists: str = "({})"
    nothing: str = "1 = 0"
    as_float: str = "{}"  # a column of whole numbers beside a float

    def all(self, where: Where, schema: Mapping[str, Any]) -> str:
        """The conjunction as one expression, empty without conditions."""
        return " and ".join(self._one(*one, schema[one[0]]) for one in checked(where, schema))

    def _one(self, column: str, op: str, value: Any, kind: Any) -> str:
        name, values = self.name(column), value if isinstance(value, list) else [value]
        if kind == pl.Int64 and any(isinstance(one, float) for one in values):
            name = self.as_float.format(name)
        if isinstance(value, list):
            among = f"{name} in {self.lists.format(', '.join(map(self.literal, value)))}" if value else self.nothing
            return among if op == "in" else f"({name} is null or not ({among}))"
        if op == "contains" and isinstance(kind, pl.List):
            return self.has.format(name, self.literal(value))
        if op == "contains":
            if self.part is None:
                raise no_substrings(self.store, column)
            return self.part.format(name, self.literal(value.lower()))
        if op == "!=":
            return f"({name} is null or {name} != {self.literal(value)})"
        return f"{name} {self.equal if op == '=' else op} {self.literal(value)}"


def no_substrings(store: str, column: str) -> UserError:
    return UserError(f"{store} finds no part of a text without regard to case: use = or in for {column!r}")
