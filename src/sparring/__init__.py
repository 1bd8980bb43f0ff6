"""Sparring: train, evaluate, index and serve large-scale retrievers, with any negative sampling in about ten lines."""

from sparring import negatives, recipes
from sparring.data.interactions import Interactions, Split
from sparring.data.readers import read
from sparring.data.splits import split
from sparring.errors import UserError
from sparring.evaluate import Evaluation, evaluate
from sparring.recipes import Run, Setup, Term, compose
from sparring.runs import Trained, load
from sparring.settings import build
from sparring.train import Fitted, fit

__version__ = "0.1.0"

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
    "evaluate",
    "fit",
    "load",
    "negatives",
    "read",
    "recipes",
    "split",
]
