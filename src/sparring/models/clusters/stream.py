"""Items of several modalities in batches, read from a memory map in blocks: what is held is bounded, however many items there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sparring.data.batches import RandomBatches

BLOCK = (
    256  # rows that are read in one piece: long enough for a disk, short enough that a sorted catalogue is well mixed
)
HELD = 1 << 26  # bytes of rows that are held and shuffled at once
PASS = 1 << 11  # rows at a time where all are read
PIECE = (
    1 << 9
)  # rows at a time where they lie apart: a memory map then brings whole pages, and their neighbours, for each


class Modalities(Protocol):
    """Named float vectors of every item; see sparring.data.modalities."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def widths(self) -> Mapping[str, int]: ...
    @property
    def present(self) -> Mapping[str, np.ndarray]: ...
    def __len__(self) -> int: ...
    def rows(self, index: np.ndarray) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Batch:
    """Items with their vectors: one tensor (B, width) per modality, zero where missing, and which are present (modalities, B)."""

    items: np.ndarray  # (B,)
    rows: tuple[Tensor, ...]
    present: Tensor
    complete: bool  # all are present: known here, so that nobody need ask the device

    def take(self, at: Tensor) -> Batch:
        chosen = tuple(rows[at] for rows in self.rows)
        return Batch(self.items[at.cpu().numpy()], chosen, self.present[:, at], self.complete)


class Stream:
    """The items of some modalities as batches on a device.

    Training batches come from blocks of rows in random order; as many as fit into `held` bytes are read, mixed and cut into batches of
    nearly equal size. Every item comes once per epoch, in an order that depends on (seed, epoch) and `held` only. A catalogue that fits
    as a whole is read once.

        for batch in islice(Stream(modalities, seed=0).batches(512), 1000): ...
    """

    def __init__(
        self,
        modalities: Modalities,
        seed: int = 0,
        device: str | torch.device = "cpu",
        names: Sequence[str] | None = None,
        held: int = HELD,
    ) -> None:
        """`names` are the modalities in the order in which batches hold them; all by default."""
        self.modalities, self.seed, self.device = modalities, seed, torch.device(device)
        self.names = tuple(modalities.names if names is None else names)
        width = 4 * sum(modalities.widths[name] for name in self.names)
        self.blocks_held = max(held // (width * BLOCK), 1)
        self._whole: Batch | None = None

    def __len__(self) -> int:
        return len(self.modalities)

    def read(self, items: np.ndarray) -> Batch:
        """Some items, by number."""
        found = self.modalities.rows(items)
        rows = tuple(found[name].to(self.device) for name in self.names)
        present = np.stack([self.modalities.present[name][items] for name in self.names])
        return Batch(items, rows, torch.from_numpy(present).to(self.device), bool(present.all()))

    def sample(self, n: int, seed: int) -> np.ndarray:
        """At most n items at random, sorted, so that they are read from front to back."""
        rng = np.random.default_rng((self.seed, seed))
        return np.sort(rng.choice(len(self), min(n, len(self)), replace=False))

    def through(self, items: np.ndarray | None = None) -> Iterator[Batch]:
        """All items, or some, in the order given."""
        n, size = (len(self), PASS) if items is None else (len(items), PIECE)
        for at in range(0, n, size):
            yield self.read(np.arange(at, min(at + size, n)) if items is None else items[at : at + size])

    def gather(self, items: np.ndarray) -> Batch:
        """Some items that lie apart, at once."""
        parts = list(self.through(items))
        rows = tuple(torch.cat(each) for each in zip(*(part.rows for part in parts), strict=True))
        return Batch(items, rows, torch.cat([part.present for part in parts], 1), all(part.complete for part in parts))

    def batches(self, size: int) -> Iterator[Batch]:
        """Training batches of about `size` items, without end."""
        blocks = RandomBatches(-(-len(self) // BLOCK), self.blocks_held, self.seed)
        epoch = 0
        while True:
            for number, chosen in enumerate(blocks.epoch(epoch)):
                pool = self._pool(np.sort(chosen.numpy()))
                generator = torch.Generator().manual_seed(
                    int(np.random.SeedSequence((self.seed, epoch, number)).generate_state(1)[0])
                )
                mixed = torch.randperm(len(pool.items), generator=generator)
                for part in mixed.tensor_split(max(round(len(mixed) / size), 1)):
                    yield pool.take(part.to(self.device))
                del pool  # before the next one is read
            epoch += 1

    def _pool(self, blocks: np.ndarray) -> Batch:
        if self._whole is not None:
            return self._whole
        items = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        pool = self.read(items[items < len(self)])
        if len(pool.items) == len(self):
            self._whole = pool
        return pool
