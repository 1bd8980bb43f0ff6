"""Negatives chosen by their scores: AmongHardest (DNS(M, N)), NearestTo (AHNS)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, Exclude, Step
from sparring.losses import bpr, sampled_softmax
from sparring.negatives import AmongHardest, Hardest, InBatch, NearestTo, Negatives, Popularity, Sampled, Uniform, Union
from sparring.testing import NegativesContract, World, chi_square, dense, weights


def ranked(world: World, step: Step, row: int, ids: list[int]) -> list[int]:
    """The candidates of a row that are not its positive, hardest first."""
    scores, own = world.logits(step)[row].tolist(), int(step.item_ids[row])
    return sorted((item for item in ids if item != own), key=lambda item: -scores[item])


def alike(world: World, rows: int, positive: int = 3) -> Step:
    """Many rows with one query and one positive, so that one forward pass is many trials."""
    q = world.queries[5].expand(rows, -1)
    ids = torch.full((rows,), positive)
    generator = torch.Generator().manual_seed(1)
    return Step(
        torch.full((rows,), 5), ids, q, world.items[ids], torch.tensor(world.tau), lambda at: world.items[at], generator
    )


class TestAmongHardest(NegativesContract):
    selects = True
    draws = 1500

    def make(self, world: World) -> Negatives:
        return AmongHardest(InBatch(Popularity(world.counts)), m=6, k=3)

    def expected(self, world: World, step: Step) -> Tensor:
        count = torch.zeros(len(step.q), world.n_items)
        for row in range(len(step.q)):
            top = ranked(world, step, row, step.item_ids.tolist())[:6]
            for item in top:
                count[row, item] += min(3 / len(top), 1)
        return count


class TestAmongHardestPerQuery(NegativesContract):
    selects, masks = True, "known"

    def make(self, world: World) -> Negatives:
        return AmongHardest(Sampled(Uniform(world.n_items), 12, per_query=True, exclude="known"), m=4)


class TestManyKept(NegativesContract):
    """If there are too many to gather, the block stays shared and candidates not chosen weigh nothing."""

    selects = True
    draws = 1000

    def make(self, world: World) -> Negatives:
        negatives = Hardest(Union(InBatch(Popularity(world.counts)), Sampled(Uniform(world.n_items), 10)), 5)
        negatives.gathered = 0
        return negatives

    def test_weights_are_kept(self) -> None:
        """Weights per item, loss and gradients equal those of gathering the kept items."""
        world = World.build()
        many, few = self.make(world), self.make(world)
        few.gathered = 1 << 16  # type: ignore[assignment]
        found = []
        for negatives in (many, few):
            table = world.items.clone().requires_grad_()
            step = world.step(16, 1, table=table)
            bag = negatives(step)
            loss = sampled_softmax(step, bag)
            found.append((dense(bag, step, world.n_items), loss, *torch.autograd.grad(loss.sum(), [step.q, table])))
            assert bag.blocks[0].shared == (negatives is many)
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        counts = 15 * world.popularity + 10 / world.n_items
        weight = found[0][0] * counts  # 1 for each time an item was kept
        torch.testing.assert_close(weight, weight.round(), rtol=0, atol=1e-4)
        assert bool((weight.sum(1) - 5).abs().max() < 1e-4)


def test_every_one_of_the_hardest_is_as_likely() -> None:
    """In 100,000 draws the 4 hardest of 10 candidates are chosen equally often, two distinct ones at a time."""
    world = World.build()
    pool = [3, 0, 7, 11, 2, 19, 5, 14, 8, 21]  # 3 is the positive
    step = alike(world, 50_000)

    class Pool(Negatives):
        def forward(self, step: Step) -> Bag:
            return Bag((Candidates(torch.tensor(pool), world.items[pool], torch.zeros(()), Exclude(step.item_ids)),))

    negatives = AmongHardest(Pool(), m=4, k=2)
    negatives.gathered = 1 << 20
    ids = negatives(step).blocks[0].ids
    assert bool((ids[:, 0] != ids[:, 1]).all())
    want = torch.zeros(world.n_items)
    want[ranked(world, step, 0, pool)[:4]] = 1
    assert chi_square(torch.bincount(ids.flatten(), minlength=world.n_items), want) > 1e-4


@pytest.mark.parametrize(("m", "n"), [(1, 5), (3, 5), (5, 5)])
def test_the_rank_of_the_kept_follows_order_statistics(m: int, n: int) -> None:
    """Uniform among the m hardest of n uniform draws: rank r by the mean over i <= m of P(i-th best has rank r)."""
    world = World.build()
    step = alike(world, 100_000)
    negatives = AmongHardest(Sampled(Uniform(world.n_items), n, per_query=True, exclude="none"), m=m)
    ids = negatives(step).blocks[0].ids.flatten()
    order = sorted(range(world.n_items), key=lambda item: -float(world.logits(step)[0, item]))

    def at_most(i: int, r: int) -> float:  # the i-th best of n draws has rank r or better: at least i draws do
        f = r / world.n_items
        return sum(math.comb(n, c) * f**c * (1 - f) ** (n - c) for c in range(i, n + 1))

    want = torch.zeros(world.n_items, dtype=torch.float64)
    for r, item in enumerate(order, start=1):
        want[item] = sum(at_most(i, r) - at_most(i, r - 1) for i in range(1, m + 1)) / m
    assert chi_square(torch.bincount(ids, minlength=world.n_items), want) > 1e-4


def test_among_as_many_as_are_kept_is_hardest() -> None:
    """m = k keeps the same candidates as Hardest."""
    world = World.build()
    pool = InBatch(Popularity(world.counts))
    ours, theirs = (
        kind(world.step(16, 1)).blocks[0].ids.sort(1).values for kind in (AmongHardest(pool, 4, 4), Hardest(pool, 4))
    )
    assert torch.equal(ours, theirs)


def test_never_a_masked_one_while_others_are_left() -> None:
    """In a batch of 4 with m = 4 the query's own column is among the four: it is never chosen, two others are."""
    world = World.build()
    for seed in range(50):
        step = world.step(4, seed)
        if len(step.item_ids.unique()) == 4:
            block = AmongHardest(InBatch(), m=4, k=2)(step).blocks[0]
            assert not bool((block.ids == step.item_ids.unsqueeze(1)).any())
            assert not bool(torch.isneginf(block.log_w).any())


