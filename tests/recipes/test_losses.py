"""Recipes of the recent losses: one step equals the formula on the drawn items, and training updates their state."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from sparring.data.interactions import Interactions, Split
from sparring.data.reading import read
from sparring.data.splits import split
from sparring.losses import AdaTau, SLatK
from sparring.recipes import RECIPES
from sparring.recipes.run import Run
from sparring.recipes.settings import build, own_setup
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress
from sparring.training.step import training_step

B, N_DRAWN = 24, 30
TINY = {"dim": 6, "init_std": 0.7, "batch_size": B, "n": N_DRAWN}
KNOWN = {
    "bpr": "known",
    "psl": "known",
    "slatk": "known",
    "sl": "positive",
    "bsl": "positive",
    "ccl": "positive",
    "gbce": "positive",
}
COSINES = ["ada_tau", "bsl", "ccl", "psl", "sl", "slatk"]


def one_step(data: Interactions, run: Run) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the losses of a batch and, in float64, its cosines with the positive (B,) and the drawn items (B, n), the
    mask of counted draws, and the queries."""
    rows = np.random.default_rng(0).choice(len(data), B, replace=False)
    queries, items = torch.from_numpy(data.queries[rows]).long(), torch.from_numpy(data.items[rows]).long()
    losses, _, outcome = training_step(run, queries, items, torch.Generator().manual_seed(5), data.positives())
    (block,) = outcome.bags[0].blocks
    ids = block.ids if block.ids.dim() == 2 else block.ids.expand(B, -1)
    assert ids.shape == (B, N_DRAWN)
    users, vectors = (table.detach().double() for table in (run.model.query.weight, run.model.item.weight))  # type: ignore[union-attr]
    cosine = (users / users.norm(dim=1, keepdim=True))[queries] @ (vectors / vectors.norm(dim=1, keepdim=True)).T
    counts = ids != items.unsqueeze(1)
    assert 0 < int(counts.sum()) < counts.numel()
    if run.terms[0].negatives.exclude == "known":
        known = torch.zeros(data.n_queries, data.n_items, dtype=torch.bool)
        known[data.queries.tolist(), data.items.tolist()] = True
        known = known[queries].gather(1, ids)
        assert int(known.sum()) > int((~counts).sum())
        counts = ~known
    return losses.detach().double(), cosine[torch.arange(B), items], cosine.gather(1, ids), counts, queries


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_never_a_negative(name: str, parts: Split) -> None:
    """By default the recipe masks all known positives if its authors do, else only the row's positive."""
    assert build(name, parts.train).terms[0].negatives.exclude == KNOWN[name]
    assert build(name, parts.train, {"exclude": "none"}).terms[0].negatives.exclude == "none"


def log_sum(terms: Tensor, counts: Tensor) -> Tensor:
    return torch.log((terms * counts).sum(1))


