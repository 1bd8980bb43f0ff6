"""Tables sharded by row over the ranks: TorchRec's row-wise sharding with fused Adagrad (the extra `scale`)."""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.part import Part
from sparring.core.ranks import Group

_ROWS = 1 << 16  # rows drawn, sent or written at a time; a multiple of 16 numbers for any dim, see `start`


def require_torchrec() -> None:
    """Raise a one-line error if TorchRec is missing."""
    if importlib.util.find_spec("torchrec") is None or importlib.util.find_spec("fbgemm_gpu") is None:
        raise UserError(
            'tables=sharded needs TorchRec: pip install "sparring[scale]", or see docs/guide/scale.md for CPUs'
        )


class RowWiseTable(Part):
    """One free vector per id, like IdTower, with rows sharded over the ranks and trained by row-wise Adagrad.

        rank r holds rows r ceil(n / ranks) and up, and for each its sum of mean squared gradients:
        n dim / ranks + n / ranks numbers

    A lookup is a collective: every rank asks for its own ids, equally often. `step` hands the vectors of a training
    step and their gradients to TorchRec at once, so a row looked up several times moves once, by the sum, as in one
    process. The table starts from the same numbers as IdTower.

        table = RowWiseTable(100_000_000, 64, 0.1, Group(), torch.device("cuda"))
        table(ids).sum().backward();   table.step(lr=0.05)
    """

    where: Tensor
    spread = True

    def __init__(
        self, n: int, dim: int, init_std: float, ranks: Group, device: torch.device, eps: float = 1e-8
    ) -> None:
        super().__init__()
        self.n, self.dim, self.ranks = n, dim, ranks
        self.register_buffer("where", torch.zeros(0, device=device), persistent=False)
        with torch.random.fork_rng([]):  # TorchRec draws its own initial values
            # in a tuple, so that other optimisers do not see its parameters
            self._engine = (_sharded(n, dim, ranks, device, eps),)
        self._asked: list[tuple[Tensor, Tensor]] = []  # ids and vectors of this step
        block = -(-n // ranks.world)
        self.bounds = [min(block * rank, n) for rank in range(ranks.world + 1)]
        self.start(init_std)

    @torch.no_grad()
    def start(self, init_std: float) -> None:
        """Draw the rows like IdTower, block by block, and keep this rank's.

        A CPU draws normal numbers 16 at a time, so blocks of multiples of 16 see the same numbers as one large draw.
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
        """(rows of this rank, dim): this rank's part of the table."""
        return _local(self._engine[0].state_dict()["embeddings.rows.weight"], (self.dim,), self.where.device)

    @property
    def sums(self) -> Tensor:
        """(rows of this rank,): the `sum` of RowAdagrad."""
        state = self._engine[0].fused_optimizer.state_dict()["state"]["embeddings.rows.weight"]
        return _local(state["rows.momentum1"], (), self.where.device)

    def whole(self, rows: Tensor) -> Tensor:
        """(n, ...): the rows of all ranks."""
        return self.ranks.gather_parts(rows, self.bounds)

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1).long()
        vectors = self._look_up(flat).detach()
        if torch.is_grad_enabled():
            self._asked.append((flat, vectors.requires_grad_()))
        return vectors.view(*ids.shape, self.dim)

    def step(self, lr: float) -> None:
        """Update every row looked up since the last step by its summed gradient."""
        asked, self._asked = self._asked, []
        ids = torch.cat([ids for ids, _ in asked]) if asked else self.where.long()
        grads = [torch.zeros_like(v) if v.grad is None else v.grad for _, v in asked]
        fused = self._engine[0].fused_optimizer
        fused.param_groups[0]["lr"] = lr
        fused.step()  # sets the learning rate; the update itself is part of the backward pass
        gradient = torch.cat(grads) if grads else self.where.new_zeros(0, self.dim)
        with torch.enable_grad():
            self._look_up(ids).backward(gradient)
        self.ranks.count("rows", gradient.nbytes * (self.ranks.world - 1) // self.ranks.world)

    def _look_up(self, ids: Tensor) -> Tensor:
        from torchrec import KeyedJaggedTensor

        # One sample holds all ids: ranks may differ in the number of ids, not of samples.
        lengths = torch.tensor([len(ids)], device=ids.device)
        jagged = KeyedJaggedTensor(keys=["id"], values=ids, lengths=lengths)
        vectors: Tensor = self._engine[0](jagged).wait()["id"].values()
        self.ranks.count("rows", (ids.nbytes + vectors.nbytes) * (self.ranks.world - 1) // self.ranks.world)
        return vectors

    def extra_repr(self) -> str:
        return f"{self.n}, {self.dim}, over {self.ranks.world} ranks"


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

    set_gradient_division(False)  # we sum gradients over ranks
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
