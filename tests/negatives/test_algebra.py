"""Combinations of bags: Resample and Hardest over any source."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparring.core.types import Bag, Step
from sparring.losses import bpr, sampled_softmax
from sparring.negatives import Hardest, InBatch, Memory, Negatives, Popularity, Resample, Sampled, Uniform, Union
from sparring.negatives.algebra import multinomial_counts, rounded_counts, systematic_counts
from sparring.testing import NegativesContract, World, dense


def softmax_of_batch(world: World, step: Step) -> Tensor:
    """(B, B) p_ij = softmax_j(s_ij - log p_j) over the columns whose item is not the row's own, one pair at a time."""
    scores, log_p, own = world.logits(step), world.popularity.log(), step.item_ids
    mass = torch.zeros(len(own), len(own), dtype=torch.float64)
    for row in range(len(own)):
        for column in range(len(own)):
            if own[row] != own[column]:
                mass[row, column] = math.exp(scores[row, own[column]] - log_p[own[column]])
    return mass / mass.sum(1, keepdim=True)


class ResampleContract(NegativesContract):
    """A bag whose weights are counts of draws: item j is drawn n p_ij times."""

    selects = True
    n = 500

    def offered(self, bag: Bag, step: Step, n_items: int) -> Tensor:
        return dense(bag, step, n_items)[0]

    def expected(self, world: World, step: Step) -> Tensor:
        p = softmax_of_batch(world, step)
        return torch.zeros(len(p), world.n_items, dtype=torch.float64).index_add_(1, step.item_ids, self.n * p)


class TestMultinomial(ResampleContract):
    def make(self, world: World) -> Negatives:
        return Resample(InBatch(Popularity(world.counts)), n=self.n, draw="multinomial")


class TestSystematic(ResampleContract):
    def make(self, world: World) -> Negatives:
        return Resample(InBatch(Popularity(world.counts)), n=self.n, draw="systematic")


class TestRounded(ResampleContract):
    def make(self, world: World) -> Negatives:
        return Resample(InBatch(Popularity(world.counts)), n=self.n, draw="rounded")


class TestExpected(ResampleContract):
    draws = 2000  # only the batch is random

    def make(self, world: World) -> Negatives:
        return Resample(InBatch(Popularity(world.counts)), n=self.n)


class TestExpectedKnown(NegativesContract):
    selects, masks = True, "known"

    def make(self, world: World) -> Negatives:
        return Resample(InBatch(Popularity(world.counts), exclude="known"))


class TestSystematicKnown(NegativesContract):
    selects, masks = True, "known"

    def make(self, world: World) -> Negatives:
        return Resample(InBatch(Popularity(world.counts), exclude="known"), draw="systematic")


class TestResamplePerQuery(ResampleContract):
    """Each query draws from per-query candidates."""

    draws = 20_000
    draw = "multinomial"

    def make(self, world: World) -> Negatives:
        source = Sampled(Popularity(world.counts), 40, per_query=True)
        return Resample(source, n=self.n, draw=self.draw)  # type: ignore[arg-type]

    def expected(self, world: World, step: Step) -> Tensor:
        ids = Sampled(Popularity(world.counts), 40, per_query=True)(world.step(self.batch, 0)).blocks[0].ids
        twin = torch.Generator()
        twin.set_state(step.generator.get_state())
        ids = Popularity(world.counts).sample(tuple(ids.shape), twin)
        mass = (world.logits(step) - world.popularity.log()).exp().gather(1, ids)
        mass[ids == step.item_ids.unsqueeze(1)] = 0
        return torch.zeros(len(ids), world.n_items, dtype=torch.float64).scatter_add_(
            1, ids, self.n * mass / mass.sum(1, keepdim=True)
        )


class TestResamplePerQuerySystematic(TestResamplePerQuery):
    draw = "systematic"


class TestResamplePerQueryExpected(TestResamplePerQuery):
    draws, draw = 2000, "expected"


