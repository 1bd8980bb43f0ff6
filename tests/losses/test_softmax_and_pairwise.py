"""Losses and temperatures, against formulas written out one pair at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.core.types import Bag, Candidates, Exclude, Step
from sparring.losses import Fixed, Learned, Loss, bpr, hinge, sampled_softmax, softmax_loss
from sparring.negatives import InBatch, Popularity, Sampled, Shown, Uniform, Union
from sparring.testing import World, weights


def case(tau: Tensor) -> tuple[Step, Bag]:
    """Two blocks, one shared and one per query, with weights, a mask, and a weight of the positive."""
    g = torch.Generator().manual_seed(0)
    q, v = (
        torch.randn(5, 3, generator=g, dtype=torch.float64).requires_grad_(),
        torch.randn(5, 3, generator=g, dtype=torch.float64),
    )
    step = Step(
        torch.arange(5), torch.tensor([1, 2, 3, 1, 5]), q, v.requires_grad_(), tau.double(), lambda ids: v[ids], g
    )
    shared = Candidates(
        torch.tensor([1, 2, 2, 9]),
        torch.randn(4, 3, generator=g, dtype=torch.float64),
        torch.randn(4, generator=g).double(),
        Exclude(step.item_ids),
    )
    own = Candidates(
        torch.arange(10).view(5, 2),
        torch.randn(5, 2, 3, generator=g, dtype=torch.float64),
        torch.randn(5, 2, generator=g).double(),
    )
    own.log_w[0, 1] = -math.inf
    return step, Bag((shared, own), torch.randn(5, generator=g).double())


def terms(step: Step, bag: Bag, row: int) -> list[tuple[Tensor, float]]:
    """(score, weight) of each candidate that counts against a row."""
    found = []
    for block in bag.blocks:
        for column in range(block.ids.shape[-1]):
            item = int(block.ids[column] if block.ids.dim() == 1 else block.ids[row, column])
            vector = block.emb[column] if block.emb.dim() == 2 else block.emb[row, column]
            weight = math.exp(block.log_w[column] if block.log_w.dim() == 1 else block.log_w[row, column])
            if block.exclude is None or item != int(step.item_ids[row]):
                found.append((step.q[row] @ vector / step.tau.expand(5)[row], weight))
    return found


def check(loss: Loss, formula: Callable[[Tensor, float, list[tuple[Tensor, float]]], Tensor], tau: Tensor) -> None:
    """Value and gradients equal those of formula(logit of the positive, its log weight, terms) to 1e-10 in float64."""
    step, bag = case(tau)
    assert bag.log_w_positive is not None
    logits = [step.q[row] @ step.v[row] / step.tau.expand(5)[row] for row in range(5)]
    want = torch.stack(
        [formula(logits[row], float(bag.log_w_positive[row]), terms(step, bag, row)) for row in range(5)]
    )
    got = loss(step, bag)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(
        *(torch.autograd.grad(value.sum(), [step.q, step.v]) for value in (got, want)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def softmax_formula(own: Tensor, log_w: float, found: list[tuple[Tensor, float]]) -> Tensor:
    t = own + log_w
    return -t + torch.log(t.exp() + sum(w * s.exp() for s, w in found))


def mean_of(penalty: Callable[[Tensor], Tensor]) -> Callable[[Tensor, float, list[tuple[Tensor, float]]], Tensor]:
    def formula(own: Tensor, log_w: float, found: list[tuple[Tensor, float]]) -> Tensor:
        return sum(w * penalty(s - own) for s, w in found) / sum(w for _, w in found)  # type: ignore[return-value]

    return formula


def check_nothing_left(loss: Loss) -> None:
    """Queries whose candidates are all masked have loss 0 and gradient 0, the others a positive and finite loss."""
    world = World.build()
    step = world.step(4, 1)
    ids = step.item_ids[:1].repeat(3)
    value = loss(step, Bag((Candidates(ids, world.items[ids], torch.zeros(()), Exclude(step.item_ids)),)))
    same = step.item_ids == step.item_ids[0]
    (gradient,) = torch.autograd.grad(value.sum(), step.q)
    assert bool((value[same] == 0).all())
    assert bool((gradient[same] == 0).all())
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(gradient).all())
    assert bool((value[~same] > 0).all())


@pytest.mark.parametrize("tau", [torch.tensor(0.5), torch.tensor([0.5, 1.0, 0.2, 2.0, 1.0])])
def test_sampled_softmax(tau: Tensor) -> None:
    """-t + log(e^t + sum_j w_j e^s_j) over all blocks, t with the positive's own weight."""
    check(sampled_softmax, softmax_formula, tau)


