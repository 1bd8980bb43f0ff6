"""A step of a pairwise loss over two tables, without the general step: from ids to row-sparse gradients in one kernel.

The general step (step.py) stays the specification: it draws the same negatives from the same generator, and its losses
and gradients are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparring.core.part import listeners
from sparring.core.types import Positives
from sparring.kernels.native import pairwise as native
from sparring.losses.pairwise import margin_of
from sparring.losses.temperature import Fixed
from sparring.models.towers import IdTower
from sparring.negatives.sampled import Sampled
from sparring.recipes.run import Run

PairwiseStep = Callable[[Tensor, Tensor, torch.Generator, Tensor | None], Tensor]


def pairwise_step(run: Run, positives: Positives) -> PairwiseStep | None:
    """A function of (query ids, item ids, generator, weights of the rows) that sets gradients and returns losses (B,).

    None unless a native kernel does all of the step: one term with a pairwise loss and uncorrected draws for each
    query, two tables with row-sparse gradients, inner products, a fixed temperature, and no module that observes.
    """
    model, setup = run.model, run.setup
    if len(run.terms) != 1 or not isinstance(run.temperature, Fixed) or listeners(run.modules(), "observe"):
        return None
    (term,) = run.terms
    kind, negatives = margin_of(term.loss), term.negatives
    if kind is None or type(negatives) is not Sampled or not negatives.per_query or negatives.correction != "none":
        return None
    query, item = model.query, model.item
    if not (type(query) is IdTower and type(item) is IdTower and query.sparse and item.sparse) or query is item:
        return None
    plain = model.score == "dot" and model.item_bias is None and model.closed_form is None
    if not plain or setup.model.dropout or setup.batches.chunk is not None:
        return None
    if not native.available(query.weight, item.weight):
        return None
    temperature, exclude, margin = run.temperature, negatives.exclude, kind[0]

    @torch.no_grad()
    def step(q: Tensor, positive: Tensor, generator: torch.Generator, weights: Tensor | None) -> Tensor:
        drawn = negatives.distribution.sample((len(q), negatives.n), generator)
        scale = torch.full((len(q),), term.weight / len(q)) if weights is None else weights * (term.weight / len(q))
        known = (positives.start, positives.items) if exclude == "known" else None
        losses, by_query, by_item = native.pairwise(
            query.weight, item.weight, q, positive, drawn, scale.float(), float(temperature.tau), margin, exclude, known
        )
        touched = torch.cat([positive.long(), drawn.flatten().long()])
        for table, rows, values in ((query.weight, q.long(), by_query), (item.weight, touched, by_item)):
            table.grad = torch.sparse_coo_tensor(rows.unsqueeze(0), values, table.shape, check_invariants=False)
        return losses * term.weight

    return step
