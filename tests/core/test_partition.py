"""The partition function of a bag with repeated candidates, against a sum over all of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparring.core import partition
from sparring.core.partition import log_partition
from sparring.core.types import Bag, Candidates, Exclude, Positives, Step
from sparring.losses import Symmetric
from sparring.negatives import InBatch, Popularity

B, D, N = 24, 6, 7
KNOWN = Positives(torch.arange(0, 2 * B + 1, 2), torch.arange(2 * B) % N)


def repeated(vary: bool = False) -> tuple[Step, Candidates]:
    """A step and its positives as candidates, each several times; `vary` gives every copy a vector of its own."""
    draw = torch.Generator().manual_seed(1)
    items = torch.randint(N, (B,), generator=draw)
    table = torch.randn(N, D, generator=draw)
    q = torch.randn(B, D, generator=draw).requires_grad_()
    v = (table[items] + (0.1 * torch.randn(B, D, generator=draw) if vary else 0)).requires_grad_()
    step = Step(torch.arange(B), items, q, v, torch.tensor(0.5), lambda ids: table[ids], draw, KNOWN)
    weights = torch.randn(N, generator=draw)[items]
    weights[items == items[0]] = -math.inf
    return step, Candidates(items, v, weights)


def summed(step: Step, block: Candidates, excluded: set[tuple[int, int]]) -> Tensor:
    """Sum the terms of each query one after another."""
    rows = []
    for i in range(len(step.q)):
        terms = [
            step.q[i] @ block.emb[j] / step.tau + block.log_w[j]
            for j in range(len(block.ids))
            if (i, int(block.ids[j])) not in excluded and block.log_w[j] > -math.inf
        ]
        rows.append(torch.logsumexp(torch.stack(terms), 0))
    return torch.stack(rows)


@pytest.mark.parametrize("vary", [False, True])
@pytest.mark.parametrize("kind", ["none", "positive", "known"])
def test_repeated_candidates_count_as_often_as_they_occur(
    vary: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are merged only where their vectors agree; values and gradients are those of the sum over all copies."""
    step, block = repeated(vary)
    exclude = {"none": None, "positive": Exclude(step.item_ids), "known": step.known()}[kind]
    known = {(i, int(KNOWN.items[2 * i + k])) for i in range(B) for k in range(2)}
    own = {(i, int(item)) for i, item in enumerate(step.item_ids)}
    block = Candidates(block.ids, block.emb, block.log_w, exclude)
    monkeypatch.setattr(partition, "_MERGED", 1)
    merged = partition._distinct(step, block)
    assert len(merged.ids) == (B if vary else len(set(block.ids.tolist())))
    got = log_partition(step, Bag((block,)))[0]
    want = summed(step, block, {"none": set(), "positive": own, "known": known}[kind])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    scale = torch.linspace(0.5, 2.0, B)
    grad_q, grad_v = torch.autograd.grad((got * scale).sum(), [step.q, step.v])
    want_q, want_v = torch.autograd.grad((want * scale).sum(), [step.q, step.v])
    torch.testing.assert_close(grad_q, want_q, rtol=1e-4, atol=1e-5)
    if vary:
        torch.testing.assert_close(grad_v, want_v, rtol=1e-4, atol=1e-5)
    zeros = torch.zeros(N, D)  # an item has the sum of the gradients of its copies
    torch.testing.assert_close(
        zeros.index_add(0, step.item_ids, grad_v), zeros.index_add(0, step.item_ids, want_v), rtol=1e-4, atol=1e-5
    )


def test_a_batch_with_few_items_has_the_same_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrected in-batch negatives with and without merged copies give one partition function."""
    step, _ = repeated()
    bag = InBatch(Popularity(torch.arange(1, N + 1)), exclude="known")(step)
    apart = log_partition(step, bag)[0]
    monkeypatch.setattr(partition, "_MERGED", 1)
    torch.testing.assert_close(log_partition(step, bag)[0], apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense", [False, True])
def test_from_items_to_queries_that_repeat(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six queries with four rows each: no item meets a query that has it, and every other row counts."""
    draw = torch.Generator().manual_seed(2)
    queries, items = torch.arange(B) % 6, torch.randint(N, (B,), generator=draw)
    table, v = torch.randn(6, D, generator=draw), torch.randn(N, D, generator=draw)[items]
    lists = [sorted({int(items[row]) for row in range(B) if queries[row] == query}) for query in range(6)]
    known = Positives(
        torch.tensor([0, *(len(each) for each in lists)]).cumsum(0), torch.tensor([j for each in lists for j in each])
    )
    step = Step(queries, items, table[queries], v, torch.tensor(0.5), lambda ids: v[ids], draw, known)
    monkeypatch.setattr(partition, "_MERGED", 1)
    turned, bag = Symmetric().turned(step)
    (block,) = bag.blocks
    assert block.exclude is not None
    if not dense:  # the pairs of a large catalogue
        monkeypatch.setattr(type(block.exclude), "places", lambda self, ids: self.hits(ids))
    got = log_partition(turned, bag)[0]
    for row in range(B):
        terms = [
            v[row] @ table[queries[other]] / 0.5 for other in range(B) if int(items[row]) not in lists[queries[other]]
        ]
        want = torch.logsumexp(torch.stack(terms), 0) if terms else torch.tensor(-math.inf)
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-5)
