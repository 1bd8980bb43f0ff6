"""A run of your own: Setup (what every recipe shares), Term (one summand of the loss), compose (towers and all)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from sparring.augmented import Augmented, shared_vectors
from sparring.data.batches import RandomBatches
from sparring.data.features import Features, Histories, histories
from sparring.data.interactions import Ids, Interactions
from sparring.data.texts import Texts, text_of, tokenized
from sparring.errors import UserError
from sparring.losses import Fixed, Learned, Loss, sampled_softmax
from sparring.negatives import Negatives
from sparring.pretrained import Pooling, load_encoder, open_encoder, width
from sparring.spectral import start_from
from sparring.towers import FeatureTower, HistoryTower, IdTower, Retriever
from sparring.towers_text import TextTower


@dataclass(frozen=True)
class Setup:
    """Model and training settings that every recipe shares."""

    dim: int = 64
    score: Literal["cosine", "dot"] = "cosine"
    tau: float = 0.1
    learn_tau: bool = False
    init: Literal["normal", "spectral"] = "normal"
    init_std: float = 0.1
    query_tower: Literal["id", "history", "text"] = "id"
    item_tower: Literal["id", "text"] = "id"
    history: int = 50
    pooling: Literal["mean", "attention", "cls"] = "mean"
    encoder: str | None = None
    share_encoder: bool = True
    max_len: int = 32
    item_features: tuple[str, ...] = ()
    item_bias: bool = False
    auxiliary: int = 0
    private: int = 0
    auxiliary_init: Literal["xavier", "zeros"] = "xavier"
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
    precision: Literal["float32", "tf32", "bf16"] = "tf32"
    seed: int = 0

    @property
    def width(self) -> int:
        """Dimensions of the vectors that are compared: those of the item tower, and one for a bias."""
        if self.item_tower == "text" and self.encoder is not None:
            return width(self.encoder, self.dim) + self.item_bias
        return (self.hidden[-1] if self.item_features else self.dim) + self.item_bias


@dataclass(frozen=True)
class Term:
    """One summand of the training loss: weight * mean of loss(step, negatives(step))."""

    weight: float
    negatives: Negatives
    loss: Loss = sampled_softmax


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
    classifiers: Classifiers | None = None  # what is trained on top, once the towers are (stages.py)

    def modules(self) -> nn.ModuleDict:
        """Everything with parameters or state, by name, for the optimiser and the checkpoint."""
        terms = {f"term{i}": term.negatives for i, term in enumerate(self.terms)}
        losses = {f"loss{i}": term.loss for i, term in enumerate(self.terms) if isinstance(term.loss, nn.Module)}
        batches = {} if self.batches is None else {"batches": self.batches}
        return nn.ModuleDict({"model": self.model, "temperature": self.temperature, **terms, **losses, **batches})


def compose(data: Interactions, setup: Setup, *terms: Term) -> Run:
    """A run of your own: towers and temperature from the setup, the terms as given."""
    temperature = Learned(setup.tau) if setup.learn_tau else Fixed(setup.tau)
    past = histories(data, setup.history + 1) if setup.query_tower == "history" else None
    model = retriever(setup, Ids(data.query_ids, data.item_ids, data.query_table, data.item_table), past)
    if setup.init == "spectral":
        start_from(data.positives(), model, setup.seed)
    if isinstance(model.item, Augmented):
        private = shared_vectors(data.n_items, setup.auxiliary, setup.private)[1]
        model.item.assign(torch.from_numpy(data.counts()), private, torch.Generator().manual_seed(setup.seed))
    return Run(model, terms, temperature, setup)


def retriever(setup: Setup, ids: Ids, past: Histories | None = None, saved: Path | None = None) -> Retriever:
    """The two towers that a setup asks for, initialised from its seed; text towers are built from the run folder `saved`, where given."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        sparse = setup.optimizer != "adam"
        n_items = len(ids.item_ids)
        written = text_towers(setup, ids, saved)
        item: TextTower | IdTower | FeatureTower | Augmented = written["item"] if "item" in written else _item_tower(setup, ids, sparse)
        query: nn.Module
        if "query" in written:
            query = written["query"]
        elif past is not None:
            query = HistoryTower(item, past, setup.history, "attention" if setup.pooling == "attention" else "mean")
        else:
            query = IdTower(len(ids.query_ids), item.dim, setup.init_std, sparse)
        if setup.auxiliary:
            item = Augmented(item, sum(shared_vectors(n_items, setup.auxiliary, setup.private)), setup.auxiliary_init, sparse)
        bias = IdTower(n_items, 1, 0.0, sparse) if setup.item_bias else None
        return Retriever(query, item, setup.score, item_bias=bias)


def _item_tower(setup: Setup, ids: Ids, sparse: bool) -> IdTower | FeatureTower:
    n_items = len(ids.item_ids)
    plain = IdTower(n_items, setup.dim, setup.init_std, sparse)
    if not setup.item_features:
        return plain
    if ids.item_table is None:
        raise UserError(f"item_features={','.join(setup.item_features)} needs an items table: give one with --items FILE")
    features = Features.from_table(ids.item_table, setup.item_features)
    return FeatureTower(n_items, setup.dim, features, setup.hidden, init_std=setup.init_std, sparse=sparse)


def text_towers(setup: Setup, ids: Ids, saved: Path | None = None) -> dict[str, TextTower]:
    """The text towers that a setup asks for, by side: `query`, `item`, both or none."""
    sides = [side for side, kind in (("query", setup.query_tower), ("item", setup.item_tower)) if kind == "text"]
    if not sides:
        return {}
    if setup.encoder is None:
        raise UserError(f"{sides[0]}_tower=text needs an encoder: set encoder to bag, minilm, a folder or a name on the Hugging Face hub")
    sparse = setup.optimizer != "adam"
    pooling: Pooling = "cls" if setup.pooling == "cls" else "mean"
    towers: dict[str, TextTower] = {}
    for side in sides:
        if towers and setup.share_encoder:
            encoder = towers["query"].encoder
        elif saved is not None:
            encoder = load_encoder(saved / encoder_folder(setup, side), pooling, sparse, weights=False)
        else:
            encoder = open_encoder(setup.encoder, setup.dim, pooling, sparse, setup.init_std)
        if saved is not None:
            texts = Texts.load(saved / f"{side}_texts")
        else:
            texts = tokenized(text_of(ids, side), encoder.tokenizer, setup.max_len)
        towers[side] = TextTower(encoder, texts, setup.max_len)
    return towers


def encoder_folder(setup: Setup, side: str) -> str:
    """Where in a run folder the encoder of a side is kept."""
    return "encoder" if setup.share_encoder else f"{side}_encoder"
