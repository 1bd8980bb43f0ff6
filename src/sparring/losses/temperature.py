"""Temperatures: modules that map query ids to tau."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sparring.core.part import Part
from sparring.core.types import Outcome, Step


class Fixed(nn.Module):
    """A constant temperature."""

    tau: Tensor

    def __init__(self, tau: float = 1.0):
        super().__init__()
        if not tau > 0:
            raise ValueError(f"a temperature must be positive, got {tau}")
        self.register_buffer("tau", torch.tensor(float(tau)), persistent=False)

    def forward(self, query_ids: Tensor) -> Tensor:
        return self.tau


class Learned(Part):
    """A temperature trained with the towers and kept in [low, high]: tau = exp(log_tau)."""

    def __init__(self, tau: float = 0.1, low: float = 0.02, high: float = 1.0):
        super().__init__()
        if not 0 < low <= tau <= high:
            raise ValueError(f"a learned temperature needs 0 < low <= tau <= high, got {low}, {tau}, {high}")
        self.low, self.high = low, high
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau)))

    def forward(self, query_ids: Tensor) -> Tensor:
        # straight-through clamp: a gradient that points back inside survives at the bound
        inside = self.log_tau.clamp(math.log(self.low), math.log(self.high)).detach()
        return (inside + self.log_tau - self.log_tau.detach()).exp()

    def observe(self, step: Step, outcome: Outcome) -> None:
        self.log_tau.clamp_(math.log(self.low), math.log(self.high))  # or the way back would be long
