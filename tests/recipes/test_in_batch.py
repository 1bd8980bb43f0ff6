"""Every recipe builds, trains and describes its batch; one step's loss equals the published formula computed by
hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions, Split
from sparring.negatives import Cache, InBatch, Memory, Resample, Streaming, Union
from sparring.recipes import PAPER, RECIPES
from sparring.recipes.run import Term, compose
from sparring.recipes.settings import build, known
from sparring.recipes.setup import Setup
from sparring.training.fitting import Fitted, fit
from sparring.training.step import describe_batch, sample_steps
from support.by_hand import INF, TINY, B, Hand, check, observe
from support.settings import QUICK


@pytest.fixture(scope="module")
def fitted(parts: Split) -> Callable[[str], Fitted]:
    """Train a recipe for one epoch."""

    def train(name: str) -> Fitted:
        return fit(build(name, parts.train, known(RECIPES[name], QUICK)), parts, k=(10,), device="cpu")

    return train


SOURCES = {
    "default": ["all items: 40 candidates shared", "masked: all known positives"],
    "tables": ["sampled from Uniform(40): 2,048 candidates shared"],
    "quick": ["in-batch: 64 candidates shared", "weight: -log expected count", "positive: one per query, uncorrected"],
    "uns": ["sampled from Uniform(40): 1,024 candidates shared"],
    "pns": ["sampled from Popularity(40 items, alpha=1): 1,024 candidates shared"],
    "bpr": ["sampled from Uniform(40): 1 candidates for each query", "1 x bpr over", "masked: all known"],
    "ssl": ["in-batch: 64 candidates shared", "weight: none", "masked: own positive"],
    "ssl_pop": ["in-batch: 64", "weight: -log q", "positive: one per query, corrected"],
    "g_tower": ["in-batch: 64", "weight: -log q", "positive: one per query, corrected"],
    "mns": [
        "in-batch: 64",
        "sampled from Uniform(40): 2,048",
        "weight: -log q",
        "positive: one per query, uncorrected",
    ],
    "debiased_mns": ["in-batch: 64", "sampled from Uniform(40): 2,048", "weight: -log expected count"],
    "bir": ["64 of in-batch by expected draws", "counted as 64 expected draws"],
    "xir": [
        "0.5 x sampled_softmax",
        "1,024 of in-batch by expected draws",
        "1,024 of cache by expected draws: 2,048 candidates",
    ],
    "cbns": ["in-batch: 64", "memory: 2,432 candidates", "2,432 dropped"],
    "full_softmax": ["all items: 40 candidates shared"],
    "shown": ["in-batch: 64", "shown and not taken: 4 candidates for each query"],
    "sl": [
        "1 x softmax_loss over",
        "sampled from Uniform(40): 800 candidates shared",
        "weight: none",
        "masked: own positive",
    ],
    "bsl": ["1 x bsl over", "sampled from Uniform(40): 800 candidates shared", "weight: none"],
    "psl": ["1 x psl over", "sampled from Uniform(40): 1,000 candidates shared", "weight: none", "masked: all known"],
    "slatk": [
        "1 x SLatK over",
        "sampled from Uniform(40): 1,000 candidates shared",
        "weight: none",
        "masked: all known",
    ],
    "ccl": ["1 x ccl over", "sampled from Uniform(40): 1,000 candidates shared", "weight: none"],
    "gbce": ["1 x gbce over", "sampled from Uniform(40): 256 candidates shared", "weight: none"],
    "ada_tau": ["1 x adaptive_softmax over", "sampled from Uniform(40): 1,024 candidates shared", "weight: none"],
    "dns": ["1 x bpr over", "hardest 1 of sampled from Uniform(40): 1 candidates for each query", "masked: all known"],
    "ahns": [
        "1 x bpr over",
        "nearest to the target, 1 of sampled from Uniform(40): 1 candidates for each query",
        "masked: all known",
    ],
    "mixgcf": [
        "positive mixed into hardest 1 of sampled from Uniform(40)",
        "64 synthetic or empty",
        "masked: all known",
    ],
    "amns": ["hardest 256 of in-batch + sampled from Uniform(40): 256 candidates for each query", "weight: none"],
    "bmns": [
        "0.2 x sampled_softmax",
        "in-batch: 64",
        "mixtures of 64 in-batch items: 2,048 candidates shared",
        "2,048 synthetic",
    ],
    "fairneg": [
        "sampled from GroupShares(40 items in 10 groups), 10% by score: 2,048 candidates shared",
        "weight: score",
    ],
    "esans": [
        "5 of each of 1 other clusters: 320 candidates shared",
        "896 mixtures of 5",
        "then each mixed with the positive: 10",
    ],
    "dpr": [
        "1 x sampled_softmax over",
        "in-batch: 60 candidates shared",
        "weight: none",
        "masked: all known positives",
    ],
    "ance": [
        "in-batch: 60",
        "nearest items of each query: 60 candidates shared",
        "60 dropped",
        "masked: all known positives",
    ],
    "ngame": ["1 x OnlineHard over", "in-batch: 60 candidates shared", "masked: all known positives"],
    "dexa": ["1 x OnlineHard over", "in-batch: 60 candidates shared", "masked: all known positives"],
    "prime": ["1 x OnlineHard over", "in-batch: 60 candidates shared", "masked: all known positives"],
    "dexml": ["1 x sampled_softmax over", "all items: 40 candidates shared", "masked: all known positives"],
    "topk_percpos": [
        "in-batch: 60",
        "nearest items of each query, less those near by the model's own scores: 4 candidates for each query",
        "240 dropped",
    ],
    "topk_marginpos": [
        "in-batch: 60",
        "nearest items of each query, less those near by the model's own scores: 4 candidates for each query",
        "240 dropped",
    ],
    "gist": ["in-batch, less those near by the model's own scores: 60 candidates shared", "masked: all known"],
    "rocketqa": [
        "in-batch: 60",
        "nearest items of each query, less those near by the model's own scores: 4 candidates for each query",
        "240 dropped",
    ],
    "midx": ["drawn from a softmax over 32 x 32 cells: 64 candidates for each query", "weight: -log expected count"],
    "sce": [
        "the hardest of 16 buckets of 16 queries: 40 candidates for each query",
        "weight: none",
        "masked: own positive",
    ],
    "popularity": ["solved in closed form; it draws no negatives"],
    "item_knn": ["solved in closed form; it draws no negatives"],
    "ease": ["solved in closed form; it draws no negatives"],
    "ials": ["solved by sweeps; it draws no negatives"],
}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_trains_and_says_what_its_batch_holds(
    name: str, parts: Split, fitted: Callable[[str], Fitted]
) -> None:
    """One epoch gives a finite loss and test metrics in range; the description names each source, size and weight."""
    found = fitted(name)
    assert len(found.history) == 1
    assert np.isfinite(found.history[0]["loss"])
    assert found.test is not None
    assert 0 <= found.test.metrics["recall@10"] <= 1
    text = describe_batch(build(name, parts.train, known(RECIPES[name], {"batch_size": 64, "dim": 8})), parts)
    assert name in SOURCES, f"add {name} to SOURCES: the words with which describe_batch names its candidates"
    for words in SOURCES[name]:
        assert words in text


def test_describing_a_batch_changes_nothing(parts: Split) -> None:
    """A description draws from its own generator and changes no state, so two descriptions agree."""
    run = build("xir", parts.train, {**TINY, "draw": "multinomial", "cache_size": 32})
    before = {name: tensor.clone() for name, tensor in run.modules().state_dict().items()}
    assert describe_batch(run, parts) == describe_batch(run, parts)
    for name, tensor in run.modules().state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_ssl(parts: Split, score: str) -> None:
    """With s = q.e / tau, the paper has -s + log(e^s + sum over the other items of the batch). The release sums all B
    columns, the positive's included."""
    settings = {**TINY, "score": score, "tau": 0.5}
    paper, release = (
        Hand(parts.train, build("ssl", parts.train, {**settings, "form": form})) for form in ("paper", "release")
    )
    check(paper.contrast()[0], paper.softmax_loss(paper.logits(paper.items) + paper.other(paper.items)))
    check(release.contrast()[0], release.softmax_loss(release.logits(release.items)))


def test_ssl_pop(parts: Split) -> None:
    """Negatives and positive alike have t_j = s_j - log p_j. The release has -t + log(e^t + sum over all B columns of
    e^t_j)."""
    for form in ("paper", "release"):
        hand = Hand(parts.train, build("ssl_pop", parts.train, {**TINY, "form": form}))
        t = hand.logits(hand.items) - hand.p[hand.items].log()
        t = t + hand.other(hand.items) if form == "paper" else t
        check(hand.contrast()[0], hand.softmax_loss(t, positive=hand.positive - hand.p[hand.items].log()))


@pytest.mark.parametrize(("name", "arguments"), [("ssl_pop", {"correction": "count"}), ("quick", {})])
def test_in_batch_by_count(parts: Split, name: str, arguments: dict[str, str]) -> None:
    """In ssl_pop with correction="count" and in quick, only negatives are corrected, by (B - 1) p_j."""
    hand = Hand(parts.train, build(name, parts.train, {**TINY, **arguments}))
    negatives = hand.logits(hand.items) - ((B - 1) * hand.p[hand.items]).log() + hand.other(hand.items)
    check(hand.contrast()[0], hand.softmax_loss(negatives))


@pytest.mark.parametrize(
    ("form", "alpha", "sizes"),
    [("paper", None, ()), ("release", None, ()), ("paper", 0.3, (7, 11)), ("release", 0.5, (5,))],
)
def test_g_tower(parts: Split, form: str, alpha: float | None, sizes: tuple[int, ...]) -> None:
    """After three batches the correction is -log p_j, p_j = 1 / max_h gap_h, with the gaps of the published loop."""
    run = build("g_tower", parts.train, {**TINY, "form": form, "alpha": alpha, "sizes": sizes})
    rate = alpha or (0.01 if form == "paper" else 1e-4)
    arrays = sizes or ((parts.train.n_items,) if form == "paper" else (4993, 4999, 5003, 5009, 5011))
    gap, last = [[1.0] * size for size in arrays], [[0.0] * size for size in arrays]
    for t in (1, 2, 3):
        hand = Hand(parts.train, run, batch=t)
        _, step, outcome = hand.contrast()
        observe(run, step, outcome)
        for h, size in enumerate(arrays):
            for bucket in {(int(item) + 1) % size for item in hand.items}:
                gap[h][bucket] = (1 - rate) * gap[h][bucket] + rate * (t - last[h][bucket])
                last[h][bucket] = t
    hand = Hand(parts.train, run, batch=4)
    longest = torch.tensor(
        [max(gap[h][(j + 1) % size] for h, size in enumerate(arrays)) for j in range(hand.n_items)], dtype=torch.float64
    )
    t_all = hand.logits(hand.items) + longest[hand.items].log()
    t_all = t_all + hand.other(hand.items) if form == "paper" else t_all
    check(hand.contrast()[0], hand.softmax_loss(t_all, positive=hand.positive + longest[hand.items].log()))


