"""auto survives kill -9 at any moment: the same record and the same model, and a folder without a fault."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sparring.core.files import read_tensors
from sparring.serving.checking import check
from support.settings import effort

PROGRAM = """
import sys

from sparring.data.splits import split
from sparring.data.synthetic_world import make_world
from sparring.experiments import contenders
from sparring.experiments.auto import auto
from sparring.experiments.contenders import Family

small = {"dim": 8, "epochs": 8, "batch_size": 64, "n": 16}
contenders.FAMILIES = (
    Family("popularity", "popularity"),
    Family("ease", "ease", tries=[{"lam": 20.0}, {"lam": 200.0}]),
    Family("default", "default", (), small, [{"tau": 0.2}, {"tau": 0.5}]),
)
parts = split(make_world(60, 40, exposure=0.5, relevant=0.4, seed=3).interactions, "random", seed=1)
print("ready", flush=True)
auto(parts, sys.argv[1], budget=4, k=(10, 20), device="cpu", resume=True)
"""


def start(out: Path) -> subprocess.Popen[str]:
    """The search in a process of its own, which has imported everything."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(out)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    return program


def outcome(folder: Path) -> dict[str, Any]:
    """auto.json without times."""
    record = json.loads((folder / "auto.json").read_text())
    for trial in record["trials"]:
        trial |= {"seconds": 0, "pace": 0, "rank_seconds": 0}
    return {**record, "seconds": 0}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_killed(tmp_path: Path) -> None:
    """Killed at random times and resumed until it ends, a search equals one that was left alone."""
    with start(tmp_path / "alone") as program:
        began = time.monotonic()
    usual = time.monotonic() - began
    assert program.returncode == 0
    random.seed(0)
    for search in range(effort(1, 6)):
        out, killed = tmp_path / f"killed{search}", 0
        while killed < effort(2, 20):
            with start(out) as program:
                try:
                    program.wait(timeout=random.uniform(0.02, 1.0 if killed else 0.3) * usual)
                    break
                except subprocess.TimeoutExpired:
                    program.send_signal(signal.SIGKILL)
                    killed += 1
        with start(out) as program:
            pass
        assert program.returncode == 0
        assert killed
        assert outcome(out) == outcome(tmp_path / "alone")
        assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "alone").iterdir()}
        assert not check(out).problems
        ours, own = (read_tensors(folder / "model.safetensors")[0] for folder in (out, tmp_path / "alone"))
        assert all(ours[key].equal(own[key]) for key in own)
