"""The update rule of each parameter, clipping, learning-rate schedules, and optimiser state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparring.core.part import Part
from sparring.core.sparse_rows import sum_rows
from sparring.models.towers import IdTower
from sparring.training.light_optimizers import Adam, AdamW
from sparring.training.row_optimizers import RowAdagrad, RowAdam, RowOptimizer

Rule = Literal["row-adam", "row-adagrad", "adam", "solver"]
LARGE = 1 << 24  # numbers in all tables from which on dense Adam takes most of a step on a CPU


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients, dense and sparse, to a joint Euclidean norm of at most max_norm; returns the original norm.

    Sparse gradients are coalesced, because a norm needs the sum over duplicate rows. On CUDA this waits for the device
    once per table.
    """
    parts: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse and parameter.grad.device.type == "cpu":
            rows, values = sum_rows(parameter.grad)
            parameter.grad = torch.sparse_coo_tensor(
                rows[None], values, parameter.shape, is_coalesced=True, check_invariants=False
            )
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
    """The optimisers of a model: a row rule for sparse tables and AdamW for the rest, or dense Adam for everything.

    "row-adam" and "row-adagrad" use decoupled weight decay. Of the dense parameters only matrices decay: biases, a
    learned temperature and tables whose module is `undecayed` do not. `dense_lr` is the rate of the dense parameters,
    by default lr. "adam" is torch.optim.Adam with coupled L2 on everything, as in the XIR release: every row decays in
    every step, so the towers must be built with sparse=False. A run with a "solver" has none.

        for optimizer in optimizers(model, "row-adam", lr=1e-2): optimizer.step()
    """
    if rule == "solver":
        return []
    if rule not in ("row-adam", "row-adagrad", "adam"):
        raise ValueError(f"unknown optimiser rule {rule!r}: use 'row-adam', 'row-adagrad' or 'adam'")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    marked = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, Part | nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    tables = {name: parameter for name, parameter in trained.items() if id(parameter) in marked}
    dense = [parameter for name, parameter in trained.items() if name not in tables]
    built: list[Optimizer] = []
    if rule == "adam":
        if tables:
            raise ValueError(
                f"rule 'adam' needs dense gradients, but {next(iter(tables))} is sparse: "
                "build the tower with sparse=False"
            )
        if dense:
            built.append(Adam(dense, lr, betas, eps, weight_decay, fused=_fused(dense), capturable=_on_cuda(dense)))
    else:
        free = {id(module.weight) for module in model.modules() if isinstance(module, Part) and module.undecayed}
        kinds = (
            ([p for p in tables.values() if id(p) not in free], weight_decay),
            ([p for p in tables.values() if id(p) in free], 0.0),
        )
        # one group per device, which holds its learning rate
        rows: Any = [
            {"params": params, "weight_decay": decay} for members, decay in kinds for params in _by_device(members)
        ]
        if rows and rule == "row-adam":
            built.append(RowAdam(rows, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        elif rows:
            built.append(RowAdagrad(rows, lr=lr, eps=eps, weight_decay=weight_decay))
        plain = [p for p in dense if p.dim() < 2 or id(p) in free]
        split = (([p for p in dense if p.dim() > 1 and id(p) not in free], weight_decay), (plain, 0.0))
        groups = [{"params": params, "weight_decay": decay} for params, decay in split if params]
        if groups:
            rate = lr if dense_lr is None else dense_lr
            built.append(AdamW(groups, rate, betas, eps, fused=_fused(dense), capturable=_on_cuda(dense)))
    for group in _groups(built):
        group["initial_lr"] = group["lr"]
        if _on_cuda(group["params"]):  # a captured step reads the rate on the device
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)
    return built


def about_large_tables(model: nn.Module, rule: str) -> str | None:
    """A line about tables so large that a dense rule takes most of a step; None if there are none."""
    if rule != "adam":
        return None
    tables = [module.weight for module in model.modules() if isinstance(module, IdTower)]
    if sum(table.numel() for table in tables) < LARGE:
        return None
    rows = f"{sum(map(len, tables)):,}"
    return f"optimizer=adam updates all {rows} rows of the tables in every step; optimizer=row-adam those of the batch"


def set_lr(optimizers: Sequence[Optimizer], factor: float) -> None:
    """Set every learning rate to factor times the one its optimiser was built with."""
    for group in _groups(optimizers):
        _put_lr(group, group["initial_lr"] * factor)


@dataclass(frozen=True)
class Schedule:
    """The factor on the learning rate: a pure function of the step and the epoch, both counted from 0.

        constant  1
        step      gamma ^ (epoch // every)                                      (0.95 every 5 epochs: the XIR setting)
        cosine    floor + (1 - floor) (1 + cos(pi (step - warmup) / (total - warmup))) / 2, then floor from step `total`
        linear    floor + (1 - floor) (total - step) / (total - warmup), then floor from step `total`

    times (step + 1) / warmup in the first `warmup` steps.

        set_lr(optimizers, Schedule("step", gamma=0.95, every=5).lr_at(step, epoch))
    """

    kind: Literal["constant", "step", "cosine", "linear"] = "constant"
    warmup: int = 0
    gamma: float = 0.95
    every: int = 5
    total: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "step", "cosine", "linear"):
            raise ValueError(f"schedule {self.kind!r} is not known: use 'constant', 'step', 'cosine' or 'linear'")
        if self.warmup < 0 or self.every < 1:
            raise ValueError(
                f"a schedule needs warmup >= 0 and every >= 1, not warmup={self.warmup}, every={self.every}"
            )
        if self.kind in ("cosine", "linear") and self.total <= self.warmup:
            raise ValueError(
                f"a {self.kind} schedule needs total > warmup steps, not total={self.total}, warmup={self.warmup}"
            )

    def lr_at(self, step: int, epoch: int) -> float:
        """The factor on the learning rate at this step of this epoch."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.kind == "step":
            return float(warm * self.gamma ** (epoch // self.every))
        if self.kind in ("cosine", "linear"):
            done = min(1.0, max(0.0, (step - self.warmup) / (self.total - self.warmup)))
            left = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
            return warm * (self.floor + (1 - self.floor) * left)
        return warm


def fitting_warmup(warmup: int, total: int) -> int:
    """The warm-up steps of a training of `total` steps: `warmup`, or a tenth of all steps if it exceeds half of them.

    >>> fitting_warmup(100, 1000), fitting_warmup(100, 40)
    (100, 4)
    """
    return warmup if 2 * warmup <= total else total // 10


def state_tensors(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The state of the optimisers as tensors by flat names: `0.rate.0` (group), `0.state.3.mean` (parameter)."""
    tensors: dict[str, Tensor] = {}
    for i, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            tensors[f"{i}.rate.{number}"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
        for number, parameter in enumerate(_parameters(optimizer)):
            for name, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    kind = type(value).__name__
                    raise ValueError(f"{type(optimizer).__name__} has {name} as a {kind}; only tensors can be saved")
                tensors[f"{i}.state.{number}.{name}"] = value.detach()
    return tensors


def load_state_tensors(optimizers: Sequence[Optimizer], tensors: dict[str, Tensor]) -> None:
    """Restore `state_tensors` bitwise into optimisers over the same parameters in the same order."""
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
        known = (
            kind == "state"
            and at.isdigit()
            and number.isdigit()
            and int(at) < len(params)
            and int(number) < len(params[int(at)])
        )
        parameter = params[int(at)][int(number)] if known else None
        if parameter is None or (value.dim() and value.shape not in (parameter.shape, parameter.shape[:1])):
            shape = tuple(value.shape)
            raise ValueError(f"the saved optimiser state {key} of shape {shape} fits no parameter of this model")
        device = parameter.device if value.dim() or _on_device(optimizers[int(at)]) else torch.device("cpu")
        fresh[int(at)].setdefault(int(number), {})[name] = value.detach().to(device, copy=True)
    for key, group in rates.items():
        _put_lr(group, tensors[key].item())
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


def _put_lr(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _by_device(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.device, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device, []).append(parameter)
    return list(groups.values())


def _on_cuda(parameters: Sequence[Tensor]) -> bool:
    return all(p.device.type == "cuda" for p in parameters)


def _fused(parameters: Sequence[Tensor]) -> bool:
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


def _on_device(optimizer: Optimizer) -> bool:
    """Whether 0-dimensional state (a step counter) lives with the parameters."""
    return isinstance(optimizer, RowOptimizer) or any(
        group.get("fused") or group.get("capturable") for group in _groups([optimizer])
    )
