"""Losses, functions or modules of (step, bag) with one value per query, and temperatures.

Nothing here draws candidates: that is the task of `negatives`.
"""

from sparring.losses.adaptive import AdaTau, adaptive_softmax
from sparring.losses.distillation import Distil, DistilForm
from sparring.losses.mined import HardPairs, OnlineHard, Reduction
from sparring.losses.pairwise import Surrogate, bpr, ccl, gbce, hinge, psl
from sparring.losses.softmax import BSLForm, Loss, bsl, sampled_softmax, softmax_loss
from sparring.losses.softmax_at_k import SLatK
from sparring.losses.temperature import Fixed, Learned
from sparring.losses.wrappers import Matryoshka, Symmetric

__all__ = [
    "AdaTau",
    "BSLForm",
    "Distil",
    "DistilForm",
    "Fixed",
    "HardPairs",
    "Learned",
    "Loss",
    "Matryoshka",
    "OnlineHard",
    "Reduction",
    "SLatK",
    "Surrogate",
    "Symmetric",
    "adaptive_softmax",
    "bpr",
    "bsl",
    "ccl",
    "gbce",
    "hinge",
    "psl",
    "sampled_softmax",
    "softmax_loss",
]
