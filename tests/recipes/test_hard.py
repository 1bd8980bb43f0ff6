"""DNS, AHNS, MixGCF, AMNS, BMNS, FairNeg, MIDX and SCE: one step's loss equals the published formula computed by hand,
and each trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.core.types import Corpus
from sparring.data.interactions import Split
from sparring.negatives import Sampled, Tilted
from sparring.recipes.hard import column_classes, popularity_classes
from sparring.recipes.settings import build
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress
from sparring.training.step import describe_batch
from support.by_hand import INF, TINY, B, Hand, check, observe

KNOWN = ("dns", "ahns", "mixgcf", "fairneg")  # their authors redraw known positives
SEED = 5  # of the generator used by Hand


def drawn(hand: Hand, n: int, per_query: bool = True) -> tuple[Tensor, torch.Generator]:
    """Return the (B, n) uniform draws of a step and the generator after them."""
    twin = torch.Generator().manual_seed(SEED)
    return torch.randint(hand.n_items, (B, n) if per_query else (n,), generator=twin).expand(B, n), twin


def softplus(x: float | Tensor) -> Tensor:
    return torch.log1p(torch.as_tensor(x, dtype=torch.float64).exp())


@pytest.mark.parametrize("name", ["dns", "ahns", "mixgcf", "amns", "bmns", "fairneg", "midx", "sce"])
def test_it_learns(name: str, parts: Split) -> None:
    """Three epochs lower the loss and give test metrics in range; the batch can be described afterwards."""
    run = build(name, parts.train, {"epochs": 3, "batch_size": 64, "dim": 8, "lr": 0.05, "weight_decay": 0.0})
    found = fit(run, parts, k=(10,), device="cpu")
    assert found.history[-1]["loss"] < found.history[0]["loss"]
    assert found.test is not None
    assert 0 < found.test.metrics["recall@10"] <= 1
    assert f"masked: {'all known positives' if name in KNOWN else 'own positive'}" in describe_batch(run, parts)


@pytest.mark.parametrize("per_query", [True, False])
def test_dns(parts: Split, per_query: bool) -> None:
    """The loss is log(1 + e^(s_j - s_+)) for the highest s_j of n uniform draws, known positives excluded."""
    hand = Hand(parts.train, build("dns", parts.train, {**TINY, "n": 20, "per_query": per_query}))
    ids, _ = drawn(hand, 20, per_query)
    hardest = (hand.logits(ids) + hand.unknown(ids)).amax(1)
    check(hand.contrast(SEED)[0], softplus(hardest - hand.positive))


def test_dns_m_n(parts: Split) -> None:
    """With m = 5 and k = 2 the loss averages two distinct draws of the five hardest, not the same for all rows."""
    hand = Hand(parts.train, build("dns", parts.train, {**TINY, "n": 20, "m": 5, "k": 2}))
    ids, _ = drawn(hand, 20)
    best = (hand.logits(ids) + hand.unknown(ids)).topk(5, 1).values
    each = [softplus(best[:, rank] - hand.positive) for rank in range(5)]
    pairs = torch.stack([(each[a] + each[b]) / 2 for a in range(5) for b in range(a)], 1)
    distance = (hand.contrast(SEED)[0].detach().double().unsqueeze(1) - pairs).abs()
    assert float(distance.amin(1).max()) < 1e-5
    assert len(distance.argmin(1).unique()) > 5  # rows do not all choose the same ranks


def test_ahns(parts: Split) -> None:
    """The pairwise loss uses the draw with the least |s_j - beta / (s_+ + alpha)|, or the hardest where s_+ <=
    -alpha."""
    hand = Hand(parts.train, build("ahns", parts.train, {**TINY, "n": 20, "alpha": 0.8, "beta": 0.3}))
    ids, _ = drawn(hand, 20)
    counts, want = hand.unknown(ids), []
    for row in range(B):
        own = float(hand.positive[row])
        scores = [float(hand.s[row, j]) for j in ids[row][torch.isfinite(counts[row])].tolist()]
        target = 0.3 / (own + 0.8) if own > -0.8 else INF
        want.append(softplus((max(scores) if target == INF else min(scores, key=lambda s: abs(s - target))) - own))
    check(hand.contrast(SEED)[0], torch.stack(want))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("mix", ["query", "candidate"])
def test_mixgcf(parts: Split, mix: str, k: int) -> None:
    """log(1 + sum over the k highest s' of e^(s' - s_+)), s' = a s_+ + (1 - a) s_j, a ~ U(0, 1) per row or draw."""
    hand = Hand(parts.train, build("mixgcf", parts.train, {**TINY, "n": 20, "mix": mix, "k": k}))
    ids, twin = drawn(hand, 20)
    a = torch.rand(B, 20 if mix == "candidate" else 1, generator=twin).double()
    mixed = a * hand.positive.unsqueeze(1) + (1 - a) * hand.logits(ids) + hand.unknown(ids)
    best = mixed.topk(k, 1).values
    check(hand.contrast(SEED)[0], softplus(torch.logsumexp(best - hand.positive.unsqueeze(1), 1)))


