"""Ranking metrics over lists of hits, in several dialects, because one name is not one metric.

For a query with n relevant (test) items, let h_r be 1 if the item at rank r of its list is relevant, and
H_r = h_1 + ... + h_r. A list of fewer than k items is padded with misses. Each metric is averaged over the queries with
at least one relevant item.

`standard`, as in LightGCN and RecBole:

    recall@k     H_k / n
    precision@k  H_k / k
    hit@k        1 if H_k > 0
    mrr@k        1 / rank of the first hit, 0 when there is none up to k
    map@k        sum_{r<=k} h_r H_r / r  /  min(k, n)
    ndcg@k       sum_{r<=k} h_r / log2(r + 1)  /  sum_{r<=min(k, n)} 1 / log2(r + 1)

Where test pairs have grades g (a BEIR folder whose qrels have other scores than 1), ndcg of the dialects standard and
trec has g_r for h_r, and the best possible order of all grades below, as BEIR and trec_eval's ndcg_cut_k compute it:

    ndcg@k       sum_{r<=k} g_r / log2(r + 1)  /  sum_{r<=k} g_(r) / log2(r + 1),   g_(1) >= g_(2) >= ... all grades

The other dialects differ only as listed; their metrics carry the dialect in the key (`ndcg_rectools@10`):

    trec         trec_eval's recall_k, P_k, success_k, recip_rank, map_cut_k, ndcg_cut_k: map divides by n.
    rectools     RecTools' defaults: map divides by n; ndcg divides by sum_{r<=k} 1 / log2(r + 1), so a query with n < k
                 never reaches 1.
    lenskit      LensKit's defaults: recall divides by min(k, n); ndcg has 1 / max(log2 r, 1) for 1 / log2(r + 1).
    xir-release  the released code of XIR (NeurIPS 2022), for comparison with that paper's table: recall, and
                 ndcg = (h_1 + sum_{2<=r<=k} h_r / log2 3) / sum_{r<=min(k, n)} 1 / log2(r + 1),
                 a bug that discounts every rank after the first alike, so that the value can exceed 1 (1.47 for a
                 perfect top 10). Averaged over all queries of the data; one without relevant items counts 0.
    xc           the extreme-classification repository's P@k, nDCG@k, R@k: precision, ndcg and recall as above, averaged
                 over all test points; one without any label counts 0. Its coverage is the share of the labels of the
                 test points that at least one of their lists has right.

With inverse propensities w_i, the inverse probability that a relevant item is known to be relevant
(`data.propensity.inverse_propensities`):

    psp@k        sum over queries of  sum_{r<=k} h_r w_r  /  sum over queries of the largest value of any list
    psndcg@k     sum over queries of  sum_{r<=k} h_r w_r / log2(r + 1) / d  /  sum over queries of its largest value,
                 with the query's own d = sum_{r<=min(k, n)} 1 / log2(r + 1)

These are ratios of sums, not means of ratios (Jain et al., KDD 2016, section 3). The denominator is the same for every
model, so a query's value is its own numerator over the mean denominator: the mean over queries is then the metric, and
two models can be compared query by query.

Two metrics describe all lists together: `coverage@k`, the share of the catalogue that is in at least one list, and
`popularity@k`, the mean popularity percentile of the listed items (`popularity_percentile`; 0.5 is as popular as the
training interactions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparring.core.choices import DIALECTS
from sparring.core.errors import UserError

METRICS = ("recall", "precision", "hit", "mrr", "map", "ndcg")
PROPENSITY_METRICS = ("psp", "psndcg")
LIST_METRICS = ("coverage", "popularity")
STRATA = ("head", "mid", "tail")
_ONLY = {"xir-release": ("recall", "ndcg"), "xc": ("recall", "precision", "ndcg")}  # the metrics they define


@dataclass(frozen=True)
class Metric:
    """One metric in one dialect: `Metric("ndcg", "xir-release").key(10)` is "ndcg_xir_release@10"."""

    name: str
    dialect: str

    @property
    def label(self) -> str:
        plain = (
            self.dialect == "standard"
            or self.name in PROPENSITY_METRICS
            or (self.name in LIST_METRICS and not self.of_hits)
        )
        return self.name if plain else f"{self.name}_{self.dialect.replace('-', '_')}"

    def key(self, k: int) -> str:
        return f"{self.label}@{k}"

    @property
    def over_all_queries(self) -> bool:
        """Whether queries without relevant items count as 0: all of the data (xir-release) or of the test part (xc)."""
        return self.dialect in _ONLY and self.name in METRICS

    @property
    def graded(self) -> bool:
        """Whether it reads grades where test pairs have them."""
        return self.name == "ndcg" and self.dialect in ("standard", "trec")

    @property
    def of_hits(self) -> bool:
        """Whether it is a coverage that counts only hits."""
        return self.name == "coverage" and self.dialect == "xc"


def parse(name: str, dialect: str = "standard") -> Metric:
    """The metric of this name, in the dialect that its suffix names or else in `dialect`.

    >>> parse("ndcg"), parse("ndcg_xir_release")
    (Metric(name='ndcg', dialect='standard'), Metric(name='ndcg', dialect='xir-release'))
    """
    if dialect not in DIALECTS:
        raise UserError(f"unknown metric dialect {dialect!r}: choose one of {', '.join(DIALECTS)}")
    plain, _, suffix = name.partition("_")
    chosen = {d.replace("-", "_"): d for d in DIALECTS}.get(suffix) if suffix else dialect
    every = METRICS + PROPENSITY_METRICS + LIST_METRICS
    if chosen is None or plain not in every or (suffix and plain not in METRICS and name != "coverage_xc"):
        raise UserError(
            f"unknown metric {name!r}: choose among {', '.join(every)}, or e.g. ndcg_trec for another dialect"
        )
    if chosen in _ONLY and plain in METRICS and plain not in _ONLY[chosen]:
        raise UserError(f"the dialect {chosen} has no {plain!r}: it defines {' and '.join(_ONLY[chosen])}")
    return Metric(plain, chosen)


class Graded(NamedTuple):
    """The grades of lists, and of all relevant items of their queries."""

    gains: np.ndarray  # (U, K) the grade of each hit, 0 at misses
    ideal: np.ndarray  # (U,) the largest possible value of sum_{r<=k} g_r / log2(r + 1)


def per_query(
    metric: Metric, hits: np.ndarray, relevant: np.ndarray, k: int, graded: Graded | None = None
) -> np.ndarray:
    """(U,) values of a metric at cutoff k, from hits (U, K >= k) and numbers of relevant items (U,) >= 1."""
    if graded is not None and metric.graded:
        value: np.ndarray = graded.gains[:, :k] @ (1 / np.log2(np.arange(2, k + 2))) / graded.ideal
        return value
    h = hits[:, :k].astype(np.float64)
    rank = np.arange(1, k + 1)
    n, capped = relevant.astype(np.float64), np.minimum(relevant, k)
    if metric.name == "recall":
        value = h.sum(1) / (capped if metric.dialect == "lenskit" else n)
    elif metric.name == "precision":
        value = h.sum(1) / k
    elif metric.name == "hit":
        value = h.max(1)
    elif metric.name == "mrr":
        value = (h / rank).max(1)
    elif metric.name == "map":
        value = (h * np.cumsum(h, 1) / rank).sum(1) / (n if metric.dialect in ("trec", "rectools") else capped)
    else:
        gain = 1 / np.maximum(np.log2(rank), 1) if metric.dialect == "lenskit" else 1 / np.log2(rank + 1)
        ideal = np.cumsum(gain)[k - 1 if metric.dialect == "rectools" else capped - 1]
        if metric.dialect == "xir-release":
            gain = np.where(rank == 1, 1, 1 / np.log2(3))
        value = (h @ gain) / ideal
    return value


def propensity_gains(metric: Metric, gains: np.ndarray, relevant: np.ndarray, k: int) -> np.ndarray:
    """(U,) each query's term in the sums of psp or psndcg, from the weights (U, K >= k) of its hits, 0 at misses."""
    gains = gains[:, :k]
    if metric.name == "psp":
        summed: np.ndarray = gains.sum(1)
        return summed
    discount = 1 / np.log2(np.arange(2, k + 2))
    discounted: np.ndarray = gains @ discount / np.cumsum(discount)[np.minimum(relevant, k) - 1]
    return discounted


