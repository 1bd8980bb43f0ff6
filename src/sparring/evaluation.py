"""What a retriever's lists are worth: full ranking of every query with a test item, and the metrics of those lists."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from sparring.errors import UserError
from sparring.metrics import LIST_METRICS, METRICS, STRATA, Metric, parse, per_query, popularity_percentile, popularity_strata
from sparring.rank import top_k
from sparring.types import Positives

__all__ = ["Encoder", "Evaluation", "Pairs", "evaluate", "top_k"]

_CHUNK = 8192  # queries encoded and ranked at once


class Encoder(Protocol):
    """What can be evaluated: vectors of queries, by id, and of all items; the score is their inner product."""

    def encode_queries(self, ids: Tensor, /) -> Tensor: ...
    def item_vectors(self) -> Tensor: ...


class Pairs(Protocol):
    """What is tested against: (query, item) pairs as two arrays of dense ids, and how many queries the data has."""

    @property
    def queries(self) -> np.ndarray: ...
    @property
    def items(self) -> np.ndarray: ...
    @property
    def n_queries(self) -> int: ...


@dataclass(frozen=True)
class Evaluation:
    """What a full ranking was worth: means, each query's own values, and the same by popularity of the items."""

    metrics: dict[str, float]  # "recall@20" -> mean
    strata: dict[str, dict[str, float]]  # "head" | "mid" | "tail" -> the same; empty where popularity is unknown
    query_ids: np.ndarray  # (U,) the queries with a test item, ascending
    per_query: dict[str, np.ndarray]  # "recall@20" -> (U,), in the order of query_ids
    seconds: float

    def table(self) -> list[tuple[str, ...]]:
        """Rows to print: a header, one row per metric with a column per cutoff, then those of each stratum."""
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
        """Everything but the values of single queries, ready for JSON."""
        return {"metrics": self.metrics, "strata": self.strata, "queries": len(self.query_ids), "seconds": round(self.seconds, 3)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


def evaluate(
    model: Encoder,
    test: Pairs,
    seen: Positives | None,
    k: Sequence[int] = (10, 20, 50),
    metrics: Sequence[str] = METRICS + LIST_METRICS,
    dialect: str = "standard",
    counts: np.ndarray | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Rank the whole catalogue for every query with a test item, leaving out what it has seen, and measure the lists.

    `metrics` are names of `sparring.metrics`, in the given dialect or, with a suffix, in another: ("recall", "ndcg", "ndcg_xir_release")
    gives both kinds of ndcg in one pass. `counts` (N,) are training interactions per item, by default those in `seen`; they define
    popularity@k and the strata head, mid and tail, and without either these are left out. In a stratum only its own items are relevant,
    and means are over the queries with such a test item; beside the metrics it has coverage@k of its items, share@k (the part of all
    listed places that went to it), and how many items and queries it has. `progress(done, total)` is called after each chunk of queries.

    Repeated test pairs count once. A test item that its query has also seen cannot be listed but still counts as relevant.

        result = evaluate(model, split.test, split.seen_for("test"), k=(20,), counts=split.train.counts())
        result.metrics["recall@20"], result.strata["tail"]["recall@20"]
    """
    began = time.perf_counter()
    chosen = list(dict.fromkeys(parse(name, dialect) for name in metrics))
    cutoffs = sorted(set(k))
    if not cutoffs or cutoffs[0] < 1:
        raise UserError(f"cutoffs must be whole numbers of at least 1, not {list(k)}")
    if not len(test.queries):
        raise UserError("the test set is empty: there is nothing to evaluate")
    with _inference(model):
        vectors = model.item_vectors()
        n_items = len(vectors)
        if cutoffs[-1] > n_items:
            raise UserError(f"cutoff {cutoffs[-1]} is larger than the catalogue of {n_items} items: choose a smaller k")
        if int(test.items.max()) >= n_items:
            raise UserError(
                f"test item {int(test.items.max())} is not among the model's {n_items} items: evaluate on the data it was trained for"
            )
        if counts is None and seen is not None:
            counts = np.bincount(seen.items.cpu().numpy(), minlength=n_items)
        if counts is not None and len(counts) != n_items:
            raise UserError(f"counts has {len(counts)} entries for {n_items} items: give one number per item")
        tally = _Tally(test, n_items, chosen, cutoffs, counts)
        total = len(tally.query_ids)
        for start in range(0, total, _CHUNK):
            ids = torch.from_numpy(tally.query_ids[start : start + _CHUNK]).to(vectors.device)
            tally.add(start, top_k(model.encode_queries(ids), vectors, cutoffs[-1], seen, ids)[1].cpu().numpy())
            if progress is not None:
                progress(min(start + _CHUNK, total), total)
    means, strata = tally.means(test.n_queries)
    return Evaluation(means, strata, tally.query_ids, tally.per_query, time.perf_counter() - began)


@contextmanager
def _inference(model: Encoder) -> Iterator[None]:
    """No gradients, no dropout; every part of the model is left in the mode in which it was found."""
    modes = [(m, m.training) for m in model.modules()] if isinstance(model, nn.Module) else []
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


class _Tally:
    """Values of the metrics, gathered chunk by chunk."""

    def __init__(self, test: Pairs, n_items: int, chosen: list[Metric], cutoffs: list[int], counts: np.ndarray | None) -> None:
        self.n_items, self.cutoffs = n_items, cutoffs
        self.pairs = np.unique(test.queries.astype(np.int64) * n_items + test.items)
        self.query_ids, place, relevant = np.unique(self.pairs // n_items, return_inverse=True, return_counts=True)
        self.relevant = relevant
        self.ranked = [m for m in chosen if m.name in METRICS]
        self.covers = any(m.name == "coverage" for m in chosen)
        self.percentile = popularity_percentile(counts) if counts is not None and any(m.name == "popularity" for m in chosen) else None
        labels = [m.label for m in self.ranked] + (["popularity"] if self.percentile is not None else [])
        self.per_query = {f"{label}@{k}": np.zeros(len(self.query_ids)) for label in labels for k in cutoffs}
        self.listed = {k: np.zeros(n_items, dtype=np.int64) for k in cutoffs}  # how often each item is in a list
        self.stratum = popularity_strata(counts) if counts is not None else None
        if self.stratum is not None:
            # (3, U): test items of each query by stratum
            flat = np.bincount(self.stratum[self.pairs % n_items] * len(self.query_ids) + place, minlength=3 * len(self.query_ids))
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
        for k in self.cutoffs:
            for metric in self.ranked:
                self.per_query[metric.key(k)][rows] = per_query(metric, hits, self.relevant[rows], k)
            if self.percentile is not None:
                share = (self.percentile[ids[:, :k]] * filled[:, :k]).sum(1) / np.maximum(filled[:, :k].sum(1), 1)
                self.per_query[f"popularity@{k}"][rows] = share
            self.listed[k] += np.bincount(ids[:, :k][filled[:, :k]], minlength=self.n_items)
        if self.stratum is not None:
            for index, sums in enumerate(self.sums_in):
                some = np.flatnonzero(self.relevant_in[index, rows])
                own = hits[some] & (self.stratum[ids[some]] == index)
                for metric in self.by_stratum:
                    for k in self.cutoffs:
                        sums[metric.key(k)] += float(per_query(metric, own, self.relevant_in[index, rows][some], k).sum())

    def means(self, n_queries: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Overall means, and those of each stratum."""
        total: dict[str, float] = {}
        whole = {m.key(k) for m in self.ranked if m.over_all_queries for k in self.cutoffs}
        for key, values in self.per_query.items():
            total[key] = float(values.sum()) / (n_queries if key in whole else len(values))
        if self.covers:
            total |= {f"coverage@{k}": float((self.listed[k] > 0).mean()) for k in self.cutoffs}
        strata: dict[str, dict[str, float]] = {}
        if self.stratum is None:
            return total, strata
        for index, name in enumerate(STRATA):
            inside, queries = np.equal(self.stratum, index), int((self.relevant_in[index] > 0).sum())
            strata[name] = {key: value / queries for key, value in self.sums_in[index].items() if queries}
            for k in self.cutoffs:
                if self.covers and inside.any():
                    strata[name][f"coverage@{k}"] = float((self.listed[k][inside] > 0).mean())
                strata[name][f"share@{k}"] = float(self.listed[k][inside].sum() / max(self.listed[k].sum(), 1))
            strata[name] |= {"items": float(inside.sum()), "queries": float(queries)}
        return total, strata
