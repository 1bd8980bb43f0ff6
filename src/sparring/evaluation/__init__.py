"""Exact ranking of a catalogue, the metrics of its lists, and tests of differences between them.

Anything that encodes queries and items can be evaluated; nothing here trains.
"""

from sparring.evaluation.metrics import DIALECTS, METRICS
from sparring.evaluation.ranking import Evaluation, evaluate, evaluate_lists

__all__ = ["DIALECTS", "METRICS", "Evaluation", "evaluate", "evaluate_lists"]
