"""Shared by the benchmarks: data, a CPU clock, one evaluator for every library, one table printer."""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sparring import Run
    from sparring.core.types import Positives
    from sparring.data.interactions import Interactions

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("SPARRING_DATA", ROOT.parent / "shared" / "data"))
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Pairs:
    """Training and held-out pairs, ids 0..n-1; `source` names their origin."""

    users: np.ndarray
    items: np.ndarray
    test_users: np.ndarray
    test_items: np.ndarray
    n_users: int
    n_items: int
    source: str

    def __len__(self) -> int:
        return len(self.users)

    def item_counts(self) -> np.ndarray:
        return np.bincount(self.items, minlength=self.n_items)

    def csr(self, test: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(start, items) with the items of each user sorted."""
        users, items = (self.test_users, self.test_items) if test else (self.users, self.items)
        order = np.lexsort((items, users))
        return np.concatenate([[0], np.cumsum(np.bincount(users, minlength=self.n_users))]), items[order]


def zipf(
    n_users: int = 29_858, n_items: int = 40_988, n_pairs: int = 1_027_464, test: float = 0.2, seed: int = 10
) -> Pairs:
    """Pairs of Gowalla's shape with Zipf popularity and no other structure: for speed only, not for quality."""
    rng = np.random.default_rng(seed)
    weight = 1.0 / np.arange(1, n_items + 1) ** 0.8
    items = np.concatenate([np.arange(n_items), rng.choice(n_items, n_pairs - n_items, p=weight / weight.sum())])
    users = rng.integers(0, n_users, n_pairs)
    held = np.zeros(n_pairs, bool)
    held[n_items:] = rng.random(n_pairs - n_items) < test  # the first n_items rows give every item a training pair
    return Pairs(
        users[~held],
        items[~held],
        users[held],
        items[held],
        n_users,
        n_items,
        "synthetic Zipf pairs (real data absent)",
    )


def gowalla_xir(seed: int = 10) -> Pairs:
    """The matrix of the XIR paper, split 80/20 per user with `random.sample`, as in its release."""
    path = DATA / "gowalla_xir" / "interactions.parquet"
    if not path.exists():
        print(f"no {path}: synthetic Zipf pairs of the same shape instead")
        return zipf(seed=seed)
    import polars as pl

    table = pl.read_parquet(path).sort("user_id", "item_id")
    users = _dense(table["user_id"].to_numpy())
    items = _dense(table["item_id"].to_numpy())
    counts = np.bincount(users)
    draw = random.Random(seed)
    kept = [np.array(draw.sample(range(n), round(0.8 * n)), dtype=np.int64) for n in counts.tolist()]
    train = np.zeros(len(users), bool)
    train[np.concatenate([first + rows for first, rows in zip(np.cumsum(counts) - counts, kept, strict=True)])] = True
    n_users, n_items = int(users.max()) + 1, int(items.max()) + 1
    return Pairs(
        users[train], items[train], users[~train], items[~train], n_users, n_items, f"gowalla_xir, 80/20, seed {seed}"
    )


def gowalla_lightgcn() -> Pairs:
    """The split of most published Gowalla figures."""
    path = DATA / "gowalla_lightgcn" / "interactions.parquet"
    if not path.exists():
        print(f"no {path}: synthetic Zipf pairs of the same shape instead")
        return zipf(n_items=40_981, n_pairs=1_027_370, test=0.21)
    import polars as pl

    table = pl.read_parquet(path)
    users, items = _dense(table["user_id"].to_numpy()), _dense(table["item_id"].to_numpy())
    train = (table["split"].cast(pl.String) == "train").to_numpy()
    n_users, n_items = int(users.max()) + 1, int(items.max()) + 1
    return Pairs(users[train], items[train], users[~train], items[~train], n_users, n_items, "gowalla_lightgcn")


def interactions(data: Pairs, test: bool = False) -> Interactions:
    """The training (or held-out) pairs as Interactions."""
    from sparring.data.interactions import Interactions, Vocabulary

    users, items = (data.test_users, data.test_items) if test else (data.users, data.items)
    order = np.lexsort((items, users))
    pairs = users[order].astype(np.int32), items[order].astype(np.int32)
    return Interactions(*pairs, Vocabulary(np.arange(data.n_users)), Vocabulary(np.arange(data.n_items)))


def _dense(ids: np.ndarray) -> np.ndarray:
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)


class Clock:
    """CPU seconds (user + system, all threads) and wall seconds since creation, without excluded work."""

    def __init__(self) -> None:
        self._cpu, self._wall = cpu_seconds(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        return cpu_seconds() - self._cpu, time.perf_counter() - self._wall

    def leave_out(self, work: Callable[[], None]) -> None:
        """Run `work` without counting it."""
        cpu, wall = cpu_seconds(), time.perf_counter()
        work()
        self._cpu += cpu_seconds() - cpu
        self._wall += time.perf_counter() - wall


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Tables:
    """Two tables of vectors, from any library, as a model that `sparring.evaluate` ranks."""

    users: Tensor
    items: Tensor

    def encode_queries(self, ids: Tensor, /) -> Tensor:
        return self.users[ids]

    def item_vectors(self) -> Tensor:
        return self.items


def stepping(run: Run, generator: torch.Generator, positives: Positives | None = None) -> Callable[[Tensor], None]:
    """A complete training step of a run on pairs (B, 2) of queries and items; recorded on a GPU."""
    import torch

    from sparring.core.part import listeners
    from sparring.training.cuda_graph import CudaGraphStep
    from sparring.training.optimizers import optimizers
    from sparring.training.step import training_step

    setup, observers = run.setup, listeners(run.modules(), "observe")
    trained = torch.nn.ModuleDict({"model": run.model, "temperature": run.temperature})
    rules = optimizers(trained, setup.training.optimizer, setup.training.lr, setup.training.weight_decay)

    def work(pairs: Tensor) -> None:
        for rule in rules:
            rule.zero_grad(set_to_none=True)
        losses, step, outcome = training_step(run, *pairs.T.contiguous(), generator, positives)
        losses.mean().backward()
        for rule in rules:
            rule.step()
        with torch.no_grad():
            for observer in observers:
                observer.observe(step, outcome)

    return CudaGraphStep(work, generator) if generator.device.type == "cuda" else work


def quality(
    users: np.ndarray | Tensor, items: np.ndarray | Tensor, data: Pairs, k: Sequence[int] = (20,), sample: int = 0
) -> dict[str, float]:
    """recall@k and ndcg@k by LightGCN's definition, training items masked, for all users or a fixed sample."""
    import torch

    from sparring.evaluation.ranking import evaluate

    held = interactions(data, test=True)
    if sample:
        held = held.subset(
            np.isin(held.queries, np.random.default_rng(0).choice(np.unique(held.queries), sample, replace=False))
        )
    tables = Tables(torch.as_tensor(users), torch.as_tensor(items))
    return evaluate(tables, held, interactions(data).positives(), k, ("recall", "ndcg")).metrics


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
