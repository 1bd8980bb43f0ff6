"""Sparring: train, evaluate, index and serve large-scale retrievers, with any negative sampling in about ten lines.

Public names are those listed here and in `__all__` of each package. Everything else may change without notice.
"""

from __future__ import annotations

import os
from importlib import import_module

__version__ = "0.2.0"

# OpenMP reads it when torch is first imported. Threads that spin while they wait for each other are many times slower
# when another process wants their core; threads that sleep at once make a training alone twice as slow. So they spin a
# few microseconds. If torch was imported before, this still holds for processes started from here.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Loaded on first use: torch takes seconds to import, and `sparring --help` needs none of it. __init__.pyi has the
# types.
_PACKAGES = ("core", "data", "evaluation", "losses", "models", "negatives", "recipes", "serving", "testing", "training")
_HOMES = {
    "Evaluation": "evaluation.ranking",
    "Fitted": "training.fitting",
    "Interactions": "data.interactions",
    "Recommender": "experiments.recommender",
    "Run": "recipes.run",
    "Setup": "recipes.setup",
    "Split": "data.interactions",
    "Term": "recipes.run",
    "Trained": "training.trained",
    "UserError": "core.errors",
    "auto": "experiments.auto",
    "build": "recipes.settings",
    "compose": "recipes.run",
    "describe_batch": "training.step",
    "evaluate": "evaluation.ranking",
    "fit": "training.fitting",
    "fuse": "training.fusing",
    "load": "training.trained",
    "prepare": "data.prepared.preparation",
    "read": "data.reading",
    "split": "data.splits",
}
__all__ = [*_HOMES, *_PACKAGES]


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f"sparring.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'sparring' has no attribute {name!r}")
    value = getattr(import_module(f"sparring.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