def popularity_bins(counts: np.ndarray, n: int = 10) -> np.ndarray:
    """(N,) bin of every item, 0 the most popular: each of the n bins has about 1/n of the training interactions.

    Items are in descending order of count, ties by ascending id; an item is in bin j if the items before it have at
    least j/n of all interactions and less than (j + 1)/n. Items without interactions are in the last bin.
    """
    order = np.argsort(-counts, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    bins = np.empty(len(counts), dtype=np.int64)
    bins[order] = np.where(counts[order] > 0, n * before // max(int(counts.sum()), 1), n - 1)
    return bins


def popularity_percentile(counts: np.ndarray) -> np.ndarray:
    """(N,) share of the interactions with less popular items, those with equally popular ones counted half.

        p_i = (sum of c_j over c_j < c_i  +  1/2 sum of c_j over c_j = c_i) / sum of all c_j

    The mean over the interactions themselves is exactly 1/2. Lists with a mean near 1 hold only the most popular items,
    near 0 none of them.
    """
    if counts.sum() <= 0:
        return np.full(len(counts), 0.5)
    value, inverse, times = np.unique(counts, return_inverse=True, return_counts=True)
    mass = value * times.astype(np.float64)
    percentile: np.ndarray = ((np.cumsum(mass) - mass / 2) / mass.sum())[inverse]
    return percentile


def popularity_strata(counts: np.ndarray) -> np.ndarray:
    """(N,) stratum of every item, an index into STRATA: thirds of the training interactions (see popularity_bins)."""
    return popularity_bins(counts, len(STRATA))
