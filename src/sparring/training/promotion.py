"""Promote a finished run that was trained without the test part: a copy of its folder, with the test part ranked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparring.core import files
from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.types import ALONE
from sparring.data.interactions import Split
from sparring.evaluation.metrics import PROPENSITY_METRICS
from sparring.evaluation.ranking import Evaluation, evaluate
from sparring.training import folder as run_folder
from sparring.training.eligibility import seen_tensors, untrained
from sparring.training.fitting import METRICS
from sparring.training.model_card import model_card


def promote(
    run: str | Path, split: Split, out: str | Path, *, k: Sequence[int] = (10, 20, 50), device: str = "auto"
) -> Evaluation | None:
    """Copy a run that was trained on Split(train, valid), rank the test part, and return its metrics.

    The new folder is that of a training on the complete split: the same model, and lists that leave out test items.

        promote("runs/trial", split, "runs/best")
    """
    trial, folder = Path(run), Path(out)
    model, ids, eligibility, meta = run_folder.read_run(trial)
    if len(ids.query_ids) != split.train.n_queries or len(ids.item_ids) != split.train.n_items:
        raise UserError(f"{trial} was trained on another split than the one given: promote it with its own")
    with run_folder.claimed(folder, False, False, ALONE):
        own = ("run.json", run_folder.SEEN, "result.json", "README.md")
        for name in run_folder.read_manifest(trial).files:
            if name not in own:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(trial / name, folder / name)
        if run_folder.is_refit(trial):  # the run that chose the epochs, a folder of its own
            shutil.copytree(trial / run_folder.SELECTION, folder / run_folder.SELECTION, dirs_exist_ok=True)
        tensors, state = run_folder.own_tensors(run_folder.read_manifest(trial), run_folder.SEEN, meta)
        if split.test is not None:
            meta["data"]["test"], meta["untrained"] = len(split.test), untrained(split)
            tensors |= seen_tensors(split.train, eligibility.seen, split.test, None)
        files.write_tensors(folder / run_folder.SEEN, tensors, state)
        files.write_json(folder / "run.json", meta)
        run_folder.manifest.write_manifest(folder, finished=False, apart=run_folder.APART)
        result: dict[str, Any] = files.read_json(trial / "result.json") | {"untrained": meta["untrained"]}
        test = None
        if split.test is not None:
            where = pick_device(device)
            among, seen = eligibility.listed(split.train.n_items), split.seen_for("test").to(where)
            metrics = (*METRICS, *(PROPENSITY_METRICS if split.test.propensity is not None else ()))
            counts = split.train.counts()
            test = evaluate(model.to(where), split.test, seen, k, metrics, counts=counts, among=among)
            result["test"] = test.to_dict()
            run_folder.write_queries(folder, "per_query.parquet", test)
        files.write_json(folder / "result.json", result)
        history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        files.write_text(folder / "README.md", model_card(meta, result, history))
        run_folder.finish(folder)
    return test
