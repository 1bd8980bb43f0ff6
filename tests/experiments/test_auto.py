"""auto: the choice is the best of its table, never sees the test part, survives interruptions, and is a run folder."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import sparring
from sparring.cli import auto as cli_auto
from sparring.cli import main, screen
from sparring.core.errors import UserError
from sparring.core.files import read_tensors
from sparring.core.workers import Ended, Task
from sparring.data.interactions import Split
from sparring.data.splits import split
from sparring.data.synthetic_world import SyntheticWorld
from sparring.evaluation.ranking import evaluate
from sparring.experiments import auto as auto_module
from sparring.experiments import contenders as contenders_module
from sparring.experiments import search as search_module
from sparring.experiments.auto import Choice, auto
from sparring.experiments.contenders import FAMILIES, Facts, Family, Times, contenders
from sparring.experiments.search import Budget, OutOfTimeError, Search, Terms, Trial
from sparring.recipes.settings import build
from sparring.serving.checking import check
from sparring.training.fitting import fit
from sparring.training.folder import SELECTION
from sparring.training.fusing import FusionGain, fuse
from sparring.training.loop import Trainer
from support.settings import quick

SMALL = (
    Family("popularity", "popularity"),
    Family("ease", "ease", ("queries", "square"), tries=[{"lam": 20.0}, {"lam": 200.0}]),
    Family("tables", "tables", ("queries",), quick(epochs=8, n=16), [{"tau": 0.2}, {"tau": 0.5}]),
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders that train in a fraction of a second; no fusion unless a test allows it."""
    monkeypatch.setattr(contenders_module, "FAMILIES", SMALL)
    judge(monkeypatch, 0.0)


def judge(monkeypatch: pytest.MonkeyPatch, gain: float) -> None:
    """Let every fusion have this gain, with the standard error 0.01."""

    def judged(runs: list[Path], parts: Split, **_: Any) -> FusionGain:
        assert parts.test is None
        return FusionGain(runs[0].name, gain, 0.01, tuple(run.name for run in runs))

    monkeypatch.setattr(auto_module, "fusion_gain", judged)


def chosen(parts: Split, out: Path, **options: Any) -> Choice:
    return auto(parts, out, **{"budget": 4, "k": (10, 20), "device": "cpu", **options})


def outcome(folder: Path) -> dict[str, Any]:
    """auto.json without times."""
    record = json.loads((folder / "auto.json").read_text())
    for trial in record["trials"]:
        trial |= {"seconds": 0, "pace": 0, "rank_seconds": 0}
    return {**record, "seconds": 0}


@pytest.fixture(scope="module")
def once(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Choice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contenders_module, "FAMILIES", SMALL)
        judge(patch, 0.0)
        return chosen(parts, tmp_path_factory.mktemp("auto") / "once")


def by_hand(trial: Trial, parts: Split, out: Path | None = None, refit: bool = False) -> Any:
    """The trial trained by `fit`, on the given split."""
    whole = {"short": 2, "complete": 8}[trial.round]  # it may have stopped early
    epochs = {"epochs": whole} if trial.family == "tables" else {}
    run = build(trial.recipe, parts.train, {**trial.settings, **epochs, "select": "ndcg@20", "seed": 0})
    return fit(run, parts, out, k=(10, 20), device="cpu", refit=refit)


def same_models(*folders: Path) -> bool:
    """Whether runs have the same model, bit for bit."""
    one, other = (read_tensors(folder / "model.safetensors")[0] for folder in folders)
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def test_the_choice_is_the_best_of_the_table(once: Choice, parts: Split) -> None:
    """Three short trainings and a complete one, the values of trainings by hand; the largest is chosen."""
    assert [(trial.name.split()[0], trial.round) for trial in once.trials] == [
        ("popularity", "short"),
        ("ease", "short"),
        ("tables", "short"),
        ("tables", "complete"),
    ]
    values = []
    for trial in once.trials:
        history = by_hand(trial, Split(parts.train, parts.valid)).history
        values.append(max(record["ndcg@20"] for record in history))
        assert trial.value == pytest.approx(values[-1], abs=1e-12)
    assert once.trials[2].epochs == 2 < once.trials[3].epochs <= 8
    assert once.chosen == (once.trials[int(np.argmax(values))].folder,)
    assert parts.valid is not None
    model = sparring.load(once.folder / SELECTION).model
    if model.past_readers():
        pytest.fail("this choice reads histories, which evaluate would have to know")
    ranked = evaluate(model, parts.valid, parts.seen_for("valid"), (20,), ("ndcg",))
    assert ranked.metrics["ndcg@20"] == pytest.approx(max(values), abs=0.01)  # alone it also ranks untrained items


