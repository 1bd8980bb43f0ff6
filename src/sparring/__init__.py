"""Sparring: train, evaluate, index and serve large-scale retrievers, with any negative sampling in about ten lines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparring import negatives, recipes
    from sparring.composition import Run, Setup, Term, compose
    from sparring.contrast import describe_batch
    from sparring.data.interactions import Interactions, Split
    from sparring.data.prepare import prepare
    from sparring.data.readers import read
    from sparring.data.splits import split
    from sparring.errors import UserError
    from sparring.evaluation import Evaluation, evaluate
    from sparring.runs import Trained, load
    from sparring.settings import build
    from sparring.stages import fit_stages as fit
    from sparring.train import Fitted

__version__ = "0.1.0"

# Imported when first used: torch takes seconds to load, and `sparring --help` needs none of it.
_HOME = {
    "Evaluation": "evaluation",
    "Fitted": "train",
    "Interactions": "data.interactions",
    "Run": "composition",
    "Setup": "composition",
    "Split": "data.interactions",
    "Term": "composition",
    "Trained": "runs",
    "UserError": "errors",
    "build": "settings",
    "compose": "composition",
    "describe_batch": "contrast",
    "evaluate": "evaluation",
    "fit": "stages",
    "load": "runs",
    "prepare": "data.prepare",
    "read": "data.readers",
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
    found = getattr(import_module(f"sparring.{_HOME[name]}"), "fit_stages" if name == "fit" else name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