PENALTIES: list[tuple[Loss, Callable[[Tensor], Tensor]]] = [
    (bpr, lambda x: torch.log1p(x.exp())),
    (hinge(0.3), lambda x: torch.clamp(0.3 + x, min=0)),
    (hinge(1.0), lambda x: torch.clamp(1.0 + x, min=0)),
]


@pytest.mark.parametrize(("loss", "penalty"), PENALTIES)
def test_pairwise(loss: Loss, penalty: Callable[[Tensor], Tensor]) -> None:
    """The mean of penalty(s_j - s+) over the candidates, weighted by w_j; the positive's weight is ignored."""
    check(loss, mean_of(penalty), torch.tensor(0.5))


@pytest.mark.parametrize("loss", [sampled_softmax, bpr, hinge()])
def test_nothing_left(loss: Loss) -> None:
    """A query with every candidate masked or dropped has loss 0 and gradient 0; the others are unaffected."""
    check_nothing_left(loss)


def of_bag(loss: Loss, change: Callable[[Candidates], dict[str, Any]]) -> Loss:
    """The loss of a bag after changing its blocks."""
    return lambda step, bag: loss(step, replace(bag, blocks=tuple(replace(b, **change(b)) for b in bag.blocks)))


def partition(step: Step, bag: Bag) -> Tensor:
    """log sum_j w_j e^s_j, (B,)."""
    return softmax_loss(step, replace(bag, log_w_positive=None)) + step.positive_logits


WRONG_SOFTMAX: dict[str, Loss] = {
    "positive missing from the denominator": softmax_loss,
    "positive counted twice": lambda step, bag: sampled_softmax(step, bag) + math.log(2),
    "positive's weight forgotten": lambda step, bag: sampled_softmax(step, replace(bag, log_w_positive=None)),
    "half the gradient of the positive": lambda step, bag: sampled_softmax(
        replace(step, v=(step.v + step.v.detach()) / 2), bag
    ),
    "positive alone divided by the temperature": lambda step, bag: F.softplus(
        partition(replace(step, tau=torch.ones(())), bag) - step.positive_logits - bag.log_w_positive
    ),
    "temperature of another query": lambda step, bag: sampled_softmax(replace(step, tau=step.tau.roll(1)), bag),
    "mean instead of sum": lambda step, bag: F.softplus(
        partition(step, bag) - math.log(6) - step.positive_logits - bag.log_w_positive
    ),
    "first block only": lambda step, bag: sampled_softmax(step, replace(bag, blocks=bag.blocks[:1])),
    "mask forgotten": of_bag(sampled_softmax, lambda block: {"exclude": None}),
    "weights forgotten": of_bag(
        sampled_softmax, lambda block: {"log_w": torch.where(block.log_w > -math.inf, 0.0, block.log_w)}
    ),
    "wrong sign": lambda step, bag: -sampled_softmax(step, bag),
}


@pytest.mark.parametrize("wrong", WRONG_SOFTMAX)
def test_wrong_softmax_losses_are_rejected(wrong: str) -> None:
    """The formula rejects a sampled softmax with one of the known bugs."""
    with pytest.raises(AssertionError):
        check(WRONG_SOFTMAX[wrong], softmax_formula, torch.tensor([0.5, 1.0, 0.2, 2.0, 1.0]))


WRONG_PAIRWISE: dict[str, Loss] = {
    "another penalty": hinge(1.0),
    "sum instead of mean": lambda step, bag: bpr(step, bag) * 6,
    "masked candidates counted": of_bag(bpr, lambda block: {"exclude": None}),
    "temperature forgotten": lambda step, bag: bpr(replace(step, tau=torch.ones(())), bag),
    "softmax": sampled_softmax,
}


@pytest.mark.parametrize("wrong", WRONG_PAIRWISE)
def test_wrong_pairwise_losses_are_rejected(wrong: str) -> None:
    """The formula of BPR rejects losses that average differently, and other losses."""
    with pytest.raises(AssertionError):
        check(WRONG_PAIRWISE[wrong], mean_of(PENALTIES[0][1]), torch.tensor(0.5))


