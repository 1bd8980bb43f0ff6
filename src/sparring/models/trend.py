"""What a retriever knows before it knows the query: which items are in demand now, and what to list for a newcomer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.data.histories import past_of
from sparring.data.interactions import Interactions, Split
from sparring.models.histories import HistoryTower
from sparring.models.sequences import SequenceTower

if TYPE_CHECKING:
    from sparring.models.retriever import Retriever

_ROUNDS = 100  # of L-BFGS


class Trend(nn.Module):
    """A part of the item bias that follows the demand, and what it is made of.

        shift_i = weight tau log(1 + c_i),   c_i = sum over interactions of i of w 2^(-age / (half_life span))

    At temperature tau it multiplies the probability of an item by (1 + c_i)^weight. Towers learn what an item was worth
    over the whole training part; the shift says what it is worth now. `half_life` is a share of the time span, infinite
    where all ages count alike. `count` also fits the vector of queries without a history (newcomer).

        trend = Trend(n_items, half_life=0.03, weight=0.5, tau=0.1);  count(model.with_trend(trend), split.train)
    """

    shift: Tensor
    settings: Tensor

    def __init__(self, n_items: int, half_life: float = math.inf, weight: float = 0.0, tau: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(n_items))
        self.register_buffer("settings", torch.tensor([half_life, weight, tau], dtype=torch.float64))


@torch.no_grad()
def count(model: Retriever, data: Interactions) -> None:
    """Let the trend of a model, if it has one, know these interactions and no others."""
    if model.trend is None:
        return
    half_life, weight, tau = model.trend.settings.tolist()
    counts = torch.from_numpy(data.recent_counts(None if half_life == math.inf else half_life)).to(model.device)
    model.trend.shift.copy_(weight * tau * torch.log1p(counts))
    if isinstance(model.query, HistoryTower | SequenceTower) and bool(counts.any()):
        model.query.empty.copy_(newcomer(model, counts, tau))


def newcomer(model: Retriever, counts: Tensor, tau: float) -> Tensor:
    """The query vector (D,) whose softmax over all items is the nearest to these counts (N,).

        max over q of   sum_i c_i log softmax_i((unit(q) . e_i + b_i) / tau)

    Towers that learn from pairs of items never see a query without any, so nothing else trains its vector.
    """
    vectors = model.item_vectors().float()
    items, share = vectors[:, : model.width], (counts / counts.sum()).float()
    bias = vectors[:, -1] if model.item_bias is not None else vectors.new_zeros(len(vectors))
    with torch.enable_grad():
        q = (share @ items).requires_grad_()
        optimizer = torch.optim.LBFGS([q], max_iter=_ROUNDS, line_search_fn="strong_wolfe")

        def loss() -> float:
            optimizer.zero_grad()
            unit = F.normalize(q, dim=0) if model.score == "cosine" else q
            value = -(share @ torch.log_softmax((items @ unit + bias) / tau, 0))
            value.backward()
            return float(value.detach())

        optimizer.step(loss)
    return q.detach() if bool(q.isfinite().all()) else share @ items


def know(model: Retriever, split: Split, part: str) -> None:
    """Let a model know what came before a part, and no more: the histories of queries, and the demand for items."""
    if model.past_readers():
        model.remember(past_of(split, part))
    if model.trend is not None:
        count(model, split.train if part == "valid" else split.joined().train)
