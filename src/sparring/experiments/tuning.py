"""The same budget for every recipe: N trials each of learning rate, temperature, weight decay and what the method itself leaves open.

What is compared after tuning differs in its negatives and losses, not in whose author tried more learning rates. Trials are scored on the
validation part alone; the test part is not even handed to them. The first trial is the recipe as it comes, the second has what all recipes
share at values known to be strong, the next two have half and twice its temperature; over what is tuned, space.py says. A trial that fails
counts: a method that diverges easily must not get more tries than one that does not.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.experiments.search_space import OneOf, Range, begin, space, untuned
from sparring.recipes.finding import Recipe, named
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup
from sparring.training.fitting import fit

__all__ = ["OneOf", "Range", "Trial", "Tuned", "best", "read_trials", "require_optuna", "space", "tune", "untuned"]

RANDOM = 4  # trials before the sampler starts to learn from those before
TUNING_SEED = 10_000  # of every trial; the final runs count from 0, so that none of them was tuned for


@dataclass(frozen=True)
class Trial:
    """One try: its settings, and its best validation score or why there is none."""

    number: int
    settings: dict[str, Any]
    value: float | None
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class Tuned:
    """The best settings found, their validation score, and every trial."""

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
    say: Callable[[Trial], None] = lambda trial: None,
) -> Tuned:
    """Try `trials` settings of a recipe on the validation part and return the best; goes on where an earlier call stopped.

    The trials after the second are the second at the temperatures `taus` (half and twice its own where none are given), then of the
    sampler's choice. Each finished trial is a line of FOLDER/trials.jsonl. The sampler (TPE) starts each trial from (seed, number of the
    trial) and the trials before it, so a study that was stopped ends exactly as one that was not. Needs the extra `tune` (Optuna).

        tune("xir", split, 20, "compare/a/tune").settings

    Akiba et al., Optuna: A Next-generation Hyperparameter Optimization Framework, KDD 2019.
    """
    optuna = require_optuna()
    if split.valid is None:
        raise UserError("tuning needs a validation part, and the split has none: use --valid with a share above 0")
    path = Path(folder) / "trials.jsonl"
    choices = space(recipe, fixed, base)
    distributions = {name: _distribution(optuna, entry) for name, entry in choices.items()}
    done = read_trials(path)
    for trial in done:
        if trial.settings.keys() != choices.keys():
            raise UserError(
                f"{path} holds trials over {', '.join(trial.settings)}, not {', '.join(choices)}: choose another folder"
            )
    parts = Split(split.train, split.valid, None)
    while len(done) < trials:
        number = len(done)
        settings = _ask(
            optuna,
            done,
            distributions,
            number,
            seed,
            begin(number, recipe, choices, parts.train, base, fixed or {}, taus),
        )
        began = time.perf_counter()
        value, error = None, None
        try:
            run = build(recipe, parts.train, {**(fixed or {}), **settings, "seed": TUNING_SEED}, base)
            history = fit(run, parts, device=device).history
            value = max(
                float(record[run.setup.validation.select])
                for record in history
                if run.setup.validation.select in record
            )
        except (ValueError, RuntimeError, ArithmeticError, MemoryError) as failure:
            error = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        done.append(Trial(number, settings, value, round(time.perf_counter() - began, 3), error))
        lines = "".join(json.dumps(asdict(trial)) + "\n" for trial in done)
        files.write(path, lambda file, lines=lines: file.write_text(lines))  # type: ignore[misc]
        say(done[-1])
    return best(named(recipe), done[:trials])


def best(recipe: str, trials: list[Trial]) -> Tuned:
    """The best of the trials; of equal ones the first."""
    scored = [trial for trial in trials if trial.value is not None and math.isfinite(trial.value)]
    if not scored:
        raise UserError(
            f"all {len(trials)} trials of {recipe} failed; the last: {trials[-1].error if trials else 'none was made'}"
        )
    winner = max(scored, key=lambda trial: (trial.value, -trial.number))
    assert winner.value is not None
    return Tuned(winner.settings, winner.value, tuple(trials))


def read_trials(path: Path) -> list[Trial]:
    """The trials of a file, none where there is no file."""
    if not path.is_file():
        return []
    try:
        return [Trial(**json.loads(line)) for line in path.read_text().splitlines()]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is corrupt: {str(error).splitlines()[0]}; delete it to tune again") from error


def _ask(
    optuna: Any, done: list[Trial], distributions: dict[str, Any], number: int, seed: int, given: dict[str, Any]
) -> dict[str, Any]:
    """The settings of the next trial, given those before it, and some of its own."""
    sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=seed * 1_000_003 + number)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    states = optuna.trial.TrialState
    for trial in done:
        state = states.FAIL if trial.value is None else states.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(
                params=trial.settings, distributions=distributions, value=trial.value, state=state
            )
        )
    if given:
        study.enqueue_trial(given)
    return dict(study.ask(distributions).params)


def _distribution(optuna: Any, entry: Range | OneOf) -> Any:
    kinds = optuna.distributions
    if isinstance(entry, OneOf):
        return kinds.CategoricalDistribution(entry.values)
    if entry.whole:
        return kinds.IntDistribution(int(entry.low), int(entry.high), log=entry.log)
    return kinds.FloatDistribution(entry.low, entry.high, log=entry.log)


def require_optuna() -> Any:
    """Optuna, quiet; an error that names the extra where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UserError('tuning needs Optuna: pip install "sparring[tune]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna
