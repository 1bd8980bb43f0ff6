"""Row updates, native and torch's, against loops over rows in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from sparring.kernels.native import library
from sparring.training.light_optimizers import Adam
from sparring.training.row_optimizers import RowAdagrad, RowAdam, RowOptimizer

N = 3000  # rows: two passes of the sort
Batch = tuple[Tensor, Tensor]


@pytest.fixture(params=["native", "torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of each update; the native one must be there."""
    monkeypatch.setattr(library, "active", request.param == "native")
    if request.param == "native" and library.library() is None:
        pytest.skip("needs a C++ compiler")
    return str(request.param)


def a_table(d: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(N, d, generator=torch.Generator().manual_seed(0)))


def batches(d: int, size: int) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    ids = [(N * torch.rand(size, generator=g) ** 3).long() for _ in range(3)]
    return [(i, torch.randn(len(i), d, generator=g)) for i in ids]


def updated(rule: RowOptimizer | Adam, table: nn.Parameter, given: list[Batch]) -> Tensor:
    for ids, values in given:
        table.grad = torch.sparse_coo_tensor(ids[None], values, table.shape, check_invariants=False)
        rule.step()
    return table.detach()


def summed(ids: Tensor, values: Tensor) -> dict[int, Tensor]:
    total: dict[int, Tensor] = {}
    for row, value in zip(ids.tolist(), values.double(), strict=True):
        total[row] = total.get(row, torch.zeros_like(value)) + value
    return total


@pytest.mark.parametrize(("d", "size"), [(1, 50), (5, 0), (5, 1), (37, 400), (64, 700)])
@pytest.mark.parametrize("bias", ["row", "step"])
def test_row_adam(d: int, size: int, bias: str) -> None:
    """Odd widths, empty batches and duplicates: values differ from the loop by less than float32 rounds."""
    table, (b1, b2), lr, decay = a_table(d), (0.8, 0.95), 0.03, 0.1
    want, m, v, t = table.detach().double(), {}, {}, {}
    for step, (ids, values) in enumerate(batches(d, size), start=1):
        for row, g in summed(ids, values).items():
            m[row] = b1 * m.get(row, 0) + (1 - b1) * g
            v[row] = b2 * v.get(row, 0) + (1 - b2) * g**2
            t[row] = t.get(row, 0) + 1
            n = t[row] if bias == "row" else step
            move = lr * (m[row] / (1 - b1**n)) / ((v[row] / (1 - b2**n)).sqrt() + 1e-8)
            want[row] = want[row] * (1 - lr * decay) - move
    rule = RowAdam([table], lr=lr, betas=(b1, b2), weight_decay=decay, bias=bias)  # type: ignore[arg-type]
    assert torch.allclose(updated(rule, table, batches(d, size)).double(), want, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize(("d", "size"), [(1, 50), (5, 0), (37, 400)])
def test_row_adagrad(d: int, size: int) -> None:
    """The same for Adagrad: a row's sum grows by the mean square of its gradient."""
    table, lr, decay = a_table(d), 0.05, 0.1
    want, total = table.detach().double(), dict[int, float]()
    for ids, values in batches(d, size):
        for row, g in summed(ids, values).items():
            total[row] = total.get(row, 0.0) + float((g**2).mean())
            want[row] = want[row] * (1 - lr * decay) - lr * g / (math.sqrt(total[row]) + 1e-8)
    rule = RowAdagrad([table], lr=lr, weight_decay=decay)
    assert torch.allclose(updated(rule, table, batches(d, size)).double(), want, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize(("d", "size"), [(1, 50), (5, 0), (5, 1), (37, 400), (64, 700)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_from_rows(d: int, size: int, decay: float) -> None:
    """Every row moves as by Adam with L2 on the dense gradient: momentum and decay do not wait for a row's turn."""
    table, (b1, b2), lr = a_table(d), (0.8, 0.95), 0.03
    want, mean, square = table.detach().double(), torch.zeros(N, d).double(), torch.zeros(N, d).double()
    for step, (ids, values) in enumerate(batches(d, size), start=1):
        g = decay * want
        for row, value in summed(ids, values).items():
            g[row] += value
        mean, square = b1 * mean + (1 - b1) * g, b2 * square + (1 - b2) * g**2
        want = want - lr * (mean / (1 - b1**step)) / ((square / (1 - b2**step)).sqrt() + 1e-8)
    rule = Adam([table], lr, (b1, b2), weight_decay=decay, fused=True)
    assert torch.allclose(updated(rule, table, batches(d, size)).double(), want, rtol=1e-6, atol=3e-7)


def test_adam_from_rows_and_dense_gradients_in_turn() -> None:
    """Both kinds of gradient share one state: half the steps of each end where torch's own steps end."""
    mine, theirs = a_table(7), a_table(7)
    rules = Adam([mine], 0.01, weight_decay=0.1, fused=True), torch.optim.Adam([theirs], 0.01, weight_decay=0.1)
    for turn, (ids, values) in enumerate(batches(7, 300)):
        rows = torch.sparse_coo_tensor(ids[None], values, mine.shape, check_invariants=False)
        mine.grad, theirs.grad = rows if turn != 1 else rows.to_dense(), rows.to_dense()
        for rule in rules:
            rule.step()
    assert torch.allclose(mine, theirs, rtol=1e-6, atol=3e-7)
    mine_state, their_state = (rule.state_dict()["state"][0] for rule in rules)
    assert mine_state.keys() == their_state.keys()
    assert float(mine_state["step"]) == 3


@pytest.mark.parametrize("make", [RowAdam, RowAdagrad, Adam])
def test_threads_change_no_bit(make: type[RowAdam] | type[RowAdagrad] | type[Adam]) -> None:
    """One and two threads give the same table, and so do two runs."""
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            table = a_table(33)
            results.append(updated(make([table], lr=0.1), table, batches(33, 2000)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])


@pytest.mark.parametrize("make", [RowAdam, RowAdagrad, Adam])
def test_expanded_and_transposed_gradients(make: type[RowAdam] | type[RowAdagrad] | type[Adam]) -> None:
    """Gradients of stride 0 or with their axes swapped move the table as their contiguous copies do."""
    ids = torch.tensor([4, 2, 4, 9])
    expanded, swapped = torch.tensor([0.5]).expand(4, 6), torch.randn(6, 4).T
    for odd in (expanded, swapped):
        a, b = a_table(6), a_table(6)
        assert torch.equal(
            updated(make([a]), a, [(ids, odd)]),
            updated(make([b]), b, [(ids, odd.clone(memory_format=torch.contiguous_format))]),
        )


@pytest.mark.parametrize("make", [RowAdam, RowAdagrad, Adam])
@pytest.mark.parametrize("row", [-1, N])
def test_a_row_outside_the_table_is_an_error(make: type[RowAdam] | type[RowAdagrad] | type[Adam], row: int) -> None:
    """No memory outside the table is written."""
    table = a_table(6)
    before = table.detach().clone()
    with pytest.raises((IndexError, RuntimeError)):
        updated(make([table]), table, [(torch.tensor([3, row]), torch.ones(2, 6))])
    assert torch.equal(table, before)