class TestNearestTo(NegativesContract):
    """AHNS over the batch: the k nearest to beta / (s_+ + alpha), s without the temperature."""

    selects = True
    draws = 1000  # only the batch is random
    alpha, beta, p, k = 1.5, 0.3, -2.0, 2

    def make(self, world: World) -> Negatives:
        return NearestTo(InBatch(Popularity(world.counts)), self.k, self.alpha, self.beta, self.p)

    def expected(self, world: World, step: Step) -> Tensor:
        count = torch.zeros(len(step.q), world.n_items)
        s = (world.logits(step) * world.tau).tolist()
        for row, own in enumerate(step.item_ids.tolist()):
            base = s[row][own] + self.alpha
            target = self.beta * base ** (self.p + 1) if base > 0 else math.inf if self.p < -1 else 0.0
            others = [item for item in step.item_ids.tolist() if item != own]
            for item in sorted(others, key=lambda item: (abs(s[row][item] - min(target, 1e3)), item))[: self.k]:
                count[row, item] += 1
        return count

    def test_every_row_by_hand(self) -> None:
        """Each of 10 x 16 rows keeps exactly the items of the formula."""
        world = World.build()
        for seed in range(10):
            step = world.step(16, seed)
            ids = self.make(world)(step).blocks[0].ids
            got = torch.zeros(16, world.n_items).scatter_add_(1, ids, torch.ones(ids.shape))
            assert torch.equal(got, self.expected(world, step))


