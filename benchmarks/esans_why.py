"""Why ESANS is behind uniform negatives: its draws are far from uniform, and nothing corrects them.

First a ranking of items by their number of training pairs, the same for all queries: every method must beat it. Then
uniform negatives and ESANS: as in the paper; with each draw weighted by one over its expected count
(`correction=counts`, ours); both without the simple mixtures; with the query's known positives masked; and three
baselines of the paper. All else is equal. For each the temperature with the best validation recall@50 of the first
seed is used for all seeds (Ada-tau has its own); the test part is ranked once per seed.

    python benchmarks/esans_why.py --codes codes.safetensors [--data FOLDER] [--epochs 12] [--seeds 3] [--out why.jsonl]

FOLDER has interactions.parquet (default: TikTok). `sparring cluster` or `sparring reproduce esans-main --codes
FOLDER` writes the codes; without them clusters are those of behaviour. A training on TikTok takes about 50 s
(uniform) or 100 s on one free CPU core; results already in --out are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

import sparring as sp
from _shared import DATA, Tables, table
from sparring.recipes.setup import Setup

POPULAR = "popularity"
UNIFORM: dict[str, object] = {"n": 5120, "per_query": False, "correction": "none"}
PLAIN: dict[str, object] = {"simple_mixtures": False}
CORRECTED: dict[str, object] = {"correction": "counts"}
METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "UNS": ("uns", UNIFORM),
    "ESANS": ("esans", {}),
    "ESANS, without simple mixtures": ("esans", PLAIN),
    "ESANS, corrected": ("esans", CORRECTED),
    "ESANS, corrected, without simple mixtures": ("esans", CORRECTED | PLAIN),
    "ESANS, known positives masked": ("esans", {"exclude": "known"}),
    "MixGCF": ("mixgcf", {"n": 64, "per_query": True}),
    "FairNeg": ("fairneg", {"n": 5120}),
    "Ada-tau": ("ada_tau", {"n": 5120, "per_query": False}),
}
SETUP = Setup.of(
    dim=64, score="cosine", item_bias=True, batch_size=512, optimizer="row-adam", lr=0.02, schedule="linear",
    weight_decay=0.0, patience=None, select="recall@50", eval_every=4, valid_queries=5000,
)  # fmt: skip
CUTOFFS = (50, 200)
Key = tuple[str, float, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA / "tiktok_mm")
    parser.add_argument("--codes", default="behaviour")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--taus", type=float, nargs="+", default=[0.25, 0.4])
    parser.add_argument(
        "--methods", nargs="+", default=[POPULAR, *METHODS], choices=[POPULAR, *METHODS], metavar="NAME"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a line of JSON per training; results already there are not repeated")
    asked = parser.parse_args()
    if not (asked.data / "interactions.parquet").exists():
        sys.exit(f"skipped: {asked.data}/interactions.parquet is absent; give another folder with --data")
    parts = sp.split(sp.read(asked.data / "interactions.parquet"), "auto", valid=1 / 9, test=0.1, seed=0)
    lines = asked.out.read_text().splitlines() if asked.out and asked.out.exists() else []
    found: dict[Key, dict[str, float]] = {
        (one["method"], one["tau"], one["seed"]): one for one in map(json.loads, lines)
    }

    def trained(method: str, tau: float, seed: int) -> dict[str, float]:
        if (method, tau, seed) not in found:
            recipe, own = METHODS[method]
            settings = (
                own
                | ({"codes": asked.codes} if recipe == "esans" else {})
                | {"tau": tau, "seed": seed, "epochs": asked.epochs}
            )
            fitted = sp.fit(
                sp.build(recipe, parts.train, settings, SETUP),
                parts,
                device=asked.device,
                k=CUTOFFS,
                metrics=("recall",),
            )
            assert fitted.test is not None
            valid = max(record["recall@50"] for record in fitted.history if "recall@50" in record)
            one = {
                "method": method,
                "tau": tau,
                "seed": seed,
                "valid": valid,
                **fitted.test.metrics,
                "seconds": fitted.seconds,
            }
            print(json.dumps(one), flush=True)
            if asked.out:
                with asked.out.open("a") as file:
                    file.write(json.dumps(one) + "\n")
            found[method, tau, seed] = one
        return found[method, tau, seed]

    seeds, rows, base = [10 * n for n in range(1, asked.seeds + 1)], [], None
    if POPULAR in asked.methods:
        counts = torch.from_numpy(parts.train.counts()).float().unsqueeze(1)
        assert parts.test is not None
        alike = Tables(torch.ones(parts.train.n_queries, 1), counts)
        metrics = sp.evaluate(alike, parts.test, parts.seen_for("test"), CUTOFFS, ("recall",)).metrics
        rows.append([POPULAR, "", *(f"{metrics[f'recall@{k}']:.4f}" for k in CUTOFFS)])
    for method in (method for method in asked.methods if method != POPULAR):
        best = max(asked.taus, key=lambda tau: trained(method, tau, seeds[0])["valid"])
        every = {
            name: np.array([trained(method, best, seed)[name] for seed in seeds])
            for name in (f"recall@{k}" for k in CUTOFFS)
        }
        base = base or {name: values.mean() for name, values in every.items()}
        cells = [
            f"{x.mean():.4f} ± {x.std(ddof=min(1, len(x) - 1)):.4f} ({x.mean() / base[name] - 1:+.1%})"
            for name, x in every.items()
        ]
        rows.append([method, f"{best:g}", *cells])
    print(table(["", "tau", *(f"recall@{k}" for k in CUTOFFS)], rows))


if __name__ == "__main__":
    main()