@pytest.mark.parametrize("name", ["uns", "pns"])
@pytest.mark.parametrize("per_query", [False, True])
def test_uns_and_pns(parts: Split, name: str, per_query: bool) -> None:
    """n negatives, shared or per query, weigh 1 / (n q_j), q_j = 1/N or count_j^alpha / sum; no positive."""
    alpha = {"alpha": 0.75} if name == "pns" else {}
    hand = Hand(
        parts.train,
        build(name, parts.train, {**TINY, "score": "cosine", "tau": 0.2, "n": 50, "per_query": per_query, **alpha}),
    )
    losses, _, outcome = hand.contrast()
    ids = outcome.bags[0].blocks[0].ids
    assert ids.shape == ((B, 50) if per_query else (50,))
    q = hand.p**0.75 / (hand.p**0.75).sum() if name == "pns" else torch.full_like(hand.p, 1 / hand.n_items)
    check(losses, hand.softmax_loss(hand.logits(ids) - (50 * q[ids]).log() + hand.other(ids)))


def test_bpr(parts: Split) -> None:
    """The loss is the mean of log(1 + e^(s_j - s_+)) over n uniform negatives per query, known positives excluded."""
    hand = Hand(parts.train, build("bpr", parts.train, {**TINY, "n": 30}))
    losses, _, outcome = hand.contrast()
    ids = outcome.bags[0].blocks[0].ids
    assert ids.shape == (B, 30)
    counts = hand.unknown(ids).exp()
    pairs = torch.log1p((hand.logits(ids) - hand.positive.unsqueeze(1)).exp())
    check(losses, (counts * pairs).sum(1) / counts.sum(1))


