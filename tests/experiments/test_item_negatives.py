"""The negatives of an item: their shares by the formula, and the run left unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sparring.cli import main
from sparring.cli.inputs import read_recorded, split_recorded
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.experiments.diagnose import samplers
from sparring.experiments.diagnose.item_negatives import negatives_of_item
from sparring.recipes.run import Run
from sparring.training.folder import read_meta


def trained(folder: Path, recipe: str, *more: str) -> tuple[Run, Split]:
    words = [
        "train",
        "--data",
        "world:60x40:3",
        "--recipe",
        recipe,
        "--epochs",
        "2",
        "--quiet",
        "--device",
        "cpu",
        "--out",
        str(folder),
    ]
    assert main([*words, "--set", "batch_size=64", "--set", "dim=8", *more]) == 0
    meta = read_meta(folder)
    split = split_recorded(read_recorded(meta, folder, None, {}), meta, folder)
    return samplers.load_for_diagnosis(folder, split), split


def rarest(split: Split) -> int:
    """The item with the fewest training pairs, at least one."""
    counts = np.bincount(split.train.items, minlength=split.train.n_items)
    return int(np.where(counts > 0, counts, 10**9).argmin())


def test_over_the_catalogue_shares_are_those_of_the_softmax(tmp_path: Path) -> None:
    """With all items that have pairs as candidates, each share is the softmax over the others, averaged over pairs."""
    run, split = trained(tmp_path / "run", "full_softmax")
    item = rarest(split)
    queries = split.train.queries[split.train.items == item]
    found = negatives_of_item(run, split, item, limit=100, steps=150, seconds=60)
    with torch.no_grad():
        vectors = run.model.item_vectors().double()
        q = run.model.encode_queries(torch.from_numpy(queries).long(), torch.full((len(queries),), item)).double()
        tau = float(run.temperature(torch.from_numpy(queries).long()).flatten()[0])
        scores = q @ vectors.T / tau
        scores[:, item] = -torch.inf
        scores[:, np.bincount(split.train.items, minlength=split.train.n_items) == 0] = -torch.inf
        each = scores.softmax(-1)
    low, high = each.min(0).values, each.max(0).values
    assert found.pairs == len(queries)
    assert found.steps == 150
    assert not found.cut
    assert found.batch == 64
    assert sum(found.shares) == pytest.approx(1, abs=1e-6)
    assert item not in found.items
    assert found.shares == sorted(found.shares, reverse=True)
    for at, share, times in zip(found.items, found.shares, found.times, strict=True):
        assert low[at] - 1e-6 <= share <= high[at] + 1e-6
        assert share == pytest.approx(float(each[:, at].mean()), rel=0.25, abs=1e-3)
        assert times == pytest.approx(1)
    assert found.candidates == len(np.unique(split.train.items)) - 1


@pytest.mark.parametrize("recipe", ["ssl_pop", "uns", "xir", "mixgcf"])
def test_negatives_are_items_and_the_run_is_unchanged(tmp_path: Path, recipe: str) -> None:
    """Items are distinct, shares sum to 1 with the synthetic ones, tensors are unchanged, and seeds repeat."""
    run, split = trained(tmp_path / "run", recipe)
    before = {name: tensor.clone() for name, tensor in run.modules().state_dict().items()}
    item = rarest(split)
    found = negatives_of_item(run, split, item, limit=100, steps=5, seconds=60)
    assert len(set(found.items)) == len(found.items)
    assert all(0 <= at < split.train.n_items for at in found.items)
    assert all(times > 0 for times in found.times)
    assert sum(found.shares) + found.made_up == pytest.approx(1, abs=1e-6)
    assert (found.made_up > 0) == (recipe == "mixgcf")
    assert len(found.items) == found.distinct
    assert negatives_of_item(run, split, item, limit=100, steps=5, seconds=60) == found
    for name, tensor in run.modules().state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_it_stops_in_time_and_reports_it(tmp_path: Path) -> None:
    """With no time left one step is taken; an item without pairs and an unknown item are errors."""
    run, split = trained(tmp_path / "run", "ssl_pop")
    found = negatives_of_item(run, split, rarest(split), seconds=0)
    assert found.steps == 1
    assert found.cut
    nobody = np.flatnonzero(np.bincount(split.train.items, minlength=split.train.n_items) == 0)
    if len(nobody):
        with pytest.raises(UserError, match="no training pair"):
            negatives_of_item(run, split, int(nobody[0]))
    with pytest.raises(UserError, match="outside"):
        negatives_of_item(run, split, split.train.n_items)
