"""Negatives by the cluster of the positive: OtherClusters and SameCluster (ESANS)."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparring.core.types import Step
from sparring.losses import sampled_softmax
from sparring.models.clusters import Codes
from sparring.negatives import InBatch, Interpolated, Negatives, OtherClusters, SameCluster, TowardsPositive, Union
from sparring.negatives.algebra import merged
from sparring.negatives.clusters import distinct
from sparring.testing import NegativesContract, World, chi_square, weights

# cluster 3 is empty, cluster 2 has one cell, cluster 5 has two items
PRIMARY = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 4, 4, 4, 4, 4, 4, 5, 5]
SECONDARY = [0, 0, 1, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 1, 1, 1, 0, 0, 0, 2, 2, 1, 0, 2]


def codes_of(n_items: int = 24) -> Codes:
    """Uneven clusters of 24 items, with neighbouring ids in different clusters."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4))[:n_items]
    words = torch.randn(6, 3, generator=torch.Generator().manual_seed(5))
    return Codes(torch.tensor(PRIMARY)[order], torch.tensor(SECONDARY)[order], words, 3)


def chances(codes: Codes, gamma: float, distance: str) -> list[list[float]]:
    """Equation 9 in our reading and verbatim, one pair at a time."""
    words, sizes = codes.codewords.double().tolist(), [PRIMARY.count(k) for k in range(codes.k_primary)]
    table = []
    for c, own in enumerate(words):
        others = [k for k in range(len(words)) if k != c and sizes[k]]
        inner = {k: sum(a * b for a, b in zip(own, words[k], strict=True)) for k in others}
        if distance == "cosine":
            d = {k: (1 - inner[k] / math.dist(own, [0] * 3) / math.dist(words[k], [0] * 3)) / 2 for k in others}
        else:
            low, high = min(inner.values()), max(inner.values())
            d = {k: (inner[k] - low) / (high - low) for k in others}
        rate = {k: min(max(d[k], 1e-3), 1.0) ** -gamma for k in others}
        table.append([rate.get(k, 0.0) / sum(rate.values()) for k in range(len(words))])
    return table


def alike(world: World, rows: int, positive: int) -> Step:
    """Many rows with one positive, so that one forward pass is many trials."""
    ids = torch.full((rows,), positive)
    generator = torch.Generator().manual_seed(1)
    return Step(
        ids, ids, world.queries[ids], world.items[ids], torch.tensor(world.tau), lambda at: world.items[at], generator
    )


class TestOtherClusters(NegativesContract):
    """Two other clusters give one item each to all queries, with expected counts from equation 9."""

    selects = True
    draws = 15_000

    def make(self, world: World) -> Negatives:
        return OtherClusters(codes_of(world.n_items), m_c=2, m_o=1, gamma=1.5)

    def expected(self, world: World, step: Step) -> Tensor:
        shares, same_cell = two_of_others(world.n_items)
        count = shares[step.item_ids].sum(0).expand(len(step.q), -1)
        return torch.where(same_cell[step.item_ids], 0.0, count)


class TestOtherClustersKnown(NegativesContract):
    selects, masks = True, "known"

    def make(self, world: World) -> Negatives:
        return OtherClusters(codes_of(world.n_items), m_c=3, m_o=3, exclude="known")


class TestOtherClustersPerQuery(NegativesContract):
    """Per-query draws need no mask."""

    masks = "none"

    def make(self, world: World) -> Negatives:
        return OtherClusters(codes_of(world.n_items), m_c=2, m_o=3, shared=False, distance="literal")


class TestSameCluster(NegativesContract):
    masks = "none"
    draws = 2000

    def make(self, world: World) -> Negatives:
        return SameCluster(codes_of(world.n_items), m_h=1)

    def expected(self, world: World, step: Step) -> Tensor:
        count = torch.zeros(len(step.q), world.n_items, dtype=torch.float64)
        for row, item in enumerate(step.item_ids.tolist()):
            hard = hard_of(world.n_items)[item]
            count[row, hard] += 1 / len(hard)
        return count


class TestSameClusterShared(NegativesContract):
    selects = True

    def make(self, world: World) -> Negatives:
        return SameCluster(codes_of(world.n_items), m_h=3, shared=True)


class TestSameClusterKnown(NegativesContract):
    masks, selects = "known", True

    def make(self, world: World) -> Negatives:
        return SameCluster(codes_of(world.n_items), m_h=4, exclude="known")


@cache
def two_of_others(n_items: int) -> tuple[Tensor, Tensor]:
    """(N, N) each: how often a positive draws item j with two clusters of one item, and whether they share a cell."""
    codes = codes_of(n_items)
    p, primary, cell = chances(codes, 1.5, "cosine"), codes.primary.tolist(), codes.cell_of.tolist()
    shares = torch.zeros(n_items, n_items, dtype=torch.float64)
    for i in range(n_items):
        row = p[primary[i]]
        for j, k in enumerate(primary):
            if row[k]:  # drawn first, or after another
                both = row[k] + sum(row[a] * row[k] / (1 - row[a]) for a in range(6) if a != k)
                shares[i, j] = both / primary.count(k)
    return shares, torch.tensor([[a == b for b in cell] for a in cell])


@cache
def hard_of(n_items: int) -> list[list[int]]:
    return [hard_items(codes_of(n_items), item) for item in range(n_items)]


def hard_items(codes: Codes, item: int) -> list[int]:
    """Same primary, other secondary cluster; if there is none, the non-empty primary cluster at the smallest angle."""
    primary, secondary = codes.primary.tolist(), codes.secondary.tolist()
    found = [j for j in range(len(codes)) if primary[j] == primary[item] and secondary[j] != secondary[item]]
    if found:
        return found
    unit = torch.nn.functional.normalize(codes.codewords.double(), dim=1)
    near = max((k for k in set(primary) if k != primary[item]), key=lambda k: float(unit[k] @ unit[primary[item]]))
    return [j for j in range(len(codes)) if primary[j] == near]


@pytest.mark.parametrize("shared", [True, False])
def test_simple_ones_come_from_other_clusters(shared: bool) -> None:
    """No item drawn for a positive has its primary cluster; m_c distinct clusters; m_o distinct items if there are."""
    world, codes = World.build(), codes_of()
    primary = codes.primary.long()
    for seed in range(30):
        step = world.step(16, seed)
        ids = OtherClusters(codes, 3, 4, shared=shared)(step).blocks[0].ids.view(16, 3, 4)
        clusters = primary[ids]
        assert bool((clusters == clusters[..., :1]).all())
        assert not bool((clusters == primary[step.item_ids].view(-1, 1, 1)).any())
        assert all(len(set(row)) == 3 for row in clusters[..., 0].tolist())
        for cluster, drawn in zip(clusters[..., 0].flatten().tolist(), ids.view(-1, 4).tolist(), strict=True):
            assert len(set(drawn)) == 4 or PRIMARY.count(cluster) < 4


def test_hard_ones_come_from_the_same_cluster_and_another_cell() -> None:
    """All items found by hand are drawn, never one of the positive's cell; distinct if enough are left."""
    world, codes = World.build(), codes_of()
    for positive in range(24):
        ids = SameCluster(codes, 3)(alike(world, 400, positive)).blocks[0].ids
        wanted = hard_items(codes, positive)
        assert set(ids.flatten().tolist()) == set(wanted)
        assert int(codes.cell_of[positive]) not in codes.cell_of[ids].flatten().tolist()
        if len(wanted) >= 3:
            assert all(len(set(row)) == 3 for row in ids.tolist())


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("distance", ["cosine", "literal"])
def test_clusters_follow_equation_9(gamma: float, distance) -> None:
    """One cluster of 40,000 draws: chi-square against the formula; gamma = 0 is uniform over other non-empty ones."""
    world, codes = World.build(), codes_of()
    for positive in (0, 5, 9):
        step = alike(world, 40_000, positive)
        own = int(codes.primary[positive])
        ids = OtherClusters(codes, 1, 1, gamma, distance)(step).blocks[0].ids
        want = torch.tensor(chances(codes, gamma, distance)[own])
        if gamma == 0:
            torch.testing.assert_close(want[want > 0], torch.full((4,), 0.25))
        assert chi_square(torch.bincount(codes.primary.long()[ids], minlength=6), want) > 1e-4