@pytest.mark.parametrize("correction", ["none", "count"])
def test_amns(parts: Split, correction: str) -> None:
    """The softmax is over the k highest of batch and n uniform items, corrected by expected count if asked."""
    hand = Hand(
        parts.train, build("amns", parts.train, {**TINY, "n": 30, "k": 7, "correction": correction, "tau": 0.4})
    )
    extra, _ = drawn(hand, 30, per_query=False)
    ids = torch.cat([hand.items.expand(B, -1), extra], 1)
    count = (B - 1) * hand.p + 30 / hand.n_items if correction == "count" else torch.ones_like(hand.p)
    scores, chosen = (hand.logits(ids) + hand.other(ids)).topk(7, 1)
    check(hand.contrast(SEED)[0], hand.softmax_loss(scores - count[ids.gather(1, chosen)].log()))


def test_bmns(parts: Split) -> None:
    """share * SSL-Pop + (1 - share) * (-t + log(e^t + sum_k e^(S W^T)_k)).

    Here t = s_+ - log p_+ and W = softmax((u - log p) / temperature)."""
    settings = {**TINY, "n": 50, "share": 0.3, "temperature": 0.7}
    hand = Hand(parts.train, build("bmns", parts.train, settings))
    log_p = hand.p[hand.items].log()
    w = torch.rand(50, B, generator=torch.Generator().manual_seed(SEED)).double()
    w = torch.softmax((w - log_p) / 0.7, 1)
    t = hand.positive - log_p
    batch = hand.softmax_loss(hand.logits(hand.items) - log_p + hand.other(hand.items), positive=t)
    mixed = hand.softmax_loss(hand.logits(hand.items) @ w.T, positive=t)
    check(hand.contrast(SEED)[0], 0.3 * batch + 0.7 * mixed)


def test_fairneg(parts: Split) -> None:
    """The weights are w_j = 1 - importance + importance * C softmax_j(s / temperature) over the pool; with every=2,
    each second step moves the shares of the column's groups."""
    settings = {**TINY, "n": 60, "importance": 0.4, "temperature": 0.5, "column": "category", "every": 2, "tau": 0.3}
    run = build("fairneg", parts.train, settings)
    negatives = run.terms[0].negatives
    assert isinstance(negatives, Tilted)
    assert isinstance(negatives.source, Sampled)
    shares = negatives.source.distribution.shares
    first = shares.clone()
    for batch in (1, 2):
        hand = Hand(parts.train, run, batch)
        losses, step, outcome = hand.contrast(SEED)
        ids = outcome.bags[0].blocks[0].ids
        s = hand.logits(ids) * 0.3 + hand.unknown(ids)
        counted = torch.isfinite(s).sum(1, keepdim=True)
        w = 0.6 + 0.4 * counted * torch.softmax(s / 0.5, 1)
        check(losses, hand.softmax_loss(hand.logits(ids) + w.log() + hand.unknown(ids)))
        assert torch.equal(shares, first)
        observe(run, step, outcome)
    assert not torch.equal(shares, first)
    assert parts.train.item_table is not None
    assert len(shares) == parts.train.item_table["category"].n_unique()


