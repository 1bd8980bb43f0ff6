"""Recipes by name: one of ours, one from an installed package, or a function in a file or module."""

from __future__ import annotations

from collections.abc import Callable

from sparring.core.errors import UserError
from sparring.core.finding import Finder, check_arguments, parameters, source_digest
from sparring.recipes import RECIPES
from sparring.recipes.run import Run
from sparring.recipes.setup import Setup

__all__ = ["Recipe", "find", "installed", "is_ours", "lasting", "named", "short", "source", "source_digest"]

Recipe = Callable[..., Run]


def _check(recipe: Recipe, name: str) -> None:
    """Refuse a function without a Setup, and arguments without a type or a default."""
    found = parameters(recipe, "recipe", name, "(data, setup=Setup(...), *, ...) -> Run")
    setup = next((p for p in found[1:2] if p.name == "setup" and isinstance(p.default, Setup)), None)
    if setup is None:
        raise UserError(f"the recipe {name} must start with (data, setup=Setup(...)): the default must be a Setup")
    check_arguments(recipe, "recipe", name)
    if any(p.name == "model" for p in found):
        raise UserError(f"the argument 'model' of the recipe {name} hides the setting of this name: rename it")


_finder = Finder("recipe", RECIPES, _check)
find, named, lasting, short = _finder.find, _finder.named, _finder.lasting, _finder.short
is_ours, installed, source = _finder.is_ours, _finder.installed, _finder.source
