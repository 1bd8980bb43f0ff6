"""The search space of a recipe, and the settings that every method tries first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from torch.quasirandom import SobolEngine

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions
from sparring.models import finding
from sparring.models.encoders import is_bag
from sparring.models.named import Model
from sparring.models.settings import ModelSettings
from sparring.recipes.arguments import OneOf, Range
from sparring.recipes.finding import Recipe, find, named
from sparring.recipes.run import TAU
from sparring.recipes.settings import argument_metadata, own_arguments, resolve
from sparring.recipes.setup import Setup, flat_name, parse


def shared(setup: Setup) -> dict[str, Range | OneOf]:
    """The settings that every recipe shares.

    Cosines are in [-1, 1] and inner products grow as needed, so their temperatures differ. A decoupled decay (row
    optimisers) is multiplied by the learning rate, a coupled one (adam) by the scale of the gradient; 0 must be among
    the values, and no logarithmic range contains it. Popularity-heavy data needs an item bias with any negatives.
    A pretrained transformer forgets at the learning rates that a table of vectors needs. A solver has none of these,
    and sweeps have a width.
    """
    if setup.training.optimizer == "solver":
        return {"dim": OneOf((32, 64, 128, 256))} if setup.model.query_tower == "ridge" else {}
    decays = (0.0, 1e-6, 1e-5, 1e-4, 1e-3) if setup.training.optimizer == "adam" else (0.0, 1e-4, 0.01, 0.1, 1.0)
    return {
        "lr": Range(1e-5, 1e-3, log=True) if _transformer(setup) else Range(1e-4, 0.05, log=True),
        "tau": Range(0.02, 1.0, log=True) if setup.model.score == "cosine" else Range(0.2, 3.0, log=True),
        "weight_decay": OneOf(decays),
        "item_bias": OneOf((False, True)),
    }


def _transformer(setup: Setup) -> bool:
    """Whether a tower reads texts with a pretrained transformer."""
    encoder = setup.text.encoder
    return "text" in (setup.model.query_tower, setup.model.item_tower) and encoder is not None and not is_bag(encoder)


# Settings that a method ignores: tuning them would waste trials.
UNUSED = {"ada_tau": {"tau"}, "ccl": {"tau"}}


def space(
    recipe: str | Recipe, fixed: Mapping[str, object] | None = None, base: Setup | None = None
) -> dict[str, Range | OneOf]:
    """The range of each tuned setting of a recipe with the towers and optimiser of `base`, except for `fixed` settings.

    An argument of a recipe, or an option of the model in `fixed`, is tuned if its type declares a range:
    `alpha: Annotated[float, Range(0, 1)] = 0.5`.

        space("xir")  # lr, tau, weight_decay, item_bias, lam
    """
    entries = shared(resolve(find(recipe), fixed or {}, base)[0]) | _argument_space(find(recipe))
    entries |= {f"model.{name}": entry for name, entry in _argument_space(_model(fixed)).items()}
    left_out = {*map(flat_name, fixed or {}), *UNUSED.get(named(recipe), ())}
    return {name: entry for name, entry in entries.items() if name not in left_out}


def _model(fixed: Mapping[str, object] | None) -> Model:
    """The model among fixed settings, or the one that settings describe."""
    name = (fixed or {}).get("model", ModelSettings().name)
    return finding.find(name)  # type: ignore[arg-type]


def untuned(recipe: str | Recipe, fixed: Mapping[str, object] | None = None) -> list[str]:
    """The recipe's own arguments that keep their defaults during tuning."""
    tuned = {*_argument_space(find(recipe)), *(fixed or {})}
    return [name for name in own_arguments(find(recipe)) if name not in tuned]


def _argument_space(recipe: Recipe | Model) -> dict[str, Range | OneOf]:
    """The ranges that the types of a recipe's own arguments declare; other arguments keep their defaults.

    A number of candidates (n, cache_size, size) declares none: more of them would be a larger budget, not a better
    method.
    """
    entries: dict[str, Range | OneOf] = {}
    metadata, recipe_name = argument_metadata(recipe), recipe.__name__
    for name, (kind, _) in own_arguments(recipe).items():
        entry = next((value for value in metadata[name] if isinstance(value, Range | OneOf)), None)
        if isinstance(entry, OneOf):
            entry = entry if entry.values else OneOf(get_args(kind))
            for value in entry.values:
                parse(f"{name}, tuned,", value, kind)
        if isinstance(entry, Range):
            entry = replace(entry, whole=entry.whole or kind is int)
            if not entry.low < entry.high or (entry.log and entry.low <= 0):
                rule = "low must be below high, and above 0 where log is set"
                raise UserError(f"{name} of {recipe_name} cannot be tuned over {entry}: {rule}")
        if entry is not None and (isinstance(entry, Range) or entry.values):
            entries[name] = entry
    return entries


