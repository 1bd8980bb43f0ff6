"""Dropout on query vectors: its effect, its timing and its generator."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress
from sparring.training.step import training_step

RATE = 0.3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("bias", [False, True])
def test_inner_products_keep_their_mean(bias: bool) -> None:
    """A dimension is 0 with probability 0.3, otherwise divided by 0.7, so its mean stays; a bias dimension stays 1."""
    model = Retriever(IdTower(5, 6), IdTower(7, 6), "dot", item_bias=IdTower(7, 1) if bias else None)
    q = model.encode_queries(torch.arange(5)).detach()
    draws = torch.stack([model.dropped(q, RATE, torch.rand(5, 6, generator=generator(seed))) for seed in range(4000)])
    assert draws.shape == (4000, *q.shape)
    if bias:
        assert bool((draws[..., -1] == 1).all())
        draws, q = draws[..., :-1], q[..., :-1]
    zero = draws == 0
    assert abs(float(zero.double().mean()) - RATE) < 4 * math.sqrt(RATE * (1 - RATE) / zero.numel())
    torch.testing.assert_close(draws[~zero], (q / 0.7).expand_as(draws)[~zero])
    error = q.abs() * math.sqrt(RATE / (1 - RATE) / len(draws))
    assert bool(((draws.mean(0) - q).abs() < 5 * error).all())


@pytest.mark.parametrize("bias", [False, True])
def test_cosines_are_of_what_is_left_of_the_towers_vectors(bias: bool) -> None:
    """Under cosine the tower's vector is dropped first and then scaled to length 1."""
    model = Retriever(IdTower(5, 6), IdTower(7, 6), "cosine", item_bias=IdTower(7, 1) if bias else None)
    q = model.dropped(model.encode_queries(torch.arange(5)), RATE, torch.rand(5, 6, generator=generator(3))).detach()
    assert q.shape == (5, 6 + bias)
    if bias:
        assert bool((q[:, -1] == 1).all())
        q = q[:, :-1]
    raw = model.query.weight.detach() * (q != 0)  # type: ignore[union-attr,operator]
    torch.testing.assert_close(q, raw / raw.norm(dim=1, keepdim=True))
    assert 0 < int((q == 0).sum()) < q.numel()


def one_loss(parts: Split, settings: dict[str, object], training: bool = True) -> tuple[Tensor, Tensor]:
    """The losses and query vectors of a batch of 24 pairs against fixed draws."""
    run = build("uns", parts.train, {"dim": 6, "n": 9, "optimizer": "adam", **settings})
    run.model.train(training)
    rows = np.random.default_rng(0).choice(len(parts.train), 24, replace=False)
    queries, items = (
        torch.from_numpy(parts.train.queries[rows]).long(),
        torch.from_numpy(parts.train.items[rows]).long(),
    )
    losses, step, _ = training_step(run, queries, items, generator(5))
    (gradient,) = torch.autograd.grad(losses.mean(), run.model.query.weight)  # type: ignore[union-attr]
    return step.q.detach(), gradient


def test_only_training_drops(parts: Split) -> None:
    """A training step drops; evaluation mode and ranked vectors are bitwise those without dropout."""
    plain, _ = one_loss(parts, {})
    assert bool((one_loss(parts, {"dropout": RATE})[0] == 0).any())
    assert torch.equal(one_loss(parts, {"dropout": RATE}, training=False)[0], plain)
    vectors = [
        build("uns", parts.train, {"dim": 6, "dropout": rate}).model.query_vectors(torch.arange(9))
        for rate in (0.0, RATE)
    ]
    assert torch.equal(*vectors)


def test_the_gradient_cache_drops_alike(parts: Split) -> None:
    """Encoding in chunks of 5 drops the same dimensions and gives the gradient of encoding all at once."""
    whole, chunked = (one_loss(parts, {"dropout": RATE, "chunk": chunk}) for chunk in (None, 5))
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


class Stop(Exception):
    pass


def test_a_stopped_run_goes_on_as_if_it_had_not_been(parts: Split, tmp_path: Path) -> None:
    """A resumed run with dropout and a bias is bitwise identical to an uninterrupted one, for any global RNG."""
    settings = {"epochs": 3, "batch_size": 64, "dim": 8, "n": 30, "dropout": RATE, "item_bias": True}

    def stop(epoch: int, step: int, loss: Tensor) -> None:
        if (epoch, step) == (1, 2):
            raise Stop

    whole, broken, resumed, plain = (
        build("uns", parts.train, {**settings, **more}) for more in ({}, {}, {}, {"dropout": 0.0})
    )
    fit(whole, parts, k=(10,), device="cpu")
    torch.manual_seed(99)
    progress = TrainingProgress(step=stop)
    with pytest.raises(Stop):
        fit(broken, parts, tmp_path / "run", k=(10,), device="cpu", progress=progress, save_seconds=-1.0)
    assert (tmp_path / "run" / "checkpoint.safetensors").is_file()
    torch.manual_seed(7)
    fit(resumed, parts, tmp_path / "run", resume=True, k=(10,), device="cpu")
    want, found = whole.modules().state_dict(), resumed.modules().state_dict()
    assert want.keys() == found.keys()
    for key in want:
        assert torch.equal(found[key], want[key]), key
    fit(plain, parts, k=(10,), device="cpu")
    assert not torch.equal(plain.model.item_vectors(), whole.model.item_vectors())


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_a_rate_outside_is_refused(parts: Split, rate: float) -> None:
    """A rate outside [0, 1) raises an error."""
    with pytest.raises(UserError, match="dropout"):
        build("uns", parts.train, {"dropout": rate})
