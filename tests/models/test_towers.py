"""Towers against loops over ids, histories without the positive, and the Retriever."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparring.data.features import Histories
from sparring.models.retriever import Retriever
from sparring.models.towers import HistoryTower, IdTower

HISTORY = [[4, 1, 1, 7], [], [2], [0, 3, 5, 6, 8, 9, 2], [2, 2]]  # oldest first


def csr(lists: list[list[int]]) -> Histories:
    start = np.cumsum([0, *[len(x) for x in lists]])
    return Histories(torch.from_numpy(start), torch.tensor([i for x in lists for i in x], dtype=torch.int32))


def a_history_tower(pooling: str = "mean", last: int = 3) -> HistoryTower:
    torch.manual_seed(0)
    tower = HistoryTower(IdTower(10, 6), csr(HISTORY), last=last, pooling=pooling)  # type: ignore[arg-type]
    if pooling == "attention":
        nn.init.normal_(tower.context)
        nn.init.normal_(tower.recency)
    return tower


def pooled_by_loop(tower: HistoryTower, items: list[int]) -> Tensor:
    """The query vector of a list of items, oldest first, one item at a time."""
    kept = items[-tower.last :]
    if not kept:
        return tower.empty
    x = [tower.item(torch.tensor(i)) for i in kept]
    if tower.pooling == "mean":
        return sum(x, torch.zeros(6)) / len(x)
    logits = [
        tower.context @ torch.tanh(tower.key.weight @ v + tower.key.bias) + tower.recency[len(x) - 1 - j]
        for j, v in enumerate(x)
    ]
    scores = [math.exp(logit.item()) for logit in logits]
    return sum((s / sum(scores) * v for s, v in zip(scores, x, strict=True)), torch.zeros(6))


def test_id_tower_reads_rows_of_any_shape() -> None:
    """(...,) ids give (..., D) rows, of int32 and int64 alike; default vectors have length about 1."""
    tower = IdTower(1000, 16)
    ids = torch.tensor([[1, 5], [5, 0]])
    assert torch.equal(tower(ids), torch.stack([torch.stack([tower.weight[i] for i in row]) for row in ids.tolist()]))
    assert torch.equal(tower(ids.int()), tower(ids))
    assert tower(torch.tensor(3)).shape == (16,)
    assert tower.weight.norm(dim=1).mean().item() == pytest.approx(1.0, abs=0.05)
    assert IdTower(1000, 16, init_std=2.0).weight.std().item() == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("sparse", [True, False])
def test_id_tower_gradient_is_sparse_or_dense(sparse: bool) -> None:
    """The sparse and the dense gradient have the same values."""
    tower = IdTower(50, 4, sparse=sparse)
    tower(torch.tensor([7, 7, 2], dtype=torch.int32)).sum().backward()
    assert tower.weight.grad is not None
    assert tower.weight.grad.is_sparse is sparse
    want = torch.zeros(50, 4)
    want[7], want[2] = 2, 1
    assert torch.equal(tower.weight.grad.to_dense() if sparse else tower.weight.grad, want)


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_history_equals_a_loop(pooling: str) -> None:
    """The last 3 items of each query, repeats counted, in any shape of ids; no history gives the learned vector."""
    tower = a_history_tower(pooling)
    want = torch.stack([pooled_by_loop(tower, items) for items in HISTORY])
    assert torch.allclose(tower(torch.arange(5)), want, atol=1e-6)
    ids = torch.tensor([[3, 1], [0, 3]])
    assert torch.allclose(tower(ids), want[ids], atol=1e-6)
    assert torch.allclose(tower(torch.tensor(4)), want[4], atol=1e-6)
    assert torch.equal(tower(torch.tensor([1])), tower.empty[None])


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_history_leaves_the_positive_out(pooling: str) -> None:
    """All places of the positive are removed and the next older item moves up; other rows are unaffected."""
    tower = a_history_tower(pooling)
    pairs = [(0, 1), (0, 7), (2, 2), (3, 9), (3, 0), (4, 2), (1, 5), (4, 9)]
    queries, items = torch.tensor([q for q, _ in pairs]), torch.tensor([i for _, i in pairs])
    # A history reads last + 1 = 4 items, so that one can be removed.
    want = [pooled_by_loop(tower, [i for i in HISTORY[q][-4:] if i != positive]) for q, positive in pairs]
    got = tower(queries, exclude_items=items)
    assert torch.allclose(got, torch.stack(want), atol=1e-6)
    assert torch.equal(got[5], tower.empty)  # only the positive


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_history_gives_the_positive_no_gradient(pooling: str) -> None:
    """The gradient of the query vector with respect to its positive is exactly zero, so nothing leaks."""
    tower = a_history_tower(pooling)
    tower(torch.tensor([0, 3]), exclude_items=torch.tensor([7, 8])).square().sum().backward()
    touched = tower.item.weight.grad.coalesce().indices()[0].tolist()  # type: ignore[union-attr, operator]
    assert touched == [1, 2, 4, 6, 9]


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_new_queries_are_encoded_from_items_alone(pooling: str) -> None:
    """encode_history of a known query's items equals the tower, wherever the padding is; longer lists are truncated."""
    tower = a_history_tower(pooling)
    items = torch.tensor(
        [[4, 1, 1, 7, -1, -1], [-1, -1, -1, -1, -1, -1], [-1, 2, -1, -1, -1, -1], [6, 8, -1, 9, -1, 2]]
    )
    want = torch.stack([pooled_by_loop(tower, row) for row in ([4, 1, 1, 7], [], [2], [6, 8, 9, 2])])
    assert torch.allclose(tower.encode_history(items), want, atol=1e-6)
    known = tower(torch.tensor([0, 1, 2, 3]))
    assert torch.allclose(tower.encode_history(items), known, atol=1e-6)
    assert torch.equal(tower.encode_history(torch.full((2, 3), -1)), tower.empty.expand(2, 6))


