"""A run from a recipe and settings by name: `name=value` checked against the recipe's signature and the Setup."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import torch

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions
from sparring.recipes.finding import Recipe, find, named
from sparring.recipes.run import Run
from sparring.recipes.setup import (
    SETTINGS,
    SOLVED,
    SWEPT,
    Setup,
    check,
    find_setting,
    parse,
    unknown_setting,
)
from sparring.recipes.text import default_encoder, text_setup

_JSON = (str, int, float, bool, tuple, list, dict, type(None))  # run.json holds the repr of any other value
# Settings that define a method if its recipe changes them: its training rows (DPR, ANCE, DEXML, NGAME), additions to
# the item tower (DEXA, PRIME), classifiers (NGAME).
METHOD = ("rows", "draw", "auxiliary", "private", "auxiliary_init", "centroids", "clf_epochs")


def build(
    name: str | Recipe,
    data: Interactions,
    settings: Mapping[str, object] | None = None,
    base: Setup | None = None,
    *,
    setup: Setup | None = None,
) -> Run:
    """The run of a recipe (a function or its name, see `find`) with settings by name: its arguments or shared settings.

    Settings are values or strings. `base` replaces the recipe's default Setup except the settings that define the
    method (METHOD); `setup` replaces all of it. The run records its recipe and resolved arguments. torch's generator is
    seeded from the Setup while the recipe builds its parts.

        build("xir", train, {"lam": 0.2, "training.lr": "0.01"});  build("mine.py:loss_tilted", train)
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
        returned = f"the recipe {named(name)} returned a {type(run).__name__}, not a Run"
        raise UserError(f"{returned}: end it with return compose(data, setup, Term(...))")
    defaults = {key: default for key, (_, default) in own_arguments(recipe).items()}
    values = {
        key: value if isinstance(value, _JSON) else repr(value) for key, value in {**defaults, **arguments}.items()
    }
    return dataclasses.replace(run, recipe=named(name), arguments=values)


def own_arguments(recipe: Callable[..., Run]) -> dict[str, tuple[Any, Any]]:
    """The recipe's own arguments, those after the setup: name -> (type, default)."""
    hints = get_type_hints(recipe)
    return {p.name: (hints[p.name], p.default) for p in list(inspect.signature(recipe).parameters.values())[2:]}


def argument_metadata(recipe: Callable[..., Run]) -> dict[str, tuple[Any, ...]]:
    """The metadata of the recipe's own arguments: a description (str), a range for tuning (Range, OneOf)."""
    hints = get_type_hints(recipe, include_extras=True)
    return {name: getattr(hints[name], "__metadata__", ()) for name in own_arguments(recipe)}


def known(recipe: Callable[..., Run], shared: Mapping[str, object]) -> dict[str, object]:
    """The settings that this recipe takes, as its own arguments or as shared settings."""
    own, read = own_arguments(recipe), settings_of(recipe)
    return {
        name: value
        for name, value in shared.items()
        if name in own or ((found := find_setting(name)) is not None and found.name in read)
    }


def is_solved(recipe: Callable[..., Run]) -> bool:
    """Whether a recipe has a solver; all others are trained by steps."""
    return own_setup(recipe).training.optimizer == "solver"


def settings_of(recipe: Callable[..., Run]) -> frozenset[str]:
    """The shared settings that a recipe reads, by flat name: all of them, unless it has a solver."""
    if not is_solved(recipe):
        return frozenset(SETTINGS)
    return SOLVED | SWEPT if own_setup(recipe).model.query_tower == "ridge" else SOLVED


def own_setup(recipe: Callable[..., Run]) -> Setup:
    """The recipe's default Setup."""
    default = inspect.signature(recipe).parameters["setup"].default
    assert isinstance(default, Setup)
    return default


def resolve(
    recipe: Callable[..., Run], settings: Mapping[str, object], base: Setup | None = None, setup: Setup | None = None
) -> tuple[Setup, dict[str, Any]]:
    """Split settings into the Setup and the recipe's own arguments, with values of the declared types.

    `base` and `setup` as in `build`.
    """
    own = own_arguments(recipe)
    if is_solved(recipe):
        _check_read(recipe, settings, own)
    if setup is None:
        setup = _method_of(recipe, base)
    encoder = settings.get("encoder", settings.get("text.encoder"))
    encoder = default_encoder() if encoder == "auto" else encoder
    if isinstance(encoder, str) and encoder.lower() != "none":
        setup = _with_text_towers(recipe, setup, encoder)
    setup = setup or own_setup(recipe)
    arguments: dict[str, Any] = {}
    for key, value in settings.items():
        shared = find_setting(key)
        if key in own:
            arguments[key] = parse(key, value, own[key][0])
        elif shared is None:
            raise UserError(f"{unknown_setting(key, own)}; `sparring recipes {named(recipe)}` lists them")
        else:
            setup = setup.replaced(**{key: parse(key, encoder if shared.name == "encoder" else value, shared.kind)})
    check(setup)
    return setup, arguments


def _check_read(recipe: Callable[..., Run], settings: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Refuse shared settings that a solver does not read."""
    read = settings_of(recipe)
    for key in settings:
        shared = find_setting(key)
        if key not in own and shared is not None and shared.name not in read:
            named_recipe, names = named(recipe), ", ".join([*own, *sorted(read)])
            raise UserError(f"{named_recipe} is solved, not trained by steps: it has no {key}, only {names}")


def _method_of(recipe: Callable[..., Run], base: Setup | None) -> Setup | None:
    """`base` with the settings that define the method (METHOD) taken from the recipe."""
    if base is None:
        return None
    own, usual = own_setup(recipe).flat(), Setup().flat()
    if is_solved(recipe):  # the number of sweeps is the method's: an epoch of steps is something else
        given = base.flat()
        return own_setup(recipe).replaced(
            **{name: given[name] for name in settings_of(recipe) - {"epochs", "init", "init_std"}}
        )
    return base.replaced(**{name: own[name] for name in METHOD if own[name] != usual[name]})


def _with_text_towers(recipe: Callable[..., Run], base: Setup | None, encoder: str) -> Setup:
    """The Setup to start from if an encoder is named.

    A base gets text towers. Without one, a recipe of pairs takes the complete Setup of text towers; a recipe of labels
    (rows=queries) takes the towers and the optimiser, and keeps the settings that make it.
    """
    if base is not None:
        return base.replaced(query_tower="text", item_tower="text") if base.text.encoder is None else base
    setup, text = own_setup(recipe), text_setup(encoder)
    if setup.batches.rows == "pairs":
        return text
    taken = ("query_tower", "item_tower", "dim", "optimizer", "lr", "weight_decay", "schedule", "warmup", "precision")
    return setup.replaced(**{name: text.flat()[name] for name in taken})
