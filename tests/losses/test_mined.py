"""Hinge losses on the hardest candidates, against loops over rows and pairs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sparring.core.types import Outcome, Step
from sparring.losses import HardPairs, OnlineHard
from sparring.negatives import BatchPositives, InBatch, Sampled, Uniform, Union
from sparring.testing import World


def unit(world: World, step: Step, tau: float = 0.1) -> Step:
    """The step with unit vectors and this temperature."""
    vectors = torch.nn.functional.normalize(world.items, dim=1)
    q = torch.nn.functional.normalize(step.q.detach(), dim=1).requires_grad_()
    return replace(step, q=q, v=vectors[step.item_ids], encode=lambda ids: vectors[ids], tau=torch.tensor(tau))


def known(step: Step, row: int) -> set[int]:
    assert step.positives is not None
    query = int(step.query_ids[row])
    return set(step.positives.items[step.positives.start[query] : step.positives.start[query + 1]].tolist())


def by_hand(step: Step, k: int, margin: float, reduction: str, least: float | None, constant: bool) -> torch.Tensor:
    """The loss row by row: positives of other rows that are not known positives, hardest first."""
    losses = []
    for i in range(len(step.q)):
        positive = step.q[i] @ step.v[i]
        others = [step.q[i] @ step.v[j] for j in range(len(step.q)) if int(step.item_ids[j]) not in known(step, i)]
        hardest = sorted(others, key=lambda s: -float(s.detach()))[:k]
        kept = []
        for score in hardest:
            allowed = margin if least is None else min(max(abs(float((positive - score).detach())), least), margin)
            excess = score - positive + allowed
            if float(excess.detach()) > 0:
                kept.append((score, excess))
        total = torch.zeros(())
        mass = sum((score / step.tau).exp() for score, _ in kept)
        for score, excess in kept:
            share = (score / step.tau).exp() / mass
            total = total + (share.detach() if constant else share) * excess
        losses.append(total / min(k, len(step.q)) if reduction == "mean" else total)
    return torch.stack(losses)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("least", [None, 0.1])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("k", [1, 4, 100])
def test_online_hard_is_its_formula(reduction: str, least: float | None, constant: bool, k: int) -> None:
    """Loss and gradient of every row equal the formula, without the query's known positives."""
    world = World.build(n_items=30, dim=6)
    step = unit(world, world.step(16, 1))
    loss = OnlineHard(k, 0.3, reduction, least, constant)(step, InBatch(exclude="known")(step))  # type: ignore[arg-type]
    expected = by_hand(step, k, 0.3, reduction, least, constant)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    ours, theirs = (torch.autograd.grad(value.sum(), step.q, retain_graph=True)[0] for value in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert float(loss.detach().max()) > 0


def test_the_hardest_of_several_blocks_together() -> None:
    """Candidates of two sources compete for the k places like those of one."""
    world = World.build(n_items=30, dim=6)
    step = unit(world, world.step(8, 2))
    bag = Union(InBatch(exclude="known"), Sampled(Uniform(30), 20, exclude="known", correction="none"))(step)
    found = OnlineHard(3, 0.3)(step, bag)
    ids = torch.cat([block.ids for block in bag.blocks])
    vectors = torch.cat([block.emb for block in bag.blocks])
    for i in range(8):
        scores = sorted(
            (float((step.q[i] @ vectors[j]).detach()) for j in range(len(ids)) if int(ids[j]) not in known(step, i)),
            reverse=True,
        )[:3]
        positive = float((step.q[i] @ step.v[i]).detach())
        excess = [s - positive + 0.3 for s in scores]
        mass = sum(math.exp(s / 0.1) for s, e in zip(scores, excess, strict=True) if e > 0)
        expected = sum(math.exp(s / 0.1) / mass * e for s, e in zip(scores, excess, strict=True) if e > 0)
        assert float(found[i].detach()) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_both_ways_adds_the_loss_of_items_against_queries() -> None:
    """The item of a row has its own query as positive and the batch's queries without the item as negatives."""
    world = World.build(n_items=30, dim=6)
    step = unit(world, world.step(12, 6))
    bag = InBatch(exclude="known")(step)
    found = OnlineHard(3, 0.3, both_ways=True)(step, bag) - OnlineHard(3, 0.3)(step, bag)
    for j in range(12):
        positive = float((step.q[j] @ step.v[j]).detach())
        item = int(step.item_ids[j])
        scores = sorted(
            (float((step.q[i] @ step.v[j]).detach()) for i in range(12) if item not in known(step, i)), reverse=True
        )[:3]
        kept = [(s, s - positive + 0.3) for s in scores if s - positive + 0.3 > 0]
        mass = sum(math.exp(s / 0.1) for s, _ in kept)
        assert float(found[j].detach()) == pytest.approx(
            sum(math.exp(s / 0.1) / mass * e for s, e in kept), rel=1e-3, abs=1e-5
        )
    drawn = Sampled(Uniform(30), 20, exclude="known", correction="none")(step)
    with pytest.raises(ValueError, match="InBatch"):
        OnlineHard(both_ways=True)(step, drawn)


def test_nothing_left_and_nothing_violated_is_zero() -> None:
    """With all candidates excluded or far below, loss and gradient are 0, never nan."""
    lone = World.build(n_items=1)
    step = unit(lone, lone.step(5, 1))
    for loss in (OnlineHard(), OnlineHard(least=0.1), OnlineHard(reduction="mean")):
        value = loss(step, InBatch(exclude="known")(step))
        (gradient,) = torch.autograd.grad(value.sum(), step.q, allow_unused=True)
        assert bool((value == 0).all())
        assert gradient is None or bool((gradient == 0).all())
    q = torch.eye(4).requires_grad_()
    far = replace(step, q=q, v=torch.eye(4), item_ids=torch.arange(4), query_ids=torch.arange(4))
    value = OnlineHard(margin=0.3)(far, InBatch()(far))
    assert value.tolist() == [0.0] * 4
    assert torch.equal(torch.autograd.grad(value.sum(), q)[0], torch.zeros(4, 4))


def test_violators_are_counted_per_row_and_epoch() -> None:
    """report() is the mean number of the k hardest that violate the margin, per row since the last report."""
    world = World.build(n_items=30, dim=6)
    loss = OnlineHard(5, 0.3)
    expected, rows = 0, 0
    for seed in (1, 2, 3):
        step = unit(world, world.step(10, seed))
        bag = InBatch(exclude="known")(step)
        output = loss.detailed(step, bag)
        loss.observe(step, Outcome(output.losses.detach(), (bag,), (output,)))
        for i in range(10):
            others = [
                float(step.q[i].detach() @ step.v[j].detach())
                for j in range(10)
                if int(step.item_ids[j]) not in known(step, i)
            ]
            expected += sum(
                s - float(step.q[i].detach() @ step.v[i].detach()) + 0.3 > 0 for s in sorted(others, reverse=True)[:5]
            )
        rows += 10
    assert loss.report()["violators"] == pytest.approx(expected / rows, abs=1e-3)
    assert loss.report()["violators"] == 0.0


@pytest.mark.parametrize(("positives", "negatives", "margin"), [(3, 5, 0.2), (1, 1, 0.5), (50, 50, 0.2)])
def test_hard_pairs_is_its_formula(positives: int, negatives: int, margin: float) -> None:
    """Loss and gradient equal those of a loop over the hardest pairs; queries have from 1 to many positives."""
    world = World.build(n_items=30, dim=6)
    step = unit(world, world.step(12, 4))
    bag = BatchPositives()(step)
    assert sorted(bag.blocks[0].ids.tolist()) == sorted(set().union(*(known(step, i) for i in range(12))))
    found = HardPairs(positives, negatives, margin)(step, bag)
    losses = []
    for i in range(12):
        scores = {int(j): step.q[i] @ world.items[j] / world.items[j].norm() for j in bag.blocks[0].ids}
        right = sorted((s for j, s in scores.items() if j in known(step, i)), key=lambda s: float(s.detach()))[
            :positives
        ]
        wrong = sorted((s for j, s in scores.items() if j not in known(step, i)), key=lambda s: -float(s.detach()))[
            :negatives
        ]
        hinges = [torch.relu(n - p + margin) for p in right for n in wrong]
        hinges = [h for h in hinges if float(h.detach()) > 0]
        mass = sum(h.exp() for h in hinges)
        losses.append(sum((h.exp() / mass * h for h in hinges), start=torch.zeros(())) / (positives * negatives))
    expected = torch.stack(losses)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    ours, theirs = (torch.autograd.grad(value.sum(), step.q, retain_graph=True)[0] for value in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_as_many_candidates_as_queries_are_no_diagonal() -> None:
    """With as many positives as queries, a query's positives are still its known ones, in any column."""
    world = World.build(n_items=5, n_queries=5, dim=3)
    step = unit(world, world.step(5, 0))
    bag = BatchPositives()(step)
    found = HardPairs(3, 5, 0.2)(step, bag)
    flipped = replace(bag.blocks[0], ids=bag.blocks[0].ids.flip(0), emb=bag.blocks[0].emb.flip(0))
    torch.testing.assert_close(found, HardPairs(3, 5, 0.2)(step, replace(bag, blocks=(flipped,))))


def test_hard_pairs_of_one_item_is_zero() -> None:
    """A single item gives zero loss and zero gradient."""
    world = World.build(n_items=1)
    step = unit(world, world.step(5, 1))
    value = HardPairs()(step, BatchPositives()(step))
    assert value.tolist() == [0.0] * 5
    assert torch.equal(torch.autograd.grad(value.sum(), step.q)[0], torch.zeros_like(step.q))


@pytest.mark.parametrize("wrong", [{"k": 0}, {"margin": 0.0}, {"reduction": "max"}, {"least": 0.5}])
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    """Invalid values raise errors that name them."""
    with pytest.raises(ValueError, match=r"k >= 1|reduction|least"):
        OnlineHard(**wrong)  # type: ignore[arg-type]
