"""Unless and its guides: which candidates are dropped, pair by pair, and what is left of the source."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.types import Corpus, Outcome, Step
from sparring.losses import Loss, OnlineHard, bpr, sampled_softmax, softmax_loss
from sparring.negatives import (
    UNKNOWN,
    Cache,
    Guide,
    Hardest,
    InBatch,
    Memory,
    NearestItems,
    Negatives,
    OwnScores,
    Popularity,
    RelatedItems,
    Resample,
    Sampled,
    ScoreFunction,
    TableScores,
    Uniform,
    Union,
    Unless,
    VectorScores,
)
from sparring.testing import NegativesContract, World, dense, observe


def vectors_of(world: World, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Vectors of a guide that differs from the model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(world.queries), 3, generator=generator), torch.randn(world.n_items, 3, generator=generator)


def pair_scores(world: World) -> VectorScores:
    return VectorScores(*vectors_of(world))


def near_by(scores: Tensor, positives: Tensor, relative: float) -> Tensor:
    """(B, N) bool, pair by pair: at least the positive's score less (1 - relative) of its size; never the positive."""
    near = torch.zeros(scores.shape, dtype=torch.bool)
    for i, positive in enumerate(positives.tolist()):
        bound = float(scores[i, positive]) - (1 - relative) * abs(float(scores[i, positive]))
        for j in range(scores.shape[1]):
            near[i, j] = j != positive and float(scores[i, j]) >= bound
    return near


def without(count: Tensor, scores: Tensor, step: Step, most: float) -> Tensor:
    """(B, N): counts (N,), but 0 where a score (B, N) is at least `most`, unless the item is the positive."""
    near = (scores >= most).scatter(1, step.item_ids.unsqueeze(1), False)
    return torch.where(near, 0.0, count.double())


class TestUnlessDrawn(NegativesContract):
    """Draws filtered by the vectors of another model: counts, weights, partition function and gradient."""

    draws = 30_000
    trials = 300
    normalised = False  # size is that of the source, before any candidate is dropped

    def make(self, world: World) -> Negatives:
        return self.resized(world, 200)

    def expected(self, world: World, step: Step) -> Tensor:
        queries, items = vectors_of(world)
        share = world.counts.double().sqrt()
        return without(200 * share / share.sum(), queries[step.query_ids] @ items.T, step, 1.0)

    def resized(self, world: World, n: int) -> Negatives:
        return Unless(Sampled(Popularity(world.counts, alpha=0.5), n), pair_scores(world), most=1.0)


class TestUnlessInBatch(NegativesContract):
    """In-batch candidates filtered by the model's own scores."""

    draws = 5_000
    trials = 200
    normalised = False
    resized = UNKNOWN

    def make(self, world: World) -> Negatives:
        return Unless(InBatch(Popularity(world.counts)), most=0.3)

    def expected(self, world: World, step: Step) -> Tensor:
        return without((self.batch - 1) * world.popularity, world.logits(step) * world.tau, step, 0.3)


class TestUnlessPerQuery(NegativesContract):
    """Draws of each query, filtered by a table of scores with gaps."""

    draws = 30_000
    trials = 200
    normalised = False

    def make(self, world: World) -> Negatives:
        return self.resized(world, 100)

    def scores(self, world: World) -> Tensor:
        """(Q, N), nan for a third of the pairs."""
        queries, items = vectors_of(world)
        gap = torch.arange(len(queries)).unsqueeze(1) % 3 == torch.arange(world.n_items) % 3
        return (queries @ items.T).masked_fill(gap, math.nan)

    def resized(self, world: World, n: int) -> Negatives:
        scores = self.scores(world)
        query, item = torch.nonzero(~scores.isnan()).unbind(1)
        table = TableScores(query, item, scores[query, item])
        return Unless(Sampled(Uniform(world.n_items), n, per_query=True), table, most=1.0)

    def expected(self, world: World, step: Step) -> Tensor:
        even = torch.full((world.n_items,), 100 / world.n_items)
        return without(even, self.scores(world)[step.query_ids], step, 1.0)


WORLD = World.build()


