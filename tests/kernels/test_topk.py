"""Exact top k without a score matrix, in the Triton interpreter without a GPU, against a sort of all scores."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sparring.core.topk import top_k
from sparring.kernels import topk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sorted_out(q: torch.Tensor, items: torch.Tensor, k: int, hidden: list[list[int]]) -> torch.Tensor:
    """Ids by (score descending, id ascending) in float64 without hidden ones; -1 once none is left."""
    found = torch.full((len(q), k), -1)
    for i, own in enumerate(hidden):
        scores = (q[i].double() @ items.double().T).tolist()
        ranking = sorted((j for j in range(len(items)) if j not in own), key=lambda j: (-scores[j], j))[:k]
        found[i, : len(ranking)] = torch.tensor(ranking)
    return found


@pytest.mark.parametrize(("n", "k", "spare"), [(700, 3, 2), (700, 3, 24), (100, 5, 24), (64, 64, 24), (5, 8, 24)])
@pytest.mark.parametrize("whole", [False, True])
def test_equals_sorting_everything(monkeypatch: pytest.MonkeyPatch, n: int, k: int, spare: int, whole: bool) -> None:
    """Seen items never appear; with integer vectors most scores tie, and the smaller id comes first."""
    monkeypatch.setattr(topk, "SPARE", spare)
    g = torch.Generator().manual_seed(n + k)
    q, items = torch.randn(24, 8, generator=g), torch.randn(n, 8, generator=g)
    if whole:
        q, items = (q * 2).round(), items.round()
    hidden = [sorted(set(torch.randint(n, (3 * i % 40,), generator=g).tolist())) for i in range(24)]
    start = torch.tensor([0, *torch.tensor([len(own) for own in hidden]).cumsum(0).tolist()], device=DEVICE)
    seen = torch.tensor([j for own in hidden for j in own], device=DEVICE)
    who = torch.arange(24, device=DEVICE)
    scores, ids, sure = (x.cpu() for x in topk.top_k(q.to(DEVICE), items.to(DEVICE), k, start, seen, who))
    expected = sorted_out(q, items, min(k, n), hidden)[:, : ids.shape[1]]
    assert torch.equal(ids[sure][:, : expected.shape[1]], expected[sure])
    if whole:
        listed = torch.einsum("bd,bkd->bk", q, items[ids.clamp(min=0)])
        assert torch.equal(scores[ids >= 0], listed[ids >= 0])
    else:
        assert int(sure.sum()) >= 20
    assert bool((ids[:, expected.shape[1] :] == -1).all())


def test_a_doubtful_list_says_so() -> None:
    """If an unsearched group may hold an item as good as the last one listed, the list is marked as unsure."""
    items = torch.ones(64 * 40, 4)  # all equal, so the skipped groups could hold equally good items
    assert not bool(topk.top_k(torch.ones(3, 4, device=DEVICE), items.to(DEVICE), 2, None, None, None).sure.any())


def test_lists_are_those_of_the_other_ranking() -> None:
    """With repeated vectors, scores and ids equal those of `core.topk`, bit by bit: equal vectors tie, by id."""
    g = torch.Generator().manual_seed(5)
    q, items = (
        torch.randn(16, 24, generator=g),
        torch.randn(300, 24, generator=g)[torch.randint(300, (900,), generator=g)],
    )
    scores, ids, sure = (x.cpu() for x in topk.top_k(q.to(DEVICE), items.to(DEVICE), 6, None, None, None))
    other = top_k(q, items, 6)
    assert int(sure.sum()) >= 12
    assert torch.equal(scores[sure], other[0][sure])
    assert torch.equal(ids[sure], other[1][sure])
