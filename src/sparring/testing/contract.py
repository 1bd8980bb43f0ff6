"""The tests that every sampler passes."""

from __future__ import annotations

import copy
import math
import unittest
from typing import Literal

import torch
from torch import Tensor

from sparring.core.types import Bag, Step
from sparring.losses import sampled_softmax
from sparring.negatives.algebra import Union
from sparring.negatives.base import Negatives, Unknown
from sparring.negatives.distributions import Popularity
from sparring.negatives.in_batch import InBatch
from sparring.testing.bag_reading import chi_square, dense, observe, plain_loss, weights
from sparring.testing.world import World, excluded


class NegativesContract:
    """The tests that every sampler passes: inherit it, name your sampler, run pytest.

        class TestMine(NegativesContract):
            make = lambda self, world: MySampler(world.n_items)

            resized = lambda self, world, n: MySampler(world.n_items, n)

    `make` builds the sampler for a world, which also has `counts`, `popularity`, `dim` and `shown`; `resized` builds
    the same sampler with n candidates; `masks` are the items that it excludes; `expected` is a formula of how often
    each item is offered. Where the sampler defines log_count, its draws must agree with it and its weights must give
    the full partition function. A sampler that cannot tell its counts declares `log_count = UNKNOWN`, and a contract of
    a sampler with a fixed size `resized = UNKNOWN`; leaving them out is a failure. A test that lacks one of these is
    skipped with a reason, and `unproved` lists the gaps. The world has 24 items, the last of them never taken; `make`
    also gets a world of one item, and `resized` is called with 4 and 64, so n may exceed the catalogue. A test switches
    exclusion off by setting the attribute `exclude` of the sampler and its parts to "none". All seeds are fixed and all
    bounds are 4 standard errors or p > 1e-4, so a pass is repeatable.
    """

    batch: int = 16  # queries of a step
    draws: int = 100_000  # candidates in the test of the distribution
    trials: int = 500  # steps in the test of the partition function
    between: int = 0  # steps observed between two trials, so that a sampler with memory has fresh draws
    masks: Literal["positive", "known", "none"] = "positive"
    partition: bool = True  # False for a correction that does not estimate the partition function
    normalised: bool = True  # False for a frequency that is estimated, whose parts need not add up to 1
    selects: bool = False  # True where excluding one item admits another (draws, top k)

    def make(self, world: World) -> Negatives:
        raise TypeError(f"{type(self).__name__} must define make(self, world) -> Negatives")

    def expected(self, world: World, step: Step) -> Tensor | None:
        """(N,) or (B, N): the expected count of each item among a query's candidates, by a formula; None: log_count."""
        return None

    def resized(self, world: World, n: int) -> Negatives | None:
        """The same sampler with n candidates, for the test of the gradient's bias, or `resized = UNKNOWN`."""
        return None

    def gaps(self) -> dict[str, str]:
        """{test: reason} of the tests that need something this sampler does not give: they are skipped."""
        world = World.build()
        step = world.step(self.batch, 1)
        log_count = self.warmed(world).log_count(torch.arange(world.n_items), step)
        formula = self.expected(world, step)
        reasons = {}
        if log_count is None:
            reasons["test_size_is_the_sum_of_counts"] = "log_count is unknown: size was not tested"
            reasons["test_partition_function"] = "log_count is unknown: the partition function was not tested"
        if not self.normalised:
            reasons["test_size_is_the_sum_of_counts"] = "normalised = False: the sum of the counts was not tested"
        if not self.partition:
            reasons["test_partition_function"] = "partition = False: the partition function was not tested"
        if formula is None or log_count is None:
            missing = "no expected" if log_count is not None else "log_count is unknown"
            reasons["test_log_count_is_the_formula"] = f"{missing}: the formula of log_count was not tested"
        if formula is None and log_count is None:
            reasons["test_distribution"] = "log_count is unknown, no expected: the distribution was not tested"
        if log_count is None or not self.partition:
            missing = "log_count is unknown" if log_count is None else "partition = False"
            reasons["test_gradient_bias_falls"] = f"{missing}: the bias of the gradient was not tested"
        elif self.resized(world, 4) is None:
            reasons["test_gradient_bias_falls"] = "resized is unknown: the bias of the gradient was not tested"
        return reasons

    def _skip_unless_applicable(self, test: str) -> None:
        reason = self.gaps().get(test)
        if reason is not None:
            raise unittest.SkipTest(reason)

    def offered(self, bag: Bag, step: Step, n_items: int) -> Tensor:
        """(N,) how often each item was offered to the first query; override where a weight is a count of draws."""
        count = torch.zeros(n_items)
        for block in bag.blocks:
            ids = block.ids.expand(len(step.q), -1)[0]
            count += torch.bincount(ids[weights(block, step)[0] > 0], minlength=n_items)
        return count

    def warmed(self, world: World, steps: int = 3) -> Negatives:
        negatives = self.make(world)
        for seed in range(steps):
            observe(negatives, world.step(self.batch, 1_000_000 + seed))
        return negatives

    def test_gaps_are_declared(self) -> None:
        """Counts that are not known, of the sampler or a part of it, are declared UNKNOWN, and so is `resized`."""
        world = World.build()
        negatives = self.warmed(world)
        if negatives.log_count(torch.arange(world.n_items), world.step(self.batch, 1)) is None:
            parts = [part for part in negatives.modules() if isinstance(part, Negatives)]
            declared = any(isinstance(part.log_count, Unknown) for part in parts)
            assert declared, f"{type(negatives).__name__} has no log_count: define it, or declare log_count = UNKNOWN"
        elif self.partition and not isinstance(self.resized, Unknown):
            given = self.resized(world, 4) is not None
            assert given, f"{type(self).__name__} has no resized: define it, or declare resized = UNKNOWN"

    def test_bag_is_well_formed(self) -> None:
        """Ids are (C,) or (B, C) and exist, vectors match them, weights broadcast and are never nan or +inf.

        Candidates (B, C) differ between queries: one draw for all belongs in a block (C,). The vectors of a sampler
        that sets `encodes` are those of this step and carry a gradient.
        """
        world = World.build()
        negatives = self.warmed(world)
        table = (world.items + 1 if negatives.encodes else world.items.clone()).requires_grad_()
        bag = negatives(world.step(self.batch, 1, table=table))
        for block in bag.blocks:
            shape = (self.batch, block.ids.shape[-1])
            assert block.ids.shape in (shape, shape[1:])
            assert block.emb.shape == (*block.ids.shape, world.dim)
            assert block.ids.dim() == 1 or bool((block.emb != block.emb[:1]).any()), "one draw for all queries"
            assert torch.broadcast_to(block.log_w, shape).shape == shape
            assert int(block.ids.min()) >= -1
            assert int(block.ids.max()) < world.n_items
            assert bool((block.log_w < math.inf).all())
            real = block.ids >= 0
            assert torch.equal(block.emb[real], table[block.ids[real]])
            assert block.emb.requires_grad or not negatives.encodes, "no gradient reaches the candidates"
        if bag.log_w_positive is not None:
            assert bag.log_w_positive.shape == (self.batch,)
            assert bool(torch.isfinite(bag.log_w_positive).all())

    def test_same_generator_same_bag(self) -> None:
        """Two forward passes from the same generator state give the same bag, bit by bit."""
        world = World.build()
        negatives = self.warmed(world)
        _assert_same(negatives(world.step(self.batch, 1)), negatives(world.step(self.batch, 1)))

    def test_forward_leaves_state_alone(self) -> None:
        """Neither the bag nor its loss changes a buffer or a plain attribute."""
        world = World.build()
        negatives = self.warmed(world)
        before, step = _state(negatives), world.step(self.batch, 1)
        sampled_softmax(step, negatives(step)).sum().backward()
        after = _state(negatives)
        changed = [name for name in after if name not in before or not torch.equal(after[name], before[name])]
        assert not changed, f"forward changed {changed}"

    def test_state_round_trip(self) -> None:
        """A new sampler that loads the state returns the same bags, now and after one more step."""
        world = World.build()
        first, second = self.warmed(world), self.make(world)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for seed in (1, 2):
            _assert_same(first(world.step(self.batch, seed)), second(world.step(self.batch, seed)))
            observe(first, world.step(self.batch, seed))
            observe(second, world.step(self.batch, seed))

    def test_one_query(self) -> None:
        """With a batch of one query, loss and gradient are finite in three steps."""
        world = World.build()
        negatives = self.make(world)
        for seed in range(3):
            _assert_finite(world.step(1, seed), negatives)
            observe(negatives, world.step(1, seed))

    def test_everything_excluded(self) -> None:
        """In a catalogue of one item every candidate is the positive: the loss is finite, and 0 if it is excluded."""
        world = World.build(n_items=1)
        loss = _assert_finite(world.step(5, 1), self.warmed(world))
        assert self.masks == "none" or bool((loss == 0).all())

    def test_distribution(self) -> None:
        """Items are offered as often as expected: chi-square over all draws, their number within 4 standard errors."""
        self._skip_unless_applicable("test_distribution")
        world = World.build()
        negatives = self.warmed(world)
        observed, wanted, trial = torch.zeros(world.n_items).double(), torch.zeros(world.n_items).double(), 0
        while wanted.sum() < self.draws:
            trial += 1
            assert trial <= 100 or wanted.sum() > 0, "no candidate is expected in 100 steps"
            _between(negatives, world, self.batch, self.between, trial)
            # the first row has the same positive in every trial, so that it always excludes the same item
            step = world.step(self.batch, trial, first=3)
            count = self.expected(world, step)
            if count is None:
                log_count = negatives.log_count(torch.arange(world.n_items), step)
                assert log_count is not None
                count = log_count.exp()
            count = count.detach().double() if count.dim() == 1 else count[0].detach().double()
            wanted += torch.where(excluded(world, step, self.masks)[0], 0.0, count)
            observed += self.offered(negatives(step), step, world.n_items)
        p = chi_square(observed, wanted)
        worst = int(((observed - wanted).abs() / wanted.clamp(min=1).sqrt()).argmax())
        offered = f"item {worst} was offered {observed[worst]:.0f} times instead of {wanted[worst]:.0f}"
        assert p > 1e-4, f"draws do not follow log_count or expected (chi-square p = {p:.2g}): {offered}"
        total, expected = observed.sum(), wanted.sum()
        assert abs(total - expected) <= 4 * expected.sqrt(), f"offered {total}, expected {expected}"

    def test_log_count_is_the_formula(self) -> None:
        """log_count is the log of `expected`."""
        self._skip_unless_applicable("test_log_count_is_the_formula")
        world = World.build()
        negatives, step = self.warmed(world), world.step(self.batch, 1)
        expected, log_count = self.expected(world, step), negatives.log_count(torch.arange(world.n_items), step)
        assert expected is not None
        assert log_count is not None
        torch.testing.assert_close(log_count.double().exp(), expected.double(), rtol=1e-5, atol=1e-9)

    def test_size_is_the_sum_of_counts(self) -> None:
        """size(step) is the number of candidates of a query: the sum of exp(log_count) over the catalogue."""
        self._skip_unless_applicable("test_size_is_the_sum_of_counts")
        world = World.build()
        negatives, step = self.warmed(world), world.step(self.batch, 1)
        log_count = negatives.log_count(torch.arange(world.n_items), step)
        assert log_count is not None
        try:
            size = torch.as_tensor(negatives.size(step), dtype=torch.float64)
        except TypeError as error:
            raise AssertionError(f"{error}: Union and corrections divide by it") from error
        total = log_count.double().exp().sum(-1)
        torch.testing.assert_close(size.expand_as(total), total, rtol=1e-4, atol=1e-6)

    def test_combines_with_in_batch(self) -> None:
        """A Union with InBatch offers both; where counts are known, a candidate weighs 1 / (its count in both)."""
        world = World.build()
        step, again = world.step(self.batch, 1), world.step(self.batch, 1)
        negatives = self.warmed(world)
        alone = negatives(again)
        bag = Union(InBatch(Popularity(world.counts)), negatives)(step)
        assert len(bag.blocks) == 1 + len(alone.blocks)
        assert torch.equal(bag.blocks[0].ids, step.item_ids)
        assert all(torch.equal(a.ids, b.ids) for a, b in zip(bag.blocks[1:], alone.blocks, strict=True))
        log_count = negatives.log_count(torch.arange(world.n_items), step)
        if log_count is not None:
            rows = torch.arange(self.batch).unsqueeze(1)
            both = (self.batch - 1) * world.popularity + log_count.double().exp().expand(self.batch, -1)
            for block in bag.blocks:
                ids = block.ids.expand(self.batch, -1)
                log_w = block.log_w.double().expand(ids.shape)
                real = (ids >= 0) & ~torch.isneginf(log_w)
                torch.testing.assert_close(log_w[real], -both[rows, ids.clamp(min=0)].log()[real], rtol=1e-4, atol=1e-5)
        _assert_finite(world.step(self.batch, 1), Union(InBatch(Popularity(world.counts)), negatives))

    def test_partition_function(self) -> None:
        """The mean over many bags of sum_j w_j e^s_j is the sum over the catalogue, within 4 standard errors."""
        self._skip_unless_applicable("test_partition_function")
        world = World.build()
        negatives = self.warmed(world)
        errors = []
        for trial in range(self.trials):
            _between(negatives, world, self.batch, self.between, trial)
            full, estimate = self._partition(world, negatives, world.step(self.batch, trial))
            errors.append((estimate / full - 1).mean())
        error = torch.stack(errors)
        noise = error.std() / math.sqrt(len(error))
        assert abs(error.mean()) <= 4 * noise + 1e-6, f"off by {error.mean():.4f} of the full sum"

    def _partition(self, world: World, negatives: Negatives, step: Step) -> tuple[Tensor, Tensor]:
        """(B,) each: the sum of e^s over all items that the sampler can offer, and its estimate from one bag."""
        mass = world.logits(step).exp()
        log_count = negatives.log_count(torch.arange(world.n_items), step)
        assert log_count is not None
        possible = ~excluded(world, step, self.masks) & torch.isfinite(log_count)
        return torch.where(possible, mass, 0.0).sum(1), (dense(negatives(step), step, world.n_items) * mass).sum(1)

    def test_gradient_bias_falls(self) -> None:
        """The gradient of the positive is biased with few candidates, and at most half as much with 16 times more."""
        self._skip_unless_applicable("test_gradient_bias_falls")
        world = World.build()
        few, many = self.resized(world, 4), self.resized(world, 64)
        assert few is not None
        assert many is not None
        small, noise = self._gradient_bias(world, few)
        large, _ = self._gradient_bias(world, many)
        assert abs(small) > 4 * noise
        assert abs(large) < abs(small) / 2

    def _gradient_bias(self, world: World, negatives: Negatives) -> tuple[float, float]:
        biases = []
        for trial in range(self.trials):
            step = world.step(self.batch, trial)
            positive = world.logits(step).exp().gather(1, step.item_ids.unsqueeze(1)).squeeze(1)
            full, estimate = self._partition(world, negatives, step)
            biases.append((positive / (positive + estimate) - positive / (positive + full)).mean())
        bias = torch.stack(biases)
        return float(bias.mean()), float(bias.std()) / math.sqrt(len(bias))

    def test_excluded_items_weigh_nothing(self) -> None:
        """The weight of an excluded item is exactly 0; all others keep theirs, up to one factor for the row."""
        world = World.build()
        negatives = self.warmed(world)
        twin, masking = copy.deepcopy(negatives), False
        for module in twin.modules():
            if getattr(module, "exclude", "none") != "none":
                module.__dict__["exclude"], masking = "none", True
        touched = False
        for seed in range(10):
            step = world.step(self.batch, seed)
            never = excluded(world, step, self.masks)
            with_mask, without = (
                dense(source(world.step(self.batch, seed)), step, world.n_items) for source in (negatives, twin)
            )
            assert bool((with_mask[never] == 0).all())
            touched |= bool((without[never] > 0).any())
            if not self.selects:
                # an exclusion may change the expected counts (InBatch's own column): compare weight times count
                before, after = (source.log_count(torch.arange(world.n_items), step) for source in (twin, negatives))
                change = 1.0 if before is None or after is None else (after.double() - before.double()).exp()
                kept = torch.where(never | (without == 0), math.nan, with_mask / without * change)
                mean = kept.nanmean(1, keepdim=True).expand_as(kept) + 0 * kept
                torch.testing.assert_close(kept, mean, equal_nan=True)
                assert torch.equal((with_mask > 0), (without > 0) & ~never)
        assert touched or not masking or self.masks == "none", "no candidate was ever excluded"

    def test_rows_that_share_a_query(self) -> None:
        """Where rows share queries, as those of a sequence do, no row counts an item that it excludes, the positives
        of its query's other rows included if these are known; loss and gradients are those of the formula."""
        world = World.build()
        negatives = self.warmed(world)
        for seed in range(5):
            step = world.step(self.batch, seed, each=4)
            never = excluded(world, step, self.masks)
            assert bool((dense(negatives(step), step, world.n_items)[never] == 0).all()), "an excluded item counts"
        self._assert_formula(world, negatives, each=4)

    def test_loss_and_gradient(self) -> None:
        """Loss and gradients equal the formula written out pair by pair; no gradient flows through the weights."""
        world = World.build()
        self._assert_formula(world, self.warmed(world))

    def _assert_formula(self, world: World, negatives: Negatives, each: int = 1) -> None:
        """Loss and gradients of a step are those of the formula, written out."""
        table = world.items.clone().requires_grad_()
        step, again = (world.step(self.batch, 1, table=table, each=each) for _ in range(2))
        ours, plain = sampled_softmax(step, negatives(step)), plain_loss(again, negatives(again))
        torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-5)
        upstream = torch.linspace(0.5, 1.5, len(ours))
        mine = torch.autograd.grad((ours * upstream).sum(), [step.q, table])
        theirs = torch.autograd.grad((plain * upstream.double()).sum(), [again.q, table])
        for got, want in zip(mine, theirs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    def test_bag_describes_itself(self) -> None:
        """describe() has a line for each block: its size, whether queries share it, and its exclusion."""
        world = World.build()
        step = world.step(self.batch, 1)
        bag = self.warmed(world)(step)
        lines = bag.describe().splitlines()
        assert len(lines) == len(bag.blocks) + 1
        for block, line in zip(bag.blocks, lines[:-1], strict=True):
            assert f"{block.ids.shape[-1]:,} candidates" in line
            assert ("shared by all queries" in line) == (block.ids.dim() == 1)
            assert ("for each query" in line) == (block.ids.dim() == 2)
            assert ("masked: nothing" in line) == (self.masks == "none"), line
        assert ("uncorrected" in lines[-1]) == (bag.log_w_positive is None)


def unproved(*contracts: type[NegativesContract]) -> dict[str, list[str]]:
    """{reason: names of contracts}: the tests of these contracts that had nothing to check.

    unproved(TestMine)     # {"log_count is unknown: size was not tested": ["TestMine"], ...}
    """
    found: dict[str, list[str]] = {}
    for contract in contracts:
        for reason in contract().gaps().values():
            found.setdefault(reason, []).append(contract.__name__)
    return found


def _state(negatives: Negatives) -> dict[str, Tensor]:
    """Copies of all buffers and of all attributes that are numbers."""
    state = {name: value.clone() for name, value in negatives.named_buffers()}
    for path, module in negatives.named_modules():
        numbers = ((name, value) for name, value in vars(module).items() if isinstance(value, int | float))
        state |= {f"{path}.{name}": torch.tensor(value) for name, value in numbers}
    return state


def _assert_same(first: Bag, second: Bag) -> None:
    assert len(first.blocks) == len(second.blocks)
    for a, b in zip(first.blocks, second.blocks, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.log_w, b.log_w)
        assert torch.equal(a.emb, b.emb)
    one, two = first.log_w_positive, second.log_w_positive
    assert (one is None and two is None) or (one is not None and two is not None and torch.equal(one, two))


def _assert_finite(step: Step, negatives: Negatives) -> Tensor:
    loss = sampled_softmax(step, negatives(step))
    (gradient,) = torch.autograd.grad(loss.sum(), step.q)
    assert loss.shape == (len(step.q),)
    assert bool(torch.isfinite(loss).all())
    assert bool(torch.isfinite(gradient).all())
    return loss.detach()


def _between(negatives: Negatives, world: World, batch: int, steps: int, trial: int) -> None:
    for extra in range(steps):
        observe(negatives, world.step(batch, 2_000_000 + trial * steps + extra))
