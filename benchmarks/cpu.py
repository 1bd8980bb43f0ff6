"""Training steps and exact ranking on a CPU in one table: native kernels off and on in turn, and peers in the same run.

    python benchmarks/cpu.py                                  # one thread, CPU seconds, about 5 minutes
    python benchmarks/cpu.py --scaling                        # two threads beside one, wall clock: on a quiet machine
    python benchmarks/cpu.py --only default,bpr --rounds 3

Each recipe trains as it comes, on the pairs of Gowalla. Rounds alternate between native kernels off
(SPARRING_NATIVE=0) and on; medians count. `default` starts from random vectors here: a spectral start takes longer than
the steps. `ranking` is the top 20 of 40,981 items for 29,858 queries, d = 64. Peers (_cpu_peers.py) take their turn in
every round: BPR of implicit and LightFM with as many dimensions as ours, and the searches of FAISS (flat), implicit and
RecTools. A cell says where one is not installed.
--scaling has OpenMP's default policy; OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=1000 is what `import sparring` sets.
The last table has the errors of gradients whose products are in bfloat16 (precision=auto), against float64.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from _cpu_peers import K, faiss_ranking, implicit_bpr, implicit_ranking, lightfm_bpr, rectools_ranking
from _shared import Pairs, gowalla_lightgcn, gowalla_xir, interactions, table
from sparring import Split, build, kernels
from sparring.core.topk import top_k
from sparring.kernels import chunked, reference
from sparring.kernels.native import library
from sparring.training.loop import Trainer, TrainingProgress
from sparring.training.pairwise_step import PairwiseStep, pairwise_step

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
RECIPES: dict[str, tuple[Callable[[], Pairs], dict[str, object], int, float]] = {  # data, settings, steps, least ratio
    "default": (gowalla_lightgcn, {"init": "normal"}, 16, 2.0),
    "ssl_pop": (gowalla_xir, {}, 40, 1.8),
    "bir": (gowalla_xir, {}, 40, 1.8),
    "xir": (gowalla_xir, {}, 20, 1.8),
    "bpr": (gowalla_lightgcn, {}, 200, 0.0),
    "dns": (gowalla_lightgcn, {}, 60, 0.0),
}
TWICE = 1.7  # claimed: two threads, times the pairs of one
PEERS: dict[str, dict[str, tuple[Callable[..., float | None], float]]] = {  # of a row: peers, and times their rate
    "bpr": {"implicit": (implicit_bpr, 1.3), "LightFM": (lightfm_bpr, 1.0)},
    "ranking": {
        "implicit": (implicit_ranking, 1.0),
        "RecTools": (rectools_ranking, 1.0),
        "FAISS": (faiss_ranking, 1.0),
    },
}


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
        self.direct: dict[tuple[bool, int], PairwiseStep | None] = {}  # each times its first steps, to choose threads
        batches = self.trainer.rows.batches
        self.batches: Iterator[tuple[Tensor, ...]] = chain.from_iterable(batches.steps(e) for e in range(1 << 20))

    def pairs_per_second(self, native: bool, steps: int, clock: Callable[[], float]) -> float:
        trainer, library.active = self.trainer, native
        pairs = trainer.rows.queries, trainer.rows.items
        form = native, torch.get_num_threads()
        if form not in self.direct:
            self.direct[form] = pairwise_step(trainer.run, pairs, trainer.positives, trainer.optimizers)
        trainer.direct = self.direct[form]
        trainer.step(*next(self.batches))  # not counted
        given = [next(self.batches) for _ in range(steps)]
        began = clock()
        for step in given:
            trainer.step(*step)
        return sum(trainer.rows.count(step) for step in given) / (clock() - began)


class Ranking:
    """Exact lists of random vectors of Gowalla's shape."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.q, self.items = (torch.randn(n, 64, generator=g) for n in (29_858, 40_981))

    def queries_per_second(self, native: bool, clock: Callable[[], float]) -> float:
        library.active = native
        began = clock()
        top_k(self.q, self.items, K)
        return len(self.q) / (clock() - began)


def scaling(names: list[str], threads: int, rounds: int) -> None:
    """Pairs per second of the wall clock on one thread and on several, in turn."""
    rows = []
    for name in names:
        source, settings, count, _ = RECIPES[name]
        steps = Steps(name, source(), settings)
        rates: dict[int, list[float]] = {1: [], threads: []}
        for _ in range(rounds):
            for each, found in rates.items():
                torch.set_num_threads(each)
                found.append(steps.pairs_per_second(True, count, time.perf_counter))
        ratio = statistics.median(many / one for one, many in zip(rates[1], rates[threads], strict=True))
        cells = [f"{statistics.median(found):,.0f}" for found in rates.values()]
        rows.append([name, *cells, f"{ratio:.2f}", f"at least {TWICE}: {_said(ratio, TWICE)}"])
        print(f"{name}: {', '.join(rows[-1][1:])}", flush=True)
    print()
    print(table(["recipe", "pairs/s, 1 thread", f"pairs/s, {threads} threads", "ratio", "claim"], rows))


