"""Kill ranks of a training at random and verify that nothing is lost.

    python benchmarks/kills.py --kills 20 --torn 4 [--nproc 2] [--seed 0] [--agents 2] [--disk] [--sharded]

One training runs uninterrupted. The same training is then killed: SIGKILL to a random rank, at a random time while it
starts, trains or saves, each time after a new save. `--torn` of the kills also cut the last checkpoint in half. With
--agents 2 two launchers meet over the network, as on two machines, and the first kill and every fifth after it take a
launcher with all its ranks, which is then restarted (with --gone never: the other continues alone, and metrics must
agree up to rounding). --disk trains on a small file system that is filled up once (it needs the right to mount).
--sharded shards the tables over the ranks. At the end the models, the training state, the metrics of every epoch and
the test result must be equal bit by bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import torch

from sparring.data.synthetic_world import make_world

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.ports import free_port
from support.run_files import contents

SETTINGS = ("cache_size=64", "dim=16", "batch_size=128", "patience=none", "lr=0.01", "draw=multinomial")


class Training:
    """Launchers of one training, and the ranks that they started."""

    def __init__(self, words: list[str], nproc: int, agents: int, restarts: int, log: Path, least: int):
        self.words, self.nproc, self.agents, self.restarts, self.log, self.least = (
            words,
            nproc,
            agents,
            restarts,
            log,
            least,
        )
        self.port = free_port()
        self.launchers = [self.start(at) for at in range(agents)]

    def start(self, at: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SPARRING_DISK_SECONDS": "3",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        if self.agents == 1:
            command = [
                sys.executable,
                "-m",
                "sparring",
                *self.words,
                "--nproc",
                str(self.nproc),
                "--restarts",
                str(self.restarts),
            ]
        else:
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.least}:{self.agents}"]
            command += [f"--nproc-per-node={self.nproc}", f"--max-restarts={self.restarts}", "--rdzv-backend=c10d"]
            command += [f"--rdzv-endpoint=127.0.0.1:{self.port}"]
            command += ["--rdzv-id=kills", "--monitor-interval=0.2"]
            command += [f"--rdzv-conf=is_host={int(at == 0)},keep_alive_interval=1,last_call_timeout=5"]
            command += ["-m", "sparring", *self.words, "--resume"]
        with open(self.log, "ab") as file:
            return subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ranks(self, at: int) -> list[int]:
        """Process ids of the ranks of a launcher."""
        children = Path(f"/proc/{self.launchers[at].pid}/task/{self.launchers[at].pid}/children").read_text().split()
        return [int(pid) for pid in children if b"sparring\0train" in _command(int(pid))]

    def kill_rank(self, draw: random.Random) -> None:
        pids = [pid for at in range(self.agents) for pid in self.ranks(at)]
        if pids:
            os.kill(draw.choice(pids), signal.SIGKILL)

    def kill_launcher(self, at: int) -> None:
        """A machine disappears, and another takes its place unless fewer are enough."""
        pids = self.ranks(at)
        self.launchers[at].kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.launchers[at].wait()
        if self.least < self.agents:
            self.agents = self.least
            del self.launchers[at]
        else:
            self.launchers[at] = self.start(at)

    def ended(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers)

    def stop(self) -> None:
        for at, launcher in enumerate(self.launchers):
            if launcher.poll() is None:
                pids = self.ranks(at)
                launcher.kill()
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def disturb(
    training: Training, folder: Path, kills: int, torn: int, draw: random.Random, say: Callable[[str], None]
) -> int:
    """Kill the requested number of times, then let the training end; return the number of kills."""
    checkpoint, done, before = folder / "checkpoint.safetensors", 0, 0.0
    cut = set(draw.sample(range(1, kills), min(torn, kills - 1)))
    while done < kills and not training.ended():
        while not (checkpoint.exists() and checkpoint.stat().st_mtime > before) and not training.ended():
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 1.0))
        if training.ended():
            break
        machine = training.agents > 1 and done % 5 == 0
        if machine:
            training.kill_launcher(training.agents - 1)
        else:
            training.kill_rank(draw)
        if done in cut:
            os.truncate(checkpoint, checkpoint.stat().st_size // 2)
        before = checkpoint.stat().st_mtime
        done += 1
        what = "a machine" if machine else "a rank"
        epochs = len((folder / "metrics.jsonl").read_text().splitlines()) if (folder / "metrics.jsonl").exists() else 0
        say(f"kill {done}: {what}{' and half a checkpoint' if done - 1 in cut else ''}, after {epochs} epochs")
    return done


def fill_up(training: Training, disk: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Fill the disk until the training notices."""
    while not (folder / "checkpoint.safetensors").exists():
        time.sleep(0.01)
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            say("the disk is full")
    while b"retrying" not in training.log.read_bytes():
        time.sleep(0.1)
    (disk / "filler").unlink()
    say("and has room again")