def test_the_folder_is_that_of_a_training(once: Choice, parts: Split, tmp_path: Path) -> None:
    """The files, the model, the test metrics and the lists are those of fit(refit=True) by hand."""
    trial = next(trial for trial in once.trials if trial.folder in once.chosen)
    by_hand(trial, parts, tmp_path / "hand", refit=True)
    assert same_models(once.folder, tmp_path / "hand")
    records = [json.loads((folder / "run.json").read_text())["refit"] for folder in (once.folder, tmp_path / "hand")]
    assert records[0] == records[1]
    assert once.refit
    assert f"{len(parts.train) + len(parts.valid or ()):,} interactions of both parts" in once.why[-1]
    assert f"{records[0]['epochs']} epoch" in once.why[-1]
    names = {path.name for path in (tmp_path / "hand").iterdir()}
    assert {path.name for path in once.folder.iterdir()} == names | {"auto.json"}
    mine, theirs = (json.loads((folder / "result.json").read_text()) for folder in (once.folder, tmp_path / "hand"))
    assert mine["test"]["metrics"] == theirs["test"]["metrics"]
    assert not check(once.folder).problems
    queries = parts.train.query_ids.decode(np.unique(parts.train.queries)[:5])
    lists = [sparring.load(folder).recommend(list(queries), 5) for folder in (once.folder, tmp_path / "hand")]
    assert lists[0].equals(lists[1])
    card = (once.folder / "README.md").read_text()
    assert all(each.name in card for each in once.trials)
    assert all(line in card for line in once.why)


def test_the_test_part_changes_nothing_but_the_test(once: Choice, parts: Split, tmp_path: Path) -> None:
    """With other test pairs, every trial, the choice and the model are the same bit for bit."""
    assert parts.test is not None
    shuffled = np.random.default_rng(0).permutation(parts.test.items)
    other = Split(parts.train, parts.valid, replace(parts.test, items=shuffled))
    again = chosen(other, tmp_path / "other")
    assert outcome(again.folder) == outcome(once.folder)
    ours, own = (read_tensors(folder / "model.safetensors")[0] for folder in (again.folder, once.folder))
    assert all(ours[key].equal(own[key]) for key in own)
    assert again.test is not None
    assert once.test is not None
    assert again.test.metrics != once.test.metrics


