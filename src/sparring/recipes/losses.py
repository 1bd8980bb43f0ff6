"""Losses with uniform negatives: SL, BSL, PSL, SL@K, CCL and Ada-tau on cosines, gBCE on inner products.

The authors draw negatives for each query; here the batch shares them unless per_query is set: the gradient has the same
expectation and a step is many times cheaper. The authors of PSL and SL@K redraw known positives; here exclude does.
Uniform negatives have equal weights, so none of these losses needs a correction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch

from sparring.data.interactions import Interactions
from sparring.losses import AdaTau, BSLForm, Loss, SLatK, Surrogate, adaptive_softmax, softmax_loss
from sparring.losses import bsl as bsl_loss
from sparring.losses import ccl as ccl_loss
from sparring.losses import gbce as gbce_loss
from sparring.losses import psl as psl_loss
from sparring.negatives import ExcludeKind, Sampled
from sparring.recipes.arguments import Excluded, OneOf, PerQuery, Range, UniformDraws
from sparring.recipes.in_batch import uniform
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup

# The authors' scripts for Gowalla: Adam at 1e-4 from Xavier's small initialisation. Cosines ignore a vector's length,
# so each step turns a short one further; at init_std 0.1 this rate would take ten times as long.
AUTHORS = Setup.of(
    dim=64,
    tau=0.08,
    init_std=0.01,
    batch_size=1024,
    epochs=400,
    optimizer="adam",
    lr=1e-4,
    patience=50,
    select="recall@20",
)
# Dimensions, batch and negatives of PSL and SL@K; the authors tune rate and temperature per data set, ours are fixed.
BENCHMARK = AUTHORS.replaced(tau=0.1, epochs=200, lr=5e-4, patience=20, select="ndcg@20")


def sl(
    data: Interactions,
    setup: Setup = AUTHORS,
    *,
    n: UniformDraws = 800,
    per_query: PerQuery = False,
    exclude: Excluded = "positive",
) -> Run:
    """Softmax loss on cosine scores, negatives alone under the logarithm (SL, SSM).

    Wu et al., On the Effectiveness of Sampled Softmax Loss for Item Recommendation, TOIS 2024.
    """
    return compose(data, setup, _against_uniform(data, n, per_query, exclude, softmax_loss))


def bsl(
    data: Interactions,
    setup: Setup = AUTHORS,
    *,
    n: UniformDraws = 800,
    exponent: Annotated[float, Range(1.0, 1.5), "ratio of the two temperatures, tau_2 / tau_1"] = 1.22,
    form: Annotated[BSLForm, OneOf(), "the form of later benchmarks, or of the authors' scripts"] = "corrected",
    per_query: PerQuery = False,
    exclude: Excluded = "positive",
) -> Run:
    """Softmax loss with separate temperatures for positives and negatives (BSL).

    form="corrected" is a rescaled SL if each query has one positive; "release" raises the sum over negatives to the
    exponent and leaves the positive unchanged.
    Wu et al., BSL: Understanding and Improving Softmax Loss for Recommendation, ICDE 2024.
    """
    return compose(data, setup, _against_uniform(data, n, per_query, exclude, bsl_loss(exponent, form)))


def psl(
    data: Interactions,
    setup: Setup = BENCHMARK.replaced(tau=0.05),
    *,
    n: UniformDraws = 1000,
    surrogate: Annotated[Surrogate, OneOf(), "surrogate in place of the exponential"] = "relu",
    per_query: PerQuery = False,
    exclude: Excluded = "known",
) -> Run:
    """Softmax loss with a tighter surrogate than the exponential, on half cosines (PSL); tau = 0.05 is 0.1 in SL.

    Yang et al., PSL: Rethinking and Improving Softmax Loss from Pairwise Perspective, NeurIPS 2024.
    """
    return compose(data, setup, _against_uniform(data, n, per_query, exclude, psl_loss(surrogate)))


def slatk(
    data: Interactions,
    setup: Setup = BENCHMARK,
    *,
    n: UniformDraws = 1000,
    k: Annotated[int, "cutoff of the ranking that the loss optimises"] = 20,
    every: Annotated[int, "epochs between two estimates of the thresholds"] = 5,
    tau_w: Annotated[float, Range(0.2, 5.0, log=True), "temperature of the weights"] = 1.0,
    sample: Annotated[int, "items from which a threshold is estimated"] = 1000,
    constant_weight: Annotated[bool, "stop the gradient through the weights; the authors' code does not"] = False,
    per_query: PerQuery = False,
    exclude: Excluded = "known",
) -> Run:
    """Softmax loss weighted by how near each positive is to its query's top k (SL@K).

    Yang et al., Breaking the Top-K Barrier: Advancing Top-K Ranking Metrics Optimization, KDD 2025.
    """
    loss = SLatK(data.n_queries, k, sample, every, tau_w, constant_weight)
    return compose(data, setup, _against_uniform(data, n, per_query, exclude, loss))


def ccl(
    data: Interactions,
    setup: Setup = AUTHORS,
    *,
    n: UniformDraws = 1000,
    margin: Annotated[float, Range(0.3, 0.98), "cosine above which a negative counts"] = 0.9,
    weight: Annotated[float, Range(10.0, 1000.0, log=True), "weight of the negatives"] = 150.0,
    per_query: PerQuery = False,
    exclude: Excluded = "positive",
) -> Run:
    """Cosine contrastive loss: negatives count only above a margin (CCL, the loss of SimpleX on plain id tables).

    Mao et al., SimpleX: A Simple and Strong Baseline for Collaborative Filtering, CIKM 2021.
    """
    return compose(data, setup, _against_uniform(data, n, per_query, exclude, ccl_loss(margin, weight)))


def ada_tau(
    data: Interactions,
    setup: Setup = AUTHORS.replaced(batch_size=2048),
    *,
    n: UniformDraws = 1024,
    beta: Annotated[float, Range(0.1, 2.0, log=True), "damping of a query's loss in its temperature"] = 1.0,
    quantile: Annotated[
        float | None, "quantile of the losses that leaves a temperature unchanged; none: their mean"
    ] = None,
    gap: Annotated[float, "mean score of known pairs less that of all pairs, until it is measured"] = 0.7,
    settle: Annotated[int | None, "epochs before the gap is measured; none: 100 or a quarter of the epochs"] = None,
    means: Annotated[
        Literal["epoch", "running"], "measure the gap on all pairs before each epoch, or keep a running average"
    ] = "epoch",
    per_query: PerQuery = False,
) -> Run:
    """Softmax loss with a temperature from the data and from each query's own loss (Ada-tau); it ignores tau.

    The authors' runs on Gowalla use quantile=0.9 and beta=0.125, the others the mean and beta=0.5; the paper beta = 1.
    Chen et al., Adap-tau: Adaptively Modulating Embedding Magnitude for Recommendation, WWW 2023.
    """
    counts = torch.bincount(torch.from_numpy(data.queries).long(), minlength=data.n_queries)
    settle = min(100, -(-setup.training.epochs_on() // 4)) if settle is None else settle
    temperature = AdaTau(counts, data.n_items, beta, quantile, gap, settle, means)
    term = _against_uniform(data, n, per_query, "positive", adaptive_softmax(temperature))
    return replace(compose(data, setup, term), temperature=temperature)


def gbce(
    data: Interactions,
    setup: Setup = Setup.of(score="dot", tau=1.0, init_std=0.02, batch_size=1024, optimizer="adam", lr=0.001),
    *,
    n: UniformDraws = 256,
    calibration: Annotated[float, Range(0.0, 1.0), "0 is plain cross-entropy, 1 gives calibrated scores"] = 0.75,
    offset: Annotated[bool, "add the best constant score to all scores in the loss; the paper does not"] = True,
    per_query: PerQuery = False,
    exclude: Excluded = "positive",
) -> Run:
    """Binary cross-entropy with the positive weighted for the share of the catalogue that is drawn (gBCE).

    Petrov and Macdonald, gSASRec: Reducing Overconfidence in Sequential Recommendation, RecSys 2023.
    """
    loss = gbce_loss(data.n_items, calibration, n if offset else None)
    return compose(data, setup, _against_uniform(data, n, per_query, exclude, loss))


def _against_uniform(data: Interactions, n: int, per_query: bool, exclude: ExcludeKind, loss: Loss) -> Term:
    return Term(1.0, Sampled(uniform(data), n, per_query, "none", exclude), loss)
