"""A fair comparison: recipes x models x seeds x data on the same split, optionally after equal tuning.

    OUT/study.json, OUT/DATA/RECIPE/...    the study (see study.py); measured.json also profiles the negatives
    OUT/DATA/baselines.json                metrics of popularity and the best cheap baseline, where asked for
    OUT/quality.*, OUT/negatives.*         the tables of comparison_tables.py, as md, csv, tex and json
    OUT/report.html, OUT/figures/          one page with everything, and its figures as svg and png

Every recipe and seed has the same split, so values are paired by query and by seed. Recipes and seeds may be added.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sparring.core import files
from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.workers import Failure, Listener
from sparring.data.interactions import Ids, Interactions, Split
from sparring.data.synthetic_world import SyntheticWorld
from sparring.evaluation.metrics import LIST_METRICS, parse
from sparring.evaluation.ranking import Evaluation, evaluate
from sparring.evaluation.tfidf import TfIdf
from sparring.experiments import study
from sparring.experiments.diagnose.profile import profile
from sparring.experiments.study import Dataset, Method, Study, Training
from sparring.models import finding as model_finding
from sparring.models.build import check_described
from sparring.models.inputs import Inputs
from sparring.models.named import Model
from sparring.models.retriever import Retriever
from sparring.recipes import finding, settings
from sparring.recipes.finding import Recipe, source_digest
from sparring.recipes.run import Run
from sparring.recipes.setup import Setup, flat
from sparring.training.baselines import baselines, text_columns
from sparring.training.fitting import METRICS
from sparring.training.step import check_rows

BASELINES = "baselines.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComparedData:
    """A data set of a comparison: its split, its source for run.json, and the true preferences where they are known."""

    name: str
    split: Split
    source: dict[str, Any] = field(default_factory=dict)
    world: SyntheticWorld | None = None


@dataclass(frozen=True)
class Comparison:
    """Recipes to compare.

    `base` gives all of them the same towers and optimiser; `shared` are settings for every recipe that has them.

    A recipe is a name (see finding.find) or a function that worker processes can import; so is a model. With `models`,
    every recipe that is trained by steps is compared with each of them, in rows named RECIPE x MODEL.

        Comparison(Path("compare/a"), (ComparedData("demo", split),), ("uns", "ssl_pop", my_recipe), seeds=5)
    """

    out: Path
    data: tuple[ComparedData, ...]
    recipes: tuple[str | Recipe, ...]
    seeds: int = 5
    baseline: str | Recipe = ""  # by default uns if it is compared, else the first recipe
    metrics: tuple[str, ...] = ("recall@20", "ndcg@20")
    base: Setup | None = None
    shared: dict[str, object] = field(default_factory=dict)
    trials: int = 0
    device: str = "auto"
    models: tuple[str | Model, ...] = ()
    refit: bool = False  # every run is trained again on train and valid, for the epochs that validation chose
    cheap_baselines: bool = False  # measure popularity and the best cheap baseline too (training/baselines.py)

    def __post_init__(self) -> None:
        _ = self.methods  # an unknown recipe, or two of one name, is an error here

    @cached_property
    def methods(self) -> dict[str, Method]:
        """The recipes by their short names, which tables and folders use, with the shared settings that they have."""
        methods: dict[str, Method] = {}
        for recipe, model in self._pairs():
            place = finding.lasting(recipe)
            chosen = {} if model is None else {"model": model_finding.lasting(model)}
            name = finding.short(place) + "".join(f" x {model_finding.short(each)}" for each in chosen.values())
            if name in methods:
                same = methods[name].recipe == place
                twice = (
                    f"recipe {name!r} is named twice" if same else f"{methods[name].recipe} and {place} share a name"
                )
                raise UserError(f"{twice}: rename one, or leave it out")
            known = study.known_settings(place, {**self.shared, **chosen})
            methods[name] = Method(name, place, known, name.replace(" x ", "+"))
        return methods

    def _pairs(self) -> Iterator[tuple[str | Recipe, str | Model | None]]:
        """Every recipe with every model; a recipe that is solved has its own."""
        for recipe in self.recipes:
            own = not self.models or settings.is_solved(finding.find(recipe))
            yield from ((recipe, None),) if own else ((recipe, model) for model in self.models)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.methods)

    @property
    def baseline_name(self) -> str:
        """The row that the others are compared with: a row's name, or the first row of a recipe."""
        if isinstance(self.baseline, str) and self.baseline in self.methods:
            return self.baseline
        recipe = finding.named(self.baseline) if self.baseline else "uns"
        rows = [name for name, method in self.methods.items() if method.recipe == recipe]
        if self.baseline:
            return rows[0] if rows else finding.short(recipe)
        return rows[0] if rows else self.names[0]

    @cached_property
    def study(self) -> Study:
        names = (*METRICS, *(metric.split("@")[0] for metric in self.metrics))
        training = Training(self.base, metrics=tuple(dict.fromkeys(names)), device=self.device, refit=self.refit)
        methods = {data.name: tuple(self.methods.values()) for data in self.data}
        data = tuple(self._dataset(data) for data in self.data)
        return Study(self.out, data, methods, range(self.seeds), training, self.trials)

    def _dataset(self, data: ComparedData) -> Dataset:
        measure = partial(_profile, data.world)
        source = partial(_same, data.source)
        return Dataset(data.name, partial(_same, data.split), source, self.cutoffs(data), measure)

    def cutoffs(self, data: ComparedData) -> list[int]:
        """The cutoffs of the compared metrics, and the usual ones that a catalogue allows."""
        usual = [k for k in (10, 20, 50) if k <= data.split.train.n_items]
        return sorted({*cutoffs(self.metrics), *usual})

    def read_baselines(self, data: str) -> dict[str, dict[str, float]]:
        """The metrics of the cheap baselines of a data set, except those that are compared as recipes."""
        path = self.out / data / BASELINES
        measured = study.read_json(path) if self.cheap_baselines and path.is_file() else {}
        compared = {method.recipe for method in self.methods.values()}
        return {name: each["metrics"] for name, each in measured.items() if name not in compared}


