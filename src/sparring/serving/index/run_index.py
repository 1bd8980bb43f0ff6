"""The index of a run, in its subfolder `index`: built for one of its rankings, tuned on queries of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.topk import top_k
from sparring.models.item_to_item import from_lists, largest_weights
from sparring.models.retriever import Retriever
from sparring.serving.index import index_files
from sparring.serving.index.recall_tuning import Tuned, tune
from sparring.serving.index.search import Index
from sparring.serving.index.staged import StagedItems, listing_vectors
from sparring.training.folder import model_hash
from sparring.training.trained import How, Trained

FOLDER = "index"
_PROBES = 16  # vectors of an index that are compared with those of its run


def build_index(
    trained: Trained,
    k: int = 100,
    recall: float = 0.99,
    memory: int | None = None,
    kind: str = "auto",
    queries: int = 1000,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    dim: int | None = None,
    ranking: How | None = None,
) -> Tuned:
    """Tune an index for a run and save it in the run folder; see `tune`. `dim` cuts vectors to their first dimensions.

    `ranking` is that of `Trained.recommend`; the recall is that of its final lists (`StagedItems`).

        build_index(load("runs/first"), recall=0.99, memory=500_000_000)
    """
    if dim is not None and ranking not in (None, "towers"):
        raise UserError(f"the first dimensions are cut from vectors of the towers, not for the {ranking} ranking")
    how = "towers" if dim is not None else trained.how(ranking)
    trained = trained if dim is None else trained.cut(dim)
    n = len(trained.ids.query_ids)
    chosen = np.random.default_rng(seed).permutation(n)[:queries]
    towers, staged = trained.item_vectors().float().cpu(), dict[str, Any]()
    vectors = towers.numpy()
    if how != "towers":
        assert trained.fused is not None
        fused = trained.fused
        vectors = listing_vectors(towers, fused, how)
        items = StagedItems(Index(vectors, np.arange(len(vectors))), towers, fused, how)
        depth = fused.shortlist if how == "fused" else 1
        staged = {"ranked": items.over, "depth": depth, "beside": items.memory}
    asked = trained.model.query_vectors(torch.from_numpy(chosen)).float().cpu().numpy()
    if not np.isfinite(vectors).all() or not np.isfinite(asked).all():
        raise UserError(
            f"the vectors of {trained.folder} contain NaN or infinite values: the model has diverged, train it again"
        )
    taken = None
    if not trained.lists_seen():
        own = trained.eligibility.taken(torch.from_numpy(chosen))
        taken = [items.cpu().numpy() for items in own.items.split(own.start.diff().tolist())]
    tuned = tune(vectors, asked, k, recall, memory, kind, seed, say, taken, **staged)
    figures = {
        "recall": round(tuned.recall, 6),
        "k": min(k, len(vectors)),
        "queries_per_second": round(tuned.chosen.speed, 1),
    }
    meta = {
        "run": trained.meta["id"],
        "model": model_hash(trained.folder),
        "novelty": trained.novelty,
        "ranking": how,
        "cut": dim,
        "memory": tuned.chosen.memory,
        "measured": figures,
    }
    tuned = replace(tuned, index=replace(tuned.index, meta=meta))
    tuned.index.save(trained.folder / FOLDER)
    return tuned


def build_lists(
    trained: Trained, neighbours: int = 200, k: int = 100, queries: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Save the strongest neighbours of each item of an item-item matrix as the index of its run; returns the figures.

    Recall is the share of the exact best k that the neighbours give, on a sample of the run's queries.

        build_lists(load("runs/ease"), neighbours=200)["recall"]
    """
    if neighbours < 1:
        raise UserError(f"neighbours is {neighbours}; keep at least 1 of each item")
    weight, items = largest_weights(trained.model, neighbours)
    if not bool(torch.isfinite(weight).all()):
        raise UserError(f"the weights of {trained.folder} contain NaN or infinite values: train it again")
    n_items, n = len(weight), len(trained.ids.query_ids)
    pruned = from_lists(trained.model, weight, items)
    asked = torch.from_numpy(np.random.default_rng(seed).permutation(n)[:queries])
    k = min(k, n_items)
    exact = _lists(trained.model, asked, k)
    began = time.perf_counter()
    found = _lists(pruned, asked, k)
    seconds = time.perf_counter() - began
    same = sum(len(np.intersect1d(*pair)) for pair in zip(exact, found, strict=True)) / exact.size
    figures = {"recall": round(same, 6), "k": k, "queries_per_second": round(len(asked) / seconds, 1)}
    meta = {
        "run": trained.meta["id"],
        "model": model_hash(trained.folder),
        "memory": weight.numel() * 8,
        "measured": figures,
    }
    stored = index_files.Stored(
        weight.numpy(), np.arange(n_items), index_files.LISTS, meta=meta, neighbours=items.numpy()
    )
    index_files.write(stored, trained.folder / FOLDER)
    return {**figures, "neighbours": weight.shape[1], "memory": meta["memory"]}


