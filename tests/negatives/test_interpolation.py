"""Synthetic negatives of ESANS: Interpolated and TowardsPositive (EDIS)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from negatives.test_clusters import codes_of
from sparring.core.types import Bag, Candidates, Exclude, Outcome, Step
from sparring.losses import bpr, sampled_softmax
from sparring.models.clusters import Codes
from sparring.negatives import (
    Hardest,
    InBatch,
    Interpolated,
    Negatives,
    OtherClusters,
    Resample,
    SameCluster,
    TowardsPositive,
    Union,
)
from sparring.testing import NegativesContract, World, observe, weights

NORMALISATIONS = ["minmax_block", "minmax_set", "affine", "dirichlet"]


class TestInterpolated(NegativesContract):
    selects = True

    def make(self, world: World) -> Negatives:
        return Interpolated(OtherClusters(codes_of(world.n_items), 2, 4))


class TestInterpolatedPerQuery(NegativesContract):
    masks = "none"

    def make(self, world: World) -> Negatives:
        return Interpolated(
            OtherClusters(codes_of(world.n_items), 2, 4, shared=False), normalisation="minmax_set", offset=-1.0
        )


class TestInterpolatedVectors(NegativesContract):
    selects = True

    def make(self, world: World) -> Negatives:
        return Interpolated(
            OtherClusters(codes_of(world.n_items), 2, 3, exclude="known"), normalisation="dirichlet", renorm=True
        )


class TestTowardsPositive(NegativesContract):
    masks = "none"

    def make(self, world: World) -> Negatives:
        return TowardsPositive(SameCluster(codes_of(world.n_items), 3), lam=0.3, offset=0.5)


class TestTowardsPositiveKnown(NegativesContract):
    masks, selects = "known", True

    def make(self, world: World) -> Negatives:
        return TowardsPositive(SameCluster(codes_of(world.n_items), 3, exclude="known"), "learned")


class TestTowardsPositiveShared(NegativesContract):
    selects = True

    def make(self, world: World) -> Negatives:
        return TowardsPositive(SameCluster(codes_of(world.n_items), 3, shared=True), lam=0.3, offset=0.5)


class TestTowardsPositiveSharedKnown(NegativesContract):
    masks, selects = "known", True

    def make(self, world: World) -> Negatives:
        return TowardsPositive(SameCluster(codes_of(world.n_items), 3, shared=True, exclude="known"), "learned")


class TestAdaptive(NegativesContract):
    masks = "none"

    def make(self, world: World) -> Negatives:
        return TowardsPositive(SameCluster(codes_of(world.n_items), 3), "adaptive", momentum=0.5)


class TestHardestMixture(NegativesContract):
    """Hardest ranks mixtures together with real candidates."""

    selects = True
    test_excluded_items_weigh_nothing = None  # type: ignore[assignment]  # a kept mixture has no id

    def make(self, world: World) -> Negatives:
        return Hardest(Union(Interpolated(OtherClusters(codes_of(world.n_items), 2, 3)), InBatch()), 5)


class TestDrawnMixture(NegativesContract):
    selects = True
    test_excluded_items_weigh_nothing = None  # type: ignore[assignment]

    def make(self, world: World) -> Negatives:
        return Resample(Interpolated(OtherClusters(codes_of(world.n_items), 2, 3)), 20)


def unit(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()
    return x / x.norm(dim=-1, keepdim=True)


def interpolated(m_o: int, **arguments) -> Interpolated:  # type: ignore[no-untyped-def]
    return Interpolated(OtherClusters(codes_of(), 1, m_o), **arguments)


@pytest.mark.parametrize("m_o", range(2, 9))
def test_the_number_of_mixtures(m_o: int) -> None:
    """(m_o + 2)(m_o - 1) / 2 for each cluster: n of every size n = 2..m_o."""
    world = World.build()
    (block,) = interpolated(m_o)(world.step(16, 1)).blocks
    assert block.mix is not None
    shares = block.mix.weights
    assert shares.shape == (16, (m_o + 2) * (m_o - 1) // 2, m_o)
    assert sorted((shares[0] > 0).sum(1).tolist()) == [n for n in range(2, m_o + 1) for _ in range(n)]


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_shares_by_hand(normalisation) -> None:
    """Each size has one set, each member is the anchor once, and shares are d(anchor, i)^eta over the set."""
    m, eta = 5, 0.6
    emb = unit(40, m, 6)
    gram = emb @ emb.mT
    shares = interpolated(m, normalisation=normalisation, eta=eta).shares(emb, torch.Generator().manual_seed(3))
    assert bool((shares >= 0).all())
    torch.testing.assert_close(shares.sum(-1), torch.ones(40, 14).double())
    begin, sets = 0, set()
    for n in range(2, m + 1):
        part = shares[:, begin : begin + n]
        begin += n
        for g in range(40):
            members = torch.nonzero(part[g, 0] > 0).flatten().tolist()
            sets.add(tuple(members))
            assert len(members) == n
            assert bool(((part[g] > 0) == (part[g, 0] > 0)).all())
            if normalisation == "dirichlet":
                continue
            anchors = part[g].argmax(1).tolist()
            assert sorted(anchors) == members
            of_set = gram[g][members][:, members]
            low, high = (
                (gram[g].min(), gram[g].max()) if normalisation == "minmax_block" else (of_set.min(), of_set.max())
            )
            for row, anchor in enumerate(anchors):
                s = gram[g, anchor]
                d = (1 + s) / 2 if normalisation == "affine" else (s - low) / (high - low + 1e-6)
                mass = torch.tensor([float(d[i].clamp(min=1e-6)) ** eta if i in members else 0.0 for i in range(m)])
                torch.testing.assert_close(part[g, row].float(), mass / mass.sum(), rtol=1e-4, atol=1e-6)
    assert len(sets) == 10 + 10 + 5 + 1  # all sets of each size occur


def test_a_pair_of_its_own_scale_repeats_its_anchors() -> None:
    """minmax_set: a set of two gives copies of its two members; minmax_block and affine do not."""
    emb = unit(40, 4, 6)
    for normalisation, copies in (("minmax_set", True), ("minmax_block", False), ("affine", False)):
        shares = interpolated(4, normalisation=normalisation).shares(emb, torch.Generator().manual_seed(3))
        assert bool((shares[:, :2].amax(-1) > 0.999).all()) == copies


def test_shares_are_constants() -> None:
    """No gradient flows through the shares, and equal vectors give equal shares instead of 0 / 0."""
    world = World.build()
    table = world.items.clone().requires_grad_()
    (block,) = interpolated(4)(world.step(8, 1, table=table)).blocks
    assert block.mix is not None
    assert block.emb.requires_grad
    assert not block.mix.weights.requires_grad
    same = torch.ones(2, 3, 4)
    for normalisation in ("minmax_block", "minmax_set", "affine"):
        shares = interpolated(3, normalisation=normalisation).shares(same, torch.Generator().manual_seed(3))
        torch.testing.assert_close(shares[:, -3:], torch.full((2, 3, 3), 1 / 3))


def halves(block: Candidates) -> tuple[Candidates, Candidates]:
    """The hard negatives of a block, and the mixture of each."""
    m = block.ids.shape[1] // 2
    assert bool((block.ids[:, m:] == -1).all())
    real, made = (
        replace(block, ids=block.ids[:, at], emb=block.emb[:, at], log_w=block.log_w[:, at])
        for at in (slice(m), slice(m, 2 * m))
    )
    return real, made


def loss_and_gradients(world: World, build, bag_of=lambda bag: bag, loss=sampled_softmax) -> list[Tensor]:  # type: ignore[no-untyped-def]
    table = world.items.clone().requires_grad_()
    step = world.step(16, 1, table=table)
    value = loss(step, bag_of(build(step)))
    return [value.detach(), *torch.autograd.grad((value * torch.linspace(0.5, 1.5, 16)).sum(), [step.q, table])]


@pytest.mark.parametrize("loss", [sampled_softmax, bpr])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_logits_mixed_or_vectors_mixed(normalisation, shared: bool, loss) -> None:
    """The same loss and gradients to 1e-5 whether logits or vectors are mixed."""
    world = World.build()
    negatives = Union(
        Interpolated(OtherClusters(codes_of(), 3, 5, shared=shared), normalisation=normalisation, offset=-0.7),
        TowardsPositive(SameCluster(codes_of(), 4), 0.2),
    )
    for ours, theirs in zip(
        loss_and_gradients(world, negatives, loss=loss),
        loss_and_gradients(world, negatives, Bag.plain, loss),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_whole_bag_by_hand() -> None:
    """Equation 14 pair by pair over all four kinds; a query's own cell and mixtures of its cluster count nothing."""
    world, codes = World.build(), codes_of()
    lam = 0.25
    step = world.step(16, 2)
    negatives = Union(Interpolated(OtherClusters(codes, 2, 4)), TowardsPositive(SameCluster(codes, 3), lam))
    bag = negatives(step)
    simple, hard = bag.blocks
    assert simple.mix is not None
    s, cell, primary = world.logits(step), codes.cell_of.tolist(), codes.primary.tolist()
    loss, masked = sampled_softmax(step, bag).detach(), 0
    for row in range(16):
        own = int(step.item_ids[row])
        total = [float(s[row, own])]
        for group in range(32):
            members = simple.ids[4 * group : 4 * group + 4].tolist()
            total += [float(s[row, j]) for j in members if cell[j] != cell[own]]
            if primary[members[0]] == primary[own]:
                masked += 1
                continue
            for share in simple.mix.weights[group].tolist():
                total.append(sum(a * float(s[row, j]) for a, j in zip(share, members, strict=True)))
        for j in hard.ids[row, :3].tolist():
            total += [float(s[row, j]), lam * total[0] + (1 - lam) * float(s[row, j])]
        want = math.log(sum(math.exp(x) for x in total)) - total[0]
        assert float(loss[row]) == pytest.approx(want, rel=1e-5)
    assert masked > 10


