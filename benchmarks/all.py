"""Run the benchmarks of this folder one after another and summarise their claims.

    python benchmarks/all.py --threads 1            # a CPU: within 10 minutes on a quiet core
    python benchmarks/all.py --device cuda          # one GPU: within 8 minutes
    python benchmarks/all.py --only in_batch,null_test

A line of output that ends in "yes" or "NO" is a claim. The scripts listed below are run; --only may name any other one
that takes --threads, or on a GPU --device. Scripts that take long (in_batch.py, null_book.py, null_test.py,
xir_table.py) are run that way or by hand.
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
ON_CPU = {  # arguments beside --threads
    "cpu": ["--rounds", "3"],
    "evaluation": ["--rounds", "1"],
    "startup": ["--rounds", "3"],
    "optimisers": [],
    "histories": [],
    "esans_step": [],
}
ON_GPU = {  # arguments beside --device cuda
    "kernels": ["--compiled"],
    "cross_entropy": [],
    "step": [],
    "vectors": [],
    "ranking": [],
    "samplers": ["--rounds", "3"],
    "esans_step": [],
    "histories": [],
    "catalogue": ["--sizes", "4,5,6,7,8", "--rounds", "3"],
}


def commands(device: str, threads: int, chosen: list[str]) -> list[list[str]]:
    """Scripts with their arguments."""
    listed, given = (ON_GPU, ["--device", "cuda"]) if device == "cuda" else (ON_CPU, ["--threads", str(threads)])
    return [
        [f"{name}.py", *(given if f'"{given[0]}"' in (HERE / f"{name}.py").read_text() else []), *listed.get(name, [])]
        for name in chosen or listed
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="", help="names of scripts without .py, comma-separated")
    given = parser.parse_args()
    chosen = [name for name in given.only.split(",") if name]
    if unknown := [name for name in chosen if not (HERE / f"{name}.py").exists()]:
        parser.error(f"there is no {unknown[0]}.py")
    summary, failed = [], 0
    for script, *arguments in commands(given.device, given.threads, chosen):
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
