"""sparring recipes: every recipe with its paper, or one with all its arguments and settings."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from rich.text import Text

from sparring.cli.parsing import Commands, add_json
from sparring.cli.screen import note, result, table
from sparring.core.errors import UserError


def add_recipes(commands: Commands) -> None:
    parser = commands.add(
        "recipes",
        "List every recipe with its paper and arguments, or describe all settings of one.",
        "sparring recipes xir",
        recipes,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="describe the arguments and settings of this recipe")
    add_json(parser)


def recipes(args: Namespace) -> int:
    from sparring.recipes.finding import named

    if args.name is not None:
        name = named(args.name)
        facts = recipe_facts(name)
        return result(args, [{name: facts}], *_one(name, facts))
    known = dict(_usable())
    return result(args, [known], *_all(known))


def _all(known: dict[str, dict[str, Any]]) -> Iterator[Any]:
    from sparring.recipes.setup import SETTINGS

    for name, facts in known.items():
        yield Text(name, style="bold")
        arguments = "  ".join(f"{key}={value['default']}" for key, value in facts["arguments"].items())
        yield from (f"    {line}" for line in (facts["summary"], facts["paper"], arguments, origin(facts)) if line)
    yield from ("", f"Settings of every recipe: {', '.join(SETTINGS)}.")
    yield "`sparring recipes NAME` describes each; change one with `sparring train --set NAME=VALUE`."
    yield "A custom recipe is FILE.py:FUNCTION or MODULE:FUNCTION; see docs/guide/extend.md."


def _one(name: str, facts: dict[str, Any]) -> Iterator[Any]:
    yield from filter(None, (f"{name}: {facts['summary']}", *facts["notes"], facts["paper"], origin(facts)))
    for title, key in (("argument", "arguments"), ("setting", "setup")):
        if facts[key]:
            columns = ("path", "default", "type", "description")
            rows = [[each[column] for column in columns] for each in facts[key].values()]
            yield from ("", table([[title, *columns[1:]], *rows], left=4))


def _usable() -> Iterator[tuple[str, dict[str, Any]]]:
    """Our recipes and those of installed packages, by name; a warning for each that cannot be used."""
    from sparring.recipes import RECIPES
    from sparring.recipes.finding import installed

    for name in (*RECIPES, *installed()):
        try:
            yield name, recipe_facts(name)
        except UserError as error:
            note(" ".join(str(error).split()), "warning")


def recipe_facts(name: str) -> dict[str, Any]:
    """A recipe's summary, paper, origin, arguments and settings, each with its type, default and description."""
    from sparring.recipes import settings
    from sparring.recipes.finding import find, source
    from sparring.recipes.setup import SETTINGS

    recipe = find(name)
    lines = (inspect.getdoc(recipe) or "no docstring").splitlines()
    setup = settings.own_setup(recipe).flat()
    return {
        "summary": lines[0],
        "notes": [line for line in lines[1:-1] if line],
        "paper": lines[-1] if len(lines) > 1 else "",
        "source": source(name),
        "arguments": argument_facts(recipe),
        "setup": {
            name: {"path": each.path, **_type(each.kind, setup[name]), "description": each.description}
            for name, each in SETTINGS.items()
        },
    }


def argument_facts(function: Callable[..., Any], prefix: str = "") -> dict[str, dict[str, str]]:
    """The arguments of a recipe or the options of a model: name for --set, type, default and description."""
    from sparring.core.finding import argument_metadata, own_arguments

    metadata = argument_metadata(function)
    descriptions = {key: next((x for x in each if isinstance(x, str)), "") for key, each in metadata.items()}
    return {
        key: {"path": f"{prefix}{key}", **_type(kind, default), "description": descriptions[key]}
        for key, (kind, default) in own_arguments(function).items()
    }


def _type(kind: Any, default: object) -> dict[str, str]:
    """The type of a value and its default, as --set takes them."""
    from sparring.recipes.setup import type_name

    return {"type": type_name(kind), "default": value_text(default)}


def value_text(value: object) -> str:
    """A value as --set takes it."""
    if isinstance(value, tuple | dict):
        return ",".join(map(str, value)) or "empty"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def origin(facts: dict[str, Any]) -> str:
    """Where a recipe or a model comes from, if it is not ours."""
    return "" if facts["source"] == "sparring" else f"from {facts['source']}"
