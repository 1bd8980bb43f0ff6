"""Negatives that are not items: MixPositive and MixHops (MixGCF), BatchMix (BMNS)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparring.core.types import ItemLayers, Step
from sparring.losses import sampled_softmax
from sparring.negatives import (
    BatchMix,
    Hardest,
    InBatch,
    MixHops,
    MixPositive,
    Negatives,
    Popularity,
    Sampled,
    Uniform,
)
from sparring.testing import NegativesContract, World, chi_square, weights


class MixContract(NegativesContract):
    """A mixture keeps the weight of its candidate but not its id."""

    selects = True

    def source(self, world: World) -> Negatives:
        return Sampled(Popularity(world.counts), 30, per_query=True)

    def make(self, world: World) -> Negatives:
        return MixPositive(self.source(world), self.mix)  # type: ignore[arg-type]

    mix = "query"

    def test_excluded_items_weigh_nothing(self) -> None:
        """Every mixture has the weight of its candidate: exactly 0 for the query's positive."""
        world = World.build()
        step = world.step(16, 1)
        source = self.source(world)(world.step(16, 1))
        got = weights(self.make(world)(step).blocks[0], step)
        want = weights(source.blocks[0], step)
        assert bool((want == 0).any())
        torch.testing.assert_close(got, want)

    def test_between_the_candidate_and_the_positive(self) -> None:
        """e' = a v + (1 - a) e for one a in [0, 1] in all coordinates; one a per row, or one per candidate."""
        world = World.build()
        step = world.step(16, 1)
        mixed = self.make(world)(step).blocks[0].emb
        e = self.source(world)(world.step(16, 1)).blocks[0].emb.expand_as(mixed)
        a = share(mixed, e, step)
        torch.testing.assert_close(mixed, a.unsqueeze(-1) * step.v.unsqueeze(1) + (1 - a.unsqueeze(-1)) * e)
        real = (step.v.unsqueeze(1) != e).any(-1)
        spread = torch.where(real, a, math.nan).nan_to_num(nan=-1.0).amax(1) - torch.where(real, a, 2.0).amin(1)
        assert bool((spread < 1e-4).all()) == (self.mix == "query")


def share(mixed: Tensor, e: Tensor, step: Step) -> Tensor:
    """The distance of each mixture from its candidate towards the positive, as a share; 0 if both coincide."""
    way = step.v.unsqueeze(1) - e
    return ((mixed - e) * way).sum(-1) / way.square().sum(-1).clamp(min=1e-12)


class TestMixPerQuery(MixContract):
    pass


class TestMixPerCandidate(MixContract):
    mix = "candidate"


class TestMixShared(MixContract):
    mix = "candidate"

    def source(self, world: World) -> Negatives:
        return InBatch(Popularity(world.counts))


class TestHardestMix(NegativesContract):
    """The hardest mixture of each query."""

    selects = True
    test_excluded_items_weigh_nothing = None  # type: ignore[assignment]  # of the mixture: it has no ids

    def make(self, world: World) -> Negatives:
        return Hardest(MixPositive(Sampled(Uniform(world.n_items), 8, per_query=True), "candidate"), 2)


@pytest.mark.parametrize(("mix", "n"), [("candidate", 400), ("query", 1)])
@pytest.mark.parametrize("high", [1.0, 0.3])
def test_shares_are_uniform(mix, n: int, high: float) -> None:
    """a ~ U(0, high): chi-square over 20 equal bins."""
    world = World.build()
    found = []
    for seed in range(1 if n > 1 else 40):
        step = world.step(256, seed)
        source = Sampled(Uniform(world.n_items), n, per_query=True)
        mixed = MixPositive(source, mix, high)(step).blocks[0].emb
        e = source(world.step(256, seed)).blocks[0].emb
        found.append(share(mixed, e, step)[(e != step.v.unsqueeze(1)).any(-1)])
    a = torch.cat(found) / high
    assert chi_square(torch.bincount((a * 20).long().clamp(0, 19), minlength=20), torch.ones(20)) > 1e-4


