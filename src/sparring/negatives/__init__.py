"""Samplers: the choice of candidates and their weights, as parts that combine (Union, Resample, Hardest, Unless).

A sampler returns a bag. Scoring the bag is the task of `losses`; nothing here trains or reads data.
"""

from sparring.negatives.algebra import DrawMethod, Resample, Union
from sparring.negatives.base import UNKNOWN, Correction, ExcludeKind, Negatives, corrected, exclude_for
from sparring.negatives.buckets import HardestBucket
from sparring.negatives.clusters import CellExcludeKind, CountCorrection, Distance, OtherClusters, SameCluster
from sparring.negatives.distributions import Distribution, Frequency, Popularity, Streaming, Uniform
from sparring.negatives.fair import GroupShares, Tilted
from sparring.negatives.filtered import Unless
from sparring.negatives.guides import Guide, OwnScores, RelatedItems, ScoreFunction, TableScores, VectorScores
from sparring.negatives.in_batch import BatchPositives, InBatch
from sparring.negatives.interpolation import Interpolated, LamRule, Normalisation, TowardsPositive
from sparring.negatives.memory import Cache, Memory
from sparring.negatives.nearest import NearestItems
from sparring.negatives.quantized import QuantizedSoftmax
from sparring.negatives.sampled import AllItems, Sampled, Shown
from sparring.negatives.selection import AmongHardest, Hardest, NearestTo
from sparring.negatives.synthetic import BatchMix, MixHops, MixPositive

__all__ = [
    "UNKNOWN",
    "AllItems",
    "AmongHardest",
    "BatchMix",
    "BatchPositives",
    "Cache",
    "CellExcludeKind",
    "CountCorrection",
    "Correction",
    "Distance",
    "Distribution",
    "DrawMethod",
    "ExcludeKind",
    "Frequency",
    "GroupShares",
    "Guide",
    "Hardest",
    "HardestBucket",
    "InBatch",
    "Interpolated",
    "Memory",
    "MixHops",
    "MixPositive",
    "NearestItems",
    "NearestTo",
    "Negatives",
    "Normalisation",
    "OtherClusters",
    "OwnScores",
    "Popularity",
    "QuantizedSoftmax",
    "RelatedItems",
    "Resample",
    "LamRule",
    "SameCluster",
    "Sampled",
    "ScoreFunction",
    "Shown",
    "Streaming",
    "Tilted",
    "TableScores",
    "TowardsPositive",
    "Uniform",
    "Union",
    "Unless",
    "VectorScores",
    "corrected",
    "exclude_for",
]
