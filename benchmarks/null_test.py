"""False-positive rate of the tests: a recipe compared with itself is called different in about 5 % of comparisons.

    python benchmarks/null_test.py --threads 1
    python benchmarks/null_test.py --comparisons 1000

Every comparison has its own world, its own split, and 2 x S real trainings of one recipe: seeds 0..S-1 play the new
method, seeds S..2S-1 the baseline. No training is used twice, so the comparisons are independent and the number of
false alarms is binomial. Printed for each paired test: the share of comparisons with p < 0.05 and its 95 % interval.
The claim is about the headline, the test over seeds and queries. The test over queries is printed to show why it is
not the headline: it takes the trained models as given and mistakes training variance (start, batches) for a better
method.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np

from sparring.evaluation.statistics import paired_t, seeds_and_queries, sign_flip

TESTS = {
    "seeds and queries (headline)": lambda d: seeds_and_queries(d).p,
    "seeds, t": lambda d: paired_t(d.mean(1)).p,
    "seeds, sign flips": lambda d: sign_flip(d.mean(1)),
    "queries, t, means over seeds": lambda d: paired_t(d.mean(0)).p,
    "queries, sign flips, means over seeds": lambda d: sign_flip(d.mean(0), 1_000),
    "queries, t, one run each": lambda d: paired_t(d[0]).p,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=200)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first world; other numbers give other worlds"
    )
    parser.add_argument("--seeds", type=int, default=5, help="of each of the two")
    parser.add_argument("--recipe", default="uns")
    parser.add_argument("--metric", default="ndcg@10")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    import torch

    torch.set_num_threads(given.threads)
    began, p = time.perf_counter(), []
    for number in range(given.first, given.first + given.comparisons):
        values = trained(number, 2 * given.seeds, given.recipe, given.metric, given.epochs)
        d = values[: given.seeds] - values[given.seeds :]
        p.append([test(d) for test in TESTS.values()])
    rates = (np.array(p) < 0.05).mean(0)
    print(
        f"{given.comparisons} comparisons of {given.recipe} with itself, {given.seeds} seeds each, "
        f"{given.metric}, 200 x 100 worlds"
    )
    print(f"\n| test over | p < 0.05 | 95 % interval |\n| {'-' * 38} | {'-' * 8} | {'-' * 14} |")
    for name, rate in zip(TESTS, rates, strict=True):
        low, high = wilson(rate, given.comparisons)
        print(f"| {name:38} | {rate:8.1%} | {low:5.1%} - {high:5.1%} |")
    print(f"\n{2 * given.seeds * given.comparisons:,} trainings in {time.perf_counter() - began:.0f} s")
    print(
        f"the headline test has its nominal size, 5 +- 2 % ({rates[0]:.1%}): "
        f"{'yes' if 0.03 <= rates[0] <= 0.07 else 'NO'}"
    )


def trained(number: int, seeds: int, recipe: str, metric: str, epochs: int) -> np.ndarray:
    """(seeds, queries) values of freshly trained models in the world of this number."""
    from sparring.data.splits import split
    from sparring.data.synthetic_world import make_world
    from sparring.recipes.finding import find
    from sparring.recipes.settings import build, own_arguments
    from sparring.training.fitting import fit

    world = make_world(200, 100, exposure=0.3, relevant=0.3, seed=number)
    parts = split(world.interactions, "random", valid=0, test=0.2, seed=number)
    name, k = metric.split("@")
    shared = {
        "dim": 8,
        "epochs": epochs,
        "batch_size": 256,
        "lr": 0.05,
        "optimizer": "adam",
        "score": "cosine",
        "tau": 0.1,
    }
    shared |= {"weight_decay": 0.0, "patience": None, **({"n": 64} if "n" in own_arguments(find(recipe)) else {})}
    rows = []
    for seed in range(seeds):
        # separate seeds in every world, so that no two comparisons share the start of a table
        run = build(recipe, parts.train, {**shared, "seed": number * seeds + seed})
        test = fit(run, parts, device="cpu", k=(int(k),), metrics=(name,)).test
        assert test is not None
        rows.append(test.per_query[metric])
    return np.stack(rows)


def wilson(rate: float, n: int, z: float = 1.96) -> tuple[float, float]:
    centre, spread = (rate + z * z / (2 * n)), z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)


if __name__ == "__main__":
    main()