def test_mns_paper(parts: Split) -> None:
    """Equation 5: only negatives are corrected, by log Q* with Q* proportional to (B - 1) p + n / N."""
    hand = Hand(parts.train, build("mns", parts.train, {**TINY, "n": 16}))
    losses, _, outcome = hand.contrast()
    drawn = outcome.bags[0].blocks[1].ids
    assert drawn.shape == (16,)
    q = ((B - 1) * hand.p + 16 / hand.n_items) / (B - 1 + 16)
    ids = torch.cat([hand.items, drawn])
    check(losses, hand.softmax_loss(hand.logits(ids) - q[ids].log() + hand.other(ids)))


def test_mns_release(parts: Split) -> None:
    """In the release the positive is corrected by popularity alone and stays among the negatives, whose mixture is half
    and half at B' = B.

    The release draws from N + 1 ids because its tables have a padding row; ours have none."""
    hand = Hand(parts.train, build("mns", parts.train, {**TINY, "n": B, "form": "release"}))
    losses, _, outcome = hand.contrast()
    ids = torch.cat([hand.items, outcome.bags[0].blocks[1].ids])
    q = 0.5 * hand.p + 0.5 / hand.n_items
    check(losses, hand.softmax_loss(hand.logits(ids) - q[ids].log(), positive=hand.positive - hand.p[hand.items].log()))


def test_mns_mixture_is_the_published_one_at_the_published_size() -> None:
    """At B = B' = 2048, weights B - 1 : B' differ from the published B : B' by at most 5e-4 in the log."""
    b, n_items = 2048, 40_988
    p = 1.0 / np.arange(1, n_items + 1)
    p /= p.sum()
    ours = np.log(((b - 1) * p + b / n_items) / (2 * b - 1))
    assert np.abs(ours - np.log(0.5 * p + 0.5 / n_items)).max() < 5e-4


def test_corrected_mixed_negatives(parts: Split) -> None:
    """Batch and n uniform items share one softmax, each divided by its expected count (B - 1) p_j + n / N."""
    hand = Hand(parts.train, build("debiased_mns", parts.train, {**TINY, "n": 16}))
    losses, _, outcome = hand.contrast()
    ids = torch.cat([hand.items, outcome.bags[0].blocks[1].ids])
    count = (B - 1) * hand.p + 16 / hand.n_items
    check(losses, hand.softmax_loss(hand.logits(ids) - count[ids].log() + hand.other(ids)))


def test_mixed_negatives_without_known_positives(parts: Split) -> None:
    """exclude=known leaves all training positives of the query out of both sources; the expected counts stay."""
    hand = Hand(parts.train, build("debiased_mns", parts.train, {**TINY, "n": 16, "exclude": "known"}))
    losses, _, outcome = hand.contrast()
    ids = torch.cat([hand.items, outcome.bags[0].blocks[1].ids])
    count = (B - 1) * hand.p + 16 / hand.n_items
    check(losses, hand.softmax_loss(hand.logits(ids) - count[ids].log() + hand.unknown(ids)))


def test_corrected_mixed_negatives_of_each_query(parts: Split) -> None:
    """per_query draws n uniform items for each row; all are divided by the same expected count."""
    hand = Hand(parts.train, build("debiased_mns", parts.train, {**TINY, "n": 5, "per_query": True}))
    losses, _, outcome = hand.contrast()
    own = outcome.bags[0].blocks[1].ids
    assert own.shape == (B, 5)
    ids = torch.cat([hand.items.expand(B, -1), own], 1)
    count = (B - 1) * hand.p + 5 / hand.n_items
    check(losses, hand.softmax_loss(hand.logits(ids) - count[ids].log() + hand.other(ids)))


@pytest.mark.parametrize("exclude", ["positive", "known"])
def test_tables(parts: Split, exclude: str) -> None:
    """-s + log of the sum over n uniform items other than the positive ("known": other than all training items)."""
    plain = {"tau": 0.3, "item_bias": False, "dropout": 0.0, "exclude": exclude}
    hand = Hand(parts.train, build("tables", parts.train, {**TINY, "n": 16, **plain}))
    losses, _, outcome = hand.contrast()
    ids = outcome.bags[0].blocks[0].ids
    mask = hand.other(ids)
    if exclude == "known":
        taken = torch.zeros(parts.train.n_queries, hand.n_items, dtype=torch.bool)
        taken[torch.from_numpy(parts.train.queries).long(), torch.from_numpy(parts.train.items).long()] = True
        assert taken[hand.queries][:, ids].sum() > torch.isinf(mask).sum()
        mask = torch.zeros(B, len(ids), dtype=torch.float64).masked_fill(taken[hand.queries][:, ids], -INF)
    check(losses, torch.logsumexp(hand.logits(ids) + mask, 1) - hand.positive)


