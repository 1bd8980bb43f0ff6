"""Negatives from the batch and from previous steps: InBatch, Memory."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.types import Bag, Outcome, Step
from sparring.losses import sampled_softmax
from sparring.negatives import UNKNOWN, InBatch, Memory, Negatives, Popularity, Sampled, Streaming, Uniform, Union
from sparring.testing import NegativesContract, World, dense, observe

NOTHING = Outcome(torch.zeros(1), ())


class TestInBatch(NegativesContract):
    resized = UNKNOWN
    batch = 128

    def make(self, world: World) -> Negatives:
        return InBatch(Popularity(world.counts))

    def expected(self, world: World, step: Step) -> Tensor:
        return 127 * world.popularity

    def test_own_column_never_counts(self) -> None:
        """The row's own positive weighs 0 however often it repeats; others weigh 1 / ((B - 1) p) each time."""
        world = World.build()
        step = world.step(8, 1)
        got = dense(self.make(world)(step), step, world.n_items)
        want = torch.zeros_like(got)
        for row in range(8):
            for column in range(8):
                if step.item_ids[column] != step.item_ids[row]:
                    item = step.item_ids[column]
                    want[row, item] += 1 / (7 * world.popularity[item])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)

    def test_rows_of_one_query_never_count_against_each_other(self) -> None:
        """Where rows share a query, a row counts the columns of other queries whose item its query does not know."""
        world = World.build()
        step = world.step(8, 1, each=3)
        got = dense(self.make(world)(step), step, world.n_items)
        known = world.known.clone()
        known[step.query_ids, step.item_ids] = True
        want = torch.zeros_like(got)
        for row in range(8):
            for column in range(8):
                item = step.item_ids[column]
                if not known[step.query_ids[row], item]:
                    want[row, item] += 1 / (7 * world.popularity[item])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        assert bool((got > 0).any())


class TestInBatchUncorrected(NegativesContract):
    batch = 128

    def make(self, world: World) -> Negatives:
        return InBatch()

    def expected(self, world: World, step: Step) -> Tensor:
        return 127 * world.popularity

    def test_does_not_know_its_counts(self) -> None:
        """Without a frequency there is no log_count, and every candidate weighs 1."""
        world = World.build()
        step = world.step(8, 1)
        assert self.make(world).log_count(step.item_ids, step) is None
        assert bool((self.make(world)(step).blocks[0].log_w == 0).all())


class TestInBatchKnown(NegativesContract):
    resized = UNKNOWN
    batch, masks, draws = 128, "known", 20_000

    def make(self, world: World) -> Negatives:
        return InBatch(Popularity(world.counts), exclude="known")


class TestInBatchBoth(NegativesContract):
    batch, masks, partition = 128, "none", False

    def make(self, world: World) -> Negatives:
        return InBatch(Popularity(world.counts), correction="both", exclude="none")

    def test_distribution(self) -> None:
        """All B columns are candidates of every query, its own too, in the order of the batch."""
        world = World.build()
        step = world.step(16, 1)
        (block,) = self.make(world)(step).blocks
        assert torch.equal(block.ids, step.item_ids)
        assert block.exclude is None


class TestInBatchStreaming(NegativesContract):
    resized = UNKNOWN
    batch = 128

    def make(self, world: World) -> Negatives:
        return InBatch(Streaming((world.n_items,), alpha=0.1))

    def test_distribution(self) -> None:
        """The expected count is (B - 1) / (B gap): the probability per draw times the columns that count."""
        world = World.build()
        negatives, step = self.warmed(world), world.step(128, 1)
        gap, last = torch.ones(world.n_items), torch.zeros(world.n_items)
        for time, seed in enumerate(range(3), start=1):
            for item in set(world.step(128, 1_000_000 + seed).item_ids.tolist()):
                gap[item] = 0.9 * gap[item] + 0.1 * (time - last[item])
                last[item] = time
        got = negatives.log_count(torch.arange(world.n_items), step)
        assert got is not None
        # the array is indexed by (id + 1) mod N, a bijection here
        torch.testing.assert_close(got.exp(), 127 / (128 * gap))

    partition = normalised = False  # an estimate after three steps


