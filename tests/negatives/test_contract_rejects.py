"""The contract rejects wrong samplers, and reports each test that it had nothing to check with.

Each wrong sampler below is a right one with a single, realistic bug, and names the contract tests that must fail on it.
The checks of losses, kernels and distributions have their wrong candidates beside them, in their own files.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import unittest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparring.core.types import Bag, Candidates, Exclude, Outcome, Step
from sparring.negatives import (
    UNKNOWN,
    Hardest,
    InBatch,
    Memory,
    Negatives,
    Popularity,
    Resample,
    Sampled,
    Shown,
    Uniform,
    Union,
)
from sparring.testing import NegativesContract, World, dense, unproved

Fields = dict[str, Any]  # of Candidates
SOURCE = Path(__file__).parents[2] / "src"


class Even(Negatives):
    """n items drawn uniformly, without known counts."""

    log_count = UNKNOWN

    def __init__(self, n_items: int, n: int = 50):
        super().__init__()
        self.n_items, self.n = n_items, n

    def forward(self, step: Step) -> Bag:
        ids = torch.randint(self.n_items, (self.n,), generator=step.generator)
        log_w = torch.tensor(math.log(self.n_items / self.n))
        return Bag((Candidates(ids, step.encode(ids), log_w, Exclude(step.item_ids)),))


class Counted(Even):
    """The same sampler with the two methods that Union and the corrections need."""

    def log_count(self, ids: Tensor, step: Step) -> Tensor:
        return torch.full(ids.shape, math.log(self.n / self.n_items))

    def size(self, step: Step) -> float | Tensor:
        return self.n


class Quick(NegativesContract):
    """The contract for samplers that share a constructor, with fewer draws."""

    draws, trials = 10_000, 100
    resized = UNKNOWN
    sampler: Callable[..., Negatives]


class OfEven(Quick):
    sampler = Even

    def make(self, world: World) -> Negatives:
        return self.sampler(world.n_items)


class OfCounted(OfEven):
    """All optional parts of the contract are given, so that no test is skipped."""

    sampler = Counted

    def expected(self, world: World, step: Step) -> Tensor:
        return torch.full((world.n_items,), 50 / world.n_items)

    def resized(self, world: World, n: int) -> Negatives:
        return self.sampler(world.n_items, n)


class OfSampled(Quick):
    sampler = Sampled

    def make(self, world: World) -> Negatives:
        return self.sampler(Popularity(world.counts), 100)

    def expected(self, world: World, step: Step) -> Tensor:
        return 100 * world.popularity


class OfKnown(Quick):
    sampler, masks = Sampled, "known"

    def make(self, world: World) -> Negatives:
        return self.sampler(Popularity(world.counts), 100, exclude="known")


class OfPerQuery(OfSampled):
    def make(self, world: World) -> Negatives:
        return self.sampler(Popularity(world.counts), 100, per_query=True)


class OfShown(Quick):
    sampler = Shown

    def make(self, world: World) -> Negatives:
        return self.sampler(world.shown, 50)

    def expected(self, world: World, step: Step) -> Tensor:
        begin, end = world.shown.start[step.query_ids[0] :][:2]
        return 50 * torch.bincount(world.shown.items[begin:end], minlength=world.n_items) / max(int(end - begin), 1)


class OfInBatch(Quick):
    sampler = InBatch

    def make(self, world: World) -> Negatives:
        return self.sampler(Popularity(world.counts))

    def expected(self, world: World, step: Step) -> Tensor:
        return (self.batch - 1) * world.popularity


class OfMemory(Quick):
    """Three steps leave places empty; the steps between two trials fill them."""

    sampler, between, draws, trials = Memory, 4, 4000, 50

    def make(self, world: World) -> Negatives:
        return self.sampler(64, world.dim, Popularity(world.counts))


class OfUnion(Quick):
    sampler = Union

    def make(self, world: World) -> Negatives:
        return self.sampler(InBatch(Popularity(world.counts)), Sampled(Uniform(world.n_items), 100))

    def expected(self, world: World, step: Step) -> Tensor:
        return (self.batch - 1) * world.popularity + 100 / world.n_items


def others(world: World, step: Step) -> Tensor:
    """(B, B) the logit of each column of the batch, -inf where its item is the row's own positive."""
    own = step.item_ids == step.item_ids.unsqueeze(1)
    return world.logits(step)[:, step.item_ids].masked_fill(own, -math.inf)


