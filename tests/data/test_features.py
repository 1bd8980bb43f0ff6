"""Feature columns and histories against loops."""

from __future__ import annotations

import datetime
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from sparring.core.errors import UserError
from sparring.data.features import Features

TABLE = pl.DataFrame(
    {
        "colour": ["red", "blue", None, "red", "", "green", "blue", "red"],
        "shop": [30, 4, 4, None, 30, 7, 30, 30],
        "price": [1.5, None, 3.0, float("nan"), 9.5, float("inf"), 2.0, 4.0],
        "flat": [2.5] * 8,
        "none": pl.Series([None] * 8, dtype=pl.Float64),
        "day": [datetime.date(2024, 1, d) if d else None for d in (1, 5, 0, 9, 2, 2, 2, 3)],
        "image": [[1.0, 2.0], None, [3.0, None], [5.0, 6.0], [0.5, float("nan")], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]],
    }
)


def codes_by_loop(values: list[object], min_count: int) -> list[int]:
    """1, 2, ... by descending count, then by value as text; 0 for missing and rare values."""
    present = [str(v) for v in values if v is not None and v != ""]
    order = sorted({v for v in present if present.count(v) >= min_count}, key=lambda v: (-present.count(v), v))
    return [0 if v is None or str(v) not in order else order.index(str(v)) + 1 for v in values]


@pytest.mark.parametrize("min_count", [1, 2, 3, 9])
def test_categorical_codes_equal_a_loop(min_count: int) -> None:
    """Text and integers are coded by descending frequency; null, empty and rare values are 0."""
    features = Features.from_table(TABLE, ["colour", "shop"], min_count=min_count)
    for at, name in enumerate(("colour", "shop")):
        want = codes_by_loop(TABLE[name].to_list(), min_count)
        assert features.categorical[:, at].tolist() == want
        assert features.cardinalities[at] == max(want) + 1
    assert features.categorical.dtype == np.int32
    assert features.dense.shape == (8, 0)
    assert len(features) == 8


def test_codes_do_not_depend_on_the_text_type() -> None:
    """Categorical, Enum and String columns with the same values get the same codes, in any row order."""
    frame = pl.DataFrame({"c": ["b", "a", "b", "c", "a", None]})
    want = Features.from_table(frame, ["c"]).categorical
    for dtype in (pl.Categorical, pl.Enum(["c", "b", "a"])):
        assert np.array_equal(Features.from_table(frame.with_columns(pl.col("c").cast(dtype)), ["c"]).categorical, want)
    assert np.array_equal(Features.from_table(frame.reverse(), ["c"]).categorical, want[::-1])


@pytest.mark.parametrize("name", ["price", "day"])
def test_numbers_are_standardised_over_what_is_present(name: str) -> None:
    """Finite values have mean 0 and deviation 1; all others become the mean, 0."""
    raw = [v.toordinal() if isinstance(v, datetime.date) else v for v in TABLE[name].to_list()]
    there = [v for v in raw if v is not None and math.isfinite(v)]
    mean = sum(there) / len(there)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in there) / len(there))
    want = [(v - mean) / deviation if v is not None and math.isfinite(v) else 0.0 for v in raw]
    got = Features.from_table(TABLE, [name]).dense
    assert got.dtype == np.float32
    assert got[:, 0].tolist() == pytest.approx(want, abs=1e-6)


def test_a_constant_or_empty_number_says_nothing() -> None:
    """A constant column and an empty one give zeros, never nan."""
    assert not Features.from_table(TABLE, ["flat", "none"]).dense.any()


def test_large_and_small_numbers_are_standardised() -> None:
    """Numbers whose squares leave the range of floats have mean 0 and deviation 1 like any other."""
    for size in (1e300, 1e-200):
        dense = Features.from_table(pl.DataFrame({"x": [size, -size, None]}), ["x"]).dense
        assert dense[:, 0].tolist() == pytest.approx([1, -1, 0])


