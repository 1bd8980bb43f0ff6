"""What a reproduction trains: an experiment of a paper on some data, as ordinary run folders that resume.

    OUT/reproduction.json            which experiment, with which settings, on what
    OUT/DATA/METHOD/SEED/            a run folder (see runs.py), and measured.json: the device, and what the experiment measures besides
    OUT/DATA/METHOD/tune/            trials.jsonl, where tuned
    OUT/DATA/codes/                  clusters of the items, where methods need them, learned once
    OUT/table.*                      ours beside the published figures, as md, csv, tex and json
    OUT/report.html, OUT/figures/    one page with all of it, and its figures as svg and png

How data is parted is the experiment's Protocol. XIR has no validation part, and the last epoch counts; each seed is a split of its own,
80 % of each query's items to train and 20 % to test, so that the deviation over seeds is over splits too. ESANS' tables keep one split.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sparring.core.errors import UserError
from sparring.core.workers import Failure
from sparring.data.interactions import Interactions, Split
from sparring.data.splits import split
from sparring.experiments.comparison import finished
from sparring.experiments.papers.published import matching
from sparring.experiments.report.html import Section
from sparring.experiments.report.tables import Table
from sparring.recipes import PAPER, finding, settings
from sparring.recipes.run import Run
from sparring.recipes.setup import Setup

METRICS = ("ndcg_xir_release", "recall_xir_release", "ndcg", "recall")
CUTOFFS = (10, 20, 50)
Measure = Callable[[Run, Split, str], dict[str, Any]]


@dataclass(frozen=True)
class Protocol:
    """How data is parted, and what is measured; unless told otherwise as XIR does it."""

    how: str = "random"
    valid: float = 0.0  # of the training part
    test: float = 0.2
    one_split: bool = False  # for all seeds, so that values are paired by query
    metrics: tuple[str, ...] = METRICS
    cutoffs: tuple[int, ...] = CUTOFFS

    def recorded(self, seed: int) -> dict[str, Any]:
        """The arguments of `split` for a seed."""
        return {"how": self.how, "valid": self.valid, "test": self.test, "seed": 0 if self.one_split else seed}

    def parts(self, data: Interactions, seed: int) -> Split:
        return split(data, **self.recorded(seed))

    def within(self, data: Interactions) -> list[int]:
        """The cutoffs that the catalogue has items for."""
        return [k for k in self.cutoffs if k <= data.n_items] or [data.n_items]


@dataclass(frozen=True)
class Catalogue:
    """Modalities of the items of a data set as they were asked for (NAME -> SPEC), and the folder for the codes learned from them."""

    folder: Path
    specs: Mapping[str, str]
    text_encoder: str = "minilm"
    cache: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)  # of MSAC
    category: str = "category"  # column of the items


@dataclass(frozen=True)
class Clustering:
    """Codes that a method needs: clusters of the items by some of their modalities; secondary=False joins the cells of a cluster."""

    modalities: tuple[str, ...]
    k_primary: int
    k_secondary: int
    secondary: bool = True

    @property
    def name(self) -> str:
        return f"{'+'.join(self.modalities)}-{self.k_primary}x{self.k_secondary}{'' if self.secondary else '-primary'}"

    def path(self, catalogue: Catalogue) -> Path:
        return catalogue.folder / f"{self.name}.safetensors"


@dataclass(frozen=True)
class Given:
    """A data set of a reproduction: `known_as` is the paper's name for the data with the same counts, "" where it has none."""

    name: str
    data: Interactions
    known_as: str = ""
    source: dict[str, Any] = field(default_factory=dict)  # for run.json
    catalogue: Catalogue | None = None

    @property
    def shown(self) -> str:
        return self.known_as or self.name


@dataclass(frozen=True)
class Method:
    """A row of a table: its name in the paper, and the recipe with the settings that make it."""

    name: str
    recipe: str
    settings: Mapping[str, object] = field(default_factory=dict)
    clustering: Clustering | None = None  # the codes that its settings name

    @property
    def folder(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower().replace("=-", " minus ")).strip("-")


@dataclass(frozen=True)
class Results:
    """What an experiment found: the main table and others by file name, what to say first, and the sections of its page."""

    table: Table
    findings: Sequence[str]
    sections: Sequence[Section]
    others: Mapping[str, Table] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper: the methods it trains on a data set, and how their folders become tables and figures.

    `methods` raises Unsuited for data it cannot use. `chosen` are settings that the experiment varies itself. `curve` measures the test
    part during training; `after` measures a finished model, one at a time; `alone` trains one at a time, for times. `tuning` says what
    --tune does: each method by itself, or only the first, whose settings the others take over; with `taus` among its first trials.
    """

    name: str
    line: str  # what it is, in one line
    source: str  # paper, and where in it
    methods: Callable[[Given, Mapping[str, object]], Sequence[Method]]  # of a data set, and what --set asks for
    results: Callable[[Plan], Results]
    notes: Sequence[str] = ()
    setup: Setup = PAPER
    chosen: Sequence[str] = ()
    curve: bool = False
    measure: Measure | None = None  # of the run as training left it
    after: Measure | None = None
    alone: bool = False
    protocol: Protocol = Protocol()
    tuning: Literal["none", "each", "first"] = "none"
    taus: Sequence[float] = ()
    known: Callable[[tuple[int, int, int]], str] = matching  # the paper's name for data with these counts


class Unsuited(UserError):
    """Why an experiment cannot be run on some data."""


@dataclass(frozen=True)
class Plan:
    """An experiment on data sets with seeds; `settings` are those of the command line, for the recipes that know them.

    Plan(experiment, Path("out"), (given,), seeds=(10, 20), settings={"epochs": 2})
    """

    experiment: Experiment
    out: Path
    data: tuple[Given, ...]
    seeds: tuple[int, ...] = (10, 20, 30, 40, 50)
    settings: dict[str, object] = field(default_factory=dict)
    device: str = "auto"
    command: str = ""
    failures: list[Failure] = field(default_factory=list)
    trials: int = 0  # of tuning

    @cached_property
    def methods(self) -> dict[str, tuple[Method, ...]]:
        """The methods of each data set, with the settings of the command line in; none where the data is not suited."""
        found = {}
        for given in self.data:
            try:
                found[given.name] = tuple(map(self._set, self.experiment.methods(given, self.settings)))
            except Unsuited:
                found[given.name] = ()
        return found

    def unsuited(self) -> dict[str, str]:
        """Why some of the data cannot be used."""
        reasons = {}
        for given in self.data:
            try:
                self.experiment.methods(given, self.settings)
            except Unsuited as error:
                reasons[given.name] = str(error)
        return reasons

    def _set(self, method: Method) -> Method:
        return dataclasses.replace(
            method, settings={**method.settings, **settings.known(finding.find(method.recipe), self.settings)}
        )

    def folder(self, given: Given, method: Method, seed: int) -> Path:
        return self.out / given.name / method.folder / str(seed)

    def folders(self, given: Given, method: Method) -> list[Path]:
        """The finished runs of a method, by seed."""
        return [folder for seed in self.seeds if finished(folder := self.folder(given, method, seed))]

    def tuned_by(self, given: Given, method: Method) -> Method:
        """The method whose trials decide the settings of this one."""
        return method if self.experiment.tuning == "each" else self.methods[given.name][0]

    def tuned_methods(self, given: Given) -> list[Method]:
        """The methods of a data set that have trials of their own."""
        return list(
            {by.name: by for by in (self.tuned_by(given, method) for method in self.methods[given.name])}.values()
        )

    def tuned(self, given: Given, method: Method) -> dict[str, Any]:
        """What tuning found best for a method, but for what the experiment sets itself; nothing where there was none."""
        from sparring.experiments.tuning import best, read_trials

        if not self.trials:
            return {}
        by = self.tuned_by(given, method)
        found = best(by.name, read_trials(self.tuning_folder(given, by) / "trials.jsonl")[: self.trials]).settings
        return {name: value for name, value in found.items() if name not in method.settings}

    def tuning_folder(self, given: Given, method: Method) -> Path:
        return self.out / given.name / method.folder / "tune"

    @property
    def caption(self) -> str:
        return f"{self.experiment.line}: {self.experiment.source}"

    def cutoffs(self, given: Given) -> list[int]:
        return self.experiment.protocol.within(given.data)

    def measured(self, given: Given, metrics: Sequence[str]) -> list[str]:
        """Those metrics of a paper, such as Recall@50, whose cutoffs the catalogue has items for."""
        return [metric for metric in metrics if int(metric.split("@")[1]) in self.cutoffs(given)]

    def error(self, given: Given, method: Method) -> str:
        """Why a method has no finished run."""
        errors = [bad.error for bad in self.failures if (bad.data, bad.recipe) == (given.name, method.name)]
        return f"failed: {errors[0]}" if errors else "no run has ended"


def seeds(n: int) -> tuple[int, ...]:
    """The first n seeds of the XIR release: 10, 20, 30, ..."""
    return tuple(10 * (at + 1) for at in range(n))
