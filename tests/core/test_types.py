"""The values passed between all parts, against loops over all pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparring.core import exclusion
from sparring.core.types import Bag, Candidates, Exclude, Positives, Provenance, Step
from sparring.negatives import InBatch, Popularity, Sampled, Uniform, Union
from sparring.testing import World

ITEM = st.integers(0, 6)


def pairs(exclude: Exclude, ids: Tensor) -> list[tuple[int, int]]:
    rows, columns = exclude.hits(ids)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


@settings(max_examples=150)
@given(st.lists(ITEM, min_size=1, max_size=6), st.lists(st.integers(-1, 6), max_size=8))
def test_own_positive_among_shared_candidates(own: list[int], candidates: list[int]) -> None:
    """Finds every place of the row's positive, repeats included, once and in row order; never an empty place."""
    got = pairs(Exclude(torch.tensor(own)), torch.tensor(candidates, dtype=torch.long))
    want = [(row, column) for row, item in enumerate(own) for column, other in enumerate(candidates) if item == other]
    assert sorted(got) == want
    assert [row for row, _ in got] == sorted(row for row, _ in got)


@settings(max_examples=150)
@given(st.lists(st.tuples(ITEM, st.lists(st.integers(-1, 6), min_size=3, max_size=3)), min_size=1, max_size=6))
def test_own_positive_among_a_querys_own_candidates(rows: list[tuple[int, list[int]]]) -> None:
    """Finds every place of the row's positive among per-query candidates."""
    own, candidates = [item for item, _ in rows], [ids for _, ids in rows]
    got = pairs(Exclude(torch.tensor(own)), torch.tensor(candidates))
    want = [(row, column) for row, item in enumerate(own) for column in range(3) if candidates[row][column] == item]
    assert sorted(got) == want
    assert [row for row, _ in got] == sorted(row for row, _ in got)


@settings(max_examples=150)
@given(st.lists(st.sets(ITEM), min_size=1, max_size=5), st.lists(st.integers(-1, 6), max_size=8))
def test_known_positives_among_shared_candidates(known: list[set[int]], candidates: list[int]) -> None:
    """Finds any number of excluded items per row, including none."""
    ids = [item for items in known for item in sorted(items)]
    rows = [row for row, items in enumerate(known) for _ in items]
    exclude = Exclude(torch.tensor(ids, dtype=torch.long), torch.tensor(rows, dtype=torch.long))
    want = [
        (row, column) for row, items in enumerate(known) for column, other in enumerate(candidates) if other in items
    ]
    got = pairs(exclude, torch.tensor(candidates, dtype=torch.long))
    assert sorted(got) == want
    assert [row for row, _ in got] == sorted(row for row, _ in got)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sets(ITEM), st.lists(st.integers(-1, 6), min_size=4, max_size=4)), min_size=1, max_size=5))
def test_known_positives_among_a_querys_own_candidates(rows: list[tuple[set[int], list[int]]]) -> None:
    """Finds any number of excluded items per row among per-query candidates."""
    ids = [item for items, _ in rows for item in sorted(items)]
    at = [row for row, (items, _) in enumerate(rows) for _ in items]
    exclude = Exclude(torch.tensor(ids, dtype=torch.long), torch.tensor(at, dtype=torch.long))
    want = [(row, column) for row, (items, mine) in enumerate(rows) for column in range(4) if mine[column] in items]
    assert sorted(pairs(exclude, torch.tensor([mine for _, mine in rows]))) == want


@settings(max_examples=150)
@given(st.lists(st.sets(st.integers(0, 20), max_size=5), min_size=1, max_size=8), st.data())
def test_positives_of_queries(lists: list[set[int]], data: st.DataObject) -> None:
    """Known positives of queries in any order, repeated or without positives, come with their row number."""
    start = torch.tensor([0, *torch.cumsum(torch.tensor([len(items) for items in lists]), 0).tolist()])
    flat = torch.tensor([item for items in lists for item in sorted(items)], dtype=torch.int32)
    queries = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=6))
    exclude = Positives(start, flat).of(torch.tensor(queries, dtype=torch.long))
    assert exclude.rows is not None
    assert exclude.ids.dtype == torch.long
    want = [(row, item) for row, query in enumerate(queries) for item in sorted(lists[query])]
    assert list(zip(exclude.rows.tolist(), exclude.ids.tolist(), strict=True)) == want


def test_large_ids_do_not_collide() -> None:
    """Pairs stay distinct for a billion items and any row."""
    ids = torch.tensor([[10**9, 5], [5, 10**9]])
    assert pairs(Exclude(torch.tensor([10**9, 10**9])), ids) == [(0, 0), (1, 1)]


def test_a_step_scales_by_one_temperature_or_by_one_per_query() -> None:
    """positive_logits is q . v / tau, for a scalar and for a vector of temperatures."""
    q, v = torch.randn(3, 4), torch.randn(3, 4)
    for tau in (torch.tensor(0.5), torch.tensor([0.5, 1.0, 2.0])):
        step = Step(torch.arange(3), torch.arange(3), q, v, tau, lambda ids: v[ids], torch.Generator())
        want = torch.stack([q[row] @ v[row] / tau.expand(3)[row] for row in range(3)])
        torch.testing.assert_close(step.positive_logits, want)


