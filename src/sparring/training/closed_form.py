"""The closed form beside trained towers (models/low_rank_ease.py): its regularisation and weight."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from sparring.core.types import Positives
from sparring.evaluation.ranking import Evaluation
from sparring.models.low_rank_ease import Decomposition, decompose
from sparring.models.retriever import Retriever
from sparring.training.peak import peak

LAMS = (1.0, 3.0, 10.0, 30.0)
WEIGHTS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0)  # 1: scores of the closed form spread as much as those of the towers
UNCHOSEN = 3.0, 0.25  # without a validation part
QUERIES = 4096  # validation queries that decide whether it stays
FEW = 1024  # and those that choose lam and weight
ERRORS = 1.0  # it stays if it is ahead by so many standard errors of the difference
_SPREAD = 256  # queries that the spreads are measured on
log = logging.getLogger(__name__)

Rank = Callable[[Retriever, int], Evaluation]  # a model and the most validation queries that it ranks -> its metrics


@dataclass(frozen=True)
class ClosedFormChoice:
    """A choice: the regularisation and the weight of a closed form, 0 for none; its metric and that of the towers."""

    lam: float
    weight: float
    towers: float | None = None
    both: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def add_closed_form(
    model: Retriever,
    pairs: Positives,
    dim: int,
    choice: ClosedFormChoice | None,
    rank: Rank | None,
    select: str,
    seed: int = 0,
) -> tuple[Retriever, ClosedFormChoice]:
    """The model beside a closed form of these pairs, as chosen before or by ranking the validation part.

    `rank` evaluates a model on so many queries of the validation part; without it and without a choice there is a
    usual one.
    """
    found = decompose(pairs, model.n_items, dim, seed)
    if choice is None:
        choice = ClosedFormChoice(*UNCHOSEN) if rank is None else _choose(model, found, pairs, rank, select)
    if not choice.weight:
        return model, choice
    return _joined(model, found, choice.lam, choice.weight * _unit(model, found, choice.lam, pairs)), choice


def _choose(model: Retriever, found: Decomposition, pairs: Positives, rank: Rank, select: str) -> ClosedFormChoice:
    """The best lam near 3 at weight 1/2, then the best weight near 1/2 for it, both on few queries.

    On more of them, the closed form must be ahead of the towers alone by ERRORS standard errors of the difference over
    queries: a gain by chance is not worth the dimensions.
    """

    @cache
    def unit(lam: float) -> float:
        return _unit(model, found, lam, pairs)

    def ranked(lam: float, weight: float, queries: int) -> Evaluation:
        return rank(_joined(model, found, lam, weight * unit(lam)), queries)

    @cache
    def score(lam: float, weight: float) -> float:
        return ranked(lam, weight, FEW).metrics[select]

    lam = peak(LAMS, 3.0, lambda lam: score(lam, 0.5))
    weight = peak(WEIGHTS, 0.5, lambda weight: score(lam, weight))
    towers, both = rank(model, QUERIES), ranked(lam, weight, QUERIES)
    gain = both.per_query[select] - towers.per_query[select]
    before, after = towers.metrics[select], both.metrics[select]
    if gain.mean() <= ERRORS * gain.std() / len(gain) ** 0.5:
        log.info("closed form: left out, with it %s is %.4f, without it %.4f", select, after, before)
        return ClosedFormChoice(lam, 0.0, before, before)
    log.info(
        "closed form of weight %g (lam %g): with it %s is %.4f, without it %.4f", weight, lam, select, after, before
    )
    return ClosedFormChoice(lam, weight, before, after)


def _joined(model: Retriever, found: Decomposition, lam: float, weight: float) -> Retriever:
    return model.with_closed_form(found.ease(lam, weight)).eval()


@torch.no_grad()
def _unit(model: Retriever, found: Decomposition, lam: float, pairs: Positives) -> float:
    """The weight at which scores of the closed form spread over the items as much as those of the towers.

    Measured on up to 256 queries with pairs, at equal distances.
    """
    known = torch.nonzero(pairs.start.diff()).flatten()
    n = min(len(known), _SPREAD)
    both = _joined(model, found, lam, 1.0)
    q = both.query_vectors(known[torch.arange(n, device=known.device) * len(known) // max(n, 1)]).float()
    items, inside = both.item_vectors().float(), slice(model.width, model.width + found.directions.shape[1])
    closed = q[:, inside] @ items[:, inside].T
    spread = [float(scores.std(1).mean()) for scores in (q @ items.T - closed, closed)]
    return spread[0] / spread[1] if spread[1] > 0 else 0.0
