"""Tables sharded over the GPUs of one process: classifiers of more items than one GPU holds (M4 of NGAME)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparring.models.towers import IdTower


class ShardedTable(nn.Module):
    """One free vector per id, like IdTower, in `shards` ranges of ids, each a separate table.

        shard of id = the s with bounds[s] <= id < bounds[s + 1],   sizes differ by at most 1

    `to("cuda")` distributes the shards over all GPUs round-robin, starting with the named one. Vectors are gathered
    from there, gradients go back, and each shard is updated on its own GPU, which holds its share of the 12 N D bytes
    of N vectors and their moments. The values do not depend on the number of shards. A saved run has one tensor per
    shard and loads on any number of devices.

        ShardedTable(1_300_000, 768, shards=4).to("cuda")(torch.tensor([3, 7], device="cuda"))      # (2, 768)
    """

    def __init__(self, n: int, dim: int, shards: int = 1, init_std: float | None = None, sparse: bool = True) -> None:
        super().__init__()
        if not 1 <= shards <= n:
            raise ValueError(f"shards must be between 1 and the {n:,} rows of the table, got {shards}")
        self.n, self.dim = n, dim
        self.bounds = [n * shard // shards for shard in range(shards + 1)]
        whole = IdTower(n, dim, init_std, sparse).weight.detach()  # drawn at once: the values of a single table
        sizes = [high - low for low, high in zip(self.bounds, self.bounds[1:], strict=False)]
        with torch.random.fork_rng(devices=[]):  # later draws must not depend on the shards
            self.parts = nn.ModuleList([IdTower(size, dim, 0.0, sparse) for size in sizes])
        self.copy_rows(whole)

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.flatten().long()
        places, vectors = [], []
        for part, low, high in zip(self.parts, self.bounds, self.bounds[1:], strict=False):
            place = torch.nonzero((flat >= low) & (flat < high)).flatten()
            places.append(place)
            vectors.append(part((flat[place] - low).to(part.weight.device)).to(flat.device))  # type: ignore[arg-type]
        order = torch.argsort(torch.cat(places))
        return torch.cat(vectors)[order].unflatten(0, ids.shape)

    def copy_rows(self, vectors: Tensor) -> None:
        """Set all rows."""
        with torch.no_grad():
            for part, low, high in zip(self.parts, self.bounds, self.bounds[1:], strict=False):
                part.weight.copy_(vectors[low:high])  # type: ignore[operator]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedTable:
        """Called by `to`, `cuda` and `cpu`: distributes shards bound for one GPU over all GPUs."""
        super()._apply(fn, recurse)
        for part, device in zip(self.parts, dealt(len(self.parts), self.parts[0].weight.device), strict=True):  # type: ignore[arg-type]
            part.to(device)
        return self

    def extra_repr(self) -> str:
        return f"{self.n}, {self.dim}, shards={len(self.parts)}"


def dealt(shards: int, device: torch.device) -> list[torch.device]:
    """The device of each shard: GPUs round-robin from this one on; this device if it is not a GPU."""
    if device.type != "cuda":
        return [device] * shards
    count, first = torch.cuda.device_count(), device.index or 0
    return [torch.device("cuda", (first + shard) % count) for shard in range(shards)]