@pytest.mark.parametrize(
    "wrong",
    [
        of_bag(sampled_softmax, lambda block: {"exclude": None}),
        lambda step, bag: torch.log(sampled_softmax(step, bag).exp() - 1),
        lambda step, bag: sampled_softmax(step, replace(bag, log_w_positive=torch.full((len(step.q),), -math.inf))),
    ],
)
def test_losses_that_fail_with_nothing_left_are_rejected(wrong: Loss) -> None:
    """The check rejects a loss that is not 0 for a query without candidates."""
    with pytest.raises(AssertionError):
        check_nothing_left(wrong)


def test_blocks_share_one_partition_function() -> None:
    """Splitting a block in two changes nothing."""
    world = World.build()
    step = world.step(8, 1)
    (whole,) = Sampled(Popularity(world.counts), 30)(step).blocks
    halves = tuple(
        Candidates(whole.ids[at], whole.emb[at], whole.log_w[at], whole.exclude) for at in (slice(0, 11), slice(11, 30))
    )
    torch.testing.assert_close(sampled_softmax(step, Bag((whole,))), sampled_softmax(step, Bag(halves)))
    torch.testing.assert_close(bpr(step, Bag((whole,))), bpr(step, Bag(halves)))


def test_shown_items_join_the_batch() -> None:
    """In a Union with a source of unknown counts, every source keeps its weights and the positive is unchanged."""
    world = World.build()
    step = world.step(8, 1)
    bag = Union(InBatch(Popularity(world.counts)), Shown(world.shown, 3))(step)
    positive = step.positive_logits.double()
    total = positive.exp()
    for block in bag.blocks:
        emb = block.emb.double().expand(8, *block.emb.shape[-2:])
        total = total + (weights(block, step) * ((step.q.double().unsqueeze(1) * emb).sum(-1) / world.tau).exp()).sum(1)
    torch.testing.assert_close(sampled_softmax(step, bag).double(), total.log() - positive, rtol=1e-5, atol=1e-5)


def test_a_small_loss_keeps_its_digits() -> None:
    """A positive far above its negatives has a loss of e^-17, not the rounding of two large numbers."""
    one = torch.ones(1, 1)
    step = Step(
        torch.zeros(1).long(),
        torch.zeros(1).long(),
        one,
        57 * one,
        torch.tensor(1.0),
        lambda ids: one,
        torch.Generator(),
    )
    loss = sampled_softmax(step, Bag((Candidates(torch.tensor([1]), 40 * one, torch.zeros(())),)))
    assert float(loss) == pytest.approx(math.exp(-17), rel=1e-3)


def test_the_mean_loss_falls_when_the_positive_rises() -> None:
    """A higher score of the positive lowers every loss."""
    world = World.build()
    for loss in (sampled_softmax, bpr, hinge(3.0)):
        step = world.step(16, 1)
        bag = Sampled(Uniform(world.n_items), 20)(step)
        before = loss(step, bag)
        (gradient,) = torch.autograd.grad(before.sum(), step.q)
        moved = Step(
            step.query_ids, step.item_ids, step.q - 0.05 * gradient, step.v, step.tau, step.encode, step.generator
        )
        assert bool((loss(moved, bag) <= before).all())


def test_fixed_temperature() -> None:
    """tau holds for every query and is not trained; a tau that is not positive raises an error."""
    assert float(Fixed(0.07)(torch.arange(3))) == pytest.approx(0.07)
    assert list(Fixed(0.07).parameters()) == []
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="positive"):
            Fixed(bad)


def test_learned_temperature_starts_where_it_is_told() -> None:
    """tau = exp(log_tau) starts at the given value and gets the gradient of the loss."""
    temperature = Learned(0.2)
    tau = temperature(torch.arange(3))
    assert float(tau.detach()) == pytest.approx(0.2)
    (3 * tau).backward()
    assert temperature.log_tau.grad is not None
    assert float(temperature.log_tau.grad) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="low"):
        Learned(0.01, low=0.02)


def test_learned_temperature_comes_back_from_its_bound() -> None:
    """Pushed past its lower bound it stays there, and the opposite gradient raises it again."""
    temperature = Learned(0.021, low=0.02)
    optimiser = torch.optim.SGD(temperature.parameters(), lr=1.0)
    for sign in (1.0, -1.0, -1.0, -1.0):  # first down past the bound, then up
        optimiser.zero_grad()
        tau = temperature(torch.arange(3))
        assert 0.02 * (1 - 1e-6) <= float(tau.detach()) <= 1.0
        (sign * 20 * tau).backward()
        optimiser.step()
    assert float(temperature(torch.arange(3)).detach()) > 0.021