@pytest.mark.parametrize("n", [16, 4096])
def test_default(parts: Split, n: int) -> None:
    """-s + log(e^s + sum_j w e^s_j) over items that the query has not taken: all of them, or n draws that count N / n.

    Rows of one query share its vector, made of the items that are given, and none of these is a target.
    """
    settings = {"dim": 8, "batch_size": 24, "n": n, "tau": 0.3, "steps": 1}
    run = build("default", parts.train, settings)
    taken = torch.zeros(parts.train.n_queries, parts.train.n_items, dtype=torch.bool)
    taken[torch.from_numpy(parts.train.queries).long(), torch.from_numpy(parts.train.items).long()] = True
    shared = 0
    for losses, step, outcome in sample_steps(run, parts):
        (block,) = outcome.bags[0].blocks
        weight = 1.0 if n > parts.train.n_items else parts.train.n_items / n
        assert len(block.ids) == min(n, parts.train.n_items)
        vectors = run.model.encode_items(block.ids).double()
        logits = step.q.double() @ vectors.T / 0.3
        logits = logits.masked_fill(taken[step.query_ids][:, block.ids], -INF) + math.log(weight)
        positive = (step.q * step.v).sum(1).double() / 0.3
        check(losses, torch.logaddexp(positive, torch.logsumexp(logits, 1)) - positive)
        assert step.shared is not None
        torch.testing.assert_close(step.shared.q[step.shared.rows], step.q)
        assert torch.equal(step.shared.ids[step.shared.rows], step.query_ids)
        shared += len(step.q) - len(step.shared.q)
    assert shared > 0


def expected_draws(hand: Hand, ids: Tensor, n: int, mask: Tensor) -> Tensor:
    """Return n softmax_j(s_j - log p_j) over the unmasked candidates, (B, C) float64."""
    return n * torch.softmax(hand.logits(ids) - hand.p[ids].log() + mask, 1)


@pytest.mark.parametrize("form", ["paper", "release"])
def test_bir_closed_form(parts: Split, form: str) -> None:
    """-s + log(e^s + |R| sum_j w_j e^s_j), w = softmax(s - log p) over the batch, |R| = B by default."""
    for n in (None, 7):
        hand = Hand(parts.train, build("bir", parts.train, {**TINY, "form": form, "n": n}))
        mask = hand.other(hand.items) if form == "paper" else torch.zeros(B, B, dtype=torch.float64)
        weights = expected_draws(hand, hand.items, n or B, mask)
        check(hand.contrast()[0], hand.softmax_loss(hand.logits(hand.items) + weights.log()))


@pytest.mark.parametrize("draw", ["multinomial", "systematic"])
def test_bir_drawn(parts: Split, draw: str) -> None:
    """The loss is the formula on |R| = B drawn counts per query, whose mean is |R| w; no positive is drawn."""
    hand = Hand(parts.train, build("bir", parts.train, {**TINY, "draw": draw}))
    total = torch.zeros(B, B, dtype=torch.float64)
    times = 400
    for seed in range(times):
        losses, _, outcome = hand.contrast(seed)
        counts = outcome.bags[0].blocks[0].log_w.double().exp()
        torch.testing.assert_close(counts, counts.round(), rtol=1e-6, atol=0)
        counts = counts.round()
        assert torch.equal(counts.sum(1), torch.full((B,), float(B), dtype=torch.float64))
        total += counts
    check(losses, hand.softmax_loss(hand.logits(hand.items) + counts.log()))
    mean = expected_draws(hand, hand.items, B, hand.other(hand.items))
    assert total[mean == 0].sum() == 0
    spread = (mean * (1 - mean / B) / times).sqrt().clamp(min=1e-9)  # of independent draws; systematic draws vary less
    assert float(((total / times - mean).abs() / (5 * spread + 1 / times)).max()) < 1


def xir_loss(hand: Hand, cache: Tensor, lam: float, n: int, form: str) -> Tensor:
    terms = []
    for ids in (hand.items, cache):
        mask = hand.other(ids) if form == "paper" else torch.zeros(B, len(ids), dtype=torch.float64)
        terms.append(hand.softmax_loss(hand.logits(ids) + expected_draws(hand, ids, n, mask).log()))
    return (1 - lam) * terms[0] + lam * terms[1]


