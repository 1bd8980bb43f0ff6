"""What a trained model knows before it knows the query: which items are in demand now, and what newcomers get.

The half-life and the weight of a trend (models/trend.py) are chosen on a validation part that is later than the
training part. The vector of queries without a history is fitted to the same counts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparring.core.types import ALONE, Ranks
from sparring.data.histories import past_of
from sparring.data.interactions import Interactions, Split
from sparring.evaluation.ranking import Evaluation
from sparring.models.histories import HistoryTower
from sparring.models.retriever import Retriever
from sparring.models.sequences import SequenceTower
from sparring.models.trend import Trend
from sparring.recipes.run import Run
from sparring.training.closed_form import FEW, QUERIES, Rank, ahead
from sparring.training.peak import peak
from sparring.training.sources import Sources

HALF_LIVES = (0.3, 0.1, 0.03, 0.01, 0.003)  # shares of the time span
WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_ROUNDS = 100  # of L-BFGS
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
    """Whether no step trains the vector of a query without a history: rows of sets and sequences all have one."""
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
        count(other, split.train, ranks)
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


@torch.no_grad()
def count(model: Retriever, data: Interactions, ranks: Ranks = ALONE) -> None:
    """Let the trend of a model, if it has one, know these interactions and no others; all ranks get the same."""
    if model.trend is None:
        return
    half_life, weight, tau = model.trend.settings.tolist()
    counts = torch.from_numpy(data.recent_counts(None if half_life == math.inf else half_life)).to(model.device)
    model.trend.shift.copy_(weight * tau * torch.log1p(counts))
    if isinstance(model.query, HistoryTower | SequenceTower) and bool(counts.any()):
        model.query.empty.copy_(newcomer(model, counts, tau))
        ranks.equalise([model.query.empty])


def newcomer(model: Retriever, counts: Tensor, tau: float) -> Tensor:
    """The query vector (D,) whose softmax over all items is the nearest to these counts (N,).

        max over q of   sum_i c_i log softmax_i((unit(q) . e_i + b_i) / tau)

    b_i includes the trend. With inner products q is not scaled.
    """
    vectors = model.item_vectors().float()
    items, share = vectors[:, : model.width], (counts / counts.sum()).float()
    bias = vectors[:, -1] if model.item_bias is not None else vectors.new_zeros(len(vectors))
    with torch.enable_grad():
        q = (share @ items).requires_grad_()
        optimizer = torch.optim.LBFGS([q], max_iter=_ROUNDS, line_search_fn="strong_wolfe")

        def loss() -> float:
            optimizer.zero_grad()
            unit = F.normalize(q, dim=0) if model.score == "cosine" else q
            value = -(share @ torch.log_softmax((items @ unit + bias) / tau, 0))
            value.backward()
            return float(value.detach())

        optimizer.step(loss)
    return q.detach() if bool(q.isfinite().all()) else share @ items


def know(model: Retriever, split: Split, part: str) -> None:
    """Let a model know what came before a part, and no more: the histories of queries, and the demand for items.

    Of a fused run, each source.
    """
    if isinstance(model, Sources):
        for source in model.sources:
            know(source.model, split, part)
        model.refresh()
        return
    if model.past_readers():
        model.remember(past_of(split, part))
    if model.trend is not None:
        count(model, split.train if part == "valid" else split.joined().train)
