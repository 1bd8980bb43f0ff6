"""Negatives retrieved by the model, and the known positives of the batch."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor

from sparring.core.types import Corpus, Positives, Step
from sparring.negatives import BatchPositives, InBatch, NearestItems, Negatives, Union, nearest
from sparring.testing import NegativesContract, World, chi_square


def positives(world: World) -> Positives:
    rows, items = torch.nonzero(world.known, as_tuple=True)
    count = torch.bincount(rows, minlength=len(world.known))
    return Positives(torch.cat([torch.zeros(1, dtype=torch.long), torch.cumsum(count, 0)]), items.int())


def corpus(world: World, epoch: int = 0) -> Corpus:
    return Corpus(epoch, world.items, lambda ids: world.queries[ids], positives(world), torch.Generator())


def refreshed(world: World, k: int = 5, skip: int = 0, **more: object) -> NearestItems:
    negatives = NearestItems(len(world.queries), k=min(k, world.n_items), skip=skip, **more)  # type: ignore[arg-type]
    negatives.refresh(corpus(world))
    return negatives


def by_hand(world: World, query: int, k: int, skip: int) -> list[int]:
    """Unknown items of a query by descending score, without the first `skip`, k of them."""
    scores = (world.queries[query] @ world.items.T).tolist()
    unknown = [j for j in range(world.n_items) if not world.known[query, j]]
    return sorted(unknown, key=lambda j: -scores[j])[skip : skip + k]


@pytest.mark.parametrize(("k", "skip"), [(5, 0), (3, 2), (24, 0), (10, 20)])
def test_lists_are_the_best_unknown_items(k: int, skip: int) -> None:
    """Lists equal brute force in order; a query without positives has none; short lists end in empty places."""
    world = World.build()
    negatives = refreshed(world, k, skip)
    for query in range(len(world.queries)):
        found = [j for j in negatives.lists[query].tolist() if j >= 0]
        assert found == (by_hand(world, query, k, skip) if bool(world.known[query].any()) else [])


class TestPerQuery(NegativesContract):
    masks = "known"
    n = 200
    partition = False

    def make(self, world: World) -> Negatives:
        return refreshed(world, n=self.n, per_query=True)

    def expected(self, world: World, step: Step) -> Tensor | None:
        return None


class TestShared(TestPerQuery):
    n = 3

    def make(self, world: World) -> Negatives:
        return refreshed(world, n=self.n)


class TestBatchPositives(NegativesContract):
    masks = "known"
    selects = True

    def make(self, world: World) -> Negatives:
        return BatchPositives()


def test_every_place_of_the_list_is_as_likely() -> None:
    """A query draws from its own list, each item equally often."""
    world = World.build()
    negatives = refreshed(world, n=2000, per_query=True)
    step = world.step(16, 3)
    ids = negatives(step).blocks[0].ids
    for row, query in enumerate(step.query_ids.tolist()):
        if bool(world.known[query].any()):
            counts = torch.bincount(ids[row], minlength=world.n_items).float()[by_hand(world, query, 5, 0)]
            assert int(counts.sum()) == 2000
            assert chi_square(counts, torch.full((5,), 400.0)) > 1e-4


def test_lists_are_made_when_it_is_time() -> None:
    """Lists are built in the epochs start, start + every, ...; before that nothing counts."""
    world = World.build()
    negatives = NearestItems(len(world.queries), k=4, every=3, start=2)
    step = world.step(8, 1)
    for epoch in range(9):
        before = negatives.lists.clone()
        moved = World(world.counts, world.items.roll(epoch, 0), world.queries, world.known, world.shown)
        negatives.refresh(corpus(moved, epoch))
        assert (not torch.equal(before, negatives.lists)) == (epoch in (2, 5, 8))
        if epoch < 2:
            assert bool(torch.isneginf(negatives(step).blocks[0].log_w).all())


def test_a_corpus_is_not_encoded_for_nothing() -> None:
    """An epoch without new lists encodes no item."""
    world = World.build()

    def never() -> Tensor:
        raise AssertionError("encoded")

    NearestItems(len(world.queries), k=4, every=3).refresh(
        Corpus(1, never, lambda ids: ids, positives(world), torch.Generator())
    )


def test_shared_ones_of_a_union_mask_what_each_query_knows() -> None:
    """A query's nearest items count against another query unless they are its known positives."""
    world = World.build()
    step = world.step(16, 5)
    bag = Union(InBatch(exclude="known"), refreshed(world))(step)
    block = bag.blocks[1]
    assert block.ids.shape == (16,)
    assert block.exclude is not None
    masked = {(int(r), int(c)) for r, c in zip(*block.exclude.hits(block.ids), strict=True)}
    known = world.known.clone()
    known[step.query_ids, step.item_ids] = True
    expected = {
        (i, j) for i in range(16) for j in range(16) if block.ids[j] >= 0 and known[step.query_ids[i], block.ids[j]]
    }
    assert masked == expected
    assert torch.isneginf(block.log_w).tolist() == (block.ids < 0).tolist()
    assert math.isfinite(float(bag.blocks[0].log_w))


