"""Histories: the items of every query, oldest first, and the batches that are made of them.

A place is an index into the flat array of all histories. The interaction at a place is predicted from the places before
it that belong to the same query.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.types import Ranks
from sparring.data.batches import Columns, RandomBatches
from sparring.data.interactions import Interactions, Split
from sparring.data.pairs import undated, within


@dataclass(frozen=True)
class Histories:
    """The items of every query, oldest first, as one flat array with offsets (CSR)."""

    start: Tensor  # (queries + 1,) int64
    items: Tensor  # (places,) int32
    time: Tensor | None = None  # (places,) int64; None: the order is known, or nothing is
    ordered: bool = True  # whether places are in time order; if not, a history is a set
    pairs: Tensor | None = None  # (places,) int64: the row of the interactions at each place

    def latest(self, n: int) -> Histories:
        """The last n items of every query."""
        count = self.start.diff()
        age = torch.repeat_interleave(self.start[1:], count) - torch.arange(len(self.items))  # 1 = the most recent
        keep = age <= n
        start = torch.cat([self.start.new_zeros(1), count.clamp(max=n).cumsum(0)])
        time, pairs = (None if column is None else column[keep] for column in (self.time, self.pairs))
        return Histories(start, self.items[keep], time, self.ordered, pairs)


def histories(interactions: Interactions, last: int | None = None) -> Histories:
    """The items of each query in time order, repeats included; ties, and rows without times, in the order of the rows.

    With `last`, only the most recent items of each query are kept.
    """
    if last is not None and last < 1:
        raise UserError(f"last {last} must be at least 1 item of history")
    queries = np.asarray(interactions.queries)
    if interactions.time is None:
        order = np.argsort(queries, kind="stable")
    else:
        order = np.lexsort((interactions.time, queries))
    count = np.bincount(queries, minlength=interactions.n_queries)
    start = torch.from_numpy(np.concatenate([[0], np.cumsum(count)]))
    items = torch.from_numpy(np.asarray(interactions.items)[order].astype(np.int32, copy=False))
    time = None
    if interactions.time is not None and not interactions.is_order:
        moments = np.asarray(interactions.time)[order]
        time = torch.from_numpy(np.where(undated(moments), 0, moments).astype(np.int64))
    past = Histories(start, items, time, interactions.time is not None, torch.from_numpy(order))
    return past if last is None else past.latest(last)


def past_of(split: Split, part: str) -> Histories:
    """The histories that rank a part: of train for "valid"; of train and valid, which came before it, for "test"."""
    return histories(split.train if part == "valid" else split.joined().train)


class Before(NamedTuple):
    """The context of rows that are single interactions: everything that came before their places."""

    places: Tensor  # (R,)

    def own(self, ranks: Ranks) -> Before:
        """The context of this rank's rows."""
        return Before(ranks.own(self.places))


class Windows(NamedTuple):
    """The context of rows that are positions of sequences: sequences side by side in windows of fixed width.

    A window holds several short sequences, each whole and in order, so that little of it is empty. The row i is
    predicted from the sequence up to slot `slots[i]` of the flattened windows.
    """

    places: Tensor  # (W, L), -1 where empty
    slots: Tensor  # (R,)

    def own(self, ranks: Ranks) -> Windows:
        return Windows(self.places, ranks.own(self.slots))


class Given(NamedTuple):
    """The context of rows that are items of sets: the items that are given, each for the set that it belongs to."""

    places: Tensor  # (G,) of the given items
    owners: Tensor  # (G,) the set of each
    rows: Tensor  # (R,) the set of each row
    queries: Tensor  # (S,) the query of each set; more sets than there are, where a shape must not depend on the data

    @property
    def sets(self) -> int:
        return len(self.queries)

    def each_once(self) -> Given:
        """The context of the sets themselves as rows."""
        return self._replace(rows=torch.arange(self.sets, device=self.rows.device))

    def own(self, ranks: Ranks) -> Given:
        return self._replace(rows=ranks.own(self.rows))


Context = Before | Windows | Given


