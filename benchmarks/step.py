"""Claim: on one GPU a step of Gowalla takes at most 0.30 ms for SSL-Pop, 0.35 for BIR in closed form and 0.6 for XIR.

    python benchmarks/step.py --device cuda [--recipes ssl_pop,bir,xir,default] [--kernels]

Each recipe with its defaults, B = 2,048: complete epochs through the training loop (batches, encoders, negatives,
loss, backward, optimiser, observers, loss sums), recorded as a CUDA graph; the median epoch after the first.
"launches" and "busy" are the kernels of one step and their time on the device, by torch.profiler; --kernels lists
them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from _shared import gowalla_xir, interactions, table
from sparring import Split, build
from sparring.training.cuda_graph import CudaGraphStep
from sparring.training.loop import Trainer, TrainingProgress

CLAIMS = {"ssl_pop": 0.30, "bir": 0.35, "xir": 0.6}
EPOCHS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipes", default="ssl_pop,bir,xir,default")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a step by time")
    given = parser.parse_args()
    if given.device != "cuda" or not torch.cuda.is_available():
        sys.exit("skipped: this benchmark needs a GPU; for a CPU see benchmarks/in_batch.py")
    pairs = gowalla_xir()
    split, rows, listed = Split(interactions(pairs)), [], []
    for name in given.recipes.split(","):
        run = build(name, split.train, {"epochs": EPOCHS, "patience": None})
        torch.set_float32_matmul_precision("highest" if run.setup.training.precision == "float32" else "high")
        trainer = Trainer(run, split, torch.device("cuda"), None, TrainingProgress())
        times = []
        for _ in range(EPOCHS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            trainer.epoch()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) / len(trainer.rows.batches) * 1e3)
            trainer.state.epoch, trainer.state.step, trainer.state.loss_sum, trainer.state.rows = (
                trainer.state.epoch + 1,
                0,
                0.0,
                0,
            )
        step = trainer.step
        assert isinstance(step, CudaGraphStep)
        took, found = statistics.median(times[1:]), launches(step)
        claim = f"at most {CLAIMS[name]:.2f} ms: {'yes' if took <= CLAIMS[name] else 'NO'}" if name in CLAIMS else ""
        training = run.setup.training
        size, dim = run.setup.batches.batch_size, run.setup.model.dim
        about = f"B = {size:,}, d = {dim}, {training.optimizer}, {training.precision}"
        busy = f"{sum(kernel[0] for kernel in found):.0f}" if found else f"not recorded: {step.why}"
        rows.append([name, about, f"{took:.3f}", f"{sum(kernel[1] for kernel in found):.0f}", busy, claim])
        listed += [f"\n{name}", *(f"{us:8.1f} us {count:5.1f} x  {kernel[:120]}" for us, count, kernel in found)]
    print(f"\none step on {pairs.source}, {torch.cuda.get_device_name()}\n")
    print(table(["recipe", "setting", "ms a step", "launches", "busy, us", "claim"], rows))
    for row in rows:
        if row[-1]:
            print(f"{row[0]} {row[-1]}")
    if given.kernels:
        print("\n".join(listed))


def launches(step: CudaGraphStep, n: int = 20) -> list[tuple[float, float, str]]:
    """(microseconds, launches, name) of the kernels of one recorded step, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    if step.graph is None:
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(n):
            step.graph.replay()
        torch.cuda.synchronize()
    kernels = [
        (each.device_time_total / n, each.count / n, each.key)
        for each in profiled.key_averages()
        if each.device_time_total > 0
    ]
    return sorted(kernels, reverse=True)


if __name__ == "__main__":
    main()