def moved(world: World, epoch: int) -> World:
    """A different world in every epoch."""
    return World(world.counts, world.items.roll(epoch, 0), world.queries, world.known, world.shown)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_delayed_lists_are_those_of_the_vectors_then(
    monkeypatch: pytest.MonkeyPatch, background: bool, delay: int
) -> None:
    """Lists of epochs 2, 5, ... are used `delay` epochs later, however they are built; older ones serve until then."""
    monkeypatch.setattr(nearest, "spare_device", lambda device: device if background else None)
    world, copies = World.build(), []
    negatives = NearestItems(len(world.queries), k=4, every=3, start=2, delay=delay)

    def at(epoch: int) -> Corpus:
        def copied(device: torch.device) -> Corpus:
            copies.append(epoch)
            return corpus(moved(world, epoch), epoch)

        def never() -> Tensor:
            raise AssertionError("the training's own vectors were read")

        items = never if background else moved(world, epoch).items
        return Corpus(epoch, items, lambda ids: world.queries[ids], positives(world), torch.Generator(), copied=copied)

    made = -1
    for epoch in range(12):
        negatives.refresh(at(epoch))
        made = epoch - delay if epoch - delay in (2, 5, 8) else made
        expected = refreshed(moved(world, made), 4).lists if made >= 0 else torch.full((len(world.queries), 4), -1)
        assert torch.equal(negatives.lists, expected.to(torch.int32)), epoch
    assert copies == ([2, 5, 8, 11] if background else [])


def test_a_checkpoint_has_the_lists_that_are_being_made() -> None:
    """state_dict waits for the background build; loaded elsewhere, the lists take effect in their epoch."""
    world = World.build()

    def slowly(device: torch.device) -> Corpus:
        def encode(ids: Tensor) -> Tensor:
            time.sleep(0.1)
            return world.queries[ids]

        return Corpus(0, world.items, encode, positives(world), torch.Generator())

    first, second = (NearestItems(len(world.queries), k=5, every=2, delay=1) for _ in range(2))
    first.refresh(Corpus(0, world.items, lambda ids: ids, positives(world), torch.Generator(), copied=slowly))
    second.load_state_dict(first.state_dict())
    assert bool((second.lists < 0).all())
    second.refresh(corpus(world, 1))
    assert torch.equal(second.lists, refreshed(world).lists)


def test_what_fails_in_the_background_is_raised_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the background is raised when the lists are needed."""
    monkeypatch.setattr(nearest, "spare_device", lambda device: device)
    world = World.build()
    negatives = NearestItems(len(world.queries), k=5, every=2, delay=1)

    def broken(device: torch.device) -> Corpus:
        return Corpus(0, world.items, lambda ids: 1 / 0, positives(world), torch.Generator())  # type: ignore[arg-type, return-value]

    negatives.refresh(Corpus(0, world.items, lambda ids: ids, positives(world), torch.Generator(), copied=broken))
    with pytest.raises(ZeroDivisionError):
        negatives.refresh(corpus(world, 1))


@pytest.mark.parametrize("delay", [-1, 6])
def test_a_delay_beyond_the_next_lists_is_refused(delay: int) -> None:
    """A delay longer than the interval raises, since lists would be replaced before use."""
    with pytest.raises(ValueError, match="delay"):
        NearestItems(10, delay=delay)


@pytest.mark.parametrize("wrong", [{"n": 0}, {"k": 0}, {"every": 0}, {"skip": -1}, {"start": -1}])
def test_nonsense_is_refused(wrong: dict[str, int]) -> None:
    """A one-line error names the values."""
    with pytest.raises(ValueError, match="NearestItems needs"):
        NearestItems(10, **wrong)  # type: ignore[arg-type]
