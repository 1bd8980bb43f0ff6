"""One rank of the comparison of several processes with one: python equality.py OUT [CASE ...], with the environment
that torchrun sets."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import sharded
from cases import BY_FOUR, CASES, MATRIX, SMALL

from sparring.core.ranks import Group
from sparring.core.types import ALONE, Ranks
from sparring.data.interactions import Split
from sparring.evaluation.ranking import evaluate
from sparring.recipes.settings import build
from sparring.training import loop as training
from sparring.training.loop import Trainer, TrainingProgress
from sparring.training.optimizers import state_tensors
from support.texts import ordered_text_parts, text_parts


def trained(name: str, parts: Split, ranks: Ranks) -> dict[str, Any]:
    """Two epochs in float64: the loss and all gradients of every step, then the complete state and the metrics."""
    recipe, settings = {**CASES, **MATRIX}[name]
    run = build(recipe, parts.train, {**SMALL, **settings})
    run = dataclasses.replace(run, setup=run.setup.replaced(clf_epochs=0))
    run.modules().double()
    gradients: list[Tensor] = []
    real = training.sum_gradients

    def recording(parameters: list[torch.nn.Parameter], over: Ranks) -> None:
        real(parameters, over)
        some = [p.grad.detach() for p in parameters if p.grad is not None]
        gradients.append(torch.cat([(g.to_dense() if g.is_sparse else g).flatten() for g in some]))

    training.sum_gradients = recording
    trainer = Trainer(run, parts, torch.device("cpu"), None, TrainingProgress(), ranks)
    means = []
    try:
        while not trainer.state.done:
            means.append(trainer.epoch())
            trainer.validate(means[-1])
    finally:
        training.sum_gradients = real
    state = {
        n: t.detach() for n, t in run.modules().state_dict().items() if t.is_floating_point() or t.dtype == torch.long
    }
    state |= {f"optimizer.{n}": t for n, t in state_tensors(trainer.optimizers).items()}
    assert parts.test is not None
    result = evaluate(run.model, parts.test, parts.seen_for("test"), (10,), ("recall", "ndcg"), ranks=ranks)
    metrics = result.metrics | {k: v for r in trainer.state.history for k, v in r.items() if "@" in k}
    return {
        "loss": means,
        "gradients": gradients,
        "state": state,
        "metrics": metrics,
        "generator": trainer.generator.get_state(),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference between two trainings."""
    steps = list(zip(one["gradients"], other["gradients"], strict=True))
    far = [_far(one["state"][name], other["state"][name]) for name in one["state"]]
    return {
        "loss": float(np.abs(np.subtract(one["loss"], other["loss"])).max()),
        "first gradient": _far(*steps[0]),
        "gradients": max(_far(*pair) for pair in steps),
        "state": max(far),
        "metrics": max(abs(one["metrics"][name] - value) for name, value in other["metrics"].items()),
        "generator": float(not torch.equal(one["generator"], other["generator"])),
        "moved": float(sum(g.abs().sum() for g in one["gradients"])),
    }


def _far(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not a.numel() or torch.equal(a, b):
        return 0.0
    a, b = a.double(), b.double()
    size = torch.where(torch.isfinite(a), a, 0.0).abs().max().clamp(min=1e-9)
    far = torch.where(a == b, 0.0, a - b).abs().max()  # infinities are equal
    return float((far / size).nan_to_num(9.0))


def agree(mine: dict[str, Any], ranks: Group) -> float:
    """Whether all ranks ended with the same bits."""
    flat = torch.cat([t.double().flatten().nan_to_num(7.0) for t in mine["state"].values()])
    first = flat.clone()
    ranks.equalise([first])
    return float(ranks.sum((first != flat).sum()))


def main(out: Path, only: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, four = Group(pairs[rank // 2]), Group()
    assert pair.aside != four.aside  # created here, after all ranks have created the same number of groups
    worlds = {"plain": world(), "texts": text_parts(), "matrix": ordered_text_parts()}
    found: dict[str, Any] = {}
    names = [name for name in (*CASES, *MATRIX) if not only or name in only]
    mine = [name for at, name in enumerate(names) if at % 2 == rank // 2]  # this pair's
    alone: dict[str, Any] = {}  # the rank that trains it in one process compares all others with it
    for name, ranks in [(name, pair) for name in mine] + [(name, four) for name in names if name in BY_FOUR]:
        parts = worlds["matrix" if name in MATRIX else "texts" if name == "texts" else "plain"]
        key = f"{name} x{ranks.world}"
        try:
            own = trained(name, parts, ranks)
            same = agree(own, ranks)
            if pair.rank == 0 and name in mine:
                alone[name] = alone.get(name) or trained(name, parts, ALONE)
                found[key] = {"ranks": same, **differences(alone[name], own)}
        except Exception:
            print(key, flush=True)
            traceback.print_exc()
            os._exit(1)
    if not only or "sharded" in only:
        found |= sharded.compared(worlds["plain"], out, pair, four)
    if pair.rank == 0:
        (out / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def world() -> Split:
    from sparring.data.splits import split
    from sparring.data.synthetic_world import make_world

    made = make_world(60, 40, exposure=0.5, relevant=0.4, seed=3).interactions
    ordered = dataclasses.replace(made, time=np.random.default_rng(2).permutation(len(made)))
    return split(ordered, "random", valid=0.1, test=0.2, seed=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
