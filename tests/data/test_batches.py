"""Batches: a permutation per epoch, the same after a resume."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.core.errors import UserError
from sparring.data import RandomBatches

quick = settings(max_examples=50)


@quick
@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 2**40), st.integers(0, 50))
def test_an_epoch_is_a_permutation(n: int, size: int, seed: int, epoch: int) -> None:
    """Every row comes exactly once an epoch, in len(batches) batches, all full but the last."""
    batches = RandomBatches(n, size, seed)
    steps = list(batches.epoch(epoch))
    assert len(steps) == len(batches) == (n + size - 1) // size
    assert all(len(step) == size for step in steps[:-1])
    assert all(step.dtype == torch.int64 for step in steps)
    assert sorted(torch.cat(steps).tolist()) == list(range(n))


@quick
@given(st.integers(1, 200), st.integers(1, 32), st.integers(0, 9), st.data())
def test_resuming_gives_the_tail(n: int, size: int, epoch: int, data: st.DataObject) -> None:
    """Starting at a step gives exactly the batches that the whole epoch has from there on."""
    batches = RandomBatches(n, size, seed=1)
    at = data.draw(st.integers(0, len(batches)))
    whole, tail = list(batches.epoch(epoch)), list(RandomBatches(n, size, seed=1).epoch(epoch, at))
    assert [step.tolist() for step in tail] == [step.tolist() for step in whole[at:]]


def test_seeds_and_epochs_give_different_orders() -> None:
    """(seed, epoch) pairs, also with swapped or shifted values, all have orders of their own."""
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
    """No rows, or no batch size, is an error that gives the number."""
    with pytest.raises(UserError, match=message):
        RandomBatches(n, size)
    with pytest.raises(UserError, match="batch_size 9"):
        RandomBatches(5, 9, drop_last=True)
    with pytest.raises(UserError, match="start_step is 3"):
        list(RandomBatches(5, 4).epoch(0, 3))
