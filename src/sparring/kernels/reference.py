"""Weighted log-sum-exp in plain PyTorch: the specification of all faster kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

NEVER = -1e30  # replaces -inf in a sum of products, where 0 times -inf would be nan
ALIVE = -1e15  # below all logits, above any share of NEVER


class ExcludedKeys(NamedTuple):
    """Excluded pairs as keys to compare: candidate j never counts for query i where columns_j = rows_i."""

    columns: Tensor  # (C,)
    rows: Tensor  # (B,), or in fused.py (2, B): a second key per query for the candidates from `split` on
    split: int = 0

    def mask(self, low: int = 0, high: int | None = None) -> Tensor:
        """The pairs of queries low to high as a mask (rows, C)."""
        return self.rows[low:high].unsqueeze(1) == self.columns


ExcludedPairs = tuple[Tensor, Tensor] | Tensor | ExcludedKeys
"""Pairs (query, candidate) that never count: (rows, columns) with rows ascending, a (B, C) mask, or keys."""


class Mix(NamedTuple):
    """Synthetic candidates: each group of M consecutive candidates yields V mixtures of their weighted logits."""

    weights: Tensor  # (G, V, M) with C = G M, or (B, G, V, M) for per-query candidates; constants
    places: ExcludedPairs | None = None  # excluded pairs (row, group)
    offset: float = 0.0  # added to the logit of every mixture


def logits(q: Tensor, emb: Tensor) -> Tensor:
    """Inner products (B, C) of q (B, D) with shared vectors (C, D) or per-query vectors (B, C, D)."""
    if emb.dim() == 2:
        return q @ emb.T
    if emb.shape[1] <= 8:  # a batched product of tiny matrices is dominated by call overhead
        return (q.unsqueeze(1) * emb).sum(-1)
    return torch.bmm(emb, q.unsqueeze(-1)).squeeze(-1)


def drop(log_w: Tensor, shape: torch.Size, places: ExcludedPairs | None) -> Tensor:
    """The weights as a (B, C) tensor with -inf at the excluded pairs."""
    full = log_w.expand(shape)
    if places is None:
        return full
    if isinstance(places, ExcludedKeys):
        return full.masked_fill(places.mask(), -math.inf)
    if isinstance(places, Tensor):
        return full.masked_fill(places, -math.inf)
    return full.index_put(places, torch.tensor(-math.inf, dtype=full.dtype, device=full.device))


def safe_logsumexp(x: Tensor) -> Tensor:
    """log sum exp over the last dimension; a row of -inf yields -inf with zero gradient instead of nan."""
    top = x.detach().amax(-1, keepdim=True)
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    total = (x - top).exp().sum(-1)
    counts = total > 0
    return torch.where(counts, top.squeeze(-1) + torch.where(counts, total, torch.ones_like(total)).log(), -math.inf)


def weighted_logsumexp(
    q: Tensor,
    emb: Tensor,
    log_w: Tensor,
    places: ExcludedPairs | None = None,
    draws: float | None = None,
    draw_counts: Tensor | None = None,
    mix: Mix | None = None,
) -> Tensor:
    """log sum_j exp(q_i . e_j + log_w_ij) for every query i, shape (B,).

    `places` are excluded pairs. With `draws` = n the weights become the constants n * softmax_j(q_i . e_j + log_w_ij),
    the expected counts of n draws, and `draw_counts` (C,), if given, is filled with their sum over the queries. No
    gradient flows through those counts, so the gradient is softmax(2 s + log_w). With `mix` the sum also runs over
    mixtures of the candidates; `draws` and `mix` exclude each other.
    """
    scores = logits(q, emb)
    weights = drop(log_w, scores.shape, places)
    if draws is not None:
        with torch.no_grad():
            corrected = scores + weights
            weights = corrected - safe_logsumexp(corrected).nan_to_num(neginf=0.0).unsqueeze(-1) + math.log(draws)
            if draw_counts is not None:
                draw_counts.copy_(weights.exp() if draw_counts.dim() == 2 else weights.exp().sum(0))
    if mix is None:
        return safe_logsumexp(scores + weights)
    return safe_logsumexp(torch.cat([scores + weights, mixed_logits(scores, log_w, mix)], -1))


def mixed_logits(scores: Tensor, log_w: Tensor, mix: Mix) -> Tensor:
    """Logits of the mixtures (B, G V) from those of the candidates (B, C) before exclusion."""
    members = (scores + log_w.clamp(min=NEVER)).unflatten(1, (-1, mix.weights.shape[-1]))
    form = "gvm,bgm->bgv" if mix.weights.dim() == 3 else "bgvm,bgm->bgv"
    mixed = torch.einsum(form, mix.weights, members) + mix.offset
    mixed = mixed.masked_fill(mixed < ALIVE, -math.inf)
    if isinstance(mix.places, ExcludedKeys):
        mixed = mixed.masked_fill(mix.places.mask().unsqueeze(-1), -math.inf)
    elif isinstance(mix.places, Tensor):
        mixed = mixed.masked_fill(mix.places.unsqueeze(-1), -math.inf)
    elif mix.places is not None:
        mixed = mixed.index_put(mix.places, torch.tensor(-math.inf, dtype=mixed.dtype, device=mixed.device))
    return mixed.flatten(1)
