"""The parts that the reports of all studies share: tuning, failures, hardware and versions, README.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.workers import Failure
from sparring.experiments.report.html import Points, Section
from sparring.experiments.report.tables import Column, Row, Table
from sparring.experiments.report.wording import bullets, distinct, in_words
from sparring.experiments.study import FinishedRun, Study
from sparring.experiments.tuning import TuningResult
from sparring.recipes.setup import flat


def tuning_table(study: Study, label: str, shown: Mapping[str, str], data_column: bool) -> Table:
    """One row per data set and tuned method: the number of trials and failures, and the best settings on validation.

    `label` heads the methods; `shown` gives the data sets' names.
    """
    rows: list[Row] = []
    for data in study.data:
        for method in study.tuned_methods(data.name):
            trials = study.read_trials(data.name, method)
            try:
                result = study.tuned(data.name, method)
            except UserError:  # every trial failed: reported as a failure
                result = TuningResult({}, math.nan, tuple(trials))
            row: Row = {"data": shown[data.name], label: method.name, "trials": len(trials), "failed": result.failed}
            row |= {"score": result.value, "settings": in_words(result.settings)}
            rows.append(row | {"seconds": sum(trial.seconds for trial in trials)})
    columns = (
        *([Column("data", "{data}", text=True)] if data_column else []),
        Column(label, f"{{{label}}}", text=True),
        Column("settings", "{settings}", text=True),
        Column("validation", "{score:.4f}"),
        Column("trials", "{trials}"),
        Column("failed", "{failed}"),
    )
    return Table(columns, rows, f"Tuning: the best of {study.trials} trials each, on the validation part")


def failed_section(failures: Sequence[Failure]) -> list[Section]:
    """A section that lists the failures; none where nothing failed."""
    return [Section("Failed", (Points(_lines(failures)),))] if failures else []


def _lines(failures: Sequence[Failure]) -> list[str]:
    return [f"{failure.data} {failure.recipe} {failure.what}: {failure.error}" for failure in failures]


def environment(runs: Sequence[FinishedRun]) -> dict[str, str]:
    """Hardware and library versions of the runs, each distinct value once."""
    facts = {"hardware": distinct(str(run.measured["device"]) for run in runs)} if runs else {}
    versions = [run.meta.get("versions", {}) for run in runs]
    for name in dict.fromkeys(name for known in versions for name in known):
        facts[name] = distinct(str(known.get(name, "unknown")) for known in versions)
    return facts


def settings_of(run: FinishedRun) -> dict[str, Any]:
    """The resolved settings of a run, without its seed."""
    every = {**run.meta.get("arguments", {}), **flat(run.meta["setup"])}
    return {name: value for name, value in every.items() if name != "seed"}


def write_readme(out: Path, parts: Iterable[str], failures: Sequence[Failure], command: str) -> None:
    """README.md: the parts, then the failures and the command."""
    written = [part for part in parts if part]
    if failures:
        written.append(f"Failed:\n\n{bullets(_lines(failures))}")
    if command:
        written.append(f"Made by\n\n    {command}")
    files.write_text(out / "README.md", "\n\n".join(written) + "\n")
