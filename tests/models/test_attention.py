"""Blocks of sequence models against loops in float64, and their causality, packing, padding and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sparring.core.errors import UserError
from sparring.models.attention import HstuBlock, LigrBlock, SasRecBlock, time_buckets

DIM, HEADS, LENGTH = 6, 2, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Rows(NamedTuple):
    """Rows of sequences side by side, then padding."""

    x: Tensor
    allowed: Tensor
    position: Tensor
    time: Tensor


def packed(lengths: list[list[int]], columns: int, seed: int = 0) -> Rows:
    """Rows of sequences of these lengths: `position` ends at LENGTH - 1, padding reads nothing."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(len(lengths), columns, DIM, generator=g, dtype=torch.float64)
    owner = torch.full((len(lengths), columns), -1)
    position = torch.zeros(len(lengths), columns, dtype=torch.long)
    time = torch.zeros(len(lengths), columns, dtype=torch.long)
    for row, row_lengths in enumerate(lengths):
        begin = 0
        for n, length in enumerate(row_lengths):
            place = slice(begin, begin + length)
            owner[row, place] = n
            position[row, place] = torch.arange(LENGTH - length, LENGTH)
            time[row, place] = 10**9 + torch.randint(0, 10**6, (length,), generator=g).cumsum(0)
            begin += length
    allowed = torch.zeros(len(lengths), columns, columns, dtype=torch.bool)
    for b in range(len(lengths)):
        for i in range(columns):
            for j in range(i + 1):
                allowed[b, i, j] = owner[b, i] >= 0 and owner[b, i] == owner[b, j]
    return Rows(x, allowed, position, time)


ROWS = packed([[3, 2], [4], [1, 1, 5]], columns=7)


def a_block(kind: str, dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(1)
    block: nn.Module = {
        "sasrec": lambda: SasRecBlock(DIM, HEADS, dropout),
        "ligr": lambda: LigrBlock(DIM, HEADS, dropout, multiplier=2),
        "hstu": lambda: HstuBlock(DIM, HEADS, dropout, LENGTH, timed=True),
        "hstu without time": lambda: HstuBlock(DIM, HEADS, dropout, LENGTH),
    }[kind]()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)  # biases and norms that are not 0 or 1
    return block.double().eval()


KINDS = ("sasrec", "ligr", "hstu", "hstu without time")


def normed(x: Tensor, norm: nn.LayerNorm | None = None) -> Tensor:
    """Layer normalisation of a vector by its formula."""
    eps = 1e-6 if norm is None else norm.eps
    z = (x - x.mean()) / ((x - x.mean()).square().mean() + eps).sqrt()
    return z if norm is None else z * norm.weight + norm.bias


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer.weight @ x + (0 if layer.bias is None else layer.bias)


def softmax_read(qkv: list[Tensor], allowed: Tensor, i: int) -> Tensor:
    """Attention of place i, head by head: qkv has for each place its query, key and value in one vector."""
    width, out = DIM // HEADS, []
    for h in range(HEADS):
        part = [[v[n * DIM + h * width : n * DIM + (h + 1) * width] for n in range(3)] for v in qkv]
        readable = [j for j in range(len(qkv)) if allowed[i, j]]
        shares = [math.exp(float(part[i][0] @ part[j][1]) / math.sqrt(width)) for j in readable]
        mixed = [s / sum(shares) * part[j][2] for s, j in zip(shares, readable, strict=True)]
        out.append(sum(mixed, torch.zeros(width, dtype=torch.float64)))
    return torch.cat(out)


def sasrec_by_loop(block: Any, x: Tensor, allowed: Tensor, position: Tensor, time: Tensor) -> list[Tensor]:
    qkv = [block.qkv.weight @ normed(v, block.attention_norm) for v in x]
    out = []
    for i in range(len(x)):
        y = x[i] + softmax_read(qkv, allowed, i)
        hidden = linear(block.inner, normed(y, block.forward_norm)).clamp(min=0)
        out.append(y + linear(block.outer, hidden))
    return out


def ligr_by_loop(block: Any, x: Tensor, allowed: Tensor, position: Tensor, time: Tensor) -> list[Tensor]:
    qkv = [linear(block.qkv, normed(v, block.attention_norm)) for v in x]
    out = []
    for i in range(len(x)):
        gate = 1 / (1 + (-linear(block.attention_gate, x[i])).exp())
        y = x[i] + gate * linear(block.out, softmax_read(qkv, allowed, i))
        both = linear(block.inner, normed(y, block.forward_norm))
        switch, hidden = both[: 2 * DIM], both[2 * DIM :]
        gate = 1 / (1 + (-linear(block.forward_gate, y)).exp())
        out.append(y + gate * linear(block.outer, switch / (1 + (-switch).exp()) * hidden))
    return out


