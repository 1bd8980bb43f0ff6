"""Small finished runs of every kind over one split, and their fusion by brute force."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch

from sparring.data.interactions import Split
from sparring.models.retriever import Retriever
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.trained import Trained
from support.settings import quick

SETTINGS: dict[str, dict[str, object]] = {
    "ease": {"lam": 20.0},
    "item_knn": {"neighbours": 9, "shrink": 2.0},
    "popularity": {},
    "ials": {"dim": 5, "epochs": 3},
    "tables": quick(epochs=3, n=16),
}


def make_runs(folder: Path, parts: Split) -> dict[str, Path]:
    """A run folder per recipe, by the name of the recipe."""
    for name, settings in SETTINGS.items():
        fit(build(name, parts.train, settings), parts, folder / name, k=(10,), device="cpu")
    return {name: folder / name for name in SETTINGS}


def table(model: Retriever) -> np.ndarray:
    """(U, N): every score of a model."""
    queries = model.query_vectors(torch.arange(model.query.n)).float().numpy().astype(np.float64)  # type: ignore[arg-type]
    if model.scores_items:
        return queries
    return queries @ model.item_vectors().float().numpy().astype(np.float64).T


def fused(
    scores: Mapping[str, np.ndarray], weights: Mapping[str, float], by: str, depth: int, without: Collection[int]
) -> dict[int, float]:
    """item -> fused score of one query, from its scores (N,) in each source; all items are known to all sources."""
    lists = {
        name: sorted((item for item in range(len(own)) if item not in without), key=lambda i: (-own[i], i))[:depth]
        for name, own in scores.items()
    }
    total = {item: 0.0 for name, listed in lists.items() if weights[name] for item in listed}
    for name, listed in lists.items():
        own = scores[name][listed]
        for item in total:
            if by == "ranks":
                value = 1 / (61 + listed.index(item)) if item in listed else 0.0
            else:
                value = (scores[name][item] - own.mean()) / own.std() if own.std() > 1e-12 else 0.0
            total[item] += weights[name] * value
    return total


def weights_of(trained: Trained) -> dict[str, float]:
    return {part["name"]: part["weight"] for part in trained.meta["parts"]}


def agrees(items: list[int], scores: list[float], expected: Mapping[int, float]) -> None:
    """A list has the best of the expected scores, in order; items of almost equal scores may change places."""
    best = sorted(expected.values(), reverse=True)[: len(items)]
    np.testing.assert_allclose(scores, best, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose([expected[item] for item in items], best, rtol=1e-3, atol=1e-4)
    assert len(set(items)) == len(items)
    assert all(math.isfinite(score) for score in scores)
