"""Every benchmark of this folder, one after another, and a summary of what each claims.

    python benchmarks/all.py --threads 1

A benchmark is a script that takes --threads; a line of its output that ends in "yes" or "NO" is a claim. Scripts that train for long
(xir_table.py) take no --threads and are run by hand.
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
YARDSTICKS = {"all.py", "release_loop.py"}  # in_batch.py runs the release loop


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="names of scripts without .py, separated by commas")
    given = parser.parse_args()
    chosen = [name for name in given.only.split(",") if name]
    summary, failed = [], 0
    for script in sorted(HERE.glob("[a-z]*.py")):
        if script.name in YARDSTICKS or '"--threads"' not in script.read_text() or (chosen and script.stem not in chosen):
            continue
        print(f"\n== {script.name}\n", flush=True)
        began, lines = time.perf_counter(), []
        threads = {name: str(given.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        command = [sys.executable, str(script), "--threads", str(given.threads)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | threads) as ran:
            assert ran.stdout is not None
            for line in ran.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        claims = [found[1] for line in lines if (found := re.search(r": (yes|NO)\W*$", line))]
        failed += ran.returncode != 0
        state = "ran" if ran.returncode == 0 else f"FAILED ({ran.returncode})"
        took = time.perf_counter() - began
        summary.append(f"{script.name:20} {state:12} {took:6.0f} s   claims met: {claims.count('yes')} of {len(claims)}")
    print("\n== summary\n" + "\n".join(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
