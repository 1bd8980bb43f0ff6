"""Losses over single pairs (positive, candidate) or single candidates: BPR, hinge, PSL, CCL, gBCE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparring.core.types import Bag, Step
from sparring.kernels import logits, reference
from sparring.kernels.native.pairwise import Penalty
from sparring.losses.softmax import Loss, above

Surrogate = Literal["tanh", "atan", "relu"]
_penalties: WeakKeyDictionary[Loss, Penalty] = WeakKeyDictionary()  # not attributes: a wrapper would inherit them


def bpr(step: Step, bag: Bag) -> Tensor:
    """Pairwise logistic loss: the weighted mean over the bag of log(1 + exp(s_ij - s_i+)), s = q . e / tau.

    Rendle et al., BPR: Bayesian Personalized Ranking from Implicit Feedback, UAI 2009.
    """
    return _pairwise(step, bag, F.softplus)


def hinge(margin: float = 0.3) -> Loss:
    """Pairwise hinge loss: the weighted mean over the bag of max(0, margin + s_ij - s_i+)."""

    def hinge(step: Step, bag: Bag) -> Tensor:
        return _pairwise(step, bag, lambda difference: F.relu(margin + difference))

    _penalties[hinge] = Penalty("hinge", margin)
    return hinge


def penalty_of(loss: object) -> Penalty | None:
    """The loss as native steps know it: bpr, hinge and gbce; None for any other."""
    if loss is bpr:
        return Penalty("logistic")
    return _penalties.get(loss) if isinstance(loss, FunctionType) else None


def psl(surrogate: Surrogate = "relu") -> Loss:
    """The softmax loss with a tighter surrogate in place of the exponential (PSL, pairwise softmax loss).

        loss_i = log sum_j w_ij sigma(d_ij)^(1 / tau_i),   d_ij = (q_i . e_j - q_i . v_i) / 2
        sigma(d) = 1 + tanh d   |   1 + atan d   |   max(0, 1 + d)

    For cosine scores, with d in [-1, 1]; sigma = exp would be softmax_loss at twice tau. A weight w counts a candidate
    w times; the positive's own weight is ignored. A sigma of 0 counts as the smallest positive number. If everything in
    the bag is excluded, the loss is 0.

        psl("relu")

    Yang et al., PSL: Rethinking and Improving Softmax Loss from Pairwise Perspective for Recommendation, NeurIPS 2024.
    """
    if surrogate not in get_args(Surrogate):
        raise ValueError(f"surrogate must be one of {', '.join(get_args(Surrogate))}; got {surrogate!r}")

    def psl(step: Step, bag: Bag) -> Tensor:
        half = step.q / 2
        positive = (half * step.v).sum(-1, keepdim=True)
        sharpness = step.tau.reciprocal().unsqueeze(-1)
        blocks = [
            _LogSumSigma.apply(scores, positive, sharpness, log_w, surrogate)  # type: ignore[no-untyped-call]
            for scores, log_w in weighed(half, bag)
        ]
        total = blocks[0] if len(blocks) == 1 else reference.safe_logsumexp(torch.stack(blocks, -1))
        return above(total, torch.zeros_like(total))

    return psl


def ccl(margin: float = 0.9, weight: float = 150.0) -> Loss:
    """Cosine contrastive loss: the positive's distance plus the mean excess of negatives over a margin (CCL, SimpleX).

        loss_i = (1 - q_i . v_i) + weight * sum_j w_ij max(0, q_i . e_j - margin) / sum_j w_ij

    For cosine scores; tau and the positive's own weight are ignored. A candidate's weight is its share in the mean.
    Positive and negatives do not compete: if everything in the bag is excluded, the positive's part remains.

        Term(1.0, Sampled(Uniform(n_items), 1000, correction="none"), ccl(margin=0.9, weight=150))

    Mao et al., SimpleX: A Simple and Strong Baseline for Collaborative Filtering, CIKM 2021.
    """
    if not weight > 0:
        raise ValueError(f"the weight of the negatives must be positive, got {weight}")

    def ccl(step: Step, bag: Bag) -> Tensor:
        excess = _mean(step.q, bag, lambda scores: F.relu(scores - margin))
        return 1 - (step.q * step.v).sum(-1) + weight * excess

    return ccl


def gbce(n_items: int, calibration: float = 0.75, drawn: int | None = None) -> Loss:
    """Binary cross-entropy whose positive counts less the fewer items are drawn (gBCE, generalised BCE).

        loss_i = -(beta_i log sigmoid(s_i+) + sum_j w_ij log(1 - sigmoid(s_ij))) / (1 + n_i),   s = q . e / tau + b
        beta_i = alpha_i (t (1 - 1 / alpha_i) + 1 / alpha_i) = 1 - t (1 - alpha_i),   n_i = sum_j w_ij
        alpha_i = n_i / (N - 1), at most 1: the sampling rate
        b = 0, as published; with `drawn`, the best score of a constant: log(beta / drawn), beta at n_i = drawn

    Plain BCE against a few negatives overestimates probabilities. With calibration t = 1 a model that fits has
    calibrated ones; t = 0 is plain BCE; the authors use 0.75. A weight w counts a candidate w times, so weights that
    estimate the sum over all N items give alpha = 1, plain BCE. The positive's own weight is ignored. If everything in
    the bag is excluded, the positive's part remains.

    b changes no ranking by given vectors. Without it scores that start near 0 first have to fall to about
    log(beta / n). A sequence model then gives all queries nearly the same vector, and stays so for thousands of steps.
    `drawn` is the number of draws of a row.

        Term(1.0, Sampled(Uniform(n_items), 256, correction="none"), gbce(n_items, drawn=256))

    Petrov and Macdonald, gSASRec: Reducing Overconfidence in Sequential Recommendation Trained with Negative Sampling,
    RecSys 2023. The constant is as in Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023, who learn
    theirs, from -10.
    """
    if n_items < 2:
        raise ValueError(f"gBCE needs at least two items, got {n_items}")
    if drawn is not None and drawn < 1:
        raise ValueError(f"gBCE needs at least one draw, got {drawn}")
    if not 0 <= calibration <= 1:
        raise ValueError(f"the calibration of gBCE must be between 0 and 1, got {calibration}")

    offset = 0.0
    if drawn is not None:
        offset = math.log((1 - calibration * (1 - min(1.0, drawn / (n_items - 1)))) / drawn)

    def gbce(step: Step, bag: Bag) -> Tensor:
        total, mass = _sums(step.scaled, bag, lambda scores: F.softplus(scores + offset))
        beta = 1 - calibration * (1 - (mass / (n_items - 1)).clamp(max=1.0))
        return (beta * F.softplus(-(step.positive_logits + offset)) + total) / (1 + mass)

    _penalties[gbce] = Penalty("gbce", calibration, n_items, offset)
    return gbce


class _LogSumSigma(torch.autograd.Function):
    """log sum_j w_ij sigma(s_ij - s_i+)^sharpness_i, (B,); the gradient is computed in forward: one (B, C) matrix."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, positive: Tensor, sharpness: Tensor, log_w: Tensor, surrogate: Surrogate
    ) -> Tensor:
        log_sigma, slope = _log_sigma(surrogate, scores - positive)
        powers = torch.addcmul(log_w, log_sigma, sharpness)
        top = powers.amax(-1, keepdim=True)
        top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        share = powers.sub_(top).exp_()
        total = share.sum(-1, keepdim=True)
        share.div_(torch.where(total > 0, total, torch.ones_like(total)))
        bends = (share * log_sigma).sum(-1, keepdim=True) if ctx.needs_input_grad[2] else None
        kept = share if ctx.needs_input_grad[3] else None
        ctx.save_for_backward(slope.mul_(share).mul_(sharpness), bends, kept)
        ctx.shape = sharpness.shape
        return (top + total.log()).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slope, bends, share = ctx.saved_tensors
        rows = grad.unsqueeze(-1)
        pull = slope * rows
        sharpness = None if bends is None else (bends * rows).sum_to_size(ctx.shape)
        return pull, -pull.sum(-1, keepdim=True), sharpness, None if share is None else share * rows, None


