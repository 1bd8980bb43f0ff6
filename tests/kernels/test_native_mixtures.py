"""The native log-sum-exp over candidates and their mixtures against the plain reference in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sparring import kernels
from sparring.kernels import chunked, reference
from sparring.kernels.chunked import half_gradients, multiplies_bfloat16
from sparring.kernels.native import library, mixtures
from sparring.kernels.reference import ExcludedKeys, ExcludedPairs, Mix

# B, G, M, V, D: one of each, the sizes of ESANS, odd ones, the most members, enough pairs for two threads
SHAPES = [
    (1, 1, 1, 1, 1),
    (64, 12, 5, 14, 16),
    (33, 7, 3, 5, 13),
    (5, 40, 2, 2, 8),
    (17, 3, 8, 9, 70),
    (75, 150, 4, 3, 5),
]


@pytest.fixture(params=["1 thread", "2 threads", "half"], autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernel on one and two threads, and with bfloat16 gradients."""
    if library.library() is None:
        pytest.skip("needs a C++ compiler")
    if request.param == "half" and not multiplies_bfloat16():
        pytest.skip("needs a processor with products of bfloat16")
    before = torch.get_num_threads()
    torch.set_num_threads(2 if "2" in request.param else 1)
    with half_gradients(request.param == "half"):
        yield str(request.param)
    torch.set_num_threads(before)


