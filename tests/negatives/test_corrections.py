"""The corrections by name, each against the full softmax."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparring.core.types import Step
from sparring.losses import sampled_softmax
from sparring.negatives import InBatch, Popularity, Sampled
from sparring.testing import World

N, DRAWS, TRIALS = 2000, 256, 1500
POPULAR, TAIL = 4, 1500  # ranks 5 and 1,501


def zipf_step(positive: int) -> tuple[Step, Tensor]:
    """TRIALS rows with one query; the positive has probability 1/2 under the full softmax. Vectors are the scores."""
    scores = torch.randn(N, generator=torch.Generator().manual_seed(0))
    others = torch.arange(N) != positive
    scores[positive] = torch.logsumexp(scores[others], 0)
    v = scores[positive].expand(TRIALS, 1).clone().requires_grad_()
    ids = torch.full((TRIALS,), positive)
    generator = torch.Generator().manual_seed(1)
    return Step(
        torch.zeros_like(ids),
        ids,
        torch.ones(TRIALS, 1),
        v,
        torch.ones(()),
        lambda ids: scores[ids].unsqueeze(-1),
        generator,
    ), v


def positive_gradient(correction: str, positive: int, counts: Tensor | None = None) -> tuple[float, float]:
    """Mean over draws of d loss / d s+, and its standard error; the full softmax has -0.5."""
    step, v = zipf_step(positive)
    if counts is None:
        counts = 1e6 / torch.arange(1, N + 1)
    bag = Sampled(Popularity(counts), DRAWS, per_query=True, correction=correction)(step)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(sampled_softmax(step, bag).sum(), v)
    return float(gradient.mean()), float(gradient.std()) / math.sqrt(TRIALS)


@pytest.mark.parametrize("positive", [POPULAR, TAIL])
@pytest.mark.parametrize("correction", ["count", "refined"])
def test_count_and_refined_leave_the_positive_right(correction: str, positive: int) -> None:
    """The positive's gradient is that of the full softmax, -0.5, for popular and rare positives."""
    mean, noise = positive_gradient(correction, positive)
    assert abs(mean + 0.5) < 0.012 + 4 * noise


def test_both_starves_the_tail() -> None:
    """The textbook correction pulls a popular positive too much and a rare one hardly at all: -n q / (1 + n q)."""
    total = sum(1 / rank for rank in range(1, N + 1))
    for positive in (POPULAR, TAIL):
        nq = DRAWS / (positive + 1) / total
        assert positive_gradient("both", positive)[0] == pytest.approx(-nq / (1 + nq), abs=0.01)
    assert positive_gradient("both", TAIL)[0] > -0.03
    assert positive_gradient("both", POPULAR)[0] < -0.8


@pytest.mark.parametrize("positive", [POPULAR, TAIL])
def test_negatives_saturates(positive: int) -> None:
    """Without log n the negatives weigh n times too much: -n / (1 + n), for any positive."""
    assert positive_gradient("negatives", positive)[0] == pytest.approx(-DRAWS / (1 + DRAWS), abs=0.003)


@pytest.mark.parametrize("positive", [POPULAR, TAIL])
def test_none_is_too_weak(positive: int) -> None:
    """n uncorrected draws of 2,000 items cover an eighth of the partition function, so the gradient is too small."""
    assert -0.25 < positive_gradient("none", positive)[0] < -0.05


@pytest.mark.parametrize("correction", ["count", "refined"])
def test_a_very_popular_positive(correction: str) -> None:
    """A positive with 30 % of all draws, all masked, still has the gradient of the full softmax."""
    counts = 1e6 / torch.arange(1, N + 1)
    counts[0] = 0
    counts[0] = counts.sum() * 3 / 7
    mean, noise = positive_gradient(correction, 0, counts)
    assert abs(mean + 0.5) < 0.012 + 4 * noise


def test_refined_is_the_published_form() -> None:
    """Gradients equal those of -sg(1 - P)[s+ - log sum exp(s - log Q')], Q' = Q / (1 - Q+), on the same negatives."""
    world = World.build()
    table = world.items.double().requires_grad_()
    base = world.step(16, 1)
    # no accidental hits, so that n is the number of negatives in both readings
    item_ids = torch.arange(16)
    q = base.q.detach().double().requires_grad_()
    tau = torch.tensor(world.tau, dtype=torch.float64)
    step = Step(base.query_ids, item_ids, q, table[item_ids], tau, lambda ids: table[ids], base.generator)
    ours = torch.autograd.grad(
        sampled_softmax(step, InBatch(Popularity(world.counts), correction="refined")(step)).sum(),
        [q, table],
        retain_graph=True,
    )
    scores, p = q @ table.T / tau, world.popularity
    published = torch.zeros((), dtype=torch.float64)
    for row in range(16):
        columns = [column for column in range(16) if column != row]
        refined = p[columns] / (1 - p[row])
        negatives = scores[row, columns] - refined.log()
        with torch.no_grad():
            own = scores[row, row].exp()
            probability = own / (own + negatives.exp().sum() / len(columns))
        published = published - (1 - probability) * (scores[row, row] - torch.logsumexp(negatives, 0))
    for got, want in zip(ours, torch.autograd.grad(published, [q, table]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # popularity is stored in float32


def test_names_give_the_weights_they_say() -> None:
    """log_w and the positive's weight of every correction, written out for one batch without accidental hits."""
    world = World.build()
    base, ids = world.step(16, 1), torch.arange(16)
    step = Step(base.query_ids, ids, base.q, world.items[ids], base.tau, base.encode, base.generator)
    p = world.popularity[step.item_ids]
    n = 15
    want = {
        "count": (-(n * p).log(), None),
        "negatives": (-p.log(), None),
        "both": (-p.log(), -p.log()),
        "refined": (-(n * p).log(), -(1 - p).log()),
        "none": (torch.zeros(16).double(), None),
    }
    for name, (negatives, positive) in want.items():
        bag = InBatch(Popularity(world.counts), correction=name)(step)  # type: ignore[arg-type]
        torch.testing.assert_close(bag.blocks[0].log_w.double().expand(16), negatives, rtol=1e-5, atol=1e-6)
        assert (bag.log_w_positive is None) == (positive is None)
        if positive is not None and bag.log_w_positive is not None:
            torch.testing.assert_close(bag.log_w_positive.double(), positive, rtol=1e-5, atol=1e-6)
