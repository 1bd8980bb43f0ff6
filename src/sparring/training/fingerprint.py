"""A canonical description of a run's terms, compared on resume to detect a changed method."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
from torch import nn

from sparring.losses.softmax import PartitionLoss
from sparring.recipes.run import Run

_MANY = 32  # the most values of a list that are written out


def method(run: Run) -> dict[str, str]:
    """The terms and the temperature of a run: the names of classes and functions with their arguments."""
    terms = {
        f"term {i}": f"{float(t.weight):g} x {described(t.loss)} over {described(t.negatives)}"
        for i, t in enumerate(run.terms, 1)
    }
    solver = {} if run.solver is None else {"solver": described(run.solver)}
    return {**terms, **solver, "temperature": described(run.temperature)}


def described(value: object) -> str:
    """A sampler, a loss or an argument as text, equal in every process: no tensors, no addresses, no trained state.

    For a module: the arguments of __init__ that it has as attributes (with or without an underscore), and its
    submodules. For a closure: the values it holds.

        described(Sampled(Uniform(40), 8))   # Sampled(distribution=Uniform(n_items=40), n=8, per_query=False, ...)
    """
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}({_listed(_arguments(value).items())})"
    if isinstance(value, PartitionLoss):
        return described(value.form)
    if isinstance(value, partial):
        arguments = [*(("", argument) for argument in value.args), *value.keywords.items()]
        return f"{described(value.func)}({_listed(arguments)})"
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        held = [(name, cell.cell_contents) for name, cell in cells if not isinstance(cell.cell_contents, FunctionType)]
        return f"{value.__name__}({_listed(held)})" if held else value.__name__
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str | int | float | bool | type(None)):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(described, value))})" if len(value) <= _MANY else f"{len(value):,} values"
    if isinstance(value, Mapping):
        return f"{{{_listed(value.items())}}}" if len(value) <= _MANY else f"{len(value):,} values"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return f"{type(value).__name__}({_listed(fields)})"
    return getattr(value, "__name__", type(value).__name__)


def _arguments(module: nn.Module) -> dict[str, Any]:
    attributes = {**vars(module), **module._modules}
    arguments: dict[str, Any] = {}
    for name in inspect.signature(type(module)).parameters:
        attribute = name if name in attributes else f"_{name}"
        if attribute in attributes:
            arguments[name] = attributes.pop(attribute)
    return {**arguments, **{name: child for name, child in module._modules.items() if name in attributes}}


def _listed(items: Iterable[tuple[object, object]]) -> str:
    return ", ".join(f"{name}={described(value)}" if name != "" else described(value) for name, value in items)
