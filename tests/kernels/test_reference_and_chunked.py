"""Kernels by error budget: no further from the float64 truth than plain PyTorch in float32, plus a small tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sparring import kernels
from sparring.kernels import chunked, reference

KERNELS = {"reference": reference, "chunked": chunked, "chosen": kernels}
SHAPES = [(64, 128, 32), (33, 57, 13), (16, 1, 8), (1, 77, 16), (1, 1, 1)]
TOLERANCE = 2e-6  # of the largest entry: a few roundings in float32


@dataclass(frozen=True)
class Problem:
    q: Tensor
    emb: Tensor
    log_w: Tensor
    places: tuple[Tensor, Tensor] | None
    draws: float | None
    upstream: Tensor


def problem(
    shape: tuple[int, int, int], weight: str, drop: str, draws: float | None = None, scale: float = 1.0, seed: int = 0
) -> Problem:
    b, c, d = shape
    g = torch.Generator().manual_seed(seed)
    q, emb = scale * torch.randn(b, d, generator=g), torch.randn(c, d, generator=g)
    size = {"scalar": (), "column": (c,), "row": (b, 1), "pair": (b, c), "one row": (1, c)}[weight]
    log_w = 2 * torch.randn(size, generator=g)
    dropped = {"none": 0.0, "some": 0.3, "all": 1.1}[drop]
    places = torch.nonzero(torch.rand(b, c, generator=g) < dropped, as_tuple=True) if drop != "none" else None
    return Problem(q, emb, log_w, places, draws, torch.randn(b, generator=g))  # type: ignore[arg-type]


def plain(p: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, both gradients and expected counts by torch.logsumexp over the whole matrix; rows with nothing left give -inf and 0."""
    q, emb = p.q.to(dtype, copy=True).requires_grad_(), p.emb.to(dtype, copy=True).requires_grad_()
    s = q @ emb.T
    w = p.log_w.to(dtype).expand(s.shape).clone()
    if p.places is not None:
        w[p.places] = -math.inf
    some = torch.isfinite(w).any(1)
    counts = torch.zeros_like(s)
    value = torch.full((len(q),), -math.inf, dtype=dtype)
    if bool(some.any()):
        logits = (s + w)[some]
        if p.draws is not None:
            counts[some] = p.draws * torch.softmax(logits.detach(), 1)
            logits = s[some] + counts[some].log()
        value[some] = torch.logsumexp(logits, 1)
    weighed = (torch.where(some, value, 0.0) * p.upstream.to(dtype)).sum()
    if not weighed.requires_grad:
        return value.detach(), torch.zeros_like(q), torch.zeros_like(emb), counts.sum(0)
    grad_q, grad_emb = torch.autograd.grad(weighed, [q, emb])
    return value.detach(), grad_q, grad_emb, counts.sum(0)


