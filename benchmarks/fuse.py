"""Quality of fused runs on a random split: NDCG@20 of each run and of their fusion, on the test part.

    python benchmarks/fuse.py --data amazon_beauty --run ease,lam=100 --run default
    python benchmarks/fuse.py --data ml1m_mm --run ease,lam=1000 --run ials,alpha=1

Epochs and weights are chosen by NDCG@20 on the validation part. Training and validation pairs are left out of the test
lists.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from _shared import DATA
from sparring import build, fit, fuse, read, split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="amazon_beauty", help="folder of SPARRING_DATA")
    parser.add_argument("--run", action="append", required=True, metavar="RECIPE,NAME=VALUE")
    parser.add_argument("--by", default="auto")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    parts = split(read(DATA / given.data / "interactions.parquet"), "random", valid=0.1, test=0.2, seed=0)
    with tempfile.TemporaryDirectory() as place:
        folders = []
        for number, run in enumerate(given.run):
            recipe, *settings = run.split(",")
            asked = {"select": "ndcg@20", **dict(each.split("=", 1) for each in settings)}
            folders.append(Path(place) / f"{number}-{recipe}")
            fit(build(recipe, parts.train, asked), parts, folders[-1], device=given.device)
        fused = fuse(folders, parts, by=given.by, device=given.device)
    weights = dict(zip((source.name for source in fused.model.sources), fused.model.weights.tolist(), strict=True))
    assert fused.test is not None
    for name, test in {**fused.parts, f"fused by {fused.model.by}": fused.test}.items():
        figures = f"recall@20 {test.metrics['recall@20']:.4f}, NDCG@20 {test.metrics['ndcg@20']:.4f}"
        print(f"{given.data}, {name}: {figures}" + (f", weight {weights[name]:.2f}" if name in weights else ""))


if __name__ == "__main__":
    main()
