"""A step of a pairwise loss over two tables, from ids to updated rows by native kernels, without the general step.

The general step (step.py) stays the specification: it draws the same negatives from the same generator, and its losses
and updates are the same up to rounding.
"""

from __future__ import annotations

import statistics
import time
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
AGAIN = 2048  # steps from one trial to the next
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
    tau, exclude, source = float(run.temperature.tau), negatives.exclude, negatives
    slots = native.slots(query.weight), native.slots(item.weight)
    columns = pairs[0].int().contiguous(), pairs[1].int().contiguous()  # no copy: pairs have this type
    known: tuple[Tensor, Tensor, Tensor] | None = None
    trial = Threads()
    equal = torch.empty(0)  # the weights of a batch without weights

    def step(batch: Tensor, generator: torch.Generator, weights: Tensor | None) -> Tensor:
        nonlocal known, equal
        if exclude == "known" and known is None:  # the lists of a run are read when its first step needs them
            known = native.marked(positives.start, positives.items)
        drawn = source.distribution.sample((len(batch), source.n), generator)
        if weights is None and len(equal) != len(batch):
            equal = torch.full((len(batch),), term.weight / len(batch))
        began, threads = time.perf_counter(), trial.next()
        losses = native.pairwise(
            (of_queries[0].native_rule(query.weight, of_queries[1]), of_items[0].native_rule(item.weight, of_items[1])),
            slots,
            columns,
            batch,
            drawn,
            equal if weights is None else weights * (term.weight / len(batch)),
            tau,
            penalty,
            kept,
            exclude,
            known,
            threads,
        )
        trial.took(threads, time.perf_counter() - began)
        return losses if term.weight == 1 else losses * term.weight

    return step


class Threads:
    """The threads of each step: one and all take turns, then those with the quicker steps stay for a while.

    Threads read rows that others have just written. Where that takes longer than it saves, between processors with
    caches of their own, one is quicker. Virtual machines come to such processors, and leave them, as they run.
    """

    def __init__(self) -> None:
        self.every = self.left = 0  # all threads; steps until the next trial
        self.taken: dict[int, list[float]] = {}  # seconds of the steps of a trial, by threads
        self.quickest: int | None = None

    def next(self) -> int:
        """The threads of the next step."""
        every = torch.get_num_threads()
        if self.every != every or not self.left:
            self.every, self.left, self.quickest = every, AGAIN, None
            self.taken = {n: [] for n in sorted({1, every})}
        self.left -= 1
        if self.quickest is None:
            untried = [n for n, seconds in self.taken.items() if len(seconds) < TRIED]
            if untried:
                return min(untried, key=lambda n: len(self.taken[n]) // IN_TURN)
            self.quickest = min(self.taken, key=lambda n: statistics.median(self.taken[n]))
        return self.quickest

    def took(self, threads: int, seconds: float) -> None:
        """Tell what the step took."""
        if self.quickest is None:
            self.taken[threads].append(seconds)


def _owner(table: Tensor, rules: Sequence[torch.optim.Optimizer]) -> tuple[RowOptimizer, dict[str, Any]] | None:
    """The row rule of a table, and its settings; None if it has another."""
    for rule in rules:
        for group in rule.param_groups:
            if any(table is each for each in group["params"]):
                return (rule, group) if isinstance(rule, RowOptimizer) else None
    return None
