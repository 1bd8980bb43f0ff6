"""Trend: the part of an item bias that follows the demand."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Trend(nn.Module):
    """A part of the item bias that follows the demand, and what it is made of.

        shift_i = weight tau log(1 + c_i),   c_i = sum over interactions of i of w 2^(-age / (half_life span))

    At temperature tau it multiplies the probability of an item by (1 + c_i)^weight. Towers learn what an item was worth
    over the whole training part; the shift says what it is worth now. `half_life` is a share of the time span, infinite
    where all ages count alike. training/trend.py counts, and fits the vector of queries without a history.

        trend = Trend(n_items, half_life=0.03, weight=0.5, tau=0.1);  count(model.with_trend(trend), split.train)
    """

    shift: Tensor
    settings: Tensor

    def __init__(self, n_items: int, half_life: float = math.inf, weight: float = 0.0, tau: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(n_items))
        self.register_buffer("settings", torch.tensor([half_life, weight, tau], dtype=torch.float64))
