"""A run of your own: Setup (what every recipe shares), Term (one summand of the loss), compose (towers and all)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import polars as pl
import torch
from torch import nn

from sparring.data.features import Features, Histories, histories
from sparring.data.interactions import Interactions
from sparring.errors import UserError
from sparring.losses import Fixed, Learned, Loss, sampled_softmax
from sparring.negatives import Negatives
from sparring.spectral import start_from
from sparring.towers import FeatureTower, HistoryTower, IdTower, Retriever


@dataclass(frozen=True)
class Setup:
    """Model and training settings that every recipe shares."""

    dim: int = 64
    score: Literal["cosine", "dot"] = "cosine"
    tau: float = 0.1
    learn_tau: bool = False
    init: Literal["normal", "spectral"] = "normal"
    init_std: float = 0.1
    query_tower: Literal["id", "history"] = "id"
    history: int = 50
    pooling: Literal["mean", "attention"] = "mean"
    item_features: tuple[str, ...] = ()
    item_bias: bool = False
    hidden: tuple[int, ...] = (32, 16)
    dropout: float = 0.0
    batch_size: int = 2048
    chunk: int | None = None
    epochs: int = 100
    optimizer: Literal["row-adam", "row-adagrad", "adam"] = "row-adam"
    lr: float = 0.005
    weight_decay: float = 0.0
    schedule: Literal["step", "cosine"] = "step"
    lr_decay: float = 1.0
    lr_decay_every: int = 5
    warmup: int = 0
    clip: float | None = None
    patience: int | None = 5
    select: str = "ndcg@10"
    eval_every: int = 1
    valid_queries: int = 20_000
    precision: Literal["float32", "tf32", "bf16"] = "tf32"
    seed: int = 0

    @property
    def width(self) -> int:
        """Dimensions of the vectors that are compared: those of the item tower, and one for a bias."""
        return (self.hidden[-1] if self.item_features else self.dim) + self.item_bias


@dataclass(frozen=True)
class Term:
    """One summand of the training loss: weight * mean of loss(step, negatives(step))."""

    weight: float
    negatives: Negatives
    loss: Loss = sampled_softmax


@dataclass(frozen=True)
class Run:
    """All that is trained and how: towers, negatives, temperature, settings; and the recipe that made it."""

    model: Retriever
    terms: tuple[Term, ...]
    temperature: nn.Module
    setup: Setup
    recipe: str = "custom"
    arguments: dict[str, Any] | None = None

    def modules(self) -> nn.ModuleDict:
        """Everything with parameters or state, by name, for the optimiser and the checkpoint."""
        terms = {f"term{i}": term.negatives for i, term in enumerate(self.terms)}
        losses = {f"loss{i}": term.loss for i, term in enumerate(self.terms) if isinstance(term.loss, nn.Module)}
        return nn.ModuleDict({"model": self.model, "temperature": self.temperature, **terms, **losses})


def compose(data: Interactions, setup: Setup, *terms: Term) -> Run:
    """A run of your own: towers and temperature from the setup, the terms as given."""
    temperature = Learned(setup.tau) if setup.learn_tau else Fixed(setup.tau)
    past = histories(data, setup.history + 1) if setup.query_tower == "history" else None
    model = retriever(setup, data.n_queries, data.n_items, data.item_table, past)
    if setup.init == "spectral":
        start_from(data.positives(), model, setup.seed)
    return Run(model, terms, temperature, setup)


def retriever(
    setup: Setup, n_queries: int, n_items: int, item_table: pl.DataFrame | None = None, past: Histories | None = None
) -> Retriever:
    """The two towers that a setup asks for, initialised from its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        sparse = setup.optimizer != "adam"
        item: IdTower | FeatureTower = IdTower(n_items, setup.dim, setup.init_std, sparse)
        if setup.item_features:
            if item_table is None:
                raise UserError(f"item_features={','.join(setup.item_features)} needs an items table: give one with --items FILE")
            features = Features.from_table(item_table, setup.item_features)
            item = FeatureTower(n_items, setup.dim, features, setup.hidden, init_std=setup.init_std, sparse=sparse)
        query: nn.Module
        if past is not None:
            query = HistoryTower(item, past, setup.history, setup.pooling)
        else:
            query = IdTower(n_queries, item.dim, setup.init_std, sparse)
        bias = IdTower(n_items, 1, 0.0, sparse) if setup.item_bias else None
        return Retriever(query, item, setup.score, item_bias=bias)
