"""The temperature of a run that sets none is the best of its neighbours after one or two epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparring.core.types import Ranks
from sparring.data.interactions import Split
from sparring.data.splits import split
from sparring.data.synthetic_world import make_world
from sparring.recipes.run import TAU, Run
from sparring.recipes.settings import build
from sparring.training import temperature
from sparring.training.fitting import fit
from sparring.training.loop import Trainer, TrainingProgress
from sparring.training.temperature import LADDER, choose_tau

CPU = torch.device("cpu")
SMALL = {"dim": 8, "epochs": 10, "batch_size": 64, "eval_every": 1}


@pytest.fixture(scope="module")
def parts() -> Split:
    return split(make_world(queries=60, items=40, seed=1).interactions, "random", valid=0.2, test=0.2, seed=0)


@pytest.mark.parametrize(("recipe", "epochs", "first"), [("default", 10, 1), ("tables", 24, 2)])
def test_the_choice_is_the_peak_of_the_first_epochs(parts: Split, recipe: str, epochs: int, first: int) -> None:
    """Each score is that of a training by hand of the first epoch, or of two in a long training; the choice is the
    first peak from 0.1 on, where a higher temperature must be ahead by 6 % after one epoch and by 3 % after two.
    """
    small = {**SMALL, "epochs": epochs}
    run = build(recipe, parts.train, small)
    before = {name: value.clone() for name, value in run.modules().state_dict().items()}
    tau, tried = choose_tau(run, parts, CPU)
    for name, value in run.modules().state_dict().items():
        assert torch.equal(value, before[name]), name
    scores = []
    for each in LADDER:
        trainer = Trainer(build(recipe, parts.train, {**small, "tau": each}), parts, CPU, None, TrainingProgress())
        trainer.set_random()
        for _ in range(first):
            trainer.validate(trainer.epoch())
        scores.append(trainer.state.history[-1]["ndcg@10"])
    assert tried == {each: scores[LADDER.index(each)] for each in tried}
    at = LADDER.index(0.1)
    rise = 1.06 if first == 1 else 1.03
    step, needed = (1, rise) if scores[at + 1] > rise * scores[at] else (-1, 1.0)
    at = max(at, at + step)
    while 0 <= at + step < len(LADDER) and scores[at + step] > needed * scores[at]:
        at += step
    assert tau == LADDER[at]


@pytest.mark.parametrize(
    ("gains", "epochs", "chosen"),
    [
        ((1.07, 1.07, 1.05), 16, 0.2),  # the third step gains less than 6 %
        ((1.05, 1.50, 1.50), 16, 0.1),  # and so does the first: those above are not tried
        ((1.05, 1.04, 1.02), 32, 0.2),  # two epochs each: 3 %
        ((1.02, 1.50, 1.50), 32, 0.1),
    ],
)
def test_a_higher_temperature_must_be_ahead(
    parts: Split, monkeypatch: pytest.MonkeyPatch, gains: tuple[float, ...], epochs: int, chosen: float
) -> None:
    """With scores that rise by these factors from 0.1 on and fall below it, the choice is the last that is worth it."""
    scores, at = {0.07: 0.009, 0.1: 0.01}, LADDER.index(0.1)
    for place, gain in enumerate(gains, at + 1):
        scores[LADDER[place]] = gain * scores[LADDER[place - 1]]
    trained = []

    def short(run: Run, split: Split, device: torch.device, ranks: Ranks, epochs: int) -> float:
        trained.append(epochs)
        return scores[run.setup.temperature.tau]

    monkeypatch.setattr(temperature, "_short_training", short)
    tau, tried = choose_tau(build("default", parts.train, {**SMALL, "epochs": epochs}), parts, CPU)
    assert tau == chosen
    assert tried == {each: scores[each] for each in tried}
    assert set(trained) == {1 if epochs == 16 else 2}


def test_a_run_records_its_temperature_and_resumes_with_it(
    parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.json has the chosen temperature and those tried; a resumed run chooses nothing and ends the same."""
    whole = fit(build("default", parts.train, SMALL), parts, tmp_path / "a", k=(5,), device="cpu")
    meta = json.loads((tmp_path / "a" / "run.json").read_text())
    assert meta["setup"]["temperature"]["tau"] == whole.run.setup.temperature.tau
    assert str(whole.run.setup.temperature.tau) in meta["temperatures"]
    assert len(meta["temperatures"]) > 1

    class Stop(Exception):
        pass

    def stop(record: dict[str, object]) -> bool:
        if record["epoch"] == 3:
            raise Stop
        return True

    with pytest.raises(Stop):
        fit(
            build("default", parts.train, SMALL),
            parts,
            tmp_path / "b",
            k=(5,),
            device="cpu",
            progress=TrainingProgress(epoch=stop),
        )
    monkeypatch.setattr(temperature, "_short_training", None)  # a call would fail
    again = fit(build("default", parts.train, SMALL), parts, tmp_path / "b", resume=True, k=(5,), device="cpu")
    assert [r["loss"] for r in again.history] == [r["loss"] for r in whole.history]


def test_without_trials_it_is_the_usual_one(parts: Split) -> None:
    """No validation part, a short training, or a temperature of the user's: nothing is tried."""
    assert choose_tau(build("default", parts.train, SMALL), Split(parts.train), CPU) == (TAU, {})
    assert choose_tau(build("default", parts.train, {**SMALL, "epochs": 9}), parts, CPU) == (TAU, {})
    fitted = fit(build("default", parts.train, {**SMALL, "tau": 0.33}), parts, k=(5,), device="cpu")
    assert fitted.run.setup.temperature.tau == 0.33


def test_a_refit_keeps_the_temperature(parts: Split) -> None:
    """The second training, which has no validation part, has the temperature of the first."""
    fitted = fit(build("default", parts.train, SMALL), parts, k=(5,), device="cpu", refit=True)
    assert fitted.selection is not None
    chosen = fitted.selection.run.setup.temperature.tau
    assert fitted.run.setup.temperature.tau == chosen
    assert float(fitted.run.temperature(torch.zeros(1, dtype=torch.long))) == pytest.approx(chosen)