class TestResampleUnion(ResampleContract):
    """Draws go over the candidates of all sources together, by their scores and their common weight."""

    draw = "multinomial"
    extra = 24

    def make(self, world: World) -> Negatives:
        union = Union(InBatch(Popularity(world.counts)), Sampled(Uniform(world.n_items), self.extra))
        return Resample(union, n=self.n, draw=self.draw)  # type: ignore[arg-type]

    def expected(self, world: World, step: Step) -> Tensor:
        twin = torch.Generator()
        twin.set_state(step.generator.get_state())
        ids = torch.cat([step.item_ids, torch.randint(world.n_items, (self.extra,), generator=twin)])
        count = (len(step.q) - 1) * world.popularity + self.extra / world.n_items
        mass = (world.logits(step).exp() / count)[:, ids]
        mass[ids == step.item_ids.unsqueeze(1)] = 0
        return torch.zeros(len(mass), world.n_items, dtype=torch.float64).index_add_(
            1, ids, self.n * mass / mass.sum(1, keepdim=True)
        )


class TestResampleUnionExpected(TestResampleUnion):
    draws, draw = 2000, "expected"


class TestResampleUnionMixedMasks(NegativesContract):
    """Sources that mask differently keep their own masks when they are merged."""

    selects = True

    def make(self, world: World) -> Negatives:
        batch, known = InBatch(Popularity(world.counts)), Sampled(Uniform(world.n_items), 24, exclude="known")
        return Resample(Union(batch, known))


class TestResampleMemory(NegativesContract):
    """The empty places of a memory that is not full are never drawn."""

    selects = True

    def make(self, world: World) -> Negatives:
        frequency = Popularity(world.counts)
        return Resample(Union(InBatch(frequency), Memory(100, world.dim, frequency)), n=64, draw="multinomial")


class TestHardest(NegativesContract):
    selects = True
    draws = 2000  # only the batch is random

    def make(self, world: World) -> Negatives:
        return Hardest(InBatch(Popularity(world.counts)), 4)

    def expected(self, world: World, step: Step) -> Tensor:
        scores, count = world.logits(step).tolist(), torch.zeros(len(step.q), world.n_items)
        for row, own in enumerate(step.item_ids.tolist()):
            others = [item for item in step.item_ids.tolist() if item != own]
            for item in sorted(others, key=lambda item: -scores[row][item])[:4]:
                count[row, item] += 1
        return count


class TestHardestPerQuery(NegativesContract):
    """DNS: the hardest of each query's own draws."""

    selects = True

    def make(self, world: World) -> Negatives:
        return Hardest(Sampled(Uniform(world.n_items), 12, per_query=True), 1)

    def test_no_draw_scores_higher(self) -> None:
        """The kept item scores at least as high as every draw that is not the positive."""
        world = World.build()
        step = world.step(16, 1)
        drawn = Sampled(Uniform(world.n_items), 12, per_query=True)(world.step(16, 1)).blocks[0].ids
        kept = self.make(world)(step).blocks[0].ids
        scores = world.logits(step)
        for row, own in enumerate(step.item_ids.tolist()):
            best = max((item for item in drawn[row].tolist() if item != own), key=lambda item: scores[row, item])
            assert kept[row].tolist() == [best]
        assert bool((bpr(step, self.make(world)(world.step(16, 1))) > 0).all())


class TestHardestUnion(NegativesContract):
    selects = True

    def make(self, world: World) -> Negatives:
        return Hardest(Union(InBatch(Popularity(world.counts)), Sampled(Uniform(world.n_items), 10)), 5)


def test_hardest_keeps_what_is_left() -> None:
    """With fewer candidates than k all are kept, and masked ones weigh nothing."""
    world = World.build()
    step = world.step(6, 1)
    bag = Hardest(InBatch(), 10)(step)
    assert bag.blocks[0].ids.shape == (6, 6)
    torch.testing.assert_close(sampled_softmax(step, bag), sampled_softmax(step, InBatch()(step)))


def refused(negatives: Negatives, step: Step) -> bool:
    """Whether a composition raises an error that names its part."""
    try:
        negatives(step)
    except ValueError as error:
        return "Resample" in str(error)
    return False


@pytest.mark.parametrize("inner", ["expected", "multinomial"])
def test_the_hardest_of_a_resampled_bag(inner) -> None:
    """Hardest over a Resample keeps the weights of the draws, or raises a clear error; it never drops them."""
    world = World.build()
    source = Resample(InBatch(Popularity(world.counts)), n=16, draw=inner)
    step = world.step(16, 1)
    full = dense(source(step), step, world.n_items)
    if refused(Hardest(source, 3), world.step(16, 1)):
        return
    step = world.step(16, 1)
    bag = Hardest(source, 3)(step)
    assert bool(torch.isfinite(sampled_softmax(step, bag)).all())
    assert bool((dense(bag, step, world.n_items) <= full + 1e-4).all())


