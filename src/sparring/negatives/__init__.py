"""Every way of choosing negatives, as parts that combine."""

from sparring.negatives.algebra import Correction, Draw, Exclusion, Negatives, Resample, Union
from sparring.negatives.ance import BatchPositives, NearestItems
from sparring.negatives.batch import Cache, InBatch, Memory
from sparring.negatives.buckets import HardestBucket
from sparring.negatives.clusters import CellExclusion, CountCorrection, Distance, OtherClusters, SameCluster
from sparring.negatives.corpus import AllItems, Sampled, Shown
from sparring.negatives.distributions import Distribution, Frequency, Popularity, Streaming, Uniform
from sparring.negatives.edis import Interpolated, Normalisation, Rule, TowardsPositive
from sparring.negatives.fair import GroupShares, Tilted
from sparring.negatives.midx import QuantizedSoftmax
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