def check_ring(memory: Memory, batch: int) -> None:
    """After each of nine steps the ring holds the last positives, oldest first, with their vectors at that time."""
    world, size = World.build(n_items=50, dim=2), len(memory.ids)
    line: deque[tuple[int, float]] = deque(maxlen=size)
    for time in range(9):
        step = world.step(batch, time, table=world.items + time)
        memory.observe(step, NOTHING)
        line.extend((item, float(step.v[row, 0])) for row, item in enumerate(step.item_ids.tolist()))
        bag = memory(step)
        filled = bag.blocks[0].log_w.isfinite() & (bag.blocks[0].ids >= 0)
        assert int(filled.sum()) == len(line) == int(memory.size(step))
        start = int(memory.cursor) % size if len(line) == size else 0
        order = [(start + at) % size for at in range(len(line))]
        held = [(int(bag.blocks[0].ids[at]), float(bag.blocks[0].emb[at, 0].detach())) for at in order]
        assert held == list(line)


class TestMemory(NegativesContract):
    resized = UNKNOWN
    batch, between = 128, 1

    def make(self, world: World) -> Negatives:
        return Memory(128, world.dim, Popularity(world.counts))

    def expected(self, world: World, step: Step) -> Tensor:
        return 128 * world.popularity

    @pytest.mark.parametrize(("size", "batch"), [(10, 4), (10, 10), (7, 16), (12, 4), (1, 3)])
    def test_first_in_first_out(self, size: int, batch: int) -> None:
        """The ring equals a deque of the same length, in order, with the vectors at the time of entry."""
        check_ring(Memory(size, 2, Uniform(50)), batch)

    def test_another_width_is_told(self) -> None:
        """An item bias makes vectors wider than the towers: the error names both widths and the fix."""
        world = World.build(dim=5)
        with pytest.raises(UserError, match=r"4 dimensions.*5.*width"):
            Memory(16, 4, Uniform(world.n_items))(world.step(8, 0))

    def test_warm_up(self) -> None:
        """With warmup=2 the first two steps enter nothing and the third does."""
        world = World.build()
        memory, held = Memory(64, world.dim, Uniform(world.n_items), warmup=2), []
        for time in range(4):
            memory.observe(world.step(16, time), NOTHING)
            held.append(int((memory.ids >= 0).sum()))
        assert held == [0, 0, 16, 32]

    def test_empty_memory_counts_nothing(self) -> None:
        """While the memory is empty, the loss is 0 and its gradient finite."""
        world = World.build()
        for correction in ("count", "negatives", "both", "refined"):
            step = world.step(8, 1)
            loss = sampled_softmax(step, Memory(16, world.dim, Popularity(world.counts), correction=correction)(step))  # type: ignore[arg-type]
            (gradient,) = torch.autograd.grad(loss.sum(), step.q)
            assert bool((loss == 0).all())
            assert bool((gradient == 0).all())

    def test_no_gradient_reaches_the_ring(self) -> None:
        """Vectors in the ring are constants, and a later write does not disturb a loss that is still held."""
        world = World.build()
        memory = self.make(world)
        table = world.items.clone().requires_grad_()
        memory.observe(world.step(128, 1, table=table), NOTHING)  # type: ignore[operator]
        step = world.step(8, 2)
        loss = sampled_softmax(step, memory(step))
        memory.observe(world.step(128, 3), NOTHING)  # type: ignore[operator]
        loss.sum().backward()
        assert table.grad is None
        assert step.q.grad is not None


class OverwritesTheNewest(Memory):
    """Every step is written to the start of the ring."""

    def observe(self, step: Step, outcome: Outcome) -> None:
        self.cursor.zero_()
        super().observe(step, outcome)


class KeepsTheFirst(Memory):
    """It keeps the first rows of a batch longer than the ring."""

    def observe(self, step: Step, outcome: Outcome) -> None:
        rows = {name: getattr(step, name)[: len(self.ids)] for name in ("query_ids", "item_ids", "q", "v")}
        super().observe(replace(step, **rows), outcome)


class VectorsOfNow(Memory):
    """The current encoder overwrites its stored vectors."""

    def forward(self, step: Step) -> Bag:
        (block,) = super().forward(step).blocks
        return Bag((replace(block, emb=step.encode(block.ids)),))


