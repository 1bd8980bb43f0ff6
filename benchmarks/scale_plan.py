"""Claim: docs/scale.md predicts the bytes on the wire and the memory of a rank, for every sampler, within a tenth.

    python benchmarks/scale_plan.py [--ranks 2,4] [--only "default;xir"] [--plan]

Trains each recipe for a few steps on synthetic pairs in 2 and 4 processes (gloo) and prints, for each, the bytes that a step hands to a
rank from the others: predicted, counted at the collectives, and, where a network namespace can be made (unshare), what really went over
the loopback device with all headers. Then memory: predicted, and what the tensors of a rank take: parameters, optimiser state, buffers.
The last column is milliseconds of a step, on whatever else the machine does. --plan prints the plan for a billion items.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

N, D, B, STEPS = 60_000, 32, 1024, 4  # items (and as many queries), dimensions, batch, steps that are counted
COMMON: dict[str, Any] = {"dim": D, "batch_size": B, "epochs": 1, "optimizer": "row-adagrad", "score": "cosine", "tau": 0.1}
COMMON |= {"weight_decay": 0.0, "item_bias": False, "dropout": 0.0, "init": "normal", "patience": None, "warmup": 0, "schedule": "step"}


@dataclass(frozen=True)
class Wire:
    """What a step of a recipe exchanges, in rows: the numbers of the table in docs/scale.md."""

    vectors: float = 0  # gathered with gradient: there and back, 4 D bytes each way
    plain: float = 0  # gathered without
    items: float = 0  # rows of the item table that all ranks together look up for a gradient
    numbers: float = 0  # float32 gathered
    sums: float = 0  # float32 summed
    memory: float = 0  # bytes beside the tables
    settings: dict[str, Any] | None = None
    recipe: str = ""
    spread: bool = False  # row-sharded tables

    def bytes(self, ranks: int) -> float:
        """Received by a rank in a step."""
        others = (ranks - 1) / ranks
        vectors = 4 * D * others * (2 * self.vectors + self.plain) + 4 * others * (self.numbers + 2 * self.sums)
        if self.spread:  # ids there, rows back, and once more with the gradients for the update
            return vectors + (B + self.items) / ranks * others * (12 * D + 16)
        return vectors + (4 * D + 8) * (ranks - 1) * (B + self.items) / ranks + 16 * (ranks - 1)

    def held(self, ranks: int) -> float:
        """Bytes of a rank: tables with their sums, and what the sampler keeps."""
        return 2 * N * (4 * D + 4) / (ranks if self.spread else 1) + self.memory


POP = 12 * N  # log q in float32, its cumulative sum in float64
PLANS: dict[str, Wire] = {
    "default": Wire(vectors=512, items=B + 512, settings={"n": 512}),
    "uns": Wire(vectors=512, items=B + 512, settings={"n": 512}),
    "uns per query": Wire(items=B + 4 * B, settings={"n": 4, "per_query": True}, recipe="uns"),
    "pns": Wire(vectors=512, items=B + 512, memory=POP, settings={"n": 512}),
    "bpr": Wire(items=B + B),
    "ssl": Wire(vectors=B, items=B),
    "ssl_pop": Wire(vectors=B, items=B, memory=POP),
    "g_tower": Wire(vectors=B, items=B, memory=12 * N),
    "mns": Wire(vectors=B + 512, items=B + 512, memory=POP, settings={"n": 512}),
    "bir": Wire(vectors=B, items=B, memory=POP),
    "xir": Wire(vectors=B + 512, items=B + 512, sums=B + 512, memory=POP + 8 * N, settings={"cache_size": 512}),
    "cbns": Wire(vectors=B, items=B, memory=POP + 4 * D * 2048, settings={"size": 2048}),
    "full_softmax": Wire(vectors=N, items=B + N),
    "dns": Wire(items=B + B, settings={"n": 8}),
    "mixgcf": Wire(items=B + B, settings={"n": 8}),
    "amns": Wire(vectors=B + 512, items=B + 512, memory=POP, settings={"n": 512, "k": 64}),
    "bmns": Wire(vectors=B, items=B, memory=POP, settings={"n": 256}),
    "fairneg": Wire(vectors=512, items=B + 512, numbers=B, memory=16 * N, settings={"n": 512}),
    "midx": Wire(items=B + 4 * B, memory=24 * N, settings={"n": 4}),
    "sce": Wire(vectors=64 * 16, plain=N + 2 * B, items=B + 64 * 16, settings={"n": 16}),
    "slatk": Wire(vectors=512, items=B + 512, memory=4 * N, settings={"n": 512}),
    "ada_tau": Wire(vectors=512, items=B + 512, numbers=B, memory=17 * N, settings={"n": 512}),
    "esans": Wire(vectors=10 * B, items=B + 10 * B + 5 * B, memory=32 * N, settings={"codes": "random", "k_primary": 64}),
    "default, sharded": Wire(vectors=512, items=B + 512, settings={"n": 512, "tables": "sharded"}, recipe="default", spread=True),
    "xir, sharded": Wire(
        vectors=B + 512,
        items=B + 512,
        sums=B + 512,
        memory=POP + 8 * N,
        settings={"cache_size": 512, "tables": "sharded"},
        recipe="xir",
        spread=True,
    ),
    "dpr": Wire(vectors=B, items=B),
    "ance": Wire(vectors=2 * B, items=2 * B, memory=4 * 50 * N, settings={"k": 50, "start": 0}),
    "ngame": Wire(vectors=B, plain=B, items=B, memory=4 * D * N, settings={"size": 8}),
}


def worker(names: list[str], out: Path) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    from sparring.data.interactions import Interactions, Split, Vocabulary
    from sparring.dist import Group, join
    from sparring.settings import build
    from sparring.train import Progress, _Trainer

    ranks = join(torch.device("cpu"))
    assert isinstance(ranks, Group)
    rng = np.random.default_rng(0)
    queries, items = np.arange(2 * N, dtype=np.int32) % N, rng.permutation(2 * N).astype(np.int32) % N
    ids = Vocabulary(np.arange(N))
    data = Interactions(queries, items, ids, ids)
    found: dict[str, Any] = {}
    for name in names:
        plan = PLANS[name]
        run = build(plan.recipe or name, data, {**COMMON, **(plan.settings or {})})
        trainer = _Trainer(run, Split(data), torch.device("cpu"), None, Progress(), ranks)
        trainer.set_rate(1.0)
        trainer.refresh()
        batches = trainer.batches.epoch(0)
        trainer.work(next(batches))  # lazy state
        dist.barrier()
        ranks.wire, wire = {}, loopback()
        for spread in trainer.keeper.tables.values():
            spread.ranks.wire = ranks.wire
        began = time.perf_counter()
        for _ in range(STEPS):
            trainer.work(next(batches))
        counted, ranks.wire = ranks.wire, None
        seconds = (time.perf_counter() - began) / STEPS
        dist.barrier()
        real = (loopback() - wire) / STEPS / ranks.world
        tensors = sum(t.nbytes for t in [*trainer.modules.parameters(), *trainer.modules.buffers()])
        tensors += sum(v.nbytes for o in trainer.optimizers for state in o.state.values() for v in state.values())
        tensors += sum(t.weight.nbytes + t.sums.nbytes for t in trainer.keeper.tables.values())
        found[name] = {"counted": sum(counted.values()) / STEPS, "real": real, "seconds": seconds, "tensors": tensors}
        del run, trainer, batches
    if ranks.rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def loopback() -> float:
    """Bytes that the loopback device has carried in this network namespace."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return float(line.split(":")[1].split()[0])


