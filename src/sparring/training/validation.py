"""What training is judged by while it runs: the metric it selects by, and the queries that are ranked for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split
from sparring.evaluation.metrics import parse
from sparring.recipes.run import Run


def check_given(run: object, split: object) -> None:
    """Tell what was given in place of a run and its parts."""
    if not isinstance(run, Run):
        raise UserError(f"fit trains a Run, from compose(...) or a recipe; got {type(run).__name__}")
    if not isinstance(split, Split):
        hint = (
            ": sparring.split(data) makes the parts, or Split(data) trains on all of it"
            if isinstance(split, Interactions)
            else ""
        )
        raise UserError(f"fit needs a Split, got {type(split).__name__}{hint}")
    weight = split.train.weight
    if weight is not None and len(weight) and not weight.any():
        raise UserError(
            'the weights of the training pairs are all 0: nothing to learn; name another column, or weight="" for none'
        )


def check_cutoffs(run: Run, split: Split, k: Sequence[int], metrics: Sequence[str]) -> None:
    """Tell before training what the ranking after it could not do."""
    n_items = split.train.n_items
    metric, cutoff = selected(run.setup.validation.select)
    parse(metric)
    if split.valid is not None and cutoff > n_items:
        raise UserError(
            f"the cutoff of select={run.setup.validation.select} is larger than the catalogue of {n_items:,} items: choose a smaller one"
        )
    for name in metrics:
        parse(name)
    if split.test is not None and (not k or min(k) < 1 or max(k) > n_items):
        raise UserError(f"cutoffs k={tuple(k)} must lie between 1 and the {n_items:,} items of the catalogue")


def selected(select: str) -> tuple[str, int]:
    """The metric and the cutoff that the best epoch is chosen by: ndcg@10 -> ("ndcg", 10)."""
    metric, _, cutoff = select.partition("@")
    if not cutoff.isdigit() or int(cutoff) < 1:
        raise UserError(f"select must name a metric and a cutoff such as ndcg@10, got {select!r}")
    return metric, int(cutoff)


def sample_queries(valid: Interactions, most: int, seed: int) -> Interactions:
    """At most this many queries of the validation part, the same ones at every epoch."""
    present = np.unique(valid.queries)
    if len(present) <= most:
        return valid
    keep = np.zeros(valid.n_queries, dtype=bool)
    keep[np.random.default_rng(seed).choice(present, most, replace=False)] = True
    return valid.subset(keep[valid.queries])