def test_history_gradients_reach_everything() -> None:
    """Items, attention, recency and the empty history's vector get gradients; absent items do not."""
    tower = a_history_tower("attention")
    (tower(torch.tensor([0, 1, 3])) ** 2).sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        assert grad.abs().sum() > 0, name
    touched = tower.item.weight.grad.coalesce().indices()[0].tolist()  # type: ignore[union-attr, operator]
    assert touched == [1, 2, 7, 8, 9]


def test_attention_starts_as_the_mean() -> None:
    """Before training both poolings agree."""
    torch.manual_seed(0)
    item = IdTower(10, 6)
    mean, attention = HistoryTower(item, csr(HISTORY)), HistoryTower(item, csr(HISTORY), pooling="attention")
    assert torch.allclose(mean(torch.tensor([0, 3])), attention(torch.tensor([0, 3])), atol=1e-6)


def test_histories_that_are_all_empty() -> None:
    """If all histories are empty the learned vector is used, with gradient, and new users with items still work."""
    tower = HistoryTower(IdTower(10, 6), csr([[], []]))
    tower(torch.tensor([0, 1]), exclude_items=torch.tensor([1, 2])).sum().backward()
    assert tower.empty.grad is not None
    assert torch.equal(tower.empty.grad, torch.full((6,), 2.0))
    assert torch.allclose(tower.encode_history(torch.tensor([[3, -1]])), tower.item(torch.tensor([3])))


@pytest.mark.parametrize("score", ["cosine", "dot"])
def test_retriever_scales_as_its_score_says(score: str) -> None:
    """Cosine scales every vector to length 1; dot leaves vectors unchanged."""
    model = Retriever(IdTower(7, 4), IdTower(9, 4), score=score)  # type: ignore[arg-type]
    q, e = model.state_dict()["query.weight"], model.state_dict()["item.weight"]
    if score == "cosine":
        q = torch.stack([v / math.sqrt(sum(x * x for x in v.tolist())) for v in q])
        e = torch.stack([v / math.sqrt(sum(x * x for x in v.tolist())) for v in e])
    assert torch.allclose(model.encode_queries(torch.tensor([[2, 6]])), q[torch.tensor([[2, 6]])])
    assert torch.allclose(model.encode_items(torch.arange(9)), e)
    assert torch.allclose(model.item_vectors(block=2), e)
    assert torch.allclose(model.item_vectors(), e)
    assert torch.allclose(model.query_vectors(torch.tensor([6, 0, 1]), block=2), q[torch.tensor([6, 0, 1])])
    assert not model.item_vectors().requires_grad


def test_cosine_of_a_zero_vector_is_finite() -> None:
    """A vector of zeros has score 0 and a finite gradient, not nan."""
    model = Retriever(IdTower(3, 4), IdTower(3, 4, init_std=0.0))
    vectors = model.encode_items(torch.arange(3))
    vectors.sum().backward()
    assert torch.equal(vectors.detach(), torch.zeros(3, 4))
    assert bool(model.item.weight.grad.to_dense().isfinite().all())  # type: ignore[union-attr, operator]


def test_retriever_passes_the_positive_to_a_history_tower_only() -> None:
    """encode_queries(ids, positives) excludes in a HistoryTower, and is ignored by a tower that reads no history."""
    tower = a_history_tower()
    model = Retriever(tower, tower.item, score="dot")
    ids, positives = torch.tensor([0, 3]), torch.tensor([7, 2])
    assert torch.allclose(model.encode_queries(ids, positives), tower(ids, exclude_items=positives))
    assert not torch.allclose(model.encode_queries(ids, positives), model.encode_queries(ids))
    assert torch.allclose(
        model.encode_histories(torch.tensor([[2, -1]])), tower.encode_history(torch.tensor([[2, -1]]))
    )
    plain = Retriever(IdTower(5, 6), tower.item)
    assert torch.equal(plain.encode_queries(ids, positives), plain.encode_queries(ids))
    with pytest.raises(ValueError, match="IdTower cannot encode a history"):
        plain.encode_histories(torch.tensor([[1]]))


def test_retriever_takes_any_modules_and_checks_their_widths() -> None:
    """Custom towers work; different widths are a one-line error."""
    item = nn.Sequential(nn.Embedding(9, 5), nn.Dropout(0.5), nn.Linear(5, 4))
    with pytest.raises(ValueError, match="3 dimensions"):
        Retriever(IdTower(4, 3), item, n_items=9)
    with pytest.raises(ValueError, match="Sequential has no attribute n: pass n_items"):
        Retriever(IdTower(4, 4), item)
    with pytest.raises(ValueError, match="l2"):
        Retriever(IdTower(4, 4), IdTower(4, 4), score="l2")  # type: ignore[arg-type]
    model = Retriever(nn.Embedding(4, 4), item, n_items=9)
    item[2].eval()
    assert torch.allclose(model.item_vectors(), model.item_vectors(block=4))  # no dropout in either mode
    assert item[1].training
    assert not item[2].training
    assert Retriever(item, nn.Embedding(6, 4)).n_items == 6
