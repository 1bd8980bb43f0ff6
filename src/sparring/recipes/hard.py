"""Harder, fairer and synthetic negatives: DNS, AHNS, MixGCF, AMNS, BMNS, FairNeg, MIDX, SCE."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions
from sparring.losses import bpr
from sparring.models.build import width
from sparring.negatives import (
    AmongHardest,
    BatchMix,
    ExcludeKind,
    GroupShares,
    Hardest,
    HardestBucket,
    InBatch,
    MixHops,
    MixPositive,
    NearestTo,
    QuantizedSoftmax,
    Sampled,
    Tilted,
    Union,
)
from sparring.negatives.quantized import Codebook
from sparring.negatives.synthetic import MixPer
from sparring.recipes.arguments import Corrected, Excluded, OneOf, PerQuery, Range, UniformDraws
from sparring.recipes.in_batch import PAPER, item_frequency, uniform, with_pairs
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup, epoch_steps

# Shared by DNS(M, N), MixGCF and AHNS: d = 64, B = 2048, Adam at 0.001 from Xavier's initialisation, whose standard
# deviation is about 0.01 for ten thousand rows.
PAIRWISE = Setup.of(score="dot", tau=1.0, init_std=0.01, lr=0.001, weight_decay=1e-4)


def dns(
    data: Interactions,
    setup: Setup = PAIRWISE,
    *,
    n: UniformDraws = 32,
    m: Annotated[int, "hardest draws among which negatives are chosen"] = 1,
    k: Annotated[int, Range(1, 16, log=True, whole=True), "negatives kept of each query"] = 1,
    per_query: PerQuery = True,
    exclude: Excluded = "known",
) -> Run:
    """Pairwise loss against k of the m hardest of n uniform draws (DNS; with m > 1 DNS(M, N)).

    per_query=False scores one pool of n items for the complete batch: scale n and m together for equal hardness. The
    settings are those that its successors share.
    Zhang et al., SIGIR 2013; Shi et al., On the Theories Behind Hard Negative Sampling for Recommendation, WWW 2023.
    """
    pool = _pool(data, n, per_query, exclude)
    return compose(data, setup, Term(1.0, AmongHardest(pool, m, k) if m > k else Hardest(pool, k), bpr))


def ahns(
    data: Interactions,
    setup: Setup = PAIRWISE,
    *,
    n: UniformDraws = 32,
    alpha: Annotated[float, Range(0.1, 2.0), "added to the positive's score"] = 1.0,
    beta: Annotated[float, Range(0.01, 1.0, log=True), "scale of the target score"] = 0.1,
    p: Annotated[float, "exponent of the target, less one; -2 gives easier negatives to high positives"] = -2.0,
    per_query: PerQuery = True,
    exclude: Excluded = "known",
) -> Run:
    """Pairwise loss against the draw whose score is nearest to beta (s_+ + alpha)^(p + 1) (AHNS).

    Lai et al., Adaptive Hardness Negative Sampling for Collaborative Filtering, AAAI 2024.
    """
    return compose(data, setup, Term(1.0, NearestTo(_pool(data, n, per_query, exclude), 1, alpha, beta, p), bpr))


def mixgcf(
    data: Interactions,
    setup: Setup = PAIRWISE,
    *,
    n: UniformDraws = 32,
    k: Annotated[int, Range(1, 16, log=True, whole=True), "hardest draws kept of each query"] = 1,
    mix: Annotated[
        MixPer, OneOf(), "one mixing share per query, after the choice, or one per draw, before it"
    ] = "query",
    per_query: PerQuery = True,
    exclude: Excluded = "known",
) -> Run:
    """Softmax against the k hardest of n draws, each mixed with the positive, in every layer of a graph (MixGCF).

    Of the model lightgcn the layers are mixed one by one, as published; any other model has one layer. mix="query"
    cannot change the choice of the hardest; mix="candidate" can, and mixes the final vectors of any model.
    Huang et al., MixGCF: An Improved Training Method for Graph Neural Network-based Recommender Systems, KDD 2021.
    """
    pool = _pool(data, n, per_query, exclude)
    negatives = MixHops(pool, k) if mix == "query" else Hardest(MixPositive(pool, mix), k)
    return compose(data, setup, Term(1.0, negatives))


def amns(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    n: UniformDraws = 2048,
    k: Annotated[int, "hardest candidates kept of each query"] = 256,
    correction: Corrected = "none",
    exclude: Excluded = "positive",
) -> Run:
    """Softmax against the k hardest for each query of in-batch and uniform negatives together (AMNS).

    Our common settings: the paper's are for sequence models.
    Prakash et al., Evaluating Performance and Bias of Negative Sampling in Large-Scale Sequential Recommendation
    Models, arXiv 2410.17276.
    """
    batch = InBatch(item_frequency(data, setup), correction, exclude)
    drawn = Sampled(uniform(data), n, False, correction, exclude)
    return compose(data, setup, Term(1.0, Hardest(Union(batch, drawn, correction=correction), k)))


def bmns(
    data: Interactions,
    setup: Setup = PAPER.replaced(lr=0.01),
    *,
    n: Annotated[int, "random mixtures of the batch's items"] = 2048,
    share: Annotated[float, Range(0.05, 0.8), "weight of the in-batch term, between 0 and 1"] = 0.2,
    temperature: Annotated[float, Range(0.1, 2.0, log=True), "temperature of the mixing weights"] = 1.0,
    correction: Corrected = "both",
) -> Run:
    """In-batch softmax by popularity plus a softmax against random mixtures of the batch's items (BMNS).

    Settings of the XIR paper, which it follows, with the learning rate of its scripts.
    Fan et al., Batch-Mix Negative Sampling for Learning Recommendation Retrievers, CIKM 2023.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is the weight of the in-batch term, between 0 and 1; got {share}")
    pop = item_frequency(data, setup)
    return compose(data, setup, Term(share, InBatch(pop, correction)), Term(1 - share, BatchMix(pop, n, temperature)))


