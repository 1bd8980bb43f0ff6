"""The in-batch family, sampled and full softmax, BPR; and `default`, the strongest general setting."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sparring.data.batches import epoch_steps
from sparring.data.interactions import Interactions
from sparring.data.propensity import inverse_propensities
from sparring.losses import bpr as bpr_loss
from sparring.losses import softmax_loss
from sparring.models.build import width
from sparring.negatives import (
    AllItems,
    Cache,
    Correction,
    DrawMethod,
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
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup

Form = Literal["paper", "release"]


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


# Chosen on validation parts of four data sets (docs/lab/results.md): a bias per item lets unit vectors say what is popular, a little dropout
# keeps queries from being learned by heart, and a low rate that falls to zero ends where a constant one does not.
DEFAULT = Setup.of(tau=None, item_bias=True, dropout=0.1, init_std=0.01, epochs=60, lr=3e-3, schedule="cosine")


def default(data: Interactions, setup: Setup = DEFAULT, *, n: int = 2048, exclude: ExcludeKind = "positive") -> Run:
    """The best that holds on every set tried: cosines with an item bias, a temperature from the data, softmax loss on uniform negatives.

    SL (Wu et al., TOIS 2024) with the first temperature of Adap-tau (Chen et al., WWW 2023).
    """
    return compose(
        data, setup, Term(1.0, Sampled(Uniform(data.n_items), n, exclude=exclude, correction="none"), softmax_loss)
    )


def quick(
    data: Interactions,
    setup: Setup = Setup.of(
        score="dot", tau=0.5, init="spectral", batch_size=512, epochs=20, optimizer="row-adagrad", lr=0.05
    ),
) -> Run:
    """The furthest in a few seconds of a CPU: a spectral start, then corrected in-batch negatives in small batches.

    Start: Halko et al., Finding Structure with Randomness, SIAM Review 2011; negatives as in ssl_pop, corrected by expected counts.
    """
    return compose(data, setup, Term(1.0, InBatch(popularity(data, setup))))


def uns(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    n: int = 1024,
    per_query: bool = False,
    correction: Correction = "count",
) -> Run:
    """Uniform negatives from the whole catalogue, shared by the batch or drawn for each query (UNS).

    Jean et al., On Using Very Large Target Vocabulary, ACL 2015 (sampled softmax).
    """
    return compose(data, setup, Term(1.0, Sampled(Uniform(data.n_items), n, per_query, correction)))


def pns(
    data: Interactions,
    setup: Setup = Setup(),
    *,
    n: int = 1024,
    alpha: float = 1.0,
    per_query: bool = False,
    correction: Correction = "count",
) -> Run:
    """Negatives by popularity: item j in proportion to count_j^alpha (PNS).

    Mikolov et al., Distributed Representations of Words and Phrases, NIPS 2013 (alpha = 0.75).
    """
    return compose(data, setup, Term(1.0, Sampled(popularity(data, alpha=alpha), n, per_query, correction)))


def bpr(
    data: Interactions,
    setup: Setup = Setup.of(score="dot", tau=1.0, optimizer="row-adagrad", lr=0.05, batch_size=4096),
    *,
    n: int = 1,
    exclude: ExcludeKind = "known",
) -> Run:
    """Pairwise logistic loss against uniform negatives drawn for each query (BPR-MF).

    Rendle et al., BPR: Bayesian Personalized Ranking from Implicit Feedback, UAI 2009.
    """
    negatives = Sampled(Uniform(data.n_items), n, True, "none", exclude)
    return compose(data, setup, Term(1.0, negatives, bpr_loss))


def ssl(data: Interactions, setup: Setup = PAPER, *, form: Form = "paper") -> Run:
    """In-batch softmax without correction (SSL): the other positives of the batch as they come.

    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, table 2 (baseline).
    """
    return compose(data, setup, Term(1.0, InBatch(exclude=masking(form))))


def ssl_pop(data: Interactions, setup: Setup = PAPER, *, form: Form = "paper", correction: Correction = "both") -> Run:
    """In-batch softmax corrected by item popularity (SSL-Pop, logQ).

    Yi et al., Sampling-Bias-Corrected Neural Modeling, RecSys 2019, equation 3.
    """
    return compose(data, setup, Term(1.0, InBatch(popularity(data, setup), correction, masking(form))))


def g_tower(
    data: Interactions,
    setup: Setup = PAPER,
    *,
    form: Form = "paper",
    alpha: float | None = None,
    sizes: tuple[int, ...] = (),
    correction: Correction = "both",
) -> Run:
    """In-batch softmax corrected by a streaming estimate of item frequency (G-Tower).

    Defaults of form="paper": one array as large as the catalogue, alpha 0.01; of form="release": five arrays of about 5,000, alpha 1e-4.
    Yi et al., Sampling-Bias-Corrected Neural Modeling, RecSys 2019, algorithms 2 and 3.
    """
    arrays = sizes or ((data.n_items,) if form == "paper" else (4993, 4999, 5003, 5009, 5011))
    frequency = Streaming(arrays, (0.01 if form == "paper" else 1e-4) if alpha is None else alpha)
    return compose(data, setup, Term(1.0, InBatch(frequency, correction, masking(form))))


def mns(data: Interactions, setup: Setup = PAPER, *, n: int = 2048, form: Form = "paper") -> Run:
    """In-batch and uniform negatives mixed, corrected by the mixture (MNS).

    form="paper" leaves the positive uncorrected (equation 5); "release" corrects it by popularity alone, as the XIR code does.
    Yang et al., Mixed Negative Sampling for Learning Two-tower Neural Networks, WWW 2020 companion.
    """
    pop, exclude = popularity(data, setup), masking(form)
    sources = InBatch(pop, exclude=exclude), Sampled(Uniform(data.n_items), n, exclude=exclude)
    if form == "paper":
        return compose(data, setup, Term(1.0, Union(*sources, correction="negatives")))
    return compose(data, setup, Term(1.0, Union(*sources, correction="both", positive=pop)))


def debiased_mns(data: Interactions, setup: Setup = PAPER, *, n: int = 2048, correction: Correction = "count") -> Run:
    """Mixed negatives with the expected count of the mixture as correction (debiased MNS).

    Xing et al., ESANS, WWW 2025 (baseline: Yang et al. 2020 with the correction of Yi et al. 2019).
    """
    return compose(
        data,
        setup,
        Term(1.0, Union(InBatch(popularity(data, setup)), Sampled(Uniform(data.n_items), n), correction=correction)),
    )


def bir(
    data: Interactions,
    setup: Setup = PAPER,
    *,
    n: int | None = None,
    draw: DrawMethod = "expected",
    form: Form = "paper",
) -> Run:
    """In-batch negatives drawn again for each query by its own corrected scores (BIR); draw="expected" is the closed form.

    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, section 3.1.
    """
    batch = InBatch(popularity(data, setup), exclude=masking(form))
    return compose(data, setup, Term(1.0, Resample(batch, n, draw)))


def xir(
    data: Interactions,
    setup: Setup = PAPER,
    *,
    lam: float = 0.5,
    cache_size: int = 2048,
    n: int | None = None,
    draw: DrawMethod = "expected",
    form: Form = "paper",
) -> Run:
    """BIR plus a cache of the items drawn most often, as a second term of weight lam (XIR).

    n draws from the batch and n from the cache; half the cache size unless given. draw="expected" is the closed form.
    Chen et al., Cache-Augmented Inbatch Importance Resampling, NeurIPS 2022, section 3.2 and algorithm 2.
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"lam is the weight of the cache term, between 0 and 1; got {lam}")
    pop, exclude, n = popularity(data, setup), masking(form), max(cache_size // 2, 1) if n is None else n
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
    size: int = 2432,
    opens: int | None = None,
    correction: Correction = "both",
) -> Run:
    """In-batch negatives plus a memory of the vectors of past batches (CBNS), which takes none in the first `opens` steps.

    Unless given, these are the paper's 40,000 or a tenth of all steps, whichever is less: in a short training the memory would never open.
    Wang et al., Cross-Batch Negative Sampling for Training Two-Tower Recommenders, SIGIR 2021, equation 9.
    """
    pop = popularity(data, setup)
    if opens is None:
        opens = min(
            40_000, setup.training.epochs * epoch_steps(data, setup.batches.rows, setup.batches.batch_size) // 10
        )
    return compose(
        data,
        setup,
        Term(1.0, Union(InBatch(pop), Memory(size, width(setup.model, setup.text), pop, opens), correction=correction)),
    )