class OfResample(Quick):
    sampler, selects = Resample, True

    def make(self, world: World) -> Negatives:
        return self.sampler(InBatch(Popularity(world.counts)), n=200, draw="multinomial")

    def offered(self, bag: Bag, step: Step, n_items: int) -> Tensor:
        return dense(bag, step, n_items)[0]

    def expected(self, world: World, step: Step) -> Tensor:
        p = torch.softmax(others(world, step) - world.popularity[step.item_ids].log(), 1)
        return torch.zeros(self.batch, world.n_items).double().index_add_(1, step.item_ids, 200 * p)


class OfHardest(Quick):
    sampler, selects, draws = Hardest, True, 2000

    def make(self, world: World) -> Negatives:
        return self.sampler(InBatch(Popularity(world.counts)), 4)

    def expected(self, world: World, step: Step) -> Tensor:
        kept = step.item_ids[others(world, step).topk(4).indices]
        return torch.zeros(self.batch, world.n_items).scatter_add_(1, kept, torch.ones(kept.shape))


CONTRACTS = (OfCounted, OfSampled, OfKnown, OfPerQuery, OfShown, OfInBatch, OfMemory, OfUnion, OfResample, OfHardest)
WRONG: list[tuple[type[Quick], Callable[..., Negatives], set[str]]] = []


def rejected(contract: type[Quick], *tests: str) -> Callable[[type[Negatives]], type[Negatives]]:
    """Register a wrong sampler with the contract it is run under and the contract tests that fail on it."""

    def register(sampler: type[Negatives]) -> type[Negatives]:
        WRONG.append((contract, sampler, {f"test_{test}" for test in tests}))
        return sampler

    return register


class Changed(Negatives):
    """Replaces the fields `change(block, step)` of every block that the right sampler returns."""

    def forward(self, step: Step) -> Bag:
        bag = super().forward(step)
        return replace(bag, blocks=tuple(replace(block, **self.change(block, step)) for block in bag.blocks))


def own_positive(block: Candidates, step: Step) -> Tensor:
    """(B, C) bool: the places of a shared block that hold the row's positive."""
    return block.ids == step.item_ids.unsqueeze(1)


# Weights and counts


@rejected(OfSampled, "partition_function")
class WrongSign(Changed, Sampled):
    """The correction multiplies by the expected count instead of dividing by it."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"log_w": -block.log_w}


@rejected(OfSampled, "partition_function", "log_count_is_the_formula", "size_is_the_sum_of_counts")
class ForgetsLogN(Sampled):
    """log_count is the log probability of one draw, not the expected count of n draws."""

    def log_count(self, ids: Tensor, step: Step) -> Tensor:
        return self.distribution.log_prob(ids)


@rejected(OfSampled, "partition_function")
class DividesByProbability(Changed, Sampled):
    """The weights divide by q instead of n q: the negatives count n times too much."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"log_w": block.log_w + math.log(self.n)}


@rejected(OfSampled, "distribution", "partition_function")
class CountsDuplicatesOnce(Changed, Sampled):
    """An item drawn several times counts as one draw."""

    def change(self, block: Candidates, step: Step) -> Fields:
        repeated = (block.ids == block.ids.unsqueeze(1)).tril(-1).any(1)
        return {"log_w": block.log_w.masked_fill(repeated, -math.inf)}


@rejected(OfCounted, "gradient_bias_falls")
class FixedNumber(Counted):
    """It always draws 50 candidates, ignoring n."""

    def __init__(self, n_items: int, n: int = 50):
        super().__init__(n_items)


@rejected(OfCounted, "size_is_the_sum_of_counts")
class WrongSize(Counted):
    """size is not the sum of the counts: corrections that divide by it are off."""

    def size(self, step: Step) -> float:
        return 2 * self.n


@rejected(OfCounted, "size_is_the_sum_of_counts", "combines_with_in_batch")
class NoSize(Counted):
    """It has log_count and no size, so a Union with it crashes."""

    def size(self, step: Step) -> float | Tensor:
        return Negatives.size(self, step)


@rejected(OfInBatch, "log_count_is_the_formula")
class CountsOwnColumn(InBatch):
    """All B columns are counted, though a query's own column never counts against it."""

    def size(self, step: Step) -> float:
        return len(step.batch)


