"""A table of vectors in ranges, dealt over the GPUs there are: classifiers of more items than one GPU holds (M4 of NGAME)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparring.models.towers import IdTower


class ShardedTable(nn.Module):
    """One free vector per id, as IdTower has it, in `shards` ranges of ids, each a table of its own.

        shard of id = the s with bounds[s] <= id < bounds[s + 1],   sizes that differ by at most 1

    `to("cuda")` deals the shards over all GPUs in turn, the first on the one that is named; vectors are gathered from there, gradients
    go back there, and each shard is updated where it lies: of the 12 N D bytes of N vectors and their moments a GPU holds its share. The
    values are those of one table, whatever the number of shards; a saved run has a tensor for each shard, and loads on any devices.

        ShardedTable(1_300_000, 768, shards=4).to("cuda")(torch.tensor([3, 7], device="cuda"))      # (2, 768)
    """

    def __init__(self, n: int, dim: int, shards: int = 1, init_std: float | None = None, sparse: bool = True) -> None:
        super().__init__()
        if not 1 <= shards <= n:
            raise ValueError(f"shards must number between 1 and the {n:,} rows of the table, got {shards}")
        self.n, self.dim = n, dim
        self.bounds = [n * at // shards for at in range(shards + 1)]
        whole = IdTower(n, dim, init_std, sparse).weight.detach()  # drawn at once, so that a start is that of one table
        sizes = [high - low for low, high in zip(self.bounds, self.bounds[1:], strict=False)]
        with torch.random.fork_rng(devices=[]):  # and what is drawn after it too
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
        """What `to`, `cuda` and `cpu` call: shards that a GPU would all get are dealt over all GPUs."""
        super()._apply(fn, recurse)
        for part, device in zip(self.parts, dealt(len(self.parts), self.parts[0].weight.device), strict=True):  # type: ignore[arg-type]
            part.to(device)
        return self

    def extra_repr(self) -> str:
        return f"{self.n}, {self.dim}, shards={len(self.parts)}"


def dealt(shards: int, device: torch.device) -> list[torch.device]:
    """The device of each shard: GPUs in turn, from this one on; all of them here where it is no GPU."""
    if device.type != "cuda":
        return [device] * shards
    count, first = torch.cuda.device_count(), device.index or 0
    return [torch.device("cuda", (first + at) % count) for at in range(shards)]
