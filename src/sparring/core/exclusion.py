"""Exclusions: a query's positive, its other known positives, or a class of items; as index pairs, keys or a mask.

Letters as in types.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sparring.kernels import ExcludedKeys, ExcludedPairs
from sparring.kernels.native import ids as native

_STRIDE = 1 << 40  # row * _STRIDE + item id is unique for every pair of a batch
_LOOKED_UP = 1 << 24  # (query, candidate) pairs; beyond this, listing the known pairs is cheaper than a mask
_WRITTEN_OUT = 1 << 26  # (query, item) pairs that a table of bytes may hold


@dataclass(frozen=True)
class Exclude:
    """Items that never count against a query: pairs (row of the batch, item id), or (row, class of items).

    `rows` ascend; None means one id per query in row order, such as its own positive. With `code` the ids are classes,
    and every item of the class is excluded. `also` adds a second exclusion.
    """

    ids: Tensor  # (P,)
    rows: Tensor | None = None  # (P,), or None: P = B and rows = 0..B-1
    code: Tensor | None = None  # (N,) the class of each item; None: ids are items
    also: Exclude | None = None

    @property
    def name(self) -> str:
        """The excluded items in words."""
        if self.rows is not None:
            words = "all known positives"
        else:
            words = "own positive" if self.code is None else "own positive and its cell"
        return words if self.also is None else f"{words}, {self.also.name}"

    def keyed(self, ids: Tensor) -> bool:
        """Whether `places` returns keys: on a GPU, if each query excludes one item or class of shared candidates."""
        return self.rows is None and self.also is None and ids.is_cuda and ids.dim() == 1

    def places(self, ids: Tensor) -> ExcludedPairs:
        """The excluded pairs for a kernel: `hits`; on a GPU keys or a (B, C) mask, to avoid synchronisation."""
        if self.rows is not None or self.also is not None or not ids.is_cuda:
            return self.hits(ids)
        return ExcludedKeys(self._keys(ids), self.ids) if ids.dim() == 1 else self.mask(ids)

    def mask(self, ids: Tensor) -> Tensor:
        """(B, C) bool: the excluded places among candidate ids (C,) or (B, C); one item or class per query."""
        return self._keys(ids) == self.ids.unsqueeze(1)

    def hits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, columns) of the excluded places among candidate ids (C,) or (B, C); O(P log C), never B x C x P."""
        if self.also is None:
            return self._hits(self._keys(ids))
        row, column = (torch.cat(both) for both in zip(self._hits(self._keys(ids)), self.also.hits(ids), strict=True))
        row, order = torch.sort(row, stable=True)
        return row, column[order]

    def _keys(self, ids: Tensor) -> Tensor:
        return ids if self.code is None else torch.where(ids >= 0, self.code[ids.clamp(min=0)], -1)

    def _hits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if ids.dim() == 2:  # one list per query: look up each candidate among the pairs
            rows = torch.arange(len(self.ids), device=self.ids.device) if self.rows is None else self.rows
            pairs = torch.sort(rows * _STRIDE + self.ids).values
            keys = torch.arange(len(ids), device=ids.device).unsqueeze(1) * _STRIDE + ids
            place = torch.searchsorted(pairs, keys).clamp_(max=max(len(pairs) - 1, 0))
            excluded = (pairs[place] == keys) & (ids >= 0) if len(pairs) else torch.zeros_like(keys) > 0
            row, column = torch.nonzero(excluded, as_tuple=True)
            return row, column
        return native.pairs(ids, self.ids, self.rows)


class Positives:
    """All known positives of every query, as one flat array with offsets (CSR).

    `start` (queries + 1,) holds the offsets, `items` (interactions,) the item ids, sorted within each query.
    """

    def __init__(self, start: Tensor, items: Tensor) -> None:
        self.start, self.items = start, items

    @staticmethod
    def lazy(make: Callable[[], Positives]) -> Positives:
        """Positives that `make` builds when they are first read."""
        return _LazyPositives(make)

    def to(self, device: torch.device) -> Positives:
        """The same positives on a device."""
        return self if self.items.device == device else Positives(self.start.to(device), self.items.to(device))

    def of(self, query_ids: Tensor) -> Exclude:
        """The pairs (row, item) of all known positives of these queries."""
        return KnownPositives(self, query_ids)

    @cached_property
    def keys(self) -> Tensor:
        """(interactions,) query * _STRIDE + item, ascending."""
        queries = torch.repeat_interleave(
            torch.arange(len(self.start) - 1, device=self.start.device), self.start.long().diff()
        )
        return queries * _STRIDE + self.items

    @cached_property
    def table(self) -> Tensor | None:
        """(queries, largest item + 2) bool of known pairs, the last column False; None if large, and on a GPU."""
        queries = len(self.start) - 1
        if self.items.is_cuda or not len(self.items) or queries * (width := int(self.items.max()) + 2) > _WRITTEN_OUT:
            return None
        table = torch.zeros(queries, width, dtype=torch.bool)
        table[torch.repeat_interleave(torch.arange(queries), self.start.long().diff()), self.items.long()] = True
        return table


