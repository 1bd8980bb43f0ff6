"""Settings by name: `name=value` strings checked against a recipe's signature and the fields of its Setup."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sparring.composition import Run, Setup
from sparring.data.interactions import Interactions
from sparring.errors import UserError
from sparring.recipes import RECIPES
from sparring.recipes.text import default_encoder, text_setup

_JSON = (str, int, float, bool, tuple, list, dict, type(None))  # what a run folder can hold; anything else is written as its name


def build(name: str, data: Interactions, settings: Mapping[str, object] | None = None, base: Setup | None = None) -> Run:
    """The run of a recipe with settings by name: its own arguments or fields of its Setup, as values or as strings.

    `base` replaces the recipe's own Setup before the settings apply. The run remembers its recipe and resolved arguments.

        build("xir", train, {"lam": 0.2, "lr": "0.01"})
    """
    recipe = find(name)
    setup, arguments = resolve(recipe, settings or {}, base)
    try:
        run = recipe(data, setup, **arguments)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    defaults = {key: default for key, (_, default) in own_arguments(recipe).items()}
    named = {key: value if isinstance(value, _JSON) else repr(value) for key, value in {**defaults, **arguments}.items()}
    return dataclasses.replace(run, recipe=recipe.__name__, arguments=named)


def find(name: str) -> Callable[..., Run]:
    """The recipe of this name; hyphens may stand for underscores."""
    recipe = RECIPES.get(name.replace("-", "_"))
    if recipe is None:
        raise UserError(f"unknown recipe {name!r}{nearest(name, RECIPES)}; `sparring recipes` lists them")
    return recipe


def nearest(name: str, choices: Iterable[str]) -> str:
    """A suggestion to append to an error, or nothing."""
    close = difflib.get_close_matches(name.replace("-", "_"), list(choices), n=1, cutoff=0.4)
    return f": did you mean {close[0]!r}?" if close else ""


def own_arguments(recipe: Callable[..., Run]) -> dict[str, tuple[Any, Any]]:
    """The recipe's own keyword arguments: name -> (type, default)."""
    hints = get_type_hints(recipe)
    parameters = inspect.signature(recipe).parameters.values()
    return {p.name: (hints[p.name], p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


def known(recipe: Callable[..., Run], shared: Mapping[str, object]) -> dict[str, object]:
    """Those of some settings that this recipe knows, as its own arguments or as fields of its Setup."""
    names = {*own_arguments(recipe), *get_type_hints(Setup)}
    return {name: value for name, value in shared.items() if name in names}


def own_setup(recipe: Callable[..., Run]) -> Setup:
    """The Setup that the recipe uses unless told otherwise."""
    default = inspect.signature(recipe).parameters["setup"].default
    assert isinstance(default, Setup)
    return default


def resolve(recipe: Callable[..., Run], settings: Mapping[str, object], base: Setup | None = None) -> tuple[Setup, dict[str, Any]]:
    """Split settings into the Setup and the recipe's own arguments, every value of the declared type."""
    own = own_arguments(recipe)
    shared = get_type_hints(Setup)
    if settings.get("encoder") == "auto":
        settings = {**settings, "encoder": default_encoder()}
    setup, arguments = _start(recipe, settings, base), {}
    for key, value in settings.items():
        if key in own:
            arguments[key] = parse(key, value, own[key][0])
        elif key in shared:
            setup = dataclasses.replace(setup, **{key: parse(key, value, shared[key])})
        else:
            raise UserError(f"unknown setting {key!r}{nearest(key, [*own, *shared])}; `sparring recipes {recipe.__name__}` lists them")
    check(setup)
    return setup, arguments


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
        return dataclasses.replace(base, query_tower="text", item_tower="text") if base.encoder is None else base
    suited = text_setup(encoder)
    if setup.rows == "pairs":
        return suited
    taken = ("query_tower", "item_tower", "dim", "optimizer", "lr", "weight_decay", "schedule", "warmup", "precision")
    return dataclasses.replace(setup, **{name: getattr(suited, name) for name in taken})


def parse_setup(fields: Mapping[str, object]) -> Setup:
    """A Setup from the fields that a run folder holds."""
    kinds = get_type_hints(Setup)
    for key in fields:
        if key not in kinds:
            raise UserError(f"unknown setting {key!r} in the saved run{nearest(key, kinds)}")
    return Setup(**{key: parse(key, value, kinds[key]) for key, value in fields.items()})


def check(setup: Setup) -> None:
    """Refuse values that no training could use."""
    counts = ("dim", "batch_size", "epochs", "lr_decay_every", "eval_every", "valid_queries", "history", "max_len")
    for key in (*counts, "clf_batch_size", "clf_shards"):
        if getattr(setup, key) < 1:
            raise UserError(f"{key} must be at least 1, got {getattr(setup, key)}")
    for key in ("lr", "tau", "init_std", "lr_decay", "clip", "clf_lr"):
        value = getattr(setup, key)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{key} must be positive and finite, got {value}")
    for key in ("weight_decay", "warmup", "seed", "auxiliary", "private", "classifiers", "clf_warmup"):
        if not 0 <= getattr(setup, key) < math.inf:
            raise UserError(f"{key} must not be negative, got {getattr(setup, key)}")
    if not 0 <= setup.dropout < 1:
        raise UserError(f"dropout must lie in [0, 1), got {setup.dropout}")
    if setup.patience is not None and setup.patience < 1:
        raise UserError(f"patience must be at least 1 validation, got {setup.patience}; none never stops early")
    if setup.chunk is not None and setup.chunk < 1:
        raise UserError(f"chunk must be at least 1 id encoded at a time, got {setup.chunk}; none encodes a batch at once")
    text = "text" in (setup.query_tower, setup.item_tower)
    if text and setup.encoder is None:
        raise UserError("a text tower needs an encoder: set encoder to bag, wordllama, minilm, a folder, or a name on the Hugging Face hub")
    if (setup.pooling == "cls" and not text) or (setup.pooling == "attention" and setup.query_tower != "history"):
        raise UserError(f"pooling={setup.pooling} is not for these towers: cls is for text towers, attention for query_tower=history")
    if setup.draw != "uniform" and setup.rows == "pairs":
        raise UserError(f"draw={setup.draw} chooses among a query's positives: set rows=queries")
    if setup.item_tower == "text" and setup.item_features:
        raise UserError("item_tower=text takes no item_features: leave one of them out")
    if not setup.hidden or min(setup.hidden) < 1:
        raise UserError(f"hidden must name at least one layer, each of at least 1 unit, got {setup.hidden}")


def parse(name: str, value: object, kind: Any) -> Any:
    """A value as the declared type; a string is read as the command line gives it."""
    try:
        return _parse(value, kind)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be {type_name(kind)}, got {value!r}") from None


def _parse(value: object, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError
    if get_origin(kind) in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        for part in get_args(kind):
            with suppress(TypeError, ValueError):
                return _parse(value, part)
        raise ValueError
    if get_origin(kind) is tuple:
        parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else list(value)  # type: ignore[call-overload]
        return tuple(_parse(part, get_args(kind)[0]) for part in parts)
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        return words[value.lower()] if isinstance(value, str) and value.lower() in words else _exactly(value, bool)
    if kind is int:
        return int(value) if isinstance(value, str) else _exactly(value, int)
    if kind is float:
        return float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else _exactly(value, float)
    return _exactly(value, kind)


def _exactly(value: object, kind: type) -> object:
    if type(value) is not kind:
        raise TypeError
    return value


def type_name(kind: Any) -> str:
    """A type in words a user knows."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join("none" if part is type(None) else type_name(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a comma-separated list of {type_name(get_args(kind)[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, getattr(kind, "__name__", str(kind)))
