"""Optimisers that start at once.

The optimisers of torch import torch._dynamo when they are built and when they step. The import takes about a second,
as long as that of torch itself, and serves torch.compile alone, which no training here uses.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparring.kernels.native import rows as native


class LightOptimizer(Optimizer):
    """The base class of torch without the wrappers that import torch._dynamo; every value stays the same bitwise."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        unwrap(Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        unwrap(Optimizer.zero_grad)(self, set_to_none)


class Adam(LightOptimizer, torch.optim.Adam):
    """torch.optim.Adam; a row-sparse gradient of a table moves every row, as the dense gradient would."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved: list[tuple[nn.Parameter, Tensor]] = []
        for group in self.param_groups:
            for table in group["params"]:
                grad = table.grad
                if grad is None or not grad.is_sparse:
                    continue
                index, values = grad._indices()[0], grad._values().contiguous()
                if self._by_rows(table, index, values, group):
                    moved.append((table, grad))
                    table.grad = None
                else:
                    table.grad = torch.zeros_like(table).index_add_(0, index, values)
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            unwrap(torch.optim.Adam.step)(self)
        for table, grad in moved:
            table.grad = grad
        return loss

    def _by_rows(self, table: nn.Parameter, index: Tensor, values: Tensor, group: dict[str, Any]) -> bool:
        """Update a table by a native kernel; False if none applies."""
        if table.dim() != 2 or group["amsgrad"] or group["maximize"] or not native.takes_rows(table):
            return False
        state = self.state[table]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(table), torch.zeros_like(table)
        rate, decay = float(group["lr"]), group["weight_decay"]
        return native.adam(table, index, values, state, rate, group["betas"], group["eps"], decay)


class AdamW(LightOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return unwrap(torch.optim.AdamW.step)(self, closure)
