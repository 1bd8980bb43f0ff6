"""Values of metrics, gathered from lists chunk by chunk."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sparring.evaluation.metrics import (
    METRICS,
    PROPENSITY_METRICS,
    STRATA,
    Metric,
    per_query,
    popularity_bins,
    popularity_percentile,
    popularity_strata,
    propensity_gains,
)

_BINS = 10  # of items by popularity


class Pairs(Protocol):
    """What is tested against: (query, item) pairs as two arrays of dense ids, and how many queries the data has."""

    @property
    def queries(self) -> np.ndarray: ...
    @property
    def items(self) -> np.ndarray: ...
    @property
    def n_queries(self) -> int: ...


class Tally:
    """Hits and gains of the lists of all test queries; from them means, each query's values, strata and bins."""

    def __init__(
        self,
        test: Pairs,
        n_items: int,
        chosen: list[Metric],
        cutoffs: list[int],
        counts: np.ndarray | None,
        propensity: np.ndarray | None,
    ) -> None:
        self.n_items, self.cutoffs, self.counts, self.propensity = n_items, cutoffs, counts, propensity
        self.pairs = np.unique(test.queries.astype(np.int64) * n_items + test.items)
        self.query_ids, self.place, relevant = np.unique(self.pairs // n_items, return_inverse=True, return_counts=True)
        self.relevant = relevant
        # Of how many queries a mean is: xir-release counts all of the data, xc also the test points that have no label.
        self.whole = {"xir-release": test.n_queries, "xc": len(self.query_ids) + getattr(test, "empty", 0)}
        self.ranked = [m for m in chosen if m.name in METRICS]
        self.weighted = [m for m in chosen if m.name in PROPENSITY_METRICS]
        self.covers = [m for m in chosen if m.name == "coverage"]
        self.percentile = (
            popularity_percentile(counts)
            if counts is not None and any(m.name == "popularity" for m in chosen)
            else None
        )
        labels = [m.label for m in self.ranked + self.weighted] + (
            ["popularity"] if self.percentile is not None else []
        )
        self.per_query = {f"{label}@{k}": np.zeros(len(self.query_ids)) for label in labels for k in cutoffs}
        self.listed = {k: np.zeros(n_items, dtype=np.int64) for k in cutoffs}  # how often each item is in a list
        self.right = {k: np.zeros(n_items, dtype=np.int64) for k in cutoffs}  # how often it is there and relevant
        self.stratum = popularity_strata(counts) if counts is not None else None
        if self.stratum is not None:
            # (3, U): test items of each query by stratum
            flat = np.bincount(
                self.stratum[self.pairs % n_items] * len(self.query_ids) + self.place, minlength=3 * len(self.query_ids)
            )
            self.relevant_in = flat.reshape(3, -1)
            self.by_stratum = [m for m in self.ranked if not m.over_all_queries]
            self.sums_in = [{m.key(k): 0.0 for m in self.by_stratum for k in cutoffs} for _ in STRATA]

    def add(self, start: int, ids: np.ndarray) -> None:
        """Take in the lists (rows, K) of the queries from `start` on; id -1 is an empty place."""
        rows = slice(start, start + len(ids))
        keys = self.query_ids[rows, None] * self.n_items + ids
        at = np.minimum(np.searchsorted(self.pairs, keys), len(self.pairs) - 1)
        filled = ids >= 0
        hits = (self.pairs[at] == keys) & filled
        gains = self.propensity[ids] * hits if self.weighted and self.propensity is not None else hits
        for k in self.cutoffs:
            for metric in self.ranked:
                self.per_query[metric.key(k)][rows] = per_query(metric, hits, self.relevant[rows], k)
            for metric in self.weighted:
                self.per_query[metric.key(k)][rows] = propensity_gains(metric, gains, self.relevant[rows], k)
            if self.percentile is not None:
                share = (self.percentile[ids[:, :k]] * filled[:, :k]).sum(1) / np.maximum(filled[:, :k].sum(1), 1)
                self.per_query[f"popularity@{k}"][rows] = share
            self.listed[k] += np.bincount(ids[:, :k][filled[:, :k]], minlength=self.n_items)
            self.right[k] += np.bincount(ids[:, :k][hits[:, :k]], minlength=self.n_items)
        if self.stratum is not None:
            for index, sums in enumerate(self.sums_in):
                some = np.flatnonzero(self.relevant_in[index, rows])
                own = hits[some] & (self.stratum[ids[some]] == index)
                for metric in self.by_stratum:
                    for k in self.cutoffs:
                        sums[metric.key(k)] += float(
                            per_query(metric, own, self.relevant_in[index, rows][some], k).sum()
                        )

    def close(self) -> None:
        """Divide what was gained by propensity by the mean of the most that could be: from here on its mean is the metric."""
        if not self.weighted or self.propensity is None:
            return
        weight = self.propensity[self.pairs % self.n_items]
        order = np.lexsort((-weight, self.place))  # by query, the heaviest first
        rank = np.arange(len(order)) - (np.cumsum(self.relevant) - self.relevant)[self.place]
        most = np.zeros((len(self.query_ids), min(self.cutoffs[-1], int(self.relevant.max()))))
        inside = rank < most.shape[1]
        most[self.place[inside], rank[inside]] = weight[order][inside]
        for k in self.cutoffs:
            best = np.pad(most[:, :k], ((0, 0), (0, max(k - most.shape[1], 0))))
            for metric in self.weighted:
                self.per_query[metric.key(k)] /= propensity_gains(metric, best, self.relevant, k).mean()

    def means(self) -> dict[str, float]:
        total: dict[str, float] = {}
        size = {m.key(k): self.whole[m.dialect] for m in self.ranked if m.over_all_queries for k in self.cutoffs}
        for key, values in self.per_query.items():
            total[key] = float(values.sum()) / size.get(key, len(values))
        for metric in self.covers:
            tested = np.unique(self.pairs % self.n_items) if metric.of_hits else slice(None)
            counted = self.right if metric.of_hits else self.listed
            total |= {metric.key(k): float((counted[k][tested] > 0).mean()) for k in self.cutoffs}
        return total

    def strata(self) -> dict[str, dict[str, float]]:
        """The same of each stratum; none where popularity is unknown."""
        strata: dict[str, dict[str, float]] = {}
        if self.stratum is None:
            return strata
        for index, name in enumerate(STRATA):
            inside, queries = np.equal(self.stratum, index), int((self.relevant_in[index] > 0).sum())
            strata[name] = {key: value / queries for key, value in self.sums_in[index].items() if queries}
            for k in self.cutoffs:
                if self.covers and inside.any():
                    strata[name][f"coverage@{k}"] = float((self.listed[k][inside] > 0).mean())
                strata[name][f"share@{k}"] = float(self.listed[k][inside].sum() / max(self.listed[k].sum(), 1))
            strata[name] |= {"items": float(inside.sum()), "queries": float(queries)}
        return strata

    def bins(self) -> list[dict[str, float]]:
        """What `evaluate` says of bins; none where popularity is unknown."""
        if self.counts is None:
            return []
        index = popularity_bins(self.counts, _BINS)
        pairs = np.bincount(index[self.pairs % self.n_items], minlength=_BINS)
        right = {k: np.bincount(index, weights=self.right[k], minlength=_BINS) for k in self.cutoffs}
        found: list[dict[str, float]] = []
        for place in range(_BINS):
            own = self.counts[index == place]
            if not len(own):
                continue
            least, most = (float(own.min()), float(own.max()))
            sizes = {"items": float(len(own)), "least": least, "most": most, "pairs": float(pairs[place])}
            added = {f"precision@{k}": float(right[k][place]) / (k * len(self.query_ids)) for k in self.cutoffs}
            recalled = {f"recall@{k}": float(right[k][place] / max(pairs[place], 1)) for k in self.cutoffs}
            found.append(sizes | added | recalled)
        return found
