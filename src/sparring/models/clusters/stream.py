"""Batches of items with several modalities, read from memory-mapped files in blocks and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sparring.data.batches import RandomBatches

BLOCK = 256  # rows read in one piece: long enough for a disk, short enough to mix a sorted catalogue well
HELD = 1 << 26  # bytes of rows held and shuffled at once
PASS = 1 << 11  # rows at a time when all are read in order
PIECE = 1 << 9  # scattered rows at a time: a memory map reads a page and its neighbours for each


class ModalityRows(Protocol):
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
class ModalityBatch:
    """Items with one tensor (B, width) per modality, zero where missing, and a presence mask (modalities, B)."""

    items: np.ndarray  # (B,)
    rows: tuple[Tensor, ...]
    present: Tensor
    complete: bool  # all are present; known on the host, so no one asks the device

    def take(self, index: Tensor) -> ModalityBatch:
        rows = tuple(rows[index] for rows in self.rows)
        return ModalityBatch(self.items[index.cpu().numpy()], rows, self.present[:, index], self.complete)


class Stream:
    """Items with their modalities as batches on a device.

    Training batches come from blocks of rows in random order: as many as fit into `held` bytes are read, shuffled and
    cut into batches of nearly equal size. Every item occurs once per epoch, in an order that depends only on (seed,
    epoch) and `held`. A catalogue that fits entirely is read once.

        for batch in islice(Stream(modalities, seed=0).batches(512), 1000): ...
    """

    def __init__(
        self,
        modalities: ModalityRows,
        seed: int = 0,
        device: str | torch.device = "cpu",
        names: Sequence[str] | None = None,
        held: int = HELD,
    ) -> None:
        """`names` are the modalities in the order of a batch's rows; all by default."""
        self.modalities, self.seed, self.device = modalities, seed, torch.device(device)
        self.names = tuple(modalities.names if names is None else names)
        width = 4 * sum(modalities.widths[name] for name in self.names)
        self.blocks_held = max(held // (width * BLOCK), 1)
        self._whole: ModalityBatch | None = None

    def __len__(self) -> int:
        return len(self.modalities)

    def read(self, items: np.ndarray) -> ModalityBatch:
        """A batch of these items."""
        vectors = self.modalities.rows(items)
        rows = tuple(vectors[name].to(self.device) for name in self.names)
        present = np.stack([self.modalities.present[name][items] for name in self.names])
        return ModalityBatch(items, rows, torch.from_numpy(present).to(self.device), bool(present.all()))

    def sample(self, n: int, seed: int) -> np.ndarray:
        """At most n random items, sorted, so that they are read front to back."""
        rng = np.random.default_rng((self.seed, seed))
        return np.sort(rng.choice(len(self), min(n, len(self)), replace=False))

    def through(self, items: np.ndarray | None = None) -> Iterator[ModalityBatch]:
        """All items, or these, in order."""
        n, size = (len(self), PASS) if items is None else (len(items), PIECE)
        for start in range(0, n, size):
            yield self.read(np.arange(start, min(start + size, n)) if items is None else items[start : start + size])

    def gather(self, items: np.ndarray) -> ModalityBatch:
        """One batch of scattered items."""
        parts = list(self.through(items))
        rows = tuple(torch.cat(pieces) for pieces in zip(*(part.rows for part in parts), strict=True))
        return ModalityBatch(
            items, rows, torch.cat([part.present for part in parts], 1), all(part.complete for part in parts)
        )

    def batches(self, size: int) -> Iterator[ModalityBatch]:
        """An endless stream of training batches of about `size` items."""
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

    def _pool(self, blocks: np.ndarray) -> ModalityBatch:
        if self._whole is not None:
            return self._whole
        items = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        pool = self.read(items[items < len(self)])
        if len(pool.items) == len(self):
            self._whole = pool
        return pool
