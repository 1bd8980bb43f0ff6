"""Claim: one kernel for unit vectors and one for inner products take a third off a GPU step of id tables with cosines.

    python benchmarks/vectors.py [--recipes ssl_pop,uns,bpr] [--data amazon_beauty]

Each recipe with the tables of the book (d = 64, cosines, item bias, dropout 0.1, B = 2,048), recorded as a CUDA graph,
with these kernels and with PyTorch's operations in their place; the two take turns, and the table has the medians of 15
rounds of an epoch's steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

import sparring as sp
from _shared import DATA, table
from sparring.core import sparse_rows
from sparring.data.interactions import Split
from sparring.experiments.book.plan import read_plan
from sparring.kernels import vectors
from sparring.training.loop import Trainer, TrainingProgress

ROUNDS, WARM = 15, 8
KERNELS = vectors.kernels_for


def none(*tensors: Tensor) -> ModuleType | None:
    return None


def prepared(
    recipe: str, split: Split, kernels: Callable[..., ModuleType | None]
) -> tuple[Trainer, list[tuple[Tensor, ...]]]:
    """A trainer after its first steps, recorded with these kernels, and its other steps."""
    vectors.kernels_for = kernels
    sparse_rows.kernels_for = kernels  # type: ignore[attr-defined]
    run = sp.build(recipe, split.train, {"seed": 0}, read_plan().base("tables"))
    trainer = Trainer(run, split, torch.device("cuda"), None, TrainingProgress())
    trainer.refresh()
    steps = list(trainer.rows.batches.steps(0, 0, trainer.device))[:-1]  # the last has another size
    for step in steps[:WARM]:
        trainer.step(*step)
    return trainer, steps[WARM:]


def timed(trainer: Trainer, steps: list[tuple[Tensor, ...]]) -> float:
    """Milliseconds of a step."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for step in steps:
        trainer.step(*step)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / len(steps) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="ssl_pop,uns,bpr")
    parser.add_argument("--data", default="amazon_beauty", help="a folder in the folder of the data")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("skipped: this benchmark needs a GPU")
    if not (DATA / given.data).exists():
        sys.exit(f"skipped: {DATA / given.data} is absent; SPARRING_DATA names the folder of the data")
    split = sp.split(sp.read(DATA / given.data), "random", valid=0.1, test=0.2, seed=0)
    torch.set_float32_matmul_precision("high")  # as training with precision=tf32 does
    rows = []
    for name in given.recipes.split(","):
        both = [prepared(name, split, kernels) for kernels in (none, KERNELS)]
        times = [[timed(*one) for one in both] for _ in range(ROUNDS)]
        before, now = (statistics.median(column) for column in zip(*times, strict=True))
        met = "yes" if now <= before * 2 / 3 else "NO"
        rows.append([name, f"{before:.3f}", f"{now:.3f}", f"{before / now:.2f}", f"a third less: {met}"])
    print(f"\none step on {given.data}, {torch.cuda.get_device_name()}\n")
    print(table(["recipe", "PyTorch's, ms", "kernels, ms", "times", "claim"], rows))


if __name__ == "__main__":
    main()
