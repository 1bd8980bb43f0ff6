"""The items of a served run: ids, titles and columns, as trained and as changed since."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import orjson
import polars as pl

from sparring.data.interactions import Ids, Vocabulary
from sparring.serving.http.conditions import Conditions, check_column, expression
from sparring.serving.http.schema import RequestError

_CACHE = 32 * 2**20  # bytes of cached filter results
_ENTRY = 512  # bytes that an entry of the cache takes besides its arrays
_WRITTEN = 1 << 16  # items whose JSON is written at a time
_CONVERSION_ERRORS = (pl.exceptions.PolarsError, OverflowError, TypeError, ValueError)
ColumnKind = Literal["text", "number", "boolean", "time", "list"]


class IdLookup:
    """Dense ids of a vocabulary, for a few original ids at a time.

    As in Vocabulary, a text that spells an integer finds it, and an integer finds the text that spells it. Integers are
    found by bisection, texts by bisection of their hashes: 16 bytes per id.

        IdLookup(Vocabulary(["a", "b"])).find(["b", "z"])      # array([1, -1])
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.ids = vocabulary.ids
        if vocabulary.kind == "int":
            self._keys, self._order = self.ids.to_numpy(), None
        else:
            hashes = np.fromiter(map(hash, self.ids), np.int64, len(self.ids))
            self._order = np.argsort(hashes, kind="stable")
            self._keys = hashes[self._order]
        self._sorted = memoryview(self._keys.data)  # bisected in Python: numpy would release the interpreter lock

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Sequence[int | str]) -> np.ndarray:
        """Dense ids, -1 where unknown."""
        return np.fromiter(map(self.find_one, ids), np.int64, len(ids))

    def find_one(self, id: int | str) -> int:
        if self._order is None:
            number = id if isinstance(id, int) else _integer(id)
            if number is None or not len(self._sorted) or number > self._sorted[-1]:
                return -1
            row = number - self._sorted[0]  # a first guess: ids are often consecutive
            if not 0 <= row < len(self._sorted) or self._sorted[row] != number:
                row = bisect_left(self._sorted, number)
            return row if self._sorted[row] == number else -1
        text = str(id)
        key = hash(text)
        row = bisect_left(self._sorted, key)
        while row < len(self._sorted) and self._sorted[row] == key:
            dense = int(self._order[row])
            if self.ids[dense] == text:
                return dense
            row += 1
        return -1

    def original(self, dense: np.ndarray) -> list[int | str]:
        """Original ids of dense ids."""
        if self._order is None:
            return self._keys[dense].tolist()  # type: ignore[no-any-return]
        return self.ids.gather(pl.Series(dense)).to_list()


def _integer(text: str) -> int | None:
    """The integer that a text spells in Python's own notation; '007' and ' 7' are texts."""
    if len(text) > 20 or not text.lstrip("-").isdecimal() or not text.isascii():
        return None
    number = int(text) if text.count("-") <= 1 and text[0] in "-0123456789" else None
    return number if number is not None and str(number) == text else None


