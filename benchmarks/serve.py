"""The service under load beside a bare FAISS loop: 32 connections, a million items, a swap, upserts and a broken index.

    python benchmarks/serve.py --cache FOLDER        # 1,000,000 x 64, 60 s; the first time builds the index (minutes)
    python benchmarks/serve.py --cache FOLDER --items 20000 --seconds 10
    python benchmarks/serve.py --cache FOLDER --workers 2 --seconds 20     # and the bars of a service on several cores

Needs `wrk`. The bare loop calls the same FAISS index with the same settings, k = 10, without exclusions: one query at
a time, and in batches of 32, as many as there are connections, on all threads. Both are measured before and after the
load, and the service is compared with both: half of the faster one is the stricter bar. The service answers single
users, with their seen items excluded. While wrk runs, another client sends requests too, and every answer is compared
with the exact one; 1,000 items are upserted (some requested as soon as they are acknowledged), a damaged index is
offered and must be refused, and a run with other users replaces the first, so that an answer from the wrong run would
be noticed.

With --workers N the service has N worker processes, and a second part measures them without swap and upserts: one
worker on one core, which the load generator shares, then N on N cores, then N at 70 % of the rate just measured, with
requests that arrive at random times. It prints each bar with yes or NO. Each rate is the median of three.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import httpx
import numpy as np
import torch

from _serve_load import (
    CONNECTIONS,
    SEEN,
    USERS,
    K,
    Seen,
    check,
    cpu_seconds,
    disturb,
    drive,
    listen,
    pace,
    resident,
    start,
)
from _shared import table
from index import world
from sparring.core.devices import usable_cores
from sparring.core.files import tensors_of, write_tensors
from sparring.core.types import Positives
from sparring.data.interactions import Interactions, Vocabulary
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.recipes.setup import Setup
from sparring.serving.index import Index, index_files
from sparring.serving.index.faiss_backends import parameters, require_faiss, widened
from sparring.serving.index.run_index import FOLDER, build_index, open_index
from sparring.training import trained as runs
from sparring.training.checkpoint import run_id
from sparring.training.folder import finish, model_hash, write_start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache", type=Path, required=True, help="folder for the runs and their index; reused the next time"
    )
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--upserts", type=int, default=1000)
    parser.add_argument("--threads", type=int, help="search threads in all (default: one per core)")
    parser.add_argument("--workers", type=int, default=1, help="worker processes, on as many cores")
    parser.add_argument("--kind", default="auto", help="kind of index; auto tunes over all kinds")
    parser.add_argument("--recall", type=float, default=0.99)
    parser.add_argument("--quiet", action="store_true", help="start the service with --quiet: no log line per request")
    args = parser.parse_args()
    args.threads = args.threads or usable_cores()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    torch.set_num_threads(args.threads)
    require_faiss().omp_set_num_threads(args.threads)
    first, second = prepared(args)
    index = open_index(first, check=False)
    measure(args, first, second, index)
    if args.workers > 1:
        measure_workers(args, first, index)


def prepared(args: argparse.Namespace) -> tuple[Path, Path]:
    """Two runs: the second has the first's items and index, and user u is the first's u + 1."""
    first, second = args.cache / "first", args.cache / "second"
    if not (second / FOLDER / index_files.META).is_file():
        shutil.rmtree(args.cache, ignore_errors=True)
        items, centres = world(args.items, args.dim)
        rng = np.random.default_rng(1)
        near = items[rng.integers(0, args.items, USERS)] + 0.1 * rng.standard_normal((USERS, args.dim)).astype(
            np.float32
        )
        users = (near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float32)
        users[: len(centres)] = centres
        write_run(first, users, items)
        write_run(second, np.roll(users, -1, axis=0), items)
        began = time.perf_counter()
        tuned = build_index(runs.load(first), k=K, recall=args.recall, kind=args.kind, say=print)
        print(
            f"index built and tuned in {time.perf_counter() - began:.0f} s: {tuned.chosen.kind}, "
            f"recall@{K} {tuned.recall:.4f}\n"
        )
        other = {"model": model_hash(second)}
        index_files.write(replace(tuned.index, meta=tuned.index.meta | other), second / FOLDER)
    for name in ("first/serve", "broken"):
        shutil.rmtree(args.cache / name, ignore_errors=True)
    return first, second


def write_run(folder: Path, users: np.ndarray, items: np.ndarray) -> None:
    """Write a run folder with these vectors, as training would."""
    rng = np.random.default_rng(2)
    setup = Setup.of(dim=items.shape[1], score="cosine")
    seen = np.sort(rng.integers(0, len(items), (len(users), SEEN)), axis=1).astype(np.int32)
    queries = np.repeat(np.arange(len(users), dtype=np.int32), SEEN)
    import polars as pl

    titles = pl.DataFrame(
        {
            "title": pl.Series(np.arange(len(items))).cast(pl.String) + " of many",
            "price": rng.random(len(items)).round(4),
        }
    )
    data = Interactions(
        queries, seen.ravel(), Vocabulary(np.arange(len(users))), Vocabulary(np.arange(len(items))), item_table=titles
    )
    model = Retriever(IdTower(len(users), items.shape[1]), IdTower(*items.shape), setup.model.score)
    with torch.no_grad():
        model.query.weight.copy_(torch.from_numpy(users))
        model.item.weight.copy_(torch.from_numpy(items))
    start = torch.arange(len(users) + 1) * SEEN
    write_start(folder, data, Positives(start, torch.from_numpy(seen.ravel())), {"recipe": "synthetic"}, setup)
    write_tensors(folder / "model.safetensors", tensors_of(model), {"run": run_id(folder)})
    finish(folder)


def bare(index: Index, users: np.ndarray, seconds: float = 5.0) -> dict[str, tuple[float, float]]:
    """Queries per second, and per CPU second, of FAISS alone: one at a time and in batches."""
    speed = {}
    for name, size in (("one at a time", 1), (f"batches of {CONNECTIONS}", CONNECTIONS)):
        told = parameters(index.kind, index.effort, K) if index.ann is not None else None
        done, began, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            at = (done % (len(users) - size)) if done else 0
            q = users[at : at + size]
            if index.ann is not None:
                index.ann.search(widened(q, index.ann.d), K, params=told)
            else:
                index.search(q, K)
            done += size
        speed[name] = done / (time.perf_counter() - began), done / (time.process_time() - cpu)
    return speed


def measure(args: argparse.Namespace, first: Path, second: Path, index: Index) -> None:
    trained = runs.load(first)
    users = trained.model.query_vectors(torch.arange(USERS)).numpy()
    seen_items = trained.seen.items.numpy().reshape(USERS, SEEN)
    before = bare(index, users)
    url, server = start(first, max(1, args.threads // args.workers), args.quiet, args.cache, args.workers)
    try:
        client = httpx.Client(base_url=url, timeout=60)
        drive(url, 3)  # warm
        memory = [resident(server.pid)]
        seen = Seen()
        stop = threading.Event()
        work = [
            threading.Thread(target=listen, args=(url, stop, seen)),
            threading.Thread(target=disturb, args=(url, args.items, args.upserts, args.seconds, second, seen)),
        ]
        for thread in work:
            thread.start()
        spent = cpu_seconds(server.pid)
        loaded = drive(url, args.seconds)
        spent = cpu_seconds(server.pid) - spent
        stop.set()
        for thread in work:
            thread.join()
        time.sleep(3)
        memory.append(resident(server.pid))
        info = client.get("/v1/info").json()
    finally:
        end(server)
    after = bare(index, users)
    check(seen, users, np.asarray(index.vectors), seen_items)
    report(args, index, before, after, loaded, spent, seen, memory, info)


def end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()


def measure_workers(args: argparse.Namespace, first: Path, index: Index) -> None:
    """Scaling, latency at 70 % of the highest rate, and the shares of bare FAISS, each with its bar."""
    users = runs.load(first).model.query_vectors(torch.arange(USERS)).numpy()
    cores = sorted(os.sched_getaffinity(0))[: args.workers]
    if len(cores) < args.workers:
        sys.exit(f"{args.workers} workers need as many cores; there are {len(cores)}")
    shutil.rmtree(first / "serve", ignore_errors=True)
    seconds = max(3, args.seconds // 4)
    loops: list[dict[str, tuple[float, float]]] = []
    rates: dict[int, list[tuple[float, float]]] = {}  # per second, and per CPU second
    services: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    try:
        for workers in (1, args.workers):
            services[workers] = start(first, 1, True, args.cache, workers, cores[:workers])
        for _ in range(3):  # alternating: a machine that slows down harms all of them alike
            loops.append(bare(index, users, 2.0))
            for workers, (url, server) in services.items():
                drive(url, 1, cores[:workers])
                spent = cpu_seconds(server.pid)
                loaded = drive(url, seconds, cores[:workers])
                spent = cpu_seconds(server.pid) - spent
                rates.setdefault(workers, []).append((float(loaded["rate"]), int(loaded["requests"]) / spent))
        one, many = (median(each[0] for each in rates[workers]) for workers in (1, args.workers))
        paced = [pace(services[args.workers][0], 0.7 * many, seconds) for _ in range(3)]
    finally:
        for _, server in services.values():
            end(server)
    ratio = median(each.at(99) / each.at(50) for each in paced)
    kept_up = all(each.sent > 0.97 * each.asked for each in paced)
    print(f"\n{args.workers} workers, one search thread each; load {os.getloadavg()[0]:.1f}\n")
    rows = [
        (name, *(f"{each[0]:,.0f}" for each in found), f"{median(each[1] for each in found):,.0f}")
        for name, found in (
            *((f"bare FAISS, {name}", [loop[name] for loop in loops]) for name in loops[0]),
            *((f"workers: {workers}, cores: {workers}", found) for workers, found in rates.items()),
        )
    ]
    print(table(("", "requests/s", "again", "again", "per CPU second"), rows))
    print()
    rows = [(f"{p.asked:,.0f}", f"{p.sent:,.0f}", *(f"{p.at(q):.2f}" for q in (50, 90, 99, 99.9))) for p in paced]
    print(table(("requests/s due", "answered", "p50, ms", "p90", "p99", "p99.9"), rows))
    print()
    single, batches = (median(loop[name][0] for loop in loops) for name in loops[0])
    bars = (
        (f"scaling from 1 to {args.workers} cores", many / one, 0.9 * args.workers, True),
        ("p99 / p50 at 70 % load", ratio, 3.0, False),
        ("share of bare FAISS, one query at a time", many / single, 0.9, True),
        (f"share of bare FAISS, batches of {CONNECTIONS} on all cores", many / batches, 0.6, True),
    )
    for name, value, bar, least in bars:
        reached = value >= bar if least else value < bar
        print(f"{name}: {value:.2f}, {'at least' if least else 'under'} {bar:g}: {'yes' if reached else 'NO'}")
    whole = kept_up and not sum(each.failed for each in paced)
    print(f"at 70 % load every request was answered, as fast as they came: {'yes' if whole else 'NO'}")


def report(
    args: argparse.Namespace,
    index: Index,
    before: dict[str, tuple[float, float]],
    after: dict[str, tuple[float, float]],
    loaded: dict[str, str],
    spent: float,
    seen: Seen,
    memory: list[float],
    info: dict[str, object],
) -> None:
    measured, count, rate = index.meta.get("measured", {}), int(loaded["requests"]), float(loaded["rate"])
    print(
        f"{args.items:,} x {args.dim}, {index.kind}, effort {index.effort}, measured "
        f"{json.dumps(measured)}; {args.threads} threads, ",
        end="",
    )
    print(f"{CONNECTIONS} connections for {args.seconds} s, load {os.getloadavg()[0]:.1f}\n")
    rows = []
    for name in before:
        (wall, cpu), (later, _) = before[name], after[name]
        rows.append((f"bare FAISS, {name}", f"{wall:,.0f}", f"{later:,.0f}", f"{cpu:,.0f}", "", ""))
    rows.append(("service", f"{rate:,.0f}", "", f"{count / spent:,.0f}", loaded["p50"], loaded["p99"]))
    print(table(("", "requests/s", "the same, after", "per CPU second", "p50", "p99"), rows))
    shares = {name: rate / ((before[name][0] + after[name][0]) / 2) for name in before}
    print("\nservice / bare loop: " + ", ".join(f"{share:.2f} of {name}" for name, share in shares.items()), end="; ")
    print(f"at least half: {' and '.join(name for name, share in shares.items() if share >= 0.5) or 'NO'}", end="")
    print(
        " (per CPU second, swap and upserts included: "
        f"{count / spent / max(cpu for _, cpu in [*before.values(), *after.values()]):.2f})"
    )
    errors = int(loaded["failed"]) + (loaded["socket"] != "0") + len(seen.wrong)
    print(
        f"{count:,} requests; refused {loaded['failed']}, socket errors {loaded['socket']}; no error: "
        f"{'yes' if not errors else 'NO'}"
    )
    checked = (
        f"{len(seen.answers)} answers checked, recall@{K} {np.mean(seen.recall):.4f}, generations "
        f"{sorted(seen.generations)}"
    )
    print(f"{checked}; wrong: {len(seen.wrong)}")
    for line in seen.wrong[:10]:
        print(f"  {line}")
    print(f"upserts acknowledged {seen.upserts}; changed now {info['changed']}")
    for name, fact in seen.facts.items():
        print(f"{name}: {fact}")
    print(f"own memory: {memory[0]:,.0f} MB at the start, {memory[1]:,.0f} MB at the end")


if __name__ == "__main__":
    main()
