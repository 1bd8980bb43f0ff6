"""A run from a recipe and settings by name: `name=value` checked against the recipe's signature and the Setup."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sparring.core.errors import UserError
from sparring.core.finding import argument_metadata, own_arguments
from sparring.data.interactions import Interactions
from sparring.models import finding
from sparring.models.build import has_tables
from sparring.models.named import Model, usual_settings
from sparring.models.settings import ModelSettings
from sparring.recipes.finding import Recipe, find, named
from sparring.recipes.run import OWN, Run
from sparring.recipes.setup import (
    SETTINGS,
    SOLVED,
    SWEPT,
    Setup,
    check,
    find_setting,
    parse,
    parse_options,
    unknown_setting,
)
from sparring.recipes.text import default_encoder, text_setup

__all__ = [
    "argument_metadata",
    "build",
    "given",
    "is_solved",
    "known",
    "own_arguments",
    "own_setup",
    "resolve",
    "settings_of",
]
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
    model: str | Model | None = None,
) -> Run:
    """The run of a recipe (a function or its name, see `find`) with settings by name: its arguments or shared settings.

    Settings are values or strings. `base` replaces the recipe's default Setup except the settings that define the
    method (METHOD); `setup` replaces all of it. `model` is a model or its name (models.finding.find): its usual
    settings replace those of the recipe or the base, except METHOD, and its options are settings with the prefix
    `model.`. The run records its recipe and resolved arguments. torch's generator is seeded from the Setup while the
    recipe builds its parts.

        build("xir", train, {"lam": 0.2, "training.lr": "0.01"});  build("mine.py:loss_tilted", train, model="history")
    """
    recipe = find(name)
    chosen, arguments = resolve(
        recipe, {**(settings or {}), **({} if model is None else {"model": model})}, base, setup
    )
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


def known(recipe: Callable[..., Run], shared: Mapping[str, object]) -> dict[str, object]:
    """The settings that this recipe takes: its own arguments, shared settings, and the model with its options."""
    own, read = own_arguments(recipe), settings_of(recipe)
    options = {} if is_solved(recipe) else _options(shared)
    return {
        name: value
        for name, value in shared.items()
        if name in own or name in options or ((found := find_setting(name)) is not None and found.name in read)
    }


def _options(settings: Mapping[str, object]) -> dict[str, object]:
    """The chosen model (`model`) and those of its options (`model.OPTION`) that it has."""
    chosen = settings.get("model", ModelSettings().name)
    own = own_arguments(finding.find(chosen))  # type: ignore[arg-type]
    return {name: value for name, value in settings.items() if name == "model" or name.removeprefix("model.") in own}


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

    `base` and `setup` as in `build`; the setting `model` is the model.
    """
    own, model = own_arguments(recipe), settings.get("model")
    if is_solved(recipe):
        _check_read(recipe, settings, own)
    whole = setup is not None
    if setup is None:
        setup = _method_of(recipe, base)
    if model is not None and not (isinstance(model, str) or callable(model)):
        raise UserError(f"the model must be a name or a function, got {model!r}; {unknown_setting('model')}")
    usual = {} if model is None else dict(usual_settings(finding.find(model)))
    named_encoder = settings.get("encoder", settings.get("text.encoder"))
    encoder = usual.get("encoder") if named_encoder is None and not whole else named_encoder
    encoder = default_encoder() if encoder == "auto" else encoder
    if isinstance(encoder, str) and encoder.lower() != "none":
        setup = _with_text_towers(recipe, setup, encoder)
    setup = setup or own_setup(recipe)
    if model is not None:
        name = finding.passed(model)
        if not whole:
            setup = _with_usual(recipe, setup, name, usual | ({"encoder": encoder} if "encoder" in usual else {}))
        setup = setup.replaced(model_name=name)
    function = None if is_solved(recipe) or setup.model.name == OWN else finding.find(setup.model.name)
    has = {} if function is None else {f"model.{name}": name for name in own_arguments(function)}
    arguments: dict[str, Any] = {}
    options = dict(setup.model.options)
    for key, value in settings.items():
        shared = find_setting(key)
        if key in own:
            arguments[key] = parse(key, value, own[key][0])
        elif key == "model":
            continue
        elif shared is not None and shared.name not in ("model_name", "model_options"):
            setup = setup.replaced(**{key: parse(key, encoder if shared.name == "encoder" else value, shared.kind)})
        elif shared is not None:
            raise UserError(
                f"{key} cannot be set: choose a model with --model, its options with --set model.OPTION=VALUE"
            )
        elif key in has:
            options[has[key]] = value
        else:
            raise UserError(f"{unknown_setting(key, [*own, *has])}; `sparring recipes {named(recipe)}` lists them")
    if function is not None:
        setup = setup.replaced(model_options=parse_options(function, options))
        if not {"init", "model.init"} & settings.keys() and not has_tables(setup.model):
            setup = setup.replaced(init="normal")  # the recipe's start may be an SVD
    check(setup)
    return setup, arguments


