"""Batches: a permutation per epoch, the same after a resume; for memory-mapped data, blocks shuffled within windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.data import RandomBatches
from sparring.data.batches import BlockBatches, batches_for
from sparring.data.interactions import Interactions, Vocabulary
from sparring.data.pairs import offsets
from sparring.data.prepared.format import ColumnWriter

quick = settings(max_examples=60)
FAR = 2_500_000_000  # a row number that int32 cannot hold


@quick
@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 2**40), st.integers(0, 50))
def test_an_epoch_is_a_permutation(n: int, size: int, seed: int, epoch: int) -> None:
    """Every row occurs once per epoch, in len(batches) batches, all full but the last."""
    batches = RandomBatches(n, size, seed)
    steps = list(batches.epoch(epoch))
    assert len(steps) == len(batches) == (n + size - 1) // size
    assert all(len(step) == size for step in steps[:-1])
    assert all(step.dtype == torch.int64 for step in steps)
    assert sorted(torch.cat(steps).tolist()) == list(range(n))


@quick
@given(st.integers(1, 200), st.integers(1, 32), st.integers(0, 9), st.data())
def test_resuming_gives_the_tail(n: int, size: int, epoch: int, data: st.DataObject) -> None:
    """Starting at a step gives exactly the remaining batches of the full epoch."""
    batches = RandomBatches(n, size, seed=1)
    at = data.draw(st.integers(0, len(batches)))
    whole, tail = list(batches.epoch(epoch)), list(RandomBatches(n, size, seed=1).epoch(epoch, at))
    assert [step.tolist() for step in tail] == [step.tolist() for step in whole[at:]]


def test_seeds_and_epochs_give_different_orders() -> None:
    """All (seed, epoch) pairs, also swapped or shifted ones, give different orders."""
    orders = {
        tuple(torch.cat(list(RandomBatches(50, 50, seed).epoch(epoch))).tolist())
        for seed in range(12)
        for epoch in range(12)
    }
    assert len(orders) == 144


def test_drop_last_leaves_out_the_short_batch() -> None:
    """With drop_last all batches are full."""
    batches = RandomBatches(10, 4, drop_last=True)
    assert [len(step) for step in batches.epoch(0)] == [4, 4]
    assert len(batches) == 2


@pytest.mark.parametrize(("n", "size", "message"), [(0, 4, "n_rows is 0"), (5, 0, "batch_size is 0")])
def test_bad_sizes_name_the_value(n: int, size: int, message: str) -> None:
    """No rows and a zero batch size raise errors with the number."""
    with pytest.raises(UserError, match=message):
        RandomBatches(n, size)
    with pytest.raises(UserError, match="batch_size 9"):
        RandomBatches(5, 9, drop_last=True)
    with pytest.raises(UserError, match="start_step is 3"):
        list(RandomBatches(5, 4).epoch(0, 3))


@quick
@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(0, 2**40),
    st.integers(0, 9),
)
def test_an_epoch_has_every_row_once(n: int, size: int, block: int, window: int, seed: int, epoch: int) -> None:
    """Every row occurs once per epoch, in int64 batches, all full but the last, which drop_last drops."""
    batches = BlockBatches(n, size, seed, block=block, window=window)
    steps = list(batches.epoch(epoch))
    assert len(steps) == len(batches) == (n + size - 1) // size
    assert all(len(step) == size for step in steps[:-1])
    assert all(step.dtype == torch.int64 for step in steps)
    assert sorted(torch.cat(steps).tolist()) == list(range(n))
    if n >= size:
        full = list(BlockBatches(n, size, seed, drop_last=True, block=block, window=window).epoch(epoch))
        assert [step.tolist() for step in full] == [step.tolist() for step in steps[: n // size]]


@quick
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 30), st.integers(1, 6), st.data())
def test_resuming_blocks_gives_the_tail(n: int, size: int, block: int, window: int, data: st.DataObject) -> None:
    """Starting at a step gives the remaining batches of the epoch, wherever windows and batches end."""
    batches = BlockBatches(n, size, 1, block=block, window=window)
    at = data.draw(st.integers(0, len(batches)))
    whole, tail = list(batches.epoch(3)), list(BlockBatches(n, size, 1, block=block, window=window).epoch(3, at))
    assert [step.tolist() for step in tail] == [step.tolist() for step in whole[at:]]


def test_only_a_window_of_blocks_is_in_use() -> None:
    """Each window consists of complete blocks; the order of blocks differs by epoch, the order of rows by window."""
    n, block, window = 1000, 10, 4
    orders, shuffles = set(), set()
    for epoch in range(20):
        rows = torch.cat(list(BlockBatches(n, 16, 0, block=block, window=window).epoch(epoch)))
        found = []
        for first in range(0, n, block * window):
            blocks, counts = np.unique(rows[first : first + block * window].numpy() // block, return_counts=True)
            assert len(blocks) == window
            assert (counts == block).all()
            found.append(tuple(blocks))
            shuffles.add(tuple((rows[first : first + block * window] % block).tolist()))
        orders.add(tuple(found))
    assert len(orders) == 20
    assert len(shuffles) == 20 * n // (block * window)


def test_any_row_may_come_anywhere() -> None:
    """Over many epochs, each row is equally often in the first batch and at each position within its window."""
    n, block, window, epochs = 24, 4, 3, 6000
    batches = BlockBatches(n, 6, 5, block=block, window=window)
    first, place = np.zeros(n), np.zeros(block * window)
    for epoch in range(epochs):
        rows = torch.cat(list(batches.epoch(epoch))).numpy()
        first[rows[:6]] += 1
        place[np.flatnonzero(rows == 7)[0] % (block * window)] += 1
    assert chisquare(first).pvalue > 1e-3
    assert chisquare(place).pvalue > 1e-3


def test_what_fits_into_a_window_is_fully_shuffled() -> None:
    """Up to a window of rows the batches are bitwise those of RandomBatches."""
    mine, full = BlockBatches(120, 16, 3, block=10, window=12), RandomBatches(120, 16, 3)
    assert all(torch.equal(a, b) for a, b in zip(mine.epoch(2), full.epoch(2), strict=True))
    more = BlockBatches(121, 16, 3, block=10, window=12)
    assert any(not torch.equal(a, b) for a, b in zip(more.epoch(2), RandomBatches(121, 16, 3).epoch(2), strict=True))


def test_row_numbers_beyond_int32() -> None:
    """Of five billion rows, batches at the start and in the middle hold distinct rows, also beyond 2^32."""
    batches = BlockBatches(5_000_000_000, 4096, 0, window=64)
    for step in (0, len(batches) // 2):
        rows = next(batches.epoch(0, step))
        assert len(rows.unique()) == 4096
        assert int(rows.min()) >= 0
        assert 2**32 < int(rows.max()) < 5_000_000_000
    last = list(batches.epoch(0, len(batches) - 2))
    assert [len(rows) for rows in last] == [4096, 5_000_000_000 % 4096]


def test_columns_beyond_int32(tmp_path: Path) -> None:
    """A column of three billion rows can be written and mapped; items beyond row 2^31 are found."""
    column = ColumnWriter(
        tmp_path / "items.npy", np.dtype(np.int32), 3_000_000_000
    )  # sparse: it takes a few blocks of the disk
    column.put(FAR, np.array([3, 5, 8], dtype=np.int32))
    column.put(3_000_000_000 - 1, np.array([9], dtype=np.int32))
    column.close()
    items = np.load(tmp_path / "items.npy", mmap_mode="c")
    assert items.shape == (3_000_000_000,)
    start = offsets(np.array([FAR, 3, 0, 3_000_000_000 - FAR - 3]))
    assert start.dtype == np.int64
    assert start.tolist() == [0, FAR, FAR + 3, FAR + 3, 3_000_000_000]
    found = Positives(torch.from_numpy(start), torch.from_numpy(items)).of(torch.tensor([1, 2]))
    assert found.ids.tolist() == [3, 5, 8]
    assert found.rows is not None
    assert found.rows.tolist() == [0, 0, 0]
    assert items[-1] == 9


def test_mapped_columns_get_blocks(tmp_path: Path) -> None:
    """Columns in memory and rows that are queries are fully shuffled; memory-mapped columns are shuffled by blocks."""
    ids = Vocabulary(np.arange(3))
    columns = np.array([0, 1, 2], dtype=np.int32), np.array([2, 1, 0], dtype=np.int32)
    for name, column in zip("qi", columns, strict=True):
        np.save(tmp_path / f"{name}.npy", column)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="c") for name in "qi"]
    assert type(batches_for(Interactions(*columns, ids, ids), None, 2)) is RandomBatches
    assert type(batches_for(Interactions(*mapped, ids, ids), None, 2)) is BlockBatches


@pytest.mark.parametrize("more", [{"block": 0}, {"window": 0}])
def test_wrong_sizes(more: dict[str, int]) -> None:
    """Empty blocks and windows raise errors."""
    with pytest.raises(UserError, match="at least 1"):
        BlockBatches(10, 2, **more)
    with pytest.raises(UserError, match="an epoch has 5 steps"):
        list(BlockBatches(10, 2, block=1, window=2).epoch(0, 6))