@pytest.mark.parametrize(("wrong", "batch"), [(OverwritesTheNewest, 4), (KeepsTheFirst, 16), (VectorsOfNow, 4)])
def test_wrong_rings_are_rejected(wrong: type[Memory], batch: int) -> None:
    """The check against a deque rejects a ring with one of the known bugs."""
    with pytest.raises(AssertionError):
        check_ring(wrong(10, 2, Uniform(50)), batch)


class TestCbns(NegativesContract):
    resized = UNKNOWN
    batch, between, trials = 128, 1, 300

    def make(self, world: World) -> Negatives:
        frequency = Popularity(world.counts)
        return Union(InBatch(frequency), Memory(128, world.dim, frequency))

    def expected(self, world: World, step: Step) -> Tensor:
        return (127 + 128) * world.popularity

    def test_an_empty_memory_leaves_the_batch_as_it_is(self) -> None:
        """Until the memory fills, the union is the in-batch loss: an empty source adds no expected count."""
        world = World.build()
        step = world.step(4, 1)
        want = sampled_softmax(step, InBatch(Popularity(world.counts))(step))
        torch.testing.assert_close(sampled_softmax(step, self.make(world)(step)), want)

    def test_published_form(self) -> None:
        """correction="both": positive and negatives weigh 1 / q, over memory and batch (equation 9)."""
        world = World.build()
        frequency = Popularity(world.counts)
        negatives = Union(InBatch(frequency), Memory(40, world.dim, frequency), correction="both")
        for seed in range(3):
            observe(negatives, world.step(16, 50 + seed))
        line = [item for seed in range(3) for item in world.step(16, 50 + seed).item_ids.tolist()][-40:]
        step = world.step(8, 1)
        log_q, scores = world.popularity.log(), world.logits(step)
        want = []
        for row, own in enumerate(step.item_ids.tolist()):
            others = [item for item in line + step.item_ids.tolist() if item != own]
            terms = torch.stack([scores[row, item] - log_q[item] for item in [own, *others]])
            want.append(torch.logsumexp(terms, 0) - terms[0])
        torch.testing.assert_close(
            sampled_softmax(step, negatives(step)).double(), torch.stack(want), rtol=1e-5, atol=1e-5
        )


class TestMixed(NegativesContract):
    """MNS: candidates of the batch and of the catalogue."""

    resized = UNKNOWN
    batch = 64

    def make(self, world: World) -> Negatives:
        return Union(InBatch(Popularity(world.counts)), Sampled(Uniform(world.n_items), 192))

    def expected(self, world: World, step: Step) -> Tensor:
        return 63 * world.popularity + 192 / world.n_items


class TestMixedKnown(NegativesContract):
    resized = UNKNOWN
    batch, masks, draws = 64, "known", 20_000

    def make(self, world: World) -> Negatives:
        return Union(
            InBatch(Popularity(world.counts), exclude="known"), Sampled(Uniform(world.n_items), 192, exclude="known")
        )


class TestMixedPerQuery(NegativesContract):
    """A union of shared and per-query candidates."""

    resized = UNKNOWN
    draws = 20_000

    def make(self, world: World) -> Negatives:
        return Union(InBatch(Popularity(world.counts)), Sampled(Uniform(world.n_items), 40, per_query=True))

    def expected(self, world: World, step: Step) -> Tensor:
        return 15 * world.popularity + 40 / world.n_items


def test_sources_without_counts_keep_their_own_weights() -> None:
    """In a union with an uncorrected batch the batch weighs 1 and other sources keep their weights."""
    world = World.build()
    bag = Union(InBatch(), Sampled(Uniform(world.n_items), 10))(world.step(8, 1))
    assert bool((bag.blocks[0].log_w == 0).all())
    torch.testing.assert_close(bag.blocks[1].log_w.exp(), torch.full((10,), world.n_items / 10))


def test_two_weights_for_one_positive_are_refused() -> None:
    """At most one of several sources with their own weights may weight the positive."""
    world = World.build()
    frequency = Popularity(world.counts)
    negatives = Union(InBatch(frequency, "both"), Sampled(frequency, 4, correction="both"), InBatch())
    with pytest.raises(ValueError, match="positive"):
        negatives(world.step(8, 1))


def test_union_needs_two_sources() -> None:
    """A union of one source raises an error."""
    with pytest.raises(ValueError, match="two sources"):
        Union(InBatch())
