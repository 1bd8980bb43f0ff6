"""The trend of a model: the demand that it counts, the vector of newcomers, and what it knows of each part."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparring import split
from sparring.data import Interactions, Split
from sparring.data.histories import histories
from sparring.data.pairs import NO_TIME
from sparring.data.synthetic_world import make_world
from sparring.models.histories import HistoryTower
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.models.trend import Trend
from sparring.training.trend import count, know, newcomer

QUERIES, ITEMS = 40, 12


def timed(weight: bool = False) -> Interactions:
    random = np.random.default_rng(0)
    data = make_world(queries=QUERIES, items=ITEMS, seed=1).interactions
    time = random.integers(0, 1000, len(data))
    time[::7] = NO_TIME["i"]
    return replace(data, time=time, weight=random.random(len(data)).astype(np.float32) if weight else None)


def model_of(data: Interactions, dim: int = 4, bias: bool = True) -> Retriever:
    torch.manual_seed(0)
    tower = HistoryTower(IdTower(ITEMS, dim, 1.0), histories(data), last=50)
    return Retriever(tower, IdTower(ITEMS, dim, 1.0), item_bias=IdTower(ITEMS, 1, 0.1) if bias else None)


@pytest.mark.parametrize(("half_life", "weighted"), [(math.inf, False), (0.1, False), (0.1, True)])
def test_the_shift_is_the_logarithm_of_what_was_taken_lately(half_life: float, weighted: bool) -> None:
    """weight tau log(1 + c) in the bias of every item; what has no time is as old as the oldest."""
    data = timed(weighted)
    assert data.time is not None
    model = model_of(data).with_trend(Trend(ITEMS, half_life, 0.5, 0.2))
    count(model, data)
    known = data.time[data.time != NO_TIME["i"]]
    expected = np.zeros(ITEMS)
    for row, (item, time) in enumerate(zip(data.items, data.time, strict=True)):
        age = known.max() - (known.min() if time == NO_TIME["i"] else time)
        halved = 1.0 if half_life == math.inf else 0.5 ** (age / (half_life * (known.max() - known.min())))
        expected[item] += halved * (1.0 if data.weight is None else data.weight[row])
    shift = 0.5 * 0.2 * np.log1p(expected)
    plain = model.towers.item_vectors()
    np.testing.assert_allclose((model.item_vectors() - plain)[:, -1].numpy(), shift, atol=1e-5)
    assert torch.equal(model.item_vectors()[:, :-1], plain[:, :-1])


def test_newcomers_are_listed_by_demand_where_vectors_can_say_it() -> None:
    """With inner products and a dimension per item, their softmax is the share of every item."""
    data = timed()
    model = model_of(data, ITEMS)
    model.score = "dot"
    model.item.weight.data = torch.eye(ITEMS)  # type: ignore[union-attr]
    counts = torch.arange(1.0, ITEMS + 1)
    q = newcomer(model, counts, 0.3)
    assert model.item_bias is not None
    found = torch.softmax((q + model.item_bias(torch.arange(ITEMS)).squeeze(1).detach()) / 0.3, 0)
    torch.testing.assert_close(found, counts / counts.sum(), atol=1e-3, rtol=0)


def test_newcomers_have_the_likeliest_of_all_directions() -> None:
    """With cosines, no direction of the plane has a smaller cross-entropy, bias and trend included."""
    data = timed()
    model = model_of(data, 2).with_trend(Trend(ITEMS, 0.1, 0.5, 0.3))
    count(model, data)
    share = torch.from_numpy(data.recent_counts(0.1)).float()
    share /= share.sum()
    angle = torch.linspace(0, 2 * math.pi, 20_000)
    items = model.item_vectors()
    scores = torch.stack([angle.cos(), angle.sin()], 1) @ items[:, :2].T + items[:, 2]
    losses = -(torch.log_softmax(scores / 0.3, 1) @ share)
    empty = model.encode_histories(torch.full((1, 3), -1)).detach()
    assert torch.equal(empty[:, 2], torch.ones(1))
    own = -(torch.log_softmax(empty @ items.T / 0.3, 1) @ share)
    assert float(own) <= float(losses.min()) + 1e-4
    assert float(losses.max()) > float(own) + 0.1


def test_without_an_item_bias_newcomers_alone_change() -> None:
    data = timed()
    model = model_of(data, bias=False).with_trend(Trend(ITEMS, 0.1, 0.5, 0.3))
    before, empty = model.towers.item_vectors(), model.query.empty.detach().clone()  # type: ignore[union-attr, operator]
    count(model, data)
    assert torch.equal(model.item_vectors(), before)
    assert not torch.equal(model.query.empty, empty)  # type: ignore[union-attr]


def test_a_model_knows_what_came_before_a_part() -> None:
    """Training pairs for the validation part, and those of both for the test part; histories likewise."""
    data = replace(timed(), time=np.random.default_rng(1).integers(0, 1000, len(timed())))
    parts: Split = split(data, "temporal", valid=0.2, test=0.2)
    assert parts.valid is not None
    model = model_of(parts.train).with_trend(Trend(ITEMS, 0.1, 1.0, 0.3))
    for part, before in (("test", [parts.train, parts.valid]), ("valid", [parts.train])):
        know(model, parts, part)
        time = np.concatenate([each.time for each in before if each.time is not None])
        items = np.concatenate([each.items for each in before])
        expected = np.bincount(items, 0.5 ** ((time.max() - time) / (0.1 * np.ptp(time))), ITEMS)
        assert model.trend is not None
        np.testing.assert_allclose(model.trend.shift.numpy(), 0.3 * np.log1p(expected), rtol=1e-5)
        assert len(model.past_readers()[0].items) == len(items)
