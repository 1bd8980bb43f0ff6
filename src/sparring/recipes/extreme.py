"""Retrieval of labels, many of them rare, for texts or other queries: DPR, ANCE, NGAME, DEXA, PRIME, DEXML.

A training row is a query with one of its positives, redrawn in each epoch; all known positives of a query are excluded
from its negatives. For texts set an encoder. The authors train DistilBERT for 300 epochs in batches of 1600 at a rate
of 2e-4; the settings here are for towers that train at a larger rate in fewer epochs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch

from sparring.data.interactions import Interactions
from sparring.losses import Loss, OnlineHard, Reduction, sampled_softmax
from sparring.models.clusters.clustered_batches import ClusteredBatches
from sparring.models.item_corrections import Centroids
from sparring.negatives import AllItems, InBatch, NearestItems, Union
from sparring.recipes.arguments import PerQuery
from sparring.recipes.in_batch import item_frequency, with_pairs
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup

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


# Arguments of NGAME and its variants.
Size = Annotated[int, "queries of a cluster; 1 is random batches"]
Start = Annotated[int, "epoch of the first clusters; 0 is the first epoch"]
Every = Annotated[int, "epochs between two clusterings"]
Grow = Annotated[tuple[int, ...], "epochs from which the clusters are twice as large"]
HardestCount = Annotated[int, "hardest negatives of a query in the loss"]
Margin = Annotated[float, "margin of the hinge loss"]
Dynamic = Annotated[bool, "set the margin of each pair by its scores, from 0.1 to `margin`"]
Reduced = Annotated[Reduction, "sum or mean over a query's negatives"]
ConstantWeights = Annotated[bool, "stop the gradient through the weights of the negatives"]
BothWays = Annotated[bool, "add the loss of items against queries"]
HingeOrSoftmax = Annotated[Literal["softmax", "hinge"], "softmax, or NGAME's hinge (use tau=0.1)"]


def dpr(
    data: Interactions,
    setup: Setup = SOFTMAX,
    *,
    loss: HingeOrSoftmax = "softmax",
    corrected: Annotated[bool, "subtract the log of an item's expected count from its logit; softmax only"] = False,
) -> Run:
    """Softmax against the positives of the other queries in random batches (DPR, random in-batch).

    loss=hinge is NGAME with random batches.
    Karpukhin et al., Dense Passage Retrieval for Open-Domain Question Answering, EMNLP 2020.
    """
    if corrected and loss == "hinge":
        raise ValueError("corrected=true weighs the candidates of a softmax: it needs loss=softmax")
    frequency = item_frequency(data, setup) if corrected else None
    return compose(data, setup, Term(1.0, InBatch(frequency, exclude="known"), _loss(loss)))


def ance(
    data: Interactions,
    setup: Setup = SOFTMAX,
    *,
    n: Annotated[int, "draws from the list of each query"] = 1,
    k: Annotated[int, "nearest items listed for each query"] = 200,
    skip: Annotated[int, "first items of a list that are dropped"] = 0,
    every: Annotated[int, "epochs between two rankings"] = 5,
    start: Annotated[int, "epoch of the first ranking; 0 is the first epoch"] = 1,
    per_query: PerQuery = False,
    delay: Annotated[int, "epochs that a ranking may take in the background; 0 ranks in the foreground"] = 0,
    loss: HingeOrSoftmax = "softmax",
) -> Run:
    """In-batch negatives and n of each query's k nearest items, ranked again every few epochs (ANCE).

    The ranking is exact: it encodes all queries and all items, on a second GPU or another core if delay > 0.
    Xiong et al., Approximate Nearest Neighbor Negative Contrastive Learning for Dense Text Retrieval, ICLR 2021.
    """
    k, among = min(k, data.n_items), with_pairs(data)
    nearest = NearestItems(data.n_queries, n, k, skip, every, start, per_query, delay=delay, among=among)
    return compose(data, setup, Term(1.0, Union(InBatch(exclude="known"), nearest), _loss(loss)))


def ngame(
    data: Interactions,
    setup: Setup = NGAME,
    *,
    size: Size = 8,
    start: Start = 1,
    every: Every = 5,
    grow: Grow = (15,),
    k: HardestCount = 10,
    margin: Margin = 0.3,
    dynamic: Dynamic = False,
    reduction: Reduced = "sum",
    constant_weights: ConstantWeights = False,
    both_ways: BothWays = False,
) -> Run:
    """Batches of similar queries and a hinge loss on their hardest negatives, then a classifier per item (NGAME).

    clf_epochs=0 trains no classifiers; clf_fusion=true ranks by towers and classifiers.
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


def dexa(
    data: Interactions,
    setup: Setup = NGAME.replaced(auxiliary=4, private=1000),
    *,
    size: Size = 8,
    start: Start = 1,
    every: Every = 5,
    grow: Grow = (15,),
    k: HardestCount = 10,
    margin: Margin = 0.3,
    dynamic: Dynamic = False,
    reduction: Reduced = "sum",
    constant_weights: ConstantWeights = False,
    both_ways: BothWays = False,
) -> Run:
    """NGAME with free vectors, one for each cluster of items, added in the item tower (DEXA).

    About `auxiliary` items share a vector; the `private` most frequent have one each. The authors use auxiliary=2 for
    131,000 items.
    Dahiya et al., Deep Encoders with Auxiliary Parameters for Extreme Classification, KDD 2023.
    """
    return ngame(**locals())  # the same arguments with other defaults


def prime(
    data: Interactions,
    setup: Setup = NGAME.replaced(auxiliary=2, centroids=True, draw="propensity"),
    *,
    size: Size = 16,
    start: Start = 1,
    every: Every = 5,
    grow: Grow = (15,),
    k: HardestCount = 10,
    margin: Margin = 0.3,
    dynamic: Dynamic = True,
    reduction: Reduced = "sum",
    constant_weights: ConstantWeights = False,
    both_ways: BothWays = True,
) -> Run:
    """DEXA with the mean vector of an item's queries in its tower, margins by score, losses both ways (close to PRIME).

    Positives are drawn by inverse propensity. The authors' label tower has a shallow transformer; here the vectors are
    summed.
    PRIME, NAACL 2025, as implemented in its successor ViXML.
    """
    return ngame(**locals())  # the same arguments with other defaults


def dexml(data: Interactions, setup: Setup = SOFTMAX) -> Run:
    """Softmax over the catalogue for one positive at a time, the query's others excluded (DEXML, decoupled softmax).

    A positive drawn for each query in each epoch gives in expectation the mean over its positives. Every step encodes
    all items: with text towers set chunk, so that they fit.
    Gupta et al., Dual-Encoders for Extreme Multi-Label Classification, ICLR 2024.
    """
    return compose(data, setup, Term(1.0, AllItems(data.n_items, "known", with_pairs(data))))


def _loss(name: Literal["softmax", "hinge"]) -> Loss:
    return OnlineHard() if name == "hinge" else sampled_softmax
