"""Interactions per second on a CPU by batch size and dimension: SSL-Pop, BIR in closed form, XIR and `tables`.

    python benchmarks/cpu_table.py                                        # one thread, CPU seconds
    python benchmarks/cpu_table.py --threads 2 --batches 512,2048,8192 --dims 32,64,128

Complete steps through `sparring.fit` on the training pairs of Gowalla: encode, negatives, loss, backward, row-sparse
Adam, observers. Beside them the share of a step spent in its weighted log-sum-exp, and that as a multiple of its
three matrix products.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from _shared import Clock, Pairs, cpu_seconds, gowalla_xir, interactions, table
from sparring import Split, fit, recipes
from sparring.experiments import bench
from sparring.training.loop import TrainingProgress

RECIPES = ("ssl_pop", "bir", "xir", "tables")


def per_second(name: str, data: Pairs, batch: int, dim: int, steps: int, threads: int, warm_up: int = 2) -> float:
    """Pairs per second of `steps` steps after a warm-up: CPU seconds on one thread, else wall seconds."""
    everything = interactions(data)
    rows = np.random.default_rng(0).permutation(len(data))[: (warm_up + steps) * batch]
    setup = recipes.PAPER.replaced(dim=dim, batch_size=batch, epochs=1, optimizer="row-adam", lr=0.005)
    run = recipes.RECIPES[name](everything, setup)
    clock, spent = Clock(), (0.0, 0.0)

    def tick(epoch: int, step: int, loss: object) -> None:
        nonlocal clock, spent
        if step == warm_up:
            clock = Clock()
        spent = clock.read()

    fit(run, Split(everything.subset(np.sort(rows))), device="cpu", progress=TrainingProgress(step=tick))
    return (len(rows) - warm_up * batch) / spent[0 if threads == 1 else 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", default="512,2048")
    parser.add_argument("--dims", default="32,64,128")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    data, rows = gowalla_xir(), []
    for batch in (int(word) for word in given.batches.split(",")):
        for dim in (int(word) for word in given.dims.split(",")):
            found = [per_second(name, data, batch, dim, given.steps, given.threads) for name in RECIPES]
            rows.append(
                [
                    f"{batch:,}",
                    str(dim),
                    *(f"{pairs:,.0f}" for pairs in found),
                    *kernel(batch, dim, found[0], given.threads),
                ]
            )
    clock = "CPU" if given.threads == 1 else "wall"
    print(f"interactions per {clock} second on {data.source}, row-sparse Adam, {given.threads} thread(s)\n")
    print(table(["B", "d", *RECIPES, "its log-sum-exp, of a step of ssl_pop", "of three products"], rows))


def kernel(batch: int, dim: int, pairs_per_second: float, threads: int) -> tuple[str, str]:
    """The share of a step spent in the weighted log-sum-exp, and its multiple of three matrix products."""
    q, emb, log_w, ids = bench.problem(batch, dim, torch.float32, torch.device("cpu"))
    took = []
    for form in (
        lambda: bench.run(bench.ours(False), q, emb, log_w, ids, 1),
        lambda: bench.products(q.detach(), emb.detach()),
    ):
        form()
        times = []
        for _ in range(5):
            began, wall = cpu_seconds(), Clock()
            form()
            times.append(cpu_seconds() - began if threads == 1 else wall.read()[1])
        took.append(min(times))
    ours = took[0] / 2  # `run` does it twice: once to warm up
    return f"{ours * pairs_per_second / batch:.0%}", f"{ours / took[1]:.2f}"


if __name__ == "__main__":
    main()
