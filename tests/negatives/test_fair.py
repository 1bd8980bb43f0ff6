"""Negatives by groups of items: GroupShares and Tilted (FairNeg)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparring.core.types import Bag, Outcome, Step
from sparring.negatives import GroupShares, InBatch, Negatives, Popularity, Sampled, Tilted, Uniform
from sparring.negatives.fair import to_simplex
from sparring.testing import NegativesContract, World, chi_square, dense

GROUPS = torch.tensor([7, 7, 2, 9, 2, 2, 9, 7])  # any numbers: 2, 7 and 9 are the groups


def batch(*items: int) -> Step:
    ids = torch.tensor(items)
    nothing = torch.zeros(len(ids), 1)
    return Step(torch.arange(len(ids)), ids, nothing, nothing, torch.ones(()), lambda ids: nothing, torch.Generator())


def groups_of(world: World) -> Tensor:
    return torch.arange(world.n_items) * 5 % 7 // 2


class TestGroupShares(NegativesContract):
    """Sampled by shares that three observed steps have changed."""

    draws = 50_000

    def make(self, world: World) -> Negatives:
        return Sampled(GroupShares(groups_of(world), lr=1.0, momentum=0.0, every=1), 500)

    def expected(self, world: World, step: Step) -> Tensor:
        shares = self.warmed(world).distribution.shares.tolist()  # type: ignore[union-attr]
        groups = groups_of(world).tolist()
        names = sorted(set(groups))
        assert (
            max(abs(share - groups.count(name) / len(groups)) for share, name in zip(shares, names, strict=True)) > 0.01
        )
        return torch.tensor([500 * shares[names.index(z)] / groups.count(z) for z in groups], dtype=torch.float64)

    def resized(self, world: World, n: int) -> Negatives:
        return Sampled(GroupShares(groups_of(world)), n)


def test_it_begins_uniform() -> None:
    """Shares start at each group's part of the catalogue: uniform over items, in draws and in log_prob."""
    shares = GroupShares(GROUPS)
    torch.testing.assert_close(shares.log_prob(torch.arange(8)).exp(), torch.full((8,), 1 / 8))
    drawn = shares.sample((100, 1000), torch.Generator().manual_seed(0))
    assert drawn.shape == (100, 1000)
    assert chi_square(torch.bincount(drawn.flatten(), minlength=8), torch.ones(8)) > 1e-4


def test_group_then_item() -> None:
    """With shares 0, 0.9 and 0.1 an item has its group's share over the group size; a share of 0 is never drawn."""
    shares = GroupShares(GROUPS, floor=0.0)
    shares.shares.copy_(torch.tensor([0.0, 0.9, 0.1]))
    want = torch.tensor([0.3, 0.3, 0.0, 0.05, 0.0, 0.0, 0.05, 0.3])
    torch.testing.assert_close(shares.log_prob(torch.arange(8)).exp(), want)
    drawn = shares.sample((100_000,), torch.Generator().manual_seed(0))
    assert chi_square(torch.bincount(drawn, minlength=8), want) > 1e-4


def plain_projection(x: list[float], floor: float) -> list[float]:
    """max(floor, x - t), t by bisection on the sum."""
    low, high = min(x) - 2, max(x)
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if sum(max(floor, value - t) for value in x) > 1 else (low, t)
    return [max(floor, value - t) for value in x]


@pytest.mark.parametrize("floor", [0.0, 0.02, 0.1])
def test_projection(floor: float) -> None:
    """The nearest point with sum 1 and no coordinate below the floor, and no random point of that set is nearer."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(10, generator=generator).double() * 0.3
        found = to_simplex(x, floor)
        torch.testing.assert_close(found, torch.tensor(plain_projection(x.tolist(), floor)).double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(found.sum(), torch.ones(()).double())
        others = floor + (1 - 10 * floor) * torch.distributions.Dirichlet(torch.ones(10).double()).sample((200,))
        assert bool(((others - x).square().sum(1) >= (found - x).square().sum() - 1e-9).all())


def plain_shares(
    steps: list[tuple[list[int], list[float]]], lr: float, momentum: float, decay: float, every: int, floor: float
) -> list[float]:
    """The rule, one row and one group at a time: each group's faded mean loss, and shares that move against it."""
    groups = GROUPS.tolist()
    names = sorted(set(groups))
    shares = {z: groups.count(z) / len(groups) for z in names}
    drift = dict.fromkeys(names, 0.0)
    for t in range(1, len(steps) + 1):
        if t % every:
            continue
        mean = {}
        for z in names:
            rows = [
                (decay ** (t - 1 - i), loss)
                for i in range(t)
                for item, loss in zip(*steps[i], strict=True)
                if groups[item] == z
            ]
            if rows:
                mean[z] = sum(w * loss for w, loss in rows) / sum(w for w, _ in rows)
        middle = sum(mean.values()) / len(mean)
        for z in names:
            drift[z] = momentum * drift[z] + (1 - momentum) * (mean[z] - middle if z in mean else 0.0)
        moved = plain_projection([shares[z] - lr * drift[z] for z in names], floor / len(names))
        shares = dict(zip(names, moved, strict=True))
    return [shares[z] for z in names]


