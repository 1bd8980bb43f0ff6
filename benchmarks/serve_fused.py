"""The fused ranking under load beside towers and classifiers: the same items and users, each with its own index.

    python benchmarks/serve_fused.py --cache FOLDER       # 200,000 x 64, 30 s each; the first time builds the indexes
    python benchmarks/serve_fused.py --cache FOLDER --items 20000 --seconds 5

Needs `wrk`. 32 connections ask for single users, k = 10, with their seen items excluded. A classifier is its item's
vector with noise, as training leaves it near its start; the tree is learnt from each user's nearest items. Another
client asks meanwhile, and each of its answers is compared with the exact list of the same ranking: scores must agree,
and the share of listed items is the recall. The bar is a p99 of at most three times that of the towers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import torch

from _serve_load import CONNECTIONS, USERS, K, Seen, cpu_seconds, drive, listen, start
from _shared import table
from index import world
from serve import write_run
from sparring.core.choices import RANKINGS
from sparring.data.interactions import Interactions
from sparring.models.fusion import Fused
from sparring.serving.index import index_files
from sparring.serving.index.faiss_backends import require_faiss
from sparring.serving.index.run_index import FOLDER, build_index
from sparring.training import trained as runs
from sparring.training.folder import finish
from sparring.training.trained import Trained

HELD = 2_000  # users that the tree learns from


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the runs; reused the next time")
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kind", default="auto", help="kind of index; auto tunes over all kinds")
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    torch.set_num_threads(args.threads)
    require_faiss().omp_set_num_threads(args.threads)
    rows, p99 = [], {}
    for ranking in RANKINGS:
        folder = prepared(args, ranking)
        about, loaded, spent, seen = measured(args, folder, ranking)
        p99[ranking] = milliseconds(loaded["p99"])
        answered = f"{np.mean(seen.recall):.4f}"
        rate = f"{int(loaded['requests']) / spent:,.0f}"
        figures = about["kind"], f"{about['measured']['recall']:.4f}", answered
        rows.append((ranking, *figures, f"{float(loaded['rate']):,.0f}", rate, loaded["p50"], loaded["p99"]))
        for line in (*seen.wrong[:5], f"refused {loaded['failed']}" if loaded["failed"] != "0" else ""):
            print(line, end="\n" if line else "")
    head = "ranking", "index", f"recall@{K}, built", "answered", "requests/s", "per CPU second", "p50", "p99"
    load = f"{args.threads} threads, {CONNECTIONS} connections for {args.seconds} s, load {os.getloadavg()[0]:.1f}"
    print(f"{args.items:,} x {args.dim}, {load}\n\n{table(head, rows)}")
    times = p99["fused"] / p99["towers"]
    print(f"\np99 of fused / towers: {times:.2f}; at most 3: {'yes' if times <= 3 else 'NO'}")


def prepared(args: argparse.Namespace, ranking: str) -> Path:
    """A run with towers and classifiers, and its index for one ranking."""
    folder = args.cache / f"{args.items}x{args.dim}" / ranking
    if not (folder / FOLDER / index_files.META).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        items, _ = world(args.items, args.dim)
        rng = np.random.default_rng(1)
        users = unit(items[rng.integers(0, len(items), USERS)] + noise(rng, (USERS, args.dim), 0.1))
        write_run(folder, users, items)
        write_run(folder / "classifiers", users, unit(items + noise(rng, items.shape, 0.05)))
        model, classifiers = (runs.load(each).model for each in (folder, folder / "classifiers"))
        fused = Fused(model, classifiers, rng.uniform(1, 5, len(items)).astype(np.float32))
        fused.learn(held_out(runs.load(folder), users, items), None)
        fused.save(folder)
        finish(folder)
        tuned = build_index(runs.load(folder), k=K, kind=args.kind, ranking=ranking)  # type: ignore[arg-type]
        print(f"{ranking}: {tuned.chosen.kind}, recall@{K} {tuned.recall:.4f}")
    shutil.rmtree(folder / "serve", ignore_errors=True)
    return folder


def noise(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    return scale * rng.standard_normal(shape).astype(np.float32)


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def held_out(trained: Trained, users: np.ndarray, items: np.ndarray) -> Interactions:
    """The three nearest items of some users."""
    queries = np.arange(HELD, dtype=np.int32)
    near = trained.eligibility.ranking(torch.from_numpy(items)).best(torch.from_numpy(users[:HELD]), 3)[1]
    ids = trained.ids
    return Interactions(np.repeat(queries, 3), near.flatten().numpy().astype(np.int32), ids.query_ids, ids.item_ids)


def measured(
    args: argparse.Namespace, folder: Path, ranking: str
) -> tuple[dict[str, object], dict[str, str], float, Seen]:
    """index.json, the figures of wrk, CPU seconds of the service, and the checked answers."""
    url, server = start(folder, args.threads, True, args.cache)
    seen, stop = Seen(), threading.Event()
    try:
        drive(url, 3)  # warm
        client = threading.Thread(target=listen, args=(url, stop, seen))
        client.start()
        spent = cpu_seconds(server.pid)
        loaded = drive(url, args.seconds)
        spent = cpu_seconds(server.pid) - spent
        stop.set()
        client.join()
    finally:
        server.terminate()
        server.wait(60)
    check(seen, runs.load(folder), ranking)
    return index_files.read_meta(folder / FOLDER), loaded, spent, seen


def check(seen: Seen, trained: Trained, ranking: str) -> None:
    """Compare every answer with the exact list: its items, and the scores of those in both."""
    rows = torch.tensor([user for user, _ in seen.answers])
    taken, exact = trained.eligibility.taken(rows), trained.ranking(ranking)  # type: ignore[arg-type]
    best = exact.best(trained.model.query_vectors(rows), K, taken)
    for (user, body), scores, items in zip(seen.answers, *(each.tolist() for each in best), strict=True):
        truth = dict(zip(items, scores, strict=True))
        given = {each["id"]: each["score"] for each in body["results"][0]["items"]}
        if any(abs(given[item] - truth[item]) > 1e-4 for item in given.keys() & truth.keys()) or len(given) != K:
            seen.wrong.append(f"user {user}: {given} and not {truth}")
        seen.recall.append(len(given.keys() & truth.keys()) / K)


def milliseconds(text: str) -> float:
    """The figures of wrk: 950.00us, 12.30ms, 1.20s."""
    for unit_, factor in (("us", 1e-3), ("ms", 1.0), ("s", 1e3)):
        if text.endswith(unit_):
            return float(text.removesuffix(unit_)) * factor
    raise ValueError(text)


if __name__ == "__main__":
    main()
