"""One engine under compare and reproduce: methods x data sets x seeds, each training an ordinary run folder.

    OUT/study.json               the kind of study, and the settings that must not change when it grows
    OUT/DATA/METHOD/SEED/        a run folder, and measured.json: device, peak memory and the study's own figures
    OUT/DATA/METHOD/tune/        trials.jsonl, where the method was tuned

Each training has its own process: a failure is reported, and the others continue. Running a study again trains only
the missing runs, so seeds, data sets and methods may be added later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch

from sparring.core import files, memory_usage
from sparring.core.devices import hardware, pick_device
from sparring.core.errors import UserError, one_line
from sparring.core.files import read_table
from sparring.core.locks import LOCK
from sparring.core.manifest import NAME as MANIFEST
from sparring.core.manifest import add_files, is_finished, read_manifest, write_manifest
from sparring.core.workers import Failure, Listener, Say, Task, Tasks, perform
from sparring.data.interactions import Split
from sparring.evaluation.metrics import parse
from sparring.evaluation.ranking import evaluate
from sparring.experiments.tuning import Trial, TuningResult, best, read_trials, tune
from sparring.recipes import finding, settings
from sparring.recipes.run import Run
from sparring.recipes.setup import Setup, flat_name, unknown_setting
from sparring.training.eligibility import listed_items
from sparring.training.fitting import METRICS, fit
from sparring.training.folder import SELECTION, difference, read_meta
from sparring.training.loop import TrainingProgress

# The files of a run that tables and pages read.
RESULTS = ("run.json", "metrics.jsonl", "result.json", "per_query.parquet", "measured.json")
# A trained run, its split and the device -> figures for a JSON file.
Measure = Callable[[Run, Split, str], dict[str, Any]]


@dataclass(frozen=True)
class Method:
    """A row of a study: its name, and the recipe with the settings, by flat name, that define it."""

    name: str
    recipe: str  # a name, or FILE.py:FUNCTION, so that a worker process finds it
    settings: Mapping[str, object] = field(default_factory=dict)
    folder_name: str = ""
    shift: int = 0  # added to every seed of its trials and trainings
    tau_unit: float = 1.0  # the temperature that is as sharp as 1 in other methods

    @property
    def folder(self) -> str:
        return self.folder_name or re.sub(r"[^a-z0-9.]+", "-", self.name.lower().replace("=-", " minus ")).strip("-")


@dataclass(frozen=True)
class Dataset:
    """A data set of a study: its split and its description for run.json, by seed. Both are sent to worker processes."""

    name: str
    split: Callable[[int], Split]
    source: Callable[[int], dict[str, Any]]
    cutoffs: Sequence[int]
    measure: Measure | None = None  # of each run as its training left it; for measured.json


@dataclass(frozen=True)
class Training:
    """The training of every method of a study. `base` and `setup` are those of `settings.build`."""

    base: Setup | None = None
    setup: Setup | None = None
    metrics: Sequence[str] = METRICS
    stages: bool = False  # train the classifiers and the fusion of a method that has them
    curve: Sequence[str] = ()  # metrics of the test part, at the first cutoff, recorded during training
    device: str = "auto"
    refit: bool = False  # train again on train and valid, for the epochs that validation chose
    results_only: bool = False  # delete the model and the checkpoint of a finished run


@dataclass(frozen=True)
class Study:
    """Methods trained on data sets with seeds.

    `tuning` says whose trials decide a method's settings: its own, or those of the first method of the data set.
    """

    out: Path
    data: Sequence[Dataset]
    methods: Mapping[str, Sequence[Method]]  # by data set
    seeds: Sequence[int]
    training: Training = Training()
    trials: int = 0
    tuning: Literal["each", "first"] = "each"
    taus: Sequence[float] = ()  # temperatures among the first trials
    after: Measure | None = None  # of finished runs, one at a time; for after.json
    alone: bool = False  # train one run at a time, so that times are comparable
    design: int = 0  # trials spread evenly over the search space, between the first ones and the sampler's
    rungs: Sequence[tuple[int, int]] = ()  # epochs, and how many of the best trials go on after them

    def folder(self, data: str, method: Method, seed: int) -> Path:
        return self.out / data / method.folder / str(seed)

    def runs(self, data: str, method: Method) -> list[FinishedRun]:
        """The finished runs of a method, by seed."""
        folders = (self.folder(data, method, seed) for seed in self.seeds)
        return [FinishedRun(folder) for folder in folders if finished(folder)]

    def all_runs(self) -> list[FinishedRun]:
        return [run for data in self.data for method in self.methods[data.name] for run in self.runs(data.name, method)]

    @property
    def total(self) -> int:
        """The number of trainings of the complete study."""
        return len(self.seeds) * sum(len(self.methods[data.name]) for data in self.data)

    def tuned_methods(self, data: str) -> list[Method]:
        """The methods of a data set that have their own trials."""
        methods = self.methods[data] if self.trials else ()
        return list(methods if self.tuning == "each" else methods[:1])

    def trials_path(self, data: str, method: Method) -> Path:
        return self.out / data / method.folder / "tune" / "trials.jsonl"

    def read_trials(self, data: str, method: Method) -> list[Trial]:
        return read_trials(self.trials_path(data, method))[: self.trials]

    def tuned(self, data: str, method: Method) -> TuningResult:
        """The best trial of a method; raises where every trial failed."""
        return best(method.name, self.read_trials(data, method))

    def tuned_settings(self, data: str, method: Method) -> dict[str, Any]:
        """The settings that tuning chose for a method, except those that define it; none where nothing is tuned."""
        if not self.trials:
            return {}
        decisive = method if self.tuning == "each" else self.methods[data][0]
        chosen = self.tuned(data, decisive).settings
        return {name: value for name, value in chosen.items() if name not in method.settings}


@dataclass(frozen=True)
class FinishedRun:
    """The files of one finished training."""

    folder: Path

    @property
    def seed(self) -> int:
        return int(self.folder.name)

    def path(self, name: str) -> Path:
        """The path of a file, after comparing it with the manifest of the run."""
        return read_manifest(self.folder, "delete its folder to train again").path(name)

    @cached_property
    def result(self) -> dict[str, Any]:
        return read_json(self.path("result.json"))

    @cached_property
    def measured(self) -> dict[str, Any]:
        return read_json(self.path("measured.json"))

    @cached_property
    def meta(self) -> dict[str, Any]:
        return read_meta(self.folder)

    @property
    def test_metrics(self) -> dict[str, float]:
        return dict(self.result["test"]["metrics"])

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """One record per epoch; of a refitted run those of the training that chose its epochs."""
        if "refit" in self.meta:
            return FinishedRun(self.folder / SELECTION).history
        path = self.path("metrics.jsonl")
        with one_line(f"{path} is corrupt", OSError, ValueError, then="delete its folder to train again"):
            return [json.loads(line) for line in path.read_text().splitlines()]

    def values(self, metric: str) -> np.ndarray:
        """(Q,) values of a metric, one per test query."""
        return query_values(read_table(self.path("per_query.parquet")), self.test_metrics, metric)


def query_values(per_query: pl.DataFrame, metrics: Mapping[str, float], metric: str) -> np.ndarray:
    """(Q,) values of a metric by query, scaled so that their mean is the reported one."""
    if metric not in per_query.columns:
        known = ", ".join(name for name in per_query.columns if name != "query")
        raise UserError(f"{metric} was not measured by the runs of this study; they have {known}")
    values = per_query[metric].to_numpy().astype(np.float64)
    if not parse(metric.split("@")[0]).over_all_queries or not values.mean() > 0:
        return values
    return values * (float(metrics[metric]) / values.mean())  # it divides by all queries, with test items or without


def finished(folder: Path, last: str = "measured.json") -> bool:
    """Whether a training has ended and the file that follows it is complete, which its manifest says.

    Where a result was deleted, it has not: deleting one is the way to train again.
    """
    there = all((folder / name).is_file() for name in ("result.json", last))
    return there and is_finished(folder) and last in read_manifest(folder).files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run folder."""
    return files.read_json(path, "delete its folder to train again")


