"""The kernel over candidates and their mixtures, with an error budget against explicit float64 sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sparring import kernels
from sparring.kernels import mixtures_chunked, reference
from sparring.kernels.reference import ExcludedPairs, Mix

SHAPES = [(64, 12, 5, 14, 16), (33, 7, 3, 5, 13), (1, 1, 2, 2, 4), (5, 40, 2, 2, 8)]  # B, G, M, V, D
TOLERANCE = 5e-6  # of the largest entry


@dataclass(frozen=True)
class Problem:
    q: Tensor
    emb: Tensor
    log_w: Tensor
    places: Tensor | None  # (B, C) bool
    mix_places: Tensor | None  # (B, G) bool
    share: Tensor
    offset: float
    upstream: Tensor


def problem(
    shape: tuple[int, ...], weight: str = "column", drop: float = 0.3, offset: float = 0.0, scale: float = 1.0
) -> Problem:
    b, g, m, v, d = shape
    random = torch.Generator().manual_seed(0)
    q, emb = scale * torch.randn(b, d, generator=random), torch.randn(g * m, d, generator=random)
    size = {"scalar": (), "column": (g * m,), "pair": (b, g * m)}[weight]
    log_w = torch.randn(size, generator=random)
    if weight == "column":
        log_w[::7] = -math.inf
    share = (
        torch.rand(g, v, m, generator=random) * (torch.rand(g, v, m, generator=random) < 0.7)
        + torch.eye(m)[torch.arange(v) % m]
    )
    places = torch.rand(b, g * m, generator=random) < drop if drop else None
    mix_places = torch.rand(b, g, generator=random) < drop if drop else None
    return Problem(
        q, emb, log_w, places, mix_places, share / share.sum(-1, keepdim=True), offset, torch.randn(b, generator=random)
    )


def truth(p: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Value and both gradients from explicit mixture vectors, one table of logits and torch.logsumexp."""
    q, emb = p.q.to(dtype, copy=True).requires_grad_(), p.emb.to(dtype, copy=True).requires_grad_()
    g, v, m = p.share.shape
    vectors = torch.einsum("gvm,gmd->gvd", p.share.to(dtype), emb.view(g, m, -1)).reshape(g * v, -1)
    log_w = p.log_w.to(dtype).expand(len(q), g * m).clone()
    members = log_w.view(len(q), g, 1, m)
    made_w = torch.where(p.share > 0, p.share.to(dtype) * members, 0.0).sum(-1).flatten(1) + p.offset
    if p.places is not None and p.mix_places is not None:
        log_w = log_w.masked_fill(p.places, -math.inf)
        made_w = made_w.masked_fill(p.mix_places.repeat_interleave(v, 1), -math.inf)
    table = torch.cat([q @ emb.T + log_w, q @ vectors.T + made_w], 1)
    some = torch.isfinite(table).any(1)
    value = torch.full((len(q),), -math.inf, dtype=dtype)
    value[some] = torch.logsumexp(table[some], 1)
    total = (torch.where(some, value, 0.0) * p.upstream.to(dtype)).sum()
    if not total.requires_grad:
        return value.detach(), torch.zeros_like(q), torch.zeros_like(emb)
    return value.detach(), *torch.autograd.grad(total, [q, emb])


def as_places(mask: Tensor | None, form: str) -> ExcludedPairs | None:
    return mask if mask is None or form == "mask" else torch.nonzero(mask, as_tuple=True)  # type: ignore[return-value]


def ours(p: Problem, kernel, form: str) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    q, emb = p.q.clone().requires_grad_(), p.emb.clone().requires_grad_()
    mix = Mix(p.share, as_places(p.mix_places, form), p.offset)
    value = kernel(q, emb, p.log_w, as_places(p.places, form), mix=mix)
    total = (torch.where(torch.isfinite(value), value, 0.0) * p.upstream).sum()
    first = torch.autograd.grad(total, [q, emb], retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(total, [q, emb]), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)  # a second backward pass gives the same
    return value.detach(), *first


def within_budget(p: Problem, kernel, form: str) -> None:  # type: ignore[no-untyped-def]
    for name, exact, single, mine in zip(
        ("value", "grad q", "grad emb"),
        truth(p, torch.float64),
        truth(p, torch.float32),
        ours(p, kernel, form),
        strict=True,
    ):
        finite = torch.isfinite(exact)
        assert torch.equal(torch.isfinite(mine), finite), name
        if bool(finite.any()):
            size = float(exact[finite].abs().max().clamp(min=1e-30))
            error, allowed = (mine - exact)[finite].abs().max(), (single - exact)[finite].abs().max()
            assert float(error) <= float(allowed) + TOLERANCE * size, f"{name}: {error:.2e} against {allowed:.2e}"


