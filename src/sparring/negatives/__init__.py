"""Every way of choosing negatives, as parts that combine."""

from sparring.negatives.base import Correction, Draw, Exclusion, Negatives, Resample, Union
from sparring.negatives.buckets import HardestBucket
from sparring.negatives.clusters import CellExclusion, CountCorrection, Distance, OtherClusters, SameCluster
from sparring.negatives.distributions import Distribution, Frequency, Popularity, Streaming, Uniform
from sparring.negatives.fair import GroupShares, Tilted
from sparring.negatives.in_batch import Cache, InBatch, Memory
from sparring.negatives.interpolation import Interpolated, Normalisation, Rule, TowardsPositive
from sparring.negatives.nearest import BatchPositives, NearestItems
from sparring.negatives.quantized import QuantizedSoftmax
from sparring.negatives.sampled import AllItems, Sampled, Shown
from sparring.negatives.selection import AmongHardest, Hardest, NearestTo
from sparring.negatives.synthetic import BatchMix, MixPositive

__all__ = [
    "AllItems",
    "AmongHardest",
    "BatchMix",
    "BatchPositives",
    "Cache",
    "CellExclusion",
    "CountCorrection",
    "Correction",
    "Distance",
    "Distribution",
    "Draw",
    "Exclusion",
    "Frequency",
    "GroupShares",
    "Hardest",
    "HardestBucket",
    "InBatch",
    "Interpolated",
    "Memory",
    "MixPositive",
    "NearestItems",
    "NearestTo",
    "Negatives",
    "Normalisation",
    "OtherClusters",
    "Popularity",
    "QuantizedSoftmax",
    "Resample",
    "Rule",
    "SameCluster",
    "Sampled",
    "Shown",
    "Streaming",
    "Tilted",
    "TowardsPositive",
    "Uniform",
    "Union",
]
