"""The fused Triton kernel, in the interpreter without a GPU, against sums over the full score matrix in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from sparring.kernels import ExcludedKeys, fused

# the interpreter's log2(0), and inf - inf in the branch of a `where` that is not taken
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}:RuntimeWarning") for words in ("divide by zero", "invalid value")
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = (33, 57, 13)
SHAPES = [(140, 150, 24), (70, 1, 8), (1, 77, 16)]  # the first spans more than one group of 128


def truth(
    q: Tensor, emb: Tensor, w: Tensor, draws: float | None, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value, gradients and expected counts in float64; w (B, C) is -inf for excluded pairs."""
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


@pytest.mark.parametrize("draws", [None, 17.0])
@pytest.mark.parametrize(
    ("shape", "weight", "keyed"),
    [(SMALL, weight, keyed) for weight in ("scalar", "column", "row", "pair", "one row") for keyed in (False, True)]
    + [(shape, weight, True) for shape in SHAPES for weight in ("column", "pair")],
)
def test_value_gradients_and_draw_counts(
    draws: float | None, shape: tuple[int, int, int], weight: str, keyed: bool
) -> None:
    """With weights of any shape, some -inf, and excluded keys, results are within float32 error of the full matrix."""
    b, c, d = shape
    g = torch.Generator().manual_seed(b + c)
    q, emb, upstream = torch.randn(b, d, generator=g), torch.randn(c, d, generator=g), torch.randn(b, generator=g)
    log_w = 2 * torch.randn(
        {"scalar": (), "column": (c,), "row": (b, 1), "pair": (b, c), "one row": (1, c)}[weight], generator=g
    )
    log_w = torch.where(torch.rand(log_w.shape, generator=g) < 0.2, -math.inf, log_w)
    keys = (
        ExcludedKeys(torch.randint(5, (c,), generator=g).to(DEVICE), torch.randint(5, (b,), generator=g).to(DEVICE))
        if keyed
        else None
    )
    q, emb, upstream, log_w = (x.to(DEVICE) for x in (q, emb, upstream, log_w))
    w = log_w.expand(b, c).clone()
    if keys is not None:
        for i, own in enumerate(keys.rows.tolist()):
            for j, each in enumerate(keys.columns.tolist()):
                if own == each:
                    w[i, j] = -math.inf
    draw_counts = torch.zeros(c, device=DEVICE) if draws is not None else None
    ours_q, ours_emb = q.clone().requires_grad_(), emb.clone().requires_grad_()
    value = fused.weighted_logsumexp(ours_q, ours_emb, log_w, keys, draws, draw_counts)
    (torch.where(torch.isfinite(value), value, 0.0) * upstream).sum().backward()
    for mine, exact in zip(
        (value, ours_q.grad, ours_emb.grad, draw_counts), truth(q, emb, w, draws, upstream), strict=True
    ):
        if mine is not None:
            finite = torch.isfinite(exact)
            assert torch.equal(torch.isfinite(mine), finite)
            assert torch.allclose(mine[finite].double(), exact[finite], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("refused", [1, 2, 3])
@pytest.mark.parametrize("half", [False, True])
def test_a_device_with_little_shared_memory_gets_smaller_tiles(
    monkeypatch: pytest.MonkeyPatch, refused: int, half: bool
) -> None:
    """If the largest tiles do not fit, the next serve with the same value and gradients, and are not tried again."""
    monkeypatch.setattr(fused, "halves", lambda dtype: half)
    monkeypatch.setattr(fused, "_plan", lru_cache(fused._Plan))
    tried: list[int] = []

    def limited(work: Callable[..., Any]) -> Callable[..., Any]:
        def launch(problem: fused._Problem, shape: fused._Shape, *more: Any) -> Any:
            tried.append(problem.plan.shapes.index(shape))
            if tried[-1] < refused:
                raise OutOfResources(2, 1, "shared memory")
            return work(problem, shape, *more)

        return launch

    for name in ("_forward", "_backward"):
        monkeypatch.setattr(fused._Problem, name, limited(getattr(fused._Problem, name)))
    g = torch.Generator().manual_seed(0)
    q, emb, w = (torch.randn(size, generator=g).to(DEVICE) for size in ((70, 24), (75, 24), (70, 75)))
    upstream = torch.ones(70, device=DEVICE)
    expected = truth(q, emb, w, 17.0, upstream)
    # scores up to 20 are summed in another order by each pass, and which one depends on the processor's BLAS
    error = 2e-3 if half else 5e-6
    for _ in range(2):
        ours_q, ours_emb = q.clone().requires_grad_(), emb.clone().requires_grad_()
        value = fused.weighted_logsumexp(ours_q, ours_emb, w, None, 17.0)
        value.sum().backward()
        for mine, exact in zip((value, ours_q.grad, ours_emb.grad), expected, strict=False):
            assert mine is not None
            assert float((mine.detach().double() - exact).norm()) < error * float(exact.norm())
    assert tried == [*range(refused + 1)] * 2 + [refused] * 2
    monkeypatch.setattr(
        fused._Problem, "_forward", lambda *given: (_ for _ in ()).throw(OutOfResources(2, 1, "shared memory"))
    )
    with pytest.raises(OutOfResources):
        fused.weighted_logsumexp(q, emb, w, None, 17.0)


def test_draw_counts_without_a_gradient() -> None:
    """Without a backward pass, the expected counts are filled at once and sum to the draws of all queries."""
    q, emb = torch.randn(40, 8, device=DEVICE), torch.randn(50, 8, device=DEVICE)
    draw_counts = torch.zeros(50, device=DEVICE)
    fused.weighted_logsumexp(q, emb, torch.zeros((), device=DEVICE), None, 12.0, draw_counts)
    assert float(draw_counts.sum()) == pytest.approx(40 * 12, rel=1e-4)
    assert torch.allclose(draw_counts, 12 * torch.softmax(q @ emb.T, 1).sum(0), rtol=1e-3)


def drawn_counts(
    logits: Tensor, n: float, seed: int, first: int = 0, keys: ExcludedKeys | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (B, C) of the forward pass, the value and draw_counts; with unit candidates the gradient is the counts."""
    q, unit = (
        logits.to(DEVICE, copy=True).requires_grad_(),
        torch.eye(logits.shape[1], device=DEVICE, requires_grad=True),
    )
    draw_counts = torch.zeros(logits.shape[1], device=DEVICE)
    seeds = torch.tensor([seed, first], device=DEVICE)
    value = fused.weighted_logsumexp(q, unit, torch.zeros(logits.shape[1], device=DEVICE), keys, n, draw_counts, seeds)
    torch.where(torch.isfinite(value), value, 0.0).sum().backward()
    assert q.grad is not None
    counts = (q.grad.double() * (value.detach().nan_to_num(neginf=0.0).unsqueeze(1) - q.detach()).double().exp()).cpu()
    assert torch.allclose(counts, counts.round(), atol=1e-2)
    return counts.round(), value.detach().cpu(), draw_counts.cpu()


@pytest.mark.parametrize("seed", [0, 1 << 61])
def test_drawn_counts_follow_their_distribution(seed: int) -> None:
    """floor(n p + u): each count is one of the two integers around n p, with the right probability, independently."""
    logits = torch.tensor([[0.3, -1.0, 1.2, 0.0, -0.4, 2.0]]).expand(1900, 6)
    n = 10.0
    counts, _, draw_counts = drawn_counts(logits, n, seed)
    expected = n * torch.softmax(logits[0].double(), 0)
    up = counts - expected.floor()
    assert set(up.unique().tolist()) <= {0.0, 1.0}
    chance = expected.frac()
    z = (up.mean(0) - chance) / (chance * (1 - chance) / len(up)).sqrt()
    assert float(z.square().sum()) < 26.0  # chi-square of 6 degrees of freedom: 1 in 4,500
    centred = (up - chance) / (chance * (1 - chance)).sqrt()
    above = torch.triu_indices(6, 6, 1).unbind()
    pairs = (centred.T @ centred / math.sqrt(len(up)))[above]
    assert float(pairs.square().sum()) < 42.0  # 15 degrees: 1 in 4,500
    lagged = centred[1:] * centred[:-1]  # neighbours among the queries
    assert float(lagged.sum(0).square().sum() / len(up)) < 26.0
    corners = (lagged.T @ lagged / math.sqrt(len(up)))[
        above
    ]  # two queries and two candidates, with the keys of all four pairs
    assert float(corners.square().sum()) < 42.0
    assert torch.equal(draw_counts.double(), counts.sum(0))  # the backward pass had the same draws


def test_draws_depend_on_seed_query_and_candidate_alone() -> None:
    """The second half of a batch draws the same as a batch that starts there; another seed draws differently."""
    logits = torch.randn(80, 5, generator=torch.Generator().manual_seed(3))
    whole, value, _ = drawn_counts(logits, 7.0, 5)
    half, _, _ = drawn_counts(logits[40:], 7.0, 5, first=40)
    other, _, _ = drawn_counts(logits, 7.0, 6)
    assert torch.equal(whole[40:], half)
    assert not torch.equal(whole, other)
    exact = torch.logsumexp(logits.double() + whole.log(), 1)
    assert torch.allclose(value.double(), exact, atol=1e-5)


@pytest.mark.parametrize("kind", ["column", "pair"])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e4])
@pytest.mark.parametrize("half", [False, True])
def test_draws_under_weights(monkeypatch: pytest.MonkeyPatch, kind: str, scale: float, half: bool) -> None:
    """With extreme weights and vectors, counts are integers next to n p, with matching value and gradients."""
    monkeypatch.setattr(fused, "halves", lambda dtype: half)
    g = torch.Generator().manual_seed(9)
    logits, n = torch.randn(40, 140, generator=g), 90.0
    w = 25 + 3 * torch.randn((140,) if kind == "column" else (40, 140), generator=g)
    w = torch.where(torch.rand(w.shape, generator=g) < 0.2, -math.inf, w)
    q, emb = (logits / scale).to(DEVICE).requires_grad_(), (scale * torch.eye(140, device=DEVICE)).requires_grad_()
    draw_counts = torch.zeros(140, device=DEVICE)
    value = fused.weighted_logsumexp(q, emb, w.to(DEVICE), None, n, draw_counts, torch.tensor([3, 0], device=DEVICE))
    upstream = torch.rand(40, generator=g, dtype=torch.float64)
    (value * upstream.to(DEVICE, value.dtype)).sum().backward()
    assert q.grad is not None
    assert emb.grad is not None
    off = 2e-3 if half else 1e-5  # rounding error of a share in 16 bits
    share = q.grad.double().cpu() / scale / upstream.unsqueeze(1)
    counts = share * (value.detach().double().cpu().unsqueeze(1) - logits.double()).exp()
    assert float((counts - counts.round()).abs().max()) < off * n
    counts = counts.round()
    assert float((counts - n * torch.softmax((logits + w).double(), 1)).abs().max()) < 1 + off * n
    assert float(counts[:, w.isinf()].max() if kind == "column" else counts[w.isinf()].max()) == 0
    assert torch.equal(draw_counts.cpu().double(), counts.sum(0))
    exact = torch.logsumexp(logits.double() + counts.log(), 1)
    assert torch.allclose(value.detach().double().cpu(), exact, atol=off)
    pulled = (
        ((logits.double() + counts.log() - exact.unsqueeze(1)).exp() * upstream.unsqueeze(1)).T
        @ logits.double()
        / scale
    )
    assert float((emb.grad.double().cpu() - pulled).norm() / pulled.norm()) < off


def test_what_does_not_count_is_never_drawn() -> None:
    """An excluded key has no count, and the others share the draws."""
    logits = torch.zeros(60, 4)
    keys = ExcludedKeys(torch.arange(4, device=DEVICE), (torch.arange(60) % 4).to(DEVICE))
    counts, _, _ = drawn_counts(logits, 9.0, 1, keys=keys)
    for i in range(60):
        assert counts[i, i % 4] == 0
        assert set(counts[i].tolist()) <= {0.0, 3.0}


@pytest.mark.parametrize("draws", [None, 30.0])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sixteen_bits_keep_what_tf32_keeps(
    monkeypatch: pytest.MonkeyPatch, draws: float | None, scale: float, dtype: torch.dtype
) -> None:
    """If PyTorch may use TF32, errors are no larger than with inputs rounded to TF32's 10 bits."""
    monkeypatch.setattr(fused, "halves", lambda dtype: True)
    g = torch.Generator().manual_seed(2)
    q, emb = 3 / scale * torch.randn(150, 24, generator=g), scale * torch.randn(140, 24, generator=g)
    upstream, w = torch.rand(150, generator=g) * 1e-7, torch.randn(140, generator=g)
    q, emb, upstream, w = q.to(DEVICE, dtype), emb.to(DEVICE, dtype), upstream.to(DEVICE), w.to(DEVICE)
    exact = truth(q, emb, w.expand(150, 140), draws, upstream)
    cut = [(x.float().view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (q, emb)]  # as tensor cores read them
    tf32 = truth(cut[0], cut[1], w.expand(150, 140), draws, upstream)
    ours_q, ours_emb = q.clone().requires_grad_(), emb.clone().requires_grad_()
    value = fused.weighted_logsumexp(ours_q, ours_emb, w, None, draws)
    (value * upstream).sum().backward()
    for mine, right, cheap in zip((value, ours_q.grad, ours_emb.grad), exact, tf32, strict=False):
        assert mine is not None
        error, budget = (mine.detach().double() - right).norm() / right.norm(), (cheap - right).norm() / right.norm()
        floor = (
            2**-8 if dtype == torch.bfloat16 and mine.dtype == dtype else 2**-11
        )  # the error from rounding the shares or the result
        assert float(error) < 1.5 * float(budget) + floor