@pytest.mark.parametrize("form", ["paper", "release"])
@pytest.mark.parametrize("n", [None, 9])
def test_xir(parts: Split, form: str, n: int | None) -> None:
    """The loss is (1 - lam) l(R) + lam l(K), with R from the batch, K from the cache and |R| = |K| = half the cache.

    Counts are o_j (0 in the paper, 1 in the release) plus all draws of j in the step. The next cache holds items with o
    > 0 (paper) or items drawn in this step (release)."""
    run = build("xir", parts.train, {**TINY, "lam": 0.2, "cache_size": 32, "form": form, "n": n})
    hand = Hand(parts.train, run)
    assert isinstance(run.terms[1].negatives, Resample)
    cache = run.terms[1].negatives.source
    assert isinstance(cache, Cache)
    ids, draws = cache.ids.clone(), n or 16
    assert ids.shape == (32,)
    losses, step, outcome = hand.contrast()
    check(losses, xir_loss(hand, ids, 0.2, draws, form))
    observe(run, step, outcome)
    drawn = torch.zeros(hand.n_items, dtype=torch.float64)
    for candidates in (hand.items, ids):
        mask = hand.other(candidates) if form == "paper" else torch.zeros(B, len(candidates), dtype=torch.float64)
        drawn.index_add_(0, candidates, expected_draws(hand, candidates, draws, mask).sum(0))
    torch.testing.assert_close(cache.occurrences, drawn + (form == "release"), rtol=1e-4, atol=1e-4)
    assert set(cache.ids.tolist()) <= set(torch.nonzero(drawn).flatten().tolist())
    check(
        Hand(parts.train, run, batch=1).contrast()[0],
        xir_loss(Hand(parts.train, run, batch=1), cache.ids, 0.2, draws, form),
    )


def test_xir_without_and_with_only_the_cache(parts: Split) -> None:
    """lam = 0 is BIR with half the cache size as its number of draws."""
    bir = Hand(parts.train, build("bir", parts.train, {**TINY, "n": 16}))
    xir = Hand(parts.train, build("xir", parts.train, {**TINY, "lam": 0.0, "cache_size": 32}))
    check(xir.contrast()[0], bir.contrast()[0].detach().double())


def test_cbns(parts: Split) -> None:
    """Equation 9: positive and negatives subtract log p; an open memory adds vectors of past batches."""
    run = build("cbns", parts.train, {**TINY, "size": 40, "opens": 1, "init_std": 0.7})
    log_p = None
    past: list[Tensor] = []
    for batch in range(4):
        hand = Hand(parts.train, run, batch)
        log_p = hand.p.log()
        memory = torch.cat(past)[-40:] if past else torch.empty(0, dtype=torch.long)
        ids = torch.cat([hand.items, memory])
        losses, step, outcome = hand.contrast()
        expected = hand.softmax_loss(
            hand.logits(ids) - log_p[ids] + hand.other(ids), positive=hand.positive - log_p[hand.items]
        )
        check(losses, expected)
        observe(run, step, outcome)
        if batch >= 1:
            past.append(hand.items)
    assert len(torch.cat(past)) > 40  # the ring buffer has wrapped around


def test_the_memory_of_cbns_opens_in_a_short_training(parts: Split) -> None:
    """By default the memory holds past items after three epochs, and it changes the model."""
    settings = {"epochs": 3, "batch_size": 64, "dim": 8, "size": 100}
    run = build("cbns", parts.train, settings)
    fit(run, parts, k=(10,), device="cpu")
    (memory,) = (module for module in run.modules().modules() if isinstance(module, Memory))
    assert bool((memory.ids >= 0).all())
    without = build("cbns", parts.train, {**settings, "opens": 10**6})
    fit(without, parts, k=(10,), device="cpu")
    assert not torch.equal(run.model.item.weight, without.model.item.weight)  # type: ignore[union-attr]


def test_full_softmax(parts: Split) -> None:
    """The loss is minus the log of the positive's softmax over the full catalogue."""
    hand = Hand(parts.train, build("full_softmax", parts.train, TINY))
    check(hand.contrast()[0], -torch.log_softmax(hand.s, 1)[torch.arange(B), hand.items])


