"""Unit vectors and inner products of rows, native, Triton's and torch's, against plain float64."""

from __future__ import annotations

import math
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sparring.core.sparse_rows import lookup
from sparring.kernels import vectors
from sparring.kernels.native import library
from sparring.kernels.native import vectors as native
from sparring.models.retriever import NORM_EPS, Retriever
from sparring.models.towers import IdTower

GPU = torch.cuda.is_available()


@pytest.fixture(params=["native", "triton", "torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All forms; the native one must be there. Without a GPU, Triton's runs in its interpreter."""
    monkeypatch.setattr(library, "active", request.param == "native")
    if request.param == "native" and library.library() is None:
        pytest.skip("needs a C++ compiler")
    if request.param == "triton" and find_spec("triton") is None:
        pytest.skip("needs Triton")
    if request.param == "triton" and not GPU:
        from sparring.kernels import vector_rows

        monkeypatch.setattr(vectors, "native", SimpleNamespace(serves=native.fits, **vars(vector_rows)))
    return str(request.param)


@pytest.fixture
def device(form: str) -> str:
    return "cuda" if form == "triton" and GPU else "cpu"


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=NORM_EPS)


def a_model(biased: bool, d: int, device: str) -> Retriever:
    torch.manual_seed(0)
    model = Retriever(IdTower(9, d), IdTower(30, d), item_bias=IdTower(30, 1) if biased else None).to(device)
    with torch.no_grad():
        model.item.weight[3] = 0.0
        model.item.weight[4] *= 1e-9
    return model


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("d", [1, 37, 64])
def test_items_from_tables(biased: bool, d: int, device: str) -> None:
    """Rows of length 1 with their bias, of zero and tiny rows too, and the sparse gradients of both tables."""
    model, ids = a_model(biased, d, device), torch.tensor([[1, 2, 3], [4, 2, 2]], device=device)
    up = torch.randn(2, 3, d + biased).to(device)
    made = model.encode_items(ids)
    (made * up).sum().backward()
    table = model.item.weight.detach().double().requires_grad_()
    bias = None if model.item_bias is None else model.item_bias.weight.detach().double().requires_grad_()
    want = unit(table[ids]) if bias is None else torch.cat([unit(table[ids]), bias[ids]], -1)
    (want * up).sum().backward()
    assert torch.allclose(made.double(), want, rtol=1e-6, atol=1e-7)
    for mine, theirs in ((model.item.weight, table), (model.item_bias and model.item_bias.weight, bias)):
        if mine is not None and theirs is not None:
            assert mine.grad is not None
            assert mine.grad.is_sparse
            assert torch.allclose(mine.grad.to_dense().double(), theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [True, False])
def test_dropout_of_queries(biased: bool, device: str) -> None:
    """A dropped dimension is 0, the others are scaled to length 1 again, and the bias dimension stays 1."""
    uniform = torch.rand(4, 7, generator=torch.Generator().manual_seed(1)).to(device)
    model, ids = a_model(biased, 7, device), torch.tensor([1, 0, 8, 1], device=device)
    q = model.dropped(model.encode_queries(ids), 0.3, uniform)
    (q**3).sum().backward()
    table = model.query.weight.detach().double().requires_grad_()
    want = unit(unit(table[ids]) * (uniform >= 0.3) / 0.7)
    want = torch.cat([want, torch.ones_like(want[:, :1])], -1) if biased else want
    (want**3).sum().backward()
    assert torch.allclose(q.double(), want, rtol=1e-6, atol=1e-7)
    assert model.query.weight.grad is not None
    assert torch.allclose(model.query.weight.grad.to_dense().double(), table.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("d", [1, 37])
def test_more_rows_than_one_program_takes(d: int, device: str) -> None:
    """Every row of 2,500 is scaled, and has its own gradient."""
    model = a_model(True, d, device)
    ids = torch.randint(5, 30, (2500,), generator=torch.Generator().manual_seed(2)).to(device)  # none is tiny
    up = torch.randn(2500, d + 1, generator=torch.Generator().manual_seed(3)).to(device)
    made = model.encode_items(ids)
    (made * up).sum().backward()
    assert model.item_bias is not None
    table, bias = (part.weight.detach().double().requires_grad_() for part in (model.item, model.item_bias))
    want = torch.cat([unit(table[ids]), bias[ids]], -1)
    (want * up).sum().backward()
    assert torch.allclose(made.double(), want, rtol=1e-6, atol=1e-7)
    assert model.item.weight.grad is not None
    assert torch.allclose(model.item.weight.grad.to_dense().double(), table.grad, rtol=1e-4, atol=1e-4)


def test_numbers_of_dropout_in_another_precision(device: str) -> None:
    """No kernel reads float64 numbers as float32: the result is the same."""
    model, ids = a_model(True, 7, device), torch.tensor([1, 0, 8, 1], device=device)
    uniform = torch.rand(4, 7, generator=torch.Generator().manual_seed(1)).to(device)
    q = model.encode_queries(ids)
    assert torch.allclose(model.dropped(q, 0.3, uniform.double()), model.dropped(q, 0.3, uniform), atol=1e-6)


def test_inner_products_of_rows(form: str, device: str) -> None:
    """Products and both gradients; None where memory is strided, for which callers have another form."""
    a, b = (torch.randn(5, 37, device=device, requires_grad=True) for _ in range(2))
    dots = vectors.row_dots(a, b)
    assert (dots is None) == (form == "torch")
    assert vectors.row_dots(a.T, b.T) is None
    if dots is not None:
        up = torch.arange(5.0, device=device)
        (dots * up).sum().backward()
        assert torch.allclose(dots.double(), (a.double() * b.double()).sum(1), atol=1e-5)
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, up.unsqueeze(1) * b.detach())
        assert torch.allclose(b.grad, up.unsqueeze(1) * a.detach())


def test_an_id_outside_its_table(form: str) -> None:
    """No memory outside a table is read."""
    if form == "native":
        with pytest.raises(IndexError):
            native.unit_rows(torch.zeros(3, 2), torch.tensor([-1]), None, 0)
        for wrong in (-1, 3):
            with pytest.raises(IndexError):
                native.rows(torch.zeros(3, 2), torch.tensor([0, wrong]))


@pytest.mark.parametrize(("n", "d"), [(0, 3), (1, 1), (9, 5), (3000, 16)])
def test_rows_of_a_table(form: str, n: int, d: int) -> None:
    """Every row, by one thread and by several; None where another form serves."""
    table = torch.randn(700, d, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(700, (n,), generator=torch.Generator().manual_seed(1))
    got = native.rows(table, ids)
    if form != "native":
        assert got is None
        return
    assert got is not None
    assert got.shape == (n, d)
    assert got.tolist() == [table[i].tolist() for i in ids.tolist()]
    assert native.rows(table.double(), ids) is None
    assert native.rows(table[:, :-1] if d > 1 else table.T, ids.int()) is None


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 3)])
def test_lookups_of_any_shape(shape: tuple[int, ...]) -> None:
    """One vector per id and one row of the gradient, also where there is no id."""
    table = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.arange(math.prod(shape)).reshape(shape)
    found = lookup(table, ids)
    assert torch.equal(found, table.detach()[ids])
    found.sum().backward()
    assert table.grad is not None
    assert torch.equal(table.grad.to_dense().sum(1), 4.0 * (torch.arange(7) < ids.numel()))
