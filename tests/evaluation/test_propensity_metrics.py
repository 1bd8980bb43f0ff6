"""Extreme-classification metrics: hand-computed cases, identities and real filter files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.data import split
from sparring.data.formats.xc import read_labels, read_xc
from sparring.data.lines import read_pairs
from sparring.data.propensity import inverse_propensities
from sparring.evaluation.metrics import parse, popularity_bins
from sparring.evaluation.ranking import evaluate, evaluate_lists

TRUTH = [{0, 4}, {1}, {2, 3, 4}, {0}]
LISTS = np.array([[4, 1, 0], [0, 2, 3], [3, 2, 1], [2, 0, 1]])
WEIGHT = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
D2 = 1 / math.log2(3)  # discount of rank 2; the discount of rank 3 is 1/2


@dataclass(frozen=True)
class Points:
    queries: np.ndarray
    items: np.ndarray
    n_queries: int
    empty: int = 0


def points(truth: list[set[int]], empty: int = 0) -> Points:
    pairs = np.array([(q, i) for q, labels in enumerate(truth) for i in sorted(labels)], dtype=np.int32)
    return Points(pairs[:, 0], pairs[:, 1], len(truth) + empty, empty)


def measured(*metrics: str, empty: int = 0, k: tuple[int, ...] = (1, 2, 3)) -> dict[str, float]:
    return evaluate_lists(LISTS, points(TRUTH, empty), 5, k, metrics, propensity=WEIGHT).metrics


def test_four_points_and_five_labels_by_hand() -> None:
    """P, PSP and PSnDCG of four points and five labels equal values computed by hand from the definitions."""
    found = measured("precision", "psp", "psndcg", "recall")
    assert found["precision@1"] == pytest.approx(2 / 4)
    assert found["precision@3"] == pytest.approx(5 / 12)
    assert found["recall@3"] == pytest.approx((1 + 0 + 2 / 3 + 1) / 4)
    assert found["psp@1"] == pytest.approx((5 + 0 + 4 + 0) / (5 + 2 + 5 + 1))
    assert found["psp@2"] == pytest.approx((5 + 0 + 7 + 1) / (6 + 2 + 9 + 1))
    assert found["psp@3"] == pytest.approx((6 + 0 + 7 + 1) / (6 + 2 + 12 + 1))
    above = (5 + 1 / 2) / (1 + D2) + (4 + 3 * D2) / (1 + D2 + 1 / 2) + D2
    below = (5 + D2) / (1 + D2) + 2 + (5 + 4 * D2 + 3 / 2) / (1 + D2 + 1 / 2) + 1
    assert found["psndcg@3"] == pytest.approx(above / below)


def test_psp_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    """PSP@1 is a ratio of sums; the mean of the per-point ratios would be 0.45."""
    mean_of_ratios = (5 / 5 + 0 / 2 + 4 / 5 + 0 / 1) / 4
    assert abs(measured("psp")["psp@1"] - mean_of_ratios) > 0.2


def test_the_mean_of_the_single_values_is_the_metric() -> None:
    """The per-query psp and psndcg average to the metric, so two models can be compared query by query."""
    found = evaluate_lists(LISTS, points(TRUTH), 5, (1, 3), ("psp", "psndcg"), propensity=WEIGHT)
    for key, value in found.metrics.items():
        assert found.per_query[key].mean() == pytest.approx(value)
    np.testing.assert_allclose(found.per_query["psp@1"], np.array([5, 0, 4, 0]) / (13 / 4))


def test_identities_at_one_and_with_equal_weights() -> None:
    """At cutoff 1, nDCG equals P and PSnDCG equals PSP; a perfect ranking by weight has a PSP of 1."""
    found = measured("precision", "ndcg", "psp", "psndcg")
    assert found["ndcg@1"] == pytest.approx(found["precision@1"])
    assert found["psndcg@1"] == pytest.approx(found["psp@1"])
    best = np.array([[4, 0, -1], [1, -1, -1], [4, 3, 2], [0, -1, -1]])
    perfect = evaluate_lists(best, points(TRUTH), 5, (1, 2, 3), ("psp", "psndcg"), propensity=WEIGHT).metrics
    assert all(value == pytest.approx(1) for value in perfect.values())


def test_points_without_labels_count_zero_in_the_dialect_xc() -> None:
    """In the xc dialect P, nDCG and R average over all test points; the plain metrics average over points with a
    label."""
    plain, found = measured("precision", "ndcg"), measured("precision_xc", "ndcg_xc", "recall_xc", empty=1)
    assert found["precision_xc@3"] == pytest.approx(plain["precision@3"] * 4 / 5)
    assert found["ndcg_xc@2"] == pytest.approx(plain["ndcg@2"] * 4 / 5)
    with pytest.raises(UserError, match="xc has no 'map'"):
        parse("map", "xc")


def test_coverage_of_the_dialect_counts_right_labels_only() -> None:
    """Of the five test labels two are hit at 1 (4 and 3) and four at 3; plain coverage counts every listed label."""
    found = measured("coverage_xc", "coverage")
    assert (found["coverage_xc@1"], found["coverage_xc@3"]) == (2 / 5, 4 / 5)
    assert (found["coverage@1"], found["coverage@3"]) == (4 / 5, 1.0)


def test_propensities_follow_the_formula() -> None:
    """The inverse propensity is 1 + c (count + b)^-a with c = (ln n - 1)(b + 1)^a; rarer labels weigh more."""
    counts = np.array([0, 1, 7, 400])
    c = (math.log(1000) - 1) * (2.6 + 1) ** 0.6
    np.testing.assert_allclose(
        inverse_propensities(counts, 1000, 0.6, 2.6), [1 + c * (n + 2.6) ** -0.6 for n in (0, 1, 7, 400)]
    )
    assert (np.diff(inverse_propensities(counts, 1000)) < 0).all()
    with pytest.raises(UserError, match="at least 3 training queries"):
        inverse_propensities(counts, 2)


class Scores:
    """A model whose queries are the rows of a score table."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def encode_queries(self, ids: Tensor) -> Tensor:
        return self.scores[ids]

    def item_vectors(self) -> Tensor:
        return torch.eye(self.scores.shape[1])


