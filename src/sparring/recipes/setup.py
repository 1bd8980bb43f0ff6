"""Setup: the settings that every recipe shares, in groups; by flat or dotted name, with types, bounds and descriptions.

`model.dim` and `dim` name one setting. The flat name is the field's name, with the prefix `clf_` for the classifiers,
and `model_name` and `model_options` for the model and its options.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sparring.core.errors import UserError, did_you_mean
from sparring.core.finding import own_arguments
from sparring.data.histories import rows_per_query
from sparring.data.interactions import Interactions
from sparring.models.named import TABLES, Model
from sparring.models.novelty import check_novelty
from sparring.models.rowwise_tables import require_torchrec
from sparring.models.settings import ModelSettings, TextSettings, setting


@dataclass(frozen=True)
class TemperatureSettings:
    """The temperature that divides scores."""

    tau: float | None = setting(
        0.1, "temperature that scores are divided by; none chooses it on the validation part", positive=True
    )
    learn_tau: bool = setting(False, "learn the temperature, starting from tau")


@dataclass(frozen=True)
class BatchSettings:
    """The rows of a training batch."""

    rows: Literal["pairs", "queries", "sequences", "sets"] = setting(
        "pairs",
        "a training row: an interaction, a query with one of its positives per epoch, "
        "a position of a query's sequence, or an item of a query of which others are given",
    )
    given: float = setting(0.5, "share of a query's items that rows=sets gives to predict the others")
    draw: Literal["uniform", "propensity"] = setting(
        "uniform", "how rows=queries draws a query's positive: uniformly, or by inverse propensity"
    )
    batch_size: int = setting(2048, "rows of a batch, over all ranks", at_least=1)
    chunk: int | None = setting(
        None, "ids encoded at a time, with a gradient cache; none encodes a batch at once", at_least=1
    )


@dataclass(frozen=True)
class TrainingSettings:
    """Epochs, optimiser and learning-rate schedule."""

    epochs: int | None = setting(100, "passes over the training rows; none: 32, and 16 on a CPU", at_least=1)
    optimizer: Literal["row-adam", "row-adagrad", "adam", "solver"] = setting(
        "row-adam", "update rule: of the rows that a step touched, adam of all parameters, or the recipe's own solver"
    )
    lr: float = setting(0.005, "learning rate", positive=True)
    weight_decay: float = setting(
        0.0, "weight decay: decoupled under row rules, added to the gradient under adam", at_least=0
    )
    schedule: Literal["step", "cosine", "linear"] = setting("step", "how the learning rate falls during training")
    lr_decay: float = setting(1.0, "factor of the learning rate under schedule=step", positive=True)
    lr_decay_every: int = setting(5, "epochs between two decays under schedule=step", at_least=1)
    warmup: int = setting(0, "steps in which the learning rate rises from 0", at_least=0)
    clip: float | None = setting(None, "largest norm of a gradient; none does not clip", positive=True)
    precision: Literal["auto", "float32", "tf32", "bf16"] = setting(
        "tf32",
        "precision of matrix products: auto is tf32 on a GPU, and on a CPU bf16 for gradients where it has that; "
        "bf16 on a GPU is autocast",
    )
    symmetric: bool = setting(False, "add the loss of each item against the queries of the batch")
    matryoshka: tuple[int, ...] = setting(
        (), "dimensions that vectors can be cut to; the loss is the mean over these and the complete vectors"
    )

    def epochs_on(self, device: str = "cuda") -> int:
        """The epochs on a type of device, also where none are set."""
        return self.epochs or (16 if device == "cpu" else 32)


@dataclass(frozen=True)
class ValidationSettings:
    """Which epoch is kept, and when training stops early."""

    select: str = setting("ndcg@10", "validation metric that chooses the epoch to keep")
    patience: int | None = setting(
        5, "validations without improvement before training stops; none never stops early", at_least=1
    )
    eval_every: int = setting(1, "epochs between two validations", at_least=1)
    valid_queries: int = setting(20_000, "most queries that a validation ranks", at_least=1)


@dataclass(frozen=True)
class RankingSettings:
    """How a finished run ranks; training does not read it."""

    novelty: float = setting(
        0.0, "how far scores are corrected for the popularity of items when lists are made, 0 to 1", at_least=0
    )


@dataclass(frozen=True)
class ClassifierSettings:
    """One vector per item, trained after the towers over frozen query vectors, then fused (M3, M4 of NGAME)."""

    epochs: int = setting(0, "epochs of the classifiers; 0 trains none", at_least=0)
    batch_size: int = setting(2048, "rows of a batch of the classifiers", at_least=1)
    lr: float = setting(1e-3, "learning rate of the classifiers", positive=True)
    warmup: int = setting(500, "steps in which the classifiers' learning rate rises from 0", at_least=0)
    shards: int = setting(1, "ranges of items that the classifiers are split into, one per GPU", at_least=1)
    dropout: float = setting(0.5, "chance that a dimension of a frozen query vector is zeroed")
    positives: int = setting(3, "hardest positives of a query in the classifiers' loss", at_least=1)
    negatives: int = setting(5, "hardest negatives of a query in the classifiers' loss", at_least=1)
    margin: float = setting(0.2, "margin of the classifiers' hinge loss", at_least=0)
    size: int = setting(2, "queries of a cluster in the classifiers' batches", at_least=1)
    every: int = setting(5, "epochs between two clusterings of the queries", at_least=1)
    grow: tuple[int, ...] = setting((15, 20, 25, 30, 35, 40), "epochs from which the clusters are twice as large")
    start: int = setting(10, "epoch of the first clustering", at_least=0)
    fusion: bool = setting(True, "rank by towers and classifiers fused")
    beta: float = setting(1.0, "weight of the towers in the fused score")
    shortlist: int = setting(300, "items listed for the fusion to score", at_least=1)
    ranking: Literal["best", "towers", "classifiers", "fused"] = setting(
        "best", "ranking that commands use by default: the best on the validation part, or this one"
    )


@dataclass(frozen=True)
class Setup:
    """Model and training settings that every recipe shares, in groups.

    `of` and `replaced` take flat names:

        setup = Setup.of(dim=32, batch_size=1024, epochs=3);   setup.model.dim, setup.replaced(lr=0.01).training.lr
    """

    model: ModelSettings = ModelSettings()
    text: TextSettings = TextSettings()
    temperature: TemperatureSettings = TemperatureSettings()
    batches: BatchSettings = BatchSettings()
    training: TrainingSettings = TrainingSettings()
    validation: ValidationSettings = ValidationSettings()
    ranking: RankingSettings = RankingSettings()
    classifiers: ClassifierSettings = ClassifierSettings()
    seed: int = setting(0, "seed of every random draw", at_least=0)

    @classmethod
    def of(cls, **values: Any) -> Setup:
        """A Setup with some settings by flat name, the others at their defaults."""
        return cls().replaced(**values)

    def replaced(self, **values: Any) -> Setup:
        """A copy with other values, by flat or dotted name; a group can be replaced as one value."""
        changes: dict[str, Any] = {}
        for name, value in values.items():
            found = find_setting(name) if name not in GROUPS else None
            if found is None and name in GROUPS and isinstance(value, GROUPS[name]):
                changes[name] = value
            elif found is None:
                raise UserError(unknown_setting(name))
            elif found.group:
                group = changes.get(found.group, getattr(self, found.group))
                changes[found.group] = replace(group, **{found.attribute: value})
            else:
                changes[found.attribute] = value
        return replace(self, **changes)

    def flat(self) -> dict[str, Any]:
        """All settings by flat name."""
        return flat(asdict(self))


@dataclass(frozen=True)
class Setting:
    """A field of Setup or of one of its groups."""

    name: str  # flat
    group: str  # "" for a field of Setup itself
    attribute: str
    kind: Any
    description: str
    at_least: float | None
    positive: bool

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.group}.{self.attribute}" if self.group else self.attribute


def _settings() -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for group, owner in {**GROUPS, "": Setup}.items():
        kinds = get_type_hints(owner)
        for field in fields(owner):
            if group or field.name not in GROUPS:
                prefix = "clf_" if group == "classifiers" else "model_" if field.name in ("name", "options") else ""
                name = f"{prefix}{field.name}"
                found[name] = Setting(name, group, field.name, kinds[field.name], **field.metadata)
    return found


GROUPS: dict[str, Any] = {name: kind for name, kind in get_type_hints(Setup).items() if is_dataclass(kind)}
SETTINGS = _settings()  # by flat name
_BY_PATH = {each.path: each for each in SETTINGS.values()}


# The settings that a solver reads, and those that only sweeps read.
SOLVED = frozenset({"seed", *(each.name for each in SETTINGS.values() if each.group in ("validation", "ranking"))})
SWEPT = frozenset({"dim", "epochs", "init", "init_std"})


def find_setting(name: str) -> Setting | None:
    """The shared setting of a flat or dotted name, if there is one; `user_tower` is another name of `query_tower`."""
    for each in (name, re.sub(r"^(\w+\.)?user_", r"\1query_", name)):
        if found := SETTINGS.get(each) or _BY_PATH.get(each):
            return found
    return None


def flat_name(name: str) -> str:
    """The flat name of a shared setting; any other name unchanged."""
    found = find_setting(name)
    return name if found is None else found.name


def flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by flat name, of a Setup as nested dicts (run.json)."""
    paths: dict[str, Any] = {}
    for name, value in nested.items():
        paths |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
    return {flat_name(path): value for path, value in paths.items()}


