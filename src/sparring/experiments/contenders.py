"""The contenders of `auto`: recipes, models and settings that it may try, and the facts of the data that decide."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split
from sparring.data.texts.texts import has_texts
from sparring.models.item_to_item import check_square
from sparring.recipes.finding import find
from sparring.recipes.settings import build, resolve

SHORT = 4  # a short training has a quarter of the epochs
_PROBE = 2048  # items of the matrix whose inversion is timed


@dataclass(frozen=True)
class Times:
    """A multiple of the value that the recipe itself has for this data."""

    factor: float


@dataclass(frozen=True)
class Family:
    """Contenders of one kind: settings they share, and what each of them changes, the most promising first."""

    name: str
    recipe: str
    needs: tuple[str, ...] = ()  # names of `Facts.lacks`
    settings: Mapping[str, object] = field(default_factory=dict)
    tries: Sequence[Mapping[str, object]] = ({},)


# The first of each family is tried in this order, then the second of each, that of the best family first, and so on.
# Solved ones cost seconds, so they come first.
FAMILIES = (
    Family("popularity", "popularity"),
    Family("recent", "popularity", ("times",), tries=[{"half_life": share} for share in (0.1, 0.03, 0.3)]),
    Family(
        "ease",
        "ease",
        ("queries", "square"),
        tries=[
            {"lam": 300.0},
            {"lam": 300.0, "neighbours": 50},
            {"lam": 100.0},
            {"lam": 1000.0},
            {"lam": 100.0, "neighbours": 30},
            {"lam": 30.0},
            {"lam": 3000.0},
        ],
    ),
    Family("item_knn", "item_knn", ("queries", "neighbours"), tries=[{}, {"shrink": 0.0}, {"neighbours": 300}]),
    Family(
        "ials",
        "ials",
        ("queries",),
        {"dim": 128},
        [{}, {"dim": 256}, {"alpha": 0.3}, {"alpha": 0.03}, {"reg": 0.001}, {"reg": 0.01}],
    ),
    Family(
        "default",
        "default",
        ("queries",),
        {"eval_every": 1},  # a training that runs out of time keeps its last epoch
        [{"tau": tau} for tau in (0.12, 0.17, 0.085, 0.24, 0.06)],
    ),
    Family(
        "tables",
        "tables",
        ("queries",),
        {"dim": 256, "precision": "auto"},  # half gradients: an epoch on a CPU that has them takes two thirds
        [{"tau": tau} for tau in (0.1, 0.17, 0.07, 0.24)],
    ),
    Family("ligr", "default", ("queries", "order"), {"model": "ligr"}, [{}, {"tau": 0.1}]),
    Family("text", "default", ("texts", "newcomers"), {"encoder": "auto"}, [{}, {"tau": Times(0.5)}]),
)


def complete_epochs(recipe: str, settings: Mapping[str, object]) -> int:
    """The epochs of a complete training; a closed form has one, which cannot be set."""
    return resolve(find(recipe), settings)[0].training.epochs_on()


@dataclass(frozen=True)
class Contender:
    """One recipe with its settings, among the families that `auto` tries."""

    name: str
    family: str
    recipe: str
    settings: Mapping[str, Any]
    turn: int = 0  # its place among the contenders of its family

    @property
    def folder(self) -> str:
        return re.sub(r"[^a-z0-9._]+", "-", self.name.lower()).strip("-")

    @cached_property
    def epochs(self) -> int:
        """The epochs of a complete training."""
        return complete_epochs(self.recipe, self.settings)

    @property
    def short(self) -> int:
        """The epochs of a short training."""
        return math.ceil(self.epochs / SHORT)

    @cached_property
    def width(self) -> int:
        """Dimensions of a vector, which the time of an epoch grows with."""
        return resolve(find(self.recipe), self.settings)[0].model.dim


@dataclass(frozen=True)
class Facts:
    """The properties of the training and validation parts that decide which contenders are worth a try."""

    queries: int
    items: int
    pairs: int
    known: float  # share of the validation queries that have a training pair
    ordered: bool  # what a query takes in the validation part came after its training part
    timed: bool  # and it has times that queries share, not positions
    texts: bool  # of queries and items
    columns: tuple[str, ...]  # of the items table
    square: str | None  # why an item-item matrix is out of reach
    square_seconds: float  # to invert it, as a guess

    @classmethod
    def of(cls, split: Split, device: str = "auto") -> Facts:
        """Facts of a split; its test part is not read."""
        train, valid = split.train, split.valid
        assert valid is not None
        trained = np.bincount(train.queries, minlength=train.n_queries) > 0
        table = train.item_table
        return cls(
            train.n_queries,
            train.n_items,
            len(train),
            float(trained[np.unique(valid.queries)].mean()),
            split.ordered,
            split.timed,
            has_texts(train, "query") and has_texts(train, "item"),
            () if table is None else tuple(table.columns),
            _no_square(train.n_items, device),
            _square_seconds(train.n_items, device),
        )

    @property
    def lacks(self) -> dict[str, str | None]:
        """Why each need of a family is not met; None if it is."""
        unknown, early = (
            "no validation query has a training pair",
            "the validation part is not later than the training part",
        )
        return {
            "queries": unknown if self.known == 0 else None,
            "newcomers": "most validation queries have training pairs" if self.known > 0.5 else None,
            "order": None if self.ordered else early,
            "times": None if self.timed else "the data has positions and no times" if self.ordered else early,
            "texts": None if self.texts else "queries or items have no texts",
            "square": self.square,
            "neighbours": "too many items to compare each with each" if self.items > 200_000 else None,
        }

    def lines(self) -> list[str]:
        """The facts in words."""
        density = self.pairs / max(self.queries * self.items, 1)
        order = "later than" if self.ordered else "not later than"
        size = f"{self.queries:,} queries x {self.items:,} items, {self.pairs:,} training pairs ({density:.3%})"
        found = [f"{size}; the validation part is {order} the training part"]
        if self.known < 1:
            found.append(f"{1 - self.known:.1%} of the validation queries have no training pair")
        if self.columns:
            found.append(f"items have {', '.join(self.columns)}")
        return found


def contenders(facts: Facts, train: Interactions, seed: int) -> tuple[list[Contender], dict[str, str]]:
    """The contenders for this data by turn, and why each other family is left out."""
    found: dict[str, Contender] = {}  # by name: two multiples of a temperature may end at the same bound
    left_out: dict[str, str] = {}
    for family in FAMILIES:
        lack = next((why for need in family.needs if (why := facts.lacks[need]) is not None), None)
        if lack is not None:
            left_out[family.name] = lack
            continue
        for turn, change in enumerate(family.tries):
            contender = _contender(family, turn, change, train, seed)
            if contender is not None:
                found.setdefault(contender.name, contender)
    return sorted(found.values(), key=lambda each: each.turn), left_out


def _contender(
    family: Family, turn: int, change: Mapping[str, object], train: Interactions, seed: int
) -> Contender | None:
    """A family with one of its changes; None if it is a multiple of a value that the recipe does not have."""
    settings = {**family.settings, **change}
    multiples = {name: value.factor for name, value in settings.items() if isinstance(value, Times)}
    if multiples:
        plain = {name: value for name, value in settings.items() if name not in multiples}
        own = build(family.recipe, train, {**plain, "seed": seed}).setup.flat()
        if any(own[name] is None for name in multiples):
            return None
        settings |= {name: float(f"{factor * own[name]:.3g}") for name, factor in multiples.items()}
    hidden = ("model", "encoder", "eval_every", "precision")
    shown = {name: value for name, value in settings.items() if name not in hidden}
    words = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in shown.items()]
    return Contender(" ".join([family.name, *words]), family.name, family.recipe, settings, turn)


def _no_square(n_items: int, device: str) -> str | None:
    try:
        check_square(n_items, pick_device(device))
    except UserError as error:
        return error.message.split("; ")[0]
    return None


def _square_seconds(n_items: int, device: str) -> float:
    """A guess of the time that the inverse of an item-item matrix takes, from a small one."""
    if n_items <= _PROBE:
        return 0.0
    matrix = torch.eye(_PROBE, dtype=torch.float64, device=pick_device(device))
    fastest = math.inf
    for _ in range(3):  # the first use of a GPU also starts it, and other processes may use a CPU
        began = time.perf_counter()
        torch.cholesky_inverse(torch.linalg.cholesky(matrix)).sum().item()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest * (n_items / _PROBE) ** 3
