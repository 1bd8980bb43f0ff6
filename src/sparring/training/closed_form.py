"""The closed form beside trained towers (models/low_rank_ease.py): its regularisation and weight."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from sparring.core.ranks import local_world
from sparring.core.types import ALONE, Positives, Ranks
from sparring.evaluation.ranking import Evaluation
from sparring.models.item_to_item import square_fits
from sparring.models.low_rank_ease import Decomposition, LowRankEase, decompose
from sparring.models.retriever import Retriever
from sparring.models.thinned_ease import thinned_ease
from sparring.training.peak import peak

LAMS = (1.0, 3.0, 10.0, 30.0)
WEIGHTS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0)  # 1: scores of the closed form spread as much as those of the towers
UNCHOSEN = 3.0, 0.25  # without a validation part
QUERIES = 4096  # validation queries that decide whether it stays
FEW = 1024  # and those that choose lam and weight
ERRORS = 1.0  # it stays if it is ahead by so many standard errors of the difference
THINNED = 100.0, 30  # lam and neighbours of the thinned form
LARGEST = 16_000  # items of a catalogue that the thinned form is tried on: it inverts their square
_SPREAD = 256  # queries that the spreads are measured on
log = logging.getLogger(__name__)

Rank = Callable[[Retriever, int], Evaluation]  # a model and the most validation queries that it ranks -> its metrics


@dataclass(frozen=True)
class ClosedFormChoice:
    """A choice: the regularisation and the weight of a closed form, 0 for none; its metric and that of the towers.

    With `neighbours` it is EASE with so many weights per item (thinned_ease.py), without them EASE at low rank.
    """

    lam: float
    weight: float
    towers: float | None = None
    both: float | None = None
    neighbours: int | None = None

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
    ranks: Ranks = ALONE,
) -> tuple[Retriever, ClosedFormChoice]:
    """The model beside a closed form of these pairs, as chosen before or by ranking the validation part.

    `rank` evaluates a model on so many queries of the validation part; without it and without a choice there is a
    usual one. EASE at low rank has `dim` dimensions; the thinned form has twice as many, at most half as many as items
    with pairs.
    """

    @cache
    def directions() -> Decomposition:
        return decompose(pairs, model.n_items, dim, seed)

    @cache
    def of_weight(lam: float, neighbours: int | None) -> Callable[[float], LowRankEase]:
        if neighbours is None:
            return partial(directions().ease, lam)
        most = min(2 * dim, len(pairs.items.unique()) // 2)
        return thinned_ease(pairs, model.n_items, most, lam, neighbours, seed).times

    @cache
    def unit(lam: float, neighbours: int | None) -> float:
        return _unit(model, of_weight(lam, neighbours)(1.0), pairs)

    def joined(choice: ClosedFormChoice) -> Retriever:
        kind = choice.lam, choice.neighbours
        return _joined(model, of_weight(*kind)(choice.weight * unit(*kind)))

    def small() -> bool:
        return model.n_items <= LARGEST and _square_fits(model.n_items, pairs.items.device, ranks)

    if choice is None:
        choice = ClosedFormChoice(*UNCHOSEN) if rank is None else _choose(model, joined, rank, select, small)
    return (joined(choice) if choice.weight else model), choice


def _choose(
    model: Retriever,
    joined: Callable[[ClosedFormChoice], Retriever],
    rank: Rank,
    select: str,
    small: Callable[[], bool],
) -> ClosedFormChoice:
    """The best lam near 3 at weight 1/2, then the best weight near 1/2 for it, both on few queries.

    On more of them, the closed form must be ahead of the towers alone by ERRORS standard errors of the difference over
    queries: a gain by chance is not worth the dimensions. Where the catalogue is small, the thinned form is tried as
    well, and replaces what was kept if it is ahead of that by as much.
    """

    def ranked(choice: ClosedFormChoice, queries: int) -> Evaluation:
        return rank(joined(choice), queries)

    @cache
    def score(lam: float, weight: float, neighbours: int | None) -> float:
        return ranked(ClosedFormChoice(lam, weight, neighbours=neighbours), FEW).metrics[select]

    def best(lam: float, neighbours: int | None = None) -> ClosedFormChoice:
        weight = peak(WEIGHTS, 0.5, lambda weight: score(lam, weight, neighbours))
        return ClosedFormChoice(lam, weight, neighbours=neighbours)

    low_rank = best(peak(LAMS, 3.0, lambda lam: score(lam, 0.5, None)))
    towers = rank(model, QUERIES)
    choice, kept = replace(low_rank, weight=0.0), towers
    for tried in (low_rank, best(*THINNED)) if small() else (low_rank,):
        found = ranked(tried, QUERIES)
        taken = ahead(found, kept, select)
        log.info(
            "closed form%s of weight %g (lam %g): %s, with it %s is %.4f, without it %.4f",
            f" with {tried.neighbours} weights per item" if tried.neighbours else "",
            *(tried.weight, tried.lam, "taken" if taken else "left out"),
            *(select, found.metrics[select], kept.metrics[select]),
        )
        if taken:
            choice, kept = tried, found
    return replace(choice, towers=towers.metrics[select], both=kept.metrics[select])


def ahead(one: Evaluation, other: Evaluation, select: str) -> bool:
    """Whether one model is ahead of another by ERRORS standard errors of the difference over queries."""
    gain = one.per_query[select] - other.per_query[select]
    return bool(gain.mean() > ERRORS * gain.std() / len(gain) ** 0.5)


def _square_fits(n_items: int, device: torch.device, ranks: Ranks) -> bool:
    """Whether every rank has the memory for the square of the catalogue."""
    fits = square_fits(n_items, device, local_world() if device.type == "cpu" else 1)
    return int(ranks.sum(torch.tensor(int(fits), device=device))) == ranks.world


def _joined(model: Retriever, form: LowRankEase) -> Retriever:
    return model.with_closed_form(form).eval()


@torch.no_grad()
def _unit(model: Retriever, form: LowRankEase, pairs: Positives) -> float:
    """The weight at which scores of the closed form spread over the items as much as those of the towers.

    Measured on up to 256 queries with pairs, at equal distances.
    """
    known = torch.nonzero(pairs.start.diff()).flatten()
    n = min(len(known), _SPREAD)
    both = _joined(model, form)
    q = both.query_vectors(known[torch.arange(n, device=known.device) * len(known) // max(n, 1)]).float()
    items, inside = both.item_vectors().float(), slice(model.width, model.width + form.dim)
    closed = q[:, inside] @ items[:, inside].T
    spread = [float(scores.std(1).mean()) for scores in (q @ items.T - closed, closed)]
    return spread[0] / spread[1] if spread[1] > 0 else 0.0