def check_folder(
    out: Path,
    kind: str,
    fixed: Mapping[str, object],
    growing: Mapping[str, Mapping[str, object]],
    notes: Mapping[str, object],
) -> None:
    """Write study.json; raise if the folder holds another study.

    The values of `fixed` must stay. Each mapping of `growing` may gain names, and must keep the value of each name; an
    older folder may lack a mapping. `notes` are recorded and may change.
    """
    fixed, growing = (json.loads(json.dumps(part, default=str)) for part in (fixed, growing))
    path = out / "study.json"
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose another folder for the {kind}")
    if path.is_file():
        before = files.read_json(path)
        with one_line(f"{path} is corrupt", ValueError, KeyError, TypeError):
            old_kind, old_fixed, old_growing = before["kind"], before["fixed"], before["growing"]
        if old_kind != kind:
            raise UserError(f"{out} holds a {old_kind}: choose another folder for the {kind}")
        for name, value in fixed.items():
            if old_fixed.get(name) != value:
                change = difference(name, old_fixed.get(name), value)
                raise UserError(f"{out} was started {change}: choose another folder, or keep its settings")
        for part, values in growing.items():
            for name, value in values.items():
                if old_growing.get(part, {}).get(name, value) != value:
                    raise UserError(f"{out} was started with another {part} of {name}: choose another folder")
        growing = {part: {**old_growing.get(part, {}), **values} for part, values in growing.items()}
    elif out.is_dir() and any(path.name != LOCK for path in out.iterdir()):
        raise UserError(f"{out} is not empty and holds no {kind}: choose another folder")
    files.write_json(path, {"kind": kind, "fixed": fixed, "growing": growing, **notes})