def test_a_mixture_is_no_harder_than_its_hardest_member() -> None:
    """Each mixture's logit is between the smallest and the largest of its members."""
    world = World.build()
    step = world.step(16, 1)
    (block,) = interpolated(5)(step).blocks
    _, made = block.plain()
    real = (step.scaled @ block.emb.T).view(16, -1, 1, 5)
    mixed = (step.scaled @ made.emb.T).view(16, -1, 14)
    assert block.mix is not None
    member = block.mix.weights > 0
    assert bool((mixed <= real.masked_fill(~member, -math.inf).amax(-1) + 1e-5).all())
    assert bool((mixed >= real.masked_fill(~member, math.inf).amin(-1) - 1e-5).all())


def test_without_its_mixtures_it_is_the_plain_loss() -> None:
    """With all mixtures masked, loss and gradients are those of the real candidates alone."""
    world, codes = World.build(), codes_of()
    plain = loss_and_gradients(world, Union(OtherClusters(codes, 2, 4), SameCluster(codes, 3)))

    def silent(step: Step) -> Bag:
        simple = OtherClusters(codes, 2, 4)
        made = Interpolated(simple, offset=-math.inf)
        made.shares = lambda *_: torch.full((32, 9, 4), 0.25)  # type: ignore[method-assign]  # without draws of its own
        return Union(made, TowardsPositive(SameCluster(codes, 3), offset=-math.inf))(step)

    def masked(step: Step) -> Bag:
        first, hard = silent(step).blocks
        assert first.mix is not None
        classes = torch.zeros_like(first.mix.groups)
        return Bag(
            (
                replace(
                    first, mix=replace(first.mix, offset=0.0, groups=classes, exclude=Exclude(torch.zeros(16).long()))
                ),
                hard,
            )
        )

    for build in (silent, masked):
        for ours, theirs in zip(loss_and_gradients(world, build), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_correction_of_a_mixture_is_the_mixture_of_corrections() -> None:
    """With weights, a mixture has the mean of its members' log weights, or none if a member weighs nothing."""
    world = World.build()
    step = world.step(16, 1)
    (block,) = interpolated(3, offset=0.3)(step).blocks
    log_w = torch.randn(len(block.ids), generator=torch.Generator().manual_seed(2))
    log_w[4] = -math.inf
    block = replace(block, log_w=log_w)
    assert block.mix is not None
    got = weights(block.plain()[1], step).log()
    for g in range(16):
        for v in range(5):
            share = block.mix.weights[g, v].tolist()
            want = 0.3 + sum(a * float(log_w[3 * g + i]) for i, a in enumerate(share) if a)
            rows = ~block.mix.exclude.mask(block.mix.groups)[:, g]  # type: ignore[union-attr]
            found = got[rows, 5 * g + v]
            assert bool(torch.isneginf(found).all()) if math.isinf(want) else float((found - want).abs().max()) < 1e-5
    torch.testing.assert_close(
        sampled_softmax(step, Bag((block,))), sampled_softmax(step, Bag(block.plain())), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("lam", [0.0, 1.0, -0.3])
def test_lam(lam: float) -> None:
    """lam = 0 repeats the hard negatives, lam = 1 gives the positive's logit, and any lam mixes the two logits."""
    world = World.build()
    step = world.step(16, 1)
    hard, made = halves(*TowardsPositive(SameCluster(codes_of(), 4), lam)(step).blocks)
    s = world.logits(step)
    real, own = s.gather(1, hard.ids), s.gather(1, step.item_ids.unsqueeze(1))
    got = torch.einsum("bd,bcd->bc", step.scaled, made.emb).double()
    torch.testing.assert_close(got, lam * own + (1 - lam) * real, rtol=1e-5, atol=1e-5)
    if lam == 0:
        torch.testing.assert_close(made.emb, hard.emb)
    if lam == 1:
        torch.testing.assert_close(got, own.expand_as(got), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("detach", [True, False])
def test_the_pull_on_the_positive(detach: bool) -> None:
    """A mixture adds lam times its probability to the gradient of the positive's logit; not with detach_positive."""
    world, lam = World.build(), 0.4
    step = world.step(16, 1)
    v = step.v.clone().requires_grad_()
    step = replace(step, v=v)
    bag = TowardsPositive(SameCluster(codes_of(), 3), lam, detach_positive=detach)(step)
    (pull,) = torch.autograd.grad(sampled_softmax(step, bag).sum(), v)
    s = world.logits(step)
    own, real = s.gather(1, step.item_ids.unsqueeze(1)), s.gather(1, bag.blocks[0].ids[:, :3])
    p = torch.softmax(torch.cat([own, real, lam * own + (1 - lam) * real], 1), 1)
    want = p[:, 0] - 1 + (0 if detach else lam) * p[:, 4:].sum(1)
    torch.testing.assert_close(pull.double(), want.unsqueeze(1) * step.scaled.detach().double(), rtol=1e-4, atol=1e-5)


def biased(step: Step, bias: Tensor) -> Step:
    """The step of a model with item biases (N,): the last dimension of items, and a 1 in queries."""
    table = step.encode(torch.arange(len(bias)))
    items = torch.cat([table, bias.unsqueeze(1)], 1)
    q = torch.cat([step.q, torch.ones_like(step.q[:, :1])], 1)
    return replace(step, q=q, v=items[step.item_ids], encode=lambda ids: items[ids], biased=True)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("shared", [True, False])
def test_an_item_bias_is_no_similarity(normalisation, shared) -> None:
    """Shares are those of the same items without a bias, however large it is; a mixture has the mixture of biases."""
    world = World.build()
    bias = 3 * torch.randn(24, generator=torch.Generator().manual_seed(8))
    sampler = Interpolated(OtherClusters(codes_of(), 2, 4, shared=shared), normalisation=normalisation)
    (plain,), (block,) = sampler(world.step(16, 1)).blocks, sampler(biased(world.step(16, 1), bias)).blocks
    assert plain.mix is not None
    assert block.mix is not None
    assert torch.equal(block.ids, plain.ids)
    torch.testing.assert_close(block.mix.weights, plain.mix.weights)
    made = block.plain()[1].emb[..., -1]
    want = (block.mix.weights * bias[block.ids].unflatten(-1, (-1, 4)).unsqueeze(-2)).sum(-1)
    torch.testing.assert_close(made, want.flatten(-2))


def test_an_item_bias_has_no_length() -> None:
    """With renorm vectors are as without a bias, and biases are mixed by their shares, not scaled."""
    world = World.build()
    bias = 3 * torch.randn(24, generator=torch.Generator().manual_seed(8))
    for sampler in (
        interpolated(4, renorm=True),
        TowardsPositive(SameCluster(codes_of(), 3), 0.3, renorm=True),
        TowardsPositive(SameCluster(codes_of(), 3, shared=True), 0.3, renorm=True),
    ):
        plain, found = sampler(world.step(16, 1)).blocks, sampler(biased(world.step(16, 1), bias)).blocks
        for one, two in zip(plain, found, strict=True):
            torch.testing.assert_close(two.emb[..., :-1], one.emb)
    step = biased(world.step(16, 1), bias)
    hard, made = halves(*TowardsPositive(SameCluster(codes_of(), 3), 0.3, renorm=True)(step).blocks)
    torch.testing.assert_close(made.emb[..., -1], 0.3 * bias[step.item_ids].unsqueeze(1) + 0.7 * bias[hard.ids])


@pytest.mark.parametrize("exclude", ["cell", "cluster", "known", "positive", "none"])
def test_shared_hard_negatives_by_hand(exclude) -> None:
    """Every query meets the hard negatives of all rows, and each mixed with the positive that it was drawn for; what
    excludes a candidate excludes its mixture."""
    world, codes, lam, m = World.build(), codes_of(), 0.2, 3
    step = world.step(16, 1)
    sampler = TowardsPositive(SameCluster(codes, m, shared=True, exclude=exclude), lam, offset=0.4)
    real, made = sampler(step).blocks
    assert step.positives is not None
    start, items = step.positives.start.tolist(), step.positives.items.tolist()
    known = {row: set(items[start[q] : start[q + 1]]) for row, q in enumerate(step.query_ids.tolist())}
    cell, primary, own = codes.cell_of.tolist(), codes.primary.tolist(), step.item_ids.tolist()
    drops = {
        "cell": lambda i, j: cell[own[i]] == cell[j],
        "cluster": lambda i, j: primary[own[i]] == primary[j],
        "known": lambda i, j: cell[own[i]] == cell[j] or j in known[i],
        "positive": lambda i, j: own[i] == j,
        "none": lambda i, j: False,
    }[exclude]
    s = world.logits(step)
    want = []
    for i in range(16):
        total = [float(s[i, own[i]])]
        for k in range(16):
            for j in real.ids[m * k : m * k + m].tolist():
                if not drops(i, j):
                    total += [float(s[i, j]), lam * float(s[i, own[k]]) + (1 - lam) * float(s[i, j]) + 0.4]
        want.append(math.log(sum(math.exp(x) for x in total)) - total[0])
    assert bool((made.ids == -1).all())
    loss = sampled_softmax(step, Bag((real, made)))
    torch.testing.assert_close(loss.double(), torch.tensor(want).double(), rtol=1e-4, atol=1e-5)


def test_a_rule_for_lam_reads_a_querys_own_hard_negatives() -> None:
    """Shared or not, lam comes from the same gaps: those between a positive and the negatives drawn for it."""
    world = World.build()
    for rule in ("adaptive", "learned"):
        found = []
        for shared in (False, True):
            sampler = TowardsPositive(SameCluster(codes_of(), 3, shared=shared), rule, momentum=0.5)  # type: ignore[arg-type]
            for seed in range(3):
                observe(sampler, world.step(16, seed))
            found.append(sampler.lam)
        torch.testing.assert_close(found[0], found[1])
        assert not torch.allclose(found[0], torch.full_like(found[0], 0.1))


def test_lengths_of_made_up_vectors() -> None:
    """With renorm a mixture has the share-weighted mean length of its members; without it, it is shorter."""

    def parts(bag: Bag) -> tuple[Candidates, ...]:
        blocks = bag.plain().blocks
        return blocks if len(blocks) == 2 else halves(*blocks)

    world = World.build()
    step = world.step(16, 1)
    for build in (
        lambda r: interpolated(4, renorm=r),
        lambda r: TowardsPositive(SameCluster(codes_of(), 3), 0.3, renorm=r),
    ):
        real, made = parts(build(True)(step))
        step = world.step(16, 1)
        shorter = parts(build(False)(step))[1].emb.norm(dim=-1)
        length = real.emb.norm(dim=-1)
        if real.shared:
            (mixed,) = build(False)(world.step(16, 1)).blocks
            length = torch.einsum("gvm,gm->gv", mixed.mix.weights, length.view(-1, 4)).flatten()
        else:
            length = 0.3 * step.v.norm(dim=-1, keepdim=True) + 0.7 * length
        torch.testing.assert_close(made.emb.norm(dim=-1), length, rtol=1e-4, atol=1e-5)
        assert bool((shorter <= length + 1e-5).all())
        step = world.step(16, 1)


def outcome_with_gap(source: SameCluster, step: Step, gap: Tensor) -> tuple[Step, Outcome]:
    """A step whose hard negatives are all `gap` (B,) below the positive, in logits."""
    (block,) = source(step).blocks
    q = torch.zeros_like(step.q.detach())
    q[:, 0] = 1.0
    v, emb = torch.zeros_like(q), torch.zeros_like(block.emb)
    v[:, 0] = 1.0
    emb[..., 0] = 1.0 - (gap * step.tau).unsqueeze(1)
    step = replace(step, q=q, v=v)
    return step, Outcome(torch.zeros(len(q)), (Bag((replace(block, emb=emb),)),))


def test_adaptive_lam_holds_the_advantage() -> None:
    """lam = margin / gap once the running mean has settled, never above `high`; easier negatives if margin < 0."""
    world = World.build()
    source = SameCluster(codes_of(), 3)
    for gap, margin, want in (
        (6.0, math.log(2), math.log(2) / 6),
        (0.5, math.log(2), 0.3),
        (-1.0, math.log(2), 0.3),
        (6.0, -0.6, -0.1),
    ):
        negatives = TowardsPositive(source, "adaptive", margin=margin, momentum=0.8)
        assert float(negatives.lam) == pytest.approx(math.copysign(0.1, margin))
        for seed in range(60):
            negatives.observe(*outcome_with_gap(source, world.step(16, seed), torch.full((16,), gap)))
        assert float(negatives.lam) == pytest.approx(want, rel=1e-3)
        step = world.step(16, 1)
        hard, made = halves(*negatives(step).blocks)
        torch.testing.assert_close(made.emb, want * step.v.unsqueeze(1) + (1 - want) * hard.emb, rtol=1e-3, atol=1e-4)


def test_learned_lam_is_each_clusters_least_squares() -> None:
    """With gaps by cluster each lam becomes margin E[gap] / E[gap^2] of its cluster; an unseen one stays."""
    world, codes = World.build(), codes_of()
    source = SameCluster(codes, 3)
    negatives = TowardsPositive(source, "learned", margin=0.5, high=1.0, momentum=0.98)
    gaps = torch.tensor([2.0, 4.0, 8.0, 0.0, 3.0, 5.0])
    for seed in range(600):
        step = world.step(16, seed)
        cluster = codes.primary.long()[step.item_ids]
        noise = torch.where(torch.arange(16) % 2 == 0, 0.5, 1.5)
        negatives.observe(*outcome_with_gap(source, step, gaps[cluster] * noise))
    met = [0, 1, 2, 4, 5]
    want = 0.5 * 1.0 / (gaps[met] * (0.25 + 2.25) / 2)
    assert bool(((negatives.lam[met] - want).abs() < 0.15 * want).all())
    assert float(negatives.lam[3]) == pytest.approx(0.1)


def test_a_rule_for_lam_learns_from_training_steps() -> None:
    """By observe(), in a Union, adaptive lam becomes margin over the mean gap of the hard negatives."""
    world = World.build()
    negatives = Union(
        OtherClusters(codes_of(), 2, 3),
        TowardsPositive(SameCluster(codes_of(), 3), "adaptive", margin=0.01, momentum=0.0),
    )
    step = world.step(16, 7)
    bag = negatives(step)
    s = world.logits(step)
    gap = (s.gather(1, step.item_ids.unsqueeze(1)) - s.gather(1, bag.blocks[1].ids[:, :3])).mean()
    observe(negatives, world.step(16, 7))
    want = min(0.01 / float(gap), 0.3) if gap > 0 else 0.3
    assert float(negatives.sources[1].lam) == pytest.approx(want, rel=1e-4)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Interpolated(OtherClusters(codes_of(), 1, 1)), "at least 2 items"),
        (lambda: interpolated(3, eta=-1.0), "eta"),
        (lambda: interpolated(3, normalisation="softmax"), "normalisation"),
        (lambda: TowardsPositive(SameCluster(codes_of()), 2.0), "lam"),
        (lambda: TowardsPositive(SameCluster(codes_of()), "best"), "lam"),  # type: ignore[arg-type]
        (lambda: TowardsPositive(SameCluster(codes_of()), high=0.0), "high"),
        (lambda: interpolated(3, layer=1)(World.build().step(4, 1)), "encode_mixtures"),
    ],
)
def test_bad_arguments_are_named(build, words) -> None:
    """A wrong argument raises a one-line error that names it."""
    with pytest.raises(ValueError, match=words):
        build()


def test_describe_tells_of_the_mixtures() -> None:
    """The block's line names the real candidates and their number of mixtures."""
    codes = Codes.random(24, 4, 2)
    line = Interpolated(OtherClusters(codes, 2, 5))(World.build().step(16, 1)).describe().splitlines()[0]
    assert "160 candidates shared by all queries" in line
    assert "448 mixtures of 5" in line
    assert "masked: own positive and its cell" in line
