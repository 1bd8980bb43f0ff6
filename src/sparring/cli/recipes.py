"""sparring recipes: every recipe with its paper, or one with all its arguments and settings."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from sparring.cli import auto
from sparring.cli.listing import (
    Facts,
    argument_facts,
    described,
    function_facts,
    indented,
    origin,
    type_facts,
    usable,
)
from sparring.cli.parsing import Commands, add_json
from sparring.cli.screen import heading, result

_AUTO = (
    "    sparring train --data FILE --recipe auto --budget 10m",
    "It has no settings but select and seed; docs/guide/train.md says how it chooses.",
)


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
    from sparring.recipes import RECIPES
    from sparring.recipes.finding import installed, named

    if args.name == auto.AUTO:
        return result(args, [{auto.AUTO: {"summary": auto.SUMMARY}}], f"auto: {auto.SUMMARY}", *_AUTO)
    if args.name is not None:
        name = named(args.name)
        facts = recipe_facts(name)
        return result(args, [{name: facts}], *_one(name, facts))
    known = usable((*RECIPES, *installed()), recipe_facts)
    return result(args, [known], *_all(known))


def _all(known: dict[str, Facts]) -> Iterator[Any]:
    from sparring.recipes.setup import SETTINGS

    for name, facts in known.items():
        yield heading(name)
        arguments = "  ".join(f"{key}={value['default']}" for key, value in facts["arguments"].items())
        yield from indented((facts["summary"], facts["paper"], arguments, origin(facts)))
    yield from ("", f"`--recipe auto`: {auto.SUMMARY}")
    yield from ("", f"Settings of every recipe: {', '.join(SETTINGS)}.")
    yield "`sparring recipes NAME` describes each; change one with `sparring train --set NAME=VALUE`."
    yield "A custom recipe is FILE.py:FUNCTION or MODULE:FUNCTION; see docs/guide/extend.md."


def _one(name: str, facts: Facts) -> Iterator[Any]:
    yield from filter(None, (f"{name}: {facts['summary']}", *facts["notes"], facts["paper"], origin(facts)))
    yield from described("argument", facts["arguments"])
    yield from described("setting", facts["setup"])


def recipe_facts(name: str) -> Facts:
    """A recipe's summary, paper, origin, arguments and settings, each with its type, default and description."""
    from sparring.recipes import settings
    from sparring.recipes.finding import find, source
    from sparring.recipes.setup import SETTINGS

    recipe = find(name)
    setup = settings.own_setup(recipe).flat()
    described_settings = {
        name: {"path": each.path, **type_facts(each.kind, setup[name]), "description": each.description}
        for name, each in SETTINGS.items()
    }
    return function_facts(recipe, source(name)) | {"arguments": argument_facts(recipe), "setup": described_settings}
