"""Quality against CPU seconds: `default`, `quick`, `ials`, `ease`, `bpr` and `implicit`'s ALS and BPR, one thread.

    pip install "sparring[bench]"
    python benchmarks/quality.py --data amazon_electronics_2023 --data amazon_beauty --figure quality.png

For each budget of CPU seconds a recipe gets as many epochs as fit, on a schedule of that length: one and two epochs are
timed first, then the training is measured, once more with fewer epochs if it took longer. CPU seconds are user + system
of everything but imports, reading the file and the test: the start, validation and choices. `ease` has one point, the
time of its inverse. `implicit` trains on the same pairs in 1, 2, 4, ... sweeps or epochs. NDCG@20 and recall@20 are
those of the test part of a random split; no model knows the validation items. The claim: at each budget the best of
ours is not behind the best of theirs.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _shared import DATA, Clock, table
from ials import Tables
from sparring import Split, build, evaluate, fit, read, split
from sparring.data.histories import past_of

BUDGETS = (5.0, 20.0, 60.0, 200.0)
OURS: dict[str, dict[str, Any]] = {
    "default": {},
    "quick": {},
    "ials": {"dim": 64},
    "bpr": {"dim": 64},
    "ease": {},
}
MOST = {"quick": 20, "ials": 16, "bpr": 64}  # epochs; `default` has those of its own schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", required=True, help="folder of SPARRING_DATA; repeat")
    parser.add_argument("--budgets", default=",".join(f"{budget:g}" for budget in BUDGETS), help="CPU seconds")
    parser.add_argument("--runs", default=",".join((*OURS, *THEIRS)), help="recipes, and models of `implicit`")
    parser.add_argument("--figure", type=Path, help="draw the curves to this file")
    parser.add_argument("--out", type=Path, help="JSON lines of points: curves in it are read, others are added")
    given = parser.parse_args()
    logging.getLogger("sparring").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports that the first optimiser of a process needs
    budgets = [float(budget) for budget in given.budgets.split(",")]
    found: dict[str, dict[str, list[Point]]] = {}
    for name in given.data:
        file = DATA / name / "interactions.parquet"
        if not file.exists():
            print(f"skipped {name}: {file} is absent")
            continue
        how = "file" if name == "gowalla_lightgcn" else "random"
        parts = split(read(file), how, valid=0.1, test=0.2, seed=0)
        curves = {}
        for run in given.runs.split(","):
            curves[run] = known(given.out, name, run)
            if not curves[run]:
                curves[run] = THEIRS[run](parts, budgets[-1]) if run in THEIRS else curve(run, parts, budgets)
                write(given.out, name, run, curves[run])
        found[name] = curves
        print(f"\n{name}, {len(parts.train):,} training pairs; NDCG@20 (recall@20) of the test part\n")
        print(
            table(["CPU s", *curves], [[f"{b:g}", *(_cell(points, b) for points in curves.values())] for b in budgets])
        )
        for budget in budgets:
            print(verdict(curves, budget))
    if given.figure is not None and found:
        draw(found, given.figure)


Point = tuple[float, float, float]  # CPU seconds, NDCG@20, recall@20


def curve(recipe: str, parts: Split, budgets: list[float]) -> list[Point]:
    """The test figures of trainings that about fill the budgets, each with the CPU seconds that it took."""
    if recipe == "ease":
        return [_trained(recipe, parts, {})]
    points = {epochs: _trained(recipe, parts, {"epochs": epochs}) for epochs in (1, 2)}
    fixed = points[1][0]
    pace = max(points[2][0] - fixed, 0.01 * fixed)
    most = MOST.get(recipe, build(recipe, parts.train).setup.training.epochs)
    for budget in budgets:
        for _ in range(2):
            epochs = min(1 + int(0.95 * (budget - fixed) / pace), most)
            if epochs in points or epochs < 1:
                break
            points[epochs] = _trained(recipe, parts, {"epochs": epochs})
            if points[epochs][0] <= budget:
                break
            pace = (points[epochs][0] - fixed) / (epochs - 1)
    return sorted(points.values())


def _trained(recipe: str, parts: Split, settings: dict[str, Any]) -> Point:
    clock = Clock()
    run = build(recipe, parts.train, {"select": "ndcg@20", **OURS.get(recipe, {}), **settings})
    fitted = fit(run, Split(parts.train, parts.valid), device="cpu")
    spent = clock.read()[0]
    model = fitted.run.model
    if model.past_readers():  # `fit` gave them the validation items
        model.remember(past_of(parts, "valid").latest(run.setup.model.history))
    return spent, *_figures(model, parts)


def _figures(model: Any, parts: Split) -> tuple[float, float]:
    assert parts.test is not None
    found = evaluate(model, parts.test, parts.seen_for("test"), (20,), ("ndcg", "recall")).metrics
    return found["ndcg@20"], found["recall@20"]


def _als(parts: Split, budget: float) -> list[Point]:
    from implicit.cpu.als import AlternatingLeastSquares

    return _theirs(
        lambda n: AlternatingLeastSquares(
            factors=64, alpha=10, regularization=10, iterations=n, num_threads=1, random_state=1
        ),
        parts,
        budget,
        64,
    )


def _bpr(parts: Split, budget: float) -> list[Point]:
    from implicit.cpu.bpr import BayesianPersonalizedRanking

    return _theirs(
        lambda n: BayesianPersonalizedRanking(factors=64, iterations=n, num_threads=1, random_state=1),
        parts,
        budget,
        256,
    )


def _theirs(make: Callable[[int], Any], parts: Split, budget: float, most: int) -> list[Point]:
    """Trainings of `implicit` of 1, 2, 4, ... iterations, as long as they fit the budget."""
    import scipy.sparse

    train = parts.train
    ones = np.ones(len(train), np.float32)
    matrix = scipy.sparse.csr_matrix((ones, (train.queries, train.items)), shape=(train.n_queries, train.n_items))
    points: list[Point] = []
    for n in (2**power for power in range(int(np.log2(most)) + 1)):
        clock, model = Clock(), make(n)
        model.fit(matrix, show_progress=False)
        spent = clock.read()[0]
        if spent > budget:
            break
        tables = Tables(torch.from_numpy(model.user_factors.copy()), torch.from_numpy(model.item_factors.copy()))
        points.append((spent, *_figures(tables, parts)))
    return points


def best_at(points: list[Point], budget: float) -> Point | None:
    """The point with the best NDCG among those within a budget."""
    return max((point for point in points if point[0] <= budget), key=lambda point: point[1], default=None)


def _cell(points: list[Point], budget: float) -> str:
    point = best_at(points, budget)
    return "" if point is None else f"{point[1]:.4f} ({point[2]:.4f})"


def verdict(curves: dict[str, list[Point]], budget: float) -> str:
    """Whether ours are behind `implicit` at a budget, and `default` behind any other of ours."""
    values = {name: point[1] for name, points in curves.items() if (point := best_at(points, budget)) is not None}
    ours = {name: value for name, value in values.items() if not name.startswith("implicit")}
    theirs = max((value for name, value in values.items() if name not in ours), default=0.0)
    leader = max(ours, key=lambda name: ours[name], default="none")
    ahead = "yes" if max(ours.values(), default=0.0) >= theirs else "NO"
    return f"{budget:g} CPU s: not behind implicit: {ahead}; the best of ours: {leader}"


def draw(found: dict[str, dict[str, list[Point]]], path: Path) -> None:
    """One panel per set: NDCG@20 against CPU seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.6), squeeze=False)
    for axis, (name, curves) in zip(axes[0], found.items(), strict=True):
        for run, points in curves.items():
            if points:
                cpu, ndcg, _ = zip(*sorted(points), strict=True)
                axis.plot(cpu, ndcg, "--" if run.startswith("implicit") else "-", marker="o", markersize=3, label=run)
        axis.set(xscale="log", xlabel="CPU seconds", ylabel="NDCG@20, test", title=name)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def known(path: Path | None, name: str, run: str) -> list[Point]:
    """The points of a curve that were measured before."""
    if path is None or not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [
        (each["cpu"], each["ndcg@20"], each["recall@20"]) for each in lines if (each["set"], each["run"]) == (name, run)
    ]


def write(path: Path | None, name: str, run: str, points: list[Point]) -> None:
    if path is not None:
        with path.open("a") as file:
            for cpu, ndcg, recall in points:
                line = {"set": name, "run": run, "cpu": round(cpu, 2), "ndcg@20": ndcg, "recall@20": recall}
                file.write(json.dumps(line) + "\n")


THEIRS: dict[str, Callable[[Split, float], list[Point]]] = {"implicit ALS": _als, "implicit BPR": _bpr}

if __name__ == "__main__":
    main()