@pytest.mark.parametrize(("every", "momentum", "floor"), [(1, 0.9, 0.1), (3, 0.5, 0.6), (1, 0.0, 0.0)])
def test_shares_against_a_plain_loop(every: int, momentum: float, floor: float) -> None:
    """Twelve batches, the first without one of the groups, give the shares of the plain rule after each of them."""
    generator = torch.Generator().manual_seed(4)
    shares = GroupShares(GROUPS, 0.2, momentum, 0.8, every, floor)
    steps = []
    for t in range(12):
        items = [0, 1, 2, 4] if t == 0 else torch.randint(8, (6,), generator=generator).tolist()
        loss = torch.rand(len(items), generator=generator) * (1 + GROUPS[items] / 5)
        shares.observe(batch(*items), Outcome(loss, ()))
        steps.append((items, loss.tolist()))
        want = plain_shares(steps, 0.2, momentum, 0.8, every, floor)
        torch.testing.assert_close(shares.shares, torch.tensor(want).double(), rtol=1e-5, atol=1e-6)
    assert max(abs(share - part) for share, part in zip(want, (3 / 8, 3 / 8, 2 / 8), strict=True)) > 0.05


def test_the_worst_served_group_is_sampled_least() -> None:
    """If one group keeps a higher loss, its share falls to the floor and the others gain; equal losses move nothing."""
    shares = GroupShares(GROUPS, every=1, floor=0.1)
    for _ in range(50):
        shares.observe(batch(0, 2, 3), Outcome(torch.tensor([1.0, 1.0, 1.0]), ()))
    torch.testing.assert_close(shares.shares, torch.tensor([3 / 8, 3 / 8, 2 / 8]).double())
    for _ in range(200):
        shares.observe(batch(0, 2, 3), Outcome(torch.tensor([1.0, 1.0, 2.0]), ()))
    torch.testing.assert_close(shares.shares[2], torch.tensor(0.1 / 3).double())
    assert bool((shares.shares[:2] > 3 / 8).all())


class TestTilted(NegativesContract):
    """In-batch candidates with half their weight from the softmax of their scores at temperature 0.4."""

    selects = True
    draws = 2000  # only the batch is random
    share = 0.5

    def make(self, world: World) -> Negatives:
        return Tilted(InBatch(exclude="positive"), self.share, 0.4)

    def offered(self, bag: Bag, step: Step, n_items: int) -> Tensor:
        return dense(bag, step, n_items)[0]

    def expected(self, world: World, step: Step) -> Tensor:
        count = torch.zeros(len(step.q), world.n_items, dtype=torch.float64)
        s = (world.logits(step) * world.tau).tolist()
        for row, own in enumerate(step.item_ids.tolist()):
            pool = [item for item in step.item_ids.tolist() if item != own]
            total = sum(math.exp(s[row][item] / 0.4) for item in pool)
            for item in pool:
                count[row, item] += 1 - self.share + self.share * len(pool) * math.exp(s[row][item] / 0.4) / total
        return count

    def test_every_row_by_hand(self) -> None:
        """The weights of all rows are those of the formula."""
        world = World.build()
        step = world.step(16, 1)
        torch.testing.assert_close(
            dense(self.make(world)(step), step, world.n_items), self.expected(world, step), rtol=1e-5, atol=1e-8
        )


class TestTiltedShares(NegativesContract):
    selects = True

    def make(self, world: World) -> Negatives:
        return Tilted(Sampled(GroupShares(groups_of(world)), 50))


def test_weights_multiply() -> None:
    """A corrected pool keeps its correction under the tilt, and share = 0 is the pool itself."""
    world = World.build()
    step = world.step(16, 1)
    pool = InBatch(Popularity(world.counts))
    plain = dense(pool(step), step, world.n_items)
    none, tilted = (dense(Tilted(source, 0.3)(step), step, world.n_items) for source in (InBatch(), pool))
    offered = dense(InBatch()(step), step, world.n_items)
    torch.testing.assert_close(tilted, torch.where(offered > 0, none * plain / offered, 0.0), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(dense(Tilted(pool, 0.0)(step), step, world.n_items), plain)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GroupShares(torch.rand(4)), "integer"),
        (lambda: GroupShares(torch.zeros(2, 2, dtype=torch.long)), "integer"),
        (lambda: GroupShares(GROUPS, every=0), "every"),
        (lambda: GroupShares(GROUPS, floor=2.0), "floor"),
        (lambda: Tilted(Sampled(Uniform(3), 2), 1.5), "share"),
        (lambda: Tilted(Sampled(Uniform(3), 2), 0.5, 0.0), "temperature"),
    ],
)
def test_bad_arguments_are_named(build, words) -> None:
    """A wrong argument raises a one-line error that names it."""
    with pytest.raises(ValueError, match=words):
        build()
