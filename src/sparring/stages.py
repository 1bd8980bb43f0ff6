"""Training in stages: towers, then one classifier per item over frozen query vectors, then both rankings fused (NGAME, DEXA).

    M1  the run itself: `fit`, in the run's folder
    M3  transfer: vectors of all queries are frozen, and an item's classifier starts where the item tower puts the item
    M4  the classifiers: `fit` again, in the folder `classifiers` inside it; a run like any other, and to be loaded like one
    fusion.safetensors: what `Fused` learnt from held-out queries; fusion_per_query.parquet: its metrics of every test query

Each stage resumes from its own checkpoint, and a stage that is done is not trained again.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from sparring import disk, runs
from sparring.composition import Classifiers, Run, Setup, Term
from sparring.data.batches import ClusteredBatches
from sparring.data.interactions import Split, write_table
from sparring.devices import pick_device
from sparring.dist import rank
from sparring.evaluation import Evaluation, evaluate_lists
from sparring.fusion import Fused
from sparring.losses import Fixed, HardPairs
from sparring.metrics import LIST_METRICS, PROPENSITY_METRICS, inverse_propensities
from sparring.negatives import BatchPositives
from sparring.retriever import Retriever
from sparring.sharded import ShardedTable
from sparring.towers import IdTower
from sparring.train import METRICS, Fitted, Progress, fit
from sparring.types import Positives


def fit_stages(
    run: Run,
    split: Split,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    k: Sequence[int] = (10, 20, 50),
    metrics: Sequence[str] = METRICS,
    progress: Progress | None = None,
    source: Mapping[str, Any] | None = None,
    save_seconds: float | None = None,
) -> Fitted:
    """Train a run and all stages that it asks for; without any this is `fit`.

    `stages` of the result has the test metrics of each ranking: knn (towers), clf (classifiers), fusion. They are in result.json too. With
    `resume` the stage that was stopped goes on, and the result is that of a run never stopped.

        fitted = fit_stages(recipes.ngame(split.train), split, "runs/ngame");   fitted.stages["fusion"].metrics["precision@1"]
    """
    progress = progress or Progress()
    wanted = run.classifiers
    folder = Path(out) if out is not None else None
    asked: dict[str, Any] = {"resume": resume, "device": device, "k": k, "metrics": metrics, "progress": progress}
    asked |= {"source": source, "save_seconds": save_seconds}
    fitted = fit(run, split, folder, overwrite=overwrite, **asked)
    if wanted is None:
        return fitted
    progress.say(f"classifiers: one vector for each of {split.train.n_items:,} items over frozen query vectors")
    inner = None if folder is None else folder / "classifiers"
    after = classifier_run(run, split)
    second = fit(after, split, inner, **asked)
    found: dict[str, Evaluation | None] = {"knn": fitted.test, "clf": second.test}
    if wanted.fusion:
        fused = _fuse(run, second.run, wanted, split, pick_device(device), folder, progress)
        if split.test is not None:
            progress.say("ranking by both for every test query")
            found["fusion"] = _measure(fused, split, k, metrics)
    rows = {name: test for name, test in found.items() if test is not None}
    if folder is not None and rank() == 0:
        if "fusion" in rows:
            write_table(_single_queries(rows["fusion"], split), folder / "fusion_per_query.parquet")
        path = folder / "result.json"
        disk.write_json(path, json.loads(path.read_text()) | {"stages": {name: test.to_dict() for name, test in rows.items()}})
    return dataclasses.replace(fitted, stages=rows)


def classifier_run(run: Run, split: Split) -> Run:
    """The run that trains classifiers over the query vectors of a trained one, from its item vectors (M3, M4)."""
    wanted, setup, train, model = run.classifiers, run.setup, split.train, run.model
    assert wanted is not None
    rows = torch.unique(train.pairs()[0])
    steps = wanted.epochs * math.ceil(len(rows) / wanted.batch_size)
    queries, items = model.query_vectors(torch.arange(train.n_queries)).float(), model.item_vectors().float()
    own = Setup(
        dim=model.dim,
        rows="queries",
        tau=1.0,
        batch_size=wanted.batch_size,
        epochs=wanted.epochs,
        lr=wanted.lr,
        warmup=min(wanted.warmup, steps // 10),  # small data has fewer steps than the warm-up of a large one
        schedule="linear",
        dropout=wanted.dropout,
        patience=None,
        select=setup.select,
        eval_every=max(setup.eval_every, wanted.epochs // 20, 1),
        valid_queries=setup.valid_queries,
        precision=setup.precision,
        clf_shards=setup.clf_shards,
        seed=setup.seed,
    )
    frozen, table = IdTower(train.n_queries, model.dim), ShardedTable(train.n_items, model.dim, setup.clf_shards)
    with torch.no_grad():
        frozen.weight.copy_(queries)
    frozen.weight.requires_grad_(False)
    table.copy_rows(items)
    towers = frozen, table if setup.clf_shards > 1 else table.parts[0]
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
    return Run(Retriever(*towers, "cosine"), (term,), Fixed(1.0), own, name, settings, batches)


def _fuse(run: Run, second: Run, wanted: Classifiers, split: Split, device: torch.device, folder: Path | None, progress: Progress) -> Fused:
    """The fused ranking, learnt from the validation part, or where there is none from the training part, which flatters the classifiers."""
    train = split.train
    weights = train.propensity
    if weights is None:
        weights = inverse_propensities(train.counts(), len(np.unique(train.queries)))
    fused = Fused(run.model, second.model, np.asarray(weights, dtype=np.float32), wanted.beta, wanted.shortlist).to(device)
    progress.say(f"fusion: learning from the {'training' if split.valid is None else 'validation'} part what each score is worth")
    held, seen = (train, None) if split.valid is None else (split.valid, _on(split.seen_for("valid"), device))
    fused.learn(held, seen, run.setup.seed)
    if folder is not None and rank() == 0:
        learnt = dict(fused.named_buffers(recurse=False))
        disk.write_tensors(folder / "fusion.safetensors", learnt, {"beta": wanted.beta, "shortlist": wanted.shortlist})
    return fused


def _measure(fused: Fused, split: Split, k: Sequence[int], metrics: Sequence[str]) -> Evaluation:
    assert split.test is not None
    device, counts, seen = fused.propensity.device, split.train.counts(), split.seen_for("test")
    ids = torch.from_numpy(np.unique(split.test.queries)).long().to(device)
    lists = fused.lists(ids, max(k), _on(seen, device)).cpu().numpy()
    weights = split.test.propensity
    if weights is not None:
        metrics = (*metrics, *PROPENSITY_METRICS)
    else:  # as `evaluate` has them
        weights = inverse_propensities(counts, int((seen.start.diff() > 0).sum()))
    return evaluate_lists(lists, split.test, split.train.n_items, k, metrics, counts=counts, propensity=weights)


def _single_queries(test: Evaluation, split: Split) -> pl.DataFrame:
    """The values of each test query, as per_query.parquet has those of the towers."""
    ranked = {key: each.astype(np.float32) for key, each in test.per_query.items() if key.split("@")[0] not in LIST_METRICS}
    return pl.DataFrame({"query": split.train.query_ids.decode(test.query_ids), **ranked})


def load_fused(folder: str | Path) -> Fused:
    """The fused ranking of a finished run in stages.

    load_fused("runs/ngame").lists(query_ids, 10, load("runs/ngame").seen)
    """
    folder = Path(folder)
    tensors, settings = disk.read_tensors(folder / "fusion.safetensors")
    knn, clf = runs.load(folder).model, runs.load(folder / "classifiers").model
    fused = Fused(knn, clf, tensors["propensity"].numpy(), settings["beta"], settings["shortlist"])
    for name, own in fused.named_buffers(recurse=False):
        own.copy_(tensors[name])
    return fused


def _on(positives: Positives, device: torch.device) -> Positives:
    return Positives(positives.start.to(device), positives.items.to(device))
