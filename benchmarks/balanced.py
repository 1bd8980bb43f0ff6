"""CPU seconds of balanced 2-means beside a loop over clusters and scikit-learn's BisectingKMeans.

    python benchmarks/balanced.py --threads 1
    python benchmarks/balanced.py --threads 2 --large        # 1,000,000 x 384: about 8 GB of memory

The loop halves one cluster after another with NumPy, by the same definition but with its own draws. BisectingKMeans
solves another problem, clusters of any size, and stands for the available alternative. Points are drawn from a
mixture of 300 directions.
"""

from __future__ import annotations

import argparse
import math
import resource
import time

import numpy as np
import torch
from torch import Tensor

from sparring.models.clusters.balanced import GAIN, balanced_2means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--points", type=int, default=68_548)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--clusters", type=int, default=8192)
    parser.add_argument("--large", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.large:
        x = points(1_000_000, 384)
        began = time.perf_counter()
        wall, cpu = timed(lambda: balanced_2means(x, 131_072, torch.Generator().manual_seed(0)))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"1,000,000 x 384 into 131,072 clusters: {wall:.0f} s, {cpu:.0f} CPU s, {args.threads} "
            f"thread(s); at most {peak:.1f} GB in all,"
        )
        print(f"of which {x.numel() * 4 / 2**30:.1f} GB are the points ({time.perf_counter() - began:.0f} s)")
        return
    x = points(args.points, args.dim)
    found: list[tuple[str, float, float]] = []
    labels: dict[str, np.ndarray] = {}

    def ours() -> None:
        labels["balanced_2means"] = balanced_2means(x, args.clusters, torch.Generator().manual_seed(0)).numpy()

    def loop() -> None:
        labels["a loop over clusters"] = in_a_loop(x.numpy(), args.clusters, np.random.default_rng(0))

    for name, work in (("balanced_2means", ours), ("a loop over clusters", loop)):
        found.append((name, *timed(work)))
    unit = torch.nn.functional.normalize(x, dim=1).numpy()
    print(f"{args.points:,} x {args.dim} into {args.clusters:,} clusters, {args.threads} thread(s)")
    for name, wall, cpu in found:
        print(
            f"  {name:28} {wall:7.2f} s {cpu:7.2f} CPU s   mean cosine to the own centre "
            f"{closeness(unit, labels[name]):.4f}"
        )
    print(
        f"  the loop takes {found[1][2] / found[0][2]:.1f} times as long; at most 5 CPU s: "
        f"{'yes' if found[0][2] <= 5 else 'NO'}"
    )
    try:
        from sklearn.cluster import BisectingKMeans
    except ImportError:
        print("\nscikit-learn is not installed: no comparison with BisectingKMeans")
        return
    x, clusters = points(100_000, 384), 4096
    cpus = [
        timed(lambda: balanced_2means(x, clusters, torch.Generator().manual_seed(0)))[1],
        timed(lambda: BisectingKMeans(clusters, random_state=0, bisecting_strategy="largest_cluster").fit(x.numpy()))[
            1
        ],
    ]
    print(
        f"\n100,000 x 384 into {clusters} clusters: balanced_2means {cpus[0]:.1f} CPU s, BisectingKMeans {cpus[1]:.1f}"
    )
    print(f"  at least 3 times as fast ({cpus[1] / cpus[0]:.1f} times): {'yes' if cpus[1] > 3 * cpus[0] else 'NO'}")


def points(n: int, dim: int) -> Tensor:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, dim, generator=g)
    centres = torch.randn(300, dim, generator=g)
    for part in x.split(65_536):
        part += centres[torch.randint(300, (len(part),), generator=g)]
    return x


def timed(work) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def in_a_loop(x: np.ndarray, clusters: int, rng: np.random.Generator) -> np.ndarray:
    """Balanced 2-means with one cluster at a time."""
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    level = [np.arange(len(x))]
    while len(level) < clusters:
        level = [half for own in level for half in halves(x[own], own, rng)]
    labels = np.empty(len(x), dtype=np.int64)
    for number, own in enumerate(level):
        labels[own] = number
    return labels


def halves(x: np.ndarray, own: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    centres, best = x[rng.choice(len(x), 2, replace=False)], -math.inf
    half = -(-len(x) // 2)
    while True:
        order = np.argsort(x @ (centres[1] - centres[0]), kind="stable")
        total = np.stack([x[order[:half]].sum(0), x[order[half:]].sum(0)])
        length = np.linalg.norm(total, axis=1)
        if length.sum() / len(x) - best < GAIN:
            return own[order[:half]], own[order[half:]]
        best = length.sum() / len(x)
        centres = total / length[:, None]


def closeness(unit: np.ndarray, labels: np.ndarray) -> float:
    order = np.argsort(labels, kind="stable")
    start = np.flatnonzero(np.r_[True, np.diff(labels[order]) > 0])
    return float(np.linalg.norm(np.add.reduceat(unit[order], start), axis=1).sum() / len(unit))


if __name__ == "__main__":
    main()
