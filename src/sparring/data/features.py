"""Features of items and queries as tower inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from sparring.core.errors import UserError
from sparring.data.cache import load_array
from sparring.data.pairs import within

FeatureKind = Literal["categorical", "tags", "numeric", "vector"]


@dataclass(frozen=True)
class TagColumn:
    """A column with any number of values per row, as codes; a row without a known value has the code 0."""

    codes: np.ndarray  # (n, L) int32, -1 after the last value of a row
    cardinality: int  # codes, 0 included


@dataclass(frozen=True)
class Features:
    """Categorical codes, tags and dense numbers of n ids; row i describes dense id i.

    Code 0 of a categorical column stands for a missing or rare value. Features of the same ids are joined with `+`.

        Features.from_table(items, ["category", "price"]) + Features.from_array("images.npy")
    """

    categorical: np.ndarray  # (n, F) int32, 0 = missing or rare
    cardinalities: tuple[int, ...]  # (F,) codes of each column, 0 included
    dense: np.ndarray  # (n, Fd) float32
    names: tuple[str, ...]  # columns: the categorical ones, then the dense ones, then the tags
    tags: tuple[TagColumn, ...] = ()

    def __len__(self) -> int:
        return len(self.categorical)

    @classmethod
    def from_table(
        cls, table: pl.DataFrame, columns: Sequence[str] | Mapping[str, FeatureKind], min_count: int = 1
    ) -> Features:
        """Features from columns of a table.

        By type: text, booleans and integers are categorical (coded from 1 by descending frequency; values seen fewer
        than min_count times are rare); other numbers and dates are standardised to mean 0 and deviation 1; lists of
        text or integers are tags, coded like categories; lists of other numbers, and arrays, are unchanged vectors.
        Missing numbers are 0. Pass {column: kind} where the type misleads, as for an integer price.
        """
        kinds = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns)
        for name in kinds:
            if name not in table.columns:
                raise UserError(f"there is no column {name!r}: the table has {', '.join(table.columns)}")
        codes: dict[str, np.ndarray] = {}
        dense: dict[str, np.ndarray] = {}
        tags: dict[str, TagColumn] = {}
        for name, given in kinds.items():
            column = table[name]
            kind = given or _kind(column)
            if kind == "categorical":
                codes[name] = _codes(column, min_count)
            elif kind == "tags":
                tags[name] = _tags(column, min_count)
            elif kind == "numeric":
                dense[name] = _standardised(column)
            elif kind == "vector":
                dense[name] = _vectors(column)
            else:
                kinds_known = "'categorical', 'tags', 'numeric' or 'vector'"
                raise UserError(f"column {name!r} cannot be {kind!r}: use {kinds_known}")
        n = table.height
        return cls(
            categorical=np.stack(list(codes.values()), axis=1) if codes else np.zeros((n, 0), np.int32),
            cardinalities=tuple(int(values.max(initial=0)) + 1 for values in codes.values()),
            dense=np.concatenate(list(dense.values()), axis=1) if dense else np.zeros((n, 0), np.float32),
            names=(*codes, *dense, *tags),
            tags=tuple(tags.values()),
        )

    @classmethod
    def from_array(cls, array: np.ndarray | str | Path, name: str = "vector") -> Features:
        """Dense vectors (n, Fd) of any number type, or the path of a `.npy` file of them; converted to float32."""
        raw = array if isinstance(array, np.ndarray) else load_array(Path(array))
        if raw.ndim != 2 or raw.dtype.kind not in "fiub":
            raise UserError(
                f"{name} must be a table of numbers with one row per id, not {raw.dtype} of shape {raw.shape}"
            )
        dense = np.array(raw, dtype=np.float32)
        if not np.isfinite(dense).all():
            row = int(np.flatnonzero(~np.isfinite(dense).all(1))[0])
            raise UserError(f"{name} holds a value that is not finite in row {row}: fill it first, for instance with 0")
        return cls(np.zeros((len(dense), 0), np.int32), (), dense, (name,))

    def __add__(self, other: Features) -> Features:
        """Both sets of columns, for the same ids."""
        if len(self) != len(other):
            raise UserError(f"features of {len(self):,} ids cannot be joined with features of {len(other):,}")
        (mine, my_dense, my_tags), (theirs, their_dense, their_tags) = self._kinds(), other._kinds()
        return Features(
            categorical=np.concatenate([self.categorical, other.categorical], axis=1),
            cardinalities=self.cardinalities + other.cardinalities,
            dense=np.concatenate([self.dense, other.dense], axis=1),
            names=mine + theirs + my_dense + their_dense + my_tags + their_tags,
            tags=self.tags + other.tags,
        )

    def _kinds(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The names of categorical, dense and tag columns."""
        codes, tags = len(self.cardinalities), len(self.names) - len(self.tags)
        return self.names[:codes], self.names[codes:tags], self.names[tags:]


_WORDS = (pl.String, pl.Categorical, pl.Enum)


