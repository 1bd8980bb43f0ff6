"""How long a checkpoint pauses training: written synchronously, and in the background.

    python benchmarks/saving.py [--rows 8000000] [--dim 32] [--device cuda]
    torchrun --standalone --nproc-per-node 2 benchmarks/saving.py [--tables sharded]

Trains `tables` on random pairs, saves several times each way, and prints the duration of the save call, the time
between the ends of the two steps around it, the longest such time until the checkpoint has its name, and the median
step before and during the write. The files are deleted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from sparring.core.devices import pick_device
from sparring.core.ranks import join, leave
from sparring.data.interactions import Interactions, Split, Vocabulary
from sparring.recipes.settings import build
from sparring.training.loop import Trainer, TrainingProgress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8_000_000, help="of both tables together")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tables", default="replicated", choices=("replicated", "sharded"))
    parser.add_argument("--saves", type=int, default=3, help="each way")
    args = parser.parse_args()
    device = pick_device(args.device)
    ranks = join(device)
    folder = Path(ranks.share(tempfile.mkdtemp(prefix="sparring-saving-") if ranks.rank == 0 else ""))
    rng, half = np.random.default_rng(0), args.rows // 2
    ids = Vocabulary(np.arange(half))
    data = Interactions(*(rng.integers(0, half, 4_000_000).astype(np.int32) for _ in range(2)), ids, ids)
    settings = {
        "dim": args.dim,
        "n": 2048,
        "batch_size": 2048,
        "optimizer": "row-adagrad",
        "weight_decay": 0.0,
        "item_bias": False,
    }
    settings |= {"init": "normal", "dropout": 0.0, "tables": args.tables, "epochs": 1}
    trainer = Trainer(build("tables", data, settings), Split(data), device, folder, TrainingProgress(), ranks)
    trainer.set_rate(1.0)
    batches = trainer.rows.batches.epoch(0, 0, device)

    def step() -> float:
        began = time.perf_counter()
        trainer.step(next(batches))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    try:
        for _ in range(10):
            step()
        before = statistics.median(step() for _ in range(50))
        say = print if ranks.rank == 0 else lambda line: None
        say(f"{ranks.world} rank(s) on {device.type}, tables {args.tables}: a step takes {1e3 * before:.1f} ms")
        beside = trainer.checkpoints._place()
        for way, place in (("training waits", "nowhere"), ("beside training", beside)):
            trainer.checkpoints._place = lambda place=place: place  # type: ignore[method-assign, misc, assignment]
            for at in range(args.saves):
                if ranks.rank == 0:
                    os.sync()  # each save starts with an idle disk
                ranks.share(None)
                trainer.state.step += 1
                began = time.perf_counter()
                trainer.save()
                stop = time.perf_counter() - began
                steps = [step()]
                while ranks.share(trainer.checkpoints.writer.busy()):
                    steps.append(step())
                whole = time.perf_counter() - began
                trainer.checkpoints.check()
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9
                pauses = f"a pause of {stop + steps[0]:.2f} s, then of {max(steps[1:], default=0):.2f} s at most"
                meanwhile = (
                    f"{len(steps)} steps of {1e3 * statistics.median(steps):.1f} ms in {whole:.1f} s; "
                    f"{size:.2f} GB on disk"
                )
                say(f"{way}, save {at + 1}: the call {stop:.2f} s, {pauses}; {meanwhile}")
        return 0
    finally:
        trainer.checkpoints.writer.join()
        leave()
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