def test_a_bag_says_what_it_holds() -> None:
    """describe() counts candidates, distinct items, empty, dropped and masked places, and names weights and sources."""
    block = Candidates(
        torch.tensor([4, 4, -1, 7]),
        torch.zeros(4, 2),
        torch.tensor([0.0, 0.0, -torch.inf, 0.0]),
        Exclude(torch.tensor([4, 9, 7])),
        provenance=Provenance("spoons"),
    )
    own = Candidates(
        torch.tensor([[1, 2], [3, -1], [1, 1]]),
        torch.zeros(3, 2, 2),
        torch.zeros(()),
        draws=1500.0,
        provenance=Provenance(weighting="-log q"),
    )
    lines = Bag((block, own), torch.zeros(3)).describe().splitlines()
    assert len(lines) == 3
    for words in (
        "spoons",
        "4 candidates",
        "shared by all queries",
        "2 distinct",
        "1 synthetic",
        "1 dropped",
        "own positive, 3 places",
    ):
        assert words in lines[0], words
    for words in (
        "2 candidates",
        "for each query",
        "3 distinct",
        "1 synthetic",
        "-log q",
        "masked: nothing",
        "1,500 expected draws",
    ):
        assert words in lines[1], words
    assert "positive" in lines[2]
    assert "uncorrected" not in lines[2]


def test_a_union_describes_each_source() -> None:
    """The description has a line per source with its name, its mask and the common weight."""
    world = World.build()
    union = Union(InBatch(Popularity(world.counts), exclude="known"), Sampled(Uniform(world.n_items), 32))
    batch, drawn, positive = union(world.step(8, 1)).describe().splitlines()
    assert "in-batch: 8 candidates" in batch
    assert "all known positives" in batch
    assert "expected count" in batch
    assert "Uniform" in drawn
    assert "32 candidates" in drawn
    assert "own positive" in drawn
    assert "expected count" in drawn
    assert "uncorrected" in positive


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 2), min_size=7, max_size=7),
    st.lists(ITEM, min_size=1, max_size=5),
    st.lists(st.sets(ITEM), min_size=5, max_size=5),
    st.lists(st.integers(-1, 6), max_size=8),
)
def test_classes_of_items_and_known_positives(
    code: list[int], own: list[int], known: list[set[int]], candidates: list[int]
) -> None:
    """Finds every place of the positive's class and, with `also`, of known positives, rows ascending."""
    known = known[: len(own)]
    rows = [row for row, items in enumerate(known) for _ in items]
    listed = torch.tensor([item for items in known for item in sorted(items)], dtype=torch.long)
    also = Exclude(listed, torch.tensor(rows, dtype=torch.long))
    classes, ids = torch.tensor(code), torch.tensor(candidates, dtype=torch.long)
    mine = torch.tensor([code[item] for item in own])
    want = {
        (row, c)
        for row, item in enumerate(own)
        for c, other in enumerate(candidates)
        if other >= 0 and code[other] == code[item]
    }
    more = want | {(row, c) for row, items in enumerate(known) for c, other in enumerate(candidates) if other in items}
    for exclude, wanted in ((Exclude(mine, code=classes), want), (Exclude(mine, code=classes, also=also), more)):
        got = pairs(exclude, ids)
        assert set(got) == wanted
        assert [row for row, _ in got] == sorted(row for row, _ in got)
        assert set(pairs(exclude, ids.expand(len(own), -1))) == wanted
    table = Exclude(mine, code=classes).mask(ids)
    assert {(row, c) for row, c in torch.nonzero(table).tolist()} == want


@pytest.mark.parametrize("written_out", [1 << 26, 0])
def test_known_positives_are_looked_up_as_they_are_listed(written_out: int) -> None:
    """For shared and per-query candidates, repeated, empty or unknown, mask, hits and places equal a loop."""
    draw = torch.Generator().manual_seed(0)
    table = torch.rand(30, 5000, generator=draw) < 0.1
    table[:, 0], table[:, 4000:], table[3] = True, False, False
    start = torch.cat([torch.zeros(1, dtype=torch.long), table.sum(1).cumsum(0)])
    positives = Positives(start, table.nonzero()[:, 1].int())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exclusion, "_WRITTEN_OUT", written_out)
        assert (positives.table is None) == (written_out == 0)
    queries = torch.tensor([3, 7, 7, 29, 0])
    for ids in (torch.randint(-1, 5000, (80,), generator=draw), torch.randint(-1, 5000, (5, 40), generator=draw)):
        ids.view(-1)[::7] = -1
        each = ids.expand(5, -1)
        want = table[queries].gather(1, each.clamp(min=0)) & (each >= 0)
        assert bool(want.any())
        known = positives.of(queries)
        assert torch.equal(known.mask(ids), want)
        for places in (known.hits(ids), known.places(ids)):
            listed = torch.zeros_like(want)
            listed[places] = True
            assert torch.equal(listed, want)
        rows = known.hits(ids)[0]
        assert torch.equal(rows, rows.sort().values)
