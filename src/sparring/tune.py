"""The same budget for every recipe: N trials each of learning rate, temperature, weight decay and what the method itself leaves open.

What is compared after tuning differs in its negatives and losses, not in whose author tried more learning rates. Trials are scored on the
validation part alone; the test part is not even handed to them. The first trial is the recipe as it comes, the second has what
all recipes share at values known to be strong. A trial that fails counts: a
method that diverges easily must not get more tries than one that does not.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from sparring import disk
from sparring.composition import Setup, tau_of
from sparring.data.interactions import Interactions, Split
from sparring.errors import UserError
from sparring.pretrained import is_bag
from sparring.recipes import RECIPES
from sparring.recipes.finding import Recipe
from sparring.settings import build, find, named, own_arguments, parse, resolve
from sparring.train import fit

RANDOM = 6  # trials before the sampler starts to learn from those before
TUNING_SEED = 10_000  # of every trial; the final runs count from 0, so that none of them was tuned for


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, evenly or by their logarithm."""

    low: float
    high: float
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class OneOf:
    """Values without an order that matters; of an argument declared as a Literal, all of them when left empty."""

    values: tuple[Any, ...] = ()


def shared(setup: Setup) -> dict[str, Range | OneOf]:
    """Every recipe's common space. Cosines lie in [-1, 1], inner products grow as they need, so their temperatures differ; a decoupled
    decay (row rules) is multiplied by the learning rate, a coupled one (adam) by the gradient's scale. A decay of exactly 0 must be in
    reach, which no logarithm has. An item bias is what popularity-heavy data needs, whatever the negatives. A pretrained transformer
    forgets at rates that a table of vectors needs."""
    decays = (0.0, 1e-6, 1e-5, 1e-4, 1e-3) if setup.optimizer == "adam" else (0.0, 1e-4, 0.01, 0.1, 1.0)
    return {
        "lr": Range(1e-5, 1e-3, log=True) if _transformer(setup) else Range(1e-4, 0.05, log=True),
        "tau": Range(0.03, 0.5, log=True) if setup.score == "cosine" else Range(0.2, 3.0, log=True),
        "weight_decay": OneOf(decays),
        "item_bias": OneOf((False, True)),
    }


def _transformer(setup: Setup) -> bool:
    """Whether a tower reads texts with a pretrained transformer."""
    return "text" in (setup.query_tower, setup.item_tower) and setup.encoder is not None and not is_bag(setup.encoder)


# A method's own arguments, by name or by recipe and name. What is not here stays as it is, and so does everything that says how many
# candidates are scored (n, cache_size, size): more of them would be a larger budget, not a better method.
OWN: dict[str, Range | OneOf] = {
    "lam": Range(0.0, 1.0),
    "esans.lam": Range(-0.3, 0.5),
    "mix": OneOf(),
    "share": Range(0.05, 0.8),
    "importance": Range(0.01, 1.0, log=True),
    "temperature": Range(0.1, 2.0, log=True),
    "surrogate": OneOf(),
    "tau_w": Range(0.2, 5.0, log=True),
    "bsl.exponent": Range(1.0, 1.5),
    "bsl.form": OneOf(),
    "ccl.margin": Range(0.3, 0.98),
    "ccl.weight": Range(10.0, 1000.0, log=True),
    "ada_tau.beta": Range(0.1, 2.0, log=True),
    "pns.alpha": Range(0.0, 1.0),
    "g_tower.alpha": Range(1e-4, 0.1, log=True),
    "ahns.alpha": Range(0.1, 2.0),
    "ahns.beta": Range(0.01, 1.0, log=True),
    "dns.k": Range(1, 16, log=True, whole=True),
    "mixgcf.k": Range(1, 16, log=True, whole=True),
}


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


def space(recipe: str | Recipe, fixed: Mapping[str, object] | None = None, base: Setup | None = None) -> dict[str, Range | OneOf]:
    """What is tuned of a recipe, by name of the setting, with these towers and optimiser; `fixed` settings are not.

    An argument of a recipe of your own is tuned where its type says over what: `alpha: Annotated[float, Range(0.0, 1.0)] = 0.5`.

        space("xir")  # lr, tau, weight_decay, item_bias, lam
    """
    found = shared(resolve(find(recipe), fixed or {}, base)[0]) | _own_space(find(recipe))
    return {name: entry for name, entry in found.items() if name not in (fixed or {})}


def untuned(recipe: str | Recipe, fixed: Mapping[str, object] | None = None) -> list[str]:
    """The recipe's own arguments that stay as they come while the rest is tuned."""
    tuned = {*_own_space(find(recipe)), *(fixed or {})}
    return [name for name in own_arguments(find(recipe)) if name not in tuned]


