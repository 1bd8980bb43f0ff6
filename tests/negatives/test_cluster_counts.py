"""The correction of draws by cluster: expected counts, and the items that corrected draws represent."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from negatives.test_clusters import Asking, chances, codes_of, hard_items
from sparring.core.types import Step
from sparring.losses import sampled_softmax
from sparring.models.clusters import Codes
from sparring.negatives import Interpolated, Negatives, OtherClusters, SameCluster, TowardsPositive, Union
from sparring.negatives.clusters import inclusion
from sparring.testing import NegativesContract, World, weights
from support.settings import effort

COUNTS = torch.tensor([9, 1, 4, 2, 7, 1, 3, 5, 2, 6, 1, 8, 2, 4, 3, 1, 5, 2, 6, 1, 3, 2, 7, 4])


def by_orders(chance: Tensor, m: int) -> Tensor:
    """The inclusion probabilities of m draws without replacement, summed over all orders."""
    found = torch.zeros_like(chance)
    for row, p in enumerate(chance.tolist()):
        possible = [k for k, x in enumerate(p) if x]
        for order in itertools.permutations(possible, min(m, len(possible))):
            product, left = 1.0, sum(p)
            for k in order:
                product, left = product * p[k] / left, left - p[k]
            for k in order:
                found[row, k] += product
    return found


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_inclusion_is_the_sum_over_orders(m: int) -> None:
    """Inclusion probabilities equal the sum over all orders of m draws, also with zeros and too few clusters."""
    chance = torch.rand(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 3
    chance[torch.arange(5), torch.arange(5)] = 0
    chance[0, 1:3] = 0
    chance /= chance.sum(1, keepdim=True)
    torch.testing.assert_close(inclusion(chance, m), by_orders(chance, m), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("m", [2, 3, 7])
def test_inclusion_of_many_is_that_of_the_race(m: int) -> None:
    """For 40 clusters, 1000 times apart in probability, they equal 200,000 simulated races; rows sum to m."""
    generator = torch.Generator().manual_seed(2)
    chance = torch.logspace(-3, 0, 40, dtype=torch.float64).unsqueeze(0)
    chance /= chance.sum()
    clock = torch.empty(200_000, 40, dtype=torch.float64).exponential_(generator=generator)
    first = (clock / chance).topk(m, dim=1, largest=False).indices
    seen = torch.bincount(first.flatten(), minlength=40) / 200_000
    found = inclusion(chance, m)[0]
    assert float(found.sum()) == pytest.approx(m, abs=1e-8)
    assert float(((found - seen).abs() / (found * (1 - found) / 200_000).sqrt().clamp(min=1e-5)).max()) < 4.5


@pytest.mark.parametrize("m_c", [1, 2, 3])
def test_expected_counts_by_hand(m_c: int) -> None:
    """The expected count is pair share times cluster probability times m_o, summed over the positives."""
    codes = codes_of()
    chance, primary = (
        by_orders(torch.tensor(chances(codes, 1.5, "cosine"), dtype=torch.float64), m_c),
        codes.primary.tolist(),
    )
    want = torch.zeros(24, dtype=torch.float64)
    for j, i in itertools.product(range(24), range(24)):
        want[j] += float(COUNTS[i] / COUNTS.sum() * chance[primary[i], primary[j]]) * 3 / primary.count(primary[j])
    found = OtherClusters(codes, m_c, 3, 1.5, correction="counts", counts=COUNTS).often.double().exp()
    torch.testing.assert_close(found, want, rtol=1e-5, atol=0)


def drawn_step(world: World, rows: int, seed: int) -> Step:
    """A step with positives drawn by COUNTS and one query for all rows."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.multinomial(COUNTS.double(), rows, replacement=True, generator=generator)
    q = world.queries[:1].expand(rows, -1)
    return Step(
        torch.zeros_like(items),
        items,
        q,
        world.items[items],
        torch.tensor(world.tau),
        lambda at: world.items[at],
        generator,
    )


def estimates(world: World, negatives: Negatives, rows: int, steps: int) -> Tensor:
    """(24,) the mean over steps of the weighted sum of exponentiated scores in the bag of a positive; nan if none."""
    mass = (world.queries[0] @ world.items.T / world.tau).double().exp()
    total, times = torch.zeros(24, dtype=torch.float64), torch.zeros(24)
    for seed in range(steps):
        step = drawn_step(world, rows, seed)
        each = torch.stack(
            [(weights(block, step) * mass[block.ids.clamp(min=0)]).sum(1) for block in negatives(step).blocks]
        ).sum(0)
        total.index_add_(0, step.item_ids, each)
        times.index_add_(0, step.item_ids, torch.ones(rows))
    return total / times


def exact(world: World, counted: list[list[int]]) -> Tensor:
    """(24,) the sum over the items that count for each positive."""
    mass = (world.queries[0] @ world.items.T / world.tau).double().exp()
    return torch.stack([mass[items].sum() for items in counted])


def outside(codes: Codes, what: str) -> list[list[int]]:
    """For each item, the items of another cell or another primary cluster; all items for any other `what`."""
    key = {"cell": codes.cell_of, "cluster": codes.primary}.get(what, torch.arange(24).neg() - 1).tolist()
    return [[j for j in range(24) if key[j] != key[i] or what == "all"] for i in range(24)]


@pytest.mark.parametrize("m_c", [1, 2, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_all_items_but_the_cell(m_c: int, shared: bool) -> None:
    """Simple and hard negatives together represent every item outside the positive's cell exactly once."""
    world, codes = World.build(), codes_of()
    apart = "cluster" if shared else "cell"
    simple = OtherClusters(codes, m_c, 3, 0.5, shared=shared, exclude=apart, correction="counts", counts=COUNTS)  # type: ignore[arg-type]
    found = estimates(
        world,
        Union(simple, SameCluster(codes, 4, correction="counts")),
        *((256, 100) if shared else (4096, effort(150, 300))),
    )
    torch.testing.assert_close(found, exact(world, outside(codes, "cell")), rtol=0.03, atol=0)


@pytest.mark.parametrize("what", ["cell", "cluster", "all"])
def test_shared_simple_ones_stand_for_what_is_not_masked(what: str) -> None:
    """If some positive reaches every cluster, each unmasked item counts once in expectation."""
    world, codes = World.build(), codes_of()
    exclude = "none" if what == "all" else what
    simple = OtherClusters(codes, 2, 2, exclude=exclude, correction="counts", counts=COUNTS)  # type: ignore[arg-type]
    torch.testing.assert_close(
        estimates(world, simple, 256, 100), exact(world, outside(codes, what)), rtol=0.03, atol=0
    )
    assert (f"own positive and its {what}" in simple(world.step(16, 1)).describe()) == (what != "all")


def test_shared_hard_ones_stand_for_what_positives_could_draw() -> None:
    """Items that some positive can draw count once in expectation; the own cell is masked."""
    world, codes = World.build(), codes_of()
    reached = {j for i in range(24) for j in hard_items(codes, i)}
    counted = [[j for j in items if j in reached] for items in outside(codes, "cell")]
    assert 0 < len(reached) < 24
    hard = SameCluster(codes, 3, shared=True, correction="counts", counts=COUNTS)
    torch.testing.assert_close(estimates(world, hard, 1024, 30), exact(world, counted), rtol=0.03, atol=0)


def test_uncorrected_draws_are_no_such_estimate() -> None:
    """The paper's equal weights count an item of a small cluster near popular ones many times over."""
    codes = codes_of()
    rate = OtherClusters(codes, 2, 3, correction="counts", counts=COUNTS).often
    assert float(rate.max() - rate.min()) > math.log(2)
    plain, weighed = (
        OtherClusters(codes, 2, 3, correction=how, counts=COUNTS)(World.build().step(16, 1))
        for how in ("none", "counts")
    )  # type: ignore[arg-type]
    assert torch.equal(plain.blocks[0].ids, weighed.blocks[0].ids)
    torch.testing.assert_close(
        plain.blocks[0].log_w - weighed.blocks[0].log_w, rate[plain.blocks[0].ids] + math.log(16)
    )


def test_a_mixture_weighs_what_its_members_weigh() -> None:
    """A mixture has the expected count of its cluster, and a hard one that of its candidate."""
    world, codes = World.build(), codes_of()
    step, found = world.step(16, 3), []
    for how in ("none", "counts"):
        simple = Interpolated(OtherClusters(codes, 2, 3, exclude="cluster", correction=how, counts=COUNTS))  # type: ignore[arg-type]
        bag = Union(simple, TowardsPositive(SameCluster(codes, 3, correction=how), 0.2))(world.step(16, 3))  # type: ignore[arg-type]
        assert bool(torch.isfinite(sampled_softmax(step, bag)).all())
        real, made = bag.blocks[0].plain()
        found.append((real.log_w.view(-1, 3), made.log_w.view(16, -1, 5), bag.blocks[1].log_w))
    (plain, mixed, _), (weighed, mixed_weighed, hard) = found
    shift = (weighed - plain)[:, :1]
    torch.testing.assert_close(weighed - plain, shift.expand(-1, 3))
    counts = torch.isfinite(mixed)
    torch.testing.assert_close(mixed_weighed[counts], (mixed + shift)[counts])
    torch.testing.assert_close(hard[:, :3], hard[:, 3:])


def test_new_codes_bring_new_counts() -> None:
    """set_codes updates the counts in place to those of a new sampler; nothing in a step synchronises."""
    world, old = World.build(), codes_of()
    new = Codes(old.primary.flip(0), (old.secondary * old.primary.flip(0)) % 3, old.codewords.flip(0), 3)
    for build in (
        lambda codes: OtherClusters(codes, 2, 3, exclude="cluster", correction="counts", counts=COUNTS),
        lambda codes: OtherClusters(codes, 2, 3, shared=False, correction="counts"),
        lambda codes: SameCluster(codes, 3, correction="counts"),
        lambda codes: SameCluster(codes, 3, shared=True, correction="counts", counts=COUNTS),
    ):
        running, fresh = build(old), build(new)
        before = {name: tensor.data_ptr() for name, tensor in running.named_buffers()}
        stale = running.often.clone()
        running.set_codes(new)
        assert {name: tensor.data_ptr() for name, tensor in running.named_buffers()} == before
        assert torch.equal(running.often, fresh.often)
        assert not torch.equal(running.often, stale)
        step = world.step(16, 1)
        with Asking() as asking:
            running(step)
        assert asking.found == []


class TestCorrected(NegativesContract):
    """The sampler contract with the correction on."""

    masks = "none"

    def make(self, world: World) -> Negatives:
        return SameCluster(codes_of(world.n_items), m_h=3, correction="counts")


def test_bad_arguments_are_named() -> None:
    """Shared draws need the pairs of each item, and an unknown correction is named."""
    for counts in (None, COUNTS[:5]):
        with pytest.raises(ValueError, match="counts of 24 items"):
            OtherClusters(codes_of(), correction="counts", counts=counts)
    with pytest.raises(ValueError, match="correction"):
        SameCluster(codes_of(), correction="count")  # type: ignore[arg-type]
