"""Harder, fairer and made-up negatives: DNS, AHNS, MixGCF, AMNS, BMNS, FairNeg, MIDX, SCE."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.data.batches import epoch_steps
from sparring.data.interactions import Interactions
from sparring.losses import bpr
from sparring.models.build import width
from sparring.negatives import (
    AmongHardest,
    BatchMix,
    Correction,
    ExcludeKind,
    GroupShares,
    Hardest,
    HardestBucket,
    InBatch,
    MixPositive,
    NearestTo,
    QuantizedSoftmax,
    Sampled,
    Tilted,
    Uniform,
    Union,
)
from sparring.negatives.quantized import Codebook
from sparring.negatives.synthetic import MixPer
from sparring.recipes.in_batch import PAPER, popularity
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup

# What DNS(M, N), MixGCF and AHNS share: d = 64, B = 2048, Adam at 0.001 from Xavier's start, about 0.01 for some ten thousand rows.
PAIRWISE = Setup.of(score="dot", tau=1.0, init_std=0.01, lr=0.001, weight_decay=1e-4)


def dns(
    data: Interactions,
    setup: Setup = PAIRWISE,
    *,
    n: int = 32,
    m: int = 1,
    k: int = 1,
    per_query: bool = True,
    exclude: ExcludeKind = "known",
) -> Run:
    """Pairwise loss against k of the m hardest of n uniform draws (DNS; with m > 1 DNS(M, N)).

    per_query=False scores one pool of n items for the whole batch: take n and m larger alike for the same hardness. The settings are those
    that its successors share.
    Zhang et al., SIGIR 2013; Shi et al., On the Theories Behind Hard Negative Sampling for Recommendation, WWW 2023.
    """
    pool = _pool(data, n, per_query, exclude)
    return compose(data, setup, Term(1.0, AmongHardest(pool, m, k) if m > k else Hardest(pool, k), bpr))


def ahns(
    data: Interactions,
    setup: Setup = PAIRWISE,
    *,
    n: int = 32,
    alpha: float = 1.0,
    beta: float = 0.1,
    p: float = -2.0,
    per_query: bool = True,
    exclude: ExcludeKind = "known",
) -> Run:
    """Pairwise loss against the draw whose score is nearest to beta (s_+ + alpha)^(p + 1) (AHNS).

    Lai et al., Adaptive Hardness Negative Sampling for Collaborative Filtering, AAAI 2024.
    """
    return compose(data, setup, Term(1.0, NearestTo(_pool(data, n, per_query, exclude), 1, alpha, beta, p), bpr))


def mixgcf(
    data: Interactions,
    setup: Setup = PAIRWISE,
    *,
    n: int = 32,
    k: int = 1,
    mix: MixPer = "query",
    per_query: bool = True,
    exclude: ExcludeKind = "known",
) -> Run:
    """Softmax against the k hardest of n draws, each mixed with the positive (MixGCF, two-tower form).

    mix="query": one share per query, mixed after the choice, which it cannot change; "candidate": one per draw, mixed before it.
    Huang et al., MixGCF: An Improved Training Method for Graph Neural Network-based Recommender Systems, KDD 2021.
    """
    pool = _pool(data, n, per_query, exclude)
    negatives = MixPositive(Hardest(pool, k)) if mix == "query" else Hardest(MixPositive(pool, mix), k)
    return compose(data, setup, Term(1.0, negatives))


def amns(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    n: int = 2048,
    k: int = 256,
    correction: Correction = "none",
    exclude: ExcludeKind = "positive",
) -> Run:
    """Softmax against the k hardest for each query of in-batch and uniform negatives together (AMNS).

    Our common settings: the paper's are for sequence models.
    Prakash et al., Evaluating Performance and Bias of Negative Sampling in Large-Scale Sequential Recommendation Models, arXiv 2410.17276.
    """
    batch, drawn = (
        InBatch(popularity(data, setup), correction, exclude),
        Sampled(Uniform(data.n_items), n, False, correction, exclude),
    )
    return compose(data, setup, Term(1.0, Hardest(Union(batch, drawn, correction=correction), k)))


def bmns(
    data: Interactions,
    setup: Setup = PAPER.replaced(lr=0.01),
    *,
    n: int = 2048,
    share: float = 0.2,
    temperature: float = 1.0,
    correction: Correction = "both",
) -> Run:
    """In-batch softmax by popularity plus a softmax against random mixtures of the batch's items (BMNS).

    share is the weight of the in-batch term. Settings of the XIR paper, which it follows, with the learning rate of its scripts.
    Fan et al., Batch-Mix Negative Sampling for Learning Recommendation Retrievers, CIKM 2023.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is the weight of the in-batch term, between 0 and 1; got {share}")
    pop = popularity(data, setup)
    return compose(data, setup, Term(share, InBatch(pop, correction)), Term(1 - share, BatchMix(pop, n, temperature)))


