"""Users and items found by a few letters of their id or title."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import polars as pl

from sparring.serving.http.served_run import Served

Kind = Literal["user", "item"]
LABELS = ("title", "name", "text")  # the first of these columns names a user or an item
_NO_MATCH = 4


class Finder:
    """Users or items by id or title: an equal id, then ids and titles that begin so, then titles with all the words; most active first."""

    def __init__(self, ids: pl.Series, titles: pl.Series | None, counts: np.ndarray) -> None:
        self.ids, self.titles, self.counts = ids, titles, counts
        self.keys = ids.cast(pl.String).str.to_lowercase()
        self.words = None if titles is None else titles.str.to_lowercase().fill_null("")

    def find(self, text: str, limit: int, without: np.ndarray) -> tuple[list[tuple[int, dict[str, Any]]], int]:
        """At most `limit` of them, each with how well it matches (0 is best), and how many match in all."""
        order = np.full(len(self.ids), _NO_MATCH if text else 0, dtype=np.int8)
        if text:
            if self.words is not None:
                every = np.ones(len(self.ids), dtype=bool)
                for word in text.split():
                    every &= self.words.str.contains(word, literal=True).to_numpy()
                order[every] = 3
                order[self.words.str.starts_with(text).to_numpy()] = 2
            order[self.keys.str.starts_with(text).to_numpy()] = 1
            order[(self.keys == text).to_numpy()] = 0
        order[without] = _NO_MATCH
        at = np.flatnonzero(order < _NO_MATCH)
        total = len(at)
        if total > limit:  # most matches of a short text are never shown, so they are not sorted
            most = int(self.counts.max(initial=0))
            key = (order[at].astype(np.int64) * (most + 1) + most - self.counts[at]) * len(self.ids) + at
            at = at[np.argpartition(key, limit - 1)[:limit]]
        at = at[np.lexsort((at, -self.counts[at], order[at]))]
        return list(zip(order[at].tolist(), self.named(at), strict=True)), total

    def named(self, at: np.ndarray) -> list[dict[str, Any]]:
        titles = [None] * len(at) if self.titles is None else self.titles.gather(pl.Series(at)).to_list()
        rows = zip(self.ids.gather(pl.Series(at)).to_list(), titles, self.counts[at].tolist(), strict=True)
        return [{"id": id, "title": title, "count": count} for id, title, count in rows]


def finder(served: Served, kind: Kind) -> Finder:
    """The users or the items of a run, as the run has them."""
    ids = served.trained.ids
    if kind == "item":
        return Finder(
            ids.item_ids.ids, _titles(ids.item_table), np.bincount(served.seen_items, minlength=len(ids.item_ids))
        )
    return Finder(ids.query_ids.ids, _titles(ids.query_table), np.diff(served.seen_start))


def label(row: Mapping[str, Any]) -> str | None:
    """What an item is called, of all its columns."""
    return next((str(row[name]) for name in LABELS if row.get(name) is not None), None)


def _titles(table: pl.DataFrame | None) -> pl.Series | None:
    name = next((name for name in LABELS if table is not None and name in table.columns), None)
    return None if table is None or name is None else table[name].cast(pl.String)