def fairneg(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    column: Annotated[str | None, "item column whose values are the groups; none: classes of popularity"] = None,
    groups: Annotated[int, "classes of popularity, of equal size"] = 10,
    n: Annotated[int, "draws by group"] = 2048,
    importance: Annotated[
        float, Range(0.01, 1.0, log=True), "share of a candidate's weight that follows its score"
    ] = 0.1,
    temperature: Annotated[float, Range(0.1, 2.0, log=True), "temperature of the weights by score"] = 0.4,
    lr_shares: Annotated[float, "learning rate of the groups' shares"] = 0.2,
    momentum: Annotated[float, "momentum of the groups' shares"] = 0.9,
    decay: Annotated[float, "decay of the groups' running losses"] = 0.99,
    every: Annotated[int | None, "steps between two updates of the shares; none: once per epoch"] = None,
    floor: Annotated[float, "smallest share of a group, relative to an equal one"] = 0.1,
    correction: Corrected = "none",
    exclude: Excluded = "known",
) -> Run:
    """Negatives by groups of items, fewer from groups whose loss is high, weighted by score (FairNeg).

    A scalable form with a softmax loss and our common settings: the paper scores every pair in every epoch.
    Chen et al., Fairly Adaptive Negative Sampling for Recommendations, WWW 2023.
    """
    of_items = popularity_classes(data, groups) if column is None else column_classes(data, column)
    steps = epoch_steps(data, setup) if every is None else every
    shares = GroupShares(of_items, lr_shares, momentum, decay, steps, floor, with_pairs(data))
    pool = Sampled(shares, n, correction=correction, exclude=exclude)
    return compose(data, setup, Term(1.0, Tilted(pool, importance, temperature)))


def midx(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    n: Annotated[int, "draws for each query"] = 64,
    words: Annotated[int, "codewords of each of the two codebooks"] = 32,
    codebook: Annotated[Codebook, "quantise two halves of a vector, or a vector and its residual"] = "residual",
    every: Annotated[int, "epochs between two rebuilds of the codebooks"] = 1,
    correction: Corrected = "count",
    exclude: Excluded = "positive",
) -> Run:
    """Negatives for each query from a softmax over quantised item vectors, corrected by their exact probability (MIDX).

    Our common settings: the paper's are for autoencoders and language models.
    Chen et al., Fast Variational AutoEncoder with Inverted Multi-Index for Collaborative Filtering, WWW 2022.
    """
    dim, among = width(setup.model, setup.text), with_pairs(data)
    negatives = QuantizedSoftmax(data.n_items, dim, n, words, codebook, correction, exclude, every, among)
    return compose(data, setup, Term(1.0, negatives))


def sce(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    n: Annotated[int, "items of a bucket"] = 256,
    buckets: Annotated[int | None, "buckets of a batch; none: 2 sqrt(B)"] = None,
    queries: Annotated[int | None, "queries of a bucket; none: 2 sqrt(B)"] = None,
    mix: Annotated[bool, "combine the batch's query vectors into the buckets' directions"] = False,
    exclude: Excluded = "positive",
) -> Run:
    """Cross-entropy inside random buckets of queries and items of similar direction, each query's hardest bucket (SCE).

    Our common settings: the paper's are for sequence models.
    Mezentsev et al., Scalable Cross-Entropy Loss for Sequential Recommendations with Large Item Catalogs, RecSys 2024.
    """
    negatives = HardestBucket(data.n_items, n, buckets, queries, mix, exclude, with_pairs(data))
    return compose(data, setup, Term(1.0, negatives))


def popularity_classes(data: Interactions, groups: int) -> Tensor:
    """(N,) the class of each item by popularity, 0 the rarest; classes have equal sizes, up to one item."""
    if not 1 <= groups <= data.n_items:
        raise UserError(f"groups must be between 1 and the {data.n_items:,} items of the catalogue, got {groups}")
    rank = np.empty(data.n_items, dtype=np.int64)
    rank[np.argsort(data.counts(), kind="stable")] = np.arange(data.n_items)
    return torch.from_numpy(rank * groups // data.n_items)


def column_classes(data: Interactions, column: str) -> Tensor:
    """(N,) the class of each item by the value of a column of the items table; a missing value is a separate class."""
    if data.item_table is None or column not in data.item_table.columns:
        table = data.item_table
        columns = "no items table was given" if table is None else f"the items table has {', '.join(table.columns)}"
        raise UserError(f"column={column} names no column of the items: {columns}")
    values = data.item_table[column]
    if values.dtype.is_nested():
        raise UserError(f"column={column} holds lists: groups need one value for each item")
    return torch.from_numpy(values.rank("dense").fill_null(0).to_numpy().astype(np.int64))


def _pool(data: Interactions, n: int, per_query: bool, exclude: ExcludeKind) -> Sampled:
    return Sampled(uniform(data), n, per_query, "none", exclude)
