"""Frequencies of items: Uniform, Popularity, Streaming."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparring.core.types import Outcome, Step
from sparring.negatives import Distribution, Popularity, Streaming, Uniform
from sparring.negatives.distributions import draw_from_cdf
from sparring.testing import World, chi_square

NOTHING = Outcome(torch.zeros(1), ())


def batch(*items: int) -> Step:
    ids = torch.tensor(items)
    nothing = torch.zeros(len(ids), 1)
    return Step(torch.arange(len(ids)), ids, nothing, nothing, torch.ones(()), lambda ids: nothing, torch.Generator())


COUNTS = [0, 5, 1, 100, 0, 40, 7, 0]


def check_distribution(distribution: Distribution, mass: list[float]) -> None:
    """log_prob and 100,000 draws both follow the masses; an item without mass is never drawn and has log_prob -inf."""
    p = torch.tensor(mass, dtype=torch.float64) / sum(mass)
    torch.testing.assert_close(distribution.log_prob(torch.arange(len(p))).double().exp(), p, rtol=1e-6, atol=0)
    drawn = distribution.sample((100, 1000), torch.Generator().manual_seed(0))
    assert drawn.shape == (100, 1000)
    assert chi_square(torch.bincount(drawn.flatten(), minlength=len(p)), p) > 1e-4


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.75, 1.0])
def test_popularity(alpha: float) -> None:
    """Popularity is count^alpha over the items that occur."""
    check_distribution(Popularity(torch.tensor(COUNTS), alpha), [count**alpha if count else 0.0 for count in COUNTS])


def test_uniform() -> None:
    """All items are equally likely."""
    check_distribution(Uniform(30), [1.0] * 30)


class OneBefore(Popularity):
    """A search in the cumulative sum that ends one step early."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return (super().sample(shape, generator) - 1).clamp(min=0)