def known_settings(recipe: str, asked: Mapping[str, object]) -> dict[str, object]:
    """The settings that a recipe has among those of a command, by flat name."""
    return {flat_name(name): value for name, value in settings.known(finding.find(recipe), asked).items()}


def check_settings(
    asked: Mapping[str, object], methods: Sequence[Method], kind: str, seeds: str, setup: Setup | None
) -> None:
    """Raise before any training if a setting is unknown to every method, or a method's settings are invalid."""
    recipes = {method.recipe: finding.find(method.recipe) for method in methods}
    known = {name for each in methods for name in settings.known(recipes[each.recipe], {**asked, **_model(each)})}
    for name in asked:
        if flat_name(name) == "seed":
            raise UserError(f"seed cannot be set: a {kind} uses the seeds {seeds} (--seeds N)")
        if name not in known and methods:
            own = [argument for recipe in recipes.values() for argument in settings.own_arguments(recipe)]
            raise UserError(f"no method of this {kind} has it: {unknown_setting(name, own)}")
    for method in methods:
        settings.resolve(recipes[method.recipe], method.settings, setup)


def _model(method: Method) -> dict[str, object]:
    """The model of a method, as a setting, if it names one."""
    return {name: value for name, value in method.settings.items() if name == "model"}


def run(study: Study, jobs: int = 1, listener: Listener | None = None) -> list[Failure]:
    """Tune, train and measure unfinished runs; return the failures."""
    listener = listener or Listener()
    failures = _tune(study, jobs, listener) if study.trials else []
    if not study.total:
        return failures
    failures += perform(_trainings(study), study.total, "training", 1 if study.alone else jobs, listener)
    if study.after is not None:
        failures += perform(_measurements(study, study.after), study.total, "measuring", 1, listener)
    return failures


def _tune(study: Study, jobs: int, listener: Listener) -> list[Failure]:
    tasks: Tasks = {}
    tuned = [(data, method) for data in study.data for method in study.tuned_methods(data.name)]
    for data, method in tuned:
        if len(study.read_trials(data.name, method)) < study.trials:
            work = (study, data, method)
            tasks[data.name, method.name, "tuning"] = Task(f"{data.name} {method.name} tuning", _tune_one, work)
    failures = perform(tasks, len(tuned), "tuning", jobs, listener)
    failed = {(failure.data, failure.recipe) for failure in failures}
    for data, method in tuned:
        try:
            study.tuned(data.name, method)
        except UserError as error:  # also where all trials failed in an earlier call
            if (data.name, method.name) not in failed:
                failures.append(Failure(data.name, method.name, "tuning", str(error)))
    return failures


def _each(study: Study) -> Iterator[tuple[Dataset, Method, int]]:
    """Seed by seed, so that an interrupted study has about as many seeds of every method."""
    return ((data, method, seed) for seed in study.seeds for data in study.data for method in study.methods[data.name])


def _trainings(study: Study) -> Tasks:
    tasks: Tasks = {}
    for data, method, seed in _each(study):
        folder = study.folder(data.name, method, seed)
        if finished(folder):
            continue
        try:
            chosen = {**method.settings, **study.tuned_settings(data.name, method)}
        except UserError:  # already reported as a failure of tuning
            continue
        work = (folder, data, replace(method, settings=chosen), seed, study.training)
        tasks[data.name, method.name, f"seed {seed}"] = Task(f"{data.name} {method.name} seed {seed}", _train_one, work)
    return tasks


