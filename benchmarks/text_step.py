"""A training step of text towers: time, tokens per second, memory with the gradient cache; the cost of mining.

    python benchmarks/text_step.py --data OEWN-Hyper3 --encoder minilm --device cuda
    python benchmarks/text_step.py --data OEWN-Hyper3 --encoder bag --chunks none
    python benchmarks/text_step.py --data OEWN-Hyper3 --encoder bag --chunks none --steps 2 --epochs 10 \
        --methods "random batches,NGAME" --cpu-seconds

The second table trains random batches, NGAME and ANCE with the same loss, encoder and batch, in turn, with the same
refresh interval. Its ratio is of complete trainings, the minimum of each over the rounds; the share is the time spent
on clusters or lists within one. A short training of each comes first, so that nothing is loaded while the clock runs.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from sparring.data.interactions import Interactions, Split
from sparring.data.reading import read
from sparring.data.splits import split
from sparring.models.text import text_tower
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress

WARM = 4  # steps before the clock starts


@dataclass
class Clock:
    """Start and end of the steps from WARM on, each after the device has finished."""

    last: int
    at: list[float] = field(default_factory=list)

    def __call__(self, epoch: int, step: int, loss) -> None:  # type: ignore[no-untyped-def]
        if step in (WARM, self.last):
            loss()  # waits for the device
            self.at.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=1600)
    parser.add_argument(
        "--chunks", default="none,400,100", help="texts encoded at a time; none encodes the batch at once"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=5, help="epochs of the second table; 0 skips it")
    parser.add_argument("--rounds", type=int, default=1, help="trainings of each method of the second table")
    parser.add_argument("--every", type=int, default=5, help="epochs from one refresh to the next")
    parser.add_argument("--methods", default="random batches,NGAME,ANCE", help="of the second table")
    parser.add_argument("--cpu-seconds", action="store_true", help="count CPU seconds: others use this machine")
    args = parser.parse_args()
    if args.cpu_seconds:
        time.perf_counter = time.monotonic = time.process_time  # the clocks of the training too
    train = split(read(args.data), valid=0.05).train
    shared = {"encoder": args.encoder, "batch_size": args.batch_size, "tau": 0.1, "clf_epochs": 0, "warmup": 100}
    steps(train, args, shared)
    if args.epochs:
        epochs(train, args, shared)


def steps(train: Interactions, args: argparse.Namespace, shared: dict[str, object]) -> None:
    cuda = args.device.startswith("cuda")
    queries = np.unique(train.queries)[: args.batch_size * (args.steps + WARM)]
    some = train.subset(np.isin(train.queries, queries))
    print(f"{args.encoder}, B = {args.batch_size}, {args.device}: a step of random batches")
    for chunk in args.chunks.split(","):
        run = build("dpr", some, {**shared, "epochs": 1, "loss": "hinge", "chunk": chunk})
        towers = [text_tower(side) for side in (run.model.query, run.model.item)]
        tokens = (
            sum(float(np.minimum(t.texts.lengths(), t.max_len).mean()) for t in towers if t is not None)
            * args.batch_size
        )
        clock = Clock(-(-len(queries) // args.batch_size))
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        fit(run, Split(some), device=args.device, progress=TrainingProgress(step=clock))
        each = (clock.at[1] - clock.at[0]) / (clock.last - WARM)
        peak = f", at most {torch.cuda.max_memory_allocated() / 2**30:.2f} GB" if cuda else ""
        print(
            f"  chunk {chunk:>5}: {1000 * each:8.1f} ms per step, about {tokens / each:12,.0f} tokens/s{peak}",
            flush=True,
        )


def epochs(train: Interactions, args: argparse.Namespace, shared: dict[str, object]) -> None:
    mined = {"every": args.every, "start": 1}
    methods = {
        "random batches": ("dpr", {"loss": "hinge"}),
        "NGAME": ("ngame", {**mined, "size": 8, "grow": ""}),
        "ANCE": ("ance", {**mined, "loss": "hinge"}),
    }
    methods = {name: methods[name] for name in args.methods.split(",")}
    print(
        f"{args.epochs} epochs, refreshed every {args.every} from the second on, "
        f"{len(np.unique(train.queries)):,} texts per epoch"
    )
    few = train.subset(np.isin(train.queries, np.unique(train.queries)[: 2 * args.batch_size]))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for recipe, own in methods.values():
        fit(build(recipe, few, {**shared, **own, "epochs": 2}), Split(few), device=args.device)
    for _ in range(args.rounds):
        for name, (recipe, own) in methods.items():
            history = fit(
                build(recipe, train, {**shared, **own, "epochs": args.epochs}), Split(train), device=args.device
            ).history
            mining = sum(record.get(key, 0.0) for record in history for key in ("cluster_seconds", "list_seconds"))
            found[name].append((history[-1]["seconds"], mining))
            print(f"  {name:15} {found[name][-1][0]:7.2f} s, of these mining {mining:6.3f}", flush=True)
    base = min(found["random batches"])[0]
    for name, each in found.items():
        seconds, mining = min(each)
        print(
            f"  {name:15} {seconds / base:6.3f} of random batches; mining "
            f"{mining / (seconds - mining):6.1%} of the rest",
            flush=True,
        )


if __name__ == "__main__":
    main()
