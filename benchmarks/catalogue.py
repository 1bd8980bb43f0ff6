"""Claim: the time of a step does not grow with the catalogue, or the sampler's docstring says why.

    python benchmarks/catalogue.py                                              # CPU, one thread, 10^4 to 10^6 items
    python benchmarks/catalogue.py --device cuda --sizes 4,5,6,7,8              # one GPU, 10^4 to 10^8 items
    python benchmarks/catalogue.py --only xir,midx

A step is complete: encode, choose, loss, backward, row-sparse Adam on tables of N rows, observe; on a GPU recorded,
as in training. Items follow a power law. State that a sampler rebuilds before an epoch is not counted. The best of
several rounds, all sizes of a sampler in turn. A sampler is flat if the largest catalogue takes at most 1.3 times the
smallest. A table of 10^4 rows fits a cache and one of 10^8 does not: the same number of rows takes longer to fetch,
the more so the more evenly they are drawn, and that is counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from _shared import stepping, table
from sparring import Run, Setup, Term
from sparring.losses import bpr, sampled_softmax
from sparring.losses.temperature import Fixed
from sparring.models.clusters.codes import Codes
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.negatives import (
    AllItems,
    BatchMix,
    Cache,
    GroupShares,
    Hardest,
    HardestBucket,
    InBatch,
    Interpolated,
    Memory,
    MixPositive,
    NearestTo,
    Negatives,
    OtherClusters,
    Popularity,
    QuantizedSoftmax,
    Resample,
    SameCluster,
    Sampled,
    Streaming,
    Tilted,
    TowardsPositive,
    Uniform,
    Union,
)
from sparring.training.cuda_graph import CudaGraphStep

FLAT, QUERIES, DIM = 1.3, 10_000, 16
Build = Callable[["World"], tuple[Negatives, ...]]


@dataclass(frozen=True)
class World:
    """A catalogue of n items: its table, the count and the code of each item."""

    n: int
    batch: int
    items: nn.Parameter

    @cached_property
    def _popularity(self) -> Popularity:
        return Popularity((1e6 / torch.arange(1, self.n + 1, dtype=torch.float64) ** 0.8).ceil_())

    def popularity(self) -> Popularity:
        return self._popularity  # it has no state: the samplers share it

    def codes(self) -> Codes:
        g = torch.Generator().manual_seed(1)
        primary, secondary = torch.randint(64, (self.n,), generator=g), torch.randint(16, (self.n,), generator=g)
        return Codes(primary, secondary, torch.randn(64, DIM, generator=g), 16)


def esans(world: World) -> tuple[Negatives, ...]:
    codes = world.codes()
    return (Union(Interpolated(OtherClusters(codes)), TowardsPositive(SameCluster(codes))),)


# name -> its negatives, one for each term; why its cost grows, where its docstring says so
SAMPLERS: dict[str, tuple[Build, str]] = {
    "in-batch": (lambda w: (InBatch(),), ""),
    "ssl_pop": (lambda w: (InBatch(w.popularity()),), ""),
    "g_tower": (lambda w: (InBatch(Streaming((w.n,))),), ""),
    "uniform": (lambda w: (Sampled(Uniform(w.n), w.batch),), ""),
    "popularity": (lambda w: (Sampled(w.popularity(), w.batch),), ""),
    "uniform per query": (lambda w: (Sampled(Uniform(w.n), 16, per_query=True),), "Sampled"),
    "mns": (lambda w: (Union(InBatch(w.popularity()), Sampled(Uniform(w.n), w.batch)),), ""),
    "cbns": (lambda w: (Union(InBatch(w.popularity()), Memory(w.batch, DIM, w.popularity())),), ""),
    "bir": (lambda w: (Resample(InBatch(w.popularity())),), ""),
    "bir drawn": (lambda w: (Resample(InBatch(w.popularity()), draw="rounded"),), ""),
    "xir": (lambda w: (Resample(InBatch(w.popularity())), Resample(Cache(w.batch, w.popularity(), w.n))), ""),
    "dns": (lambda w: (Hardest(Sampled(Uniform(w.n), w.batch), 1),), ""),
    "ahns": (lambda w: (NearestTo(Sampled(Uniform(w.n), w.batch)),), ""),
    "mixgcf": (lambda w: (MixPositive(Hardest(Sampled(Uniform(w.n), w.batch), 8)),), ""),
    "bmns": (lambda w: (Union(InBatch(w.popularity()), BatchMix(w.popularity(), w.batch)),), ""),
    "fairneg": (lambda w: (Tilted(Sampled(GroupShares(torch.arange(w.n) % 8), w.batch)),), ""),
    "midx": (lambda w: (QuantizedSoftmax(w.n, DIM, 16),), "QuantizedSoftmax"),
    "esans": (esans, ""),
    "sce": (lambda w: (HardestBucket(w.n, 64),), "HardestBucket"),
    "full_softmax": (lambda w: (AllItems(w.n),), "AllItems"),
}
LARGEST = {"full_softmax": 5, "sce": 6}  # powers of 10 beyond which a step takes too long


class Timed:
    """One sampler over one catalogue, ready to step."""

    def __init__(self, build: Build, world: World):
        item, device = IdTower(1, DIM), world.items.device
        item.n, item.weight = world.n, world.items
        setup = Setup.of(dim=DIM, batch_size=world.batch, lr=1e-3)
        terms = tuple(
            Term(1.0, negatives, bpr if isinstance(negatives, NearestTo) else sampled_softmax)
            for negatives in build(world)
        )
        self.run = Run(Retriever(IdTower(QUERIES, DIM), item, "cosine"), terms, Fixed(0.1), setup)
        self.run.modules().to(device)
        self.device = device
        self.step = stepping(self.run, torch.Generator(device).manual_seed(0))

    def seconds(self, batches: Tensor) -> float:
        """Seconds per step over batches (steps, B, 2); CPU time on a CPU, since it may be shared."""
        on_gpu = self.device.type == "cuda"
        clock = time.perf_counter if on_gpu else time.process_time
        if on_gpu:
            torch.cuda.synchronize()
        began = clock()
        for pairs in batches:
            self.step(pairs)
        if on_gpu:
            torch.cuda.synchronize()
        return (clock() - began) / len(batches)


def measured(name: str, worlds: list[World], rounds: int, steps: int) -> list[float]:
    """Milliseconds per step in each world."""
    timed, drawn = [], []
    for world in worlds:
        timed.append(Timed(SAMPLERS[name][0], world))
        g = torch.Generator().manual_seed(0)
        items = (
            torch.rand((steps, world.batch), generator=g, dtype=torch.float64) ** 5 * world.n
        ).long()  # the first ones most often
        drawn.append(
            torch.stack([torch.randint(QUERIES, (steps, world.batch), generator=g), items], 2).to(world.items.device)
        )
    spent: list[list[float]] = [[] for _ in worlds]
    for turn in range(rounds + 1):
        for each, batches, times in zip(timed, drawn, spent, strict=True):
            took = each.seconds(batches)
            if turn:  # the first warms up
                times.append(took * 1e3)
    if isinstance(step := timed[0].step, CudaGraphStep) and step.why is not None:
        print(f"{name} is not recorded: {step.why}")
    return [min(times) for times in spent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--sizes",
        default="",
        help="powers of 10, comma-separated (default: 4,5,6 on a CPU, 4,5,6,7 on a GPU)",
    )
    parser.add_argument("--batch", type=int, default=0, help="default: 512 on a CPU, 2048 on a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    on_gpu = device.type == "cuda"
    powers = [int(power) for power in (given.sizes or ("4,5,6,7" if on_gpu else "4,5,6")).split(",")]
    batch, steps = given.batch or (2048 if on_gpu else 512), 40 if on_gpu else 4
    worlds = {
        power: World(10**power, batch, nn.Parameter(torch.empty(10**power, DIM, device=device).normal_(0, 0.25)))
        for power in powers
    }
    rows, failed = [], []
    for name, (_, why) in SAMPLERS.items():
        if given.only and name not in given.only.split(","):
            continue
        own = [power for power in powers if power <= LARGEST.get(name, 99)]
        times = measured(name, [worlds[power] for power in own], given.rounds, steps)
        if on_gpu:
            torch.cuda.empty_cache()  # the next sampler allocates its own moments of the largest tables
        growth = times[-1] / times[0]
        verdict = "yes" if growth <= FLAT else f"no: see {why}" if why else "NO"
        failed += [name] if verdict == "NO" else []
        rows.append([name, *(f"{ms:.3f}" for ms in times), *[""] * (len(powers) - len(own)), f"{growth:.2f}", verdict])
        print(f"{name}: {', '.join(f'{ms:.3f}' for ms in times)} ms", flush=True)
    where = torch.cuda.get_device_name() if on_gpu else f"CPU time, {given.threads} thread(s)"
    print(f"\nms per step, B = {batch:,}, d = {DIM}, {where}\n")
    print(table(["sampler", *(f"10^{power}" for power in powers), "growth", "flat"], rows))
    print(f"\nflat within {FLAT}, or its docstring says why: {'NO' if failed else 'yes'}")


if __name__ == "__main__":
    main()
