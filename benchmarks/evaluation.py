"""CPU seconds, wall time and memory of a full-ranking evaluation: 29,858 x 40,981, d = 64, top 20, seen masked.

    python benchmarks/evaluation.py --threads 1

Ours, with and without the native kernel, beside plain PyTorch (matrix product, mask, topk in blocks of 64 queries)
with the same metrics, and beside the search alone of FAISS' flat index, without mask and metrics. Each is in a separate
process, in turn, round by round; medians. The product is that of all queries with all items in float32, at the best
rate of any shape on this machine. Vectors are random; those of trained models are faster to rank, since their norms
differ. Memory is the growth of the process above data and vectors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from _shared import Clock, Pairs, gowalla_lightgcn, table
from sparring.core.types import Positives
from sparring.evaluation.metrics import LIST_METRICS, METRICS
from sparring.evaluation.ranking import evaluate
from sparring.kernels.native import ranking

K = 20
NAMES = {
    "floor": "one matrix product in float32",
    "ours": "ours, recall and ndcg",
    "torch": "ours without the native kernel",
    "ours-all": "ours, all metrics, by stratum too",
    "plain": "plain torch, recall and ndcg",
    "faiss": "FAISS flat, search alone",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--only", choices=NAMES, help="measure one of them in this process and print it as JSON")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args.threads, args.dim)))
        return
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for _ in range(args.rounds):
        for name in NAMES:
            rounds[name].append(in_own_process(name, args))
    best = {name: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for name, runs in rounds.items()}
    for key in ("recall", "ndcg"):
        for other in ("torch", "plain"):
            if abs(best["ours"][key] - best[other][key]) > 1e-6:
                raise SystemExit(f"{key} differs: ours {best['ours'][key]}, {other} {best[other][key]}")
    source = gowalla_lightgcn().source
    print(
        f"{source}, d = {args.dim}, top {K}, {args.threads} thread(s), median of {args.rounds} "
        f"rounds; load {os.getloadavg()[0]:.1f}\n"
    )
    rows = []
    for name, label in NAMES.items():
        m = best[name]
        ratio = f"{best['plain']['cpu'] / m['cpu']:.2f}"
        rows.append(
            (label, f"{m['cpu']:.2f}", f"{m['wall']:.2f}", ratio, f"{m['memory']:.0f}" if name != "floor" else "")
        )
    print(table(("evaluation", "CPU s", "wall s", "plain / this, CPU", "memory, MB"), rows))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps({"source": source, "threads": args.threads, "dim": args.dim, "rounds": rounds}, indent=1)
        )


def in_own_process(name: str, args: argparse.Namespace) -> dict[str, float]:
    native = {"SPARRING_NATIVE": "0"} if name == "torch" else {}
    command = [sys.executable, __file__, "--only", name, "--threads", str(args.threads), "--dim", str(args.dim)]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": str(args.threads)} | native,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(name: str, threads: int, dim: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    data = gowalla_lightgcn()
    generator = torch.Generator().manual_seed(1)
    model = Vectors(
        torch.randn(data.n_users, dim, generator=generator), torch.randn(data.n_items, dim, generator=generator)
    )
    seen = Positives(*(torch.from_numpy(a) for a in data.csr()))
    if name == "floor":
        return floor(model)
    test = Tests(data)
    ranking.inner_products(model.q[:1], model.items, torch.zeros(1, 1, dtype=torch.int64))  # compiles, if need be
    search = flat(model, threads) if name == "faiss" else None
    before, clock = resident_mb(), Clock()
    if search is not None:
        search()
        value = {"recall": 0.0, "ndcg": 0.0}
    elif name == "plain":
        value = plain(model, data, seen)
    else:
        metrics = ("recall", "ndcg") if name == "ours" else METRICS + LIST_METRICS
        found = evaluate(
            model, test, seen, (K,), metrics, counts=data.item_counts() if name == "ours-all" else None
        ).metrics
        value = {"recall": found[f"recall@{K}"], "ndcg": found[f"ndcg@{K}"]}
    cpu, wall = clock.read()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu": cpu, "wall": wall, "memory": max(0.0, peak - before), **value}


class Vectors:
    def __init__(self, q: torch.Tensor, items: torch.Tensor) -> None:
        self.q, self.items = q, items

    def encode_queries(self, ids: torch.Tensor) -> torch.Tensor:
        return self.q[ids]

    def item_vectors(self) -> torch.Tensor:
        return self.items


class Tests:
    def __init__(self, data: Pairs) -> None:
        self.queries, self.items, self.n_queries = data.test_users, data.test_items, data.n_users


def plain(model: Vectors, data: Pairs, seen: Positives) -> dict[str, float]:
    """A careful user's version: the block's product, seen items set to -inf, topk, hits by lookup."""
    held = np.unique(data.test_users * data.n_items + data.test_items)
    users, n_held = np.unique(held // data.n_items, return_counts=True)
    gain = 1 / np.log2(np.arange(2, K + 2))
    lists = torch.empty(len(users), K, dtype=torch.int64)
    buffer = torch.empty(64, data.n_items)  # reused: fresh blocks cost page faults and fragment the heap
    for first in range(0, len(users), 64):
        rows = torch.from_numpy(users[first : first + 64])
        scores = torch.mm(model.q[rows], model.items.T, out=buffer[: len(rows)])
        hidden = seen.of(rows)
        scores[hidden.rows, hidden.ids] = float("-inf")
        lists[first : first + 64] = torch.topk(scores, K, dim=1).indices
    keys = users[:, None] * data.n_items + lists.numpy()
    hits = held[np.minimum(np.searchsorted(held, keys), len(held) - 1)] == keys
    ndcg = (hits @ gain) / np.cumsum(gain)[np.minimum(n_held, K) - 1]
    return {"recall": float((hits.sum(1) / n_held).mean()), "ndcg": float(ndcg.mean())}


def flat(model: Vectors, threads: int) -> Callable[[], object]:
    import faiss

    faiss.omp_set_num_threads(threads)
    index = faiss.IndexFlatIP(model.items.shape[1])
    index.add(model.items.numpy())
    return lambda: index.search(model.q.numpy(), K)


def floor(model: Vectors) -> dict[str, float]:
    """Seconds of the products of all queries with all items at the rate of the fastest shape."""
    times = []
    for width in (32, 64, 128, 256):
        out = torch.empty(len(model.items), width)
        repeats = 2048 // width
        for first in range(2):  # the first call warms up
            clock = Clock()
            for i in range(repeats):
                torch.mm(model.items, model.q[i * width : (i + 1) * width].T, out=out)
            if first:
                times.append([seconds / (repeats * width) * len(model.q) for seconds in clock.read()])
    cpu, wall = min(times)
    return {
        "cpu": cpu,
        "wall": wall,
        "memory": 0.0,
        "gflops_per_cpu_s": 2e-9 * model.items.numel() * len(model.q) / cpu,
    }


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
