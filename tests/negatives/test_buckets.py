"""Negatives from random buckets: HardestBucket (SCE)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sparring.core.types import Step
from sparring.losses import sampled_softmax
from sparring.negatives import HardestBucket, InBatch, Negatives, Union
from sparring.testing import NegativesContract, World

BUCKETS, QUERIES, N = 5, 6, 7


class TestBuckets(NegativesContract):
    selects = True

    def make(self, world: World) -> Negatives:
        return HardestBucket(world.n_items, N, BUCKETS, QUERIES)


class TestUsualSize(NegativesContract):
    selects = True

    def make(self, world: World) -> Negatives:
        return HardestBucket(world.n_items, N)


class TestMixedCentres(NegativesContract):
    selects = True
    masks = "known"

    def make(self, world: World) -> Negatives:
        return HardestBucket(world.n_items, N, BUCKETS, QUERIES, mix=True, exclude="known")


class TestWithTheBatch(NegativesContract):
    """In a Union with in-batch negatives each source keeps its own weights."""

    selects = True

    def make(self, world: World) -> Negatives:
        return Union(InBatch(), HardestBucket(world.n_items, N, BUCKETS, QUERIES))


def by_hand(step: Step, items: Tensor, tau: Tensor, mix: bool, never: Tensor) -> tuple[Tensor, Tensor]:
    """The published loss, one bucket and query at a time, and the buckets of each query; `never` is excluded."""
    generator = torch.Generator()
    generator.set_state(step.generator.get_state())
    b, dim = step.q.shape
    centres = torch.randn(BUCKETS, b if mix else dim, generator=generator)
    centres = centres @ step.q.detach() if mix else centres
    losses: list[list[Tensor]] = [[] for _ in range(b)]
    for centre in centres:
        rows = sorted(range(b), key=lambda i: -float(step.q[i].detach() @ centre))[:QUERIES]
        columns = sorted(range(len(items)), key=lambda j: -float(items[j].detach() @ centre))[:N]
        for i in rows:
            own = step.q[i] @ items[step.item_ids[i]] / tau[i]
            logits = [own, *(step.q[i] @ items[j] / tau[i] for j in columns if not never[i, j])]
            losses[i].append(torch.stack(logits).double().logsumexp(0) - own.double())
    largest = [torch.stack(found).max() if found else torch.zeros((), dtype=torch.float64) for found in losses]
    return torch.stack(largest), torch.tensor([len(found) for found in losses])


@pytest.mark.parametrize("mix", [False, True])
@pytest.mark.parametrize("exclude", ["positive", "known", "none"])
def test_it_is_the_published_loss(exclude: str, mix: bool) -> None:
    """Loss and gradients equal a loop: cross-entropy in each bucket plus the positive, the largest over the buckets."""
    world = World.build()
    table = world.items.clone().requires_grad_()
    several, none = 0, 0
    for seed in range(6):
        step = world.step(16, seed, table=table)
        step = replace(step, tau=torch.linspace(0.2, 1.5, 16))
        never = torch.zeros(16, world.n_items, dtype=torch.bool)
        if exclude == "known":
            assert step.positives is not None
            for i, query in enumerate(step.query_ids.tolist()):
                never[i, step.positives.items[step.positives.start[query] : step.positives.start[query + 1]]] = True
        if exclude != "none":
            never[torch.arange(16), step.item_ids] = True
        want, count = by_hand(step, table, step.tau, mix, never)
        found = sampled_softmax(step, HardestBucket(world.n_items, N, BUCKETS, QUERIES, mix, exclude)(step))  # type: ignore[arg-type]
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
        upstream = torch.linspace(0.5, 1.5, 16)
        mine = torch.autograd.grad((found * upstream).sum(), [step.q, table], retain_graph=True)
        theirs = torch.autograd.grad((want * upstream.double()).sum(), [step.q, table])
        for got, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        several, none = several + int((count > 1).sum()), none + int((count == 0).sum())
    assert min(several, none) > 0, "no query was in several buckets, or in none: the test saw nothing"


def test_a_query_in_no_bucket_learns_nothing() -> None:
    """One bucket of one query: every other query has an empty bag, loss 0 and no gradient."""
    world = World.build()
    step = world.step(16, 3)
    bag = HardestBucket(world.n_items, N, 1, 1)(step)
    loss = sampled_softmax(step, bag)
    (gradient,) = torch.autograd.grad(loss.sum(), step.q)
    inside = (bag.blocks[0].ids >= 0).all(1)
    assert int(inside.sum()) == 1
    assert bool((loss[~inside] == 0).all())
    assert bool((gradient[~inside] == 0).all())
    assert bool((loss[inside] > 0).all())
    assert bool((gradient[inside] != 0).any())
    assert bool(torch.isneginf(bag.blocks[0].log_w[~inside]).all())


def test_everything_in_one_bucket_is_the_full_softmax() -> None:
    """One bucket with all queries and all items: cross-entropy over the catalogue."""
    world = World.build()
    step = world.step(16, 1)
    loss = sampled_softmax(step, HardestBucket(world.n_items, 1000, 1, 1000)(step))
    full = -torch.log_softmax(world.logits(step), 1)[torch.arange(16), step.item_ids]
    torch.testing.assert_close(loss.double(), full, rtol=1e-5, atol=1e-5)


def test_usual_numbers() -> None:
    """By default there are 2 sqrt(B) buckets of 2 sqrt(B) queries."""
    world = World.build()
    step = world.step(100, 1)
    members, items = HardestBucket(world.n_items, 4).fill(step)
    assert members.shape == (20, 20)
    assert items.shape == (20, 4)


def test_only_items_in_a_bucket_are_encoded_for_their_gradient() -> None:
    """The catalogue is encoded without gradient, and only buckets * n rows of it with gradient."""
    world = World.build()
    seen: list[tuple[int, bool]] = []
    step = world.step(16, 1)
    table = world.items.clone().requires_grad_()

    def encode(ids: Tensor) -> Tensor:
        seen.append((ids.numel(), torch.is_grad_enabled()))
        return table[ids]

    HardestBucket(world.n_items, N, BUCKETS, QUERIES)(replace(step, encode=encode))
    assert sorted(seen) == sorted([(world.n_items, False), (BUCKETS * N, True)])


def test_larger_buckets_are_closer_to_the_full_softmax() -> None:
    """With larger buckets the loss of a query inside rises towards the full cross-entropy, and never above it."""
    world = World.build()
    step = world.step(16, 1)
    full = -torch.log_softmax(world.logits(step), 1)[torch.arange(16), step.item_ids]
    before = torch.full((16,), -math.inf, dtype=torch.float64)
    for n in (2, 8, world.n_items):
        loss = sampled_softmax(step, HardestBucket(world.n_items, n, 40, 16)(world.step(16, 1))).detach().double()
        assert bool((loss >= before - 1e-6).all())
        assert bool((loss <= full + 1e-5).all())
        before = loss
    torch.testing.assert_close(before, full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"n": 0}, {"buckets": 0}, {"queries": 0}, {"exclude": "all"}])
def test_bad_arguments_are_named(wrong: dict[str, object]) -> None:
    """A wrong argument raises a one-line error that names it."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HardestBucket(**{"n_items": 10, "n": 4, **wrong})  # type: ignore[arg-type]


def test_nothing_depends_on_values_but_values() -> None:
    """Bag and loss can be traced without data, so no shape or branch waits for the GPU."""
    world = World.build()
    step = world.step(16, 1)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        tensors = {name: fake.from_tensor(getattr(step, name)) for name in ("query_ids", "item_ids", "q", "v", "tau")}
        table = fake.from_tensor(world.items)
        traced = replace(step, **tensors, encode=lambda ids: table[ids])
        for mix in (False, True):
            assert sampled_softmax(traced, HardestBucket(world.n_items, N, mix=mix)(traced)).shape == (16,)
        with pytest.raises(DataDependentOutputException):
            float(traced.v.sum())