def given(recipe: Callable[..., Run], setup: Setup, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `resolve` turns into this Setup and these arguments; those that it takes anyway are left out.

    given(recipes.xir, run.setup, run.arguments)  -> {"dim": 64, "lam": 0.2}
    """
    if setup.model.name == OWN:  # the recipe builds it
        model = own_setup(recipe).model
        setup = setup.replaced(model_name=model.name, model_options=resolve(recipe, {})[0].model.options)
    values, solved = setup.flat(), is_solved(recipe)
    settings: dict[str, Any] = {}
    if not solved and setup.model.name != ModelSettings().name:
        settings["model"] = setup.model.name
    if setup.text.encoder is not None:
        settings["encoder"] = setup.text.encoder
    usual = resolve(recipe, settings)[0]
    if not solved:
        settings |= {
            f"model.{name}": value
            for name, value in setup.model.options.items()
            if value != usual.model.options.get(name)
        }
    apart = ("model_name", "model_options")
    settings |= {name: value for name, value in values.items() if name not in apart and value != usual.flat()[name]}
    defaults = {name: default for name, (_, default) in own_arguments(recipe).items()}
    settings |= {name: value for name, value in arguments.items() if name in defaults and value != defaults[name]}
    if resolve(recipe, settings)[0] != setup:
        raise UserError(f"the settings of this run are not those of its recipe {named(recipe)}: build it in Python")
    return settings


def _method(recipe: Callable[..., Run]) -> dict[str, Any]:
    """The settings of a recipe that define its method; rows of sets and sequences belong to its model."""
    own, usual = own_setup(recipe).flat(), Setup().flat()
    of_model = {"rows"} if own["rows"] in ("sets", "sequences") else set()
    return {name: own[name] for name in METHOD if name not in of_model and own[name] != usual[name]}


def _with_usual(recipe: Callable[..., Run], setup: Setup, name: str, usual: Mapping[str, object]) -> Setup:
    """The setup with the usual settings of a model, except where the recipe's define its method."""
    kept = {*_method(recipe), *(["encoder"] if setup.text.encoder is not None else [])}
    taken = {key: value for key, value in usual.items() if key not in kept}
    for key in taken:
        if find_setting(key) is None:
            raise UserError(f"among the usual settings of the model {finding.short(name)}: {unknown_setting(key)}")
    return setup.replaced(**taken)


def _check_read(recipe: Callable[..., Run], settings: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Refuse a model, and shared settings that a solver does not read."""
    read = settings_of(recipe)
    if "model" in settings:
        raise UserError(f"{named(recipe)} is solved and has a model of its own: leave out --model")
    for key in settings:
        shared = find_setting(key)
        if key not in own and shared is not None and shared.name not in read:
            named_recipe, names = named(recipe), ", ".join([*own, *sorted(read)])
            raise UserError(f"{named_recipe} is solved, not trained by steps: it has no {key}, only {names}")


def _method_of(recipe: Callable[..., Run], base: Setup | None) -> Setup | None:
    """`base` with the settings that define the method (METHOD) taken from the recipe."""
    if base is None:
        return None
    if is_solved(recipe):  # the number of sweeps is the method's: an epoch of steps is something else
        given = base.flat()
        return own_setup(recipe).replaced(
            **{name: given[name] for name in settings_of(recipe) - {"epochs", "init", "init_std"}}
        )
    return base.replaced(**_method(recipe))


def _with_text_towers(recipe: Callable[..., Run], base: Setup | None, encoder: str) -> Setup:
    """The Setup to start from if an encoder is named.

    A base gets text towers. Without one, a recipe of pairs or sets takes the complete Setup of text towers; a recipe of
    labels (rows=queries) takes the towers and the optimiser, and keeps the settings that make it.
    """
    if base is not None:
        return base.replaced(query_tower="text", item_tower="text") if base.text.encoder is None else base
    setup, text = own_setup(recipe), text_setup(encoder)
    if setup.batches.rows != "queries":
        return text
    taken = ("query_tower", "item_tower", "dim", "optimizer", "lr", "weight_decay", "schedule", "warmup", "precision")
    return setup.replaced(**{name: text.flat()[name] for name in taken})
