"""Every way of choosing negatives, as parts that combine."""

from sparring.negatives.algebra import Correction, Draw, Exclusion, Negatives, Resample, Union
from sparring.negatives.batch import Cache, InBatch, Memory
from sparring.negatives.corpus import AllItems, Sampled, Shown
from sparring.negatives.distributions import Distribution, Frequency, Popularity, Streaming, Uniform
from sparring.negatives.fair import GroupShares, Tilted
from sparring.negatives.midx import QuantizedSoftmax
from sparring.negatives.selection import AmongHardest, Hardest, NearestTo
from sparring.negatives.synthetic import BatchMix, MixPositive

__all__ = [
    "AllItems",
    "AmongHardest",
    "BatchMix",
    "Cache",
    "Correction",
    "Distribution",
    "Draw",
    "Exclusion",
    "Frequency",
    "GroupShares",
    "Hardest",
    "InBatch",
    "Memory",
    "MixPositive",
    "NearestTo",
    "Negatives",
    "Popularity",
    "QuantizedSoftmax",
    "Resample",
    "Sampled",
    "Shown",
    "Streaming",
    "Tilted",
    "Uniform",
    "Union",
]
