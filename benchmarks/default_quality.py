"""Quality of `default` beside popularity, EASE and iALS: recall@20 and NDCG@20 on the test parts of known sets.

    python benchmarks/default_quality.py --data amazon_beauty --data tafeng --device cuda
    python benchmarks/default_quality.py --data ml1m_mm --run default --run ease,lam=1000 --split leave-last-out
    python benchmarks/default_quality.py --data tafeng --run recent --run default --split temporal

Everything is chosen by NDCG@20 on the validation part: the epoch, the temperature of `default`, lambda of EASE, alpha
and reg of iALS, the half-life of recent popularity. Training and validation pairs are left out of the test lists. Each
run is one line of JSON; the ratio to the best of the other runs comes last. LightGCN's Gowalla keeps its own test part.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from typing import Any

from _shared import DATA
from sparring import Split, build, fit, read, split

RUNS = ["popularity", "ease", "ials,dim=64", "ials,dim=256", "default"]
GRIDS: dict[str, dict[str, list[float]]] = {
    "recent": {"half_life": [0.3, 0.1, 0.03, 0.01]},
    "ease": {"lam": [30, 100, 300, 1000, 3000]},
    "ials": {"alpha": [0.03, 0.1, 0.3, 1], "reg": [0.001, 0.003, 0.01]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", required=True, help="folder of SPARRING_DATA; repeat")
    parser.add_argument("--run", action="append", metavar="RECIPE,NAME=VALUE", help=f"default: {' '.join(RUNS)}")
    parser.add_argument("--split", default="random")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    for name in given.data:
        file = DATA / name / "interactions.parquet"
        if not file.exists():
            print(f"skipped {name}: {file} is absent")
            continue
        how = "file" if name == "gowalla_lightgcn" else given.split
        parts = split(read(file), how, valid=0.1, test=0.2, seed=0)
        found = {}
        for run in given.run or RUNS:
            found[run] = best_of(run, parts, given.device)
            print(json.dumps({"set": name, "split": how, "run": run, **found[run]}), flush=True)
        others = [each["ndcg@20"] for run, each in found.items() if not run.startswith("default")]
        if others:
            for run in (run for run in found if run.startswith("default")):
                print(f"{name}: {run} has {found[run]['ndcg@20'] / max(others):.3f} of the best other NDCG@20")


def best_of(run: str, parts: Split, device: str) -> dict[str, Any]:
    """The test figures of the settings with the best validation."""
    recipe, *settings = run.split(",")
    fixed: dict[str, Any] = {"select": "ndcg@20", **dict(each.split("=", 1) for each in settings)}
    grid = {name: values for name, values in GRIDS.get(recipe, {}).items() if name not in fixed}
    best: dict[str, Any] = {}
    began = time.perf_counter()
    for values in product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        fitted = fit(
            build("popularity" if recipe == "recent" else recipe, parts.train, fixed | chosen),
            parts,
            device=device,
            k=(20,),
        )
        valid = max(record["ndcg@20"] for record in fitted.history if "ndcg@20" in record)
        if not best or valid > best["valid"]:
            assert fitted.test is not None
            tau = {"tau": fitted.run.setup.temperature.tau} if fitted.run.solver is None else {}
            figures = {name: round(fitted.test.metrics[name], 4) for name in ("recall@20", "ndcg@20")}
            best = {"valid": round(valid, 4), **figures, **chosen, **tau, "epoch": fitted.best_epoch}
    return best | {"seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    main()
