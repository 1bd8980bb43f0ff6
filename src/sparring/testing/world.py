"""A catalogue small enough to sum over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparring.core.types import Batch, Positives, Step


@dataclass(frozen=True)
class World:
    """A small catalogue: item and query vectors, popularity, known positives, and items shown and not taken.

    Popularity falls as 1 / rank, and the last item never occurs. The positives of a step are independent draws by
    popularity, so an in-batch sampler sees exactly the distribution that its correction assumes.

        world = World.build(n_items=30)
        step = world.step(16, seed=1)
    """

    counts: Tensor  # (N,) interactions per item; the last is 0
    items: Tensor  # (N, D)
    queries: Tensor  # (Q, D)
    known: Tensor  # (Q, N) bool: known positives
    shown: Positives  # items shown to each query and not taken; none for query 0
    tau: float = 0.7

    @classmethod
    def build(
        cls, n_items: int = 24, n_queries: int = 256, dim: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> World:
        generator = torch.Generator().manual_seed(seed)
        counts = (1000.0 / torch.arange(1, n_items + 1)).round().long()
        if n_items > 1:
            counts[-1] = 0
        items = 0.6 * torch.randn(n_items, dim, generator=generator, dtype=dtype)
        queries = 0.6 * torch.randn(n_queries, dim, generator=generator, dtype=dtype)
        known = torch.rand(n_queries, n_items, generator=generator) < 0.15
        shown = torch.rand(n_queries, n_items, generator=generator) < 0.3
        shown[0] = False
        if n_queries > 1:
            shown[1:, 0] = True
        return cls(counts, items, queries, known, _lists(shown))

    @property
    def n_items(self) -> int:
        return len(self.items)

    @property
    def dim(self) -> int:
        return self.items.shape[1]

    @property
    def popularity(self) -> Tensor:
        """(N,) float64: the probability that the positive of a row is item j."""
        return self.counts.double() / self.counts.sum()

    def step(
        self, batch: int, seed: int, *, first: int | None = None, table: Tensor | None = None, each: int = 1
    ) -> Step:
        """One training step: rows and positives follow `seed`, and so does the generator that samplers draw from.

        `first` replaces the positive of row 0; `table` (N, D) replaces the item vectors, as a leaf to take gradients
        of. With `each` above 1 that many rows share a query, as those of a sequence do.
        """
        source = torch.Generator().manual_seed(2 * seed + 1)
        # no query twice without `each`: its known positives would depend on the rest of the batch
        query_ids = torch.randperm(len(self.queries), generator=source).repeat_interleave(each)[:batch]
        item_ids = torch.multinomial(self.counts.double(), batch, replacement=True, generator=source)
        if first is not None:
            item_ids[0] = first
        vectors = self.items if table is None else table
        known = self.known.clone()
        known[query_ids, item_ids] = True
        q, v = self.queries[query_ids].clone().requires_grad_(), vectors[item_ids]
        return Step(
            query_ids,
            item_ids,
            q,
            v,
            torch.tensor(self.tau, dtype=self.items.dtype),
            lambda ids: vectors[ids],
            torch.Generator().manual_seed(2 * seed),
            _lists(known),
            whole=Batch(query_ids, item_ids, q, v, grouped=True) if each > 1 else None,
        )

    def logits(self, step: Step) -> Tensor:
        """(B, N) float64: the logit of every item of the catalogue."""
        return step.q.detach().double() @ self.items.double().T / self.tau


def _lists(member: Tensor) -> Positives:
    rows, items = torch.nonzero(member, as_tuple=True)
    sizes = torch.bincount(rows, minlength=len(member))
    return Positives(torch.cat([torch.zeros(1, dtype=torch.long), torch.cumsum(sizes, 0)]), items)


def excluded(world: World, step: Step, masks: str) -> Tensor:
    """(B, N) bool: the items that must never count against a query, by a table of all pairs."""
    mask = torch.zeros(len(step.q), world.n_items, dtype=torch.bool)
    if masks == "none":
        return mask
    if masks == "known" and step.positives is not None:
        known = torch.zeros_like(world.known)
        known[torch.repeat_interleave(torch.arange(len(known)), step.positives.start.diff()), step.positives.items] = (
            True
        )
        mask = known[step.query_ids]
    mask[torch.arange(len(mask)), step.item_ids] = True
    return mask