def _same(value: Any, seed: int) -> Any:
    return value


def _profile(world: SyntheticWorld | None, run: Run, split: Split, device: str) -> dict[str, Any]:
    return {"negatives": profile(run, split, world=world)}


def check(comparison: Comparison) -> None:
    """Raise before any training if recipes, metrics or data cannot be compared, or the folder holds another study."""
    methods, names = list(comparison.methods.values()), comparison.names
    if comparison.baseline_name not in names:
        raise UserError(
            f"the baseline {comparison.baseline_name!r} is not among the recipes {', '.join(names)}: add it"
        )
    study.check_settings(comparison.shared, methods, "comparison", "0, 1, ...", comparison.base)
    largest = max(cutoffs(comparison.metrics))
    for data in comparison.data:
        if data.split.test is None:
            raise UserError(f"{data.name} has no test part: use --test with a share above 0")
        if (comparison.trials or comparison.refit) and data.split.valid is None:
            need = f"{'tuning' if comparison.trials else 'refit'} needs a validation part, and {data.name} has none"
            raise UserError(f"{need}: use --valid with a larger share")
        if largest > data.split.train.n_items:
            raise UserError(f"cutoff {largest} exceeds the {data.split.train.n_items:,} items of {data.name}")
        _check_inputs(comparison, data.split.train)
    sources = {method.name: _sources(method) for method in methods}
    study.check_folder(
        comparison.out,
        "comparison",
        {
            "setup": None if comparison.base is None else comparison.base.flat(),
            "settings": comparison.shared,
            "trials": comparison.trials,
            "refit": comparison.refit or None,  # missing in folders of earlier versions
        },
        {
            "version or split": {data.name: data.source or _sizes(data.split) for data in comparison.data},
            "source": {name: source for name, source in sources.items() if [name] != source[:1]},  # not our recipes
        },
        {
            "recipes": names,
            "seeds": comparison.seeds,
            "baseline": comparison.baseline_name,
            "metrics": comparison.metrics,
        },
    )


