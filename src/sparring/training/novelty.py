"""A model with a novelty: the correction of models/novelty.py as part of its item vectors or of its scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.topk import top_k
from sparring.core.types import Positives
from sparring.models.item_to_item import ItemSums
from sparring.models.novelty import DEPTH, check_novelty, log_popularity, spread
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.training.eligibility import Eligibility
from sparring.training.item_vectors import item_vectors
from sparring.training.sources import Sources

_QUERIES = 256  # queries whose mean spread is the unit of a model with item vectors


def novel(
    model: Retriever, novelty: float, seen: Positives, listed: Tensor | None = None, folder: Path | None = None
) -> Retriever:
    """A model that ranks with a novelty and shares its towers with the given one; at novelty 0, that model itself.

    A model with item vectors gets an item bias, with one spread for all queries, so an index, an export and a service
    need not know of it. An item-item matrix corrects each query by its own spread. `seen` counts the interactions and
    `listed` are the items that lists may hold, by default all; a `folder` has cached vectors.

        novel(model, 0.3, split.before("test"))
    """
    check_novelty(novelty)
    if not novelty:
        return model
    check_correctable(model)
    penalty = novelty * log_popularity(seen, model.n_items, listed)
    if isinstance(model.query, ItemSums):
        return Retriever(model.query.penalised(penalty), model.item, model.score).eval()
    vectors = model.item_vectors() if folder is None else item_vectors(model, folder).to(model.device)
    bias = IdTower(model.n_items, 1, sparse=False)
    with torch.no_grad():
        shift = -mean_spread(model, vectors, seen) * penalty.unsqueeze(1).to(model.device)
        ids = torch.arange(model.n_items, device=model.device)
        bias.weight.data = shift if model.item_bias is None else shift + model.item_bias(ids).to(shift)
    return model.with_bias(bias.requires_grad_(False)).eval()


def check_correctable(model: Retriever) -> None:
    """Refuse a model whose scores are neither inner products of vectors nor those of an item-item matrix."""
    own = model if type(model) is not Retriever else model.query
    if own is model or (model.scores_items and not isinstance(own, ItemSums)):
        raise UserError(f"novelty cannot correct the scores of a {type(own).__name__}: leave it at 0")


def mean_spread(model: Retriever, vectors: Tensor, seen: Positives) -> float:
    """The mean spread of up to 256 queries with interactions, at equal distances in order of id."""
    known = torch.nonzero(seen.start.cpu().diff()).flatten()
    if not len(known):
        return 0.0
    n = min(len(known), _QUERIES)
    chosen = known[torch.arange(n) * len(known) // n]
    scores = top_k(model.query_vectors(chosen).to(vectors), vectors, min(DEPTH, model.n_items))[0]
    return float(spread(scores.float()).mean())


def novel_run(model: Retriever, novelty: float, eligibility: Eligibility, folder: Path) -> Retriever:
    """`novel` for the model of a run folder; of a fused run, each source is corrected in its own unit."""
    if not isinstance(model, Sources):
        return novel(model, novelty, eligibility.seen, eligibility.listed(model.n_items), folder)
    sources = [
        replace(each, model=novel_run(each.model, novelty, each.eligibility, each.folder)) for each in model.sources
    ]
    return Sources(sources, model.by, model.weights.tolist(), model.depth).eval()
