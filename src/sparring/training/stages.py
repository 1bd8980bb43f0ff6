"""Training in stages: towers, then one classifier per item over frozen query vectors, then both rankings fused (NGAME, DEXA).

    M1  the run itself: `fit`, in the run's folder
    M3  transfer: vectors of all queries are frozen, and an item's classifier starts where the item tower puts the item
    M4  the classifiers: `fit` again, in the folder `classifiers` inside it; a run like any other, and to be loaded like one
    fusion.safetensors: what `Fused` learnt from held-out queries; fusion_per_query.parquet: its metrics of every test query

`load` of the run's folder then recommends by both (`ranking`), for new texts too, and its model card has the figures of both.

Each stage resumes from its own checkpoint, and a stage that is done is not trained again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from sparring.core import files
from sparring.core.devices import pick_device
from sparring.core.files import write_table
from sparring.core.ranks import rank
from sparring.data.interactions import Split
from sparring.data.propensity import inverse_propensities
from sparring.evaluation.metrics import LIST_METRICS, PROPENSITY_METRICS
from sparring.evaluation.ranking import Evaluation, evaluate
from sparring.losses import Fixed, HardPairs
from sparring.models.clusters.batches import ClusteredBatches
from sparring.models.fusion import Fused
from sparring.models.retriever import Retriever
from sparring.models.sharded_tables import ShardedTable
from sparring.models.towers import IdTower
from sparring.negatives import BatchPositives
from sparring.recipes.run import Run, Term
from sparring.recipes.setup import ClassifierSettings, Setup
from sparring.training import trained
from sparring.training.fitting import METRICS, Fitted, Progress, fit
from sparring.training.model_card import model_card


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
    warm: str | Path | None = None,
) -> Fitted:
    """Train a run and all stages that it asks for; users call it `sparring.fit`. Without stages it is `fit` of train.py.

    With `out` everything goes to that folder (see runs.py), which must be empty or new: `resume` goes on in the stage that was stopped, to
    the result of a run never stopped, and `overwrite` deletes the run that is there. `source` is recorded in run.json. `warm` is an
    earlier run whose vectors the towers begin with. `stages` of the
    result has the test metrics of each ranking: knn (towers), clf (classifiers), fusion. They are in result.json too.

        fitted = sparring.fit(recipes.ngame(split.train), split, "runs/ngame");   fitted.stages["fusion"].metrics["precision@1"]
    """
    progress = progress or Progress()
    folder = Path(out) if out is not None else None
    asked: dict[str, Any] = {"resume": resume, "device": device, "k": k, "metrics": metrics, "progress": progress}
    asked |= {"source": source, "save_seconds": save_seconds}
    fitted = fit(run, split, folder, overwrite=overwrite, warm=warm, **asked)
    wanted = run.classifiers
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
        result = json.loads(path.read_text()) | {"stages": {name: test.to_dict() for name, test in rows.items()}}
        files.write_json(path, result)
        files.write(
            folder / "README.md",
            lambda file: file.write_text(model_card(trained.read_meta(folder), result, fitted.history)),
        )
    return dataclasses.replace(fitted, stages=rows)


def classifier_run(run: Run, split: Split) -> Run:
    """The run that trains classifiers over the query vectors of a trained one, from its item vectors (M3, M4)."""
    wanted, setup, train, model = run.classifiers, run.setup, split.train, run.model
    assert wanted is not None
    rows = torch.unique(train.pairs()[0])
    queries, items = model.query_vectors(torch.arange(train.n_queries)).float(), model.item_vectors().float()
    own = Setup.of(
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
    return Run(Retriever(*towers, "cosine"), (term,), Fixed(1.0), own, name, settings, batches)


def _fuse(
    run: Run,
    second: Run,
    wanted: ClassifierSettings,
    split: Split,
    device: torch.device,
    folder: Path | None,
    progress: Progress,
) -> Fused:
    """The fused ranking, learnt from the validation part, or where there is none from the training part, which flatters the classifiers."""
    train = split.train
    weights = train.propensity
    if weights is None:
        weights = inverse_propensities(train.counts(), len(np.unique(train.queries)))
    fused = Fused(run.model, second.model, np.asarray(weights, dtype=np.float32), wanted.beta, wanted.shortlist).to(
        device
    )
    progress.say(
        f"fusion: learning from the {'training' if split.valid is None else 'validation'} part what each score is worth"
    )
    held, seen = (train, None) if split.valid is None else (split.valid, split.seen_for("valid").to(device))
    fused.learn(held, seen, run.setup.seed)
    if folder is not None and rank() == 0:
        fused.save(folder)
    return fused


def _measure(fused: Fused, split: Split, k: Sequence[int], metrics: Sequence[str]) -> Evaluation:
    assert split.test is not None
    seen = split.seen_for("test").to(fused.propensity.device)
    metrics = (*metrics, *(PROPENSITY_METRICS if split.test.propensity is not None else ()))
    return evaluate(fused, split.test, seen, k, metrics, counts=split.train.counts())


def _single_queries(test: Evaluation, split: Split) -> pl.DataFrame:
    """The values of each test query, as per_query.parquet has those of the towers."""
    ranked = {
        key: each.astype(np.float32) for key, each in test.per_query.items() if key.split("@")[0] not in LIST_METRICS
    }
    return pl.DataFrame({"query": split.train.query_ids.decode(test.query_ids), **ranked})
