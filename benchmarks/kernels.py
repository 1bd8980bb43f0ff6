"""Claim: the fused log-sum-exp costs less than 2 times its three matrix products, in constant memory (one GPU).

    python benchmarks/kernels.py --device cuda [--sizes 8192,65536] [--precision tf32,bf16] [--compiled] [--out DIR]

Forward and backward, B = C, the best of several rounds (`sparring bench` measures the same on any machine). The floor
is three products of B x C x D in the same precision: the scores, and the gradients of both sides. "eager" writes out
the scores, as PyTorch code does; "BIR, drawn" is as many draws as candidates for each query. Then the errors of value
and gradients against float64, beside those of PyTorch in the same precision, and a batch of a million against a
million candidates.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from _shared import table
from sparring import kernels
from sparring.core.types import Exclude
from sparring.experiments import bench
from sparring.experiments.report import figures

MOST = {bench.PLAIN: 2.0, bench.EXPECTED: 2.2, bench.DRAWN: 3.0}  # times the three products, at the largest size
MOST_MIB, MILLION = 256, 1 << 20
BEST_PEER = 2.0  # times as fast as the best compiled form


def truth(q: Tensor, emb: Tensor, log_w: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value and both gradients of the sum of values in float64, a block of rows at a time."""
    q, emb = q.detach().double(), emb.detach().double()
    value, grad_q, grad_emb = q.new_empty(len(q)), torch.empty_like(q), torch.zeros_like(emb)
    for low in range(0, len(q), 2048):
        rows = slice(low, low + 2048)
        scores = (q[rows] @ emb.T + log_w.double()).masked_fill_(ids[rows].unsqueeze(1) == ids, -math.inf)
        value[rows] = torch.logsumexp(scores, 1)
        share = (scores - value[rows].unsqueeze(1)).exp_()
        grad_q[rows] = share @ emb
        grad_emb += share.T @ q[rows]
    return value, grad_q, grad_emb


def errors(precision: bench.Precision, dim: int, size: int = 8192) -> list[list[str]]:
    """Largest error of a value, and relative errors of both gradients, ours and PyTorch's."""
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    q, emb, log_w, ids = bench.problem(
        size, dim, torch.bfloat16 if precision == "bf16" else torch.float32, torch.device("cuda")
    )
    exact = truth(q, emb, log_w, ids)
    found = []
    for name, form in (("ours", bench.ours(False)), ("eager", bench.eager)):
        q.grad = emb.grad = None
        value = form(q, emb, log_w, ids)
        value.sum().backward()
        assert q.grad is not None
        assert emb.grad is not None
        worst = float((value.detach().double() - exact[0]).abs().max())
        relative = [
            float((mine.double() - right).norm() / right.norm())
            for mine, right in ((q.grad, exact[1]), (emb.grad, exact[2]))
        ]
        found.append([precision, name, f"{worst:.1e}", *(f"{error:.1e}" for error in relative)])
    return found


def million(dim: int = 64) -> tuple[float, float]:
    """Seconds and GiB beyond inputs and gradients of a million queries against a million candidates."""
    torch.set_float32_matmul_precision("high")
    q, emb, log_w, ids = bench.problem(MILLION, dim, torch.float32, torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, began = torch.cuda.memory_allocated(), time.perf_counter()
    kernels.weighted_logsumexp(q, emb, log_w, Exclude(ids).places(ids)).sum().backward()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds, (torch.cuda.max_memory_allocated() - held - 4 * (q.numel() + emb.numel())) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="2048,8192,16384,65536")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--precision", default="tf32,bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="torch.compile too; it compiles for each size")
    parser.add_argument("--out", type=Path, help="folder for kernels.json and a picture of each precision")
    given = parser.parse_args()
    if given.device != "cuda" or not torch.cuda.is_available():
        sys.exit(
            "skipped: this benchmark needs a GPU; for a CPU see `sparring bench --device cpu` and "
            "benchmarks/in_batch.py"
        )
    sizes, record = [int(size) for size in given.sizes.split(",")], {}
    for precision in given.precision.split(","):
        compiled = given.compiled and precision == "tf32"
        rows = list(bench.measure(torch.device("cuda"), sizes, given.dim, precision, given.rounds, compiled))
        record[precision] = bench.record(rows)
        print(f"\nforward and backward, B = C, d = {given.dim}, {precision}, {torch.cuda.get_device_name()}\n")
        print(table(*((head := bench.cells(rows))[0], head[1:])))
        ours = [row for row in rows if row.size == max(sizes) and row.form == "ours"]
        for row in ours:
            assert row.ratio is not None
            assert row.mib is not None
            print(
                f"{row.method}: at most {MOST[row.method]:g} times three products: "
                f"{'yes' if row.ratio <= MOST[row.method] else 'NO'}"
            )
            print(f"{row.method}: below {MOST_MIB} MiB: {'yes' if row.mib < MOST_MIB else 'NO'}")
        peers = [
            row.ms for row in rows if row.size == max(sizes) and row.form == "torch.compile" and row.ms is not None
        ]
        if peers and ours[0].ms is not None:
            ratio = min(peers) / ours[0].ms
            print(
                f"torch.compile takes {ratio:.1f} times as long, at least {BEST_PEER:g}: "
                f"{'yes' if ratio >= BEST_PEER else 'NO'}"
            )
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            figures.save(
                bench.figure(rows), given.out, f"kernels-{precision}", "time and memory against the size of the batch"
            )
    print("\nerrors against float64, B = C = 8,192\n")
    found = [line for precision in ("tf32", "bf16", "float32") for line in errors(precision, given.dim)]
    print(table(["precision", "form", "largest error of a value", "error of grad q", "error of grad e"], found))
    seconds, gib = million()
    record["million"] = {"seconds": seconds, "GiB": gib}
    print(
        f"\n{MILLION:,} queries against {MILLION:,} candidates, d = 64, tf32: {seconds:.2f} s, "
        f"{gib:.2f} GiB beyond inputs and gradients"
    )
    print(f"a million against a million in less than 2 GiB: {'yes' if gib < 2 else 'NO'}")
    if given.out is not None:
        (given.out / "kernels.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
