"""Quality of the solved baselines on a random split: chosen by NDCG@20 on the validation part, ranked once on the test.

    python benchmarks/baselines.py --data ml1m_mm --recipe ease --set lam=100,300,1000
    python benchmarks/baselines.py --data amazon_beauty --recipe ials --set alpha=0.03 --set reg=0.003 --set epochs=12

Every combination of the values is tried. Training and validation pairs are left out of the test lists.
"""

from __future__ import annotations

import argparse
import itertools

from _shared import DATA
from sparring import Split, build, evaluate, fit, read, split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="ml1m_mm", help="folder of SPARRING_DATA")
    parser.add_argument("--recipe", default="ease")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE,VALUE")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    grid = {name: values.split(",") for name, _, values in (each.partition("=") for each in given.set)}
    parts = split(read(DATA / given.data / "interactions.parquet"), "random", valid=0.1, test=0.2, seed=0)
    assert parts.test is not None
    tried = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        run = build(given.recipe, parts.train, {**settings, "select": "ndcg@20", "patience": "none"})
        history = fit(run, Split(parts.train, parts.valid), device=given.device).history
        score = max(record["ndcg@20"] for record in history)
        print(f"{given.recipe} {settings}: validation NDCG@20 {score:.4f}", flush=True)
        if not tried or score > tried[0]:
            tried = [score, run]
    run = tried[1]
    seen = parts.seen_for("test").to(run.model.device)
    found = evaluate(run.model, parts.test, seen, (20,), ("recall", "ndcg")).metrics
    print(f"{given.data}, {given.recipe} {run.arguments}: test {found['recall@20']:.4f} / {found['ndcg@20']:.4f}")


if __name__ == "__main__":
    main()
