"""Filters of a search: excluded ids per query, as positions in the index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sparring.core.types import Positives

Lists = Positives | Sequence[Sequence[int] | np.ndarray]


def positions(ids: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The positions of `asked` in the ascending `ids`, -1 where absent."""
    if not len(ids):
        return np.full(len(asked), -1, dtype=np.int64)
    if ids[0] == 0 and ids[-1] == len(ids) - 1:  # 0..N-1: a row is its id
        return np.where((asked >= 0) & (asked < len(ids)), asked, -1)
    at = np.searchsorted(ids, asked).clip(max=len(ids) - 1)
    return np.where(ids[at] == asked, at, -1)


def present(ids: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The distinct positions of `asked` in `ids`, ascending, without absent ones."""
    at = np.unique(positions(ids, asked))
    return at[at >= 0]


def pairs(exclude: Lists | None, n_queries: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, ids) of the excluded items, rows ascending. Row i of Positives is query i of the batch."""
    if exclude is None:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    if isinstance(exclude, Positives):
        count, ids = np.diff(exclude.start.numpy()), exclude.items.numpy().astype(np.int64)
    else:
        count = np.array([len(items) for items in exclude], dtype=np.int64)
        ids = np.concatenate([np.empty(0, dtype=np.int64), *exclude], dtype=np.int64, casting="unsafe")
    if len(count) != n_queries:
        raise ValueError(f"exclude has {len(count)} lists for {n_queries} queries: give one for each")
    return np.repeat(np.arange(n_queries), count), ids


class Hidden:
    """Distinct pairs (row of the batch, column) that a search may not return."""

    def __init__(self, rows: np.ndarray, columns: np.ndarray, n_rows: int, n_columns: int) -> None:
        self.n_rows, self.n_columns = n_rows, max(n_columns, 1)
        known = columns >= 0
        keys = np.sort(rows[known] * self.n_columns + columns[known]) if len(rows) else rows
        twice = keys[1:] == keys[:-1]
        self.keys = np.delete(keys, np.flatnonzero(twice)) if twice.any() else keys

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def rows(self) -> np.ndarray:
        return self.keys // self.n_columns

    @property
    def columns(self) -> np.ndarray:
        return self.keys % self.n_columns

    def counts(self) -> np.ndarray:
        """(B,) number of hidden columns per row."""
        return np.bincount(self.rows, minlength=self.n_rows)

    def of(self, kept: np.ndarray) -> Hidden:
        """The pairs of some rows, ascending, renumbered."""
        if len(kept) == self.n_rows:
            return self
        at = np.full(self.n_rows, -1)
        at[kept] = np.arange(len(kept))
        rows = at[self.rows]
        return Hidden(rows[rows >= 0], self.columns[rows >= 0], len(kept), self.n_columns)

    def within(self, columns: np.ndarray) -> Hidden:
        """The pairs in some columns, ascending, renumbered."""
        return Hidden(self.rows, positions(columns, self.columns), self.n_rows, len(columns))

    def without(self, columns: np.ndarray) -> Hidden:
        """The pairs without some columns."""
        if not len(self) or not len(columns):
            return self
        kept = ~np.isin(self.columns, columns)
        return Hidden(self.rows[kept], self.columns[kept], self.n_rows, self.n_columns)

    def mask(self, found: np.ndarray) -> np.ndarray:
        """(B, F) bool: whether the columns found for each row are hidden from it."""
        if not len(self.keys):
            return np.zeros(found.shape, dtype=bool)
        key = np.arange(len(found))[:, None] * self.n_columns + found
        return (self.keys[np.searchsorted(self.keys, key).clip(max=len(self.keys) - 1)] == key) & (found >= 0)

    def positives(self, also: np.ndarray) -> Positives | None:
        """The pairs as input of the exact ranking, plus columns hidden from every row."""
        rows, columns = self.rows, self.columns
        if len(also):
            rows = np.concatenate([rows, np.repeat(np.arange(self.n_rows), len(also))])
            columns = np.concatenate([columns, np.tile(also, self.n_rows)])
            order = np.argsort(rows, kind="stable")
            rows, columns = rows[order], columns[order]
        if not len(rows):
            return None
        start = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=self.n_rows))])
        return Positives(torch.from_numpy(start), torch.from_numpy(columns))
