"""sparring models: every model with its paper and options, or one with all of them described."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from sparring.cli.parsing import Commands, add_json
from sparring.cli.recipes import argument_facts, origin, value_text
from sparring.cli.screen import note, result, table
from sparring.core.errors import UserError


def add_models(commands: Commands) -> None:
    parser = commands.add(
        "models",
        "List every model that a recipe can train, or describe the options of one.",
        "sparring models history",
        models,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="describe the options of this model")
    add_json(parser)


def models(args: Namespace) -> int:
    from sparring.models.finding import named

    if args.name is not None:
        name = named(args.name)
        facts = model_facts(name)
        return result(args, [{name: facts}], *_one(name, facts))
    known = dict(_usable())
    return result(args, [known], *_all(known))


def _all(known: dict[str, dict[str, Any]]) -> Iterator[Any]:
    for name, facts in known.items():
        yield Text(name, style="bold")
        options = "  ".join(f"model.{key}={value['default']}" for key, value in facts["options"].items())
        lines = (facts["summary"], facts["paper"], options, _usual(facts), origin(facts))
        yield from (f"    {line}" for line in lines if line)
    yield ""
    yield "`sparring train --model NAME --set model.OPTION=VALUE` trains one with any recipe."
    yield "A custom model is FILE.py:FUNCTION or MODULE:FUNCTION; see docs/guide/models.md."


def _one(name: str, facts: dict[str, Any]) -> Iterator[Any]:
    lines = (f"{name}: {facts['summary']}", *facts["notes"], facts["paper"], _usual(facts), origin(facts))
    yield from filter(None, lines)
    if facts["options"]:
        columns = ("path", "default", "type", "description")
        rows = [[each[column] for column in columns] for each in facts["options"].values()]
        yield from ("", table([["option", *columns[1:]], *rows], left=4))


def _usual(facts: dict[str, Any]) -> str:
    settings = ", ".join(f"{name}={value_text(value)}" for name, value in facts["usual"].items())
    return f"usually with {settings}" if settings else ""


def _usable() -> Iterator[tuple[str, dict[str, Any]]]:
    """Our models and those of installed packages, by name; a warning for each that cannot be used."""
    from sparring.models.finding import installed
    from sparring.models.named import MODELS

    for name in (*MODELS, *installed()):
        try:
            yield name, model_facts(name)
        except UserError as error:
            note(" ".join(str(error).split()), "warning")


def model_facts(name: str) -> dict[str, Any]:
    """A model's summary, paper, origin, usual settings, and options with type, default and description."""
    from sparring.models.finding import find, source
    from sparring.models.named import usual_settings

    model = find(name)
    lines = (inspect.getdoc(model) or "no docstring").splitlines()
    return {
        "summary": lines[0],
        "notes": [line for line in lines[1:-1] if line],
        "paper": lines[-1] if len(lines) > 1 else "",
        "source": source(name),
        "usual": dict(usual_settings(model)),
        "options": argument_facts(model, "model."),
    }
