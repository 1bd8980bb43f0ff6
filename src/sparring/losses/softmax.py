"""Losses that are a weighted log-sum-exp over the bag: sampled softmax, SL, BSL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.core.partition import log_partition
from sparring.core.types import Bag, LossOutput, Step

Loss = Callable[[Step, Bag], Tensor]
BSLForm = Literal["corrected", "release"]


class PartitionLoss:
    """A loss that is a function of the step, the bag and the log partition function of the bag (B,).

    `detailed` also returns the draw counts, which a closed form has as a by-product.

        @PartitionLoss
        def my_loss(step, bag, log_z): return log_z - weighted_positive(step, bag)
    """

    def __init__(self, form: Callable[[Step, Bag, Tensor], Tensor]) -> None:
        self.form, self.__name__, self.__doc__ = form, form.__name__, form.__doc__

    def __call__(self, step: Step, bag: Bag) -> Tensor:
        return self.detailed(step, bag).losses

    def detailed(self, step: Step, bag: Bag) -> LossOutput:
        log_z, counts = log_partition(step, bag)
        return LossOutput(self.form(step, bag, log_z), counts)

    def __reduce__(self) -> str:
        return self.__name__  # pickled by name, as a function is


@PartitionLoss
def sampled_softmax(step: Step, bag: Bag, log_z: Tensor) -> Tensor:
    """Minus log probability of the positive against the bag (sampled softmax, InfoNCE).

        loss_i = -t_i + log( exp(t_i) + sum_j exp(q_i . e_j / tau_i + log_w_ij) ),   t_i = q_i . v_i / tau_i + log_w_i+

    If everything in the bag is excluded, the loss is 0.
    """
    return -F.logsigmoid(weighted_positive(step, bag) - log_z)


@PartitionLoss
def softmax_loss(step: Step, bag: Bag, log_z: Tensor) -> Tensor:
    """The softmax loss with the negatives alone under the logarithm (SL, SSM).

        loss_i = -t_i + log sum_j exp(q_i . e_j / tau_i + log_w_ij),   t_i = q_i . v_i / tau_i + log_w_i+

    A weight w counts a candidate w times. Unlike sampled_softmax it never saturates: a positive far above its negatives
    is still pushed up, and a factor common to all weights (the log n of a correction) adds a constant and changes no
    gradient. It may be negative. If everything in the bag is excluded, it is 0.

        Term(1.0, Sampled(Uniform(n_items), 800, correction="none"), softmax_loss)

    Wu et al., On the Effectiveness of Sampled Softmax Loss for Item Recommendation, TOIS 2024.
    """
    return above(log_z, weighted_positive(step, bag))


def bsl(exponent: float = 1.0, form: BSLForm = "corrected") -> Loss:
    """The softmax loss with separate temperatures for positives and negatives (BSL, bilateral softmax loss).

        corrected   loss_i = -q_i . v_i / tau_1 + (tau_2 / tau_1) L_i,   tau_2 = step.tau,  tau_2 / tau_1 = exponent
        release     loss_i = -q_i . v_i / tau + exponent L_i
        L_i = log sum_j exp(q_i . e_j / tau_i + log_w_ij)

    With one positive per query the corrected form is `exponent` times softmax_loss at tau_2, so Adam without weight
    decay trains the same model. The authors' scripts run the release form: an exponent above 1 pushes negatives away
    harder than it pulls the positive in. With exponent 1 both are softmax_loss. Weights and exclusion as there.

        bsl(1.22, form="release")

    Wu et al., BSL: Understanding and Improving Softmax Loss for Recommendation, ICDE 2024.
    """
    if not exponent > 0:
        raise ValueError(f"the exponent of BSL must be positive, got {exponent}")
    if form not in ("corrected", "release"):
        raise ValueError(f"form must be one of corrected, release; got {form!r}")

    @PartitionLoss
    def bsl(step: Step, bag: Bag, log_z: Tensor) -> Tensor:
        positive = weighted_positive(step, bag)
        return above(exponent * log_z, positive * exponent if form == "corrected" else positive)

    return bsl


def weighted_positive(step: Step, bag: Bag) -> Tensor:
    """q_i . v_i / tau_i + log_w_i+, (B,)."""
    return step.positive_logits if bag.log_w_positive is None else step.positive_logits + bag.log_w_positive


def above(negatives: Tensor, positive: Tensor) -> Tensor:
    """negatives - positive; 0 without gradient if nothing counts against a query."""
    return torch.where(torch.isneginf(negatives), 0.0, negatives - positive)
