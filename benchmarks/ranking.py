"""Claim: exact top 50 of a catalogue with seen items masked is faster on a GPU than PyTorch's product and topk.

    python benchmarks/ranking.py --device cuda

"plain" multiplies blocks of queries with all items, masks seen items, and calls torch.topk. "blocks" is our way
without Triton, "fused" the Triton kernels, which `sparring.evaluate` uses and which write no scores. The floor is the
product alone, in float32 and in half precision, its result discarded. Lists are compared item by item. Memory is
beyond vectors and lists.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from _shared import table
from sparring.core.topk import top_k
from sparring.core.types import Positives

SHAPES = [(29_858, 40_981, 64), (8192, 1_000_000, 128)]  # queries, items, dimensions
K, SEEN = 50, 30


def plain(q: Tensor, items: Tensor, seen: Positives, block: int) -> Tensor:
    found = []
    for low in range(0, len(q), block):
        rows = torch.arange(low, min(low + block, len(q)), device=q.device)
        scores = q[rows] @ items.T
        hidden = seen.of(rows)
        scores[hidden.rows, hidden.ids] = float("-inf")
        found.append(torch.topk(scores, K, dim=1).indices)
    return torch.cat(found)


def timed(work: Callable[[], Tensor]) -> tuple[Tensor, float, float]:
    """The result, the milliseconds of the better of two calls after a warm-up, and the MiB it takes."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, times, found = torch.cuda.memory_allocated(), [], torch.empty(0)
    for _ in range(2):
        began = time.perf_counter()
        found = work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return found, min(times), (torch.cuda.max_memory_allocated() - held) / 2**20


def near(centres: Tensor, n: int, generator: torch.Generator) -> Tensor:
    at = torch.randint(len(centres), (n,), device="cuda", generator=generator)
    return centres[at] + torch.randn(n, centres.shape[1], device="cuda", generator=generator)


def forms(q: Tensor, items: Tensor, seen: Positives, block: int) -> dict[str, Callable[[], Tensor]]:
    """Every way by its name."""
    who, half_q, half_items = torch.arange(len(q), device="cuda"), q.half(), items.half()

    def product(q: Tensor, items: Tensor) -> Tensor:
        for low in range(0, len(q), block):
            q[low : low + block] @ items.T
        return q

    return {
        "product, float32": lambda: product(q, items),
        "product, half": lambda: product(half_q, half_items),
        "plain": lambda: plain(q, items, seen, block),
        "blocks": lambda: top_k(q, items, K, seen, who, 2048)[1],
        "fused": lambda: top_k(q, items, K, seen, who)[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.device != "cuda" or not torch.cuda.is_available():
        sys.exit("skipped: this benchmark needs a GPU; for a CPU see benchmarks/evaluation.py")
    torch.set_float32_matmul_precision("highest")
    rows = []
    for b, n, d in SHAPES:
        g = torch.Generator("cuda").manual_seed(0)
        centres = torch.randn(300, d, device="cuda", generator=g)
        q, items = (torch.nn.functional.normalize(near(centres, m, g)) for m in (b, n))
        bought = torch.randint(n, (b, SEEN), device="cuda", generator=g).sort(1).values.flatten().int()
        seen = Positives(torch.arange(b + 1, device="cuda") * SEEN, bought)
        ways = forms(q, items, seen, max(64, (1 << 28) // n))
        found = {name: timed(work) for name, work in ways.items()}
        for name, (lists, ms, mib) in found.items():
            same = f"{float((lists == found['blocks'][0]).float().mean()):.6f}" if "product" not in name else ""
            rows.append([f"{b:,} x {n:,}, d = {d}", name, f"{ms:.1f}", f"{mib:,.0f}", same])
        ratio = found["plain"][1] / found["fused"][1]
        print(
            f"{b:,} x {n:,}: plain takes {ratio:.1f} times as long as fused, at least 1: "
            f"{'yes' if ratio >= 1 else 'NO'}",
            flush=True,
        )
    print(f"\ntop {K}, {SEEN} seen items per query, {torch.cuda.get_device_name()}\n")
    print(table(["queries x items", "way", "ms", "MiB", "items listed as by blocks"], rows))


if __name__ == "__main__":
    main()
