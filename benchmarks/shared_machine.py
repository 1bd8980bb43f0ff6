"""Two trainings at once on two cores, with threads that sleep while they wait (what `import sparring` sets) and with
OpenMP's default, threads that spin.

    python benchmarks/shared_machine.py --rounds 3

Each training is a process of its own with two threads: 66,840 Zipf pairs, `tables` with 64 dimensions. It builds its
run, takes a first epoch, waits for the others, then reports the wall and CPU seconds of the next epochs. Alone and
together, sleeping and spinning alternate, so that all meet the same load of other users; the least disturbed round
counts, and of two trainings the slower one. While others use the machine, "alone" is not an idle machine, and wall
seconds say little; CPU seconds still do: two trainings that need no more of them than one alone take twice as long.

The claims: sleeping, each of two trainings takes at most 2.5 times as long as one alone; a training alone is at most
5 % slower than spinning. Use `taskset -c 0,1` on a machine with more cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from importlib import import_module

POLICIES = ("sleeping", "spinning")


def train(policy: str, epochs: int) -> None:
    """The process of one training: prints "ready", waits for a line, trains and prints the seconds."""
    import_module("torch" if policy == "spinning" else "sparring")  # OpenMP reads the policy when torch is imported
    import torch

    import sparring
    from _shared import interactions, zipf
    from sparring.training import TrainingProgress

    torch.set_num_threads(2)
    data = interactions(zipf(3_000, 10_000, 66_840, test=0.0))
    run = sparring.build("tables", data, {"dim": 64, "epochs": 1 + epochs})
    began: list[float] = []

    def epoch(record: dict[str, float]) -> None:
        if record["epoch"] == 1:
            print("ready", flush=True)
            sys.stdin.readline()
            began.extend((time.perf_counter(), time.process_time()))

    sparring.fit(run, sparring.Split(data), device="cpu", progress=TrainingProgress(epoch=epoch))
    print(time.perf_counter() - began[0], time.process_time() - began[1], flush=True)


def measured(policy: str, n: int, epochs: int) -> list[tuple[float, ...]]:
    """Wall and CPU seconds of n trainings that run at the same time."""
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, __file__, "--policy", policy, "--epochs", str(epochs)]
    running = [
        subprocess.Popen(command, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(n)
    ]
    for each in running:
        assert each.stdout is not None
        each.stdout.readline()
    for each in running:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    return [tuple(map(float, each.communicate()[0].split())) for each in running]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="timed epochs of each training")
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--policy", choices=POLICIES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.policy:
        train(given.policy, given.epochs)
        return
    wall: dict[tuple[str, int], list[float]] = {(policy, n): [] for policy in given.policies for n in (1, 2)}
    cpu: dict[tuple[str, int], list[float]] = {key: [] for key in wall}
    for number in range(given.rounds):
        for policy, n in wall:
            took = measured(policy, n, given.epochs)
            for column, values in zip((wall, cpu), zip(*took, strict=True), strict=True):
                column[policy, n].append(max(values))
            shown = "; ".join(f"{each[0]:.1f} s, {each[1]:.1f} CPU s" for each in took)
            print(f"round {number + 1}: {n} x {policy}: {shown} (load {os.getloadavg()[0]:.1f})", flush=True)
    for policy in given.policies:
        ratios = [min(column[policy, 2]) / min(column[policy, 1]) for column in (wall, cpu)]
        print(
            f"{policy}: two at once take {ratios[0]:.2f} times as long, with {ratios[1]:.2f} times the CPU seconds each"
        )
    ratio = min(wall["sleeping", 2]) / min(wall["sleeping", 1])
    print(f"sleeping, two at once take at most 2.5 times as long ({ratio:.2f}): {'yes' if ratio <= 2.5 else 'NO'}")
    if ("spinning", 1) in wall:
        slower = min(wall["sleeping", 1]) / min(wall["spinning", 1])
        print(f"alone, sleeping takes at most 1.05 times spinning ({slower:.2f}): {'yes' if slower <= 1.05 else 'NO'}")


if __name__ == "__main__":
    main()
