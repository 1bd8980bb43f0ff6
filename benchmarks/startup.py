"""Claim: `import sparring` takes at most 0.15 s, `sparring --help` 0.3 s, and a training of 10,000 pairs 6 s.

    python benchmarks/startup.py

From the start of a process to its end, one thread; CPU seconds, which a busy machine changes little, and wall seconds;
medians. Bytecode is compiled in a round before, as it is where the package was used once.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from _shared import table

PAIRS = 10_000
BARS = {"import sparring": 0.15, "sparring --help": 0.3, f"sparring train, {PAIRS:,} pairs": 6.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_pairs(place / "pairs.csv")
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(place / "bytecode")}
        train = ["train", "--data", str(place / "pairs.csv"), "--out", str(place / "run"), "--overwrite"]
        commands = dict(
            zip(
                BARS, (["-c", "import sparring"], ["-m", "sparring", "--help"], ["-m", "sparring", *train]), strict=True
            )
        )
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(args.rounds + 1):
            for name, words in commands.items():
                taken[name].append(timed([sys.executable, *words], env))
    rows = []
    for name, times in taken.items():
        cpu, wall = (statistics.median(values) for values in zip(*times[1:], strict=True))
        said = "yes" if cpu <= BARS[name] else "NO"
        rows.append([name, f"{cpu:.2f}", f"{wall:.2f}", f"at most {BARS[name]:g}: {said}"])
    print(f"one thread, median of {args.rounds} rounds; load {os.getloadavg()[0]:.1f}\n")
    print(table(["command", "CPU s", "wall s", "claim, CPU s"], rows))


def write_pairs(path: Path) -> None:
    rng = np.random.default_rng(0)
    users = rng.integers(0, 1000, PAIRS)
    items = np.minimum((rng.pareto(1.0, PAIRS) * 20).astype(int), 1999)
    path.write_text("user,item\n" + "\n".join(f"{u},{i}" for u, i in zip(users, items, strict=True)))


def timed(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, time.perf_counter() - began


if __name__ == "__main__":
    main()
