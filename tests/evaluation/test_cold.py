"""Cold items in an evaluation: ranked with all others, apart from warm ones, and among themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from sparring.core.types import Positives
from sparring.evaluation.ranking import evaluate
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower

N_QUERIES, N_ITEMS, K = 12, 20, 4
WARM = set(range(N_ITEMS)) - {0, 3, 8, 9, 15, 19}


@dataclass
class Held:
    queries: np.ndarray
    items: np.ndarray
    n_queries: int = N_QUERIES


@pytest.fixture(scope="module")
def world() -> tuple[Retriever, list[set[int]], list[set[int]]]:
    """A model, the seen items of every query (warm ones), and its test items."""
    rng = np.random.default_rng(3)
    torch.manual_seed(0)
    model = Retriever(IdTower(N_QUERIES, 5), IdTower(N_ITEMS, 5), "dot")
    seen = [set(rng.choice(sorted(WARM), 4, replace=False).tolist()) for _ in range(N_QUERIES)]
    for item in WARM:  # every warm item has a pair
        seen[item % N_QUERIES].add(item)
    test = [set(rng.choice(N_ITEMS, 5, replace=False).tolist()) - seen[q] for q in range(N_QUERIES)]
    return model, seen, test


def lists(sets: Sequence[set[int]]) -> Positives:
    start = np.concatenate([[0], np.cumsum([len(s) for s in sets])])
    return Positives(torch.tensor(start), torch.tensor([i for s in sets for i in sorted(s)], dtype=torch.int32))


def pairs(sets: Sequence[set[int]]) -> Held:
    rows = [(q, i) for q, items in enumerate(sets) for i in items]
    queries, items = (np.array(column) for column in zip(*rows, strict=True))
    return Held(queries, items)


def best(model: Retriever, query: int, seen: set[int], among: set[int]) -> list[int]:
    scores = (model.query_vectors(torch.tensor([query])) @ model.item_vectors().T)[0].tolist()
    return sorted(among - seen, key=lambda item: (-scores[item], item))[:K]


def measured(found: list[int], wanted: set[int]) -> tuple[float, float]:
    """recall and ndcg of one list."""
    gains = [1 / math.log2(rank + 2) for rank, item in enumerate(found) if item in wanted]
    ideal = sum(1 / math.log2(rank + 2) for rank in range(min(K, len(wanted))))
    return len(gains) / len(wanted), sum(gains) / ideal


def by_hand(model: Retriever, seen: list[set[int]], test: list[set[int]], among: set[int], of: set[int]) -> list[float]:
    values = [measured(best(model, q, seen[q], among), test[q] & of) for q in range(N_QUERIES) if test[q] & of]
    return [sum(column) / len(values) for column in zip(*values, strict=True)]


def test_warm_and_cold_apart(world: tuple[Retriever, list[set[int]], list[set[int]]]) -> None:
    """Both kinds of test items in the ranking of all items, and cold ones among cold items, equal brute force."""
    model, seen, test = world
    result = evaluate(model, pairs(test), lists(seen), (K,), ("recall", "ndcg"))
    everything = set(range(N_ITEMS))
    cold = everything - WARM
    for name, among, of in (
        ("warm", everything, WARM),
        ("cold", everything, cold),
        ("cold among cold", cold, cold),
    ):
        values = result.strata[name]
        assert [values[f"recall@{K}"], values[f"ndcg@{K}"]] == pytest.approx(by_hand(model, seen, test, among, of))
        assert (values["items"], values["queries"]) == (len(of), sum(bool(items & of) for items in test))
    assert "recall (cold among cold)" in str(result)


@pytest.mark.parametrize("sharded", [False, True])
def test_only_some_items_are_listed(
    world: tuple[Retriever, list[set[int]], list[set[int]]], sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `among`, lists hold these items alone, the others count as missed; also from a sharded table."""
    model, seen, test = world
    among, vectors = WARM - {1, 2} | {9}, model.item_vectors()
    with monkeypatch.context() as patch:
        if sharded:
            patch.setattr(model, "item_shard", lambda: (0, vectors))
        result = evaluate(model, pairs(test), lists(seen), (K,), ("recall", "ndcg"), among=torch.tensor(sorted(among)))
    everything = set(range(N_ITEMS))
    expected = by_hand(model, seen, test, among, everything)
    assert [result.metrics[f"recall@{K}"], result.metrics[f"ndcg@{K}"]] == pytest.approx(expected)
    alone = result.strata["cold among cold"]
    assert alone["items"] == 1  # item 9
    assert alone[f"recall@{K}"] == pytest.approx(by_hand(model, seen, test, {9}, everything - WARM)[0])


def test_no_cold_test_item_no_rows(world: tuple[Retriever, list[set[int]], list[set[int]]]) -> None:
    """Without a cold test item the strata are those of popularity alone."""
    model, seen, test = world
    result = evaluate(model, pairs([items & WARM for items in test]), lists(seen), (K,), ("recall",))
    assert list(result.strata) == ["head", "mid", "tail"]


class Scores(torch.nn.Module):
    """A query tower that scores all items."""

    dim = N_ITEMS

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


def test_models_that_score_all_items(world: tuple[Retriever, list[set[int]], list[set[int]]]) -> None:
    """A model without item vectors lists the same items as one with them."""
    from sparring.models.towers import UnitTower

    model, seen, test = world
    table = (model.query_vectors(torch.arange(N_QUERIES)) @ model.item_vectors().T).detach()
    scores, among = Retriever(Scores(table), UnitTower(N_ITEMS), "dot"), torch.tensor([1, 3, 4, 9, 11, 12, 15])
    ours, theirs = (
        evaluate(each, pairs(test), lists(seen), (K,), ("recall", "ndcg"), among=among) for each in (scores, model)
    )
    assert ours.metrics == pytest.approx(theirs.metrics)
    assert ours.strata["cold among cold"] == pytest.approx(theirs.strata["cold among cold"])
