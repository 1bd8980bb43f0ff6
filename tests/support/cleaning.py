"""The rules of cleaning as tests that every engine inherits; plain Python over the same rows gives the expectation."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

import polars as pl
import pytest

from sparring.core.errors import UserError
from sparring.data.cleaning import SHORT, clean

NAN, INF = float("nan"), float("inf")
ROLES = {"user": "query", "item": "item", "when": "time", "much": "weight", "stars": "rating"} | {
    "part": "split",
    "clicked": "label",
}
COLUMNS = {
    "user": ["a", None, "b", "c", "a", "", "d"],
    "item": [1.0, 2.0, NAN, 4.0, 5.0, 6.0, 7.0],
    "when": [3, 1, 4, None, 5, 9, -2],
    "much": [0.5, 1.0, 2.0, 3.0, NAN, None, 0.0],
    "stars": [4, 5, 5, 5, 4, None, 3],
    "part": ["train", "test", "val", "0", " Valid", "1.0", "TEST"],
    "clicked": [True, False, True, True, False, True, True],
}


def missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


class CleaningContract:
    """Inherit, and define `rows(frame)`, the unread rows of an engine, and `collect(rows)`, their columns as lists."""

    rows: Callable[[pl.DataFrame], Any]
    collect: Callable[[Any], dict[str, list]]

    def cleaned(self, columns: dict[str, Any], **options: Any) -> tuple[dict[str, list], list[str]]:
        """Columns and notes of cleaning a table whose column names are the keys of ROLES."""
        frame = pl.DataFrame(columns).rename({name: SHORT[ROLES[name]] for name in columns})
        roles = {ROLES[name]: name for name in columns}
        rows, notes = clean(self.rows(frame), roles, options, "the test")  # type: ignore[arg-type]
        return self.collect(rows), notes

    @pytest.mark.parametrize("lowest", [None, 4, 3.5, -INF])
    def test_rows_are_kept_as_in_plain_python(self, lowest: float | None) -> None:
        """Rows need two ids and, with a threshold, a sufficient rating; dropped and filled rows are counted."""
        names = [name for name in COLUMNS if name != "stars" or lowest is not None]
        rows = [
            dict(zip(names, values, strict=True)) for values in zip(*(COLUMNS[name] for name in names), strict=True)
        ]
        with_ids = [row for row in rows if not missing(row["user"]) and not missing(row["item"])]
        left = [row for row in with_ids if lowest is None or (row["stars"] is not None and row["stars"] >= lowest)]
        undated = [row for row in left if row["when"] is None]
        codes = {"train": 0, "0": 0, "val": 1, " Valid": 1, "1.0": 1, "test": 2, "TEST": 2}
        got, notes = self.cleaned({name: COLUMNS[name] for name in names}, min_rating=lowest)
        assert set(got) == {"q", "i", "t", "w", "s", "l"}
        assert got["q"] == [row["user"] for row in left]
        assert got["i"] == [row["item"] for row in left]
        assert got["t"] == [row["when"] for row in left]
        assert got["w"] == [None if missing(row["much"]) else row["much"] for row in left]
        assert got["s"] == [codes[row["part"]] for row in left]
        assert got["l"] == [int(row["clicked"]) for row in left]
        dropped = [len(rows) - len(with_ids), len(with_ids) - len(left), len(undated)]
        dropped.append(sum(missing(row["much"]) for row in left))
        counted = [next(word for word in note.split() if word.isdigit()) for note in notes]
        assert counted == [str(n) for n in dropped if n]

    @pytest.mark.parametrize(
        ("times", "want"),
        [
            ([1.5, NAN, -2.0], [1.5, None, -2.0]),
            ([date(2020, 2, 29), None, date(1969, 12, 31)], [18321 * 86400 * 10**6, None, -86400 * 10**6]),
            ([datetime(2020, 2, 29, 1, 2, 3, 4), None, datetime(1969, 12, 31)], [1582938123000004, None, -86400000000]),
        ],
    )
    def test_times_are_numbers(self, times: list, want: list) -> None:
        """Numbers stay as they are, dates and timestamps become microseconds since 1970, and NaN is no time."""
        got, _ = self.cleaned({"user": ["a", "b", "c"], "item": [1, 2, 3], "when": times})
        assert got["t"] == want

    def test_a_column_of_null_times(self) -> None:
        """A guessed time column without any time is ignored; a named one is an error."""
        columns = {"user": ["a", "b"], "item": [1, 2], "when": pl.Series([None, None], dtype=pl.Int64)}
        got, notes = self.cleaned(columns)
        assert got == {"q": ["a", "b"], "i": [1, 2]}
        assert len(notes) == 1
        with pytest.raises(UserError, match="nulls only"):
            self.cleaned(columns, time="when")

    @pytest.mark.parametrize(
        ("columns", "options", "keyword"),
        [
            ({"much": [1.0, -3.0]}, {}, "-3"),
            ({"much": [1.0, INF]}, {}, "finite"),
            ({"much": [date(2020, 1, 1)] * 2}, {}, "numbers"),
            ({"much": ["1", "much"]}, {}, "number"),
            ({"when": [True, False]}, {}, "dates"),
            ({"when": ["5", "noon"]}, {}, "date"),
            ({"when": [1.0, -INF]}, {}, "finite"),
            ({"part": ["train", "later"]}, {}, "'later'"),
            ({"part": ["train", None]}, {}, "null"),
            ({"clicked": [1, 7]}, {}, "'7'"),
            ({"user": [[1], [2]]}, {}, "not ids"),
            ({"user": pl.Series([None, None], dtype=pl.String)}, {}, "'user'"),
            ({"stars": [1, 2]}, {"min_rating": 9}, "at least 9"),
            ({"user": pl.Series([], dtype=pl.String), "item": pl.Series([], dtype=pl.Int64)}, {}, "empty"),
        ],
    )
    def test_bad_columns_are_refused_in_one_line(self, columns: dict, options: dict, keyword: str) -> None:
        """Values that no rule allows are named in one line."""
        with pytest.raises(UserError, match=keyword) as caught:
            self.cleaned({"user": ["a", "b"], "item": [1, 2], **columns}, **options)
        assert "\n" not in str(caught.value)