@pytest.mark.parametrize("form", ["pairs", "mask"])
@pytest.mark.parametrize("weight", ["scalar", "column"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", ["fast", "reference"])
def test_budget(kernel: str, shape: tuple[int, ...], weight: str, form: str) -> None:
    """Value and gradients are as accurate as float32 with explicit vectors, with masks as pairs or as a table."""
    run = mixtures_chunked.weighted_logsumexp if kernel == "fast" else reference.weighted_logsumexp
    for drop, offset in ((0.0, 0.0), (0.3, -0.8), (1.1, 0.0)):
        within_budget(problem(shape, weight, drop, offset), run, form)


@pytest.mark.parametrize("store", [0, 1 << 26])
@pytest.mark.parametrize("block", [1, 2000])
def test_in_blocks(monkeypatch: pytest.MonkeyPatch, block: int, store: int) -> None:
    """The budget holds for one group at a time, for a few, and with exponentials recomputed in the backward pass."""
    monkeypatch.setitem(mixtures_chunked.BLOCK, "cpu", block)
    monkeypatch.setattr(mixtures_chunked, "STORE", store)
    for shape in SHAPES:
        within_budget(problem(shape, drop=0.3), mixtures_chunked.weighted_logsumexp, "pairs")
        within_budget(problem(shape, drop=0.3), mixtures_chunked.weighted_logsumexp, "mask")


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_large_logits(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Logits of hundreds neither overflow nor vanish in any block, and a masked logit never sets the maximum."""
    monkeypatch.setitem(mixtures_chunked.BLOCK, "cpu", block)
    p = problem((16, 12, 3, 5, 8), "column", scale=100.0)
    within_budget(p, mixtures_chunked.weighted_logsumexp, "pairs")


def test_a_weight_per_pair_takes_the_plain_form() -> None:
    """The dispatcher supports a weight per pair, and rejects draws combined with mixtures."""
    p = problem((9, 6, 3, 5, 8), "pair")
    within_budget(p, kernels.weighted_logsumexp, "pairs")
    with pytest.raises(ValueError, match="mixtures"):
        kernels.weighted_logsumexp(p.q, p.emb, p.log_w, draws=3.0, mix=Mix(p.share))


def test_candidates_of_each_query() -> None:
    """With vectors (B, C, D) and shares (B, G, V, M) each query has its own mixtures."""
    random = torch.Generator().manual_seed(1)
    q, emb, share = (torch.randn(4, *rest, generator=random).double() for rest in ((3,), (6, 3), (2, 5, 3)))
    share = share.softmax(-1)
    got = kernels.weighted_logsumexp(q, emb, torch.zeros(()), mix=Mix(share))
    for i in range(4):
        real = [float(q[i] @ e) for e in emb[i]]
        made = [sum(float(share[i, g, v, m]) * real[3 * g + m] for m in range(3)) for g in range(2) for v in range(5)]
        assert float(got[i]) == pytest.approx(math.log(sum(math.exp(x) for x in real + made)))


def test_buffers_are_used_again_and_never_shared() -> None:
    """Two live losses keep their own exponentials: the second does not change the first one's gradient."""
    p = problem((64, 12, 5, 14, 16))
    alone = ours(p, mixtures_chunked.weighted_logsumexp, "pairs")
    q, emb = p.q.clone().requires_grad_(), p.emb.clone().requires_grad_()
    mix = Mix(p.share, as_places(p.mix_places, "pairs"))
    first = mixtures_chunked.weighted_logsumexp(q, emb, p.log_w, as_places(p.places, "pairs"), mix)
    second = mixtures_chunked.weighted_logsumexp(2 * q, emb, p.log_w, None, mix)
    torch.autograd.grad(second.sum(), [q, emb], retain_graph=True)
    mixtures_chunked.weighted_logsumexp(3 * q, emb, p.log_w, None, mix)
    for got, want in zip(torch.autograd.grad((first * p.upstream).sum(), [q, emb]), alone[1:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def of_mixtures(mixtures: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel with its own logits of mixtures, from q, emb, log_w and mix."""

    def kernel(q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None, mix: Mix) -> Tensor:
        scores = q @ emb.T
        candidates = scores + reference.drop(log_w, scores.shape, places)
        return reference.safe_logsumexp(torch.cat([candidates, mixtures(q, emb, log_w, mix)], 1))

    return kernel


RIGHT = of_mixtures(lambda q, emb, log_w, mix: reference.mixed_logits(q @ emb.T, log_w, mix))
WRONG = {
    "no gradient": of_mixtures(lambda q, emb, log_w, mix: reference.mixed_logits(q @ emb.T.detach(), log_w, mix)),
    "no mask": of_mixtures(
        lambda q, emb, log_w, mix: reference.mixed_logits(q @ emb.T, log_w, mix._replace(places=None))
    ),
    "no weights": of_mixtures(lambda q, emb, log_w, mix: reference.mixed_logits(q @ emb.T, torch.zeros(()), mix)),
    "no offset": of_mixtures(
        lambda q, emb, log_w, mix: reference.mixed_logits(q @ emb.T, log_w, mix._replace(offset=0.0))
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kernels_are_rejected(wrong: str) -> None:
    """The budget rejects mixtures whose members get no gradient, or that forget their mask, weights or offset."""
    p = problem(SHAPES[1], offset=-0.8)
    within_budget(p, RIGHT, "mask")
    with pytest.raises(AssertionError):
        within_budget(p, WRONG[wrong], "mask")
