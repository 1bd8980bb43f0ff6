"""Ada-tau: its temperatures, state and loss against the equations of the paper in plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import lambertw
from torch import Tensor

from sparring.core.types import Bag, Candidates, Corpus, Exclude, Outcome, Positives, Step
from sparring.losses import AdaTau, adaptive_softmax
from sparring.losses.adaptive import lambert_w

U, N, D = 6, 12, 3
LISTS = [[0, 5], [1, 2, 3], [4], [2, 7, 8, 11], [], [6, 9]]
COUNTS = torch.tensor([len(own) for own in LISTS])
ACTIVE = [0, 1, 3, 5]  # more than the 20 % quantile of 0, 1, 2, 2, 3, 4, which is 1


def unit(*shape: int, seed: int) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x / x.norm(dim=-1, keepdim=True)).float()


def corpus(epoch: int, queries: Tensor, items: Tensor) -> Corpus:
    positives = Positives(
        torch.tensor([0, *(len(own) for own in LISTS)]).cumsum(0), torch.tensor([j for own in LISTS for j in own])
    )
    return Corpus(epoch, items, lambda ids: queries[ids], positives, torch.Generator())


def log_ratio() -> float:
    return math.log(0.5 * len(ACTIVE) * N / sum(len(LISTS[u]) for u in ACTIVE))


def batch(temperature: AdaTau, seed: int) -> tuple[Step, Bag]:
    """Five rows, two of them of one query; shared candidates with a mask and weights."""
    ids = torch.tensor([3, 0, 3, 1, 5])
    q, v = unit(5, D, seed=seed).requires_grad_(), unit(5, D, seed=seed + 1).requires_grad_()
    step = Step(ids, torch.tensor([2, 0, 7, 1, 9]), q, v, temperature(ids), lambda ids: v[ids], torch.Generator())
    shared = Candidates(
        torch.tensor([2, 4, 10, 0]),
        unit(4, D, seed=seed + 2),
        torch.tensor([0.0, 0.3, -0.2, 0.1]),
        Exclude(step.item_ids),
    )
    return step, Bag((shared,))


def partition(step: Step, bag: Bag, row: int, tau: float) -> float:
    """The sum of w_j exp(q . e_j / tau) over candidates that count, in float64."""
    (block,) = bag.blocks
    total = 0.0
    for place, item in enumerate(block.ids.tolist()):
        if item != int(step.item_ids[row]):
            total += math.exp(
                float(step.q[row].detach().double() @ block.emb[place].double()) / tau + float(block.log_w[place])
            )
    return total


def test_lambert_w_against_scipy() -> None:
    """w exp(w) = x to 1e-12 from the branch point -1/e (where W falls vertically) to 1e8; the values of scipy."""
    x = np.concatenate([-np.exp(-1) + np.logspace(-15, -1, 300), np.linspace(-0.3678, 3, 500), np.logspace(0, 8, 100)])
    found, want = lambert_w(torch.from_numpy(x)).numpy(), lambertw(x).real
    # next to the branch point the last bit of x changes W by its square root
    assert (np.abs(found - want) <= 1e-12 * np.abs(want) + 1e-12 + 1e-15 / np.sqrt(x + np.exp(-1))).all()
    np.testing.assert_allclose(found * np.exp(found), x, rtol=1e-12, atol=1e-14)


def test_lambert_w_at_its_ends() -> None:
    """-1 at -1/e in both precisions (also when rounding puts x below it), 0 at 0, 1 at e; float32 in, float32 out."""
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([-1 / math.e, 0.0, math.e], dtype=dtype)
        found = lambert_w(torch.cat([x, torch.nextafter(x[:1], torch.tensor(-1.0, dtype=dtype))]))
        assert found.dtype == dtype
        torch.testing.assert_close(
            found,
            torch.tensor([-1.0, 0.0, 1.0, -1.0], dtype=dtype),
            rtol=0,
            atol=1e-3 if dtype == torch.float32 else 1e-7,
        )


def test_temperature_before_anything_is_known() -> None:
    """tau_0 = gap / log(n m / 2|D|), with n and |D| over queries above the 20 % quantile of activity."""
    temperature = AdaTau(COUNTS, N, gap=0.7)
    torch.testing.assert_close(temperature(torch.arange(U)), torch.full((U,), 0.7 / log_ratio()))
    assert list(temperature.parameters()) == []


def test_common_temperature_from_all_pairs() -> None:
    """Equation 14: mu_+ over known pairs and mu over all pairs of active queries, from epoch `settle` on."""
    queries, items = unit(U, D, seed=7), unit(N, D, seed=8)
    scores = (queries.double() @ items.double().T).tolist()
    known = [scores[u][j] for u in ACTIVE for j in LISTS[u]]
    everywhere = [scores[u][j] for u in ACTIVE for j in range(N)]
    gap = sum(known) / len(known) - sum(everywhere) / len(everywhere)
    sign = 1.0 if gap > 0 else -1.0  # a second world with a negative gap tests the floor
    for queries_now, want in ((sign * queries, abs(gap) / log_ratio()), (-sign * queries, 0.02)):
        temperature = AdaTau(COUNTS, N, gap=0.9, settle=3)
        temperature.refresh(corpus(2, queries_now, items))
        assert float(temperature.tau_0) == pytest.approx(0.9 / log_ratio(), rel=1e-6)
        temperature.refresh(corpus(3, queries_now, items))
        assert float(temperature.tau_0) == pytest.approx(want, rel=1e-5)
        torch.testing.assert_close(temperature(torch.arange(U)), temperature.tau_0.expand(U))


@pytest.mark.parametrize("quantile", [None, 0.9, 0.5])
@pytest.mark.parametrize("beta", [1.0, 0.125])
def test_each_querys_temperature_follows_its_loss(quantile: float | None, beta: float) -> None:
    """Equations 15, 16: tau_u = tau_0 exp(W(...)) of L(u), the mean of -s_+ + log sum_j w_j e^s_j; tau_0 if unseen."""
    temperature = AdaTau(COUNTS, N, beta=beta, quantile=quantile, settle=5)
    sums: dict[int, list[float]] = {}
    for seed in (10, 20, 30):
        step, bag = batch(temperature, seed)
        with torch.no_grad():
            temperature.observe(step, Outcome(torch.full((5,), 99.0), (bag,)))
        for row, query in enumerate(step.query_ids.tolist()):
            own = float(step.q[row].detach().double() @ step.v[row].detach().double())
            sums.setdefault(query, []).append(-own + math.log(partition(step, bag, row, 1.0)))
    start = temperature.tau_0.clone()
    torch.testing.assert_close(temperature(torch.arange(U)), start.expand(U))  # nothing changes within an epoch
    temperature.refresh(corpus(1, unit(U, D, seed=1), unit(N, D, seed=2)))
    mean = {query: sum(values) / len(values) for query, values in sums.items()}
    ordered = sorted(mean.values())
    centre = sum(ordered) / len(ordered) if quantile is None else ordered[math.ceil(quantile * len(ordered)) - 1]
    for query in range(U):
        excess = max(-1 / math.e, (mean[query] - centre) / (2 * beta)) if query in mean else 0.0
        want = float(start) * math.exp(lambertw(max(excess, -1 / math.e + 1e-12)).real)
        assert float(temperature(torch.tensor([query]))) == pytest.approx(want, rel=2e-3 if excess < -0.36 else 1e-4)
    worst, best = max(mean, key=lambda u: mean[u]), min(mean, key=lambda u: mean[u])
    assert float(temperature.tau[worst]) > float(temperature.tau[best])


def test_a_losss_memory_is_one_epoch_and_survives_an_absence() -> None:
    """A query seen in the last epoch has that epoch's mean; an unseen one keeps its previous mean."""
    temperature = AdaTau(COUNTS, N)
    for epoch, seed in ((1, 10), (2, 40)):
        step, bag = batch(temperature, seed)
        only = torch.arange(5) if epoch == 1 else torch.tensor([0, 2])  # in the second epoch only query 3
        step = Step(
            step.query_ids[only],
            step.item_ids[only],
            step.q[only],
            step.v[only],
            step.tau[only],
            step.encode,
            step.generator,
        )
        (block,) = bag.blocks
        bag = Bag((Candidates(block.ids, block.emb, block.log_w, Exclude(step.item_ids)),))
        with torch.no_grad():
            temperature.observe(step, Outcome(torch.zeros(len(only)), (bag,)))
        before = temperature.loss.clone()
        temperature.refresh(corpus(epoch, unit(U, D, seed=1), unit(N, D, seed=2)))
        rows = [row for row, query in enumerate(step.query_ids.tolist()) if query == 3]
        own = [
            math.log(partition(step, bag, row, 1.0)) - float((step.q[row] * step.v[row]).detach().sum()) for row in rows
        ]
        assert float(temperature.loss[3]) == pytest.approx(sum(own) / len(own), rel=1e-5)
    assert torch.equal(temperature.loss[[0, 1, 5]], before[[0, 1, 5]])
    assert bool(torch.isnan(temperature.loss[[2, 4]]).all())