def test_nearer_clusters_are_likelier_unless_literal() -> None:
    """For gamma > 0 the probability falls with the angle between codewords; with equation 9 verbatim it rises."""
    codes = codes_of()
    unit = torch.nn.functional.normalize(codes.codewords.double(), dim=1)
    for distance, sign in (("cosine", 1), ("literal", -1)):
        words = Codes(codes.primary, codes.secondary, unit.float(), 3) if sign < 0 else codes
        chance = OtherClusters(words, 1, 1, 1.0, distance).chance  # type: ignore[arg-type]
        for c in range(6):
            others = sorted((k for k in (0, 1, 2, 4, 5) if k != c), key=lambda k: -sign * float(unit[c] @ unit[k]))
            row = chance[c, others].tolist()
            assert row == sorted(row, reverse=True)
            assert row[0] > row[-1]
            assert float(chance[c, 3]) == float(chance[c, c]) == 0


@pytest.mark.parametrize("exclude", ["cell", "known", "positive", "none"])
@pytest.mark.parametrize("kind", ["other", "same"])
def test_masks_pair_by_pair(kind: str, exclude) -> None:
    """Among shared candidates exactly the positive, its cell or the known positives weigh nothing, pair by pair."""
    world, codes = World.build(), codes_of()
    cell = codes.cell_of.tolist()
    seen = set()
    for seed in range(5):
        step = world.step(16, seed)
        make = (
            OtherClusters(codes, 2, 3, exclude=exclude)
            if kind == "other"
            else SameCluster(codes, 3, shared=True, exclude=exclude)
        )
        (block,) = make(step).blocks
        got = weights(block, step)
        assert step.positives is not None
        for row, column in itertools.product(range(16), range(len(block.ids))):
            item, own, query = int(block.ids[column]), int(step.item_ids[row]), int(step.query_ids[row])
            known = step.positives.items[step.positives.start[query] : step.positives.start[query + 1]].tolist()
            never = {
                "cell": cell[item] == cell[own],
                "known": cell[item] == cell[own] or item in known,
                "positive": item == own,
                "none": False,
            }[exclude]
            assert float(got[row, column]) == (0.0 if never else 1.0)
            seen.add(never)
        (rows, columns) = block.exclude.hits(block.ids) if block.exclude else (torch.empty(0), torch.empty(0))
        assert rows.tolist() == sorted(rows.tolist())
        assert len({*zip(rows.tolist(), columns.tolist(), strict=True)}) == int((got == 0).sum())
    assert seen == ({False} if exclude == "none" else {True, False})


def test_merging_keeps_masks_apart() -> None:
    """Drawn or ranked together with in-batch candidates, each part keeps its own mask."""
    world, codes = World.build(), codes_of()
    step = world.step(16, 1)
    bag = Union(InBatch(), OtherClusters(codes, 2, 3))(step)
    block = merged(bag, step)
    want = torch.cat([weights(part, step) for part in bag.blocks], 1)
    torch.testing.assert_close(weights(block, step), want)


def test_every_set_is_as_likely() -> None:
    """m = 2 of 5 and 3 of 4: all 10 and 4 sets equally likely; fewer than m: independent uniform draws."""
    generator = torch.Generator().manual_seed(0)
    for size, m in ((5, 2), (4, 3), (3, 3)):
        drawn = distinct(torch.full((60_000,), size), m, generator).sort(1).values
        sets = list(itertools.combinations(range(size), m))
        key = (drawn * torch.tensor([size**k for k in range(m)])).sum(1)
        counts = torch.tensor([int((key == sum(a * size**k for k, a in enumerate(chosen))).sum()) for chosen in sets])
        assert int(counts.sum()) == 60_000
        assert chi_square(counts, torch.ones(len(sets))) > 1e-4
    few = distinct(torch.tensor([2, 1, 0]).expand(20_000, 3), 4, generator)
    assert bool((few[:, 1:] == 0).all())
    assert (
        chi_square(torch.bincount((few[:, 0] * torch.tensor([1, 2, 4, 8])).sum(1), minlength=16), torch.ones(16)) > 1e-4
    )


