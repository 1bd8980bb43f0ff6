"""Cleaning with polars: typed columns, dropped rows, notes, and text that is parsed. Spark inherits the same rules."""

from __future__ import annotations

from typing import Any

import polars as pl

from sparring.data.cleaning import PolarsRows
from support.cleaning import CleaningContract


class TestPolarsRows(CleaningContract):
    def rows(self, frame: pl.DataFrame) -> PolarsRows:
        return PolarsRows(frame.lazy())

    def collect(self, rows: Any) -> dict[str, list]:
        return rows.frame.collect().to_dict(as_series=False)
