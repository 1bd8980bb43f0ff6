"""Successive halving over contenders: a short training of each, then a complete one of the best.

The search sees a training and a validation part and no test part. It keeps the run folder of the best trial of each
family and the record of all trials.

A budget in time is planned from its end. While trials run, `reserve` is what the choice so far needs: to judge the
fusion of the best trials, to train them again on both parts, and to rank the test part. A trial may take what is left
beside it, and not so much that its own training on both parts would not fit.
"""

from __future__ import annotations

import gc
import logging
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sparring.core import files, manifest
from sparring.core.devices import pick_device
from sparring.core.errors import UserError, first_line
from sparring.core.locks import LOCK
from sparring.core.workers import Ended, Listener, Say, Task, TaskMessage, run
from sparring.data.interactions import Interactions, Split
from sparring.experiments.contenders import Contender, Facts, complete_epochs
from sparring.recipes.run import Run
from sparring.recipes.settings import build
from sparring.training import folder as run_folder
from sparring.training.fitting import Fitted, fit
from sparring.training.loop import TrainingProgress

_UNITS = {"s": 1, "m": 60, "h": 3600}
_FUSING = 6e-3  # seconds per validation query, to judge a fusion and once more to choose its weights
_POOLING = {"cpu": 1.5e-3, "cuda": 1.5e-4}  # seconds per query and run, for fusing its lists
_LAST = 0.03  # of the time: for the files of the choice
# Shares of the rest: short trainings may begin until the first, complete ones until the second, and once more. The
# complete training of the best may use all of it.
_PASSES = ((0.35, 0.6), (0.8, 1.0))
_LARGEST = 0.25  # of the time: the most that a short training may take
_SLACK = 1.1  # trainings take up to this much longer than expected
_SURE, _EARLY = 0.05, 0.2  # parts of its time between which a training that is too slow starts again with fewer epochs
_SAVED = 60.0  # seconds between checkpoints
_LEAST = 3  # epochs of a short training, unless its schedule has fewer
GROWTH = 1.15  # a training on both parts takes this many times the seconds of one on the training part
_KEPT = 2 / 3  # of the time: the most that the search keeps to fuse two runs; the best trial alone may need more
_ALWAYS = 10.0  # seconds that the first model may take, however small the budget is
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """A time in seconds, or a number of trials.

    Budget.parse("10m");  Budget.parse("90s");  Budget.parse("12")  # twelve trials
    """

    text: str
    seconds: float | None = None
    trials: int | None = None

    @classmethod
    def parse(cls, value: str | int) -> Budget:
        text = str(value).strip()
        if re.fullmatch(r"\d+", text) and int(text) > 0:
            return cls(text, trials=int(text))
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
        if match is None or not 0 < (seconds := float(match[1]) * _UNITS[match[2]]) < math.inf:
            raise UserError(
                f"the budget {text!r} is neither a time such as 90s, 10m or 1h nor a number of trials such as 12"
            )
        return cls(text, seconds=seconds)


Round = Literal["short", "complete"]


@dataclass(frozen=True)
class Terms:
    """The limits of a training."""

    epochs: int  # of its schedule
    least: int  # epochs that are worth a training
    seconds: float
    expected: float = 0.0  # seconds of the schedule it should have; 0 if unknown


@dataclass(frozen=True)
class Trial:
    """One training of a contender: how long it took, how good it is, or why there is none."""

    name: str
    family: str
    recipe: str
    settings: dict[str, Any]
    round: Round
    status: Literal["done", "failed", "skipped"]
    folder: str
    epochs: int = 0  # of its schedule
    value: float | None = None  # best on the validation part
    seconds: float = 0.0
    pace: float = 0.0  # seconds per epoch, validation included
    rank_seconds: float = 0.0  # to rank a validation query
    why: str = ""
    best: int = 0  # its best epoch

    @property
    def start(self) -> float:
        """Seconds that do not grow with the epochs: to build the run, its closed form, the files."""
        return max(self.seconds - self.epochs * self.pace, 0.0)


class OutOfTimeError(Exception):
    """A training would not end in time; `pace` is its seconds per epoch."""

    def __init__(self, message: str, pace: float) -> None:
        super().__init__(message)
        self.pace = pace


@dataclass
class Search:
    """The state of a search; `trials` may hold those of an earlier, interrupted one, which are not run again."""

    split: Split  # without a test part
    folder: Path
    budget: Budget
    facts: Facts
    select: str
    seed: int
    jobs: int
    device: str
    source: Mapping[str, Any] | None
    save: Callable[[], None]
    listener: Listener = field(default_factory=Listener)
    trials: list[Trial] = field(default_factory=list)
    spent: float = 0.0  # seconds of earlier calls
    began: float = field(default_factory=time.monotonic)
    fusing: float | None = None  # seconds to fuse runs and rank the test part with them, once that was measured

    def __post_init__(self) -> None:
        assert self.split.test is None, "a search must not see the test part"
        where = pick_device(self.device)
        self.kind = where.type
        several = where.type == "cuda" and where.index is None
        names = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if several else [self.device]
        self.devices = Counter(dict.fromkeys(names, 0))  # trainings that run on each
        assert self.split.valid is not None
        self.fused_queries = min(len(np.unique(self.split.valid.queries)), 5000)
        self.skipped: dict[str, Trial] = {}  # contenders that the time was too short for so far

    # Time

    @property
    def elapsed(self) -> float:
        return self.spent + time.monotonic() - self.began

    @property
    def reserve(self) -> float:
        """Seconds that the end takes with the choice so far."""
        return self.closing(self.likely())

    def likely(self) -> list[Trial]:
        """The best trial, and the next one to fuse it with that leaves time for trials."""
        models = [trial for trial in self.finalists() if trial.recipe != "popularity"]
        most = _KEPT * (self.budget.seconds or math.inf)
        pairs = ([models[0], other] for other in models[1:])
        return next((pair for pair in pairs if self.closing(pair) <= most), models[:1])

    def closing(self, sources: Sequence[Trial], more: int = 0, refit: bool = True) -> float:
        """Seconds to judge the fusion of these trials and some unknown ones, train these again, and rank the test."""
        if self.budget.seconds is None:
            return 0.0
        judging = self.judging if len(sources) + more > 1 else 0.0
        return judging + refit * refit_seconds(*sources) + self.ending(sources, more)

    @property
    def judging(self) -> float:
        """Seconds to judge a fusion."""
        return 0.0 if self.budget.seconds is None else _FUSING * self.fused_queries

    def ending(self, sources: Sequence[Trial], more: int = 0) -> float:
        """Seconds for ranking the test part with these trials, fused if there are several, and for the files."""
        if self.budget.seconds is None:
            return 0.0
        ranking, runs = 1.5 * sum(trial.rank_seconds for trial in sources) * self.facts.queries, len(sources) + more
        if runs > 1:  # the fused lists, and those of each source
            fusing = _FUSING * self.fused_queries + _POOLING[self.kind] * runs * self.facts.queries + ranking
            ranking = fusing if self.fusing is None else self.fusing
        return ranking + _LAST * self.budget.seconds

    def fits(self, seconds: float) -> bool:
        """Whether the budget has this much time left."""
        return self.budget.seconds is None or self.budget.seconds - self.elapsed > seconds

    def refittable(self, sources: Sequence[Trial]) -> list[Trial]:
        """The trials, in this order, that can be judged, trained again and fused in time; none without the first."""
        kept: list[Trial] = []
        for trial in sources:
            if self.fits(self.closing([*kept, trial])):
                kept.append(trial)
            elif not kept:
                break
        return kept

    def left(self, share: float = 1.0, family: str = "") -> float:
        """Seconds that a training of a family may take until this share of the time for trials is used.

        They leave the time that the end takes with the choice so far, and with this training in it. Infinite for a
        number of trials.
        """
        if self.budget.seconds is None:
            return math.inf
        elapsed, others = self.elapsed, [trial for trial in self.likely() if trial.family != family]
        with_it = (self.budget.seconds - elapsed - self.closing(others, 1)) / (1 + GROWTH)
        return min(share * (self.budget.seconds - self.reserve) - elapsed, with_it)

    # Rounds

    def run(self, contenders: Sequence[Contender]) -> None:
        """Train contenders briefly, as far as the budget allows, and the best of them completely."""
        self.plan = list(contenders)
        if self.budget.trials is None:
            for short, complete in _PASSES:
                self._round("short", self._turns(), short)
                best = self._best()
                self._round("complete", iter(best[:1]))  # the best of all before other contenders are tried
                self._round("complete", iter(best[: max(2, math.ceil(len(best) / 3))]), complete)
        else:
            first = max(self.budget.trials - self.budget.trials // 4, 2)
            self._round("short", self._turns(), most=first)
            self._round("complete", iter(self._best()), most=max(self.budget.trials, first))
            self._round("short", self._turns(), most=self.budget.trials)
        tried = {trial.name for trial in self.trials}
        late = [trial for name, trial in self.skipped.items() if name not in tried]
        self.trials += late
        self.save()
        if late:
            log.info("skipped for lack of time: %s", ", ".join(trial.name for trial in late))

    def _turns(self) -> Iterator[Contender]:
        """All contenders turn by turn; after the first turn those of the best family come first.

        A family is as good as its contenders of earlier turns, so that a resumed search has the same order.
        """
        for turn in sorted({each.turn for each in self.plan}):
            values = {trial.name: trial.value for trial in self.trials if trial.round == "short"}
            earlier = [each for each in self.plan if each.turn < turn]

            def value(family: str, known: Any = values, earlier: Any = earlier) -> float:
                return max((known.get(each.name) or 0.0 for each in earlier if each.family == family), default=0.0)

            yield from sorted((each for each in self.plan if each.turn == turn), key=lambda each: -value(each.family))

    def _best(self) -> list[Contender]:
        """The contenders whose training was short, best first; the best of each family before all others."""
        values = {
            trial.name: trial.value for trial in self.trials if trial.round == "short" and trial.value is not None
        }
        found = [each for each in self.plan if each.name in values and each.short < each.epochs]
        found.sort(key=lambda each: -values[each.name])  # type: ignore[operator]
        firsts = {each.family: each.name for each in reversed(found)}.values()
        return sorted(found, key=lambda each: each.name not in firsts)

    def _round(self, which: Round, plan: Iterator[Contender], share: float = 1.0, most: int | None = None) -> None:
        """Train contenders in order until the trials or this share of the time are used.

        Each is decided on when a process is free.
        """
        done = {trial.name for trial in self.trials if trial.round == which}
        running: dict[str, tuple[Trial, str]] = {}
        self.listener.begin(f"{which} trainings", self._count(), most or len(self.plan))

        def tasks() -> Iterator[Task]:
            for contender in plan:
                if contender.name in done:
                    continue
                if most is not None and self._count() + len(running) >= most:
                    return
                terms = self._terms(contender, which, share, any(t.recipe != "popularity" for t, _ in running.values()))
                trial = self._trial(contender, which, terms)
                if trial.status == "skipped":
                    self.skipped[trial.name] = trial
                    continue
                device = min(self.devices, key=lambda name: self.devices[name])
                self.devices[device] += 1
                running[trial.name] = trial, device
                place = self.folder / trial.folder
                work = (trial, self.split, place, self.select, self.seed, device, terms, self.source)
                yield Task(contender.name, _train, work)

        for event in self._events(tasks()):
            if isinstance(event, TaskMessage):
                self.listener.said(event.name, event.message)
                continue
            trial, device = running.pop(event.name)
            self.devices[device] -= 1
            outcome = event.value or replace(trial, status="failed", why=event.error or "")
            if outcome.status == "skipped":
                self.skipped[outcome.name] = outcome
            else:
                self._add(outcome)
            self.listener.ended(event.name, event.error)

    def _count(self) -> int:
        return sum(trial.status != "skipped" for trial in self.trials)

    def _terms(self, contender: Contender, which: Round, share: float, beside: bool = False) -> Terms:
        """The limits of a contender's training, as of now; `beside` says that another model is being trained."""
        most = contender.short if which == "short" else contender.epochs
        if self.budget.seconds is None:
            return Terms(most, most, math.inf)
        left, least = self.left(share, contender.family), min(_LEAST, most)
        start, pace = self._pace(contender) or (0.0, 0.0)
        expected = _SLACK * (start + most * pace)
        if which == "short":
            left = min(left, _LARGEST * self.budget.seconds)
            known = any(trial.recipe != "popularity" and trial.value is not None for trial in self.trials)
            if not known and not beside:
                begins = expected <= max(left, _ALWAYS)
                return Terms(most, least, math.inf) if begins else Terms(0, least, left, expected)
        else:
            before = next(trial for trial in self.trials if trial.name == contender.name and trial.round == "short")
            least = min(before.epochs + math.ceil(before.epochs / 2), most)
        epochs = most if pace == 0 else min(most, int(max(left / _SLACK - start, 0.0) / pace))
        return Terms(epochs if left > 0 else 0, least, left, expected)

    def _pace(self, contender: Contender) -> tuple[float, float] | None:
        """Expected seconds for the start and for an epoch, from its own earlier training or that of its family.

        A training that was stopped early on says less than a finished one. None if nothing is known.
        """
        for tried in (self.trials, self.skipped.values()):
            family = [trial for trial in tried if trial.family == contender.family and trial.pace]
            if family:
                last = ([trial for trial in family if trial.name == contender.name] or family)[-1]
                wider = contender.width / max(int(last.settings.get("dim", contender.width)), 1)
                return last.start, last.pace * max(wider, 1.0)
        return (0.0, self.facts.square_seconds) if contender.family == "ease" else None

    def _trial(self, contender: Contender, which: Round, terms: Terms) -> Trial:
        """A trial before its outcome is known; skipped if it is not worth a start."""
        short = which == "short" and contender.short < contender.epochs
        trial = Trial(
            contender.name,
            contender.family,
            contender.recipe,
            dict(contender.settings),
            which,
            "done",
            f"{contender.folder}-short" if short else contender.folder,
            terms.epochs,
        )
        if terms.epochs >= terms.least:
            return trial
        about = f"it takes about {terms.expected:.0f} s, and " if terms.expected else ""
        left = f"{max(terms.seconds, 0):.0f} s were left for it, beside {self.reserve:.0f} s for the choice so far"
        return replace(trial, status="skipped", epochs=0, why=about + left)

    def _events(self, tasks: Iterator[Task]) -> Iterator[TaskMessage | Ended]:
        """One training at a time in this process, several in processes of their own."""
        if self.jobs > 1:
            cores = max(1, torch.get_num_threads() // self.jobs)
            yield from run(tasks, self.jobs, cores)
            return
        for task in tasks:
            with _silent():
                value = task.work(lambda message, name=task.name: self.listener.said(name, message), *task.arguments)
            gc.collect()  # a failed training may hold its tables until then
            yield Ended(task.name, value, None)

    # Trials

    def _add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.save()
        self.clean()
        left = f"; {clock(self.budget.seconds - self.elapsed)} left" if self.budget.seconds is not None else ""
        log.info("%s%s", trial_line(trial, self.select), left)

    def finalists(self) -> list[Trial]:
        """The best trial of each family, best first."""
        best: dict[str, Trial] = {}
        for trial in self.trials:
            if trial.value is not None and (
                trial.family not in best or trial.value > best[trial.family].value  # type: ignore[operator]
            ):
                best[trial.family] = trial
        return sorted(best.values(), key=lambda trial: -trial.value)  # type: ignore[operator]

    def clean(self) -> None:
        """Delete the folders of trials that are not the best of their family."""
        kept = {trial.folder for trial in self.finalists()}
        for trial in self.trials:
            if trial.folder not in kept and (self.folder / trial.folder).is_dir():
                shutil.rmtree(self.folder / trial.folder)


def trial_line(trial: Trial, select: str) -> str:
    """A trial in one line."""
    if trial.status != "done":
        return f"{trial.name}: {trial.status}, {trial.why}"
    kind = f"{trial.epochs} epoch{'s' * (trial.epochs > 1)}"
    return f"{trial.name}: {select} {trial.value:.4f}, {kind}, {trial.seconds:.1f} s"


def clock(seconds: float) -> str:
    """754.3 -> 12:34."""
    whole = max(int(seconds), 0)
    return f"{whole // 60}:{whole % 60:02d}"


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the log of a single training off the log of the search."""
    logger = logging.getLogger("sparring.training")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _built(trial: Trial, train: Interactions, folder: Path, select: str, seed: int) -> Run:
    """The run of a trial; the schedule of a training that began in its folder stays."""
    asked = {**trial.settings, "select": select, "seed": seed}
    if complete_epochs(trial.recipe, trial.settings) > 1:
        begun = run_folder.has_run(folder) and run_folder.read_meta(folder)["setup"]["training"]["epochs"]
        asked["epochs"] = begun or trial.epochs
    return build(trial.recipe, train, asked)


def refit_seconds(*trials: Trial) -> float:
    """The time that trainings of finished trials on both parts take, as a guess: each up to its best epoch."""
    whole = ((trial.seconds, (trial.epochs - (trial.best or trial.epochs)) * trial.pace) for trial in trials)
    return GROWTH * sum(max(seconds - later, 0.0) for seconds, later in whole)


def retrain(
    search: Search, trial: Trial, split: Split, folder: Path, seconds: float, k: Sequence[int] = (10, 20, 50)
) -> Fitted:
    """Train a finished trial again on the training and validation parts, as `fit` does with `refit`.

    A copy of the trial is the selection, so it is read and not trained. Raises OutOfTimeError if the training would
    take more than these seconds. An interrupted one continues.
    """
    chosen, began = search.folder / trial.folder, time.monotonic()
    selection = folder / run_folder.SELECTION
    if not manifest.is_finished(selection):
        shutil.rmtree(selection, ignore_errors=True)
        shutil.copytree(chosen, selection, ignore=shutil.ignore_patterns(LOCK, manifest.NAME))
        files.write(selection / manifest.NAME, lambda path: shutil.copyfile(chosen / manifest.NAME, path))  # last
    run = _built(trial, split.train, selection, search.select, search.seed)
    epochs = int(files.read_json(selection / "result.json")["best_epoch"])
    within = _within(Terms(epochs, epochs, seconds), began, lambda message: search.listener.said(trial.name, message))
    progress = replace(within, stop=lambda: False)  # all epochs, or none
    how: dict[str, Any] = {"device": search.device, "progress": progress, "save_seconds": _SAVED, "k": k}
    with _silent():
        return fit(run, split, folder, refit=True, resume=True, source=search.source, **how)


def _train(
    say: Say,
    trial: Trial,
    split: Split,
    folder: Path,
    select: str,
    seed: int,
    device: str,
    terms: Terms,
    source: Mapping[str, Any] | None,
) -> Trial:
    """Train a contender in its folder, from the last checkpoint if there is one; the trial with its outcome.

    If it turns out to be too slow, it starts again with as many epochs as fit.
    """
    began = time.monotonic()
    try:
        built = _built(trial, split.train, folder, select, seed)
        progress = _within(terms, began, say)
        how: dict[str, Any] = {"resume": True, "device": device, "progress": progress, "save_seconds": _SAVED}
        fitted = fit(built, split, folder, source=source, **how)
    except OutOfTimeError as late:
        shutil.rmtree(folder, ignore_errors=True)
        left = terms.seconds - (time.monotonic() - began)
        fitting = int(left / (_SLACK * late.pace))
        if terms.least <= fitting < trial.epochs:
            fewer = replace(terms, epochs=fitting, seconds=left)
            return _train(say, replace(trial, epochs=fitting), split, folder, select, seed, device, fewer, source)
        return replace(trial, status="skipped", why=str(late), pace=late.pace)
    except (ValueError, RuntimeError, ArithmeticError, MemoryError) as failure:
        shutil.rmtree(folder, ignore_errors=True)
        return replace(trial, status="failed", why=first_line(failure), seconds=round(time.monotonic() - began, 3))
    history = fitted.history
    ranked = [record for record in history if select in record]
    assert split.valid is not None
    queries = min(len(np.unique(split.valid.queries)), built.setup.validation.valid_queries)
    pace = _epoch_seconds(history)
    return replace(
        trial,
        epochs=len(history),
        value=max(float(record[select]) for record in ranked),
        seconds=round(max(time.monotonic() - began, pace * len(history)), 3),  # a resumed one began earlier
        pace=round(pace, 4),
        best=fitted.best_epoch,
        rank_seconds=min(record["valid_seconds"] for record in ranked) / max(queries, 1),
    )


def _epoch_seconds(history: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of an epoch with its validation; the first epoch does not count if there are more, for it is slower."""
    first, last, n = history[0]["seconds"], history[-1]["seconds"], len(history)
    valid = sum(record.get("valid_seconds", 0.0) for record in history)
    return float((last - first) / (n - 1) if n > 1 else last) + valid / n


def _within(terms: Terms, began: float, say: Say) -> TrainingProgress:
    """Callbacks that pass epochs on and keep a training within its time.

    One that is too slow for its schedule is stopped early on. Any other ends with the last epoch that fits.
    """
    total, steps, first, pace, base = 1, 1, None, 0.0, began
    limit, least = terms.seconds, terms.least

    def start(epochs: int, of_epoch: int) -> None:
        nonlocal total, steps, base
        total, steps, base = epochs * of_epoch, of_epoch, time.monotonic()

    def check(done: int) -> None:
        nonlocal first, pace
        first = done - 1 if first is None else first  # a resumed training has done some steps before
        now = time.monotonic()
        used, pace = now - began, (now - base) / max(done - first, 1)  # of a step
        whole = base - began + pace * (total - first)
        slow = _SURE * limit < now - base < _EARLY * limit and whole > _SLACK * limit
        if slow or (used > limit and done < least * steps):
            seconds = f"it takes about {max(whole, used):.0f} s, and {limit:.0f} s were left for it"
            raise OutOfTimeError(seconds, pace * steps)

    def step(epoch: int, step: int, loss: Callable[[], float]) -> None:
        check(epoch * steps + step)

    def epoch(record: dict[str, Any]) -> None:
        say(record)
        check(record["epoch"] * steps)

    def stop() -> bool:
        return time.monotonic() - began + pace * steps > limit

    return TrainingProgress(start=start, step=step, epoch=epoch, stop=stop)