@rejected(OfSampled, "loss_and_gradient")
class GradientThroughWeights(Changed, Sampled):
    """The weights depend on the scores and are not detached: the loss is right, its gradient is not."""

    def change(self, block: Candidates, step: Step) -> Fields:
        scores = step.q @ block.emb.T
        return {"log_w": block.log_w + scores - scores.detach()}


# Draws


@rejected(OfSampled, "distribution", "partition_function")
class DrawsUniformly(Changed, Sampled):
    """It draws from another distribution than the one it is corrected for."""

    def change(self, block: Candidates, step: Step) -> Fields:
        occurring = torch.nonzero(self.distribution.log_prob(torch.arange(self.distribution.n_items)) > -math.inf)
        ids = occurring[torch.randint(len(occurring), (self.n,), generator=step.generator), 0]
        return {"ids": ids, "emb": step.encode(ids), "log_w": -self.log_count(ids, step)}


@rejected(OfShown, "distribution")
class ListOfTheNextQuery(Shown):
    """It reads another query's list."""

    def forward(self, step: Step) -> Bag:
        return super().forward(replace(step, query_ids=(step.query_ids + 1) % 256))


@rejected(OfPerQuery, "bag_is_well_formed")
class OneDrawForAll(Changed, Sampled):
    """It claims per-query draws, but all queries share one."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {name: getattr(block, name)[:1].expand_as(getattr(block, name)) for name in ("ids", "emb", "log_w")}


@rejected(OfSampled, "same_generator_same_bag", "state_round_trip", "combines_with_in_batch", "loss_and_gradient")
class HiddenGenerator(Sampled):
    """It draws from a private generator, which no checkpoint contains."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.hidden = torch.Generator().manual_seed(0)

    def forward(self, step: Step) -> Bag:
        return super().forward(replace(step, generator=self.hidden))


@rejected(OfSampled, "distribution", "partition_function")
class SameEveryStep(Sampled):
    """It seeds its own draws, so that every step has the same negatives."""

    def forward(self, step: Step) -> Bag:
        return super().forward(replace(step, generator=torch.Generator().manual_seed(0)))


@rejected(OfResample, "distribution")
class ResamplesUncorrected(Resample):
    """It draws by the scores alone and forgets the source's correction."""

    def __init__(self, source: Negatives, **options: Any):
        super().__init__(InBatch(), **options)


@rejected(OfResample, "distribution")
class ForgetsDrawnCounts(Changed, Resample):
    """A candidate drawn twice weighs as much as one drawn once."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"log_w": block.log_w.clamp(max=0)}


@rejected(OfHardest, "distribution")
class Easiest(Hardest):
    """It keeps the lowest scores."""

    def choose(self, scores: Tensor, step: Step) -> Tensor:
        return torch.where(scores > -math.inf, scores, math.inf).sort().indices[:, : self.k]


# Mixtures


@rejected(OfUnion, "partition_function", "log_count_is_the_formula")
class SwappedWeights(Union):
    """Each source is weighed by the size of the other."""

    def log_count(self, ids: Tensor, step: Step) -> Tensor:
        batch, catalogue = self.sources
        swap = math.log(catalogue.size(step)) - math.log(batch.size(step))
        return torch.logaddexp(batch.log_count(ids, step) + swap, catalogue.log_count(ids, step) - swap)


@rejected(OfUnion, "partition_function", "log_count_is_the_formula", "size_is_the_sum_of_counts")
class CountsOneSource(Union):
    """The expected counts are those of one source, as if the other offered nothing."""

    def log_count(self, ids: Tensor, step: Step) -> Tensor:
        return self.sources[1].log_count(ids, step)


@rejected(OfUnion, "partition_function", "excluded_items_weigh_nothing")
class EachSourceByItself(Union):
    """Each source keeps its own weights: together they count the catalogue twice."""

    def forward(self, step: Step) -> Bag:
        return Bag(tuple(block for source in self.sources for block in source(step).blocks))


# Exclusion


@rejected(OfSampled, "excluded_items_weigh_nothing", "distribution", "everything_excluded", "bag_describes_itself")
class ExcludesNothing(Changed, Sampled):
    """The exclusion is a no-op: the positive is among its own negatives."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"exclude": None}