def unknown_setting(name: str, own: Iterable[str] = ()) -> str:
    """The message for a name that is no setting: the members of a group, or the nearest name."""
    if name in GROUPS:
        members = ", ".join(each.name for each in SETTINGS.values() if each.group == name)
        return f"{name} is a group of settings: name one of {members}"
    return f"unknown setting {name!r}{did_you_mean(name, [*own, *SETTINGS, *_BY_PATH])}"


def parse_options(model: Model, given: Mapping[str, object]) -> dict[str, Any]:
    """All options of a model with values of the declared types: the given ones, and the defaults of the others."""
    own = own_arguments(model)
    for name in given:
        if name not in own:
            known = f"it has {', '.join(own)}" if own else "it has none"
            raise UserError(f"the model {model.__name__} has no option {name!r}{did_you_mean(name, own)}: {known}")
    return {
        name: parse(f"model.{name}", given[name], kind) if name in given else default
        for name, (kind, default) in own.items()
    }


def parse_setup(nested: Mapping[str, Any]) -> Setup:
    """The Setup that a run folder holds as nested dicts."""
    values = flat(nested)
    for name in values:
        if name not in SETTINGS:
            raise UserError(f"{unknown_setting(name)} (in the saved run)")
    return Setup.of(**{name: parse(name, value, SETTINGS[name].kind) for name, value in values.items()})


