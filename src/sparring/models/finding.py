"""Models by name: one of ours, one from an installed package, or a function in a file or module."""

from __future__ import annotations

from dataclasses import fields

from sparring.core.errors import UserError
from sparring.core.finding import Finder, check_arguments, own_arguments, parameters
from sparring.models.named import MODELS, Model
from sparring.models.settings import ModelSettings

__all__ = ["Model", "find", "installed", "is_ours", "lasting", "named", "passed", "short", "source"]


def _check(model: Model, name: str) -> None:
    """Refuse a function that does not start with (inputs, settings), and options that hide a setting."""
    found = parameters(model, "model", name, "(inputs, settings, *, ...) -> Retriever")
    if [p.name for p in found[:2]] != ["inputs", "settings"]:
        raise UserError(f"the model {name} must start with (inputs, settings): Inputs and ModelSettings")
    check_arguments(model, "model", name)
    taken = {field.name for field in fields(ModelSettings)} & own_arguments(model).keys()
    if taken:
        option = min(taken)
        raise UserError(f"the option {option!r} of the model {name} is a setting: read settings.{option}, or rename it")


_finder = Finder("model", MODELS, _check)
find, named, lasting, short, passed = _finder.find, _finder.named, _finder.lasting, _finder.short, _finder.passed
is_ours, installed, source = _finder.is_ours, _finder.installed, _finder.source
