"""Which batch size of `bpr` is best in CPU seconds: pairs per second, and the time to 0.97 of the final NDCG@20.

    python benchmarks/batches.py                    # one thread, Gowalla by LightGCN's split, 64 dimensions
    python benchmarks/batches.py --batches 1024,4096 --epochs 20

Every batch size has the recipe's other settings and the same seed. A tenth of the training pairs is held out; NDCG@20
on them, for a fixed sample of users, is measured after every epoch and not counted. The final NDCG is the highest of
the recipe as it comes, in all its epochs. Between two epochs the time to the bar is interpolated.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch

from _shared import Clock, gowalla_lightgcn, interactions, table
from sparring import Split, build, evaluate, split
from sparring.training.loop import Trainer, TrainingProgress, sample_queries

SHARE = 0.97


def curve(parts: Split, batch: int | None, epochs: int, sample: int, until: float) -> tuple[int, float, list[float]]:
    """The batch size, pairs per CPU second, and NDCG@20 after each epoch, until one reaches `until`."""
    run = build("bpr", parts.train, {} if batch is None else {"batch_size": batch})
    trainer = Trainer(run, Split(parts.train), torch.device("cpu"), None, TrainingProgress())
    assert parts.valid is not None
    held, seen, found = sample_queries(parts.valid, sample, 0), parts.train.positives(), list[float]()
    clock = Clock()

    def measure() -> None:
        found.append(evaluate(run.model, held, seen, (20,), ("ndcg",)).metrics["ndcg@20"])

    while len(found) < epochs and (not found or found[-1] < until):
        trainer.epoch()
        trainer.state.epoch, trainer.state.step, trainer.state.rows = trainer.state.epoch + 1, 0, 0
        clock.leave_out(measure)
    return run.setup.batches.batch_size, len(found) * len(parts.train) / clock.read()[0], found


def epochs_to(bar: float, found: list[float]) -> float | None:
    """Epochs after which a curve that starts at 0 has reached the bar."""
    for at, value in enumerate(found):
        if value >= bar:
            before = found[at - 1] if at else 0.0
            return at + (bar - before) / (value - before)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="256,512,1024,2048,4096,8192,16384")
    parser.add_argument("--epochs", type=int, default=100, help="at most")
    parser.add_argument("--sample", type=int, default=3000, help="users whose lists are measured")
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = split(interactions(gowalla_lightgcn()), "random", valid=0.1, test=0.0, seed=0)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{len(parts.train):,} training pairs, one thread, CPU seconds, load {load}", flush=True)
    size, _, whole = curve(parts, None, given.epochs, given.sample, np.inf)
    final = max(whole)
    print(f"B = {size:,} as it comes: NDCG@20 {final:.4f} after {1 + whole.index(final)} of {len(whole)} epochs")
    rows, times = [], {}
    for batch in map(int, given.batches.split(",")):
        _, rate, found = curve(parts, batch, given.epochs, given.sample, SHARE * final)
        epochs = epochs_to(SHARE * final, found)
        cells = ["never", f"best {max(found):.4f}"]
        if epochs is not None:
            times[batch] = epochs * len(parts.train) / rate
            cells = [f"{epochs:.1f}", f"{times[batch]:.2f}"]
        rows.append([f"{batch:,}", f"{rate:,.0f}", *cells])
        print(", ".join(rows[-1]), flush=True)
    print()
    print(table(["B", "pairs per CPU s", "epochs", f"CPU s to {SHARE} of the final NDCG@20"], rows))
    if times:
        best = min(times, key=lambda each: times[each])
        print(f"\nsoonest: B = {best:,}, {times[best]:.2f} CPU s")


if __name__ == "__main__":
    main()