def check(setup: Setup) -> None:
    """Refuse values of another type than declared, values out of bounds, and combinations that cannot be trained."""
    for name, value in setup.flat().items():
        declared = SETTINGS[name]
        parsed = parse(name, value, declared.kind)
        if isinstance(value, str) and not isinstance(parsed, str):
            raise UserError(f"{name} must be {type_name(declared.kind)}, got {value!r}")
        if value is None or isinstance(value, str | tuple | Mapping):
            continue
        if declared.positive and not 0 < value < math.inf:
            raise UserError(f"{name} must be positive and finite, got {value}")
        if declared.at_least is not None and not declared.at_least <= value < math.inf:
            bound = "must not be negative" if declared.at_least == 0 else f"must be at least {declared.at_least}"
            raise UserError(f"{name} {bound}{', or none' if _optional(declared.kind) else ''}, got {value}")
    model, text, batches = setup.model, setup.text, setup.batches
    for name, rate in (
        ("dropout", model.dropout),
        ("clf_dropout", setup.classifiers.dropout),
        ("given", batches.given),
    ):
        if not 0 <= rate < 1:
            raise UserError(f"{name} must be in [0, 1), got {rate}")
    check_novelty(setup.ranking.novelty)
    if setup.ranking.novelty and setup.classifiers.epochs:
        raise UserError("novelty corrects the ranking by the towers alone: set clf_epochs=0 or novelty=0")
    staged = setup.classifiers
    if staged.ranking in ("classifiers", "fused") and not (staged.epochs and staged.fusion):
        raise UserError(f"a {staged.ranking} ranking needs classifiers: set clf_epochs=N and clf_fusion=true")
    reads_text = "text" in (model.query_tower, model.item_tower)
    if reads_text and text.encoder is None:
        names = "bag, wordllama, minilm, a folder, or a name on the Hugging Face hub"
        raise UserError(f"a text tower needs an encoder: set encoder to {names}")
    for side, tower, columns in (
        ("query", model.query_tower, text.query_text),
        ("item", model.item_tower, text.item_text),
    ):
        if columns and tower != "text":
            raise UserError(
                f"{side}_text is for text towers, and {side}_tower is {tower}: set an encoder, or leave it out"
            )
    if (model.pooling in ("cls", "last", "auto") and not reads_text) or (
        model.pooling in ("attention", "sum") and model.query_tower != "history"
    ):
        why = "cls, last and auto are for text towers, attention and sum for query_tower=history"
        raise UserError(f"pooling={model.pooling} is not for these towers: {why}")
    if batches.draw != "uniform" and batches.rows != "queries":
        raise UserError(f"draw={batches.draw} chooses among a query's positives: set rows=queries")
    for side, tower, described in (
        ("query", model.query_tower, model.query_features or model.query_vectors),
        ("item", model.item_tower, model.item_features or model.item_vectors),
    ):
        if tower == "text" and described:
            raise UserError(f"{side}_tower=text takes no {side}_features or {side}_vectors: leave one of them out")
        if tower == "features" and not described:
            raise UserError(f"{side}_tower=features needs columns or vectors: set {side}_features or {side}_vectors")
    if min(setup.training.matryoshka, default=1) < 1:
        raise UserError(f"vectors can be cut to 1 dimension or more, got matryoshka={setup.training.matryoshka}")
    if min(model.hidden, default=1) < 1:
        raise UserError(f"every hidden layer needs at least 1 unit, got hidden={model.hidden}")


