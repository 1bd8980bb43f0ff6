"""Our `ials` beside `implicit`'s ALS at the same width: validation NDCG@20 against CPU seconds, one thread, one run.

    pip install "sparring[bench]"
    python benchmarks/ials.py --data amazon_beauty --dim 64

Sweeps alternate between the two, so that both meet the same load. CPU seconds are user + system of the sweeps alone,
ours with the start. Both weigh a pair 1 / alpha times as much as any other; each has the best of three regularisations
on the validation part. `implicit` does three steps of conjugate gradients per row and sweep (its default) and has one
regularisation for all rows; ours starts from a truncated SVD, solves each row to rounding, and scales regularisation by
the row's weight. The claim: at the CPU seconds of every sweep of `implicit` that has 95 % of its best NDCG, ours has at
least as much, up to --margin.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from queue import Queue

import numpy as np
import torch

from _shared import DATA, Clock, table
from sparring import Split, build, evaluate, read, split


def ours(parts: Split, dim: int, alpha: float, reg: float) -> Iterator[tuple[float, torch.Tensor, torch.Tensor]]:
    """(CPU seconds so far, queries, items) after each sweep; the spectral start is part of the first."""
    clock = Clock()
    run = build("ials", parts.train, {"dim": dim, "alpha": alpha, "reg": reg})
    assert run.solver is not None
    spent, sweeps = 0.0, run.solver.sweeps(run.model, parts.train)
    while True:
        with torch.no_grad():
            next(sweeps)
        spent += clock.read()[0]
        yield spent, run.model.query.weight.detach(), run.model.item.weight.detach()
        clock = Clock()


def theirs(parts: Split, dim: int, alpha: float, reg: float) -> Iterator[tuple[float, torch.Tensor, torch.Tensor]]:
    """The same for `implicit`, whose training is a call with a callback: it waits in a thread between two sweeps."""
    import scipy.sparse
    from implicit.cpu.als import AlternatingLeastSquares

    train = parts.train
    ones = np.ones(len(train), np.float32)
    matrix = scipy.sparse.csr_matrix((ones, (train.queries, train.items)), shape=(train.n_queries, train.n_items))
    model = AlternatingLeastSquares(
        factors=dim, alpha=1 / alpha, regularization=reg, iterations=10_000, num_threads=1, random_state=1
    )
    done: Queue[None] = Queue()
    proceed: Queue[None] = Queue()

    def swept(*_: object) -> None:
        done.put(None)
        proceed.get()

    thread = threading.Thread(target=model.fit, args=(matrix,), kwargs={"show_progress": False, "callback": swept})
    thread.daemon = True
    spent, clock = 0.0, Clock()
    thread.start()
    while True:
        done.get()
        spent += clock.read()[0]
        yield spent, torch.from_numpy(model.user_factors.copy()), torch.from_numpy(model.item_factors.copy())
        clock = Clock()
        proceed.put(None)


class Tables:
    """Two tables, for the evaluator."""

    def __init__(self, queries: torch.Tensor, items: torch.Tensor) -> None:
        self.queries, self.items = queries, items

    def encode_queries(self, ids: torch.Tensor) -> torch.Tensor:
        return self.queries[ids]

    def item_vectors(self) -> torch.Tensor:
        return self.items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="amazon_beauty", help="folder of SPARRING_DATA")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--regs", default="0.001,0.003,0.01", help="reg of ours; the best is shown")
    parser.add_argument("--their-regs", default="1,10,100", help="regularization of implicit; the best is shown")
    parser.add_argument("--margin", type=float, default=0.005, help="share of NDCG that counts as level")
    parser.add_argument("--sweeps", type=int, default=12, help="of ours; implicit sweeps until it has spent as much")
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = split(read(DATA / given.data / "interactions.parquet"), "random", valid=0.1, test=0.2, seed=0)
    assert parts.valid is not None
    seen = parts.seen_for("valid")
    mine = {f"ours, reg {reg}": ours(parts, given.dim, given.alpha, float(reg)) for reg in given.regs.split(",")}
    peers = {
        f"implicit, regularization {reg}": theirs(parts, given.dim, given.alpha, float(reg))
        for reg in given.their_regs.split(",")
    }
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in (*mine, *peers)}

    def sweep(name: str, sweeps: Iterator[tuple[float, torch.Tensor, torch.Tensor]]) -> float:
        spent, queries, items = next(sweeps)
        found = evaluate(Tables(queries, items), parts.valid, seen, (20,), ("ndcg",))
        curves[name].append((spent, found.metrics["ndcg@20"]))
        return spent

    for _ in range(given.sweeps):
        most = max(sweep(name, sweeps) for name, sweeps in mine.items())
        for name, sweeps in peers.items():
            while not curves[name] or curves[name][-1][0] < most:
                sweep(name, sweeps)
    best, peer = (max(names, key=lambda name: max(value for _, value in curves[name])) for names in (mine, peers))
    rows = [[name, f"{cpu:.2f}", f"{value:.4f}"] for name in (best, peer) for cpu, value in curves[name]]
    print(table(["after each sweep", "CPU s", "NDCG@20, validation"], rows))
    good = 0.95 * max(value for _, value in curves[peer])
    wins = [
        max((own for spent, own in curves[best] if spent <= cpu), default=0.0) >= (1 - given.margin) * value
        for cpu, value in curves[peer]
        if value >= good and cpu <= curves[best][-1][0]
    ]
    print(f"\n{given.data}, {given.dim} dimensions: not behind implicit per CPU second: {'yes' if all(wins) else 'NO'}")


if __name__ == "__main__":
    main()
