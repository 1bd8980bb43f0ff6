"""Batches from clusters of similar queries, and rows that are queries."""

from __future__ import annotations

import math

import pytest
import torch

from sparring.core.errors import UserError
from sparring.core.types import Bag, Corpus, Outcome, Positives, Step
from sparring.data.batches import QueryRows, RandomBatches
from sparring.models.clusters.clustered_batches import ClusteredBatches
from sparring.testing import World, chi_square

NONE = Positives(torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.int32))


def corpus(epoch: int, seed: int = 0) -> Corpus:
    def never(*_: object) -> torch.Tensor:
        raise AssertionError("clusters must not encode anything")

    return Corpus(epoch, never, never, NONE, torch.Generator().manual_seed(seed))


def clustered(n: int = 60, size: int = 4, **more: object) -> ClusteredBatches:
    """n queries with known vectors, in distant groups of `size`."""
    settings = {"batch_size": 10, "seed": 3, "size": size, "start": 0, **more}
    batches = ClusteredBatches(torch.arange(n), n, 16, **settings)  # type: ignore[arg-type]
    batches.memory.copy_(torch.randn(n, 16, generator=torch.Generator().manual_seed(1)))
    return batches


def order(batches: RandomBatches, epoch: int) -> list[int]:
    return torch.cat(list(batches.epoch(epoch))).tolist()


def test_an_epoch_is_clusters_in_random_order() -> None:
    """Every row occurs once, a cluster's rows are adjacent, and the order of clusters differs by epoch."""
    batches = clustered()
    batches.refresh(corpus(0))
    assert torch.bincount(batches.cluster.long()).tolist() == [4] * 12 + [3] * 4
    sequences = []
    for epoch in range(5):
        rows = order(batches, epoch)
        assert sorted(rows) == list(range(60))
        runs = [int(batches.cluster[row]) for row in rows]
        sequence = [c for at, c in enumerate(runs) if at == 0 or runs[at - 1] != c]
        assert sorted(sequence) == list(range(16))
        sequences.append(tuple(sequence))
    assert len(set(sequences)) == 5