def test_codes_can_be_replaced_while_training() -> None:
    """set_codes changes the buffers in place, and later bags equal those of a sampler built with the new codes."""
    world, old = World.build(), codes_of()
    new = Codes(old.primary.flip(0), old.secondary.flip(0), old.codewords.flip(0), 3)
    for build in (lambda codes: OtherClusters(codes, 2, 3), lambda codes: SameCluster(codes, 3)):
        running, fresh = build(old), build(new)
        before = {name: tensor.data_ptr() for name, tensor in running.named_buffers()}
        first = running(world.step(16, 1)).blocks[0].ids
        running.set_codes(new)
        assert {name: tensor.data_ptr() for name, tensor in running.named_buffers()} == before
        ids = running(world.step(16, 1)).blocks[0].ids
        assert torch.equal(ids, fresh(world.step(16, 1)).blocks[0].ids)
        assert not torch.equal(ids, first)
        with pytest.raises(ValueError, match="new run"):
            running.set_codes(Codes.random(24, 7, 3))


class Asking(TorchDispatchMode):
    """Records operations that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in {
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "_unique2",
            "repeat_interleave",
            "bincount",
            "equal",
        }:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device() -> None:
    """A forward pass reads no value and makes no tensor of data-dependent size: it can be captured in a CUDA graph."""
    world, codes = World.build(), codes_of()
    for negatives in (
        OtherClusters(codes, 2, 3),
        SameCluster(codes, 3),
        Union(Interpolated(OtherClusters(codes, 2, 3)), TowardsPositive(SameCluster(codes, 3), "adaptive")),
        Union(
            Interpolated(OtherClusters(codes, 2, 3), normalisation="minmax_set", renorm=True),
            SameCluster(codes, 3, shared=True),
        ),
    ):
        step = world.step(16, 1)
        with Asking() as asking:
            negatives(step)
        assert asking.found == []
    with Asking() as asking:
        torch.nonzero(torch.ones(2))
    assert asking.found == ["nonzero"]


def test_codes_without_meaning_draw_all_clusters_alike() -> None:
    """Random codes have codewords at equal distance: both readings of equation 9 are then uniform, with no 0 / 0."""
    for distance in ("cosine", "literal"):
        chance = OtherClusters(Codes.random(30, 5, 2), 2, 3, 1.0, distance).chance  # type: ignore[arg-type]
        torch.testing.assert_close(chance, (1 - torch.eye(5)) / 4)


def test_too_few_clusters_count_nothing() -> None:
    """If only one other cluster has items, the second of m_c = 2 draws is empty, weighs nothing and stays finite."""
    world = World.build()
    codes = Codes(torch.tensor([0, 2] * 12), torch.zeros(24).long(), torch.randn(3, 2), 1)
    step = world.step(16, 1)
    (block,) = OtherClusters(codes, 2, 3, shared=False)(step).blocks
    assert bool((block.ids[:, :3] >= 0).all())
    assert bool((block.ids[:, 3:] == -1).all())
    assert bool(torch.isneginf(block.log_w[:, 3:]).all())
    loss = sampled_softmax(step, Interpolated(OtherClusters(codes, 2, 3))(step))
    assert bool(torch.isfinite(loss).all())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: OtherClusters(codes_of(), m_c=6), "m_c < 6"),
        (lambda: OtherClusters(codes_of(), m_o=0), "m_o >= 1"),
        (lambda: OtherClusters(codes_of(), gamma=-1.0), "gamma >= 0"),
        (lambda: OtherClusters(codes_of(), distance="far"), "distance"),  # type: ignore[arg-type]
        (lambda: OtherClusters(codes_of(), exclude="all"), "exclude"),  # type: ignore[arg-type]
        (lambda: SameCluster(codes_of(), m_h=0), "m_h >= 1"),
    ],
)
def test_bad_arguments_are_named(build, words) -> None:
    """A wrong argument raises a one-line error that names it."""
    with pytest.raises(ValueError, match=words):
        build()
