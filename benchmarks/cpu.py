"""Training steps on a CPU in one table: native kernels off and on in turn, and `implicit` in the same run.

    python benchmarks/cpu.py                                  # one thread, CPU seconds, about 5 minutes
    python benchmarks/cpu.py --threads 2 --clock wall         # two threads
    python benchmarks/cpu.py --only default,bpr --rounds 3

Each recipe trains as it comes, on the pairs of Gowalla. Rounds alternate between native kernels off
(SPARRING_NATIVE=0) and on; medians count. `default` starts from random vectors here: a spectral start takes longer than
the steps. implicit's BPR (the extra `bench`) has as many dimensions as ours, and takes its turn in every round.
The last table has the errors of gradients whose products are in bfloat16 (precision=auto), against float64.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from _shared import Pairs, gowalla_lightgcn, gowalla_xir, interactions, table
from sparring import Split, build
from sparring.kernels import chunked, reference
from sparring.kernels.native import library
from sparring.training.loop import Trainer, TrainingProgress
from sparring.training.pairwise_step import pairwise_step

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
RECIPES: dict[str, tuple[Callable[[], Pairs], dict[str, object], int, float]] = {  # data, settings, steps, least ratio
    "default": (gowalla_lightgcn, {"init": "normal"}, 8, 2.0),
    "ssl_pop": (gowalla_xir, {}, 15, 1.8),
    "bir": (gowalla_xir, {}, 15, 1.8),
    "xir": (gowalla_xir, {}, 10, 1.8),
    "bpr": (gowalla_lightgcn, {}, 60, 0.0),
}
AHEAD = 1.3  # claimed: times the pairs of implicit's BPR


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = named.get("flags", named.get("Features", "")).split()
    return f"{named.get('model name', platform.machine())}; {', '.join(flag for flag in FLAGS if flag in flags)}"


class Steps:
    """The steps of a run, one epoch after the other, with native kernels or without."""

    def __init__(self, name: str, data: Pairs, settings: dict[str, object]) -> None:
        train = interactions(data)
        self.trainer = Trainer(
            build(name, train, settings), Split(train), torch.device("cpu"), None, TrainingProgress()
        )
        batches = self.trainer.rows.batches
        self.batches: Iterator[tuple[Tensor, ...]] = chain.from_iterable(batches.steps(e) for e in range(1 << 20))

    def pairs_per_second(self, native: bool, steps: int, clock: Callable[[], float]) -> float:
        trainer, library.active = self.trainer, native
        trainer.direct = pairwise_step(trainer.run, trainer.positives, trainer.optimizers)
        trainer.step(*next(self.batches))  # not counted
        given = [next(self.batches) for _ in range(steps)]
        began = clock()
        for step in given:
            trainer.step(*step)
        return sum(trainer.rows.count(step) for step in given) / (clock() - began)


def implicit_bpr(data: Pairs, threads: int, clock: Callable[[], float]) -> float | None:
    """Pairs per second of implicit's BPR, without its set-up: the difference of two trainings."""
    try:
        from implicit.cpu.bpr import BayesianPersonalizedRanking
        from scipy.sparse import csr_matrix
    except ImportError:
        return None
    ones = np.ones(len(data), np.float32)
    matrix = csr_matrix((ones, (data.users, data.items)), shape=(data.n_users, data.n_items))
    took = []
    for epochs in (1, 3):
        model = BayesianPersonalizedRanking(
            factors=64, learning_rate=0.05, regularization=0.001, iterations=epochs, num_threads=threads, random_state=1
        )
        began = clock()
        model.fit(matrix, show_progress=False)
        took.append(clock() - began)
    return 2 * len(data) / (took[1] - took[0])


def errors(b: int, c: int, d: int) -> list[str]:
    """The largest error of a value, and relative errors of both gradients, in float32 and with half gradients."""
    g = torch.Generator().manual_seed(0)
    q, emb = (10 * torch.nn.functional.normalize(torch.randn(n, d, generator=g), dim=1) for n in (b, c))
    q, log_w = q * 0.5, torch.randn(c, generator=g)
    found = []
    for kind in ("exact", "float32", "half"):
        precise = torch.float64 if kind == "exact" else torch.float32
        x, y = (t.to(precise, copy=True).requires_grad_() for t in (q, emb))
        kernel = reference.weighted_logsumexp if kind == "exact" else chunked.weighted_logsumexp
        with chunked.half_gradients(kind == "half"):
            value = kernel(x, y, log_w.to(precise))
        value.sum().backward()
        found.append([t.double() for t in (value.detach(), x.grad, y.grad)])  # type: ignore[union-attr]
    cells = []
    for mine in found[1:]:
        apart = [float((mine[0] - found[0][0]).abs().max())]
        apart += [float((a - e).norm() / e.norm()) for a, e in zip(mine[1:], found[0][1:], strict=True)]
        cells.append(", ".join(f"{each:.1e}" for each in apart))
    return [f"{b:,} x {c:,}, d = {d}", *cells]


def products(b: int, c: int, d: int, clock: Callable[[], float]) -> list[str]:
    """GFLOP per second of one product of this shape in float32 and in bfloat16."""
    cells = []
    for kind in (torch.float32, torch.bfloat16):
        x, y = torch.randn(b, c).to(kind), torch.randn(c, d).to(kind)
        x @ y
        times = []
        for _ in range(5):
            began = clock()
            x @ y
            times.append(clock() - began)
        cells.append(f"{2 * b * c * d / statistics.median(times) / 1e9:.0f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(RECIPES), help="recipes, separated by commas")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.clock == "cpu" else time.perf_counter
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{processor()}; {given.threads} thread(s), {given.clock} seconds, load {load}", flush=True)
    rows = []
    for name in given.only.split(","):
        source, settings, count, claim = RECIPES[name]
        data = source()
        steps = Steps(name, data, settings)
        off, on, peer = [], [], []
        for _ in range(given.rounds):
            off.append(steps.pairs_per_second(False, count, clock))
            on.append(steps.pairs_per_second(True, count, clock))
            if name == "bpr" and (found := implicit_bpr(data, given.threads, clock)) is not None:
                peer.append(found)
        ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
        cells = [f"{statistics.median(off):,.0f}", f"{statistics.median(on):,.0f}", f"{ratio:.2f}"]
        beside = ""
        if peer:
            ahead = statistics.median(a / b for a, b in zip(on, peer, strict=True))
            beside = f"{statistics.median(peer):,.0f}: {ahead:.2f} times it, at least {AHEAD}: {_said(ahead, AHEAD)}"
        setup = steps.trainer.setup
        shape = f"B = {setup.batches.batch_size:,}, d = {setup.model.dim}, {setup.training.optimizer}"
        wanted = f"at least {claim:g}: {_said(ratio, claim)}" if claim else ""
        rows.append([name, shape, *cells, wanted, beside])
        print(f"{name}: {', '.join(cells)}", flush=True)
    library.active = True
    print()
    print(
        table(["recipe", "setting", "pairs/s, torch", "pairs/s, native", "ratio", "claim", "implicit, pairs/s"], rows)
    )
    print()
    shapes = [(1000, 1000, 64), (2048, 2048, 32), (1000, 4096, 256), (4096, 4096, 128)]
    head = ["product", "float32: value, gradients", "half gradients", "GFLOP/s, float32", "bfloat16"]
    print(table(head, [[*errors(*shape), *products(*shape, clock)] for shape in shapes]))


def _said(found: float, claim: float) -> str:
    return "yes" if found >= claim else "NO"


if __name__ == "__main__":
    main()