def interrupted(after: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which stops the program when it is called for this time."""
    calls = 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt
        return function(*arguments, **named)

    return called


@pytest.mark.parametrize(
    ("module", "name", "after", "left"),
    [
        (search_module, "fit", 3, 3),
        (search_module, "fit", 5, 1),
        (auto_module.manifest, "add_files", 1, 1),
        (os, "replace", -3, 0),
        (os, "replace", -12, 0),
    ],
    ids=["in a trial", "before the refit", "before the card", "while files move", "after most have moved"],
)
def test_a_stopped_search_ends_like_any_other(
    module: Any, name: str, after: int, left: int, once: Choice, parts: Split, tmp_path: Path
) -> None:
    """Wherever it stops, --resume gives the same record and model, and no finished trial is run again.

    The last training is the refit, which reads a finished one.
    """
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        if after < 0:  # in the last step, which moves files
            lift = auto_module._lift

            def stopped(chosen: Path, folder: Path) -> None:
                patch.setattr(os, "replace", interrupted(-after, os.replace))
                lift(chosen, folder)

            patch.setattr(auto_module, "_lift", stopped)
        else:
            patch.setattr(module, name, interrupted(after, getattr(module, name)))
        with pytest.raises(KeyboardInterrupt):
            chosen(parts, out)
    trained: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "fit", lambda *a, **b: trained.append(a[2]) or fit(*a, **b))
        again = chosen(parts, out, resume=True)
    assert len(trained) == left
    assert outcome(again.folder) == outcome(once.folder)
    assert {path.name for path in out.iterdir()} == {path.name for path in once.folder.iterdir()}
    assert not check(out).problems
    ours, own = (read_tensors(folder / "model.safetensors")[0] for folder in (out, once.folder))
    assert all(ours[key].equal(own[key]) for key in own)
    assert chosen(parts, out, resume=True).chosen == once.chosen  # finished: nothing is left to do


def test_a_search_that_is_resumed_must_be_the_same(once: Choice, parts: Split) -> None:
    """Another budget, metric or seed is refused, and so is a folder that is not empty."""
    for change, keyword in (({"budget": 9}, "budget=4"), ({"select": "recall@20"}, "select"), ({"seed": 3}, "seed")):
        with pytest.raises(UserError, match=keyword):
            chosen(parts, once.folder, resume=True, **change)
    with pytest.raises(UserError, match="not empty"):
        chosen(parts, once.folder)
    with pytest.raises(UserError, match="validation") as error:
        chosen(Split(parts.train, None, parts.test), once.folder.parent / "other")
    assert error.value.argument == "valid"


@pytest.mark.parametrize("folder", ["../../thesis", "..", "", 3])
def test_a_record_of_a_stranger_deletes_nothing(folder: object, once: Choice, parts: Split, tmp_path: Path) -> None:
    """A trial whose folder is outside OUT/trials is refused before anything is deleted."""
    (tmp_path / "thesis").mkdir()
    record = json.loads((once.folder / "auto.json").read_text())
    record["trials"][0]["folder"] = folder
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "auto.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="corrupt"):
        chosen(parts, tmp_path / "out", resume=True)
    assert (tmp_path / "thesis").is_dir()


def test_a_fusion_that_helps_is_the_run(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain above its error fuses the best of each family, in a folder that commands take; overwrite replaces it."""
    judge(monkeypatch, 0.05)
    choice = chosen(parts, tmp_path / "fused", budget=3)
    assert [trial.family for trial in choice.trials] == ["popularity", "ease", "tables"]
    ranked = sorted(choice.trials[1:], key=lambda trial: -(trial.value or 0))
    assert choice.chosen == tuple(trial.folder for trial in ranked)
    assert "+0.05" in choice.why[-2]
    meta = json.loads((choice.folder / "run.json").read_text())
    assert [part["name"] for part in meta["parts"]] == list(choice.chosen)
    assert not check(choice.folder).problems
    trained = sparring.load(choice.folder)
    assert parts.test is not None
    test = evaluate(trained.model, parts.test, parts.seen_for("test"), (20,), ("ndcg",)).metrics["ndcg@20"]
    assert choice.test is not None
    assert choice.test.metrics["ndcg@20"] == pytest.approx(test, abs=1e-9)
    assert "How it was chosen" in (choice.folder / "README.md").read_text()
    judge(monkeypatch, 0.009)  # below the error
    assert len(chosen(parts, choice.folder, budget=3, overwrite=True).chosen) == 1
    assert not (choice.folder / "parts").exists()


def test_a_fused_choice_keeps_its_weights(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials by hand choose the weights; the parts are the same trials after a refit by hand, in a resumed call too."""
    judge(monkeypatch, 0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "fit", interrupted(5, fit))  # three trials, and the refit of the first source
        with pytest.raises(KeyboardInterrupt):
            chosen(parts, tmp_path / "fused", budget=3)
    choice = chosen(parts, tmp_path / "fused", budget=3, resume=True)
    trials = [next(trial for trial in choice.trials if trial.folder == name) for name in choice.chosen]
    bare = Split(parts.train, parts.valid)
    for trial in trials:
        by_hand(trial, bare, tmp_path / "plain" / trial.folder)
        by_hand(trial, parts, tmp_path / "again" / trial.folder, refit=True)
        assert same_models(choice.folder / "parts" / trial.folder, tmp_path / "again" / trial.folder)
    plain, again = ([tmp_path / kind / trial.folder for trial in trials] for kind in ("plain", "again"))
    first = fuse(plain, bare, by="scores", device="cpu")
    trained = sparring.load(choice.folder)
    assert trained.model.weights.tolist() == first.model.weights.tolist()
    result, meta = (json.loads((choice.folder / name).read_text()) for name in ("result.json", "run.json"))
    assert result["valid"] == first.valid
    assert meta["refit"]["interactions"] == len(parts.train) + len(parts.valid or ())
    assert not check(choice.folder).problems
    test = fuse(again, parts, by="scores", k=(10, 20), device="cpu").test
    assert test is not None
    assert result["test"]["metrics"] == test.to_dict()["metrics"]


@pytest.mark.parametrize("recipe", ["popularity", "ease", "item_knn", "ials"])
def test_solved_recipes_are_refitted(
    recipe: str, parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single contender is the choice, and equals fit(refit=True)."""
    settings = {"dim": 4} if recipe == "ials" else {}
    monkeypatch.setattr(contenders_module, "FAMILIES", (Family(recipe, recipe, (), settings),))
    choice = chosen(parts, tmp_path / "out", budget=1)
    run = build(recipe, parts.train, {**settings, "select": "ndcg@20", "seed": 0, **epochs_of(choice)})
    fit(run, parts, tmp_path / "hand", k=(10, 20), device="cpu", refit=True)
    assert choice.refit
    assert same_models(choice.folder, tmp_path / "hand")


def epochs_of(choice: Choice) -> dict[str, int]:
    """The epochs of the schedule that a choice had, as a setting, if it has more than one."""
    epochs = json.loads((choice.folder / "run.json").read_text())["setup"]["training"]["epochs"]
    return {"epochs": epochs} if epochs > 1 else {}


def test_killed_in_the_refit(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped within an epoch of the refit, it goes on from its checkpoint to the same model and the same record."""
    family = Family("tables", "tables", (), quick(epochs=8, n=16) | {"tau": 0.2, "lr": 0.01})
    monkeypatch.setattr(contenders_module, "FAMILIES", (family,))
    monkeypatch.setattr(search_module, "_SAVED", 0.0)
    alone = chosen(parts, tmp_path / "alone", budget=2)
    assert json.loads((alone.folder / "run.json").read_text())["refit"]["epochs"] > 1
    with pytest.MonkeyPatch.context() as patch:
        retrain = auto_module.retrain

        def stopped(*arguments: Any) -> Any:
            patch.setattr(Trainer, "validate", interrupted(2, Trainer.validate))
            return retrain(*arguments)

        patch.setattr(auto_module, "retrain", stopped)
        with pytest.raises(KeyboardInterrupt):
            chosen(parts, tmp_path / "out", budget=2)
    began: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        validate = Trainer.validate
        patch.setattr(Trainer, "validate", lambda self, loss: began.append(self.state.epoch) or validate(self, loss))
        chosen(parts, tmp_path / "out", budget=2, resume=True)
    assert began[0] > 0
    assert outcome(tmp_path / "out") == outcome(alone.folder)
    assert same_models(tmp_path / "out", alone.folder)
    assert not check(tmp_path / "out").problems


@pytest.mark.parametrize("gain", [0.0, 0.05], ids=["single", "fused"])
def test_no_time_for_a_refit(gain: float, parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials themselves become the run, with the reason, if a refit turns out to take too long."""
    judge(monkeypatch, gain)
    retrain = auto_module.retrain
    monkeypatch.setattr(auto_module, "retrain", lambda s, t, p, f, seconds, *k: retrain(s, t, p, f, 1e-9, *k))
    slow = SMALL[2], replace(SMALL[2], name="others", settings={**SMALL[2].settings, "dim": 4})
    monkeypatch.setattr(contenders_module, "FAMILIES", slow)
    choice = chosen(parts, tmp_path / "out", budget=2)
    assert not choice.refit
    assert "the validation part too" in choice.why[-1]
    assert "refit" not in json.loads((choice.folder / "run.json").read_text())
    assert len(choice.chosen) == (1 if gain == 0 else 2)
    assert {"trials", "refits", "chosen", "selection"}.isdisjoint(path.name for path in choice.folder.iterdir())
    assert not check(choice.folder).problems
    assert choice.test is not None


@pytest.mark.parametrize("count", [2, 3], ids=["best alone", "two of three"])
@pytest.mark.parametrize("stopped", [False, True], ids=["in one go", "resumed"])
def test_a_source_whose_refit_fails_is_left_out(
    stopped: bool, count: int, parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last source takes too long: the others are fused as if it were not there, or the best is the run alone."""
    judge(monkeypatch, 0.05)
    families = (*SMALL, Family("item_knn", "item_knn"))
    monkeypatch.setattr(contenders_module, "FAMILIES", families[: count + 1])
    retrain, calls = auto_module.retrain, 0

    def late(search: Search, trial: Trial, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise OutOfTimeError("it takes about 9 s, and 3 s were left for it", 1.0)
        return retrain(search, trial, *rest)

    monkeypatch.setattr(auto_module, "retrain", late)
    out = tmp_path / "out"
    if stopped:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(auto_module, "_written", interrupted(1, auto_module._written))
            with pytest.raises(KeyboardInterrupt):
                chosen(parts, out, budget=2 * count - 1)
    choice = chosen(parts, out, budget=2 * count - 1, resume=stopped)
    assert calls == count
    best = {trial.family: trial for trial in sorted(choice.trials[1:], key=lambda trial: trial.value or 0)}
    ranked = sorted(best.values(), key=lambda trial: -(trial.value or 0))
    assert len(ranked) == count
    assert choice.refit
    assert choice.chosen == tuple(trial.folder for trial in ranked[: count - 1])
    assert any(ranked[-1].name in line and "9 s" in line for line in choice.why)
    assert not check(out).problems
    assert {"trials", "refits", "chosen"}.isdisjoint(path.name for path in out.iterdir())
    for trial in ranked[: count - 1]:
        by_hand(trial, parts, tmp_path / "hand" / trial.folder, refit=True)
    hands = [tmp_path / "hand" / name for name in choice.chosen]
    if count == 2:
        assert same_models(out, hands[0])
        mine, theirs = (json.loads((folder / "result.json").read_text()) for folder in (out, hands[0]))
        lists = [sparring.load(folder).recommend([1, 2, 3], 5) for folder in (out, hands[0])]
        assert lists[0].equals(lists[1])
        assert mine["test"]["metrics"] == theirs["test"]["metrics"]
    else:
        fused = fuse(hands, parts, by="scores", k=(10, 20), device="cpu").test
        assert fused is not None
        assert json.loads((out / "result.json").read_text())["test"]["metrics"] == fused.to_dict()["metrics"]


# The end of a budget in time


class Clock:
    """The time of a search, which passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(search_module.time, "monotonic", lambda: self.now)

    def search(self, parts: Split, folder: Path, budget: float) -> Search:
        bare = Split(parts.train, parts.valid)
        allowed, facts = Budget.parse(f"{budget}s"), Facts.of(bare, "cpu")
        return Search(bare, folder, allowed, facts, "ndcg@20", 0, 1, "cpu", None, lambda: None, began=self.now)


def tried(name: str, value: float, seconds: float, best: int = 0, epochs: int = 4, pace: float = 0.0) -> Trial:
    return Trial(
        name, name, "tables", {}, "short", "done", name, epochs, value, seconds, pace, rank_seconds=1e-3, best=best
    )


def test_the_search_keeps_time_for_its_end(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training leaves what the choice so far needs, and what it needs itself if it becomes a part of the choice."""
    clock = Clock(monkeypatch)
    search = clock.search(parts, tmp_path, 1000)
    clock.now += 100
    queries, judged = search.facts.queries, search.fused_queries
    search.trials = [tried("a", 0.4, 100, best=3, pace=20), tried("b", 0.3, 50), tried("popularity", 0.1, 5)]
    search.trials[2] = replace(search.trials[2], recipe="popularity")
    again = {"a": 1.15 * 80, "b": 1.15 * 50}  # a was best one epoch before its end
    each, files = queries * 1.5 * 1e-3, 30
    fusing = 2 * judged * 6e-3 + 2 * queries * 1.5e-3  # to judge, to choose weights, and the fused lists
    both = again["a"] + again["b"] + 2 * each + fusing + files
    assert [trial.name for trial in search.likely()] == ["a", "b"]
    assert search.reserve == pytest.approx(both)
    assert search.closing(search.likely()[:1]) == pytest.approx(again["a"] + each + files)
    assert search.left(0.5, "c") == pytest.approx(0.5 * (1000 - both) - 100)
    third = queries * 1.5e-3  # to fuse one more
    assert search.left(1.0, "c") == pytest.approx((900 - both - third) / 2.15)
    assert search.left(1.0, "b") == pytest.approx((900 - both + again["b"] + each) / 2.15)  # b itself is replaced
    search.trials[1] = tried("b", 0.3, 600)  # too long to train again beside the other trials
    assert [trial.name for trial in search.likely()] == ["a"]
    search.trials.append(tried("c", 0.2, 50))
    assert [trial.name for trial in search.likely()] == ["a", "c"]
    search.trials[1] = tried("b", 0.5, 600)
    assert [trial.name for trial in search.likely()] == ["b"]
    assert search.reserve == pytest.approx(1.15 * 600 + each + files)


def test_trials_leave_time_for_the_refit_of_the_best(
    parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long trainings take and however good they are, the best can be trained again when they have ended.

    Contenders that would not leave that time are skipped, and the reason names the time that is kept.
    """
    monkeypatch.setattr(contenders_module, "FAMILIES", FAMILIES)
    clock, random, skips = Clock(monkeypatch), np.random.default_rng(0), 0
    facts = Facts.of(Split(parts.train, parts.valid), "cpu")
    plan, _ = contenders(facts, parts.train, 0)
    costs, ended = {}, list[bool]()

    def train(say: Any, trial: Trial, split: Split, folder: Path, *rest: Any) -> Trial:
        terms, (start, pace) = rest[3], costs[trial.family]
        epochs = min(trial.epochs, int(max(terms.seconds - start, 0) / pace) if np.isfinite(terms.seconds) else 999)
        if epochs < terms.least:  # found out after a tenth of the time
            clock.now += 0.1 * terms.seconds
            return replace(trial, status="skipped", why="too slow", pace=start + pace)
        clock.now += (seconds := start + epochs * pace)
        ended.append(search.fits(search.reserve - 1e-6))
        value, best = float(random.random()), int(random.integers(1, epochs + 1))
        return replace(trial, epochs=epochs, value=value, seconds=seconds, pace=pace, best=best, rank_seconds=1e-6)

    monkeypatch.setattr(search_module, "_train", train)
    monkeypatch.setattr(search_module.gc, "collect", lambda: 0)
    for budget in (200, 420, 1500) * 10:
        search = clock.search(parts, tmp_path, budget)
        costs |= {each.family: (random.exponential(8), random.exponential(20 / each.epochs)) for each in plan}
        ended.clear()
        search.run(plan)
        best = next(trial for trial in search.finalists() if trial.recipe != "popularity")
        assert search.fits(search.closing([best]))
        assert all(ended[2:])  # after every training but the first ones, what the choice so far needs is left
        skipped = [trial for trial in search.trials if trial.status == "skipped"]
        assert all(trial.why == "too slow" or "for the choice so far" in trial.why for trial in skipped)
        skips += len(skipped)
    assert skips


def test_the_outcome_is_the_first_that_fits(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random trials, gains and times left: the decision is that of a search over all sets of sources, in order."""
    clock, random, met = Clock(monkeypatch), np.random.default_rng(0), Counter[tuple[int, bool, bool]]()
    assert parts.valid is not None
    more = len(parts.valid) / len(parts.train)
    for _ in range(600):
        search = clock.search(parts, tmp_path, 1000)
        names = "abcd"[: random.integers(1, 5)]
        refit = {name: float(random.choice([0, 20, 60, 200, 400])) for name in names}
        search.trials = [tried(name, 0.5 - 0.01 * at, refit[name] / 1.15) for at, name in enumerate(names)]
        clock.now += 970 - (left := float(random.choice([2, 10, 60, 150, 350, 700])))  # 30 s are for files
        gain, slow = float(random.choice([0.001, 0.03, 0.2])), float(random.choice([0, 5, 100]))
        weights = dict(zip(names, random.random(len(names)).tolist(), strict=True))
        asked = ""

        def judged(runs: list[Path], _: Split, **__: Any) -> FusionGain:
            nonlocal asked
            asked = "".join(run.name for run in runs)
            clock.now += slow  # noqa: B023
            return FusionGain("a", gain, 0.01, tuple(asked), slow, 0.0, weights)  # noqa: B023

        monkeypatch.setattr(auto_module, "fusion_gain", judged)
        decision = auto_module._decided(search)

        each, guess = search.facts.queries * 1.5e-3, search.fused_queries * 6e-3
        pooling = search.facts.queries * 1.5e-3

        def before(sources: str, again: bool) -> float:
            """Expected seconds from the judgement to the end."""
            several = 2 * guess + pooling * len(sources) if len(sources) > 1 else 0.0  # noqa: B023
            return several + each * len(sources) + again * sum(refit[name] for name in sources)  # noqa: B023

        subsets = ["a" + "".join(rest) for n in range(len(names)) for rest in combinations(names[1:], n)]
        fitting = [each for each in subsets if before(each, True) < left]
        ours = max(fitting, key=lambda subset: [name in subset for name in names], default="")
        sources = ours if len(ours) > 1 else names
        if len(ours) < 2 and max(before(names, False), guess + before(ours, True) if ours else 0.0) >= left:
            sources = ""
        if len(names) == 1:
            sources = ""
        assert asked == sources
        left -= slow * bool(sources)
        expected = "a", before("a", True) < left
        if sources and gain > 0.01:
            heavy = "".join(sorted(sources[1:], key=lambda name: -weights[name]))
            chain = ["a" + "".join(sorted(heavy[:n])) for n in range(len(heavy), 0, -1)]
            whole = [each for each in chain if sum(refit[name] for name in each) + slow < left]
            if whole:
                expected = whole[0], True
            elif slow < left and (not expected[1] or gain / 0.5 > more):
                expected = sources, False
        assert ("".join(trial.name for trial in decision.chosen), decision.refit) == expected
        met[len(expected[0]), expected[1], expected[0] == names] += 1
    assert len(met) >= 10  # single, fused and fused of fewer, with refits and without


def test_the_best_is_trained_completely_before_others_are_tried(
    parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short trainings used their share; the complete one of the best takes more than the share of complete ones."""
    clock = Clock(monkeypatch)
    search = clock.search(parts, tmp_path, 1000)
    plan, _ = contenders(search.facts, parts.train, 0)
    began: list[tuple[str, str]] = []

    def train(say: Any, trial: Trial, *_: Any) -> Trial:
        began.append((trial.name.split()[-1], trial.round))
        seconds = 100.0 * trial.epochs if trial.family == "tables" else 1.0
        clock.now += seconds
        value = {"popularity": 0.1, "ease": 0.2, "tables": 0.3}[trial.family]
        return replace(trial, value=value, seconds=seconds, pace=seconds / trial.epochs, best=trial.epochs)

    monkeypatch.setattr(search_module, "_train", train)
    search.run(plan)
    first = began.index(("tau=0.2", "complete"))
    assert began[:3] == [("popularity", "short"), ("lam=20", "short"), ("tau=0.2", "short")]
    assert ("tau=0.5", "short") not in began[:first]
    assert clock.now > 400
    assert search.fits(search.closing([search.finalists()[0]]))


def test_one_model_alone_may_exceed_the_budget(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trainings that run at once, one model has all the time that it needs; the others have what is left."""
    search, given = Clock(monkeypatch).search(parts, tmp_path, 100), dict[str, float]()
    plan, _ = contenders(search.facts, parts.train, 0)

    def all_at_once(tasks: Iterator[Task]) -> Iterator[Ended]:
        trainings = [task.arguments for task in tasks]
        given.update({trial.family: terms.seconds for trial, *_, terms, _ in trainings})
        return iter([Ended(trial.name, replace(trial, value=0.1, seconds=1.0), None) for trial, *_ in trainings])

    monkeypatch.setattr(search, "_events", all_at_once)
    search.plan = plan
    search._round("short", iter(plan[:3]))
    assert [each.family for each in plan[:3]] == list(given) == ["popularity", "ease", "tables"]
    assert given["ease"] == np.inf
    assert given["tables"] <= 25  # a quarter of the budget


def test_better_families_come_first_in_later_turns(parts: Split, tmp_path: Path) -> None:
    """After the first turn the order is that of the families' values; the best of each family trains completely."""
    bare = Split(parts.train, parts.valid)
    search = Search(bare, tmp_path, Budget.parse(99), Facts.of(bare), "ndcg@20", 0, 1, "cpu", None, lambda: None)
    search.plan, _ = contenders(search.facts, bare.train, 0)
    assert [each.name.split()[-1] for each in search.plan] == ["popularity", "lam=20", "tau=0.2", "lam=200", "tau=0.5"]
    for value, better in ((0.3, ["lam=200", "tau=0.5"]), (0.1, ["tau=0.5", "lam=200"])):
        search.trials = [
            Trial(each.name, each.family, each.recipe, {}, "short", "done", each.folder, 2, number)
            for each, number in zip(search.plan, (0.05, value, 0.2), strict=False)
        ]
        assert [each.name.split()[-1] for each in search._turns()][3:] == better
    search.trials.append(replace(search.trials[2], name=search.plan[4].name, value=0.4))
    assert [each.name.split()[-1] for each in search._best()] == ["tau=0.5", "tau=0.2"]
    assert [trial.value for trial in search.finalists()] == [0.4, 0.1, 0.05]


def test_a_short_training_may_have_one_epoch(parts: Split, tmp_path: Path) -> None:
    """One epoch of eight is one epoch, not the whole schedule."""
    (only,) = [each for each in contenders(Facts.of(parts), parts.train, 0)[0] if each.name.endswith("tau=0.2")]
    trial = Trial(only.name, only.family, only.recipe, dict(only.settings), "short", "done", "a", epochs=1)
    bare, terms = Split(parts.train, parts.valid), Terms(1, 1, np.inf)
    ended = search_module._train(lambda message: None, trial, bare, tmp_path / "a", "ndcg@20", 0, "cpu", terms, None)
    assert (ended.status, ended.epochs) == ("done", 1)


def test_processes_make_the_same_choice(once: Choice, parts: Split, tmp_path: Path) -> None:
    """Two trainings at a time choose as one at a time does."""
    both = chosen(parts, tmp_path / "both", budget=3, jobs=2)
    values = {trial.name: trial.value for trial in both.trials}
    assert values == pytest.approx({trial.name: trial.value for trial in once.trials[:3]}, abs=1e-6)
    best = max(both.trials, key=lambda trial: trial.value or 0.0)
    assert both.chosen == (best.folder,)


def test_a_failed_trial_ends_no_search(parts: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender that cannot be trained is in the table with the reason."""
    broken = Family("broken", "tables", (), {"clip": -1.0})
    monkeypatch.setattr(contenders_module, "FAMILIES", (SMALL[0], SMALL[1], replace(broken, settings={"encoder": "x"})))
    choice = chosen(parts, tmp_path / "out", budget=4)
    failed = next(trial for trial in choice.trials if trial.family == "broken")
    assert (failed.status, failed.value) == ("failed", None)
    assert failed.why
    assert choice.chosen[0].startswith("ease")


# Budgets


@pytest.mark.parametrize(
    ("text", "seconds", "trials"),
    [("90s", 90, None), ("10m", 600, None), ("1.5h", 5400, None), ("12", None, 12), (3, None, 3)],
)
def test_budgets(text: str | int, seconds: float | None, trials: int | None) -> None:
    """A time has a unit; a number alone counts trials."""
    assert (Budget.parse(text).seconds, Budget.parse(text).trials) == (seconds, trials)


@pytest.mark.parametrize("text", ["", "0", "-3", "0m", "10 min", "m", "1e3s", "ten", "1.5", "nan", "10d"])
def test_bad_budgets(text: str, parts: Split, tmp_path: Path) -> None:
    """Anything else is one line that names it, before anything is written."""
    with pytest.raises(UserError, match="budget"):
        auto(parts, tmp_path / "out", budget=text)
    assert not (tmp_path / "out").exists()


def test_the_smallest_time_still_has_a_model(parts: Split, tmp_path: Path) -> None:
    """Popularity and one model are trained in a budget that allows nothing; the others are skipped with a reason."""
    choice = chosen(parts, tmp_path / "out", budget="0.01s")
    assert [trial.family for trial in choice.trials if trial.status == "done"] == ["popularity", "ease"]
    skipped = [trial for trial in choice.trials if trial.status == "skipped"]
    assert skipped
    assert all("left" in trial.why for trial in skipped)


@pytest.mark.parametrize(
    ("pace", "stopped", "ended"),
    [(1.0, 2, None), (0.7, None, 10), (0.78, None, 9)],
    ids=["too slow", "fast enough", "a little too slow"],
)
def test_a_training_ends_in_time(
    pace: float, stopped: int | None, ended: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten epochs of four steps in 30 s: a slow training is stopped after 1.5 s, any other with the last that fits."""
    now = 0.0
    monkeypatch.setattr(search_module.time, "monotonic", lambda: now)
    progress = search_module._within(Terms(10, 3, 30.0), 0.0, lambda record: None)
    progress.start(10, 4)
    late, last, told = None, None, 4 * pace
    for done in range(1, 41):
        now += pace
        try:
            progress.step((done - 1) // 4, (done - 1) % 4 + 1, lambda: 0.0)
        except OutOfTimeError as error:
            late, told = done, error.pace
            break
        if done % 4 == 0:
            progress.epoch({"epoch": done // 4})
            last = done // 4
            if progress.stop():
                break
    assert late == stopped
    assert told == pytest.approx(4 * pace)
    assert now <= 30.0
    assert stopped or last == ended


# Contenders


def test_facts_are_those_of_the_parts(small_world: SyntheticWorld) -> None:
    """Order, known queries and sizes by a loop over the pairs."""
    for how, ordered in (("random", False), ("leave-last-out", True), ("temporal", True)):
        parts = split(small_world.interactions, how, seed=0)
        facts, train, valid = Facts.of(Split(parts.train, parts.valid)), parts.train, parts.valid
        assert valid is not None
        known = [bool((train.queries == query).any()) for query in set(valid.queries.tolist())]
        assert facts.known == pytest.approx(sum(known) / len(known))
        assert (facts.queries, facts.items, facts.pairs) == (train.n_queries, train.n_items, len(train))
        assert facts.ordered == ordered


def test_every_contender_can_be_built(small_world: SyntheticWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are distinct, settings are known, a multiple is of the recipe's own value, and cheap ones come first."""
    monkeypatch.setattr(contenders_module, "FAMILIES", FAMILIES)
    parts = split(small_world.interactions, "leave-last-out", seed=0)
    plan, left_out = contenders(Facts.of(Split(parts.train, parts.valid)), parts.train, 0)
    assert plan[0].recipe == "popularity"
    assert set(left_out) == {"text"}
    assert {each.family for each in plan} == {family.name for family in FAMILIES} - {"text"}
    assert len({each.folder for each in plan}) == len(plan)
    for each in plan:
        build(each.recipe, parts.train, {**each.settings, "seed": 0})
        assert 1 <= each.short <= each.epochs
    own = build("sl", parts.train).setup.temperature.tau
    twice = Family("sl", "sl", tries=[{"tau": Times(2.0)}])
    monkeypatch.setattr(contenders_module, "FAMILIES", (twice,))
    (only,), _ = contenders(Facts.of(Split(parts.train, parts.valid)), parts.train, 0)
    assert own is not None
    assert only.settings["tau"] == pytest.approx(2 * own, rel=0.01)


# The command line


def test_the_command_splits_by_time_and_lists_auto(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data with times is split by them unless --split says otherwise; the run can be evaluated, used and resumed."""
    out = tmp_path / "auto"
    words = ["train", "--data", "world:60x40:3", "--recipe", "auto", "--budget", "3", "--device", "cpu"]
    assert main([*words, "--out", str(out)]) == 0
    said = capfd.readouterr().out
    assert "--split temporal" in said
    assert "ease lam=20" in said
    assert json.loads((out / "run.json").read_text())["source"]["split"]["how"] == "temporal"
    assert main(["evaluate", str(out), "--device", "cpu"]) == 0
    assert main(["recommend", str(out), "--query", "1", "-k", "3"]) == 0
    assert main(["train", "--out", str(out), "--resume", "--device", "cpu"]) == 0
    assert main(["recipes", "auto"]) == 0
    assert "--budget" in capfd.readouterr().out


@pytest.mark.parametrize(("budget", "shown"), [("10m", "6:40 left"), ("12", "0:00:00")])
def test_the_bar_shows_the_time_left(budget: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 minutes 200 s were spent before; nothing is known of the time that trials take, so they show that spent."""
    out = io.StringIO()
    monkeypatch.setattr(screen, "console", lambda: Console(file=out, force_terminal=True, width=100))
    monkeypatch.setattr(cli_auto.time, "monotonic", lambda: 1000.0)
    with cli_auto._listening(False, Budget.parse(budget), 200.0) as listener:
        listener.begin("short trainings", 3, 12)
        listener.said("ials", {"epoch": 2})
        listener.ended("ials", None)
    drawn = out.getvalue()
    assert shown in drawn
    assert ("200/600 s" if budget == "10m" else "4/12 trials") in drawn
    assert "left" not in drawn.replace(shown, "")


@pytest.mark.parametrize(
    ("options", "keyword"),
    [
        (["--recipe", "auto", "--model", "ligr"], "--model"),
        (["--recipe", "auto", "--epochs", "3"], "--epochs"),
        (["--recipe", "auto", "--set", "dim=8"], "dim"),
        (["--recipe", "auto", "--budget", "soon"], "soon"),
        (["--recipe", "ease", "--budget", "3"], "--budget"),
        (["--recipe", "ease", "--jobs", "2"], "--jobs"),
    ],
)
def test_options_that_auto_decides_are_refused(
    options: list[str], keyword: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line and code 2, and nothing is written."""
    assert main(["train", "--data", "world:60x40", "--out", str(tmp_path / "out"), *options]) == 2
    error = capfd.readouterr().err
    assert keyword in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
