"""Milliseconds of one optimiser step on a large embedding table: row rules, PyTorch's, and ways to sum duplicated rows.

    python benchmarks/optimisers.py --threads 1

All rows of a table are timed in one run, interleaved round by round, because other work on the machine changes
absolute times; the ratios hold. The floor is the time of a plain copy of the bytes that the rule must read and write.
CPU time, median of the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparring.core.sparse_rows import sum_rows
from sparring.training.row_optimizers import RowAdagrad, RowAdam


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--ids",
        choices=("uniform", "zipf"),
        default="uniform",
        help="uniform has the most distinct rows, the worst case",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    g = torch.Generator().manual_seed(0)
    batches = [draw(args.ids, args.rows, args.batch, g) for _ in range(args.rounds + 3)]
    values = torch.randn(args.batch, args.dim, generator=g)
    distinct = sum(torch.unique(ids).numel() for ids in batches) / len(batches)
    of = f"batch {args.batch:,} of {args.ids} ids, {distinct:,.0f} distinct"
    print(f"{args.rows:,} x {args.dim} float32, {of}, {args.threads} thread(s)\n")

    rules: dict[str, tuple[Callable[[nn.Parameter], torch.optim.Optimizer], bool]] = {
        "RowAdam": (lambda p: RowAdam([p]), True),
        "RowAdagrad": (lambda p: RowAdagrad([p]), True),
        "torch SparseAdam": (lambda p: torch.optim.SparseAdam([p]), True),
        "torch Adagrad, sparse": (lambda p: torch.optim.Adagrad([p]), True),
        "torch Adam, dense, fused": (lambda p: torch.optim.Adam([p], fused=True), False),
        "torch Adam, dense": (lambda p: torch.optim.Adam([p]), False),
    }
    steps = {name: stepper(args.rows, args.dim, values, make, sparse) for name, (make, sparse) in rules.items()}
    times = timed(steps, batches)
    row_bytes = distinct * args.dim * 4
    floor = copy_ms(args.batch * args.dim * 4) / (args.batch * args.dim * 4)
    floors = {"RowAdam": 6 * row_bytes, "RowAdagrad": 2 * row_bytes}
    table(times, times["RowAdam"], "RowAdam", {name: floor * size / 2 for name, size in floors.items()})

    print("\nsumming the duplicated rows of one gradient")
    shape = (args.rows, args.dim)
    ways: dict[str, Callable[[Tensor], object]] = {
        "stable sort + embedding_bag (ours)": lambda ids: sum_rows(coo(ids, values, shape)),
        "unique + index_add_": lambda ids: unique_add(ids, values),
        "sparse coalesce()": lambda ids: coo(ids, values, shape).coalesce(),
        "sort + segment_reduce": lambda ids: segment(ids, values),
    }
    times = timed(ways, batches)
    table(times, times["stable sort + embedding_bag (ours)"], "ours", {})


def draw(kind: str, rows: int, batch: int, g: torch.Generator) -> Tensor:
    if kind == "uniform":
        return torch.randint(0, rows, (batch,), generator=g)
    return (rows ** torch.rand(batch, generator=g, dtype=torch.float64)).long() - 1  # density ~ 1 / rank


def coo(ids: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_coo_tensor(ids[None], values, shape, check_invariants=False)


def stepper(
    rows: int, dim: int, values: Tensor, make: Callable[[nn.Parameter], torch.optim.Optimizer], sparse: bool
) -> Callable[[Tensor], object]:
    """One step with this rule on its own table and state; the gradient is given, only the rule is timed."""
    parameter = nn.Parameter(torch.zeros(rows, dim))
    optimizer = make(parameter)
    parameter.grad = None if sparse else torch.full((rows, dim), 1e-3)

    def step(ids: Tensor) -> None:
        if sparse:
            parameter.grad = coo(ids, values, (rows, dim))
        optimizer.step()

    return step


def unique_add(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    rows, inverse = torch.unique(ids, return_inverse=True)
    return rows, torch.zeros(len(rows), values.shape[1]).index_add_(0, inverse, values)


def segment(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    ordered, order = torch.sort(ids)
    rows, count = torch.unique_consecutive(ordered, return_counts=True)
    return rows, torch.segment_reduce(values.index_select(0, order), "sum", lengths=count)


def timed(steps: dict[str, Callable[[Tensor], object]], batches: list[Tensor]) -> dict[str, float]:
    """Median CPU milliseconds of each, a round of all for each batch."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for at, ids in enumerate(batches):
        for name, step in steps.items():
            begin = time.process_time()
            step(ids)
            if at >= 3:
                taken[name].append((time.process_time() - begin) * 1e3)
    return {name: sorted(values)[len(values) // 2] for name, values in taken.items()}


def copy_ms(size: int, pool: int = 1 << 28) -> float:
    """Milliseconds to read and write `size` bytes that are in no cache: consecutive parts of a large array."""
    source, target = torch.zeros(pool, dtype=torch.uint8), torch.zeros(pool, dtype=torch.uint8)
    parts = range(0, pool - size, size)
    start = time.process_time()  # one copy takes less than a tick of some clocks
    for begin in parts:
        target[begin : begin + size].copy_(source[begin : begin + size])
    return (time.process_time() - start) * 1e3 / len(parts)


def table(times: dict[str, float], unit: float, name: str, floors: dict[str, float]) -> None:
    print(f"{'':38s} {'CPU ms':>9s}   x {name}   x floor by bytes")
    for what, taken in sorted(times.items(), key=lambda pair: pair[1]):
        limit = f"{taken / floors[what]:.1f} ({floors[what]:.2f} ms)" if what in floors else ""
        print(f"{what:38s} {taken:9.3f}   {taken / unit:>{len(name) + 2}.2f}   {limit}")


if __name__ == "__main__":
    main()
