"""The whole procedure of `sparring book` calls a method different from itself in about 5 % of comparisons.

    python benchmarks/null_book.py --threads 1
    python benchmarks/null_book.py --worlds 4 --repetitions 20

In each of several synthetic worlds one method is tuned and trained in many independent repetitions, as the book does it
on a larger scale: a search of its own seed with pruned trials, then a training of its choice with its own seed. Each
choice is also trained with four more seeds. Two procedures are then compared with themselves, by the test of the book:

    repetitions         two disjoint groups of five repetitions, as the book does now
    one tuning each     five trainings of one choice against five of another, as it did before: the test sees seeds and
                        queries, and takes the luck of two searches for a difference between methods

Groups are drawn at random from the repetitions of a world, 2,000 pairs in each. Such pairs share repetitions, so they
are not independent: the rate of a world counts as one value, and the printed interval is a t interval over worlds,
which are independent.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from sparring.evaluation.statistics import seeds_and_queries, summary

GROUP = 5  # repetitions, or seeds, on each side of a comparison
PAIRS = 2_000
METRIC = "ndcg@20"
TRIALS, DESIGN, RUNGS = 8, 2, ((1, 4), (3, 2))
SETTINGS = {"epochs": 6, "dim": 8, "batch_size": 256, "patience": None, "tau": 0.12, "select": METRIC}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first world")
    parser.add_argument("--repetitions", type=int, default=24, help="in each world")
    parser.add_argument("--method", default="uns")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    import torch

    torch.set_num_threads(given.threads)
    began, rates = time.perf_counter(), []
    for number in range(given.first, given.first + given.worlds):
        with tempfile.TemporaryDirectory() as out:
            values = repeated(Path(out), number, given.method, given.repetitions)
        rates.append(null_rates(values, number))
        spread = values[:, 0].mean(1).std(ddof=1), values.mean(2).std(1, ddof=1).mean()
        line = f"world {number}: repetitions {rates[-1][0]:.1%}, one tuning each {rates[-1][1]:.1%}"
        print(f"{line}; std of repetitions {spread[0]:.4f}, of seeds alone {spread[1]:.4f}", flush=True)
    total = given.worlds * given.repetitions
    print(f"\n{given.method}, {given.worlds} worlds of {given.repetitions} repetitions, {PAIRS:,} pairs in each\n")
    print(f"| {'procedure':15} | p < 0.05 | 95 % interval |\n| {'-' * 15} | {'-' * 8} | {'-' * 14} |")
    for name, column in zip(("repetitions", "one tuning each"), np.array(rates).T, strict=True):
        over, rate = summary(column), float(column.mean())
        low, high = (rate if end is None else min(max(end, 0.0), 1.0) for end in (over.low, over.high))
        print(f"| {name:15} | {over.mean:8.1%} | {low:5.1%} - {high:5.1%} |")
    rate = float(np.mean(rates, 0)[0])
    print(f"\n{total} tunings and {GROUP * total:,} trainings in {time.perf_counter() - began:.0f} s")
    print(f"the book's verdict has its nominal size, 5 +- 2 % ({rate:.1%}): {'yes' if 0.03 <= rate <= 0.07 else 'NO'}")


def repeated(folder: Path, number: int, method: str, repetitions: int) -> np.ndarray:
    """(repetitions, seeds, queries) values: each repetition tunes anew, and trains its choice with five seeds."""
    from sparring.data.splits import split
    from sparring.data.synthetic_world import make_world
    from sparring.experiments.tuning import tune
    from sparring.recipes.finding import find
    from sparring.recipes.settings import build, own_arguments, resolve
    from sparring.training.fitting import fit

    world = make_world(300, 200, exposure=0.3, relevant=0.3, seed=number)
    parts = split(world.interactions, "random", valid=0.1, test=0.2, seed=number)
    base = resolve(find("tables"), SETTINGS)[0]
    fixed = {"n": 64} if "n" in own_arguments(find(method)) else {}
    name, k = METRIC.split("@")
    rows = []
    for seed in range(0, GROUP * repetitions, GROUP):  # each repetition has five seeds that no other has
        search = {"base": base, "fixed": fixed, "device": "cpu", "seed": seed, "design": DESIGN, "rungs": RUNGS}
        chosen = {**fixed, **tune(method, parts, TRIALS, folder / str(seed), **search).settings}
        for own in range(seed, seed + GROUP):
            run = build(method, parts.train, {**chosen, "seed": own}, base)
            test = fit(run, parts, device="cpu", k=(int(k),), metrics=(name,), progress=False).test
            assert test is not None
            rows.append(test.per_query[METRIC])
    return np.stack(rows).reshape(repetitions, GROUP, -1)


def null_rates(values: np.ndarray, seed: int) -> tuple[float, float]:
    """The shares of random pairs with p < 0.05: groups of five repetitions, and five seeds of one tuning each."""
    random, hits = np.random.default_rng(seed), np.zeros((PAIRS, 2), dtype=bool)
    for pair in range(PAIRS):
        chosen = random.permutation(len(values))[: 2 * GROUP]
        groups = values[chosen, 0]
        hits[pair, 0] = seeds_and_queries(groups[:GROUP] - groups[GROUP:]).p < 0.05
        hits[pair, 1] = seeds_and_queries(values[chosen[0]] - values[chosen[1]]).p < 0.05
    return float(hits[:, 0].mean()), float(hits[:, 1].mean())


if __name__ == "__main__":
    main()
