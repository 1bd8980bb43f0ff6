"""MSAC on a million items with three modalities of 512 dimensions: time and peak memory, from memory-mapped files.

    python benchmarks/msac.py                        # 1,000,000 items: 6.1 GB of temporary disk
    python benchmarks/msac.py --items 200000
    python benchmarks/msac.py --device cuda

Items are noisy linear views of points in 1,000 groups. The work is measured in a separate process. Its peak memory is
that of its own pages (RssAnon, sampled 50 times a second), beside the bytes of the files; the second figure (VmHWM,
everything ever resident) includes mapped file pages, which the system can take back. Two floors are measured in the
same run: reading every file once from front to back, and the arithmetic of all matrix products at the rate of one
large product.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from _shared import Clock, table
from sparring.data.modalities.modalities import Modalities
from sparring.models.clusters import MSAC, ROBUST, MSACSettings
from sparring.models.clusters.learning import PER_WORD

NAMES = ("image", "text", "behaviour")
GROUPS, LATENT, BLOCK = 1000, 32, 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--warmup", type=int, default=ROBUST.warmup)
    parser.add_argument("--steps", type=int, default=ROBUST.steps)
    parser.add_argument("--folder", type=Path, help="folder for the temporary files (default: the system's)")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # the measured process
    args = parser.parse_args()
    if args.work:
        print(json.dumps(measure(args)))
        return
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        torch.set_num_threads(1)  # of each of the threads that make the files
        clock = Clock()
        make(folder, args.items, args.width, args.cores if args.device == "cpu" else os.cpu_count() or 1, args.device)
        made = clock.read()[1]
        print(f"files made: {made:.1f} s", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, *sys.argv[1:], "--work", str(folder)]
        threads = {name: str(args.cores) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        done = subprocess.run(command, env=os.environ | threads, stdout=subprocess.PIPE, text=True, check=True)
        show(args, {"made": made, **json.loads(done.stdout.splitlines()[-1])})
    finally:
        shutil.rmtree(folder)


def make(folder: Path, n: int, width: int, cores: int, device: str) -> None:
    """Files NAME.npy (n, width) float32 and group.npy, in blocks with separate seeds, by threads or on the device."""

    def normal(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)

    group = np.random.default_rng(0).integers(0, GROUPS, n)
    np.save(folder / "group.npy", group)
    centres, views = normal(1, GROUPS, LATENT), normal(2, len(NAMES), LATENT, width)
    files = [np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, (n, width)) for name in NAMES]

    def fill(at: int) -> None:
        mine = torch.from_numpy(group[at : at + BLOCK]).to(device)
        latent = centres[mine] + 0.4 * normal(3 + at, len(mine), LATENT)
        for which, file in enumerate(files):
            rows = torch.addmm(2 * normal(1_000_003 * (which + 1) + at, len(mine), width), latent, views[which])
            file[at : at + len(mine)] = rows.cpu().numpy()

    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(fill, range(0, n, BLOCK)))


def measure(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(args.cores)
    settings = replace(ROBUST, warmup=args.warmup, steps=args.steps)
    clock = Clock()
    for name in NAMES:
        with open(args.work / f"{name}.npy", "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    read = clock.read()[1]
    clock = Clock()
    modalities = Modalities.from_arrays({name: np.load(args.work / f"{name}.npy", mmap_mode="r") for name in NAMES})
    opened = clock.read()[1]
    before, own, ended = memory("RssAnon"), [0.0], threading.Event()
    watch = threading.Thread(target=lambda: _watch(own, ended))
    watch.start()
    clock, stages = Clock(), Stages()
    msac = MSAC(modalities.widths, settings, args.device)
    codes = msac.fit(modalities, progress=stages)
    cpu, wall = clock.read()
    ended.set()  # before the floors, which allocate matrices
    watch.join()
    peak, resident = own[0], memory("VmHWM")
    group = np.load(args.work / "group.npy")
    counts = np.zeros((codes.k_primary, GROUPS))
    np.add.at(counts, (codes.primary.numpy(), group), 1)
    whole = {
        "opened": opened,
        "read": read,
        "cpu": cpu,
        "wall": wall,
        "peak": peak,
        "resident": resident,
        "before": before,
    }
    whole |= stages.close()
    if args.device != "cpu":
        whole["device_peak"] = torch.cuda.max_memory_allocated() / 2**20
    whole |= {
        "used": float((codes.sizes > 0).sum()),
        "least": float(codes.sizes.min()),
        "most": float(codes.sizes.max()),
    }
    # with fewer clusters than groups, groups must be complete rather than clusters pure
    whole["whole"] = float(counts.max(0).sum() / len(group))
    return {**whole, **floor(settings, args)}


class Stages:
    """Wall seconds between reports of progress, by stage."""

    def __init__(self) -> None:
        self.name, self.began, self.seconds = "aligning", time.perf_counter(), dict[str, float]()

    def __call__(self, name: str, done: int, total: int) -> None:
        if name != self.name:
            self.close()
            self.name = name

    def close(self) -> dict[str, float]:
        now = time.perf_counter()
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + now - self.began
        print(f"{self.name}: {now - self.began:.1f} s", file=sys.stderr, flush=True)
        self.began = now
        return self.seconds


def floor(settings: MSACSettings, args: argparse.Namespace) -> dict[str, float]:
    """Wall seconds of the arithmetic at the rate of one large product, and that rate."""
    s, b, d, n = len(NAMES), settings.batch_size, settings.dim, args.items
    forward = 2 * args.width * d * s  # an item's projections; as much again for the gradient of their weights
    pairs = (
        2 * b * d * (s * (s - 1) // 2) * 3
    )  # an item's part in the products of pairs, with the gradients of both sides
    books = 2 * d * settings.k_primary + 2 * s * d * settings.k_secondary
    start = 20 * settings.k_primary * PER_WORD * 2 * d * settings.k_primary  # Lloyd's steps
    flops = (
        b * (settings.warmup + settings.steps) * (2 * forward + pairs)
        + b * settings.steps * books
        + n * (forward + books)
        + start
    )
    a, c = (torch.randn(2048, 2048, device=args.device) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        began = time.perf_counter()
        float((a @ c)[0, 0])
        best = min(best, time.perf_counter() - began)
    return {"flops": flops, "rate": 2 * 2048**3 / best, "arithmetic": flops * best / (2 * 2048**3)}


def _watch(peak: list[float], ended: threading.Event) -> None:
    while not ended.wait(0.02):
        peak[0] = max(peak[0], memory("RssAnon"))


def memory(field: str) -> float:
    """MB, of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def show(args: argparse.Namespace, m: dict[str, float]) -> None:
    size = 4 * args.items * args.width * len(NAMES)
    steps = (
        f"{args.warmup} + {args.steps} steps of {ROBUST.batch_size}, d = {ROBUST.dim}, {ROBUST.k_primary} "
        f"x {ROBUST.k_secondary}"
    )
    print(
        f"{args.items:,} items x {len(NAMES)} x {args.width} ({size / 2**20:,.0f} MB), {steps}; "
        f"{args.device}, {args.cores} cores, ",
        end="",
    )
    print(f"load {os.getloadavg()[0]:.1f}\n")
    rows = [("files made, before", f"{m['made']:.1f}")]
    rows += [(name, f"{m[name]:.1f}") for name in ("opened", "aligning", "k-means", "learning", "assigning")]
    rows += [("all but opening", f"{m['wall']:.1f} ({m['cpu']:.1f} CPU)")]
    rows += [
        ("floor: reading once", f"{m['read']:.1f}"),
        (f"floor: arithmetic at {m['rate'] / 1e9:,.0f} Gflop/s", f"{m['arithmetic']:.1f}"),
    ]
    print(table(("stage", "wall s"), rows))
    print(f"\npeak memory {m['peak']:,.0f} MB, of it {m['before']:,.0f} before learning began; ", end="")
    print(f"with mapped pages of the files {m['resident']:,.0f} MB; the files have {size / 2**20:,.0f} MB")
    if "device_peak" in m:
        print(f"peak memory on the device {m['device_peak']:,.0f} MB")
    print(
        f"codewords used {m['used']:.0f} of {ROBUST.k_primary}, clusters of {m['least']:,.0f} to "
        f"{m['most']:,.0f} items; ",
        end="",
    )
    print(f"{m['whole']:.1%} of the items are in the cluster that holds most of their group")
    if args.items >= 1_000_000:
        most = max(m["peak"], m.get("device_peak", 0.0))
        print(
            "it streams, so that memory stays below a quarter of the files: "
            f"{'yes' if most < 0.25 * size / 2**20 else 'NO'}"
        )


if __name__ == "__main__":
    main()