@rejected(OfSampled, "excluded_items_weigh_nothing", "distribution", "everything_excluded", "bag_describes_itself")
class TinyWeight(Changed, Sampled):
    """An excluded item has a tiny weight instead of none."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"exclude": None, "log_w": torch.where(own_positive(block, step), -20.0, block.log_w)}


@rejected(OfInBatch, "excluded_items_weigh_nothing", "distribution", "everything_excluded", "bag_describes_itself")
class OwnColumnOnly(Changed, InBatch):
    """Its own column is excluded, and other columns that repeat the positive are not."""

    def change(self, block: Candidates, step: Step) -> Fields:
        diagonal = torch.eye(len(step.q), dtype=torch.bool)
        return {"exclude": None, "log_w": torch.where(diagonal, -math.inf, block.log_w)}


@rejected(OfSampled, "excluded_items_weigh_nothing", "distribution", "partition_function")
class ExcludesForEveryone(Changed, Sampled):
    """The positive of one query is excluded for all queries of the batch."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"log_w": block.log_w.masked_fill(torch.isin(block.ids, step.item_ids), -math.inf)}


@rejected(OfKnown, "excluded_items_weigh_nothing", "distribution")
class OwnPositiveOnly(Changed, Sampled):
    """Only the positive of the step is excluded, not the other known positives."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"exclude": Exclude(step.item_ids)}


@rejected(OfKnown, "excluded_items_weigh_nothing", "distribution", "everything_excluded")
class ForgetsTheLastKnown(Changed, Sampled):
    """The list of known positives ends one too early for every query."""

    def change(self, block: Candidates, step: Step) -> Fields:
        rows, ids = block.exclude.rows, block.exclude.ids
        kept = rows.diff(append=torch.tensor([-1])) == 0
        return {"exclude": Exclude(ids[kept], rows[kept])}


@rejected(OfSampled, "bag_describes_itself", "excluded_items_weigh_nothing")
class SilentExclusion(Changed, Sampled):
    """The exclusion is written into the weights and describe() does not mention it."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"exclude": None, "log_w": torch.where(own_positive(block, step), -math.inf, block.log_w)}


# Edges


@rejected(OfInBatch, "one_query")
class NeedsTwoQueries(InBatch):
    """A batch of one has an expected count of 0, whose logarithm does not exist."""

    def size(self, step: Step) -> float:
        return len(step.batch) - 1


@rejected(OfSampled, "everything_excluded")
class NothingLeftIsNan(Sampled):
    """The positive is weighed by the share of candidates that are left: with none left the loss is nan."""

    def forward(self, step: Step) -> Bag:
        bag = super().forward(step)
        left = (~own_positive(bag.blocks[0], step)).float().mean(1)
        return replace(bag, log_w_positive=left.log())


@rejected(OfKnown, "rows_that_share_a_query")
class FirstRowOfAQuery(Changed, Sampled):
    """It looks up what a query knows for one of its rows only."""

    def change(self, block: Candidates, step: Step) -> Fields:
        if block.exclude is None or block.exclude.rows is None:
            return {}
        ids = step.query_ids.tolist()
        first = torch.tensor([ids.index(query) == row for row, query in enumerate(ids)])[block.exclude.rows]
        return {"exclude": Exclude(block.exclude.ids[first], block.exclude.rows[first])}


@rejected(OfHardest, "everything_excluded")
class KeepsExcludedItems(Changed, Hardest):
    """If too few candidates are left, it fills up with excluded ones that count."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"log_w": block.log_w.clamp(min=-1.0)}


@rejected(OfMemory, "everything_excluded")
class ReadsEmptyPlaces(Changed, Memory):
    """Empty places count as candidates."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"log_w": block.log_w.clamp(min=-1.0)}


@rejected(OfSampled, "bag_is_well_formed")
class VectorsOfOtherItems(Changed, Sampled):
    """Ids and vectors are in different orders."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"emb": block.emb.flip(0)}


@rejected(OfSampled, "bag_is_well_formed")
class Detached(Changed, Sampled):
    """It claims to encode its candidates, and no gradient reaches them."""

    def change(self, block: Candidates, step: Step) -> Fields:
        return {"emb": block.emb.detach()}


# State


@rejected(OfMemory, "forward_leaves_state_alone")
class WritesInForward(Memory):
    """forward changes a buffer, so that evaluating the loss twice is training twice."""

    def forward(self, step: Step) -> Bag:
        self.steps += 1
        return super().forward(step)


@rejected(OfSampled, "forward_leaves_state_alone")
class CountsCalls(Sampled):
    """forward counts its calls in a plain attribute, which no checkpoint contains."""

    calls = 0

    def forward(self, step: Step) -> Bag:
        self.calls += 1
        return super().forward(step)


@rejected(OfMemory, "state_round_trip")
class UnsavedState(Memory):
    """Its stored vectors are not in its state_dict."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.register_buffer("emb", self.emb, persistent=False)


