"""Claim: the weighted log-sum-exp costs at most 2 times its three matrix products, in constant memory (one GPU).

    python benchmarks/kernels.py --device cuda [--sizes 8192,16384,65536] [--dim 128] [--precision tf32] [--out kernels.json]

Forward and backward, B = C, each form in turn, the best of several rounds; memory is what it takes beyond inputs and gradients. The floor
is three products of B x C x D in the same precision. "eager" writes out the scores, as PyTorch code does; "chunked" is our kernel without
Triton, "fused" the Triton kernel; "drawn" draws |R| = C counts for each query. Forms that would not fit are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from _shared import table
from sparring.kernels import chunked
from sparring.types import Keys

Form = Callable[[Tensor, Tensor, Tensor, Keys], Tensor]


def eager(q: Tensor, emb: Tensor, log_w: Tensor, keys: Keys) -> Tensor:
    return torch.logsumexp((q @ emb.T + log_w).masked_fill(keys.mask(), -math.inf), 1)


def eager_drawn(q: Tensor, emb: Tensor, log_w: Tensor, keys: Keys) -> Tensor:
    scores = q @ emb.T
    with torch.no_grad():
        chance = torch.softmax((scores + log_w).masked_fill(keys.mask(), -math.inf), 1)
        drawn = torch.multinomial(chance, len(emb), replacement=True)
    return torch.logsumexp(scores.gather(1, drawn), 1)


def forms(c: int) -> dict[str, Form]:
    """Every form that is there, by name; BIR beside plain in-batch."""
    found: dict[str, Form] = {
        "plain: eager": eager,
        "plain: chunked": chunked.weighted_logsumexp,
        "BIR expected: chunked": lambda q, emb, w, keys: chunked.weighted_logsumexp(q, emb, w, keys, float(c)),
        "BIR drawn: eager": eager_drawn,
    }
    try:
        from sparring.kernels import fused
    except ImportError:
        return found
    found["plain: fused"] = fused.weighted_logsumexp
    found["BIR expected: fused"] = lambda q, emb, w, keys: fused.weighted_logsumexp(q, emb, w, keys, float(c))
    seed = torch.tensor([7], device="cuda")
    found["BIR drawn: fused"] = lambda q, emb, w, keys: fused.weighted_logsumexp(q, emb, w, keys, float(c), None, seed)
    if hasattr(torch, "compile"):
        compiled = torch.compile(eager, dynamic=False)
        found["plain: compiled"] = compiled
    return found


def products(q: Tensor, emb: Tensor) -> None:
    """Three products of the size of the scores, a part of the rows at a time so that they fit."""
    step = max(1, (1 << 30) // len(emb))
    for low in range(0, len(q), step):
        part = q[low : low + step]
        scores = part @ emb.T
        scores @ emb
        scores.T @ part


def timed(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Milliseconds of the best round, and the most memory beyond what was held before, in MiB."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    best = math.inf
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best, (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="2048,8192,16384,65536")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--precision", default="tf32", choices=["tf32", "bf16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="only forms whose name holds this")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.device != "cuda" or not torch.cuda.is_available():
        sys.exit("skipped: these figures are of one GPU; benchmarks/in_batch.py has those of a CPU")
    torch.set_float32_matmul_precision("highest" if given.precision == "float32" else "high")
    dtype = torch.bfloat16 if given.precision == "bf16" else torch.float32
    record, rows = [], []
    for size in map(int, given.sizes.split(",")):
        q, emb = (0.3 * torch.randn(2, size, given.dim, device="cuda")).to(dtype).unbind()
        q, emb = q.clone().requires_grad_(), emb.clone().requires_grad_()
        log_w, ids = torch.zeros(size, device="cuda"), torch.arange(size, device="cuda")
        keys, upstream = Keys(ids, ids), torch.ones(size, device="cuda")
        with torch.no_grad():
            floor, _ = timed(lambda q=q, emb=emb: products(q, emb), given.rounds)  # type: ignore[misc]
        rows.append([f"{size:,}", "three products", f"{floor:.2f}", "", "1.00"])
        for name, form in forms(size).items():
            if given.only not in name or (size > 16384 and ("eager" in name or "compiled" in name) and size**2 * 4 * 8 > 100 * 2**30):
                continue

            def work(form: Form = form, q: Tensor = q, emb: Tensor = emb) -> None:
                q.grad = emb.grad = None
                form(q, emb, log_w, keys).backward(upstream)  # noqa: B023

            try:
                milliseconds, memory = timed(work, given.rounds)
            except torch.OutOfMemoryError:
                rows.append([f"{size:,}", name, "does not fit", "", ""])
                continue
            rows.append([f"{size:,}", name, f"{milliseconds:.2f}", f"{memory:,.0f}", f"{milliseconds / floor:.2f}"])
            record.append({"size": size, "form": name, "ms": milliseconds, "MiB": memory, "floor_ms": floor})
    print(f"weighted log-sum-exp, forward and backward, B = C, d = {given.dim}, {given.precision}, {torch.cuda.get_device_name()}\n")
    print(table(["B = C", "form", "ms", "MiB beyond inputs", "of the three products"], rows))
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
