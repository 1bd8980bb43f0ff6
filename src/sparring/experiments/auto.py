"""auto: the best retriever for a data set within a budget, as a run folder like any other.

    OUT/auto.json     the budget, the facts of the data, every trial, and the reasons for the choice
    OUT/trials/       while it searches: the run folder of the best trial of each family
    OUT/refits/       after it: the runs that are to be fused, trained again on both parts
    OUT/chosen/       at the end, until its files have moved to OUT: the chosen run, or the fusion of several

The search gets the training and the validation part alone (search.py). Then the choice is trained again on both parts
(refitted), if there is time. The test part is ranked once, by the choice. Of the outcomes that the rest of the time
allows, the first of these is the choice:

1. the best trials, fused, if the gain exceeds its error, and all refitted; trials whose refits do not fit are left out,
2. the best trial, refitted,
3. the fusion without a refit, also before 2 if its gain, as a share of the best trial's metric, exceeds the share by
   which the validation part enlarges the training part: a refit is assumed to be worth less than that,
4. the best trial.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparring.core import files, manifest
from sparring.core.errors import UserError, first_line, one_line
from sparring.core.locks import LOCK
from sparring.core.ranks import launched
from sparring.core.workers import Listener
from sparring.data.interactions import Split
from sparring.evaluation.metrics import LIST_METRICS, parse
from sparring.evaluation.ranking import Evaluation
from sparring.experiments.contenders import Facts, contenders
from sparring.experiments.search import Budget, OutOfTimeError, Search, Trial, clock, refit_seconds, retrain
from sparring.training import folder as run_folder
from sparring.training.fusing import fuse, fusion_gain
from sparring.training.loop import selected
from sparring.training.promotion import promote

NAME = "auto.json"
_SOURCES = 4  # runs that are considered for fusing, popularity apart
_FAILURES = (OutOfTimeError, ValueError, RuntimeError, ArithmeticError, MemoryError)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The outcome of `auto`: the run folder, all trials, the reasons, and the test metrics."""

    folder: Path
    select: str
    trials: tuple[Trial, ...]
    left_out: dict[str, str]  # families, and why none of them was tried
    chosen: tuple[str, ...]  # the trials that became the run, fused if there are several
    why: tuple[str, ...]
    seconds: float
    test: Evaluation | None = None
    refit: bool = False  # whether it was trained again on the training and validation parts

    def rows(self) -> list[list[str]]:
        """The table of what was tried: a header, then a row per trial, the best first."""
        ranked = sorted(self.trials, key=lambda trial: (-(trial.value or 0.0), trial.status == "skipped"))
        return [["trial", "outcome", "epochs", "seconds", self.select], *map(self._row, ranked)]

    def _row(self, trial: Trial) -> list[str]:
        chosen = "chosen" if trial.folder in self.chosen and trial.value is not None else "tried"
        outcome = chosen if trial.status == "done" else f"{trial.status}: {trial.why}"
        value = "" if trial.value is None else f"{trial.value:.4f}"
        epochs = str(trial.epochs) if trial.value is not None else ""
        return [trial.name, outcome, epochs, f"{trial.seconds:.1f}" if trial.seconds else "", value]


