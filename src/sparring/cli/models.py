"""sparring models: every model with its paper and options, or one with all of them described."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from sparring.cli.listing import (
    Facts,
    argument_facts,
    described,
    function_facts,
    indented,
    origin,
    usable,
    value_text,
)
from sparring.cli.parsing import Commands, add_json
from sparring.cli.screen import heading, result


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
    from sparring.models.finding import installed, named
    from sparring.models.named import MODELS

    if args.name is not None:
        name = named(args.name)
        facts = model_facts(name)
        return result(args, [{name: facts}], *_one(name, facts))
    known = usable((*MODELS, *installed()), model_facts)
    return result(args, [known], *_all(known))


def _all(known: dict[str, Facts]) -> Iterator[Any]:
    for name, facts in known.items():
        yield heading(name)
        options = "  ".join(f"model.{key}={value['default']}" for key, value in facts["options"].items())
        yield from indented((facts["summary"], facts["paper"], options, _usual(facts), origin(facts)))
    yield ""
    yield "`sparring train --model NAME --set model.OPTION=VALUE` trains one with any recipe."
    yield "A custom model is FILE.py:FUNCTION or MODULE:FUNCTION; see docs/guide/models.md."


def _one(name: str, facts: Facts) -> Iterator[Any]:
    lines = (f"{name}: {facts['summary']}", *facts["notes"], facts["paper"], _usual(facts), origin(facts))
    yield from filter(None, lines)
    yield from described("option", facts["options"])


def _usual(facts: Facts) -> str:
    settings = ", ".join(f"{name}={value_text(value)}" for name, value in facts["usual"].items())
    return f"usually with {settings}" if settings else ""


def model_facts(name: str) -> Facts:
    """A model's summary, paper, origin, usual settings, and options with type, default and description."""
    from sparring.models.finding import find, source
    from sparring.models.named import usual_settings

    model = find(name)
    more = {"usual": dict(usual_settings(model)), "options": argument_facts(model, "model.")}
    return function_facts(model, source(name)) | more
