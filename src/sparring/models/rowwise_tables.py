"""Tables whose rows are spread over the ranks: TorchRec's row-wise sharding with its fused row-wise Adagrad (the extra `scale`)."""

from __future__ import annotations

import importlib.util
import os
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.memory import machine_bytes
from sparring.core.ranks import Group, home, join, launched
from sparring.models.towers import IdTower

_ROWS = (
    1 << 16
)  # of a table that are drawn, sent or written at a time; with any dim a multiple of 16 numbers, see `start`


def require_torchrec() -> None:
    """Say in one line what is missing."""
    if importlib.util.find_spec("torchrec") is None or importlib.util.find_spec("fbgemm_gpu") is None:
        raise UserError(
            'tables=sharded needs TorchRec: pip install "sparring[scale]", or on CPUs as docs/scale.md says'
        )


class RowWiseTable(nn.Module):
    """One free vector per id, as IdTower has it, its rows spread over the ranks; trained by RowAdagrad's rule (row-wise Adagrad).

        rank r holds the rows from r ceil(n / ranks) on, and of each the sum of mean squared gradients: n dim / ranks + n / ranks numbers

    A lookup is a collective: every rank asks for ids of its own, as often as the others. The vectors that a step looked up are kept with
    their gradients until `step` hands all of them to TorchRec at once: a row that was looked up in several places moves once, by the
    sum, as in one process. The table starts from the numbers that IdTower would start from.

        table = RowWiseTable(100_000_000, 64, 0.1, Group(), torch.device("cuda"));   table(ids).sum().backward();   table.step(lr=0.05)
    """

    where: Tensor
    spread = True  # each rank has some of the rows

    def __init__(
        self, n: int, dim: int, init_std: float, ranks: Group, device: torch.device, eps: float = 1e-8
    ) -> None:
        super().__init__()
        self.n, self.dim, self.ranks = n, dim, ranks
        self.register_buffer("where", torch.zeros(0, device=device), persistent=False)
        with torch.random.fork_rng([]):  # it draws a start of its own
            self._engine = (
                _sharded(n, dim, ranks, device, eps),
            )  # a tuple: its parameters are no business of other optimisers
        self._asked: list[tuple[Tensor, Tensor]] = []  # ids and vectors of this step
        block = -(-n // ranks.world)
        self.bounds = [min(block * rank, n) for rank in range(ranks.world + 1)]
        self.start(init_std)

    @torch.no_grad()
    def start(self, init_std: float) -> None:
        """Draw the rows as IdTower does, block by block, and keep this rank's.

        A CPU draws normal numbers 16 at a time, so that blocks of multiples of 16 go through the same numbers as the whole.
        """
        low, high = self.bounds[self.ranks.rank : self.ranks.rank + 2]
        weight = self.weight
        for first in range(0, self.n, _ROWS):
            rows = torch.empty(min(_ROWS, self.n - first), self.dim).normal_(0.0, init_std)
            begin, end = max(first, low), min(first + len(rows), high)
            if begin < end:
                weight[begin - low : end - low] = rows[begin - first : end - first].to(weight.device)

    @property
    def weight(self) -> Tensor:
        """(rows of this rank, dim): the part of the table that lies here."""
        return _local(self._engine[0].state_dict()["embeddings.rows.weight"], (self.dim,), self.where.device)

    @property
    def sums(self) -> Tensor:
        """(rows of this rank,): what RowAdagrad calls `sum`."""
        state = self._engine[0].fused_optimizer.state_dict()["state"]["embeddings.rows.weight"]
        return _local(state["rows.momentum1"], (), self.where.device)

    def whole(self, rows: Tensor) -> Tensor:
        """(n, ...) of what each rank has for its own rows."""
        return self.ranks.gather_parts(rows, self.bounds)

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1).long()
        vectors = self._look_up(flat).detach()
        if torch.is_grad_enabled():
            self._asked.append((flat, vectors.requires_grad_()))
        return vectors.view(*ids.shape, self.dim)

    def step(self, lr: float) -> None:
        """Move every row that was looked up since the last step by its summed gradient."""
        asked, self._asked = self._asked, []
        ids = torch.cat([ids for ids, _ in asked]) if asked else self.where.long()
        grads = [torch.zeros_like(v) if v.grad is None else v.grad for _, v in asked]
        fused = self._engine[0].fused_optimizer
        fused.param_groups[0]["lr"] = lr
        fused.step()  # takes over the rate; the update itself is part of the backward pass
        gradient = torch.cat(grads) if grads else self.where.new_zeros(0, self.dim)
        with torch.enable_grad():
            self._look_up(ids).backward(gradient)
        self.ranks.count("rows", gradient.nbytes * (self.ranks.world - 1) // self.ranks.world)

    def _look_up(self, ids: Tensor) -> Tensor:
        from torchrec import KeyedJaggedTensor

        # One sample that holds all ids: their number may differ from rank to rank, the number of samples may not.
        lengths = torch.tensor([len(ids)], device=ids.device)
        found: Tensor = (
            self._engine[0](KeyedJaggedTensor(keys=["id"], values=ids, lengths=lengths)).wait()["id"].values()
        )
        self.ranks.count("rows", (ids.nbytes + found.nbytes) * (self.ranks.world - 1) // self.ranks.world)
        return found

    def extra_repr(self) -> str:
        return f"{self.n}, {self.dim}, over {self.ranks.world} ranks"


def fitting(setup: Any, n_queries: int, n_items: int) -> Any:
    """The setup with tables=auto decided: sharded where the tables and what their rule keeps are more than a device has, and ranks share.

    A row takes 4 dim bytes, three times that and a number under row-adam, a number more under row-adagrad, four times that under adam.
    """
    if setup.tables == "sharded":
        _check(setup)
    if setup.tables != "auto" or "text" in (setup.query_tower, setup.item_tower):
        return setup
    per_row = {"row-adam": 12 * setup.dim + 4, "row-adagrad": 4 * setup.dim + 4, "adam": 16 * setup.dim}[
        setup.optimizer
    ]
    needed, room = per_row * (n_items + (n_queries if setup.query_tower == "id" else 0)), _room(pick_device("auto"))
    if needed <= room:
        return setup
    sharded = replace(setup, tables="sharded")
    try:
        _check(sharded)
        if launched() == 1:
            raise UserError("start several ranks: torchrun, or --nproc")
    except UserError as error:
        raise UserError(
            f"the tables take {needed / 1e9:,.0f} GB and this device has {room / 1e9:,.0f}; {error}"
        ) from error
    return sharded


def id_table(setup: Any, n: int, dim: int) -> IdTower | RowWiseTable:
    """A table of ids as the setup asks for it: whole in every process, or its rows spread over the ranks."""
    if setup.tables == "sharded":
        ranks = join(pick_device("auto"))
        if isinstance(ranks, Group):
            return RowWiseTable(n, dim, setup.init_std, ranks, home())
    return IdTower(n, dim, setup.init_std, setup.optimizer != "adam")


def _check(setup: Any) -> None:
    """Say in one line what a sharded table cannot do."""
    wanted: dict[str, Any] = {"optimizer": "row-adagrad", "query_tower": "id", "item_tower": "id", "init": "normal"}
    wanted |= {
        "weight_decay": 0.0,
        "clip": None,
        "chunk": None,
        "item_features": (),
        "auxiliary": 0,
        "centroids": False,
        "classifiers": 0,
    }
    for name, value in wanted.items():
        if getattr(setup, name) != value:
            why = ": its table has row-wise Adagrad only" if name == "optimizer" else ""
            raise UserError(f"tables=sharded needs {name}={value}, not {getattr(setup, name)}{why}")
    if setup.dim % 4:
        raise UserError(f"tables=sharded needs a dim that is a multiple of 4, not {setup.dim}")
    require_torchrec()


def _room(device: torch.device) -> int:
    """Bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_bytes()


def _sharded(n: int, dim: int, ranks: Group, device: torch.device, eps: float) -> Any:
    require_torchrec()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingCollection, EmbeddingConfig
        from torchrec.distributed.comm_ops import set_gradient_division
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.types import ShardingEnv

    set_gradient_division(False)  # gradients are summed over ranks, as everywhere here
    config = EmbeddingConfig(name="rows", embedding_dim=dim, num_embeddings=n, feature_names=["id"])
    collection = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.0, "eps": eps}
    )
    group = ranks.group or dist.group.WORLD
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
    plan = construct_module_sharding_plan(
        collection,
        {"rows": row_wise(compute_kernel="fused")},
        sharder=sharder,
        local_size=min(machine, ranks.world),
        world_size=ranks.world,
        device_type=device.type,
    )
    return sharder.shard(collection, plan, ShardingEnv.from_process_group(group), device)  # type: ignore[arg-type]


def _local(sharded: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    shards = sharded.local_shards()
    return shards[0].tensor.view(-1, *shape) if shards else torch.zeros(0, *shape, device=device)
