"""A run folder with seeded vectors, and the same vectors in memory: tests check answers by brute force, untrained."""

from __future__ import annotations

import datetime
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import torch

from sparring.core.files import tensors_of, write_tensors
from sparring.core.types import Positives
from sparring.data.interactions import Interactions, Vocabulary
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.recipes.setup import Setup
from sparring.training.checkpoint import run_id
from sparring.training.folder import finish, write_start

USERS, ITEMS, DIM, SEEN = 40, 60, 8, 5


@dataclass
class MadeRun:
    """The contents of a run folder, in memory."""

    folder: Path
    users: np.ndarray  # (U, D)
    items: np.ndarray  # (N, D)
    seen: np.ndarray  # (U, SEEN) rows of items
    table: pl.DataFrame | None
    item_ids: list[int]

    def user(self, row: int) -> str:
        return f"user-{row:02}"

    def best(
        self, q: np.ndarray, k: int, without: Collection[int] = (), only: Collection[int] | None = None
    ) -> list[tuple[int, float]]:
        """(item id, score) of the k best by brute force; `without` and `only` are rows."""
        scores = [
            (float(q @ self.items[row]), row)
            for row in range(len(self.items))
            if row not in without and (only is None or row in only)
        ]
        return [(self.item_ids[row], score) for score, row in sorted(scores, key=lambda pair: -pair[0])[:k]]


def _table(n: int, rng: np.random.Generator) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "title": [f"thing {row}" for row in range(n)],
            "category": [("apple", "bread", None)[row % 3] for row in range(n)],
            "price": rng.random(n).round(3) * 20,
            "stock": [row % 4 != 0 for row in range(n)],
            "year": [2000 + row for row in range(n)],
            "since": [datetime.date(2020, 1, 1) + datetime.timedelta(days=row) for row in range(n)],
            "tags": [["new", "red"] if row % 2 else ["red"] for row in range(n)],
        }
    )


def make_run(
    folder: Path,
    seed: int = 0,
    score: Literal["cosine", "dot"] = "dot",
    items: int = ITEMS,
    dim: int = DIM,
    with_table: bool = True,
    bias: bool = False,
    repeats: bool = False,
) -> MadeRun:
    """A run folder as training would leave it, with vectors drawn from a seed."""
    rng = np.random.default_rng(seed)
    item_ids = [1000 + 7 * row for row in range(items)]
    seen = np.sort(np.stack([rng.permutation(items)[:SEEN] for _ in range(USERS)]), axis=1).astype(np.int32)
    known = _table(items, rng) if with_table else None
    queries, ids = Vocabulary([f"user-{row:02}" for row in range(USERS)]), Vocabulary(item_ids)
    data = Interactions(np.repeat(np.arange(USERS, dtype=np.int32), SEEN), seen.ravel(), queries, ids, item_table=known)
    setup = Setup.of(dim=dim, score=score, seed=seed, item_bias=bias)
    query, item, biases = IdTower(USERS, dim), IdTower(items, dim), IdTower(items, 1)
    model = Retriever(query, item, score, item_bias=biases if bias else None)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    start = torch.arange(USERS + 1) * SEEN
    meta = {"recipe": "made", **({"repeats": "keep"} if repeats else {})}
    write_start(folder, data, Positives(start, torch.from_numpy(seen.ravel())), meta, setup)
    write_tensors(folder / "model.safetensors", tensors_of(model), {"run": run_id(folder)})
    finish(folder)
    users, vectors = (tower.weight.detach().numpy().astype(np.float64) for tower in (query, item))
    if score == "cosine":
        users, vectors = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (users, vectors))
    if bias:
        vectors = np.concatenate([vectors, biases.weight.detach().numpy()], 1)
        users = np.concatenate([users, np.ones((USERS, 1))], 1)
    return MadeRun(folder, users, vectors, seen, known, item_ids)
