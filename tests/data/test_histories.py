"""Histories in time order, and the batches that are made of them, against loops."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sparring.core.errors import UserError
from sparring.data.histories import Histories, SequenceBatches, SetBatches, best_fit, histories, past_of
from sparring.data.interactions import Interactions, Split, Vocabulary


@dataclass
class Log:
    """The part of Interactions that histories read."""

    queries: np.ndarray
    items: np.ndarray
    time: np.ndarray | None
    n_queries: int
    is_order: bool = False


@pytest.mark.parametrize("last", [None, 1, 3, 100])
@pytest.mark.parametrize("timed", [True, False])
def test_histories_equal_a_loop(timed: bool, last: int | None) -> None:
    """A query's items are oldest first, ties and untimed rows in row order; only the last ones are kept."""
    rng = np.random.default_rng(0)
    queries, items = rng.integers(0, 9, 60).astype(np.int32), rng.integers(0, 20, 60).astype(np.int32)
    time = rng.integers(0, 15, 60) if timed else None
    got = histories(Log(queries, items, time, 11), last)  # type: ignore[arg-type]
    assert len(got.start) == 12
    assert got.start[0] == 0
    assert got.ordered == timed
    for query in range(11):
        rows = [r for r in range(60) if queries[r] == query]
        if time is not None:
            rows.sort(key=lambda r: int(time[r]))
        rows = rows[-last if last else 0 :]
        own = slice(got.start[query], got.start[query + 1])
        assert got.items[own].tolist() == [int(items[r]) for r in rows]
        assert got.pairs is not None
        assert got.pairs[own].tolist() == rows
        if time is not None:
            assert got.time is not None
            assert got.time[own].tolist() == [int(time[r]) for r in rows]


def test_the_test_part_is_ranked_by_train_and_valid() -> None:
    """The validation item comes between the training items and the test item."""
    ids = Vocabulary([0, 1]), Vocabulary(range(6))

    def part(rows: list[tuple[int, int, int]]) -> Interactions:
        q, i, t = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
        return Interactions(q, i, *ids, time=t.astype(np.int64))

    split = Split(part([(0, 3, 1), (0, 1, 2), (1, 5, 9)]), part([(0, 0, 3), (1, 2, 4)]), part([(0, 4, 5)]))
    assert past_of(split, "valid").items.tolist() == [3, 1, 5]
    assert past_of(split, "test").items.tolist() == [3, 1, 0, 2, 5]


def made(lengths: list[int]) -> Histories:
    start = np.cumsum([0, *lengths])
    return Histories(torch.from_numpy(start), torch.arange(start[-1], dtype=torch.int32))


LENGTHS = [3, 0, 1, 12, 2, 5, 7, 4, 2, 9]


@pytest.mark.parametrize(("length", "size"), [(5, 6), (5, 100), (20, 7), (1, 3), (3, 1)])
def test_sequences_have_every_position_once_with_all_that_came_before(length: int, size: int) -> None:
    """An epoch has the last `length` targets of each query once; each reads exactly the inputs before it, in order."""
    past = made(LENGTHS)
    batches = SequenceBatches(past, length, size, seed=3)
    orders = []
    for epoch in (0, 1):
        targets: Counter[int] = Counter()
        steps = list(batches.steps(epoch))
        assert len(steps) == len(batches)
        for number, (places, slots, windows) in enumerate(steps):
            assert len(places) == min(size, batches.n_rows - number * size)
            assert windows.shape[1] == length
            targets.update(places.tolist())
            for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
                row, column = divmod(slot, length)
                owner = int(torch.searchsorted(past.start, place, right=True)) - 1
                first = max(int(past.start[owner]), int(past.start[owner + 1]) - 1 - length)
                before = [int(windows[row, j]) for j in range(column + 1)]
                own = [p for p in before if first <= p < int(past.start[owner + 1])]
                assert own == list(range(first, place))
        wanted = [
            place
            for begin, n in zip(past.start.tolist(), LENGTHS, strict=False)
            for place in range(begin + n - min(n - 1, length), begin + n)
        ]
        assert targets == Counter(wanted)
        orders.append([place for places, _, _ in steps for place in places.tolist()])
    assert orders[0] != orders[1]
    resumed = [tuple(map(torch.Tensor.tolist, step)) for step in batches.steps(1, start_step=len(batches) // 2)]
    assert resumed == [tuple(map(torch.Tensor.tolist, step)) for step in batches.steps(1)][len(batches) // 2 :]


def test_sequences_need_two_items() -> None:
    """Histories of one item have nothing to predict."""
    with pytest.raises(UserError, match="at least two items"):
        SequenceBatches(made([1, 0, 1]), 5, 8)


@pytest.mark.parametrize(("most", "slots"), [(100, 6), (4, 7), (1, 3), (100, 1000)])
def test_sets_have_every_item_once(most: int, slots: int) -> None:
    """An epoch has each query's items once, at most `most`; owners count the sets of a step, items of one in a row."""
    past = made(LENGTHS)
    batches = SetBatches(past, most, slots, seed=1)
    seen: Counter[int] = Counter()
    for places, owners in batches.steps(0):
        assert len(places) == len(owners) <= slots
        query = [int(torch.searchsorted(past.start, place, right=True)) - 1 for place in places.tolist()]
        number = list(dict.fromkeys(query))
        assert owners.tolist() == [number.index(q) for q in query]
        seen.update(places.tolist())
    assert max(seen.values()) == 1
    for begin, n in zip(past.start.tolist(), LENGTHS, strict=False):
        assert sum(seen[place] for place in range(begin, begin + n)) == min(n, most)
    if most == 4:  # other items in another epoch
        assert seen.keys() != {int(place) for step in batches.steps(1) for place in step[0]}


def test_best_fit_wastes_little_and_overlaps_nowhere() -> None:
    """Pieces lie side by side within windows; random lengths fill more than nine tenths."""
    lengths = np.random.default_rng(0).integers(1, 51, 400)
    window, column, n = best_fit(lengths, 50)
    taken = np.zeros((n, 50), int)
    for length, row, first in zip(lengths, window, column, strict=True):
        taken[row, first : first + length] += 1
    assert taken.max() == 1
    assert taken.sum() == lengths.sum()
    assert lengths.sum() / taken.size > 0.9
