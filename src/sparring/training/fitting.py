"""Training from start to end: a folder is claimed, the loop of trainer.py runs or goes on, the best epoch is tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.ranks import join
from sparring.data.interactions import Split
from sparring.evaluation.metrics import PROPENSITY_METRICS
from sparring.evaluation.ranking import Evaluation, evaluate
from sparring.recipes.run import Run
from sparring.training import checkpoint, trained
from sparring.training import folder as run_folder
from sparring.training.lock import claimed, delete_run
from sparring.training.loop import Progress, Trainer
from sparring.training.validation import check_cutoffs, check_given
from sparring.training.warm_start import warm_start

METRICS = ("recall", "ndcg", "hit", "mrr", "map", "precision", "coverage", "popularity")


@dataclass(frozen=True)
class Fitted:
    """What training gave: the model of the chosen epoch, one record per epoch, and the test metrics."""

    run: Run
    history: list[dict[str, Any]]
    best_epoch: int
    test: Evaluation | None
    seconds: float
    stages: dict[str, Evaluation] = field(
        default_factory=dict
    )  # test metrics of each ranking, where there are several (stages.py)


def fit(
    run: Run,
    split: Split,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    k: Sequence[int] = (10, 20, 50),
    metrics: Sequence[str] = METRICS,
    progress: Progress | None = None,
    source: Mapping[str, Any] | None = None,
    save_seconds: float | None = None,
    warm: str | Path | None = None,
) -> Fitted:
    """Train the towers of a run on a split; keep the epoch that does best on the validation part (the last one where there is none).

    What a run asks for on top, classifiers and their fusion, stages.py trains, which is what `sparring.fit` calls.

    With `out` everything goes to that folder (see runs.py), which must be empty or new: `resume` goes on from its last checkpoint, bitwise
    as if never stopped on the same CPU, and `overwrite` deletes the run that is there, with its index. `source` is recorded in run.json:
    where the data came from. `warm` is an earlier run whose vectors this one begins with (warm.py). Called in each of the processes that
    torchrun started, all of them train the run as one process would, batch by batch; rank 0 writes. A checkpoint is saved once
    `save_seconds` have passed since the last: by default 600 inside an epoch, 10 at its end.

        fitted = fit(recipes.xir(split.train), split, "runs/xir");  print(fitted.test)
    """
    check_given(run, split)
    if (resume or overwrite) and out is None:
        raise UserError(f"{'resume' if resume else 'overwrite'} needs `out`: the folder of the run")
    progress = progress or Progress()
    where = pick_device(device)
    ranks = join(where)
    if ranks.rank:
        progress = Progress()  # one of them tells
    folder = Path(out) if out is not None else None
    if where.type == "cuda":
        torch.set_float32_matmul_precision("highest" if run.setup.training.precision == "float32" else "high")
    check_cutoffs(run, split, k, metrics)
    saved = (
        resume and folder is not None and any(folder.glob("checkpoint*.safetensors"))
    )  # then the vectors come from there
    began = None if warm is None or saved else warm_start(run.model, split, warm)
    with nullcontext() if folder is None else claimed(folder, resume, overwrite, ranks):
        trainer = Trainer(run, split, where, folder, progress, ranks, save_seconds)
        if folder is not None:
            described = run_folder.description(run, split, source) | (
                {} if began is None else {"warm": began.described()}
            )
            if ranks.share(resume and (folder / "run.json").is_file()):
                run_folder.check_same(folder, described, run.setup)
                if not saved and trained.read_meta(folder).get("warm") != described.get("warm"):
                    raise UserError(
                        f"{folder} was begun from another run's vectors than warm={warm}: resume cannot change that"
                    )
                trainer.load()
            elif ranks.rank == 0:
                if overwrite and (line := delete_run(folder)) is not None:
                    progress.say(line)
                checkpoint.clear(folder)
                given = None if began is None else {"queries": began.queries, "items": began.items}
                run_folder.write_start(
                    folder, split.train, split.seen_for("test"), described, run.setup, run.model, split.test, given
                )
        if began is not None:
            progress.say(str(began))
        with trainer.keeper:
            trainer.train()
        trainer.keeper.load_best(trainer.state.best_epoch)
        test = None
        if split.test is not None:
            progress.say("ranking the whole catalogue for every test query")
            metrics = (*metrics, *(PROPENSITY_METRICS if split.test.propensity is not None else ()))
            seen = split.seen_for("test").to(trainer.device)
            test = evaluate(run.model, split.test, seen, k, metrics, counts=split.train.counts(), ranks=ranks)
        fitted = Fitted(run, trainer.state.history, trainer.state.best_epoch, test, trainer.state.seconds)
        if folder is not None and ranks.rank == 0:
            run_folder.write_end(folder, run, fitted.history, fitted.best_epoch, fitted.seconds, test)
        return fitted
