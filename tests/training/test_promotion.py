"""Promotion: a run that was trained without the test part becomes the run of a training on the complete split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.core.errors import UserError
from sparring.core.files import read_tensors
from sparring.data.interactions import Split
from sparring.data.splits import split
from sparring.data.synthetic_world import SyntheticWorld, make_world
from sparring.recipes.settings import build
from sparring.serving.checking import check
from sparring.training.fitting import fit
from sparring.training.promotion import promote
from sparring.training.trained import load
from support.settings import quick

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ease": ("ease", {"lam": 20.0}),
    "ials": ("ials", {"dim": 5, "epochs": 3}),
    "ids": ("default", quick(n=16)),
    "sets": ("default", quick(n=16, model="sets")),
    "ligr": ("default", {"model": "ligr", **quick(n=16)}),
}


@pytest.fixture(scope="module")
def ordered(small_world: SyntheticWorld) -> Split:
    """Each query's last item is its test."""
    return split(small_world.interactions, "leave-last-out")


@pytest.mark.parametrize("name", RUNS)
def test_it_equals_a_training_on_the_complete_split(name: str, ordered: Split, tmp_path: Path) -> None:
    """The same files, model, test metrics, settings and lists, and no fault in the folder."""
    recipe, settings = RUNS[name]
    for part, parts in (("trial", Split(ordered.train, ordered.valid)), ("whole", ordered)):
        fit(build(recipe, parts.train, settings), parts, tmp_path / part, k=(10, 20), device="cpu")
    test = promote(tmp_path / "trial", ordered, tmp_path / "promoted", k=(10, 20), device="cpu")
    folders = tmp_path / "promoted", tmp_path / "whole"
    names = [{path.name for path in folder.iterdir()} for folder in folders]
    assert names[0] == names[1]
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    for result in results:
        del result["train_seconds"], result["test"]["seconds"]
    assert results[0] == results[1]
    assert test is not None
    assert test.metrics == results[0]["test"]["metrics"]
    metas = [json.loads((folder / "run.json").read_text()) | {"id": ""} for folder in folders]
    assert metas[0] == metas[1]
    for file in ("model.safetensors", "seen.safetensors"):
        ours, own = (read_tensors(folder / file)[0] for folder in folders)
        assert ours.keys() == own.keys()
        assert all(ours[key].equal(own[key]) for key in ours)
    assert not check(folders[0]).problems
    queries = list(ordered.train.query_ids.decode(np.unique(ordered.train.queries)[:5]))
    lists = [load(folder).recommend(queries, 5) for folder in folders]
    assert lists[0].equals(lists[1])


def test_a_split_of_other_data_is_refused(ordered: Split, tmp_path: Path) -> None:
    """Nothing is written for a split whose queries and items are not those of the run."""
    fit(build("popularity", ordered.train), Split(ordered.train, ordered.valid), tmp_path / "trial", device="cpu")
    with pytest.raises(UserError, match="another split"):
        promote(tmp_path / "trial", split(make_world(30, 20, seed=1).interactions), tmp_path / "promoted")
    assert not (tmp_path / "promoted").exists()
