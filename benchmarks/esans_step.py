"""Cost of a training step of ESANS beside debiased MNS with as many real candidates, as a ratio in one run.

For each positive ESANS encodes m_c * m_o items of other clusters and m_h of its own, and contrasts every query with
the former, with their mixtures, and with its own hard negatives. Debiased MNS draws as many items and contrasts every
query with all of them and with the batch. Both are timed through `sparring.fit` with the same towers and optimiser;
rounds alternate, and the median of the ratios counts. The claim is at most 1.2; the paper's own training times give
1.04.

    python benchmarks/esans_step.py                     # one thread, CPU seconds
    python benchmarks/esans_step.py --device cuda       # wall seconds
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from _shared import Pairs, cpu_seconds, gowalla_xir, interactions, table
from sparring import Split, fit
from sparring.models.clusters import Codes
from sparring.recipes.settings import build
from sparring.training.loop import TrainingProgress

B, M_C, M_O, M_H = 512, 2, 5, 5
REAL = B * (M_C * M_O + M_H)
MIXED = B * M_C * (M_O + 2) * (M_O - 1) // 2
PEER = "debiased_mns, as many real candidates"
COMPARED: list[tuple[str, str, dict[str, Any]]] = [
    (PEER, "debiased_mns", {"n": REAL}),
    ("debiased_mns, as many as the simple ones", "debiased_mns", {"n": B * M_C * M_O}),
    ("esans", "esans", {}),
    ("esans without mixtures", "esans", {"simple_mixtures": False, "hard_mixtures": False}),
    ("esans, mixtures as vectors", "esans", {"renorm": True}),
    ("uns, as many logits", "uns", {"n": B * M_C * M_O + MIXED + 2 * M_H}),
]


def seconds(
    name: str, arguments: dict[str, Any], data: Pairs, codes: Codes, steps: int, device: str, warm_up: int = 8
) -> float:
    """Seconds of one step: CPU time, or wall time on a GPU."""
    everything = interactions(data)
    rows = np.random.default_rng(0).permutation(len(data))[: (warm_up + steps) * B]
    settings = {
        "dim": 64,
        "score": "cosine",
        "tau": 0.05,
        "batch_size": B,
        "lr": 2e-4,
        "optimizer": "row-adam",
        "epochs": 1,
    }
    settings |= {"init_std": 0.1, "weight_decay": 0.0}
    run = build(name, everything, settings | arguments | ({"codes": codes} if name == "esans" else {}))
    clock = cpu_seconds if device == "cpu" else time.perf_counter
    begin = end = 0.0

    def tick(epoch: int, step: int, loss: torch.Tensor) -> None:
        nonlocal begin, end
        if step in (warm_up, warm_up + steps):
            if device != "cpu":
                torch.cuda.synchronize()
            begin, end = (clock(), end) if step == warm_up else (begin, clock())

    fit(run, Split(everything.subset(np.sort(rows))), device=device, progress=TrainingProgress(step=tick))
    return (end - begin) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    data = gowalla_xir()
    codes = Codes.random(data.n_items, 300, 15)
    unit = "CPU" if given.device == "cpu" else "wall"
    print(
        f"steps on {data.source}: B = {B}, d = 64, m_c = {M_C}, m_o = {M_O}, m_h = {M_H}; "
        f"{given.device}, {unit} milliseconds"
    )
    rounds = [
        [seconds(n, a, data, codes, given.steps, given.device) for _, n, a in COMPARED] for _ in range(given.rounds)
    ]
    rows = []
    for at, (label, _, _) in enumerate(COMPARED):
        ratios = sorted(costs[at] / costs[0] for costs in rounds)
        ratio = statistics.median(ratios)
        claim = f"at most 1.2: {'yes' if ratio <= 1.2 else 'NO'}" if label == "esans" else ""
        cost = 1e3 * statistics.median(costs[at] for costs in rounds)
        rows.append([label, f"{cost:.2f}", f"{ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", claim])
    print(table(["recipe", f"{unit} ms per step", "ratio to the first (range)", "claim"], rows))


if __name__ == "__main__":
    main()
