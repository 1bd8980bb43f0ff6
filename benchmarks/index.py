"""Lists of every query as Parquet beside the bare ranking loop, and the tuned index beside FAISS called directly.

    python benchmarks/index.py lists --threads 2              # 29,858 queries x 40,988 items x 64, top 100
    python benchmarks/index.py search --items 1000000         # recall against queries/s, then ours beside FAISS

`lists`: the bound is the same blocks through `top_k` without writing; both in turn, round by round, medians.
`search`: vectors are spread around a hundredth as many centres, as learned vectors are; the bare loop calls the same
FAISS index with the same settings on the same batches of 64 queries.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from _shared import Clock, table, zipf
from sparring.core.topk import top_k
from sparring.core.types import Positives
from sparring.data.interactions import Ids, Vocabulary
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.serving.export.lists import write_lists
from sparring.serving.index import Index, Tuned, index_files, tune
from sparring.serving.index.faiss_backends import parameters, require_faiss, widened
from sparring.training.eligibility import Eligibility
from sparring.training.trained import Trained

K, BATCH = 100, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lists", "search"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--recall", type=float, default=0.99)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lists(args) if args.what == "lists" else search(args)


def lists(args: argparse.Namespace) -> None:
    pairs = zipf()
    start, items = pairs.csr()
    seen = Positives(torch.from_numpy(start), torch.from_numpy(items.astype(np.int32)))
    ids = Ids(Vocabulary(np.arange(pairs.n_users)), Vocabulary(np.arange(pairs.n_items)))
    model = Retriever(IdTower(pairs.n_users, args.dim), IdTower(pairs.n_items, args.dim)).eval()
    taken: dict[str, list[tuple[float, float]]] = {"top_k alone": [], "write_lists": []}  # (CPU, wall) seconds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lists.parquet"
        trained = Trained(model, ids, Eligibility(seen), {}, Path(folder))
        for _ in range(args.rounds):
            clock = Clock()
            vectors = model.item_vectors()
            for block in torch.arange(pairs.n_users).split(4096):
                top_k(model.query_vectors(block), vectors, K, seen, block)
            taken["top_k alone"].append(clock.read())
            clock = Clock()
            rows = write_lists(trained, path, K)
            taken["write_lists"].append(clock.read())
        size = path.stat().st_size / 1e6
    medians = {name: [statistics.median(column) for column in zip(*each, strict=True)] for name, each in taken.items()}
    print(
        f"{pairs.n_users:,} x {pairs.n_items:,} x {args.dim}, top {K}, {args.threads} threads, load "
        f"{os.getloadavg()[0]:.1f}; ",
        end="",
    )
    print(f"{rows:,} rows, {size:.0f} MB\n")
    bound = medians["top_k alone"][0]
    shown = [
        (name, f"{cpu:.2f}", f"{wall:.2f}", f"{pairs.n_users / wall:,.0f}", f"{bound / cpu:.2f}")
        for name, (cpu, wall) in medians.items()
    ]
    print(table(("lists of every query", "CPU s", "wall s", "queries/s", "top_k / this, CPU"), shown))


def search(args: argparse.Namespace) -> None:
    faiss = require_faiss()
    faiss.omp_set_num_threads(args.threads)
    vectors, queries = world(args.items, args.dim)
    began = time.perf_counter()
    tuned = tune(vectors, queries, K, args.recall, say=print)
    print(f"tuned in {time.perf_counter() - began:.0f} s\n")
    rows = [(p.kind, p.setting, f"{p.recall:.4f}", f"{p.speed:,.0f}", f"{p.memory / 1e6:,.0f}") for p in tuned.points]
    print(table(("kind", "looks at", f"recall@{K}", "queries/s", "MB"), rows))
    with tempfile.TemporaryDirectory() as folder:
        index_files.write(tuned.index, Path(folder))
        began = time.perf_counter()
        index = Index.load(folder)
        seconds = time.perf_counter() - began
        print(
            f"\n{tuned.chosen.kind}, {tuned.chosen.setting}: held-out recall {tuned.recall:.4f}, "
            f"loaded in {seconds:.2f} s\n"
        )
        beside(index, tuned, queries, args.rounds)


def beside(index: Index, tuned: Tuned, queries: np.ndarray, rounds: int) -> None:
    seen = [np.random.default_rng(b).choice(len(index.ids), 40, replace=False) for b in range(BATCH)]
    batches = [queries[b : b + BATCH] for b in range(0, len(queries) - BATCH + 1, BATCH)]
    ways = {
        "ours": lambda q: index.search(q, K),
        "ours, 40 seen items left out": lambda q: index.search(q, K, exclude=seen),
    }
    if index.ann is not None:
        told = parameters(index.kind, index.effort, K)
        ways = {"bare FAISS": lambda q: index.ann.search(widened(q, index.ann.d), K, params=told), **ways}
    speed: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            for batch in batches:
                way(batch)
            speed[name].append(len(batches) * BATCH / (time.perf_counter() - began))
    best = {name: statistics.median(each) for name, each in speed.items()}
    first = next(iter(best.values()))
    print(
        table(
            ("search", "queries/s", "share"),
            [(name, f"{each:,.0f}", f"{each / first:.2f}") for name, each in best.items()],
        )
    )


def world(n: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((n // 100, dim)).astype(np.float32)

    def around(count: int) -> np.ndarray:
        made = centres[rng.integers(0, len(centres), count)] + 0.5 * rng.standard_normal((count, dim)).astype(
            np.float32
        )
        return np.asarray(made / np.linalg.norm(made, axis=1, keepdims=True))

    return around(n), around(1000)


if __name__ == "__main__":
    main()
