"""Towers of histories against loops: what they read with each context, and what they never read."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparring.data.features import Features, TagColumn
from sparring.data.histories import Before, Context, Given, Histories, Windows
from sparring.models.attention import HstuBlock, LigrBlock, SasRecBlock
from sparring.models.histories import HistoryTower, by_distance
from sparring.models.parts import FeatureTower, Sum, fixed_shapes
from sparring.models.retriever import Retriever
from sparring.models.sequences import SequenceTower
from sparring.models.towers import IdTower

HISTORY = [[4, 1, 1, 7], [], [2], [0, 3, 5, 6, 8, 9, 2], [2, 2]]  # oldest first
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POOLINGS = ["sum", "mean", "attention"]


def csr(lists: list[list[int]], ordered: bool = True) -> Histories:
    start = np.cumsum([0, *[len(x) for x in lists]])
    items = torch.tensor([i for x in lists for i in x], dtype=torch.int32)
    return Histories(torch.from_numpy(start), items, torch.arange(len(items)) * 100, ordered)


def an_item_tower(kind: str) -> nn.Module:
    """A table with sparse or dense gradients, or ids, a category, tags and vectors through a perceptron."""
    if kind != "features":
        return IdTower(10, 6, sparse=kind == "sparse table")
    tags = np.array([[i % 4, i % 3 if i % 2 else -1] for i in range(10)], np.int32)
    columns = Features(np.arange(10, dtype=np.int32)[:, None] % 3, (3,), np.zeros((10, 0), np.float32), ("category",))
    columns += Features(np.zeros((10, 0), np.int32), (), np.zeros((10, 0), np.float32), (), (TagColumn(tags, 4),))
    return FeatureTower(10, 6, columns, (5,), vectors=np.random.default_rng(0).normal(size=(10, 4)))


def a_history_tower(
    pooling: str = "mean", last: int = 3, ordered: bool = True, item: str = "sparse table"
) -> HistoryTower:
    torch.manual_seed(0)
    tower = HistoryTower(an_item_tower(item), csr(HISTORY, ordered), last=last, pooling=pooling)  # type: ignore[arg-type]
    if pooling == "attention":
        nn.init.normal_(tower.context)
        nn.init.normal_(tower.recency)
    return tower


def a_sequence_tower(kind: str, last: int = 3) -> SequenceTower:
    torch.manual_seed(0)
    makers: dict[str, Callable[[], nn.Module]] = {
        "sasrec": lambda: SasRecBlock(6, 2),
        "ligr": lambda: LigrBlock(6, 2),
        "hstu": lambda: HstuBlock(6, 2, length=last, timed=True),
    }
    blocks = [makers[kind]() for _ in range(2)]
    return SequenceTower(IdTower(10, 6), csr(HISTORY), last, blocks).eval()


def pooled_by_loop(tower: HistoryTower, items: list[int]) -> Tensor:
    """The query vector of a list of items, oldest first, one item at a time."""
    kept = items[-tower.last :]
    if not kept:
        return tower.empty
    x = [tower.item(torch.tensor(i)) for i in kept]
    if tower.pooling != "attention":
        return sum(x, torch.zeros(6)) / (len(x) if tower.pooling == "mean" else 1)
    logits = [
        tower.context @ torch.tanh(tower.key.weight @ v + tower.key.bias) + tower.recency[len(x) - 1 - j]
        for j, v in enumerate(x)
    ]
    scores = [math.exp(logit.item()) for logit in logits]
    return sum((s / sum(scores) * v for s, v in zip(scores, x, strict=True)), torch.zeros(6))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_history_equals_a_loop(pooling: str) -> None:
    """The last 3 items of each query, repeats counted, in any shape of ids; no history gives the learned vector."""
    tower = a_history_tower(pooling)
    want = torch.stack([pooled_by_loop(tower, items) for items in HISTORY])
    assert torch.allclose(tower(torch.arange(5)), want, atol=1e-6)
    ids = torch.tensor([[3, 1], [0, 3]])
    assert torch.allclose(tower(ids), want[ids], atol=1e-6)
    assert torch.allclose(tower(torch.tensor(4)), want[4], atol=1e-6)
    assert torch.equal(tower(torch.tensor([1])), tower.empty[None])


PLACES = [(q, place) for q, items in enumerate(HISTORY) for place in range(len(items))]


def places_of(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    start = np.cumsum([0, *map(len, HISTORY)])
    return torch.tensor([q for q, _ in pairs]), torch.tensor([int(start[q]) + place for q, place in pairs])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_ordered_history_holds_only_what_came_before(pooling: str) -> None:
    """The item at a place is predicted from the items before it, repeats of itself included; the first from none."""
    tower = a_history_tower(pooling)
    queries, places = places_of(PLACES)
    got = tower(queries, Before(places))
    for row, (query, place) in enumerate(PLACES):
        torch.testing.assert_close(got[row], pooled_by_loop(tower, HISTORY[query][:place]))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_set_leaves_the_positive_out(pooling: str) -> None:
    """Without an order all places of the positive are removed, and the next older item moves up."""
    tower = a_history_tower(pooling, ordered=False)
    queries, places = places_of(PLACES)
    got = tower(queries, Before(places))
    for row, (query, place) in enumerate(PLACES):
        rest = [i for i in HISTORY[query][-4:] if i != HISTORY[query][place]]
        torch.testing.assert_close(got[row], pooled_by_loop(tower, rest))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_history_gives_the_future_no_gradient(pooling: str) -> None:
    """The gradient reaches exactly the items before the place, so nothing leaks."""
    tower = a_history_tower(pooling)
    queries, places = places_of([(0, 1), (3, 2)])
    tower(queries, Before(places)).square().sum().backward()
    touched = tower.item.weight.grad.coalesce().indices()[0].tolist()  # type: ignore[union-attr, operator]
    assert touched == [0, 3, 4]


def windows() -> tuple[Windows, list[tuple[int, int]]]:
    """Inputs of queries 3 and 0 side by side, an empty window, and the (query, place) that each slot predicts."""
    start = np.cumsum([0, *map(len, HISTORY)])
    inputs = [(query, place) for query in (3, 0) for place in range(len(HISTORY[query]) - 1)]
    rows = [*(int(start[query]) + place for query, place in inputs), -1]
    pairs = [(query, place + 1) for query, place in inputs]
    return Windows(torch.tensor([rows, [-1] * len(rows)]), torch.arange(len(pairs))), pairs


@pytest.mark.parametrize("pooling", POOLINGS)
def test_windows_of_a_history_equal_a_loop(pooling: str) -> None:
    """Every slot pools the items of its own query up to itself; empty slots and windows change nothing."""
    tower = a_history_tower(pooling, last=9)
    context, pairs = windows()
    got = tower(torch.tensor([q for q, _ in pairs]), context)
    for row, (query, place) in enumerate(pairs):
        torch.testing.assert_close(got[row], pooled_by_loop(tower, HISTORY[query][:place]))
    got.square().sum().backward()
    touched = tower.item.weight.grad.coalesce().indices()[0].tolist()  # type: ignore[union-attr, operator]
    assert touched == [0, 1, 3, 4, 5, 6, 8, 9]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_sets_pool_what_is_given(pooling: str) -> None:
    """Each row has the vector of its set's given items; a set of which nothing is given has the learned vector."""
    tower = a_history_tower(pooling)
    _, places = places_of([(3, 0), (0, 3), (3, 4), (3, 6)])
    context = Given(places, torch.tensor([0, 1, 0, 0]), torch.tensor([1, 0, 2, 0]), torch.tensor([3, 0, 2, 0]))
    got = tower(torch.tensor([0, 3, 2, 3]), context)
    scale = 3 if pooling == "mean" else 1
    three = sum((tower.item(torch.tensor(i)) for i in (0, 8, 2)), torch.zeros(6)) / scale
    want = torch.stack([tower.item(torch.tensor(7)), three, tower.empty, three])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_new_queries_are_encoded_from_items_alone(pooling: str) -> None:
    """encode_history of a known query's items equals the tower, wherever the padding is; longer lists are truncated."""
    tower = a_history_tower(pooling)
    items = torch.tensor(
        [[4, 1, 1, 7, -1, -1], [-1, -1, -1, -1, -1, -1], [-1, 2, -1, -1, -1, -1], [6, 8, -1, 9, -1, 2]]
    )
    want = torch.stack([pooled_by_loop(tower, row) for row in ([4, 1, 1, 7], [], [2], [6, 8, 9, 2])])
    assert torch.allclose(tower.encode_history(items), want, atol=1e-6)
    known = tower(torch.tensor([0, 1, 2, 3]))
    assert torch.allclose(tower.encode_history(items), known, atol=1e-6)
    assert torch.equal(tower.encode_history(torch.full((2, 3), -1)), tower.empty.expand(2, 6))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("item", ["sparse table", "dense table", "features"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_kernels_of_a_gpu_give_the_same(
    monkeypatch: pytest.MonkeyPatch, pooling: str, item: str, ordered: bool
) -> None:
    """Vectors and the gradient of every parameter are those of a CPU, with every context and for new queries."""
    pytest.importorskip("triton")
    towers = [a_history_tower(pooling, ordered=ordered, item=item) for _ in range(2)]
    queries, places = places_of(PLACES)
    new = torch.tensor([[4, 1, 1, 7, -1, -1], [-1] * 6, [-1, 2, -1, -1, -1, -1], [6, 8, -1, 9, -1, 2]])

    def encoded(tower: HistoryTower) -> list[Tensor]:
        tower.to(DEVICE)
        found = [
            tower(queries.to(DEVICE), Before(places.to(DEVICE))),
            tower(torch.arange(5, device=DEVICE)),
            tower.encode_history(new.to(DEVICE)),
            tower.encode_history(torch.full((2, 3), -1, device=DEVICE)),
        ]
        assert torch.equal(tower.encode_history(new[:0].to(DEVICE)), tower.empty.expand(0, 6))
        sum((x * torch.linspace(-1, 2, 6, device=DEVICE).cos()).square().sum() for x in found).backward()  # type: ignore[union-attr]
        grads = [p.grad.to_dense() for p in tower.parameters() if p.grad is not None]
        assert len(grads) == len(list(tower.parameters()))
        return [x.detach() for x in found] + grads

    if DEVICE == "cpu":
        want = encoded(towers[0])
        monkeypatch.setattr(Tensor, "is_cuda", True)
    else:
        monkeypatch.setattr("sparring.models.histories.fuses_rows", lambda table: False)
        want = encoded(towers[0])
        monkeypatch.undo()
    got = encoded(towers[1])
    for ours, expected in zip(got, want, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_kernels_encode_as_many_items_whatever_the_histories(monkeypatch: pytest.MonkeyPatch, pooling: str) -> None:
    """The number of items that a perceptron encodes depends on shapes alone; under autocast vectors stay float32."""
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr(Tensor, "is_cuda", True)
    tower, encoded = a_history_tower(pooling, item="features").to(DEVICE), []
    tower.item.register_forward_pre_hook(lambda part, given: encoded.append(given[0].shape))
    for row in ([4, 1, 1, 7], [2, 2, 2, 2], [-1, -1, -1, -1]):
        items = torch.tensor([row, row], device=DEVICE)
        want = tower.encode_history(items)
        with torch.autocast(DEVICE, torch.bfloat16):
            got = tower.encode_history(items)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)
        got.sum().backward()
    assert len(set(encoded)) == 1


def test_only_parts_of_fixed_shapes_go_through_kernels() -> None:
    """Tables and perceptrons over columns have fixed shapes; a tower around one, of which nothing is known, has not."""
    tables = an_item_tower("sparse table"), an_item_tower("features")
    assert all(fixed_shapes(tower) for tower in (*tables, Sum(*tables)))
    assert not fixed_shapes(Doubled(tables[0]))


def test_history_gradients_reach_everything() -> None:
    """Items, attention, recency and the empty history's vector get gradients; absent items do not."""
    tower = a_history_tower("attention")
    (tower(torch.tensor([0, 1, 3])) ** 2).sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        assert grad.abs().sum() > 0, name
    touched = tower.item.weight.grad.coalesce().indices()[0].tolist()  # type: ignore[union-attr, operator]
    assert touched == [1, 2, 7, 8, 9]


@pytest.mark.parametrize(("length", "last"), [(5, 5), (5, 3), (3, 7), (1, 1), (40, 8)])
def test_recency_by_distance_and_its_gradient_equal_loops(length: int, last: int) -> None:
    """The query at i weights the item at j <= i by recency_(i - j), or the last one; 0 after i."""
    random = torch.Generator().manual_seed(length)
    recency = torch.randn(last, generator=random, dtype=torch.float64).requires_grad_()
    grad = torch.randn(length, length, generator=random, dtype=torch.float64)
    expected, back = torch.zeros(length, length, dtype=torch.float64), torch.zeros(last, dtype=torch.float64)
    for i in range(length):
        for j in range(i + 1):
            expected[i, j] = recency.detach()[min(i - j, last - 1)]
            back[min(i - j, last - 1)] += grad[i, j]
    found = by_distance(recency, length)
    found.backward(grad)
    assert torch.equal(found.detach(), expected)
    assert torch.allclose(recency.grad, back)  # type: ignore[arg-type]


def test_attention_starts_as_the_mean() -> None:
    """Before training both poolings agree."""
    torch.manual_seed(0)
    item = IdTower(10, 6)
    mean, attention = HistoryTower(item, csr(HISTORY)), HistoryTower(item, csr(HISTORY), pooling="attention")
    assert torch.allclose(mean(torch.tensor([0, 3])), attention(torch.tensor([0, 3])), atol=1e-6)


def test_histories_that_are_all_empty() -> None:
    """If all histories are empty the learned vector is used, with gradient, and new users with items still work."""
    tower = HistoryTower(IdTower(10, 6), csr([[], []]))
    tower(torch.tensor([0, 1])).sum().backward()
    assert tower.empty.grad is not None
    assert torch.equal(tower.empty.grad, torch.full((6,), 2.0))
    assert torch.allclose(tower.encode_history(torch.tensor([[3, -1]])), tower.item(torch.tensor([3])))


def test_a_tower_remembers_other_histories() -> None:
    """After remember() a query is made of the new items."""
    tower = a_history_tower()
    tower.remember(csr([[1], [8, 9], [], [], []]))
    torch.testing.assert_close(tower(torch.tensor(1)), pooled_by_loop(tower, [8, 9]))
    assert not [name for name in tower.state_dict() if name in ("start", "items", "time")]


def test_retriever_passes_the_context_to_a_tower_that_reads_it() -> None:
    """encode_queries(ids, context) restricts a HistoryTower; a tower that reads no history ignores it."""
    tower = a_history_tower()
    model = Retriever(tower, tower.item, score="dot")
    ids, places = places_of([(0, 2), (3, 4)])
    context = Before(places)
    assert torch.allclose(model.encode_queries(ids, context), tower(ids, context))
    assert not torch.allclose(model.encode_queries(ids, context), model.encode_queries(ids))
    assert model.past_readers() == [tower]
    plain = Retriever(IdTower(5, 6), tower.item)
    assert torch.equal(plain.encode_queries(ids, context), plain.encode_queries(ids))
    assert plain.past_readers() == []
    with pytest.raises(ValueError, match="IdTower cannot encode a history"):
        plain.encode_histories(torch.tensor([[1]]))


class Doubled(nn.Module):
    """A tower around another that knows nothing of contexts."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower, self.n = tower, 5

    def forward(self, ids: Tensor) -> Tensor:
        return 2.0 * self.tower(ids)  # type: ignore[no-any-return]


@pytest.mark.parametrize("around", [Doubled, lambda tower: Sum(Doubled(tower), tower)])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_context_reaches_histories_inside_towers_of_ones_own(
    pooling: str, around: Callable[[nn.Module], nn.Module]
) -> None:
    """A module around a tower of histories, which passes no context on, reads what the tower alone would read; outside
    a step everything that is known."""
    tower = a_history_tower(pooling)
    whole = around(tower)
    model, factor = Retriever(whole, tower.item, score="dot"), 2.0 if isinstance(whole, Doubled) else 3.0
    ids, places = places_of(PLACES)
    given = Given(places[:2], torch.tensor([0, 1]), torch.tensor([1, 0, 2]), torch.arange(3))
    contexts: list[tuple[Tensor, Context]] = [
        (ids, Before(places)),
        (torch.tensor([q for q, _ in windows()[1]]), windows()[0]),
    ]
    if pooling != "attention":
        contexts.append((torch.arange(3), given))
    for rows, context in contexts:
        want = factor * tower(rows, context)
        torch.testing.assert_close(model.encode_queries(rows, context), want)
        with torch.no_grad():
            torch.testing.assert_close(model.encode_queries(rows, context), want)
    torch.testing.assert_close(model.encode_queries(ids), factor * tower(ids))
    with pytest.raises(IndexError):
        model.encode_queries(torch.tensor([99]), Before(places[:1]))
    torch.testing.assert_close(model.encode_queries(ids), factor * tower(ids))


SEQUENCES = ["sasrec", "ligr", "hstu"]


@pytest.mark.parametrize("kind", SEQUENCES)
def test_a_sequence_reads_its_last_items_in_order(kind: str) -> None:
    """Known queries equal their histories; order matters; what lies before the last items does not."""
    tower = a_sequence_tower(kind)
    tower.time = None  # a history of a request has no times
    known = tower(torch.arange(5))
    torch.testing.assert_close(known[3], tower.encode_history(torch.tensor([[8, 9, 2]]))[0])
    torch.testing.assert_close(known[3], tower.encode_history(torch.tensor([[5, -1, 8, 9, -1, 2]]))[0])
    torch.testing.assert_close(known[2], tower.encode_history(torch.tensor([[-1, 2, -1]]))[0])
    assert not torch.allclose(known[3], tower.encode_history(torch.tensor([[9, 8, 2]]))[0], atol=1e-5, rtol=0.0)
    assert torch.equal(known[1], tower.empty)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_windows_equal_sequences_cut_at_every_place(kind: str) -> None:
    """Position by position, a window gives the vectors that the history before each target would give by itself.

    Positions count back from the newest input, so a sequence that ends earlier is shifted in the comparison.
    """
    tower = a_sequence_tower(kind, last=6)
    context, pairs = windows()
    got = tower(torch.tensor([q for q, _ in pairs]), context)
    position = None if tower.position is None else tower.position.detach().clone()
    for row, (query, place) in enumerate(pairs):
        ids, places = places_of([(query, place)])
        if position is not None and tower.position is not None:
            newest = len(HISTORY[query]) - 1  # inputs of the query, of which `place` are read
            with torch.no_grad():
                tower.position.copy_(position.roll(newest - place, 0))
        torch.testing.assert_close(got[row], tower(ids, Before(places))[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_the_future_changes_nothing(kind: str) -> None:
    """Vectors of earlier positions stay bitwise equal when a later item of the window changes."""
    tower = a_sequence_tower(kind, last=6)
    context, pairs = windows()
    ids = torch.tensor([q for q, _ in pairs])
    before = tower(ids, context)
    tower.items = tower.items.clone()
    changed = int(context.places[0, 4])  # the fifth input of query 3
    tower.items[changed] = (tower.items[changed] + 1) % 10
    after = tower(ids, context)
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[6:], after[6:])  # of another query in the same window
    assert not torch.equal(before[4], after[4])