def test_a_kind_can_be_given() -> None:
    """An integer column can be numeric and a fractional one categorical."""
    features = Features.from_table(TABLE, {"shop": "numeric", "price": "categorical"})
    there = [30, 4, 4, 30, 7, 30, 30]
    mean = sum(there) / 7
    deviation = math.sqrt(sum((v - mean) ** 2 for v in there) / 7)
    want = [0.0 if v is None else (v - mean) / deviation for v in TABLE["shop"].to_list()]
    assert features.dense[:, 0].tolist() == pytest.approx(want, abs=1e-6)
    assert features.categorical[3, 0] == 0
    assert features.names == ("price", "shop")


@pytest.mark.parametrize("dtype", [pl.List(pl.Float64), pl.List(pl.Float32), pl.Array(pl.Float32, 2)])
def test_vectors_are_taken_as_they_are(dtype: pl.DataType) -> None:
    """Lists of equal length are kept; missing lists, missing numbers and nan are 0."""
    got = Features.from_table(TABLE.with_columns(pl.col("image").cast(dtype)), ["image"]).dense
    assert got.tolist() == [[1, 2], [0, 0], [3, 0], [5, 6], [0.5, 0], [1, 1], [2, 2], [3, 3]]


def test_arrays_and_files_are_read_as_float32(tmp_path: Path) -> None:
    """float16 and integer arrays, in memory or in a .npy file, are read as float32."""
    array = np.arange(6).reshape(3, 2)
    np.save(tmp_path / "v.npy", array.astype(np.float16))
    for source in (array, array.astype(np.float16), tmp_path / "v.npy", str(tmp_path / "v.npy")):
        features = Features.from_array(source)
        assert features.dense.dtype == np.float32
        assert features.dense.tolist() == array.tolist()


def test_joined_features_keep_every_column() -> None:
    """a + b has the codes, sizes and numbers of both, and names in the same order as the columns."""
    a, b = Features.from_table(TABLE, ["colour", "price"]), Features.from_table(TABLE, ["shop", "image"])
    both, at_once = a + b, Features.from_table(TABLE, ["colour", "shop", "price", "image"])
    assert both.names == at_once.names == ("colour", "shop", "price", "image")
    assert both.cardinalities == at_once.cardinalities
    assert np.array_equal(both.categorical, at_once.categorical)
    assert np.array_equal(both.dense, at_once.dense)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    """Each error names the bad value and the valid ones."""
    (tmp_path / "text.npy").write_text("no array")
    cases = [
        (lambda: Features.from_table(TABLE, ["color"]), "no column 'color': the table has colour, shop, price"),
        (lambda: Features.from_table(TABLE, {"colour": "numeric"}), "'colour' of type String cannot be numeric"),
        (lambda: Features.from_table(TABLE, {"image": "categorical"}), "cannot be categorical"),
        (lambda: Features.from_table(TABLE, {"shop": "vector"}), "holds no vectors"),
        (lambda: Features.from_table(TABLE, {"shop": "text"}), "cannot be 'text'"),  # type: ignore[dict-item]
        (lambda: Features.from_table(pl.DataFrame({"v": [[1.0], [1.0, 2.0]]}), ["v"]), "2 different lengths"),
        (lambda: Features.from_table(pl.DataFrame({"v": [["a"], ["b"]]}), {"v": "vector"}), "holds no vectors"),
        (lambda: Features.from_table(TABLE, {"shop": "tags"}), "cannot be tags"),
        (lambda: Features.from_array(tmp_path / "no.npy"), "no.npy"),
        (lambda: Features.from_array(tmp_path / "text.npy"), "text.npy"),
        (lambda: Features.from_array(np.zeros(3)), "one row per id"),
        (lambda: Features.from_array(np.array([[1.0], [np.nan]])), "not finite in row 1"),
        (
            lambda: Features.from_array(np.zeros((3, 1))) + Features.from_array(np.zeros((4, 1))),
            "3 ids cannot be joined",
        ),
    ]
    for make, message in cases:
        with pytest.raises(UserError, match=message) as raised:
            make()
        assert "\n" not in str(raised.value)