def different(one: Path, other: Path) -> list[str]:
    """Names of the parts of two runs that are not equal bit by bit."""
    first, second = contents(one), contents(other)
    names = first.keys() | second.keys()
    same = {n for n in names if n in first and n in second and _equal(first[n], second[n])}
    return sorted(names - same)


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--torn", type=int, default=4)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument(
        "--gone",
        action="store_true",
        help="with --agents 2: the machine does not return, and the other continues alone",
    )
    args = parser.parse_args()
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)

    work = Path(tempfile.mkdtemp(prefix="sparring-kills-"))
    data = make_world(300, 150, exposure=0.5, relevant=0.3, seed=3).interactions
    pl.DataFrame({"user_id": data.queries, "item_id": data.items}).write_parquet(work / "pairs.parquet")
    words = [
        "train",
        "--data",
        str(work / "pairs.parquet"),
        "--recipe",
        "xir",
        "--device",
        "cpu",
        "--save-seconds",
        "0.3",
    ]
    rule = ("optimizer=row-adagrad", "weight_decay=0", "tables=sharded") if args.sharded else ("optimizer=row-adam",)
    words += [word for setting in (*SETTINGS, *rule) for word in ("--set", setting)] + [
        "--epochs",
        str(args.epochs),
        "--out",
    ]
    disk = work / "disk"
    disk.mkdir()
    started: list[Training] = []
    try:
        if args.disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=True)
        for name, folder in (("left alone", work / "whole"), ("killed", disk / "killed")):
            restarts = 0 if name == "left alone" else args.kills + 5
            log, least = work / f"{folder.name}.log", 1 if args.gone and name == "killed" else args.agents
            training = Training([*words, str(folder)], args.nproc, args.agents, restarts, log, least)
            started.append(training)
            say(f"{name}: {args.agents} x {args.nproc} ranks")
            kills = 0
            if name == "killed":
                if args.disk:
                    fill_up(training, disk, folder, say)
                kills = disturb(training, folder, args.kills, args.torn, random.Random(args.seed), say)
            while not training.ended():
                time.sleep(0.1)
            codes = [launcher.returncode for launcher in training.launchers]
            say(f"ended with codes {codes}" + (f" after {kills} kills" if kills else ""))
            if any(codes):
                print(training.log.read_text()[-3000:])
                return 1
        if args.gone:  # another number of ranks sums in another order
            first, second = (contents(folder)["result"] for folder in (work / "whole", disk / "killed"))
            far = max(abs(value - second[key]) for key, value in first.items())
            say(f"with fewer ranks than at the start, the test metrics are within {far:.2g} of the uninterrupted run")
            return int(far > 0.01)
        wrong = different(work / "whole", disk / "killed")
        text = training.log.read_text()
        say(f"fell back to the previous checkpoint {text.count('falling back to the previous checkpoint')} times")
        say(
            f"not equal: {', '.join(wrong)}"
            if wrong
            else f"after {kills} kills every tensor, metric and result is equal bit by bit"
        )
        return int(bool(wrong) or kills < args.kills)
    finally:
        for training in started:
            training.stop()
        if args.disk:
            subprocess.run(["umount", "-l", str(disk)], check=False)
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