def test_psp_of_a_model_equals_a_loop() -> None:
    """For random scores, truths and seen items, psp and psndcg equal loops; missing propensities are derived from the
    seen items."""
    rng = np.random.default_rng(0)
    truth = [set(rng.permutation(30)[: rng.integers(1, 9)].tolist()) for _ in range(50)]
    seen = [sorted(set(rng.permutation(30)[: rng.integers(0, 5)].tolist()) - t) for t in truth]
    start = np.concatenate([[0], np.cumsum([len(s) for s in seen])])
    masked = Positives(torch.tensor(start), torch.tensor([i for s in seen for i in s]))
    scores = torch.from_numpy(rng.normal(size=(50, 30))).float()
    found = evaluate(Scores(scores), points(truth), masked, (1, 4, 10), ("psp", "psndcg")).metrics
    counts, n = np.bincount([i for s in seen for i in s], minlength=30), sum(bool(s) for s in seen)
    w = [1 + (math.log(n) - 1) * 2.5**0.55 * (c + 1.5) ** -0.55 for c in counts]
    for k in (1, 4, 10):
        sums = np.zeros(4)
        for q in range(50):
            ranked = [i for i in sorted(range(30), key=lambda i: -scores[q, i].item()) if i not in seen[q]][:k]
            best = sorted((w[i] for i in truth[q]), reverse=True)[:k]
            gains = [w[i] if i in truth[q] else 0.0 for i in ranked]
            norm = sum(1 / math.log2(r + 1) for r in range(1, min(k, len(truth[q])) + 1))
            dcg, ideal = (sum(g / math.log2(r + 1) for r, g in enumerate(each, 1)) / norm for each in (gains, best))
            sums += [sum(gains), sum(best), dcg, ideal]
        assert found[f"psp@{k}"] == pytest.approx(sums[0] / sums[1])
        assert found[f"psndcg@{k}"] == pytest.approx(sums[2] / sums[3])


