"""Towers against loops over ids, and the Retriever."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from sparring.data.features import Features
from sparring.models.retriever import Retriever
from sparring.models.towers import FeatureTower, IdTower


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


def some_features(n: int = 6) -> Features:
    codes = np.array([[0, 1], [1, 2], [2, 0], [1, 1], [0, 0], [2, 2]], np.int32)[:n]
    return Features(codes, (3, 3), np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32), ("a", "b", "x"))


@pytest.mark.parametrize("with_id", [True, False])
def test_feature_tower_equals_a_loop(with_id: bool) -> None:
    """Each column has its own vectors, code 0 (missing) included; then two layers with one ReLU between them."""
    torch.manual_seed(1)
    features = some_features()
    tower = FeatureTower(6, 4, features, hidden=(8, 3), with_id=with_id)
    ids = torch.tensor([[0, 5], [2, 2]])
    got = tower(ids)
    assert got.shape == (2, 2, 3)
    assert tower(torch.tensor(1)).shape == (3,)
    first, second = tower.layers[0], tower.layers[2]
    assert len(tower.layers) == 3
    for i, vector in zip(ids.flatten().tolist(), got.reshape(-1, 3), strict=True):
        x = [tower.id.weight[i]] if tower.id is not None else []
        for column, code in enumerate(features.categorical[i].tolist()):
            x.append(tower.values.weight[3 * column + code])  # type: ignore[union-attr]
        x.append(torch.from_numpy(features.dense[i]))
        hidden = [max(0.0, (w @ torch.cat(x) + b).item()) for w, b in zip(first.weight, first.bias, strict=True)]  # type: ignore[arg-type]
        assert torch.allclose(vector, second.weight @ torch.tensor(hidden) + second.bias, atol=1e-5)  # type: ignore[operator]


def test_feature_tower_missing_category_learns() -> None:
    """The vector of a missing value gets a gradient, and the rows of other codes do not."""
    tower = FeatureTower(6, 4, some_features())
    tower(torch.tensor([4])).square().sum().backward()  # codes (0, 0)
    grad = tower.values.weight.grad.to_dense()  # type: ignore[union-attr]
    assert [r for r in range(6) if grad[r].abs().sum() > 0] == [0, 3]
    assert tower.dim == 16
    assert tower.layers[0].out_features == 32


def test_feature_tower_travels_with_its_features() -> None:
    """state_dict includes the features, so a tower built over blank ones becomes the trained one."""
    tower = FeatureTower(6, 4, some_features())
    blank = Features(np.zeros((6, 2), np.int32), (3, 3), np.zeros((6, 2), np.float32), ("a", "b", "x"))
    other = FeatureTower(6, 4, blank)
    other.load_state_dict(tower.state_dict())
    assert torch.equal(other(torch.arange(6)), tower(torch.arange(6)))


def test_feature_tower_errors_are_one_line() -> None:
    """A wrong number of rows, no layers and no columns raise one-line errors."""
    with pytest.raises(ValueError, match="6 ids"):
        FeatureTower(7, 4, some_features())
    with pytest.raises(ValueError, match="at least one layer"):
        FeatureTower(6, 4, some_features(), hidden=())
    nothing = Features(np.zeros((6, 0), np.int32), (), np.zeros((6, 0), np.float32), ())
    with pytest.raises(ValueError, match="at least one feature"):
        FeatureTower(6, 4, nothing, with_id=False)
    assert FeatureTower(6, 4, nothing)(torch.tensor([1])).shape == (1, 16)


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


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_mixtures_inside_the_tower(layer: int, bias: bool) -> None:
    """Items are mixed after the first layers and passed through the rest; a share of 1 is the item; biases mix."""
    torch.manual_seed(0)
    features = Features(torch.randint(3, (10, 2)).int().numpy(), (3, 3), torch.randn(10, 2).numpy(), tuple("abcd"))
    tower = FeatureTower(10, 4, features, hidden=(7, 6, 5))
    model = Retriever(IdTower(3, 5), tower, item_bias=IdTower(10, 1) if bias else None)
    ids, weights = torch.tensor([[1, 4, 4], [9, 0, 2]]), torch.rand(2, 4, 3)
    got = model.encode_mixtures(ids, weights, layer)
    for g in range(2):
        hidden = [tower.layers[: 2 * layer](tower._joined(ids[g, m : m + 1]))[0] for m in range(3)]
        for v in range(4):
            mixed = tower.layers[2 * layer :](sum((weights[g, v, m] * hidden[m] for m in range(3)), torch.zeros(())))
            mixed = mixed / mixed.norm()
            if bias:
                own = sum(float(weights[g, v, m] * model.item_bias(ids[g, m]).detach()) for m in range(3))  # type: ignore[misc]
                mixed = torch.cat([mixed, torch.tensor([own])])
            torch.testing.assert_close(got[g, v], mixed, rtol=1e-4, atol=1e-5)
    alone = model.encode_mixtures(ids, torch.eye(3).expand(2, 3, 3), layer)
    torch.testing.assert_close(alone, model.encode_items(ids), rtol=1e-4, atol=1e-5)


def test_mixtures_need_hidden_layers() -> None:
    """A table has no layers and a tower of two has no third: both are one-line errors."""
    with pytest.raises(ValueError, match="hidden layers"):
        Retriever(IdTower(3, 5), IdTower(4, 5)).encode_mixtures(torch.zeros(1, 2).long(), torch.ones(1, 1, 2), 1)
    tower = FeatureTower(
        10, 4, Features(np.zeros((10, 1), np.int32), (1,), np.zeros((10, 0), np.float32), ("a",)), hidden=(7, 5)
    )
    with pytest.raises(ValueError, match="0 to 1"):
        tower.mixtures(torch.zeros(1, 2).long(), torch.ones(1, 1, 2), 2)
