"""Every metric of every dialect equals a loop and an independent library."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.core.errors import UserError
from sparring.evaluation.metrics import METRICS, parse, per_query, popularity_percentile, popularity_strata


def world(seed: int, users: int = 40, items: int = 50, k: int = 12) -> tuple[list[list[int]], list[set[int]]]:
    """Build lists of k distinct items and non-empty sets of relevant items, some larger than k."""
    rng = np.random.default_rng(seed)
    lists = [rng.permutation(items)[:k].tolist() for _ in range(users)]
    return lists, [set(rng.permutation(items)[: rng.integers(1, 25)].tolist()) for _ in range(users)]


def hit_matrix(lists: list[list[int]], truth: list[set[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([[i in t for i in row] for row, t in zip(lists, truth, strict=True)]), np.array(
        [len(t) for t in truth]
    )


def loop(name: str, dialect: str, ranked: list[int], relevant: set[int], k: int) -> float:
    """Compute one metric of one query from its definition."""
    h = [1 if item in relevant else 0 for item in ranked[:k]]
    n, found = len(relevant), sum(h)
    if name == "recall":
        return found / (min(k, n) if dialect == "lenskit" else n)
    if name == "precision":
        return found / k
    if name == "hit":
        return 1.0 if found else 0.0
    if name == "mrr":
        return next((1 / r for r, x in enumerate(h, 1) if x), 0.0)
    if name == "map":
        precisions = [sum(h[:r]) / r for r in range(1, k + 1) if h[r - 1]]
        return sum(precisions) / (n if dialect in ("trec", "rectools") else min(k, n))

    def discount(r: int) -> float:
        return max(math.log2(r), 1.0) if dialect == "lenskit" else math.log2(r + 1)

    ideal = sum(1 / discount(r) for r in range(1, (k if dialect == "rectools" else min(k, n)) + 1))
    if dialect == "xir-release":
        return sum(x / (1.0 if r == 1 else math.log2(3)) for r, x in enumerate(h, 1)) / ideal
    return sum(x / discount(r) for r, x in enumerate(h, 1)) / ideal


CASES = [(m, d) for d in ("standard", "trec", "rectools", "lenskit") for m in METRICS] + [
    ("recall", "xir-release"),
    ("ndcg", "xir-release"),
]


@pytest.mark.parametrize(("name", "dialect"), CASES)
def test_every_metric_equals_a_loop_over_queries(name: str, dialect: str) -> None:
    """Each metric of each dialect equals a plain loop at several cutoffs, with more and fewer relevant items than k."""
    lists, truth = world(1)
    hits, relevant = hit_matrix(lists, truth)
    for k in (1, 3, 10, 12):
        expected = [loop(name, dialect, row, t, k) for row, t in zip(lists, truth, strict=True)]
        np.testing.assert_allclose(per_query(parse(name, dialect), hits, relevant, k), expected, rtol=0, atol=1e-14)


def test_trec_dialect_agrees_with_trec_eval() -> None:
    """The trec dialect matches trec_eval's recall, P, success, map_cut, ndcg_cut and recip_rank to 1e-12."""
    pytrec_eval = pytest.importorskip("pytrec_eval")
    k = 12
    lists, truth = world(2, k=k)
    hits, relevant = hit_matrix(lists, truth)
    qrel = {str(u): {str(i): 1 for i in t} for u, t in enumerate(truth)}
    run = {str(u): {str(i): float(k - r) for r, i in enumerate(row)} for u, row in enumerate(lists)}
    theirs = {"recall": "recall", "precision": "P", "hit": "success", "map": "map_cut", "ndcg": "ndcg_cut"}
    cutoffs = (1, 5, 10)
    wanted = {f"{name}.{','.join(map(str, cutoffs))}" for name in theirs.values()} | {"recip_rank"}
    result = pytrec_eval.RelevanceEvaluator(qrel, wanted).evaluate(run)
    for name, trec in theirs.items():
        for cutoff in cutoffs:
            expected = [result[str(u)][f"{trec}_{cutoff}"] for u in range(len(lists))]
            np.testing.assert_allclose(
                per_query(parse(name, "trec"), hits, relevant, cutoff), expected, rtol=0, atol=1e-12
            )
    expected = [result[str(u)]["recip_rank"] for u in range(len(lists))]
    np.testing.assert_allclose(per_query(parse("mrr", "trec"), hits, relevant, k), expected, rtol=0, atol=1e-12)


def test_xir_release_ndcg_shows_its_bug() -> None:
    """A lone test item at rank 10 scores 0.631 in the XIR release's ndcg and 0.289 in the standard one; a perfect top
    10 scores 1.47 and 1."""
    lone, perfect = np.zeros((1, 10), dtype=bool), np.ones((1, 10), dtype=bool)
    lone[0, 9] = True
    release, standard = parse("ndcg_xir_release"), parse("ndcg")
    assert per_query(release, lone, np.array([1]), 10)[0] == pytest.approx(0.6309, abs=1e-4)
    assert per_query(release, perfect, np.array([10]), 10)[0] == pytest.approx(1.4698, abs=1e-4)
    assert per_query(standard, lone, np.array([1]), 10)[0] == pytest.approx(0.2891, abs=1e-4)
    assert per_query(standard, perfect, np.array([10]), 10)[0] == pytest.approx(1.0, abs=1e-12)


def test_keys_say_the_dialect() -> None:
    """The key of a non-standard metric names its dialect, however it was requested; metrics without dialects have plain
    keys."""
    assert parse("ndcg").key(10) == "ndcg@10"
    assert parse("ndcg_xir_release").key(10) == parse("ndcg", "xir-release").key(10) == "ndcg_xir_release@10"
    assert parse("recall_standard", "trec").key(5) == "recall@5"
    assert parse("coverage", "rectools").key(5) == "coverage@5"


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("ndgc", "standard"),
        ("ndcg_best", "standard"),
        ("ndcg", "best"),
        ("map", "xir-release"),
        ("coverage_trec", "standard"),
    ],
)
def test_unknown_metrics_are_refused(name: str, dialect: str) -> None:
    """A misspelt metric, an unknown dialect and a metric missing from its dialect raise one-line errors."""
    with pytest.raises(UserError) as caught:
        parse(name, dialect)
    assert "\n" not in str(caught.value)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_popularity_percentile_is_centred_on_consumption(counts: list[int]) -> None:
    """The percentile equals its definition, and its mean over the interactions is 1/2."""
    got = popularity_percentile(np.array(counts))
    total = sum(counts)
    if total == 0:
        assert (got == 0.5).all()
        return
    for i, c in enumerate(counts):
        expected = (sum(x for x in counts if x < c) + 0.5 * sum(x for x in counts if x == c)) / total
        assert got[i] == pytest.approx(expected, abs=1e-12)
    assert sum(c * p for c, p in zip(counts, got, strict=True)) / total == pytest.approx(0.5, abs=1e-12)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_strata_follow_their_definition(counts: list[int]) -> None:
    """With items sorted by count, the strata end at one third and two thirds of the interactions."""
    got = popularity_strata(np.array(counts))
    total, used = sum(counts), 0
    for c, i in sorted(((c, i) for i, c in enumerate(counts)), key=lambda pair: (-pair[0], pair[1])):
        expected = 2 if c == 0 or used / total >= 2 / 3 - 1e-12 else 1 if used / total >= 1 / 3 - 1e-12 else 0
        assert got[i] == expected
        used += c
