"""The log-sum-exp in blocks, native and torch's, against the plain reference in float64."""

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
from sparring.kernels.native import library
from sparring.kernels.native.library import function
from sparring.kernels.reference import ExcludedKeys, ExcludedPairs

SHAPES = [(1, 1, 1), (5, 77, 3), (33, 130, 37), (20, 150, 130), (50, 3000, 2)]  # the last: two blocks of queries


@pytest.fixture(params=["native", "native, 2 threads", "half", "torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every form of the kernel: native on one and two threads, with bfloat16 gradients, and torch's."""
    monkeypatch.setattr(library, "active", request.param != "torch")
    if request.param != "torch" and library.library() is None:
        pytest.skip("needs a C++ compiler")
    if request.param == "half" and not multiplies_bfloat16():
        pytest.skip("needs a processor with products of bfloat16")
    before = torch.get_num_threads()
    torch.set_num_threads(2 if "2" in request.param else 1)
    with half_gradients(request.param == "half"):
        yield str(request.param)
    torch.set_num_threads(before)


def problem(shape: tuple[int, int, int], seed: int = 0) -> tuple[Tensor, Tensor, torch.Generator]:
    b, c, d = shape
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, d, generator=g), torch.randn(c, d, generator=g), g


def weights(kind: str, b: int, c: int, g: torch.Generator) -> Tensor:
    shape = {"none": (), "column": (c,), "one row": (1, c), "row": (b, 1), "pair": (b, c)}[kind]
    log_w = torch.randn(shape, generator=g)
    if kind == "column":
        log_w[::3] = -math.inf
    return log_w


def excluded(kind: str, b: int, c: int, g: torch.Generator) -> ExcludedPairs | None:
    mask = torch.rand(b, c, generator=g) < 0.2
    mask[b // 2] = True  # a query that has nothing left
    if kind == "pairs":
        row, column = torch.nonzero(mask, as_tuple=True)
        return row, column
    keys = torch.randint(4, (c,), generator=g), torch.randint(4, (b,), generator=g)
    return {"none": None, "mask": mask, "keys": ExcludedKeys(*keys)}[kind]


def both(
    q: Tensor, emb: Tensor, log_w: Tensor, places: ExcludedPairs | None, draws: float | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Values, gradients by q and by emb, and draw counts: of the kernel and of the reference in float64."""
    results = []
    for kernel, kind in ((kernels.weighted_logsumexp, q.dtype), (reference.weighted_logsumexp, torch.float64)):
        a, b = (x.detach().to(kind).requires_grad_() for x in (q, emb))
        counts = None if draws is None else torch.zeros(len(emb), dtype=kind)
        value = kernel(a, b, log_w.to(kind), places, draws, counts)
        up = torch.linspace(-1, 2, len(q)).to(kind)
        torch.where(torch.isfinite(value), value * up, 0.0).sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        results.append([value.detach(), a.grad, b.grad] + ([] if counts is None else [counts]))
    return results[0], results[1]


def close(got: list[Tensor], want: list[Tensor], form: str, gradients: float | None = None) -> None:
    value, by_q, by_emb, *counts = (x.double() for x in got)
    finite = torch.isfinite(want[0])
    assert torch.equal(torch.isfinite(value), finite)
    assert torch.equal(value[~finite], want[0][~finite])
    assert torch.allclose(value[finite], want[0][finite], rtol=2e-6, atol=4e-6)
    bound = gradients or (4e-3 if form == "half" else 4e-6)
    for mine, theirs in ((by_q, want[1]), (by_emb, want[2])):
        assert float((mine - theirs).norm()) <= bound * float(theirs.norm()) + 1e-12
    for mine, theirs in zip(counts, want[3:], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [1 << 19, 200])
def test_values_and_gradients(
    shape: tuple[int, int, int], block: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shape of weights and exclusions, in one block and in many; gradients to 4e-6, in bfloat16 to 4e-3."""
    monkeypatch.setitem(chunked.BLOCK, "cpu", block)
    b, c, _ = shape
    for weight, exclusion in itertools.product(
        ("none", "column", "one row", "row", "pair"), ("none", "pairs", "mask", "keys")
    ):
        q, emb, g = problem(shape)
        close(*both(q, emb, weights(weight, b, c, g), excluded(exclusion, b, c, g), None), form)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [1 << 19, 200])
def test_expected_draws(shape: tuple[int, int, int], block: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with expected counts of draws, and the counts themselves."""
    monkeypatch.setitem(chunked.BLOCK, "cpu", block)
    b, c, _ = shape
    for weight, exclusion in itertools.product(("none", "column"), ("none", "pairs", "mask", "keys")):
        q, emb, g = problem(shape)
        close(*both(q, emb, weights(weight, b, c, g), excluded(exclusion, b, c, g), 7.0), form)


def test_scores_far_apart(form: str) -> None:
    """Scores in the hundreds, a weight of -inf on the largest, and candidates whose terms underflow."""
    q, emb, g = problem((9, 50, 4))
    q *= 60
    log_w = torch.randn(50, generator=g)
    log_w[int((q @ emb.T)[0].argmax())] = -math.inf
    for draws in (None, 5.0):
        got, want = both(q, emb, log_w, None, draws)
        assert torch.allclose(got[0].double(), want[0], rtol=1e-5, atol=1e-4)
        assert all(torch.isfinite(x).all() for x in got)


def test_other_memory_layouts_and_types(form: str) -> None:
    """Transposed and strided inputs, and float64, which has no native form."""
    q, emb, g = problem((6, 20, 8))
    log_w = torch.randn(40, generator=g)[::2]
    mask = (torch.rand(20, 6, generator=g) < 0.3).T
    close(*both(q.T.contiguous().T, emb.repeat(1, 2)[:, ::2] * 2, log_w, mask, None), form)
    close(*both(q.double(), emb.double(), log_w.double(), mask, None), "torch")


@pytest.mark.parametrize("draws", [None, 5.0])
def test_recomputed_exponentials(form: str, draws: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond STORE elements the backward pass computes the exponentials again, in float32."""
    monkeypatch.setattr(chunked, "STORE", 0)  # and eight queries at a time
    q, emb, g = problem((13, 31, 5))
    close(*both(q, emb, torch.randn(31, generator=g), None, draws), "native")


@pytest.mark.parametrize("draws", [None, 20.0])
def test_memory_that_held_anything(form: str, draws: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh and spare memory is full of NaN: whatever is read of it was written before."""
    dirty = [torch.full((1 << 14,), torch.nan, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    monkeypatch.setattr(chunked.spare, "buffers", dirty)
    q, emb, g = problem((33, 130, 37))
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        got, want = both(q, emb, torch.randn(130, generator=g), excluded("pairs", 33, 130, g), draws)
    finally:
        torch.use_deterministic_algorithms(False)
    close(got, want, form)


def test_a_second_backward_pass(form: str) -> None:
    """A second backward pass over one graph gives the gradients of the first."""
    q, emb, _ = problem((13, 31, 5))
    q.requires_grad_()
    total = kernels.weighted_logsumexp(q, emb, torch.zeros(())).sum()
    first, second = (torch.autograd.grad(total, q, retain_graph=True)[0] for _ in range(2))
    assert float((first - second).norm()) <= 4e-3 * float(second.norm())


@pytest.mark.parametrize("draws", [None, 5.0])
def test_no_queries_and_no_dimensions(form: str, draws: float | None) -> None:
    """A batch without queries has gradients of 0; vectors without dimensions have the sums of equal scores."""
    q, emb = torch.zeros(0, 4, requires_grad=True), torch.randn(5, 4).requires_grad_()
    kernels.weighted_logsumexp(q, emb, torch.zeros(5), None, draws).sum().backward()
    assert q.grad is not None
    assert q.grad.shape == (0, 4)
    assert emb.grad is not None
    assert not emb.grad.any()
    empty = kernels.weighted_logsumexp(torch.zeros(3, 0), torch.zeros(5, 0), torch.zeros(5), None, draws)
    torch.testing.assert_close(empty, torch.full((3,), math.log(5 if draws is None else draws)))


@pytest.mark.parametrize("draws", [None, 5.0])
def test_repeats_bitwise(form: str, draws: float | None) -> None:
    """The same inputs on the same threads give the same bits."""
    q, emb, g = problem((64, 900, 16))
    log_w = torch.randn(900, generator=g)
    first, second = (both(q, emb, log_w, None, draws)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_exponential(form: str) -> None:
    """2^x is within 1.2e-7 of the exact value, 0 below -126, 1 at 0; bfloat16 copies are rounded to the nearest."""
    kernel = function("exp2", "plpp")
    if kernel is None:
        return
    x = torch.cat([torch.linspace(-126, 0, 200_001)[1:], torch.tensor([-math.inf, -127.0, -1e30, 0.0])])
    y, half = torch.empty_like(x), torch.empty(len(x), dtype=torch.bfloat16)
    kernel(x.data_ptr(), len(x), y.data_ptr(), half.data_ptr())
    exact = torch.exp2(x[:200_000].double())
    assert float(((y[:200_000].double() - exact) / exact).abs().max()) < 1.2e-7
    assert y[200_000:].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert torch.equal(half, y.bfloat16())
