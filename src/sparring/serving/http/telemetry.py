"""Monitoring: the log, one JSON object per line on stderr, and Prometheus metrics."""

from __future__ import annotations

import datetime
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import IO, Any, NamedTuple

import orjson
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.searcher import Searcher
from sparring.serving.index.scored import FusedItems

_FLUSH_SECONDS = 0.2  # request lines may stay in the buffer this long
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


class Figures(dict[tuple[Any, ...], float]):
    """(kind, labels ...) -> value: what one process has counted, or several."""

    def add(self, other: Figures) -> None:
        for key, value in other.items():
            self[key] = self.get(key, 0) + value


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

    def flush(self) -> None:
        (self._stream or sys.stderr.buffer).flush()

    def request(self, method: str, path: str, status: int, seconds: float, client: str) -> None:
        self("request", method=method, path=path, status=status, ms=round(seconds * 1e3, 3), client=client)


class Metrics:
    """Metrics of a service, in the text format of `GET /metrics`. Only the event loop counts requests."""

    def __init__(self, registry: RunRegistry, searcher: Searcher) -> None:
        self._runs, self._searcher = registry, searcher
        self._counts: dict[tuple[str, int], int] = {}
        self._durations: dict[str, tuple[list[int], list[float]]] = {}  # path -> (requests per bucket, [sum])

    def count(self, path: str, status: int, seconds: float) -> None:
        self._counts[path, status] = self._counts.get((path, status), 0) + 1
        durations = self._durations.get(path)
        if durations is None:
            self._durations[path] = durations = ([0] * (len(_BUCKETS) + 1), [0.0])
        durations[0][bisect_left(_BUCKETS, seconds)] += 1
        durations[1][0] += seconds

    def figures(self) -> Figures:
        """What this process has counted."""
        figures, searcher = Figures(), self._searcher
        for (path, status), count in dict(self._counts).items():
            figures["requests", path, str(status)] = count
        for path, (counts, total) in dict(self._durations).items():
            figures.update({("bucket", path, number): count for number, count in enumerate(counts)})
            figures["seconds", path] = total[0]
        for served in self._runs.runs:
            index = served.index
            if isinstance(index, FusedItems):
                figures["listed", served.name] = index.listed
                for name, spent, items in zip(index.names, index.seconds, index.found, strict=True):
                    figures["source seconds", served.name, name] = float(spent)
                    figures["source items", served.name, name] = float(items)
        figures["waiting",] = searcher.waiting
        figures["batches",], figures["searched",] = searcher.batches, searcher.searched
        return figures

    def text(self, figures: Figures | None = None) -> bytes:
        """The figures, by default those of this process, and the state of the runs."""
        metrics = [*_counted(self.figures() if figures is None else figures), *self._state()]
        return generate_latest(_Listed(metrics))  # type: ignore[arg-type]

    def _state(self) -> Iterator[Metric]:
        """The same in every worker."""
        items = GaugeMetricFamily("sparring_items", "Items that can be listed", labels=["run"])
        generation = GaugeMetricFamily("sparring_generation", "Generation of the served run", labels=["run"])
        waiting = GaugeMetricFamily("sparring_items_waiting", "Stored items that the run cannot place", labels=["run"])
        for served in self._runs.runs:
            items.add_metric([served.name], len(served.index))
            generation.add_metric([served.name], served.generation)
            waiting.add_metric([served.name], len(served.waiting))
        yield from (items, generation, waiting)
        yield CounterMetricFamily(
            "sparring_changes", "Sequence number of the last change", value=self._runs.store.sequence
        )


class _Listed(NamedTuple):
    metrics: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.metrics


def _counted(figures: Figures) -> Iterator[Metric]:
    families: dict[str, Any] = {
        "requests": CounterMetricFamily("sparring_requests", "Requests answered", labels=["path", "status"]),
        "source seconds": CounterMetricFamily(
            "sparring_source_seconds", "Seconds of searches", labels=["run", "source"]
        ),
        "source items": CounterMetricFamily(
            "sparring_source_items", "Listed items that the source has among its own k best", labels=["run", "source"]
        ),
        "listed": CounterMetricFamily("sparring_fused_items", "Items listed by a fused run", labels=["run"]),
        "waiting": GaugeMetricFamily("sparring_queries_waiting", "Queries waiting to be searched", labels=[]),
        "batches": CounterMetricFamily("sparring_searches", "Batches searched", labels=[]),
        "searched": CounterMetricFamily("sparring_queries_searched", "Queries searched", labels=[]),
    }
    latency = HistogramMetricFamily("sparring_request_seconds", "Request latency in seconds", labels=["path"])
    for (kind, *labels), value in figures.items():
        if kind in families:
            families[kind].add_metric(labels, value)
        elif kind == "seconds":
            (path,) = labels
            counts = [figures["bucket", path, number] for number in range(len(_BUCKETS) + 1)]
            bounds = [*map(str, _BUCKETS), "+Inf"]
            latency.add_metric([path], list(zip(bounds, accumulate(counts), strict=True)), value)
    yield from (latency, *families.values())