def test_shown(parts: Split) -> None:
    """In-batch negatives are corrected by expected count; n items that were shown but not taken have weight 1."""
    hand = Hand(parts.train, build("shown", parts.train, {**TINY, "n": 3}))
    losses, _, outcome = hand.contrast()
    ids = outcome.bags[0].blocks[1].ids
    assert parts.train.shown is not None
    pairs = set(zip(*(column.tolist() for column in parts.train.shown), strict=True))
    weight = torch.zeros(B, 3, dtype=torch.float64)
    for row, query in enumerate(hand.queries.tolist()):
        for place, item in enumerate(ids[row].tolist()):
            assert (query, item) in pairs or (item == -1 and query not in {q for q, _ in pairs})
            weight[row, place] = -INF if item < 0 else 0.0
    batch = hand.logits(hand.items) - ((B - 1) * hand.p[hand.items]).log() + hand.other(hand.items)
    check(losses, hand.softmax_loss(batch, hand.logits(ids.clamp(min=0)) + weight))


def test_shown_needs_shown_rows(parts: Split) -> None:
    """Without rows that were shown but not taken, the error names the option that marks them."""
    bare = Interactions(parts.train.queries, parts.train.items, parts.train.query_ids, parts.train.item_ids)
    with pytest.raises(UserError, match="--label-column"):
        build("shown", bare)


def test_recipes_are_wired_from_the_parts_that_their_papers_name(parts: Split) -> None:
    """The stateful recipes use the modules of their papers, with the arguments that `form` selects."""

    def parts_of(name: str, kind: type, **settings: Any) -> Any:
        run = build(name, parts.train, {**TINY, **settings})
        return next(module for module in run.modules().modules() if isinstance(module, kind))

    assert (parts_of("xir", Cache).pool, parts_of("xir", Cache, form="release").pool) == ("all", "drawn")
    assert parts_of("xir", InBatch, form="release").exclude == "none"
    steps = -(-len(parts.train) // B)
    assert parts_of("cbns", Memory).warmup == 100 * steps // 10
    assert parts_of("cbns", Memory, epochs=10**6).warmup == 40_000
    assert (
        parts_of("cbns", Memory, epochs=50, rows="queries").warmup
        == 50 * -(-len(set(parts.train.queries.tolist())) // B) // 10
    )
    assert parts_of("cbns", Memory, opens=7).warmup == 7
    assert parts_of("cbns", Memory, item_features="category", hidden="5,3", dim=6).emb.shape == (2432, 6)
    assert parts_of("g_tower", Streaming).alpha == 0.01
    assert parts_of("mns", Union).correction == "negatives"
    assert (
        PAPER.model.dim,
        PAPER.training.lr,
        PAPER.training.weight_decay,
        PAPER.training.optimizer,
        PAPER.model.init_std,
    ) == (32, 0.001, 1e-5, "adam", 1.0)


def test_towers_start_alike_for_every_recipe_and_leave_the_global_generator_alone(parts: Split) -> None:
    """Initial tables depend only on the Setup's seed; building leaves the global generator alone."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    tables = [build(name, parts.train, {**TINY, "seed": 4}).model.item.weight for name in ("ssl", "xir", "cbns")]
    other = build("ssl", parts.train, {**TINY, "seed": 5}).model.item.weight
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(table, tables[0]) for table in tables)  # type: ignore[arg-type]
    assert not torch.equal(tables[0], other)  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [1, 8, 64])
def test_a_spectral_start_knows_the_data_before_the_first_step(parts: Split, dim: int) -> None:
    """init="spectral" gives finite tables of any width, even wider than the catalogue, that score known pairs above
    other pairs. It depends only on the seed."""
    model, again = (build("quick", parts.train, {"dim": dim}).model for _ in range(2))
    scores = model.query_vectors(torch.arange(parts.train.n_queries)) @ model.item_vectors().T
    assert torch.isfinite(scores).all()
    known = torch.zeros_like(scores, dtype=torch.bool)
    known[torch.from_numpy(parts.train.queries).long(), torch.from_numpy(parts.train.items).long()] = True
    assert float(scores[known].mean()) > float(scores[~known].mean())
    assert torch.equal(model.item_vectors(), again.item_vectors())


def test_features_need_a_table(parts: Split) -> None:
    """item_features without an items table raises an error that names the option for one."""
    bare = Interactions(parts.train.queries, parts.train.items, parts.train.query_ids, parts.train.item_ids)
    with pytest.raises(UserError, match="--items"):
        compose(bare, Setup.of(item_features=("category",)), Term(1.0, InBatch()))
