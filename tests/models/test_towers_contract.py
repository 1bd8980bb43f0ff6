"""All towers keep the contract, one of a user's too; each deliberately wrong tower breaks the test that is about it."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.data.features import Features
from sparring.data.histories import Context, Histories
from sparring.data.texts.texts import tokenize
from sparring.data.texts.tokenizers import WordTokenizer
from sparring.models.attention import HstuBlock, LigrBlock, SasRecBlock
from sparring.models.hashed import HashedIds
from sparring.models.histories import HistoryTower
from sparring.models.item_corrections import Augmented
from sparring.models.parts import Categories, Concat, Dense, DescribedHistory, FeatureTower, Perceptron, Sum, Tags
from sparring.models.sequences import SequenceTower
from sparring.models.text import BagEncoder, TextTower
from sparring.models.towers import HistoryReader, IdTower, UnitTower
from sparring.testing import TowersContract

N, DIM = 6, 4
COLUMNS = pl.DataFrame({"kind": ["a", "a", "b", "b", "c", None], "tags": [["x"], ["x", "y"], [], ["z"], ["y"], ["x"]]})
FEATURES = Features.from_table(COLUMNS, ["kind", "tags"])
VECTORS = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
PAST = Histories(torch.tensor([0, 2, 2, 3, 6, 7, 8]), torch.tensor([0, 1, 5, 2, 2, 3, 4, 0], dtype=torch.int32))
TESTS = [name for name in dir(TowersContract) if name.startswith("test_")]


class Layered(nn.Module):
    """A user's tower: a table, a layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.table, self.layer, self.dropout = N, nn.Embedding(N, DIM), nn.Linear(DIM, DIM), nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.dropout(self.layer(self.table(ids)))
        return vectors


class Halved(HistoryReader):
    """A user's tower around one of histories."""

    def __init__(self, history: HistoryReader) -> None:
        super().__init__()
        self.n, self.history = N, history

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.history(ids) / 2
        return vectors

    def encode_history(self, items: Tensor) -> Tensor:
        return self.history.encode_history(items) / 2


def text_tower() -> TextTower:
    encoder = BagEncoder(WordTokenizer(8), torch.randn(8, DIM))
    strings = ["red shoe", "blue shoe", "", "hat", "a red hat", "green one two three four five six seven"]
    return TextTower(encoder, tokenize(strings, encoder.tokenizer, 16), 16)


TOWERS: dict[str, Callable[[], nn.Module]] = {
    "ids": lambda: IdTower(N, DIM),
    "ids, dense gradient": lambda: IdTower(N, DIM, sparse=False),
    "embedding": lambda: nn.Embedding(N, DIM),
    "units": lambda: UnitTower(N),
    "hashed ids": lambda: HashedIds(range(N), 5, DIM),
    "categories": lambda: Categories(FEATURES.categorical, FEATURES.cardinalities, DIM),
    "tags": lambda: Tags(FEATURES.tags[0], DIM),
    "dense": lambda: Dense(VECTORS),
    "sum": lambda: Sum(IdTower(N, 3), Dense(VECTORS)),
    "concat": lambda: Concat(IdTower(N, DIM), Dense(VECTORS), Tags(FEATURES.tags[0], 2)),
    "perceptron": lambda: Perceptron(Dense(VECTORS), (5,), DIM),
    "features": lambda: FeatureTower(N, DIM, FEATURES, vectors=VECTORS),
    "texts": text_tower,
    "history": lambda: HistoryTower(IdTower(N, DIM), PAST, 3),
    "history, attention": lambda: HistoryTower(IdTower(N, DIM), PAST, 3, "attention"),
    "history, sum": lambda: HistoryTower(IdTower(N, DIM), PAST, 3, "sum"),
    "history by SASRec": lambda: SequenceTower(IdTower(N, DIM), PAST, 3, [SasRecBlock(DIM, dropout=0.0)], 0.0),
    "history by LiGR": lambda: SequenceTower(IdTower(N, DIM), PAST, 3, [LigrBlock(DIM, dropout=0.0)], 0.0),
    "history by HSTU": lambda: SequenceTower(
        IdTower(N, DIM), PAST, 3, [HstuBlock(DIM, dropout=0.0, length=3)], 0.0, positions=False
    ),
    "history of features": lambda: HistoryTower(FeatureTower(N, DIM, FEATURES), PAST, 3),
    "history and columns": lambda: DescribedHistory(
        HistoryTower(IdTower(N, DIM), PAST, 3), FeatureTower(N, DIM, FEATURES, with_id=False)
    ),
    "a history in a user's tower": lambda: Halved(HistoryTower(IdTower(N, DIM), PAST, 3)),
    "shared vectors": lambda: Augmented(IdTower(N, DIM), 2),
    "a user's": Layered,
}


