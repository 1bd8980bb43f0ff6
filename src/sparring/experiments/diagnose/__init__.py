"""Diagnosis of samplers: their error against the full softmax on a given model, and advice.

A diagnosis never trains and leaves the run unchanged.
"""

from sparring.experiments.diagnose.advice import Advice, advise, tables
from sparring.experiments.diagnose.measures import Diagnosis, diagnose
from sparring.experiments.diagnose.samplers import with_negatives_of

__all__ = ["Advice", "Diagnosis", "advise", "diagnose", "tables", "with_negatives_of"]
