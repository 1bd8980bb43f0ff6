"""MetricAccumulator: metrics of the lists of all test queries, added chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparring.data.pairs import within
from sparring.evaluation.metrics import (
    METRICS,
    PROPENSITY_METRICS,
    STRATA,
    Graded,
    Metric,
    per_query,
    popularity_bins,
    popularity_percentile,
    popularity_strata,
    propensity_gains,
)

_BINS = 10  # of items by popularity


class Pairs(Protocol):
    """Test interactions: (query, item) pairs as two arrays of dense ids, and the number of queries of the data."""

    @property
    def queries(self) -> np.ndarray: ...
    @property
    def items(self) -> np.ndarray: ...
    @property
    def n_queries(self) -> int: ...


@dataclass(frozen=True)
class Misses:
    """Relevant items that no list can hold, because the model does not know them or their query."""

    items: np.ndarray  # (n_queries,) of each query, beside its test pairs
    queries: int  # queries without any test pair, which count as 0


class MetricAccumulator:
    """Hits and gains of the lists of all test queries; then means, values per query, strata and bins.

    Call `add` for each chunk of lists, then `close`.
    """

    def __init__(
        self,
        test: Pairs,
        n_items: int,
        chosen: list[Metric],
        cutoffs: list[int],
        counts: np.ndarray | None,
        propensity: np.ndarray | None,
        misses: Misses | None = None,
    ) -> None:
        self.n_items, self.cutoffs, self.counts, self.propensity = n_items, cutoffs, counts, propensity
        self.pairs, place = np.unique(test.queries.astype(np.int64) * n_items + test.items, return_inverse=True)
        given: np.ndarray | None = getattr(test, "grade", None)
        self.grades: np.ndarray | None = None  # of each pair
        if given is not None:
            self.grades = np.zeros(len(self.pairs))
            np.maximum.at(self.grades, place, given)
        self.query_ids, self.query_of_pair, self.relevant = np.unique(
            self.pairs // n_items, return_inverse=True, return_counts=True
        )
        self.missed_queries = 0 if misses is None else misses.queries
        self.missing = np.zeros(0, dtype=np.int64) if misses is None else misses.items[self.query_ids]
        if misses is not None:
            self.relevant = self.relevant + self.missing
        # Dialects that average over other queries: all of the data, or also the test points without a label.
        self.averaged_over = {"xir-release": test.n_queries, "xc": len(self.query_ids) + getattr(test, "empty", 0)}
        self.ranked = [m for m in chosen if m.name in METRICS]
        self.weighted = [m for m in chosen if m.name in PROPENSITY_METRICS]
        self.covers = [m for m in chosen if m.name == "coverage"]
        self.percentile = None
        labels = [m.label for m in self.ranked + self.weighted]
        if counts is not None and any(m.name == "popularity" for m in chosen):
            self.percentile = popularity_percentile(counts)
            labels.append("popularity")
        self.ideals: dict[tuple[int, str | None], np.ndarray] = {}
        self.per_query = {f"{label}@{k}": np.zeros(len(self.query_ids)) for label in labels for k in cutoffs}
        self.listed = {k: np.zeros(n_items, dtype=np.int64) for k in cutoffs}  # lists that hold the item
        self.found = {k: np.zeros(n_items, dtype=np.int64) for k in cutoffs}  # lists that hold it as a hit
        self.by_stratum = [m for m in self.ranked if not m.over_all_queries]
        self.stratum = {} if counts is None else self._strata(counts)  # name -> (N,) bool
        tested = self.pairs % n_items
        self.relevant_in = {  # name -> (U,) test items of the stratum
            name: np.bincount(self.query_of_pair[inside[tested]], minlength=len(self.query_ids))
            for name, inside in self.stratum.items()
        }
        self.sums_in = {name: {m.key(k): 0.0 for m in self.by_stratum for k in cutoffs} for name in self.stratum}

    def _strata(self, counts: np.ndarray) -> dict[str, np.ndarray]:
        """Thirds of the interactions; warm and cold items, with and without interactions, if a test item is cold."""
        third = popularity_strata(counts)
        strata = {name: third == index for index, name in enumerate(STRATA)}
        cold = counts == 0
        return strata | ({"warm": ~cold, "cold": cold} if cold[self.pairs % self.n_items].any() else {})

    def add(self, start: int, ids: np.ndarray) -> None:
        """Add the lists (rows, K) of the queries from `start` on; id -1 is an empty place."""
        rows = slice(start, start + len(ids))
        keys = self.query_ids[rows, None] * self.n_items + ids
        index = np.minimum(np.searchsorted(self.pairs, keys), len(self.pairs) - 1)
        filled = ids >= 0
        hits = (self.pairs[index] == keys) & filled
        gains = self.propensity[ids] * hits if self.weighted and self.propensity is not None else hits
        graded = None if self.grades is None else self.grades[index] * hits
        for k in self.cutoffs:
            known = None if graded is None else Graded(graded, self._ideal(k)[rows])
            for metric in self.ranked:
                self.per_query[metric.key(k)][rows] = per_query(metric, hits, self.relevant[rows], k, known)
            for metric in self.weighted:
                self.per_query[metric.key(k)][rows] = propensity_gains(metric, gains, self.relevant[rows], k)
            if self.percentile is not None:
                share = (self.percentile[ids[:, :k]] * filled[:, :k]).sum(1) / np.maximum(filled[:, :k].sum(1), 1)
                self.per_query[f"popularity@{k}"][rows] = share
            self.listed[k] += np.bincount(ids[:, :k][filled[:, :k]], minlength=self.n_items)
            self.found[k] += np.bincount(ids[:, :k][hits[:, :k]], minlength=self.n_items)
        for name, sums in self.sums_in.items():
            tested = np.flatnonzero(self.relevant_in[name][rows])
            relevant = self.relevant_in[name][rows][tested]
            stratum_hits = hits[tested] & self.stratum[name][ids[tested]]
            for k in self.cutoffs:
                known = None
                if graded is not None:
                    known = Graded(graded[tested] * stratum_hits, self._ideal(k, name)[rows][tested])
                for metric in self.by_stratum:
                    sums[metric.key(k)] += float(per_query(metric, stratum_hits, relevant, k, known).sum())

    def _ideal(self, k: int, stratum: str | None = None) -> np.ndarray:
        """(U,) the largest possible sum_{r<=k} g_r / log2(r + 1), of all items or those of a stratum.

        Items that the model does not know count with grade 1.
        """
        if (k, stratum) not in self.ideals:
            assert self.grades is not None
            kept = slice(None) if stratum is None else self.stratum[stratum][self.pairs % self.n_items]
            queries, grades = self.query_of_pair[kept], self.grades[kept]
            if stratum is None and len(self.missing):
                queries = np.concatenate([queries, np.repeat(np.arange(len(self.missing)), self.missing)])
                grades = np.concatenate([grades, np.ones(len(queries) - len(grades))])
            order = np.lexsort((-grades, queries))
            queries, grades = queries[order], grades[order]
            sizes = np.bincount(queries, minlength=len(self.query_ids))
            rank = within(sizes)
            gains = np.where(rank < k, grades / np.log2(rank + 2), 0.0)
            self.ideals[k, stratum] = np.bincount(queries, weights=gains, minlength=len(self.query_ids))
        return self.ideals[k, stratum]

    def close(self) -> None:
        """Divide gains by propensity by the mean of their largest possible values, so that their mean is the metric."""
        if not self.weighted or self.propensity is None:
            return
        weight = self.propensity[self.pairs % self.n_items]
        order = np.lexsort((-weight, self.query_of_pair))  # by query, the heaviest first
        rank = np.arange(len(order)) - (np.cumsum(self.relevant) - self.relevant)[self.query_of_pair]
        heaviest = np.zeros((len(self.query_ids), min(self.cutoffs[-1], int(self.relevant.max()))))
        inside = rank < heaviest.shape[1]
        heaviest[self.query_of_pair[inside], rank[inside]] = weight[order][inside]
        for k in self.cutoffs:
            best = np.pad(heaviest[:, :k], ((0, 0), (0, max(k - heaviest.shape[1], 0))))
            for metric in self.weighted:
                self.per_query[metric.key(k)] /= propensity_gains(metric, best, self.relevant, k).mean()

    def means(self) -> dict[str, float]:
        """The mean of each metric at each cutoff; coverage of the catalogue."""
        means: dict[str, float] = {}
        sizes = {
            m.key(k): self.averaged_over[m.dialect] for m in self.ranked if m.over_all_queries for k in self.cutoffs
        }
        for key, values in self.per_query.items():
            missed = 0 if key.startswith("popularity@") else self.missed_queries  # they have no list to describe
            means[key] = float(values.sum()) / (sizes.get(key, len(values)) + missed)
        for metric in self.covers:
            items = np.unique(self.pairs % self.n_items) if metric.of_hits else slice(None)
            counted = self.found if metric.of_hits else self.listed
            means |= {metric.key(k): float((counted[k][items] > 0).mean()) for k in self.cutoffs}
        return means

    def strata(self) -> dict[str, dict[str, float]]:
        """The means of each stratum of items, its coverage and its share of the lists; empty without counts."""
        strata: dict[str, dict[str, float]] = {}
        for name, inside in self.stratum.items():
            queries = int((self.relevant_in[name] > 0).sum())
            strata[name] = {key: value / queries for key, value in self.sums_in[name].items() if queries}
            for k in self.cutoffs:
                if self.covers and inside.any():
                    strata[name][f"coverage@{k}"] = float((self.listed[k][inside] > 0).mean())
                strata[name][f"share@{k}"] = float(self.listed[k][inside].sum() / max(self.listed[k].sum(), 1))
            strata[name] |= {"items": float(inside.sum()), "queries": float(queries)}
        return strata

    def bins(self) -> list[dict[str, float]]:
        """Ten bins of items by popularity (see `evaluate`); empty without counts."""
        if self.counts is None:
            return []
        index = popularity_bins(self.counts, _BINS)
        pairs = np.bincount(index[self.pairs % self.n_items], minlength=_BINS)
        found = {k: np.bincount(index, weights=self.found[k], minlength=_BINS) for k in self.cutoffs}
        bins: list[dict[str, float]] = []
        for number in range(_BINS):
            counts = self.counts[index == number]
            if not len(counts):
                continue
            least, most = (float(counts.min()), float(counts.max()))
            sizes = {"items": float(len(counts)), "least": least, "most": most, "pairs": float(pairs[number])}
            added = {f"precision@{k}": float(found[k][number]) / (k * len(self.query_ids)) for k in self.cutoffs}
            recall = {f"recall@{k}": float(found[k][number] / max(pairs[number], 1)) for k in self.cutoffs}
            bins.append(sizes | added | recall)
        return bins
