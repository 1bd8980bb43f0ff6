"""The cache of XIR: items that past queries drew most often."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparring.core.part import loss_output
from sparring.core.types import Bag, Candidates, Outcome, Step
from sparring.losses import sampled_softmax
from sparring.negatives import Cache, InBatch, Negatives, Popularity, Resample, Sampled, Uniform, Union
from sparring.negatives.distributions import Distribution
from sparring.testing import NegativesContract, World, chi_square, dense, observe


class TestCache(NegativesContract):
    pool = "all"

    def make(self, world: World) -> Negatives:
        return Cache(64, Popularity(world.counts), world.n_items, pool=self.pool)  # type: ignore[arg-type]

    def test_weight_is_one_over_popularity(self) -> None:
        """A cached item weighs 1 / p for each copy in the cache."""
        world = World.build()
        cache, step = self.warmed(world), world.step(16, 1)
        held = torch.bincount(cache.ids, minlength=world.n_items).double()  # type: ignore[arg-type]
        want = torch.where(held > 0, held / world.popularity, 0.0).expand(16, -1).clone()
        want[torch.arange(16), step.item_ids] = 0
        torch.testing.assert_close(dense(cache(step), step, world.n_items), want, rtol=1e-5, atol=0)


class TestCacheKnown(TestCache):
    masks = "known"

    def make(self, world: World) -> Negatives:
        return Cache(64, Popularity(world.counts), world.n_items, exclude="known")

    def test_weight_is_one_over_popularity(self) -> None:
        """The initial cache holds `size` items, drawn evenly from those that occur."""
        world = World.build()
        ids = Cache(50_000, Popularity(world.counts), world.n_items).ids
        assert chi_square(torch.bincount(ids, minlength=world.n_items), (world.counts > 0).double()) > 1e-4


class TestResampledCache(NegativesContract):
    """The second term of XIR, whose own draws feed the cache."""

    selects = True
    pool = "all"
    draw = "expected"

    def make(self, world: World) -> Negatives:
        cache = Cache(32, Popularity(world.counts), world.n_items, pool=self.pool)  # type: ignore[arg-type]
        return Resample(cache, n=16, draw=self.draw)  # type: ignore[arg-type]

    def test_occurrences_grow_by_every_draw(self) -> None:
        """After three steps of B queries and n draws, 3 B n draws have been counted."""
        world = World.build()
        cache = self.warmed(world).source
        torch.testing.assert_close(float(cache.occurrences.sum()), 3.0 * self.batch * 16, rtol=1e-4, atol=0)  # type: ignore[union-attr, operator, arg-type]


class TestResampledCacheDrawn(TestResampledCache):
    pool = "drawn"


class TestResampledCacheSystematic(TestResampledCache):
    draw = "systematic"


class TestResampledCacheMultinomial(TestResampledCache):
    draw, pool = "multinomial", "drawn"


def outcome(*drawn: tuple[list[int], list[float]]) -> Outcome:
    """The outcome of a step whose terms drew these items with these counts."""
    bags = tuple(
        Bag((Candidates(torch.tensor(ids), torch.zeros(len(ids), 4), torch.zeros(()), drawn=torch.tensor(counts)),))
        for ids, counts in drawn
    )
    return Outcome(torch.zeros(1), bags)


def adds_up(kind: type[Cache]) -> None:
    """An item drawn 3 and 4 times at two places of one term and 5 times in another has 12 occurrences."""
    world = World.build()
    cache = kind(8, Popularity(world.counts), world.n_items)
    cache.observe(world.step(4, 1), outcome(([2, 2, 5], [3.0, 4.0, 1.0]), ([2, 7], [5.0, 2.5])))
    want = torch.zeros(world.n_items, dtype=torch.float64)
    want[2], want[5], want[7] = 12, 1, 2.5
    assert torch.equal(cache.occurrences, want)
    cache.observe(world.step(4, 2), outcome(([2], [1.0])))
    assert float(cache.occurrences[2]) == 13


def test_counts_of_a_whole_step() -> None:
    """Both terms of XIR feed the cache: per item, the draws summed over queries and terms, recomputed from the bags."""
    world = World.build()
    frequency = Popularity(world.counts)
    for draw in ("expected", "multinomial", "systematic"):
        cache = Cache(16, frequency, world.n_items, start=1.0)
        terms = [Resample(InBatch(frequency), 20, draw), Resample(cache, 30, draw)]  # type: ignore[arg-type]
        step = world.step(8, 1)
        bags = tuple(term(step) for term in terms)
        loss = sum(sampled_softmax(step, bag) for bag in bags)
        want = 1.0 * (world.counts > 0) + sum(dense(bag, step, world.n_items).sum(0) for bag in bags)
        cache.observe(step, Outcome(loss.detach(), bags))  # type: ignore[union-attr]
        torch.testing.assert_close(cache.occurrences, want, rtol=1e-4, atol=1e-3)


def test_counts_do_not_depend_on_who_wrote_the_loss() -> None:
    """Occurrences are the same after a loss that returns its draw counts and after a plain function around it."""
    world = World.build()
    frequency = Popularity(world.counts)
    occurrences = []
    for loss in (sampled_softmax, lambda step, bag: 2 * sampled_softmax(step, bag)):
        cache = Cache(16, frequency, world.n_items)
        step = world.step(8, 1)
        bag = Resample(InBatch(frequency), 20)(step)
        output = loss_output(loss, step, bag)
        cache.observe(step, Outcome(output.losses.detach(), (bag,), (output,)))
        occurrences.append(cache.occurrences)
        assert (output.draw_counts is None) == (loss is not sampled_softmax)
    assert float(occurrences[0].sum()) == pytest.approx(8 * 20, rel=1e-4)
    torch.testing.assert_close(occurrences[0], occurrences[1])


def test_draws_of_a_query_of_its_own_count_too() -> None:
    """Every Resample of the run feeds the cache, also one with per-query candidates."""
    world = World.build()
    frequency = Popularity(world.counts)
    cache = Cache(16, frequency, world.n_items)
    step = world.step(8, 1)
    bag = Resample(Sampled(frequency, 12, per_query=True), 20, "systematic")(step)
    loss = sampled_softmax(step, bag)
    cache.observe(step, Outcome(loss.detach(), (bag,)))
    torch.testing.assert_close(cache.occurrences, dense(bag, step, world.n_items).sum(0), rtol=1e-4, atol=1e-3)


class Elsewhere(Distribution):
    """Uniform with a buffer that cannot be indexed by ids on another device."""

    log_p: torch.Tensor

    def __init__(self, n_items: int, device: str):
        super().__init__()
        self.register_buffer("log_p", torch.zeros(n_items, device=device))

    def log_prob(self, ids: torch.Tensor) -> torch.Tensor:
        return self.log_p.gather(0, ids)


@pytest.mark.parametrize("n_items", [50, 300_000])  # in one block and in many
def test_a_cache_of_a_distribution_on_another_device(n_items: int) -> None:
    """The cache is on the device of its distribution; fake CUDA tensors detect a mix of devices."""
    with FakeTensorMode():
        cache = Cache(8, Elsewhere(n_items, "cuda"), n_items)
    assert {buffer.device.type for buffer in cache.buffers()} == {"cuda"}


def test_the_next_cache_follows_all_occurrences() -> None:
    """pool="all": draws with replacement in proportion to all occurrences so far; chi-square over 1e5 places."""
    world = World.build()
    cache = Cache(50_000, Popularity(world.counts), world.n_items)
    occurrences = torch.arange(world.n_items, dtype=torch.float64) ** 2
    occurrences[-1] = 0
    held = torch.zeros(world.n_items)
    for seed in range(2):
        cache.occurrences.copy_(occurrences)
        cache.observe(world.step(4, seed), outcome(([1], [1.0])))
        held += torch.bincount(cache.ids, minlength=world.n_items)
    occurrences[1] += 1
    assert chi_square(held, occurrences) > 1e-4


def draws_from_this_step(kind: type[Cache]) -> None:
    """pool="drawn": only items drawn in this step, in proportion to all their occurrences so far."""
    world = World.build()
    cache = kind(50_000, Popularity(world.counts), world.n_items, pool="drawn", start=1.0)
    cache.observe(world.step(4, 1), outcome(([3, 4, 9], [10.0, 1.0, 5.0])))
    cache.observe(world.step(4, 2), outcome(([4, 9], [2.0, 1.0])))
    held = torch.bincount(cache.ids, minlength=world.n_items)
    want = torch.zeros(world.n_items)
    want[4], want[9] = 1 + 1 + 2, 1 + 5 + 1
    assert set(cache.ids.unique().tolist()) == {4, 9}
    assert chi_square(held, want) > 1e-4


def test_without_draws_the_cache_stays() -> None:
    """A first step without draws leaves the uniform start unchanged."""
    world = World.build()
    cache = Cache(32, Popularity(world.counts), world.n_items)
    before = cache.ids.clone()
    cache.observe(world.step(4, 1), Outcome(torch.zeros(4), ()))
    assert torch.equal(cache.ids, before)


def registers_small_additions(kind: type[Cache]) -> None:
    """A counter at 1.6e8 registers +5, which float32 would lose."""
    world = World.build()
    cache = kind(8, Popularity(world.counts), world.n_items)
    cache.occurrences[3] = 1.6e8
    cache.observe(world.step(4, 1), outcome(([3], [5.0])))
    assert float(cache.occurrences[3]) == 1.6e8 + 5


@pytest.mark.parametrize("check", [adds_up, draws_from_this_step, registers_small_additions])
def test_occurrences(check: Callable[[type[Cache]], None]) -> None:
    """All draws of all terms add up in double precision, and the next cache is drawn from the pool."""
    check(Cache)


class CountsItemsOnce(Cache):
    """An item counts once per place, regardless of its number of draws."""

    def observe(self, step: Step, result: Outcome) -> None:
        blocks = [block for bag in result.bags for block in bag.blocks]
        once = [replace(block, drawn=(block.drawn > 0).double()) for block in blocks if block.drawn is not None]
        super().observe(step, replace(result, bags=(Bag(tuple(once)),)))


class FirstTermOnly(Cache):
    """The draws of the other terms are not counted."""

    def observe(self, step: Step, result: Outcome) -> None:
        super().observe(step, replace(result, bags=result.bags[:1]))


class IgnoresItsPool(Cache):
    """It draws from the catalogue, ignoring the pool."""

    def observe(self, step: Step, result: Outcome) -> None:
        self.pool = "all"
        super().observe(step, result)


class SinglePrecision(Cache):
    """Occurrences are kept in float32."""

    def observe(self, step: Step, result: Outcome) -> None:
        super().observe(step, result)
        self.occurrences.copy_(self.occurrences.float())


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (CountsItemsOnce, adds_up),
        (FirstTermOnly, adds_up),
        (IgnoresItsPool, draws_from_this_step),
        (SinglePrecision, registers_small_additions),
    ],
)
def test_wrong_caches_are_rejected(wrong: type[Cache], check: Callable[[type[Cache]], None]) -> None:
    """Each check rejects the bug that it guards against."""
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.parametrize("pool", ["all", "drawn"])
def test_an_item_without_interactions_never_enters(pool) -> None:
    """An item of frequency 0 never enters: not initially, not with start=1, not when another term draws it."""
    world = World.build()
    never = world.n_items - 1
    frequency = Popularity(world.counts)
    cache = Cache(4096, frequency, world.n_items, pool=pool, start=1.0)
    assert world.counts[never] == 0
    assert not bool((cache.ids == never).any())
    cache.observe(world.step(4, 1), outcome(([0, 5], [1.0, 1.0])))
    assert not bool((cache.ids == never).any())
    cache.observe(world.step(4, 2), outcome(([0, never], [1.0, 1000.0])))
    assert not bool((cache.ids == never).any())
    step = world.step(4, 3)
    assert bool(torch.isfinite(sampled_softmax(step, cache(step))).all())


def test_a_run_that_draws_beyond_the_frequency_stays_finite() -> None:
    """XIR with uniform extra candidates: both losses stay finite and positive though a term draws unseen items."""
    world = World.build()
    frequency = Popularity(world.counts)
    cache = Cache(64, frequency, world.n_items, pool="drawn")
    terms = [Resample(Union(InBatch(frequency), Sampled(Uniform(world.n_items), 200)), 64), Resample(cache, 64)]
    for seed in range(5):
        step = world.step(8, seed)
        bags = tuple(term(step) for term in terms)
        losses = [sampled_softmax(step, bag).detach() for bag in bags]
        assert all(bool(torch.isfinite(loss).all()) and bool((loss > 0).all()) for loss in losses)
        cache.observe(step, Outcome(losses[0], bags))


def test_empty_places_are_not_items() -> None:
    """The cache skips the empty places (-1) of a resampled memory that is not full."""
    world = World.build()
    cache = Cache(8, Popularity(world.counts), world.n_items)
    cache.observe(world.step(4, 1), outcome(([4, -1, -1], [2.0, 0.0, 0.0])))
    assert float(cache.occurrences.sum()) == 2
    assert set(cache.ids.tolist()) == {4}


def test_the_cache_encodes_its_items_anew() -> None:
    """Vectors come from the current encoder, with gradient, not from the time of entry."""
    world = World.build()
    cache = Cache(16, Popularity(world.counts), world.n_items)
    observe(cache, world.step(4, 1))
    table = (world.items + 1).requires_grad_()
    (block,) = cache(world.step(4, 2, table=table)).blocks
    assert torch.equal(block.emb, table[cache.ids])
    assert block.emb.requires_grad


def test_bad_arguments_are_named() -> None:
    """A wrong argument raises a one-line error that names it."""
    world = World.build()
    with pytest.raises(ValueError, match="size >= 1"):
        Cache(0, Popularity(world.counts), world.n_items)
    with pytest.raises(ValueError, match="pool"):
        Cache(4, Popularity(world.counts), world.n_items, pool="recent")  # type: ignore[arg-type]


def test_xir_is_two_weighted_terms() -> None:
    """lambda * loss(cache draws) + (1 - lambda) * loss(batch draws), with each draw counted one by one."""
    world = World.build()
    frequency = Popularity(world.counts)
    cache = Cache(16, frequency, world.n_items, exclude="none")
    step = world.step(8, 1)
    batch_term = Resample(InBatch(frequency, exclude="none"), 12, "multinomial")(step)
    cache_term = Resample(cache, 12, "multinomial")(step)
    ours = 0.2 * sampled_softmax(step, cache_term) + 0.8 * sampled_softmax(step, batch_term)
    scores, want = world.logits(step), torch.zeros(8, dtype=torch.float64)
    for share, bag, pool in ((0.2, cache_term, cache.ids), (0.8, batch_term, step.item_ids)):
        counts = bag.blocks[0].log_w.exp().round().long()
        assert bool((counts.sum(1) == 12).all())
        for row in range(8):
            own = float(scores[row, step.item_ids[row]])
            drawn = [
                float(scores[row, pool[column]]) for column in range(len(pool)) for _ in range(int(counts[row, column]))
            ]
            want[row] += share * (-own + math.log(math.exp(own) + sum(map(math.exp, drawn))))
    torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-5)


def test_a_large_catalogue_is_drawn_from_in_blocks() -> None:
    """With block sums, draws follow all occurrences, and the sums equal the occurrences after every step."""
    n = 300_000
    generator = torch.Generator().manual_seed(0)
    counts = torch.ones(n)
    counts[5] = 0  # impossible: drawn elsewhere, it must never enter
    cache = Cache(100_000, Popularity(counts), n)
    assert cache.block > 1
    world, wanted = World.build(), torch.zeros(n, dtype=torch.float64)
    for seed in range(3):
        ids, usage = torch.randint(n, (40,), generator=generator), torch.rand(40, generator=generator).double()
        ids[:2] = torch.tensor([5, n - 1])
        cache.observe(world.step(4, seed), outcome((ids.tolist(), usage.tolist())))
        wanted.index_add_(0, ids, torch.where(ids == 5, 0.0, usage))
        torch.testing.assert_close(cache.occurrences, wanted)
        padded = torch.cat([wanted, torch.zeros(-n % cache.block, dtype=torch.float64)])
        torch.testing.assert_close(cache.sums, padded.view(-1, cache.block).sum(1))
    some = wanted > 0
    held = torch.bincount(cache.ids, minlength=n)
    assert int(held[~some].sum()) == 0
    assert chi_square(held[some].float(), wanted[some]) > 1e-4
