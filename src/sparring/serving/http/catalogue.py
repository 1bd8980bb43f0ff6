"""The items that are served: their ids, titles and columns, as the run has them and as they were changed since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import polars as pl

from sparring.data.interactions import Ids
from sparring.serving.http.filters import Conditions, expression
from sparring.serving.http.limits import Refused
from sparring.serving.http.names import Names

_KEPT = 64  # filters whose answer is remembered
_STRINGS = np.dtypes.StringDType(na_object=None)
Kind = Literal["text", "number", "boolean", "time", "list"]


class Catalogue:
    """Items by dense id: 0..N-1 are the run's, later ones were added. One thread changes it, many read.

    catalogue.find(["espresso"]);  catalogue.put("espresso", {"title": "Espresso", "price": 2.5});  catalogue.passing((("price", "<", 3),))
    """

    def __init__(self, ids: Ids) -> None:
        self.base = Names(ids.item_ids)
        self.table = ids.item_table
        self.schema: dict[str, Any] = dict(self.table.schema) if self.table is not None else {}
        # numpy's own strings: for the few of one search they are read ten times as fast as from a polars column
        self.titles = (
            np.array(self.table["title"].cast(pl.String).to_list(), _STRINGS)
            if self.table is not None and "title" in self.schema
            else None
        )
        self.schema.setdefault("title", pl.String)
        self.changed: dict[int, dict[str, Any]] = {}  # whole rows
        self._added: dict[str, int] = {}
        self._names: list[int | str] = []  # of the added, from N on
        self._version = 0
        self._base_masks: dict[Conditions, np.ndarray] = {}
        self._answers: dict[Conditions, tuple[int, np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self.base) + len(self._names)

    @property
    def columns(self) -> list[tuple[str, Kind, str]]:
        """(name, kind, type) of every column that a filter may use."""
        return [(name, _kind(dtype), str(dtype)) for name, dtype in self.schema.items()]

    def find_one(self, item: int | str) -> int:
        """The dense id of an item, -1 where it was never known."""
        at = self.base.find_one(item)
        return at if at >= 0 else self._added.get(str(item), -1)

    def find(self, items: Sequence[int | str]) -> np.ndarray:
        return np.fromiter(map(self.find_one, items), np.int64, len(items))

    def names(self, dense: np.ndarray) -> list[int | str]:
        """Original ids, of any shape flattened."""
        n = len(self.base)
        if not self._names or not len(dense) or int(dense.max()) < n:
            return self.base.of(dense)
        new = dense >= n
        names: list[int | str] = self.base.of(np.where(new, 0, dense)) if n else [0] * len(dense)
        for at in np.flatnonzero(new).tolist():
            names[at] = self._names[int(dense[at]) - n]
        return names

    def values(self, dense: np.ndarray, column: str) -> list[Any]:
        """One column of these items, None where nothing is known."""
        n = len(self.base)
        own = dense if not self._names else np.where(dense < n, dense, 0)
        if column == "title" and self.titles is not None and n:
            values: list[Any] = self.titles[own].tolist()
        elif self.table is not None and column in self.table.columns and n:
            values = _plainly(self.table[column].gather(pl.Series(own))).to_list()
        else:
            values = [None] * len(dense)
        if self.changed:
            for at, item in enumerate(dense.tolist()):
                row = self.changed.get(item)
                if row is not None:
                    values[at] = row.get(column)
        return values

    def row(self, dense: int) -> dict[str, Any]:
        """All columns of one item, as they are now."""
        row = self.changed.get(dense)
        if row is not None:
            return row
        if self.table is not None and dense < len(self.base):
            return {name: _plainly(self.table[name].slice(dense, 1))[0] for name in self.table.columns}
        return {}

    def check(self, columns: Mapping[str, Any]) -> None:
        """Refuse columns that the table does not have, and values that are not of their kind."""
        for name, value in columns.items():
            if name not in self.schema:
                raise Refused(422, f"there is no item column {name!r}: there are {', '.join(self.schema)}")
            if value is None:
                continue
            wanted = _kind(self.schema[name])
            given = "boolean" if isinstance(value, bool) else "number" if isinstance(value, (int, float)) else "text"
            if wanted == "list" or (wanted != given and not (wanted == "time" and given == "text")):
                raise Refused(422, f"item column {name!r} holds {wanted}, and {str(value)[:80]!r} is {given}")
            try:
                _typed(name, value, self.schema[name])
            except (pl.exceptions.PolarsError, OverflowError, TypeError, ValueError) as error:
                raise Refused(
                    422, f"{str(value)[:80]!r} is no value of item column {name!r}, which is {self.schema[name]}"
                ) from error

    def put(self, item: int | str, columns: Mapping[str, Any]) -> int:
        """Set columns of an item, which is added where it is new; its dense id."""
        dense = self.find_one(item)
        if dense < 0:
            dense = len(self)
            self._names.append(item)
            self._added[str(item)] = dense
        typed = {}
        for name, value in columns.items():
            with suppress(
                pl.exceptions.PolarsError, OverflowError, TypeError, ValueError
            ):  # put under another run, whose column differs
                if name in self.schema:
                    typed[name] = _typed(name, value, self.schema[name])
        if typed or dense >= len(self.base):
            self.changed[dense] = {**self.row(dense), **typed}
            self._version += 1
        return dense

    def forget(self, dense: int) -> None:
        """Drop what was said of an item that is deleted: put again, it is as the run has it, and what is said then."""
        if self.changed.pop(dense, None) is not None:
            self._version += 1

    def passing(self, where: Conditions) -> np.ndarray:
        """Dense ids of the items for which all conditions hold, ascending."""
        version, known = self._version, self._answers.get(where)
        if known is not None and known[0] == version:
            return known[1]
        test = expression(where, self.schema)
        mask = self._base_masks.get(where)
        if mask is None:
            mask = self._tested(self.table, test, len(self.base))
            _remember(self._base_masks, where, mask)
        changed = dict(self.changed)
        if changed:
            rows = pl.DataFrame(list(changed.values()), schema=self.schema, orient="row")
            passed = self._tested(rows, test, len(rows))
            dense = np.fromiter(changed, np.int64, len(changed))
            whole = np.zeros(max(len(mask), int(dense.max()) + 1), dtype=bool)
            whole[: len(mask)] = mask
            whole[dense] = passed
            mask = whole
        allowed = np.flatnonzero(mask)
        _remember(self._answers, where, (version, allowed))
        return allowed

    @staticmethod
    def _tested(table: pl.DataFrame | None, test: pl.Expr, n: int) -> np.ndarray:
        if table is None:  # no columns at all: only a condition on the title comes so far, and no item has one
            table = pl.DataFrame({"title": pl.Series([None] * n, dtype=pl.String)})
        elif "title" not in table.columns:
            table = table.with_columns(title=pl.lit(None, pl.String))
        return table.select(test.fill_null(False)).to_series().to_numpy()


def _remember(kept: dict[Conditions, Any], key: Conditions, value: Any) -> None:
    if len(kept) >= _KEPT:
        kept.pop(next(iter(kept)), None)
    kept[key] = value


def _plainly(column: pl.Series) -> pl.Series:
    """A column to be shown: single precision as it is written, 5.95 rather than 5.949999809265137."""
    return column.cast(pl.String).cast(pl.Float64) if column.dtype == pl.Float32 else column


def _kind(dtype: Any) -> Kind:
    if isinstance(dtype, (pl.List, pl.Array, pl.Struct)):
        return "list"
    if dtype == pl.Boolean:
        return "boolean"
    if dtype.is_numeric():
        return "number"
    return "time" if dtype.is_temporal() else "text"


def _typed(name: str, value: Any, dtype: Any) -> Any:
    """A value as the column holds it."""
    if value is None or dtype == pl.String:
        return value
    series = pl.Series(name, [value])
    return _plainly(
        series.str.strptime(dtype) if dtype.is_temporal() and isinstance(value, str) else series.cast(dtype)
    )[0]
