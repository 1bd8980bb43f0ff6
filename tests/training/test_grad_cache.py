"""Gradient cache: a batch encoded in chunks gives the gradient of a batch encoded at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.losses import softmax_loss
from sparring.negatives import InBatch, Negatives, Sampled, Uniform, Union
from sparring.recipes import item_frequency
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup
from sparring.training.fitting import fit
from sparring.training.step import in_chunks, training_step

B = 29
TOWERS: dict[str, Setup] = {
    "id": Setup.of(dim=6),
    "dense id": Setup.of(dim=6, optimizer="adam", score="dot"),
    "features": Setup.of(dim=6, item_features=("category",), hidden=(7,)),
    "history": Setup.of(dim=6, query_tower="history", history=4),
    "history of features": Setup.of(dim=6, query_tower="history", history=4, item_features=("category",), hidden=(5,)),
}


def negatives(name: str, parts: Split) -> Negatives:
    n_items = parts.train.n_items
    found: dict[str, Negatives] = {
        "in-batch": InBatch(item_frequency(parts.train)),
        "sampled": Sampled(Uniform(n_items), 33),
        "per query": Sampled(Uniform(n_items), 5, per_query=True),
        "union": Union(InBatch(item_frequency(parts.train)), Sampled(Uniform(n_items), 33)),
    }
    return found[name]


def gradients(run: Run, parts: Split, chunk: int | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses of one batch, and the gradient of their weighted mean with respect to every parameter."""
    run = Run(run.model, run.terms, run.temperature, run.setup.replaced(chunk=chunk))
    run.model.zero_grad()
    queries, items = (column[:B].long() for column in parts.train.pairs())
    losses, _, _ = training_step(run, queries, items, torch.Generator().manual_seed(3), parts.train.positives())
    (losses * torch.linspace(0.5, 2, B)).mean().backward()
    found = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
    return losses.detach(), {name: g.to_dense() if g.is_sparse else g for name, g in found.items()}


def same_gradients(parts: Split, tower: str, source: str, chunk: int) -> None:
    run = compose(
        parts.train,
        TOWERS[tower],
        Term(0.7, negatives(source, parts)),
        Term(0.3, negatives("in-batch", parts), softmax_loss),
    )
    (direct, want), (chunked, found) = gradients(run, parts, None), gradients(run, parts, chunk)
    torch.testing.assert_close(chunked, direct, rtol=1e-5, atol=1e-6)
    assert found.keys() == want.keys()
    assert any(bool((gradient != 0).any()) for gradient in want.values())
    for name in want:
        torch.testing.assert_close(found[name], want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tower", list(TOWERS))
@pytest.mark.parametrize("source", ["in-batch", "sampled", "per query", "union"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_the_gradient_is_that_of_the_whole_batch(parts: Split, tower: str, source: str, chunk: int) -> None:
    """Losses and the gradient of every parameter are equal, for chunks that do and do not divide the batch."""
    same_gradients(parts, tower, source, chunk)


class Watched(nn.Module):
    """A tower that records the number of ids per call and whether the graph is recorded."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, []  # type: ignore[var-annotated]
        self.dropout = nn.Dropout(0.4)

    def forward(self, ids: Tensor) -> Tensor:
        self.calls.append(ids.numel())
        vectors: Tensor = self.dropout(self.inner(ids))
        return vectors


def test_no_call_sees_more_than_a_chunk_and_each_chunk_is_encoded_twice() -> None:
    """30 ids in chunks of 8 take four forward calls and the same four again in the backward pass; only ids are kept in
    between."""
    tower = Watched(nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 4), nn.Tanh()))
    ids = torch.arange(30).view(5, 6)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        vectors = in_chunks(8, tower, ids)
    assert vectors.shape == (5, 6, 4)
    assert tower.calls == [8, 8, 8, 6]
    assert kept == [8, 8, 8, 6]
    vectors.square().sum().backward()
    assert sorted(tower.calls) == sorted([8, 8, 8, 6] * 2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        in_chunks(None, tower, ids)
    assert sum(kept) > 30 + 2 * 30 * 4  # the inputs and outputs of its layers that a tower keeps in a single call
    in_chunks(30, tower, ids)
    assert tower.calls[8:] == [30, 30]


def test_the_second_pass_draws_the_dropout_of_the_first() -> None:
    """With a random tower the gradient is that of the vectors that the loss used."""
    tower = Watched(nn.Embedding(50, 4))
    ids = torch.arange(30)
    torch.manual_seed(1)
    vectors = in_chunks(7, tower, ids)
    (found,) = torch.autograd.grad(vectors.sum(), tower.inner.weight)
    kept = (vectors.detach() != 0).float() / 0.6
    torch.testing.assert_close(found[:30], kept)


def test_training_with_a_chunk_is_training(parts: Split) -> None:
    """Two epochs with and without chunks give the same model up to rounding."""
    runs = [
        # without dropout: of 4 dimensions it may leave one, whose gradient under cosine is rounding alone
        build("tables", parts.train, {"dim": 4, "epochs": 2, "batch_size": 64, "n": 50, "dropout": 0.0, "chunk": chunk})
        for chunk in (None, 10)
    ]
    first, second = (fit(run, parts, k=(5,), device="cpu") for run in runs)
    assert first.history[1]["loss"] == pytest.approx(second.history[1]["loss"], rel=1e-4)
    torch.testing.assert_close(runs[0].model.item_vectors(), runs[1].model.item_vectors(), rtol=1e-2, atol=1e-2)


def test_a_chunk_of_nothing_is_refused(parts: Split) -> None:
    """chunk=0 raises an error; chunk=none disables chunks."""
    with pytest.raises(UserError, match="chunk"):
        build("tables", parts.train, {"chunk": 0})
    assert build("tables", parts.train, {"chunk": "none"}).setup.batches.chunk is None
    assert build("tables", parts.train, {"chunk": "512"}).setup.batches.chunk == 512
