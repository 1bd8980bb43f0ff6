"""Lists of named functions, recipes and models, and what a table says about each of them and their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sparring.cli.screen import note, table
from sparring.core.errors import UserError

Facts = dict[str, Any]


def usable(names: Iterable[str], facts: Callable[[str], Facts]) -> dict[str, Facts]:
    """The facts of each name; a warning for each that cannot be used."""
    found: dict[str, Facts] = {}
    for name in names:
        try:
            found[name] = facts(name)
        except UserError as error:
            note(" ".join(str(error).split()), "warning")
    return found


def function_facts(function: Callable[..., Any], source: str) -> Facts:
    """Summary, notes and paper of a function, from its docstring, and where it comes from."""
    lines = (inspect.getdoc(function) or "no docstring").splitlines()
    notes, paper = [line for line in lines[1:-1] if line], lines[-1] if len(lines) > 1 else ""
    return {"summary": lines[0], "notes": notes, "paper": paper, "source": source}


def argument_facts(function: Callable[..., Any], prefix: str = "") -> dict[str, dict[str, str]]:
    """The arguments of a recipe or the options of a model: name for --set, type, default and description."""
    from sparring.core.finding import argument_metadata, own_arguments

    metadata = argument_metadata(function)
    descriptions = {key: next((x for x in each if isinstance(x, str)), "") for key, each in metadata.items()}
    return {
        key: {"path": f"{prefix}{key}", **type_facts(kind, default), "description": descriptions[key]}
        for key, (kind, default) in own_arguments(function).items()
    }


def type_facts(kind: Any, default: object) -> dict[str, str]:
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


def origin(facts: Facts) -> str:
    """Where a recipe or a model comes from, if it is not ours."""
    return "" if facts["source"] == "sparring" else f"from {facts['source']}"


def indented(lines: Iterable[str]) -> Iterator[str]:
    """The lines below a name in a list, empty ones left out."""
    return (f"    {line}" for line in lines if line)


def described(title: str, facts: dict[str, dict[str, str]]) -> Iterator[Any]:
    """A table of arguments or settings; nothing if there are none."""
    if facts:
        columns = ("path", "default", "type", "description")
        rows = [[each[column] for column in columns] for each in facts.values()]
        yield from ("", table([[title, *columns[1:]], *rows], left=4))
