"""A run of your own: Setup (what every recipe shares), Term (one summand of the loss), compose (towers and all)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparring.core.errors import UserError
from sparring.data.batches import RandomBatches
from sparring.data.features import Features, Histories, histories
from sparring.data.interactions import Ids, Interactions
from sparring.data.texts.encoder import Pooling
from sparring.data.texts.texts import Role, Texts, find_texts, text_of, tokenized
from sparring.losses import Fixed, Learned, Loss, sampled_softmax
from sparring.models.encoders import load_encoder, open_encoder
from sparring.models.item_corrections import Augmented, Centroids, shared_vectors
from sparring.models.retriever import Retriever
from sparring.models.rowwise_tables import RowWiseTable, fitting, id_table
from sparring.models.sharded_tables import ShardedTable
from sparring.models.spectral import start_from
from sparring.models.text import TextTower
from sparring.models.towers import FeatureTower, HistoryTower, IdTower
from sparring.negatives import Negatives
from sparring.recipes.setup import Setup, check


@dataclass(frozen=True)
class Term:
    """One summand of the training loss: weight * mean of loss(step, negatives(step))."""

    weight: float
    negatives: Negatives
    loss: Loss = sampled_softmax

    def __post_init__(self) -> None:
        if not isinstance(self.weight, float | int):
            raise UserError(
                f"a Term is Term(weight, negatives, loss): its weight must be a number, got {_name(self.weight)}"
            )
        if not isinstance(self.negatives, Negatives):
            raise UserError(
                f"a Term is Term(weight, negatives, loss): its negatives must be Negatives, got {_name(self.negatives)}"
            )
        if not callable(self.loss):
            raise UserError(
                f"a Term is Term(weight, negatives, loss): its loss must be a function, got {_name(self.loss)}"
            )


@dataclass(frozen=True)
class Classifiers:
    """One vector per item, trained over frozen query vectors from where the item tower puts it, and fused with it (M3, M4 of NGAME)."""

    epochs: int = 100
    batch_size: int = 2048
    lr: float = 1e-3
    warmup: int = 500
    dropout: float = 0.5
    positives: int = 3
    negatives: int = 5
    margin: float = 0.2
    size: int = 2
    every: int = 5
    grow: tuple[int, ...] = (15, 20, 25, 30, 35, 40)
    start: int = 10
    fusion: bool = True
    beta: float = 1.0
    shortlist: int = 300


@dataclass(frozen=True)
class Run:
    """All that is trained and how: towers, negatives, temperature, settings; and the recipe that made it."""

    model: Retriever
    terms: tuple[Term, ...]
    temperature: nn.Module
    setup: Setup
    recipe: str = "custom"
    arguments: dict[str, Any] | None = None
    batches: RandomBatches | None = None  # who shares a batch, where not anyone with anyone

    @property
    def classifiers(self) -> Classifiers | None:
        """What is trained on top, once the towers are (stages.py)."""
        setup = self.setup
        if not setup.classifiers:
            return None
        return Classifiers(setup.classifiers, setup.clf_batch_size, setup.clf_lr, setup.clf_warmup, fusion=setup.fusion)

    def modules(self) -> nn.ModuleDict:
        """Everything with parameters or state, by name, for the optimiser and the checkpoint."""
        terms = {f"term{i}": term.negatives for i, term in enumerate(self.terms)}
        losses = {f"loss{i}": term.loss for i, term in enumerate(self.terms) if isinstance(term.loss, nn.Module)}
        batches = {} if self.batches is None else {"batches": self.batches}
        return nn.ModuleDict({"model": self.model, "temperature": self.temperature, **terms, **losses, **batches})


def compose(data: Interactions, setup: Setup, *terms: Term) -> Run:
    """A run of your own: towers and temperature from the setup, the terms as given."""
    if not isinstance(data, Interactions):
        raise UserError(f"compose needs the training part, Interactions such as split.train, got {_name(data)}")
    if not isinstance(setup, Setup):
        raise UserError(f"compose needs a Setup, got {_name(setup)}")
    check(setup)
    check_terms(terms, data.n_items)
    setup = fitting(setup, data.n_queries, data.n_items)
    sides = text_sides(setup)
    if "query" in sides:
        setup = replace(setup, query_text=setup.query_text or find_texts(data, "query"))
    if "item" in sides:
        setup = replace(setup, item_text=setup.item_text or find_texts(data, "item"))
    if setup.tau is None:
        setup = replace(setup, tau=tau_of(data) if setup.score == "cosine" else 1.0)
    assert setup.tau is not None
    temperature = Learned(setup.tau) if setup.learn_tau else Fixed(setup.tau)
    past = histories(data, setup.history + 1) if setup.query_tower == "history" else None
    model = retriever(setup, Ids(data.query_ids, data.item_ids, data.query_table, data.item_table), past)
    if setup.init == "spectral":
        start_from(data.positives(), model, setup.seed)
    return Run(model, terms, temperature, setup)


def check_terms(terms: tuple[Term, ...], n_items: int) -> None:
    """Refuse what could not be trained: no terms, other things than terms, negatives from a larger catalogue than there is."""
    if not terms:
        raise UserError("a run needs at least one Term: compose(data, setup, Term(1.0, negatives))")
    for term in terms:
        if not isinstance(term, Term):
            raise UserError(f"compose needs Terms after the setup, got {_name(term)}: write Term(1.0, negatives)")
        for module in term.negatives.modules():
            size = getattr(module, "n_items", None)
            if isinstance(size, int) and size > n_items:
                raise UserError(f"{_name(module)} is over {size:,} items, but the catalogue has {n_items:,}")


def _name(value: object) -> str:
    """What something is, for an error: its type, or the value itself where that is short."""
    return repr(value) if isinstance(value, str | int | float | type(None)) else type(value).__name__


def tau_of(data: Interactions) -> float:
    """A temperature for cosines from the size and density of the data: 4.7 / x^2, x = log(n_queries n_items / (2 pairs)), in [0.05, 0.5].

    Adap-tau has gap / x, where gap is how much nearer a pair is than any query and item; the gap of what did best on validation parts grew
    as x fell, from 0.7 (Gowalla, x = 6.7) to 1.4 (the demo groceries, x = 3.3). Chen et al., Adap-tau, WWW 2023, equation 14.
    """
    x = math.log(max(data.n_queries * data.n_items / (2 * max(len(data), 1)), math.e))
    return round(min(max(4.7 / x**2, 0.05), 0.5), 3)


def retriever(setup: Setup, ids: Ids, past: Histories | None = None, saved: Path | None = None) -> Retriever:
    """The two towers that a setup asks for, initialised from its seed; text towers are built from the run folder `saved`, where given."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        sparse = setup.optimizer != "adam"
        n_items = len(ids.item_ids)
        written = text_towers(setup, ids, saved)
        item: TextTower | IdTower | RowWiseTable | ShardedTable | FeatureTower | Centroids | Augmented
        item = written["item"] if "item" in written else _item_tower(setup, ids, sparse)
        query: nn.Module
        if "query" in written:
            query = written["query"]
        elif past is not None:
            query = HistoryTower(item, past, setup.history, "attention" if setup.pooling == "attention" else "mean")
        else:
            query = id_table(setup, len(ids.query_ids), item.dim)
        if setup.centroids:
            item = Centroids(item)
        if setup.auxiliary:
            shared, private = shared_vectors(n_items, setup.auxiliary, setup.private)
            item = Augmented(item, shared + private, setup.auxiliary_init, sparse, private, setup.seed)
        bias = IdTower(n_items, 1, 0.0, sparse) if setup.item_bias else None
        return Retriever(query, item, setup.score, item_bias=bias)


