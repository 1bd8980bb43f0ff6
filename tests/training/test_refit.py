"""A refit trains again on train and valid, for the epochs that validation chose, and resumes at any moment."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split
from sparring.data.prepared.preparation import prepare
from sparring.data.reading import read
from sparring.data.splits import split
from sparring.data.synthetic_world import SyntheticWorld
from sparring.negatives import InBatch
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup
from sparring.training import closed_form, trained
from sparring.training.fitting import Fitted, fit
from sparring.training.folder import SELECTION, begun_run, delete_run
from sparring.training.fusing import fuse
from sparring.training.loop import Trainer, TrainingProgress
from support.run_files import contents

SETTINGS: dict[str, dict[str, Any]] = {
    "xir": {"draw": "multinomial", "cache_size": 64, "schedule": "linear", "warmup": 4},
    "ssl_pop": {"query_tower": "history", "schedule": "cosine"},
    "ials": {},
    "ease": {},
}
EPOCHS = 5


class Killed(BaseException):
    """Simulates a kill: nothing may catch it."""


def settings_of(case: str) -> dict[str, Any]:
    if case == "ease":
        return {}
    usual = {"dim": 8, "epochs": EPOCHS, "patience": 2}
    return {**usual, **({} if case == "ials" else {"batch_size": 64, "lr": 0.05}), **SETTINGS[case]}


def refitted(
    case: str, parts: Split, out: Path | None, progress: TrainingProgress | None = None, **more: Any
) -> Fitted:
    """Train with a checkpoint after every epoch, then refit."""
    progress = progress or TrainingProgress(epoch=lambda record: True)
    run = build(case, parts.train, settings_of(case))
    return fit(run, parts, out, k=(10,), device="cpu", progress=progress, refit=True, **more)


def by_hand(case: str, parts: Split, epochs: int) -> tuple[Run, Split]:
    """Training on the rows of both parts, stopped after this many epochs, without any code of the refit."""
    assert parts.valid is not None
    rows = [(part.queries, part.items, part.time) for part in (parts.train, parts.valid)]
    queries, items, time = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    order = sorted(range(len(queries)), key=lambda row: (queries[row], items[row]))
    both = Interactions(
        queries[order], items[order], parts.train.query_ids, parts.train.item_ids, time[order], shown=parts.train.shown
    )
    first = build(case, parts.train, settings_of(case))
    run = build(case, both, first.arguments, setup=first.setup)
    whole = Split(both, None, parts.test)

    def stop(record: dict[str, Any]) -> None:
        if record["epoch"] == epochs:
            raise Killed

    with suppress(Killed):
        fit(run, whole, k=(10,), device="cpu", progress=TrainingProgress(epoch=stop))
    return run, whole


@pytest.mark.parametrize("case", sorted(SETTINGS))
def test_a_refit_is_the_chosen_epochs_on_the_joined_parts(case: str, parts: Split, tmp_path: Path) -> None:
    """The refitted model equals, bit for bit, a training on the rows of both parts under the complete schedule, stopped
    after the chosen epoch; the folder holds that model and the training that chose the epoch."""
    plain = fit(build(case, parts.train, settings_of(case)), parts, k=(10,), device="cpu")
    found = refitted(case, parts, tmp_path / "run")
    assert found.selection is not None
    assert found.best_epoch == found.selection.best_epoch == plain.best_epoch
    assert case == "ease" or found.best_epoch < EPOCHS, "an epoch before the last one shows that training stops there"
    hand, _ = by_hand(case, parts, found.best_epoch)
    for name, tensor in files.tensors_of(hand.model).items():
        assert torch.equal(tensor, files.tensors_of(found.run.model)[name]), name
    loaded = trained.load(tmp_path / "run")
    assert loaded.ids.query_ids.ids.equals(parts.train.query_ids.ids)
    for name, tensor in files.tensors_of(found.run.model).items():
        assert torch.equal(tensor, files.tensors_of(loaded.model)[name]), name
    curve = [{k: v for k, v in record.items() if "seconds" not in k} for record in found.selection.history]
    saved = [json.loads(line) for line in (tmp_path / "run" / SELECTION / "metrics.jsonl").read_text().splitlines()]
    assert curve == [{k: v for k, v in record.items() if "seconds" not in k} for record in saved]
    assert curve == [{k: v for k, v in record.items() if "seconds" not in k} for record in plain.history]
    record = json.loads((tmp_path / "run" / "run.json").read_text())["refit"]
    assert record["epochs"] == found.best_epoch
    assert record["interactions"] == len(parts.train) + len(parts.valid or ())
    assert record["value"] == curve[found.best_epoch - 1][record["select"]]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["refit"] == record
    assert f"{record['interactions']:,} interactions of both parts" in (tmp_path / "run" / "README.md").read_text()


def test_the_test_masks_both_parts(parts: Split) -> None:
    """A refitted run is tested on the test part without the items of both other parts, by brute force."""
    found = refitted("ssl_pop", parts, None)
    assert found.test is not None
    assert parts.test is not None
    assert parts.valid is not None
    scores = (
        found.run.model.query_vectors(torch.arange(parts.train.n_queries)) @ found.run.model.item_vectors().T
    ).numpy()
    recalls = []
    for query in np.unique(parts.test.queries):
        row = scores[query].copy()
        for part in (parts.train, parts.valid):
            row[part.items[part.queries == query]] = -np.inf
        trained_on = np.union1d(parts.train.items, parts.valid.items)
        row[np.setdiff1d(np.arange(len(row)), trained_on)] = -np.inf
        wanted = parts.test.items[parts.test.queries == query]
        recalls.append(np.isin(np.argsort(-row)[:10], wanted).sum() / len(wanted))
    assert found.test.metrics["recall@10"] == pytest.approx(np.mean(recalls), abs=1e-6)


def test_joined_rows_are_those_of_a_split_without_validation(small_world: SyntheticWorld) -> None:
    """Train and valid joined equal the training part of the same split with valid=0, row by row."""
    for how in ("random", "leave-last-out"):
        both = split(small_world.interactions, how, valid=0.1, seed=1).joined()
        whole = split(small_world.interactions, how, valid=0.0, seed=1)
        assert both.valid is None
        for name in ("queries", "items", "time"):
            assert np.array_equal(getattr(both.train, name), getattr(whole.train, name))
        seen, expected = both.seen_for("test"), whole.seen_for("test")
        assert torch.equal(seen.start, expected.start)
        assert torch.equal(seen.items, expected.items)


def test_prepared_data_is_refitted(small_world: SyntheticWorld, tmp_path: Path) -> None:
    """Prepared data gives the refitted model that the same data in memory gives, bit for bit."""
    data = small_world.interactions
    rows = {"user_id": data.queries, "item_id": data.items, "timestamp": data.time}
    pl.DataFrame(rows).write_parquet(tmp_path / "pairs.parquet")
    prepare(tmp_path / "pairs.parquet", tmp_path / "prepared", how="random")
    models = []
    for place in ("pairs.parquet", "prepared"):
        found = refitted("xir", split(read(tmp_path / place), "auto"), None)
        models.append(files.tensors_of(found.run.model))
    for name, tensor in models[0].items():
        assert torch.equal(tensor, models[1][name]), name


def assert_same(one: Path, other: Path) -> None:
    for place in ("", SELECTION):
        if place:
            for folder in (one, other):  # the run that chooses has no test
                path = folder / place / "result.json"
                path.write_text(json.dumps({**json.loads(path.read_text()), "test": {"metrics": {}}}))
        first, second = contents(one / place), contents(other / place)
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name], name


def killing(moments: set[int], checkpoints: random.Random) -> TrainingProgress:
    """Raise after these steps of both trainings, counted without repetition; a checkpoint after every third or so."""
    calls = 0

    def step(epoch: int, done: int, loss: Callable[[], float]) -> bool:
        nonlocal calls
        calls += 1
        if calls in moments:
            raise Killed
        return checkpoints.random() < 0.3

    return TrainingProgress(step=step, epoch=lambda record: True)


@pytest.mark.parametrize("case", ["xir", "ials"])
def test_stopped_at_any_step_and_resumed(case: str, parts: Split, tmp_path: Path) -> None:
    """Stopped before the first checkpoint, while the epoch is chosen, and in the refit, a resumed run is bitwise
    identical to an uninterrupted one."""
    refitted(case, parts, tmp_path / "whole")
    every = {"xir": 7, "ials": 2}[case]
    progress, stops, places = killing(set(range(1, 400, every)), random.Random(0)), 0, set()
    while True:
        try:
            refitted(case, parts, tmp_path / "stopped", progress, resume=stops > 0)
            break
        except Killed:
            stops += 1
            places.add(begun_run(tmp_path / "stopped"))
    assert places == {tmp_path / "stopped" / SELECTION, tmp_path / "stopped"}
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_stopped_while_the_refit_starts(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between any two files that the refit writes first, the resumed run is bitwise identical."""
    refitted("ials", parts, tmp_path / "whole")
    real = os.replace
    for target in ("query_ids.parquet", "seen.safetensors", "run.json", "manifest.json"):
        stopped = tmp_path / target

        def replace(source: Path, to: Path, stopped: Path = stopped, target: str = target) -> None:
            if Path(to) == stopped / target:
                raise Killed
            real(source, to)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            with pytest.raises(Killed):
                refitted("ials", parts, stopped)
        refitted("ials", parts, stopped, resume=True)
        assert_same(tmp_path / "whole", stopped)


