"""The ranking of a CPU, native and torch's, against a sort of all exact scores."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.topk import inner_products, prepare, top_k
from sparring.core.types import Positives
from sparring.kernels.native import library, ranking


@pytest.fixture(params=["native", "torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of the ranking; the native one must be there."""
    monkeypatch.setattr(library, "active", request.param == "native")
    if request.param == "native" and ranking.pack(torch.ones(2, 2)) is None:
        pytest.skip("needs a C++ compiler and a processor with AVX-512 VNNI")
    return str(request.param)


def by_sorting(q: Tensor, items: Tensor, k: int, hidden: list[list[int]]) -> tuple[Tensor, Tensor]:
    """All items by (score descending, id ascending), without hidden ones; -inf and -1 once none is left."""
    every = inner_products(q, items, torch.arange(len(items)).expand(len(q), -1)).tolist()
    scores, ids = torch.full((len(q), k), -math.inf), torch.full((len(q), k), -1)
    for i, row in enumerate(every):
        own = set(hidden[i])
        best = sorted((-score, j) for j, score in enumerate(row) if j not in own)[:k]
        scores[i, : len(best)] = torch.tensor([-score for score, _ in best])
        ids[i, : len(best)] = torch.tensor([j for _, j in best], dtype=torch.int64)
    return scores, ids


def flat(hidden: list[list[int]]) -> Positives:
    start = torch.tensor([0, *torch.tensor([len(own) for own in hidden]).cumsum(0).tolist()])
    return Positives(start, torch.tensor([j for own in hidden for j in own], dtype=torch.int32))


