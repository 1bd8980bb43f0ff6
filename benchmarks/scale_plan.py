"""Claim: the cost model of docs/lab/scale.md predicts bytes, memory and step time of a rank for every sampler.

    python benchmarks/scale_plan.py [--ranks 2,4] [--only "tables;xir"] [--shape 60000,32,1024,512] [--plan]

Trains each recipe for a few steps on synthetic pairs in 2 and 4 processes (gloo) and prints the bytes that a step
hands to a rank from the others: predicted, counted at the collectives, and, where a network namespace can be created
(unshare), the bytes that passed the loopback device with all headers. Then memory: predicted, and the size of a
rank's tensors: parameters, optimiser state, buffers. Then the time of a step, predicted from the rates of the machine
(_rates.py) and measured: CPU time of a rank, which other load does not lengthen, and wall time. --plan prints the
plan for a billion items.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import _rates
from _rates import Rates

N, D, B, C = (int(number) for number in os.environ.get("SCALE_PLAN_SHAPE", "60000,32,1024,512").split(","))  # --shape
STEPS = 4  # counted steps
COMMON: dict[str, Any] = {
    "dim": D,
    "batch_size": B,
    "epochs": 1,
    "optimizer": "row-adagrad",
    "score": "cosine",
    "tau": 0.1,
}
COMMON |= {
    "weight_decay": 0.0,
    "item_bias": False,
    "dropout": 0.0,
    "init": "normal",
    "patience": None,
    "warmup": 0,
    "schedule": "step",
}


@dataclass(frozen=True)
class Wire:
    """Rows that a step of a recipe exchanges and the work it does: the counts of docs/lab/scale.md."""

    n: int  # items, and as many queries
    dim: int
    batch: int
    vectors: float = 0  # gathered with gradient: both ways, 4 D bytes each
    plain: float = 0  # gathered without
    items: float = 0  # rows of the item table that all ranks together look up for a gradient
    numbers: float = 0  # float32 gathered
    sums: float = 0  # float32 summed
    memory: float = 0  # bytes beside the tables
    pairs: float = 0  # of a query and a candidate that are scored and trained, by all ranks together
    far: float = 0  # the same where candidates are too many for a cache
    own: float = 0  # the same for a query's own candidates
    products: float = 0  # pairs that are scored and looked at, without a gradient
    alike: float = 0  # products that every rank computes
    draws: float = 0  # random numbers, which every rank draws for the complete batch
    looked: float = 0  # rows looked up without a gradient
    settings: dict[str, Any] | None = None
    recipe: str = ""
    spread: bool = False  # row-sharded tables

    def bytes(self, ranks: int) -> float:
        """Received by a rank in a step."""
        others = (ranks - 1) / ranks
        vectors = 4 * self.dim * others * (2 * self.vectors + self.plain) + 4 * others * (self.numbers + 2 * self.sums)
        if self.spread:  # ids one way, rows back, and once more with the gradients for the update
            asked = (self.batch + self.items) * (12 * self.dim + 16) + self.looked * (4 * self.dim + 8)
            return vectors + asked / ranks * others
        return vectors + (4 * self.dim + 8) * (ranks - 1) * (self.batch + self.items) / ranks + 16 * (ranks - 1)

    def seconds(self, ranks: int, rates: Rates, launch: float) -> float:
        """Seconds of a step for a rank with its own core; `launch` is the time of its operations on almost no data."""
        shared = self.pairs * rates.pair + self.far * rates.far + self.own * rates.own + self.products * rates.product
        alike, rows = self.alike * rates.product + self.draws * rates.draw, self.batch + self.items
        moved = (
            rows / ranks if self.spread else rows + rows / ranks
        )  # a rank sums its own rows, then updates those of all ranks ranks ranks
        return (
            launch
            + (shared + (rows + self.looked) * rates.look) / ranks
            + alike
            + moved * rates.update
            + self.bytes(ranks) * rates.byte
        )

    def held(self, ranks: int) -> float:
        """Bytes of a rank: tables with their sums, and the sampler's state."""
        return 2 * self.n * (4 * self.dim + 4) / (ranks if self.spread else 1) + self.memory


