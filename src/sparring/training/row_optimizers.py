"""Optimisers that touch only the rows of a batch.

In one step an embedding table of N rows receives gradients for the few rows of the batch. The row rules read and write
only those rows and their state: the cost of a step depends on the batch, not on the catalogue.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparring.core.sparse_rows import sum_rows
from sparring.kernels import fuses_rows
from sparring.kernels.native import rows as native
from sparring.training.light_optimizers import LightOptimizer

_BLOCK = 1 << 16  # elements updated at a time on a CPU: with their moments they fit into the L2 cache

if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default; unless set, some versions of torch warn


class RowOptimizer(LightOptimizer, ABC):
    """The base of the row rules: finds the rows of each gradient and updates them in blocks."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is None:
                    continue
                if not table.grad.is_sparse or table.dim() != 2:
                    kind = f"a {'sparse' if table.grad.is_sparse else 'dense'} gradient of shape {tuple(table.shape)}"
                    raise ValueError(
                        f"{type(self).__name__} got {kind}: "
                        "it needs a sparse gradient of an (N, D) table (IdTower(sparse=True))"
                    )
                index, values = table.grad._indices()[0], table.grad._values()
                if fuses_rows(table) and table.grad._nnz():
                    with torch.cuda.device_of(table):  # a kernel runs on the current GPU, a shard may be on another
                        self._fuse(table, index, values, self._started(table, group), group)
                elif not self.update_rows(table, index, values.contiguous(), group):
                    rows, grad = sum_rows(table.grad)
                    for block, part in _blocks(rows, grad):
                        self._update(table, block, part, self.state[table], group)
        return loss

    def update_rows(self, table: Tensor, index: Tensor, values: Tensor, group: dict[str, Any]) -> bool:
        """Begin a step of a table, and update its rows by a native kernel; False if none applies."""
        return self._compiled(table, index, values, self._started(table, group), group)

    def native_rule(self, table: Tensor, group: dict[str, Any]) -> native.Rule:
        """Begin a step of a table whose rows a native kernel will update, and say how."""
        return self._rule(table, self._started(table, group), group)

    def _started(self, table: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a table, in a new step."""
        state: dict[str, Tensor] = self.state[table]
        if not state:
            state.update(self._fresh(table, group))
        self._begin(state)
        return state

    @abstractmethod
    def _fresh(self, table: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The initial state of a table."""

    def _begin(self, state: dict[str, Tensor]) -> None:
        """Called once per table and step, before its rows are updated."""

    @abstractmethod
    def _update(
        self, table: Tensor, rows: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        """Update these rows of the table and of its state."""

    @abstractmethod
    def _fuse(
        self, table: Tensor, index: Tensor, values: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        """The update in one GPU kernel, from the rows of a batch with duplicates."""

    @abstractmethod
    def _compiled(
        self, table: Tensor, index: Tensor, values: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> bool:
        """The update in one native CPU kernel, from the rows of a batch with duplicates; False where none applies."""

    @abstractmethod
    def _rule(self, table: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> native.Rule:
        """The update for native kernels that sum the rows of a batch themselves."""


class RowAdam(RowOptimizer):
    """Adam on the rows of the batch only (lazy Adam).

        m_r = b1 m_r + (1 - b1) g_r,   v_r = b2 v_r + (1 - b2) g_r^2,   t_r = t_r + 1
        p_r = (1 - lr wd) p_r - lr (m_r / (1 - b1^t_r)) / (sqrt(v_r / (1 - b2^t_r)) + eps)

    g_r is the sum over all occurrences of row r in the batch. A row outside the batch keeps its value and moments
    bitwise; a row in every batch is updated as under AdamW. With `bias="row"` t_r counts the updates of the row, so its
    first step has length lr whenever it occurs; with `bias="step"` t counts all steps, as in torch.optim.SparseAdam,
    and the first step of a row that occurs late is up to (1 - b1) / sqrt(1 - b2) = 3.2 times as long. Repeated runs
    agree bitwise; on CUDA a step never waits for the device.

        RowAdam([tower.weight], lr=1e-3)

    Kingma and Ba, Adam, ICLR 2015; decay as in Loshchilov and Hutter, ICLR 2019.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias: Literal["row", "step"] = "row",
    ) -> None:
        _check(lr, eps, weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas {betas} must be in [0, 1)")
        if bias not in ("row", "step"):
            raise ValueError(f"unknown bias {bias!r}: use 'row' or 'step'")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias": bias})

    def _fresh(self, table: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        precise = torch.promote_types(table.dtype, torch.float32)
        count = torch.zeros(len(table) if group["bias"] == "row" else (), dtype=precise, device=table.device)
        return {"mean": torch.zeros_like(table), "square": torch.zeros_like(table), "count": count}

    def _begin(self, state: dict[str, Tensor]) -> None:
        if state["count"].dim() == 0:
            state["count"] += 1

    def _update(
        self, table: Tensor, rows: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        mean = state["mean"].index_select(0, rows).lerp_(grad, 1 - beta1)
        square = state["square"].index_select(0, rows).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        state["mean"].index_copy_(0, rows, mean)
        state["square"].index_copy_(0, rows, square)
        count = state["count"]
        if count.dim():
            count = count.index_select(0, rows).add_(1)
            state["count"].index_copy_(0, rows, count)
            count = count.unsqueeze(1)
        size = (-group["lr"] / _unbias(beta1, count)).to(table.dtype)
        spread = square.sqrt_().mul_(_unbias(beta2, count).rsqrt_().to(table.dtype)).add_(group["eps"])
        values = table.index_select(0, rows)
        if group["weight_decay"]:
            values.mul_(1 - group["lr"] * group["weight_decay"])
        table.index_copy_(0, rows, values.addcdiv_(mean.mul_(size), spread))

    def _fuse(
        self, table: Tensor, index: Tensor, values: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        from sparring.kernels.row_updates import row_adam

        row_adam(
            table,
            index,
            values,
            state,
            _on_device(group["lr"], table),
            group["betas"],
            group["eps"],
            group["weight_decay"],
        )

    def _compiled(
        self, table: Tensor, index: Tensor, values: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> bool:
        rate, decay = float(group["lr"]), group["weight_decay"]
        return native.row_adam(table, index, values, state, rate, group["betas"], group["eps"], decay)

    def _rule(self, table: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> native.Rule:
        rate, decay = float(group["lr"]), group["weight_decay"]
        return native.adam_rule(table, state, rate, group["betas"], group["eps"], decay)


class RowAdagrad(RowOptimizer):
    """Adagrad with one accumulator per row, on the rows of the batch only (row-wise Adagrad).

        a_r = a_r + mean_d(g_rd^2),   p_r = (1 - lr wd) p_r - lr g_r / (sqrt(a_r) + eps)

    g_r is the sum over all occurrences of row r in the batch. The state is N numbers, where RowAdam has N (2 D + 1).
    Rows outside the batch stay bitwise unchanged.

        RowAdagrad([tower.weight], lr=0.05)

    Duchi et al., JMLR 2011; the row-wise form is the one that FBGEMM's embedding tables use.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 1e-2, eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        _check(lr, eps, weight_decay)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def _fresh(self, table: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"sum": torch.zeros(len(table), dtype=table.dtype, device=table.device)}

    def _update(
        self, table: Tensor, rows: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        total = state["sum"].index_select(0, rows).add_(grad.square().mean(1))
        state["sum"].index_copy_(0, rows, total)
        size = (-group["lr"] / total.sqrt_().add_(group["eps"])).unsqueeze(1)
        values = table.index_select(0, rows)
        if group["weight_decay"]:
            values.mul_(1 - group["lr"] * group["weight_decay"])
        table.index_copy_(0, rows, values.addcmul_(grad, size))

    def _fuse(
        self, table: Tensor, index: Tensor, values: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        from sparring.kernels.row_updates import row_adagrad

        row_adagrad(
            table, index, values, state["sum"], _on_device(group["lr"], table), group["eps"], group["weight_decay"]
        )

    def _compiled(
        self, table: Tensor, index: Tensor, values: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> bool:
        rate, decay = float(group["lr"]), group["weight_decay"]
        return native.row_adagrad(table, index, values, state["sum"], rate, group["eps"], decay)

    def _rule(self, table: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> native.Rule:
        return native.adagrad_rule(table, state["sum"], float(group["lr"]), group["eps"], group["weight_decay"])


def _blocks(rows: Tensor, grad: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    if rows.device.type != "cpu":  # with duplicate rows (sum_rows), all must be read before one is written
        return [(rows, grad)]
    size = max(1, _BLOCK // max(1, grad.shape[1]))
    return zip(rows.split(size), grad.split(size), strict=True)


def _on_device(rate: float | Tensor, table: Tensor) -> Tensor:
    return rate if isinstance(rate, Tensor) else torch.full((), rate, device=table.device)


def _unbias(beta: float, count: Tensor) -> Tensor:
    """1 - beta^count, without the cancellation of a float32 power close to 1."""
    return torch.expm1(count * math.log(beta)).neg_() if beta else torch.ones_like(count)


def _check(lr: float, eps: float, weight_decay: float) -> None:
    if lr < 0 or eps < 0 or weight_decay < 0:
        raise ValueError(f"lr {lr}, eps {eps} and weight_decay {weight_decay} must not be negative")