def errors(b: int, c: int, d: int) -> list[str]:
    """The largest error of a value, and relative errors of both gradients, in float32 and with half gradients."""
    g = torch.Generator().manual_seed(0)
    q, emb = (10 * torch.nn.functional.normalize(torch.randn(n, d, generator=g), dim=1) for n in (b, c))
    q, log_w = q * 0.5, torch.randn(c, generator=g)
    found = []
    for kind in ("exact", "float32", "half"):
        precise = torch.float64 if kind == "exact" else torch.float32
        x, y = (t.to(precise, copy=True).requires_grad_() for t in (q, emb))
        kernel = reference.weighted_logsumexp if kind == "exact" else kernels.weighted_logsumexp
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


def measured(
    name: str, clock: Callable[[], float]
) -> tuple[Callable[[bool], float], str, float, tuple[Pairs] | tuple[Tensor, Tensor]]:
    """The rate of a row with native kernels or without, its setting, its claim, and the work for peers."""
    if name == "ranking":
        ranking = Ranking()
        return (
            lambda native: ranking.queries_per_second(native, clock),
            f"top {K}, d = 64, queries",
            0.0,
            (ranking.q, ranking.items),
        )
    source, settings, count, claim = RECIPES[name]
    data = source()
    steps = Steps(name, data, settings)
    setup = steps.trainer.setup
    shape = f"B = {setup.batches.batch_size:,}, d = {setup.model.dim}, {setup.training.optimizer}, pairs"
    return lambda native: steps.pairs_per_second(native, count, clock), shape, claim, (data,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="1, or 2 under --scaling")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join([*RECIPES, "ranking"]), help="rows, separated by commas")
    parser.add_argument("--scaling", action="store_true", help="only this: several threads beside one, wall clock")
    given = parser.parse_args()
    given.threads = given.threads or (2 if given.scaling else 1)
    given.clock = "wall" if given.scaling else given.clock
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.clock == "cpu" else time.perf_counter
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{processor()}; {given.threads} thread(s), {given.clock} seconds, load {load}", flush=True)
    if given.scaling:
        return scaling([name for name in given.only.split(",") if name in RECIPES], given.threads, given.rounds)
    rows = []
    for name in given.only.split(","):
        off, on, beside = list[float](), list[float](), defaultdict[str, list[float]](list)
        measure, setting, claim, work = measured(name, clock)
        for _ in range(given.rounds):
            off.append(measure(False))
            on.append(measure(True))
            for peer, (run, _) in PEERS.get(name, {}).items():
                if (found := run(*work, given.threads, clock)) is not None:
                    beside[peer].append(found)
        ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
        cells = [f"{statistics.median(off):,.0f}", f"{statistics.median(on):,.0f}", f"{ratio:.2f}"]
        wanted = f"at least {claim:g}: {_said(ratio, claim)}" if claim else ""
        peers = []
        for peer, (_, least) in PEERS.get(name, {}).items():
            if peer in beside:
                ahead = statistics.median(a / b for a, b in zip(on, beside[peer], strict=True))
                rate = f"{statistics.median(beside[peer]):,.0f}"
                peers.append(f"{peer} {rate}: {ahead:.2f} times it, at least {least:g}: {_said(ahead, least)}")
            else:
                peers.append(f"{peer}: not installed")
        rows.append([name, setting, *cells, wanted, "; ".join(peers)])
        print(f"{name}: {', '.join([*cells, *peers])}", flush=True)
    library.active = True
    print()
    head = ["work", "setting", "torch, per second", "native", "ratio", "claim", "peers, per second"]
    print(table(head, rows))
    print()
    shapes = [(1000, 1000, 64), (2048, 2048, 32), (1000, 4096, 256), (4096, 4096, 128)]
    head = ["product", "float32: value, gradients", "half gradients", "GFLOP/s, float32", "bfloat16"]
    print(table(head, [[*errors(*shape), *products(*shape, clock)] for shape in shapes]))


def _said(found: float, claim: float) -> str:
    return "yes" if found >= claim else "NO"


if __name__ == "__main__":
    main()
