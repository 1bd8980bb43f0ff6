"""Negatives from the catalogue: Sampled, AllItems, Shown."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparring.core.types import Bag, Positives, Step
from sparring.losses import sampled_softmax
from sparring.negatives import UNKNOWN, AllItems, Negatives, Popularity, Sampled, Shown, Uniform
from sparring.testing import NegativesContract, World


class TestUniform(NegativesContract):
    def make(self, world: World) -> Negatives:
        return Sampled(Uniform(world.n_items), 200)

    def expected(self, world: World, step: Step) -> Tensor:
        return torch.full((world.n_items,), 200 / world.n_items)

    def resized(self, world: World, n: int) -> Negatives:
        return Sampled(Uniform(world.n_items), n)


class TestTwoLines(NegativesContract):
    """Two lines make a complete test, as documented."""

    make = lambda self, world: Sampled(Uniform(world.n_items), 64)  # noqa: E731
    resized = lambda self, world, n: Sampled(Uniform(world.n_items), n)  # noqa: E731


class TestPopularity(NegativesContract):
    alpha = 1.0

    def make(self, world: World) -> Negatives:
        return Sampled(Popularity(world.counts, self.alpha), 200)

    def expected(self, world: World, step: Step) -> Tensor:
        mass = torch.tensor([float(count) ** self.alpha if count > 0 else 0.0 for count in world.counts])
        return 200 * mass / mass.sum()

    def resized(self, world: World, n: int) -> Negatives:
        return Sampled(Popularity(world.counts, self.alpha), n)


class TestFlattenedPopularity(TestPopularity):
    alpha = 0.75


class TestUniformOverItemsThatOccur(TestPopularity):
    alpha = 0.0


class TestPerQuery(NegativesContract):
    resized = lambda self, world, n: Sampled(Popularity(world.counts), n, per_query=True)  # noqa: E731

    def make(self, world: World) -> Negatives:
        return Sampled(Popularity(world.counts), 200, per_query=True)

    def expected(self, world: World, step: Step) -> Tensor:
        return 200 * world.popularity

    def test_queries_draw_independently(self) -> None:
        """Queries have independent draws: equal rows would be one shared draw in disguise."""
        world = World.build()
        ids = self.make(world)(world.step(16, 1)).blocks[0].ids
        assert ids.shape == (16, 200)
        assert not torch.equal(ids[0], ids[1])


class TestKnownPositives(NegativesContract):
    resized = lambda self, world, n: Sampled(Uniform(world.n_items), n, exclude="known")  # noqa: E731
    masks = "known"

    def make(self, world: World) -> Negatives:
        return Sampled(Uniform(world.n_items), 200, exclude="known")


class TestKnownPositivesPerQuery(NegativesContract):
    resized = lambda self, world, n: Sampled(Uniform(world.n_items), n, per_query=True, exclude="known")  # noqa: E731
    masks = "known"

    def make(self, world: World) -> Negatives:
        return Sampled(Uniform(world.n_items), 200, per_query=True, exclude="known")


class TestRefined(NegativesContract):
    partition = False

    def make(self, world: World) -> Negatives:
        return Sampled(Popularity(world.counts), 200, correction="refined")


class TestBoth(TestRefined):
    def make(self, world: World) -> Negatives:
        return Sampled(Popularity(world.counts), 200, correction="both")


class TestNegativesOnly(TestRefined):
    def make(self, world: World) -> Negatives:
        return Sampled(Popularity(world.counts), 200, correction="negatives")


class TestUncorrected(TestRefined):
    def make(self, world: World) -> Negatives:
        return Sampled(Popularity(world.counts), 200, correction="none", exclude="none")

    masks = "none"


class TestAllItems(NegativesContract):
    resized = UNKNOWN
    draws, trials = 500, 5  # nothing is random

    def make(self, world: World) -> Negatives:
        return AllItems(world.n_items)

    def expected(self, world: World, step: Step) -> Tensor:
        return torch.ones(world.n_items)

    def test_is_the_full_softmax(self) -> None:
        """The loss is the cross-entropy over the catalogue, as PyTorch computes it."""
        world = World.build()
        step = world.step(16, 1)
        full = torch.nn.functional.cross_entropy(step.q @ world.items.T / world.tau, step.item_ids, reduction="none")
        torch.testing.assert_close(sampled_softmax(step, self.make(world)(step)), full)


class TestAllItemsKnown(TestAllItems):
    masks = "known"

    def make(self, world: World) -> Negatives:
        return AllItems(world.n_items, exclude="known")

    def test_is_the_full_softmax(self) -> None:
        """The loss is the cross entropy over the catalogue without the query's other known positives."""
        world = World.build()
        step = world.step(16, 1)
        logits = (step.q @ world.items.T / world.tau).detach()
        for row in range(16):
            for item in range(world.n_items):
                if world.known[step.query_ids[row], item] and item != step.item_ids[row]:
                    logits[row, item] = -math.inf
        full = torch.nn.functional.cross_entropy(logits, step.item_ids, reduction="none")
        torch.testing.assert_close(sampled_softmax(step, self.make(world)(step)).detach(), full)


class TestShown(NegativesContract):
    draws = 20_000

    def make(self, world: World) -> Negatives:
        return Shown(world.shown, 50)

    def expected(self, world: World, step: Step) -> Tensor:
        query = int(step.query_ids[0])
        items = world.shown.items[world.shown.start[query] : world.shown.start[query + 1]]
        count = torch.zeros(world.n_items)
        count[items] = 50 / max(len(items), 1)
        return count

    def test_a_query_without_a_list_has_no_negatives(self) -> None:
        """Its loss is 0 and its gradient finite, and it does not affect the others."""
        world = World.build()
        step = world.step(256, 3)
        loss = sampled_softmax(step, self.make(world)(step))
        empty = step.query_ids == 0
        assert bool(empty.any())
        assert bool((loss[empty] == 0).all())
        assert bool((loss[~empty] > 0).all())

    def test_nobody_was_shown_anything(self) -> None:
        """Empty lists give candidates that weigh nothing."""
        world = World.build()
        lists = Positives(torch.zeros(len(world.queries) + 1, dtype=torch.long), torch.zeros(0, dtype=torch.long))
        step = world.step(8, 1)
        bag: Bag = Shown(lists, 3)(step)
        assert bool((bag.blocks[0].ids == -1).all())
        assert bool((sampled_softmax(step, bag) == 0).all())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Sampled(Uniform(5), 0), "n >= 1"),
        (lambda: Sampled(Uniform(5), 3, correction="logq"), "correction"),  # type: ignore[arg-type]
        (lambda: Sampled(Uniform(5), 3, exclude="all"), "exclude"),  # type: ignore[arg-type]
        (lambda: Uniform(0), "at least one"),
        (lambda: Popularity(torch.zeros(3)), "positive sum"),
        (lambda: Popularity(torch.tensor([1.0, -1.0])), "negative"),
        (lambda: Shown(World.build().shown, 0), "n >= 1"),
    ],
)
def test_bad_arguments_are_named(build, words) -> None:
    """A wrong argument raises a one-line error that names it."""
    with pytest.raises(ValueError, match=words) as error:
        build()
    assert "\n" not in str(error.value)


def test_known_needs_the_lists() -> None:
    """exclude="known" without known positives raises an error instead of masking nothing."""
    world = World.build()
    step = world.step(4, 1)
    bare = Step(step.query_ids, step.item_ids, step.q, step.v, step.tau, step.encode, step.generator)
    with pytest.raises(ValueError, match="positives"):
        Sampled(Uniform(world.n_items), 4, exclude="known")(bare)
