"""A reproduction: an experiment of a paper on some data, as a study of ordinary run folders (see study.py).

    OUT/study.json, OUT/DATA/METHOD/...    the study; measured.json also has the figures that the experiment measures
    OUT/DATA/codes/                        clusters of the items, learned once, where methods need them
    OUT/table.*                            ours beside the published figures, as md, csv, tex and json
    OUT/report.html, OUT/figures/          one page with everything, and its figures as svg and png

The experiment's SplitProtocol defines the split. XIR has no validation part and keeps the last epoch; each seed has its
own split, 80 % of each query's items for training and 20 % for testing, so the deviation over seeds covers splits too.
ESANS' tables keep one split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, get_type_hints

from sparring.core import files
from sparring.core.devices import pick_device
from sparring.core.errors import UserError, did_you_mean
from sparring.core.workers import Failure, Listener, Say, Task, Tasks, perform
from sparring.data.interactions import Interactions, Split
from sparring.data.modalities.sources import load_modalities
from sparring.data.splits import split
from sparring.experiments import study
from sparring.experiments.papers.printed import Counts, published_counts
from sparring.experiments.report.clustering import labels_of, summary
from sparring.experiments.report.html import Section
from sparring.experiments.report.tables import Row, Table
from sparring.experiments.study import Dataset, FinishedRun, Measure, Method, Study, Training, read_json
from sparring.models.clusters import MSAC, ROBUST, Codes, MSACSettings
from sparring.recipes import PAPER
from sparring.recipes.setup import Setup, flat_name, parse
from sparring.training.trained import run_vectors

METRICS = ("ndcg_xir_release", "recall_xir_release", "ndcg", "recall")
CUTOFFS = (10, 20, 50)
MODALITY_NOTES = "modalities.json"  # beside the codes: the sources of the modalities, and the request
ITEMS_PER_CLUSTER = 10  # at least, on average: twice the 5 that ESANS draws from a cluster


@dataclass(frozen=True)
class SplitProtocol:
    """The split and the metrics of an experiment; by default those of XIR."""

    how: str = "random"
    valid: float = 0.0  # of the training part
    test: float = 0.2
    one_split: bool = False  # for all seeds, so that values are paired by query
    metrics: tuple[str, ...] = METRICS
    cutoffs: tuple[int, ...] = CUTOFFS

    def arguments(self, seed: int) -> dict[str, Any]:
        """The arguments of `split` for a seed."""
        return {"how": self.how, "valid": self.valid, "test": self.test, "seed": 0 if self.one_split else seed}

    def split(self, data: Interactions, seed: int) -> Split:
        return split(data, **self.arguments(seed))

    def source(self, source: dict[str, Any], cutoffs: list[int], seed: int) -> dict[str, Any]:
        """The source of the data for run.json."""
        return {**source, "split": self.arguments(seed), "k": cutoffs}

    def within(self, data: Interactions) -> list[int]:
        """The cutoffs that do not exceed the catalogue."""
        return [k for k in self.cutoffs if k <= data.n_items] or [data.n_items]


@dataclass(frozen=True)
class ItemModalities:
    """The modalities of a data set's items (NAME -> SPEC), and the folder for the codes learned from them."""

    folder: Path
    specs: Mapping[str, str]
    text_encoder: str = "minilm"
    cache: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)  # of MSAC
    category: str = "category"  # column of the item table
    recipe: str | None = None  # of the run of behaviour:RUN, as in `sparring.load`
    trust: bool = False

    @property
    def request(self) -> dict[str, Any]:
        """The part that decides the codes, apart from the interactions."""
        return {"specs": dict(self.specs), "settings": dict(self.settings), "text_encoder": self.text_encoder}


@dataclass(frozen=True)
class Clustering:
    """Codes that a method needs: clusters of the items by modalities; secondary=False joins the cells of a cluster."""

    modalities: tuple[str, ...]
    k_primary: int
    k_secondary: int
    secondary: bool = True

    @property
    def name(self) -> str:
        return f"{'+'.join(self.modalities)}-{self.k_primary}x{self.k_secondary}{'' if self.secondary else '-primary'}"

    def path(self, modalities: ItemModalities) -> Path:
        return modalities.folder / f"{self.name}.safetensors"


