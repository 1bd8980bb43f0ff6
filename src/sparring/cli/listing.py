"""What there is: recipes with their settings, data sets with their origin, the content of a file."""

from __future__ import annotations

import inspect
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

from sparring.cli import inputs, screen
from sparring.core.errors import UserError


def recipes(args: Namespace) -> int:
    from sparring.recipes import finding
    from sparring.recipes.setup import SETTINGS

    found = _usable() if args.name is None else ((name, recipe_facts(name)) for name in [finding.named(args.name)])
    if args.json:
        print(json.dumps(dict(found), indent=2))
        return 0
    show = screen.console()
    if args.name is not None:
        _one_recipe(*next(found))
        return 0
    for name, facts in found:
        show.print(Text(name, style="bold"), soft_wrap=True)
        arguments = "  ".join(f"{key}={value['default']}" for key, value in facts["arguments"].items())
        for line in filter(None, (facts["summary"], facts["paper"], arguments, _come(facts))):
            show.print(f"    {line}", markup=False, soft_wrap=True)
    show.print(f"\nEvery recipe also takes: {', '.join(SETTINGS)}.", markup=False)
    show.print(
        "`sparring recipes NAME` shows types and defaults; change one with `sparring train --set name=value`.",
        markup=False,
    )
    show.print(
        "A recipe of your own is named FILE.py:FUNCTION or MODULE:FUNCTION; see docs/guide/extend.md.", markup=False
    )
    return 0


def _usable() -> Iterator[tuple[str, dict[str, Any]]]:
    """Our recipes and those of installed packages, by name; a warning says why one of theirs cannot be used."""
    from sparring.recipes import RECIPES
    from sparring.recipes.finding import installed

    for name in (*RECIPES, *installed()):
        try:
            facts = recipe_facts(name)
        except UserError as error:
            screen.tell(f"warning: {' '.join(str(error).split())}")
        else:
            yield name, facts


def recipe_facts(name: str) -> dict[str, Any]:
    """What a recipe is, its paper, where it comes from, its own arguments and the settings it shares, with types and defaults."""
    from sparring.recipes import finding, settings
    from sparring.recipes.finding import source
    from sparring.recipes.setup import SETTINGS

    recipe = finding.find(name)
    lines = (inspect.getdoc(recipe) or "no docstring").splitlines()
    setup, metadata = settings.own_setup(recipe).flat(), settings.argument_metadata(recipe)
    return {
        "summary": lines[0],
        "notes": [line for line in lines[1:-1] if line],
        "paper": lines[-1] if len(lines) > 1 else "",
        "source": source(name),
        "arguments": {
            key: {**_kind(kind, default), "description": next((x for x in metadata[key] if isinstance(x, str)), "")}
            for key, (kind, default) in settings.own_arguments(recipe).items()
        },
        "setup": {
            name: {"group": each.group, **_kind(each.kind, setup[name]), "description": each.description}
            for name, each in SETTINGS.items()
        },
    }


def _kind(kind: Any, default: object) -> dict[str, str]:
    from sparring.recipes.setup import type_name

    if isinstance(default, tuple):
        written = ",".join(map(str, default)) or "empty"
    elif isinstance(default, bool) or default is None:
        written = str(default).lower()
    else:
        written = f"{default:g}" if isinstance(default, float) else str(default)
    return {"type": type_name(kind), "default": written}


def _come(facts: dict[str, Any]) -> str:
    return "" if facts["source"] == "sparring" else f"from {facts['source']}"


def _one_recipe(name: str, facts: dict[str, Any]) -> None:
    show = screen.console()
    for line in filter(None, (f"{name}: {facts['summary']}", *facts["notes"], facts["paper"], _come(facts))):
        show.print(line, markup=False, soft_wrap=True)
    for title, key in (
        ("its own arguments", "arguments"),
        ("settings of every recipe, with this one's defaults", "setup"),
    ):
        if facts[key]:
            rows = [
                [setting, kind["default"], kind["type"], kind["description"]] for setting, kind in facts[key].items()
            ]
            show.print()
            show.print(screen.table([[title, "default", "type", "description"], *rows], left=4))


def data_list(args: Namespace) -> int:
    from sparring.data.public_sets import PUBLIC_SETS

    rows = [[public.name, public.summary, public.size, public.terms] for public in PUBLIC_SETS.values()]
    screen.console().print(screen.table([["name", "what", "queries x items, interactions", "terms"], *rows], left=4))
    return 0


def data_get(args: Namespace) -> int:
    from sparring.data.public_sets import download_set, find_set

    source = find_set(args.name)
    show = screen.console()
    show.print(
        f"{source.name}: {source.summary}; {source.home}",
        f"terms: {source.terms}",
        sep="\n",
        markup=False,
        soft_wrap=True,
    )
    with inputs.download_bar(source.name) as progress:
        folder = download_set(source.name, progress)
    show.print(f"in {folder}", markup=False, soft_wrap=True)
    return 0


def data_show(args: Namespace) -> int:
    from sparring.cli import explanation
    from sparring.data.reading import describe, describe_roles, show

    given = inputs.columns(args)
    try:
        data = inputs.read_data(args.data, given)
    except UserError as error:
        if given or not Path(args.data).is_file():
            raise
        columns = show(args.data).rpartition("\n")[
            0
        ]  # or it cannot be read at all; the last line says that it holds no interactions
        screen.console().print(columns, markup=False, soft_wrap=True)
        screen.tell(
            f"note: this does not read as interactions, though --items or --queries may take it: {explanation(error)}"
        )
        return 0
    told = describe_roles(Path(args.data), given) if Path(args.data).exists() else []
    screen.console().print(*told, describe(data), sep="\n", markup=False, soft_wrap=True)
    return 0