def full_softmax(data: Interactions, setup: Setup = PAPER) -> Run:
    """Softmax over the whole catalogue: no sampling, the target that sampled losses estimate.

    Covington et al., Deep Neural Networks for YouTube Recommendations, RecSys 2016 (the exact loss they sample).
    """
    return compose(data, setup, Term(1.0, AllItems(data.n_items)))


def shown(data: Interactions, setup: Setup = Setup(), *, n: int = 4, correction: Correction = "count") -> Run:
    """In-batch negatives plus items that the query was shown and did not take (explicit negatives).

    Needs a label column in the data: 1 = taken, 0 = shown and not taken.
    """
    lists = data.shown_lists()
    if lists is None:
        raise ValueError(
            "the recipe `shown` needs shown-and-not-taken rows: name their column with --label-column (1 taken, 0 shown)"
        )
    return compose(data, setup, Term(1.0, Union(InBatch(popularity(data, setup), correction), Shown(lists, n))))


def popularity(data: Interactions, setup: Setup | None = None, alpha: float = 1.0) -> Popularity:
    """How often a batch of this setup holds each item, to the power alpha; without a setup a batch of pairs."""
    return Popularity(torch.from_numpy(data.counts()) if setup is None else offered(data, setup), alpha)


def offered(data: Interactions, setup: Setup) -> Tensor:
    """(N,) how often each item is the positive of a row in one epoch, on average; a row that is a query offers each of its n 1/n times."""
    if setup.batches.rows == "pairs":
        return torch.from_numpy(data.counts())
    weight = np.ones(data.n_items)
    if setup.batches.draw == "propensity":
        weight = inverse_propensities(data.counts(), len(np.unique(data.queries)))
    share = weight[data.items]
    total = np.bincount(data.queries, weights=share, minlength=data.n_queries)
    return torch.from_numpy(np.bincount(data.items, weights=share / total[data.queries], minlength=data.n_items))


def masking(form: Form) -> ExcludeKind:
    """The XIR release leaves the query's positive among its negatives; we drop it by id."""
    return "none" if form == "release" else "positive"
