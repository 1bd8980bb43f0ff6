"""Ours beside `implicit` (BPR, ALS) and RecBole (BPR): pairs per CPU second, and quality against CPU seconds.

Everything has 64 dimensions and one thread; CPU seconds are user + system of training alone. Quality is recall@20 and
ndcg@20 by one evaluator (`sparring.evaluate`). A missing library is skipped with a message. Each runs in its own
process, and may have its own interpreter:

    python -m venv peer && peer/bin/pip install implicit
    python benchmarks/peers.py --implicit-python peer/bin/python --recbole-python other/bin/python

(or set IMPLICIT_PYTHON and RECBOLE_PYTHON, which benchmarks/all.py passes on). ALS has alpha 40, regularization 10
and its defaults otherwise. The learning rate, temperature and batch size of our curves were chosen on a held-out
tenth of the training pairs, and the spectral start was checked there; that start and inner products were first tried
with test users in view. The points of a curve are measured on a sample of users, the same for all.

RecBole 1.2.1 installs beside numpy 2 with `pip install torch recbole "setuptools<81"`; _peer_child.py restores the
names that numpy 2 removed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from _shared import RESULTS, Clock, Pairs, gowalla_lightgcn, interactions, quality, table
from sparring import Run, Setup, Split, Term, build, compose, fit, recipes
from sparring.negatives import InBatch
from sparring.training.loop import TrainingProgress

HERE = Path(__file__).resolve().parent
MODULE = {"implicit-als": "implicit", "implicit-bpr": "implicit", "recbole-bpr": "recbole"}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Point:
    """Tables after a number of CPU seconds and training pairs, with their metrics."""

    cpu: float
    pairs: int
    worth: dict[str, float]


class Enough(Exception):
    """The CPU seconds of a curve are spent."""


def peer(what: str, python: str, data: Pairs, sample: int) -> list[Point]:
    """Train another library's model in its own interpreter; [] with a message where it is absent."""
    known = subprocess.run(
        [python, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec('{MODULE[what]}') is None)"], check=False
    )
    if known.returncode:
        print(
            f"{what}: skipped, {python} has no module {MODULE[what]} (pip install {MODULE[what]}, or "
            f"--{MODULE[what]}-python PATH)"
        )
        return []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pairs.npz"
        np.savez(
            source,
            **{
                name: getattr(data, name)
                for name in ("users", "items", "test_users", "test_items", "n_users", "n_items")
            },
        )
        command = [python, str(HERE / "_peer_child.py"), what, str(source), folder]
        ran = subprocess.run(
            command, env=os.environ | ONE_THREAD, cwd=folder, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            print(f"{what}: skipped, it failed: {(ran.stderr.strip().splitlines() or ['no message'])[-1]}")
            return []
        curve = json.loads((Path(folder) / "curve.json").read_text())
        points = []
        for at, point in enumerate(curve["points"], 1):
            with np.load(Path(folder) / point["tables"]) as tables:
                worth = quality(tables["users"], tables["items"], data, sample=sample)
            points.append(Point(point["cpu"], at * curve["pairs_per_point"], worth))
        return points


def ours(make: Callable[[], Run], data: Pairs, at: Sequence[float], sample: int) -> list[Point]:
    """The curve of one of our runs through `fit`: tables after each of these CPU seconds, `make` included."""
    clock, points, pairs = Clock(), list[Point](), 0
    run = make()

    def tick(epoch: int, step: int, loss: torch.Tensor) -> None:
        nonlocal pairs
        pairs = min(pairs + run.setup.batches.batch_size, (epoch + 1) * len(data))
        cpu = clock.read()[0]
        if cpu >= at[len(points)]:
            clock.leave_out(lambda: points.append(Point(cpu, pairs, worth())))
            if len(points) == len(at):
                raise Enough

    def worth() -> dict[str, float]:
        users = run.model.query_vectors(torch.arange(data.n_users))
        return quality(users, run.model.item_vectors(), data, sample=sample)

    with contextlib.suppress(Enough):
        fit(run, Split(interactions(data)), device="cpu", progress=TrainingProgress(step=tick))
    return points


def warm_up(data: Pairs) -> None:
    """One short run, so that no curve pays for PyTorch's imports at the first optimiser."""
    train = interactions(data)
    few = Split(train.subset(np.arange(1000)))
    fit(compose(train, Setup.of(epochs=1, optimizer="row-adagrad"), Term(1.0, InBatch())), few, device="cpu")


def bpr(data: Pairs, epochs: int = 2) -> Point:
    """Our BPR: row-wise Adagrad on the rows of the batch, one uniform negative for each query."""
    train = interactions(data)
    setup = Setup.of(
        score="dot", tau=1.0, optimizer="row-adagrad", lr=0.05, batch_size=8192, epochs=epochs, patience=None
    )
    run = recipes.bpr(train, setup)
    clock, spent = Clock(), 0.0

    def tick(epoch: int, step: int, loss: torch.Tensor) -> None:
        nonlocal spent
        spent = clock.read()[0]

    fit(run, Split(train), device="cpu", progress=TrainingProgress(step=tick))
    users = run.model.query_vectors(torch.arange(data.n_users))
    return Point(spent, epochs * len(train), quality(users, run.model.item_vectors(), data))


def quick(data: Pairs, init: str, lr: float = 0.05) -> Callable[[], Run]:
    """The recipe `quick`, from random or from spectral tables."""
    train = interactions(data)
    return lambda: build("quick", train, {"init": init, "lr": lr, "epochs": 1000, "patience": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = sys.executable
    parser.add_argument(
        "--implicit-python", default=os.environ.get("IMPLICIT_PYTHON", here), help="an interpreter that has implicit"
    )
    parser.add_argument(
        "--recbole-python", default=os.environ.get("RECBOLE_PYTHON", here), help="an interpreter that has RecBole"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="ignored: always one, since CPU seconds of several threads do not compare",
    )
    parser.add_argument("--sample", type=int, default=6000, help="users in the points of a curve; 0 = all")
    parser.add_argument(
        "--seconds", default="0.5,1,1.5,2,3,4,5,6,8,10", help="CPU seconds at which our curves are measured"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = gowalla_lightgcn()
    print(
        f"{data.source}: {data.n_users:,} users, {data.n_items:,} items, {len(data):,} training "
        "pairs; 64 dimensions, one thread\n"
    )

    warm_up(data)
    mine = bpr(data)
    rows = [("ours: BPR, row-wise Adagrad, B = 8192", mine)]
    for what, python in (("implicit-bpr", given.implicit_python), ("recbole-bpr", given.recbole_python)):
        rows += [(what, points[-1]) for points in [peer(what, python, data, 0)] if points]
    print(
        table(
            ["BPR", "pairs per CPU s", "times ours", "epochs", "recall@20", "ndcg@20"],
            [
                [
                    name,
                    f"{p.pairs / p.cpu:,.0f}",
                    f"{p.pairs / p.cpu / (mine.pairs / mine.cpu):.2f}",
                    f"{p.pairs / len(data):.0f}",
                    *(f"{v:.4f}" for v in p.worth.values()),
                ]
                for name, p in rows
            ],
        )
    )
    print(f"claim: ours at least 380,000 pairs per CPU second: {'yes' if mine.pairs / mine.cpu >= 380_000 else 'NO'}\n")

    at = [float(second) for second in given.seconds.split(",")]
    curves = {
        "implicit ALS (alpha 40, regularization 10)": peer("implicit-als", given.implicit_python, data, given.sample),
        "ours: spectral start, dot": ours(quick(data, "spectral"), data, at, given.sample),
        "ours: random start, dot": ours(quick(data, "normal", lr=0.15), data, at, given.sample),
    }
    for name, points in curves.items():
        if points:
            print(
                f"{name}\n"
                + table(["CPU s", "epochs", "recall@20", "ndcg@20"], [_line(p, data) for p in points])
                + "\n"
            )
    compare(curves)
    RESULTS.mkdir(exist_ok=True)
    stored = {name: [{"cpu": p.cpu, "pairs": p.pairs, **p.worth} for p in points] for name, points in curves.items()}
    (RESULTS / "peers.json").write_text(json.dumps(stored, indent=1))


def compare(curves: dict[str, list[Point]]) -> None:
    """Ours beside ALS at the CPU time that all its iterations take, and at the time of its best iteration."""
    als, mine = curves["implicit ALS (alpha 40, regularization 10)"], curves["ours: spectral start, dot"]
    if not als:
        return
    best = max(als, key=lambda point: point.worth["recall@20"])
    for name, theirs in (("after all its iterations", als[-1]), ("at its best iteration", best)):
        by_then = [point for point in mine if point.cpu <= theirs.cpu * 1.02]
        if by_then:
            reached = by_then[-1]
            ahead = "yes" if reached.worth["recall@20"] >= theirs.worth["recall@20"] else "NO"
            print(f"implicit ALS {name}: recall@20 {theirs.worth['recall@20']:.4f} in {theirs.cpu:.1f} CPU s")
            print(f"  ours {reached.worth['recall@20']:.4f} in {reached.cpu:.1f} CPU s; at least as good: {ahead}")


def _line(point: Point, data: Pairs) -> list[str]:
    return [f"{point.cpu:.2f}", f"{point.pairs / len(data):.2f}", *(f"{value:.4f}" for value in point.worth.values())]


if __name__ == "__main__":
    main()