def ours(p: Problem, kernel: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, emb = p.q.to(dtype, copy=True).requires_grad_(), p.emb.to(dtype, copy=True).requires_grad_()
    usage = torch.zeros(len(emb), dtype=dtype) if p.draws is not None else None
    value = KERNELS[kernel].weighted_logsumexp(q, emb, p.log_w.to(dtype), p.places, p.draws, usage)
    some = torch.isfinite(value)
    grad_q, grad_emb = torch.autograd.grad((torch.where(some, value, 0.0) * p.upstream.to(dtype)).sum(), [q, emb])
    return value.detach(), grad_q, grad_emb, torch.zeros(len(emb)) if usage is None else usage


def within_budget(p: Problem, kernel: str) -> None:
    truth, torch32, got = plain(p, torch.float64), plain(p, torch.float32), ours(p, kernel)
    for name, exact, single, mine in zip(("value", "grad q", "grad emb", "usage"), truth, torch32, got, strict=True):
        finite = torch.isfinite(exact)
        assert torch.equal(torch.isfinite(mine), finite), name
        if not bool(finite.any()):
            continue
        size = float(exact[finite].abs().max().clamp(min=1e-30))
        error, budget = (
            float((mine - exact)[finite].abs().max()) / size,
            float((single - exact)[finite].abs().max()) / size,
        )
        assert error <= budget + TOLERANCE, f"{name}: {error:.2e} of the largest entry, PyTorch float32 {budget:.2e}"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight", ["scalar", "column", "row", "pair", "one row"])
@pytest.mark.parametrize("drop", ["none", "some", "all"])
def test_error_budget(kernel: str, shape: tuple[int, int, int], weight: str, drop: str) -> None:
    """Value and both gradients, for weights of every shape and any dropped places."""
    within_budget(problem(shape, weight, drop), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight", ["scalar", "column"])
@pytest.mark.parametrize("drop", ["none", "some", "all"])
def test_error_budget_of_expected_draws(kernel: str, shape: tuple[int, int, int], weight: str, drop: str) -> None:
    """The same with the weights replaced by expected counts, and the counts themselves."""
    within_budget(problem(shape, weight, drop, draws=100.0), kernel)


@pytest.mark.parametrize("kernel", ["reference", "chosen"])
@pytest.mark.parametrize("weight", ["pair", "row", "one row"])
def test_expected_draws_with_a_weight_per_pair(kernel: str, weight: str) -> None:
    """Expected counts from weights that differ by query."""
    within_budget(problem((33, 57, 13), weight, "some", draws=100.0), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("draws", [None, 64.0])
@pytest.mark.parametrize("scale", [0.01, 6.0, 30.0])
def test_error_budget_at_other_scales(kernel: str, draws: float | None, scale: float) -> None:
    """Flat scores, and scores so far apart that one candidate takes almost everything."""
    within_budget(problem((40, 50, 16), "column", "some", draws, scale), kernel)


@pytest.mark.parametrize("draws", [None, 64.0])
@pytest.mark.parametrize(("store", "block"), [(0, 1 << 19), (1 << 26, 100), (0, 100), (1 << 26, 1), (0, 57 * 32)])
def test_blocks_and_recomputing_change_nothing(monkeypatch, draws: float | None, store: int, block: int) -> None:
    """With blocks smaller than the batch, and exponentials computed again beyond STORE, the budget holds all the same."""
    monkeypatch.setattr(chunked, "STORE", store)
    monkeypatch.setattr(chunked, "BLOCK", {"cpu": block})
    for weight, drop in (("column", "some"), ("scalar", "all"), ("column", "none")):
        within_budget(problem((33, 57, 13), weight, drop, draws), "chunked")
    if draws is None:
        within_budget(problem((33, 57, 13), "pair", "some"), "chunked")
        within_budget(problem((33, 57, 13), "row", "some"), "chunked")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("draws", [None, 64.0])
def test_columns_without_weight(kernel: str, draws: float | None) -> None:
    """A weight of -inf drops a column for all queries, however high it scores, and all columns at once too."""
    p = problem((20, 30, 8), "column", "some", draws)
    p.log_w[::3] = -math.inf
    within_budget(p, kernel)
    p.emb[::3] *= 40  # the dropped columns now hold every row's maximum, far above the rest
    within_budget(p, kernel)
    p.log_w.fill_(-math.inf)
    within_budget(p, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_far_apart(kernel: str) -> None:
    """Expected draws with weights 60 nats apart, the heaviest on the lowest scores."""
    p = problem((20, 30, 8), "column", "none", 64.0)
    p.log_w.copy_(torch.linspace(-60, 0, 30))
    p.emb[:10] *= 5
    within_budget(p, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("draws", [None, 16.0])
def test_double_precision(kernel: str, draws: float | None) -> None:
    """In float64 all kernels agree with the truth to 1e-10."""
    p = problem((33, 57, 13), "column", "some", draws)
    for exact, mine in zip(plain(p, torch.float64), ours(p, kernel, torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_with_nothing_left(kernel: str) -> None:
    """A row whose every place is dropped gives -inf and sends no gradient; its neighbours are as without it."""
    p = problem((6, 9, 4), "column", "none")
    rows = torch.tensor([2, 4]).repeat_interleave(9)
    p = replace(p, places=(rows, torch.arange(9).repeat(2)))
    value, grad_q, _, _ = ours(p, kernel)
    assert torch.isneginf(value).tolist() == [False, False, True, False, True, False]
    assert bool((grad_q[[2, 4]] == 0).all())
    assert bool((grad_q[[0, 1, 3, 5]] != 0).any(1).all())
    within_budget(p, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_draws_leave_usage_alone(kernel: str) -> None:
    """`usage` belongs to expected draws: where the counts were drawn before, the kernel must not erase them."""
    p = problem((8, 5, 4), "column", "none")
    usage = torch.arange(5.0)
    KERNELS[kernel].weighted_logsumexp(p.q, p.emb, p.log_w, None, None, usage)
    assert usage.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("draws", [None, 16.0])
def test_backward_twice(kernel: str, draws: float | None) -> None:
    """A graph kept for a second backward pass gives the same gradient again, also after another problem in between."""
    p, other = problem((33, 57, 13), "column", "some", draws), problem((33, 57, 13), "column", "some", draws, seed=1)
    q, emb = p.q.requires_grad_(), p.emb.requires_grad_()
    value = KERNELS[kernel].weighted_logsumexp(q, emb, p.log_w, p.places, draws)
    held = KERNELS[kernel].weighted_logsumexp(other.q.requires_grad_(), other.emb, other.log_w, other.places, draws)
    first = torch.autograd.grad(value.sum(), [q, emb], retain_graph=True)
    ours(other, kernel)
    second = torch.autograd.grad(value.sum(), [q, emb])
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(one, two)
    plain_value = reference.weighted_logsumexp(other.q, other.emb, other.log_w, other.places, draws)
    torch.testing.assert_close(*(torch.autograd.grad(value.sum(), other.q)[0] for value in (held, plain_value)))


def test_spare_buffers_stay_on_their_device() -> None:
    """A buffer freed on the CPU is never handed out for vectors that live elsewhere."""
    spare = chunked._Spare(most=2)
    spare.give(torch.empty(4, 4))
    assert spare.take(torch.empty(1, device="meta"), 4, 4).device.type == "meta"


def test_own_candidates_of_each_query() -> None:
    """Candidates (B, C, D), few and many, against a loop over queries."""
    g = torch.Generator().manual_seed(0)
    for c in (3, 8, 9, 40):
        q, emb, log_w = (
            torch.randn(7, 5, generator=g),
            torch.randn(7, c, 5, generator=g),
            torch.randn(7, c, generator=g),
        )
        places = (torch.tensor([0, 0, 6]), torch.tensor([0, 2, 1]))
        got = kernels.weighted_logsumexp(q, emb, log_w, places)
        for row in range(7):
            terms = [
                float(emb[row, j] @ q[row] + log_w[row, j])
                for j in range(c)
                if (row, j) not in {(0, 0), (0, 2), (6, 1)}
            ]
            assert float(got[row]) == pytest.approx(math.log(sum(map(math.exp, terms))), abs=1e-5)


def test_a_learned_weight_gets_its_gradient() -> None:
    """A log_w that needs a gradient receives softmax probabilities, from whichever kernel is chosen."""
    p = problem((5, 7, 3), "column", "none")
    log_w = p.log_w.clone().requires_grad_()
    kernels.weighted_logsumexp(p.q, p.emb, log_w).sum().backward()
    assert log_w.grad is not None
    torch.testing.assert_close(log_w.grad, torch.softmax(p.q @ p.emb.T + p.log_w, 1).sum(0))


def test_second_derivatives_are_refused_not_wrong() -> None:
    """The chunked kernel has no second derivative: asking for one raises."""
    p = problem((5, 7, 3), "column", "none")
    q = p.q.requires_grad_()
    (gradient,) = torch.autograd.grad(chunked.weighted_logsumexp(q, p.emb, p.log_w).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()
