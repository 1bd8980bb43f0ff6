"""Towers against loops over ids, and the Retriever."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower


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
