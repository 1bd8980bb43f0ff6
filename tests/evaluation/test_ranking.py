"""Full ranking and its metrics equal brute force on small worlds."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparring.core import topk
from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.evaluation.ranking import Misses, evaluate, top_k

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def positives(sets: list[set[int]]) -> Positives:
    start = np.concatenate([[0], np.cumsum([len(s) for s in sets])])
    return Positives(torch.tensor(start), torch.tensor([i for s in sets for i in sorted(s)], dtype=torch.int64))


def brute(q: Tensor, items: Tensor, k: int, seen: list[set[int]]) -> list[list[int]]:
    """Sort all unseen items by (score descending, id ascending). Scores are small integers, so they are exact."""
    lists = []
    for row, hidden in zip((q.double() @ items.double().T).tolist(), seen, strict=True):
        ordered = sorted((-score, i) for i, score in enumerate(row) if i not in hidden)
        lists.append(([i for _, i in ordered] + [-1] * k)[:k])
    return lists


def whole_numbers(shape: tuple[int, int], seed: int, high: int = 3) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-high, high + 1, shape)).float()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "k"), [(5, 7), (32, 32), (33, 1), (700, 5), (2500, 20), (2500, 90)])
def test_top_k_equals_sorting_everything(n: int, k: int, device: str) -> None:
    """Scores and ids equal a full sort without the seen items, with ties broken by id, even where most scores are
    equal."""
    rng = np.random.default_rng(n + k)
    q, items = whole_numbers((70, 3), 1), whole_numbers((n, 3), 2)
    seen = [set(rng.permutation(n)[: rng.integers(0, min(n, 40) + 1)].tolist()) for _ in range(70)]
    expected = torch.tensor(brute(q, items, k, seen))
    scores, ids = top_k(q.to(device), items.to(device), k, positives(seen), torch.arange(70))
    assert torch.equal(ids.cpu(), expected)
    full = (q @ items.T).gather(1, expected.clamp(min=0)).masked_fill(expected < 0, -math.inf)
    assert torch.equal(scores.cpu(), full)


@settings(max_examples=40)
@given(st.integers(1, 200), st.integers(1, 60), st.integers(1, 8), st.integers(0, 2), st.integers(0, 10**6))
def test_top_k_on_any_small_world(n: int, k: int, b: int, high: int, seed: int) -> None:
    """The lists equal a full sort for every catalogue size and every share of tied scores."""
    rng = np.random.default_rng(seed)
    q, items = whole_numbers((b, 2), seed, high), whole_numbers((n, 2), seed + 1, high)
    seen = [set(rng.permutation(n)[: rng.integers(0, n + 1)].tolist()) for _ in range(b)]
    assert top_k(q, items, k, positives(seen), torch.arange(b))[1].tolist() == brute(q, items, k, seen)


def test_all_scores_equal_gives_the_smallest_ids() -> None:
    """If all items have the same score, the list is the k smallest unseen ids in order, for every block size."""
    seen = [{0, 2} if u % 2 else {5} for u in range(150)]
    expected = [[1, 3, 4, 5] if u % 2 else [0, 1, 2, 3] for u in range(150)]
    for block in (1, 64, 1000):
        assert (
            top_k(torch.ones(150, 4), torch.ones(3000, 4), 4, positives(seen), torch.arange(150), block)[1].tolist()
            == expected
        )


@pytest.mark.parametrize("device", DEVICES)
def test_lists_do_not_depend_on_block_batch_or_threads(device: str) -> None:
    """Scores are bitwise identical for every block size, for single queries, and on one or two threads."""
    generator = torch.Generator().manual_seed(0)
    q, items = (
        torch.randn(300, 24, generator=generator).to(device),
        torch.randn(3001, 24, generator=generator).to(device),
    )
    items[1::2] = items[:-1:2]  # equal vectors give ties across the matrix product's tiles
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        scores, ids = top_k(q, items, 15)
        for count, block in [(1, 1), (1, 100), (1, 5000), (2, None), (2, 128), (2, 5000)]:
            torch.set_num_threads(count)
            other = top_k(q, items, 15, block=block)
            assert torch.equal(other[0], scores)
            assert torch.equal(other[1], ids)
            assert torch.get_num_threads() == count
        for row in (0, 77, 299):
            alone = top_k(q[row : row + 1], items, 15)
            assert torch.equal(alone[0][0], scores[row])
            assert torch.equal(alone[1][0], ids[row])
    finally:
        torch.set_num_threads(threads)
    assert (ids[:, 0] % 2 == 0).all()
    assert (ids[:, 1] == ids[:, 0] + 1).all()


def test_a_catalogue_in_parts_gives_the_same_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue scored in parts gives the same lists, including ties across parts."""
    q, items = whole_numbers((90, 3), 3), whole_numbers((1000, 3), 4)
    seen = [set(range(u, 1000, 7)) for u in range(90)]
    expected = brute(q, items, 12, seen)
    for columns in (32, 96, 992, 1024):
        monkeypatch.setattr(topk, "_COLUMNS", columns)
        assert top_k(q, items, 12, positives(seen), torch.arange(90))[1].tolist() == expected


