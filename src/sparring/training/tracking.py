"""Trackers: the settings, epochs and test metrics of a training in Weights & Biases, MLflow, TensorBoard or trackio.

Each client is an extra and reads its own environment variables, such as WANDB_MODE or MLFLOW_TRACKING_URI. A client
that fails during a training is left out with a warning; the training goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.core.choices import TRACKERS
from sparring.core.errors import UserError, did_you_mean, first_line, one_line
from sparring.core.extras import optional
from sparring.training.loop import TrainingProgress

log = logging.getLogger(__name__)
_PARAMS = 100  # that one request to MLflow may hold
_LENGTH = 500  # characters of a parameter that every MLflow server takes


@dataclass(frozen=True)
class Tracked:
    """A run of a tracker: `log` takes numbers by name and a step, `close` whether the training has succeeded."""

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[bool], None]


def track(
    name: str, folder: str | Path | None = None, *, project: str = "sparring", run: str | None = None
) -> TrainingProgress:
    """Callbacks that send a training to a tracker: wandb, mlflow, tensorboard or trackio.

    `folder` is the run folder: its name is the name of the run unless `run` is given, and TensorBoard's files are in
    FOLDER/tensorboard. Steps are epochs. The `@` of a metric becomes `_at_`, as some trackers require.

        sparring.fit(built, parts, "runs/first", callbacks=[track("wandb", "runs/first")])
    """
    if name not in TRACKERS:
        raise UserError(f"no tracker called {name!r}{did_you_mean(name, TRACKERS)}; choose from {', '.join(TRACKERS)}")
    place = None if folder is None else Path(folder)
    title = run or (place.resolve().name if place is not None else "run")
    open_run = _OPENERS[name](project, title, place)  # raises here if the client is not installed
    tracked: Tracked | None = None
    stage, last, before = "", 0, 0  # the steps of a stage follow those of the one before

    def sent(act: Callable[[Tracked], None]) -> None:
        nonlocal tracked
        if tracked is None:
            return
        try:
            act(tracked)
        except Exception as error:
            log.warning("%s is left out from here on: %s", name, first_line(error))
            tracked = None

    def begin(settings: Mapping[str, Any]) -> None:
        nonlocal tracked
        with one_line(f"cannot open a run of {name}", Exception):
            tracked = open_run(settings)

    def staged(name: str) -> None:
        nonlocal stage, before
        stage, before = f"{name}/" if name else "", last

    def epoch(record: Mapping[str, Any]) -> None:
        nonlocal last
        values = numbers({name: value for name, value in record.items() if name != "epoch"}, stage)
        last = before + int(record["epoch"])
        sent(lambda to: to.log(values, last))

    def end(metrics: Mapping[str, float] | None) -> None:
        nonlocal tracked
        if metrics:
            sent(lambda to: to.log(numbers(metrics, "test/"), last))
        sent(lambda to: to.close(metrics is not None))
        tracked = None

    return TrainingProgress(begin=begin, stage=staged, epoch=epoch, end=end)


def numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record by names that every tracker takes."""
    return {
        f"{prefix}{name.replace('@', '_at_')}": float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


# A tracker: a function that finds its client and returns one that opens a run with settings

Opener = Callable[[Mapping[str, Any]], Tracked]


def _wandb(project: str, title: str, folder: Path | None) -> Opener:
    wandb = optional("wandb", "wandb", "the tracker wandb")

    def opened(settings: Mapping[str, Any]) -> Tracked:
        run = wandb.init(project=project, name=title, config=dict(settings), reinit="create_new")
        return Tracked(lambda values, step: run.log(dict(values), step=step), lambda done: run.finish(int(not done)))

    return opened


def _mlflow(project: str, title: str, folder: Path | None) -> Opener:
    mlflow = optional("mlflow", "mlflow", "the tracker mlflow")
    from mlflow.entities import Metric, Param

    def opened(settings: Mapping[str, Any]) -> Tracked:
        client = mlflow.MlflowClient()  # not the active run of the process, which may be the user's
        found = client.get_experiment_by_name(project)
        experiment = client.create_experiment(project) if found is None else found.experiment_id
        run = client.create_run(experiment, run_name=title).info.run_id
        params = [Param(name, str(value)[:_LENGTH]) for name, value in settings.items()]
        for start in range(0, len(params), _PARAMS):
            client.log_batch(run, params=params[start : start + _PARAMS])

        def write(values: Mapping[str, float], step: int) -> None:
            now = int(time.time() * 1000)
            client.log_batch(run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

        return Tracked(write, lambda done: client.set_terminated(run, "FINISHED" if done else "FAILED"))

    return opened


def _trackio(project: str, title: str, folder: Path | None) -> Opener:
    trackio = optional("trackio", "trackio", "the tracker trackio")

    def opened(settings: Mapping[str, Any]) -> Tracked:
        run = trackio.init(project=project, name=title, config=dict(settings))
        return Tracked(lambda values, step: run.log(dict(values), step=step), lambda done: run.finish())

    return opened


def _tensorboard(project: str, title: str, folder: Path | None) -> Opener:
    tensorboard = optional("torch.utils.tensorboard", "tensorboard", "the tracker tensorboard")
    place = Path(project) / title if folder is None else folder / "tensorboard"

    def opened(settings: Mapping[str, Any]) -> Tracked:
        writer: Any = None

        def ready() -> Any:
            nonlocal writer
            if writer is None:  # it creates the folder, and the run folder must be empty when training starts
                writer = tensorboard.SummaryWriter(str(place))
                rows = [f"| {name} | {value} |" for name, value in settings.items()]
                writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))
            return writer

        def write(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                ready().add_scalar(name, value, step)
            writer.flush()

        return Tracked(write, lambda done: ready().close())

    return opened


_OPENERS: dict[str, Callable[[str, str, Path | None], Opener]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
    "trackio": _trackio,
}
assert set(_OPENERS) == set(TRACKERS)