def table_of(function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(Q, N): the score of every pair of the world."""
    query, item = torch.meshgrid(torch.arange(len(WORLD.queries)), torch.arange(WORLD.n_items), indexing="ij")
    return function(query.flatten(), item.flatten()).view(query.shape)


def by_vectors(query: Tensor, item: Tensor) -> Tensor:
    queries, items = vectors_of(WORLD)
    return (queries[query] * items[item]).sum(1)


EDGES = torch.tensor([[0, 1], [1, 2], [3, 9], [9, 0], [4, 4]])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["own", "vectors", "table", "graph", "function"])
def test_every_guide_drops_the_pairs_within_its_bound(name: str, shared: bool) -> None:
    """For each guide exactly those pairs lose their weight whose score, computed one by one, reaches the bound."""
    step = WORLD.step(16, 3)
    every = table_of(by_vectors)
    pairs = torch.nonzero(torch.ones_like(every, dtype=torch.bool))
    guides: dict[str, Guide] = {
        "own": OwnScores(),
        "vectors": pair_scores(WORLD),
        "table": TableScores(pairs[:, 0], pairs[:, 1], every.flatten()),
        "graph": RelatedItems(EDGES[:, 0], EDGES[:, 1]),
        "function": ScoreFunction(lambda query, item: by_vectors(query, item).numpy()),
    }
    scores = every[step.query_ids]
    if name == "own":
        scores = WORLD.logits(step) * WORLD.tau
    elif name == "graph":
        edges = {tuple(edge) for edge in EDGES.tolist()} | {tuple(edge[::-1]) for edge in EDGES.tolist()}
        rows = [[float((p, j) in edges or p == j) for j in range(WORLD.n_items)] for p in step.item_ids.tolist()]
        scores = torch.tensor(rows)
    source = Sampled(Uniform(WORLD.n_items), 300, per_query=not shared, correction="none")
    before = dense(source(WORLD.step(16, 3)), step, WORLD.n_items)
    after = dense(Unless(source, guides[name], relative=0.9)(step), step, WORLD.n_items)
    near = near_by(scores, step.item_ids, 0.9)
    assert 0 < int((near & (before > 0)).sum()) < int((before > 0).sum())
    assert torch.equal(after, before.masked_fill(near, 0.0))


def test_bounds() -> None:
    """relative and margin lie below the positive for both signs of its score, most is absolute, several all apply."""
    step = WORLD.step(2, 1)
    one, other = step.item_ids.tolist()
    rest = [j for j in range(WORLD.n_items) if j not in (one, other)]
    scores = torch.full((len(WORLD.queries), WORLD.n_items), -9.0)
    scores[step.query_ids[0], [one, *rest[:4]]] = torch.tensor([1.0, 0.96, 0.94, 0.84, 1.5])
    scores[step.query_ids[1], [other, *rest[:4]]] = torch.tensor([-1.0, -0.9, -1.04, -1.06, -1.2])
    query, item = torch.nonzero(scores > -9).unbind(1)
    guide = TableScores(query, item, scores[query, item])
    ids = torch.tensor(rest[:4])

    def dropped(**bounds: float) -> list[list[int]]:
        return Unless(InBatch(), guide, **bounds).near(step, ids).long().tolist()

    assert dropped(relative=0.95) == [[1, 0, 0, 1], [1, 1, 0, 0]]
    assert dropped(margin=0.1) == [[1, 1, 0, 1], [1, 1, 1, 0]]
    assert dropped(margin=-0.2) == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert dropped(most=0.9) == [[1, 1, 0, 1], [0, 0, 0, 0]]
    assert dropped(relative=0.95, most=0.9) == [[1, 1, 0, 1], [1, 1, 0, 0]]


def test_missing_scores_drop_nothing_unless_a_value_is_given() -> None:
    """A pair outside the table keeps its weight; so does every candidate of a positive outside it; 0 fills both."""
    step = WORLD.step(3, 1)
    first, second, _third = step.query_ids.tolist()
    a, b, c = step.item_ids.tolist()
    free = [j for j in range(WORLD.n_items) if j not in (a, b, c)][:2]
    query, item = torch.tensor([first, first, second]), torch.tensor([a, free[0], free[0]])
    scores = torch.tensor([0.5, 0.5, 0.9])
    ids = torch.tensor([*free, -1])
    assert Unless(InBatch(), TableScores(query, item, scores), relative=0.95).near(step, ids).long().tolist() == [
        [1, 0, 0],  # listed; not listed; synthetic
        [0, 0, 0],  # the positive is not listed
        [0, 0, 0],
    ]
    filled = TableScores(query, item, scores, missing=0.0)
    assert Unless(InBatch(), filled, relative=0.95).near(step, ids).long().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 0]]


def corpus(epoch: int = 0) -> Corpus:
    positives = WORLD.step(16, 3).positives
    assert positives is not None
    return Corpus(epoch, WORLD.items, lambda ids: WORLD.queries[ids], positives, torch.Generator())


@pytest.mark.parametrize("loss", [sampled_softmax, softmax_loss, bpr, OnlineHard()], ids=lambda loss: str(loss)[:12])
@pytest.mark.parametrize("kind", ["in-batch", "drawn", "mined", "cached", "memory", "union", "resampled"])
def test_dropped_candidates_do_not_count_in_any_loss(kind: str, loss: Loss) -> None:
    """For every kind of candidates and loss, value and gradient do not depend on the vectors of dropped candidates."""
    pop = Popularity(WORLD.counts)
    mined = NearestItems(len(WORLD.queries), n=6, k=8, per_query=True)
    mined.refresh(corpus())
    sources: dict[str, Negatives] = {
        "in-batch": InBatch(pop, exclude="known"),
        "drawn": Sampled(Uniform(WORLD.n_items), 20),
        "mined": mined,
        "cached": Cache(20, pop, WORLD.n_items),
        "memory": Memory(20, WORLD.dim, pop),
        "union": Union(InBatch(pop), Sampled(Uniform(WORLD.n_items), 20)),
        "resampled": InBatch(pop),
    }
    source = sources[kind]
    observe(source, WORLD.step(16, 4))
    unless = Unless(source, pair_scores(WORLD), relative=0.5)
    negatives: Negatives = Resample(unless, 8, draw="systematic") if kind == "resampled" else unless

    def value(shift: float) -> tuple[Tensor, Tensor, int]:
        step = WORLD.step(16, 3)
        bag = negatives(step)
        near = [unless.near(step, block.ids) for block in bag.blocks]
        moved = tuple(
            replace(
                block,
                ids=block.ids.expand(mask.shape),
                emb=block.emb.expand(*mask.shape, -1) + shift * mask.unsqueeze(-1),
            )
            for block, mask in zip(bag.blocks, near, strict=True)
        )
        if kind == "resampled":  # the draws of a shared block are counted for all queries
            moved = tuple(replace(block, drawn=None) for block in moved)
        losses = loss(step, replace(bag, blocks=moved))
        (gradient,) = torch.autograd.grad(losses.sum(), step.q)
        return losses.detach(), gradient, int(torch.stack([mask.sum() for mask in near]).sum())

    (plain, slope, dropped), (moved, other, _) = value(0.0), value(7.0)
    assert dropped > 0
    torch.testing.assert_close(plain, moved)
    torch.testing.assert_close(slope, other)


def test_selection_after_the_filter_fills_up_with_others() -> None:
    """Hardest(Unless(...)) keeps the k best of what is left: those that a sort of all pairs finds."""
    step = WORLD.step(16, 3)
    scores = WORLD.logits(step)
    guide = table_of(by_vectors)[step.query_ids]
    near = near_by(guide, step.item_ids, 0.5)
    source = Unless(Sampled(Uniform(WORLD.n_items), 500, correction="none"), pair_scores(WORLD), relative=0.5)
    weight = dense(Hardest(Union(source, InBatch(), correction="none"), 3)(step), step, WORLD.n_items)
    offered = source.source(WORLD.step(16, 3)).blocks[0].ids
    assert len(offered.unique()) == WORLD.n_items
    for i in range(16):
        chosen = set(torch.nonzero(weight[i]).flatten().tolist())
        batch = set(step.item_ids.tolist())
        left = [j for j in range(WORLD.n_items) if j != int(step.item_ids[i]) and (not near[i, j] or j in batch)]
        assert chosen <= set(sorted(left, key=lambda j: -float(scores[i, j]))[:3])


def test_each_epoch_reports_the_share_dropped() -> None:
    """The report is the number of dropped pairs over the number of offered ones since the last report."""
    unless = Unless(Sampled(Uniform(WORLD.n_items), 30), pair_scores(WORLD), relative=0.5)
    dropped = 0
    for seed in (1, 2):
        step = WORLD.step(16, seed)
        bag = unless(step)
        dropped += int(torch.isneginf(bag.blocks[0].log_w).sum())
        unless.observe(step, Outcome(torch.zeros(16), (bag,)))
    assert dropped > 0
    assert unless.report() == {"dropped": pytest.approx(dropped / (2 * 16 * 30), abs=1e-6)}
    assert unless.report() == {"dropped": 0.0}


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (lambda: Unless(InBatch()), "bound"),
        (lambda: Unless(InBatch(), relative=1.2), "relative"),
        (lambda: Unless(InBatch(), margin=math.nan), "finite"),
        (lambda: VectorScores(torch.zeros(3, 4), torch.zeros(5, 6)), "width"),
        (lambda: TableScores(torch.zeros(2), torch.zeros(2), torch.zeros(3)), "as many"),
        (lambda: TableScores(torch.zeros(2), torch.zeros(2), torch.zeros(2)), "twice"),
        (lambda: ScoreFunction(lambda q, i: [1.0])(WORLD.step(4, 1), torch.arange(5), None), "each pair"),
    ],
)
def test_wrong_arguments(wrong: Callable[[], object], word: str) -> None:
    """A missing bound, a bound that is no number, and guides of the wrong shape are refused by name."""
    with pytest.raises((ValueError, UserError), match=word):
        wrong()