def test_scratch_memory_is_bounded_by_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor exceeds block x N scores, regardless of the number of queries."""
    made: list[int] = []
    plain = topk._rank_block

    def spy(
        q: Tensor, items: Tensor, k: int, hidden: tuple[Tensor, Tensor] | None, scratch: Tensor, slack: Tensor
    ) -> tuple[Tensor, Tensor]:
        made.append(scratch.numel())
        return plain(q, items, k, hidden, scratch, slack)

    monkeypatch.setattr(topk, "_rank_block", spy)
    top_k(torch.randn(1000, 4), torch.randn(640, 4), 5, block=128)
    assert len(made) == 8
    assert max(made) == 128 * 640


def test_relaxed_matmul_precision_does_not_reach_the_ranking() -> None:
    """Ranking uses full float32 even where training allows bfloat16 or TF32 products, and it restores the setting."""
    generator = torch.Generator().manual_seed(1)
    q, items = torch.randn(64, 32, generator=generator), torch.randn(999, 32, generator=generator)
    scores, ids = top_k(q, items, 10)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            relaxed = top_k(q.requires_grad_(), items, 10)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(relaxed[0], scores)
    assert torch.equal(relaxed[1], ids)


def test_diverged_vectors_are_refused() -> None:
    """NaN vectors raise a one-line error."""
    with pytest.raises(UserError, match="diverged"):
        top_k(torch.tensor([[float("nan"), 1.0]]), torch.ones(4, 2), 2)


@dataclass(frozen=True)
class Tests:
    __test__ = False
    queries: np.ndarray
    items: np.ndarray
    n_queries: int


class Vectors(nn.Module):
    """A model with given vectors; its dropout changes every score unless evaluation turns it off."""

    def __init__(self, q: Tensor, items: Tensor) -> None:
        super().__init__()
        self.q, self.items, self.drop = nn.Parameter(q), items, nn.Dropout(0.5)

    def encode_queries(self, ids: Tensor) -> Tensor:
        out: Tensor = self.drop(self.q[ids])
        return out

    def item_vectors(self) -> Tensor:
        return self.items


USERS, ITEMS = 300, 45  # more test queries than eight bits can count


def small_world() -> tuple[Vectors, Tests, list[set[int]], list[set[int]], list[list[int]]]:
    """Build a model, test pairs (some queries have none, one pair is repeated), seen sets, truth and brute-force
    lists."""
    rng = np.random.default_rng(5)
    q, items = whole_numbers((USERS, 4), 6), whole_numbers((ITEMS, 4), 7)
    weight = 1 / np.arange(1, ITEMS + 1)
    taken = [rng.choice(ITEMS, 14, replace=False, p=weight / weight.sum()).tolist() for _ in range(USERS)]
    seen = [set(t[:8]) for t in taken]
    truth = [set(t[8 : 8 + u % 7]) for u, t in enumerate(taken)]
    pairs = [(u, i) for u, t in enumerate(truth) for i in t]
    pairs = [pairs[j] for j in rng.permutation(len(pairs))] + pairs[:1]
    columns = np.array(pairs, dtype=np.int32)
    return Vectors(q, items), Tests(columns[:, 0], columns[:, 1], USERS), seen, truth, brute(q, items, ITEMS, seen)


def naive(name: str, ranked: list[int], relevant: set[int], k: int) -> float:
    h = [1 if i in relevant else 0 for i in ranked[:k]]
    n = len(relevant)
    if name == "mrr":
        return next((1 / r for r, x in enumerate(h, 1) if x), 0.0)
    if name == "map":
        return sum(sum(h[:r]) / r for r in range(1, k + 1) if h[r - 1]) / min(k, n)
    if name == "ndcg":
        return sum(x / math.log2(r + 1) for r, x in enumerate(h, 1)) / sum(
            1 / math.log2(r + 1) for r in range(1, min(k, n) + 1)
        )
    return {"recall": sum(h) / n, "precision": sum(h) / k, "hit": float(any(h))}[name]


def test_evaluation_equals_brute_force() -> None:
    """Every metric at every cutoff, per query and averaged over queries with a test item, equals a loop over full
    sorts."""
    model, test, seen, truth, lists = small_world()
    model.train()
    done: list[tuple[int, int]] = []
    result = evaluate(model, test, positives(seen), k=(10, 3, 25), progress=lambda a, b: done.append((a, b)))
    tested = [u for u in range(USERS) if truth[u]]
    assert result.query_ids.tolist() == tested
    assert done == [(len(tested), len(tested))]
    assert model.training
    assert model.drop.training
    for k in (3, 10, 25):
        for name in ("recall", "precision", "hit", "mrr", "map", "ndcg"):
            expected = [naive(name, lists[u], truth[u], k) for u in tested]
            np.testing.assert_allclose(result.per_query[f"{name}@{k}"], expected, rtol=0, atol=1e-12)
            assert result.metrics[f"{name}@{k}"] == pytest.approx(sum(expected) / len(tested), abs=1e-12)
        shown = {i for u in tested for i in lists[u][:k]}
        assert result.metrics[f"coverage@{k}"] == pytest.approx(len(shown) / ITEMS, abs=1e-12)


def test_popularity_and_strata_equal_brute_force() -> None:
    """popularity@k and the head, mid and tail metrics equal their definitions, with counts from the seen items."""
    model, test, seen, truth, lists = small_world()
    result = evaluate(model, test, positives(seen), k=(5, 10))
    counts = [sum(i in s for s in seen) for i in range(ITEMS)]
    total, used, stratum = sum(counts), 0, [""] * ITEMS
    for i in sorted(range(ITEMS), key=lambda i: (-counts[i], i)):
        stratum[i] = (
            "tail" if counts[i] == 0 else "head" if used < total / 3 else "mid" if used < 2 * total / 3 else "tail"
        )
        used += counts[i]
    tested = [u for u in range(USERS) if truth[u]]
    percentile = [(sum(c for c in counts if c < x) + sum(c for c in counts if c == x) / 2) / total for x in counts]
    for k in (5, 10):
        expected = sum(sum(percentile[i] for i in lists[u][:k]) / k for u in tested) / len(tested)
        assert result.metrics[f"popularity@{k}"] == pytest.approx(expected, abs=1e-12)
        for name in ("head", "mid", "tail"):
            inside = {i for i in range(ITEMS) if stratum[i] == name}
            have = [u for u in tested if truth[u] & inside]
            got = result.strata[name]
            assert inside
            assert have
            assert (got["items"], got["queries"]) == (len(inside), len(have))
            for metric in ("recall", "precision", "hit", "mrr", "map", "ndcg"):
                mean = sum(naive(metric, lists[u], truth[u] & inside, k) for u in have) / len(have)
                assert got[f"{metric}@{k}"] == pytest.approx(mean, abs=1e-12)
            places = [i for u in tested for i in lists[u][:k]]
            assert got[f"coverage@{k}"] == pytest.approx(len(inside & set(places)) / len(inside), abs=1e-12)
            assert got[f"share@{k}"] == pytest.approx(sum(i in inside for i in places) / len(places), abs=1e-12)


def test_dialects_side_by_side_in_one_pass() -> None:
    """The release's ndcg averages over all queries of the data; the same pass also computes the standard one."""
    model, test, seen, truth, lists = small_world()
    result = evaluate(
        model,
        test,
        positives(seen),
        k=(10,),
        metrics=("recall", "ndcg", "ndcg_xir_release", "recall_xir_release", "ndcg_rectools"),
    )
    assert list(result.metrics) == [
        "recall@10",
        "ndcg@10",
        "ndcg_xir_release@10",
        "recall_xir_release@10",
        "ndcg_rectools@10",
    ]
    tested = [u for u in range(USERS) if truth[u]]
    assert len(tested) < USERS
    release = 0.0
    for u in tested:
        h = [i in truth[u] for i in lists[u][:10]]
        release += (h[0] + sum(h[1:]) / math.log2(3)) / sum(
            1 / math.log2(r + 1) for r in range(1, min(10, len(truth[u])) + 1)
        )
    assert result.metrics["ndcg_xir_release@10"] == pytest.approx(release / USERS, abs=1e-12)
    assert result.metrics["recall_xir_release@10"] == pytest.approx(
        result.metrics["recall@10"] * len(tested) / USERS, abs=1e-12
    )
    assert "ndcg_xir_release@10" not in result.strata["head"]
    assert "ndcg_rectools@10" in result.strata["head"]


