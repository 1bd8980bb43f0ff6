"""Successive halving over contenders: a short training of each, then a complete one of the best.

The search sees a training and a validation part and no test part. It keeps the run folder of the best trial of each
family and the record of all trials.
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

from sparring.core.devices import pick_device
from sparring.core.errors import UserError, first_line
from sparring.core.workers import Ended, Listener, Say, Task, TaskMessage, run
from sparring.data.interactions import Split
from sparring.experiments.contenders import Contender, Facts
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress

_UNITS = {"s": 1, "m": 60, "h": 3600}
_RESERVED = 0.1  # of the time: for fusing and the last ranking
_FIRST = 0.4  # of the rest: for short trainings
_LARGEST = 0.25  # of the time: the most that a short training may take
_SLACK = 1.1  # estimates are this much too low at worst
_SURE = 0.05  # of its time that a training runs before its end is projected
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


@dataclass(frozen=True)
class Trial:
    """One training of a contender: how long it took, how good it is, or why there is none."""

    name: str
    family: str
    recipe: str
    settings: dict[str, Any]
    round: Literal["short", "complete"]
    status: Literal["done", "failed", "skipped"]
    folder: str
    epochs: int = 0  # of its schedule
    value: float | None = None  # best on the validation part
    seconds: float = 0.0
    rank_seconds: float = 0.0  # to rank a validation query
    why: str = ""


class OutOfTimeError(Exception):
    """A training would not end in time."""


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

    def __post_init__(self) -> None:
        assert self.split.test is None, "a search must not see the test part"
        where = pick_device(self.device)
        several = where.type == "cuda" and where.index is None
        names = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if several else [self.device]
        self.devices = Counter(dict.fromkeys(names, 0))  # trainings that run on each
        self.used: dict[str, str] = {}  # the device of each running training

    # Time

    @property
    def elapsed(self) -> float:
        return self.spent + time.monotonic() - self.began

    @property
    def reserve(self) -> float:
        """Seconds for fusing three runs and ranking the queries of the training part with them."""
        assert self.budget.seconds is not None
        ranking = max((trial.rank_seconds for trial in self.trials), default=0.0) * self.facts.queries
        return min(_RESERVED * self.budget.seconds + 2 * ranking, 0.5 * self.budget.seconds)

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the time for trainings is used; infinite for a number of trials."""
        if self.budget.seconds is None:
            return math.inf
        return share * (self.budget.seconds - self.reserve) - self.elapsed

    # Rounds

    def run(self, contenders: Sequence[Contender]) -> None:
        """Train every contender briefly, as far as the budget allows, then the best of them completely."""
        limit = self.budget.trials
        later = 0 if limit is None else limit // 4
        self._round("short", contenders, None if limit is None else max(limit - later, 2))
        best = self._best(contenders)
        more = math.ceil(len(best) / 3) if limit is None else max(limit - self._count(), 0)
        self._round("complete", best[:more], None)

    def _best(self, contenders: Sequence[Contender]) -> list[Contender]:
        """The contenders whose training was short, best first; the best of each family before all others."""
        values = {
            trial.name: trial.value for trial in self.trials if trial.round == "short" and trial.value is not None
        }
        found = [each for each in contenders if each.name in values and each.short < each.epochs]
        found.sort(key=lambda each: -values[each.name])  # type: ignore[operator]
        firsts = list({each.family: each for each in reversed(found)}.values())
        firsts.sort(key=lambda each: -values[each.name])  # type: ignore[operator]
        return [*firsts, *(each for each in found if each not in firsts)]

    def _count(self) -> int:
        return sum(trial.status != "skipped" for trial in self.trials)

    def _round(self, which: Literal["short", "complete"], plan: Sequence[Contender], most: int | None) -> None:
        """Train contenders in order, at most this many; a decision for each is made when a process is free."""
        done = {trial.name for trial in self.trials if trial.round == which}
        self.listener.begin(f"{which} trainings", len(done), len(plan) if most is None else min(most, len(plan)))
        started = sum(trial.round == which and trial.status != "skipped" for trial in self.trials)

        def tasks() -> Iterator[Task]:
            nonlocal started
            for contender in plan:
                if contender.name in done:
                    continue
                if most is not None and started >= most:
                    return
                epochs, limit, why = self._allowed(contender, which)
                if why:
                    self._add(self._trial(contender, which, "skipped", why=why))
                    continue
                started += 1
                device = min(self.devices, key=lambda name: self.devices[name])
                self.devices[device] += 1
                self.used[contender.name] = device
                trial = self._trial(contender, which, "done", epochs=epochs)
                work = (
                    trial,
                    self.split,
                    self.folder / trial.folder,
                    self.select,
                    self.seed,
                    device,
                    limit,
                    self.source,
                )
                yield Task(contender.name, _train, work)

        names = {each.name: each for each in plan}
        for event in self._events(tasks()):
            if isinstance(event, TaskMessage):
                self.listener.said(event.name, event.message)
                continue
            self.devices[self.used.pop(event.name)] -= 1
            lost = self._trial(names[event.name], which, "failed", why=event.error or "")
            self._add(lost if event.value is None else event.value)
            self.listener.ended(event.name, event.error)

    def _allowed(self, contender: Contender, which: Literal["short", "complete"]) -> tuple[int, float, str]:
        """The epochs that a training may have, the seconds it may take, and why it is not worth a start."""
        first = not any(trial.family != "popularity" and trial.value is not None for trial in self.trials)
        if which == "short":
            left = self.left(_FIRST) if not first else math.inf
            guess = self._guess(contender)
            if self.budget.seconds is not None:
                left = min(left, _LARGEST * self.budget.seconds) if not first else left
                if not first and left <= 0:
                    return 0, 0.0, "no time left for short trainings"
                bound = min(left, self.left(_FIRST))
                if guess is not None and contender.family != "popularity" and guess > bound:
                    return 0, 0.0, f"about {guess:.0f} s, and {max(bound, 0):.0f} s are left for it"
            return contender.short, left, ""
        left = self.left()
        before = next(trial for trial in self.trials if trial.name == contender.name and trial.round == "short")
        each = _SLACK * before.seconds / max(before.epochs, 1)
        epochs = contender.epochs if math.isinf(left) else min(contender.epochs, int(max(left, 0.0) / max(each, 1e-9)))
        if epochs < min(2 * contender.short, contender.epochs):
            return 0, 0.0, f"about {each * contender.epochs:.0f} s, and {max(left, 0):.0f} s are left"
        return epochs, left, ""

    def _guess(self, contender: Contender) -> float | None:
        """Seconds of a short training, from those of its family; None if nothing is known."""
        known = [trial for trial in self.trials if trial.family == contender.family and trial.round == "short"]
        known = [trial for trial in known if trial.seconds and trial.epochs]
        if not known:
            return _SLACK * self.facts.square_seconds if contender.family == "ease" else None
        last = known[-1]
        wider = contender.width / max(int(last.settings.get("dim", contender.width)), 1)
        return _SLACK * last.seconds * max(wider, 1.0)

    def _trial(self, contender: Contender, which: Any, status: Any, **more: Any) -> Trial:
        short = which == "short" and contender.short < contender.epochs
        folder = f"{contender.folder}-short" if short else contender.folder
        return Trial(
            contender.name, contender.family, contender.recipe, dict(contender.settings), which, status, folder, **more
        )

    def _events(self, tasks: Iterator[Task]) -> Iterator[TaskMessage | Ended]:
        """One training at a time in this process, several in processes of their own."""
        if self.jobs > 1:
            cores = max(1, (torch.get_num_threads()) // self.jobs)
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


def _train(
    say: Say,
    trial: Trial,
    split: Split,
    folder: Path,
    select: str,
    seed: int,
    device: str,
    limit: float,
    source: Mapping[str, Any] | None,
) -> Trial:
    """Train a contender in its folder, from the last checkpoint if there is one; the trial with its outcome."""
    began = time.monotonic()
    try:
        asked = {**trial.settings, "select": select, "seed": seed}
        if trial.epochs > 1:
            asked["epochs"] = trial.epochs
        built = build(trial.recipe, split.train, asked)
        progress = _within(limit, began, say)
        history = fit(built, split, folder, resume=True, device=device, progress=progress, source=source).history
    except OutOfTimeError as late:
        status, why = "skipped", str(late)
    except (ValueError, RuntimeError, ArithmeticError, MemoryError) as failure:
        status, why = "failed", first_line(failure)
    else:
        best = max(float(record[select]) for record in history if select in record)
        ranked = [record["valid_seconds"] for record in history if "valid_seconds" in record]
        assert split.valid is not None
        queries = min(len(np.unique(split.valid.queries)), built.setup.validation.valid_queries)
        each = min(ranked) / max(queries, 1)
        return replace(trial, value=best, seconds=round(time.monotonic() - began, 3), rank_seconds=each)
    shutil.rmtree(folder, ignore_errors=True)
    return replace(trial, status=status, why=why, seconds=round(time.monotonic() - began, 3))  # type: ignore[arg-type]


def _within(limit: float, began: float, say: Say) -> TrainingProgress:
    """Callbacks that pass epochs on and end a training that would take longer than `limit` seconds."""
    total, steps, first = 1, 1, None

    def start(epochs: int, of_epoch: int) -> None:
        nonlocal total, steps
        total, steps = epochs * of_epoch, of_epoch

    def check(done: int) -> None:
        nonlocal first
        first = done - 1 if first is None else first  # a resumed training has done some steps before
        used = time.monotonic() - began
        projected = used * (total - first) / max(done - first, 1)
        if used > limit or (used > _SURE * limit + 1.0 and projected > _SLACK * limit):
            raise OutOfTimeError(f"about {max(projected, used):.0f} s, and {limit:.0f} s were left for it")

    def step(epoch: int, step: int, loss: Callable[[], float]) -> None:
        check(epoch * steps + step)

    def epoch(record: dict[str, Any]) -> None:
        say(record)
        if record["epoch"] * steps < total:
            check(record["epoch"] * steps)

    return TrainingProgress(start=start, step=step, epoch=epoch)
