"""What is tuned of a recipe, over what, and which settings every method tries first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions
from sparring.models.encoders import is_bag
from sparring.recipes.arguments import OneOf, Range
from sparring.recipes.finding import Recipe, find, named
from sparring.recipes.run import default_tau
from sparring.recipes.settings import argument_metadata, own_arguments, resolve
from sparring.recipes.setup import Setup, flat_name, parse


def shared(setup: Setup) -> dict[str, Range | OneOf]:
    """Every recipe's common space. Cosines lie in [-1, 1], inner products grow as they need, so their temperatures differ; a decoupled
    decay (row rules) is multiplied by the learning rate, a coupled one (adam) by the gradient's scale. A decay of exactly 0 must be in
    reach, which no logarithm has. An item bias is what popularity-heavy data needs, whatever the negatives. A pretrained transformer
    forgets at rates that a table of vectors needs."""
    decays = (0.0, 1e-6, 1e-5, 1e-4, 1e-3) if setup.training.optimizer == "adam" else (0.0, 1e-4, 0.01, 0.1, 1.0)
    return {
        "lr": Range(1e-5, 1e-3, log=True) if _transformer(setup) else Range(1e-4, 0.05, log=True),
        "tau": Range(0.02, 1.0, log=True) if setup.model.score == "cosine" else Range(0.2, 3.0, log=True),
        "weight_decay": OneOf(decays),
        "item_bias": OneOf((False, True)),
    }


def _transformer(setup: Setup) -> bool:
    """Whether a tower reads texts with a pretrained transformer."""
    return (
        "text" in (setup.model.query_tower, setup.model.item_tower)
        and setup.text.encoder is not None
        and not is_bag(setup.text.encoder)
    )


# What a method does not use: a trial of it would be one less for the rest.
UNUSED = {"ada_tau": {"tau"}, "ccl": {"tau"}}


def space(
    recipe: str | Recipe, fixed: Mapping[str, object] | None = None, base: Setup | None = None
) -> dict[str, Range | OneOf]:
    """What is tuned of a recipe, by name of the setting, with these towers and optimiser; `fixed` settings are not.

    An argument of a recipe of your own is tuned where its type says over what: `alpha: Annotated[float, Range(0.0, 1.0)] = 0.5`.

        space("xir")  # lr, tau, weight_decay, item_bias, lam
    """
    found = shared(resolve(find(recipe), fixed or {}, base)[0]) | _own_space(find(recipe))
    left_out = {*map(flat_name, fixed or {}), *UNUSED.get(named(recipe), ())}
    return {name: entry for name, entry in found.items() if name not in left_out}


def untuned(recipe: str | Recipe, fixed: Mapping[str, object] | None = None) -> list[str]:
    """The recipe's own arguments that stay as they come while the rest is tuned."""
    tuned = {*_own_space(find(recipe)), *(fixed or {})}
    return [name for name in own_arguments(find(recipe)) if name not in tuned]


def _own_space(recipe: Recipe) -> dict[str, Range | OneOf]:
    """The ranges that the types of a recipe's own arguments declare."""
    found: dict[str, Range | OneOf] = {}
    metadata, name_of = argument_metadata(recipe), recipe.__name__
    for name, (kind, _) in own_arguments(recipe).items():
        entry = next((each for each in metadata[name] if isinstance(each, Range | OneOf)), None)
        if isinstance(entry, OneOf):
            entry = entry if entry.values else OneOf(get_args(kind))
            for value in entry.values:
                parse(f"{name}, tuned,", value, kind)
        if isinstance(entry, Range):
            entry = replace(entry, whole=entry.whole or kind is int)
            if not entry.low < entry.high or (entry.log and entry.low <= 0):
                raise UserError(
                    f"{name} of {name_of} cannot be tuned over {entry}: low must be below high, and above 0 where log is set"
                )
        if entry is not None and (isinstance(entry, Range) or entry.values):
            found[name] = entry
    return found


def begin(
    number: int,
    recipe: str | Recipe,
    choices: Mapping[str, Range | OneOf],
    train: Interactions,
    base: Setup | None,
    fixed: Mapping[str, object],
    taus: Sequence[float] = (),
) -> dict[str, Any]:
    """What every method tries first, by number of the trial; {} where the sampler is to choose.

    The recipe as it comes; what it shares with the others at the values that `default` has; that at the temperatures `taus`, or without
    them at half and at twice its temperature. So no method is compared at a setting that is known to be poor because a handful of trials
    missed a good one, or because its temperature has another unit: resampling (BIR, XIR) doubles logits, PSL halves cosines.
    """
    setup = resolve(find(recipe), fixed, base)[0]
    usual = {"tau": default_tau(train)} if setup.model.score == "cosine" else {}
    first = _inside(choices, usual | defaults(recipe, choices, base, fixed))
    strong: dict[str, Any] = {"weight_decay": 0.0, "item_bias": True, **usual} | (
        {} if _transformer(setup) else {"lr": 3e-3}
    )
    second = first | _inside(choices, strong)
    tries = [first, second]
    if "tau" in second:
        tries += [second | _inside(choices, {"tau": tau}) for tau in taus or (second["tau"] / 2, 2 * second["tau"])]
    tries = [each for place, each in enumerate(tries) if each not in tries[:place]]
    return tries[number] if number < len(tries) else {}


def _inside(choices: Mapping[str, Range | OneOf], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are tuned, moved into their ranges."""
    ranges = {name: (entry.low, entry.high) for name, entry in choices.items() if isinstance(entry, Range)}
    kept = {name: value for name, value in values.items() if name in choices}
    return {
        name: min(max(value, ranges[name][0]), ranges[name][1]) if name in ranges else value
        for name, value in kept.items()
    }


def defaults(
    recipe: str | Recipe, choices: Mapping[str, Range | OneOf], base: Setup | None, fixed: Mapping[str, object]
) -> dict[str, Any]:
    """The recipe as it comes, moved into the space where it lies outside; without what it leaves open."""
    found = find(recipe)
    values = resolve(found, fixed, base)[0].flat() | {
        name: default for name, (_, default) in own_arguments(found).items()
    }
    known = _inside(choices, {name: value for name, value in values.items() if value is not None})
    return {
        name: value
        for name, value in known.items()
        if not isinstance(entry := choices[name], OneOf) or value in entry.values
    }
