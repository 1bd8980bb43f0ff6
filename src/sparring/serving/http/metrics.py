"""Counters for Prometheus: requests and their seconds, searches, items, generations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sparring.serving.http.runs import Live
from sparring.serving.http.search import Searcher

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """What `GET /metrics` prints. Each service has its own, so that several may live in one process; the event loop alone counts."""

    def __init__(self, live: Live, searcher: Searcher) -> None:
        self._registry = CollectorRegistry()
        self._counts: dict[tuple[str, int], int] = {}
        self._seconds: dict[
            str, tuple[list[int], list[float]]
        ] = {}  # path -> requests by how long they took, and the sum
        self._registry.register(_Now(live, searcher))
        self._registry.register(_Requests(self._counts, self._seconds))

    def answered(self, path: str, status: int, seconds: float) -> None:
        self._counts[path, status] = self._counts.get((path, status), 0) + 1
        known = self._seconds.get(path)
        if known is None:
            self._seconds[path] = known = ([0] * (len(_SECONDS) + 1), [0.0])
        known[0][bisect_left(_SECONDS, seconds)] += 1
        known[1][0] += seconds

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Requests(Collector):
    def __init__(self, counts: dict[tuple[str, int], int], seconds: dict[str, tuple[list[int], list[float]]]) -> None:
        self.counts, self.seconds = counts, seconds

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("sparring_requests", "Requests answered", labels=["path", "status"])
        for (path, status), count in self.counts.items():
            requests.add_metric([path, str(status)], count)
        took = HistogramMetricFamily("sparring_request_seconds", "Seconds from request to answer", labels=["path"])
        for path, (counts, total) in self.seconds.items():
            bounds = [*map(str, _SECONDS), "+Inf"]
            took.add_metric([path], list(zip(bounds, accumulate(counts), strict=True)), total[0])
        yield from (requests, took)


class _Now(Collector):
    """What is read when it is asked for."""

    def __init__(self, live: Live, searcher: Searcher) -> None:
        self.live, self.searcher = live, searcher

    def collect(self) -> Iterator[Metric]:
        items = GaugeMetricFamily("sparring_items", "Items that can be listed", labels=["run"])
        generation = GaugeMetricFamily("sparring_generation", "Generation of the run that answers", labels=["run"])
        waiting = GaugeMetricFamily("sparring_items_waiting", "Items put that this run cannot place", labels=["run"])
        for served in self.live.runs:
            items.add_metric([served.name], len(served.index))
            generation.add_metric([served.name], served.generation)
            waiting.add_metric([served.name], len(served.waiting))
        yield from (items, generation, waiting)
        yield GaugeMetricFamily(
            "sparring_queries_waiting", "Queries that wait to be searched", value=self.searcher.waiting
        )
        yield CounterMetricFamily("sparring_searches", "Batches searched", value=self.searcher.batches)
        yield CounterMetricFamily("sparring_queries_searched", "Queries searched", value=self.searcher.searched)
        yield CounterMetricFamily(
            "sparring_changes", "Number of the last change of items", value=self.live.store.sequence
        )