class _LazyPositives(Positives):
    def __init__(self, make: Callable[[], Positives]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Tensor:  # Python calls it for an attribute that is not set
        if name not in ("start", "items"):
            raise AttributeError(name)
        built = self._make()
        self.start, self.items = built.start, built.items
        return self.start if name == "start" else self.items


class KnownPositives(Exclude):
    """All known positives of some queries, listed only when the pairs are read.

    Candidates of one query are looked up among all known pairs, as a mask (B, C). So are shared candidates on a GPU,
    where listing the known pairs would synchronise, and on a CPU if a table of all pairs is small. Otherwise listing is
    many times cheaper.
    """

    name = "all known positives"

    def __init__(self, positives: Positives, query_ids: Tensor) -> None:
        self.positives, self.query_ids = positives, query_ids

    def _listed(self) -> tuple[Tensor, Tensor]:
        start, items = self.positives.start, self.positives.items
        begin, count = start[self.query_ids], start[self.query_ids + 1] - start[self.query_ids]
        rows = torch.repeat_interleave(torch.arange(len(self.query_ids), device=count.device), count)
        # the offset between a query's first pair in the list of all pairs and in this one
        ahead = begin - (torch.cumsum(count, 0) - count)
        return items[torch.arange(len(rows), device=count.device) + ahead[rows]].long(), rows

    _pairs = cached_property(_listed)

    @property
    def ids(self) -> Tensor:
        return self._pairs[0]

    @property
    def rows(self) -> Tensor:
        return self._pairs[1]

    def keyed(self, ids: Tensor) -> bool:
        return False

    def places(self, ids: Tensor) -> ExcludedPairs:
        few = len(self.query_ids) * len(ids) <= _LOOKED_UP if ids.is_cuda else self.positives.table is not None
        return self.mask(ids) if few or ids.dim() == 2 else self.hits(ids)

    def hits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if ids.dim() == 2 or self.positives.table is not None:
            row, column = torch.nonzero(self.mask(ids), as_tuple=True)
            return row, column
        own, rows = self._pairs
        last = (1 << (16 * len(ids)).bit_length()) - 1  # most known items differ from all candidates in these bits
        among = torch.zeros(last + 1, dtype=torch.bool, device=ids.device)
        among[ids & last] = True
        near = torch.nonzero(among[own & last]).squeeze(1)
        return Exclude(own[near], rows[near]).hits(ids)

    def mask(self, ids: Tensor) -> Tensor:
        table = self.positives.table
        if table is not None:
            last = table.shape[1] - 1
            column = torch.where(ids < 0, last, ids.clamp(max=last))
            if column.dim() == 1:
                return table.index_select(0, self.query_ids).index_select(1, column)
            return table.flatten()[self.query_ids.unsqueeze(1) * (last + 1) + column]
        keys = self.query_ids.long().unsqueeze(1) * _STRIDE + ids
        known = self.positives.keys
        if not len(known):
            return torch.zeros_like(keys, dtype=torch.bool)
        return known[torch.searchsorted(known, keys).clamp_(max=len(known) - 1)] == keys


class KnownQueries(Exclude):
    """The queries of a batch that have the item of a row: all known positives, with rows and columns swapped.

    The candidates are the queries of the batch in order; each row is an item.
    """

    name = "queries with the item"

    def __init__(self, known: Exclude, items: Tensor) -> None:
        self.known, self.items = known, items

    def keyed(self, ids: Tensor) -> bool:
        return False

    def places(self, ids: Tensor) -> ExcludedPairs:
        found = self.known.places(self.items)
        return found.T if isinstance(found, Tensor) else self.hits(ids)

    def mask(self, ids: Tensor) -> Tensor:
        return self.known.mask(self.items).T

    def hits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        queries, items = self.known.hits(self.items)
        items, order = torch.sort(items, stable=True)
        return items, queries[order]
