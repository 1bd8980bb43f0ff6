"""Losses around losses: both directions of a pair, and cut vectors, against loops over rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from sparring.core.errors import UserError
from sparring.core.types import Step
from sparring.data.interactions import Split
from sparring.losses import Matryoshka, OnlineHard, Symmetric, bpr, sampled_softmax
from sparring.negatives import InBatch, Popularity, Sampled, Uniform, Union
from sparring.recipes.settings import build
from sparring.testing import World

WORLD = World.build(n_items=30, dim=6)


def known(step: Step, query: int) -> set[int]:
    assert step.positives is not None
    return set(step.positives.items[step.positives.start[query] : step.positives.start[query + 1]].tolist())


@pytest.mark.parametrize("corrected", [False, True])
def test_symmetric_adds_items_against_queries(corrected: bool) -> None:
    """The loss is the mean of the softmax over items and the softmax over the queries that do not have the item."""
    step = WORLD.step(16, 1)
    frequency = Popularity(torch.arange(1, 257)) if corrected else None
    found = Symmetric(frequency=frequency)(step, InBatch(exclude="known")(step))
    want = []
    for i in range(16):
        score = float((step.q[i] @ step.v[i] / step.tau).detach())
        items = [j for j in range(16) if int(step.item_ids[j]) not in known(step, int(step.query_ids[i]))]
        queries = [j for j in range(16) if int(step.item_ids[i]) not in known(step, int(step.query_ids[j]))]
        there = torch.stack([step.q[i] @ step.v[j] / step.tau for j in items]).detach()
        back = torch.stack([step.q[j] @ step.v[i] / step.tau for j in queries]).detach()
        if corrected:
            share = (step.query_ids[queries] + 1) / (256 * 257 / 2)
            back = back - (15 * share).log()
        both = [torch.cat([torch.tensor([score]), part]).logsumexp(0) - score for part in (there, back)]
        want.append(sum(both) / 2)
    torch.testing.assert_close(found, torch.stack(want), rtol=1e-4, atol=1e-5)
    alone = Symmetric()(
        replace(step, positives=None), InBatch()(step)
    )  # each item's own query is excluded all the same
    assert torch.isfinite(alone).all()


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("loss", [sampled_softmax, bpr, OnlineHard(5)], ids=["softmax", "bpr", "hinge"])
def test_matryoshka_is_the_mean_over_cut_vectors(loss: object, cosine: bool) -> None:
    """The loss is the mean of the loss over complete vectors and over vectors cut by hand, with the same candidates."""
    step = WORLD.step(12, 2)
    negatives = Union(InBatch(Popularity(WORLD.counts)), Sampled(Uniform(WORLD.n_items), 7, per_query=True))
    bag = negatives(step)
    found = Matryoshka((2, 4), loss, cosine)(step, bag)  # type: ignore[arg-type]
    parts = []
    for dim in (6, 2, 4):

        def short(x: torch.Tensor, dim: int = dim) -> torch.Tensor:
            return normalize(x[..., :dim], dim=-1) if cosine and dim < 6 else x[..., :dim]

        small = replace(step, q=short(step.q), v=short(step.v), whole=None)
        blocks = tuple(replace(block, emb=short(block.emb)) for block in bag.blocks)
        parts.append(loss(small, replace(bag, blocks=blocks)))  # type: ignore[operator]
    torch.testing.assert_close(found, sum(parts) / 3)


def test_matryoshka_keeps_an_item_bias() -> None:
    """The last dimension, an item bias, counts at every width and is not scaled."""
    step = replace(WORLD.step(5, 3), biased=True)
    cut, _ = Matryoshka((2,)).cut(step, InBatch()(step), 2)
    torch.testing.assert_close(cut.v[:, :2], normalize(step.v[:, :2], dim=-1))
    torch.testing.assert_close(cut.v[:, 2], step.v[:, 5])
    with pytest.raises(ValueError, match="6 dimensions"):
        Matryoshka((6,)).cut(step, InBatch()(step), 6)


def test_settings_wrap_the_terms_of_any_recipe(parts: Split) -> None:
    """symmetric and matryoshka apply to every term; too many dimensions are refused."""
    run = build("ssl", parts.train, {"dim": 8, "symmetric": "true", "matryoshka": "2,4"})
    loss = run.terms[0].loss
    assert isinstance(loss, Matryoshka)
    assert isinstance(loss.loss, Symmetric)
    assert loss.dims == (2, 4)
    for wrong in ("16", "0"):
        with pytest.raises(UserError, match="matryoshka"):
            build("ssl", parts.train, {"dim": 8, "matryoshka": wrong})