def worlds(name: str, b: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    """Vectors that are hard to rank from integers or from a matrix product."""
    g = torch.Generator().manual_seed(len(name) + b + n + d)
    q, items = torch.randn(b, d, generator=g), torch.randn(n, d, generator=g)
    if name == "norms":  # over 24 orders of magnitude
        items *= 10 ** (24 * torch.rand(n, 1, generator=g) - 12)
        q *= 10 ** (6 * torch.rand(b, 1, generator=g) - 3)
    elif name == "outliers":  # one dimension leaves no integers for the others, and decides nothing
        items[:, 0], q[:, 0] = 1e6, 1e-6
    elif name == "close":  # scores that differ in their last bits
        items = items[:1].repeat(n, 1)
        items[torch.arange(n), torch.randint(d, (n,), generator=g)] *= 1 + 2e-7
    elif name == "parallel":  # as close, and the norms alone nearly prove the order
        items = items[:1].repeat(n, 1)
        items[torch.arange(n), torch.randint(d, (n,), generator=g)] *= 1 + 2e-7
        q = items[:b] * 3
    elif name in ("rounded items", "rounded queries"):
        # The bound is attained: -0.4 + 0.49 on average and 0.4 - 0.49, as integers -0.4 and 0.4. The few that are best
        # have the smallest scores by integers, and the largest possible error.
        towards = torch.where(torch.rand(d, generator=g) < 0.5, -1.0, 1.0)
        best = torch.where(torch.rand(n, 1, generator=g) < 0.1, 1.0, -1.0)
        missed = 0.49 - (torch.rand(n, d, generator=g) < 0.4).float()
        items, q = best * missed * towards, towards * torch.randint(1, 4, (b, 1), generator=g)
        items[:, 0], q[:, 0] = 127, 0
        if name == "rounded queries":
            items, q = best * towards, missed[:b] * towards
            items[:, 0], q[:, 0] = 0, 127
    elif name == "copies":
        items = items[torch.randint(max(1, n // 50), (n,), generator=g)]
    elif name == "zeros":
        items[torch.rand(n, generator=g) < 0.9] = 0
        q[::3] = 0
    elif name == "nothing":
        items[:] = 0
    elif name == "tiny":  # scores and some factors that float32 holds with few bits
        q, items = q * 1e-21, items * 1e-21
        items[::2] *= 1e-19
    elif name == "subnormal":
        items *= 1e-42
    elif name == "large":
        q, items = q * 1e17, items * 1e17
        q[::2] *= 10
    elif name == "popular":  # almost one direction, norms as of popular items
        items = (items / 8 + 1) * torch.rand(n, 1, generator=g) ** 4
        q += 2
    elif name == "negative":  # all scores are below zero
        items, q = -items.abs(), q.abs()
    elif name == "whole":  # most scores tie
        q, items = (q * 2).round(), items.round()
    return q, items


WORLDS = (
    *("plain", "norms", "outliers", "rounded items", "rounded queries", "close", "parallel", "copies", "zeros"),
    *("nothing", "tiny", "subnormal", "large", "popular", "negative", "whole"),
)


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize(("b", "n", "d", "k"), [(1, 40, 1, 5), (7, 500, 3, 11), (29, 801, 64, 20)])
def test_lists_equal_a_sort_of_all_scores(name: str, b: int, n: int, d: int, k: int) -> None:
    """Scores and ids are those of a full sort, ties included, with seen items in any order, for prepared items."""
    q, items = worlds(name, b, n, d)
    g = torch.Generator().manual_seed(d)
    hidden = [torch.randperm(n, generator=g)[: [0, 9, n // 2, n - 2, n][i % 5]].tolist() for i in range(b)]
    for own in (None, hidden):
        lists = (None, None) if own is None else (flat(own), torch.arange(b))
        scores, ids = top_k(q, items, k, *lists, prepared=prepare(items))
        expected = by_sorting(q, items, k, own or [[]] * b)
        assert torch.equal(ids, expected[1])
        assert torch.equal(scores, expected[0])


def test_any_batch_gives_the_same_lists() -> None:
    """A query has the same list and the same scores alone, in any batch, in blocks, and on two threads."""
    q, items = worlds("copies", 61, 900, 24)
    q[5] = q[50] = 0
    q[6] = q[51] = 1e-30  # out of the kernel's range: the blocks rank it
    expected = by_sorting(q, items, 9, [[]] * len(q))
    prepared, threads = prepare(items), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for size in (1, 13, 48, 61):
                parts = [top_k(q[low : low + size], items, 9, prepared=prepared) for low in range(0, len(q), size)]
                assert torch.equal(torch.cat([part[0] for part in parts]), expected[0])
                assert torch.equal(torch.cat([part[1] for part in parts]), expected[1])
            for block in (None, 64):
                scores, ids = top_k(q, items, 9, block=block)
                assert torch.equal(scores, expected[0])
                assert torch.equal(ids, expected[1])
    finally:
        torch.set_num_threads(threads)


def test_items_are_those_that_were_prepared(form: str) -> None:
    """The kernel refuses items of another shape than those that were prepared."""
    if form == "native":
        with pytest.raises(ValueError, match="packed"):
            top_k(torch.randn(3, 4), torch.randn(70, 4), 2, prepared=prepare(torch.randn(64, 4)))


def test_ordinary_vectors_need_no_second_ranking(form: str) -> None:
    """The kernel itself ranks vectors of any ordinary size, and says where numbers are out of its range."""
    if form == "torch":
        assert ranking.pack(torch.randn(9, 4)) is None
        return
    for name, sure in (("plain", 60), ("norms", 60), ("popular", 60), ("zeros", 60), ("large", 60), ("subnormal", 0)):
        q, items = worlds(name, 60, 400, 8)
        packed = ranking.pack(items)
        assert packed is not None
        best = ranking.rank(q, items, packed, 5, None, None, None)
        assert best is not None
        assert int(best.sure.sum()) == sure


@pytest.mark.parametrize("d", [1, 7, 8, 65])
def test_scores_are_exact_inner_products_rounded_once(d: int) -> None:
    """A score is the float32 nearest to the inner product, computed here with fractions."""
    g = torch.Generator().manual_seed(d)
    q, items = torch.randn(6, d, generator=g), torch.randn(50, d, generator=g)
    ids = torch.randint(50, (6, 20), generator=g)
    found = inner_products(q, items, ids)
    for i, row in enumerate(ids.tolist()):
        for j, item in enumerate(row):
            exact = sum(Fraction(a) * Fraction(b) for a, b in zip(q[i].tolist(), items[item].tolist(), strict=True))
            assert float(found[i, j]) == float(torch.tensor(float(exact), dtype=torch.float64).float())


def test_bad_ids_are_refused() -> None:
    """Items and queries outside their tables raise; nothing is read."""
    q, items = torch.randn(2, 4), torch.randn(64, 4)
    for bad in (-65, 64):
        with pytest.raises(IndexError):
            inner_products(q, items, torch.tensor([[0], [bad]]))
    seen = Positives(torch.tensor([0, 1, 2]), torch.tensor([3, 64], dtype=torch.int32))
    with pytest.raises((IndexError, RuntimeError)):
        top_k(q, items, 3, seen, torch.arange(2), prepared=prepare(items))
    with pytest.raises((RuntimeError, IndexError)):
        inner_products(q, torch.randn(64, 5), torch.zeros(2, 1, dtype=torch.long))
    for who in (-1, 2):
        with pytest.raises(UserError, match="out of range"):
            top_k(q, items, 3, seen, torch.tensor([0, who]))
