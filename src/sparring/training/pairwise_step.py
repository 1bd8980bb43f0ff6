"""A step of a pairwise loss over two tables, from ids to updated rows by native kernels, without the general step.

The general step (step.py) stays the specification: it draws the same negatives from the same generator, and its losses
and updates are the same up to rounding.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparring.core.part import listeners
from sparring.core.types import Positives
from sparring.kernels.native import pairwise as native
from sparring.losses.pairwise import penalty_of
from sparring.losses.temperature import Fixed
from sparring.models.towers import IdTower
from sparring.negatives.sampled import Sampled
from sparring.negatives.selection import Hardest
from sparring.recipes.run import Run
from sparring.training.row_optimizers import RowOptimizer

TRIED = 16  # steps that are timed with one thread, and as many with all
IN_TURN = 8  # of these steps in a row: the first ones after a change find rows in the cache of another processor
PairwiseStep = Callable[[Tensor, torch.Generator, Tensor | None], Tensor]


def pairwise_step(
    run: Run, pairs: tuple[Tensor, Tensor], positives: Positives, rules: Sequence[torch.optim.Optimizer]
) -> PairwiseStep | None:
    """A function of (training pairs (B,), generator, their weights) that updates rows and returns losses (B,).

    `pairs` has the queries and items of all training pairs.
    None unless a native kernel does all of the step: one term with a pairwise loss and uncorrected draws for each query
    or the hardest of them, two tables under a row rule, inner products, a fixed temperature, no clipping, and no module
    that observes.
    """
    model, setup = run.model, run.setup
    if len(run.terms) != 1 or not isinstance(run.temperature, Fixed) or listeners(run.modules(), "observe"):
        return None
    (term,) = run.terms
    penalty = penalty_of(term.loss)
    kept = term.negatives.k if type(term.negatives) is Hardest else None
    negatives = term.negatives.source if type(term.negatives) is Hardest else term.negatives
    if penalty is None or type(negatives) is not Sampled or not negatives.per_query or negatives.correction != "none":
        return None
    query, item = model.query, model.item
    if not (type(query) is IdTower and type(item) is IdTower and query.sparse and item.sparse) or query is item:
        return None
    plain = model.score == "dot" and model.item_bias is None and model.closed_form is None
    if not plain or setup.model.dropout or setup.batches.chunk is not None or setup.training.clip is not None:
        return None
    if not native.available(query.weight, item.weight):
        return None
    owners = [_owner(table, rules) for table in (query.weight, item.weight)]
    if owners[0] is None or owners[1] is None:
        return None
    of_queries, of_items = owners[0], owners[1]
    temperature, exclude, source = run.temperature, negatives.exclude, negatives
    slots = native.slots(query.weight), native.slots(item.weight)
    columns = pairs[0].int().contiguous(), pairs[1].int().contiguous()  # no copy: pairs have this type
    known: tuple[Tensor, Tensor, Tensor] | None = None
    taken: defaultdict[int, list[float]] = defaultdict(list)  # seconds of steps, by threads

    @torch.no_grad()
    def step(batch: Tensor, generator: torch.Generator, weights: Tensor | None) -> Tensor:
        nonlocal known
        if exclude == "known" and known is None:  # the lists of a run are read when its first step needs them
            known = native.marked(positives.start, positives.items)
        drawn = source.distribution.sample((len(batch), source.n), generator)
        each, began, threads = term.weight / len(batch), time.perf_counter(), _threads(taken)
        losses = native.pairwise(
            (of_queries[0].native_rule(query.weight, of_queries[1]), of_items[0].native_rule(item.weight, of_items[1])),
            slots,
            columns,
            batch,
            drawn,
            torch.full((len(batch),), each) if weights is None else weights * each,
            float(temperature.tau),
            penalty,
            kept,
            exclude,
            known,
            threads,
        )
        if len(taken[threads]) < TRIED:
            taken[threads].append(time.perf_counter() - began)
        return losses * term.weight

    return step


def _threads(taken: defaultdict[int, list[float]]) -> int:
    """The threads of the next step: one and all in turn, then those with the quicker steps.

    Threads read rows that others have just written. Where that takes longer than it saves, between processors with
    caches of their own, one is quicker.
    """
    choices = sorted({1, torch.get_num_threads()})
    untried = [n for n in choices if len(taken[n]) < TRIED]
    if untried:
        return min(untried, key=lambda n: len(taken[n]) // IN_TURN)
    return min(choices, key=lambda n: statistics.median(taken[n]))


def _owner(table: Tensor, rules: Sequence[torch.optim.Optimizer]) -> tuple[RowOptimizer, dict[str, Any]] | None:
    """The row rule of a table, and its settings; None if it has another."""
    for rule in rules:
        for group in rule.param_groups:
            if any(table is each for each in group["params"]):
                return (rule, group) if isinstance(rule, RowOptimizer) else None
    return None