class Catalogue:
    """Items by dense id: the run has 0..N-1, added items follow. One thread writes, many read.

    catalogue.find(["espresso"])
    catalogue.put("espresso", {"title": "Espresso", "price": 2.5})
    np.flatnonzero(np.unpackbits(catalogue.passing([("price", "<", 3)])))
    """

    def __init__(self, ids: Ids) -> None:
        self.base = IdLookup(ids.item_ids)
        self.table = ids.item_table
        self.schema: dict[str, Any] = dict(self.table.schema) if self.table is not None else {}
        titled = self.table is not None and "title" in self.schema
        self.titles = _texts(self.table["title"]) if self.table is not None and titled else None
        self.schema.setdefault("title", pl.String)
        self._listed, self._starts = self._write_all()  # one text: an object per item would take twice the memory
        self._relisted: dict[int, bytes] = {}  # the same of changed and added items
        self.changed: dict[int, dict[str, Any]] = {}  # complete rows
        self.version = 0  # grows with every change of a column
        self._added: dict[str, int] = {}
        self._added_ids: list[int | str] = []  # of dense ids from N on
        # by a hash of the conditions, oldest use first: (bits of the run's items, version, bits of all items)
        self._passing: dict[bytes, tuple[np.ndarray, int, np.ndarray]] = {}
        self._cached = 0  # bytes

    def __len__(self) -> int:
        return len(self.base) + len(self._added_ids)

    @property
    def columns(self) -> list[tuple[str, ColumnKind, str]]:
        """(name, kind, type) of every column that a filter may use."""
        return [(name, _kind(dtype), str(dtype)) for name, dtype in self.schema.items()]

    def find_one(self, item: int | str) -> int:
        """The dense id of an item, -1 if it was never known."""
        dense = self.base.find_one(item)
        return dense if dense >= 0 else self._added.get(str(item), -1)

    def find(self, items: Sequence[int | str]) -> np.ndarray:
        return np.fromiter(map(self.find_one, items), np.int64, len(items))

    def original(self, dense: np.ndarray) -> list[int | str]:
        """Original ids of dense ids (n,)."""
        n = len(self.base)
        if not self._added_ids or not len(dense) or int(dense.max()) < n:
            return self.base.original(dense)
        added = dense >= n
        ids: list[int | str] = self.base.original(np.where(added, 0, dense)) if n else [0] * len(dense)
        for row in np.flatnonzero(added).tolist():
            ids[row] = self._added_ids[int(dense[row]) - n]
        return ids

    def listed(self, dense: np.ndarray) -> list[bytes]:
        """The JSON of items (n,) in a list, each from the end of the one before to its score.

        catalogue.listed(np.array([0]))  # [b'},{"id":1042,"title":"A","score":']
        """
        text, others = self._listed, self._relisted
        rows = dense if not self._added_ids else np.minimum(dense, len(self.base) - 1)
        spans = zip(self._starts[rows].tolist(), self._starts[rows + 1].tolist(), strict=True)
        if not others:
            return [text[start:end] for start, end in spans]
        return [others.get(item) or text[start:end] for item, (start, end) in zip(dense.tolist(), spans, strict=True)]

    def _write_all(self) -> tuple[bytes, np.ndarray]:
        """`listed` of all items of the run in one text, and where each begins and the last ends."""
        parts, n = list[bytes](), len(self.base)
        starts = np.zeros(n + 1, np.int64)
        for begin in range(0, n, _WRITTEN):
            end = min(n, begin + _WRITTEN)
            ids = self.base.original(np.arange(begin, end))
            titles = [None] * len(ids) if self.titles is None else self.titles[begin:end].to_list()
            written = list(map(_listed, ids, titles))
            starts[begin + 1 : end + 1] = starts[begin] + np.cumsum([*map(len, written)])
            parts.append(b"".join(written))
        return b"".join(parts), starts

    def values(self, dense: np.ndarray, column: str) -> list[Any]:
        """The values of one column for these items, None where missing."""
        n = len(self.base)
        rows = dense if not self._added_ids else np.where(dense < n, dense, 0)
        if column == "title" and self.titles is not None and n:
            values: list[Any] = self.titles.gather(pl.Series(rows)).to_list()
        elif self.table is not None and column in self.table.columns and n:
            values = _shortest(self.table[column].gather(pl.Series(rows))).to_list()
        else:
            values = [None] * len(dense)
        if self.changed:
            for position, item in enumerate(dense.tolist()):
                row = self.changed.get(item)
                if row is not None:
                    values[position] = _title(row) if column == "title" else row.get(column)
        return values

    def row(self, dense: int) -> dict[str, Any]:
        """All columns of one item, with its changes."""
        row = self.changed.get(dense)
        return self._given(dense) if row is None else row

    def _given(self, dense: int) -> dict[str, Any]:
        """The columns of one item in the run."""
        if self.table is not None and dense < len(self.base):
            one = self.table.slice(dense, 1)
            return {name: _shortest(one[name]).to_list()[0] for name in one.columns}
        return {}

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raise RequestError for unknown columns and for values of the wrong type."""
        for name, value in columns.items():
            check_column(name, self.schema)
            if value is None:
                continue
            wanted = _kind(self.schema[name])
            given = "boolean" if isinstance(value, bool) else "number" if isinstance(value, (int, float)) else "text"
            if wanted == "list" or (wanted != given and not (wanted == "time" and given == "text")):
                raise RequestError(422, f"item column {name!r} expects a {wanted}, not the {given} {str(value)[:80]!r}")
            try:
                _converted(name, value, self.schema[name])
            except _CONVERSION_ERRORS as error:
                message = f"{str(value)[:80]!r} is not a valid {self.schema[name]} for item column {name!r}"
                raise RequestError(422, message) from error

    def put(self, item: int | str, columns: Mapping[str, Any]) -> int:
        """Give an item these columns instead of the run's, adding it if it is new; returns its dense id.

        Earlier changes do not count: `columns` has all of them.
        """
        dense = self.find_one(item)
        if dense < 0:
            dense = len(self)
            self._added_ids.append(item)
            self._added[str(item)] = dense
        converted = {}
        for name, value in columns.items():
            with suppress(*_CONVERSION_ERRORS):  # stored under another run, whose column has another type
                if name in self.schema:
                    converted[name] = _converted(name, value, self.schema[name])
        if converted or dense >= len(self.base):
            row = self.changed[dense] = {**self._given(dense), **converted}
            self._relisted[dense] = _listed(self.original(np.array([dense]))[0], _title(row))
            self.version += 1
        else:
            self.forget(dense)
        return dense

    def forget(self, dense: int) -> None:
        """Drop the changes of an item, which then has the values of the run."""
        if self.changed.pop(dense, None) is not None:
            self.version += 1
            if dense < len(self.base):
                del self._relisted[dense]

    def passing(self, where: Conditions) -> np.ndarray:
        """The bits of the items that meet all conditions, by dense id; `np.unpackbits` gives one byte per item.

        Results are cached up to a number of bytes; a change of items recomputes only the changed rows. Only one thread
        may call it at a time.
        """
        key = blake2b(orjson.dumps(where), digest_size=16).digest()
        version, cached = self.version, self._forget(key)
        if cached is None or cached[1] != version:
            test = expression(where, self.schema)
            base = _bits(self.table, test, len(self.base)) if cached is None else cached[0]
            cached = base, version, self._with_changed(base, test)
        self._passing[key] = cached
        self._cached += _size(cached)
        while self._cached > _CACHE and len(self._passing) > 1:
            self._forget(next(iter(self._passing)))
        return cached[2]

    def _forget(self, key: bytes) -> tuple[np.ndarray, int, np.ndarray] | None:
        entry = self._passing.pop(key, None)
        self._cached -= 0 if entry is None else _size(entry)
        return entry

    def _with_changed(self, base: np.ndarray, test: pl.Expr) -> np.ndarray:
        """The bits of the run's items, with those of changed and added items."""
        changed = dict(self.changed)
        if not changed:
            return base
        rows = pl.DataFrame(list(changed.values()), schema=self.schema, orient="row")
        dense = np.fromiter(changed, np.int64, len(changed))
        mask = np.unpackbits(base, count=max(len(self.base), int(dense.max()) + 1))
        mask[dense] = np.unpackbits(_bits(rows, test, len(rows)), count=len(rows))
        return np.packbits(mask)


