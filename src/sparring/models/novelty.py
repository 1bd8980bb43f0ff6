"""Novelty: scores are corrected for the popularity of items when lists are made; training does not change.

    score'(q, i) = score(q, i) - novelty * spread * z_i

z_i is the logarithm of 1 + the interactions of item i, standardised over the items that can be listed. `spread` is the
standard deviation of the scores of the 200 best items of a query. So novelty has no unit: a model whose scores are ten
times as large gives the same lists. At 0 nothing changes; at 1, one standard deviation of log-popularity costs an item
as much as one of score among the best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.types import Positives

DEPTH = 200  # best items of a query that its spread is measured on


def check_novelty(novelty: float) -> None:
    if not 0 <= novelty <= 1:
        raise UserError(f"novelty must be between 0 (the model's own scores) and 1, got {novelty:g}")


def spread(scores: Tensor) -> Tensor:
    """(B,): the standard deviation of the largest scores of each query, of scores (B, N) or of lists (B, K)."""
    return scores.topk(min(DEPTH, scores.shape[1]), 1).values.std(1, correction=0)


def log_popularity(seen: Positives, n_items: int, listed: Tensor | None = None) -> Tensor:
    """(N,): log(1 + interactions), standardised over the listed items; zeros where all have equally many."""
    logs = torch.log1p(torch.bincount(seen.items.cpu().long(), minlength=n_items).double())
    among = logs if listed is None else logs[listed.cpu()]
    if not len(among) or among.min() == among.max():
        return torch.zeros(n_items)
    return ((logs - among.mean()) / among.std(correction=0)).float()
