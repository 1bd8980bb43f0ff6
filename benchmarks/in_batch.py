"""Our in-batch recipes against a plain PyTorch loop that does what the XIR release does: ratio of pairs per second.

Both train the same model on the same pairs: d = 32, B = 2048, N(0, 1) tables, dense Adam with coupled weight decay,
the release's semantics (form="release": the positive stays among its negatives, the cache draws from the items of the
step). Ours is timed through `sparring.fit`, the release loop through release_loop.py; rounds alternate, and the
median round of each counts. On one thread the ratio is of CPU seconds, on more threads of wall seconds.

The release computes in float64, and so does its loop here: the ratio is what a user of the release gains, not a
comparison with the best that PyTorch can do. Against a float32 loop and against a careful one it is smaller
(docs/lab/speed.md).

    python benchmarks/in_batch.py                  # one thread, CPU seconds
    python benchmarks/in_batch.py --threads 2      # two threads, wall seconds
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import numpy as np
import torch

import release_loop
from _shared import Clock, Pairs, gowalla_xir, interactions, table
from sparring import Split, fit, recipes
from sparring.training.loop import TrainingProgress

# our recipe, its arguments, the method of the release loop, and the least ratio we claim
COMPARED = [
    ("ssl", {}, "ssl", None),
    ("ssl_pop", {}, "ssl_pop", 3.0),
    ("mns", {}, "mns", None),
    ("g_tower", {}, "g_tower", None),
    ("bir", {}, "bir", 10.0),
    ("bir", {"draw": "systematic"}, "bir", None),
    ("xir", {"lam": 0.2}, "xir", 10.0),
]
SETUP = recipes.PAPER.replaced(lr=0.01, epochs=1, seed=10)


@dataclass(frozen=True)
class Cost:
    """Seconds per training pair."""

    cpu: float
    wall: float


def ours(name: str, arguments: dict[str, object], data: Pairs, n_steps: int, warm_up: int = 3) -> Cost:
    """The cost of n_steps steps of `fit` after a warm-up."""
    everything = interactions(data)
    rows = np.random.default_rng(0).permutation(len(data))[: (warm_up + n_steps) * SETUP.batches.batch_size]
    run = recipes.RECIPES[name](everything, SETUP, form="release", **arguments)
    clock, spent = Clock(), (0.0, 0.0)

    def tick(epoch: int, step: int, loss: torch.Tensor) -> None:
        nonlocal clock, spent
        if step == warm_up:
            clock = Clock()
        spent = clock.read()

    fit(run, Split(everything.subset(np.sort(rows))), device="cpu", progress=TrainingProgress(step=tick))
    pairs = len(rows) - warm_up * SETUP.batches.batch_size
    return Cost(spent[0] / pairs, spent[1] / pairs)


def release(method: str, data: Pairs, n_steps: int) -> Cost:
    ran = release_loop.steps(method, data, n_steps)
    return Cost(ran.cpu / ran.pairs, ran.wall / ran.pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="our steps per round; the release loop takes a quarter")
    parser.add_argument("--recipes", default="ssl,ssl_pop,bir,xir", help="or: all")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    data = gowalla_xir()
    clock = "CPU" if given.threads == 1 else "wall"
    print(
        f"in-batch recipes on {data.source}: B = 2048, d = 32, dense Adam, {given.threads} thread(s), {clock} seconds"
    )
    rows = []
    for name, arguments, method, claim in COMPARED:
        if given.recipes != "all" and name not in given.recipes.split(","):
            continue
        pairs = [
            (release(method, data, max(given.steps // 4, 2)), ours(name, arguments, data, given.steps))
            for _ in range(given.rounds)
        ]
        theirs, mine = ([getattr(cost, clock.lower()) for cost in side] for side in zip(*pairs, strict=True))
        ratios = sorted(a / b for a, b in zip(theirs, mine, strict=True))
        rows.append(
            [
                name + "".join(f" {key}={value}" for key, value in arguments.items()),
                f"{1 / statistics.median(theirs):,.0f}",
                f"{1 / statistics.median(mine):,.0f}",
                f"{statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})",
                f"at least {claim:g}: {'yes' if statistics.median(ratios) >= claim else 'NO'}" if claim else "",
            ]
        )
    print(
        table(
            ["recipe", f"release loop, pairs per {clock} s", f"ours, pairs per {clock} s", "ratio (range)", "claim"],
            rows,
        )
    )


if __name__ == "__main__":
    main()
