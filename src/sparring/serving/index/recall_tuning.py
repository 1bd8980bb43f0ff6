"""The index that answers most queries per second among those that are good and small enough: built, measured, chosen.

Recall is the share of the exact k best items, without a query's own, that an index finds. Speed is measured on batches
of 64 queries.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparring.core.errors import UserError
from sparring.serving.index import faiss_backends
from sparring.serving.index.faiss_backends import (
    GRAPHS,
    Effort,
    cagra_problem,
    cells,
    code_sizes,
    estimated_bytes,
    make,
    n_cells,
)
from sparring.serving.index.search import Index
from sparring.serving.index.searchable import Searchable

SMALL = 2_000  # up to this many items only the exact index is considered
GRAPH = 250_000  # up to this many items `auto` builds a graph on the CPU; beyond, that takes many minutes
_BATCH = 64
_REFINE = {"hnsw": (1.0,), "cagra": (1.0,), "ivf": (1.0,), "ivfsq": (1.0, 1.5), "ivfpq": (2.0, 5.0)}
_LEAST = 0.15  # shortest measurement in seconds


@dataclass(frozen=True)
class Point:
    """A measured configuration."""

    kind: str
    effort: Effort
    recall: float
    speed: float  # queries per second
    memory: int  # bytes; vectors that are only read to refine stay on disk

    @property
    def setting(self) -> str:
        if self.kind == "exact":
            return ""
        name = "candidates" if self.kind in GRAPHS else "cells"
        return f"{self.effort.width} {name}" + (f", {self.effort.refine:g} k refined" if self.effort.refine > 1 else "")


@dataclass(frozen=True)
class Tuned:
    """The chosen index, all measured points, and the recall of the chosen one on held-out queries."""

    index: Index
    chosen: Point
    points: tuple[Point, ...]
    recall: float
    left_out: tuple[str, ...]  # kinds that were not measured, with the reason


def tune(
    vectors: np.ndarray,
    queries: np.ndarray,
    k: int = 100,
    recall: float = 0.99,
    memory: int | None = None,
    kind: str = "auto",
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    exclude: Sequence[np.ndarray] | None = None,
    ranked: Callable[[Index], Searchable] = lambda index: index,
    depth: int = 1,
    beside: int = 0,
) -> Tuned:
    """Build indexes of item vectors (N, D), measure them on query vectors (n, D), and return the fastest good one.

    Half of the queries tune the effort of each index; the other half must confirm the recall. `memory` bounds the bytes
    that a search keeps in memory. If no index reaches the recall within it, the error names the best one. `exclude` has
    the items that each query's list leaves out: a query's own items are its nearest, and easier to find than others.

    `ranked` makes lists of what an index finds, such as `StagedItems`, whose query vectors `queries` then are; it takes
    at least `depth` items from the index and keeps `beside` more bytes in memory.

        tuned = tune(model.item_vectors().numpy(), queries, k=100, recall=0.99, memory=500_000_000)
    """
    n, dim = vectors.shape
    if kind not in ("auto", *faiss_backends.KINDS):
        raise UserError(f"kind {kind!r} is not one of auto, {', '.join(faiss_backends.KINDS)}")
    if not 0 < recall <= 1:
        raise UserError(f"recall {recall} must be above 0 and at most 1")
    if len(queries) < 2:
        raise UserError(f"tuning needs at least 2 queries, not {len(queries)}: half of them are held out")
    k = min(k, n)
    half = len(queries) // 2
    exact = Index(np.ascontiguousarray(vectors, dtype=np.float32), np.arange(n))
    hidden = None if exclude is None else list(exclude)
    tuning, held_out = (queries[:half], hidden and hidden[:half]), (queries[half:], hidden and hidden[half:])
    truth = ranked(exact).search(queries, k, hidden)[1]

    def size_of(name: str, code: int = 0) -> int:
        return beside + estimated_bytes(name, n, dim, code)

    baseline = Point("exact", Effort(), 1.0, _speed(ranked(exact), *tuning, k), size_of("exact"))
    fits = memory is None or baseline.memory <= memory
    points = [baseline] if fits and kind in ("auto", "exact") else []
    indexes, left_out = {"exact": exact}, list[str]()
    say(f"exact: {baseline.speed:,.0f} queries/s, {baseline.memory / 1e6:,.1f} MB")
    quantizer = None
    slowest = baseline.speed if points else 0.0  # if exact search is allowed, a far slower index is useless
    for name, code in _wanted(kind, n, dim, memory, size_of, left_out):
        began = time.perf_counter()
        if name.startswith("ivf") and quantizer is None:
            quantizer = cells(exact.vectors, seed)
        try:
            ann = make(name, exact.vectors, quantizer, code, seed)
        except UserError as error:  # a GPU may be full
            if kind != "auto":
                raise
            left_out.append(str(error))
            continue
        seconds = time.perf_counter() - began
        size = size_of(name, code)
        indexes[name] = Index(exact.vectors, exact.ids, name, ann)
        measured = list(_sweep(indexes[name], *tuning, truth[:half], k, recall, size, slowest, ranked, max(k, depth)))
        points += measured
        best = max(
            measured,
            key=lambda point: (point.recall >= recall, point.speed if point.recall >= recall else point.recall),
        )
        figures = f"recall {best.recall:.4f} at {best.speed:,.0f} queries/s"
        say(f"{name}: built in {seconds:.1f} s, {size / 1e6:,.1f} MB, {figures}")
    good = sorted((point for point in points if point.recall >= recall), key=lambda point: -point.speed)
    for point in good:
        index = replace(indexes[point.kind], effort=point.effort)
        held = _recall(ranked(index).search(held_out[0], k, held_out[1])[1], truth[half:])
        if held >= recall:
            return Tuned(index, point, tuple(points), held, tuple(left_out))
    limit = "" if memory is None else f" within {memory / 1e6:,.1f} MB"
    if not points:
        left_out = left_out or [f"exact takes {baseline.memory / 1e6:,.1f} MB"]
        raise UserError(f"no index of {n:,} x {dim} vectors fits{limit}: {'; '.join(left_out)}")
    if good:
        raise UserError(
            f"no index{limit} keeps recall {recall:g} on held-out queries: measure on more --queries, or lower --recall"
        )
    best = max(points, key=lambda point: point.recall)
    found = f"the best is {best.kind} with {best.recall:.4f}"
    raise UserError(f"no index{limit} reaches recall {recall:g}: {found}; lower --recall or raise --memory")


def _wanted(
    kind: str, n: int, dim: int, memory: int | None, size_of: Callable[[str, int], int], left_out: list[str]
) -> Iterator[tuple[str, int]]:
    """Approximate kinds to build, with the bytes of a product code; `left_out` gets the reasons of the others."""
    for name in faiss_backends.KINDS[1:]:
        if kind not in ("auto", name):
            continue
        if kind == "auto" and n <= SMALL:
            left_out.append(f"{name} is only for more than {SMALL:,} items")
            continue
        if kind == "auto" and name == "hnsw" and n > GRAPH:
            left_out.append(f"hnsw takes minutes to build for {n:,} items: request it with --kind hnsw")
            continue
        if kind == "auto" and name == "cagra" and cagra_problem():
            continue
        codes = code_sizes(dim) if name == "ivfpq" else (0,)
        fitting = [code for code in codes if memory is None or size_of(name, code) <= memory]
        if not fitting:
            left_out.append(f"{name} takes about {size_of(name, codes[-1]) / 1e6:,.1f} MB")
            continue
        yield name, fitting[0]


def _sweep(
    index: Index,
    queries: np.ndarray,
    hidden: list[np.ndarray] | None,
    truth: np.ndarray,
    k: int,
    target: float,
    size: int,
    slowest: float,
    ranked: Callable[[Index], Searchable],
    depth: int,
) -> Iterator[Point]:
    """Points of rising effort until the target is reached or exact search is faster; then bisect for the least."""

    def at(effort: Effort) -> Point:
        tried = ranked(replace(index, effort=effort))
        recall = _recall(tried.search(queries, k, hidden)[1], truth)
        return Point(index.kind, effort, recall, _speed(tried, queries, hidden, k), size)

    n = len(index.ids)
    most = n if index.kind in GRAPHS else n_cells(n)
    for refine in _REFINE[index.kind]:
        # with fewer cells lists stay short, and the search falls back to exact ranking
        least = depth if index.kind in GRAPHS else math.ceil(2 * depth * refine * most / n)
        low, high, reached, before = 0, min(least, most), False, -1.0
        while True:
            point = at(Effort(high, refine))
            yield point
            reached = point.recall >= target
            # the codes are too coarse: more cells do not help; without codes all cells find everything
            stuck = index.kind != "ivf" and point.recall - before < 1e-4 and high > 8
            if reached or high >= most or point.speed < slowest / 4 or stuck:
                break
            low, high, before = high, min(2 * high, most), point.recall
        if reached and not low and high < most:
            yield at(Effort(min(2 * high, most), refine))  # held-out queries may need more
        while reached and high - low > max(1, high // 8):
            middle = (low + high) // 2
            point = at(Effort(middle, refine))
            yield point
            low, high = (low, middle) if point.recall >= target else (middle, high)


def _recall(found: np.ndarray, truth: np.ndarray) -> float:
    """Mean share of the true items that were found; ids are distinct within a row."""
    base = int(max(found.max(), truth.max())) + 2
    row = np.arange(len(truth))[:, None] * base
    return float(np.isin(truth + row, found + row).sum() / truth.size)


def _speed(index: Searchable, queries: np.ndarray, hidden: list[np.ndarray] | None, k: int) -> float:
    """Queries per second of the median batch, which is robust to other load on the machine."""
    parts = [slice(begin, begin + _BATCH) for begin in range(0, len(queries), _BATCH)]
    batches = [(queries[part], hidden and hidden[part]) for part in parts]
    each: list[float] = []  # seconds per query
    start = time.perf_counter()
    while time.perf_counter() - start < _LEAST or len(each) < min(len(batches), 5):
        batch = batches[len(each) % len(batches)]
        began = time.perf_counter()
        index.search(batch[0], k, batch[1])
        each.append((time.perf_counter() - began) / len(batch[0]))
    return 1 / float(np.median(each))
