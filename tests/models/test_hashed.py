"""Hashed ids: the formula, stable hashes, runs that are saved, read and continued with new ids."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

import sparring
from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split, Vocabulary
from sparring.models.hashed import HashedIds, hash_codes
from sparring.models.towers import IdTower
from sparring.training.warm_start import warm_start

QUICK = {"dim": 6, "epochs": 2, "batch_size": 64, "n": 16, "patience": None, "model.buckets": 32}


def test_a_vector_is_the_mixture_of_two_rows() -> None:
    """Each vector equals the loop over the hashes of its id; numbers hash as their texts."""
    torch.manual_seed(0)
    tower = HashedIds(["a", "b", "7", "ü"], buckets=5, dim=3)
    torch.nn.init.normal_(tower.mixture.weight)
    for row, name in enumerate(["a", "b", "7", "ü"]):
        h = [xxhash.xxh3_64_intdigest(name.encode(), seed) % 5 for seed in range(3)]
        weights, values = tower.mixture.weight[h[2]], tower.values.weight
        expected = weights[0] * values[h[0]] + weights[1] * values[h[1]]
        assert torch.allclose(tower(torch.tensor(row)), expected)
    assert hash_codes([7], 5).tolist() == hash_codes(["7"], 5).tolist()


def test_vectors_start_as_long_as_those_of_a_table() -> None:
    """The mean square of a hashed vector is that of a free one, within four standard errors."""
    torch.manual_seed(0)
    squares = HashedIds(range(3000), buckets=4096, dim=8)(torch.arange(3000)).detach().square().sum(1).numpy()
    table = IdTower(3000, 8)(torch.arange(3000)).detach().square().sum(1).numpy()
    error = np.sqrt((squares.var() + table.var()) / 3000)
    assert abs(squares.mean() - table.mean()) < 6 * error  # rows are shared, so that draws are not independent


def test_few_ids_share_a_vector() -> None:
    """Of 2,000 ids with 200 buckets, all three hashes agree for as few pairs as chance has it."""
    codes = hash_codes(range(2000), 200)
    _, counts = np.unique(codes, axis=0, return_counts=True)
    assert (counts * (counts - 1) // 2).sum() <= 3  # expected: 2,000^2 / 2 / 200^3 = 0.25
    used = np.bincount(codes[:, 0], minlength=200)
    assert np.square(used - 10).sum() / 10 == pytest.approx(199, abs=4 * np.sqrt(2 * 199))


@pytest.mark.parametrize("query", ["id", "history"])
def test_a_run_comes_back(query: str, parts: Split, tmp_path: Path) -> None:
    """A run of hashed ids trains, and its folder recommends as the model in memory; its tables have the buckets set."""
    run = sparring.build("tables", parts.train, {**QUICK, "query_tower": query}, model="hashed")
    fitted = sparring.fit(run, parts, tmp_path / "run", k=(10,), device="cpu")
    loaded = sparring.load(tmp_path / "run")
    assert loaded.model.item.values.weight.shape == (32, 6)
    assert torch.equal(loaded.model.item_vectors(), run.model.item_vectors())
    assert loaded.recommend([1, 2]).equals(fitted.recommend([1, 2]))


def test_untrained_items_are_not_listed(parts: Split, tmp_path: Path) -> None:
    """An item without a training pair has a vector of other items, and no list holds it."""
    kept = parts.train.items != 3
    train = dataclasses.replace(
        parts.train, **{name: getattr(parts.train, name)[kept] for name in ("queries", "items", "time")}
    )
    run = sparring.build("tables", train, QUICK, model="hashed")
    sparring.fit(run, Split(train, parts.valid, parts.test), tmp_path / "run", k=(10,), device="cpu")
    listed = sparring.load(tmp_path / "run").recommend(list(range(60)), k=20, with_seen=True)["item"]
    assert 3 not in listed.to_list()
    assert 4 in listed.to_list()


def test_a_warm_start_keeps_the_table(parts: Split, tmp_path: Path) -> None:
    """With new ids in the data, ids that both know start with their trained vectors, and the tables keep their size."""
    sparring.fit(
        sparring.build("tables", parts.train, QUICK, model="hashed"), parts, tmp_path / "run", k=(10,), device="cpu"
    )
    more = Vocabulary(np.arange(-5, 40))  # five new items, which come first

    def moved(data: Interactions | None) -> Interactions | None:
        return None if data is None else dataclasses.replace(data, items=data.items + 5, item_ids=more, item_table=None)

    train = moved(parts.train)
    assert train is not None
    split = Split(train, moved(parts.valid), moved(parts.test))
    run = sparring.build("tables", train, QUICK, model="hashed")
    started = warm_start(run.model, split, tmp_path / "run")
    before = sparring.load(tmp_path / "run").model
    assert len(started.items) == 40
    assert torch.equal(run.model.encode_items(torch.arange(5, 45)), before.encode_items(torch.arange(40)))
    assert torch.equal(run.model.encode_queries(torch.arange(60)), before.encode_queries(torch.arange(60)))
    other = sparring.build("tables", train, {**QUICK, "model.buckets": 16}, model="hashed")
    with pytest.raises(UserError, match="cannot warm-start"):
        warm_start(other.model, split, tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"model.buckets": 1}, "buckets"),
        ({"item_tower": "features", "item_features": "category"}, "item_tower"),
        ({"tables": "sharded"}, "sharded"),
        ({"item_features": "category"}, "leave out item_features"),
        ({"query_features": "country"}, "leave out query_features"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], word: str, parts: Split) -> None:
    """Fewer than two rows, towers of other inputs and sharded tables raise one-line errors."""
    with pytest.raises(UserError, match=word):
        sparring.build("tables", parts.train, {**QUICK, **settings}, model="hashed")