def plans(n: int, dim: int, b: int, c: int) -> dict[str, Wire]:
    """Every sampler, with c shared candidates."""
    wire, buckets = partial(Wire, n, dim, b), round(2 * b**0.5)
    popular = 12 * n  # log q in float32, its cumulative sum in float64
    shared: dict[str, Any] = {"vectors": c, "items": b + c, "pairs": b * c, "draws": c}
    in_batch: dict[str, Any] = {"vectors": b, "items": b, "pairs": b * b}
    mixed: dict[str, Any] = {"vectors": b + c, "items": b + c, "pairs": b * (b + c), "draws": c}
    both: dict[str, Any] = {**mixed, "sums": b + c, "memory": popular + 8 * n}
    return {
        "tables": wire(**shared, settings={"n": c}),
        "uns": wire(**shared, settings={"n": c}),
        "uns per query": wire(
            items=b + 4 * b, own=4 * b, draws=4 * b, settings={"n": 4, "per_query": True}, recipe="uns"
        ),
        "pns": wire(**shared, memory=popular, settings={"n": c}),
        "bpr": wire(items=b + b, own=b, draws=b),
        "ssl": wire(**in_batch),
        "ssl_pop": wire(**in_batch, memory=popular),
        "g_tower": wire(**in_batch, memory=12 * n),
        "mns": wire(**mixed, memory=popular, settings={"n": c}),
        "bir": wire(**in_batch, memory=popular),
        "xir": wire(**both, settings={"cache_size": c}),
        "cbns": wire(
            **{**in_batch, "pairs": b * (b + 2048)},
            memory=popular + 4 * dim * 2048,
            settings={"size": 2048, "opens": 0},
        ),
        "full_softmax": wire(vectors=n, items=b + n, far=b * n),
        "dns": wire(items=b + b, own=b, products=8 * b, looked=8 * b, draws=8 * b, settings={"n": 8}),
        "mixgcf": wire(items=b + b, own=b, products=8 * b, looked=8 * b, draws=9 * b, settings={"n": 8}),
        # keeping 64 takes three times as long as keeping 16
        "amns": wire(
            **{**mixed, "pairs": 0}, own=64 * b, products=3 * b * (b + c), memory=popular, settings={"n": c, "k": 64}
        ),
        "bmns": wire(
            **{**in_batch, "pairs": b * (b + 256)}, draws=256 * b, alike=256 * b, memory=popular, settings={"n": 256}
        ),
        "fairneg": wire(**shared, numbers=b, memory=16 * n, settings={"n": c}),
        "midx": wire(items=b + 4 * b, own=4 * b, products=32 * 32 * b, draws=8 * b, memory=24 * n, settings={"n": 4}),
        "sce": wire(
            vectors=buckets * 16,
            plain=n + 2 * b,
            items=b + buckets * 16,
            own=16 * b,
            alike=buckets * (n + b + buckets * 16),
            looked=n,
            draws=buckets * dim,
            settings={"n": 16},
        ),
        "slatk": wire(**shared, memory=4 * n, settings={"n": c}),
        "ada_tau": wire(**shared, numbers=b, memory=17 * n, settings={"n": c}),
        "esans": wire(
            vectors=10 * b,
            items=16 * b,
            pairs=20 * b * b,
            own=5 * b,
            draws=80 * b,
            memory=32 * n,
            settings={"codes": "random", "k_primary": 64},
        ),
        "tables, sharded": wire(**shared, settings={"n": c, "tables": "sharded"}, recipe="tables", spread=True),
        "xir, sharded": wire(**both, settings={"cache_size": c, "tables": "sharded"}, recipe="xir", spread=True),
        "dpr": wire(**in_batch),
        "ance": wire(
            vectors=2 * b, items=2 * b, pairs=2 * b * b, draws=b, memory=4 * 50 * n, settings={"k": 50, "start": 0}
        ),
        "ngame": wire(**in_batch, plain=b, products=b * b, memory=4 * dim * n, settings={"size": 8}),
    }


PLANS = plans(N, D, B, C)


