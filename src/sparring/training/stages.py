"""Stages after the towers: one classifier per item over frozen query vectors, then both rankings fused (NGAME, DEXA).

    M1  the run itself, in the run's folder
    M3  transfer: the vectors of all queries are frozen, and an item's classifier starts as the item tower's vector
    M4  the classifiers: a run like any other, trained and loaded like one, in the folder `classifiers` inside it
    fusion.safetensors: the fused ranking, learnt from held-out queries

`load` of the run's folder then recommends by the best of towers, classifiers and both on the validation part, for new
texts too, and its model card has the figures. Each stage resumes from its own checkpoint; a finished stage is not
trained again.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparring.core.ranks import rank
from sparring.core.types import ALONE, Positives, Ranks
from sparring.data.interactions import Interactions, Split
from sparring.data.propensity import inverse_propensities
from sparring.evaluation.ranking import Encoder, Lister, evaluate
from sparring.losses import Fixed, HardPairs
from sparring.models.clusters.clustered_batches import ClusteredBatches
from sparring.models.fusion import ROWS, Fused
from sparring.models.retriever import Retriever
from sparring.models.sharded_tables import ShardedTable
from sparring.models.towers import IdTower
from sparring.negatives import BatchPositives
from sparring.recipes.run import Run, Term
from sparring.recipes.setup import Setup
from sparring.training.loop import selected

log = logging.getLogger(__name__)


def classifier_run(run: Run, split: Split) -> Run:
    """The run that trains classifiers over frozen query vectors of a trained run, from its item vectors (M3, M4)."""
    wanted, setup, train, model = run.classifiers, run.setup, split.train, run.model
    assert wanted is not None
    rows = torch.unique(train.pairs()[0])
    queries, items = model.query_vectors(torch.arange(train.n_queries)).float(), model.item_vectors().float()
    inner = Setup.of(
        dim=model.dim,
        rows="queries",
        tau=1.0,
        batch_size=wanted.batch_size,
        epochs=wanted.epochs,
        lr=wanted.lr,
        warmup=wanted.warmup,
        schedule="linear",
        dropout=wanted.dropout,
        patience=None,
        select=setup.validation.select,
        eval_every=max(setup.validation.eval_every, wanted.epochs // 20, 1),
        valid_queries=setup.validation.valid_queries,
        precision=setup.training.precision,
        clf_shards=setup.classifiers.shards,
        seed=setup.seed,
    )
    frozen, table = (
        IdTower(train.n_queries, model.dim),
        ShardedTable(train.n_items, model.dim, setup.classifiers.shards),
    )
    with torch.no_grad():
        frozen.weight.copy_(queries)
    frozen.weight.requires_grad_(False)
    table.copy_rows(items)
    towers = frozen, table if setup.classifiers.shards > 1 else table.parts[0]
    batches = ClusteredBatches(
        rows,
        train.n_queries,
        model.dim,
        wanted.batch_size,
        setup.seed,
        wanted.size,
        wanted.start,
        wanted.every,
        wanted.grow,
        vectors=queries.cpu(),
    )
    term = Term(1.0, BatchPositives(), HardPairs(wanted.positives, wanted.negatives, wanted.margin))
    name, settings = f"{run.recipe} classifiers", dataclasses.asdict(wanted)
    return Run(Retriever(*towers, "cosine"), (term,), Fixed(1.0), inner, name, settings, batches)


def fuse(
    run: Run,
    classifiers: Run,
    split: Split,
    device: torch.device,
    folder: Path | None,
    ranks: Ranks,
    listed: Tensor | None = None,
) -> Fused:
    """The fused ranking, learnt from the validation part; without one from the training part (too optimistic).

    Its `ranking` is that of the settings, else the best one on the validation part, or "towers" if there is none.
    """
    wanted, train, weights = run.classifiers, split.train, split.train.propensity
    assert wanted is not None
    if weights is None:
        weights = inverse_propensities(train.counts(), len(np.unique(train.queries)))
    propensity = np.asarray(weights, dtype=np.float32)
    fused = Fused(run.model, classifiers.model, propensity, wanted.beta, wanted.shortlist, listed=listed).to(device)
    part = "training" if split.valid is None else "validation"
    log.info("fusion: learning the weight of each score from the %s part", part)
    held_out, seen = (train, None) if split.valid is None else (split.valid, split.seen_for("valid").to(device))
    if split.valid is not None:
        fused.valid = compare_rankings(fused, split.valid, seen, run.setup.validation.select, run.setup.seed, ranks)
        fused.ranking = max(fused.valid, key=lambda name: fused.valid[name], default="towers")  # the simplest of equals
    if wanted.ranking != "best":
        fused.ranking = wanted.ranking
    fused.learn(held_out, seen, run.setup.seed)
    if folder is not None and rank() == 0:
        fused.save(folder)
    return fused


def compare_rankings(
    fused: Fused, valid: Interactions, seen: Positives | None, select: str, seed: int, ranks: Ranks = ALONE
) -> dict[str, float]:
    """`select` of each ranking on half of the validation queries; empty if they are too few.

    The fused ranking learns from the other half meanwhile: on its own queries it would look better than it is.
    """
    queries = np.random.default_rng(seed).permutation(np.unique(valid.queries))[: 2 * ROWS]
    half = len(queries) // 2
    if not half:
        return {}
    learnt, compared = (valid.subset(np.isin(valid.queries, some)) for some in (queries[:half], queries[half:]))
    fused.learn(learnt, seen, seed)
    metric, k = selected(select)
    models: dict[str, Encoder | Lister] = {"towers": fused.knn, "classifiers": fused.clf, "fused": fused}
    return {
        name: evaluate(model, compared, seen, (k,), (metric,), ranks=ranks, among=fused.listed).metrics[f"{metric}@{k}"]
        for name, model in models.items()
    }
