"""Newer losses on cosine scores with uniform negatives: SL, BSL, PSL, SL@K, CCL, Ada-tau.

Their authors draw negatives for each query; here they are shared by the batch unless per_query asks for that, since the gradient is the
same on average and a step many times cheaper. The authors of PSL and SL@K draw again what the query is known to have; here it is left out
(exclude). Drawn uniformly negatives all weigh the same, so none of these losses needs a correction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from sparring.data.interactions import Interactions
from sparring.losses import AdaTau, BSLForm, Loss, SLatK, Surrogate, adaptive_softmax, softmax_loss
from sparring.losses import bsl as bsl_loss
from sparring.losses import ccl as ccl_loss
from sparring.losses import psl as psl_loss
from sparring.negatives import ExcludeKind, Sampled, Uniform
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup

# The authors' scripts for Gowalla: Adam at 1e-4 from the small tables of Xavier's start. Cosines forget the length of a vector, so a small
# start makes every step turn it further; at init_std 0.1 this rate would take ten times as long.
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
# Dimensions, batch and negatives of PSL and SL@K, whose authors tune rate and temperature for each data set: those are ours.
BENCHMARK = AUTHORS.replaced(tau=0.1, epochs=200, lr=5e-4, patience=20, select="ndcg@20")


def sl(
    data: Interactions,
    setup: Setup = AUTHORS,
    *,
    n: int = 800,
    per_query: bool = False,
    exclude: ExcludeKind = "positive",
) -> Run:
    """Softmax loss on cosine scores, negatives alone under the logarithm (SL, SSM).

    Wu et al., On the Effectiveness of Sampled Softmax Loss for Item Recommendation, TOIS 2024.
    """
    return compose(data, setup, _against_uniform(data, n, per_query, exclude, softmax_loss))


def bsl(
    data: Interactions,
    setup: Setup = AUTHORS,
    *,
    n: int = 800,
    exponent: float = 1.22,
    form: BSLForm = "corrected",
    per_query: bool = False,
    exclude: ExcludeKind = "positive",
) -> Run:
    """Softmax loss with temperatures of their own for positives and negatives (BSL).

    exponent = tau_2 / tau_1. form="corrected" is the form of later benchmarks, with one positive per query a rescaled SL; "release", the
    form of the authors' scripts, raises the sum over negatives to the exponent and leaves the positive as it is.
    Wu et al., BSL: Understanding and Improving Softmax Loss for Recommendation, ICDE 2024.
    """
    return compose(data, setup, _against_uniform(data, n, per_query, exclude, bsl_loss(exponent, form)))


def psl(
    data: Interactions,
    setup: Setup = BENCHMARK.replaced(tau=0.05),
    *,
    n: int = 1000,
    surrogate: Surrogate = "relu",
    per_query: bool = False,
    exclude: ExcludeKind = "known",
) -> Run:
    """Softmax loss with a tighter surrogate than the exponential, on half cosines (PSL); tau = 0.05 is 0.1 in SL.

    Yang et al., PSL: Rethinking and Improving Softmax Loss from Pairwise Perspective, NeurIPS 2024.
    """
    return compose(data, setup, _against_uniform(data, n, per_query, exclude, psl_loss(surrogate)))


def slatk(
    data: Interactions,
    setup: Setup = BENCHMARK,
    *,
    n: int = 1000,
    k: int = 20,
    every: int = 5,
    tau_w: float = 1.0,
    sample: int = 1000,
    constant_weight: bool = False,
    per_query: bool = False,
    exclude: ExcludeKind = "known",
) -> Run:
    """Softmax loss weighed by how near each positive is to its query's top k (SL@K); thresholds from `sample` items `every` epochs.

    constant_weight=True keeps the gradient out of the weight; the authors' code lets it through.
    Yang et al., Breaking the Top-K Barrier: Advancing Top-K Ranking Metrics Optimization, KDD 2025.
    """
    loss = SLatK(data.n_queries, k, sample, every, tau_w, constant_weight)
    return compose(data, setup, _against_uniform(data, n, per_query, exclude, loss))


def ccl(
    data: Interactions,
    setup: Setup = AUTHORS,
    *,
    n: int = 1000,
    margin: float = 0.9,
    weight: float = 150.0,
    per_query: bool = False,
    exclude: ExcludeKind = "positive",
) -> Run:
    """Cosine contrastive loss: negatives count only above a margin (CCL, the loss of SimpleX on plain id tables).

    Mao et al., SimpleX: A Simple and Strong Baseline for Collaborative Filtering, CIKM 2021.
    """
    return compose(data, setup, _against_uniform(data, n, per_query, exclude, ccl_loss(margin, weight)))


def ada_tau(
    data: Interactions,
    setup: Setup = AUTHORS.replaced(batch_size=2048),
    *,
    n: int = 1024,
    beta: float = 1.0,
    quantile: float | None = None,
    gap: float = 0.7,
    settle: int | None = None,
    means: Literal["epoch", "running"] = "epoch",
    per_query: bool = False,
) -> Run:
    """Softmax loss whose temperature follows the data, and each query's own loss (Ada-tau); the setup's tau is not used.

    For the first `settle` epochs the scores say nothing, and `gap` stands for what they will: the authors' 100, or unless given a quarter
    of the training where that is less.
    The authors' runs on Gowalla have quantile=0.9 and beta=0.125, the others the mean and beta=0.5; the paper says beta = 1.
    Chen et al., Adap-tau: Adaptively Modulating Embedding Magnitude for Recommendation, WWW 2023.
    """
    counts = torch.bincount(torch.from_numpy(data.queries).long(), minlength=data.n_queries)
    settle = min(100, -(-setup.training.epochs // 4)) if settle is None else settle
    temperature = AdaTau(counts, data.n_items, beta, quantile, gap, settle, means)
    term = _against_uniform(data, n, per_query, "positive", adaptive_softmax(temperature))
    return replace(compose(data, setup, term), temperature=temperature)


def _against_uniform(data: Interactions, n: int, per_query: bool, exclude: ExcludeKind, loss: Loss) -> Term:
    return Term(1.0, Sampled(Uniform(data.n_items), n, per_query, "none", exclude), loss)
