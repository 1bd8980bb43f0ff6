"""An index returns the best eligible items, as by brute force, with every filter and while items change."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.serving.index import Effort, Index, faiss_backends
from sparring.serving.index.faiss_backends import GRAPHS
from support.cagra import pretend_gpu

N, D, B = 3000, 12, 20
APPROXIMATE = ("hnsw", "cagra", "ivf", "ivfsq", "ivfpq")
rng = np.random.default_rng(0)
CENTRES = rng.standard_normal((60, D))
VECTORS = (CENTRES[rng.integers(0, 60, N)] + 0.5 * rng.standard_normal((N, D))).astype(np.float32)
QUERIES = (CENTRES[rng.integers(0, 60, B)] + 0.5 * rng.standard_normal((B, D))).astype(np.float32)
IDS = np.sort(rng.choice(100_000, N, replace=False))  # not 0..N-1, so that a row mistaken for an id is detected


@pytest.fixture(scope="module")
def built() -> dict[str, Index]:
    """One index of each kind over the same vectors with little effort, where filters must hold too."""
    pytest.importorskip("faiss")
    quantizer = faiss_backends.cells(VECTORS, seed=0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_gpu(monkeypatch)
        made = {name: faiss_backends.make(name, VECTORS, quantizer, code=6) for name in APPROXIMATE}
    efforts = {
        "hnsw": Effort(4),
        "cagra": Effort(4),
        "ivf": Effort(2),
        "ivfsq": Effort(2, 1.5),
        "ivfpq": Effort(2, 3.0),
    }
    return {name: Index(VECTORS, IDS, name, made[name], efforts[name]) for name in APPROXIMATE}


@pytest.fixture(params=["exact", *APPROXIMATE])
def index(request: pytest.FixtureRequest) -> Index:
    """A fresh index of every kind; the FAISS index underneath is shared and never changed."""
    if request.param == "exact":
        return Index(VECTORS, IDS)
    base: Index = request.getfixturevalue("built")[request.param]
    return Index(base.vectors, base.ids, base.kind, base.ann, base.effort)


def brute(q: np.ndarray, items: dict[int, np.ndarray], k: int, hidden: set[int]) -> list[int]:
    """Ids of the k best of the items, by the definition."""
    left = [item for item in items if item not in hidden]
    return sorted(left, key=lambda item: -float(q.astype(np.float64) @ items[item]))[:k]


def catalogue() -> dict[int, np.ndarray]:
    return {int(item): vector.astype(np.float64) for item, vector in zip(IDS, VECTORS, strict=True)}


def lists(sizes: list[int]) -> list[np.ndarray]:
    """The best items of each query, which an index would return first, and some unknown ids."""
    order = np.argsort(-(QUERIES @ VECTORS.T), axis=1)
    return [np.concatenate([IDS[order[b, :size]], [100_001]]) for b, size in zip(range(B), sizes, strict=True)]


@pytest.mark.parametrize("batch", [1, 7, 8, 20])
def test_equal_scores_are_in_the_order_of_ids(batch: int) -> None:
    """Exact search lists items with equal scores by ascending id, for few queries as for many."""
    vectors = np.ones((2000, 4), np.float32)
    vectors[100:110] = 2.0
    found = Index(vectors, np.arange(2000)).search(np.ones((batch, 4), np.float32), 13)[1]
    assert found.tolist() == [[*range(100, 110), 0, 1, 2]] * batch


@pytest.mark.parametrize("batch", [1, 7, 8, B])
def test_exact_is_brute_force(batch: int) -> None:
    """Ids and scores equal sorting all inner products, for any number of queries."""
    scores, ids = Index(VECTORS, IDS).search(QUERIES[:batch], 25)
    for b in range(batch):
        assert ids[b].tolist() == brute(QUERIES[b], catalogue(), 25, set())
        expected = [float(QUERIES[b].astype(np.float64) @ catalogue()[item]) for item in ids[b].tolist()]
        assert scores[b] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", APPROXIMATE)
def test_with_full_effort_every_kind_is_nearly_exact(built: dict[str, Index], kind: str) -> None:
    """With full effort, and rescoring for codes, the lists equal brute force, all of them for ivf."""
    base = built[kind]
    found = Index(
        VECTORS,
        IDS,
        kind,
        base.ann,
        Effort(N if kind in GRAPHS else faiss_backends.n_cells(N), 1.0 if kind in (*GRAPHS, "ivf") else 5.0),
    )
    _, ids = found.search(QUERIES, 20)
    shares = [len(set(ids[b].tolist()) & set(brute(QUERIES[b], catalogue(), 20, set()))) / 20 for b in range(B)]
    assert np.mean(shares) >= (1.0 if kind == "ivf" else 0.97)


@pytest.mark.parametrize("batch", [1, B])
def test_no_filter_lets_a_hidden_item_through(index: Index, batch: int) -> None:
    """Seen and denied items, even a query's best, are never returned, and the lists are full."""
    seen = lists([0, 1, 2, 5, 40, 300, 2990] + [10] * (B - 7))[-batch:]
    denied = IDS[::3]
    scores, ids = index.search(QUERIES[-batch:], 15, exclude=seen, deny=denied)
    for b in range(batch):
        hidden = set(seen[b].tolist()) | set(denied.tolist())
        left = set(IDS.tolist()) - hidden
        got = [item for item in ids[b].tolist() if item >= 0]
        assert set(got) <= left
        assert len(got) == len(set(got)) == min(15, len(left))
        assert (ids[b][len(got) :] == -1).all()
        assert np.isneginf(scores[b][len(got) :]).all()
        assert (np.diff(scores[b][: len(got)]) <= 0).all()


