"""What the tests of `sparring reproduce` share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sparring.core import workers
from sparring.training import curve


def run_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trainings in this process, one after another, without the picture of each; the names of those that ran."""
    ran: list[str] = []

    def run(tasks: Sequence[workers.Task], jobs: int = 1, threads: int | None = None) -> Iterator[workers.Ended]:
        for task in tasks:
            ran.append(task.name)
            try:
                yield workers.Ended(task.name, task.work(lambda message: None, *task.arguments), None)
            except ValueError as error:
                yield workers.Ended(task.name, None, str(error))

    monkeypatch.setattr(workers, "run", run)
    monkeypatch.setattr(curve, "training_curve", lambda history, path, title, select: Path(path).touch())
    return ran
