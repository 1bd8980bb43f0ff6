"""Fifty million interactions within 8 GB: memory and time of reading, splitting, training, saving and ranking.

    python benchmarks/rows50m.py                    # 50 million rows, 2 million users, 500,000 items; 2 GB of disk
    python benchmarks/rows50m.py --rows 1000000     # the same at a fiftieth, users and items in proportion

Users are random and items follow Zipf's law, with a time: no structure, so only memory and speed mean anything. Each
stage prints the peak so far of its own process (VmHWM, everything ever resident), so writing the file is not
included. Training stops after `--steps`, once the checkpoint of a long epoch has been written as in a real run.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT = 8.0  # GB
USERS_PER_ROW, ITEMS_PER_ROW = 2_000_000 / 50_000_000, 500_000 / 50_000_000


class _Enough(Exception):
    """Raised by the progress callback after the requested number of steps."""


def make(path: Path, rows: int, seed: int = 0) -> None:
    """A Parquet file of (user_id, item_id, timestamp), ids scattered over 64-bit integers."""
    import numpy as np
    import polars as pl

    random = np.random.default_rng(seed)
    users, items = max(int(rows * USERS_PER_ROW), 2), max(int(rows * ITEMS_PER_ROW), 2)
    cdf = np.cumsum(1.0 / np.arange(1, items + 1) ** 0.9)
    drawn = np.searchsorted(cdf, random.random(rows) * cdf[-1]).clip(max=items - 1)
    frame = pl.DataFrame(
        {
            "user_id": random.integers(0, users, rows) * 1_000_003 + 17,
            "item_id": random.permutation(items)[drawn] * 7_919 + 5,
            "timestamp": random.integers(1_600_000_000, 1_700_000_000, rows),
        }
    )
    frame.write_parquet(path)


def peak() -> float:
    """Peak resident GB of this process; from the kernel where possible, since getrusage includes the parent's."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def work(path: Path, out: Path, steps: int, dim: int) -> None:
    """Read, split, train, save and rank a sample of queries; print a line for each."""
    import numpy as np
    import torch

    from sparring import build, evaluate, fit, read, split
    from sparring.training.loop import TrainingProgress

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    began = time.perf_counter()

    def tell(stage: str) -> None:
        nonlocal began
        print(f"{stage:<58}{time.perf_counter() - began:8.1f} s   peak {peak():5.2f} GB", flush=True)
        began = time.perf_counter()

    tell("import")
    data = read(path)
    tell(f"read: {data.n_queries:,} users x {data.n_items:,} items, {len(data):,} pairs")
    parts = split(data, "random", valid=0.1, test=0.2, seed=0)
    del data
    tell("split: 70 % train, 10 % valid, 20 % test, at random per user")
    run = build("tables", parts.train, {"dim": dim, "optimizer": "row-adam"})
    tell(f"build: tables of {parts.train.n_queries + parts.train.n_items:,} x {dim}")
    first: list[float] = []

    def step(epoch: int, done: int, loss: Any) -> bool:
        if not first:
            tell("begin: id maps and seen items written, first step done")
            first.append(time.perf_counter())
        if done >= steps:
            raise _Enough
        return done == steps // 2  # a checkpoint follows this step

    try:
        fit(run, parts, out, overwrite=True, device="cpu", progress=TrainingProgress(step=step))
    except _Enough:
        rate = (steps - 1) * run.setup.batches.batch_size / (time.perf_counter() - first[0])
        size = (out / "checkpoint.safetensors").stat().st_size / 1e9
        tell(f"{steps} steps, {rate / 1e3:,.0f} thousand rows/s with a checkpoint of {size:.2f} GB")
    assert parts.test is not None
    sample = parts.test.subset(np.isin(parts.test.queries, np.unique(parts.test.queries)[:1000]))
    evaluate(run.model, sample, parts.seen_for("test"), (10,), ("recall", "ndcg"))
    tell("ranked the catalogue for 1,000 users")
    verdict = "within" if peak() < LIMIT else "ABOVE"
    print(f"peak {peak():.2f} GB, {verdict} the {LIMIT:g} GB allowed")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=50_000_000)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--dim", type=int, default=32)
    options.add_argument("--child", choices=("make", "work"), help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.child == "make":
        make(asked.folder / "interactions.parquet", asked.rows)
        return
    if asked.child == "work":
        work(asked.folder / "interactions.parquet", asked.folder / "run", asked.steps, asked.dim)
        return
    with tempfile.TemporaryDirectory(prefix="rows50m-") as folder:
        words = [sys.executable, __file__, "--folder", folder]
        words += ["--rows", str(asked.rows), "--steps", str(asked.steps), "--dim", str(asked.dim)]
        # separate processes, so that the peak of one is not the peak of the other
        for child in ("make", "work"):
            began = time.perf_counter()
            subprocess.run([*words, "--child", child], check=True)
            if child == "make":
                size = (Path(folder) / "interactions.parquet").stat().st_size / 1e6
                print(
                    f"made {asked.rows:,} rows, {size:,.0f} MB of Parquet, in {time.perf_counter() - began:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
