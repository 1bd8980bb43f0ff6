"""The runs of a book: a cell is one method with one model on one split of a set, in several repetitions.

    OUT/study.json                                    the settings that must not change when the book grows
    OUT/runs/MODEL/SET-SPLIT/METHOD/REPETITION/       a study (see study.py): tune/ and the run folder 0/

A repetition is a complete tuning with its own search seed, and one training of its choice with its own seed. Those of a
method are independent and alike, so a test over them sees the noise of tuning and that of training. Repetitions are
ordinary tasks of worker processes. A finished run keeps its results and not its model. Running a book again goes on
where the last call ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from sparring.core import files, workers
from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.partition import drawn_blocks
from sparring.core.workers import Ended, Failure, Listener, Task
from sparring.data.fingerprints import fingerprint
from sparring.data.interactions import Interactions, Split
from sparring.data.public_sets import PUBLIC_SETS, load_set
from sparring.data.reading import read
from sparring.data.splits import split
from sparring.data.synthetic_world import named_world
from sparring.experiments import study
from sparring.experiments.book.plan import SOLVED, BookMethod, BookSet, Plan
from sparring.experiments.diagnose.profile import profile
from sparring.experiments.search_space import space
from sparring.experiments.study import Dataset, FinishedRun, Method, Study, Training, finished
from sparring.recipes import finding, settings
from sparring.recipes.run import Run
from sparring.recipes.setup import SETTINGS, Setup
from sparring.training.fitting import METRICS
from sparring.training.step import sample_steps

SHIFT = 1_000  # of the seeds of a repeated method
VALID, TEST = 0.1, 0.2


@dataclass(frozen=True)
class Cell:
    """A method with a model on a split of a set."""

    where: BookSet
    split: str
    model: str
    method: BookMethod

    @property
    def chapter(self) -> str:
        return f"{self.where.name}-{self.split}"

    @property
    def name(self) -> str:
        return f"{self.where.name} {self.split} {self.model} {self.method.name}"


@dataclass(frozen=True)
class Book:
    """A plan, the folder of its runs and pages, and the folder of its data; `changes` are settings of every method."""

    out: Path
    plan: Plan
    root: Path | None = None
    device: str = "auto"
    changes: Mapping[str, object] = field(default_factory=dict)
    plan_file: Path | None = None  # for commands; the project's own unless given

    @cached_property
    def cells(self) -> list[Cell]:
        """All cells, the most important first: every method on one split of one set, then the next."""
        return [
            Cell(where, how, model, method)
            for where in self.plan.sets.values()
            for how in where.splits
            for model in (SOLVED, *self.plan.models)
            for method in self.plan.methods.values()
            if model in self.plan.models_of(method, where)
        ]

    def study(self, cell: Cell) -> Study:
        """The study of a cell, whose methods are its repetitions."""
        names = tuple(dict.fromkeys((*METRICS, *(metric.split("@")[0] for metric in self.plan.metrics))))
        return Study(
            self.out / "runs" / cell.model,
            (self.dataset(cell),),
            {cell.chapter: [self.method(cell, r) for r in self.repetitions(cell)]},
            (0,),  # the shift of a method is the seed of its repetition
            Training(self.base(cell), metrics=names, device=self.device, results_only=True),
            self.plan.trials,
            design=self.plan.design,
            rungs=self.plan.rungs_of(cell.where, cell.model),
        )

    def base(self, cell: Cell) -> Setup:
        return self.plan.base(cell.model, cell.where)

    def dataset(self, cell: Cell) -> Dataset:
        place = place_of(cell.where, self.root)
        how = {"how": cell.split, "valid": VALID, "test": TEST, "seed": 0}
        measure = partial(_measure, commit(), place)
        parts, source = partial(_parts, place, how), partial(_source, place, how, list(self.plan.cutoffs))
        return Dataset(cell.chapter, parts, source, self.plan.cutoffs, measure)

    def method(self, cell: Cell, repetition: int = 0) -> Method:
        """The method of a cell in a repetition, whose number is the seed of its search and of its training."""
        own = cell.method
        changed = study.known_settings(own.recipe, {**own.settings, **self.changes})
        seed = repetition + (SHIFT if own.repeats else 0)
        return Method(own.name, own.recipe, changed, f"{own.name.replace(' ', '-')}/{repetition}", seed, own.tau_unit)

    def repetitions(self, cell: Cell) -> range:
        """The repetitions of a cell: one of a closed form with nothing to tune, since others would be equal."""
        setup = settings.own_setup(finding.find(cell.method.recipe))
        closed = setup.training.optimizer == "solver" and setup.training.epochs == 1
        equal = closed and not space(cell.method.recipe, self.method(cell).settings, self.base(cell))
        return range(1 if equal else self.plan.repetitions)

    def folder(self, cell: Cell, repetition: int) -> Path:
        """The run folder of a repetition."""
        return self.out / "runs" / cell.model / cell.chapter / self.method(cell, repetition).folder / "0"

    def runs(self, cell: Cell) -> list[FinishedRun]:
        """The finished runs of a cell, by repetition."""
        folders = (self.folder(cell, repetition) for repetition in self.repetitions(cell))
        return [FinishedRun(folder) for folder in folders if finished(folder)]

    def done(self, cell: Cell) -> bool:
        return len(self.runs(cell)) == len(self.repetitions(cell))

    @cached_property
    def defaults(self) -> dict[str, dict[str, Any]]:
        """The resolved settings of every method with every model before tuning, by "MODEL METHOD", and their digest."""
        return {
            f"{cell.model} {cell.method.name}": _described(self.plan, cell, self.method(cell)) for cell in self.cells
        }


def _described(plan: Plan, cell: Cell, method: Method) -> dict[str, Any]:
    recipe = finding.find(method.recipe)
    setup, arguments = settings.resolve(recipe, method.settings, plan.base(cell.model))
    own = {name: default for name, (_, default) in settings.own_arguments(recipe).items()}
    values = {**{SETTINGS[name].path: value for name, value in setup.flat().items()}, **own, **arguments}
    values = json.loads(json.dumps({name: values[name] for name in sorted(values)}, default=repr))
    digest = hashlib.blake2b(json.dumps(values).encode(), digest_size=8).hexdigest()
    return {"recipe": method.recipe, "digest": digest, "settings": values}


def stale(made: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The differences between the defaults that a book was made with and those of now, one line for each method.

    stale(json.loads(Path("book/book.json").read_text())["defaults"], book.defaults)
    """
    lines = []
    for name, before in made.items():
        after = now.get(name)
        if after is None:
            lines.append(f"{name}: the plan no longer has it")
        elif before["digest"] != after["digest"]:
            old, new = before["settings"], after["settings"]
            changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            lines.append(f"{name}: " + ", ".join(f"{key}={old.get(key)}, now {new.get(key)}" for key in changed))
    return lines