@dataclass(frozen=True)
class PaperDataset:
    """A data set of a reproduction; `known_as` is the paper's name for data with the same counts, "" if it has none."""

    name: str
    data: Interactions
    known_as: str = ""
    source: dict[str, Any] = field(default_factory=dict)  # for run.json
    modalities: ItemModalities | None = None

    @property
    def shown(self) -> str:
        return self.known_as or self.name


@dataclass(frozen=True)
class PaperMethod(Method):
    """A row of a paper's table, by its name in the paper."""

    clustering: Clustering | None = None  # the codes that its settings name


@dataclass(frozen=True)
class Results:
    """The findings of an experiment: the main table, other tables by file name, sentences, and sections of the page."""

    table: Table
    findings: Sequence[str]
    sections: Sequence[Section]
    others: Mapping[str, Table] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper: the methods it trains on a data set, and how their runs become tables and figures.

    `methods` raises Unsuited for data that it cannot use. `chosen` are settings that the experiment varies itself.
    `curve` measures the test part during training; `after` measures a finished model, one at a time; `alone` trains one
    run at a time, for times. `tuning` says what --tune does: tune each method, or only the first, whose settings the
    others use; `taus` are among the first trials.
    """

    name: str
    line: str  # a description in one line
    source: str  # the paper, and the place in it
    methods: Callable[[PaperDataset, Mapping[str, object]], Sequence[PaperMethod]]  # for a data set and --set values
    results: Callable[[Reproduction], Results]
    notes: Sequence[str] = ()
    setup: Setup = PAPER
    chosen: Sequence[str] = ()
    curve: bool = False
    measure: Measure | None = None  # of the run as training left it
    after: Measure | None = None
    alone: bool = False
    protocol: SplitProtocol = SplitProtocol()
    tuning: Literal["none", "each", "first"] = "none"
    taus: Sequence[float] = ()
    paper: str = "xir"  # the file of published figures, which knows the paper's data sets

    def known_as(self, counts: Counts) -> str:
        """The paper's data set with exactly these counts of queries, items and interactions; "" if there is none."""
        return next((name for name, printed in published_counts(self.paper).items() if printed == counts), "")


class Unsuited(UserError):
    """An experiment cannot be run on some data."""


@dataclass(frozen=True)
class Reproduction:
    """An experiment on data sets with seeds; `settings` apply to every method that has them.

    `only` names the methods to train; the tables have all, with the runs that are there.

    Reproduction(experiment, Path("out"), (dataset,), seeds=(10, 20), settings={"epochs": 2})
    """

    experiment: Experiment
    out: Path
    data: tuple[PaperDataset, ...]
    seeds: tuple[int, ...] = (10, 20, 30, 40, 50)
    settings: dict[str, object] = field(default_factory=dict)
    device: str = "auto"
    command: str = ""
    failures: list[Failure] = field(default_factory=list)
    trials: int = 0  # of tuning
    only: tuple[str, ...] = ()  # by name or folder; empty: all

    @cached_property
    def _suited(self) -> tuple[dict[str, tuple[PaperMethod, ...]], dict[str, str]]:
        methods: dict[str, tuple[PaperMethod, ...]] = {}
        reasons = {}
        asked = {flat_name(name): value for name, value in self.settings.items()}
        for dataset in self.data:
            try:
                methods[dataset.name] = tuple(map(self._set, self.experiment.methods(dataset, asked)))
            except Unsuited as error:
                methods[dataset.name], reasons[dataset.name] = (), str(error)
        return methods, reasons

    @property
    def methods(self) -> dict[str, tuple[PaperMethod, ...]]:
        """The methods of each data set, with `settings` applied; none where the data is unsuited."""
        return self._suited[0]

    @property
    def unsuited(self) -> dict[str, str]:
        """The reasons why some data sets cannot be used."""
        return self._suited[1]

    def _set(self, method: PaperMethod) -> PaperMethod:
        asked = study.known_settings(method.recipe, self.settings)
        return dataclasses.replace(method, settings={**method.settings, **asked})

    @property
    def suited(self) -> list[PaperDataset]:
        return [dataset for dataset in self.data if self.methods[dataset.name]]

    @cached_property
    def study(self) -> Study:
        experiment, protocol = self.experiment, self.experiment.protocol
        curve = METRICS if experiment.curve else ()
        training = Training(None, experiment.setup, protocol.metrics, stages=True, curve=curve, device=self.device)
        data = []
        for dataset in self.data:
            cutoffs = self.cutoffs(dataset)
            parts, source = partial(protocol.split, dataset.data), partial(protocol.source, dataset.source, cutoffs)
            data.append(Dataset(dataset.name, parts, source, cutoffs, experiment.measure))
        return Study(
            self.out,
            data,
            self.methods,
            self.seeds,
            training,
            self.trials,
            "each" if experiment.tuning == "each" else "first",
            experiment.taus,
            experiment.after,
            experiment.alone,
        )

    @property
    def trained(self) -> dict[str, tuple[PaperMethod, ...]]:
        """The methods of each data set that `only` names."""
        if not self.only:
            return self.methods
        return {
            data: tuple(method for method in methods if {method.name, method.folder} & set(self.only))
            for data, methods in self.methods.items()
        }

    def runs(self, dataset: PaperDataset, method: Method) -> list[FinishedRun]:
        return self.study.runs(dataset.name, method)

    @property
    def caption(self) -> str:
        return f"{self.experiment.line}: {self.experiment.source}"

    def cutoffs(self, dataset: PaperDataset) -> list[int]:
        return self.experiment.protocol.within(dataset.data)

    def measured(self, dataset: PaperDataset, metrics: Sequence[str]) -> list[str]:
        """The metrics of a paper, such as Recall@50, whose cutoffs do not exceed the catalogue."""
        return [metric for metric in metrics if int(metric.split("@")[1]) in self.cutoffs(dataset)]

    def error(self, dataset: PaperDataset, method: Method) -> str:
        """Why a method has no finished run."""
        own = (dataset.name, method.name)
        errors = [failure.error for failure in self.failures if (failure.data, failure.recipe) == own]
        return f"failed: {errors[0]}" if errors else "no run has finished"


