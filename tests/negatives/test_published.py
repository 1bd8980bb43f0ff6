"""Our compositions equal the published losses on the same draws, each written as its release computes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparring.core.types import Step
from sparring.losses import sampled_softmax
from sparring.negatives import (
    AllItems,
    Cache,
    InBatch,
    Negatives,
    Popularity,
    Resample,
    Sampled,
    Streaming,
    Uniform,
    Union,
)
from sparring.testing import World, observe

B = 12


@pytest.fixture
def world() -> World:
    return World.build(n_items=20)


def trial(world: World) -> tuple[Step, Tensor]:
    table = world.items.clone().requires_grad_()
    return world.step(B, 5, table=table), table


def release(
    step: Step, table: Tensor, tau: float, positive: Tensor | None, negatives: Callable[[Tensor], Tensor]
) -> Tensor:
    """-t + log(e^t + sum_k e^..): the explicit positive first, then the columns that the release appends."""
    s = step.q.double() @ table.double().T / tau
    own = s.gather(1, step.item_ids.unsqueeze(1))
    if positive is not None:
        own = own - positive.unsqueeze(1)
    return torch.logsumexp(torch.cat([own, negatives(s)], 1), 1) - own.squeeze(1)


def check(world: World, negatives: Negatives, published: Callable[[Step, Tensor], Tensor], rtol: float = 1e-5) -> None:
    """Compare loss and both gradients of two runs with the same draws."""
    step, table = trial(world)
    ours = sampled_softmax(step, negatives(step))
    theirs = published(step, table)
    torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=1e-5)
    mine, other = (torch.autograd.grad(loss.mean(), [step.q, table], retain_graph=True) for loss in (ours, theirs))
    for got, want in zip(mine, other, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_ssl(world: World) -> None:
    """SSL, release: -s_rr + log(e^s_rr + sum over all B columns of e^s_rj), with the positive twice."""
    check(
        world,
        InBatch(exclude="none"),
        lambda step, table: release(step, table, world.tau, None, lambda s: s[:, step.item_ids]),
    )


def test_ssl_pop(world: World) -> None:
    """SSL-Pop, release: the same with t = s - log p on every column, the positive too."""
    log_p = world.popularity.log()
    check(
        world,
        InBatch(Popularity(world.counts), correction="both", exclude="none"),
        lambda step, table: release(
            step, table, world.tau, log_p[step.item_ids], lambda s: (s - log_p)[:, step.item_ids]
        ),
    )


def test_g_tower(world: World) -> None:
    """G-Tower, release: SSL-Pop with log p := -log max_h gap; the batch size shifts all weights and cancels."""
    sizes = (7, 11)
    negatives = InBatch(Streaming(sizes, alpha=0.3), correction="both", exclude="none")
    gap, last = [torch.ones(size) for size in sizes], [torch.zeros(size) for size in sizes]
    for time in (1, 2, 3):
        step = world.step(B, 100 + time)
        observe(negatives, step)
        for h, size in enumerate(sizes):
            at = (step.item_ids + 1) % size
            gap[h][at] = 0.7 * gap[h][at] + 0.3 * (time - last[h][at])
            last[h][at] = time
    ids = torch.arange(world.n_items) + 1
    log_p = -torch.stack([gap[h][ids % size] for h, size in enumerate(sizes)]).amax(0).double().log()
    check(
        world,
        negatives,
        lambda step, table: release(
            step, table, world.tau, log_p[step.item_ids], lambda s: (s - log_p)[:, step.item_ids]
        ),
    )


def test_mns_release(world: World) -> None:
    """MNS, release: B batch and B' uniform columns, corrected by log(rho p + (1 - rho) / N), the positive by log p."""
    extra, pop = B, Popularity(world.counts)
    negatives = Union(
        InBatch(pop, exclude="none"),
        Sampled(Uniform(world.n_items), extra, exclude="none"),
        correction="both",
        positive=pop,
    )

    def published(step: Step, table: Tensor) -> Tensor:
        drawn = torch.randint(world.n_items, (extra,), generator=torch.Generator().manual_seed(2 * 5))
        columns = torch.cat([step.item_ids, drawn])
        rho = B / (B + extra)
        log_q = (rho * world.popularity + (1 - rho) / world.n_items).log()
        return release(step, table, world.tau, world.popularity[step.item_ids].log(), lambda s: (s - log_q)[:, columns])

    check(world, negatives, published)


def test_mns_paper(world: World) -> None:
    """MNS, equation 5 in count form: batch and uniform columns by their expected count, the positive unchanged."""
    extra = 30
    negatives = Union(InBatch(Popularity(world.counts)), Sampled(Uniform(world.n_items), extra))

    def published(step: Step, table: Tensor) -> Tensor:
        drawn = torch.randint(world.n_items, (extra,), generator=torch.Generator().manual_seed(2 * 5))
        columns = torch.cat([step.item_ids, drawn])
        log_count = ((B - 1) * world.popularity + extra / world.n_items).log()
        hit = columns == step.item_ids.unsqueeze(1)
        return release(step, table, world.tau, None, lambda s: (s - log_count)[:, columns].masked_fill(hit, -torch.inf))

    check(world, negatives, published)


