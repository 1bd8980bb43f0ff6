"""The meaning of a bag by brute force: the weight of each pair and the loss in float64, by tables of all pairs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparring.core.part import listeners
from sparring.core.types import Bag, Candidates, Exclude, Outcome, Step
from sparring.losses import sampled_softmax
from sparring.negatives.base import Negatives


def weights(block: Candidates, step: Step) -> Tensor:
    """(B, C) float64: the weight of each candidate of a block, by a table of all pairs; no gradient."""
    n = len(step.q)
    ids = block.ids.expand(n, -1)
    log_w = block.log_w.detach().double().expand(ids.shape).clone()
    log_w[_never(block.exclude, ids)] = -math.inf
    if block.draws is None:
        return log_w.exp()
    mass = (_scores(block, step).detach() + log_w).exp()
    total = mass.sum(1, keepdim=True)
    return torch.where(total > 0, block.draws * mass / total, 0.0)


def _never(exclude: Exclude | None, ids: Tensor) -> Tensor:
    """(B, C) bool: the excluded candidates (B, C), by a table of all pairs (row, item) or (row, class)."""
    if exclude is None:
        return torch.zeros_like(ids, dtype=torch.bool)
    rows = torch.arange(len(ids)) if exclude.rows is None else exclude.rows
    key = ids.clamp(min=0) if exclude.code is None else exclude.code[ids.clamp(min=0)]
    never = torch.zeros(len(ids), 1 + int(max(exclude.ids.max(), key.max())), dtype=torch.bool)
    never[rows, exclude.ids] = True
    return (never.gather(1, key) & (ids >= 0)) | _never(exclude.also, ids)


def _mixed(block: Candidates, step: Step) -> Tensor:
    """(B, G, V) float64: the terms of the mixtures in the partition function, vector by vector."""
    assert block.mix is not None
    n, (v, m) = len(step.q), block.mix.weights.shape[-2:]
    share = block.mix.weights.double().expand(n, -1, v, m)
    vectors = torch.einsum(
        "bgvm,bgmd->bgvd", share, block.emb.double().expand(n, *block.emb.shape[-2:]).unflatten(1, (-1, m))
    )
    log_w = block.log_w.double().expand(n, block.ids.shape[-1]).unflatten(1, (-1, 1, m))
    terms = (torch.where(share > 0, share * log_w, 0.0)).sum(-1) + block.mix.offset
    terms = terms + torch.einsum("bd,bgvd->bgv", step.q.double(), vectors) / step.tau.double().reshape(-1, 1, 1)
    return terms.exp().masked_fill(_never(block.mix.exclude, block.mix.groups.expand(n, -1)).unsqueeze(-1), 0.0)


def dense(bag: Bag, step: Step, n_items: int) -> Tensor:
    """(B, N) float64: the total weight of every item for every query; synthetic candidates are ignored."""
    total = torch.zeros(len(step.q), n_items, dtype=torch.float64)
    for block in bag.blocks:
        ids = block.ids.expand(len(step.q), -1)
        total.scatter_add_(1, ids.clamp(min=0), torch.where(ids >= 0, weights(block, step), 0.0))
    return total


def plain_loss(step: Step, bag: Bag) -> Tensor:
    """(B,) float64: -t + log(e^t + sum_j w_ij e^s_ij), written out."""
    positive = (step.q * step.v).sum(-1).double() / step.tau.double()
    if bag.log_w_positive is not None:
        positive = positive + bag.log_w_positive.detach().double()
    total = positive.exp()
    for block in bag.blocks:
        total = total + (weights(block, step) * _scores(block, step).exp()).sum(1)
        if block.mix is not None:
            total = total + _mixed(block, step).sum((1, 2))
    return total.log() - positive


def _scores(block: Candidates, step: Step) -> Tensor:
    emb = block.emb.double().expand(len(step.q), *block.emb.shape[-2:])
    return (step.q.double().unsqueeze(1) * emb).sum(-1) / step.tau.double().reshape(-1, 1)


def observe(negatives: Negatives, step: Step) -> None:
    """Observe a step as the training loop does: every part that observes receives the outcome."""
    bag = negatives(step)
    outcome = Outcome(sampled_softmax(step, bag).detach(), (bag,))
    for part in listeners(negatives, "observe"):
        part.observe(step, outcome)


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """p-value of counts against expected counts scaled to the same total; cells that expect fewer than 5 are pooled."""
    expected = expected.double() * (observed.sum() / expected.sum())
    assert not bool((observed[expected == 0] > 0).any()), (
        f"drawn despite probability 0: {observed[expected == 0].tolist()}"
    )
    large = expected >= 5
    o = torch.cat([observed[large].double(), observed[~large].sum().double().reshape(1)])
    e = torch.cat([expected[large], expected[~large].sum().reshape(1)])
    o, e = o[e > 0], e[e > 0]
    statistic = ((o - e).square() / e).sum()
    return float(
        torch.special.gammaincc(torch.tensor((len(o) - 1) / 2, dtype=torch.float64).clamp(min=0.5), statistic / 2)
    )
