"""Kernels have at most the float64 error of plain PyTorch in float32, plus a tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sparring import kernels
from sparring.kernels import chunked, reference
from sparring.kernels.reference import ExcludedPairs

Kernel = Callable[..., Tensor]
KERNELS: dict[str, Kernel] = {
    "reference": reference.weighted_logsumexp,
    "chunked": chunked.weighted_logsumexp,
    "chosen": kernels.weighted_logsumexp,
}
SHAPES = [(64, 128, 32), (33, 57, 13), (16, 1, 8), (1, 77, 16), (1, 1, 1)]
TOLERANCE = 2e-6  # of the largest entry: a few float32 roundings


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
    """Loss, both gradients and expected counts by torch.logsumexp over the full matrix; empty rows give -inf and 0."""
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


def ours(p: Problem, kernel: Kernel, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, emb = p.q.to(dtype, copy=True).requires_grad_(), p.emb.to(dtype, copy=True).requires_grad_()
    draw_counts = torch.zeros(len(emb), dtype=dtype) if p.draws is not None else None
    value = kernel(q, emb, p.log_w.to(dtype), p.places, p.draws, draw_counts)
    some = torch.isfinite(value)
    grad_q, grad_emb = torch.autograd.grad((torch.where(some, value, 0.0) * p.upstream.to(dtype)).sum(), [q, emb])
    return value.detach(), grad_q, grad_emb, torch.zeros(len(emb)) if draw_counts is None else draw_counts


def within_budget(p: Problem, kernel: Kernel) -> None:
    truth, torch32, got = plain(p, torch.float64), plain(p, torch.float32), ours(p, kernel)
    for name, exact, single, mine in zip(
        ("value", "grad q", "grad emb", "draw_counts"), truth, torch32, got, strict=True
    ):
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
    """Value and both gradients are within budget for weights of every shape and any dropped places."""
    within_budget(problem(shape, weight, drop), KERNELS[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight", ["scalar", "column"])
@pytest.mark.parametrize("drop", ["none", "some", "all"])
def test_error_budget_of_expected_draws(kernel: str, shape: tuple[int, int, int], weight: str, drop: str) -> None:
    """Weights replaced by expected counts, and the counts themselves, are within budget."""
    within_budget(problem(shape, weight, drop, draws=100.0), KERNELS[kernel])


@pytest.mark.parametrize("kernel", ["reference", "chosen"])
@pytest.mark.parametrize("weight", ["pair", "row", "one row"])
def test_expected_draws_with_a_weight_per_pair(kernel: str, weight: str) -> None:
    """Expected counts are right for weights that differ by query."""
    within_budget(problem((33, 57, 13), weight, "some", draws=100.0), KERNELS[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("draws", [None, 64.0])
@pytest.mark.parametrize("scale", [0.01, 6.0, 30.0])
def test_error_budget_at_other_scales(kernel: str, draws: float | None, scale: float) -> None:
    """The budget holds for flat scores and for scores where one candidate dominates."""
    within_budget(problem((40, 50, 16), "column", "some", draws, scale), KERNELS[kernel])


@pytest.mark.parametrize("draws", [None, 64.0])
@pytest.mark.parametrize(("store", "block"), [(0, 1 << 19), (1 << 26, 100), (0, 100), (1 << 26, 1), (0, 57 * 32)])
def test_blocks_and_recomputing_change_nothing(monkeypatch, draws: float | None, store: int, block: int) -> None:
    """The error budget holds with blocks smaller than the batch and exponentials recomputed beyond STORE."""
    monkeypatch.setattr(chunked, "STORE", store)
    monkeypatch.setattr(chunked, "BLOCK", {"cpu": block})
    for weight, drop in (("column", "some"), ("scalar", "all"), ("column", "none")):
        within_budget(problem((33, 57, 13), weight, drop, draws), chunked.weighted_logsumexp)
    if draws is None:
        within_budget(problem((33, 57, 13), "pair", "some"), chunked.weighted_logsumexp)
        within_budget(problem((33, 57, 13), "row", "some"), chunked.weighted_logsumexp)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("draws", [None, 64.0])
def test_columns_without_weight(kernel: str, draws: float | None) -> None:
    """A weight of -inf drops a column, or all of them, for all queries, however high it scores."""
    p = problem((20, 30, 8), "column", "some", draws)
    p.log_w[::3] = -math.inf
    within_budget(p, KERNELS[kernel])
    p.emb[::3] *= 40  # the dropped columns now hold every row's maximum, far above the rest
    within_budget(p, KERNELS[kernel])
    p.log_w.fill_(-math.inf)
    within_budget(p, KERNELS[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_far_apart(kernel: str) -> None:
    """Expected draws are right for weights 60 nats apart, the heaviest on the lowest scores."""
    p = problem((20, 30, 8), "column", "none", 64.0)
    p.log_w.copy_(torch.linspace(-60, 0, 30))
    p.emb[:10] *= 5
    within_budget(p, KERNELS[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("draws", [None, 16.0])
def test_double_precision(kernel: str, draws: float | None) -> None:
    """In float64 all kernels agree with the truth to 1e-10."""
    p = problem((33, 57, 13), "column", "some", draws)
    for exact, mine in zip(plain(p, torch.float64), ours(p, KERNELS[kernel], torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_with_nothing_left(kernel: str) -> None:
    """A row with every place dropped gives -inf and no gradient; its neighbours are unaffected."""
    p = problem((6, 9, 4), "column", "none")
    rows = torch.tensor([2, 4]).repeat_interleave(9)
    p = replace(p, places=(rows, torch.arange(9).repeat(2)))
    value, grad_q, _, _ = ours(p, KERNELS[kernel])
    assert torch.isneginf(value).tolist() == [False, False, True, False, True, False]
    assert bool((grad_q[[2, 4]] == 0).all())
    assert bool((grad_q[[0, 1, 3, 5]] != 0).any(1).all())
    within_budget(p, KERNELS[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_draws_leave_the_counts_alone(kernel: str) -> None:
    """Without expected draws the kernel leaves `draw_counts` unchanged."""
    p = problem((8, 5, 4), "column", "none")
    draw_counts = torch.arange(5.0)
    KERNELS[kernel](p.q, p.emb, p.log_w, None, None, draw_counts)
    assert draw_counts.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("draws", [None, 16.0])
def test_backward_twice(kernel: str, draws: float | None) -> None:
    """A retained graph gives the same gradient again, also after another problem in between."""
    p, other = problem((33, 57, 13), "column", "some", draws), problem((33, 57, 13), "column", "some", draws, seed=1)
    q, emb = p.q.requires_grad_(), p.emb.requires_grad_()
    value = KERNELS[kernel](q, emb, p.log_w, p.places, draws)
    held = KERNELS[kernel](other.q.requires_grad_(), other.emb, other.log_w, other.places, draws)
    first = torch.autograd.grad(value.sum(), [q, emb], retain_graph=True)
    ours(other, KERNELS[kernel])
    second = torch.autograd.grad(value.sum(), [q, emb])
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(one, two)
    plain_value = reference.weighted_logsumexp(other.q, other.emb, other.log_w, other.places, draws)
    torch.testing.assert_close(*(torch.autograd.grad(value.sum(), other.q)[0] for value in (held, plain_value)))


def test_spare_buffers_stay_on_their_device() -> None:
    """A buffer freed on the CPU is never reused for vectors on another device."""
    spare = chunked._Spare(most=2)
    spare.give(torch.empty(4, 4))
    assert spare.take(torch.empty(1, device="meta"), 4, 4).device.type == "meta"


def test_own_candidates_of_each_query() -> None:
    """Per-query candidates (B, C, D), few and many, equal a loop over queries."""
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
    """A log_w that requires a gradient gets the softmax probabilities from every kernel."""
    p = problem((5, 7, 3), "column", "none")
    log_w = p.log_w.clone().requires_grad_()
    kernels.weighted_logsumexp(p.q, p.emb, log_w).sum().backward()
    assert log_w.grad is not None
    torch.testing.assert_close(log_w.grad, torch.softmax(p.q @ p.emb.T + p.log_w, 1).sum(0))


def test_second_derivatives_are_refused_not_wrong() -> None:
    """The chunked kernel raises when asked for a second derivative."""
    p = problem((5, 7, 3), "column", "none")
    q = p.q.requires_grad_()
    (gradient,) = torch.autograd.grad(chunked.weighted_logsumexp(q, p.emb, p.log_w).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def check_weighted_logsumexp(kernel: Kernel) -> None:
    """Check the error budget on problems that separate right kernels from wrong ones."""
    for weight, drop, draws, scale in (
        ("column", "some", None, 1.0),
        ("pair", "all", None, 1.0),
        ("column", "some", None, 30.0),
        ("column", "some", 100.0, 1.0),
    ):
        within_budget(problem((33, 57, 13), weight, drop, draws, scale), kernel)


def of_logits(logsumexp: Callable[[Tensor], Tensor]) -> Kernel:
    """A kernel with its own log-sum-exp over weighted logits (B, C) that leaves expected draws to the reference."""

    def kernel(
        q: Tensor,
        emb: Tensor,
        log_w: Tensor,
        places: ExcludedPairs | None,
        draws: float | None,
        draw_counts: Tensor | None,
    ) -> Tensor:
        if draws is not None:
            return reference.weighted_logsumexp(q, emb, log_w, places, draws, draw_counts)
        scores = q @ emb.T
        return logsumexp(scores + reference.drop(log_w, scores.shape, places))

    return kernel


def maximum_of_the_last_chunk(x: Tensor) -> Tensor:
    tops = [part.amax(1, keepdim=True).clamp(min=-1e4) for part in x.split(20, 1)]
    totals = [(part - top).exp().sum(1) for part, top in zip(x.split(20, 1), tops, strict=True)]
    return sum(totals).log() + tops[-1].squeeze(1)  # type: ignore[union-attr]


def counts_with_gradient(
    q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs, draws: float | None, *rest: Tensor
) -> Tensor:
    if draws is None:
        return reference.weighted_logsumexp(q, emb, log_w, places)
    scores = q @ emb.T
    corrected = scores + reference.drop(log_w, scores.shape, places)
    counts = corrected - reference.safe_logsumexp(corrected).unsqueeze(1) + math.log(draws)
    rest[0].copy_(counts.detach().exp().sum(0))
    return reference.safe_logsumexp(scores + counts)


def counts_not_squared(
    q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs, draws: float | None, draw_counts: Tensor
) -> Tensor:
    reference.weighted_logsumexp(q, emb, log_w, places, draws, draw_counts)
    return reference.weighted_logsumexp(q, emb, log_w, places)


WRONG: dict[str, Kernel] = {
    "forgets a chunk": of_logits(lambda x: reference.safe_logsumexp(torch.cat([x[:, :20], x[:, 40:]], 1))),
    "rescales no chunk": of_logits(maximum_of_the_last_chunk),
    "subtracts no maximum": of_logits(lambda x: x.exp().sum(1).log()),
    "takes the mean": of_logits(lambda x: reference.safe_logsumexp(x) - math.log(x.shape[1])),
    "has a nan gradient where nothing is left": of_logits(lambda x: torch.logsumexp(x, 1)),
    "has twice the gradient": of_logits(
        lambda x: 2 * reference.safe_logsumexp(x) - reference.safe_logsumexp(x).detach()
    ),
    "forgets the weights": lambda q, emb, log_w, *rest: reference.weighted_logsumexp(q, emb, 0 * log_w, *rest),
    "forgets the mask": lambda q, emb, log_w, places, *rest: reference.weighted_logsumexp(q, emb, log_w, None, *rest),
    "forgets the draw_counts": lambda *rest: reference.weighted_logsumexp(*rest[:-1]),
    "does not square the counts": counts_not_squared,
    "has a gradient through the counts": counts_with_gradient,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_right_kernels_pass(kernel: str) -> None:
    """The check accepts every kernel of the library."""
    check_weighted_logsumexp(KERNELS[kernel])


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kernels_are_rejected(wrong: str) -> None:
    """The check rejects a kernel with one of the known bugs."""
    with pytest.raises(AssertionError):
        check_weighted_logsumexp(WRONG[wrong])
