"""The plan of a book, read from a TOML file: sets, models, methods and claims; plan.toml is the plan of the project."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparring.core.choices import SPLITS
from sparring.core.errors import UserError, did_you_mean, one_line
from sparring.experiments.comparison import cutoffs
from sparring.experiments.papers.printed import published_cells
from sparring.recipes import finding, settings
from sparring.recipes.setup import Setup

SOLVED = "solved"  # the model of a method that has one of its own
AGAIN = " again"  # ends the name of a repeated method


@dataclass(frozen=True)
class BookSet:
    """A data set: its place (a folder of the data root, a public set or a world) and the splits it is tested with.

    Its rungs replace the plan's; its settings follow those of the plan and of the model.
    """

    name: str
    place: str
    splits: tuple[str, ...]
    line: str = ""
    models: tuple[str, ...] = ()  # all but text unless given
    published: Mapping[str, str] = field(default_factory=dict)  # its name in papers
    rungs: tuple[tuple[int, int], ...] | None = None  # the plan's unless given
    settings: Mapping[str, object] = field(default_factory=dict)  # of every model on it


@dataclass(frozen=True)
class BookModel:
    """A model: the Setup of a recipe, with changes."""

    name: str
    setup: str
    line: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class BookMethod:
    """A method: its recipe, the settings that define it, and its unit of temperature; `repeats` if it is a null."""

    name: str
    recipe: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    tau_unit: float = 1.0
    models: tuple[str, ...] = ()  # all but text unless given
    formula: str = ""  # as docs/methods has it
    published: Mapping[str, str] = field(default_factory=dict)  # paper, table, and the method's name there
    repeats: str = ""

    @property
    def solved(self) -> bool:
        return settings.is_solved(finding.find(self.recipe))


@dataclass(frozen=True)
class Claim:
    """A claim of a paper: one method is ahead of another."""

    name: str
    statement: str
    better: str
    worse: str
    paper: str = ""
    models: tuple[str, ...] = ()  # all unless given
    note: str = ""  # on the settings here and in the paper


@dataclass(frozen=True)
class Plan:
    """A complete plan; see plan.toml."""

    sets: Mapping[str, BookSet]
    models: Mapping[str, BookModel]
    methods: Mapping[str, BookMethod]
    claims: Mapping[str, Claim]
    metric: str = "ndcg@20"
    metrics: tuple[str, ...] = ("ndcg@20", "recall@20")
    cutoffs: tuple[int, ...] = (10, 20, 50)
    trials: int = 20
    design: int = 6
    rungs: tuple[tuple[int, int], ...] = ()
    repetitions: int = 5
    reference: str = "uns"
    margin: float = 0.01
    settings: Mapping[str, object] = field(default_factory=dict)  # of every model

    def base(self, model: str, where: BookSet | None = None) -> Setup:
        """The Setup of every method with a model; on a set, with the settings of that set."""
        if model == SOLVED:
            return Setup.of(select=self.metric)
        chosen = self.models[model]
        own = {} if where is None else where.settings
        changes = {**self.settings, **chosen.settings, **own, "select": self.metric}
        return settings.resolve(finding.find(chosen.setup), changes)[0]

    def rungs_of(self, where: BookSet, model: str = "") -> tuple[tuple[int, int], ...]:
        """The rungs of a set: its own, or the plan's. A solver has the plan's, since a sweep is no number of steps."""
        return self.rungs if where.rungs is None or model == SOLVED else where.rungs

    def models_of(self, method: BookMethod, where: BookSet) -> tuple[str, ...]:
        """The models that a method is trained with on a set."""
        if method.solved:
            return (SOLVED,)
        usual = tuple(name for name in self.models if name != "text")
        allowed = {*(where.models or usual)} & {*(method.models or usual)}
        return tuple(name for name in self.models if name in allowed)


def read_plan(path: Path | None = None) -> Plan:
    """The plan of a file, by default the project's.

    read_plan().methods["xir"].tau_unit  # 2.0
    """
    source = resources.files("sparring.experiments.book") / "plan.toml" if path is None else path
    with one_line(f"cannot read the plan {source}", OSError, ValueError):
        content = tomllib.loads(source.read_text(encoding="utf-8"))
    repeated = content.pop("repeated", [])
    parts: dict[str, Any] = {}
    for name, kind in (("sets", BookSet), ("models", BookModel), ("methods", BookMethod), ("claims", Claim)):
        parts[name] = _entries(kind, name, content.pop(name, {}))
    known = {each.name for each in fields(Plan)} - parts.keys()
    for name in content:
        if name not in known:
            raise UserError(f"the plan has an unknown entry {name!r}{did_you_mean(name, known)}")
    parts |= {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
    parts["methods"] = {name: replace(each, recipe=each.recipe or name) for name, each in parts["methods"].items()}
    plan = Plan(**parts)
    _known(plan.methods, repeated, "method", "repeated")
    nulls = {f"{name}{AGAIN}": replace(plan.methods[name], name=f"{name}{AGAIN}", repeats=name) for name in repeated}
    plan = replace(plan, methods={**plan.methods, **nulls})
    _check(plan)
    return plan


def _entries(kind: Any, part: str, content: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)} - {"name", "repeats"}
    entries = {}
    for name, values in content.items():
        for key in values:
            if key not in names:
                raise UserError(f"{part}.{name} of the plan has an unknown entry {key!r}{did_you_mean(key, names)}")
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        with one_line(f"{part}.{name} of the plan is not complete", TypeError):
            entries[name] = kind(name, **given)
        if not isinstance(given.get("settings", {}), dict):
            raise UserError(f"settings of {part}.{name} of the plan must be a table, such as {{ epochs = 20 }}")
    return entries


def _check(plan: Plan) -> None:
    """Raise for names that do not exist, rungs that do not rise, and settings that a recipe does not have."""
    for name, least in (("trials", 0), ("design", 0), ("repetitions", 1)):
        if not _counts([value := getattr(plan, name)]) or value < least:
            raise UserError(f"{name} of the plan is {value!r}, not a whole number of at least {least}")
    _check_rungs(plan.rungs, plan.trials, "the plan")
    if not cutoffs(plan.metrics) or plan.metric not in plan.metrics:
        raise UserError(f"the metric {plan.metric!r} of the plan is not among its metrics {', '.join(plan.metrics)}")
    for each in plan.sets.values():
        _check_rungs(plan.rungs_of(each), plan.trials, f"sets.{each.name} of the plan")
        for how in each.splits:
            if how not in SPLITS:
                raise UserError(f"sets.{each.name} of the plan has no split {how!r}: choose from {', '.join(SPLITS)}")
        _known(plan.models, each.models, "model", f"sets.{each.name}")
    for method in plan.methods.values():
        _known(plan.models, method.models, "model", f"methods.{method.name}")
        finding.find(method.recipe)
        if method.published:
            published_cells(method.published["paper"], method.published["table"])
    for claim in plan.claims.values():
        _known(plan.methods, (claim.better, claim.worse), "method", f"claims.{claim.name}")
        _known(plan.models, claim.models, "model", f"claims.{claim.name}")


def _check_rungs(rungs: object, trials: int, where: str) -> None:
    """Raise unless these are pairs of epochs that rise and trials that become fewer."""
    if not isinstance(rungs, tuple) or not all(_counts(each) and len(each) == 2 for each in rungs):
        raise UserError(f"rungs of {where} must be pairs of epochs and trials that go on, such as [[8, 7], [24, 2]]")
    if any(not (low[0] < high[0] and low[1] > high[1] > 0) for low, high in pairwise([(0, trials + 1), *rungs])):
        rule = "epochs must rise, and the trials that go on must become fewer"
        raise UserError(f"{where} has rungs {', '.join(map(str, rungs))}: {rule}")


def _counts(values: object) -> bool:
    """Whether this is a list of whole numbers."""
    return isinstance(values, list) and all(type(value) is int for value in values)


def _known(names: Collection[str], asked: Sequence[str], kind: str, where: str) -> None:
    for name in asked:
        if name not in names:
            hint = did_you_mean(name, names) or f": choose from {', '.join(names)}"
            raise UserError(f"{where}: no {kind} called {name!r} in the plan{hint}")


def chosen(
    plan: Plan,
    sets: Sequence[str] = (),
    splits: Sequence[str] = (),
    models: Sequence[str] = (),
    methods: Sequence[str] = (),
) -> Plan:
    """The part of a plan that has these names, in the order of the plan; an empty list keeps all.

    Popularity stays, since verdicts need it, and so does the repetition of a method that stays.
    """
    for names, asked, kind, option in (
        (plan.sets, sets, "set", "--sets"),
        (plan.models, models, "model", "--models"),
        (plan.methods, methods, "method", "--methods"),
        ({how for each in plan.sets.values() for how in each.splits}, splits, "split", "--splits"),
    ):
        _known(sorted(names) if isinstance(names, set) else names, asked, kind, option)
    kept = {
        name: replace(each, splits=tuple(how for how in each.splits if not splits or how in splits))
        for name, each in plan.sets.items()
        if not sets or name in sets
    }
    rows = {
        name: each
        for name, each in plan.methods.items()
        if not methods or {name, each.repeats} & set(methods) or each.recipe == "popularity"
    }
    return replace(
        plan,
        sets={name: each for name, each in kept.items() if each.splits},
        models={name: each for name, each in plan.models.items() if not models or name in models},
        methods=rows,
        claims={name: each for name, each in plan.claims.items() if {each.better, each.worse} <= rows.keys()},
    )
