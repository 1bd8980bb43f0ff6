"""Samplers that leave out items without a training pair: `among`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from sparring.core.types import Corpus, Positives, Step
from sparring.models.clusters import Codes
from sparring.negatives import (
    AllItems,
    GroupShares,
    HardestBucket,
    InBatch,
    Interpolated,
    NearestItems,
    Negatives,
    OtherClusters,
    Popularity,
    QuantizedSoftmax,
    SameCluster,
    Sampled,
    TowardsPositive,
    Uniform,
    Union,
)
from sparring.testing import NegativesContract, World, dense

AMONG = torch.tensor([1, 2, 3, 5, 8, 9, 10, 13, 14, 17, 20, 21, 22])
CODES = Codes(
    torch.arange(24) % 4, torch.arange(24) // 4 % 3, torch.randn(4, 3, generator=torch.Generator().manual_seed(5)), 3
)
PLACE = torch.full((24,), -1).scatter(0, AMONG, torch.arange(len(AMONG)))
Make = Callable[[World, Codes, Tensor | None], Negatives]


def codes_of(ids: Tensor) -> Codes:
    return Codes(CODES.primary[ids], CODES.secondary[ids], CODES.codewords, CODES.k_secondary)


def world_of(ids: Tensor) -> World:
    """24 items of which those of AMONG alone have training pairs; or a catalogue of these `ids` alone."""
    whole = World.build()
    counts = torch.zeros_like(whole.counts).scatter(0, AMONG, whole.counts[AMONG] + 1)
    known = whole.known & (counts > 0)
    return replace(whole, counts=counts[ids], items=whole.items[ids], known=known[:, ids])


def lists(world: World) -> Positives:
    rows, items = torch.nonzero(world.known, as_tuple=True)
    count = torch.bincount(rows, minlength=len(world.known))
    return Positives(torch.cat([torch.zeros(1, dtype=torch.long), torch.cumsum(count, 0)]), items.int())


def corpus(world: World) -> Corpus:
    generator = torch.Generator().manual_seed(7)
    return Corpus(0, world.items, lambda ids: world.queries[ids], lists(world), generator)


def step_of(world: World, items: Tensor, seed: int) -> Step:
    queries = torch.arange(len(items)) * 3
    generator = torch.Generator().manual_seed(seed)
    tau = torch.tensor(world.tau)
    q, v = world.queries[queries], world.items[items]
    return Step(queries, items, q, v, tau, lambda ids: world.items[ids], generator, lists(world))


def nearest(world: World, codes: Codes, among: Tensor | None, per_query: bool) -> Negatives:
    return NearestItems(len(world.queries), 3, 4, 1, per_query=per_query, among=among)


SAMPLERS: dict[str, Make] = {
    "uniform": lambda world, codes, among: Sampled(Uniform(world.n_items, among), 40),
    "per query": lambda world, codes, among: Sampled(Uniform(world.n_items, among), 9, True, "both", "known"),
    "mixed": lambda world, codes, among: Union(
        InBatch(Popularity(world.counts)), Sampled(Uniform(world.n_items, among), 30)
    ),
    "all": lambda world, codes, among: AllItems(world.n_items, "known", among),
    "buckets": lambda world, codes, among: HardestBucket(world.n_items, 5, among=among),
    "midx": lambda world, codes, among: QuantizedSoftmax(world.n_items, world.dim, 30, 3, among=among),
    "midx by halves": lambda world, codes, among: QuantizedSoftmax(
        world.n_items, world.dim, 30, 3, "product", "refined", among=among
    ),
    "nearest": partial(nearest, per_query=False),
    "nearest per query": partial(nearest, per_query=True),
    "groups": lambda world, codes, among: Sampled(GroupShares(codes.primary, among=among), 40),
    "other clusters": lambda world, codes, among: OtherClusters(
        codes, 2, 3, correction="counts", counts=world.counts, among=among
    ),
    "mixtures": lambda world, codes, among: Interpolated(OtherClusters(codes, 2, 3, among=among)),
    "same cluster": lambda world, codes, among: SameCluster(codes, 3, correction="counts", among=among),
    "same cluster, shared": lambda world, codes, among: SameCluster(
        codes, 3, True, "cell", "counts", world.counts, among
    ),
    "towards the positive": lambda world, codes, among: TowardsPositive(SameCluster(codes, 3, among=among)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_items_left_out_might_as_well_not_exist(name: str) -> None:
    """Draws, weights and counts are those of a catalogue of the other items alone, with other ids."""
    everything = torch.arange(24)
    whole, small = world_of(everything), world_of(AMONG)
    ours, theirs = SAMPLERS[name](whole, CODES, AMONG), SAMPLERS[name](small, codes_of(AMONG), None)
    ours.refresh(corpus(whole))
    theirs.refresh(corpus(small))
    for seed in range(3):
        source = torch.Generator().manual_seed(seed)
        places = torch.multinomial(small.counts.double(), 16, replacement=True, generator=source)
        step, other = step_of(whole, AMONG[places], seed), step_of(small, places, seed)
        bag, expected = ours(step).plain(), theirs(other).plain()
        for a, b in zip(bag.blocks, expected.blocks, strict=True):
            assert torch.equal(torch.where(a.ids >= 0, PLACE[a.ids.clamp(min=0)], -1), b.ids)
            assert torch.equal(a.log_w, b.log_w)
            counts = ~torch.isneginf(a.log_w)  # a place without an item has any vector
            counts = (counts.any(0) if counts.dim() > a.ids.dim() else counts).expand(a.ids.shape)
            assert torch.equal(a.emb[counts], b.emb[counts])
        weighed = dense(bag, step, 24)
        assert torch.equal(weighed[:, AMONG], dense(expected, other, len(AMONG)))
        outside = torch.ones(24, dtype=torch.bool)
        outside[AMONG] = False
        assert bool((weighed[:, outside] == 0).all())
        found, wanted = ours.log_count(everything, step), theirs.log_count(torch.arange(len(AMONG)), other)
        if wanted is not None:
            assert found is not None
            assert torch.equal(found[..., AMONG], wanted)
            assert ours.size(step) == theirs.size(other)
            assert bool(torch.isneginf(found[..., outside]).all())


@pytest.mark.parametrize("name", SAMPLERS)
def test_nothing_changes_where_all_items_have_pairs(name: str) -> None:
    """With every item in `among`, a bag is bitwise the one without `among`."""
    everything = torch.arange(24)
    world = world_of(everything)
    bags = []
    for among in (None, everything):
        sampler = SAMPLERS[name](world, CODES, among)
        sampler.refresh(corpus(world))
        assert all(getattr(part, "among", None) is None for part in sampler.modules()) or "nearest" in name
        bags.append(sampler(step_of(world, AMONG[torch.arange(12)], 1)).plain())
    for a, b in zip(bags[0].blocks, bags[1].blocks, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.emb, b.emb)
        assert torch.equal(a.log_w, b.log_w)


class TestUniformAmong(NegativesContract):
    """Uniform draws of all items but the one that never occurs: the contract's world has one such item."""

    def make(self, world: World) -> Negatives:
        return self.resized(world, 200)

    def resized(self, world: World, n: int) -> Negatives:
        return Sampled(Uniform(world.n_items, torch.nonzero(world.counts).flatten()), n)

    def expected(self, world: World, step: Step) -> Tensor:
        return 200 * (world.counts > 0).double() / (world.counts > 0).sum()


def test_wrong_items_are_refused() -> None:
    """No items, and ids outside the catalogue, are errors that name the bound."""
    for ids in (torch.tensor([], dtype=torch.long), torch.tensor([24]), torch.tensor([-1, 3])):
        with pytest.raises(ValueError, match="23"):
            Uniform(24, ids)
