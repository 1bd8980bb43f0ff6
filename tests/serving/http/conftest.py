"""A small run whose vectors, histories and columns a test can read, and a service over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("orjson", reason="the extra `serve` is not installed")

from fastapi.testclient import TestClient

from sparring.serving.http.app import Service
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.store import Store
from support.made_run import MadeRun, make_run
from support.sockets import Listening


@pytest.fixture
def truth(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path / "runs" / "first")


@pytest.fixture
def serving() -> Iterator[Callable[..., TestClient]]:
    """Starts services in this process; all are stopped when the test ends."""
    services: list[tuple[Service, TestClient]] = []

    def started(
        *folders: Path,
        store: Path | None = None,
        roots: Any = (),
        as_given: bool = False,
        ranking: Any = None,
        **options: Any,
    ) -> TestClient:
        place = store or folders[0] / "serve" / "items.sqlite"
        registry = RunRegistry(folders, Store(place), roots, as_given=as_given, ranking=ranking)
        service = Service(registry, **options)
        client = TestClient(service.gate, raise_server_exceptions=False)
        client.service = service  # type: ignore[attr-defined]
        client.stop = lambda: services.pop(next(at for at, (_, each) in enumerate(services) if each is client))[
            0
        ].close()  # type: ignore[attr-defined]
        services.append((service, client))
        return client

    yield started
    for service, _ in services:
        service.close()


@pytest.fixture
def client(truth: MadeRun, serving: Callable[..., TestClient]) -> TestClient:
    return serving(truth.folder)


@pytest.fixture
def listening(truth: MadeRun) -> Iterator[Callable[..., Listening]]:
    started: list[Listening] = []

    def start(**options: Any) -> Listening:
        registry = RunRegistry([truth.folder], Store(truth.folder / "serve" / "items.sqlite"))
        started.append(Listening(Service(registry, **options)))
        return started[-1]

    yield start
    for service in started:
        service.stop()