def test_one_share_per_query_cannot_change_the_choice() -> None:
    """The hardest of the mixtures is the mixture of the hardest: same loss and gradients; not with a per candidate."""
    world = World.build()
    found = []
    for build in (
        lambda pool: Hardest(MixPositive(pool), 1),
        lambda pool: MixPositive(Hardest(pool, 1)),
        lambda pool: Hardest(MixPositive(pool, "candidate"), 1),
    ):
        table = world.items.clone().requires_grad_()
        step = world.step(16, 1, table=table)
        loss = sampled_softmax(
            step, build(Sampled(Uniform(world.n_items), 12, per_query=True, correction="none"))(step)
        )
        found.append((loss.detach(), *torch.autograd.grad(loss.sum(), [step.q, table])))
    for ours, theirs in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0][0], found[2][0], rtol=1e-3)


def test_the_hardest_mixture_by_hand() -> None:
    """MixGCF, one pair at a time: argmax_m a_m s_+ + (1 - a_m) s_m over draws, then log(1 + e^(s' - s_+))."""
    world = World.build()
    step = world.step(16, 1)
    loss = sampled_softmax(
        step, Hardest(MixPositive(Sampled(Uniform(world.n_items), 9, True, "none"), "candidate"), 1)(step)
    ).detach()
    twin = torch.Generator().manual_seed(2 * 1)
    drawn = torch.randint(world.n_items, (16, 9), generator=twin)
    a = torch.rand(16, 9, generator=twin).double()
    s = world.logits(step)
    for row, own in enumerate(step.item_ids.tolist()):
        mixed = [
            float(a[row, m] * s[row, own] + (1 - a[row, m]) * s[row, item])
            for m, item in enumerate(drawn[row].tolist())
            if item != own
        ]
        assert float(loss[row]) == pytest.approx(math.log1p(math.exp(max(mixed) - float(s[row, own]))), rel=1e-4)


class TestBatchMix(NegativesContract):
    masks = "none"

    def make(self, world: World) -> Negatives:
        return BatchMix(Popularity(world.counts), 40)

    def offered(self, bag, step, n_items):  # type: ignore[no-untyped-def]
        raise AssertionError("mixtures offer no items")


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_mixed_logits(temperature: float) -> None:
    """BMNS in logits: S W^T with W_kj = softmax_j((u_kj - log p_j) / temperature); the positive is s_+ - log p_+."""
    world = World.build()
    table = world.items.clone().requires_grad_()
    step = world.step(16, 1, table=table)
    ours = sampled_softmax(step, BatchMix(Popularity(world.counts), 30, temperature)(step))
    u = torch.rand(30, 16, generator=torch.Generator().manual_seed(2 * 1)).double()
    mass = ((u - world.popularity.log()[step.item_ids]) / temperature).exp()
    s = step.q.double() @ table.double().T / world.tau
    mixed = s[:, step.item_ids] @ (mass / mass.sum(1, keepdim=True)).T
    own = s.gather(1, step.item_ids.unsqueeze(1)) - world.popularity.log()[step.item_ids].unsqueeze(1)
    theirs = torch.logsumexp(torch.cat([own, mixed], 1), 1) - own.squeeze(1)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    mine, other = (torch.autograd.grad(loss.mean(), [step.q, table], retain_graph=True) for loss in (ours, theirs))
    for got, want in zip(mine, other, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_mixture_weights_follow_their_formula_on_average() -> None:
    """Over 20,000 mixtures the mean weight of an item equals the formula's mean within 5 standard errors."""
    world = World.build()
    step = replace(world.step(8, 1), v=torch.eye(8))  # a mixture of unit vectors equals its weights
    got = BatchMix(Popularity(world.counts), 20_000)(step).blocks[0].emb.double()
    u = torch.rand(20_000, 8, generator=torch.Generator().manual_seed(99)).double()
    want = u.exp() / world.popularity[step.item_ids]
    want = want / want.sum(1, keepdim=True)
    noise = (got.var(0) + want.var(0)).sqrt() / math.sqrt(20_000)
    assert bool(((got.mean(0) - want.mean(0)).abs() <= 5 * noise).all())
    torch.testing.assert_close(got.sum(1), torch.ones(20_000).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: MixPositive(InBatch(), mix="row"), "mix"),  # type: ignore[arg-type]
        (lambda: MixPositive(InBatch(), high=2.0), "high"),
        (lambda: BatchMix(Uniform(3), 0), "n >= 1"),
        (lambda: BatchMix(Uniform(3), 1, 0.0), "temperature"),
    ],
)
def test_bad_arguments_are_named(build, words) -> None:
    """A wrong argument raises a one-line error that names it."""
    with pytest.raises(ValueError, match=words):
        build()


LAYERS = 3


def layered(world: World, step: Step, tables: Tensor) -> Step:
    """The step of a model whose item vectors are the unit vectors of the mean over tables (LAYERS, N, D)."""
    layers = ItemLayers(
        LAYERS, lambda ids, layer: tables[layer][ids], lambda mean: torch.nn.functional.normalize(mean, dim=-1)
    )
    return replace(step, layers=layers)


def layer_tables(world: World) -> Tensor:
    return torch.randn(LAYERS, *world.items.shape, generator=torch.Generator().manual_seed(8))


class TestMixHops(NegativesContract):
    """Without layers it is MixPositive(Hardest(source, k)), and meets the same contract."""

    masks = "positive"
    selects = True

    def make(self, world: World) -> Negatives:
        return MixHops(Sampled(Uniform(world.n_items), 30, per_query=True), 2)

    test_excluded_items_weigh_nothing = None  # type: ignore[assignment]  # a mixture has no id; tested below


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("exclude", ["positive", "known"])
def test_hops_are_mixed_one_by_one(k: int, shared: bool, exclude: str) -> None:
    """The hardest candidates of each layer, mixed with the positive's, averaged: the same as loops over everything."""
    world = World.build()
    tables = layer_tables(world)
    source = Sampled(Uniform(world.n_items), 12, not shared, "none", exclude)  # type: ignore[arg-type]
    drawn = source(world.step(16, 4))
    ids, counted = drawn.blocks[0].ids.expand(16, -1), weights(drawn.blocks[0], world.step(16, 4)) > 0
    generator = torch.Generator().manual_seed(8)  # the draws of ids, then those of shares, as in world.step(16, 4)
    source.distribution.sample((12,) if shared else (16, 12), generator)
    share = torch.rand(16, LAYERS, generator=generator)
    step = layered(world, world.step(16, 4), tables)
    block = MixHops(source, k)(step).blocks[0]
    assert bool((block.ids == -1).all())
    for row in range(16):
        total = torch.zeros(k, world.dim)
        allowed = [m for m in range(12) if counted[row, m]]
        for layer in range(LAYERS):
            mixed = []
            for m in allowed:
                a = share[row, layer]
                vector = a * tables[layer, step.item_ids[row]] + (1 - a) * tables[layer, ids[row, m]]
                mixed.append((float(step.q[row].detach() @ vector), vector))
            best = sorted(mixed, key=lambda pair: -pair[0])[:k]
            total[: len(best)] += torch.stack([vector for _, vector in best])
        expected = torch.nn.functional.normalize(total / LAYERS, dim=-1)
        n = min(k, len(allowed))
        torch.testing.assert_close(block.emb[row, :n], expected[:n])
        assert torch.isneginf(block.log_w[row]).tolist() == [j >= n for j in range(k)]


def test_gradients_reach_every_layer() -> None:
    """The positive and the chosen items of each layer get gradients; scores that choose them get none."""
    world = World.build()
    tables = layer_tables(world).requires_grad_()
    step = layered(world, world.step(16, 4), tables)
    bag = MixHops(Sampled(Uniform(world.n_items), 12, per_query=True, correction="none"))(step)
    sampled_softmax(step, bag).sum().backward()
    assert tables.grad is not None
    assert bool((tables.grad[:, step.item_ids].abs().sum((1, 2)) > 0).all())
    assert int((tables.grad.abs().sum(-1) > 0).sum()) < tables.shape[0] * tables.shape[1]


def test_one_layer_is_the_two_tower_form() -> None:
    """Without layers the bag is bitwise that of MixPositive(Hardest(source, k))."""
    world = World.build()
    source = Sampled(Uniform(world.n_items), 12, per_query=True)
    ours, plain = MixHops(source, 2)(world.step(16, 1)), MixPositive(Hardest(source, 2))(world.step(16, 1))
    assert torch.equal(ours.blocks[0].emb, plain.blocks[0].emb)
    assert torch.equal(ours.blocks[0].log_w, plain.blocks[0].log_w)


def test_hops_need_items() -> None:
    """A source whose vectors are not encoded from ids is refused."""
    with pytest.raises(ValueError, match="InBatch"):
        MixHops(InBatch())
