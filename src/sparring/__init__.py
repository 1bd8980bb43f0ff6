"""Sparring: train, evaluate, index and serve large-scale retrievers, with any negative sampling in about ten lines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparring import negatives, recipes
    from sparring.core.errors import UserError
    from sparring.data.interactions import Interactions, Split
    from sparring.data.prepared.preparation import prepare
    from sparring.data.reading import read
    from sparring.data.splits import split
    from sparring.evaluation.ranking import Evaluation, evaluate
    from sparring.recipes.run import Run, Setup, Term, compose
    from sparring.recipes.settings import build
    from sparring.training.fitting import Fitted, fit
    from sparring.training.step import describe_batch
    from sparring.training.trained import Trained, load

__version__ = "0.2.0"

# Imported when first used: torch takes seconds to load, and `sparring --help` needs none of it.
_HOME = {
    "Evaluation": "evaluation.ranking",
    "Fitted": "training.fitting",
    "Interactions": "data.interactions",
    "Run": "recipes.run",
    "Setup": "recipes.run",
    "Split": "data.interactions",
    "Term": "recipes.run",
    "Trained": "training.trained",
    "UserError": "core.errors",
    "build": "recipes.settings",
    "compose": "recipes.run",
    "describe_batch": "training.step",
    "evaluate": "evaluation.ranking",
    "fit": "training.fitting",
    "load": "training.trained",
    "prepare": "data.prepared.preparation",
    "read": "data.reading",
    "split": "data.splits",
}
__all__ = [
    "Evaluation",
    "Fitted",
    "Interactions",
    "Run",
    "Setup",
    "Split",
    "Term",
    "Trained",
    "UserError",
    "build",
    "compose",
    "describe_batch",
    "evaluate",
    "fit",
    "load",
    "negatives",
    "prepare",
    "read",
    "recipes",
    "split",
]


def __getattr__(name: str) -> object:
    if name in ("negatives", "recipes"):
        return import_module(f"sparring.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'sparring' has no attribute {name!r}")
    found = getattr(import_module(f"sparring.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
