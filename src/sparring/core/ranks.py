"""Several processes that train as one, on torch.distributed (gloo on CPUs, NCCL on GPUs): gather with gradient, sum.

Each rank encodes its part of the batch and of the shared candidates, scores its own queries against all candidates, and
returns the gradient of each vector to the rank that encoded it; gradients of weights are summed. A step therefore
equals that of one process on the complete batch, and so does the state of every sampler. A single process uses none of
this: see types.Ranks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparring.core.sparse_rows import sum_rows
from sparring.core.types import ALONE, Ranks

# torch 2.13 renamed both; 2.11 only has the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def launched() -> int:
    """The number of processes that a launcher (torchrun) started for this training; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world() -> int:
    """The number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """This process's number in the training; 0 for a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def leave() -> None:
    """Close the process group once all ranks are done."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def home() -> torch.device:
    """The device of this rank: a GPU under NCCL, otherwise the CPU."""
    return torch.device("cuda", local_rank()) if "nccl" in str(dist.get_backend_config()) else torch.device("cpu")


def join(device: torch.device) -> Ranks:
    """Join the processes that a launcher started; without a launcher, this process alone."""
    if not dist.is_initialized():
        if launched() == 1:
            return ALONE
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", **_meeting())
    return Group() if dist.get_world_size() > 1 else ALONE


def _meeting() -> dict[str, Any]:
    """The rendezvous store. A launcher may reuse its own after a restart: a prefix hides addresses of dead ranks."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), launched(), is_master=False)
    again = dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    return {"store": again, "rank": int(os.environ["RANK"]), "world_size": launched()}


class Group(Ranks):
    """The ranks of a process group, by default the group of `join`.

    If `wire` is a dictionary, every collective adds the bytes that this rank receives from the others.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.wire: dict[str, int] | None = None

    @cached_property
    def aside(self) -> dist.ProcessGroup:
        """A second group of these ranks on gloo, for a thread that writes during training; created by all together."""
        members = dist.get_process_group_ranks(self.group or dist.distributed_c10d._get_default_group())
        group: dist.ProcessGroup = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        return group

    def bounds(self, n: int) -> list[int]:
        """The first row of each rank's part of n rows, and n."""
        return [n * rank // self.world for rank in range(self.world + 1)]

    def own(self, x: Tensor) -> Tensor:
        bounds = self.bounds(len(x))
        return x[bounds[self.rank] : bounds[self.rank + 1]]

    def gather(self, x: Tensor, n: int) -> Tensor:
        if not (torch.is_grad_enabled() and x.is_floating_point()):
            return self.gather_parts(x, self.bounds(n))
        # The backward pass is a collective too: a rank whose part needs no gradient must take part in it.
        own = x if x.requires_grad else x.detach().requires_grad_()
        gathered: Tensor = _Gather.apply(own, self, self.bounds(n))  # type: ignore[no-untyped-call]
        return gathered

    def sum(self, x: Tensor) -> Tensor:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        self.count("sum", 2 * total.nbytes * (self.world - 1) // self.world)
        return total

    def share(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def equalise(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), group=self.group, group_src=0)

    def gather_parts(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """Concatenate the parts of all ranks, rank r holding rows bounds[r] to bounds[r + 1]; no gradient."""
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        most = max(sizes)
        whole = x.new_empty(self.world * most, *x.shape[1:])
        _all_gather(whole, _padded(x.detach(), most), group=self.group)
        self.count("gather", whole.nbytes * (self.world - 1) // self.world)
        if min(sizes) == most:
            return whole
        return torch.cat([whole[rank * most : rank * most + size] for rank, size in enumerate(sizes)])

    def scatter_sum(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """This rank's part of the sum of x over ranks, cut at the bounds: the backward pass of `gather_parts`."""
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        most = max(sizes)
        if min(sizes) == most:
            whole = x.contiguous()
        else:
            whole = torch.cat([_padded(part, most) for part in x.split(sizes)])
        mine = whole.new_empty(most, *x.shape[1:])
        _reduce_scatter(mine, whole, group=self.group)
        self.count("scatter", whole.nbytes * (self.world - 1) // self.world)
        return mine[: sizes[self.rank]]

    def count(self, what: str, size: int) -> None:
        if self.wire is not None:
            self.wire[what] = self.wire.get(what, 0) + size


class UnevenGroup(Group):
    """The ranks of a process group of which each brings `rows` rows of its own to a step, not an equal part.

    Tensors over all these rows are cut where the ranks' rows end; any others into equal parts.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__()
        counts = self.gather_parts(torch.tensor([rows], device=device), range(self.world + 1)).tolist()
        self.ends = [0, *itertools.accumulate(counts)]

    def bounds(self, n: int) -> list[int]:
        return self.ends if n == self.ends[-1] else super().bounds(n)


def _padded(x: Tensor, n: int) -> Tensor:
    return x.contiguous() if len(x) == n else torch.cat([x, x.new_zeros(n - len(x), *x.shape[1:])])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Group, bounds: list[int]) -> Tensor:
        ctx.ranks, ctx.bounds = ranks, bounds
        return ranks.gather_parts(x, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.scatter_sum(grad, ctx.bounds), None, None


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace every gradient by its sum over ranks; row-sparse gradients are concatenated in the order of ranks.

    A parameter without a gradient on any rank has none afterwards. All ranks end with the same bits.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not isinstance(ranks, Group) or not trained:
        return
    rows: list[tuple[Tensor, Tensor] | None] = []
    kinds: list[int] = []  # rows of a sparse gradient, -1 for a dense one, 0 for none
    for parameter in trained:
        grad = parameter.grad
        sparse = _rows(grad) if grad is not None and grad.is_sparse else None
        rows.append(sparse)
        kinds.append(0 if grad is None else -1 if sparse is None else len(sparse[0]))
    device = trained[0].device
    table = ranks.gather_parts(torch.tensor([kinds], device=device), range(ranks.world + 1)).tolist()
    dense = [p for at, p in enumerate(trained) if min(kind[at] for kind in table) < 0]
    if dense:
        flat = ranks.sum(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in dense]))
        for parameter, part in zip(dense, flat.split([p.numel() for p in dense]), strict=True):
            parameter.grad = part.view_as(parameter)
    for at, (parameter, own) in enumerate(zip(trained, rows, strict=True)):
        sizes = [kind[at] for kind in table]
        if max(sizes) < 1:
            continue
        none = torch.zeros(0, dtype=torch.long, device=device), parameter.new_zeros(0, *parameter.shape[1:])
        index, values = none if own is None else own
        bounds = [sum(sizes[:rank]) for rank in range(ranks.world + 1)]
        index, values = ranks.gather_parts(index, bounds), ranks.gather_parts(values, bounds)
        parameter.grad = torch.sparse_coo_tensor(index[None], values, parameter.shape, check_invariants=False)


def _rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, gradients) of a sparse gradient; on a CPU each row once, to send less."""
    return sum_rows(grad) if grad.device.type == "cpu" else (grad._indices()[0], grad._values())