class TestNearestToGrowing(TestNearestTo):
    """p = 0: the target beta (s_+ + alpha) grows with the positive."""

    alpha, beta, p = 0.2, 1.2, 0.0


class TestNearestToUnion(NegativesContract):
    selects = True

    def make(self, world: World) -> Negatives:
        return NearestTo(
            Union(InBatch(Popularity(world.counts)), Sampled(Uniform(world.n_items), 10, exclude="known")), 3
        )


def test_a_better_positive_gets_an_easier_negative() -> None:
    """The chosen score falls from the hardest candidate (s_+ <= -alpha) to the easiest as the positive's grows."""
    world = World.build(n_items=20)
    step = alike(world, 7)
    direction = world.queries[5] / world.queries[5].square().sum()
    v = torch.tensor([-9.0, -1.0, -0.99, -0.5, 0.0, 1.0, 1e4]).unsqueeze(1) * direction  # the positive scores just this
    step = Step(step.query_ids, step.item_ids, step.q, v, step.tau, step.encode, step.generator)
    pool = Sampled(Uniform(world.n_items), 12, correction="none")
    drawn = pool(alike(world, 7)).blocks[0].ids.tolist()
    scores = [float(world.items[item] @ world.queries[5]) for item in drawn if item != 3]
    kept = world.items[NearestTo(pool, alpha=1.0, beta=0.1)(step).blocks[0].ids[:, 0]] @ world.queries[5]
    assert kept.tolist() == sorted(kept.tolist(), reverse=True)
    assert float(kept[0]) == pytest.approx(max(scores))
    assert float(kept[1]) == pytest.approx(max(scores))
    for row, positive in ((3, -0.5), (4, 0.0), (5, 1.0), (6, 1e4)):
        assert float(kept[row]) == pytest.approx(min(scores, key=lambda s: abs(s - 0.1 / (positive + 1))), abs=1e-6)


@pytest.mark.parametrize("per_query", [True, False])
@pytest.mark.parametrize("gathered", [0, 1 << 16])
def test_only_what_is_kept_is_encoded_for_the_gradient(per_query: bool, gathered: int) -> None:
    """Draws are encoded without gradient, the kept ones again with it; the gradient is that of the formula."""
    world = World.build()
    table = world.items.clone().requires_grad_()
    step = world.step(16, 1, table=table)
    encoded: list[tuple[int, bool]] = []

    def encode(ids: Tensor) -> Tensor:
        encoded.append((ids.numel(), torch.is_grad_enabled()))
        return table[ids]

    negatives = Hardest(Sampled(Uniform(world.n_items), 12, per_query, "none"), 1)
    negatives.gathered = gathered
    step = replace(step, encode=encode)
    bag = negatives(step)
    shared = not per_query and gathered == 0
    assert encoded == [(12 if not per_query else 16 * 12, False), (12 if shared else 16, True)]
    kept = [
        int(block.ids.expand(16, -1)[row][weights(block, step)[row] > 0]) for block in bag.blocks for row in range(16)
    ]
    loss = torch.nn.functional.softplus(((table[kept] - table[step.item_ids]) * step.q).sum(1) / world.tau)
    ours, theirs = (torch.autograd.grad(value.sum(), [step.q, table]) for value in (bpr(step, bag), loss))
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: AmongHardest(InBatch(), m=2, k=3), "m >= k"),
        (lambda: AmongHardest(InBatch(), m=2, k=0), "k >= 1"),
        (lambda: NearestTo(InBatch(), 0), "k >= 1"),
        (lambda: NearestTo(InBatch(), beta=-1.0), "beta"),
    ],
)
def test_bad_arguments_are_named(build, words) -> None:
    """A wrong argument raises a one-line error that names it."""
    with pytest.raises(ValueError, match=words):
        build()
