"""Monitoring: the log, one JSON object per line on stderr, and Prometheus metrics."""

from __future__ import annotations

import datetime
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import IO

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.searcher import Searcher
from sparring.serving.http.served_run import ServedRun
from sparring.serving.index.scored import FusedItems

_FLUSH_SECONDS = 0.2  # request lines may stay in the buffer this long
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


class EventLog:
    """A structured log: `log("reloaded", run="first")` writes {"time":"...","event":"reloaded","run":"first"}."""

    def __init__(self, stream: IO[bytes] | None = None, requests: bool = True) -> None:
        self._stream = stream
        self.requests = requests
        self._flushed = 0.0

    def __call__(self, event: str, **facts: object) -> None:
        line = {"time": datetime.datetime.now(datetime.UTC), "event": event, **facts}
        stream = self._stream or sys.stderr.buffer
        stream.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE, default=str))
        now = time.monotonic()
        if event != "request" or now - self._flushed > _FLUSH_SECONDS:
            self._flushed = now
            stream.flush()

    def request(self, method: str, path: str, status: int, seconds: float, client: str) -> None:
        self("request", method=method, path=path, status=status, ms=round(seconds * 1e3, 3), client=client)


def _sources(runs: Sequence[ServedRun]) -> Iterator[Metric]:
    """Figures of the sources of fused runs."""
    seconds = CounterMetricFamily("sparring_source_seconds", "Seconds of searches", labels=["run", "source"])
    text = "Listed items that the source has among its own k best"
    found = CounterMetricFamily("sparring_source_items", text, labels=["run", "source"])
    listed = CounterMetricFamily("sparring_fused_items", "Items listed by a fused run", labels=["run"])
    for served in runs:
        index = served.index
        if isinstance(index, FusedItems):
            listed.add_metric([served.name], index.listed)
            for name, spent, items in zip(index.names, index.seconds, index.found, strict=True):
                seconds.add_metric([served.name, name], spent)
                found.add_metric([served.name, name], items)
    yield from (seconds, found, listed)


class Metrics(Collector):
    """Metrics of one service, in the text format of `GET /metrics`. Only the event loop counts requests."""

    def __init__(self, registry: RunRegistry, searcher: Searcher) -> None:
        self._runs, self._searcher = registry, searcher
        self._counts: dict[tuple[str, int], int] = {}
        self._durations: dict[str, tuple[list[int], list[float]]] = {}  # path -> (requests per bucket, [sum])
        self._collectors = CollectorRegistry()
        self._collectors.register(self)

    def count(self, path: str, status: int, seconds: float) -> None:
        self._counts[path, status] = self._counts.get((path, status), 0) + 1
        durations = self._durations.get(path)
        if durations is None:
            self._durations[path] = durations = ([0] * (len(_BUCKETS) + 1), [0.0])
        durations[0][bisect_left(_BUCKETS, seconds)] += 1
        durations[1][0] += seconds

    def text(self) -> bytes:
        return generate_latest(self._collectors)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("sparring_requests", "Requests answered", labels=["path", "status"])
        for (path, status), count in self._counts.items():
            requests.add_metric([path, str(status)], count)
        latency = HistogramMetricFamily("sparring_request_seconds", "Request latency in seconds", labels=["path"])
        for path, (counts, total) in self._durations.items():
            bounds = [*map(str, _BUCKETS), "+Inf"]
            latency.add_metric([path], list(zip(bounds, accumulate(counts), strict=True)), total[0])
        items = GaugeMetricFamily("sparring_items", "Items that can be listed", labels=["run"])
        generation = GaugeMetricFamily("sparring_generation", "Generation of the served run", labels=["run"])
        waiting = GaugeMetricFamily("sparring_items_waiting", "Stored items that the run cannot place", labels=["run"])
        for served in self._runs.runs:
            items.add_metric([served.name], len(served.index))
            generation.add_metric([served.name], served.generation)
            waiting.add_metric([served.name], len(served.waiting))
        yield from (requests, latency, items, generation, waiting)
        yield from _sources(self._runs.runs)
        searcher = self._searcher
        yield GaugeMetricFamily("sparring_queries_waiting", "Queries waiting to be searched", value=searcher.waiting)
        yield CounterMetricFamily("sparring_searches", "Batches searched", value=searcher.batches)
        yield CounterMetricFamily("sparring_queries_searched", "Queries searched", value=searcher.searched)
        yield CounterMetricFamily(
            "sparring_changes", "Sequence number of the last change", value=self._runs.store.sequence
        )