def worker(names: list[str], out: Path) -> None:
    import torch
    import torch.distributed as dist

    from sparring.core.ranks import Group, join, leave

    torch.set_num_threads(1)
    ranks = join(torch.device("cpu"))
    assert isinstance(ranks, Group)
    rates = _rates.measure(ranks, N, D, B)
    found: dict[str, Any] = {}
    for name in names:
        launch = _rates.quick(trained(name, ranks, 200, 8 * ranks.world)[1], time.process_time)
        trainer, step = trained(name, ranks, N, B)
        step()  # lazy state
        dist.barrier()
        ranks.wire, wire = {}, loopback()
        for spread in trainer.checkpoints.tables.values():
            spread.ranks.wire = ranks.wire
        for _ in range(STEPS):
            step()
        counted, ranks.wire = sum(ranks.wire.values()) / STEPS, None
        dist.barrier()
        real = (loopback() - wire) / STEPS / ranks.world
        seconds = _rates.quick(step, time.process_time, 15)
        dist.barrier()
        wall = _rates.quick(step, time.perf_counter, 9)
        tensors = sum(t.nbytes for t in [*trainer.modules.parameters(), *trainer.modules.buffers()])
        tensors += sum(v.nbytes for o in trainer.optimizers for state in o.state.values() for v in state.values())
        tensors += sum(t.weight.nbytes + t.sums.nbytes for t in trainer.checkpoints.tables.values())
        found[name] = {"counted": counted, "real": real, "tensors": tensors}
        found[name] |= {"seconds": seconds, "wall": wall, "launch": launch}
        del trainer, step
    if ranks.rank == 0:
        out.write_text(json.dumps({"rates": vars(rates), "found": found}))
    leave()


def trained(name: str, ranks: Any, n: int, batch: int) -> tuple[Any, Callable[[], None]]:
    """A trainer of this case on n items and as many queries, and one step of it."""
    import numpy as np
    import torch

    from sparring.data.interactions import Interactions, Split, Vocabulary
    from sparring.recipes.settings import build
    from sparring.training.loop import Trainer, TrainingProgress

    items = np.random.default_rng(0).permutation(2 * n).astype(np.int32) % n
    data = Interactions(np.arange(2 * n, dtype=np.int32) % n, items, Vocabulary(np.arange(n)), Vocabulary(np.arange(n)))
    plan = PLANS[name]
    settings = {**COMMON, **(plan.settings or {}), "batch_size": batch}
    if batch < B:
        settings |= {key: 8 for key in ("n", "cache_size", "size", "k") if key in settings}
    run = build(plan.recipe or name, data, settings)
    trainer = Trainer(run, Split(data), torch.device("cpu"), None, TrainingProgress(), ranks)
    trainer.set_rate(1.0)
    trainer.refresh()
    batches = itertools.cycle(
        [rows for rows in trainer.rows.batches.epoch(0) if len(rows) == batch]
    )  # the last of an epoch is shorter
    return trainer, lambda: trainer.work(next(batches))


def cores() -> int:
    return len(os.sched_getaffinity(0))