def test_chunks_of_queries_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranking seven queries at a time gives the same values as ranking all at once."""
    model, test, seen, _, _ = small_world()
    whole = evaluate(model, test, positives(seen), k=(5,))
    monkeypatch.setattr(sys.modules[evaluate.__module__], "_CHUNK", 7)
    parts = evaluate(model, test, positives(seen), k=(5,))
    assert parts.metrics == whole.metrics
    for name, values in whole.strata.items():
        assert parts.strata[name] == pytest.approx(values, abs=1e-12)


def test_without_seen_items_or_counts_popularity_is_left_out() -> None:
    """Without seen items or counts, popularity and strata are omitted; explicit counts bring them back."""
    model, test, _, truth, _ = small_world()
    result = evaluate(model, test, None, k=(10,))
    assert "popularity@10" not in result.metrics
    assert result.strata == {}
    lists = brute(model.q.detach(), model.items, 10, [set()] * USERS)
    tested = [u for u in range(USERS) if truth[u]]
    assert result.metrics["recall@10"] == pytest.approx(
        sum(naive("recall", lists[u], truth[u], 10) for u in tested) / len(tested), abs=1e-12
    )
    assert set(evaluate(model, test, None, k=(10,), counts=np.ones(ITEMS, dtype=np.int64)).strata) == {
        "head",
        "mid",
        "tail",
    }


def test_table_and_json_hold_the_means() -> None:
    """The printed table has a row per metric and stratum and a column per cutoff; the JSON holds the same means."""
    model, test, seen, _, _ = small_world()
    result = evaluate(model, test, positives(seen), k=(5, 10), metrics=("recall", "coverage"))
    rows = result.table()
    assert rows[0] == ("metric", "@5", "@10")
    assert all(len(row) == 3 for row in rows)
    assert rows[1] == ("recall", f"{result.metrics['recall@5']:.4f}", f"{result.metrics['recall@10']:.4f}")
    assert [row[0] for row in rows[3:6]] == ["recall (head)", "coverage (head)", "share (head)"]
    assert len(str(result).splitlines()) == len(rows)
    assert json.loads(result.to_json())["metrics"] == result.metrics


@pytest.mark.parametrize(
    ("cutoffs", "words"), [((10, ITEMS + 1), "larger than the catalogue"), ((0,), "at least 1"), ((), "at least 1")]
)
def test_bad_cutoffs_are_refused(cutoffs: tuple[int, ...], words: str) -> None:
    """A cutoff below 1 or above the catalogue size raises a one-line error."""
    model, test, seen, _, _ = small_world()
    with pytest.raises(UserError, match=words):
        evaluate(model, test, positives(seen), k=cutoffs)


def test_an_empty_test_set_is_refused() -> None:
    """An empty test set raises an error instead of returning NaN."""
    model, _, seen, _, _ = small_world()
    with pytest.raises(UserError, match="empty"):
        evaluate(model, Tests(np.array([], dtype=np.int32), np.array([], dtype=np.int32), USERS), positives(seen))


def test_misses_equal_items_that_are_ranked_last() -> None:
    """A missed item counts as a relevant item that no list holds, and a missed query as a query without a hit."""
    k, n_items, missed = 4, 9, {0: 2, 2: 1}
    q, items = whole_numbers((5, 3), 5), whole_numbers((n_items, 3), 6)
    relevant = {0: {1, 2}, 2: {3}, 3: {0, 8}}
    test = Tests(*(np.array(ids) for ids in zip(*((u, i) for u in relevant for i in relevant[u]), strict=True)), 5)
    counts = np.array([missed.get(u, 0) for u in range(5)])
    got = evaluate(
        Vectors(q, items), test, None, (k,), ("recall", "ndcg", "hit", "precision"), misses=Misses(counts, 2)
    )
    lists = brute(q, items, k, [set()] * 5)
    want = dict.fromkeys(("recall", "ndcg", "hit", "precision"), 0.0)
    for u, wanted in relevant.items():
        hits = [item in wanted for item in lists[u]]
        total = len(wanted) + missed.get(u, 0)
        ideal = sum(1 / math.log2(rank + 2) for rank in range(min(total, k)))
        want["recall"] += sum(hits) / total / 5
        want["ndcg"] += sum(hit / math.log2(rank + 2) for rank, hit in enumerate(hits)) / ideal / 5
        want["hit"] += any(hits) / 5
        want["precision"] += sum(hits) / k / 5
    assert {name: got.metrics[f"{name}@{k}"] for name in want} == pytest.approx(want)
    with pytest.raises(UserError, match="psp"):
        evaluate(Vectors(q, items), test, None, (k,), ("psp",), misses=Misses(counts, 2))