def test_resampling_a_resampled_bag() -> None:
    """The outer draw follows the inner weights: over expected counts softmax(2 s - log p), or a clear error."""
    world = World.build()
    step = world.step(16, 1)
    negatives = Resample(Resample(InBatch(Popularity(world.counts))), n=10_000, draw="systematic")
    if refused(negatives, step):
        return
    bag = negatives(step)
    mass = softmax_of_batch(world, step) * world.logits(step)[:, step.item_ids].exp()
    want = 10_000 * mass / mass.sum(1, keepdim=True)
    assert bool(((bag.blocks[0].log_w.exp() - want).abs() <= 1.01).all())


def test_closed_form_gradient_is_softmax_of_twice_the_score() -> None:
    """With expected counts the negatives pull with softmax(2 s - log p), computed here pair by pair in float64."""
    world = World.build()
    table = world.items.clone().requires_grad_()
    step = world.step(16, 1, table=table)
    loss = sampled_softmax(step, Resample(InBatch(Popularity(world.counts)), n=64)(step))
    (got,) = torch.autograd.grad(loss.sum(), step.q)
    p = softmax_of_batch(world, step)
    s = world.logits(step)[:, step.item_ids]
    twice = p * s.exp() / (p * s.exp()).sum(1, keepdim=True)
    mass = 64 * (p * s.exp()).sum(1)
    positive = world.logits(step).gather(1, step.item_ids.unsqueeze(1)).squeeze(1).exp()
    pull = (mass / (positive + mass)).unsqueeze(1)  # one minus the probability of the positive
    vectors = world.items.double()[step.item_ids]
    want = pull * (twice @ vectors - vectors) / world.tau
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("draw", ["multinomial", "systematic", "rounded"])
def test_closed_form_is_the_mean_and_the_limit_of_draws(draw) -> None:
    """Summed weights of drawn bags average to the closed form's, and one bag of very many draws has its loss."""
    world = World.build()
    expected = Resample(InBatch(Popularity(world.counts)), n=32)
    step = world.step(16, 1)
    want = dense(expected(step), step, world.n_items)
    drawn = torch.stack(
        [
            dense(Resample(InBatch(Popularity(world.counts)), n=32, draw=draw)(step), step, world.n_items)
            for _ in range(400)
        ]
    )
    noise = drawn.std(0) / math.sqrt(len(drawn))
    assert bool(((drawn.mean(0) - want).abs() <= 4 * noise + 4 / len(drawn)).all())  # rare events are not normal
    for n, budget in ((1_000, 0.1), (200_000, 0.01)):
        loss = sampled_softmax(step, Resample(InBatch(Popularity(world.counts)), n=n, draw=draw)(step))
        closed = sampled_softmax(step, Resample(InBatch(Popularity(world.counts)), n=n)(step))
        assert float((loss - closed).detach().abs().max()) < budget


@pytest.mark.parametrize("n", [1, 7, 64, 1024])
def test_systematic_counts(n: int) -> None:
    """Counts are within 1 of n p, rows sum to n, candidates of probability 0 are never drawn, the mean is n p."""
    counts_lie_around(n, systematic_counts)


@pytest.mark.parametrize("n", [1, 7, 64, 1024])
def test_rounded_counts(n: int) -> None:
    """Every count differs from n p by less than 1, zero probability is never drawn, and the mean is n p."""
    counts_lie_around(n, rounded_counts, sums=False)


