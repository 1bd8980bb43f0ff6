"""Every way of choosing negatives, as parts that combine."""

from sparring.negatives.algebra import Correction, Draw, Exclusion, Hardest, Negatives, Resample, Union
from sparring.negatives.batch import Cache, InBatch, Memory
from sparring.negatives.corpus import AllItems, Sampled, Shown
from sparring.negatives.distributions import Distribution, Frequency, Popularity, Streaming, Uniform

__all__ = [
    "AllItems",
    "Cache",
    "Correction",
    "Distribution",
    "Draw",
    "Exclusion",
    "Frequency",
    "Hardest",
    "InBatch",
    "Memory",
    "Negatives",
    "Popularity",
    "Resample",
    "Sampled",
    "Shown",
    "Streaming",
    "Uniform",
    "Union",
]