def loopback() -> float:
    """Bytes carried by the loopback device of this network namespace."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return float(line.split(":")[1].split()[0])


def measure(names: list[str], ranks: int, out: Path) -> tuple[dict[str, Any], bool]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        __file__,
        "--worker",
        str(out),
    ]
    command += ["--only", ";".join(names)]
    tool = shutil.which("unshare")
    own = tool is not None and subprocess.run([tool, "-n", "true"], capture_output=True, check=False).returncode == 0
    if own:  # a separate network namespace, so that nothing else is counted
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(out.read_text()), own


def show_plan() -> None:
    """A billion items and as many queries x 128 on 64 GPUs, sharded tables, row-wise Adagrad."""
    n, dim, batch, shared, gpus = 1_000_000_000, 128, 65_536, 8192, 64
    network, matrix, memory = (
        50e9,
        200e12,
        1.5e12,
    )  # per second and GPU: bytes of network, products, bytes of scattered rows
    launch = 4e-3 + 12 * 5e-5  # launched one by one, since steps of several ranks are not recorded; 12 collectives
    score, row = 2 * dim / matrix, 4 * dim / memory
    rates = Rates(3 * score, 3 * score, 3 * score + 3 * row, score, 1e-12, 3 * row, 4 * row, 1 / network)
    print(f"{n:,} items and as many queries x {dim}, batch {batch:,}, {shared:,} shared candidates, {gpus} GPUs")
    print(
        f"tables with their sums: {2 * n * (4 * dim + 4) / gpus / 1e9:.1f} GB per GPU of "
        f"{2 * n * (4 * dim + 4) / 1e12:.2f} TB"
    )
    print(f"{'':17} {'kept':>9} {'wire':>9} {'wire':>9} {'device':>9} {'step':>9} {'pairs per s':>12}")
    for name, whole in plans(n, dim, batch, shared).items():
        if name.endswith("sharded"):
            continue
        plan = replace(whole, spread=True)
        wire = plan.bytes(gpus)
        device = plan.seconds(gpus, rates, 0.0) - wire / network
        step = launch + device + wire / network
        print(
            f"{name:17} {plan.memory / 1e9:6.0f} GB {wire / 1e6:6,.0f} MB "
            f"{1e3 * wire / network:6,.1f} ms {1e3 * device:6,.2f} ms "
            f"{1e3 * step:6,.1f} ms {batch / step / 1e6:10,.1f} M"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--only", default=";".join(PLANS), help="names separated by ;")
    parser.add_argument(
        "--shape", default=f"{N},{D},{B},{C}", help="items (and as many queries), dimensions, batch, shared candidates"
    )
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--plan", action="store_true")
    args = parser.parse_args()
    if args.shape != f"{N},{D},{B},{C}":
        return subprocess.run(
            [sys.executable, *sys.argv], env={**os.environ, "SCALE_PLAN_SHAPE": args.shape}, check=False
        ).returncode
    names = args.only.split(";")
    if args.worker:
        worker(names, args.worker)
        return 0
    if args.plan:
        show_plan()
        return 0
    wrong = []
    for ranks in (int(text) for text in args.ranks.split(",")):
        out = Path(f"/tmp/scale_plan_{os.getpid()}.json")
        measured, own = measure(names, ranks, out)
        out.unlink()
        rates, found = _rates.Rates(**measured["rates"]), measured["found"]
        print(
            f"\n{ranks} ranks; N = {N:,} items and queries, D = {D}, B = {B:,}; kB received per rank "
            "and step; MB of tensors per rank;"
        )
        print("ms of a step: CPU of a rank, and wall time. Rates in ns:", end=" ")
        print(", ".join(f"{key} {1e9 * value:,.2f}" for key, value in vars(rates).items()))
        print(f"{'':17} {'predicted':>10} {'counted':>10} {'ratio':>6} {'loopback':>10}", end="   ")
        print(
            f"{'predicted':>10} {'held':>8} {'ratio':>6}   {'launch':>7} {'predicted':>10} {'CPU':>7} "
            f"{'ratio':>6} {'clock':>7}"
        )
        for name in names:
            plan, seen = PLANS[name], found[name]
            wire, memory, seconds = plan.bytes(ranks), plan.held(ranks), plan.seconds(ranks, rates, seen["launch"])
            ratios = seen["counted"] / wire, seen["tensors"] / memory
            real = f"{seen['real'] / 1e3:10.1f}" if own else f"{'':10}"
            print(
                f"{name:17} {wire / 1e3:10.1f} {seen['counted'] / 1e3:10.1f} {ratios[0]:6.2f} {real}  "
                f" {memory / 1e6:10.1f} "
                f"{seen['tensors'] / 1e6:8.1f} {ratios[1]:6.2f}   {1e3 * seen['launch']:7.1f} {1e3 * seconds:10.1f} "
                f"{1e3 * seen['seconds']:7.1f} {seen['seconds'] / seconds:6.2f} {1e3 * seen['wall']:7.1f}"
            )
            wrong += [f"{name} x{ranks}" for ratio in ratios if not 0.9 <= ratio <= 1.1]
            if ranks <= cores():
                wrong += [f"time of {name} x{ranks}"] * (not 1 / 1.6 <= seen["seconds"] / seconds <= 1.6)
    verdict = "yes" if not wrong else f"NO: {', '.join(dict.fromkeys(wrong))}"
    print(f"\nbytes and memory within a tenth, time within 1.6 times where each rank has a core: {verdict}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
