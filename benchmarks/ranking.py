"""Claim: exact top 50 of a catalogue with seen items masked is faster on a GPU than PyTorch's product and topk.

    python benchmarks/ranking.py --device cuda
    python benchmarks/ranking.py --device cpu --items 1000000

"plain" multiplies blocks of queries with all items, masks seen items, and calls torch.topk. "blocks" is our way
without Triton, "fused" the Triton kernels, which `sparring.evaluate` uses and which write no scores. The floor is the
product alone, in float32 and in half precision, its result discarded. Lists are compared item by item. Memory is
beyond vectors and lists.

On a CPU: CPU milliseconds per query of an exact top 10 by the size of the batch, for items that were prepared once, as
in the service; by the native kernel, by blocks of PyTorch, and by FAISS' flat index. One thread, in turn, medians.
Lists of the first two are compared bit by bit. The products are those of 256 queries with all items alone, in blocks of
64, by PyTorch: a first pass in bf16 or int8 that writes its scores would start from there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from _shared import Clock, table
from sparring.core.topk import prepare, top_k
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


def on_cpu(n: int, d: int, rounds: int = 5) -> None:
    import faiss

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    items = torch.randn(n, d, generator=g)
    flat = faiss.IndexFlatIP(d)
    flat.add(items.numpy())
    prepare(items[:128])  # compiles, if need be
    clock = Clock()
    prepared, facts = prepare(items), prepare(items, queries=0)
    print(f"{n:,} items of {d} dimensions, one thread; prepared once in {clock.read()[0] * 1e3:.0f} CPU ms\n")
    if prepared.packed is None:
        print("the native kernel does not run on this machine: the first column is PyTorch's too\n")
    rows = []
    for b in (1, 8, 32, 256):
        q, calls = torch.randn(b, d, generator=g), max(1, min(64, 5_000_000 // (n * b)))
        found = top_k(q, items, 10, prepared=prepared), top_k(q, items, 10, block=64, prepared=facts)
        if not all(torch.equal(x, y) for x, y in zip(*found, strict=True)):
            raise SystemExit(f"batches of {b}: the two lists differ")
        ways: dict[str, Callable[[], object]] = {
            "native": lambda q=q: top_k(q, items, 10, prepared=prepared),  # type: ignore[misc]
            "blocks": lambda q=q: top_k(q, items, 10, block=64, prepared=facts),  # type: ignore[misc]
            "FAISS flat": lambda q=q: flat.search(q.numpy(), 10),  # type: ignore[misc]
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, work in ways.items():
                clock = Clock()
                for _ in range(calls):
                    work()
                taken[name].append(clock.read()[0] * 1e3 / (calls * b))
        rows.append([str(b), *(f"{statistics.median(times):.3f}" for times in taken.values())])
    print(table(["queries at once", "ours", "without the native kernel", "FAISS flat"], rows))
    small, halves = torch.randint(-127, 128, (n, d), generator=g, dtype=torch.int8), items.bfloat16()
    products: dict[str, Callable[[Tensor], object]] = {
        "float32": lambda q: items @ q.T,
        "bf16": lambda q: halves @ q.bfloat16().T,
        "int8": lambda q: torch._int_mm(small, q.to(torch.int8).T),
    }
    print("\nproducts alone, CPU ms per query: ", end="")
    for name, product in products.items():
        times = []
        for _ in range(rounds):
            clock = Clock()
            for part in torch.randn(256, d, generator=g).split(64):
                product(part)
            times.append(clock.read()[0] * 1e3 / 256)
        print(f"{name} {statistics.median(times):.3f}", end=", " if name != "int8" else "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--items", type=int, default=40_981, help="items, on a CPU")
    given = parser.parse_args()
    if given.device == "cpu":
        on_cpu(given.items, 64)
        return
    if not torch.cuda.is_available():
        sys.exit("skipped: this needs a GPU; --device cpu ranks small batches, benchmarks/evaluation.py large ones")
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
