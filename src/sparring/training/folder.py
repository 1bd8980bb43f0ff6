"""What a training writes into its run folder, before its first step and after its last; runs.py says what is in it, and reads it back."""

from __future__ import annotations

import dataclasses
import json
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.ranks import rank
from sparring.core.types import Positives
from sparring.data.interactions import Interactions, Split, Vocabulary, write_table
from sparring.evaluation.metrics import LIST_METRICS
from sparring.evaluation.ranking import Evaluation
from sparring.models.build import encoder_folder
from sparring.models.encoders import save_encoder
from sparring.models.retriever import Retriever
from sparring.models.text import text_tower
from sparring.recipes.finding import short, source_digest
from sparring.recipes.run import Run
from sparring.recipes.setup import Setup, flat
from sparring.training.custom_towers import own_towers
from sparring.training.eligibility import kept, untrained
from sparring.training.fingerprint import method
from sparring.training.step import describe_batch
from sparring.training.trained import read_meta


def check_same(folder: Path, meta: Mapping[str, Any], setup: Setup) -> None:
    """Refuse to go on with a run under other settings than it was begun with; warn where the file of its recipe is another."""
    before = read_meta(folder)
    before["setup"] = flat(before["setup"])
    now = json.loads(json.dumps({**meta, "setup": setup.flat()}, default=str))
    for part in ("recipe", "arguments", "setup", "method", "data"):
        old, new = before.get(part), now[part]
        if old == new or (part == "method" and old is None):  # folders of before it was recorded
            continue
        raise UserError(f"{folder} was begun {difference(part, old, new)}: resume cannot change it")
    digest = now.get("recipe_digest")
    if rank() == 0 and before.get("recipe_digest", digest) != digest:
        file = now["recipe"].rpartition(":")[0]
        warnings.warn(
            f"{file} has changed since this run was begun: what is left of it is trained as the file is now",
            stacklevel=1,
        )


def difference(part: str, old: object, new: object) -> str:
    """What differs between two settings, or the first of several in a dict, in words that go on from "was begun"."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return (
            f"with other {part}" if isinstance(old, dict) or isinstance(new, dict) else f"with {part}={old}, not {new}"
        )
    name = next(name for name in {**old, **new} if name not in old or name not in new or old[name] != new[name])
    if name not in old:
        return f"without {name}={new[name]}"
    return f"with {name}={old[name]}" + (f", not {new[name]}" if name in new else ", which is missing now")


def write_start(
    folder: Path,
    data: Interactions,
    seen: Positives,
    meta: Mapping[str, Any],
    setup: Setup,
    model: Retriever | None = None,
    test: Interactions | None = None,
    began: Mapping[str, np.ndarray] | None = None,
) -> None:
    """What is known before the first step: the resolved run, the id maps, what each query has seen, and what it takes in the test part."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another folder for the run")
    # what an earlier run left here must not be resumed, or taken for the result, of this one
    results = ("metrics.jsonl", "result.json", "per_query.parquet", "measured.json", "curve.png", "README.md")
    for name in (
        "run.json",
        "checkpoint.safetensors",
        "checkpoint.previous.safetensors",
        "model.safetensors",
        *results,
    ):
        (folder / name).unlink(missing_ok=True)
    data.save_ids(folder)
    if model is not None:
        _write_encoders(folder, model, setup, weights=False)
    files.write_tensors(folder / "seen.safetensors", kept(data, seen, test, model, began))
    files.write_json(folder / "run.json", {**meta, "setup": dataclasses.asdict(setup)})


def _write_encoders(folder: Path, model: Retriever, setup: Setup, weights: bool) -> None:
    """What text towers need to be built again; with `weights` the encoders are whole, and of use outside this folder."""
    for side, module in (("query", model.query), ("item", model.item)):
        tower = text_tower(module)
        if tower is not None:
            tower.texts.save(folder / f"{side}_texts")
            save_encoder(tower.encoder, folder / encoder_folder(setup.text, side), weights)


def description(run: Run, split: Split, source: Mapping[str, Any] | None) -> dict[str, Any]:
    """The resolved run for run.json: enough to run it again."""
    from importlib.metadata import version

    from sparring import __version__

    parts = {"train": split.train, "valid": split.valid, "test": split.test}
    return {
        "recipe": run.recipe,
        "arguments": run.arguments or {},
        **({"recipe_digest": digest} if (digest := source_digest(run.recipe)) else {}),
        "method": method(run),
        **({"towers": towers} if (towers := own_towers(run.model)) else {}),
        "source": dict(source or {}),
        "data": {
            "queries": split.train.n_queries,
            "items": split.train.n_items,
            **{name: len(part) for name, part in parts.items() if part is not None},
        },
        "untrained": untrained(split),
        "batch": describe_batch(run, split).splitlines(),
        "versions": {
            "python": platform.python_version(),
            "sparring": __version__,  # not from the metadata: the package may run from its source folder
            **{name: version(name) for name in ("torch", "polars", "numpy")},
        },
    }


def write_end(
    folder: Path, run: Run, history: list[dict[str, Any]], best_epoch: int, seconds: float, test: Evaluation | None
) -> None:
    """The result, the values of single queries, the curve and the model card."""
    from sparring.training.curve import training_curve
    from sparring.training.model_card import model_card

    meta = read_meta(folder)
    result: dict[str, Any] = {"best_epoch": best_epoch, "epochs": len(history), "train_seconds": round(seconds, 3)}
    result |= {"untrained": meta["untrained"]} if "untrained" in meta else {}
    if test is not None:
        result |= {"test": test.to_dict()}
        write_table(
            _single_queries(folder, test), folder / "per_query.parquet"
        )  # before the result: who sees that one finds this
    _write_encoders(folder, run.model, run.setup, weights=True)
    files.write_json(folder / "result.json", result)
    files.write(
        folder / "curve.png", lambda file: training_curve(history, file, short(run.recipe), run.setup.validation.select)
    )
    files.write(folder / "README.md", lambda file: file.write_text(model_card(meta, result, history)))


def _single_queries(folder: Path, test: Evaluation) -> pl.DataFrame:
    """One row per test query, by its original id; what describes lists rather than how good they are is left out."""
    ids = Vocabulary.load(folder / "query_ids.parquet").decode(test.query_ids)
    ranked = {
        key: values.astype(np.float32)
        for key, values in test.per_query.items()
        if key.split("@")[0] not in LIST_METRICS
    }
    return pl.DataFrame({"query": ids, **ranked})