def counts_lie_around(n: int, drawn, sums: bool = True) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(50, 33, generator=generator).double() ** 4
    p[:, ::5] = 0
    p[7] = 0
    p[7, 3] = 1
    p /= p.sum(1, keepdim=True)
    total = torch.zeros_like(p)
    for _ in range(300):
        counts = drawn(p, n, generator)
        assert bool(((counts - n * p).abs() < 1).all())
        assert not sums or bool((counts.sum(1) == n).all())
        assert bool((counts[p == 0] == 0).all())
        assert torch.equal(counts, counts.round())
        total += counts
    fraction = (n * p) % 1  # a count has two neighbouring values, so its variance is that of a coin
    noise = (fraction * (1 - fraction) / 300).sqrt()
    # a few more draws, since rare events are not normal
    assert bool(((total / 300 - n * p).abs() <= 4 * noise + 4 / 300).all())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, n, generator: torch.floor(p * n),
        lambda p, n, generator: torch.floor(p * n + torch.rand(1, generator=generator)) + (p == 0),
        lambda p, n, generator: torch.floor(torch.cumsum(p, 1) * n + 1e-9).diff(prepend=torch.zeros(len(p), 1)),
        lambda p, n, generator: torch.ceil(torch.cumsum(p, 1) * n + 0.5).diff(prepend=torch.zeros(len(p), 1)),
        multinomial_counts,
    ],
    ids=["always rounded down", "impossible drawn", "no random start", "off by one", "not within 1"],
)
def test_wrong_counts_are_rejected(wrong) -> None:
    """The check rejects a wrong mean, draws of candidates without probability, and counts too far from n p."""
    with pytest.raises(AssertionError):
        counts_lie_around(7, wrong, sums=False)


@pytest.mark.parametrize("counts", [multinomial_counts, systematic_counts])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_without_probability_draws_nothing(counts, dtype) -> None:
    """A row of zeros gives zeros; its neighbours still sum to n, in either precision."""
    p = torch.tensor([[0.0, 0.0, 0.0], [0.2, 0.0, 0.8]], dtype=dtype)
    drawn = counts(p, 10, torch.Generator().manual_seed(0))
    assert drawn.dtype == dtype
    assert drawn[0].tolist() == [0, 0, 0]
    assert float(drawn[1].sum()) == 10
    assert float(drawn[1, 1]) == 0


@pytest.mark.parametrize("draw", ["expected", "multinomial", "systematic", "rounded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_resampling_works_in_other_precisions(draw, dtype) -> None:
    """Vectors in float64 and bfloat16 can be resampled like float32 ones."""
    world = World.build(dtype=dtype)
    single = World.build()
    for name in ("items", "queries"):
        object.__setattr__(world, name, getattr(single, name).to(dtype))
    step = world.step(16, 1)
    loss = sampled_softmax(step, Resample(InBatch(Popularity(world.counts)), n=64, draw=draw)(step))
    reference = single.step(16, 1)
    want = sampled_softmax(reference, Resample(InBatch(Popularity(world.counts)), n=64)(reference))
    torch.testing.assert_close(loss.float(), want, rtol=0.2, atol=0.2)


@pytest.mark.parametrize("draw", ["expected", "multinomial", "systematic"])
def test_the_loss_returns_the_number_of_draws(draw) -> None:
    """The counts returned with the loss are the draws summed over the queries: n for each query that can draw."""
    world = World.build()
    step = world.step(16, 1)
    bag = Resample(InBatch(Popularity(world.counts)), n=50, draw=draw)(step)
    output = sampled_softmax.detailed(step, bag)
    assert output.draw_counts is not None
    (counts,) = output.draw_counts
    assert counts is not None
    assert counts.shape == (16,)
    torch.testing.assert_close(float(counts.sum()), 16 * 50.0, rtol=1e-4, atol=0)
    want = dense(bag, step, world.n_items).sum(0)
    got = torch.zeros(world.n_items, dtype=torch.float64).index_add_(0, step.item_ids, counts.double())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_pairwise_losses_refuse_expected_counts() -> None:
    """A pairwise loss has no closed form over expected draws, and the error names the remedy."""
    world = World.build()
    step = world.step(8, 1)
    with pytest.raises(ValueError, match="draw="):
        bpr(step, Resample(InBatch(Popularity(world.counts)))(step))


def test_a_merged_bag_describes_all_its_weights() -> None:
    """The description of an uncorrected and a corrected source resampled together names both corrections."""
    world = World.build()
    bag = Resample(Union(InBatch(), Sampled(Uniform(world.n_items), 8)))(world.step(8, 1))
    assert "expected count" in bag.describe().splitlines()[0]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Resample(InBatch(), n=0), "n >= 1"),
        (lambda: Resample(InBatch(), draw="iid"), "draw"),  # type: ignore[arg-type]
        (lambda: Hardest(InBatch(), 0), "k >= 1"),
    ],
)
def test_bad_arguments_are_named(build, words) -> None:
    """A wrong argument raises a one-line error that names it."""
    with pytest.raises(ValueError, match=words):
        build()