def hstu_by_loop(block: Any, x: Tensor, allowed: Tensor, position: Tensor, time: Tensor) -> list[Tensor]:
    def silu(z: Tensor) -> Tensor:
        return z / (1 + (-z).exp())

    width = DIM // HEADS
    u, v, q, k = ([silu(block.uvqk.weight[n * DIM : (n + 1) * DIM] @ normed(place)) for place in x] for n in range(4))
    out = []
    for i in range(len(x)):
        read = torch.zeros(DIM, dtype=torch.float64)
        for h in range(HEADS):
            head = slice(h * width, (h + 1) * width)
            for j in range(len(x)):
                if not allowed[i, j]:
                    continue
                score = q[i][head] @ k[j][head] + block.by_position[position[i] - position[j]]
                if block.by_time is not None:
                    seconds = max(abs(int(time[i] - time[j])), 1)
                    score = score + block.by_time[min(int(math.log(seconds) / 0.301), 128)]
                read[head] += silu(score) / LENGTH * v[j][head]
        out.append(x[i] + linear(block.outer, normed(read) * u[i]))
    return out


LOOPS: dict[str, Callable[..., list[Tensor]]] = {
    "sasrec": sasrec_by_loop,
    "ligr": ligr_by_loop,
    "hstu": hstu_by_loop,
    "hstu without time": hstu_by_loop,
}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_equal_loops_over_their_formulas(kind: str) -> None:
    """Every place, padding included, has the value that a loop over heads and readable places computes."""
    block = a_block(kind)
    with torch.no_grad():
        got = block(*ROWS)
        for row in range(len(ROWS.x)):
            expected = torch.stack(LOOPS[kind](block, *(part[row] for part in ROWS)))
            torch.testing.assert_close(got[row], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_changes_nothing(kind: str) -> None:
    """A place keeps its value when later places of its sequence, and other sequences, change."""
    block, rows = a_block(kind), packed([[4, 3]], columns=7)
    changed = rows.x.clone()
    changed[:, 2:] += 1.0
    times = rows.time.clone()
    times[:, 2:] += 5000
    with torch.no_grad():
        before, after = block(*rows), block(changed, rows.allowed, rows.position, times)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.isclose(before[:, 2:], after[:, 2:]).all(-1).any()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_equal_separate_rows(kind: str) -> None:
    """A sequence has the same vectors alone in a row, behind others, and with padding after it."""
    block, rows = a_block(kind), packed([[3, 2, 2]], columns=8)
    with torch.no_grad():
        got = block(*rows)
        for begin, length in ((0, 3), (3, 2), (5, 2)):
            place = slice(begin, begin + length)
            alone = block(rows.x[:, place], rows.allowed[:, place, place], rows.position[:, place], rows.time[:, place])
            torch.testing.assert_close(got[:, place], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_padding_is_finite_and_so_are_all_gradients(kind: str, training: bool) -> None:
    """Places and whole rows that may read nothing have finite values and gradients, with dropout and without."""
    block = a_block(kind).float().train(training).to(DEVICE)
    x, *rest = (part.to(DEVICE) for part in packed([[2], []], columns=4))
    x = x.float().requires_grad_()
    result = block(x, *rest)
    result.square().sum().backward()
    assert result.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_in_training_alone(kind: str) -> None:
    """Two passes differ in training mode and are equal in evaluation mode."""
    block = a_block(kind)
    with torch.no_grad():
        assert torch.equal(block(*ROWS), block(*ROWS))
        block.train()
        assert not torch.equal(block(*ROWS), block(*ROWS))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_run_in_bfloat16(kind: str) -> None:
    """Under autocast the result is finite, near that in float32, and the gradients arrive."""
    block = a_block(kind).float().to(DEVICE)
    x, *rest = (part.to(DEVICE) for part in ROWS)
    x = x.float().requires_grad_()
    exact = block(x, *rest)
    with torch.autocast(DEVICE, torch.bfloat16):
        rough = block(x, *rest)
    rough.float().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    torch.testing.assert_close(rough.float(), exact, rtol=0.1, atol=0.2)


def test_time_buckets_are_logarithmic() -> None:
    """floor(log(max(|s|, 1)) / 0.301), at most 128: 0 and 1 second share a bucket, the sign does not matter."""
    seconds = torch.tensor([0, 1, -1, 2, 60, 3600, -86400, 10**9, 2**62])
    expected = [min(int(math.log(max(abs(s), 1)) / 0.301), 128) for s in seconds.tolist()]
    assert time_buckets(seconds).tolist() == expected
    assert expected[-1] == 128


def test_a_distance_beyond_the_window_has_the_bias_of_the_longest() -> None:
    """Positions that are `length` or more apart share one bias."""
    block = a_block("hstu without time")
    rows = packed([[2]], columns=2)
    with torch.no_grad():
        far, farther = (
            block(rows.x, rows.allowed, torch.tensor([[0, place]]), None) for place in (LENGTH - 1, 3 * LENGTH)
        )
    assert torch.equal(far, farther)


def test_bad_arguments_are_refused() -> None:
    """Heads that do not divide the width."""
    for kind in (SasRecBlock, LigrBlock, HstuBlock):
        with pytest.raises(UserError, match="heads"):
            kind(DIM, heads=4)


def test_a_timed_block_without_times_leaves_the_time_bias_out() -> None:
    """Its result is that of the same block with time biases of 0."""
    block = a_block("hstu")
    with torch.no_grad():
        without = block(*ROWS[:3], None)
        block.by_time.zero_()  # type: ignore[operator]
        torch.testing.assert_close(without, block(*ROWS), rtol=1e-12, atol=1e-12)
