"""Claim: the in-batch family does what the XIR release does: standard NDCG@10 beside an independent implementation.

    python benchmarks/xir_table.py [--data DIR] [--epochs 10] [--methods ssl_pop,bir]

Gowalla as in the XIR paper (random 80/20 per user, seed 10), d=32, B=2048, dense Adam, lr 0.01, L2 1e-5, lr x 0.95
every 5 epochs, N(0, 1) start, positive left among the negatives as in the release. Ten epochs of one method take 20 s
on a GPU, minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import sparring as sp

RELEASE: dict[str, object] = {"form": "release"}
METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "ssl": ("ssl", RELEASE),
    "ssl_pop": ("ssl_pop", RELEASE),
    "mns": ("mns", RELEASE),
    "bir": ("bir", {**RELEASE, "draw": "multinomial"}),
    "bir_closed": ("bir", RELEASE),
    "xir": ("xir", {**RELEASE, "draw": "multinomial", "lam": 0.2}),
    "xir_closed": ("xir", {**RELEASE, "lam": 0.2}),
    "full_softmax": ("full_softmax", {}),
}
INDEPENDENT = {  # (method, epochs) -> ndcg@10
    ("ssl", 10): 0.0877,
    ("ssl_pop", 10): 0.1211,
    ("mns", 10): 0.1199,
    ("bir", 10): 0.1195,
    ("bir_closed", 10): 0.1199,
    ("xir", 10): 0.1178,
    ("full_softmax", 10): 0.1193,
    ("ssl_pop", 5): 0.1068,
    ("bir", 5): 0.1063,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared/data/gowalla_xir")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    if not (arguments.data / "interactions.parquet").exists():
        sys.exit(f"skipped: {arguments.data}/interactions.parquet is absent; give the XIR paper's Gowalla with --data")
    split = sp.split(sp.read(arguments.data / "interactions.parquet"), "random", valid=0.0, test=0.2, seed=10)
    rows: list[dict[str, Any]] = []
    print(
        f"{'method':14}{'ndcg@10':>9}{'independent':>13}{'difference':>12}{'recall@10':>11}{'ndcg_xir@10':>13}{'s/epoch':>9}"
    )
    for method in arguments.methods.split(","):
        recipe, settings = METHODS[method]
        run = sp.build(recipe, split.train, {"lr": 0.01, "epochs": arguments.epochs, "seed": 10, **settings})
        fitted = sp.fit(run, split, device=arguments.device, k=(10, 20), metrics=("recall", "ndcg", "ndcg_xir_release"))
        assert fitted.test is not None
        ours, theirs = fitted.test.metrics, INDEPENDENT.get((method, arguments.epochs))
        beside = f"{theirs:13.4f}{(ours['ndcg@10'] / theirs - 1) * 100:+11.1f}%" if theirs else f"{'':13}{'':12}"
        seconds = fitted.seconds / arguments.epochs
        rest = f"{ours['recall@10']:11.4f}{ours['ndcg_xir_release@10']:13.4f}{seconds:9.2f}"
        print(f"{method:14}{ours['ndcg@10']:9.4f}{beside}{rest}", flush=True)
        rows.append({"method": method, **ours, "independent": theirs, "seconds_per_epoch": seconds})
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