def test_bins_add_up_to_precision() -> None:
    """Each of the ten bins holds a tenth of the interactions; their contributions sum to precision, and recall is over
    pairs."""
    counts = np.array([50, 20, 10, 5, 5, 4, 3, 2, 1, 0])
    assert popularity_bins(counts, 10).tolist() == [0, 5, 7, 8, 8, 9, 9, 9, 9, 9]
    lists = np.array([[0, 1, 9], [3, 2, 5], [9, 8, 0]])
    found = evaluate_lists(lists, points([{0, 9}, {3, 4}, {1}]), 10, (1, 3), ("precision",), counts=counts)
    assert [row["items"] for row in found.bins] == [1, 1, 1, 2, 5]
    assert [(row["least"], row["most"]) for row in found.bins] == [(50, 50), (20, 20), (10, 10), (5, 5), (0, 4)]
    assert [row["pairs"] for row in found.bins] == [1, 1, 0, 2, 1]
    assert [row["precision@3"] for row in found.bins] == pytest.approx([1 / 9, 0, 0, 1 / 9, 1 / 9])
    assert [row["recall@3"] for row in found.bins] == [1, 0, 0, 1 / 2, 1]
    assert sum(row["precision@1"] for row in found.bins) == pytest.approx(found.metrics["precision@1"])


def test_lists_that_do_not_fit_are_refused() -> None:
    """Too few rows, short lists, unknown ids and missing propensities raise one-line errors."""
    for lists, words in (
        (LISTS[:2], "expected 4 rows"),
        (LISTS[:, :2], "at least 3 items"),
        (LISTS + 3, "expected 0..4"),
    ):
        with pytest.raises(UserError, match=words):
            evaluate_lists(lists, points(TRUTH), 5, (3,), ("precision",))
    with pytest.raises(UserError, match="give propensity"):
        evaluate_lists(LISTS, points(TRUTH), 5, (3,), ("psp",))


def test_real_filters_have_the_known_counts(real_data: Path) -> None:
    """LF-AmazonTitles-131K has 284,746 labels on 134,835 test points and 79,663 filtered pairs on 38,808 of them; no
    filtered pair is a true label."""
    folder = real_data / "xc" / "lf131k"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    labels = read_labels(folder / "tst_X_Y.txt.gz")
    assert (labels.n_rows, labels.n_labels, len(labels.rows)) == (134_835, 131_073, 284_746)
    assert len(np.unique(labels.rows)) == labels.n_rows
    hidden = read_pairs(folder / "tst_filter_labels.txt.gz", labels.n_rows, labels.n_labels)
    assert (len(hidden), len(np.unique(hidden[:, 0])), np.bincount(hidden[:, 0]).max()) == (79_663, 38_808, 51)
    keys = labels.rows.astype(np.int64) * labels.n_labels + labels.labels
    assert not np.isin(hidden[:, 0] * labels.n_labels + hidden[:, 1], keys).any()
    train = read_pairs(folder / "trn_filter_labels.txt.gz", 294_805, labels.n_labels)
    assert (len(train), np.bincount(train[:, 0]).max()) == (75_144, 1)


def test_popularity_on_a_real_set_has_the_published_figures(real_data: Path) -> None:
    """Popularity on the first 4,000 test points of OEWN-Hyper3 matches an independent implementation: 17.80, 5.56,
    11.50, 3.32, 2.86, 27.2."""
    folder = real_data / "xc" / "oewn" / "OEWN-Hyper3"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    parts = split(read_xc(folder), valid=0.0)
    assert parts.test is not None
    test = parts.test.subset(parts.test.queries < parts.test.queries.min() + 4000)
    counts = torch.from_numpy(parts.train.counts()).float()

    class Popular(Scores):
        def encode_queries(self, ids: Tensor) -> Tensor:
            return torch.ones(len(ids), 1)

        def item_vectors(self) -> Tensor:
            return self.scores[:, None]

    found = evaluate(
        Popular(counts), test, parts.seen_for("test"), (1, 5, 100), ("precision", "ndcg", "psp", "recall")
    ).metrics
    keys = ("precision@1", "precision@5", "ndcg@5", "psp@1", "psp@5")
    assert [round(100 * found[key], 2) for key in keys] == [17.80, 5.56, 11.50, 3.32, 2.86]
    assert 100 * found["recall@100"] == pytest.approx(27.2, abs=0.06)
