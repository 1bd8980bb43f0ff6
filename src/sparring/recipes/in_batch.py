"""In-batch negatives and their corrections, sampled and full softmax, BPR; and `default`, the best general setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from sparring.data.histories import check_sequences, target_shares
from sparring.data.interactions import Interactions
from sparring.data.propensity import inverse_propensities
from sparring.losses import bpr as bpr_loss
from sparring.losses import softmax_loss
from sparring.models.build import width
from sparring.models.histories import HistoryTower
from sparring.models.retriever import Retriever
from sparring.models.sequences import SequenceTower
from sparring.negatives import (
    AllItems,
    Cache,
    ExcludeKind,
    InBatch,
    Memory,
    Popularity,
    Resample,
    Sampled,
    Shown,
    Streaming,
    Uniform,
    Union,
)
from sparring.recipes.arguments import AsIn, Corrected, Excluded, Form, PerQuery, Range, Redrawn, UniformDraws
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup, epoch_rows, epoch_steps

PAPER = Setup.of(
    dim=32,
    score="dot",
    tau=1.0,
    init_std=1.0,
    batch_size=2048,
    epochs=100,
    optimizer="adam",
    lr=0.001,
    weight_decay=1e-5,
    lr_decay=0.95,
    lr_decay_every=5,
    patience=None,
    precision="float32",
)  # Chen et al. 2022, section 4 and appendix; tables start at N(0, 1)

SMALLEST = 512  # rows of a batch of `default`, however small the data
MOST_NUMBERS = 1 << 28  # in the table of a closed form

# Half of a query's items predict the other half, so no query is memorised; an item bias lets unit vectors express
# popularity, and a rate that falls to zero ends lower than a constant one.
DEFAULT = Setup.of(
    query_tower="history",
    history=1000,
    history_table="own",
    rows="sets",
    dim=256,
    tau=None,
    item_bias=True,
    dropout=0.1,
    init_std=0.01,
    init="spectral",
    batch_size=4096,
    epochs=None,
    lr=3e-3,
    schedule="cosine",
    eval_every=4,
    patience=None,
    precision="auto",
)


def default(
    data: Interactions,
    setup: Setup = DEFAULT,
    *,
    n: UniformDraws = 4096,
    exclude: Excluded = "known",
    steps: Annotated[int, "batches are smaller than batch_size where an epoch has fewer steps than this"] = 48,
    closed_form: Annotated[int, "dimensions of EASE beside the towers, twice as many for few weights; 0: none"] = 512,
    trend: Annotated[bool, "a part of the item bias follows the demand, where the validation part is later"] = True,
) -> Run:
    """Queries as sums of their items, against uniform negatives that the query has not taken, or all of them.

    A catalogue of at most n items is seen completely at every step. The temperature is chosen on the validation part
    in the first epochs; the form and the weight of EASE, added to the scores of the towers, after the last. Where the
    validation part is later than the training part, a part of the item bias follows the demand (models/trend.py).
    Liang et al., Variational Autoencoders for Collaborative Filtering, WWW 2018 (Mult-DAE, which this simplifies).
    """
    rows = epoch_rows(data, setup)
    setup = setup.replaced(batch_size=min(setup.batches.batch_size, max(rows // steps, SMALLEST)))
    complete = data.n_items <= n
    negatives = (
        AllItems(data.n_items, exclude, with_pairs(data)) if complete else Sampled(uniform(data), n, exclude=exclude)
    )
    run = compose(data, setup, Term(1.0, negatives))
    dim = closed_form_width(run.model, data, closed_form)
    return replace(run, closed_form=dim, trend=trend and isinstance(run.model.query, HistoryTower | SequenceTower))


def closed_form_width(model: Retriever, data: Interactions, most: int) -> int:
    """Dimensions of the closed form beside a model, at most `most`; 0 unless its queries are sums of items.

    There are at most half as many as queries, and as items with pairs, and the table has at most a gigabyte.
    """
    if most < 0:
        raise ValueError(f"closed_form is a number of dimensions, at least 0; got {most}")
    if not isinstance(model.query, HistoryTower) or model.query.pooling == "attention":
        return 0
    known = min(len(np.unique(data.queries)), len(np.unique(data.items)))
    return min(most, known // 2, MOST_NUMBERS // data.n_items)


def tables(
    data: Interactions,
    setup: Setup = Setup.of(
        tau=None, item_bias=True, dropout=0.1, init_std=0.01, epochs=60, lr=3e-3, schedule="cosine", patience=None
    ),
    *,
    n: UniformDraws = 2048,
    exclude: Excluded = "positive",
) -> Run:
    """A free vector per query and per item, softmax loss on uniform negatives, cosines and an item bias.

    Long histories and many epochs suit it: on Gowalla it is ahead of `default`, which serves new queries too.
    Wu et al., On the Effectiveness of Sampled Softmax Loss for Item Recommendation, TOIS 2024 (SL).
    """
    return compose(data, setup, Term(1.0, Sampled(uniform(data), n, exclude=exclude, correction="none"), softmax_loss))


def quick(
    data: Interactions,
    setup: Setup = Setup.of(
        score="dot", tau=0.5, init="spectral", batch_size=512, epochs=20, optimizer="row-adagrad", lr=0.05
    ),
) -> Run:
    """The best quality reachable in a few seconds on a CPU: a spectral start, then corrected in-batch negatives.

    Start: Halko et al., Finding Structure with Randomness, SIAM Review 2011; negatives as in ssl_pop.
    """
    return compose(data, setup, Term(1.0, InBatch(item_frequency(data, setup))))


def uns(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    n: UniformDraws = 1024,
    per_query: PerQuery = False,
    correction: Corrected = "count",
) -> Run:
    """Uniform negatives from the complete catalogue (UNS).

    Jean et al., On Using Very Large Target Vocabulary, ACL 2015 (sampled softmax).
    """
    return compose(data, setup, Term(1.0, Sampled(uniform(data), n, per_query, correction)))


def pns(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    n: Annotated[int, "draws by popularity"] = 1024,
    alpha: Annotated[float, Range(0.0, 1.0), "exponent of the item counts; 0 is uniform"] = 1.0,
    per_query: PerQuery = False,
    correction: Corrected = "count",
) -> Run:
    """Negatives by popularity: item j in proportion to count_j^alpha (PNS).

    Mikolov et al., Distributed Representations of Words and Phrases, NIPS 2013 (alpha = 0.75).
    """
    return compose(data, setup, Term(1.0, Sampled(item_frequency(data, alpha=alpha), n, per_query, correction)))


def bpr(
    data: Interactions,
    setup: Setup = Setup.of(score="dot", tau=1.0, optimizer="row-adagrad", lr=0.05, batch_size=4096),
    *,
    n: Annotated[int, "uniform draws for each query"] = 1,
    exclude: Excluded = "known",
) -> Run:
    """Pairwise logistic loss against uniform negatives drawn for each query (BPR-MF).

    Rendle et al., BPR: Bayesian Personalized Ranking from Implicit Feedback, UAI 2009.
    """
    negatives = Sampled(uniform(data), n, True, "none", exclude)
    return compose(data, setup, Term(1.0, negatives, bpr_loss))


def ssl(data: Interactions, setup: Setup = PAPER, *, form: AsIn = "paper") -> Run:
    """In-batch softmax without correction (SSL): the other positives of the batch.

    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, table 2 (baseline).
    """
    return compose(data, setup, Term(1.0, InBatch(exclude=masking(form))))


def ssl_pop(data: Interactions, setup: Setup = PAPER, *, form: AsIn = "paper", correction: Corrected = "both") -> Run:
    """In-batch softmax corrected by item popularity (SSL-Pop, logQ).

    Yi et al., Sampling-Bias-Corrected Neural Modeling, RecSys 2019, equation 3.
    """
    return compose(data, setup, Term(1.0, InBatch(item_frequency(data, setup), correction, masking(form))))


def g_tower(
    data: Interactions,
    setup: Setup = PAPER,
    *,
    form: AsIn = "paper",
    alpha: Annotated[
        float | None, Range(1e-4, 0.1, log=True), "rate of the moving average; none: 0.01 (paper) or 1e-4 (release)"
    ] = None,
    sizes: Annotated[
        tuple[int, ...], "sizes of the hashed arrays; empty: one as large as the catalogue, or five (release)"
    ] = (),
    correction: Corrected = "both",
) -> Run:
    """In-batch softmax corrected by a streaming estimate of item frequency (G-Tower).

    Yi et al., Sampling-Bias-Corrected Neural Modeling, RecSys 2019, algorithms 2 and 3.
    """
    arrays = sizes or ((data.n_items,) if form == "paper" else (4993, 4999, 5003, 5009, 5011))
    frequency = Streaming(arrays, (0.01 if form == "paper" else 1e-4) if alpha is None else alpha)
    return compose(data, setup, Term(1.0, InBatch(frequency, correction, masking(form))))


def mns(data: Interactions, setup: Setup = PAPER, *, n: UniformDraws = 2048, form: AsIn = "paper") -> Run:
    """In-batch and uniform negatives mixed, corrected by the mixture (MNS).

    form="paper" leaves the positive uncorrected (equation 5); "release" corrects it by popularity alone, as the XIR
    code does.
    Yang et al., Mixed Negative Sampling for Learning Two-tower Neural Networks, WWW 2020 companion.
    """
    pop, exclude = item_frequency(data, setup), masking(form)
    sources = InBatch(pop, exclude=exclude), Sampled(uniform(data), n, exclude=exclude)
    if form == "paper":
        return compose(data, setup, Term(1.0, Union(*sources, correction="negatives")))
    return compose(data, setup, Term(1.0, Union(*sources, correction="both", positive=pop)))


def debiased_mns(
    data: Interactions,
    setup: Setup = PAPER,
    *,
    n: UniformDraws = 2048,
    per_query: PerQuery = False,
    correction: Corrected = "count",
    exclude: Excluded = "positive",
) -> Run:
    """Mixed negatives corrected by the expected count of the mixture (debiased MNS).

    Xing et al., ESANS, WWW 2025 (baseline: Yang et al. 2020 with the correction of Yi et al. 2019).
    """
    sources = (
        InBatch(item_frequency(data, setup), exclude=exclude),
        Sampled(uniform(data), n, per_query, exclude=exclude),
    )
    return compose(data, setup, Term(1.0, Union(*sources, correction=correction)))


def bir(
    data: Interactions,
    setup: Setup = PAPER,
    *,
    n: Annotated[int | None, "redraws for each query; none: as many as the batch has items"] = None,
    draw: Redrawn = "expected",
    form: AsIn = "paper",
) -> Run:
    """In-batch negatives redrawn for each query by its own corrected scores (BIR).

    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, section 3.1.
    """
    batch = InBatch(item_frequency(data, setup), exclude=masking(form))
    return compose(data, setup, Term(1.0, Resample(batch, n, draw)))


def xir(
    data: Interactions,
    setup: Setup = PAPER,
    *,
    lam: Annotated[float, Range(0.0, 1.0), "weight of the cache term, between 0 and 1"] = 0.5,
    cache_size: Annotated[int, "items of the cache"] = 2048,
    n: Annotated[int | None, "redraws from the batch, and from the cache; none: half the cache size"] = None,
    draw: Redrawn = "expected",
    form: AsIn = "paper",
) -> Run:
    """BIR plus a cache of the items drawn most often, as a second term of weight lam (XIR).

    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, section 3.2 and algorithm 2.
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"lam is the weight of the cache term, between 0 and 1; got {lam}")
    pop, exclude, n = item_frequency(data, setup), masking(form), max(cache_size // 2, 1) if n is None else n
    pool: Literal["all", "drawn"] = "all" if form == "paper" else "drawn"
    cache = Cache(
        cache_size, pop, data.n_items, pool, start=0.0 if form == "paper" else 1.0, exclude=exclude, seed=setup.seed
    )
    batch = Resample(InBatch(pop, exclude=exclude), n, draw)
    return compose(data, setup, Term(1 - lam, batch), Term(lam, Resample(cache, n, draw)))


def cbns(
    data: Interactions,
    setup: Setup = PAPER.replaced(dim=64, batch_size=128, init_std=0.1, weight_decay=1e-6, lr_decay=1.0, patience=20),
    *,
    size: Annotated[int, "vectors that the memory holds"] = 2432,
    opens: Annotated[int | None, "steps before the memory starts to fill; none: 40,000 or a tenth of all"] = None,
    correction: Corrected = "both",
) -> Run:
    """In-batch negatives plus a memory of the vectors of past batches (CBNS).

    The paper waits 40,000 steps; in a short training its memory would stay empty, hence the tenth.
    Wang et al., Cross-Batch Negative Sampling for Training Two-Tower Recommenders, SIGIR 2021, equation 9.
    """
    pop = item_frequency(data, setup)
    if opens is None:
        steps = setup.training.epochs_on() * epoch_steps(data, setup)
        opens = min(40_000, steps // 10)
    memory = Memory(size, width(setup.model, setup.text), pop, opens)
    return compose(data, setup, Term(1.0, Union(InBatch(pop), memory, correction=correction)))


def full_softmax(data: Interactions, setup: Setup = PAPER) -> Run:
    """Softmax over the complete catalogue: no sampling, the target that sampled losses estimate.

    Covington et al., Deep Neural Networks for YouTube Recommendations, RecSys 2016 (the exact loss they sample).
    """
    return compose(data, setup, Term(1.0, AllItems(data.n_items, among=with_pairs(data))))


def shown(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    n: Annotated[int, "shown items drawn for each query"] = 4,
    correction: Corrected = "count",
) -> Run:
    """In-batch negatives plus items that the query was shown and did not take (explicit negatives).

    Needs a label column in the data: 1 = taken, 0 = shown and not taken.
    """
    lists = data.shown_lists()
    if lists is None:
        raise ValueError(
            "the recipe `shown` needs shown items: name their column with --label-column (1 taken, 0 shown)"
        )
    return compose(data, setup, Term(1.0, Union(InBatch(item_frequency(data, setup), correction), Shown(lists, n))))


def uniform(data: Interactions) -> Uniform:
    """The uniform distribution over the items that have a training pair."""
    return Uniform(data.n_items, with_pairs(data))


def with_pairs(data: Interactions) -> Tensor | None:
    """The items that have a training pair, the only ones that negatives are drawn from; None if all have one.

    An item that is never a positive must not be a negative either: a tower over features or texts would learn to rank
    it last.
    """
    counts = data.counts()
    return None if counts.all() else torch.from_numpy(np.flatnonzero(counts))


def item_frequency(data: Interactions, setup: Setup | None = None, alpha: float = 1.0) -> Popularity:
    """The frequency of each item in a batch of this setup, to the power alpha; without a setup, in a batch of pairs."""
    return Popularity(torch.from_numpy(data.counts()) if setup is None else positive_counts(data, setup), alpha)


def positive_counts(data: Interactions, setup: Setup) -> Tensor:
    """(N,) expected rows of an epoch whose positive is the item; a query as row gives each of n positives 1/n."""
    rows = setup.batches.rows
    if rows == "pairs":
        return torch.from_numpy(data.counts())
    if rows == "sequences":
        check_sequences(data)
    if rows in ("sequences", "sets"):
        shares = target_shares(data, rows, setup.model.history)
        return torch.from_numpy(np.bincount(data.items, weights=shares, minlength=data.n_items))
    weight = np.ones(data.n_items)
    if setup.batches.draw == "propensity":
        weight = inverse_propensities(data.counts(), len(np.unique(data.queries)))
    share = weight[data.items]
    total = np.bincount(data.queries, weights=share, minlength=data.n_queries)
    return torch.from_numpy(np.bincount(data.items, weights=share / total[data.queries], minlength=data.n_items))


def masking(form: Form) -> ExcludeKind:
    """The XIR release keeps the query's positive among its negatives; the paper's form excludes it by id."""
    return "none" if form == "release" else "positive"