def seeds(n: int) -> tuple[int, ...]:
    """The first n seeds of the XIR release: 10, 20, 30, ..."""
    return tuple(range(10, 10 * n + 1, 10))


def check(plan: Reproduction) -> None:
    """Raise before any training if something cannot be run, or the folder holds another study."""
    experiment = plan.experiment
    for dataset in plan.data:
        if sum(dataset.shown == other.shown for other in plan.data) > 1:
            raise UserError(f"two of the data sets are {dataset.shown}: give each once")
    for name in plan.settings:
        if flat_name(name) in experiment.chosen:
            raise UserError(f"{name} cannot be set: {experiment.name} sets it itself")
    methods = [method for every in plan.methods.values() for method in every]
    study.check_settings(plan.settings, methods, experiment.name, "10, 20, ...", experiment.setup)
    known = {name: method for method in methods for name in (method.name, method.folder)}
    for name in plan.only:
        if name not in known:
            there = ", ".join(dict.fromkeys(method.folder for method in methods))
            raise UserError(f"{experiment.name} has no method {name!r}{did_you_mean(name, known)}; it has {there}")
    if plan.only and plan.trials:
        raise UserError("--methods and --tune exclude each other: trials of one method may decide the settings of all")
    if plan.trials and experiment.tuning == "none":
        tunable = "--tune is for `sparring compare` and the quality of ESANS"
        raise UserError(f"{experiment.name} keeps the settings of its paper: {tunable}")
    data = {dataset.name: dataset.source or _sizes(dataset.data) for dataset in plan.data}
    requests = {dataset.name: dataset.modalities.request for dataset in plan.data if dataset.modalities is not None}
    study.check_folder(
        plan.out,
        f"reproduction of {experiment.name}",
        {"settings": plan.settings, "trials": plan.trials},
        {"version": data, "set of modalities": requests},
        {"seeds": plan.seeds},
    )


def _sizes(data: Interactions) -> dict[str, int]:
    return {"queries": data.n_queries, "items": data.n_items, "interactions": len(data)}


def train(plan: Reproduction, jobs: int = 1, listener: Listener | None = None) -> list[Failure]:
    """Learn codes, tune, train and measure unfinished runs; return the failures, also kept in plan.failures."""
    listener = listener or Listener()
    check(plan)
    plan.failures.extend(learn_codes(plan, jobs, listener))
    plan.failures.extend(study.run(dataclasses.replace(plan.study, methods=plan.trained), jobs, listener))
    return plan.failures


def most_clusters(dataset: PaperDataset) -> int:
    """The number of primary clusters that the items of a data set allow."""
    return max(2, dataset.data.n_items // ITEMS_PER_CLUSTER)


def clusterings(
    plan: Reproduction, methods: Mapping[str, Sequence[PaperMethod]]
) -> list[tuple[PaperDataset, ItemModalities, Clustering]]:
    """Every clustering that a method names, once per data set."""
    named = {
        (dataset.name, method.clustering.name): (dataset, dataset.modalities, method.clustering)
        for dataset in plan.data
        for method in methods[dataset.name]
        if method.clustering is not None and dataset.modalities is not None
    }
    return list(named.values())


def learn_codes(plan: Reproduction, jobs: int, listener: Listener) -> list[Failure]:
    """Learn the codes that are missing; return the failures.

    The modalities are encoded here, once; worker processes read them from the cache. A folder that several tables share
    must hold codes of the same request.
    """
    needed = clusterings(plan, plan.trained)
    missing: Tasks = {}
    protocol = plan.experiment.protocol
    for dataset, modalities, clustering in needed:
        notes = modalities.folder / MODALITY_NOTES
        if notes.is_file() and read_json(notes).get("asked", {}) != modalities.request:
            held = f"{notes.parent} holds codes of other modalities or settings"
            raise UserError(f"{held}: choose another folder for --codes")
        if not clustering.path(modalities).is_file():
            work = (dataset, clustering, protocol, plan.device)
            name = f"{dataset.name} clusters {clustering.name}"
            missing[dataset.name, clustering.name, "clusters"] = Task(name, _learn_one, work)
    if not missing:
        return []
    for dataset in plan.data:
        if dataset.modalities is not None and any(name == dataset.name for name, _, _ in missing):
            encoded = _modalities(dataset, protocol, tuple(dataset.modalities.specs), plan.device)
            notes = dataset.modalities.folder / MODALITY_NOTES
            files.write_json(notes, {"notes": encoded.notes, "asked": dataset.modalities.request})
    return perform(missing, len(needed), "clusters", jobs, listener)


def cluster_settings(modalities: ItemModalities, clustering: Clustering) -> MSACSettings:
    """The robust settings of MSAC with the requested changes."""
    kinds = get_type_hints(MSACSettings)
    for name in modalities.settings:
        if name not in kinds or name in ("k_primary", "k_secondary"):
            raise UserError(f"no setting of the clusters: msac.{name}{did_you_mean(name, kinds)}")
    changes: dict[str, Any] = {name: parse(name, value, kinds[name]) for name, value in modalities.settings.items()}
    changes |= {"k_primary": clustering.k_primary, "k_secondary": clustering.k_secondary}
    return dataclasses.replace(ROBUST, **changes)


def _modalities(dataset: PaperDataset, protocol: SplitProtocol, names: Sequence[str], device: str) -> Any:
    source = dataset.modalities
    assert source is not None
    specs, parts = {name: source.specs[name] for name in names}, protocol.split(dataset.data, 0)
    encoder, cache = source.text_encoder, source.cache
    vectors = partial(run_vectors, recipe=source.recipe, trust=source.trust)
    return load_modalities(specs, parts, text_encoder=encoder, cache=cache, device=device, run_vectors=vectors)


def _learn_one(say: Say, dataset: PaperDataset, clustering: Clustering, protocol: SplitProtocol, device: str) -> None:
    assert dataset.modalities is not None
    modalities = _modalities(dataset, protocol, clustering.modalities, device)
    msac = MSAC(dict(modalities.widths), cluster_settings(dataset.modalities, clustering), pick_device(device))
    codes = msac.fit(modalities, dataset.data.item_ids)
    path = clustering.path(dataset.modalities)
    path.parent.mkdir(parents=True, exist_ok=True)
    (codes if clustering.secondary else codes.without_secondary()).save(path)


def cluster_rows(plan: Reproduction) -> list[Row]:
    """One row per learned clustering: how many clusters are used, how large and how pure they are."""
    rows: list[Row] = []
    for dataset, modalities, clustering in clusterings(plan, plan.methods):
        path, table = clustering.path(modalities), dataset.data.item_table
        if path.is_file():
            known = table is not None and modalities.category in table.columns
            labels = labels_of(dataset.data, modalities.category) if known else None
            measured = summary(Codes.load(path).aligned(dataset.data.item_ids), labels)
            rows.append({"data": dataset.shown, "modalities": " + ".join(clustering.modalities), **measured})
    return rows