def test_running_means() -> None:
    """means="running": gap <- 0.99 gap + 0.01 (mean positive score - weighted mean score), used from `settle` on."""
    temperature = AdaTau(COUNTS, N, gap=0.5, settle=1, means="running")
    want = 0.5
    for seed in (10, 20, 30):
        step, bag = batch(temperature, seed)
        own = Candidates(
            torch.arange(10).view(5, 2), unit(5, 2, D, seed=seed + 5), torch.tensor([[0.0, -math.inf]]).expand(5, 2)
        )
        bag = Bag((*bag.blocks, own))
        with torch.no_grad():
            temperature.observe(step, Outcome(torch.zeros(5), (bag,)))
        positive = [float(step.q[i].detach() @ step.v[i].detach()) for i in range(5)]
        total = mass = 0.0
        for i in range(5):
            for j in range(4):
                weight = math.exp(float(bag.blocks[0].log_w[j]))
                total, mass = total + weight * float(step.q[i].detach() @ bag.blocks[0].emb[j]), mass + weight
            total, mass = total + float(step.q[i].detach() @ own.emb[i, 0]), mass + 1.0
        want = 0.99 * want + 0.01 * (sum(positive) / 5 - total / mass)
    temperature.refresh(corpus(1, unit(U, D, seed=1), unit(N, D, seed=2)))
    assert float(temperature.tau_0) == pytest.approx(want / log_ratio(), rel=1e-5)


