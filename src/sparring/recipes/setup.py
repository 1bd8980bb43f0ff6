"""Setup: the settings that every recipe shares; their types, and what no training could use."""

from __future__ import annotations

import math
import types
import typing
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sparring.core.errors import UserError
from sparring.models.encoders import width


@dataclass(frozen=True)
class Setup:
    """Model and training settings that every recipe shares."""

    dim: int = 64
    score: Literal["cosine", "dot"] = "cosine"
    tau: float | None = 0.1
    learn_tau: bool = False
    init: Literal["normal", "spectral"] = "normal"
    init_std: float = 0.1
    query_tower: Literal["id", "history", "text"] = "id"
    item_tower: Literal["id", "text"] = "id"
    history: int = 50
    pooling: Literal["mean", "attention", "cls"] = "mean"
    encoder: str | None = None
    query_text: tuple[str, ...] = ()
    item_text: tuple[str, ...] = ()
    share_encoder: bool = True
    max_len: int = 32
    item_features: tuple[str, ...] = ()
    item_bias: bool = False
    auxiliary: int = 0
    private: int = 0
    auxiliary_init: Literal["xavier", "zeros"] = "xavier"
    centroids: bool = False
    tables: Literal["auto", "replicated", "sharded"] = "auto"
    hidden: tuple[int, ...] = (32, 16)
    dropout: float = 0.0
    rows: Literal["pairs", "queries"] = "pairs"
    draw: Literal["uniform", "propensity"] = "uniform"
    batch_size: int = 2048
    chunk: int | None = None
    epochs: int = 100
    optimizer: Literal["row-adam", "row-adagrad", "adam"] = "row-adam"
    lr: float = 0.005
    weight_decay: float = 0.0
    schedule: Literal["step", "cosine", "linear"] = "step"
    lr_decay: float = 1.0
    lr_decay_every: int = 5
    warmup: int = 0
    clip: float | None = None
    patience: int | None = 5
    select: str = "ndcg@10"
    eval_every: int = 1
    valid_queries: int = 20_000
    classifiers: int = 0
    clf_lr: float = 1e-3
    clf_batch_size: int = 2048
    clf_warmup: int = 500
    clf_shards: int = 1
    fusion: bool = True
    precision: Literal["float32", "tf32", "bf16"] = "tf32"
    seed: int = 0

    @property
    def width(self) -> int:
        """Dimensions of the vectors that are compared: those of the item tower, and one for a bias."""
        if self.item_tower == "text" and self.encoder is not None:
            return width(self.encoder, self.dim) + self.item_bias
        return (self.hidden[-1] if self.item_features else self.dim) + self.item_bias


def check(setup: Setup) -> None:
    """Refuse values of another type than declared, and those that no training could use."""
    kinds = get_type_hints(Setup)
    for field in fields(setup):
        value = getattr(setup, field.name)
        if isinstance(value, str) and not isinstance(parse(field.name, value, kinds[field.name]), str):
            raise UserError(f"{field.name} must be {type_name(kinds[field.name])}, got {value!r}")
        parse(field.name, value, kinds[field.name])
    counts = ("dim", "batch_size", "epochs", "lr_decay_every", "eval_every", "valid_queries", "history", "max_len")
    for key in (*counts, "clf_batch_size", "clf_shards"):
        if getattr(setup, key) < 1:
            raise UserError(f"{key} must be at least 1, got {getattr(setup, key)}")
    for key in ("lr", "tau", "init_std", "lr_decay", "clip", "clf_lr"):
        value = getattr(setup, key)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{key} must be positive and finite, got {value}")
    for key in ("weight_decay", "warmup", "seed", "auxiliary", "private", "classifiers", "clf_warmup"):
        if not 0 <= getattr(setup, key) < math.inf:
            raise UserError(f"{key} must not be negative, got {getattr(setup, key)}")
    if not 0 <= setup.dropout < 1:
        raise UserError(f"dropout must lie in [0, 1), got {setup.dropout}")
    if setup.patience is not None and setup.patience < 1:
        raise UserError(f"patience must be at least 1 validation, got {setup.patience}; none never stops early")
    if setup.chunk is not None and setup.chunk < 1:
        raise UserError(
            f"chunk must be at least 1 id encoded at a time, got {setup.chunk}; none encodes a batch at once"
        )
    text = "text" in (setup.query_tower, setup.item_tower)
    if text and setup.encoder is None:
        raise UserError(
            "a text tower needs an encoder: set encoder to bag, wordllama, minilm, a folder, or a name on the Hugging Face hub"
        )
    for side, tower in (("query", setup.query_tower), ("item", setup.item_tower)):
        if getattr(setup, f"{side}_text") and tower != "text":
            raise UserError(
                f"{side}_text names what a text tower reads, and {side}_tower is {tower}: set an encoder, or leave it out"
            )
    if (setup.pooling == "cls" and not text) or (setup.pooling == "attention" and setup.query_tower != "history"):
        raise UserError(
            f"pooling={setup.pooling} is not for these towers: cls is for text towers, attention for query_tower=history"
        )
    if setup.draw != "uniform" and setup.rows == "pairs":
        raise UserError(f"draw={setup.draw} chooses among a query's positives: set rows=queries")
    if setup.item_tower == "text" and setup.item_features:
        raise UserError("item_tower=text takes no item_features: leave one of them out")
    if not setup.hidden or min(setup.hidden) < 1:
        raise UserError(f"hidden must name at least one layer, each of at least 1 unit, got {setup.hidden}")


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


def type_name(kind: Any) -> str:
    """A type in words a user knows."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join("none" if part is type(None) else type_name(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a comma-separated list of {type_name(get_args(kind)[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )
