"""Tuning: equal numbers of trials, scored on the validation part alone, resumable."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.experiments import tuning
from sparring.experiments.search_space import OneOf, Range, defaults, first_trials, in_unit, space, space_filling
from sparring.experiments.tuning import Trial, best, read_trials, tune
from sparring.recipes import RECIPES
from sparring.recipes.finding import find
from sparring.recipes.run import TAU
from sparring.recipes.settings import is_solved, own_arguments, own_setup
from sparring.recipes.setup import Setup
from support.settings import quick

pytest.importorskip("optuna")
QUICK = Setup.of(**quick(dim=4, epochs=2, batch_size=128))
FIXED = {"n": 16}


def test_the_space_is_shared_settings_plus_the_recipes_own() -> None:
    """Recipes of steps tune rate, temperature and decay, xir also lam; solvers their own arguments and their width;
    never numbers of candidates or fixed settings."""
    assert set(space("xir")) == {"lr", "tau", "weight_decay", "item_bias", "lam"}
    assert set(space("uns")) == {"lr", "tau", "weight_decay", "item_bias"}
    assert set(space("pns", {"tau": 0.1})) == {"lr", "weight_decay", "item_bias", "alpha"}
    assert set(space("ials")) == {"dim", "alpha", "reg"}
    assert (set(space("ease")), set(space("popularity"))) == ({"lam"}, set())
    assert set(space("item_knn")) == {"neighbours", "shrink"}
    for name in (name for name, recipe in RECIPES.items() if not is_solved(recipe)):
        assert {"lr", "weight_decay"} <= set(space(name))
        assert ("tau" in space(name)) == (name not in ("ada_tau", "ccl"))
        assert not {"n", "size", "cache_size"} & set(space(name))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_space_fits_its_recipe(name: str) -> None:
    """Tuned settings belong to the recipe or to Setup, fit its type, and have its default in range."""
    own, setup = own_arguments(find(name)), own_setup(find(name)).flat()
    for key, entry in space(name).items():
        value = own[key][1] if key in own else setup[key]
        if isinstance(entry, Range):
            assert entry.low < entry.high
            assert value is None or entry.low <= value <= entry.high
            assert entry.whole == isinstance(value, int)
        else:
            assert value in entry.values
            assert key not in own or set(entry.values) <= set(get_args(own[key][0]))


def test_trials_are_counted_kept_and_resumed(parts: Split, tmp_path: Path) -> None:
    """Two trials resumed to four equal four trials in one call."""
    told: list[Trial] = []
    whole = tune("xir", parts, 4, tmp_path / "whole", base=QUICK, fixed={"cache_size": 16, "n": 8}, device="cpu")
    tune("xir", parts, 2, tmp_path / "a", base=QUICK, fixed={"cache_size": 16, "n": 8}, device="cpu", say=told.append)
    again = tune(
        "xir", parts, 4, tmp_path / "a", base=QUICK, fixed={"cache_size": 16, "n": 8}, device="cpu", say=told.append
    )
    assert [trial.number for trial in told] == [0, 1, 2, 3]
    assert again.settings == whole.settings
    assert [(t.settings, t.value) for t in again.trials] == [(t.settings, t.value) for t in whole.trials]
    as_it_comes = {
        "lr": QUICK.training.lr,
        "tau": QUICK.temperature.tau,
        "weight_decay": 0.0,
        "item_bias": False,
        "lam": 0.5,
    }
    assert whole.trials[0].settings == as_it_comes
    assert len({json.dumps(trial.settings) for trial in whole.trials}) == 4
    assert whole.value == max(trial.value or 0 for trial in whole.trials)
    assert tune("xir", parts, 4, tmp_path / "a", base=QUICK, fixed={"cache_size": 16, "n": 8}, say=told.append) == again
    assert len(told) == 4


RUNGS = ((1, 3), (2, 2))


def test_rungs_prune_trials(parts: Split, tmp_path: Path) -> None:
    """All trials train one epoch, the best three two, the best two of those to the end; each value by a fit here."""
    from sparring.recipes.settings import build
    from sparring.training.fitting import fit

    base = QUICK.replaced(epochs=4, patience=None)
    found = tune("uns", parts, 5, tmp_path, base=base, fixed=FIXED, device="cpu", rungs=RUNGS)
    curves = []
    for trial in found.trials:
        run = build("uns", parts.train, {**FIXED, **trial.settings, "seed": tuning.TUNING_SEED}, base)
        history = fit(run, Split(parts.train, parts.valid, None), device="cpu").history
        curves.append([record[base.validation.select] for record in history])
    by_first = sorted(range(5), key=lambda i: (-curves[i][0], i))[:3]
    by_second = sorted(by_first, key=lambda i: (-max(curves[i][:2]), i))[:2]
    winner = max(by_second, key=lambda i: (max(curves[i]), -i))
    for i, trial in enumerate(found.trials):
        rung = (i in by_first) + (i in by_second)
        epochs = (1, 2, 4)[rung]
        assert (trial.number, trial.rung, trial.epochs) == (i, rung, epochs)
        assert trial.value == max(curves[i][:epochs])
    assert (found.settings, found.value) == (found.trials[winner].settings, max(curves[winner]))


def test_pruned_trials_are_resumed(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that is interrupted in any training ends like one that is not; finished trainings are kept."""
    base = QUICK.replaced(epochs=3, patience=None)
    asked: dict[str, Any] = {"base": base, "fixed": FIXED, "device": "cpu", "rungs": RUNGS}
    whole = tune("uns", parts, 5, tmp_path / "whole", **asked)
    real, calls = tuning.fit, 0

    def every_third_is_killed(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyboardInterrupt
        return real(*args, **named)

    monkeypatch.setattr(tuning, "fit", every_third_is_killed)
    for _ in range(20):
        try:
            found = tune("uns", parts, 5, tmp_path / "cut", **asked)
            break
        except KeyboardInterrupt:
            continue
    assert found.settings == whole.settings
    assert [dataclasses.replace(t, seconds=0) for t in found.trials] == [
        dataclasses.replace(t, seconds=0) for t in whole.trials
    ]
    assert calls - calls // 3 == 5 + 3 + 2


def test_a_training_that_ended_by_itself_is_not_repeated(
    parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed form trains once a trial, and the best of all trials wins, whatever the rungs; failures do not rise."""
    real, calls = tuning.fit, 0

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise UserError("no memory")
        return real(*args, **named)

    monkeypatch.setattr(tuning, "fit", counted)
    found = tune("ease", parts, 5, tmp_path, device="cpu", design=2, rungs=((8, 3), (24, 2)))
    assert calls == 5
    assert found.value == max(trial.value or 0 for trial in found.trials)
    assert (found.trials[0].rung, found.trials[0].error) == (0, "no memory")
    assert sorted(trial.rung for trial in found.trials) == [0, 0, 1, 2, 2]


def test_every_method_tries_other_temperatures(parts: Split, tmp_path: Path) -> None:
    """After defaults and strong settings come the temperatures `taus`, or half and twice the default."""
    named, plain = (
        tune("uns", parts, 5, tmp_path / str(taus), base=QUICK, fixed=FIXED, device="cpu", taus=taus).trials
        for taus in ((0.2, 0.4), ())
    )
    strong = named[1].settings
    assert strong["item_bias"]
    assert [trial.settings for trial in named[2:4]] == [strong | {"tau": tau} for tau in (0.2, 0.4)]
    usual = TAU
    assert strong["tau"] == pytest.approx(usual, abs=5e-4)
    assert [trial.settings["tau"] for trial in plain[2:4]] == pytest.approx([usual / 2, 2 * usual], abs=5e-4)
    assert all(trial.settings | {"tau": 0} == strong | {"tau": 0} for trial in plain[2:4])
    assert plain[4].settings not in [trial.settings for trial in plain[:4]]


def test_no_setting_is_tried_twice(parts: Split) -> None:
    """A recipe whose defaults are the strong settings tries other temperatures a trial earlier."""
    choices = space("tables")
    trials = first_trials("tables", choices, parts.train, None, {})
    assert trials[0]["tau"] == first_trials("uns", space("uns"), parts.train, None, {})[1]["tau"]
    assert len({json.dumps(trial, sort_keys=True) for trial in trials}) == len(trials) <= 4


def test_temperatures_of_another_unit_are_among_the_first(parts: Split) -> None:
    """BIR at twice tau is as sharp as SSL-Pop at tau, PSL at half of it: every method tries all three."""
    taus = {
        recipe: [trial["tau"] for trial in first_trials(recipe, space(recipe, base=QUICK), parts.train, QUICK, {})[1:4]]
        for recipe in ("ssl_pop", "bir", "xir", "psl")
    }
    usual, half, double = taus["ssl_pop"]
    assert (half, double) == (usual / 2, usual * 2)
    assert all(each == [usual, half, double] for each in taus.values())


def test_a_design_fills_the_space() -> None:
    """Of eight settings, one is in each eighth of every range, and each half of a list has four."""
    choices = space("xir", base=QUICK)
    points = space_filling(choices, 8, seed=3)
    for name, entry in choices.items():
        values = [point[name] for point in points]
        if isinstance(entry, Range):
            scale = np.log if entry.log else np.asarray
            low, high = scale(entry.low), scale(entry.high)
            places = (scale(np.array(values)) - low) / (high - low)
            assert sorted(np.floor(8 * places).astype(int)) == list(range(8)), name
        else:
            assert set(values) <= set(entry.values)
    assert sorted(point["item_bias"] for point in points) == [False] * 4 + [True] * 4
    assert space_filling(choices, 8, seed=3) == points != space_filling(choices, 8, seed=4)
    whole = [point["neighbours"] for point in space_filling(space("item_knn"), 16)]
    assert all(isinstance(value, int) and 10 <= value <= 500 for value in whole)
    assert space_filling({}, 3) == space_filling(choices, 0) == []


def test_temperatures_are_tried_in_the_unit_of_a_method(parts: Split, tmp_path: Path) -> None:
    """With a unit of 2 every tried temperature and the range are twice as large; a design follows the first trials."""
    plain, twice = (
        tune("uns", parts, 6, tmp_path / str(unit), base=QUICK, fixed=FIXED, device="cpu", unit=unit, design=2).trials
        for unit in (1.0, 2.0)
    )
    assert [2 * trial.settings["tau"] for trial in plain] == pytest.approx([t.settings["tau"] for t in twice])
    tau = in_unit(space("uns", FIXED, QUICK), 2.0)["tau"]
    assert isinstance(tau, Range)
    assert (tau.low, tau.high) == (0.04, 2.0)
    choices = in_unit(space("uns", FIXED, QUICK), 2.0)
    assert [trial.settings for trial in twice[4:]] == space_filling(choices, 2)


def test_the_score_is_the_best_validation_and_the_test_part_is_not_used(parts: Split, tmp_path: Path) -> None:
    """The first trial scores like the recipe's own training on validation; the test part changes nothing."""
    from sparring.recipes.settings import build
    from sparring.training.fitting import fit

    run = build("uns", parts.train, {"n": 16, "seed": tuning.TUNING_SEED}, QUICK)
    history = fit(run, parts, device="cpu", k=(10,)).history
    found = tune("uns", parts, 1, tmp_path / "a", base=QUICK, fixed=FIXED, device="cpu")
    assert found.value == max(record["ndcg@10"] for record in history)
    blind = tune("uns", Split(parts.train, parts.valid, None), 1, tmp_path / "b", base=QUICK, fixed=FIXED, device="cpu")
    assert blind.value == found.value


def test_a_failed_trial_counts_and_is_reported(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed trial counts, keeps its reason, and the best of the others wins."""
    calls, real = 0, tuning.fit

    def sometimes(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise UserError("the loss is nan in epoch 1\nmore")
        return real(*args, **named)

    monkeypatch.setattr(tuning, "fit", sometimes)
    found = tune("uns", parts, 3, tmp_path, base=QUICK, fixed=FIXED, device="cpu")
    assert calls == len(found.trials) == 3
    assert found.failed == 1
    assert (found.trials[1].value, found.trials[1].error) == (None, "the loss is nan in epoch 1")
    assert read_trials(tmp_path / "trials.jsonl") == list(found.trials)


def test_best_takes_the_first_in_a_tie_and_needs_a_success() -> None:
    """The earlier trial wins a tie; NaN and failures never win; with nothing else there is an error."""
    values = [0.1, None, 0.3, float("nan"), 0.3]
    trials = [
        Trial(i, {"lr": float(i)}, value, 1.0, "bad" if value is None else None) for i, value in enumerate(values)
    ]
    assert best("uns", trials).settings == {"lr": 2.0}
    with pytest.raises(UserError, match="all 1 trials of uns failed; the last: bad"):
        best("uns", trials[1:2])


def test_bad_input(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No validation part, a corrupt file, trials over another space and no Optuna are one-line errors."""
    with pytest.raises(UserError, match="validation part"):
        tune("uns", Split(parts.train, None, parts.test), 1, tmp_path)
    (tmp_path / "trials.jsonl").write_text('{"number": 0, "sett')
    with pytest.raises(UserError, match=r"trials\.jsonl is corrupt"):
        tune("uns", parts, 1, tmp_path)
    (tmp_path / "trials.jsonl").write_text(json.dumps(dataclasses.asdict(Trial(0, {"lr": 0.1}, 0.5, 1.0))) + "\n")
    with pytest.raises(UserError, match="another folder"):
        tune("uns", parts, 1, tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"sparring\[tune\]"):
        tune("uns", parts, 1, tmp_path)


def test_literal_arguments_take_their_declared_values() -> None:
    """An entry without values stands for all values of the argument's Literal type."""
    assert space("bsl")["form"] == OneOf(("corrected", "release"))


@pytest.mark.parametrize(("encoder", "lr"), [("minilm", 2e-4), ("bag", 0.01)])
def test_rates_of_text_towers(encoder: str, lr: float) -> None:
    """A transformer is tried at rates from 1e-5 to 1e-3, a bag at those of a table; the first suits the encoder."""
    found = space("dpr", {"encoder": encoder})
    assert found["lr"] == (Range(1e-5, 1e-3, log=True) if encoder == "minilm" else space("dpr")["lr"])
    assert defaults("dpr", found, None, {"encoder": encoder})["lr"] == lr