def measure(names: list[str], ranks: int, out: Path) -> tuple[dict[str, Any], bool]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__, "--worker", str(out)]
    command += ["--only", ";".join(names)]
    tool = shutil.which("unshare")
    own = tool is not None and subprocess.run([tool, "-n", "true"], capture_output=True, check=False).returncode == 0
    if own:  # a network of its own, so that nothing else is counted
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(out.read_text()), own


def plan() -> None:
    """A billion items and as many queries x 128 on 64 GPUs, B = 65,536, row-wise Adagrad, sharded tables; NVLink inside a machine of 8."""
    items, queries, dim, batch, shared, gpus = 1e9, 1e9, 128, 65_536, 8192, 64
    network, matrix = 50e9, 200e12  # bytes per second and rank over the network (400 Gb/s each), products in bf16 or TF32 that are reached
    row = 4 * dim + 4
    print(f"\n{items:.0e} items and {queries:.0e} queries x {dim}, batch {batch:,}, {shared:,} shared candidates, {gpus} GPUs")
    print(f"  tables with their sums, per rank: {(items + queries) * row / gpus / 1e9:.1f} GB of {(items + queries) * row / 1e12:.2f} TB")
    print(f"  per item on every rank: bias 8, popularity 12, occurrences of XIR 8 bytes: {items * 28 / 1e9:.0f} GB with all three")
    looked = (batch + batch + shared) / gpus
    exchange = looked * (2 * (8 + 4 * dim) + 4 * dim)
    gathered = 2 * 4 * dim * (batch + shared)
    print(f"  wire per step and rank: rows {exchange / 1e6:.1f} MB, vectors there and back {gathered / 1e6:.1f} MB")
    wire = (exchange + gathered) / network
    scores = 6 * batch / gpus * (batch + shared) * dim / matrix
    print(f"  time per step: wire {1e3 * wire:.2f} ms, scores {1e3 * scores:.2f} ms, collectives 12 x 0.05 = 0.60 ms")
    total = wire + scores + 6e-4
    rate = batch / total
    print(f"  together {1e3 * total:.1f} ms: {rate / 1e6:.0f} million pairs a second; a billion pairs in {1e9 / rate:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--only", default=";".join(PLANS), help="names with ; between them")
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--plan", action="store_true")
    args = parser.parse_args()
    names = args.only.split(";")
    if args.worker:
        worker(names, args.worker)
        return 0
    if args.plan:
        plan()
        return 0
    wrong = []
    for ranks in (int(text) for text in args.ranks.split(",")):
        out = Path(f"/tmp/scale_plan_{os.getpid()}.json")
        found, own = measure(names, ranks, out)
        out.unlink()
        print(f"\n{ranks} ranks; N = {N:,} items and queries, D = {D}, B = {B:,}; kB received per rank and step; MB of tensors per rank")
        print(f"{'':17} {'predicted':>10} {'counted':>10} {'ratio':>6} {'loopback':>10}", end="   ")
        print(f"{'predicted':>10} {'held':>8} {'ratio':>6} {'ms':>8}")
        for name in names:
            wire, seen = PLANS[name].bytes(ranks), found[name]
            memory = PLANS[name].held(ranks)
            ratios = seen["counted"] / wire, seen["tensors"] / memory
            real = f"{seen['real'] / 1e3:10.1f}" if own else f"{'':10}"
            print(
                f"{name:17} {wire / 1e3:10.1f} {seen['counted'] / 1e3:10.1f} {ratios[0]:6.2f} {real}   {memory / 1e6:10.1f} "
                f"{seen['tensors'] / 1e6:8.1f} {ratios[1]:6.2f} {1e3 * seen['seconds']:8.1f}"
            )
            wrong += [f"{name} x{ranks}" for ratio in ratios if not 0.9 <= ratio <= 1.1]
    print(f"\nwithin a tenth: {'yes' if not wrong else 'NO: ' + ', '.join(dict.fromkeys(wrong))}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
