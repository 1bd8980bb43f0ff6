"""Cost of a training step: towers of histories and sequences beside id tables, in turn.

    python benchmarks/histories.py --device cuda
    python benchmarks/histories.py --device cpu --threads 1

`tables` on ML-1M, 64 dimensions, 2,048 rows of a batch, 2,048 uniform negatives, 50 items of history (200 for sequence
models). Claim: a history, whatever pools it and whichever rows share it, costs at most 1.5 times the step of an id
table on a GPU, and at most twice on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import time
from statistics import median
from typing import Any

import torch

from _shared import DATA, table
from sparring import Split, build, read, split
from sparring.training.loop import Trainer, TrainingProgress

CASES: dict[str, dict[str, Any]] = {
    "ids": {"model": "ids"},
    "history, mean": {"model": "history"},
    "history, sum, own table": {"model": "history", "pooling": "sum", "history_table": "own"},
    "history, attention": {"model": "history", "pooling": "attention"},
    "history, mean, rows=sequences": {"model": "history", "rows": "sequences"},
    "history, attention, rows=sequences": {"model": "history", "pooling": "attention", "rows": "sequences"},
    "sets": {"model": "sets", "history": 50},
    "sasrec": {"model": "sasrec", "history": 200},
    "ligr": {"model": "ligr", "history": 200},
    "hstu": {"model": "hstu", "history": 200},
}


def milliseconds(parts: Split, settings: dict[str, Any], device: torch.device, steps: int) -> tuple[float, str]:
    """The time of a step after the first ones, and why it is not a CUDA graph, if it is not."""
    run = build("tables", parts.train, {"history": 50, **settings, "batch_size": 2048, "dim": 64})
    trainer = Trainer(run, parts, device, None, TrainingProgress())
    epochs = (trainer.rows.batches.steps(epoch, 0, device) for epoch in itertools.count())
    made = list(itertools.islice(itertools.chain.from_iterable(epochs), steps + 6))
    for step in made[:6]:
        trainer.step(*step)
    wait(device)
    began = time.perf_counter()
    for step in made[6:]:
        trainer.step(*step)
    wait(device)
    return (time.perf_counter() - began) / steps * 1e3, getattr(trainer.step, "why", None) or ""


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    parts = split(read(DATA / "ml1m_mm" / "interactions.parquet"), "leave-last-out")
    times: dict[str, list[float]] = {name: [] for name in CASES}
    notes: dict[str, str] = {}
    for _ in range(given.rounds):
        for name, settings in CASES.items():
            spent, notes[name] = milliseconds(parts, settings, device, 50 if device.type == "cuda" else 8)
            times[name].append(spent)
    plain = median(times["ids"])
    rows = [
        [name, f"{median(found):.2f}", f"{median(found) / plain:.2f}", notes[name]] for name, found in times.items()
    ]
    print(table(["model", "ms a step", "of ids", "not recorded because"], rows))
    bound = 1.5 if device.type == "cuda" else 2.0
    worst = max(median(found) / plain for name, found in times.items() if "history" in name or name == "sets")
    print(f"\nat most {bound} steps of an id table, the costliest {worst:.2f}: {'yes' if worst <= bound else 'NO'}")


if __name__ == "__main__":
    main()
