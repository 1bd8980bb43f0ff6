"""Items without a training pair are no recipe's negatives, and a tower over features learns nothing against them."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch

from sparring.core.part import listeners
from sparring.core.types import Corpus
from sparring.data.interactions import Interactions, Split, Vocabulary
from sparring.recipes import RECIPES
from sparring.recipes.in_batch import with_pairs
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.step import sample_steps
from support.settings import quick

SOLVED = ("popularity", "item_knn", "ease", "ials")  # they draw nothing
COLD = {0, 5, 6, 13, 22, 23}  # an item of each kind, and the first and the last


@pytest.fixture(scope="module")
def shop() -> Split:
    """40 queries that each like one of three kinds of 24 items; six items are in the test part only."""
    rng = np.random.default_rng(0)
    pairs = [(q, i) for q in range(40) for i in range(24) if i % 3 == q % 3 and (i in COLD or rng.random() < 0.8)]
    q, i = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    late = np.isin(i, list(COLD)) | (rng.random(len(q)) < 0.1)
    ids, table = (
        (Vocabulary(range(40)), Vocabulary(range(24))),
        pl.DataFrame({"kind": [f"k{n % 3}" for n in range(24)]}),
    )
    train, test = (Interactions(q[part], i[part], *ids, item_table=table) for part in (~late, late))
    other = np.array([(u + 1) % 3 + 3 for u in range(40)], np.int32)  # shown and not taken
    shown = np.arange(40, dtype=np.int32), np.where(other == 5, 8, other).astype(np.int32)
    return Split(Interactions(train.queries, train.items, *ids, item_table=table, shown=shown), None, test)


def test_the_items_with_pairs(shop: Split) -> None:
    """They are those of the training part; None where every item has one."""
    ids = with_pairs(shop.train)
    assert ids is not None
    assert set(ids.tolist()) == set(range(24)) - COLD
    everywhere = Interactions(
        np.zeros(24, np.int32), np.arange(24, dtype=np.int32), shop.train.query_ids, shop.train.item_ids
    )
    assert with_pairs(everywhere) is None


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in SOLVED])
def test_no_recipe_draws_an_item_without_a_pair(name: str, shop: Split) -> None:
    """Every candidate that counts in a step of any recipe has a training pair, before and after a refresh."""
    run = build(name, shop.train, quick(item_features="kind", hidden="8,4", init="normal"))
    positives = shop.train.positives()
    vectors = run.model.item_vectors()
    for epoch in range(3):
        corpus = Corpus(epoch, vectors, run.model.query_vectors, positives, torch.Generator().manual_seed(epoch))
        for part in listeners(run.modules(), "refresh"):
            part.refresh(corpus)
        _, _, outcome = next(sample_steps(run, shop, epoch))
        for bag in outcome.bags:
            for block in bag.plain().blocks:
                counts = ~torch.isneginf(block.log_w)
                counts = counts.any(0) if counts.dim() > block.ids.dim() else counts.expand(block.ids.shape)
                drawn = block.ids[counts & (block.ids >= 0)]
                assert not set(drawn.tolist()) & COLD


def test_cold_items_are_not_buried(shop: Split) -> None:
    """With one of three kinds as feature, a cold item of the right kind is ranked with the warm ones of that kind."""
    settings = quick(epochs=15, n=64, item_features="kind", hidden="16,8", lr=0.02)
    fitted = fit(build("default", shop.train, settings), shop, k=(10,), device="cpu")
    assert fitted.test is not None
    strata = fitted.test.strata
    assert strata["cold"]["items"] == len(COLD)
    assert strata["cold"]["recall@10"] > 0.5  # 0 where they are negatives
    assert strata["cold among cold"]["recall@10"] == 1  # there are six
