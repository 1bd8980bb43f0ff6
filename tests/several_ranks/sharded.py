"""Tables sharded over ranks, compared with unsharded ones; run by the ranks of equality.py."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sparring.core import files, manifest
from sparring.core.ranks import Group
from sparring.core.types import ALONE, Ranks
from sparring.data.interactions import Split
from sparring.evaluation.ranking import evaluate
from sparring.recipes.run import Run
from sparring.recipes.settings import build
from sparring.training import checkpoint
from sparring.training.loop import Trainer, TrainingProgress

SETTINGS: dict[str, Any] = {
    "dim": 8,
    "batch_size": 61,
    "epochs": 4,
    "lr": 0.05,
    "optimizer": "row-adagrad",
    "weight_decay": 0.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tables": ("tables", {"n": 16, "learn_tau": True, "patience": None}),
    "xir": ("xir", {"cache_size": 24, "lr_decay": 0.5, "lr_decay_every": 1}),
    "bpr": ("bpr", {"n": 2, "patience": None}),
}


def made(name: str, parts: Split, ranks: Ranks, tables: str) -> Run:
    """Build the run with its tables sharded over these ranks."""
    from sparring.models import build as towers

    real, towers.join = towers.join, lambda device: ranks
    try:
        recipe, settings = CASES[name]
        return build(recipe, parts.train, {**SETTINGS, **settings, "tables": tables})
    finally:
        towers.join = real


def train(name: str, parts: Split, ranks: Ranks, tables: str, folder: Path | None, until: int = 9) -> Trainer:
    """Train from the folder's checkpoint and stop after the epoch `until`."""
    run = made(name, parts, ranks, tables)
    trainer = Trainer(run, parts, torch.device("cpu"), folder, TrainingProgress(), ranks, 0.0)
    if folder is not None and ranks.share((folder / checkpoint.NAME).is_file()):
        trainer.load()
    with trainer.checkpoints:
        while not trainer.state.done and trainer.state.epoch < until:
            trainer.validate(trainer.epoch())
            trainer.save()
    return trainer


def results(trainer: Trainer, parts: Split) -> dict[str, Any]:
    assert parts.test is not None
    model = trainer.run.model
    measured = evaluate(
        model, parts.test, parts.seen_for("test"), (10,), ("recall", "ndcg", "coverage"), ranks=trainer.ranks
    )
    losses = [record["loss"] for record in trainer.state.history]
    return {"metrics": measured.metrics, "vectors": model.item_vectors(ranks=trainer.ranks), "losses": losses}


def compared(parts: Split, out: Path, pair: Group, four: Group) -> dict[str, Any]:
    """Compare sharded with unsharded tables on two and four ranks, and move a training from four ranks to one to
    two."""
    if importlib.util.find_spec("torchrec") is None:
        return {}
    found: dict[str, Any] = {}
    for name in CASES:
        whole = results(train(name, parts, ALONE, "replicated", None), parts)
        for ranks in (pair, four) if four.rank < 2 else (four,):  # TorchRec numbers the ranks of a group from 0
            found[f"sharded {name} x{ranks.world}"] = far(
                whole, results(train(name, parts, ranks, "sharded", None), parts)
            )
    folder = out / "passed"
    if four.rank == 0:  # the files of a start: checkpoints repeat the id of their run
        files.write_json(folder / "run.json", {"id": "passed"})
        manifest.write_manifest(folder, finished=False)
    whole = results(train("xir", parts, ALONE, "replicated", None), parts)
    train("xir", parts, four, "sharded", folder, until=1)
    dist.barrier()
    if four.rank == 0:
        train("xir", parts, ALONE, "sharded", folder, until=2)
    dist.barrier()
    if four.rank < 2:
        trainer = train("xir", parts, pair, "sharded", folder)
        found["passed on"] = far(whole, results(trainer, parts))
        trainer.checkpoints.load_best(trainer.state.best_epoch)
        best = results(trainer, parts)
        dist.barrier(pair.group)
        run = made("xir", parts, ALONE, "sharded")  # as a server reads it
        files.load_tensors(run.model, files.read_tensors(folder / "model.safetensors")[0], folder / "model.safetensors")
        served = evaluate(run.model, parts.test, parts.seen_for("test"), (10,), ("recall", "ndcg", "coverage"))  # type: ignore[arg-type]
        found["served"] = far(best, best | {"metrics": served.metrics, "vectors": run.model.item_vectors()})
    dist.barrier()
    if four.rank == 0:
        shutil.rmtree(folder)
    return found


def far(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    return {
        "loss": float(np.abs(np.subtract(one["losses"], other["losses"])).max()),
        "vectors": float((one["vectors"] - other["vectors"]).abs().max()),
        "metrics": max(abs(value - other["metrics"][name]) for name, value in one["metrics"].items()),
    }