def drawn_columns(weights: Tensor, n: int) -> Tensor:
    """(B, n) the columns of a multiset of counts, as the release gets them from torch.multinomial."""
    counts = weights.exp().round().long()
    assert bool((counts.sum(1) == n).all())
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), row) for row in counts])


@pytest.mark.parametrize("draw", ["multinomial", "systematic"])
def test_bir(world: World, draw) -> None:
    """BIR, release: -s_rr + log(e^s_rr + sum over the drawn multiset of e^s_rk), no gradient through the draw."""
    negatives = Resample(InBatch(Popularity(world.counts), exclude="none"), draw=draw)
    columns = drawn_columns(negatives(world.step(B, 5)).blocks[0].log_w, B)
    check(
        world,
        negatives,
        lambda step, table: release(step, table, world.tau, None, lambda s: s.gather(1, step.item_ids[columns])),
    )


def test_bir_draws_like_the_release(world: World) -> None:
    """The counts average to B softmax_j(s_rj - log p_j), for any constant in the weights."""
    step = world.step(B, 5)
    w = torch.softmax((world.logits(step) - world.popularity.log())[:, step.item_ids], 1)
    negatives = Resample(InBatch(Popularity(world.counts), exclude="none"), n=60_000, draw="multinomial")
    counts = negatives(step).blocks[0].log_w.exp().double()
    assert bool(((counts - 60_000 * w).abs() <= 5 * (60_000 * w * (1 - w)).sqrt() + 1).all())


@pytest.mark.parametrize("correction", ["count", "both", "negatives"])
def test_bir_in_closed_form(world: World, correction) -> None:
    """-s_rr + log(e^s_rr + |R| sum_j sg(w_rj) e^s_rj): the same for every correction by p, the positive uncorrected."""
    log_p = world.popularity.log()

    def published(step: Step, table: Tensor) -> Tensor:
        def terms(s: Tensor) -> Tensor:
            w = torch.softmax((s - log_p)[:, step.item_ids], 1).detach()
            return s[:, step.item_ids] + (B * w).log()

        return release(step, table, world.tau, None, terms)

    check(world, Resample(InBatch(Popularity(world.counts), correction=correction, exclude="none")), published)


@pytest.mark.parametrize("draw", ["expected", "multinomial", "systematic"])
def test_xir(world: World, draw) -> None:
    """XIR, release: lambda l(K) + (1 - lambda) l(R), n draws each from cache and batch by softmax(s - log p)."""
    lam, n, log_p = 0.2, 9, world.popularity.log()
    pop = Popularity(world.counts)
    cache = Cache(16, pop, world.n_items, exclude="none")
    terms = (
        (lam, Resample(cache, n, draw), cache.ids.clone()),
        (1 - lam, Resample(InBatch(pop, exclude="none"), n, draw), None),
    )
    step, table = trial(world)
    ours, theirs = torch.zeros(B), torch.zeros(B, dtype=torch.float64)
    for share, negatives, pool in terms:
        ids = step.item_ids if pool is None else pool
        bag = negatives(step)
        ours = ours + share * sampled_softmax(step, bag)
        if draw == "expected":
            theirs = theirs + share * release(
                step,
                table,
                world.tau,
                None,
                lambda s, ids=ids: s[:, ids] + (n * torch.softmax((s - log_p)[:, ids], 1).detach()).log(),  # type: ignore[misc]
            )
        else:
            columns = drawn_columns(bag.blocks[0].log_w, n)
            theirs = theirs + share * release(step, table, world.tau, None, lambda s, at=ids[columns]: s.gather(1, at))  # type: ignore[misc]
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    mine, other = (torch.autograd.grad(loss.mean(), [step.q, table], retain_graph=True) for loss in (ours, theirs))
    for got, want in zip(mine, other, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_full_softmax(world: World) -> None:
    """AllItems is cross entropy over the catalogue, gradient included."""
    check(
        world,
        AllItems(world.n_items),
        lambda step, table: torch.nn.functional.cross_entropy(
            step.q.double() @ table.double().T / world.tau, step.item_ids, reduction="none"
        ),
    )


def test_uns(world: World) -> None:
    """UNS as in the papers: InfoNCE over the positive and n uncorrected uniform draws, without accidental hits."""

    def published(step: Step, table: Tensor) -> Tensor:
        drawn = torch.randint(world.n_items, (10,), generator=torch.Generator().manual_seed(2 * 5))
        hit = drawn == step.item_ids.unsqueeze(1)
        return release(step, table, world.tau, None, lambda s: s[:, drawn].masked_fill(hit, -torch.inf))

    check(world, Sampled(Uniform(world.n_items), 10, correction="none"), published)
