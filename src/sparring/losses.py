"""Losses: pure functions of a step and a bag that give one value per query; and temperatures."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparring.kernels import logits, reference, weighted_logsumexp
from sparring.types import Bag, Candidates, Outcome, Step

Loss = Callable[[Step, Bag], Tensor]


def sampled_softmax(step: Step, bag: Bag) -> Tensor:
    """Minus log probability of the positive against the bag (sampled softmax, InfoNCE).

        loss_i = -t_i + log( exp(t_i) + sum_j exp(q_i . e_j / tau_i + log_w_ij) ),   t_i = q_i . v_i / tau_i + log_w_i+

    With everything in the bag excluded the loss is 0.
    """
    positive = step.positive_logits
    if bag.log_w_positive is not None:
        positive = positive + bag.log_w_positive
    blocks = [_logsumexp(step, block) for block in bag.blocks]
    negatives = blocks[0] if len(blocks) == 1 else reference.safe_logsumexp(torch.stack(blocks, -1))
    return -F.logsigmoid(positive - negatives)


def bpr(step: Step, bag: Bag) -> Tensor:
    """Pairwise logistic loss: the weighted mean over the bag of log(1 + exp(s_ij - s_i+)), s = q . e / tau.

    Rendle et al., BPR: Bayesian Personalized Ranking from Implicit Feedback, UAI 2009.
    """
    return _pairwise(step, bag, F.softplus)


def hinge(margin: float = 0.3) -> Loss:
    """Pairwise hinge loss: the weighted mean over the bag of max(0, margin + s_ij - s_i+)."""

    def loss(step: Step, bag: Bag) -> Tensor:
        return _pairwise(step, bag, lambda difference: F.relu(margin + difference))

    return loss


def _logsumexp(step: Step, block: Candidates) -> Tensor:
    places = block.exclude.places(block.ids) if block.exclude else None
    return weighted_logsumexp(step.scaled, block.emb, block.log_w, places, block.draws, block.usage)


def _pairwise(step: Step, bag: Bag, penalty: Callable[[Tensor], Tensor]) -> Tensor:
    positive = step.positive_logits.unsqueeze(1)
    total, mass = torch.zeros_like(positive[:, 0]), torch.zeros_like(positive[:, 0])
    for block in bag.blocks:
        if block.draws is not None:
            raise ValueError("a pairwise loss needs drawn negatives: give Resample draw='multinomial' or 'systematic'")
        scores = logits(step.scaled, block.emb)
        places = block.exclude.places(block.ids) if block.exclude else None
        weights = reference.drop(block.log_w, scores.shape, places).exp()
        total = total + (weights * penalty(scores - positive)).sum(1)
        mass = mass + weights.sum(1)
    return total / mass.clamp(min=torch.finfo(mass.dtype).tiny)


class Fixed(nn.Module):
    """A temperature that stays: tau for every query."""

    tau: Tensor

    def __init__(self, tau: float = 1.0):
        super().__init__()
        if not tau > 0:
            raise ValueError(f"a temperature must be positive, got {tau}")
        self.register_buffer("tau", torch.tensor(float(tau)), persistent=False)

    def forward(self, query_ids: Tensor) -> Tensor:
        return self.tau


class Learned(nn.Module):
    """A temperature trained with the towers, kept within [low, high]: tau = exp(log_tau)."""

    def __init__(self, tau: float = 0.1, low: float = 0.02, high: float = 1.0):
        super().__init__()
        if not 0 < low <= tau <= high:
            raise ValueError(f"a learned temperature needs 0 < low <= tau <= high, got {low}, {tau}, {high}")
        self.low, self.high = low, high
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)))

    def forward(self, query_ids: Tensor) -> Tensor:
        # straight through: a gradient that leads back inside is never lost at the bound
        inside = self.log_tau.clamp(math.log(self.low), math.log(self.high)).detach()
        return (inside + self.log_tau - self.log_tau.detach()).exp()

    def observe(self, step: Step, outcome: Outcome) -> None:
        self.log_tau.clamp_(math.log(self.low), math.log(self.high))  # so that it need not come back from far outside
