"""Training batches: which rows share one. A row is a pair, or a query with one of its pairs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.part import Part
from sparring.data.interactions import Interactions
from sparring.data.propensity import inverse_propensities

Columns = tuple[Tensor, ...]  # the tensors of a step

BLOCK = 1 << 14  # rows read together: 64 KB of a column
WINDOW = 512  # blocks shuffled together: 8 million rows


class RandomBatches(Part):
    """Every row once per epoch, in an order that depends on (seed, epoch) only.

    An epoch is a permutation cut into slices, so a run resumed at (epoch, step) gets the batches of an uninterrupted
    run. The permutation takes 4 bytes a row (8 above 2^31 rows), 200 MB and about a second at 50 million.

        batches = RandomBatches(len(train), 2048, seed=0)
        for rows in batches.epoch(3, start_step=17): ...
    """

    def __init__(self, n_rows: int, batch_size: int, seed: int = 0, drop_last: bool = False) -> None:
        super().__init__()
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
        """Row indices (B,) int64 of each step from start_step on, copied to the device once per epoch."""
        self._check_start(start_step)
        order = self._order(epoch).to(device)
        for step in range(start_step, len(self)):
            yield order[step * self.batch_size : (step + 1) * self.batch_size].long()

    def steps(
        self, epoch: int, start_step: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, ...]]:
        """The tensors of each step from start_step on: here its row indices."""
        return ((rows,) for rows in self.epoch(epoch, start_step, device))

    def _check_start(self, start_step: int) -> None:
        if not 0 <= start_step <= len(self):
            raise UserError(f"start_step is {start_step}; an epoch has {len(self)} steps")

    def around(self, rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Row indices (at most `size`,) of a batch that starts with `rows` (CPU, distinct), mixed as in an epoch.

        The other rows are distinct, unless there are so many that duplicates hardly ever occur.
        """
        if self.n_rows <= 1 << 20:
            others = torch.randperm(self.n_rows, generator=generator)[:size]
        else:
            others = torch.randint(self.n_rows, (size,), generator=generator)
        return torch.cat([rows, others[~torch.isin(others, rows)]])[: max(size, len(rows))]

    @property
    def largest_group(self) -> int:
        """The most rows that always share a batch."""
        return 1

    def _order(self, epoch: int) -> Tensor:
        kind = torch.int32 if self.n_rows < 2**31 else torch.int64
        return torch.randperm(self.n_rows, generator=self._generator(epoch), dtype=kind)

    def _generator(self, epoch: int, part: int = 0) -> torch.Generator:
        # torch seeds differ in few bits, so mix (seed, epoch, part) before seeding: neighbours must not share streams.
        mixed = (
            self.seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + part * 0xD6E8FEB86659FD93 + 0x94D049BB133111EB
        )
        mixed &= 2**64 - 1
        mixed ^= mixed >> 31
        return torch.Generator().manual_seed(mixed & (2**63 - 1))


