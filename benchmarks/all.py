"""Run the benchmarks of this folder one after another and summarise their claims.

    python benchmarks/all.py --threads 1            # a CPU
    python benchmarks/all.py --device cuda          # one GPU: within 8 minutes

A line of output that ends in "yes" or "NO" is a claim. On a CPU all scripts that take --threads are run, on a GPU
those listed below. Scripts that train for long (xir_table.py, sequences.py) are run by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LEFT_OUT = {"all.py", "release_loop.py", "sequences.py"}  # in_batch.py runs the release loop
ON_GPU = {  # arguments beside --device cuda
    "kernels": ["--compiled"],
    "cross_entropy": [],
    "step": [],
    "ranking": [],
    "samplers": ["--rounds", "3"],
    "esans_step": [],
    "histories": [],
    "catalogue": ["--sizes", "4,5,6,7,8", "--rounds", "3"],
}


def commands(device: str, threads: int, chosen: list[str]) -> list[list[str]]:
    """Scripts with their arguments."""
    if device == "cuda":
        return [
            [f"{name}.py", "--device", "cuda", *more] for name, more in ON_GPU.items() if not chosen or name in chosen
        ]
    found = [
        script
        for script in sorted(HERE.glob("[a-z]*.py"))
        if script.name not in LEFT_OUT and '"--threads"' in script.read_text()
    ]
    return [[script.name, "--threads", str(threads)] for script in found if not chosen or script.stem in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="", help="names of scripts without .py, comma-separated")
    given = parser.parse_args()
    summary, failed = [], 0
    for script, *arguments in commands(given.device, given.threads, [name for name in given.only.split(",") if name]):
        print(f"\n== {script}\n", flush=True)
        began, lines = time.perf_counter(), []
        threads = {name: str(given.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        command = [sys.executable, str(HERE / script), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | threads) as ran:
            assert ran.stdout is not None
            for line in ran.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        claims = [found[1] for line in lines if (found := re.search(r": (yes|NO)\W*$", line))]
        failed += ran.returncode != 0
        state = "ran" if ran.returncode == 0 else f"FAILED ({ran.returncode})"
        took = time.perf_counter() - began
        summary.append(f"{script:20} {state:12} {took:6.0f} s   claims met: {claims.count('yes')} of {len(claims)}")
    print("\n== summary\n" + "\n".join(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