class SequenceBatches(RandomBatches):
    """Positions of sequences as rows: every query's last `length` positions once per epoch, `batch_size` per step.

    Queries come in random order, and the positions of a query follow each other, so most of a query's positions share a
    batch. Where a batch ends within a query, the next one begins with the rest of its positions and reads the items
    before them again. A query needs two items.

        for places, slots, windows in SequenceBatches(past, 50, 2048).steps(0): ...
    """

    def __init__(self, past: Histories, length: int, batch_size: int, seed: int = 0) -> None:
        start = past.start.numpy()
        count = np.minimum(np.diff(start) - 1, length)
        self.queries = np.flatnonzero(count > 0)
        if not len(self.queries):
            raise UserError("sequences need a query with at least two items, and none has")
        self.count = count[self.queries]
        self.first = start[self.queries + 1] - self.count  # the place of the first target
        super().__init__(int(self.count.sum()), batch_size, seed)
        self.length = length
        # Recorded steps need one shape: as many windows as the fullest batch of an epoch, and a few more.
        most = max(len(windows) for _, windows in self._plan(0, 0))
        self.windows = most + max(1, most // 32)

    @property
    def largest_group(self) -> int:
        return int(self.count.max())

    def steps(self, epoch: int, start_step: int = 0, device: torch.device | str = "cpu") -> Iterator[Columns]:
        """(places of the rows (R,), their slots (R,), windows (W, L)) of each step from start_step on."""
        self._check_start(start_step)
        recorded = torch.device(device).type == "cuda"
        for rows, windows in self._plan(epoch, start_step):
            if recorded and len(windows) < self.windows:
                windows = np.concatenate([windows, np.full((self.windows - len(windows), self.length), -1)])
            columns = (torch.from_numpy(column) for column in (*rows, windows))
            # A copy from pageable memory waits for the step before it; with pinned ones the next step is planned
            # meanwhile.
            yield tuple(
                (column.pin_memory() if recorded else column).to(device, non_blocking=True) for column in columns
            )

    def _plan(self, epoch: int, start_step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each step: rows (2, R), the places of targets and their slots; windows (W, L) of places of inputs."""
        order = torch.randperm(len(self.queries), generator=self._generator(epoch)).numpy()
        count, first = self.count[order], self.first[order]
        end = np.cumsum(count)
        for low in range(start_step * self.batch_size, self.n_rows, self.batch_size):
            high = min(low + self.batch_size, self.n_rows)
            chosen = slice(np.searchsorted(end, low, side="right"), np.searchsorted(end, high, side="left") + 1)
            begin = end[chosen] - count[chosen]
            skip = np.maximum(low - begin, 0)  # targets of the batch before
            stop = np.minimum(high - begin, count[chosen])  # inputs that are read
            window, column, n = best_fit(stop, self.length)
            owner = np.repeat(np.arange(len(stop)), stop)
            place = within(stop)
            slot = (window * self.length + column)[owner] + place
            places = first[chosen][owner] + place  # of the targets
            windows = np.full(n * self.length, -1)
            windows[slot] = places - 1
            kept = place >= skip[owner]
            yield np.stack([places[kept], slot[kept]]), windows.reshape(n, self.length)


class SetBatches(RandomBatches):
    """Items of sets as rows: the items of each query once per epoch, at most `most` of them, `slots` per step.

    Queries come in random order, and the items of a query follow each other. A set that does not fit into what is left
    of a batch is cut in two. Of a query with more items, an epoch takes `most` at random.

        for places, owners in SetBatches(past, 200, 4096).steps(0): ...
    """

    def __init__(self, past: Histories, most: int, slots: int, seed: int = 0) -> None:
        self.start, self.most = past.start.numpy(), most
        self.count = np.minimum(np.diff(self.start), most)
        super().__init__(int(self.count.sum()), slots, seed)

    @property
    def largest_group(self) -> int:
        return int(self.count.max())

    def steps(self, epoch: int, start_step: int = 0, device: torch.device | str = "cpu") -> Iterator[Columns]:
        """(places (S,), the set of each (S,) from 0) of each step from start_step on."""
        self._check_start(start_step)
        generator = self._generator(epoch)
        order = torch.randperm(len(self.count), generator=generator).numpy()
        taken = np.diff(self.start)[order]
        rank = np.repeat(np.arange(len(order)), taken)  # of the query of each place
        place = within(taken)
        places = self.start[order][rank] + place
        if len(places) > self.n_rows:
            mixed = np.lexsort((torch.rand(len(places), generator=generator, dtype=torch.float64).numpy(), rank))
            kept = mixed[place < self.most]
            places, rank = places[kept], rank[kept]
        for low in range(start_step * self.batch_size, self.n_rows, self.batch_size):
            step = slice(low, low + self.batch_size)
            owners = rank[step] - rank[low]
            owners = np.cumsum(np.diff(owners, prepend=0) > 0)  # queries without items leave gaps
            yield tuple(torch.from_numpy(column).to(device, non_blocking=True) for column in (places[step], owners))


def check_sequences(train: Interactions) -> None:
    """Refuse training data that has no rows of sequences: no order, or no query with two items."""
    if train.time is None:
        raise UserError("rows=sequences needs an order, and the data has no times: name their column", "time")
    if not rows_per_query(train, "sequences", 1).any():
        raise UserError("rows=sequences needs a query with at least two items in the training part, and none has")


def rows_per_query(train: Interactions, rows: str, most: int) -> np.ndarray:
    """(queries,) the rows that each query gives an epoch; sequences and sets have at most `most`."""
    count = np.bincount(train.queries, minlength=train.n_queries)
    if rows == "pairs":
        return count
    if rows == "queries":
        return np.minimum(count, 1)
    return np.minimum(count if rows == "sets" else np.maximum(count - 1, 0), most)


def target_shares(train: Interactions, rows: str, most: int) -> np.ndarray:
    """(pairs,) how often a pair is the positive of a row in an epoch, for rows of sequences and sets."""
    if rows == "sets":
        return (rows_per_query(train, rows, most) / np.maximum(rows_per_query(train, "pairs", most), 1))[train.queries]
    past = histories(train)
    assert past.pairs is not None
    count = past.start.diff().numpy()
    age = np.repeat(past.start[1:].numpy(), count) - np.arange(len(train))  # 1 = the most recent
    shares = np.zeros(len(train))
    shares[past.pairs.numpy()] = age <= np.minimum(most, np.repeat(count, count) - 1)  # the first predicts nothing
    return shares


def best_fit(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Pack pieces into windows of a width, the longest first, each where it leaves least room.

    Returns the window and the first column of each piece, and the number of windows.
    """
    window, column = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    free: list[tuple[int, int]] = []  # (room, window), ascending
    n = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        place = bisect.bisect_left(free, (length, -1))
        if place < len(free):
            room, which = free.pop(place)
        else:
            room, which, n = width, n, n + 1
        window[piece], column[piece] = which, width - room
        if room > length:
            bisect.insort(free, (room - length, which))
    return window, column, n
