"""Equal tuning: the same number of trials for every recipe.

After tuning, methods differ in their negatives and losses, not in how many learning rates their authors tried. Trials
are scored on the validation part alone and never receive the test part. The first trial has the recipe's defaults, the
second the shared settings at values known to be strong, the next two half and twice its temperature; search_space.py
defines the ranges. A failed trial counts: a method that diverges easily gets no extra trials.

Rungs prune trials by one rule for all methods (successive halving): with rungs ((8, 7), (24, 2)) every trial trains 8
epochs, the best 7 are trained for 24, and the best 2 of those until their training ends by itself. A method that learns
slowly may lose a good setting at a low rung, so pages name the rungs.

    Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sparring.core import files
from sparring.core.errors import UserError, first_line, one_line
from sparring.core.extras import optional
from sparring.data.interactions import Split
from sparring.experiments.search_space import OneOf, Range, first_trials, in_unit, space, space_filling
from sparring.recipes.finding import Recipe, named
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress

RANDOM = 4  # trials before the sampler learns from earlier ones
TUNING_SEED = 10_000  # of every trial; final runs use 0, 1, ..., so none of them was tuned for


@dataclass(frozen=True)
class Trial:
    """The settings of one trial, and its best validation score or the reason why there is none.

    `rung` says how often it was among the best that go on; the value is that of its last training, which had `epochs`.
    """

    number: int
    settings: dict[str, Any]
    value: float | None
    seconds: float
    error: str | None = None
    epochs: int = 0
    rung: int = 0

    @property
    def scored(self) -> bool:
        return self.value is not None and math.isfinite(self.value)

    @property
    def order(self) -> tuple[float, int]:
        """Sorts scored trials: the best last, the earlier in a tie."""
        assert self.value is not None
        return self.value, -self.number


@dataclass(frozen=True)
class TuningResult:
    """The best settings, their validation score, and every trial."""

    settings: dict[str, Any]
    value: float
    trials: tuple[Trial, ...]

    @property
    def failed(self) -> int:
        return sum(trial.error is not None for trial in self.trials)


def tune(
    recipe: str | Recipe,
    split: Split,
    trials: int,
    folder: str | Path,
    *,
    base: Setup | None = None,
    fixed: Mapping[str, object] | None = None,
    device: str = "auto",
    seed: int = 0,
    taus: Sequence[float] = (),
    unit: float = 1.0,
    design: int = 0,
    rungs: Sequence[tuple[int, int]] = (),
    say: Callable[[Trial], None] = lambda trial: None,
) -> TuningResult:
    """Try `trials` settings of a recipe on the validation part and return the best; resumes an interrupted call.

    After the first two trials come the second's settings at the temperatures `taus` (half and twice its own by
    default), `design` settings spread evenly over the space, then the sampler's choices. `unit` is the temperature that
    is as sharp as 1 in other methods, and scales every temperature that is tried. Each rung (epochs, kept) ends the
    trainings of its trials after that many epochs and lets the best `kept` go on. They are trained anew, unless they
    had ended by themselves. Each trial is a line of FOLDER/trials.jsonl. The sampler (TPE) is seeded with (seed, trial
    number) and reads the earlier trials, so a resumed call ends exactly like an uninterrupted one. Needs the extra
    `tune` (Optuna).

        tune("xir", split, 20, "compare/a/tune").settings

    Akiba et al., Optuna: A Next-generation Hyperparameter Optimization Framework, KDD 2019.
    """
    optuna = require_optuna()
    if split.valid is None:
        raise UserError("tuning needs a validation part, and the split has none: use --valid with a share above 0")
    path, fixed = Path(folder) / "trials.jsonl", fixed or {}
    plain = space(recipe, fixed, base)
    choices = in_unit(plain, unit)
    trials = trials if choices else 1  # more would be equal
    distributions = {name: _distribution(optuna, entry) for name, entry in choices.items()}
    done = read_trials(path)
    for trial in done:
        if trial.settings.keys() != choices.keys():
            tuned, now = ", ".join(trial.settings), ", ".join(choices)
            raise UserError(f"{path} holds trials over {tuned}, not {now}: choose another folder")
    parts = Split(split.train, split.valid, None)
    first = first_trials(recipe, plain, parts.train, base, fixed, taus)
    first = [{**trial, "tau": unit * trial["tau"]} if "tau" in trial else trial for trial in first]
    first += space_filling(choices, design, seed)
    rungs = [(epochs, kept) for epochs, kept in rungs if kept < trials]
    limits = [*(epochs for epochs, _ in rungs), None]

    def trained(trial: Trial) -> Trial:
        """The trial after a training up to the limit of its rung."""
        started, limit = time.perf_counter(), limits[trial.rung]
        epochs, value, error = list[object](), None, None
        counting = TrainingProgress(epoch=epochs.append, stop=lambda: limit is not None and len(epochs) >= limit)
        try:
            run = build(recipe, parts.train, {**fixed, **trial.settings, "seed": TUNING_SEED + seed}, base)
            towers = replace(run, setup=run.setup.replaced(clf_epochs=0))  # trials are judged by the towers alone
            history = fit(towers, parts, device=device, progress=counting).history
            select = run.setup.validation.select
            value = max(float(record[select]) for record in history if select in record)
        except (ValueError, RuntimeError, ArithmeticError, MemoryError) as failure:
            error = first_line(failure)
        seconds = round(trial.seconds + time.perf_counter() - started, 3)
        return replace(trial, value=value, seconds=seconds, error=error, epochs=len(epochs))

    def keep(trial: Trial) -> None:
        done[trial.number :] = [trial, *done[trial.number + 1 :]]
        files.write_text(path, "".join(json.dumps(asdict(each)) + "\n" for each in done))

    while len(done) < trials:
        number = len(done)
        settings = _ask(optuna, done, distributions, seed, first[number] if number < len(first) else {})
        keep(trained(Trial(number, settings, None, 0.0)))
        say(done[-1])
    done = done[:trials]
    for rung, (epochs, kept) in enumerate(rungs, 1):
        while sum(trial.rung >= rung for trial in done) < kept:
            waiting = [trial for trial in done if trial.rung == rung - 1 and trial.scored]
            if not waiting:
                break
            chosen = max(waiting, key=lambda trial: trial.order)
            risen = replace(chosen, rung=rung)
            keep(risen if chosen.epochs < epochs else trained(risen))
    return best(named(recipe), done)


def best(recipe: str, trials: list[Trial]) -> TuningResult:
    """The best of the trials that went furthest, the earliest in a tie."""
    scored = [trial for trial in trials if trial.scored]
    if not scored:
        last = trials[-1].error if trials else "none was made"
        raise UserError(f"all {len(trials)} trials of {recipe} failed; the last: {last}")
    winner = max(scored, key=lambda trial: (trial.rung, trial.order))
    assert winner.value is not None
    return TuningResult(winner.settings, winner.value, tuple(trials))


def read_trials(path: Path) -> list[Trial]:
    """The trials of a file; none where the file does not exist."""
    if not path.is_file():
        return []
    with one_line(f"{path} is corrupt", ValueError, TypeError, then="delete it to tune again"):
        return [Trial(**json.loads(line)) for line in path.read_text().splitlines()]


def _ask(
    optuna: Any, done: list[Trial], distributions: dict[str, Any], seed: int, preset: dict[str, Any]
) -> dict[str, Any]:
    """The settings of the next trial: `preset`, completed by the sampler, which knows the earlier trials."""
    sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=seed * 1_000_003 + len(done))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    states = optuna.trial.TrialState
    for trial in done:
        state = states.FAIL if trial.value is None else states.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(
                params=trial.settings, distributions=distributions, value=trial.value, state=state
            )
        )
    if preset:
        study.enqueue_trial(preset)
    return dict(study.ask(distributions).params)


def _distribution(optuna: Any, entry: Range | OneOf) -> Any:
    kinds = optuna.distributions
    if isinstance(entry, OneOf):
        return kinds.CategoricalDistribution(entry.values)
    if entry.whole:
        return kinds.IntDistribution(int(entry.low), int(entry.high), log=entry.log)
    return kinds.FloatDistribution(entry.low, entry.high, log=entry.log)


def require_optuna() -> Any:
    """Optuna with its log silenced; raises an error that names the extra where it is not installed."""
    optuna = optional("optuna", "tune", "tuning")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna
