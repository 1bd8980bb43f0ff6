"""Every recipe under every model: it trains, and a resumed training equals an uninterrupted one bit for bit.

tests/several_ranks compares the same pairs in several processes with one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch

from sparring.data.interactions import Split
from sparring.recipes.run import Run
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.loop import Trainer, TrainingProgress
from support.texts import ordered_text_parts

_path = Path(__file__).parents[1] / "several_ranks" / "cases.py"
_spec = importlib.util.spec_from_file_location("matrix_cases", _path)
assert _spec is not None
assert _spec.loader is not None
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)


@pytest.fixture(scope="module")
def parts() -> Split:
    """A small world with texts and categories, in an order."""
    return ordered_text_parts()


def a_run(parts: Split, recipe: str, model: str) -> Run:
    run = build(recipe, parts.train, {**cases.SMALL, **cases.under(recipe, model)})
    return dataclasses.replace(run, setup=run.setup.replaced(clf_epochs=0))


@pytest.mark.parametrize(("recipe", "model"), cases.PAIRS)
def test_every_recipe_trains_every_model(parts: Split, recipe: str, model: str) -> None:
    """Two steps change the model and leave finite losses."""
    made = Trainer(a_run(parts, recipe, model), parts, torch.device("cpu"), None, TrainingProgress())
    before = {name: value.clone() for name, value in made.run.model.state_dict().items()}
    made.refresh()
    for step in itertools.islice(made.rows.batches.steps(0), 2):
        made.step(*step)
    assert torch.isfinite(made.total)
    assert any(not torch.equal(value, before[name]) for name, value in made.run.model.state_dict().items())


class Stop(Exception):
    """Raised where a training is interrupted."""


@pytest.mark.parametrize(("recipe", "model"), cases.PAIRS)
def test_resuming_changes_no_bit(parts: Split, recipe: str, model: str, tmp_path: Path) -> None:
    """A training that was interrupted within its second epoch ends with the weights of an uninterrupted one."""
    alone = Split(parts.train)
    whole = fit(a_run(parts, recipe, model), alone, device="cpu")

    def stop(epoch: int, step: int, loss: object) -> bool:
        if (epoch, step) == (1, 2):
            raise Stop
        return epoch == 1

    with pytest.raises(Stop):
        fit(a_run(parts, recipe, model), alone, tmp_path / "run", device="cpu", progress=TrainingProgress(step=stop))
    resumed = fit(a_run(parts, recipe, model), alone, tmp_path / "run", device="cpu", resume=True)
    assert [record["loss"] for record in resumed.history] == [record["loss"] for record in whole.history]
    for name, value in resumed.run.model.state_dict().items():
        assert torch.equal(value, whole.run.model.state_dict()[name]), name