def check(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("per_query", [False, True])
def test_sl(parts: Split, per_query: bool) -> None:
    """log sum_j exp((f_j - f_+) / 0.08) over n uniform items, shared or per query, without the positive."""
    found, own, others, counts, _ = one_step(parts.train, build("sl", parts.train, {**TINY, "per_query": per_query}))
    check(found, log_sum(((others - own.unsqueeze(1)) / 0.08).exp(), counts))


def test_bsl(parts: Split) -> None:
    """corrected: 1.22 times SL; release: -f_+ / tau + 1.22 log sum_j exp(f_j / tau)."""
    found, own, others, counts, _ = one_step(parts.train, build("bsl", parts.train, {**TINY, "tau": 0.2}))
    check(found, 1.22 * (log_sum((others / 0.2).exp(), counts) - own / 0.2))
    found, own, others, counts, _ = one_step(
        parts.train, build("bsl", parts.train, {**TINY, "tau": 0.2, "form": "release"})
    )
    check(found, 1.22 * log_sum((others / 0.2).exp(), counts) - own / 0.2)


def test_psl(parts: Split) -> None:
    """log sum_j (1 + d_j)^(1 / 0.05) with d = (f_j - f_+) / 2; the other surrogates are available by name."""
    for surrogate, sigma in (
        ("relu", lambda d: 1 + d),
        ("tanh", lambda d: 1 + torch.tanh(d)),
        ("atan", lambda d: 1 + torch.atan(d)),
    ):
        found, own, others, counts, _ = one_step(
            parts.train, build("psl", parts.train, {**TINY, "surrogate": surrogate})
        )
        check(found, log_sum(sigma((others - own.unsqueeze(1)) / 2) ** 20, counts))


@pytest.mark.parametrize("exclude", ["positive", "known"])
def test_ccl(parts: Split, exclude: str) -> None:
    """(1 - f_+) + w mean_j max(0, f_j - m)."""
    settings = {**TINY, "margin": 0.2, "weight": 7.0, "exclude": exclude}
    found, own, others, counts, _ = one_step(parts.train, build("ccl", parts.train, settings))
    check(found, 1 - own + 7 * ((others - 0.2).clamp(min=0) * counts).sum(1) / counts.sum(1))


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("per_query", [False, True])
def test_gbce(parts: Split, per_query: bool, offset: bool) -> None:
    """-(beta log sigmoid(f_+ + b) + sum_j log(1 - sigmoid(f_j + b))) / (1 + n), with the n of each row that count.

    b is 0 without the offset, and else the constant at which the loss of a row with all its draws is least.
    """
    settings = {**TINY, "score": "cosine", "tau": 0.3, "calibration": 0.6, "per_query": per_query, "offset": offset}
    found, own, others, counts, _ = one_step(parts.train, build("gbce", parts.train, settings))
    n = counts.sum(1)
    alpha = (n / (parts.train.n_items - 1)).clamp(max=1)
    beta = alpha * (0.6 * (1 - 1 / alpha) + 1 / alpha)
    grid = torch.linspace(-12, 4, 160_001, dtype=torch.float64)
    share = 1 - 0.6 * (1 - min(1.0, N_DRAWN / (parts.train.n_items - 1)))
    losses = -(share * torch.log(torch.sigmoid(grid)) + N_DRAWN * torch.log(torch.sigmoid(-grid)))
    b = float(grid[losses.argmin()]) if offset else 0.0
    negatives = (torch.log(1 - torch.sigmoid(others / 0.3 + b)) * counts).sum(1)
    check(found, -(beta * torch.log(torch.sigmoid(own / 0.3 + b)) + negatives) / (1 + n))


def test_gbce_learns_orders() -> None:
    """A sequence model under gBCE learns that each of 200 items is followed by the next. As published, without an
    offset, it gives all queries nearly the same vector."""
    first, length = np.random.default_rng(0).integers(200, size=150), np.arange(12)
    columns = np.arange(150).repeat(12), (first[:, None] + length).ravel() % 200, np.tile(length, 150)
    steps = split(read(pl.DataFrame(dict(zip(("query", "item", "time"), columns, strict=True)))), "leave-last-out")
    settings = {"dim": 16, "epochs": 12, "batch_size": 128, "lr": 0.005, "score": "dot", "tau": 1.0, "n": 64}
    learned, spread = [], []
    for given in ({}, {"offset": False}):
        run = build("gbce", steps.train, {**settings, **given, "patience": None}, model="sasrec")
        fitted = fit(run, steps, k=(10,), device="cpu", metrics=("ndcg",))
        assert fitted.test is not None
        learned.append(fitted.test.metrics["ndcg@10"])
        with torch.no_grad():
            vectors = run.model.eval().query_vectors(torch.arange(steps.train.n_queries))
        spread.append(float((vectors - vectors.mean(0)).square().sum() / vectors.square().sum()))
    assert learned[0] > 0.6
    assert learned[1] < 0.1
    assert spread[0] > 0.5
    assert spread[1] < 0.05


def test_slatk(parts: Split) -> None:
    """The loss is sigmoid((f_+ - beta_u) / tau_w) times SL at tau 0.1, with the threshold of each row's query."""
    run = build("slatk", parts.train, {**TINY, "tau_w": 0.4})
    loss = run.terms[0].loss
    assert isinstance(loss, SLatK)
    loss.beta.copy_(torch.linspace(-1, 1, parts.train.n_queries))
    found, own, others, counts, queries = one_step(parts.train, run)
    weight = torch.sigmoid((own - loss.beta.double()[queries]) / 0.4)
    check(found, weight * log_sum(((others - own.unsqueeze(1)) / 0.1).exp(), counts))


def test_ada_tau(parts: Split) -> None:
    """-f_+ / tau_0 + log sum_j exp(f_j / tau_u), tau_0 = 0.7 / log(n m / 2|D|) at first, a tau per query later."""
    run = build("ada_tau", parts.train, TINY)
    temperature = run.temperature
    assert isinstance(temperature, AdaTau)
    count = np.bincount(parts.train.queries, minlength=parts.train.n_queries)
    active = count > np.quantile(count, 0.2)
    tau_0 = 0.7 / math.log(active.sum() * parts.train.n_items / (2 * count[active].sum()))
    assert float(temperature.tau_0) == pytest.approx(tau_0, rel=1e-6)
    temperature.tau.copy_(tau_0 * torch.linspace(0.5, 2, parts.train.n_queries))
    found, own, others, counts, queries = one_step(parts.train, run)
    tau = temperature.tau.double()[queries].unsqueeze(1)
    check(found, log_sum((others / tau).exp(), counts) - own / tau_0)


def test_what_they_keep_moves_as_they_train(parts: Split) -> None:
    """After three epochs SL@K has finite thresholds, and Ada-tau's temperatures follow each query's losses."""
    settings = {"epochs": 3, "batch_size": 64, "dim": 8, "lr": 0.01}
    slatk = build("slatk", parts.train, {**settings, "every": 2, "k": 5})
    fit(slatk, parts, k=(10,), device="cpu")
    assert bool(torch.isfinite(slatk.terms[0].loss.beta).all())  # type: ignore[union-attr]
    for means in ("epoch", "running"):
        run = build("ada_tau", parts.train, {**settings, "settle": 1, "means": means})
        fit(run, parts, k=(10,), device="cpu")
        temperature = run.temperature
        assert isinstance(temperature, AdaTau)
        assert float(temperature.gap) != pytest.approx(0.7)
        seen = torch.isfinite(temperature.loss)
        assert int(seen.sum()) == len(np.unique(parts.train.queries))
        order = temperature.loss[seen].argsort()
        assert bool((temperature.tau[seen][order].diff() >= -1e-7).all())
        assert float(temperature.tau.max()) > float(temperature.tau.min())


def test_ada_tau_leaves_the_given_gap_in_a_short_training(parts: Split) -> None:
    """By default equation 14 applies after a quarter of the epochs; the recorded tau is the mean over queries."""
    run = build("ada_tau", parts.train, {"epochs": 6, "batch_size": 64, "dim": 8, "lr": 0.05})
    temperature, gaps, taus = run.temperature, [], []
    assert isinstance(temperature, AdaTau)

    def note(record: dict[str, object]) -> None:
        gaps.append(float(temperature.gap))
        taus.append((record["tau"], sum(temperature.tau.tolist()) / parts.train.n_queries, float(temperature.tau[0])))

    fit(run, parts, k=(10,), device="cpu", progress=TrainingProgress(epoch=note))
    assert [gap == pytest.approx(0.7) for gap in gaps] == [True, True, False, False, False, False]
    for recorded, mean, first in taus[1:]:
        assert recorded == pytest.approx(mean, abs=2e-6)
        assert abs(first - mean) > 1e-5  # the first query's tau is not the mean
    long = {
        epochs: build("ada_tau", parts.train, {"epochs": epochs}).temperature.settle for epochs in (1, 4, 20, 400, 1000)
    }
    assert long == {1: 1, 4: 1, 20: 5, 400: 100, 1000: 100}


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["slatk", "ada_tau"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(name: str, parts: Split, tmp_path: Path) -> None:
    """A stateful loss or temperature, stopped after one epoch and resumed, ends bitwise as if uninterrupted."""
    settings = {
        "epochs": 3,
        "batch_size": 64,
        "dim": 8,
        "lr": 0.01,
        "n": 30,
        **({"every": 2} if name == "slatk" else {"settle": 2}),
    }

    def stop(epoch: int, step: int, loss: Tensor) -> None:
        if (epoch, step) == (1, 2):
            raise Stop

    whole, broken, resumed = (build(name, parts.train, settings) for _ in range(3))
    fit(whole, parts, k=(10,), device="cpu")
    progress = TrainingProgress(step=stop)
    with pytest.raises(Stop):
        fit(broken, parts, tmp_path / "run", k=(10,), device="cpu", progress=progress, save_seconds=-1.0)
    assert (tmp_path / "run" / "checkpoint.safetensors").is_file()
    fit(resumed, parts, tmp_path / "run", resume=True, k=(10,), device="cpu")
    want, found = whole.modules().state_dict(), resumed.modules().state_dict()
    assert want.keys() == found.keys()
    for key in want:
        torch.testing.assert_close(found[key], want[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [*COSINES, "gbce"])
def test_they_learn(name: str, parts: Split) -> None:
    """After a few epochs the mean score of the known pairs exceeds that of all pairs by 0.2.

    gBCE spends the first epochs on a common low score.
    """
    settings = {
        "epochs": 30 if name == "gbce" else 8,
        "batch_size": 64,
        "dim": 8,
        "lr": 0.02,
        "patience": "none",
        "optimizer": "row-adam",
        "n": 30,
    }
    run = build(name, parts.train, settings)
    queries, items = (torch.from_numpy(column).long() for column in (parts.train.queries, parts.train.items))

    def lead() -> float:
        scores = run.model.query_vectors(torch.arange(parts.train.n_queries)) @ run.model.item_vectors().T
        return float(scores[queries, items].mean() - scores.mean())

    assert abs(lead()) < 0.1
    fit(run, Split(parts.train, None, None), k=(10,), device="cpu")
    assert lead() > 0.2


def test_their_papers_and_settings() -> None:
    """Each recipe cites its paper, scores by cosine, and has the paper's dimension and batch size."""
    for name in COSINES:
        recipe = RECIPES[name]
        assert recipe.__doc__
        assert recipe.__doc__.strip().splitlines()[-1].strip().rstrip(".").split()[-1].isdigit()
        setup = own_setup(recipe)
        assert (setup.model.score, setup.model.dim, setup.batches.batch_size) == (
            "cosine",
            64,
            2048 if name == "ada_tau" else 1024,
        )
    assert own_setup(RECIPES["sl"]) == own_setup(RECIPES["bsl"])