@rejected(OfMemory, "distribution", "partition_function", "excluded_items_weigh_nothing")
class NeverObserves(Memory):
    """It learns nothing from a step, so it never offers anything."""

    def observe(self, step: Step, outcome: Outcome) -> None:
        return None


@rejected(OfEven, "gaps_are_declared")
class Undeclared(Even):
    """It neither defines log_count nor says that it is unknown."""

    log_count = Negatives.log_count


def verdicts(contract: type[NegativesContract]) -> dict[str, str]:
    """For each test of a contract: passed, failed, or the reason why it was skipped."""
    verdict = {}
    for name in (name for name in dir(contract) if name.startswith("test_")):
        try:
            getattr(contract(), name)()
            verdict[name] = "passed"
        except unittest.SkipTest as reason:
            verdict[name] = str(reason)
        except Exception:  # a crash is a failure too
            verdict[name] = "failed"
    return verdict


def failed(contract: type[NegativesContract]) -> set[str]:
    return {name for name, verdict in verdicts(contract).items() if verdict == "failed"}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_right_samplers_pass(contract: type[Quick]) -> None:
    """No test of the contract fails on the samplers that the wrong ones are derived from."""
    assert failed(contract) == set()


@pytest.mark.parametrize(("contract", "wrong", "tests"), [pytest.param(*case, id=case[1].__name__) for case in WRONG])
def test_wrong_samplers_are_rejected(contract: type[Quick], wrong: type[Negatives], tests: set[str]) -> None:
    """Every wrong sampler fails the tests that it names; some tests may fail on it too, all others pass."""
    assert tests <= failed(type(wrong.__name__, (contract,), {"sampler": wrong})) <= tests | MAY_FAIL


# Statistics, and two other tests on other rows.
MAY_FAIL = {"test_distribution", "test_partition_function", "test_rows_that_share_a_query"}
NOT_STATED = {"test_log_count_is_the_formula", "test_gradient_bias_falls"}  # need `expected` and `resized`
NEED_COUNTS = {"test_distribution", "test_partition_function", "test_size_is_the_sum_of_counts"}


def test_every_test_rejects_something() -> None:
    """Each test of the contract fails on at least one wrong sampler."""
    every = {name for name in dir(NegativesContract) if name.startswith("test_")}
    assert every - set().union(*(tests for _, _, tests in WRONG)) == set()


def test_nothing_passes_untested() -> None:
    """Tests that lack log_count or a formula are skipped with a reason; where all is given, none is skipped."""
    skipped = {name: verdict for name, verdict in verdicts(OfEven).items() if verdict != "passed"}
    assert skipped.keys() == NOT_STATED | NEED_COUNTS
    assert all("not tested" in reason for reason in skipped.values())
    assert set(verdicts(OfCounted).values()) == {"passed"}


def test_pytest_shows_the_skips(tmp_path: Path) -> None:
    """The pytest summary counts the skipped tests and gives the reasons."""
    (tmp_path / "test_uncounted.py").write_text(
        "from sparring.negatives import InBatch\n"
        "from sparring.testing import NegativesContract\n"
        "class TestUncounted(NegativesContract):\n"
        "    make = lambda self, world: InBatch()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "test_uncounted.py"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f" {len(NOT_STATED | NEED_COUNTS)} skipped" in done.stdout.splitlines()[-1]
    assert "log_count is unknown: size was not tested" in done.stdout


def test_gaps_are_listed() -> None:
    """`unproved` has the reason of each skipped test, with the contracts that it concerns."""
    listed = unproved(OfEven, OfCounted)
    assert set(listed) == {verdict for verdict in verdicts(OfEven).values() if verdict != "passed"}
    assert all(names == ["OfEven"] for names in listed.values())


def test_a_contract_without_resized_fails() -> None:
    """A sampler with known counts needs `resized`, or a declaration that there is none."""

    class Left(OfCounted):
        resized = NegativesContract.resized

    assert failed(Left) == {"test_gaps_are_declared"}
