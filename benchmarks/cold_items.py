"""Claim: uniform negatives among items with a training pair do not bury cold items, and cost the lists nothing.

    python benchmarks/cold_items.py --data amazon_electronics_2023 --epochs 10

The split is by time, so some test items have no training pair. Two item towers that can encode such items, over texts
and over features and ids, are each trained twice, with the same settings and seed: with negatives from the complete
catalogue, and with negatives from the items that have a training pair, which is what every recipe draws from. A query
is the mean of its items. Prints recall@20 and ndcg@20 of warm and cold test items in the ranking of all items, and of
cold ones in the ranking of cold items alone. The claim holds for a tower if recall@20 of cold items grows and that of
all test items falls by at most 2 %. A list has 20 places, so warm items may give way to cold ones.
"""

from __future__ import annotations

import argparse
import time

from _shared import DATA
from sparring.core.devices import pick_device
from sparring.data import read, split
from sparring.losses import softmax_loss
from sparring.negatives import Sampled, Uniform
from sparring.recipes.in_batch import DEFAULT, with_pairs
from sparring.recipes.run import Term, compose
from sparring.training.fitting import fit

TOWERS: dict[str, dict[str, object]] = {
    "text": {"item_tower": "text", "encoder": "bag"},
    "features": {"hidden": (128, 64)},
}
SHOWN = ("warm", "cold", "cold among cold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="amazon_electronics_2023", help="a set with an items table and times")
    parser.add_argument("--towers", default="text,features", help="text, features or both")
    parser.add_argument("--features", default="category,brand", help="columns of the items table")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--item-bias", action="store_true", help="with a bias per item, 0 for cold ones")
    parser.add_argument("--n", type=int, default=1024, help="negatives, shared by the batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    data = read(DATA / args.data)
    parts = split(data, "temporal", valid=0.1, test=0.2)
    assert parts.test is not None
    counts, device = parts.train.counts(), str(pick_device(args.device))
    cold = int((counts[parts.test.items] == 0).sum())
    print(f"{args.data}, split by time: {data}; {int((counts == 0).sum()):,} items without a training pair")
    print(f"{cold:,} of {len(parts.test):,} test pairs are of cold items; {args.epochs} epochs on {device}")
    header = [f"{metric} {stratum}" for metric in ("recall@20", "ndcg@20") for stratum in SHOWN]
    print("| item tower | negatives from | recall@20 | " + " | ".join(header) + " | seconds |")
    print("|---|---|" + "---:|" * (len(header) + 2))
    for name in args.towers.split(","):
        towers = TOWERS[name] | ({"item_features": tuple(args.features.split(","))} if name == "features" else {})
        setup = DEFAULT.replaced(
            query_tower="history", epochs=args.epochs, seed=args.seed, item_bias=args.item_bias, **towers
        )
        recall: dict[str, dict[str, float]] = {}
        for source, among in (("all items", None), ("items with pairs", with_pairs(parts.train))):
            began = time.perf_counter()
            negatives = Sampled(Uniform(data.n_items, among), args.n, correction="none")
            fitted = fit(compose(parts.train, setup, Term(1.0, negatives, softmax_loss)), parts, device=device, k=(20,))
            assert fitted.test is not None
            strata = fitted.test.strata
            recall[source] = {stratum: strata[stratum]["recall@20"] for stratum in SHOWN} | fitted.test.metrics
            cells = [strata[stratum][metric] for metric in ("recall@20", "ndcg@20") for stratum in SHOWN]
            row = [name, source, *(f"{value:.4f}" for value in (fitted.test.metrics["recall@20"], *cells))]
            print("| " + " | ".join([*row, f"{time.perf_counter() - began:.0f}"]) + " |", flush=True)
        before, after = recall.values()
        holds = after["cold"] > before["cold"] and after["recall@20"] >= 0.98 * before["recall@20"]
        kinds = {"cold": "cold", "warm": "warm", "recall@20": "all"}
        change = ", ".join(f"{of} items {before[key]:.4f} to {after[key]:.4f}" for key, of in kinds.items())
        print(f"{name}: recall@20 of {change}: {'yes' if holds else 'NO'}", flush=True)


if __name__ == "__main__":
    main()
