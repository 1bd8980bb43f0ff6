"""Unit vectors, inner products of rows and pairwise losses, native and torch's, against plain float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparring.data.splits import split
from sparring.data.synthetic_world import make_world
from sparring.kernels.native import library, pairwise, vectors
from sparring.losses import bpr, hinge
from sparring.models.retriever import NORM_EPS, Retriever
from sparring.models.towers import IdTower
from sparring.recipes.settings import build
from sparring.training.loop import Trainer, TrainingProgress


@pytest.fixture(params=["native", "torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms; the native one must be there."""
    monkeypatch.setattr(library, "active", request.param == "native")
    if request.param == "native" and library.library() is None:
        pytest.skip("needs a C++ compiler")
    return str(request.param)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=NORM_EPS)


def a_model(biased: bool, d: int) -> Retriever:
    torch.manual_seed(0)
    model = Retriever(IdTower(9, d), IdTower(30, d), item_bias=IdTower(30, 1) if biased else None)
    with torch.no_grad():
        model.item.weight[3] = 0.0
        model.item.weight[4] *= 1e-9
    return model


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("d", [1, 37, 64])
def test_items_from_tables(biased: bool, d: int) -> None:
    """Rows of length 1 with their bias, of zero and tiny rows too, and the sparse gradients of both tables."""
    model, ids = a_model(biased, d), torch.tensor([[1, 2, 3], [4, 2, 2]])
    up = torch.randn(2, 3, d + biased)
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
def test_dropout_of_queries(biased: bool) -> None:
    """A dropped dimension is 0, the others are scaled to length 1 again, and the bias dimension stays 1."""
    model, uniform = a_model(biased, 7), torch.rand(4, 7, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([1, 0, 8, 1])
    q = model.dropped(model.encode_queries(ids), 0.3, uniform)
    (q**3).sum().backward()
    table = model.query.weight.detach().double().requires_grad_()
    want = unit(unit(table[ids]) * (uniform >= 0.3) / 0.7)
    want = torch.cat([want, torch.ones(4, 1, dtype=torch.float64)], -1) if biased else want
    (want**3).sum().backward()
    assert torch.allclose(q.double(), want, rtol=1e-6, atol=1e-7)
    assert model.query.weight.grad is not None
    assert torch.allclose(model.query.weight.grad.to_dense().double(), table.grad, rtol=1e-5, atol=1e-6)


def test_inner_products_of_rows(form: str) -> None:
    """Products and both gradients; None where memory is strided, for which callers have another form."""
    a, b = (torch.randn(5, 37, requires_grad=True) for _ in range(2))
    dots = vectors.row_dots(a, b)
    assert (dots is None) == (form == "torch")
    assert vectors.row_dots(a.T, b.T) is None
    if dots is not None:
        (dots * torch.arange(5.0)).sum().backward()
        assert torch.allclose(dots.double(), (a.double() * b.double()).sum(1), atol=1e-5)
        assert a.grad is not None
        assert torch.allclose(a.grad, torch.arange(5.0).unsqueeze(1) * b.detach())


@pytest.mark.parametrize("margin", [None, 0.3])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("exclude", ["none", "positive", "known"])
def test_pairwise_losses(form: str, margin: float | None, n: int, exclude: pairwise.Excluded) -> None:
    """Losses and gradients equal loops over named negatives; a query whose negatives are all excluded has none."""
    if form == "torch":
        return  # the general step is the torch form: see the next test
    g = torch.Generator().manual_seed(2)
    users, items = (torch.randn(rows, 5, generator=g) for rows in (6, 8))
    q, positive = torch.tensor([0, 5, 2, 2]), torch.tensor([1, 7, 0, 3])
    negative = torch.randint(8, (4, n), generator=g)
    negative[0] = 1
    lists = [[1, 2], [], [0, 3, 5], [], [], [7]]
    known = torch.tensor([0, 2, 2, 5, 5, 5, 6]), torch.tensor([1, 2, 0, 3, 5, 7], dtype=torch.int32)
    scale, tau = torch.rand(4, generator=g), 0.5
    losses, by_query, by_item = pairwise.pairwise(
        users, items, q, positive, negative, scale, tau, margin, exclude, known
    )
    u, e = users.double().requires_grad_(), items.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        out = {"none": [], "positive": [int(positive[i])], "known": lists[int(q[i])]}[exclude]
        kept = [j for j in negative[i].tolist() if j not in out]
        apart = [(u[q[i]] @ (e[j] - e[positive[i]])) / tau for j in kept]
        terms = [torch.log1p(x.exp()) if margin is None else (margin + x).clamp(min=0) for x in apart]
        want = sum(terms) / len(terms) if terms else torch.zeros((), dtype=torch.float64)
        assert math.isclose(float(losses[i]), want.item(), rel_tol=1e-5, abs_tol=1e-6)
        total = total + scale[i] * want
    total.backward()
    got_u = torch.zeros(6, 5).index_add_(0, q, by_query)
    got_e = torch.zeros(8, 5).index_add_(0, torch.cat([positive, negative.flatten()]), by_item)
    assert torch.allclose(got_u.double(), u.grad, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
    assert torch.allclose(got_e.double(), e.grad, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings", [{}, {"exclude": "positive", "n": 3, "optimizer": "row-adam", "weight_decay": 0.01}, {"tau": 0.5}]
)
def test_the_direct_step_trains_as_the_general_one(form: str, settings: dict[str, object]) -> None:
    """The same draws, losses and tables as the general step after two epochs; other runs have no direct step."""
    parts = split(make_world(80, 50, exposure=0.5, relevant=0.3, seed=3).interactions, "random", valid=0.1, test=0.1)
    found = []
    for direct in (True, False):
        run = build("bpr", parts.train, {"dim": 7, "batch_size": 64, "epochs": 2, **settings})
        trainer = Trainer(run, parts, torch.device("cpu"), None, TrainingProgress())
        assert (trainer.direct is not None) == (form == "native")
        trainer.direct = trainer.direct if direct else None
        losses = []
        for _ in range(2):
            losses.append(trainer.epoch())
            trainer.state.epoch, trainer.state.step, trainer.state.rows = trainer.state.epoch + 1, 0, 0
        found.append((losses, [p.detach().clone() for p in run.model.parameters()], trainer.generator.get_state()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.equal(found[0][2], found[1][2])
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert float((mine - theirs).norm()) <= 2e-4 * float(theirs.norm())


@pytest.mark.parametrize("settings", [{"score": "cosine"}, {"clip": 1.0}, {"optimizer": "adam"}, {"dropout": 0.1}])
def test_runs_without_a_direct_step(settings: dict[str, object]) -> None:
    """Cosines, clipping, a dense rule and dropout go through the general step."""
    parts = split(make_world(40, 30, exposure=0.5, relevant=0.3, seed=3).interactions, "random", valid=0.1, test=0.1)
    run = build("bpr", parts.train, {"dim": 4, "epochs": 1, **settings})
    assert Trainer(run, parts, torch.device("cpu"), None, TrainingProgress()).direct is None


def test_an_id_outside_its_table(form: str) -> None:
    """No memory outside a table is read."""
    if form == "native":
        table, ids = torch.zeros(3, 2), torch.tensor([0])
        with pytest.raises(IndexError):
            pairwise.pairwise(table, table, ids, ids, torch.tensor([[3]]), torch.ones(1), 1.0)
        with pytest.raises(IndexError):
            vectors.unit_rows(table, torch.tensor([-1]), None, 0)


def test_margins_of_losses() -> None:
    """The direct step knows our pairwise losses, and takes no other for one of them."""
    from sparring.losses.pairwise import margin_of

    assert margin_of(bpr) == (None,)
    assert margin_of(hinge(0.2)) == (0.2,)
    assert margin_of(lambda step, bag: step.q) is None