def auto(
    split: Split,
    out: str | Path,
    *,
    budget: str | int = "10m",
    select: str = "ndcg@20",
    seed: int = 0,
    k: Sequence[int] = (10, 20, 50),
    jobs: int = 1,
    device: str = "auto",
    source: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    listener: Listener | None = None,
) -> Choice:
    """Try contenders on the validation part, fuse the best where that helps, and write the choice as a run folder.

    The choice is trained again on the training and validation parts together, unless a budget in time is too short.

    `budget` is a time ("90s", "10m", "1h") or a number of trials (12). Popularity and one model are trained however
    small it is. `select` is the validation metric that decides. `jobs` trainings run at once, on one device or spread
    over all GPUs. `resume` continues an interrupted call: finished trials are not run again.

        choice = sparring.auto(split, "runs/auto", budget="10m");  print(choice.why, choice.test)
    """
    allowed, folder = Budget.parse(budget), Path(out)
    _check(split, select)
    cutoffs = [each for each in k if each <= split.train.n_items] or [split.train.n_items]
    lock = run_folder.hold(folder)
    try:
        record = _opened(folder, resume, overwrite)
        asked = {"budget": allowed.text, "select": select, "seed": seed, "source": dict(source or {})}
        for name, value in json.loads(json.dumps(asked)).items():
            if record and record.get(name) != value:
                change = run_folder.difference(name, record.get(name), value)
                raise UserError(f"{folder} was started {change}: resume cannot change it")
        if _is_complete(folder / "chosen"):
            _lift(folder / "chosen", folder)
        if record and manifest.is_finished(folder):
            return _choice(folder, record)
        parts = Split(split.train, split.valid, None, split.seen)
        facts = Facts.of(parts, device)
        plan, left_out = contenders(facts, parts.train, seed)
        state: dict[str, Any] = {**asked, "facts": facts.lines(), "left_out": left_out}
        for line in facts.lines():
            log.info("  %s", line)
        search: Search

        def save() -> None:
            trials = [asdict(trial) for trial in search.trials]
            files.write_json(folder / NAME, {**state, "seconds": round(search.elapsed, 3), "trials": trials})

        search = Search(
            parts,
            folder / "trials",
            allowed,
            facts,
            select,
            seed,
            jobs,
            device,
            source,
            save,
            listener or Listener(),
            _trials(folder, record),
            float(record.get("seconds", 0.0)),
        )
        search.clean()
        save()
        if "chosen" in record:
            state |= {"chosen": record["chosen"], "why": record["why"], "refit": record.get("refit", False)}
        else:
            search.run(plan)
            decision = _decided(search)
            names = [trial.folder for trial in decision.chosen]
            state |= {"chosen": names, "why": decision.why, "refit": decision.refit}
        save()
        for line in state["why"]:
            log.info("%s", line)
        test = _finish(search, split, state, cutoffs, save)
        _lift(folder / "chosen", folder)
        return _choice(folder, files.read_json(folder / NAME), test)
    finally:
        lock.release()


def _check(split: Split, select: str) -> None:
    if launched() > 1:
        raise UserError("auto starts processes itself: use jobs (--jobs N) without torchrun")
    if split.valid is None or not len(split.valid):
        raise UserError("auto chooses on the validation part, and this split has none", "valid", "0.1")
    metric, cutoff = selected(select)
    if parse(metric).name in LIST_METRICS:
        raise UserError(
            f"select is {select}, which says nothing about relevance: choose recall, ndcg or another metric"
        )
    if cutoff > split.train.n_items:
        raise UserError(
            f"the cutoff of select={select} exceeds the {split.train.n_items:,} items: choose a smaller one"
        )


def _opened(folder: Path, resume: bool, overwrite: bool) -> dict[str, Any]:
    """auto.json of an interrupted call that is to be resumed; empty if the search starts anew."""
    began = (folder / NAME).is_file()
    if resume and overwrite:
        raise UserError("resume and overwrite cannot be combined: choose one")
    if resume and began:
        return files.read_json(folder / NAME, "delete the folder, or choose another")
    if overwrite and began:
        for part in ("trials", "refits", "chosen"):
            shutil.rmtree(folder / part, ignore_errors=True)
        run_folder.delete_run(folder)
        (folder / NAME).unlink(missing_ok=True)
    elif overwrite:
        run_folder.check_free(folder, False, True)
        run_folder.delete_run(folder)
    run_folder.check_free(folder, False, False)
    return {}


# The choice


@dataclass(frozen=True)
class _Decision:
    """The trials that become the run, whether they are trained again on both parts, and why."""

    chosen: list[Trial]
    refit: bool
    why: list[str]