def _kind(column: pl.Series) -> FeatureKind:
    dtype: Any = column.dtype
    if isinstance(dtype, pl.List) and (dtype.inner.is_integer() or dtype.inner in _WORDS):
        return "tags"
    if isinstance(dtype, (pl.List, pl.Array)):
        return "vector"
    if dtype.is_integer() or dtype in _WORDS or dtype == pl.Boolean:
        return "categorical"
    if dtype.is_numeric() or dtype.is_temporal():
        return "numeric"
    raise UserError(
        f"column {column.name!r} of type {dtype} is no feature: give text, numbers, dates or lists of numbers"
    )


def value_codes(column: pl.Series, min_count: int = 1) -> pl.DataFrame:
    """The values of a column, or of its lists, as text, and their codes from 1 by descending frequency, then by value.

    Missing and empty values, and those seen fewer than min_count times, have none.
    """
    values = column.drop_nulls().explode() if isinstance(column.dtype, pl.List) else column
    known = _as_text(values).to_frame().drop_nulls().group_by("value").len().filter(pl.col("len") >= min_count)
    known = known.sort(["len", "value"], descending=[True, False]).with_row_index("code", offset=1)
    return known.select("value", pl.col("code").cast(pl.Int32))


def _codes(column: pl.Series, min_count: int) -> np.ndarray:
    """The codes of a column's values (value_codes); 0 for those without one."""
    if isinstance(column.dtype, (pl.List, pl.Array, pl.Struct)):
        raise UserError(f"column {column.name!r} of type {column.dtype} cannot be categorical: give one value per row")
    frame = _as_text(column).to_frame()
    coded = frame.join(value_codes(column, min_count), on="value", how="left", maintain_order="left")
    return coded["code"].fill_null(0).to_numpy()


def _as_text(column: pl.Series) -> pl.Series:
    present = column.fill_nan(None) if column.dtype.is_float() else column
    return present.cast(pl.String).replace("", None).rename("value")


def _tags(column: pl.Series, min_count: int) -> TagColumn:
    """The distinct codes of each row in ascending order; the code 0 alone where no value is known."""
    dtype: Any = column.dtype
    if not isinstance(dtype, (pl.List, pl.Array)):
        raise UserError(f"column {column.name!r} of type {dtype} cannot be tags: give lists of values")
    lists = column.arr.to_list() if isinstance(dtype, pl.Array) else column
    length = lists.list.len().fill_null(0)
    codes = _codes(lists.filter(length > 0).explode(), min_count)
    row = np.repeat(np.arange(len(column)), length.to_numpy())[codes > 0]
    without = np.flatnonzero(np.bincount(row, minlength=len(column)) == 0)
    pairs = np.concatenate([np.stack([row, codes[codes > 0]], 1), np.stack([without, 0 * without], 1)])
    pairs = np.unique(pairs, axis=0)
    count = np.bincount(pairs[:, 0], minlength=len(column))
    place = within(count)
    padded = np.full((len(column), int(count.max(initial=1))), -1, np.int32)
    padded[pairs[:, 0], place] = pairs[:, 1]
    return TagColumn(padded, int(codes.max(initial=0)) + 1)


def _standardised(column: pl.Series) -> np.ndarray:
    """(n, 1) float32 of mean 0 and deviation 1 over the finite values; 0 elsewhere."""
    if not (column.dtype.is_numeric() or column.dtype.is_temporal() or column.dtype == pl.Boolean):
        raise UserError(f"column {column.name!r} of type {column.dtype} cannot be numeric: give numbers or dates")
    number = column.dt.epoch("us") if column.dtype in (pl.Date, pl.Datetime) else column
    values = number.to_physical().cast(pl.Float64).fill_null(float("nan")).to_numpy()
    present = np.isfinite(values)
    if not present.any():
        return np.zeros((len(values), 1), np.float32)
    # By a power of two, which is exact: squares of large numbers would overflow.
    values = np.ldexp(values, -np.frexp(np.abs(values[present]).max())[1])
    centred = np.where(present, values - values[present].mean(), 0.0)
    deviation = np.sqrt(np.square(centred[present]).mean())
    scale = 1.0 / deviation if deviation > 0 else 0.0
    return (centred * scale).astype(np.float32)[:, None]


def _vectors(column: pl.Series) -> np.ndarray:
    """(n, width) float32 from lists of numbers of one length; 0 where missing or not finite."""
    dtype: Any = column.dtype
    if not isinstance(dtype, (pl.List, pl.Array)) or not dtype.inner.is_numeric():
        raise UserError(f"column {column.name!r} of type {dtype} holds no vectors: give lists of numbers")
    lists = column.arr.to_list() if isinstance(dtype, pl.Array) else column
    widths = lists.list.len().drop_nulls().unique()
    if len(widths) != 1:
        raise UserError(
            f"column {column.name!r} holds lists of {len(widths)} different lengths: give vectors of one length"
        )
    present = lists.is_not_null().to_numpy()
    flat = lists.drop_nulls().list.explode().cast(pl.Float32).fill_null(0.0).to_numpy()
    vectors = np.zeros((len(column), int(widths[0])), np.float32)
    vectors[present] = np.nan_to_num(flat.reshape(-1, vectors.shape[1]), nan=0.0, posinf=0.0, neginf=0.0)
    return vectors
