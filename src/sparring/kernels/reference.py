"""Weighted log-sum-exp in plain PyTorch: the specification that every faster kernel is held to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Places = tuple[Tensor, Tensor] | Tensor  # pairs that do not count: (rows, columns) with rows ascending, or a (B, C) mask


def logits(q: Tensor, emb: Tensor) -> Tensor:
    """Inner products (B, C) of q (B, D) with shared vectors (C, D) or with each query's own (B, C, D)."""
    if emb.dim() == 2:
        return q @ emb.T
    if emb.shape[1] <= 8:  # a batched product of slivers costs more in calls than in arithmetic
        return (q.unsqueeze(1) * emb).sum(-1)
    return torch.bmm(emb, q.unsqueeze(-1)).squeeze(-1)


def drop(log_w: Tensor, shape: torch.Size, places: Places | None) -> Tensor:
    """The weights as a (B, C) tensor with -inf at the dropped places."""
    full = log_w.expand(shape)
    if places is None:
        return full
    if isinstance(places, Tensor):
        return full.masked_fill(places, -math.inf)
    return full.index_put(places, torch.tensor(-math.inf, dtype=full.dtype, device=full.device))


def safe_logsumexp(x: Tensor) -> Tensor:
    """log sum exp over the last dimension; a row of -inf gives -inf with zero gradient instead of nan."""
    top = x.detach().amax(-1, keepdim=True)
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    total = (x - top).exp().sum(-1)
    some = total > 0
    return torch.where(some, top.squeeze(-1) + torch.where(some, total, torch.ones_like(total)).log(), -math.inf)


def weighted_logsumexp(
    q: Tensor,
    emb: Tensor,
    log_w: Tensor,
    places: Places | None = None,
    draws: float | None = None,
    usage: Tensor | None = None,
) -> Tensor:
    """log sum_j exp(q_i . e_j + log_w_ij) for every query i, shape (B,).

    `places` drops pairs. With `draws` = n the weights are replaced by the constants n * softmax_j(q_i . e_j + log_w_ij), the
    expected counts of n draws, and `usage` (C,), where given, receives their sum over the queries. No gradient flows
    through those counts, so the gradient is softmax(2 s + log_w).
    """
    scores = logits(q, emb)
    weights = drop(log_w, scores.shape, places)
    if draws is not None:
        with torch.no_grad():
            corrected = scores + weights
            weights = corrected - safe_logsumexp(corrected).nan_to_num(neginf=0.0).unsqueeze(-1) + math.log(draws)
            if usage is not None:
                usage.copy_(weights.exp() if usage.dim() == 2 else weights.exp().sum(0))
    return safe_logsumexp(scores + weights)
