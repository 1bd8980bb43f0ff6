"""Exact ranking of a catalogue, metrics of its lists, tests of differences between them; BM25 and TF-IDF as references.

Anything that encodes queries and items can be evaluated; nothing here trains. Ties are broken in core/topk.py.
"""

from sparring.evaluation.metrics import DIALECTS, METRICS
from sparring.evaluation.ranking import Evaluation, evaluate, evaluate_lists

__all__ = ["DIALECTS", "METRICS", "Evaluation", "evaluate", "evaluate_lists"]
