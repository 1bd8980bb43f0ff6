"""Sums over padded bags, in Triton's interpreter without a GPU, against loops over items in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sparring.kernels import bags as kernels
from sparring.kernels.bags import Bags, bags, pooled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POOLINGS = ["sum", "mean", "attention"]


def ragged(b: int, length: int, n: int, seed: int = 0) -> Tensor:
    """(B, L) ids with gaps and padding anywhere: the first bag is empty, one is full, and item 1 is in most bags."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(n, (b, length), generator=g)
    ids[torch.rand(b, length, generator=g) < 0.4] = -1
    ids[:, length // 2] = 1
    ids[0] = -1
    ids[b // 2] = torch.randint(n, (length,), generator=g)
    return ids


def kept(bag: list[int], last: int) -> list[int]:
    """Columns of the last items of a bag, oldest first."""
    return [column for column, item in enumerate(bag) if item >= 0][-last:]


CASES = [(9, 7, 11, 5), (5, 1, 3, 4), (33, 20, 4, 64), (6, 130, 40, 100), (3, 1100, 5, 1050), (4, 5, 40_000, 3)]


@pytest.mark.parametrize(("b", "length", "n", "last"), CASES)
def test_slots_are_short_runs_of_one_item(b: int, length: int, n: int, last: int) -> None:
    """Each of the last items of a bag is in the slot of its id; no other place has one; ages count what follows."""
    ids = ragged(b, length, n)
    found = bags(ids.to(DEVICE), n, last)
    rows, slot, age, order = (x.cpu() for x in (found.rows, found.slot, found.age, found.order))
    seen = torch.zeros(b, length, dtype=torch.bool)
    for row, bag in enumerate(ids.tolist()):
        columns = kept(bag, last)
        assert int(found.length[row]) == len(columns)
        for at, column in enumerate(columns):
            seen[row, column] = True
            assert int(rows[slot[row, column]]) == bag[column]
            assert int(age[row, column]) == len(columns) - 1 - at
    assert torch.equal(slot >= 0, seen)
    listed: list[int] = []
    present = sorted({int(i) for i in ids[seen]})
    spare = []
    for at, (begin, end) in enumerate(zip(found.begin.tolist(), found.end.tolist(), strict=True)):
        assert 0 <= end - begin <= kernels.PIECE
        places = order[begin:end].tolist()
        assert (slot.flatten()[places] == at).all()
        assert places == sorted(places)
        listed += places
        if not places:
            spare.append(int(rows[at]))
    assert sorted(listed) == seen.flatten().nonzero().flatten().tolist()
    assert set(spare) <= set(present)  # they read no item that the batch does not have
    used = rows.tolist()[: len(rows) - len(spare)]
    for item in set(spare):  # in turn
        assert spare.count(item) <= used.count(item) * -(-len(spare) // len(used))


def test_slots_depend_on_shapes_alone() -> None:
    """Whatever the bags hold, even nothing, there are as many slots, and a run of one item is cut into pieces."""
    shapes = set()
    for ids in (torch.full((8, 40), -1), torch.full((8, 40), 2), torch.arange(320).reshape(8, 40) % 30):
        found = bags(ids.to(DEVICE), 30, 50)
        shapes.add(tuple(tuple(x.shape) for x in found))
        assert int(found.rows.min()) >= 0
        assert int(found.rows.max()) < 30
        one = int((ids == 2).all())
        assert not one or (found.end - found.begin).tolist()[:6] == [64] * 5 + [0]
    assert len(shapes) == 1


def test_bags_of_places_are_bags_of_the_items_there() -> None:
    """Places in a list of items give what the ids give, field by field."""
    items = torch.randint(9, (50,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    places = ragged(7, 12, 50)
    ids = torch.where(places >= 0, items[places.clamp(min=0)].long(), -1)
    direct = bags(ids.to(DEVICE), 9, 8)
    through = bags(places.to(DEVICE), 9, 8, items.to(DEVICE))
    for ours, expected in zip(through, direct, strict=True):
        assert torch.equal(ours, expected)


def by_loop(table: Tensor, ids: Tensor, last: int, pooling: str, per_item: Tensor, recency: Tensor) -> Tensor:
    """(B, D) in float64, one item at a time."""
    made = []
    for bag in ids.tolist():
        columns = kept(bag, last)
        x = [table[bag[column]] for column in columns]
        weights = [torch.tensor(1.0).double() for _ in x]
        if pooling == "mean":
            weights = [1.0 / len(x) for _ in x]  # type: ignore[misc]
        if pooling == "attention" and x:
            logits = [per_item[bag[column]] + recency[len(x) - 1 - at] for at, column in enumerate(columns)]
            weights = list(torch.softmax(torch.stack(logits), 0))
        made.append(sum((w * v for w, v in zip(weights, x, strict=True)), torch.zeros(table.shape[1]).double()))
    return torch.stack(made)


def of_items(found: Bags, values: Tensor) -> Tensor:
    """Values of items (N, ...) by slot, with a gradient."""
    return values.index_select(0, found.rows)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    ("b", "length", "n", "last", "d"),
    [(9, 7, 11, 5, 6), (33, 20, 4, 64, 3), (5, 1, 3, 1, 1), (6, 130, 40, 100, 24), (3, 70, 300, 50, 100)],
)
def test_pooled_equals_a_loop(b: int, length: int, n: int, last: int, d: int, pooling: str) -> None:
    """Values and the gradients of vectors, scores and recency, with repeats, gaps, empty bags and long runs."""
    g = torch.Generator().manual_seed(b)
    ids, upstream = ragged(b, length, n), torch.randn(b, d, generator=g)
    start = [torch.randn(n, d, generator=g), torch.randn(n, generator=g), torch.randn(last, generator=g)]
    table, per_item, recency = (x.to(DEVICE, copy=True).requires_grad_() for x in start)
    found = bags(ids.to(DEVICE), n, last)
    score = (of_items(found, per_item), recency) if pooling == "attention" else (None, None)
    got = pooled(of_items(found, table), found, pooling == "mean", *score)
    got.backward(upstream.to(DEVICE))
    exact = [x.double().requires_grad_() for x in start]
    want = by_loop(exact[0], ids, last, pooling, *exact[1:])
    want.backward(upstream.double())
    torch.testing.assert_close(got.detach().cpu().double(), want.detach(), atol=1e-4, rtol=1e-4)
    assert torch.equal(got[0], torch.zeros(d, device=DEVICE))  # an empty bag
    for ours, expected in zip((table, per_item, recency), exact, strict=True):
        if expected.grad is None:
            assert ours.grad is None
        else:
            torch.testing.assert_close(ours.grad.cpu().double(), expected.grad, atol=2e-4, rtol=1e-4)  # type: ignore[union-attr]


def test_large_scores_do_not_overflow() -> None:
    """Attention is that of the differences of scores, however large they are."""
    ids = torch.tensor([[0, 1, -1], [-1, 1, 2]], device=DEVICE)
    found = bags(ids, 3, 3)
    table = torch.eye(3, device=DEVICE)
    score, recency = torch.tensor([3e4, 3e4 - 1, -3e4], device=DEVICE), torch.zeros(3, device=DEVICE)
    got = pooled(table[found.rows], found, score=score[found.rows], recency=recency)
    share = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(got.cpu(), torch.tensor([[share, 1 - share, 0.0], [0.0, 1.0, 0.0]]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pooling", POOLINGS)
def test_on_a_gpu_runs_repeat_bitwise_and_never_wait(pooling: str) -> None:
    """Vectors and all gradients of 100,000 places, of which one item has most, have the same bits five times."""
    g = torch.Generator().manual_seed(0)
    ids = (torch.rand(2048, 50, generator=g).pow(6) * 3000).long()
    ids[torch.rand(2048, 50, generator=g) < 0.2] = -1
    ids, upstream = ids.cuda(), torch.randn(2048, 64, generator=g).cuda()
    start = [torch.randn(*shape, generator=g).cuda() for shape in ((3000, 64), (3000,), (50,))]
    seen = []
    for _ in range(5):
        table, per_item, recency = (x.clone().requires_grad_() for x in start)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = bags(ids, 3000, 50)
            x = of_items(found, table)
            score = (of_items(found, per_item), recency) if pooling == "attention" else (None, None)
            got = pooled(x, found, pooling == "mean", *score)
            inputs = [x, *(each for each in score if each is not None)]
            grads = torch.autograd.grad(got, inputs, upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen.append([*found, got, *grads])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
