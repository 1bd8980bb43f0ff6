"""The Triton kernels, in Triton's interpreter where there is no GPU: held to sums over the whole matrix of scores in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sparring.kernels import fused
from sparring.types import Keys

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the interpreter's log2(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(40, 70, 24), (33, 57, 13), (70, 1, 8), (1, 77, 16), (1, 1, 1), (65, 130, 40)]


def truth(q: Tensor, emb: Tensor, w: Tensor, draws: float | None, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value, gradients and expected counts in float64, w (B, C) with -inf where a pair does not count."""
    q, emb, w = q.double().requires_grad_(), emb.double().requires_grad_(), w.double()
    s = q @ emb.T
    some = torch.isfinite(w).any(1)
    logits, counts = (s + w)[some], torch.zeros_like(s)
    if draws is not None:
        counts[some] = draws * torch.softmax(logits.detach(), 1)
        logits = s[some] + counts[some].log()
    value = torch.full((len(q),), -math.inf, dtype=torch.float64, device=q.device)
    value[some] = torch.logsumexp(logits, 1)
    grad_q, grad_emb = torch.autograd.grad((torch.where(some, value, 0.0) * upstream.double()).sum(), [q, emb])
    return value.detach(), grad_q, grad_emb, counts.sum(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draws", [None, 17.0])
@pytest.mark.parametrize("weight", ["scalar", "column", "row", "pair", "one row"])
@pytest.mark.parametrize("keyed", [False, True])
def test_value_gradients_and_usage(shape: tuple[int, int, int], draws: float | None, weight: str, keyed: bool) -> None:
    """With weights of any shape, some of them -inf, and pairs left out by key, all within float32's error of the whole matrix."""
    b, c, d = shape
    g = torch.Generator().manual_seed(b + c)
    q, emb, upstream = torch.randn(b, d, generator=g), torch.randn(c, d, generator=g), torch.randn(b, generator=g)
    log_w = 2 * torch.randn({"scalar": (), "column": (c,), "row": (b, 1), "pair": (b, c), "one row": (1, c)}[weight], generator=g)
    log_w = torch.where(torch.rand(log_w.shape, generator=g) < 0.2, -math.inf, log_w)
    keys = Keys(torch.randint(5, (c,), generator=g).to(DEVICE), torch.randint(5, (b,), generator=g).to(DEVICE)) if keyed else None
    q, emb, upstream, log_w = (x.to(DEVICE) for x in (q, emb, upstream, log_w))
    w = log_w.expand(b, c).clone()
    if keys is not None:
        for i in range(b):
            for j in range(c):
                if keys.rows[i] == keys.columns[j]:
                    w[i, j] = -math.inf
    usage = torch.zeros(c, device=DEVICE) if draws is not None else None
    ours_q, ours_emb = q.clone().requires_grad_(), emb.clone().requires_grad_()
    value = fused.weighted_logsumexp(ours_q, ours_emb, log_w, keys, draws, usage)
    (torch.where(torch.isfinite(value), value, 0.0) * upstream).sum().backward()
    for mine, exact in zip((value, ours_q.grad, ours_emb.grad, usage), truth(q, emb, w, draws, upstream), strict=True):
        if mine is not None:
            finite = torch.isfinite(exact)
            assert torch.equal(torch.isfinite(mine), finite)
            assert torch.allclose(mine[finite].double(), exact[finite], rtol=1e-5, atol=2e-5)


def test_usage_without_a_gradient() -> None:
    """Where no backward pass will come, the expected counts are there at once, and add up to the draws of all queries."""
    q, emb = torch.randn(40, 8, device=DEVICE), torch.randn(50, 8, device=DEVICE)
    usage = torch.zeros(50, device=DEVICE)
    fused.weighted_logsumexp(q, emb, torch.zeros((), device=DEVICE), None, 12.0, usage)
    assert float(usage.sum()) == pytest.approx(40 * 12, rel=1e-4)
    assert torch.allclose(usage, 12 * torch.softmax(q @ emb.T, 1).sum(0), rtol=1e-3)


def test_drawn_counts_follow_their_distribution() -> None:
    """floor(n p + u): each pair's count is one of the two whole numbers around n p, the upper with the chance that is left over, whatever
    the seed; the backward pass draws the same counts as the forward pass."""
    g = torch.Generator().manual_seed(0)
    q, emb, n, seeds = torch.randn(3, 4, generator=g), torch.randn(6, 4, generator=g), 10.0, 400
    expected = n * torch.softmax(q.double() @ emb.double().T, 1)
    totals, even = torch.zeros(seeds, 6), torch.zeros(6, device=DEVICE)
    for seed in range(seeds):
        ours_q, ours_emb = q.to(DEVICE, copy=True).requires_grad_(), emb.to(DEVICE, copy=True).requires_grad_()
        usage = torch.zeros(6, device=DEVICE)
        value = fused.weighted_logsumexp(ours_q, ours_emb, even, None, n, usage, torch.tensor([seed], device=DEVICE))
        value.sum().backward()
        totals[seed] = usage.cpu()
        if seed == 0:
            # one query alone: its counts can be read off the usage, and the value and gradients follow from them
            alone, one_q = torch.zeros(6, device=DEVICE), q[:1].to(DEVICE, copy=True).requires_grad_()
            one_emb = emb.to(DEVICE, copy=True).requires_grad_()
            got = fused.weighted_logsumexp(one_q, one_emb, even, None, n, alone, torch.tensor([seed], device=DEVICE))
            got.sum().backward()
            counts = alone.cpu().double()
            assert bool(((counts - expected[0]).abs() < 1 + 1e-4).all())
            exact_q, exact_emb = q[:1].double().requires_grad_(), emb.double().requires_grad_()
            exact = torch.logsumexp(exact_q @ exact_emb.T + counts.log(), 1)
            exact.sum().backward()
            assert torch.allclose(got.detach().cpu().double(), exact.detach(), atol=1e-4)
            for mine, theirs in ((one_q.grad, exact_q.grad), (one_emb.grad, exact_emb.grad)):
                assert mine is not None
                assert theirs is not None
                assert torch.allclose(mine.cpu().double(), theirs, atol=1e-4)
    mean, spread = expected.sum(0), (expected.frac() * (1 - expected.frac())).sum(0).sqrt()
    z = (totals.double().mean(0) - mean) / (spread / math.sqrt(seeds)).clamp(min=1e-9)
    assert float(z.abs().max()) < 4.5
    assert torch.allclose(totals.double().std(0), spread, rtol=0.2)
    assert torch.equal(totals, totals.round())