def proof_of(make: Callable[[], nn.Module]) -> Any:
    return type("Proof", (TowersContract,), {"make": lambda self: make()})()


@pytest.mark.parametrize("name", TOWERS)
def test_towers_keep_the_contract(name: str) -> None:
    """Every test of the contract passes; only those of a GPU and, without a history, of histories may be skipped."""
    proof, skipped = proof_of(TOWERS[name]), set()
    for test in TESTS:
        try:
            getattr(proof, test)()
        except unittest.SkipTest:
            skipped.add(test)
    allowed = {"test_devices"} if not torch.cuda.is_available() else set()
    assert skipped <= allowed | (set() if "history" in name else {"test_histories", "test_the_future_changes_nothing"})


class Wrong(Layered):
    """A correct tower that the mutants below break in one place."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids))  # type: ignore[no-any-return]


class Normalised(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(super().forward(ids).reshape(-1, DIM)).view(*ids.shape, DIM)  # type: ignore[no-any-return]


class Centred(Wrong):
    def forward(self, ids: Tensor) -> Tensor:
        vectors = super().forward(ids)
        return vectors - vectors.reshape(-1, DIM).mean(0) if ids.numel() > 1 else vectors


class Dropping(Wrong):
    def forward(self, ids: Tensor) -> Tensor:
        return F.dropout(super().forward(ids))  # also in evaluation mode


class Counting(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(ids)


class Squeezing(Wrong):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).squeeze()


class Flat(Wrong):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.reshape(-1))


class Detached(Wrong):
    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids).detach())  # type: ignore[no-any-return]


class Unused(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Plain(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


class Remembering(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.noise: list[float] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.noise = self.noise or torch.rand(DIM).tolist()
        return super().forward(ids) * torch.tensor(self.noise)


class Infinite(Wrong):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) / (ids != N - 1).unsqueeze(-1)


class Empty(HistoryTower):
    def __init__(self) -> None:
        super().__init__(IdTower(N, DIM), PAST, 3)

    def encode_history(self, items: Tensor) -> Tensor:
        present = (items >= 0).unsqueeze(-1)
        return (self.item(items.clamp(min=0)) * present).sum(1) / present.sum(1)  # an empty history divides by 0


class Peeking(SasRecBlock):
    """A block whose positions read their whole window."""

    def forward(self, x: Tensor, allowed: Tensor, position: Tensor, time: Tensor | None = None) -> Tensor:
        return super().forward(x, torch.ones_like(allowed), position, time)


class Newest(HistoryTower):
    """A tower that adds the newest item of a query, whatever it predicts."""

    def __init__(self) -> None:
        super().__init__(IdTower(N, DIM), PAST, 3)

    def forward(self, ids: Tensor, context: Context | None = None) -> Tensor:
        vectors: Tensor = super().forward(ids, context) + self.item(self.items[self.start[ids + 1] - 1])
        return vectors


def peeking() -> SequenceTower:
    return SequenceTower(IdTower(N, DIM), PAST, 3, [Peeking(DIM, dropout=0.0)], 0.0)


@pytest.mark.parametrize(
    ("tower", "test"),
    [
        (Normalised, "test_rows_are_independent"),
        (Centred, "test_rows_are_independent"),
        (Centred, "test_batches_of_one"),
        (Dropping, "test_evaluation_is_deterministic"),
        (Counting, "test_evaluation_is_deterministic"),
        (Squeezing, "test_shapes"),
        (Flat, "test_shapes"),
        (Infinite, "test_shapes"),
        (Detached, "test_gradients_reach_every_parameter"),
        (Unused, "test_gradients_reach_every_parameter"),
        (Plain, "test_state_is_registered"),
        (Remembering, "test_state_round_trip"),
        (Empty, "test_histories"),
        (peeking, "test_the_future_changes_nothing"),
        (Newest, "test_the_future_changes_nothing"),
    ],
)
def test_wrong_towers_break_it(tower: Callable[[], nn.Module], test: str) -> None:
    """The test that is about the mistake fails, and the correct tower passes it."""
    with pytest.raises(AssertionError):
        getattr(proof_of(tower), test)()
    of_histories = test in ("test_histories", "test_the_future_changes_nothing")
    getattr(proof_of(TOWERS["history"] if of_histories else Wrong), test)()


def test_frozen_parameters_have_no_gradient() -> None:
    """A parameter that the contract names as frozen may have no gradient, and must have none."""
    proof = proof_of(Detached)
    proof.frozen = ("table.weight",)
    proof.test_gradients_reach_every_parameter()
    proof = proof_of(Wrong)
    proof.frozen = ("table.weight",)
    with pytest.raises(AssertionError, match="frozen"):
        proof.test_gradients_reach_every_parameter()
