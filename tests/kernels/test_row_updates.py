"""The fused row updates, in Triton's interpreter without a GPU, against a float64 loop over the rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sparring.kernels import row_updates
from sparring.kernels.row_updates import gather, row_adagrad, row_adam

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, PLACES, STEPS = 12, 45, 3


@pytest.fixture(params=["searched", "sorted"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with searched places and with places sorted by row."""
    if request.param == "sorted":
        monkeypatch.setattr(row_updates, "SEARCHED", 0)


def gradients(step: int, d: int = 5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    index = torch.randint(N - 2, (PLACES,), generator=g)  # the last two rows never occur
    index[:20] = step  # more places than one block sums
    return index, torch.randn(PLACES, d, generator=g)


@pytest.mark.parametrize(("bias", "decay", "d"), [("row", 0.0, 5), ("row", 0.3, 40), ("step", 0.3, 5)])
def test_adam_equals_a_loop_over_rows(bias: str, decay: float, d: int) -> None:
    """Repeated rows are summed, each row counts its own updates (or all steps), and other rows stay bitwise equal."""
    start = torch.randn(N, d, generator=torch.Generator().manual_seed(9))
    table = start.to(DEVICE, copy=True)
    state = {
        "mean": torch.zeros(N, d, device=DEVICE),
        "square": torch.zeros(N, d, device=DEVICE),
        "count": torch.zeros(N if bias == "row" else (), device=DEVICE),
    }
    lr, eps, (b1, b2) = 0.1, 1e-8, (0.9, 0.999)
    value, mean, square, count = start.double(), torch.zeros(N, d).double(), torch.zeros(N, d).double(), [0] * N
    for step in range(STEPS):
        index, grads = gradients(step, d)
        if bias == "step":
            state["count"] += 1
        row_adam(
            table, index.to(DEVICE), grads.to(DEVICE), state, torch.tensor(lr, device=DEVICE), (b1, b2), eps, decay
        )
        for row in set(index.tolist()):
            g = grads[index == row].double().sum(0)
            mean[row] = b1 * mean[row] + (1 - b1) * g
            square[row] = b2 * square[row] + (1 - b2) * g * g
            count[row] = count[row] + 1 if bias == "row" else step + 1
            moved = (mean[row] / (1 - b1 ** count[row])) / ((square[row] / (1 - b2 ** count[row])).sqrt() + eps)
            value[row] = value[row] * (1 - lr * decay) - lr * moved
    assert torch.allclose(table.cpu().double(), value, atol=2e-5)
    assert torch.allclose(state["mean"].cpu().double(), mean, atol=2e-6)
    assert torch.allclose(state["square"].cpu().double(), square, atol=2e-6)
    assert torch.equal(table[-2:].cpu(), start[-2:])
    if bias == "row":
        assert state["count"].tolist() == count


def test_adagrad_equals_a_loop_over_rows() -> None:
    """One accumulator per row adds the mean square of the summed gradient; rows outside the batch stay bitwise."""
    start = torch.randn(N, 5, generator=torch.Generator().manual_seed(9))
    table, total = start.to(DEVICE, copy=True), torch.zeros(N, device=DEVICE)
    value, sums = start.double(), torch.zeros(N).double()
    for step in range(STEPS):
        index, grads = gradients(step)
        row_adagrad(table, index.to(DEVICE), grads.to(DEVICE), total, torch.tensor(0.1, device=DEVICE), 1e-8, 0.2)
        for row in set(index.tolist()):
            g = grads[index == row].double().sum(0)
            sums[row] += (g * g).mean()
            value[row] = value[row] * (1 - 0.1 * 0.2) - 0.1 * g / (sums[row].sqrt() + 1e-8)
    assert torch.allclose(table.cpu().double(), value, atol=1e-5)
    assert torch.equal(table[-2:].cpu(), start[-2:])


@pytest.mark.parametrize("shape", [(45,), (9, 5), (3, 3, 5), ()])
def test_gather_has_the_dense_gradient_of_indexing(shape: tuple[int, ...]) -> None:
    """Ids of any shape give their rows; the gradient is the sum per row, 0 for unused rows."""
    index, grads = gradients(1)
    ids = index[: max(1, torch.Size(shape).numel())].reshape(shape).to(DEVICE)
    back = grads[: ids.numel()].reshape(*shape, 5).to(DEVICE)
    table = torch.randn(N, 5, generator=torch.Generator().manual_seed(3)).to(DEVICE).requires_grad_()
    got = gather(table, ids)
    assert torch.equal(got, table[ids])
    got.backward(back)
    exact = torch.zeros(N, 5).double()
    for row, g in zip(ids.reshape(-1).tolist(), back.reshape(-1, 5).cpu().double(), strict=True):
        exact[row] += g
    assert table.grad is not None
    assert torch.allclose(table.grad.cpu().double(), exact, atol=1e-5)
