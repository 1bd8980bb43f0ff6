"""The trainings of a reproduction: what is missing is run in processes of its own, what failed is told, nothing is run twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparring.core import files, workers
from sparring.core.devices import hardware
from sparring.core.errors import UserError
from sparring.core.workers import Failure, Listener, Tasks, perform
from sparring.data.interactions import Split
from sparring.experiments.comparison import finished
from sparring.experiments.papers import clusterings
from sparring.experiments.papers.plan import CUTOFFS, METRICS, Given, Measure, Method, Plan, Protocol
from sparring.recipes import finding, settings
from sparring.recipes.run import Run
from sparring.recipes.setup import Setup, find_setting, flat_name, unknown_setting
from sparring.training import folder as run_folder


def check(plan: Plan) -> None:
    """Refuse, before anything is trained, what could not be run or would not fit what is in the folder."""
    for given in plan.data:
        if sum(given.shown == other.shown for other in plan.data) > 1:
            raise UserError(f"two of the data sets are {given.shown}: give each once")
    methods = [method for each in plan.methods.values() for method in each]
    own = {name for method in methods for name in settings.own_arguments(finding.find(method.recipe))}
    for name in plan.settings:
        if flat_name(name) == "seed":
            raise UserError("seed cannot be set: a reproduction uses the seeds 10, 20, ... (--seeds N)")
        if flat_name(name) in plan.experiment.chosen:
            raise UserError(f"{name} cannot be set: {plan.experiment.name} sets it itself")
        if name not in own and find_setting(name) is None and methods:
            raise UserError(f"no method of {plan.experiment.name} knows it: {unknown_setting(name, own)}")
    for method in methods:
        settings.resolve(finding.find(method.recipe), method.settings, plan.experiment.setup)
    if plan.trials and plan.experiment.tuning == "none":
        raise UserError(
            f"{plan.experiment.name} keeps the setting of its paper: --tune is for `sparring compare` and the quality of ESANS"
        )
    _check_same(plan)


def _check_same(plan: Plan) -> None:
    """A folder may grow by seeds and data; experiment, settings and each data set must stay."""
    now: dict[str, Any] = {
        "experiment": plan.experiment.name,
        "settings": plan.settings,
        "trials": plan.trials,
        "modalities": {given.name: clusterings.asked(given) for given in plan.data if given.catalogue is not None},
        "data": {given.name: given.source or _sizes(given) for given in plan.data},
    }
    now = json.loads(json.dumps(now, default=str))
    path = plan.out / "reproduction.json"
    if plan.out.exists() and not plan.out.is_dir():
        raise UserError(f"{plan.out} is a file: choose another folder for the reproduction")
    if path.is_file():
        try:
            before = json.loads(path.read_text())
            old = before["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is corrupt: {str(error).splitlines()[0]}") from error
        if before.get("experiment") != now["experiment"]:
            raise UserError(
                f"{plan.out} holds {before.get('experiment')}: choose another folder for {now['experiment']}"
            )
        if before.get("settings") != now["settings"]:
            what = run_folder.difference("settings", before.get("settings"), now["settings"])
            raise UserError(f"{plan.out} was begun {what}: choose another folder, or ask for the same as then")
        trials = before.get("trials", 0)
        if trials != now["trials"]:
            raise UserError(
                f"{plan.out} was begun with {trials} trials of tuning, not {now['trials']}: choose another folder"
            )
        for part, older, words in (
            ("data", old, ""),
            ("modalities", before.get("modalities", {}), "other modalities of "),
        ):
            for name, source in now[part].items():
                if older.get(name, source) != source:
                    raise UserError(f"{plan.out} was begun with {words or 'another '}{name}: choose another folder")
            now[part] = {**older, **now[part]}
    elif plan.out.is_dir() and any(plan.out.iterdir()):
        raise UserError(f"{plan.out} is not empty and holds no reproduction: choose another folder")
    files.write_json(path, {**now, "seeds": plan.seeds})


def _sizes(given: Given) -> dict[str, int]:
    return {"queries": given.data.n_queries, "items": given.data.n_items, "interactions": len(given.data)}


def train(plan: Plan, jobs: int = 1, listener: Listener | None = None) -> list[Failure]:
    """Train all that is missing, then measure what is measured after it; what failed, which plan.failures holds too."""
    listener = listener or Listener()
    check(plan)
    experiment = plan.experiment
    total = len(plan.seeds) * sum(map(len, plan.methods.values()))
    plan.failures.extend(clusterings.learn(plan, jobs, listener))
    plan.failures.extend(_tune(plan, jobs, listener))
    if total:
        plan.failures.extend(perform(_tasks(plan), total, "training", 1 if experiment.alone else jobs, listener))
    if total and experiment.after is not None:
        plan.failures.extend(perform(_measurements(plan), total, "measuring", 1, listener))
    return plan.failures


def _each(plan: Plan) -> list[tuple[Given, Method, int]]:
    """Seed by seed, so that an early stop leaves every method on every data set with about as many."""
    return [(given, method, seed) for seed in plan.seeds for given in plan.data for method in plan.methods[given.name]]


def _tune(plan: Plan, jobs: int, listener: Listener) -> list[Failure]:
    """Tune what is to be tuned and is not yet; the methods that tuning found nothing for."""
    from sparring.experiments.tuning import read_trials

    if not plan.trials:
        return []
    experiment, tasks, wanted = plan.experiment, {}, []
    for given in plan.data:
        for by in plan.tuned_methods(given):
            wanted.append((given, by))
            folder = plan.tuning_folder(given, by)
            if len(read_trials(folder / "trials.jsonl")) < plan.trials:
                work = (
                    experiment.protocol,
                    given,
                    by,
                    plan.trials,
                    folder,
                    experiment.setup,
                    experiment.taus,
                    plan.device,
                )
                tasks[given.name, by.name, "tuning"] = workers.Task(f"{given.name} {by.name} tuning", _tune_one, work)
    failures = perform(tasks, len(wanted), "tuning", jobs, listener)
    for given, by in wanted:
        try:
            plan.tuned(given, by)
        except UserError as error:
            if not any((bad.data, bad.recipe) == (given.name, by.name) for bad in failures):
                failures.append(Failure(given.name, by.name, "tuning", str(error)))
    return failures


def _tune_one(
    say: workers.Say,
    protocol: Protocol,
    given: Given,
    method: Method,
    trials: int,
    folder: Path,
    setup: Setup,
    taus: Sequence[float],
    device: str,
) -> None:
    from sparring.experiments.tuning import tune

    parts, fixed = protocol.parts(given.data, 0), method.settings
    tune(method.recipe, parts, trials, folder, base=setup, fixed=fixed, device=device, taus=taus, say=say)


def _tasks(plan: Plan) -> Tasks:
    tasks: Tasks = {}
    experiment = plan.experiment
    for given, method, seed in _each(plan):
        folder = plan.folder(given, method, seed)
        if not finished(folder):
            try:
                asked = replace(method, settings={**plan.tuned(given, method), **method.settings})
            except UserError:  # told as a failure of tuning
                continue
            measured = (experiment.curve, experiment.measure)
            work = (folder, given, asked, seed, experiment.setup, experiment.protocol, *measured, plan.device)
            tasks[given.name, method.name, f"seed {seed}"] = workers.Task(
                f"{given.name} {method.name} seed {seed}", _train_one, work
            )
    return tasks


def _measurements(plan: Plan) -> Tasks:
    tasks: Tasks = {}
    for given, method, seed in _each(plan):
        folder = plan.folder(given, method, seed)
        if finished(folder) and not (folder / "after.json").is_file():
            work = (
                folder,
                given,
                method,
                seed,
                plan.experiment.setup,
                plan.experiment.protocol,
                plan.experiment.after,
                plan.device,
            )
            tasks[given.name, method.name, f"measuring seed {seed}"] = workers.Task(
                f"{given.name} {method.name} seed {seed}", _measure_one, work
            )
    return tasks


def _train_one(
    say: workers.Say,
    folder: Path,
    given: Given,
    method: Method,
    seed: int,
    setup: Setup,
    protocol: Protocol,
    curve: bool,
    measure: Measure | None,
    device: str,
) -> None:
    from sparring.core.devices import pick_device
    from sparring.training.fitting import Progress
    from sparring.training.stages import fit_stages

    parts = protocol.parts(given.data, seed)
    run = settings.build(method.recipe, parts.train, {**method.settings, "seed": seed}, setup=setup)
    where = pick_device(device)

    def epoch(record: dict[str, Any]) -> None:
        number = record["epoch"]
        if curve and (
            number == 1 or number % run.setup.validation.eval_every == 0 or number == run.setup.training.epochs
        ):
            record |= _test_metrics(run, parts)  # the record is the one that metrics.jsonl and the checkpoint get
        say(record)

    k = protocol.within(given.data)
    source = {**given.source, "split": protocol.recorded(seed), "k": k}
    progress = Progress(epoch=epoch)
    fit_stages(
        run, parts, folder, resume=True, device=device, k=k, metrics=protocol.metrics, progress=progress, source=source
    )
    measured = {"device": hardware(where)}
    files.write_json(folder / "measured.json", measured | (measure(run, parts, device) if measure else {}))


def _measure_one(
    say: workers.Say,
    folder: Path,
    given: Given,
    method: Method,
    seed: int,
    setup: Setup,
    protocol: Protocol,
    after: Measure,
    device: str,
) -> None:
    parts = protocol.parts(given.data, seed)
    run = settings.build(method.recipe, parts.train, {**method.settings, "seed": seed}, setup=setup)
    path = folder / "model.safetensors"
    files.load_tensors(run.model, files.read_tensors(path)[0], path)
    files.write_json(folder / "after.json", after(run, parts, device))


def _test_metrics(run: Run, parts: Split) -> dict[str, float]:
    from sparring.core.types import Positives
    from sparring.evaluation.ranking import evaluate

    assert parts.test is not None
    device = next(run.model.parameters()).device
    seen = parts.seen_for("test")
    k = min(CUTOFFS[0], parts.train.n_items)
    found = evaluate(run.model, parts.test, Positives(seen.start.to(device), seen.items.to(device)), (k,), METRICS)
    return {f"test_{name}": value for name, value in found.metrics.items()}