def _decided(search: Search) -> _Decision:
    """The first outcome, in the order above, that the rest of the time allows."""
    ranked = search.finalists()
    if not ranked:
        raise UserError(f"every trial failed; the first: {search.trials[0].why}")
    best = ranked[0]
    why = [f"{best.name} has the best {search.select} on the validation part: {best.value:.4f}"]
    counted = next((trial for trial in ranked if trial.recipe == "popularity"), None)
    if counted is not None and counted is not best:
        why.append(f"{counted.name}, the same list for everyone, has {counted.value:.4f}")
    sources = [trial for trial in ranked if trial.recipe != "popularity"][:_SOURCES]
    alike = counted is not None and search.facts.known < 1  # it lists items for queries that no other source knows
    if counted is not None and (alike or search.facts.timed or best is counted):
        sources.append(counted)
    if len(sources) < 2:
        return _alone(search, best, why)
    if len(again := search.refittable(sources)) > 1:
        why += [_left_out(trial) for trial in sources if trial not in again]
        sources = again
    elif not search.fits(max(search.closing(sources, refit=False), search.judging + search.closing(again))):
        return _alone(search, best, [*why, "no time was left to fuse it with others"])
    places = [search.folder / trial.folder for trial in sources]
    judged = fusion_gain(places, search.split, select=search.select, device=search.device)
    search.fusing = judged.seconds + 1.5 * judged.rank_seconds * search.facts.queries
    used = [trial for trial in sources if trial.folder in judged.used or (alike and trial is counted)]
    gain = f"{judged.gain:+.4f} (standard error {judged.error:.4f}) on queries that did not choose the weights"
    if len(used) < 2 or not judged.gain > judged.error:
        return _alone(search, best, [*why, f"not fused: {_names(sources)} change {search.select} by {gain}"])
    gain, kept, late = f"{_names(used)} change {search.select} by {gain}", list(used), list[str]()
    while len(kept) > 1 and not search.fits(refit_seconds(*kept) + search.ending(kept)):
        lightest = min(kept, key=lambda trial: (trial is best, judged.weights.get(trial.folder, 0.0)))
        kept.remove(lightest)
        late.append(_left_out(lightest))
    if len(kept) > 1:
        line = f"fused: {_names(kept)}; {gain}" if late else f"fused: {gain}"
        return _Decision(kept, True, [*why, line, *late])
    assert search.split.valid is not None
    share = judged.gain / best.value if best.value else math.inf
    more, again = len(search.split.valid) / len(search.split.train), search.refittable([best])
    size = f"{share:.1%} of the best alone, and the validation part adds {more:.1%} to the training part"
    if search.fits(search.ending(used)) and (share > more or not again):
        return _Decision(used, False, [*why, f"fused: {gain}, {size}" if again else f"fused: {gain}", _no_refit(used)])
    return _alone(search, best, [*why, f"not fused, for no time was left to train all again: {gain}, {size}"])


def _names(trials: Sequence[Trial]) -> str:
    return " + ".join(trial.name for trial in trials)


def _left_out(trial: Trial) -> str:
    about = f"which takes about {refit_seconds(trial):.0f} s"
    return f"not fused: {trial.name}, for no time was left to train it again, {about}"


def _alone(search: Search, best: Trial, why: Sequence[str]) -> _Decision:
    """The best trial, trained again if there is time."""
    if search.fits(search.closing([best])):
        return _Decision([best], True, [*why])
    return _Decision([best], False, [*why, _no_refit([best])])


def _no_refit(chosen: Sequence[Trial]) -> str:
    return f"no time was left to train on the validation part too, which takes about {refit_seconds(*chosen):.0f} s"


def _finish(
    search: Search, split: Split, state: dict[str, Any], cutoffs: Sequence[int], save: Callable[[], None]
) -> Evaluation | None:
    """Train the choice again on both parts if that is planned, write it to OUT/chosen, and rank the test part."""
    folder = search.folder.parent / "chosen"
    test = _refitted(search, split, state, cutoffs, save) if state["refit"] else None
    if not state["refit"]:
        shutil.rmtree(folder, ignore_errors=True)
        runs = [search.folder / name for name in state["chosen"]]
        test = _written(search, runs, split, folder, cutoffs)
    trials = [asdict(trial) for trial in search.trials]
    record = {**state, "seconds": round(search.elapsed, 3), "trials": trials}
    files.write_json(folder / NAME, record)
    card = (folder / "README.md").read_text()
    files.write_text(folder / "README.md", card + _section(_choice(folder, record)))
    manifest.add_files(folder, NAME, "README.md")
    return test


def _written(
    search: Search, runs: Sequence[Path], split: Split, folder: Path, cutoffs: Sequence[int]
) -> Evaluation | None:
    """Promote a run, or fuse several; the test metrics."""
    if len(runs) == 1:
        return promote(runs[0], split, folder, k=cutoffs, device=search.device)
    return fuse(runs, split, folder, by="scores", select=search.select, k=cutoffs, device=search.device).test


