"""Lists by towers and classifiers: those of the formula over the whole catalogue, with filters and changes of items."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparring.data.interactions import Interactions, Vocabulary
from sparring.models.fusion import Fused
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.serving.index import Index
from sparring.serving.index.recall_tuning import tune
from sparring.serving.index.staged import StagedItems, listing_vectors

QUERIES, ITEMS, DIM = 30, 50, 6


def made(score: str = "cosine", shortlist: int = ITEMS) -> Fused:
    """Random towers and classifiers over the same queries, with a tree that was learnt from random pairs."""
    random = torch.Generator().manual_seed(4)
    draws = [torch.randn(n, DIM, generator=random) for n in (QUERIES, ITEMS, ITEMS)]
    models = []
    for items, kind in zip(draws[1:], (score, "cosine"), strict=True):
        model = Retriever(IdTower(QUERIES, DIM), IdTower(ITEMS, DIM), kind)  # type: ignore[arg-type]
        with torch.no_grad():
            model.query.weight.copy_(draws[0])  # type: ignore[operator]
            model.item.weight.copy_(items)  # type: ignore[operator]
        models.append(model)
    fused = Fused(models[0], models[1], np.linspace(1, 4, ITEMS).astype(np.float32), 0.7, shortlist)
    near = (models[0].query_vectors(torch.arange(QUERIES)) @ models[0].item_vectors().T).topk(4).indices
    held = Interactions(
        np.repeat(np.arange(QUERIES, dtype=np.int32), 4),
        near.flatten().numpy().astype(np.int32),
        Vocabulary(np.arange(QUERIES)),
        Vocabulary(np.arange(ITEMS)),
    )
    fused.learn(held, None)
    assert float(fused.chance.max()) > 0
    return fused


def items_of(fused: Fused, how: str = "fused") -> StagedItems:
    towers = fused.knn.item_vectors()
    return StagedItems(Index(listing_vectors(towers, fused, how), np.arange(ITEMS)), towers, fused, how)  # type: ignore[arg-type]


def formula(fused: Fused, q: np.ndarray, knn: np.ndarray, clf: np.ndarray, weight: float) -> float:
    """The fused score of one query and one item."""
    x = np.array([q @ clf / np.linalg.norm(q), q @ knn, weight], dtype=np.float32)
    node = 0
    for _ in range(7):
        node = int((fused.below if x[int(fused.feature[node])] <= fused.threshold[node] else fused.above)[node])
    return float(x[0] + fused.beta * (x[1] + fused.chance[node]))


def by_hand(fused: Fused, q: np.ndarray, allowed: list[int], new: dict[int, np.ndarray], k: int) -> list[int]:
    """The best of all allowed items; a new one has its tower's direction as classifier and the largest propensity."""
    knn, clf = fused.knn.item_vectors().numpy(), fused.clf.item_vectors().numpy()
    scored = {}
    for item in allowed:
        if item in new:
            v = new[item]
            weight = float(fused.propensity[item]) if item < ITEMS else float(fused.propensity.max())
            scored[item] = formula(fused, q, v, v / np.linalg.norm(v), weight)
        else:
            scored[item] = formula(fused, q, knn[item], clf[item], float(fused.propensity[item]))
    return sorted(scored, key=lambda item: (-scored[item], item))[:k]


@pytest.mark.parametrize("score", ["cosine", "dot"])
def test_an_exhaustive_shortlist_gives_the_formula_over_all_items(score: str) -> None:
    """Served lists, those of evaluate and those by hand are one; filters are exact."""
    fused = made(score)
    q, everyone = fused.knn.query_vectors(torch.arange(QUERIES)), torch.arange(QUERIES)
    items = items_of(fused)
    found = items.search(q.numpy(), 8)[1]
    assert found.tolist() == [by_hand(fused, row, list(range(ITEMS)), {}, 8) for row in q.numpy()]
    assert found.tolist() == fused.lists(everyone, 8, None).tolist()
    exclude = [[row % ITEMS, 3] for row in range(QUERIES)]
    allow, deny = np.arange(0, ITEMS, 2), np.array([4, 8, 12])
    found = items.search(q.numpy(), 6, exclude, allow, deny)[1]
    left = [sorted({*allow.tolist()} - {*deny.tolist()} - {*hidden}) for hidden in exclude]
    assert found.tolist() == [by_hand(fused, row, kept, {}, 6) for row, kept in zip(q.numpy(), left, strict=True)]