def fairneg(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    column: str | None = None,
    groups: int = 10,
    n: int = 2048,
    importance: float = 0.1,
    temperature: float = 0.4,
    lr_shares: float = 0.2,
    momentum: float = 0.9,
    decay: float = 0.99,
    every: int | None = None,
    floor: float = 0.1,
    correction: Correction = "none",
    exclude: ExcludeKind = "known",
) -> Run:
    """Negatives by groups of items whose shares fall where the group is served badly, tilted by score (FairNeg).

    Groups are the values of an item column, or without one `groups` classes of popularity with as many items each. Shares move every
    `every` steps, as in the authors' code once an epoch unless given. Scalable form with a softmax loss and our common settings: the paper
    scores every pair in every epoch.
    Chen et al., Fairly Adaptive Negative Sampling for Recommendations, WWW 2023.
    """
    of_items = popularity_classes(data, groups) if column is None else column_classes(data, column)
    steps = epoch_steps(data, setup.batches.rows, setup.batches.batch_size) if every is None else every
    shares = GroupShares(of_items, lr_shares, momentum, decay, steps, floor)
    pool = Sampled(shares, n, correction=correction, exclude=exclude)
    return compose(data, setup, Term(1.0, Tilted(pool, importance, temperature)))


def midx(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    n: int = 64,
    words: int = 32,
    codebook: Codebook = "residual",
    every: int = 1,
    correction: Correction = "count",
    exclude: ExcludeKind = "positive",
) -> Run:
    """Negatives for each query from a softmax over quantised item vectors, corrected by their exact chance (MIDX).

    New codebooks every `every` epochs. Our common settings: the paper's are for autoencoders and language models.
    Chen et al., Fast Variational AutoEncoder with Inverted Multi-Index for Collaborative Filtering, WWW 2022.
    """
    negatives = QuantizedSoftmax(
        data.n_items, width(setup.model, setup.text), n, words, codebook, correction, exclude, every
    )
    return compose(data, setup, Term(1.0, negatives))


def sce(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    n: int = 256,
    buckets: int | None = None,
    queries: int | None = None,
    mix: bool = False,
    exclude: ExcludeKind = "positive",
) -> Run:
    """Cross-entropy inside random buckets of queries and items that point the same way, the hardest bucket of each query (SCE).

    n items to a bucket; 2 sqrt(B) buckets of as many queries unless given. Our common settings: the paper's are for sequence models.
    Mezentsev et al., Scalable Cross-Entropy Loss for Sequential Recommendations with Large Item Catalogs, RecSys 2024.
    """
    return compose(data, setup, Term(1.0, HardestBucket(data.n_items, n, buckets, queries, mix, exclude)))


def popularity_classes(data: Interactions, groups: int) -> Tensor:
    """(N,) the class of each item by popularity, 0 the rarest, with as equal numbers of items as can be."""
    if not 1 <= groups <= data.n_items:
        raise UserError(f"groups must lie between 1 and the {data.n_items:,} items of the catalogue, got {groups}")
    rank = np.empty(data.n_items, dtype=np.int64)
    rank[np.argsort(data.counts(), kind="stable")] = np.arange(data.n_items)
    return torch.from_numpy(rank * groups // data.n_items)


def column_classes(data: Interactions, column: str) -> Tensor:
    """(N,) the class of each item by the value of a column of the items table; a missing value is a class of its own."""
    if data.item_table is None or column not in data.item_table.columns:
        known = (
            "no items table was given"
            if data.item_table is None
            else f"the items table has {', '.join(data.item_table.columns)}"
        )
        raise UserError(f"column={column} names no column of the items: {known}")
    values = data.item_table[column]
    if values.dtype.is_nested():
        raise UserError(f"column={column} holds lists: groups need one value for each item")
    return torch.from_numpy(values.rank("dense").fill_null(0).to_numpy().astype(np.int64))


def _pool(data: Interactions, n: int, per_query: bool, exclude: ExcludeKind) -> Sampled:
    return Sampled(Uniform(data.n_items), n, per_query, "none", exclude)
