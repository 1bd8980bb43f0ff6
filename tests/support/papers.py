"""Builders shared by the tests of studies: trainings in this process, tables and results read back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparring.core import workers


def run_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run trainings in this process, one after another; the list fills with the tasks that ran."""
    ran: list[str] = []

    def run(
        tasks: Iterable[workers.Task], jobs: int = 1, threads: int | None = None, deadline: float | None = None
    ) -> Iterator[workers.Ended]:
        for task in tasks:
            if deadline is not None and time.monotonic() >= deadline:
                return
            ran.append(task.name)
            try:
                yield workers.Ended(task.name, task.work(lambda message: None, *task.arguments), None)
            except ValueError as error:
                yield workers.Ended(task.name, None, str(error))

    monkeypatch.setattr(workers, "run", run)
    return ran


def table(out: Path, name: str = "table") -> list[dict[str, Any]]:
    """The rows of a written table."""
    return list(json.loads((out / f"{name}.json").read_text())["rows"])


def result_json(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text()))


def metrics_of(folder: Path) -> dict[str, float]:
    return dict(result_json(folder)["test"]["metrics"])


def run_json(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run.json").read_text()))
