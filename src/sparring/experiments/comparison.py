"""A fair comparison: recipes x seeds x data on the same parts, optionally after equal tuning, as ordinary run folders that resume.

    OUT/comparison.json              what is compared, and what must not change when more is added
    OUT/DATA/RECIPE/tune/            trials.jsonl, where tuned
    OUT/DATA/RECIPE/SEED/            a run folder (see runs.py), and measured.json: memory, device, what its negatives were
    OUT/quality.*, OUT/negatives.*   the tables of results.py as md, csv, tex and json
    OUT/report.html, OUT/figures/    one page with all of it, and its figures as svg and png

The split is the same for every recipe and seed, so values are paired by query and by seed. Each training has a process of its own: one
that fails or is killed is reported, and the others go on. The same call again runs only what is missing, so recipes and seeds may be added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.core import files, memory, workers
from sparring.core.devices import hardware
from sparring.core.errors import UserError
from sparring.core.workers import Failure, Listener, Tasks, perform
from sparring.data.interactions import Split
from sparring.data.synthetic import World
from sparring.recipes import finding, settings
from sparring.recipes.finding import source_digest
from sparring.recipes.setup import Setup, find_setting, flat_name, unknown_setting
from sparring.training import folder as run_folder

if TYPE_CHECKING:
    pass

SINGLE = ("recall", "ndcg", "hit", "mrr", "map", "precision", "coverage", "popularity")  # measured of every run


@dataclass(frozen=True)
class Data:
    """One data set of a comparison: its parts, where they came from (for run.json), and the truth where it is known."""

    name: str
    split: Split
    source: dict[str, Any] = field(default_factory=dict)
    world: World | None = None


@dataclass(frozen=True)
class Plan:
    """What is compared. `base` gives every recipe the same towers and optimiser; `shared` are settings of all recipes that know them.

    A recipe is named as in finding.find, or is a function of your own; `recipes` becomes their short names, for tables and folders, and
    `places` tells where each is found again by the processes that train.

        Plan(Path("compare/a"), (Data("demo", parts),), ("uns", "ssl_pop", my_recipe), seeds=5)
    """

    out: Path
    data: tuple[Data, ...]
    recipes: tuple[Any, ...]  # names or functions, once made: short names
    seeds: int = 5
    baseline: Any = ""  # uns where it is compared, else the first recipe
    metrics: tuple[str, ...] = ("recall@20", "ndcg@20")
    base: Setup | None = None
    shared: dict[str, object] = field(default_factory=dict)
    trials: int = 0
    device: str = "auto"
    places: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places: dict[str, str] = {}
        for recipe in self.recipes:
            place = self.places[recipe] if recipe in self.places else finding.lasting(recipe)
            name = finding.short(place)
            if name in places:
                twice = (
                    f"recipe {name!r} is named twice"
                    if places[name] == place
                    else f"{places[name]} and {place} have the same name"
                )
                raise UserError(f"{twice}: rename one, or leave it out")
            places[name] = place
        baseline = self.baseline
        if baseline and baseline not in places:
            baseline = finding.short(finding.named(baseline))
        for name, value in {"recipes": tuple(places), "places": places, "baseline": baseline}.items():
            object.__setattr__(self, name, value)

    @property
    def against(self) -> str:
        return self.baseline or ("uns" if "uns" in self.recipes else self.recipes[0])

    def folder(self, data: str, recipe: str, seed: int) -> Path:
        return self.out / data / recipe / str(seed)

    def tuning(self, data: str, recipe: str) -> Path:
        return self.out / data / recipe / "tune"

    def settings_of(self, recipe: str) -> dict[str, object]:
        """Those of the shared settings that this recipe knows."""
        return settings.known(finding.find(self.places[recipe]), self.shared)


def check(plan: Plan) -> None:
    """Refuse, before anything is trained, what could not be compared."""
    for recipe in plan.recipes:
        settings.resolve(finding.find(plan.places[recipe]), plan.settings_of(recipe), plan.base)
    if plan.against not in plan.recipes:
        raise UserError(
            f"the baseline {plan.against!r} is not among the recipes {', '.join(plan.recipes)}: add it, or choose one of them"
        )
    own = {name for recipe in plan.recipes for name in settings.own_arguments(finding.find(plan.places[recipe]))}
    for name in plan.shared:
        if flat_name(name) == "seed":
            raise UserError("seed cannot be set: a comparison runs every recipe with the seeds 0, 1, ... (--seeds N)")
        if name not in own and find_setting(name) is None:
            raise UserError(f"no compared recipe knows it: {unknown_setting(name, own)}")
    cutoffs(plan.metrics)
    for data in plan.data:
        if data.split.test is None:
            raise UserError(f"{data.name} has no test part: use --test with a share above 0")
        if plan.trials and data.split.valid is None:
            raise UserError(
                f"tuning needs a validation part, and {data.name} has none: use --valid with a larger share"
            )
        most = max(cutoffs(plan.metrics))
        if most > data.split.train.n_items:
            raise UserError(
                f"cutoff {most} is larger than the catalogue of {data.name}, {data.split.train.n_items:,} items"
            )
    _check_same(plan)


def cutoffs(metrics: tuple[str, ...]) -> list[int]:
    """The cutoffs of metrics such as recall@20."""
    from sparring.evaluation.metrics import LIST_METRICS, parse

    found = set()
    for metric in metrics:
        name, _, k = metric.partition("@")
        if not k.isdigit() or int(k) < 1:
            raise UserError(f"{metric!r} is not a metric with a cutoff, such as recall@20")
        if parse(name).name in LIST_METRICS:
            raise UserError(
                f"{metric!r} has no value for single queries: compare by recall, ndcg, mrr, map, hit or precision"
            )
        found.add(int(k))
    if not found:
        raise UserError("there is no metric to compare by: name some, such as recall@20,ndcg@20")
    return sorted(found)


def _check_same(plan: Plan) -> None:
    """A folder may grow by recipes, seeds and data, but what its runs share must stay."""
    now = {
        "setup": None if plan.base is None else plan.base.flat(),
        "settings": plan.shared,
        "trials": plan.trials,
        "data": {data.name: data.source or _sizes(data.split) for data in plan.data},
    }
    now = json.loads(json.dumps(now, default=str))
    places = {
        name: [place, source_digest(place)] for name, place in plan.places.items() if name != place
    }  # of recipes that are not ours
    path = plan.out / "comparison.json"
    if plan.out.exists() and not plan.out.is_dir():
        raise UserError(f"{plan.out} is a file: choose another folder for the comparison")
    if path.is_file():
        try:
            before = json.loads(path.read_text())
            old_data = before["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is corrupt: {str(error).splitlines()[0]}") from error
        for name in ("setup", "settings", "trials"):
            if before.get(name) != now[name]:
                what = run_folder.difference(name, before.get(name), now[name])
                raise UserError(f"{plan.out} was begun {what}: choose another folder, or ask for the same as then")
        for name, source in now["data"].items():
            if old_data.get(name, source) != source:
                raise UserError(
                    f"{plan.out} was begun with another {name}, or another split of it: choose another folder"
                )
        for name, (place, digest) in before.get("places", {}).items():
            now_place, now_digest = places.get(name, (place, digest))
            if now_place != place:
                what = f"was begun with {place} as {name!r}, not {now_place}"
                raise UserError(f"{plan.out} {what}: choose another folder, or rename one")
            if now_digest != digest:
                what = f"{place.rpartition(':')[0]} has changed since {name!r} was first trained in {plan.out}"
                raise UserError(f"{what}: choose another folder, or delete this one")
        now["data"] = {**old_data, **now["data"]}
        places = {**before.get("places", {}), **places}
    elif plan.out.is_dir() and any(plan.out.iterdir()):
        raise UserError(f"{plan.out} is not empty and holds no comparison: choose another folder")
    asked = {
        "recipes": plan.recipes,
        "places": places,
        "seeds": plan.seeds,
        "baseline": plan.against,
        "metrics": plan.metrics,
    }
    files.write_json(path, {**now, **asked})


def _sizes(split: Split) -> dict[str, int]:
    parts = {"train": split.train, "valid": split.valid, "test": split.test}
    return {
        "queries": split.train.n_queries,
        "items": split.train.n_items,
        **{name: len(part) for name, part in parts.items() if part},
    }


def compare(plan: Plan, jobs: int = 1, listener: Listener | None = None) -> list[Failure]:
    """Tune (where asked) and train all that is missing; what failed. The tables are made of the folders by results.py.

    failures = compare(plan, jobs=2);  quality(plan).markdown()
    """
    listener = listener or Listener()
    check(plan)
    failures: list[Failure] = []
    if plan.trials:
        failures += perform(_tunings(plan), len(plan.data) * len(plan.recipes), "tuning", jobs, listener)
    untuned = {(failure.data, failure.recipe) for failure in failures}
    for data in plan.data:
        for recipe in plan.recipes:
            if (data.name, recipe) in untuned:
                continue
            try:
                tuned_settings(plan, data.name, recipe)
            except UserError as error:  # an earlier call has used up all its trials in vain
                failures.append(Failure(data.name, recipe, "tuning", str(error)))
                untuned.add((data.name, recipe))
    total = len(plan.data) * len(plan.recipes) * plan.seeds
    return failures + perform(_trainings(plan, untuned), total, "training", jobs, listener)


def _tunings(plan: Plan) -> Tasks:
    from sparring.experiments.tuning import read_trials

    tasks = {}
    for data in plan.data:
        for recipe in plan.recipes:
            folder = plan.tuning(data.name, recipe)
            if len(read_trials(folder / "trials.jsonl")) < plan.trials:
                work = (
                    data.split,
                    plan.places[recipe],
                    plan.trials,
                    folder,
                    plan.base,
                    plan.settings_of(recipe),
                    plan.device,
                )
                tasks[data.name, recipe, "tuning"] = workers.Task(f"{data.name} {recipe} tuning", _tune_one, work)
    return tasks


def _trainings(plan: Plan, untuned: set[tuple[str, str]]) -> Tasks:
    """Seed by seed, so that an early stop leaves every recipe with about as many."""
    tasks = {}
    for data in plan.data:
        k = sorted({*cutoffs(plan.metrics), *(k for k in (10, 20, 50) if k <= data.split.train.n_items)})
        for seed in range(plan.seeds):
            for recipe in plan.recipes:
                folder = plan.folder(data.name, recipe, seed)
                if finished(folder) or (data.name, recipe) in untuned:
                    continue
                asked = {**plan.settings_of(recipe), **tuned_settings(plan, data.name, recipe), "seed": seed}
                names = tuple(dict.fromkeys([*SINGLE, *(metric.split("@")[0] for metric in plan.metrics)]))
                work = (folder, data, plan.places[recipe], asked, plan.base, k, names, plan.device)
                tasks[data.name, recipe, f"seed {seed}"] = workers.Task(
                    f"{data.name} {recipe} seed {seed}", _train_one, work
                )
    return tasks


def finished(folder: Path) -> bool:
    return (folder / "result.json").is_file() and (folder / "measured.json").is_file()


def tuned_settings(plan: Plan, data: str, recipe: str) -> dict[str, Any]:
    """What tuning found best for a recipe; nothing where there was none."""
    from sparring.experiments.tuning import best, read_trials

    return (
        best(recipe, read_trials(plan.tuning(data, recipe) / "trials.jsonl")[: plan.trials]).settings
        if plan.trials
        else {}
    )


def _tune_one(
    say: workers.Say,
    split: Split,
    recipe: str,
    trials: int,
    folder: Path,
    base: Setup | None,
    fixed: Mapping[str, object],
    device: str,
) -> None:
    from sparring.experiments.tuning import tune

    tune(recipe, split, trials, folder, base=base, fixed=fixed, device=device, say=say)


def _train_one(
    say: workers.Say,
    folder: Path,
    data: Data,
    recipe: str,
    asked: Mapping[str, object],
    base: Setup | None,
    k: list[int],
    metrics: tuple[str, ...],
    device: str,
) -> None:
    import torch

    from sparring.core.devices import pick_device
    from sparring.experiments.diagnose.profile import profile
    from sparring.training.fitting import Progress, fit

    run = settings.build(recipe, data.split.train, asked, base)
    where, before = pick_device(device), memory.resident_bytes()
    on_gpu, peak = where.type == "cuda", None

    def epoch(record: dict[str, Any]) -> None:
        nonlocal peak  # of training and its validation, not of the test and the figures after it
        peak = torch.cuda.max_memory_allocated(where) if on_gpu else memory.peak_bytes() - before
        say(record)

    progress = Progress(epoch=epoch)
    fitted = fit(
        run, data.split, folder, resume=True, device=device, k=k, metrics=metrics, progress=progress, source=data.source
    )
    measured = {
        "peak_bytes": peak,
        "device": hardware(where),
        "negatives": profile(fitted.run, data.split, world=data.world),
    }
    files.write_json(folder / "measured.json", measured)
