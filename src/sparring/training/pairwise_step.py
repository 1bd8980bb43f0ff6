"""A step of a pairwise loss over two tables, from ids to updated rows by native kernels, without the general step.

The general step (step.py) stays the specification: it draws the same negatives from the same generator, and its losses
and updates are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
from sparring.training.row_optimizers import RowOptimizer

PairwiseStep = Callable[[Tensor, Tensor, torch.Generator, Tensor | None], Tensor]


def pairwise_step(run: Run, positives: Positives, rules: Sequence[torch.optim.Optimizer]) -> PairwiseStep | None:
    """A function of (query ids, item ids, generator, weights of the rows) that updates rows and returns losses (B,).

    None unless native kernels do all of the step: one term with a pairwise loss and uncorrected draws for each query,
    two tables under a row rule, inner products, a fixed temperature, no clipping, and no module that observes.
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
    if not plain or setup.model.dropout or setup.batches.chunk is not None or setup.training.clip is not None:
        return None
    if not native.available(query.weight, item.weight):
        return None
    found = [_owner(table, rules) for table in (query.weight, item.weight)]
    updates = [each for each in found if each is not None]
    if len(updates) < 2:
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
        made = (query.weight, q.long(), by_query), (item.weight, touched, by_item)
        for (rule, group), (table, rows, values) in zip(updates, made, strict=True):
            rule.update_rows(table, rows, values, group)
        return losses * term.weight

    return step


def _owner(table: Tensor, rules: Sequence[torch.optim.Optimizer]) -> tuple[RowOptimizer, dict[str, Any]] | None:
    """The row rule of a table, and its settings; None if it has another."""
    for rule in rules:
        for group in rule.param_groups:
            if any(table is each for each in group["params"]):
                return (rule, group) if isinstance(rule, RowOptimizer) else None
    return None
