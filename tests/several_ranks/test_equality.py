"""Two and four ranks train the same model as one process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port
from support.settings import effort

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("dist_cases", HERE / "cases.py")
assert _spec is not None
assert _spec.loader is not None
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Start four ranks once: two pairs share the cases, then all four train each case together."""
    out = tmp_path_factory.mktemp("equality")
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    common["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    started = []
    for rank in range(4):
        with open(out / f"log{rank}", "wb") as log:
            command = [sys.executable, str(HERE / "equality.py"), str(out)]
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(effort(600, 3600)) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0] * 4, "\n".join((out / f"log{rank}").read_text()[-3000:] for rank in range(4))
    return {**json.loads((out / "2.json").read_text()), **json.loads((out / "0.json").read_text())}


def test_every_recipe_is_compared() -> None:
    """The cases below cover every recipe that is trained by steps; one process solves the others."""
    assert set(cases.STEPPED) <= {recipe for recipe, _ in cases.CASES.values()}


@pytest.mark.parametrize(
    "name", [f"{name} x2" for name in (*cases.CASES, *cases.MATRIX)] + [f"{name} x4" for name in cases.BY_FOUR]
)
def test_ranks_train_what_one_process_trains(found: dict[str, Any], name: str) -> None:
    """Over two epochs in float64, losses, gradients, towers, optimisers, sampler state, draws and metrics equal those
    of one process with the same batches, and all ranks agree bitwise."""
    far = found[name]
    assert far["moved"] > 0
    assert far["first gradient"] < 1e-12
    assert far["loss"] < 1e-8
    assert far["gradients"] < 1e-6
    assert far["state"] < 1e-6
    assert far["metrics"] < 1e-9
    assert far["generator"] == 0
    assert far["ranks"] == 0


@pytest.mark.parametrize(
    "name", [*(f"sharded {name} x{n}" for name in ("tables", "xir", "bpr") for n in (2, 4)), "passed on", "served"]
)
def test_sharded_tables_train_as_whole_ones(found: dict[str, Any], name: str) -> None:
    """Tables sharded by TorchRec give the float32 losses, vectors and metrics of unsharded ones in one process, also if
    checkpoints move the training from four ranks to one and to two, and if one process serves the model."""
    pytest.importorskip("torchrec")
    far = found[name]
    assert far["loss"] < 1e-5
    assert far["vectors"] < 1e-4
    assert far["metrics"] < 1e-9
