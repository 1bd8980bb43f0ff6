"""Experiments over many trainings: comparing, tuning, diagnosing, reproducing papers, and their reports;
and mining hard negatives.

Experiments train through `sparring.training`; nothing below them knows that they exist.
"""

from sparring.experiments.auto import Choice
from sparring.experiments.comparison import ComparedData, Comparison, compare
from sparring.experiments.comparison_tables import quality
from sparring.experiments.mining import Mined, Mining, mine
from sparring.experiments.recommender import Recommender
from sparring.experiments.search_space import OneOf, Range

__all__ = [
    "Choice",
    "ComparedData",
    "Comparison",
    "Mined",
    "Mining",
    "OneOf",
    "Range",
    "Recommender",
    "compare",
    "mine",
    "quality",
]
