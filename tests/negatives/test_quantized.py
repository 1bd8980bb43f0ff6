"""Negatives from a quantised softmax: QuantizedSoftmax (MIDX) and its codebooks."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from sparring.core.types import Corpus, Step
from sparring.losses import sampled_softmax
from sparring.negatives import UNKNOWN, InBatch, Negatives, Popularity, QuantizedSoftmax, Union
from sparring.negatives import quantized as module
from sparring.negatives.quantized import Codebook
from sparring.testing import NegativesContract, World, chi_square


def corpus(world: World, epoch: int = 0) -> Corpus:
    step = world.step(1, 0)
    assert step.positives is not None
    return Corpus(epoch, world.items, lambda ids: world.queries[ids], step.positives, torch.Generator().manual_seed(7))


def refreshed(world: World, n: int, words: int = 4, codebook: Codebook = "residual", **more) -> QuantizedSoftmax:  # type: ignore[no-untyped-def]
    negatives = QuantizedSoftmax(world.n_items, world.dim, n, words, codebook, **more)
    negatives.refresh(corpus(world))
    return negatives


@cache
def quantized(n_items: int, codebook: Codebook) -> list[Tensor]:
    """The quantised vectors of the items."""
    negatives = refreshed(World.build(n_items), 1, codebook=codebook)
    return [negatives.book[0, negatives.code[0, j]] + negatives.book[1, negatives.code[1, j]] for j in range(n_items)]


def proposal(codebook: Codebook, world: World, step: Step) -> Tensor:
    """(B, N) softmax over the quantised vectors, one item at a time."""
    q = step.q.detach().double() / world.tau
    mass = torch.stack([(q @ vector.double()).exp() for vector in quantized(world.n_items, codebook)], 1)
    return mass / mass.sum(1, keepdim=True)


class TestResidual(NegativesContract):
    codebook: Codebook = "residual"
    n = 500

    def make(self, world: World) -> Negatives:
        return refreshed(world, self.n, codebook=self.codebook)

    def resized(self, world: World, n: int) -> Negatives:
        return refreshed(world, n, codebook=self.codebook)

    def expected(self, world: World, step: Step) -> Tensor:
        return self.n * proposal(self.codebook, world, step)

    trials = 300


class TestProduct(TestResidual):
    codebook = "product"


class TestBeforeRefresh(NegativesContract):
    """Without codebooks every item is equally likely."""

    resized = UNKNOWN

    def make(self, world: World) -> Negatives:
        return QuantizedSoftmax(world.n_items, world.dim, 500, exclude="known")

    masks = "known"

    def expected(self, world: World, step: Step) -> Tensor:
        return torch.full((len(step.q), world.n_items), 500 / world.n_items)


class TestUnion(NegativesContract):
    """With the batch in one partition function, the expected counts of both sources add up for each query."""

    resized = UNKNOWN
    trials = 300
    draws = 20_000

    def make(self, world: World) -> Negatives:
        return Union(InBatch(Popularity(world.counts)), refreshed(world, 60))

    def expected(self, world: World, step: Step) -> Tensor:
        return (len(step.q) - 1) * world.popularity + 60 * proposal("residual", world, step)


@pytest.mark.parametrize("codebook", ["product", "residual"])
def test_log_prob_is_normalised(codebook) -> None:
    """Probabilities of all items sum to 1 for every query, even where most cells underflow single precision."""
    world = World.build()
    for tau in (0.7, 0.004):
        step = world.step(16, 1)
        step = Step(step.query_ids, step.item_ids, step.q, step.v, torch.tensor(tau), step.encode, step.generator)
        log_q = refreshed(world, 8, codebook=codebook).log_prob(torch.arange(world.n_items), step)
        assert log_q.shape == (16, world.n_items)
        torch.testing.assert_close(log_q.double().exp().sum(1), torch.ones(16).double(), rtol=1e-5, atol=0)
        assert bool(torch.isfinite(sampled_softmax(step, refreshed(world, 8, codebook=codebook)(step))).all())


def test_one_word_per_item_is_the_exact_softmax() -> None:
    """With as many words as items the proposal is the softmax, so every bag has the full partition function."""
    world = World.build()
    step = world.step(16, 1)
    negatives = refreshed(world, 10, words=world.n_items, exclude="none")
    want = torch.softmax(world.logits(step), 1)
    torch.testing.assert_close(
        negatives.log_prob(torch.arange(world.n_items), step).double().exp(), want, rtol=1e-4, atol=1e-9
    )
    block = negatives(step).blocks[0]
    total = (world.logits(step).gather(1, block.ids) + block.log_w.double()).exp().sum(1)
    torch.testing.assert_close(total.detach(), world.logits(step).exp().sum(1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("codebook", ["product", "residual"])
def test_codes_and_cells(codebook) -> None:
    """Each code is the nearest word of its half or residual; each cell lists exactly its items."""
    world = World.build(n_items=50, dim=6)
    found = refreshed(world, 8, words=5, codebook=codebook)
    for item in range(50):
        x = world.items[item]
        halves = (torch.cat([x[:3], torch.zeros(3)]), torch.cat([torch.zeros(3), x[3:]]))
        parts = halves if codebook == "product" else (x, x - found.book[0, found.code[0, item]])
        for which in (0, 1):
            distances = [float((parts[which] - word).square().sum()) for word in found.book[which]]
            assert distances[int(found.code[which, item])] == pytest.approx(min(distances), abs=1e-6)
    for cell in range(25):
        begin, size = int(found.start[cell]), int(found.size_of[cell])
        members = [j for j in range(50) if int(found.code[0, j]) * 5 + int(found.code[1, j]) == cell]
        assert sorted(found.items[begin : begin + size].tolist()) == members
    if codebook == "product":
        assert float(found.book[0, :, 3:].abs().sum() + found.book[1, :, :3].abs().sum()) == 0


def test_residual_books_are_closer_than_one() -> None:
    """The second book removes more than half of the squared error left by the first."""
    world = World.build(n_items=200, dim=4)
    found = refreshed(world, 8, words=16)
    one = (world.items - found.book[0][found.code[0]]).square().sum()
    two = (world.items - found.book[0][found.code[0]] - found.book[1][found.code[1]]).square().sum()
    assert float(two) < float(one) / 2


def test_more_words_than_items() -> None:
    """In a catalogue of three items with 16 words every item can be drawn, and nothing else."""
    world = World.build(n_items=3)
    step = world.step(8, 1)
    found = refreshed(world, 200, words=16, exclude="none")
    assert set(found(step).blocks[0].ids.flatten().tolist()) == {0, 1, 2}
    torch.testing.assert_close(found.log_prob(torch.arange(3), step).exp().sum(1), torch.ones(8))


def test_blocks_of_queries_draw_alike(monkeypatch) -> None:
    """Queries processed one at a time draw the same items as all together."""
    world = World.build()
    found = refreshed(world, 50)
    together = found(world.step(16, 1)).blocks[0].ids
    monkeypatch.setattr(module, "CELLS", 1)
    assert torch.equal(found(world.step(16, 1)).blocks[0].ids, together)


def test_refresh_every_other_epoch() -> None:
    """every=2 rebuilds before epochs 0 and 2 and leaves the books alone before epoch 1."""
    world, moved = World.build(), World.build(seed=5)
    found = refreshed(world, 8, every=2)
    before = found.book.clone()
    found.refresh(corpus(moved, 1))
    assert torch.equal(found.book, before)
    found.refresh(corpus(moved, 2))
    assert not torch.equal(found.book, before)


def test_the_positive_is_corrected_by_its_own_chance() -> None:
    """correction="both": every negative weighs 1 / q(j | i), the positive 1 / q(+ | i)."""
    world = World.build()
    step = world.step(16, 1)
    found = refreshed(world, 30, correction="both")
    bag = found(step)
    q = proposal("residual", world, step)
    assert bag.log_w_positive is not None
    torch.testing.assert_close(
        bag.log_w_positive.double(), -q.gather(1, step.item_ids.unsqueeze(1)).squeeze(1).log(), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        bag.blocks[0].log_w.double(), -q.gather(1, bag.blocks[0].ids).log(), rtol=1e-4, atol=1e-5
    )


def test_within_a_cell_items_are_alike() -> None:
    """One word per book gives one cell, so draws are uniform for every query."""
    world = World.build()
    found = refreshed(world, 7000, words=1, exclude="none")
    drawn = found(world.step(16, 1)).blocks[0].ids
    assert chi_square(torch.bincount(drawn.flatten(), minlength=world.n_items), torch.ones(world.n_items)) > 1e-4
    torch.testing.assert_close(
        found.log_prob(drawn[:, :5], world.step(16, 1)), torch.full((16, 5), -math.log(world.n_items))
    )


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: QuantizedSoftmax(10, 4, 0), "n, words"),
        (lambda: QuantizedSoftmax(10, 4, 8, words=0), "words"),
        (lambda: QuantizedSoftmax(10, 4, 8, codebook="additive"), "codebook"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_named(build, words) -> None:
    """A wrong argument raises a one-line error that names it."""
    with pytest.raises(ValueError, match=words):
        build()
