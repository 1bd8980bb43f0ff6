"""The trend of a trained model (models/trend.py): its half-life and weight, chosen on a later validation part."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from sparring.core.types import ALONE, Ranks
from sparring.data.interactions import Split
from sparring.evaluation.ranking import Evaluation
from sparring.models.histories import HistoryTower
from sparring.models.retriever import Retriever
from sparring.models.sequences import SequenceTower
from sparring.models.trend import Trend, count
from sparring.recipes.run import Run
from sparring.training.closed_form import FEW, QUERIES, Rank, ahead
from sparring.training.peak import peak

HALF_LIVES = (0.3, 0.1, 0.03, 0.01, 0.003)
WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrendChoice:
    """A choice: the half-life, none if all ages count alike, and the weight of a trend; its metric and that without."""

    half_life: float | None = None
    weight: float = 0.0
    without: float | None = None
    both: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def has_newcomers(run: Run) -> bool:
    """Whether no step trains the vector of a query without a history: sets and sequences predict from items alone."""
    own = isinstance(run.model.query, HistoryTower | SequenceTower)
    return own and run.solver is None and run.setup.batches.rows in ("sets", "sequences")


def add_trend(
    model: Retriever,
    split: Split,
    tau: float,
    choice: TrendChoice | None,
    rank: Rank | None,
    select: str,
    ranks: Ranks = ALONE,
) -> tuple[Retriever, TrendChoice]:
    """The model with a trend, as chosen before or by ranking the validation part, which knows the training part.

    `rank` evaluates a model on so many queries of the validation part. Only a validation part that is later than the
    training part can choose, and only for a model with an item bias; otherwise the weight is 0, and the trend is no
    more than the vector of newcomers.
    """

    def following(choice: TrendChoice) -> Retriever:
        half_life = math.inf if choice.half_life is None else choice.half_life
        other = model.with_trend(Trend(model.n_items, half_life, choice.weight, tau))
        count(other, split.train)
        if isinstance(other.query, HistoryTower | SequenceTower):
            ranks.equalise([other.query.empty])
        return other.eval()

    if choice is None:
        choice = TrendChoice()
        if split.timed and rank is not None and model.item_bias is not None:
            choice = _choose(following, rank, select)
    return following(choice), choice


def _choose(following: Callable[[TrendChoice], Retriever], rank: Rank, select: str) -> TrendChoice:
    """The best half-life near 0.1 at weight 1/2, then the best weight for it, both on few queries.

    On more of them, the trend must be ahead by a standard error of the difference over queries, as a closed form must.
    """

    @cache
    def ranked(choice: TrendChoice, queries: int) -> Evaluation:
        return rank(following(choice), queries)

    def score(half_life: float, weight: float) -> float:
        return ranked(TrendChoice(half_life, weight), FEW).metrics[select]

    half_life = peak(HALF_LIVES, 0.1, lambda half_life: score(half_life, 0.5))
    best = TrendChoice(half_life, peak(WEIGHTS, 0.5, lambda weight: score(half_life, weight)))
    without, found = ranked(TrendChoice(), QUERIES), ranked(best, QUERIES)
    taken = ahead(found, without, select)
    log.info(
        "trend with a half-life of %g of the time and weight %g: %s, with it %s is %.4f, without it %.4f",
        *(best.half_life, best.weight, "taken" if taken else "left out"),
        *(select, found.metrics[select], without.metrics[select]),
    )
    kept = best if taken else TrendChoice()
    both = found if taken else without
    return TrendChoice(kept.half_life, kept.weight, without.metrics[select], both.metrics[select])
