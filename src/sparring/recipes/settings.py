"""Settings by name: `name=value` strings checked against a recipe's signature and the fields of its Setup."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import torch

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions
from sparring.recipes.finding import Recipe, find, lasting, named, short
from sparring.recipes.run import Run
from sparring.recipes.setup import Setup, check, find_setting, parse, parse_setup, type_name, unknown_setting
from sparring.recipes.text import default_encoder, text_setup

__all__ = [
    "build",
    "check",
    "find",
    "known",
    "lasting",
    "named",
    "own_arguments",
    "own_setup",
    "parse",
    "parse_setup",
]
__all__ += ["resolve", "short", "type_name"]
_JSON = (
    str,
    int,
    float,
    bool,
    tuple,
    list,
    dict,
    type(None),
)  # what a run folder can hold; anything else is written as its name
# Fields of a Setup that are part of a method, where its own Setup has other values than most: what a training row is (DPR, ANCE, DEXML,
# NGAME), what stands beside the item tower (DEXA, PRIME), what is trained after it (NGAME).
METHOD = ("rows", "draw", "auxiliary", "private", "auxiliary_init", "centroids", "clf_epochs")


def build(
    name: str | Recipe,
    data: Interactions,
    settings: Mapping[str, object] | None = None,
    base: Setup | None = None,
    *,
    setup: Setup | None = None,
) -> Run:
    """The run of a recipe (by name, see `find`, or itself) with settings by name: its own arguments or fields of its Setup.

    Settings are values or strings. `base` replaces the recipe's own Setup before they apply, all but what makes the method (METHOD);
    `setup` replaces all of it, as a run folder has it. The run remembers its recipe and resolved arguments. Whatever a recipe of yours
    initialises, it does from the Setup's seed.

        build("xir", train, {"lam": 0.2, "lr": "0.01"});  build("mine.py:loss_tilted", train)
    """
    recipe = find(name)
    chosen, arguments = resolve(recipe, settings or {}, base, setup)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(chosen.seed)
            run: object = recipe(data, chosen, **arguments)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    if not isinstance(run, Run):
        gave = f"the recipe {named(name)} gave a {type(run).__name__}, not a Run"
        raise UserError(f"{gave}: end it with return compose(data, setup, Term(...))")
    defaults = {key: default for key, (_, default) in own_arguments(recipe).items()}
    values = {
        key: value if isinstance(value, _JSON) else repr(value) for key, value in {**defaults, **arguments}.items()
    }
    return dataclasses.replace(run, recipe=named(name), arguments=values)


def own_arguments(recipe: Callable[..., Run]) -> dict[str, tuple[Any, Any]]:
    """The recipe's own arguments, those after the setup: name -> (type, default)."""
    hints = get_type_hints(recipe)
    return {p.name: (hints[p.name], p.default) for p in list(inspect.signature(recipe).parameters.values())[2:]}


def known(recipe: Callable[..., Run], shared: Mapping[str, object]) -> dict[str, object]:
    """Those of some settings that this recipe knows, as its own arguments or as fields of its Setup."""
    own = own_arguments(recipe)
    return {name: value for name, value in shared.items() if name in own or find_setting(name) is not None}


def own_setup(recipe: Callable[..., Run]) -> Setup:
    """The Setup that the recipe uses unless told otherwise."""
    default = inspect.signature(recipe).parameters["setup"].default
    assert isinstance(default, Setup)
    return default


def resolve(
    recipe: Callable[..., Run], settings: Mapping[str, object], base: Setup | None = None, setup: Setup | None = None
) -> tuple[Setup, dict[str, Any]]:
    """Split settings into the Setup and the recipe's own arguments, every value of the declared type; `base` and `setup` as in `build`."""
    own = own_arguments(recipe)
    settings = {
        name.removeprefix("text.") if name == "text.encoder" else name: value for name, value in settings.items()
    }
    if settings.get("encoder") == "auto":
        settings = {**settings, "encoder": default_encoder()}
    setup, arguments = _start(recipe, settings, _kept(recipe, base) if setup is None else setup), {}
    for key, value in settings.items():
        if key in own:
            arguments[key] = parse(key, value, own[key][0])
        elif (shared := find_setting(key)) is not None:
            setup = setup.replaced(**{key: parse(key, value, shared.kind)})
        else:
            raise UserError(f"{unknown_setting(key, own)}; `sparring recipes {named(recipe)}` lists them")
    check(setup)
    return setup, arguments


def _kept(recipe: Callable[..., Run], base: Setup | None) -> Setup | None:
    """The base with what the recipe's own Setup says of METHOD."""
    own, usual = own_setup(recipe).flat(), Setup().flat()
    return None if base is None else base.replaced(**{name: own[name] for name in METHOD if own[name] != usual[name]})


def _start(recipe: Callable[..., Run], settings: Mapping[str, object], base: Setup | None) -> Setup:
    """The Setup that settings change.

    Naming an encoder asks for text towers. Unless a base is given, what suits such towers comes with it: all of the Setup where the recipe
    is of pairs of ids, else what concerns the optimiser, so that a recipe of labels (rows=queries) keeps what makes it.
    """
    setup = base or own_setup(recipe)
    encoder = settings.get("encoder")
    if not isinstance(encoder, str) or encoder.lower() == "none":
        return setup
    if base is not None:
        return base.replaced(query_tower="text", item_tower="text") if base.text.encoder is None else base
    suited = text_setup(encoder)
    if setup.batches.rows == "pairs":
        return suited
    taken = ("query_tower", "item_tower", "dim", "optimizer", "lr", "weight_decay", "schedule", "warmup", "precision")
    values = suited.flat()
    return setup.replaced(**{name: values[name] for name in taken})