class BlockBatches(RandomBatches):
    """Every row once per epoch, for memory-mapped columns: random blocks, rows shuffled within windows of blocks.

    An epoch is a random permutation of the blocks of `block` consecutive rows. The rows of `window` successive blocks
    are shuffled together and cut into batches, so that only their pages are in use, and each block is read once.

    Guaranteed: every row comes once per epoch; (seed, epoch) decide the order, so a run resumes at any step at the cost
    of one window; all orders of the blocks, and within a window all orders of its rows, are equally likely. Not
    guaranteed: rows of one block are always in the same window, so rows of one query, which are adjacent, share a batch
    `n_rows / (block * window)` times as often as in a full shuffle. If all rows fit into one window, it equals
    RandomBatches bit for bit.

        batches = BlockBatches(10**9, 2048, seed=0);   for rows in batches.epoch(3, start_step=17): ...
    """

    def __init__(
        self,
        n_rows: int,
        batch_size: int,
        seed: int = 0,
        drop_last: bool = False,
        block: int | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__(n_rows, batch_size, seed, drop_last)
        self.block, self.window = BLOCK if block is None else block, WINDOW if window is None else window
        if self.block < 1 or self.window < 1:
            raise UserError(f"block is {block} rows and window {window} blocks; both must be at least 1")

    def epoch(self, epoch: int, start_step: int = 0, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """Row indices (B,) int64 of each step from start_step on, copied to the device once per window."""
        if self.n_rows <= self.block * self.window:
            yield from super().epoch(epoch, start_step, device)
            return
        self._check_start(start_step)
        skip, left = start_step * self.batch_size, len(self) - start_step
        kept = torch.empty(0, dtype=torch.int64, device=device)  # the rest of a window, which starts the next batch
        for window in self._windows(epoch, skip):
            rows = window.to(device)
            if len(kept):
                short = self.batch_size - len(kept)
                kept, rows = torch.cat([kept, rows[:short]]), rows[short:]
                if len(kept) < self.batch_size:
                    continue
                yield kept
                left -= 1
            full = min(len(rows) // self.batch_size, left)
            yield from rows[: full * self.batch_size].split(self.batch_size) if full else ()
            kept, left = rows[full * self.batch_size :].clone(), left - full
        if left:
            yield kept

    def _windows(self, epoch: int, skip: int) -> Iterator[Tensor]:
        """The shuffled rows of each window, without the first `skip` of the epoch; skipped windows cost nothing."""
        n_blocks = -(-self.n_rows // self.block)
        order = torch.randperm(n_blocks, generator=self._generator(epoch))
        for number, first in enumerate(range(0, n_blocks, self.window)):
            blocks = order[first : first + self.window]
            size = len(blocks) * self.block
            short = blocks == n_blocks - 1
            if bool(short.any()):  # to the end of its window, so that positions beyond the last row can be cut off
                blocks = torch.cat([blocks[~short], blocks[short]])
                size -= n_blocks * self.block - self.n_rows
            if skip >= size:
                skip -= size
                continue
            kind = torch.int32 if size < 2**31 else torch.int64
            place = torch.randperm(size, generator=self._generator(epoch, number + 1), dtype=kind)[skip:]
            # Looked up in a few hundred blocks, which stay in the cache, rather than in a list of all rows.
            yield blocks[place // self.block].mul_(self.block).add_(place % self.block)
            skip = 0


class QueryRows:
    """Training rows that are queries: for each row of a batch, one of the query's pairs is drawn.

    Pairs are drawn uniformly, or in proportion to the `weight` of each pair (inverse propensities favour the tail).
    Queries without pairs are not rows. The draw uses the generator of the step, without a device synchronisation.

        rows = QueryRows(train.pairs()[0]);   pairs = rows.pairs(batch, generator);   train.items[pairs]
    """

    def __init__(self, queries: Tensor, weight: Tensor | None = None) -> None:
        self.order = torch.sort(queries, stable=True).indices  # pairs by query
        self.queries, self.count = torch.unique_consecutive(queries[self.order], return_counts=True)
        self.start = torch.cumsum(self.count, 0) - self.count
        self.mass: Tensor | None = None
        if weight is not None:
            # Cumulative share within each query, offset by the query's number: one search serves all queries.
            mass = weight[self.order].double()
            which = torch.repeat_interleave(torch.arange(len(self.queries), device=queries.device), self.count)
            total = torch.zeros(len(self.queries), dtype=mass.dtype, device=mass.device).index_add_(0, which, mass)
            below = torch.cumsum(mass / total[which], 0)
            before = below[self.start] - (mass / total[which])[self.start]
            self.mass = which + (below - before[which]).clamp(max=1.0)

    def __len__(self) -> int:
        return len(self.queries)

    def chances(self) -> Tensor:
        """(pairs,) the probability that the row of a pair draws this pair, float64."""
        drawn = torch.repeat_interleave(1.0 / self.count.double(), self.count)
        if self.mass is not None:
            which = torch.repeat_interleave(torch.arange(len(self), device=self.mass.device), self.count)
            below = self.mass - which
            drawn = below.diff(prepend=below[:1]).where(
                torch.arange(len(below), device=below.device) != self.start[which], below
            )
        return torch.empty_like(drawn).index_copy_(0, self.order, drawn)

    def pairs(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """(B,) a pair drawn for each row."""
        u = torch.rand(len(rows), dtype=torch.float64, generator=generator, device=rows.device)
        first, last = self.start[rows], self.start[rows] + self.count[rows] - 1
        if self.mass is None:
            chosen = first + (u * self.count[rows]).long()
        else:
            chosen = torch.maximum(torch.searchsorted(self.mass, rows + u, right=True), first)
        return self.order[torch.minimum(chosen, last)]


def query_rows(train: Interactions, draw: str, device: torch.device | str = "cpu") -> QueryRows:
    """The queries of training data as rows, with pairs drawn uniformly or by the item's inverse propensity."""
    weight = None
    if draw == "propensity":
        weights = inverse_propensities(train.counts(), len(np.unique(train.queries)))
        weight = torch.from_numpy(weights[train.items]).to(device)
    return QueryRows(train.pairs()[0].to(device), weight)


def batches_for(train: Interactions, rows: QueryRows | None, batch_size: int, seed: int = 0) -> RandomBatches:
    """Batches of the pairs or queries of training data: fully shuffled, or by blocks for memory-mapped pairs."""
    if rows is None and isinstance(train.queries, np.memmap):
        return BlockBatches(len(train), batch_size, seed)
    return RandomBatches(len(train if rows is None else rows), batch_size, seed)


def epoch_steps(train: Interactions, rows: str, batch_size: int) -> int:
    """Steps of an epoch over the pairs of training data, or over its queries."""
    return -(-(len(train) if rows == "pairs" else len(np.unique(train.queries))) // batch_size)
