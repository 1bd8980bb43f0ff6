"""Retrieval of labels, many of them rare, for texts or any other queries: DPR, ANCE, NGAME, DEXA, PRIME, DEXML.

A training row is a query with one of its positives, drawn anew in each epoch; all known positives of a query are masked in its batch.
With id towers they train as they are; for texts set an encoder. The authors train DistilBERT for
300 epochs in batches of 1600 at a rate of 2e-4; the common settings here are for towers that train at a larger one in fewer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from sparring.data.interactions import Interactions
from sparring.losses import Loss, OnlineHard, Reduction, sampled_softmax
from sparring.models.clusters.batches import ClusteredBatches
from sparring.models.item_corrections import Centroids
from sparring.negatives import AllItems, InBatch, NearestItems, Union
from sparring.recipes.in_batch import popularity
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup
from sparring.recipes.variant import variant

LABELS = Setup.of(
    tau=0.1,
    rows="queries",
    batch_size=1024,
    epochs=30,
    lr=0.01,
    schedule="linear",
    warmup=100,
    patience=None,
    eval_every=5,
)
SOFTMAX = LABELS.replaced(tau=0.05)
NGAME = LABELS.replaced(clf_epochs=100)


def dpr(
    data: Interactions,
    setup: Setup = SOFTMAX,
    *,
    loss: Literal["softmax", "hinge"] = "softmax",
    corrected: bool = False,
) -> Run:
    """Softmax against the positives of the other queries in random batches (DPR, random in-batch).

    loss=hinge is NGAME's, at tau=0.1: the same training with other batches. corrected=true subtracts from each item's logit the log of how
    often a batch is expected to hold it; the hinge has no such weights.
    Karpukhin et al., Dense Passage Retrieval for Open-Domain Question Answering, EMNLP 2020.
    """
    if corrected and loss == "hinge":
        raise ValueError("corrected=true weighs the candidates of a softmax: it needs loss=softmax")
    frequency = popularity(data, setup) if corrected else None
    return compose(data, setup, Term(1.0, InBatch(frequency, exclude="known"), _loss(loss)))


def ance(
    data: Interactions,
    setup: Setup = SOFTMAX,
    *,
    n: int = 1,
    k: int = 200,
    skip: int = 0,
    every: int = 5,
    start: int = 1,
    per_query: bool = False,
    delay: int = 0,
    loss: Literal["softmax", "hinge"] = "softmax",
) -> Run:
    """In-batch negatives and n of each query's k nearest items, ranked anew `every` epochs (ANCE).

    The ranking is exact: it encodes all queries and all items, in the foreground, or with a delay (in epochs) beside training, on a second
    GPU or another core. skip drops the first ranks.
    Xiong et al., Approximate Nearest Neighbor Negative Contrastive Learning for Dense Text Retrieval, ICLR 2021.
    """
    nearest = NearestItems(data.n_queries, n, min(k, data.n_items), skip, every, start, per_query, delay=delay)
    return compose(data, setup, Term(1.0, Union(InBatch(exclude="known"), nearest), _loss(loss)))


def ngame(
    data: Interactions,
    setup: Setup = NGAME,
    *,
    size: int = 8,
    start: int = 1,
    every: int = 5,
    grow: tuple[int, ...] = (15,),
    k: int = 10,
    margin: float = 0.3,
    dynamic: bool = False,
    reduction: Reduction = "sum",
    constant_weights: bool = False,
    both_ways: bool = False,
) -> Run:
    """Batches of clusters of alike queries and a hinge loss on their hardest negatives, then a classifier per item (NGAME).

    Clusters of about `size` queries from the epoch `start` on (0 is the first), made anew `every` epochs, twice as large from each epoch in
    grow on; size=1 is random batches. dynamic=true sets the margin of each pair by its scores, from 0.1 to `margin`, and both_ways=true
    adds the loss of items against queries, as PRIME does.
    `classifiers` epochs of one vector per item over frozen query vectors follow, 0 leaves them out; fusion=true ranks by both.
    Dahiya et al., NGAME: Negative Mining-aware Mini-batching for Extreme Classification, WSDM 2023.
    """
    if start < 1:
        raise ValueError(f"start must be at least 1, got {start}: in the first epoch no query has a vector yet")
    loss = OnlineHard(k, margin, reduction, min(0.1, margin) if dynamic else None, constant_weights, both_ways)
    run = compose(data, setup, Term(1.0, InBatch(exclude="known"), loss))
    queries = data.pairs()[0]
    batches = ClusteredBatches(
        torch.unique(queries) if setup.batches.rows == "queries" else queries,
        data.n_queries,
        run.model.dim,
        setup.batches.batch_size,
        setup.seed,
        size,
        start,
        every,
        grow,
    )
    for module in run.model.modules():
        if isinstance(module, Centroids):
            module.follow(batches)
    return replace(run, batches=batches)


dexa = variant(
    ngame,
    "dexa",
    """NGAME with free vectors, one for each cluster of items, added in the item tower (DEXA).

    About `auxiliary` items share a vector; the `private` most frequent have one each. auxiliary=2 is the authors' for 131,000 items.
    Dahiya et al., Deep Encoders with Auxiliary Parameters for Extreme Classification, KDD 2023.
    """,
    {"setup": NGAME.replaced(auxiliary=4, private=1000)},
)


prime = variant(
    ngame,
    "prime",
    """DEXA with the mean vector of each item's queries in the item tower, a margin by the scores, and losses both ways (close to PRIME).

    Positives are drawn by inverse propensity. Of the authors' label tower the shallow transformer is missing: the vectors are summed.
    PRIME, NAACL 2025, as it is in the code of its successor ViXML.
    """,
    {
        "setup": NGAME.replaced(auxiliary=2, centroids=True, draw="propensity"),
        "size": 16,
        "dynamic": True,
        "both_ways": True,
    },
)


def dexml(data: Interactions, setup: Setup = SOFTMAX) -> Run:
    """Softmax over the whole catalogue for one positive at a time, the query's other positives left out (DEXML, decoupled softmax).

    A positive drawn for each query in each epoch gives on average the mean over its positives. Every step encodes all items: with text
    towers set chunk, so that they fit.
    Gupta et al., Dual-Encoders for Extreme Multi-Label Classification, ICLR 2024.
    """
    return compose(data, setup, Term(1.0, AllItems(data.n_items, exclude="known")))


def _loss(name: Literal["softmax", "hinge"]) -> Loss:
    return OnlineHard() if name == "hinge" else sampled_softmax
