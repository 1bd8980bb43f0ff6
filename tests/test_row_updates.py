"""The fused row updates, in Triton's interpreter where there is no GPU: held to a loop over the rows in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sparring.kernels.row_updates import row_adagrad, row_adam

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, D, PLACES, STEPS = 12, 5, 20, 4


def gradients(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randint(N - 2, (PLACES,), generator=g), torch.randn(PLACES, D, generator=g)  # the last two rows never come


@pytest.mark.parametrize("bias", ["row", "step"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adam_equals_a_loop_over_rows(bias: str, decay: float) -> None:
    """Repeated rows are summed, each row counts its own updates (or all steps), and rows outside the batch stay bitwise."""
    start = torch.randn(N, D, generator=torch.Generator().manual_seed(9))
    table = start.to(DEVICE, copy=True)
    state = {
        "mean": torch.zeros(N, D, device=DEVICE),
        "square": torch.zeros(N, D, device=DEVICE),
        "count": torch.zeros(N if bias == "row" else (), device=DEVICE),
    }
    lr, eps, (b1, b2) = 0.1, 1e-8, (0.9, 0.999)
    value, mean, square, count = start.double(), torch.zeros(N, D).double(), torch.zeros(N, D).double(), [0] * N
    for step in range(STEPS):
        index, grads = gradients(step)
        if bias == "step":
            state["count"] += 1
        row_adam(table, index.to(DEVICE), grads.to(DEVICE), state, torch.tensor(lr, device=DEVICE), (b1, b2), eps, decay)
        for row in set(index.tolist()):
            g = grads[index == row].double().sum(0)
            mean[row] = b1 * mean[row] + (1 - b1) * g
            square[row] = b2 * square[row] + (1 - b2) * g * g
            count[row] = count[row] + 1 if bias == "row" else step + 1
            moved = (mean[row] / (1 - b1 ** count[row])) / ((square[row] / (1 - b2 ** count[row])).sqrt() + eps)
            value[row] = value[row] * (1 - lr * decay) - lr * moved
    assert torch.allclose(table.cpu().double(), value, atol=1e-5)
    assert torch.allclose(state["mean"].cpu().double(), mean, atol=1e-6)
    assert torch.allclose(state["square"].cpu().double(), square, atol=1e-6)
    assert torch.equal(table[-2:].cpu(), start[-2:])


def test_adagrad_equals_a_loop_over_rows() -> None:
    """One accumulator a row: the mean square of the summed gradient; rows outside the batch stay bitwise."""
    start = torch.randn(N, D, generator=torch.Generator().manual_seed(9))
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