def _refitted(
    search: Search, split: Split, state: dict[str, Any], cutoffs: Sequence[int], save: Callable[[], None]
) -> Evaluation | None:
    """The choice trained again on both parts and written to OUT/chosen; the test metrics.

    If a training fails or takes too long, `state` says so: the others are fused without it, and without the first, the
    best, nothing is refitted and there is no such folder. Weights of a fusion are those that the trials themselves
    choose (fusing.py). Only a training of a single run gets the test part, which it ranks last.
    """
    out = search.folder.parent
    chosen = [next(trial for trial in search.finalists() if trial.folder == name) for name in state["chosen"]]
    allowed = search.budget.seconds
    end = math.inf if allowed is None else allowed - search.ending(chosen)
    search.listener.begin("training on both parts", len(search.trials), len(search.trials))
    places = [out / "refits" / trial.folder for trial in chosen]
    try:
        if len(chosen) == 1 and not manifest.is_finished(places[0]):
            test = retrain(search, chosen[0], split, out / "chosen", end - search.elapsed, cutoffs).test
            places = [out / "chosen"]
        else:
            for trial, place in zip(list(chosen), list(places), strict=True):
                try:
                    if not manifest.is_finished(place):
                        retrain(search, trial, search.split, place, end - search.elapsed)
                except _FAILURES as failure:
                    if trial is chosen[0]:
                        raise
                    shutil.rmtree(place, ignore_errors=True)
                    chosen.remove(trial)
                    places.remove(place)
                    line = f"not fused after all: {trial.name}, not trained on both parts: {first_line(failure)}"
                    state |= {"chosen": [each.folder for each in chosen], "why": [*state["why"], line]}
                    save()
                    log.info("%s", line)
            shutil.rmtree(out / "chosen", ignore_errors=True)
            test = _written(search, places, split.joined() if len(places) == 1 else split, out / "chosen", cutoffs)
    except _FAILURES as failure:
        for part in ("refits", "chosen"):
            shutil.rmtree(out / part, ignore_errors=True)
        line = f"not trained on the validation part too: {first_line(failure)}"
        state |= {"refit": False, "why": [*state["why"], line]}
        save()
        test = None
    else:
        state["why"] = [*state["why"], _retrained(chosen, places)]
    log.info("%s", state["why"][-1])
    return test


def _retrained(chosen: Sequence[Trial], places: Sequence[Path]) -> str:
    """How the choice was trained again, in words."""
    records = [run_folder.read_meta(place)["refit"] for place in places]
    epochs = ", ".join(
        f"{record['epochs']} epoch{'s' * (record['epochs'] > 1)} of {trial.name}"
        for trial, record in zip(chosen, records, strict=True)
    )
    return f"trained again on all {records[0]['interactions']:,} interactions of both parts: {epochs}"


def _is_complete(chosen: Path) -> bool:
    """Whether the choice was written and its files may move; some may have moved already."""
    return manifest.is_finished(chosen) and NAME in manifest.read_manifest(chosen).files


def _lift(chosen: Path, folder: Path) -> None:
    """Move the files of the chosen run to their place, its manifest last, and delete the trials."""
    for part in ("trials", "refits"):
        shutil.rmtree(folder / part, ignore_errors=True)
    for path in sorted(chosen.iterdir(), key=lambda path: path.name == manifest.NAME):
        if path.name != LOCK:
            os.replace(path, folder / path.name)
    shutil.rmtree(chosen)


def _trials(folder: Path, record: Mapping[str, Any]) -> list[Trial]:
    """The trials of auto.json, whose folders must be inside OUT/trials."""
    with one_line(f"{folder / NAME} is corrupt", TypeError, ValueError, then="delete the folder, or overwrite it"):
        trials = [Trial(**trial) for trial in record.get("trials", ())]
        places = {trial.folder for trial in trials}
        if not {*places, *record.get("chosen", ())} <= {place for place in places if re.fullmatch(r"\w[\w.-]*", place)}:
            raise ValueError("a trial has no folder")
    return trials


def _choice(folder: Path, record: Mapping[str, Any], test: Evaluation | None = None) -> Choice:
    trials = tuple(_trials(folder, record))
    chosen, why, left_out = tuple(record["chosen"]), tuple(record["why"]), dict(record["left_out"])
    seconds, refit = float(record["seconds"]), bool(record.get("refit", False))
    return Choice(folder, str(record["select"]), trials, left_out, chosen, why, seconds, test, refit)


def _section(choice: Choice) -> str:
    """The part of the model card on how the run was chosen."""
    head, *body = choice.rows()
    lines = ["", "## How it was chosen", *(f"- {line}." for line in choice.why)]
    lines += [f"- {name}: not tried, {why}." for name, why in choice.left_out.items()]
    lines += [f"- {clock(choice.seconds)} minutes in all. The test part was ranked once, after the choice.", ""]
    lines += [f"| {' | '.join(head)} |", "|---|---|---:|---:|---:|", *(f"| {' | '.join(row)} |" for row in body)]
    return "\n".join(lines) + "\n"