def test_the_loss_of_adap_tau() -> None:
    """-s_+ / tau_0 + log sum_j w_j exp(s_j / tau_u): common temperature for the positive, the query's for negatives."""
    temperature = AdaTau(COUNTS, N)
    temperature.tau.copy_(torch.linspace(0.1, 0.6, U))
    temperature.tau_0.fill_(0.25)
    step, bag = batch(temperature, 10)
    found = adaptive_softmax(temperature)(step, bag)
    for row in range(5):
        own = float(step.q[row].detach().double() @ step.v[row].detach().double())
        want = -own / 0.25 + math.log(partition(step, bag, row, float(temperature.tau[step.query_ids[row]])))
        assert float(found[row].detach()) == pytest.approx(want, rel=1e-5)
    weighed = adaptive_softmax(temperature)(step, Bag(bag.blocks, torch.full((5,), 0.4)))
    torch.testing.assert_close(weighed, found - 0.4)
    (gradient,) = torch.autograd.grad(found.sum(), step.v)
    torch.testing.assert_close(gradient, -step.q.detach() / 0.25)


def test_state_survives_saving() -> None:
    """A state_dict carries tau, tau_0, the gap and the losses of the epoch so far to another module."""
    first, second = AdaTau(COUNTS, N), AdaTau(COUNTS, N)
    step, bag = batch(first, 10)
    with torch.no_grad():
        first.observe(step, Outcome(torch.zeros(5), (bag,)))
    second.load_state_dict(first.state_dict())
    for temperature in (first, second):
        temperature.refresh(corpus(200, unit(U, D, seed=1), unit(N, D, seed=2)))
    assert torch.equal(first.tau, second.tau)
    assert not torch.equal(first.tau, first.tau_0.expand(U))


def test_what_is_refused() -> None:
    """Arguments and data without a valid temperature raise errors."""
    for bad in ({"beta": 0.0}, {"gap": -1.0}, {"quantile": 1.5}, {"means": "batch"}, {"low": 0.0}):
        with pytest.raises(ValueError, match=r"Ada-tau|quantile|means"):
            AdaTau(COUNTS, N, **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sparse"):
        AdaTau(torch.full((4,), 8), 10)