def test_lists_hold_listed_items_alone() -> None:
    """The lists of evaluate are those of the service without the other items, such as ids without a training pair."""
    fused = made(shortlist=9)
    fused.listed = torch.arange(0, ITEMS, 3)
    q = fused.knn.query_vectors(torch.arange(QUERIES))
    items = items_of(fused)
    items.remove(np.setdiff1d(np.arange(ITEMS), fused.listed.numpy()))
    found = fused.lists(torch.arange(QUERIES), 5, None)
    assert found.tolist() == items.search(q.numpy(), 5)[1].tolist()
    assert bool(torch.isin(found, fused.listed).all())


@pytest.mark.parametrize("how", ["classifiers", "fused"])
def test_items_come_go_and_are_replaced(how: str) -> None:
    """An added item has its tower's vector as classifier; removal, replacement and return take effect at once."""
    fused, random = made(), np.random.default_rng(2)
    q = fused.knn.query_vectors(torch.arange(QUERIES)).numpy()
    items = items_of(fused, how)
    before = items.search(q, 7)
    vectors = random.normal(size=(3, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    items.add(np.array([ITEMS + 5, 9, ITEMS + 1]), vectors)
    new = dict(zip((ITEMS + 5, 9, ITEMS + 1), vectors, strict=True))
    items.remove(np.array([2, 3, ITEMS + 1]))
    kept = [item for item in (*range(ITEMS), ITEMS + 5) if item not in (2, 3)]
    found = items.search(q, 7)[1].tolist()
    if how == "fused":
        assert found == [by_hand(fused, row, kept, new, 7) for row in q]
    else:
        clf = {**dict(enumerate(fused.clf.item_vectors().numpy())), **new}
        assert found == [sorted(kept, key=lambda j: -float(row @ clf[j]))[:7] for row in q]
    assert any(ITEMS + 5 in row for row in found)
    assert items.has(9)
    assert not items.has(2)
    assert len(items) == len(kept)
    np.testing.assert_array_equal(items.vectors_of(np.array([9, ITEMS + 5])), vectors[[1, 0]])
    items.remove(np.array([ITEMS + 5]))
    items.restore(np.array([2, 3, 9]))
    for now, then in zip(items.search(q, 7), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_similar_items_are_those_of_the_towers() -> None:
    fused = made()
    items, knn = items_of(fused), fused.knn.item_vectors().numpy()
    found = items.towers.search(knn[:5], 4, [[at] for at in range(5)])[1]
    near = knn[:5] @ knn.T
    assert found.tolist() == [sorted(set(range(ITEMS)) - {at}, key=lambda j: -near[at, j])[:4] for at in range(5)]


def test_the_measured_recall_is_that_of_the_final_lists() -> None:
    """Of cells that miss items: the share of the exact fused lists on held-out queries, by brute force."""
    pytest.importorskip("faiss")
    fused = made(shortlist=5)
    towers = fused.knn.item_vectors()
    q = fused.knn.query_vectors(torch.arange(QUERIES)).numpy()

    def ranked(index: Index) -> StagedItems:
        return StagedItems(index, towers, fused)

    tuned = tune(listing_vectors(towers, fused, "fused"), q, 5, 0.5, None, "ivf", ranked=ranked, depth=5)
    truth = fused.lists(torch.arange(QUERIES), 5, None)[QUERIES // 2 :].tolist()
    found = ranked(tuned.index).search(q[QUERIES // 2 :], 5)[1].tolist()
    same = sum(len(set(a) & set(b)) for a, b in zip(found, truth, strict=True))
    assert tuned.recall == pytest.approx(same / sum(map(len, truth)))
    assert tuned.recall < 1
