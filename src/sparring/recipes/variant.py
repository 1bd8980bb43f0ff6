"""A recipe that is another one with other defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from sparring.recipes.run import Run

P = ParamSpec("P")


def variant(recipe: Callable[P, Run], name: str, doc: str, defaults: Mapping[str, Any]) -> Callable[P, Run]:
    """The same arguments, with these `defaults` (of the setup, or of the recipe's own arguments) instead of the recipe's.

    dexa = variant(ngame, "dexa", "NGAME with free vectors ...", {"setup": replace(NGAME, auxiliary=4)})
    """
    before = inspect.signature(recipe)
    unknown = defaults.keys() - before.parameters.keys()
    if unknown:
        raise ValueError(f"{recipe.__name__} has no argument {sorted(unknown)[0]!r}")
    given = [each.replace(default=defaults.get(each.name, each.default)) for each in before.parameters.values()]
    signature = before.replace(parameters=given)

    @functools.wraps(recipe)
    def call(*args: P.args, **own: P.kwargs) -> Run:
        bound = signature.bind(*args, **own)
        bound.apply_defaults()
        return recipe(*bound.args, **bound.kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    return call
