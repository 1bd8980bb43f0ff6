"""How often items are offered: Uniform, Popularity, Streaming."""

from __future__ import annotations

import math

import pytest
import torch

from sparring.core.types import Outcome, Step
from sparring.negatives import Popularity, Streaming, Uniform
from sparring.negatives.distributions import draw_from_cdf
from sparring.testing import World, chi_square

NOTHING = Outcome(torch.zeros(1), ())


def batch(*items: int) -> Step:
    ids = torch.tensor(items)
    nothing = torch.zeros(len(ids), 1)
    return Step(torch.arange(len(ids)), ids, nothing, nothing, torch.ones(()), lambda ids: nothing, torch.Generator())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.75, 1.0])
def test_popularity(alpha: float) -> None:
    """Draws and log_prob both follow count^alpha; an item that never occurs is never drawn and has log_prob -inf."""
    counts = [0, 5, 1, 100, 0, 40, 7, 0]
    distribution = Popularity(torch.tensor(counts), alpha)
    mass = [count**alpha if count else 0.0 for count in counts]
    p = torch.tensor([m / sum(mass) for m in mass], dtype=torch.float64)
    torch.testing.assert_close(distribution.log_prob(torch.arange(8)).double().exp(), p, rtol=1e-6, atol=0)
    drawn = distribution.sample((100, 1000), torch.Generator().manual_seed(0))
    assert drawn.shape == (100, 1000)
    assert chi_square(torch.bincount(drawn.flatten(), minlength=8), p) > 1e-4


def test_uniform() -> None:
    """Every item has the same chance."""
    drawn = Uniform(30).sample((100_000,), torch.Generator().manual_seed(0))
    assert chi_square(torch.bincount(drawn, minlength=30), torch.ones(30)) > 1e-4
    torch.testing.assert_close(Uniform(30).log_prob(torch.arange(30)).exp(), torch.full((30,), 1 / 30))


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


@pytest.mark.parametrize("sizes", [(40,), (7,), (7, 11, 13)])
def test_streaming_against_a_plain_loop(sizes: tuple[int, ...]) -> None:
    """The estimate is that of algorithms 2 and 3, collisions and duplicates in a batch included, divided by the batch size."""
    world = World.build(n_items=40)
    batches = [world.step(6, seed).item_ids.tolist() for seed in range(60)]
    streaming = Streaming(sizes, alpha=0.07, start=3.0)
    for items in batches:
        streaming.observe(batch(*items), NOTHING)
    want = torch.tensor(plain_streaming(batches, sizes, 0.07, 3.0)) / 6
    torch.testing.assert_close(streaming.log_prob(torch.arange(40)).exp(), want)


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
    """Four rows: those items whose turn it is, filled up with item 0, whose turn it always is."""
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
    # a mean over m independent gaps of sd about 1 / p
    noise = (1 / p) / (5000 * p).sqrt()
    assert bool(((mean - 1 / p).abs() <= 4 * noise).all()), mean


def test_streaming_counts_beyond_float32() -> None:
    """After 2^24 steps the clock still moves: an item seen at every step keeps a gap of 1."""
    streaming = Streaming((4,), alpha=0.5)
    streaming.time.fill_(2**24)
    streaming.last.fill_(2**24)
    for _ in range(20):
        streaming.observe(batch(1), NOTHING)
    assert float(streaming.log_prob(torch.tensor([1])).exp()) == pytest.approx(1.0, rel=1e-3)


def test_streaming_reads_a_short_last_batch_as_a_batch() -> None:
    """The chance per draw divides by the size of a full batch, also after a shorter one."""
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
    """A wrong argument is refused with one line that names it."""
    with pytest.raises(ValueError, match=words):
        build()
