"""Claim: a step over 100 million items x 64 on one GPU takes at most 1.3 times one over a million.

    python benchmarks/million_items.py --device cuda                                    # against 1 million of each
    python benchmarks/million_items.py --device cpu --items 1e5,1e4 --queries 1e5,1e4   # small

100 million items and 20 million queries. Tables and optimiser state are in device memory; pairs are drawn there,
queries evenly and items by a power law. A step is complete: encode, draw, loss, backward, row-wise Adagrad
(--optimizer row-adam: three times the memory), observe; on a GPU recorded, as in training. Ids are 0..N-1. Time is
the median of rounds that alternate between the sizes; memory is the peak allocation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from _shared import stepping
from sparring.losses import Fixed, softmax_loss
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.negatives import Cache, InBatch, Popularity, Resample, Sampled, Uniform
from sparring.negatives.distributions import draw_from_cdf
from sparring.recipes.run import Run, Term
from sparring.recipes.setup import Setup

DIM, BATCH, DRAWN = 64, 4096, 2048


@dataclass
class Training:
    """A run over tables of a given size and its training step."""

    run: Run
    step: Callable[[Tensor], None]
    generator: torch.Generator
    cdf: Tensor  # of items, by popularity
    queries: int
    device: torch.device

    def take(self) -> None:
        """One step on pairs drawn now."""
        items = draw_from_cdf(self.cdf, (BATCH,), self.generator)
        queries = torch.randint(self.queries, (BATCH,), generator=self.generator, device=self.device)
        self.step(torch.stack([queries, items], 1))


def built(recipe: str, items: int, queries: int, device: torch.device, rule: str) -> Training:
    # a rank for each item, spread over the table: popular rows must not be neighbours
    spread = (torch.arange(items) * 1_000_003) % items
    popularity = Popularity((1.0 + spread.double()) ** -0.8)
    setup = Setup.of(dim=DIM, optimizer=rule, lr=0.01, batch_size=BATCH, tau=0.1, item_bias=recipe == "tables")  # type: ignore[arg-type]
    with torch.device(device):
        bias = IdTower(items, 1, 0.0) if setup.model.item_bias else None
        towers = IdTower(queries, DIM, 0.01), IdTower(items, DIM, 0.01)
        model = Retriever(*towers, "cosine" if recipe == "tables" else "dot", item_bias=bias)
    if recipe == "tables":
        terms: tuple[Term, ...] = (Term(1.0, Sampled(Uniform(items), DRAWN, correction="none"), softmax_loss),)
    else:
        cache = Cache(DRAWN, popularity, items)
        terms = Term(0.5, Resample(InBatch(popularity), 1024)), Term(0.5, Resample(cache, 1024))
    run = Run(model, terms, Fixed(0.1 if recipe == "tables" else 1.0), setup)
    run.modules().to(device)
    popularity.to(device)
    own = torch.Generator(device).manual_seed(1)  # for the pairs: a recorded step owns the other generator
    return Training(run, stepping(run, torch.Generator(device).manual_seed(0)), own, popularity.cdf, queries, device)


def timed(training: Training, steps: int) -> float:
    """Seconds of a step."""
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        training.take()
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--items", default="1e8,1e6", help="large, small")
    parser.add_argument("--queries", default="2e7,1e6", help="large, small")
    parser.add_argument("--optimizer", default="row-adagrad", choices=("row-adagrad", "row-adam"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    device = torch.device(args.device)
    sizes = list(
        zip(*([int(float(text)) for text in part.split(",")] for part in (args.items, args.queries)), strict=True)
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}; {DIM} dimensions, batch {BATCH:,}, {DRAWN:,} drawn, {args.optimizer}")
    slow = []
    for recipe in ("tables", "xir"):
        trainings, memory = [], []
        for items, queries in sizes:
            before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            began = time.perf_counter()
            training = built(recipe, items, queries, device, args.optimizer)
            for _ in range(10):
                training.take()
            why = getattr(training.step, "why", None)
            peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
            print(
                f"{recipe}: {items:,} items, {queries:,} queries: built in {time.perf_counter() - began:.0f} s",
                flush=True,
            )
            print(
                f"  recorded: {'no: ' + why if why else device.type == 'cuda'}; memory {peak / 1e9:.1f} GB", flush=True
            )
            trainings.append(training)
            memory.append(peak)
        rounds = [[timed(training, args.steps) for training in trainings] for _ in range(args.rounds)]
        large, small = (statistics.median(times) for times in zip(*rounds, strict=True))
        ratio = large / small
        verdict = "yes" if ratio <= 1.3 else "NO"
        print(
            f"{recipe}: {1e3 * large:.3f} ms per step against {1e3 * small:.3f}: {ratio:.2f} times; "
            f"at most 1.3: {verdict}"
        )
        slow += [recipe] if ratio > 1.3 else []
        del trainings, training
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