def test_every_order_of_clusters_is_as_likely() -> None:
    """The six orders of three clusters are equally frequent over many epochs."""
    batches = clustered(12)
    batches.cluster.copy_(torch.arange(12) // 4)
    seen = torch.zeros(6)
    orders = {o: i for i, o in enumerate([(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])}
    for epoch in range(3000):
        rows = order(batches, epoch)
        seen[orders[tuple(int(batches.cluster[rows[at]]) for at in (0, 4, 8))]] += 1  # type: ignore[index]
    assert chi_square(seen, torch.full((6,), 500.0)) > 1e-4


def test_before_the_start_batches_are_random_to_the_bit() -> None:
    """Before the first clusters, and always with size=1, batches are bitwise those of RandomBatches."""
    plain = RandomBatches(60, 10, 3)
    late, single = clustered(start=5), clustered(size=1)
    for epoch in range(5):
        for batches in (late, single):
            batches.refresh(corpus(epoch))
            assert order(batches, epoch) == order(plain, epoch)
    late.refresh(corpus(5))
    assert order(late, 5) != order(plain, 5)


def test_the_memory_is_what_each_query_was_in_its_last_step() -> None:
    """A step stores the vectors of its queries without gradient; all other rows are unchanged."""
    batches = clustered(20)
    expected = batches.memory.clone()
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        ids = torch.randperm(20, generator=generator)[:6]
        q = torch.randn(6, 16, generator=generator, requires_grad=True)
        step = Step(ids, ids, q, q, torch.tensor(1.0), lambda _: torch.zeros(0), generator)
        batches.observe(step, Outcome(torch.zeros(6), (Bag(()),)))
        for at, query in enumerate(ids.tolist()):
            expected[query] = q[at].detach()
    assert torch.equal(batches.memory, expected)
    assert not batches.memory.requires_grad


def test_clusters_are_made_when_the_schedule_says() -> None:
    """start=2, every=3, grow=(4, 8) rebuilds in epochs 2, 4 (larger), 5, 8 (larger) and 11."""
    batches = clustered(size=4, start=2, every=3, grow=(4, 8))
    expected = {2: 4, 4: 8, 5: 8, 8: 16, 11: 16}
    for epoch in range(12):
        before = batches.cluster.clone()
        batches.refresh(corpus(epoch, epoch))
        assert (not torch.equal(before, batches.cluster)) == (epoch in expected), epoch
        if epoch in expected:
            n = int(batches.cluster.max()) + 1
            assert n == min((2**p for p in range(7)), key=lambda c: abs(math.log2(c * expected[epoch] / 60)))
        assert batches.size_at(epoch) == max([size for at, size in expected.items() if at <= epoch], default=1)


def test_clusters_hold_alike_queries() -> None:
    """Queries of one group share a cluster far more often than by chance."""
    truth = torch.arange(64) // 8
    batches = clustered(64, 8)
    batches.memory.copy_(5 * torch.randn(8, 16, generator=torch.Generator().manual_seed(2))[truth] + batches.memory)
    batches.refresh(corpus(0))
    same = batches.cluster.unsqueeze(0) == batches.cluster.unsqueeze(1)
    alike = truth.unsqueeze(0) == truth.unsqueeze(1)
    assert float((same & alike).sum() / same.sum()) > 0.7  # by chance about 1 in 8


def test_given_vectors_are_clustered_and_stay() -> None:
    """Given vectors are clustered, never updated, and not part of the state."""
    vectors = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    batches = ClusteredBatches(torch.arange(30), 30, 4, 10, size=4, start=0, vectors=vectors)
    world = World.build(n_queries=30)
    batches.observe(world.step(8, 1), Outcome(torch.zeros(8), (Bag(()),)))
    assert torch.equal(batches.memory, vectors)
    assert set(batches.state_dict()) == {"cluster"}


def test_what_clusters_cost_is_reported() -> None:
    """The report has the seconds spent on clusters since the last report."""
    batches = clustered()
    assert batches.report() == {"cluster_seconds": 0.0}
    batches.refresh(corpus(0))
    assert batches.report()["cluster_seconds"] > 0
    assert batches.report() == {"cluster_seconds": 0.0}


def test_the_state_is_all_that_an_order_needs() -> None:
    """An object with the loaded state gives the same batches, from any step, now and after the next clusters."""
    first, second = clustered(every=2), clustered(every=2)
    first.refresh(corpus(0, 7))
    first.memory.add_(1.0)
    second.load_state_dict(first.state_dict())
    for epoch in range(4):
        for batches in (first, second):
            batches.refresh(corpus(epoch, 9))
        for at in range(len(first)):
            assert [r.tolist() for r in first.epoch(epoch, at)] == [r.tolist() for r in second.epoch(epoch)][at:]


@pytest.mark.parametrize("settings", [{"size": 0}, {"every": 0}, {"start": -1}, {"grow": (-1,)}])
def test_nonsense_is_refused(settings: dict[str, object]) -> None:
    """A one-line error names the values."""
    with pytest.raises(UserError, match="clusters need"):
        clustered(**settings)  # type: ignore[arg-type]


PAIRS = torch.tensor([4, 1, 1, 7, 4, 4, 1, 9, 4])  # the query of each pair, unordered


def draws(rows: QueryRows, times: int = 4000) -> torch.Tensor:
    """Count the draws of each pair when every row occurs `times` times."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.arange(len(rows)).repeat(times)
    return torch.bincount(rows.pairs(batch, generator), minlength=len(PAIRS))


def test_a_row_is_a_query_and_draws_one_of_its_pairs() -> None:
    """Rows are the queries with pairs, in order; a row draws the pairs of its query with equal frequency."""
    rows = QueryRows(PAIRS)
    assert rows.queries.tolist() == [1, 4, 7, 9]
    found = rows.pairs(torch.tensor([3, 0, 2, 1]), torch.Generator().manual_seed(1))
    assert PAIRS[found].tolist() == [9, 1, 7, 4]
    counts = draws(rows).float()
    for query in (1, 4):
        own = counts[query == PAIRS]
        assert chi_square(own, torch.full_like(own, float(own.sum()) / len(own))) > 1e-4
    assert counts[PAIRS == 7].tolist() == [4000.0]


def test_pairs_are_drawn_in_proportion_to_their_weights() -> None:
    """A pair is drawn with its weight over the sum of its query; a weight of 0 is never drawn."""
    weight = torch.tensor([1.0, 2.0, 1.0, 5.0, 3.0, 0.0, 1.0, 1e-3, 1e3])
    counts = draws(QueryRows(PAIRS, weight)).float()
    assert counts[5] == 0
    for query in (1, 4):
        mine = (query == PAIRS) & (weight > 0)
        expected = 4000 * weight[mine] / weight[mine].sum()
        assert chi_square(counts[mine], expected) > 1e-4
    assert counts[3] == counts[7] == 4000