def _item_tower(setup: Setup, ids: Ids, sparse: bool) -> IdTower | RowWiseTable | ShardedTable | FeatureTower:
    n_items = len(ids.item_ids)
    if setup.clf_shards > 1 and not setup.classifiers:  # the classifiers themselves: what trains them has none after it
        return ShardedTable(n_items, setup.dim, setup.clf_shards, setup.init_std, sparse)
    if not setup.item_features:
        return id_table(setup, n_items, setup.dim)
    if ids.item_table is None:
        raise UserError(
            f"item_features={','.join(setup.item_features)} needs an items table: give one with --items FILE"
        )
    features = Features.from_table(ids.item_table, setup.item_features)
    return FeatureTower(n_items, setup.dim, features, setup.hidden, init_std=setup.init_std, sparse=sparse)


def text_sides(setup: Setup) -> list[Role]:
    """Which towers of a setup read texts: `query`, `item`, both or none."""
    towers: dict[Role, str] = {"query": setup.query_tower, "item": setup.item_tower}
    return [side for side, kind in towers.items() if kind == "text"]


def text_towers(setup: Setup, ids: Ids, saved: Path | None = None) -> dict[str, TextTower]:
    """The text towers that a setup asks for, by side."""
    sides = text_sides(setup)
    if not sides:
        return {}
    sparse = setup.optimizer != "adam"
    pooling: Pooling = "cls" if setup.pooling == "cls" else "mean"
    towers: dict[str, TextTower] = {}
    for side in sides:
        if towers and setup.share_encoder:
            encoder = towers["query"].encoder
        elif saved is not None:
            encoder = load_encoder(saved / encoder_folder(setup, side), pooling, sparse, weights=False)
        else:
            assert setup.encoder is not None  # else `check` has refused it
            encoder = open_encoder(setup.encoder, setup.dim, pooling, sparse, setup.init_std)
        if saved is not None:
            texts = Texts.load(saved / f"{side}_texts")
        else:
            texts = tokenized(text_of(ids, side, getattr(setup, f"{side}_text")), encoder.tokenizer, setup.max_len)
        towers[side] = TextTower(encoder, texts, setup.max_len)
    return towers


def encoder_folder(setup: Setup, side: str) -> str:
    """Where in a run folder the encoder of a side is kept."""
    return "encoder" if setup.share_encoder else f"{side}_encoder"