# Data


def place_of(where: BookSet, root: Path | None) -> str:
    """The place of a set's data: a folder of the data root, a world, or the name of a public set."""
    if root is not None and (root / where.place).exists():
        return str((root / where.place).resolve())
    return where.place


def absent(where: BookSet, root: Path | None) -> str:
    """Why a set cannot be read here; "" if it can."""
    place = place_of(where, root)
    if place.startswith("world:") or place in ("demo", *PUBLIC_SETS) or Path(place).is_absolute():
        return ""
    return f"{where.name}: no folder {where.place} in {root}" if root else f"{where.name}: no data root is given"


def available(plan: Plan, root: Path | None, named: bool) -> tuple[Plan, list[str]]:
    """The plan without the sets that cannot be read here, and the reasons; an error if the sets were `named`."""
    reasons = [why for each in plan.sets.values() if (why := absent(each, root))]
    if reasons and (named or len(reasons) == len(plan.sets)):
        raise UserError(f"{reasons[0]}: name the folder of data sets with --data-root, or set SPARRING_DATA")
    return replace(plan, sets={name: each for name, each in plan.sets.items() if not absent(each, root)}), reasons


def default_root() -> Path | None:
    """The folder of data sets that the environment variable SPARRING_DATA names."""
    named = os.environ.get("SPARRING_DATA")
    return Path(named) if named else None


def _read(place: str) -> Interactions:
    if place.startswith("world:"):
        return named_world(place).interactions
    return read(place) if Path(place).is_absolute() else load_set(place)


def _parts(place: str, how: Mapping[str, Any], seed: int) -> Split:
    """The parts of a set, the same for every seed."""
    return split(_read(place), **how)


def _source(place: str, how: Mapping[str, Any], k: list[int], seed: int) -> dict[str, Any]:
    return {"data": place, "columns": {}, "split": dict(how), "fingerprint": fingerprint(_read(place)), "k": k}


# Measures


def _measure(made_by: str, place: str, run: Run, parts: Split, device: str) -> dict[str, Any]:
    world = named_world(place) if place.startswith("world:") else None
    return {"commit": made_by, "negatives": profile(run, parts, world=world), **candidates(run, parts)}


def candidates(run: Run, parts: Split) -> dict[str, float]:
    """The candidates in the loss of a query, and the share of the catalogue among those of all queries of a step.

    A method that keeps the hardest of its draws counts those that it keeps. Nothing for a solver, which draws none.
    """
    if run.solver is not None:
        return {}
    with torch.no_grad():
        _, step, outcome = next(iter(sample_steps(run, parts)))
        blocks = [block for block, _ in drawn_blocks(step, outcome)]
    ids = torch.cat([block.ids.flatten().long() for block in blocks])
    distinct = len(ids[ids >= 0].unique())
    return {
        "candidates": float(sum(block.ids.shape[-1] for block in blocks)),
        "catalogue_share": distinct / parts.train.n_items,
    }


@cache
def commit() -> str:
    """The commit of the source that runs, with a + if it was changed since; outside its repository the version."""
    from sparring import __version__

    try:
        _git("ls-files", "--error-unmatch", "__init__.py")  # the repository may be another, around an installed package
        return _git("rev-parse", "HEAD")[:12] + ("+" if _git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return f"of version {__version__}"


def _git(*words: str) -> str:
    folder = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True)  # noqa: S603, S607
    return done.stdout.strip()


# Running


def check(book: Book) -> None:
    """Raise before any training if settings are invalid, or the folder holds another study."""
    for cell in book.cells:
        ends = [0, *(epochs for epochs, kept in book.plan.rungs_of(cell.where, cell.model) if kept < book.plan.trials)]
        setup = settings.resolve(finding.find(cell.method.recipe), book.method(cell).settings, book.base(cell))[0]
        every, last = setup.validation.eval_every, setup.training.epochs_on()  # the last epoch is always validated
        if any(high < last and high - low < every for low, high in pairwise(ends)):
            rungs = f"the rungs at epoch {', '.join(map(str, ends[1:]))}"
            raise UserError(f"{cell.name} validates every {every} epochs (eval_every), too rarely for {rungs}")
    if not book.cells:
        raise UserError("no method of this book has one of its models: choose others with --models or --methods")
    asked = {name: value for name, value in book.changes.items() if not _any_has(book, name)}
    if asked:
        raise UserError(f"no method of this book has the setting {next(iter(asked))!r}: `sparring recipes` lists them")
    made = book.out / "book.json"
    before = files.read_json(made).get("defaults", {}) if made.is_file() else {}
    changed = stale({name: each for name, each in before.items() if name in book.defaults}, book.defaults)
    if changed:
        raise UserError(f"{book.out} was made with other defaults: {changed[0]}; choose another folder")
    study.check_folder(
        book.out,
        "book",
        {name: getattr(book.plan, name) for name in ("trials", "design", "rungs", "metric")},
        {
            "set of defaults": {name: each["digest"] for name, each in book.defaults.items()},
            "choice of rungs and settings": {
                name: [book.plan.rungs_of(each), each.settings] for name, each in book.plan.sets.items()
            },
        },
        {"repetitions": book.plan.repetitions},
    )


def _any_has(book: Book, name: str) -> bool:
    return any(study.known_settings(cell.method.recipe, {name: book.changes[name]}) for cell in book.cells)


def run(
    book: Book, jobs: int = 1, seconds: float | None = None, listener: Listener | None = None
) -> tuple[list[Failure], list[Cell]]:
    """Tune and train the repetitions that are not done, `jobs` at once; the failures, and the cells that are left.

    After `seconds` running repetitions are ended; their finished trials and epochs are kept for the next call.

        failures, left = run(Book(Path("book"), read_plan(), Path("data")), jobs=2, seconds=3600)
    """
    listener, began = listener or Listener(), time.monotonic()
    check(book)
    every = [(cell, repetition) for cell in book.cells for repetition in book.repetitions(cell)]
    waiting = {f"{cell.name} {r}": (cell, r) for cell, r in every if not finished(book.folder(cell, r))}
    listener.begin("repetitions", len(every) - len(waiting), len(every))
    used = Counter(dict.fromkeys(_devices(book.device), 0))
    taken: dict[str, str] = {}
    failures: list[Failure] = []
    deadline = None if seconds is None else began + seconds

    def tasks() -> Iterator[Task]:
        for name, (cell, repetition) in waiting.items():
            device = min(used, key=lambda name: used[name])
            used[device] += 1
            taken[name] = device
            own = replace(book, device=device).study(cell)
            yield Task(name, study.run_cell, (own, book.dataset(cell), book.method(cell, repetition)))

    for event in workers.run(tasks(), jobs, 1 if jobs > 1 else None, deadline):
        if not isinstance(event, Ended):
            listener.said(event.name, event.message)
            continue
        used[taken[event.name]] -= 1
        if event.error is not None:
            cell, repetition = waiting[event.name]
            method = f"{cell.method.name} x {cell.model}"
            failures.append(Failure(cell.chapter, method, f"repetition {repetition}", event.error))
        listener.ended(event.name, event.error)
    return failures, [cell for cell in book.cells if not book.done(cell)]


def _devices(device: str) -> list[str]:
    """The devices that cells are spread over: all GPUs unless one is named."""
    where = pick_device(device)
    several = where.type == "cuda" and where.index is None
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] if several else [device]
