"""The Triton kernel for per-query candidates, in the interpreter without a GPU, against float64 sums."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from sparring.kernels import per_query

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(9, 20, 8), (5, 300, 24), (3, 1, 5), (1, 7, 1)])
@pytest.mark.parametrize("draws", [None, 13.0])
@pytest.mark.parametrize("weight", ["scalar", "column", "pair"])
@pytest.mark.parametrize("masked", [False, True])
def test_value_gradients_and_draw_counts(
    shape: tuple[int, int, int], draws: float | None, weight: str, masked: bool
) -> None:
    """Value, gradients and expected counts are right for weights of any shape, some -inf, and full masks."""
    b, c, d = shape
    g = torch.Generator().manual_seed(c)
    q, emb, upstream = torch.randn(b, d, generator=g), torch.randn(b, c, d, generator=g), torch.randn(b, generator=g)
    log_w = 2 * torch.randn({"scalar": (), "column": (c,), "pair": (b, c)}[weight], generator=g)
    log_w = torch.where(torch.rand(log_w.shape, generator=g) < 0.1, -math.inf, log_w)
    mask = torch.rand(b, c, generator=g) < 0.3 if masked else None
    if mask is not None:
        mask[0] = True
    exact_q, exact_emb = q.double().requires_grad_(), emb.double().requires_grad_()
    values, counts = [], torch.zeros(b, c, dtype=torch.float64)
    for i in range(b):
        s = exact_emb[i] @ exact_q[i]
        w = log_w.double().expand(b, c)[i]
        keep = torch.isfinite(w) if mask is None else torch.isfinite(w) & ~mask[i]
        if not bool(keep.any()):
            values.append(torch.zeros((), dtype=torch.float64) + 0 * s.sum())
            continue
        if draws is None:
            values.append(torch.logsumexp((s + w)[keep], 0))
        else:
            counts[i, keep] = draws * torch.softmax((s + w)[keep].detach(), 0)
            values.append(torch.logsumexp(s[keep] + counts[i, keep].log(), 0))
    (torch.stack(values) * upstream.double()).sum().backward()
    ours_q, ours_emb = q.to(DEVICE).requires_grad_(), emb.to(DEVICE).requires_grad_()
    draw_counts = torch.zeros(b, c, device=DEVICE) if draws is not None else None
    value = per_query.weighted_logsumexp(
        ours_q, ours_emb, log_w.to(DEVICE), None if mask is None else mask.to(DEVICE), draws, draw_counts
    )
    (torch.where(torch.isfinite(value), value, 0.0) * upstream.to(DEVICE)).sum().backward()
    got = torch.where(torch.isfinite(value), value, 0.0).detach().cpu().double()
    assert torch.allclose(got, torch.stack(values).detach(), atol=2e-5)
    for mine, right in ((ours_q.grad, exact_q.grad), (ours_emb.grad, exact_emb.grad)):
        assert mine is not None
        assert right is not None
        assert torch.allclose(mine.cpu().double(), right, atol=2e-5)
    if draw_counts is not None:
        assert torch.allclose(draw_counts.cpu().double(), counts, atol=2e-5)
    if mask is not None:
        assert value[0] == -math.inf
