"""Which rows share a training batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparring.errors import UserError


class RandomBatches:
    """Every row once per epoch, in an order that depends on (seed, epoch) only.

    An epoch is a permutation cut into slices, so a run that stopped at (epoch, step) goes on with exactly the batches that
    it would have had. The permutation takes 4 bytes a row (8 above 2^31 rows), 200 MB and about a second at 50 million.

        batches = RandomBatches(len(train), 2048, seed=0)
        for rows in batches.epoch(3, start_step=17): ...
    """

    def __init__(self, n_rows: int, batch_size: int, seed: int = 0, drop_last: bool = False) -> None:
        if n_rows < 1:
            raise UserError(f"n_rows is {n_rows}: there is nothing to train on")
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1")
        if drop_last and n_rows < batch_size:
            raise UserError(f"batch_size {batch_size} is more than the {n_rows} rows, and drop_last leaves no batch")
        self.n_rows, self.batch_size, self.seed, self.drop_last = n_rows, batch_size, seed, drop_last

    def __len__(self) -> int:
        """Steps per epoch."""
        return self.n_rows // self.batch_size if self.drop_last else -(-self.n_rows // self.batch_size)

    def epoch(self, epoch: int, start_step: int = 0, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """Row indices (B,) int64 of each step of an epoch, from start_step on; on a device, all of them are copied there at once."""
        if not 0 <= start_step <= len(self):
            raise UserError(f"start_step is {start_step}; an epoch has {len(self)} steps")
        order = self._order(epoch).to(device)
        for step in range(start_step, len(self)):
            yield order[step * self.batch_size : (step + 1) * self.batch_size].long()

    def _order(self, epoch: int) -> Tensor:
        # torch seeds differ in few bits, so mix (seed, epoch) before seeding: neighbours must not share streams.
        mixed = (self.seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
        mixed ^= mixed >> 31
        generator = torch.Generator().manual_seed(mixed & (2**63 - 1))
        kind = torch.int32 if self.n_rows < 2**31 else torch.int64
        return torch.randperm(self.n_rows, generator=generator, dtype=kind)