OWN = Setup.of(dim=8, epochs=3, batch_size=64)


def test_a_run_of_ones_own(parts: Split) -> None:
    """A run without a recipe needs the function that builds it; other settings or another value are refused."""

    def made(data: Interactions) -> Run:
        return compose(data, OWN, Term(1.0, InBatch()))

    found = fit(made(parts.train), parts, k=(10,), device="cpu", refit=made)
    assert found.selection is not None
    with pytest.raises(UserError, match="refit=FUNCTION"):
        fit(made(parts.train), parts, k=(10,), device="cpu", refit=True)
    other = OWN.replaced(dim=4)
    with pytest.raises(UserError, match="settings"):
        fit(made(parts.train), parts, k=(10,), refit=lambda data: compose(data, other, Term(1.0, InBatch())))
    with pytest.raises(UserError, match="int"):
        fit(made(parts.train), parts, k=(10,), refit=lambda data: 3)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("recipe", ["default", "ials", "ease"])
def test_a_finished_selection_is_read(
    recipe: str, parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was trained before, put in the folder `selection`, chooses: nothing of it is trained or chosen again.

    The result is that of a refit in one go, with the closed form of `default` as chosen before.
    """
    settings = {} if recipe == "ease" else {"dim": 8, "epochs": 4}
    settings |= {"batch_size": 64, "tau": 0.2} if recipe == "default" else {}
    refits = {"k": (10,), "device": "cpu", "refit": True}
    whole = fit(build(recipe, parts.train, settings), parts, tmp_path / "whole", **refits)
    place = tmp_path / "run" / SELECTION
    fit(build(recipe, parts.train, settings), Split(parts.train, parts.valid), place, device="cpu")
    before = {path: path.read_bytes() for path in place.iterdir() if path.is_file()}

    def choose(*_: object) -> None:
        pytest.fail("the closed form is chosen again")

    monkeypatch.setattr(closed_form, "_choose", choose)
    trained_on: list[int] = []
    usual = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self: trained_on.append(len(self.split.train)) or usual(self))
    found = fit(build(recipe, parts.train, settings), parts, tmp_path / "run", resume=True, **refits)
    assert trained_on == [len(parts.train) + len(parts.valid or ())]
    assert {path: path.read_bytes() for path in place.iterdir() if path.is_file()} == before
    assert found.selection is not None
    assert whole.selection is not None
    assert found.closed_form == whole.closed_form == found.selection.closed_form
    for one, other in ((found, whole), (found.selection, whole.selection)):
        ours, theirs = (files.tensors_of(each.run.model) for each in (one, other))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    queries = list(parts.train.query_ids.decode(np.unique(parts.train.queries)[:3]))
    assert found.selection.recommend(queries, 5).equals(whole.selection.recommend(queries, 5))
    with pytest.raises(UserError, match="resume cannot change"):
        fit(build(recipe, parts.train, {**settings, "seed": 5}), parts, tmp_path / "run", resume=True, **refits)


def test_refusals(parts: Split, tmp_path: Path) -> None:
    """A refit needs a validation part and no classifiers; resume cannot begin or drop one, fuse cannot mix."""
    run = build("ials", parts.train, settings_of("ials"))
    with pytest.raises(UserError, match="validation part"):
        fit(run, Split(parts.train, None, parts.test), k=(10,), refit=True)
    with pytest.raises(UserError, match="clf_epochs"):
        fit(build("ngame", parts.train, {"clf_epochs": 2}), parts, k=(10,), refit=True)
    refitted("ials", parts, tmp_path / "a")
    with pytest.raises(UserError, match="with a refit"):
        fit(build("ials", parts.train, settings_of("ials")), parts, tmp_path / "a", resume=True, k=(10,), device="cpu")
    fit(build("ials", parts.train, settings_of("ials")), parts, tmp_path / "b", k=(10,), device="cpu")
    with pytest.raises(UserError, match="without a refit"):
        refitted("ials", parts, tmp_path / "b", resume=True)
    with pytest.raises(UserError, match=SELECTION):
        fuse([tmp_path / "a", tmp_path / "b"], parts, device="cpu")
    fused = fuse([tmp_path / "a" / SELECTION, tmp_path / "b"], parts, device="cpu", k=(10,))
    assert fused.test is not None


def test_overwrite_deletes_both_runs(parts: Split, tmp_path: Path) -> None:
    """overwrite deletes a refitted run, also one that was stopped while its epoch was chosen."""
    refitted("ials", parts, tmp_path / "whole")
    refitted("ials", parts, tmp_path / "run")
    with pytest.raises(Killed):
        refitted("ials", parts, tmp_path / "run", killing({2}, random.Random(0)), overwrite=True)
    assert begun_run(tmp_path / "run") == tmp_path / "run" / SELECTION
    with pytest.raises(UserError, match=SELECTION):
        trained.load(tmp_path / "run", unfinished=True)
    refitted("ials", parts, tmp_path / "run", overwrite=True)
    assert_same(tmp_path / "whole", tmp_path / "run")
    assert delete_run(tmp_path / "run")
    assert not (tmp_path / "run" / SELECTION).exists()


def test_from_the_command_line(tmp_path: Path, refused: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    """train --refit, resumed by the folder alone, then evaluate, recommend, index and check work on the folder;
    evaluate --part valid names the run that has not seen that part."""
    out = tmp_path / "run"
    words = ["train", "--data", "world:80x40", "--recipe", "ials", "--set", "dim=8", "--epochs", "3", "--device", "cpu"]
    assert main([*words, "--out", str(out), "--refit", "--quiet"]) == 0
    assert "refitted" in capfd.readouterr().out
    assert main(["train", "--out", str(out), "--resume", "--device", "cpu", "--quiet"]) == 0
    capfd.readouterr()
    assert main(["evaluate", str(out), "--k", "10", "--json", "--device", "cpu"]) == 0
    shown = json.loads(capfd.readouterr().out)
    result = json.loads((out / "result.json").read_text())["test"]
    assert shown["metrics"]["ndcg@10"] == pytest.approx(result["metrics"]["ndcg@10"])
    assert shown["strata"]["head"]["items"] == result["strata"]["head"]["items"], "counts are those of both parts"
    refused(["evaluate", out, "--part", "valid"], SELECTION)
    assert main(["evaluate", str(out / SELECTION), "--part", "valid", "--k", "10", "--device", "cpu"]) == 0
    assert main(["recommend", str(out), "--query", "1"]) == 0
    assert main(["index", str(out)]) == 0
    assert main(["check", str(out)]) == 0