def _measurements(study: Study, after: Measure) -> Tasks:
    tasks: Tasks = {}
    for data, method, seed in _each(study):
        folder = study.folder(data.name, method, seed)
        if finished(folder) and not finished(folder, "after.json"):
            work = (folder, data, method, seed, study.training, after)
            tasks[data.name, method.name, f"measuring seed {seed}"] = Task(
                f"{data.name} {method.name} seed {seed}", _measure_one, work
            )
    return tasks


def _tune_one(say: Say, study: Study, data: Dataset, method: Method) -> None:
    tune(
        method.recipe,
        data.split(0),
        study.trials,
        study.trials_path(data.name, method).parent,
        base=study.training.base or study.training.setup,
        fixed=method.settings,
        device=study.training.device,
        seed=method.shift,
        taus=study.taus,
        unit=method.tau_unit,
        design=study.design,
        rungs=study.rungs,
        say=say,
    )


def run_cell(say: Say, study: Study, data: Dataset, method: Method) -> None:
    """Tune one method on one data set and train it with the seeds; trials and runs that exist are kept."""
    if study.trials:
        _tune_one(say, study, data, method)
    chosen = replace(method, settings={**method.settings, **study.tuned_settings(data.name, method)})
    for seed in study.seeds:
        if not finished(place := study.folder(data.name, method, seed)):
            _train_one(say, place, data, chosen, seed, study.training)


def _build(method: Method, split: Split, seed: int, training: Training) -> Run:
    chosen = {**method.settings, "seed": seed + method.shift}
    run = settings.build(method.recipe, split.train, chosen, training.base, setup=training.setup)
    return run if training.stages else replace(run, setup=run.setup.replaced(clf_epochs=0))


def _train_one(say: Say, folder: Path, data: Dataset, method: Method, seed: int, training: Training) -> None:
    split = data.split(seed)
    built = _build(method, split, seed, training)
    device, before = pick_device(training.device), memory_usage.resident_bytes()
    peak: int | None = None

    def epoch(record: dict[str, Any]) -> None:
        nonlocal peak  # of training and its validation, before the test and the measurements
        on_gpu = device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else memory_usage.peak_bytes() - before
        number, setup = record["epoch"], built.setup
        measured = number in (1, setup.training.epochs_on(device.type)) or number % setup.validation.eval_every == 0
        if training.curve and measured:
            record |= _test_metrics(built, split, data.cutoffs[0], training.curve)  # for metrics.jsonl
        say(record)

    fitted = fit(
        built,
        split,
        folder,
        resume=True,
        device=training.device,
        k=data.cutoffs,
        metrics=training.metrics,
        progress=TrainingProgress(epoch=epoch),
        source=data.source(seed),
        refit=training.refit,
    )
    trained_on = split.joined() if training.refit else split
    more = data.measure(fitted.run, trained_on, training.device) if data.measure is not None else {}
    files.write_json(folder / "measured.json", {"peak_bytes": peak, "device": hardware(device), **more})
    add_files(folder, "measured.json")
    if training.results_only:
        _keep_results(folder)


def _keep_results(folder: Path) -> None:
    """Delete every file of a finished run but its description and its results; a kill leaves it finished."""
    write_manifest(folder, names=(), keep=RESULTS)
    for path in folder.iterdir():
        if path.is_file() and path.name not in (*RESULTS, MANIFEST, LOCK):
            path.unlink()


def _measure_one(
    say: Say, folder: Path, data: Dataset, method: Method, seed: int, training: Training, after: Measure
) -> None:
    split = data.split(seed)
    built = _build(method, split, seed, training)
    path = folder / "model.safetensors"
    files.load_tensors(built.model, read_manifest(folder).tensors(path.name)[0], path)
    files.write_json(folder / "after.json", after(built, split, training.device))
    add_files(folder, "after.json")


def _test_metrics(built: Run, split: Split, cutoff: int, metrics: Sequence[str]) -> dict[str, float]:
    assert split.test is not None
    device = next(built.model.parameters()).device
    seen, among = split.seen_for("test").to(device), listed_items(built.model, split.train)
    evaluation = evaluate(built.model, split.test, seen, (cutoff,), metrics, among=among)
    return {f"test_{name}": value for name, value in evaluation.metrics.items()}