def test_the_shares_of_fairneg_move_once_an_epoch(parts: Split) -> None:
    """By default only the last step of each epoch moves the shares."""
    run = build("fairneg", parts.train, {"epochs": 3, "batch_size": 64, "dim": 8, "lr": 0.05})
    shares, moved = run.terms[0].negatives.source.distribution.shares, []  # type: ignore[union-attr]
    before = shares.clone()

    def watch(epoch: int, step: int, loss: object) -> None:
        if not torch.equal(shares, before):
            moved.append((epoch, step))
            before.copy_(shares)

    fit(run, parts, k=(10,), device="cpu", progress=TrainingProgress(step=watch))
    assert moved == [(epoch, -(-len(parts.train) // 64)) for epoch in range(3)]


def test_groups(parts: Split) -> None:
    """Popularity classes are ordered and equal in size; column classes are its values; bad names raise errors."""
    classes, counts = popularity_classes(parts.train, 4), torch.from_numpy(parts.train.counts())
    assert torch.bincount(classes).tolist() == [10, 10, 10, 10]
    for z in range(3):
        assert counts[classes == z].max() <= counts[classes == z + 1].min()
    assert parts.train.item_table is not None
    values = parts.train.item_table["category"].to_list()
    found = column_classes(parts.train, "category").tolist()
    assert len(set(zip(found, values, strict=True))) == len(set(values)) == len(set(found))
    with pytest.raises(UserError, match="title, category"):
        build("fairneg", parts.train, {"column": "genre"})
    with pytest.raises(UserError, match="groups"):
        build("fairneg", parts.train, {"groups": 41})


@pytest.mark.parametrize("codebook", ["product", "residual"])
def test_midx(parts: Split, codebook: str) -> None:
    """n draws per query weigh 1 / (n q(j | i)), q the softmax over the quantised vectors of the last refresh."""
    run = build("midx", parts.train, {**TINY, "score": "cosine", "tau": 0.3, "n": 25, "words": 5, "codebook": codebook})
    hand = Hand(parts.train, run)
    negatives = run.terms[0].negatives
    vectors = run.model.item_vectors()
    negatives.refresh(
        Corpus(0, vectors, run.model.encode_queries, parts.train.positives(), torch.Generator().manual_seed(1))
    )  # type: ignore[operator]
    users = run.model.encode_queries(hand.queries).detach().double()
    quantised = (negatives.book[0][negatives.code[0]] + negatives.book[1][negatives.code[1]]).double()  # type: ignore[index]
    log_q = torch.log_softmax(users @ quantised.T / 0.3, 1)
    losses, _, outcome = hand.contrast(SEED)
    ids = outcome.bags[0].blocks[0].ids
    assert ids.shape == (B, 25)
    check(losses, hand.softmax_loss(hand.logits(ids) - (25 * log_q.gather(1, ids).exp()).log() + hand.other(ids)))


def test_midx_follows_the_feature_tower(parts: Split) -> None:
    """With item features the codebooks have the width of the feature tower, and one epoch trains."""
    run = build(
        "midx",
        parts.train,
        {"item_features": "category", "hidden": "6", "dim": 4, "epochs": 1, "batch_size": 64, "words": 4},
    )
    found = fit(run, parts, k=(10,), device="cpu")
    assert np.isfinite(found.history[0]["loss"])
    assert run.terms[0].negatives.book.shape == (2, 4, 4)  # type: ignore[union-attr]


@pytest.mark.parametrize("mix", [False, True])
def test_sce(parts: Split, mix: bool) -> None:
    """The maximum over a query's buckets of log(1 + sum over the n items of e^(s_j - s_+)), 0 without a bucket."""
    run = build(
        "sce", parts.train, {**TINY, "score": "cosine", "tau": 0.4, "n": 9, "buckets": 6, "queries": 5, "mix": mix}
    )
    hand = Hand(parts.train, run)
    losses, step, _ = hand.contrast(SEED)
    q = step.q.detach().double()
    centres = torch.randn(6, B if mix else q.shape[1], generator=torch.Generator().manual_seed(SEED)).double()
    want = torch.zeros(B, dtype=torch.float64)
    for centre in centres @ q if mix else centres:
        items = (hand.vectors @ centre).topk(9).indices
        inside = hand.softmax_loss(hand.logits(items) + hand.other(items))
        rows = (q @ centre).topk(5).indices
        want[rows] = torch.maximum(want[rows], inside[rows])
    assert 0 < int((want == 0).sum()) < B
    check(losses, want)


@pytest.mark.parametrize(
    ("name", "setting"), [("bmns", {"share": 1.5}), ("dns", {"n": 0}), ("midx", {"words": 0}), ("amns", {"k": 0})]
)
def test_bad_arguments_are_one_line(name: str, setting: dict[str, object], parts: Split) -> None:
    """An unusable value raises a one-line UserError."""
    with pytest.raises(UserError) as error:
        build(name, parts.train, setting)
    assert "\n" not in str(error.value)