def problem(shape: tuple[int, ...], scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    """Queries, candidates and shares; some shares are 0, and some mixtures are outside the span of their members."""
    b, g, m, v, d = shape
    random = torch.Generator().manual_seed(0)
    q, emb = scale * torch.randn(b, d, generator=random), torch.randn(g * m, d, generator=random)
    share = torch.rand(g, v, m, generator=random) * (torch.rand(g, v, m, generator=random) < 0.6)
    return q, emb, share / share.sum(-1, keepdim=True).clamp(min=0.4), random


def weights(kind: str, c: int, random: torch.Generator) -> Tensor:
    log_w = torch.randn(() if kind == "scalar" else (c,), generator=random)
    if kind == "column":
        log_w[::7] = -math.inf
    return log_w


def excluded(kind: str, b: int, columns: int, random: torch.Generator) -> ExcludedPairs | None:
    mask = torch.rand(b, columns, generator=random) < 0.3
    mask[b // 2] = True  # a query that has nothing left
    if kind == "pairs":
        row, column = torch.nonzero(mask, as_tuple=True)
        return row, column
    keys = torch.randint(4, (columns,), generator=random), torch.randint(4, (b,), generator=random)
    return {"none": None, "mask": mask, "keys": ExcludedKeys(*keys)}[kind]


def both(
    q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None, mix: Mix
) -> tuple[list[Tensor], list[Tensor]]:
    """Values and gradients by q and by emb: of the kernel, and of the reference in float64."""
    results = []
    for kernel, kind in ((mixtures.weighted_logsumexp, torch.float32), (reference.weighted_logsumexp, torch.float64)):
        a, b = (x.detach().to(kind).requires_grad_() for x in (q, emb))
        value = kernel(a, b, log_w.to(kind), places, mix=mix._replace(weights=mix.weights.to(kind)))
        assert value is not None
        up = torch.linspace(-1, 2, len(q)).to(kind)
        torch.where(torch.isfinite(value), value * up, 0.0).sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        results.append([value.detach(), a.grad, b.grad])
    return results[0], results[1]


def close(got: list[Tensor], want: list[Tensor], form: str) -> None:
    value, by_q, by_emb = (x.double() for x in got)
    finite = torch.isfinite(want[0])
    assert torch.equal(torch.isfinite(value), finite)
    assert torch.equal(value[~finite], want[0][~finite])
    assert torch.allclose(value[finite], want[0][finite], rtol=2e-6, atol=4e-6)
    bound = 4e-3 if form == "half" else 4e-6
    for mine, theirs in ((by_q, want[1]), (by_emb, want[2])):
        assert float((mine - theirs).norm()) <= bound * float(theirs.norm()) + 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape: tuple[int, ...], form: str) -> None:
    """Every form of weights and of both exclusions, with an offset; gradients to 4e-6, in bfloat16 to 4e-3."""
    b, g, m, _, _ = shape
    kinds = ("none", "pairs", "mask", "keys")
    for weight, real, mixed in itertools.product(("scalar", "column"), kinds, kinds):
        q, emb, share, random = problem(shape)
        places, groups = excluded(real, b, g * m, random), excluded(mixed, b, g, random)
        close(*both(q, emb, weights(weight, g * m, random), places, Mix(share, groups, -0.8)), form)


def test_weights_of_any_sign(form: str) -> None:
    """Mixtures beyond their members, whose logits the largest candidate does not bound."""
    q, emb, share, random = problem((33, 7, 5, 14, 9), scale=6.0)
    log_w, out = torch.randn(35, generator=random), excluded("mask", 33, 35, random)
    for weights in (3 * share, 2 * share - 0.3):
        close(*both(q, emb, log_w, out, Mix(weights, None, 0.5)), form)


def test_scores_far_apart(form: str) -> None:
    """Scores in the hundreds neither overflow nor vanish, and an excluded or worthless one never sets the maximum."""
    q, emb, share, random = problem((9, 10, 5, 14, 8), scale=60.0)
    log_w = torch.randn(50, generator=random)
    log_w[int((q @ emb.T)[0].argmax())] = -math.inf
    best = (q @ emb.T).argmax(1)
    got, want = both(q, emb, log_w, (torch.arange(9), best), Mix(share, (torch.arange(9), best // 5)))
    assert torch.allclose(got[0].double(), want[0], rtol=1e-5, atol=1e-4)
    assert all(torch.isfinite(x).all() for x in got)
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert float((mine - theirs).norm()) <= (4e-3 if form == "half" else 1e-4) * float(theirs.norm())


def test_recomputed_in_chunks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond STORE elements queries come in chunks, and the backward pass computes the exponentials again."""
    monkeypatch.setattr(chunked, "STORE", 0)
    b, g, m, _, _ = shape = (75, 7, 5, 14, 9)
    for kind in ("none", "pairs", "mask", "keys"):
        q, emb, share, random = problem(shape)
        mix = Mix(share, excluded(kind, b, g, random))
        close(*both(q, emb, torch.randn(g * m, generator=random), excluded(kind, b, g * m, random), mix), "1 thread")


def test_a_second_backward_pass(form: str) -> None:
    """A second backward pass over one graph gives the gradients of the first."""
    q, emb, share, _ = problem((33, 7, 5, 14, 9))
    q.requires_grad_()
    total = kernels.weighted_logsumexp(q, emb, torch.zeros(()), mix=Mix(share)).sum()
    first, second = (torch.autograd.grad(total, q, retain_graph=True)[0] for _ in range(2))
    assert float((first - second).norm()) <= 4e-3 * float(second.norm())


def test_other_memory_layouts(form: str) -> None:
    """Transposed and strided inputs, and a batch without queries."""
    q, emb, share, _ = problem((6, 4, 3, 5, 8))
    mask = torch.zeros(12, 6, dtype=torch.bool).T
    strided = share.repeat(1, 1, 2)[..., ::2].contiguous().transpose(0, 1).contiguous().transpose(0, 1)
    close(*both(q.T.contiguous().T, emb.repeat(1, 2)[:, ::2], torch.zeros(24)[::2], mask, Mix(strided)), form)
    none = kernels.weighted_logsumexp(torch.zeros(0, 8, requires_grad=True), emb, torch.zeros(()), mix=Mix(share))
    none.sum().backward()
    assert none.shape == (0,)


def test_results_do_not_depend_on_threads(form: str) -> None:
    """One and two threads give the same bits."""
    q, emb, share, random = problem((75, 150, 5, 14, 16))
    log_w, found = torch.randn(750, generator=random), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(both(q, emb, log_w, None, Mix(share))[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_where_the_kernel_does_not_apply(form: str) -> None:
    """Other types and groups of more than 8 members go to torch's form, with the same results."""
    for m, kind in ((9, torch.float32), (3, torch.float64)):
        q, emb, share = (x.to(kind) for x in problem((6, 4, m, 5, 8))[:3])
        assert mixtures.weighted_logsumexp(q, emb, torch.zeros((), dtype=kind), None, Mix(share)) is None
        got = kernels.weighted_logsumexp(q, emb, torch.zeros((), dtype=kind), mix=Mix(share))
        want = reference.weighted_logsumexp(q, emb, torch.zeros((), dtype=kind), mix=Mix(share))
        torch.testing.assert_close(got, want)