def _lists(model: Retriever, queries: torch.Tensor, k: int) -> np.ndarray:
    """(B, k): the best items of queries, by blocks."""
    blocks = [top_k(model.query_vectors(ids), None, k)[1] for ids in queries.split(64)]
    return torch.cat(blocks).numpy()


def has_index(run: Path) -> bool:
    """Whether a run folder has an index."""
    return (run / FOLDER / index_files.META).is_file()


def cut_as_indexed(model: Retriever, run: Path) -> Retriever:
    """The model with what the index of its run has: the dimensions of its vectors, or an item's neighbours."""
    if not has_index(run):
        return model
    if model.scores_items:
        return open_lists(model, run)
    cut = index_files.read_meta(run / FOLDER).get("cut")
    return model if cut is None else model.cut(int(cut))


def ranking_of(trained: Trained, asked: How | None = None) -> How:
    """The ranking that a run is served by: as asked, else the one that its index was built for, else its own.

    An index for another ranking than asked raises UserError.
    """
    run = trained.folder
    meta = index_files.read_meta(run / FOLDER) if trained.has_vectors and has_index(run) else None
    if meta is None:
        return trained.how(asked)
    indexed: How = meta.get("ranking", "towers")
    if asked is not None and trained.how(asked) != indexed:
        how = f"build it again with `sparring index {run} --ranking {asked}`"
        raise UserError(f"{run / FOLDER} was built for the {indexed} ranking, not {asked}: {how}")
    return trained.how(indexed)


def open_staged(trained: Trained, how: Literal["classifiers", "fused"]) -> StagedItems:
    """The items of a run by its classifiers or by both fused: through its index, without one exactly."""
    assert trained.fused is not None
    run, towers = trained.folder, trained.item_vectors().float().cpu()
    if not has_index(run):
        vectors = listing_vectors(towers, trained.fused, how)
        return StagedItems(Index(vectors, np.arange(len(vectors))), towers, trained.fused, how)
    index, n = open_index(run, novelty=trained.novelty, ranking=how), len(towers)
    rows = np.unique(np.linspace(0, n - 1, min(n, _PROBES)).astype(np.int64))
    truth = listing_vectors(towers, trained.fused, how, torch.from_numpy(rows))
    fits = index.vectors.shape == towers.shape and np.allclose(truth, index.vectors[rows], rtol=1e-3, atol=1e-4)
    if not fits or int(index.ids[-1]) != n - 1:
        rebuild = f"build it again with `sparring index {run} --ranking {how}`"
        raise UserError(f"the vectors in the index of {run} are not those of its {how} ranking: {rebuild}")
    return StagedItems(index, towers, trained.fused, how)


def open_lists(model: Retriever, run: Path) -> Retriever:
    """The item-item matrix of a run, cut to the neighbours in its index."""
    files.check_folder(run)
    stored = index_files.read(run / FOLDER)
    _check_model(stored.meta, run)
    if stored.neighbours is None or len(stored.ids) != model.n_items:
        raise UserError(f"{run / FOLDER} does not hold the neighbours of {model.n_items:,} items: build it again")
    weight, items = (torch.from_numpy(np.array(each)) for each in (stored.vectors, stored.neighbours))
    return from_lists(model, weight, items)


def open_index(run: str | Path, check: bool = True, novelty: float | None = None, ranking: How = "towers") -> Index:
    """The index of a run folder; that of another model or ranking, or of another novelty if one is given, is refused.

    For another ranking than that by the towers `open_staged` makes lists of what it finds.

    open_index("runs/first").search(q, k=10)
    """
    run = Path(run)
    folder = run / FOLDER
    if not (folder / index_files.META).is_file():
        raise UserError(f"{run} has no index: build one with `sparring index {run}`")
    files.check_folder(run)
    if index_files.read_meta(folder)["kind"] == index_files.LISTS:
        raise UserError(f"{folder} holds the neighbours of an item-item matrix, not vectors: use open_lists")
    index = Index.load(folder, check)
    _check_model(index.meta, run)
    if (indexed := index.meta.get("ranking", "towers")) != ranking:
        how = f"build it again with `sparring index {run} --ranking {ranking}`"
        raise UserError(f"{folder} was built for the {indexed} ranking, not {ranking}: {how}")
    own = index.meta.get("novelty", 0.0)
    if novelty is not None and own != novelty:
        how = f"use --novelty {own}, or build it again with `sparring index {run} --novelty {novelty:g}`"
        raise UserError(f"{folder} was built with novelty {own}, not {novelty:g}: {how}")
    return index


def _check_model(meta: Mapping[str, Any], run: Path) -> None:
    """Raise if an index was built from another model than that of its run."""
    if meta.get("model") != model_hash(run):
        model = run / "model.safetensors"
        raise UserError(
            f"{run / FOLDER} was built from another model than {model}: build it again with `sparring index {run}`"
        )
