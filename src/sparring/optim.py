"""Optimisers that touch only the rows of a batch, the choice of rule for each parameter, learning-rate schedules.

An embedding table of N rows receives, per step, gradients for the few rows of the batch. The row rules read and write those rows and
their state, and nothing else: the cost of a step follows the batch, not the catalogue.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

Rule = Literal["row-adam", "row-adagrad", "adam"]

_BLOCK = 1 << 16  # elements of a table that are updated together on a CPU: with their moments they stay in the L2 cache


class _RowOptimizer(Optimizer, ABC):
    """What the row rules share: finding the rows of each gradient, and walking over them in blocks."""

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
                    raise ValueError(f"{type(self).__name__} got {kind}: it needs a sparse one of an (N, D) table (IdTower(sparse=True))")
                state = self.state[table]
                if not state:
                    state.update(self._fresh(table, group))
                rows, grad = sum_rows(table.grad)
                self._begin(state)
                for some, part in _blocks(rows, grad):
                    self._update(table, some, part, state, group)
        return loss

    @abstractmethod
    def _fresh(self, table: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a table before its first step."""

    def _begin(self, state: dict[str, Tensor]) -> None:
        """Once per table and step, before its rows are updated."""

    @abstractmethod
    def _update(self, table: Tensor, rows: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Update these rows of the table and of its state."""


class RowAdam(_RowOptimizer):
    """Adam on the rows of the batch only (lazy Adam).

        m_r = b1 m_r + (1 - b1) g_r,   v_r = b2 v_r + (1 - b2) g_r^2,   t_r = t_r + 1
        p_r = (1 - lr wd) p_r - lr (m_r / (1 - b1^t_r)) / (sqrt(v_r / (1 - b2^t_r)) + eps)

    g_r is the sum over all places of row r in the batch. A row outside the batch keeps its value and moments bitwise; a row that is in
    every batch moves as under AdamW. With `bias="row"` t_r counts the updates of the row, so its first step has length lr whenever it
    comes; with `bias="step"` t counts all steps, as in torch.optim.SparseAdam, and the first step of a row that comes late is up to
    (1 - b1) / sqrt(1 - b2) = 3.2 times as long. Repeated runs agree bitwise; on CUDA a step never waits for the device.

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
            raise ValueError(f"betas {betas} must lie in [0, 1)")
        if bias not in ("row", "step"):
            raise ValueError(f"bias {bias!r} is not known: use 'row' or 'step'")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias": bias})

    def _fresh(self, table: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        precise = torch.promote_types(table.dtype, torch.float32)
        count = torch.zeros(len(table) if group["bias"] == "row" else (), dtype=precise, device=table.device)
        return {"mean": torch.zeros_like(table), "square": torch.zeros_like(table), "count": count}

    def _begin(self, state: dict[str, Tensor]) -> None:
        if state["count"].dim() == 0:
            state["count"] += 1

    def _update(self, table: Tensor, rows: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
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


class RowAdagrad(_RowOptimizer):
    """Adagrad with one accumulator per row, on the rows of the batch only (row-wise Adagrad).

        a_r = a_r + mean_d(g_rd^2),   p_r = (1 - lr wd) p_r - lr g_r / (sqrt(a_r) + eps)

    g_r is the sum over all places of row r in the batch. State is N numbers where RowAdam keeps N (2 D + 1). Rows outside the batch
    stay bitwise as they are.

        RowAdagrad([tower.weight], lr=0.05)

    Duchi et al., JMLR 2011; the row-wise form is the one that FBGEMM's embedding tables use.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-2, eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        _check(lr, eps, weight_decay)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def _fresh(self, table: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"sum": torch.zeros(len(table), dtype=table.dtype, device=table.device)}

    def _update(self, table: Tensor, rows: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        total = state["sum"].index_select(0, rows).add_(grad.square().mean(1))
        state["sum"].index_copy_(0, rows, total)
        size = (-group["lr"] / total.sqrt_().add_(group["eps"])).unsqueeze(1)
        values = table.index_select(0, rows)
        if group["weight_decay"]:
            values.mul_(1 - group["lr"] * group["weight_decay"])
        table.index_copy_(0, rows, values.addcmul_(grad, size))


def sum_rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, gradients) of a sparse gradient, duplicated rows summed in batch order.

    On a CPU each row comes once, in ascending order. On other devices a row that occurs c times comes c times, each time with the
    whole sum: the number of distinct rows is then never needed on the host, and writing the same value c times is harmless.
    """
    index, values = grad._indices()[0], grad._values().contiguous()
    if grad.is_coalesced() or index.numel() < 2:
        return index, values
    return _once(index, values) if index.device.type == "cpu" else _repeated(index, values)


def _once(index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    ordered, order = torch.sort(index, stable=True)
    rows, count = torch.unique_consecutive(ordered, return_counts=True)
    # A bag per row: from about 8,000 places on faster than index_add_ and coalesce() (benchmarks/optimisers.py).
    return rows, F.embedding_bag(order, values, torch.cumsum(count, 0) - count, mode="sum")


def _repeated(index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    ordered, order = torch.sort(index, stable=True)
    new = torch.zeros_like(ordered)
    new[1:] = ordered[1:] != ordered[:-1]
    segment = torch.cumsum(new, 0)
    # As many bags as places, the last ones empty: a shape that the host knows. A bag is summed in order, unlike atomic additions.
    begin = torch.searchsorted(segment, torch.arange(len(segment), device=segment.device))
    return ordered, F.embedding_bag(order, values, begin, mode="sum").index_select(0, segment)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients, dense and sparse, so that their joint Euclidean norm is at most max_norm; returns the norm before.

    A sparse gradient is replaced by its coalesced form, because duplicated rows must be summed before a norm means anything
    (on CUDA this waits for the device once per table).
    """
    parts: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse and parameter.grad.device.type == "cpu":
            rows, values = sum_rows(parameter.grad)
            parameter.grad = torch.sparse_coo_tensor(rows[None], values, parameter.shape, is_coalesced=True, check_invariants=False)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        parts.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    if not parts:
        return torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts]))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for part in parts:
        part.mul_(scale)
    return norm


def optimizers(
    model: nn.Module,
    rule: Rule = "row-adam",
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    dense_lr: float | None = None,
) -> list[Optimizer]:
    """The optimisers of a model: tables with sparse gradients by the row rule, all else by AdamW; or all of it by dense Adam.

    "row-adam" and "row-adagrad" decay decoupled, and of the dense parameters only matrices (biases and a learned temperature are left
    alone); `dense_lr` is the rate of the dense parameters where it differs. "adam" is torch.optim.Adam on everything with coupled L2,
    as in the XIR release: every row decays in every step, so the towers must be built with sparse=False.

        for optimizer in optimizers(model, "row-adam", lr=1e-2): optimizer.step()
    """
    if rule not in ("row-adam", "row-adagrad", "adam"):
        raise ValueError(f"optimiser rule {rule!r} is not known: use 'row-adam', 'row-adagrad' or 'adam'")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    marked = {id(getattr(module, "weight", None)) for module in model.modules() if getattr(module, "sparse", False) is True}
    tables = {name: parameter for name, parameter in trained.items() if id(parameter) in marked}
    dense = [parameter for name, parameter in trained.items() if name not in tables]
    found: list[Optimizer] = []
    if rule == "adam":
        if tables:
            raise ValueError(f"rule 'adam' needs dense gradients, but {next(iter(tables))} is sparse: build the tower with sparse=False")
        if dense:
            found.append(torch.optim.Adam(dense, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=_fused(dense)))
    else:
        rows = list(tables.values())
        if rows and rule == "row-adam":
            found.append(RowAdam(rows, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        elif rows:
            found.append(RowAdagrad(rows, lr=lr, eps=eps, weight_decay=weight_decay))
        split = (([p for p in dense if p.dim() > 1], weight_decay), ([p for p in dense if p.dim() < 2], 0.0))
        groups = [{"params": params, "weight_decay": decay} for params, decay in split if params]
        if groups:
            found.append(torch.optim.AdamW(groups, lr=lr if dense_lr is None else dense_lr, betas=betas, eps=eps, fused=_fused(dense)))
    for group in _groups(found):
        group["initial_lr"] = group["lr"]
    return found


def set_lr(optimizers: Sequence[Optimizer], factor: float) -> None:
    """Set every learning rate to factor times the one its optimiser was built with."""
    for group in _groups(optimizers):
        group["lr"] = group["initial_lr"] * factor


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes: a pure function of the step and the epoch, both counted from 0.

        constant  1
        step      gamma ^ (epoch // every)                                      (0.95 every 5 epochs: the XIR setting)
        cosine    floor + (1 - floor) (1 + cos(pi (step - warmup) / (total - warmup))) / 2, and floor from step `total` on

    times (step + 1) / warmup in the first `warmup` steps.

        set_lr(optimizers, Schedule("step", gamma=0.95, every=5).lr_at(step, epoch))
    """

    kind: Literal["constant", "step", "cosine"] = "constant"
    warmup: int = 0
    gamma: float = 0.95
    every: int = 5
    total: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "step", "cosine"):
            raise ValueError(f"schedule {self.kind!r} is not known: use 'constant', 'step' or 'cosine'")
        if self.warmup < 0 or self.every < 1:
            raise ValueError(f"a schedule needs warmup >= 0 and every >= 1, not warmup={self.warmup}, every={self.every}")
        if self.kind == "cosine" and self.total <= self.warmup:
            raise ValueError(f"a cosine schedule needs total > warmup steps, not total={self.total}, warmup={self.warmup}")

    def lr_at(self, step: int, epoch: int) -> float:
        """The factor on the learning rate at this step of this epoch."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.kind == "step":
            return float(warm * self.gamma ** (epoch // self.every))
        if self.kind == "cosine":
            done = min(1.0, max(0.0, (step - self.warmup) / (self.total - self.warmup)))
            return warm * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)
        return warm


def state_tensors(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """All that the optimisers remember, as tensors under flat names: `0.rate.0` (group), `0.state.3.mean` (parameter)."""
    tensors: dict[str, Tensor] = {}
    for at, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            tensors[f"{at}.rate.{number}"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
        for number, parameter in enumerate(_parameters(optimizer)):
            for name, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    raise ValueError(f"{type(optimizer).__name__} keeps {name} as {type(value).__name__}, and only tensors can be saved")
                tensors[f"{at}.state.{number}.{name}"] = value.detach()
    return tensors


def load_state_tensors(optimizers: Sequence[Optimizer], tensors: dict[str, Tensor]) -> None:
    """Put back what `state_tensors` gave, bitwise, into optimisers built over the same parameters in the same order."""
    params = [list(_parameters(optimizer)) for optimizer in optimizers]
    rates = {f"{at}.rate.{n}": group for at, o in enumerate(optimizers) for n, group in enumerate(o.param_groups)}
    missing = sorted(rates.keys() - tensors.keys())
    if missing:
        raise ValueError(f"the saved optimiser state lacks {missing[0]}: it belongs to another model or rule")
    fresh: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for key, value in tensors.items():
        if key in rates:
            continue
        at, kind, number, name = ([*key.split(".", 3), "", "", ""])[:4]
        known = kind == "state" and at.isdigit() and number.isdigit() and int(at) < len(params) and int(number) < len(params[int(at)])
        parameter = params[int(at)][int(number)] if known else None
        if parameter is None or (value.dim() and value.shape not in (parameter.shape, parameter.shape[:1])):
            raise ValueError(f"the saved optimiser state {key} of shape {tuple(value.shape)} fits no parameter: it is of another model")
        device = parameter.device if value.dim() or _on_device(optimizers[int(at)]) else torch.device("cpu")
        fresh[int(at)].setdefault(int(number), {})[name] = value.detach().to(device, copy=True)
    for key, group in rates.items():
        group["lr"] = tensors[key].item()
    for optimizer, owned, states in zip(optimizers, params, fresh, strict=True):
        optimizer.state.clear()
        for which, state in states.items():
            optimizer.state[owned[which]] = state


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _groups(optimizers: Sequence[Optimizer]) -> Iterator[dict[str, Any]]:
    for optimizer in optimizers:
        yield from optimizer.param_groups


def _blocks(rows: Tensor, grad: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    if rows.device.type != "cpu":  # rows may repeat there (sum_rows): all must be read before one is written
        return [(rows, grad)]
    size = max(1, _BLOCK // max(1, grad.shape[1]))
    return zip(rows.split(size), grad.split(size), strict=True)


def _unbias(beta: float, count: Tensor) -> Tensor:
    """1 - beta^count, without the cancellation of a float32 power close to 1."""
    return torch.expm1(count * math.log(beta)).neg_() if beta else torch.ones_like(count)


def _check(lr: float, eps: float, weight_decay: float) -> None:
    if lr < 0 or eps < 0 or weight_decay < 0:
        raise ValueError(f"lr {lr}, eps {eps} and weight_decay {weight_decay} must not be negative")


def _fused(parameters: Sequence[Tensor]) -> bool:
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


def _on_device(optimizer: Optimizer) -> bool:
    """Whether 0-dimensional state (a step counter) lives with the parameters."""
    return isinstance(optimizer, _RowOptimizer) or any(group.get("fused") or group.get("capturable") for group in _groups([optimizer]))
