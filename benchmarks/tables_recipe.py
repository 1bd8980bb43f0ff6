"""Claim: `tables` reaches recall@20 >= 0.21 and ndcg@20 >= 0.163 on the XIR paper's Gowalla with 64 dimensions.

    python benchmarks/tables_recipe.py [--data DIR] [--epochs 60] [--device cuda]

Random 80/20 per user, seed 10; all training pairs, no validation part, the last epoch. On one CPU thread an epoch
takes about half a minute; 60 epochs are enough for the claim.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import sparring as sp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared/data/gowalla_xir")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    if not (arguments.data / "interactions.parquet").exists():
        sys.exit(f"skipped: {arguments.data}/interactions.parquet is absent; give the XIR paper's Gowalla with --data")
    split = sp.split(sp.read(arguments.data / "interactions.parquet"), "random", valid=0.0, test=0.2, seed=10)
    run = sp.build("tables", split.train, {"epochs": arguments.epochs, "tau": 0.105})
    began = time.perf_counter()
    fitted = sp.fit(run, split, device=arguments.device, k=(10, 20, 50), metrics=("recall", "ndcg"))
    print(
        f"tables, {arguments.epochs} epochs in {fitted.seconds:.0f} s of training, "
        f"{time.perf_counter() - began:.0f} s in all"
    )
    print(fitted.test)


if __name__ == "__main__":
    main()