def _log_sigma(surrogate: Surrogate, d: Tensor) -> tuple[Tensor, Tensor]:
    """log sigma(d) and its derivative."""
    if surrogate == "tanh":  # 1 + tanh d = 2 sigmoid(2 d), without the cancellation near -1
        return F.logsigmoid(2 * d).add_(math.log(2)), torch.sigmoid(-2 * d).mul_(2)
    tiny = torch.finfo(d.dtype).tiny
    sigma = (torch.atan(d) if surrogate == "atan" else d).add(1).clamp_(min=tiny)
    slope = sigma.reciprocal()
    if surrogate == "atan":
        slope /= d.square().add_(1)
    return sigma.log(), slope.masked_fill_(sigma <= tiny, 0.0)


def weighed(q: Tensor, bag: Bag) -> Iterator[tuple[Tensor, Tensor]]:
    """Inner products with q, and log weights, -inf for excluded candidates: (B, C) each, block by block."""
    for block in bag.plain().blocks:
        if block.draws is not None:
            raise ValueError("a pairwise loss needs drawn negatives: give Resample draw='multinomial' or 'systematic'")
        scores = logits(q, block.emb)
        places = block.exclude.places(block.ids) if block.exclude else None
        yield scores, reference.drop(block.log_w, scores.shape, places)


def _mean(q: Tensor, bag: Bag, penalty: Callable[[Tensor], Tensor]) -> Tensor:
    """The weighted mean of penalty(q_i . e_j) over the bag, (B,); 0 if nothing counts."""
    total, mass = _sums(q, bag, penalty)
    return total / mass.clamp(min=torch.finfo(mass.dtype).tiny)


def _sums(q: Tensor, bag: Bag, penalty: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The weighted sum of penalty(q_i . e_j) over the bag, and the sum of the weights, (B,) each."""
    total, mass = torch.zeros_like(q[:, 0]), torch.zeros_like(q[:, 0])
    for scores, log_w in weighed(q, bag):
        weights = log_w.exp()
        total = total + (weights * penalty(scores)).sum(1)
        mass = mass + weights.sum(1)
    return total, mass


def _pairwise(step: Step, bag: Bag, penalty: Callable[[Tensor], Tensor]) -> Tensor:
    positive = step.positive_logits.unsqueeze(1)
    return _mean(step.scaled, bag, lambda scores: penalty(scores - positive))