class DrawsImpossible(Popularity):
    """One draw in a thousand is an item that never occurs."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        drawn = super().sample(shape, generator)
        drawn.view(-1)[::1000] = 0
        return drawn


class Unnormalised(Popularity):
    """Its log_prob is of a mass that does not sum to 1."""

    def log_prob(self, ids: Tensor) -> Tensor:
        return super().log_prob(ids) + 0.1


class AnotherPower(Popularity):
    """It draws with alpha = 1, ignoring its alpha."""

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return Popularity(torch.tensor(COUNTS)).sample(shape, generator)


@pytest.mark.parametrize("wrong", [OneBefore, DrawsImpossible, Unnormalised, AnotherPower])
def test_wrong_distributions_are_rejected(wrong: type[Popularity]) -> None:
    """The check rejects draws that do not follow the formula and a log_prob that does not."""
    with pytest.raises(AssertionError):
        check_distribution(wrong(torch.tensor(COUNTS), 0.75), [count**0.75 if count else 0.0 for count in COUNTS])


def test_draw_from_cdf_skips_steps_of_zero() -> None:
    """Zeros at the start, in the middle and at the end are never drawn, and the mass need not be 1."""
    mass = torch.tensor([0.0, 0.0, 3.0, 0.0, 1e-9, 5.0, 0.0], dtype=torch.float64)
    drawn = draw_from_cdf(torch.cumsum(mass, 0), (100_000,), torch.Generator().manual_seed(0))
    assert chi_square(torch.bincount(drawn, minlength=7), mass) > 1e-4


def plain_streaming(batches: list[list[int]], sizes: tuple[int, ...], alpha: float, start: float) -> list[float]:
    """Algorithms 2 and 3, one item and one array at a time; in a batch an item counts once."""
    gap = [[start] * size for size in sizes]
    last = [[0.0] * size for size in sizes]
    for time, items in enumerate(batches, start=1):
        for h, size in enumerate(sizes):
            for bucket in {(item + 1) % size for item in items}:
                gap[h][bucket] = (1 - alpha) * gap[h][bucket] + alpha * (time - last[h][bucket])
                last[h][bucket] = time
    return [1 / max(gap[h][(item + 1) % size] for h, size in enumerate(sizes)) for item in range(40)]


def check_streaming(kind: type[Streaming], sizes: tuple[int, ...]) -> None:
    world = World.build(n_items=40)
    batches = [world.step(6, seed).item_ids.tolist() for seed in range(60)]
    streaming = kind(sizes, alpha=0.07, start=3.0)
    for items in batches:
        streaming.observe(batch(*items), NOTHING)
    want = torch.tensor(plain_streaming(batches, sizes, 0.07, 3.0)) / 6
    torch.testing.assert_close(streaming.log_prob(torch.arange(40)).exp(), want)


@pytest.mark.parametrize("sizes", [(40,), (7,), (7, 11, 13)])
def test_streaming_against_a_plain_loop(sizes: tuple[int, ...]) -> None:
    """The estimate is that of algorithms 2 and 3, with collisions and duplicates, divided by the batch size."""
    check_streaming(Streaming, sizes)


class ShortestGap(Streaming):
    """A collision in one array decides."""

    def log_prob(self, ids: Tensor) -> Tensor:
        return -self.gap[self.buckets(ids)].amin(-1).log() - self.draws.log()


class ForgetsLastSeen(Streaming):
    """Every gap is counted from step 0."""

    def observe(self, step: Step, outcome: Outcome) -> None:
        super().observe(step, outcome)
        self.last.zero_()


class PerBatch(Streaming):
    """The probability per batch, not divided by the batch size."""

    def log_prob(self, ids: Tensor) -> Tensor:
        return super().log_prob(ids) + self.draws.log()


@pytest.mark.parametrize("wrong", [ShortestGap, ForgetsLastSeen, PerBatch])
def test_wrong_streams_are_rejected(wrong: type[Streaming]) -> None:
    """The plain loop rejects an estimate with one of the known bugs."""
    with pytest.raises(AssertionError):
        check_streaming(wrong, (7, 11, 13))


def test_streaming_takes_the_longest_gap() -> None:
    """A collision shortens a gap, so the rare item that collides in one array keeps its long gap from the other."""
    streaming = Streaming((2, 3), alpha=0.5)
    for time in range(1, 41):  # item 0 always, item 2 every tenth step: they share a bucket of the first array only
        streaming.observe(batch(0, 2) if time % 10 == 0 else batch(0), NOTHING)
    p = streaming.log_prob(torch.tensor([0, 2])).exp() * 2
    assert float(p[0]) == pytest.approx(1.0, rel=0.01)
    assert float(p[1]) == pytest.approx(0.1, rel=0.15)


def test_streaming_finds_the_period() -> None:
    """On a stream in which item j occurs every k_j steps the estimate becomes exactly 1 / k_j."""
    periods = [1, 2, 5, 9]
    streaming = Streaming((10,), alpha=0.2)
    for time in range(1, 401):
        streaming.observe(step_of(time, periods), NOTHING)
    got = streaming.log_prob(torch.arange(4)).exp() * 4
    torch.testing.assert_close(got, torch.tensor([1 / period for period in periods]), rtol=1e-4, atol=0)


def step_of(time: int, periods: list[int]) -> Step:
    """Four rows: the items due at this step, filled up with item 0, which is always due."""
    items = [item for item, period in enumerate(periods) if time % period == 0]
    return batch(*items, *[0] * (4 - len(items)))


def test_streaming_converges_on_a_stationary_stream() -> None:
    """On a stream of single draws from p the mean gap is 1 / p, within 4 standard errors."""
    p = torch.tensor([0.5, 0.25, 0.15, 0.1])
    stream = torch.multinomial(p, 6000, replacement=True, generator=torch.Generator().manual_seed(0))
    streaming = Streaming((4,), alpha=0.05)
    gaps = []
    for time, item in enumerate(stream):
        streaming.observe(batch(int(item)), NOTHING)
        if time >= 1000 and time % 10 == 0:
            gaps.append(-streaming.log_prob(torch.arange(4)))
    mean = torch.stack(gaps).exp().mean(0)
    # a mean over m independent gaps of deviation about 1 / p
    noise = (1 / p) / (5000 * p).sqrt()
    assert bool(((mean - 1 / p).abs() <= 4 * noise).all()), mean


def test_streaming_counts_beyond_float32() -> None:
    """After 2^24 steps the clock still advances: an item seen at every step keeps a gap of 1."""
    streaming = Streaming((4,), alpha=0.5)
    streaming.time.fill_(2**24)
    streaming.last.fill_(2**24)
    for _ in range(20):
        streaming.observe(batch(1), NOTHING)
    assert float(streaming.log_prob(torch.tensor([1])).exp()) == pytest.approx(1.0, rel=1e-3)


def test_streaming_reads_a_short_last_batch_as_a_batch() -> None:
    """The probability per draw divides by the full batch size, also after a shorter batch."""
    streaming = Streaming((8,), alpha=0.5)
    for size in (6, 6, 6, 2):
        streaming.observe(batch(*[1] * size), NOTHING)
    assert float(streaming.log_prob(torch.tensor([1]))) == pytest.approx(-math.log(6), abs=1e-5)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Streaming(()), "hash array"),
        (lambda: Streaming((0,)), "bucket"),
        (lambda: Streaming((4,), alpha=0.0), "alpha"),
        (lambda: Streaming((4,), alpha=1.5), "alpha"),
    ],
)
def test_bad_arguments_are_named(build, words) -> None:
    """A wrong argument raises a one-line error that names it."""
    with pytest.raises(ValueError, match=words):
        build()