def check_sharded(setup: Setup) -> None:
    """Refuse settings that tables=sharded does not support."""
    model = setup.model.name
    if model not in TABLES:
        raise UserError(f"tables=sharded is for the model ids, not {model}")
    needed: dict[str, object] = {"optimizer": "row-adagrad", "query_tower": "id", "item_tower": "id", "init": "normal"}
    needed |= {"weight_decay": 0.0, "clip": None, "chunk": None, "item_features": (), "auxiliary": 0}
    needed |= {"query_features": (), "item_vectors": None, "query_vectors": None, "centroids": False, "clf_epochs": 0}
    needed |= {"novelty": 0.0}
    values = setup.flat()
    for name, value in needed.items():
        if values[name] != value:
            why = ": its table has row-wise Adagrad only" if name == "optimizer" else ""
            raise UserError(f"tables=sharded needs {name}={value}, not {values[name]}{why}")
    if setup.model.dim % 4:
        raise UserError(f"tables=sharded needs a dim that is a multiple of 4, not {setup.model.dim}")
    require_torchrec()


def epoch_steps(data: Interactions, setup: Setup) -> int:
    """Steps of an epoch over the rows of training data."""
    slots = round(setup.batches.batch_size / _asked(setup))
    return -(-_slots(data, setup) // slots)


def epoch_rows(data: Interactions, setup: Setup) -> int:
    """Rows of an epoch."""
    return int(_slots(data, setup) * _asked(setup))


def _slots(data: Interactions, setup: Setup) -> int:
    """Rows of an epoch, and for rows=sets the items that are given."""
    return int(rows_per_query(data, setup.batches.rows, setup.model.history).sum())


def _asked(setup: Setup) -> float:
    """The share of items that rows=sets does not give; 1 for other rows."""
    given = setup.batches.rows == "sets" and setup.model.query_tower == "history"
    return 1 - setup.batches.given if given else 1.0


def _optional(kind: Any) -> bool:
    return type(None) in get_args(kind)


def parse(name: str, value: object, kind: Any) -> Any:
    """A value as the declared type; a string is read as the command line gives it."""
    try:
        return _parse(value, kind)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be {type_name(kind)}, got {value!r}") from None


def _parse(value: object, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError
    if get_origin(kind) in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        for part in get_args(kind):
            with suppress(TypeError, ValueError):
                return _parse(value, part)
        raise ValueError
    if get_origin(kind) is tuple:
        parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else list(value)  # type: ignore[call-overload]
        return tuple(_parse(part, get_args(kind)[0]) for part in parts)
    if get_origin(kind) is Mapping:
        return dict(value)  # type: ignore[call-overload]
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        return words[value.lower()] if isinstance(value, str) and value.lower() in words else _exactly(value, bool)
    if kind is int:
        return int(value) if isinstance(value, str) else _exactly(value, int)
    if kind is float:
        return (
            float(value)
            if isinstance(value, str | int | float) and not isinstance(value, bool)
            else _exactly(value, float)
        )
    return _exactly(value, kind)


def _exactly(value: object, kind: type) -> object:
    if type(value) is not kind:
        raise TypeError
    return value


def settings_schema() -> dict[str, Any]:
    """The JSON schema of a table of settings by flat or dotted name; a recipe's own arguments are allowed too."""
    properties: dict[str, Any] = {}
    for each in SETTINGS.values():
        if each.name not in ("model_name", "model_options"):
            bounds: dict[str, float] = {"exclusiveMinimum": 0} if each.positive else {}
            bounds |= {} if each.at_least is None else {"minimum": each.at_least}
            kinds = {**_schema(each.kind, bounds), "description": each.description}
            properties |= {each.name: kinds, each.path: kinds}
    return {"type": "object", "properties": properties}


def _schema(kind: Any, bounds: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a value of a declared type; `bounds` are of numbers."""
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [_schema(part, bounds) for part in get_args(kind) if part is not type(None)]
        return {"anyOf": [*kinds, {"enum": ["none", None]}] if _optional(kind) else kinds}
    if get_origin(kind) is tuple:
        return {"anyOf": [{"type": "array", "items": _schema(get_args(kind)[0], bounds)}, {"type": "string"}]}
    name = {int: "integer", float: "number", bool: "boolean"}.get(kind, "string")
    return {"type": name, **(bounds if kind in (int, float) else {})}


def type_name(kind: Any) -> str:
    """A type in words a user knows."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join("none" if part is type(None) else type_name(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a comma-separated list of {type_name(get_args(kind)[0])}"
    if get_origin(kind) is Mapping:
        return "name=value, ..."
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )
