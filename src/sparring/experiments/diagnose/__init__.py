"""How well a sampler estimates the full softmax on a given model, and advice that follows from it."""

from sparring.experiments.diagnose.advice import Advice, advise, tables
from sparring.experiments.diagnose.measures import Diagnosis, diagnose
from sparring.experiments.diagnose.samplers import opponent

__all__ = ["Advice", "Diagnosis", "advise", "diagnose", "opponent", "tables"]
