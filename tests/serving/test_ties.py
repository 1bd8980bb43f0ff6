"""One order everywhere: higher score first, then the smaller id, for one query, a batch, filters and changed items."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.core.topk import top_k
from sparring.core.types import Positives
from sparring.models.fusion import Fused
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.serving.index import Index
from support.settings import effort

SIZES = (1, 2, 7, 33)
Lists = tuple[np.ndarray, np.ndarray]


def brute(q: np.ndarray, vectors: np.ndarray, k: int, allowed: np.ndarray) -> Lists:
    """All inner products, summed in extended precision and rounded once, by (score descending, id ascending)."""
    full = (q.astype(np.longdouble) @ vectors[allowed].astype(np.longdouble).T).astype(np.float32)
    order = np.argsort(-full, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(full, order, 1), allowed[order]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, np.random.Generator]:
    """Queries, items of which many are equal, k: whole numbers, or general floats."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, dim, distinct = draw(st.integers(3, 700)), draw(st.sampled_from([1, 3, 8, 33, 64])), draw(st.integers(1, 40))
    if draw(st.booleans()):
        q, base = rng.integers(-2, 3, (max(SIZES), dim)), rng.integers(-2, 3, (distinct, dim))
    else:
        q, base = (
            rng.normal(size=(max(SIZES), dim)),
            rng.normal(size=(distinct, dim)) * 10.0 ** draw(st.integers(-3, 3)),
        )
    vectors = base[rng.integers(0, distinct, n)]
    return q.astype(np.float32), vectors.astype(np.float32), draw(st.integers(1, min(n, 30))), rng


def in_batches(index: Index, q: np.ndarray, k: int, size: int, **filters: np.ndarray) -> Lists:
    parts = [index.search(q[low : low + size], k, **filters) for low in range(0, len(q), size)]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def same(found: Lists, expected: Lists) -> bool:
    return np.array_equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])


@settings(max_examples=effort(5, 200))
@given(worlds())
def test_lists_are_the_same_in_every_batch(world: tuple[np.ndarray, np.ndarray, int, np.random.Generator]) -> None:
    """Scores and ids equal the brute force bit by bit, whatever the batch, the block and the way that an item came."""
    q, vectors, k, rng = world
    n = len(vectors)
    every, half = np.arange(n), np.sort(rng.permutation(n)[: max(k, n // 2)])
    expected, filtered = brute(q, vectors, k, every), brute(q, vectors, k, half)
    plain = Index(vectors, every)
    changed = Index(np.where(np.isin(every, half)[:, None], vectors, -vectors), every)
    changed.remove(half)
    changed.add(every, vectors)  # every item replaces a row of the index
    partly = Index(vectors, every)
    partly.remove(half)
    partly.add(half, vectors[half])  # half of the items are added, half are rows of the index
    for size in SIZES:
        for index in (plain, changed, partly):
            assert same(in_batches(index, q, k, size), expected)
            assert same(in_batches(index, q, k, size, allow=half), filtered)
            assert same(in_batches(index, q, k, size, deny=np.setdiff1d(every, half)), filtered)
    for block in (None, 1, 5000):
        scores, ids = top_k(torch.from_numpy(q), torch.from_numpy(vectors), k, block=block)
        assert same((scores.numpy(), ids.numpy()), expected)


def test_a_close_race_is_decided_by_the_exact_scores() -> None:
    """Hundreds of items within the rounding of a matrix product are ranked by their exact inner products."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=64).astype(np.float32)
    vectors = np.repeat(base[None], 3000, 0)
    places = rng.integers(0, 64, 3000)
    vectors[np.arange(3000), places] = np.nextafter(vectors[np.arange(3000), places], np.float32(np.inf))
    q = rng.normal(size=(9, 64)).astype(np.float32)
    expected = brute(q, vectors, 20, np.arange(3000))
    for size in (1, 9):
        assert same(in_batches(Index(vectors, np.arange(3000)), q, 20, size), expected)


def test_fused_lists_break_ties_by_id() -> None:
    """Items with equal fused scores are listed by id, not in the order of the classifiers."""
    knn, clf = (Retriever(IdTower(2, 2), IdTower(4, 2)) for _ in range(2))
    with torch.no_grad():
        for model, items in ((clf, [[0, 1], [1, 0], [0, 1], [1, 0]]), (knn, [[1, 0], [0, 1], [1, 0], [0, 1]])):
            model.query.weight.copy_(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
            model.item.weight.copy_(torch.tensor(items).float())
    fused = Fused(knn, clf, np.ones(4), shortlist=4)
    nothing = Positives(torch.zeros(3, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    assert fused.lists(torch.arange(2), 4, nothing).tolist() == [[0, 1, 2, 3]] * 2