def _own_space(recipe: Recipe) -> dict[str, Range | OneOf]:
    """By what the type of each argument says; of our own recipes by the table above."""
    found: dict[str, Range | OneOf] = {}
    hints, name_of = get_type_hints(recipe, include_extras=True), recipe.__name__
    ours = RECIPES.get(name_of) is recipe
    for name, (kind, _) in own_arguments(recipe).items():
        said = getattr(hints[name], "__metadata__", ())
        entry = next((each for each in said if isinstance(each, Range | OneOf)), None)
        if entry is None and ours:
            entry = OWN.get(f"{name_of}.{name}", OWN.get(name))
        if isinstance(entry, OneOf):
            entry = entry if entry.values else OneOf(get_args(kind))
            for value in entry.values:
                parse(f"{name}, tuned,", value, kind)
        if isinstance(entry, Range):
            entry = replace(entry, whole=entry.whole or kind is int)
            if not entry.low < entry.high or (entry.log and entry.low <= 0):
                raise UserError(f"{name} of {name_of} cannot be tuned over {entry}: low must be below high, and above 0 where log is set")
        if entry is not None and (isinstance(entry, Range) or entry.values):
            found[name] = entry
    return found


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

    The trials after the second are the second at the temperatures `taus`, then of the sampler's choice. Each finished trial is a line of
    FOLDER/trials.jsonl. The sampler (TPE) starts each trial from (seed, number of the trial) and the trials before it, so a study that was
    stopped ends exactly as one that was not. Needs the extra `tune` (Optuna).

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
            raise UserError(f"{path} holds trials over {', '.join(trial.settings)}, not {', '.join(choices)}: choose another folder")
    parts = Split(split.train, split.valid, None)
    while len(done) < trials:
        number = len(done)
        settings = _ask(optuna, done, distributions, number, seed, _begin(number, recipe, choices, parts.train, base, fixed or {}, taus))
        began = time.perf_counter()
        value, error = None, None
        try:
            run = build(recipe, parts.train, {**(fixed or {}), **settings, "seed": TUNING_SEED}, base)
            history = fit(run, parts, device=device).history
            value = max(float(record[run.setup.select]) for record in history if run.setup.select in record)
        except (ValueError, RuntimeError, ArithmeticError, MemoryError) as failure:
            error = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        done.append(Trial(number, settings, value, round(time.perf_counter() - began, 3), error))
        lines = "".join(json.dumps(asdict(trial)) + "\n" for trial in done)
        disk.write(path, lambda file, lines=lines: file.write_text(lines))  # type: ignore[misc]
        say(done[-1])
    return best(named(recipe), done[:trials])


def best(recipe: str, trials: list[Trial]) -> Tuned:
    """The best of the trials; of equal ones the first."""
    scored = [trial for trial in trials if trial.value is not None and math.isfinite(trial.value)]
    if not scored:
        raise UserError(f"all {len(trials)} trials of {recipe} failed; the last: {trials[-1].error if trials else 'none was made'}")
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


def _ask(optuna: Any, done: list[Trial], distributions: dict[str, Any], number: int, seed: int, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the next trial, given those before it, and some of its own."""
    sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=seed * 1_000_003 + number)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    states = optuna.trial.TrialState
    for trial in done:
        state = states.FAIL if trial.value is None else states.COMPLETE
        study.add_trial(optuna.trial.create_trial(params=trial.settings, distributions=distributions, value=trial.value, state=state))
    if given:
        study.enqueue_trial(given)
    return dict(study.ask(distributions).params)


def _begin(
    number: int,
    recipe: str | Recipe,
    choices: Mapping[str, Range | OneOf],
    train: Interactions,
    base: Setup | None,
    fixed: Mapping[str, object],
    taus: Sequence[float] = (),
) -> dict[str, Any]:
    """What every method tries first: the recipe as it comes, then what it shares with the others at the values that `default` has.

    So no method is compared at a setting that is known to be poor because a handful of trials missed a good one.
    """
    if number > (1 + len(taus) if "tau" in choices else 1):
        return {}
    first = _defaults(recipe, choices, base, fixed)
    if number == 0:
        return first
    setup = resolve(find(recipe), fixed, base)[0]
    strong: dict[str, Any] = {"weight_decay": 0.0, "item_bias": True}
    strong |= {} if _transformer(setup) else {"lr": 3e-3}
    strong |= {"tau": tau_of(train)} if setup.score == "cosine" else {}
    second = first | {name: value for name, value in strong.items() if name in choices}
    if number > 1:
        return second | {"tau": taus[number - 2]}
    return second if second != first else {}


def _defaults(
    recipe: str | Recipe, choices: Mapping[str, Range | OneOf], base: Setup | None, fixed: Mapping[str, object]
) -> dict[str, Any]:
    """The recipe as it comes, moved into the space where it lies outside; what it leaves open is left to the sampler."""
    found = find(recipe)
    values = asdict(resolve(found, fixed, base)[0]) | {name: default for name, (_, default) in own_arguments(found).items()}
    first: dict[str, Any] = {}
    for name, entry in choices.items():
        value = values[name]
        if isinstance(entry, Range) and value is not None:
            first[name] = min(max(value, entry.low), entry.high)
        elif isinstance(entry, OneOf) and value in entry.values:
            first[name] = value
    return first


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