def _check_inputs(comparison: Comparison, train: Interactions) -> None:
    """Raise if the data lacks the order, the columns or the vectors that a method reads."""
    inputs = Inputs(Ids(train.query_ids, train.item_ids, train.query_table, train.item_table))
    read = set()
    for method in comparison.methods.values():
        setup = settings.resolve(finding.find(method.recipe), method.settings, comparison.base)[0]
        check_rows(setup, train)
        model = setup.model
        described = (model.query_features, model.query_vectors, model.item_features, model.item_vectors)
        if described not in read:
            check_described(inputs, model)
        read.add(described)


def _sources(method: Method) -> list[str | None]:
    """The recipe of a method and its model, if one is named, each with the hash of its file."""
    names = [method.recipe, *([str(method.settings["model"])] if "model" in method.settings else [])]
    return [part for name in names for part in (name, source_digest(name))]


def cutoffs(metrics: tuple[str, ...]) -> list[int]:
    """The cutoffs of metrics such as recall@20."""
    numbers = set()
    for metric in metrics:
        name, _, k = metric.partition("@")
        if not k.isdigit() or int(k) < 1:
            raise UserError(f"{metric!r} is not a metric with a cutoff, such as recall@20")
        if parse(name).name in LIST_METRICS:
            raise UserError(
                f"{metric!r} has no value for single queries: compare by recall, ndcg, mrr, map, hit or precision"
            )
        numbers.add(int(k))
    if not numbers:
        raise UserError("there is no metric to compare by: name some, such as recall@20,ndcg@20")
    return sorted(numbers)


def _sizes(split: Split) -> dict[str, int]:
    parts = {"train": split.train, "valid": split.valid, "test": split.test}
    sizes = {name: len(part) for name, part in parts.items() if part}
    return {"queries": split.train.n_queries, "items": split.train.n_items, **sizes}


def compare(comparison: Comparison, jobs: int = 1, listener: Listener | None = None) -> list[Failure]:
    """Tune, if requested, and train unfinished runs; return the failures. comparison_tables.py reads the folders.

    failures = compare(comparison, jobs=2);  quality(comparison).markdown()
    """
    check(comparison)
    failures = study.run(comparison.study, jobs, listener)
    if comparison.cheap_baselines:
        for data in comparison.data:
            _measure_baselines(comparison, data)
    return failures


def _measure_baselines(comparison: Comparison, data: ComparedData) -> None:
    """Write the metrics of the cheap baselines of a data set, unless its folder has all that are compared."""
    split, test, device = data.split, data.split.test, pick_device(comparison.device)
    assert test is not None  # checked before training
    path, metrics = comparison.out / data.name / BASELINES, comparison.study.training.metrics
    k, seen, counts = comparison.cutoffs(data), split.seen_for("test").to(device), split.train.counts()
    measured = study.read_json(path).values() if path.is_file() else ()
    if measured and all(metric in each["metrics"] for each in measured for metric in comparison.metrics):
        return
    log.info("%s: popularity, and the best baseline on the validation part that takes seconds", data.name)

    def rank(model: Retriever | TfIdf, listed: Tensor | None) -> Evaluation:
        return evaluate(model, test, seen, k, metrics, counts=counts, among=listed)

    runs = [run for method in comparison.methods.values() for run in comparison.study.runs(data.name, method)]
    seconds = sum(float(run.result["train_seconds"]) for run in runs)
    texts = text_columns(flat(study.read_json(runs[0].path("run.json"))["setup"])) if runs else None
    found = baselines(split, test, rank, device, select=comparison.metrics[-1], seconds=seconds, texts=texts)
    files.write_json(path, {name: result.to_dict() for name, result in found.items()})
