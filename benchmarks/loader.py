"""Rows per second and core of the training loaders: from files by blocks, from memory, and the floor.

    python benchmarks/loader.py                     # 200 million rows, 1.6 GB in the temporary folder
    python benchmarks/loader.py --rows 20000000

Each line counts (query, item) pairs put into batches of int64 ids, as a training step takes them, per CPU second of
one thread. The floor is copying as many rows in order with numpy, from the same arrays, without shuffle or lookup.
The files were just written, so they are in the page cache where memory allows; rows per wall second show where they
are not.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from _shared import table
from sparring.data.batches import BlockBatches, RandomBatches
from sparring.data.prepared.format import ColumnWriter

GOAL = 5e6  # rows per second of a core


def write(folder: Path, rows: int) -> None:
    """Two columns as `sparring prepare` writes them: queries ascending, about 20 items each."""
    random, step = np.random.default_rng(0), 1 << 24
    columns = {name: ColumnWriter(folder / f"{name}.npy", np.dtype(np.int32), rows) for name in ("queries", "items")}
    for first in range(0, rows, step):
        n = min(step, rows - first)
        columns["queries"].put(first, (np.arange(first, first + n) // 20).astype(np.int32))
        columns["items"].put(first, random.integers(0, 10_000_000, n, dtype=np.int32))
    for column in columns.values():
        column.close()


def taken(batches: Iterator[Tensor], queries: Tensor, items: Tensor) -> Iterator[int]:
    for rows in batches:
        queries[rows].long()
        items[rows].long()
        yield len(rows)


def copied(queries: np.ndarray, items: np.ndarray, size: int) -> Iterator[int]:
    for first in range(0, len(queries), size):
        queries[first : first + size].astype(np.int64)
        items[first : first + size].astype(np.int64)
        yield min(size, len(queries) - first)


def rate(sizes: Iterator[int]) -> tuple[float, float, int]:
    """Rows per CPU second and per wall second."""
    cpu, wall = time.process_time(), time.perf_counter()
    rows = sum(sizes)
    return rows / (time.process_time() - cpu), rows / (time.perf_counter() - wall), rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=200_000_000)
    options.add_argument("--batch", type=int, default=2048)
    options.add_argument("--take", type=int, default=40_000_000, help="rows of an epoch to time")
    asked = options.parse_args()
    torch.set_num_threads(1)
    steps = -(-min(asked.take, asked.rows) // asked.batch)
    lines = []
    with tempfile.TemporaryDirectory(prefix="loader-") as name:
        folder = Path(name)
        write(folder, asked.rows)
        mapped = [np.load(folder / f"{column}.npy", mmap_mode="c") for column in ("queries", "items")]
        files = [torch.from_numpy(column) for column in mapped]
        floor = rate(itertools.islice(copied(*mapped, asked.batch), steps))
        blocks = BlockBatches(asked.rows, asked.batch)
        found = {"files, blocks shuffled (BlockBatches)": rate(itertools.islice(taken(blocks.epoch(0), *files), steps))}
        found["files, the same after a resume"] = rate(
            itertools.islice(taken(blocks.epoch(1, len(blocks) // 3), *files), steps)
        )
        kept = min(asked.rows, 50_000_000)  # a full shuffle pays for its complete permutation, so all of it is counted
        memory = [torch.from_numpy(np.array(column[:kept])) for column in mapped]
        found[f"memory, fully shuffled (RandomBatches), {kept:,} rows"] = rate(
            taken(RandomBatches(kept, asked.batch).epoch(0), *memory)
        )
        found["files, in order: the floor"] = floor
    for label, (cpu, wall, rows) in found.items():
        lines.append([label, f"{rows:,}", f"{cpu / 1e6:.1f}", f"{wall / 1e6:.1f}", f"{floor[0] / cpu:.1f}"])
    print(f"{asked.rows:,} rows in files, batches of {asked.batch:,}, one thread")
    print(table(["rows from", "rows", "million rows per CPU s", "per wall s", "times the floor's time"], lines))
    best = found["files, blocks shuffled (BlockBatches)"][0]
    verdict = "at least" if best >= GOAL else "BELOW"
    print(f"{best / 1e6:.1f} million rows per second of a core, {verdict} the {GOAL / 1e6:g} million asked for")


if __name__ == "__main__":
    main()
