"""One batch of a run and the parts of its loss, computed by hand in float64 from the tables alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparring.core.part import listeners
from sparring.core.types import Outcome, Step
from sparring.data.interactions import Interactions
from sparring.recipes.run import Run
from sparring.training.step import training_step

B, DIM, INF = 24, 6, float("inf")
TINY = {"dim": DIM, "init_std": 0.7, "batch_size": B}


class Hand:
    """One batch of a run with all logits s (B, N) and popularities p (N,), in float64, from the tables alone."""

    def __init__(self, data: Interactions, run: Run, batch: int = 0) -> None:
        rows = np.random.default_rng(batch).choice(len(data), B, replace=False)
        self.run, self.data = run, data
        self.queries = torch.from_numpy(data.queries[rows]).long()
        self.items = torch.from_numpy(data.items[rows]).long()
        assert len(self.items.unique()) < B  # otherwise exclusion by place and by id would agree
        users, vectors = (table.detach().double() for table in (run.model.query.weight, run.model.item.weight))  # type: ignore[union-attr]
        if run.setup.model.score == "cosine":
            users, vectors = users / users.norm(dim=1, keepdim=True), vectors / vectors.norm(dim=1, keepdim=True)
        self.vectors = vectors
        self.s = users[self.queries] @ vectors.T / run.setup.temperature.tau
        count = torch.bincount(torch.from_numpy(data.items).long(), minlength=data.n_items).double()
        self.p = count / count.sum()
        self.positive = self.s[torch.arange(B), self.items]
        self.n_items = data.n_items

    def contrast(self, seed: int = 5) -> tuple[Tensor, Step, Outcome]:
        """A training step of the run on this batch."""
        return training_step(
            self.run, self.queries, self.items, torch.Generator().manual_seed(seed), self.data.positives()
        )

    def other(self, ids: Tensor) -> Tensor:
        """(B, C): 0 where a candidate is not the query's positive, -inf where it is."""
        same = ids.expand(B, -1) == self.items.unsqueeze(1)
        return torch.zeros(same.shape, dtype=torch.float64).masked_fill(same, -INF)

    def unknown(self, ids: Tensor) -> Tensor:
        """(B, C): 0 where a candidate is no training positive of the query, -inf where it is."""
        pairs = set(zip(self.data.queries.tolist(), self.data.items.tolist(), strict=True))
        rows = zip(self.queries.tolist(), ids.expand(B, -1).tolist(), strict=True)
        known = torch.tensor([[(query, item) in pairs for item in row] for query, row in rows])
        assert int(known.sum()) > int(torch.isinf(self.other(ids)).sum())  # otherwise excluding one and all would agree
        return torch.zeros(known.shape, dtype=torch.float64).masked_fill(known, -INF)

    def logits(self, ids: Tensor) -> Tensor:
        return self.s.gather(1, ids.expand(B, -1))

    def softmax_loss(self, *negatives: Tensor, positive: Tensor | None = None) -> Tensor:
        """-t + log(e^t + sum_j e^negative_j), t the positive's logit."""
        t = self.positive if positive is None else positive
        return torch.logsumexp(torch.cat([t.unsqueeze(1), *negatives], 1), 1) - t


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach().double(), expected, rtol=2e-5, atol=2e-5)


def observe(run: Run, step: Step, outcome: Outcome) -> None:
    for part in listeners(run.modules(), "observe"):
        part.observe(step, outcome)
