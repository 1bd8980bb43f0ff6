"""Optimisers that start at once.

The optimisers of torch import torch._dynamo when they are built and when they step. The import takes about a second,
as long as that of torch itself, and serves torch.compile alone, which no training here uses.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch
from torch.optim import Optimizer


class LightOptimizer(Optimizer):
    """The base class of torch without the wrappers that import torch._dynamo; every value stays the same bitwise."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        unwrap(Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        unwrap(Optimizer.zero_grad)(self, set_to_none)


class Adam(LightOptimizer, torch.optim.Adam):
    """torch.optim.Adam."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return unwrap(torch.optim.Adam.step)(self, closure)


class AdamW(LightOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return unwrap(torch.optim.AdamW.step)(self, closure)
