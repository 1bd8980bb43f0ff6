"""Evaluate a retriever: rank the complete catalogue for every query with a test item, and measure the lists.

`core.topk.top_k` makes the lists and breaks ties: equal scores are in ascending order of item id. To change how ties
are broken, change it there; `_RankedLists.of` merges the lists of several ranks in the same order.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.core.subset import Subset
from sparring.core.topk import Prepared, in_order, prepare, top_k
from sparring.core.types import ALONE, Positives, Ranks
from sparring.data.propensity import inverse_propensities
from sparring.evaluation.accumulator import MetricAccumulator, Misses, Pairs
from sparring.evaluation.metrics import LIST_METRICS, METRICS, PROPENSITY_METRICS, parse
from sparring.models.retriever import Retriever
from sparring.models.towers import evaluating

__all__ = ["Encoder", "Evaluation", "Misses", "Pairs", "evaluate", "evaluate_lists", "top_k"]

_CHUNK = 8192  # queries encoded and ranked at once
_SCORES = 1 << 26  # scores that a model without item vectors computes at once


class Encoder(Protocol):
    """A model that encodes queries, by id, and all items; the score is the inner product of their vectors."""

    def encode_queries(self, ids: Tensor, /) -> Tensor: ...
    def item_vectors(self) -> Tensor: ...


@runtime_checkable
class Lister(Protocol):
    """A model that makes lists itself (models/fusion.py)."""

    @property
    def n_items(self) -> int: ...
    def lists(self, ids: Tensor, k: int, seen: Positives | None) -> Tensor: ...


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a full ranking: means, values per query, and the same by popularity of the items."""

    metrics: dict[str, float]  # "recall@20" -> mean
    strata: dict[str, dict[str, float]]  # "head" | "mid" | "tail" | ... -> the same; empty without counts
    query_ids: np.ndarray  # (U,) the queries with a test item, ascending
    per_query: dict[str, np.ndarray]  # "recall@20" -> (U,), in the order of query_ids
    seconds: float
    bins: list[dict[str, float]] = field(default_factory=list)  # of items, the most popular first; see `evaluate`

    def table(self) -> list[tuple[str, ...]]:
        """Rows to print: a header, a row per metric with a column per cutoff, then the rows of each stratum."""
        cutoffs = sorted({int(key.split("@")[1]) for key in self.metrics})
        rows: list[tuple[str, ...]] = [("metric", *(f"@{k}" for k in cutoffs))]
        for stratum, values in [("", self.metrics), *self.strata.items()]:
            for label in dict.fromkeys(key.split("@")[0] for key in values if "@" in key):
                cells = [f"{values[key]:.4f}" if (key := f"{label}@{k}") in values else "" for k in cutoffs]
                rows.append((f"{label} ({stratum})" if stratum else label, *cells))
        return rows

    def __str__(self) -> str:
        rows = self.table()
        width = max(len(row[0]) for row in rows)
        return "\n".join(row[0].ljust(width) + "".join(cell.rjust(9) for cell in row[1:]) for row in rows)

    def to_dict(self) -> dict[str, object]:
        """Everything except the values of single queries, ready for JSON."""
        measured = {"metrics": self.metrics, "strata": self.strata, "bins": self.bins}
        return {**measured, "queries": len(self.query_ids), "seconds": round(self.seconds, 3)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


def evaluate(
    model: Encoder | Lister,
    test: Pairs,
    seen: Positives | None,
    k: Sequence[int] = (10, 20, 50),
    metrics: Sequence[str] = METRICS + LIST_METRICS,
    dialect: str = "standard",
    counts: np.ndarray | None = None,
    progress: Callable[[int, int], None] | None = None,
    propensity: np.ndarray | None = None,
    ranks: Ranks = ALONE,
    misses: Misses | None = None,
    among: Tensor | None = None,
    lists_to: Callable[[np.ndarray, np.ndarray], None] | None = None,
) -> Evaluation:
    """Rank the complete catalogue for every query with a test item, without its seen items, and measure the lists.

    `metrics` are names (evaluation/metrics.py) in the given dialect or, with a suffix, in another: ("recall", "ndcg",
    "ndcg_xir_release") gives both kinds of ndcg in one pass. `counts` (N,) are training interactions per item, by
    default those in `seen`; they define popularity@k and the strata head, mid and tail, which are omitted without them.
    In a stratum only its own items are relevant, and means are over the queries with such a test item; a stratum also
    has coverage@k of its items, share@k (its share of all listed places), and its numbers of items and queries.
    `progress(done, total)` is called after each chunk of queries, `lists_to(queries, lists)` with the dense ids of the
    queries and their lists (n, K), such as `evaluation.trec.RunFile`. `among` are the items that a list may hold, by
    default all: a table of ids has no useful vector of an item that it was not trained on (training/eligibility.py).

    If a test item has no interactions, it is cold, and there are three more strata: "warm", "cold" (both in the ranking
    of the complete catalogue), and "cold among cold", in which cold items are ranked alone.

    `bins` are ten bins of items, each with about a tenth of the training interactions: the number of items, their least
    and most interactions, the test pairs, the bin's part of precision@k (the bins add up to it), and recall@k, the
    share of its test pairs that are found. `propensity` (N,) are the inverse propensities of psp and psndcg; by default
    those of the data, else computed from counts and the number of queries in `seen`. Several `ranks` share the work,
    and each gets the complete result.

    `misses` are relevant items that the model does not know: they count in the means and in the values per query, not
    in strata and bins. psp and psndcg are not defined with them.

    Equal scores are ranked by item id (core/topk.py). Repeated test pairs count once. A test item that its query has
    also seen cannot be listed but still counts as relevant.

        result = evaluate(model, split.test, split.seen_for("test"), k=(20,), counts=split.train.counts())
        result.metrics["recall@20"], result.strata["tail"]["recall@20"]
    """
    began = time.perf_counter()
    with torch.no_grad(), evaluating(model) if isinstance(model, nn.Module) else nullcontext():
        lists: _GivenLists | _RankedLists
        if isinstance(model, Lister):
            lists = _GivenLists(model, seen, test, max(k))
        else:
            lists = _RankedLists(model, seen, ranks, among)
        if counts is None and seen is not None and len(seen.items):
            counts = np.bincount(seen.items.cpu().numpy(), minlength=lists.n_items)
        accumulator = _accumulator(test, lists.n_items, k, metrics, dialect, counts, propensity, seen, misses)
        total = len(accumulator.query_ids)
        for start in range(0, total, _CHUNK):
            queries = torch.from_numpy(accumulator.query_ids[start : start + _CHUNK])
            found = lists.of(queries, max(k)).cpu().numpy()
            accumulator.add(start, found)
            if lists_to is not None:
                lists_to(queries.numpy(), found)
            if progress is not None:
                progress(min(start + _CHUNK, total), total)
        alone = {}
        if "cold" in accumulator.stratum and isinstance(lists, _RankedLists):
            alone = _cold_among_cold(lists, accumulator, test)
    return _evaluation(accumulator, began, alone)


def _cold_among_cold(lists: _RankedLists, whole: MetricAccumulator, test: Pairs) -> dict[str, dict[str, float]]:
    """The stratum of cold test items in a ranking of the cold items that can be listed; empty if none can."""
    cold = np.flatnonzero(whole.stratum["cold"])
    lists = lists.only(torch.from_numpy(cold))
    assert lists.among is not None
    if not len(lists.among):
        return {}
    pairs = _SomePairs(test, np.isin(test.items, cold))
    metrics = MetricAccumulator(pairs, whole.n_items, whole.by_stratum, whole.cutoffs, None, None)
    for start in range(0, len(metrics.query_ids), _CHUNK):
        queries = torch.from_numpy(metrics.query_ids[start : start + _CHUNK])
        metrics.add(start, lists.of(queries, whole.cutoffs[-1]).cpu().numpy())
    sizes = {"items": float(len(lists.among)), "queries": float(len(metrics.query_ids))}
    return {"cold among cold": metrics.means() | sizes}


class _SomePairs:
    """The test pairs that a mask keeps."""

    def __init__(self, test: Pairs, kept: np.ndarray) -> None:
        self.queries, self.items, self.n_queries = test.queries[kept], test.items[kept], test.n_queries
        grade = getattr(test, "grade", None)
        self.grade = None if grade is None else grade[kept]


class _RankedLists:
    """The best items of each query, of `among` if given.

    Each rank ranks some of the queries, or its shard of the items for all queries.
    """

    def __init__(self, model: Encoder, seen: Positives | None, ranks: Ranks, among: Tensor | None = None):
        self.model, self.ranks, self.among = model, ranks, among
        vectors: Tensor | None = None
        self.first: int | None = None
        shard = model.item_shard() if isinstance(model, Retriever) else None
        if isinstance(model, Retriever) and model.scores_items:
            self.n_items = model.n_items
        elif shard is None:
            vectors = model.item_vectors(ranks=ranks) if isinstance(model, Retriever) else model.item_vectors()
            self.n_items = len(vectors)
        else:
            self.first, vectors = shard
            self.n_items = model.n_items  # type: ignore[attr-defined]
            seen = None if seen is None else _between(seen, self.first, self.first + len(vectors))
        self.all = vectors, seen  # of this rank's items
        self.part: Subset | None = None
        self.vectors, self.seen = vectors, seen
        self.prepared: Prepared | None = None
        if among is not None:
            self._restrict(among)

    def only(self, ids: Tensor) -> _RankedLists:
        """The same ranking, of those of its items that are among `ids`."""
        lists = copy.copy(self)
        lists.among = ids if self.among is None else ids[torch.isin(ids, self.among)]
        lists._restrict(lists.among)
        return lists

    def _restrict(self, ids: Tensor) -> None:
        vectors, seen = self.all
        n = self.n_items if vectors is None else len(vectors)
        if self.first is not None:
            ids = ids[(ids >= self.first) & (ids < self.first + n)] - self.first
        self.part = Subset(ids, n)
        if vectors is not None:
            self.part = self.part.to(vectors.device)
            self.vectors, self.prepared = vectors[self.part.ids], None
        self.seen = None if seen is None else self.part.lists(seen.to(self.part.ids.device))

    def of(self, ids: Tensor, k: int) -> Tensor:
        """(n, k): the lists of these queries."""
        if self.vectors is None:
            return self._by_scores(ids, k)
        ids = ids.to(self.vectors.device)
        local_ids = self.ranks.own(ids)
        q = self.model.encode_queries(local_ids)
        if self.prepared is None:
            self.prepared = prepare(self.vectors, len(local_ids))
        if self.first is None:
            best = top_k(q, self.vectors, k, self.seen, local_ids, prepared=self.prepared)[1]
            return self.ranks.gather(self._named(best), len(ids))
        scores, items = top_k(self.ranks.gather(q, len(ids)), self.vectors, k, self.seen, ids, prepared=self.prepared)
        items = torch.where(items >= 0, self._named(items) + self.first, -1)
        n = len(ids)
        parts = [self.ranks.gather(x, self.ranks.world * n).unflatten(0, (-1, n)) for x in (scores, items)]
        scores, items = (x.transpose(0, 1).flatten(1) for x in parts)
        return in_order(scores, items, k)[1]

    def _named(self, places: Tensor) -> Tensor:
        return places if self.part is None else self.part.ids_at(places)

    def _by_scores(self, ids: Tensor, k: int) -> Tensor:
        """(n, k): the lists of a model that scores all items itself, so few queries at a time."""
        assert isinstance(self.model, Retriever)
        size, device = max(1, _SCORES // self.n_items), self.model.device
        part, lists = None if self.part is None else self.part.to(device), list[Tensor]()
        for chunk in (chunk.to(device) for chunk in ids.split(size)):
            scores = self.model.encode_queries(chunk)
            scores = scores if part is None else scores[:, part.ids]
            best = top_k(scores, None, k, self.seen, chunk)[1]
            lists.append(best if part is None else part.ids_at(best))
        return torch.cat(lists)


class _GivenLists:
    """The lists of a Lister, made all at once."""

    def __init__(self, model: Lister, seen: Positives | None, test: Pairs, k: int):
        self.n_items = model.n_items
        self.ids = torch.from_numpy(np.unique(test.queries))
        device = next(model.parameters()).device if isinstance(model, nn.Module) else None
        self.lists = model.lists(self.ids.long().to(device), min(k, self.n_items), seen).cpu()

    def of(self, ids: Tensor, k: int) -> Tensor:
        return self.lists[torch.searchsorted(self.ids, ids.to(self.ids.dtype))]


def _between(seen: Positives, low: int, high: int) -> Positives:
    """The seen items in [low, high), numbered from low."""
    inside = (seen.items >= low) & (seen.items < high)
    before = torch.cat([inside.new_zeros(1, dtype=torch.long), torch.cumsum(inside, 0)])
    return Positives(before[seen.start], seen.items[inside] - low)


def evaluate_lists(
    lists: np.ndarray,
    test: Pairs,
    n_items: int,
    k: Sequence[int] = (10, 20, 50),
    metrics: Sequence[str] = (*METRICS, "coverage"),
    dialect: str = "standard",
    counts: np.ndarray | None = None,
    propensity: np.ndarray | None = None,
) -> Evaluation:
    """Measure lists made elsewhere (BM25, fused scores): (U, K) item ids, the best first, -1 for an empty place.

    Row i is the list of the i-th query with a test item, in ascending order: np.unique(test.queries). It must not hold
    items that the query has seen.

        lists, _ = bm25(item_texts, query_texts, 100);  evaluate_lists(lists, split.test, n_items, k=(1, 5, 100))
    """
    began = time.perf_counter()
    accumulator = _accumulator(test, n_items, k, metrics, dialect, counts, propensity, None)
    n_queries = len(accumulator.query_ids)
    if lists.ndim != 2 or len(lists) != n_queries or lists.shape[1] < max(k):
        expected = f"{n_queries} rows, one per test query, of at least {max(k)} items"
        raise UserError(f"lists are {lists.shape}; expected {expected}")
    if lists.min(initial=0) < -1 or lists.max(initial=-1) >= n_items:
        expected = f"0..{n_items - 1}, or -1 for an empty place"
        raise UserError(f"lists hold ids from {lists.min()} to {lists.max()}; expected {expected}")
    for start in range(0, len(lists), _CHUNK):
        accumulator.add(start, lists[start : start + _CHUNK, : max(k)].astype(np.int64))
    return _evaluation(accumulator, began)


def _accumulator(
    test: Pairs,
    n_items: int,
    k: Sequence[int],
    metrics: Sequence[str],
    dialect: str,
    counts: np.ndarray | None,
    propensity: np.ndarray | None,
    seen: Positives | None,
    misses: Misses | None = None,
) -> MetricAccumulator:
    """Validate the arguments and return an empty accumulator."""
    chosen = list(dict.fromkeys(parse(name, dialect) for name in metrics))
    cutoffs = sorted(set(k))
    if not cutoffs or cutoffs[0] < 1:
        raise UserError(f"cutoffs must be whole numbers of at least 1, not {list(k)}")
    if not len(test.queries):
        raise UserError("the test set is empty: there is nothing to evaluate")
    if cutoffs[-1] > n_items:
        raise UserError(f"cutoff {cutoffs[-1]} is larger than the catalogue of {n_items} items: choose a smaller k")
    if int(test.items.max()) >= n_items:
        item = int(test.items.max())
        raise UserError(f"test item {item} is not among the model's {n_items} items: evaluate on its training data")
    if counts is not None and len(counts) != n_items:
        raise UserError(f"counts has {len(counts)} entries for {n_items} items: give one number per item")
    if misses is not None and any(metric.name in PROPENSITY_METRICS for metric in chosen):
        raise UserError("psp and psndcg need a propensity of every item, and unknown ones have none: leave them out")
    if any(metric.name in PROPENSITY_METRICS for metric in chosen):
        propensity = _propensity(propensity, test, n_items, counts, seen)
    return MetricAccumulator(test, n_items, chosen, cutoffs, counts, propensity, misses)


def _evaluation(
    metrics: MetricAccumulator, began: float, more: dict[str, dict[str, float]] | None = None
) -> Evaluation:
    metrics.close()
    strata = metrics.strata() | (more or {})
    seconds = time.perf_counter() - began
    return Evaluation(metrics.means(), strata, metrics.query_ids, metrics.per_query, seconds, metrics.bins())


def _propensity(
    given: np.ndarray | None, test: Pairs, n_items: int, counts: np.ndarray | None, seen: Positives | None
) -> np.ndarray:
    weights = given if given is not None else getattr(test, "propensity", None)
    if weights is None:
        if counts is None or seen is None:
            raise UserError("psp and psndcg weight items by their training counts: give propensity, or counts and seen")
        weights = inverse_propensities(counts, int((seen.start.diff() > 0).sum()))
    if len(weights) != n_items:
        raise UserError(f"propensity has {len(weights)} entries for {n_items} items: give one number per item")
    return np.asarray(weights, dtype=np.float64)
