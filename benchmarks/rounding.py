"""Do several ranks differ from one process by rounding alone?

    torchrun --standalone --nproc-per-node 4 benchmarks/rounding.py

Trains in one process, in two and in four ranks, in float32 and in float64, and in one process again from weights each
moved by a random part of its last bit. Prints how far losses, weights and metrics are from the first. Two things show
rounding: in float64 all differences shrink with the last bit (by 5e8) and metrics are equal; in float32 they are no
larger than after moving the last bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sparring.core.ranks import Group
from sparring.core.types import ALONE, Ranks
from sparring.data.splits import split
from sparring.data.synthetic_world import make_world
from sparring.evaluation.ranking import evaluate
from sparring.recipes.settings import build
from sparring.training.loop import Trainer, TrainingProgress

COMMON: dict[str, Any] = {"dim": 16, "batch_size": 128, "epochs": 6, "patience": None, "seed": 5, "lr": 0.01}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tables, dropout, adam": ("tables", {"n": 64, "dropout": 0.3, "optimizer": "adam"}),
    "tables, row-adam": ("tables", {"n": 64, "optimizer": "row-adam"}),
    "xir, row-adagrad": ("xir", {"cache_size": 64, "optimizer": "row-adagrad"}),
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    four, rank = Group(), dist.get_rank()
    two = Group(dist.new_group([0, 1]))
    parts = split(
        make_world(300, 150, exposure=0.5, relevant=0.3, seed=3).interactions, "random", valid=0.1, test=0.2, seed=1
    )
    assert parts.test is not None

    def trained(
        name: str, kind: torch.dtype, ranks: Ranks, bits: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        recipe, settings = CASES[name]
        run = build(recipe, parts.train, {**COMMON, **settings})
        if kind == torch.float64:
            run.modules().double()
        if bits:
            draw = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for weight in run.model.parameters():
                    weight *= 1 + torch.finfo(kind).eps * (torch.rand(weight.shape, generator=draw, dtype=kind) - 0.5)
        trainer = Trainer(run, parts, torch.device("cpu"), None, TrainingProgress(), ranks)
        while not trainer.state.done:
            trainer.validate(trainer.epoch())
        result = evaluate(run.model, parts.test, parts.seen_for("test"), (10, 50), ("recall", "ndcg"), ranks=ranks)  # type: ignore[arg-type]
        weights = torch.cat([weight.detach().flatten().double() for weight in run.model.parameters()])
        return (
            torch.tensor([record["loss"] for record in trainer.state.history], dtype=torch.float64),
            weights,
            result.metrics,
        )

    if rank == 0:
        print(f"{'':42} {'first loss':>11} {'last loss':>10} {'weights':>9} {'metrics':>9}")
    for name in CASES:
        for kind in (torch.float32, torch.float64):
            one = trained(name, kind, ALONE)
            for way, ranks, bits in (("2 ranks", two, False), ("4 ranks", four, False), ("last bits", ALONE, True)):
                if rank < ranks.world:
                    losses, weights, metrics = trained(name, kind, ranks, bits)
                    far = (one[0] - losses).abs()
                    moved = float((one[1] - weights).abs().max() / one[1].abs().max())
                    apart = max(abs(one[2][key] - value) for key, value in metrics.items())
                    if rank == 0:
                        label = f"{name}, {str(kind).split('.')[1]}, {way}"
                        print(f"{label:42} {far[0]:11.1e} {far[-1]:10.1e} {moved:9.1e} {apart:9.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
