"""Step time of each hard, fair and synthetic sampler as a ratio to in-batch softmax with as many scored candidates.

A step is complete: encode, choose, loss, backward, row-sparse Adam, observe. Rounds alternate over all methods and
the median of the per-round ratios counts; CPU seconds on one thread, wall seconds on more or on a GPU, where steps
are recorded as in training. "scored" is the number of candidates that each query is scored against. A yardstick that
scores more than the batch holds is filled up with uniform negatives. A sampler that draws for each query scores far
fewer than the batch holds; the claim compares it with in-batch all the same. "of its kind" compares it with plain
draws that encode as many items and shows the cost of its choice.

    python benchmarks/samplers.py                       # CPU, one thread
    python benchmarks/samplers.py --device cuda         # one GPU
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from _shared import cpu_seconds, gowalla_xir, interactions, stepping, table
from sparring import Run, Setup, Term, compose, recipes
from sparring.core.part import listeners
from sparring.core.types import Corpus
from sparring.data.interactions import Interactions
from sparring.negatives import InBatch, Sampled, Uniform, Union
from sparring.training.cuda_graph import CudaGraphStep

CLAIM = 1.3
Build = Callable[[Interactions, Setup], Run]


@dataclass(frozen=True)
class Method:
    """A run, its in-batch yardstick, why it costs more, and a plain sampler that encodes as many items."""

    name: str
    scored: str
    build: Build
    yardstick: str
    why: str = ""
    alike: str = ""


def in_batch(data: Interactions, setup: Setup) -> Run:
    return compose(data, setup, Term(1.0, InBatch(recipes.item_frequency(data))))


def filled_up(data: Interactions, setup: Setup) -> Run:
    mixed = Union(InBatch(recipes.item_frequency(data)), Sampled(Uniform(data.n_items), setup.batches.batch_size))
    return compose(data, setup, Term(1.0, mixed))


def per_query(n: int) -> Build:
    return lambda data, setup: recipes.RECIPES["uns"](data, setup, n=n, per_query=True)


def recipe(name: str, **arguments: object) -> Build:
    return lambda data, setup: recipes.RECIPES[name](data, setup, **arguments)


def methods(b: int) -> list[Method]:
    """The methods and their yardsticks for batches of b queries."""
    own = "encodes and updates items for each query instead of one pool for all, as uniform draws per query do"
    fresh = "encodes and updates a pool of items that the batch does not hold, as uniform draws do"
    ranks = f"{fresh}; topk costs more on a CPU than scoring them"
    pool = "uniform, shared pool"
    mixes = "draws n x B random numbers and mixes with them, forward and backward, before the mixtures are scored"
    return [
        Method("in-batch", f"{b:,}", in_batch, ""),
        Method("in-batch and uniform", f"{2 * b:,}", filled_up, ""),
        Method(pool, f"{b:,}", recipe("uns", n=b), ""),
        Method("uniform per query", "32", per_query(32), ""),
        Method("uniform per query, 64", "64", per_query(64), ""),
        Method(
            "dns, shared pool, one of the 64 hardest",
            f"{b:,}",
            recipe("dns", n=b, m=b // 32, per_query=False),
            "in-batch",
            ranks,
            pool,
        ),
        Method("dns, shared pool, the hardest", f"{b:,}", recipe("dns", n=b, per_query=False), "in-batch", fresh, pool),
        Method("ahns, shared pool", f"{b:,}", recipe("ahns", n=b, per_query=False), "in-batch", fresh, pool),
        Method("mixgcf, shared pool", f"{b:,}", recipe("mixgcf", n=b, per_query=False), "in-batch", fresh, pool),
        Method(
            "amns, 256 hardest",
            f"{2 * b:,}",
            recipe("amns", n=b),
            "in-batch and uniform",
            "scores the pool a second time to rank it; on a CPU topk alone costs more than the loss",
        ),
        Method("bmns", f"{2 * b:,}", recipe("bmns", n=b), "in-batch and uniform", mixes),
        Method("fairneg, shares only", f"{b:,}", recipe("fairneg", n=b, importance=0.0), "in-batch", fresh, pool),
        Method(
            "fairneg",
            f"{b:,}",
            recipe("fairneg", n=b),
            "in-batch",
            f"{fresh}, and scores it once more for the weights",
            pool,
        ),
        Method("dns", "32", recipe("dns"), "in-batch", own, "uniform per query"),
        Method("ahns", "32", recipe("ahns"), "in-batch", own, "uniform per query"),
        Method("mixgcf", "32", recipe("mixgcf"), "in-batch", own, "uniform per query"),
        Method(
            "mixgcf, a share per candidate",
            "32",
            recipe("mixgcf", mix="candidate"),
            "in-batch",
            own,
            "uniform per query",
        ),
        Method("midx", "64", recipe("midx"), "in-batch", own, "uniform per query, 64"),
        Method(
            "sce",
            "256",
            recipe("sce", n=256),
            "in-batch",
            "projects all items on buckets and gives each query its own",
        ),
    ]


class Timed:
    """One method, ready to step on the same batches as the others."""

    def __init__(self, method: Method, data: Interactions, setup: Setup, device: torch.device):
        self.method, self.device = method, device
        self.run = method.build(data, setup)
        self.modules = self.run.modules().to(device)
        self.refreshers = listeners(self.modules, "refresh")
        self.generator = torch.Generator(device).manual_seed(0)
        known = data.positives()
        self.positives = known.to(device)
        self.step = stepping(self.run, self.generator, self.positives)

    def refresh(self) -> float:
        """Seconds of a rebuild before an epoch; 0 where there is none."""
        began = time.perf_counter()
        with torch.no_grad():
            model = self.run.model
            for module in self.refreshers:
                module.refresh(Corpus(0, model.item_vectors(), model.encode_queries, self.positives, self.generator))
        if isinstance(self.step, CudaGraphStep):
            self.step.forget()
        self.wait()
        return time.perf_counter() - began if self.refreshers else 0.0

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def steps(self, queries: torch.Tensor, items: torch.Tensor, clock: Callable[[], float]) -> float:
        """Seconds per step over batches (steps, B)."""
        self.wait()
        began = clock()
        for pairs in torch.stack([queries, items], 2):
            self.step(pairs)
        self.wait()
        return (clock() - began) / len(queries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of a method per round (default: 3 on a CPU, 50 on a GPU)"
    )
    parser.add_argument("--batch", type=int, default=2048)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    on_cpu = device.type == "cpu" and given.threads == 1
    n_steps = given.steps or (3 if device.type == "cpu" else 50)
    pairs = gowalla_xir()
    data = interactions(pairs)
    setup = Setup.of(dim=64, batch_size=given.batch, optimizer="row-adam", lr=0.005)
    all_queries, all_items = (column.long() for column in data.pairs())
    timed = [Timed(method, data, setup, device) for method in methods(given.batch)]
    rebuild = {each.method.name: each.refresh() for each in timed}
    spent: dict[str, list[float]] = {each.method.name: [] for each in timed}
    for turn in range(given.rounds + 1):
        at = torch.randint(len(all_queries), (n_steps, given.batch), generator=torch.Generator().manual_seed(turn))
        batch = all_queries[at].to(device), all_items[at].to(device)
        for each in timed:
            seconds = each.steps(*batch, cpu_seconds if on_cpu else time.perf_counter)
            if turn:  # the first round warms up
                spent[each.method.name].append(seconds)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {given.threads} thread(s)"
    print(f"samplers on {pairs.source}: B = {given.batch:,}, d = 64, {'CPU' if on_cpu else 'wall'} time, {where}\n")
    rows = []
    for each in timed:
        method, mine = each.method, spent[each.method.name]
        ratio = (
            statistics.median(a / b for a, b in zip(mine, spent[method.yardstick], strict=True))
            if method.yardstick
            else None
        )
        held = f"{ratio:.2f} x {method.yardstick}" if ratio is not None else ""
        kind = (
            statistics.median(a / b for a, b in zip(mine, spent[method.alike], strict=True)) if method.alike else None
        )
        same = f"{kind:.2f} x {method.alike}" if kind is not None else ""
        claim = "" if ratio is None else f"at most {CLAIM}: {'yes' if ratio <= CLAIM else 'NO'}"
        rows.append([method.name, method.scored, f"{1000 * statistics.median(mine):.1f}", same, held, claim])
    print(table(["sampler", "scored", "ms per step", "of its kind", "ratio", "claim"], rows))
    for each in timed:
        if each.method.why:
            print(f"{each.method.name}: {each.method.why}")
        if rebuild[each.method.name]:
            print(
                f"{each.method.name}: {rebuild[each.method.name]:.2f} s of wall time before an epoch for new codebooks"
            )


if __name__ == "__main__":
    main()