def first_trials(
    recipe: str | Recipe,
    choices: Mapping[str, Range | OneOf],
    train: Interactions,
    base: Setup | None,
    fixed: Mapping[str, object],
    taus: Sequence[float] = (),
) -> list[dict[str, Any]]:
    """The settings that every method tries first; the sampler chooses those of later trials.

    They are the recipe's defaults; the shared settings at the values of `default`; and these at the temperatures
    `taus`, by default half and twice its own. So no method is compared at a setting known to be poor because a handful
    of trials missed a good one, or because its temperature has another unit: resampling (BIR, XIR) doubles logits, PSL
    halves cosines.
    """
    setup = resolve(find(recipe), fixed, base)[0]
    if setup.training.optimizer == "solver":
        return [defaults(recipe, choices, base, fixed)] if choices else []
    usual = {"tau": TAU} if setup.model.score == "cosine" else {}
    first = _clipped(choices, usual | defaults(recipe, choices, base, fixed))
    strong: dict[str, Any] = {"weight_decay": 0.0, "item_bias": True, **usual}
    strong |= {} if _transformer(setup) else {"lr": 3e-3}
    second = first | _clipped(choices, strong)
    trials = [first, second]
    if "tau" in second:
        trials += [second | _clipped(choices, {"tau": tau}) for tau in taus or (second["tau"] / 2, 2 * second["tau"])]
    return [trial for number, trial in enumerate(trials) if trial not in trials[:number]]


def space_filling(choices: Mapping[str, Range | OneOf], n: int, seed: int = 0) -> list[dict[str, Any]]:
    """n settings spread evenly over the search space: points of a scrambled Sobol sequence.

    space_filling(space("xir"), 6)

    Sobol, On the Distribution of Points in a Cube, USSR Computational Mathematics and Mathematical Physics 1967.
    """
    if not choices or n < 1:
        return []
    points = SobolEngine(len(choices), scramble=True, seed=seed).draw(n).double().clamp(0, 1 - 1e-9).tolist()
    return [{name: _at(entry, u) for (name, entry), u in zip(choices.items(), point, strict=True)} for point in points]


def _at(entry: Range | OneOf, u: float) -> Any:
    """The value at a place 0 <= u < 1 of a range or of a list."""
    if isinstance(entry, OneOf):
        return entry.values[int(u * len(entry.values))]
    low, high = entry.low, entry.high + (1 if entry.whole else 0)
    value = low * (high / low) ** u if entry.log else low + (high - low) * u
    return min(int(value), int(entry.high)) if entry.whole else value


def in_unit(choices: Mapping[str, Range | OneOf], unit: float) -> dict[str, Range | OneOf]:
    """The search space of a method whose temperature `unit` tau is as sharp as tau in others."""
    tau = choices.get("tau")
    if not isinstance(tau, Range):
        return dict(choices)
    return {**choices, "tau": replace(tau, low=unit * tau.low, high=unit * tau.high)}


def _clipped(choices: Mapping[str, Range | OneOf], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of tuned settings, clipped to their ranges."""
    ranges = {name: (entry.low, entry.high) for name, entry in choices.items() if isinstance(entry, Range)}
    kept = {name: value for name, value in values.items() if name in choices}
    return {
        name: min(max(value, ranges[name][0]), ranges[name][1]) if name in ranges else value
        for name, value in kept.items()
    }


def defaults(
    recipe: str | Recipe, choices: Mapping[str, Range | OneOf], base: Setup | None, fixed: Mapping[str, object]
) -> dict[str, Any]:
    """The recipe's defaults clipped to the search space; settings whose default is None are omitted."""
    function = find(recipe)
    values = resolve(function, fixed, base)[0].flat()
    values |= {name: default for name, (_, default) in own_arguments(function).items()}
    values |= {f"model.{name}": default for name, (_, default) in own_arguments(_model(fixed)).items()}
    known = _clipped(choices, {name: value for name, value in values.items() if value is not None})
    return {
        name: value
        for name, value in known.items()
        if not isinstance(entry := choices[name], OneOf) or value in entry.values
    }
