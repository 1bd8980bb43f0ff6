"""The index of a run, in its subfolder `index`: built from the item tower, tuned on queries of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sparring.core import files
from sparring.core.errors import UserError
from sparring.serving.index import index_files
from sparring.serving.index.recall_tuning import Tuned, tune
from sparring.serving.index.search import Index
from sparring.training.folder import model_hash
from sparring.training.trained import Trained

FOLDER = "index"


def build_index(
    trained: Trained,
    k: int = 100,
    recall: float = 0.99,
    memory: int | None = None,
    kind: str = "auto",
    queries: int = 1000,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Tune an index for a run and save it in the run folder; see `tune`.

    build_index(load("runs/first"), recall=0.99, memory=500_000_000)
    """
    n = len(trained.ids.query_ids)
    chosen = np.random.default_rng(seed).permutation(n)[:queries]
    vectors = trained.item_vectors().float().cpu().numpy()
    asked = trained.model.query_vectors(torch.from_numpy(chosen)).float().cpu().numpy()
    if not np.isfinite(vectors).all() or not np.isfinite(asked).all():
        raise UserError(
            f"the vectors of {trained.folder} contain NaN or infinite values: the model has diverged, train it again"
        )
    tuned = tune(vectors, asked, k, recall, memory, kind, seed, say)
    figures = {
        "recall": round(tuned.recall, 6),
        "k": min(k, len(vectors)),
        "queries_per_second": round(tuned.chosen.speed, 1),
    }
    meta = {
        "run": trained.meta["id"],
        "model": model_hash(trained.folder),
        "memory": tuned.chosen.memory,
        "measured": figures,
    }
    tuned = replace(tuned, index=replace(tuned.index, meta=meta))
    tuned.index.save(trained.folder / FOLDER)
    return tuned


def open_index(run: str | Path, check: bool = True) -> Index:
    """The index of a run folder; the index of another model raises UserError.

    open_index("runs/first").search(q, k=10)
    """
    run = Path(run)
    folder = run / FOLDER
    if not (folder / index_files.META).is_file():
        raise UserError(f"{run} has no index: build one with `sparring index {run}`")
    files.check_folder(run)
    index = Index.load(folder, check)
    if index.meta.get("model") != model_hash(run):
        model = run / "model.safetensors"
        raise UserError(
            f"{folder} was built from another model than {model}: build it again with `sparring index {run}`"
        )
    return index