def test_exact_filters_are_brute_force() -> None:
    """With exclude, deny and allow together the list has the best remaining items."""
    seen, allowed, denied = lists([7] * B), IDS[: N // 2], IDS[::5]
    _, ids = Index(VECTORS, IDS).search(QUERIES, 10, exclude=seen, allow=allowed, deny=denied)
    for b in range(B):
        hidden = set(seen[b].tolist()) | set(denied.tolist()) | set(IDS[N // 2 :].tolist())
        assert ids[b].tolist() == brute(QUERIES[b], catalogue(), 10, hidden)


def test_a_short_allow_list_is_ranked_exactly(index: Index) -> None:
    """Exactly the allowed items are returned in order, however far they are from the query."""
    allowed = np.concatenate([IDS[np.argsort(QUERIES[0] @ VECTORS.T)[:12]], [100_001, 100_002]])
    _, ids = index.search(QUERIES[:1], 20, allow=allowed)
    expected = brute(QUERIES[0], catalogue(), 12, set(IDS.tolist()) - set(allowed.tolist()))
    assert ids[0].tolist() == expected + [-1] * 8


def test_a_long_allow_list_goes_through_the_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the list is too long for exact ranking, FAISS selects: only allowed items, and full lists."""
    monkeypatch.setattr("sparring.serving.index.search._SMALL", 10)
    allowed = IDS[1::2]
    _, ids = index.search(QUERIES, 15, exclude=lists([30] * B), allow=allowed)
    for b in range(B):
        assert set(ids[b].tolist()) <= set(allowed.tolist()) - set(lists([30] * B)[b].tolist())
        assert (ids[b] >= 0).all()


def test_what_a_query_has_seen_may_come_as_positives(index: Index) -> None:
    """Row i of Positives is excluded for query i, as with lists."""
    seen = lists(list(range(B)))
    start = torch.tensor([0, *np.cumsum([len(each) for each in seen]).tolist()])
    packed = Positives(start, torch.from_numpy(np.concatenate(seen)))
    assert (index.search(QUERIES, 10, exclude=seen)[1] == index.search(QUERIES, 10, exclude=packed)[1]).all()


def test_items_come_and_go_at_once(index: Index) -> None:
    """An added best item comes first, a replaced one is ranked by its new vector, a removed one never returns."""
    best = 10 * QUERIES[0] / np.linalg.norm(QUERIES[0])
    index.add([100_500], best[None])
    assert index.search(QUERIES[:1], 5)[1][0, 0] == 100_500
    assert len(index) == N + 1
    first = int(Index(VECTORS, IDS).search(QUERIES[:1], 1)[1][0, 0])
    index.add([first], -best[None])
    assert first not in index.search(QUERIES[:1], 50)[1]
    assert len(index) == N + 1
    assert index.vectors_of([first, 100_500]).tolist() == np.stack([-best, best]).astype(np.float32).tolist()
    assert index.remove([100_500, first, 100_999]) == 2
    assert len(index) == N - 1
    assert not {100_500, first} & set(index.search(QUERIES[:1], 50)[1][0].tolist())
    with pytest.raises(UserError, match=str(first)):
        index.vectors_of([first])
    index.add([first], best[None])
    assert index.search(QUERIES[:1], 5)[1][0, 0] == first
    assert index.search(QUERIES[:1], 5, deny=[first])[1][0, 0] != first
    assert index.search(QUERIES[:1], 5, exclude=[[first]])[1][0, 0] != first
    assert index.search(QUERIES[:1], 5, allow=IDS[first != IDS])[1][0, 0] != first


def test_ids_that_no_item_has_are_ignored(index: Index) -> None:
    """Filters ignore unknown ids, with and without gaps between ids."""
    outside = [-7, -1, 10**6, 2**62]
    for found in (index, Index(VECTORS, np.arange(N))):
        plain = found.search(QUERIES, 5)[1]
        assert (found.search(QUERIES, 5, exclude=[outside] * B, deny=outside)[1] == plain).all()
        assert (found.search(QUERIES, 5, allow=outside)[1] == -1).all()
        assert found.remove(outside) == 0


def test_many_changes_are_brute_force() -> None:
    """After 400 random additions, replacements and removals, lists match a catalogue kept in a dictionary."""
    random, index, kept = np.random.default_rng(3), Index(VECTORS, IDS), catalogue()
    for _ in range(20):
        ids = random.choice(100_000, 15, replace=False)
        ids[:5] = random.choice(IDS, 5, replace=False)
        ids = np.unique(ids)
        vectors = random.standard_normal((len(ids), D)).astype(np.float32)
        index.add(ids, vectors)
        kept |= dict(zip(ids.tolist(), vectors.astype(np.float64), strict=True))
        gone = random.choice(list(kept), 10, replace=False)
        assert index.remove(gone) == 10
        for item in gone.tolist():
            del kept[item]
    assert len(index) == len(kept)
    seen = lists([9] * B)
    _, ids = index.search(QUERIES, 20, exclude=seen)
    for b in range(B):
        assert ids[b].tolist() == brute(QUERIES[b], kept, 20, set(seen[b].tolist()))


def test_when_most_is_gone_the_rest_is_still_found(index: Index) -> None:
    """With all but ten items removed, the ten are returned in order."""
    index.remove(IDS[10:])
    _, ids = index.search(QUERIES[:2], 12)
    for b in range(2):
        assert ids[b].tolist() == [*brute(QUERIES[b], catalogue(), 10, set(IDS[10:].tolist())), -1, -1]


def test_searches_and_changes_in_many_threads(built: dict[str, Index]) -> None:
    """While one item is added and removed repeatedly, searches see it fully or not at all, and never fail."""
    base = built["ivf"]
    index = Index(VECTORS, IDS, "ivf", base.ann, Effort(8))
    best, wrong, stop = 10 * QUERIES[:1], [], threading.Event()

    def change() -> None:
        while not stop.is_set():
            index.add([100_500], best)
            index.remove([100_500])

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(200):
            scores, ids = index.search(QUERIES[:1], 5)
            row = ids[0].tolist()
            if len(set(row)) < 5 or 100_500 in row[1:] or (row[0] == 100_500) != (scores[0, 0] > 5 * scores[0, 1]):
                wrong.append(row)
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_vectors_that_do_not_fit_are_refused(index: Index) -> None:
    """A wrong dimension, NaN, k = 0, repeated or negative ids and a missing list raise one-line errors."""
    for call, words in (
        (lambda: index.search(QUERIES[:, :5], 3), "12"),
        (lambda: index.search(np.full((1, D), np.nan), 3), "NaN"),
        (lambda: index.search(QUERIES, 0), "k"),
        (lambda: index.add([1, 1], QUERIES[:2]), "distinct"),
        (lambda: index.add([-1], QUERIES[:1]), "distinct"),
        (lambda: index.add([1, 2], QUERIES[:1]), "vector"),
    ):
        with pytest.raises(UserError, match=words):
            call()
    with pytest.raises(ValueError, match="lists"):
        index.search(QUERIES, 5, exclude=[[1], [2], [3]])
    with pytest.raises(ValueError, match="ascend"):
        Index(VECTORS[:2], np.array([5, 5]))


def test_sizes_are_known_before_building(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimated memory is within 5 % and 10 kB of the actual size."""
    faiss = pytest.importorskip("faiss")
    pretend_gpu(monkeypatch)
    quantizer = faiss_backends.cells(VECTORS, seed=0)
    for name in APPROXIMATE:
        taken = len(faiss.serialize_index(faiss_backends.make(name, VECTORS, quantizer, code=6)))
        assert faiss_backends.estimated_bytes(name, N, D, 6) == pytest.approx(taken, rel=0.05, abs=10_000)


def test_a_width_that_codes_do_not_divide() -> None:
    """13 dimensions and codes of 7 bytes: padding with zeros changes no inner product."""
    pytest.importorskip("faiss")
    vectors = np.concatenate([VECTORS, VECTORS[:, :1]], 1)
    made = faiss_backends.make("ivfpq", vectors, faiss_backends.cells(vectors, seed=0), code=7)
    _, ids = Index(vectors, IDS, "ivfpq", made, Effort(faiss_backends.n_cells(N), 5.0)).search(vectors[:B], 10)
    truth = np.argsort(-(vectors[:B] @ vectors.T), axis=1)[:, :10]
    assert np.mean([len(set(ids[b].tolist()) & set(IDS[truth[b]].tolist())) / 10 for b in range(B)]) > 0.95


def test_without_faiss_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact search needs no extra; an approximate index names the extra to install."""
    monkeypatch.setitem(sys.modules, "faiss", None)
    Index(VECTORS, IDS).search(QUERIES, 3)
    with pytest.raises(UserError, match=r"pip install \"sparring\[serve\]\""):
        faiss_backends.make("hnsw", VECTORS)


@pytest.mark.parametrize("kind", [*GRAPHS, "ivf"])
@pytest.mark.parametrize("sizes", [[0] * B, [0, 1, 14, 32] * 5, [15] * B])
def test_few_queries_that_hide_a_few_items_find_what_any_search_finds(
    built: dict[str, Index], kind: str, sizes: list[int]
) -> None:
    """The path for few queries gives the lists of the general one, which Positives take, before and after changes.
    With full effort they equal brute force."""
    order = np.argsort(-(QUERIES @ VECTORS.T), axis=1)
    seen = [np.concatenate([order[b, :size], [N + 7, N + 7]]) if size else order[b, :0] for b, size in enumerate(sizes)]
    start = np.concatenate([[0], np.cumsum([len(each) for each in seen])])
    packed = Positives(torch.from_numpy(start), torch.from_numpy(np.concatenate(seen)))
    for effort in (Effort(2), Effort(N if kind in GRAPHS else faiss_backends.n_cells(N))):
        found = Index(VECTORS, np.arange(N), kind, built[kind].ann, effort)
        items = {item: VECTORS[item].astype(np.float64) for item in range(N)}
        for _ in range(2):
            short, long = found.search(QUERIES, 15, exclude=seen), found.search(QUERIES, 15, exclude=packed)
            assert (short[1] == long[1]).all()
            assert short[0] == pytest.approx(long[0], abs=1e-5)
            if kind == "ivf" and effort.width > 2:
                assert short[1].tolist() == [brute(QUERIES[b], items, 15, set(seen[b].tolist())) for b in range(B)]
            gone = np.unique(order[:, 1:4])
            found.remove(gone)
            found.add([N, N + 7], 3 * QUERIES[:2])
            items = {item: vector for item, vector in items.items() if item not in gone}
            items |= {N: 3 * QUERIES[0].astype(np.float64), N + 7: 3 * QUERIES[1].astype(np.float64)}


@pytest.mark.parametrize(("ids", "word"), [([0, 1], "ids"), ([0, 2, 1], "ascend"), ([0, 1, 1], "distinct")])
def test_ids_and_vectors_must_agree(ids: list[int], word: str) -> None:
    """An index needs one ascending id per vector."""
    with pytest.raises(ValueError, match=word):
        Index(VECTORS[:3], np.array(ids))


def test_an_unknown_kind_is_refused() -> None:
    """The error names the kinds."""
    pytest.importorskip("faiss")
    with pytest.raises(UserError, match="hnsw"):
        faiss_backends.make("hsnw", VECTORS, None)


def test_codes_are_learned_from_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more vectors than the codes need, a sample teaches them, and the index still finds most neighbours."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(faiss_backends, "_CODES", 4)  # 1,024 of 3,000 vectors
    index = Index(VECTORS, IDS, "ivfsq", faiss_backends.make("ivfsq", VECTORS, faiss_backends.cells(VECTORS, 0)))
    index = replace(index, effort=Effort(60, 4.0))
    truth = Index(VECTORS, IDS).search(QUERIES, 10)[1]
    found = index.search(QUERIES, 10)[1]
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, truth, strict=True)]) > 0.9


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_few_queries_are_refined_without_their_hidden_items(batch: int) -> None:
    """A small batch over all cells lists the best items by exact score, without hidden and removed ones."""
    pytest.importorskip("faiss")
    rng, k = np.random.default_rng(6), 10
    vectors, q = rng.standard_normal((3000, 16), np.float32), rng.standard_normal((batch, 16), np.float32)
    made = faiss_backends.make("ivfsq", vectors, faiss_backends.cells(vectors, 0))
    index = Index(vectors, np.arange(3000), "ivfsq", made, Effort(made.nlist, 4.0))
    exact = q.astype(np.float64) @ vectors.T.astype(np.float64)
    best = np.argsort(-exact, axis=1)
    hidden = [best[row, : row % 33 : 2] for row in range(batch)]  # at most 16 of them, as a service has
    index.remove(best[0, 1:2])
    scores, found = index.search(q, k, hidden)
    for row in range(batch):
        left = [item for item in best[row].tolist() if item not in {*hidden[row].tolist(), int(best[0, 1])}][:k]
        assert found[row].tolist() == left
        assert np.array_equal(scores[row], exact[row, left].astype(np.float32))
    assert index._search_few(q, k, hidden, index._changes.gone) is not None
