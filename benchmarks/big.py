"""Ten million items, 200 million interactions, one small machine: prepare from Parquet parts and train from disk.

    python benchmarks/big.py --folder FOLDER        # about 2.5 GB of parts, 4 GB more while they are prepared
    python benchmarks/big.py --folder FOLDER --rows 2000000 --items 100000 --queries 50000

Queries are random and items follow Zipf's law: no structure, so only memory and speed mean anything. Each stage runs
in a separate process and prints its wall and CPU time (of all threads; the fairer figure on shared cores) and two
peaks of memory: its own (RssAnon), and everything resident (VmHWM), mapped file pages included, which the system can
take back. The optimiser is row-wise Adagrad, with one number per row: Adam's two moments would triple the tables. The
folder is deleted at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # read when torch is imported: spinning threads are slow on shared cores
LIMIT = 8.0  # GB
PART = 10_000_000  # rows of a Parquet part


class _Enough(Exception):
    """Raised by the progress callback after the requested number of steps."""


class Watch:
    """Time since the last call and peak memory of this process: its own, and with mapped file pages."""

    def __init__(self) -> None:
        self.own, self.wall, self.cpu = 0.0, time.perf_counter(), time.process_time()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.own = max(self.own, _status("RssAnon"))
            time.sleep(0.05)

    def lap(self) -> tuple[float, float]:
        """Wall and CPU seconds since the last call."""
        wall, cpu, self.wall, self.cpu = self.wall, self.cpu, time.perf_counter(), time.process_time()
        return self.wall - wall, self.cpu - cpu

    def tell(self, what: str, rows: int = 0) -> None:
        """Print a line on the work since the last one."""
        wall, cpu = self.lap()
        rate = f"; {rows / wall / 1e6:.3g} million rows per s, {rows / cpu / 1e6:.3g} per CPU s" if rows else ""
        print(f"{what:<44}{wall:8.1f} s, {cpu:8.1f} CPU s   {self}{rate}", flush=True)

    def __str__(self) -> str:
        return f"peak {self.own:5.2f} GB of its own, {_status('VmHWM'):5.2f} with mapped pages"


def _status(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e9


def make(folder: Path, rows: int, items: int, queries: int) -> None:
    """Parquet parts of (user_id, item_id, timestamp), scattered 64-bit ids, popularity 1 / rank^0.8."""
    import numpy as np
    import polars as pl

    folder.mkdir(parents=True)
    for k, first in enumerate(range(0, rows, PART)):
        random, n = np.random.default_rng(k), min(PART, rows - first)
        # the inverse of the continuous law is fast; drawing from ten million probabilities is not
        u = random.random(n)
        rank = (items * u * u * u * u * u).astype(np.int64)
        every = np.arange(items)[
            first * items // rows : (first + n) * items // rows
        ]  # each item at least once over all parts
        rank[: len(every)] = every
        columns = {
            "user_id": random.integers(0, queries, n) * 1_000_003 + 17,
            "item_id": rank * 7_919 + 5,
            "timestamp": 1_600_000_000 + np.sort(random.integers(0, 10**8, n)),
        }
        pl.DataFrame(columns).write_parquet(folder / f"part-{k:03}.parquet", compression="lz4", row_group_size=1 << 20)


def run_make(folder: Path, rows: int, items: int, queries: int) -> None:
    watch = Watch()
    make(folder / "parts", rows, items, queries)
    size = sum(file.stat().st_size for file in (folder / "parts").iterdir()) / 1e9
    watch.tell(f"made {rows:,} rows, {size:.2f} GB of Parquet", rows)


def run_prepare(folder: Path, rows: int) -> None:
    from sparring.data.prepared.preparation import prepare

    watch, whole, stage = Watch(), Watch(), ""

    def tell(name: str, done: int, total: int | None) -> None:
        nonlocal stage
        if name != stage:
            watch.tell(f"  {stage}" if stage else "  import")
            stage = name

    data = prepare(folder / "parts", folder / "prepared", how="random", valid=0.01, test=0.01, progress=tell)
    tell("done", 0, None)
    size = sum(file.stat().st_size for file in (folder / "prepared").iterdir()) / 1e9
    print(f"{data.n_queries:,} queries x {data.n_items:,} items, {len(data):,} pairs, {size:.2f} GB")
    whole.tell("prepared", rows)


def run_train(folder: Path, steps: int, dim: int) -> None:
    import torch

    from sparring import build, fit, read, split
    from sparring.training import checkpoint_writer
    from sparring.training.loop import TrainingProgress

    checkpoint_writer.machine_bytes = lambda: (
        0
    )  # no room for copies: training waits for its checkpoint, as on a machine with 8 GB
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    watch = Watch()
    parts = split(read(folder / "prepared"))
    watch.tell("opened: id maps read, columns mapped")
    run = build("tables", parts.train, {"dim": dim, "optimizer": "row-adagrad", "lr": 0.05})
    watch.tell(f"built: tables of {parts.train.n_queries + parts.train.n_items:,} x {dim}")
    size = run.setup.batches.batch_size

    def step(epoch: int, done: int, loss: Any) -> bool:
        if done == 1:
            watch.tell("began: run folder written, first step done")
        if done == steps:
            watch.tell(f"{steps - 1} steps of {size:,}", (steps - 1) * size)
        if done > steps:
            saved = (folder / "run" / "checkpoint.safetensors").stat().st_size / 1e9
            watch.tell(f"a checkpoint of {saved:.2f} GB")
            raise _Enough
        return done == steps  # a checkpoint follows this step

    with contextlib.suppress(_Enough):
        fit(run, parts, folder / "run", overwrite=True, device="cpu", progress=TrainingProgress(step=step))
    verdict = "within" if max(watch.own, _status("VmHWM")) < LIMIT else "ABOVE"
    print(f"training: {watch} (GB): {verdict} the {LIMIT:g} GB allowed")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--folder", type=Path, required=True, help="working folder; must not exist, deleted at the end"
    )
    options.add_argument("--rows", type=int, default=200_000_000)
    options.add_argument("--items", type=int, default=10_000_000)
    options.add_argument("--queries", type=int, default=4_000_000)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--dim", type=int, default=64)
    options.add_argument("--child", choices=("make", "prepare", "train"), help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.child == "make":
        run_make(asked.folder, asked.rows, asked.items, asked.queries)
    elif asked.child == "prepare":
        run_prepare(asked.folder, asked.rows)
    elif asked.child == "train":
        run_train(asked.folder, asked.steps, asked.dim)
    else:
        if asked.folder.exists():
            sys.exit(f"{asked.folder} exists: give a folder that can be made and deleted")
        try:
            for child in ("make", "prepare", "train"):
                subprocess.run([sys.executable, __file__, *sys.argv[1:], "--child", child], check=True)
        finally:
            shutil.rmtree(asked.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