def _texts(column: pl.Series) -> pl.Series:
    """A column as texts: the values of a list with commas between them."""
    if isinstance(column.dtype, pl.List | pl.Array):
        return column.cast(pl.List(pl.String)).list.join(", ", ignore_nulls=True)
    return column.cast(pl.String)


def _title(row: Mapping[str, Any]) -> str | None:
    """The title of a changed item as a text, as `titles` has those of the run."""
    text: str | None = _texts(pl.Series([row.get("title")]))[0]
    return text


def _listed(item: int | str, title: str | None) -> bytes:
    return b'},%b,"score":' % orjson.dumps({"id": item, "title": title})[:-1]


def _size(entry: tuple[np.ndarray, int, np.ndarray]) -> int:
    return _ENTRY + entry[0].nbytes + (entry[2].nbytes if entry[2] is not entry[0] else 0)


def _bits(table: pl.DataFrame | None, test: pl.Expr, n: int) -> np.ndarray:
    if table is None:  # the only column that a condition can name is then the title, and no item has one
        table = pl.DataFrame({"title": pl.Series([None] * n, dtype=pl.String)})
    elif "title" not in table.columns:
        table = table.with_columns(title=pl.lit(None, pl.String))
    return np.packbits(table.select(test.fill_null(False)).to_series().to_numpy())


def _shortest(column: pl.Series) -> pl.Series:
    """Single-precision numbers in their shortest notation: 5.95 rather than 5.949999809265137."""
    return column.cast(pl.String).cast(pl.Float64) if column.dtype == pl.Float32 else column


def _kind(dtype: Any) -> ColumnKind:
    if isinstance(dtype, (pl.List, pl.Array, pl.Struct)):
        return "list"
    if dtype == pl.Boolean:
        return "boolean"
    if dtype.is_numeric():
        return "number"
    return "time" if dtype.is_temporal() else "text"


def _converted(name: str, value: Any, dtype: Any) -> Any:
    """A value with the type of its column."""
    if value is None or dtype == pl.String:
        return value
    series = pl.Series(name, [value])
    parse = dtype.is_temporal() and isinstance(value, str)
    return _shortest(series.str.strptime(dtype) if parse else series.cast(dtype))[0]
