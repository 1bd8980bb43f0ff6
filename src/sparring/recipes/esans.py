"""ESANS: negatives by clusters of items and their mixtures, and the controls that its clusters are compared with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions
from sparring.data.modalities import Modalities
from sparring.models.clusters import MSAC, ROBUST
from sparring.models.clusters.codes import Codes, default_clusters
from sparring.models.clusters.columns import column_vectors
from sparring.models.clusters.kmeans import k_means, nearest
from sparring.models.spectral_start import spectral
from sparring.negatives import (
    CellExcludeKind,
    CountCorrection,
    Distance,
    Interpolated,
    LamRule,
    Negatives,
    Normalisation,
    OtherClusters,
    SameCluster,
    TowardsPositive,
    Union,
)
from sparring.negatives.clusters import ByCluster
from sparring.recipes.arguments import Range
from sparring.recipes.hard import column_classes
from sparring.recipes.in_batch import positive_counts, with_pairs
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup

Preset = Literal["ours", "literal"]

# Xing et al. 2025, table 6 and appendix C. Ours: cosines, which tau 0.05 suggests, and an init_std small enough for
# this learning rate.
ESANS = Setup.of(dim=64, tau=0.05, init_std=0.01, batch_size=512, lr=2e-4)
PASSES = 10  # over the items, when clusters are learned here; 500 steps at most
# Clusters learned from data that still exists: tuning builds the recipe again and again.
_learned: WeakKeyDictionary[Interactions, dict[tuple[object, ...], Codes]] = WeakKeyDictionary()


def esans(
    data: Interactions,
    setup: Setup = ESANS,
    *,
    codes: Annotated[
        str | Codes,
        "a file of `sparring cluster`; modalities: item columns and behaviour, aligned; behaviour alone; or a control: "
        "random, shuffled:FILE, column:NAME",
    ] = "modalities",
    m_c: Annotated[int, "other clusters that easy negatives are drawn from"] = 2,
    m_o: Annotated[int, "easy negatives of a cluster"] = 5,
    m_h: Annotated[int, "hard negatives from the positive's cluster; 0 draws none"] = 5,
    lam: Annotated[
        float | LamRule, Range(-0.3, 0.5), "share of the positive in a hard mixture, or a rule for it"
    ] = 0.1,
    eta: Annotated[float, "exponent of the mixing shares by similarity to a mixture's anchor"] = 0.6,
    gamma: Annotated[float, "exponent that prefers near clusters; 0 draws all equally"] = 1.0,
    preset: Annotated[Preset, "our reading of equations 9 and 11, or the literal one"] = "ours",
    distance: Annotated[Distance | None, "distance between clusters; none: by preset"] = None,
    normalisation: Annotated[Normalisation | None, "normalisation of mixing shares; none: by preset"] = None,
    exclude: Annotated[
        Literal["preset", "cell", "known", "positive", "none"], "excluded real items: by preset, or one of these"
    ] = "preset",
    simple_mixtures: Annotated[bool, "add mixtures of easy negatives"] = True,
    hard_mixtures: Annotated[bool, "mix hard negatives with the positive"] = True,
    shared: Annotated[bool, "share easy negatives among the batch"] = True,
    hard_shared: Annotated[bool, "share hard negatives and their mixtures among the batch"] = False,
    correction: Annotated[CountCorrection, "counts weighs every draw by 1 / its expected count"] = "none",
    renorm: Annotated[bool, "scale mixtures to the mean length of their members"] = False,
    detach_positive: Annotated[bool, "stop the gradient through the positive of a hard mixture"] = False,
    offset: Annotated[float, "added to the logits of mixtures"] = 0.0,
    layer: Annotated[int | None, "layer of the item tower at which vectors are mixed; none: its output"] = None,
    k_primary: Annotated[
        int | None, "primary clusters that are made here; none: one for 295 items, from 2 to 300"
    ] = None,
    k_secondary: Annotated[int, "secondary clusters of each"] = 15,
) -> Run:
    """Easy negatives from other clusters of items, hard ones from the positive's own, and mixtures of both (ESANS).

    codes=modalities clusters the words and vectors of the item columns together with co-interaction vectors of the
    training data; where items have no such columns it is codes=behaviour, which has the latter alone and is the paper's
    ablation without aligning. The controls are random, shuffled:FILE (the cluster sizes of a file, items dealt at
    random) and column:NAME (a cluster for each value, cells at random).
    preset=literal follows equations 9 and 11 to the letter (far clusters first, shares by (1 + cos) / 2) and excludes
    only the positive among real items; ours excludes its cell. Both exclude mixtures of the positive's primary cluster,
    neither the query's other known positives: exclude=known does. The paper does not say which negatives a batch
    shares: shared and hard_shared have the readings, and a shared mixture of a hard negative holds the positive that it
    was drawn for. correction=counts is not in the paper: real negatives then stand for all items outside the cell.
    Xing et al., ESANS: Effective and Semantic-Aware Negative Sampling for Large-Scale Retrieval Systems, WWW 2025.
    """
    ours = preset == "ours"
    masks: CellExcludeKind = exclude if exclude != "preset" else "cell" if ours else "positive"
    near: Distance = distance or ("cosine" if ours else "literal")
    if hard_shared and correction == "counts":
        raise UserError(
            "correction=counts needs hard_shared=false: shared hard negatives would stand for items of the easy ones"
        )
    cells = item_codes(data, codes, k_primary, k_secondary, m_o, setup.seed)
    negatives: list[Negatives] = []
    # Corrected hard negatives stand for the rest of the positive's cluster, so the shared ones must not.
    apart: CellExcludeKind = "cluster" if correction == "counts" and masks == "cell" and m_h > 0 else masks
    rows, among, m_c = positive_counts(data, setup), with_pairs(data), min(m_c, cells.k_primary - 1)
    others = OtherClusters(cells, m_c, m_o, gamma, near, shared, apart, correction, rows, among)
    if simple_mixtures and m_o > 1:
        scale: Normalisation = normalisation or ("minmax_block" if ours else "affine")
        negatives.append(Interpolated(others, eta, scale, renorm, offset, layer))
    else:
        negatives.append(others)
    if m_h > 0:
        same = SameCluster(cells, m_h, hard_shared, masks, correction, among=among)
        negatives.append(TowardsPositive(same, lam, detach_positive, renorm, offset, layer) if hard_mixtures else same)
    return compose(data, setup, Term(1.0, negatives[0] if len(negatives) == 1 else Union(*negatives)))


def set_codes(run: Run, codes: Codes) -> None:
    """Continue with other codes of the same items, in every part of a run that draws by cluster: no restart is needed.

    fit(run, split, progress=TrainingProgress(epoch=lambda record: set_codes(run, msac.update(modalities, ids))))
    """
    for module in run.modules().modules():
        if isinstance(module, ByCluster):
            module.set_codes(codes)


def item_codes(
    data: Interactions,
    codes: str | Codes,
    k_primary: int | None = None,
    k_secondary: int = 15,
    m_o: int = 5,
    seed: int = 0,
) -> Codes:
    """The codes that a word or a file names, for this data's items; at least 2 m_o items per primary cluster."""
    n = data.n_items
    k_primary = default_clusters(n) if k_primary is None else k_primary
    if k_primary < 2 or k_secondary < 1 or m_o < 1:
        raise UserError(
            f"clusters need k_primary >= 2, k_secondary >= 1 and m_o >= 1; got {k_primary}, {k_secondary}, {m_o}"
        )
    k_primary, k_secondary = max(2, min(k_primary, n // (2 * m_o))), min(k_secondary, n)
    if isinstance(codes, Codes):
        cells = codes
    elif codes in ("modalities", "behaviour"):
        known, key = _learned.setdefault(data, {}), (codes, k_primary, k_secondary, m_o, seed)
        if key not in known:
            known[key] = (
                modality_codes(data, k_primary, k_secondary, m_o, seed)
                if codes == "modalities"
                else behaviour_codes(data, k_primary, k_secondary, seed)
            )
        cells = known[key]
    elif codes == "random":
        cells = Codes.random(n, k_primary, k_secondary, seed, data.item_ids)
    elif codes.startswith("column:"):
        deal = torch.randperm(n, generator=torch.Generator().manual_seed(seed)) % k_secondary
        cells = Codes.from_labels(column_classes(data, codes.removeprefix("column:")), deal, ids=data.item_ids)
    else:
        file = Codes.load(codes.removeprefix("shuffled:")).aligned(data.item_ids)
        cells = file.shuffled(seed) if codes.startswith("shuffled:") else file
    if len(cells) != n:
        raise UserError(f"the codes are of {len(cells):,} items, but the data has {n:,}: give codes of these items")
    if cells.k_primary < 2:
        raise UserError(f"{cells} has one cluster: negatives need at least 2")
    return cells


def modality_codes(data: Interactions, k_primary: int, k_secondary: int, min_size: int = 5, seed: int = 0) -> Codes:
    """Codes by MSAC from the item columns and behaviour, as `column_vectors` reads them; without any, of behaviour."""
    vectors = {} if data.item_table is None else column_vectors(data.item_table, seed=seed)
    if not vectors:
        return behaviour_codes(data, k_primary, k_secondary, seed)
    vectors["co-interactions"] = behaviour_vectors(data, seed).numpy()
    modalities = Modalities.from_arrays(vectors)
    steps = min(math.ceil(PASSES * data.n_items / ROBUST.batch_size) + 20, 500)
    sizes: dict[str, Any] = {"k_primary": k_primary, "k_secondary": k_secondary, "min_size": min_size}
    settings = replace(ROBUST, **sizes, dim=64, warmup=2 * steps // 5, steps=steps, seed=seed)
    return MSAC(modalities.widths, settings).fit(modalities, data.item_ids)


def behaviour_vectors(data: Interactions, seed: int = 0, dim: int = 64) -> Tensor:
    """(N, dim) unit vectors of items by the queries that they share in the training data."""
    positives = data.positives()
    dim = max(1, min(dim, data.n_items // 4, data.n_queries // 4))  # further directions of a small matrix are noise
    return F.normalize(spectral(positives.start, positives.items, data.n_items, dim, seed=seed)[1], dim=1)


def behaviour_codes(data: Interactions, k_primary: int, k_secondary: int, seed: int = 0) -> Codes:
    """Codes from the interactions alone: k-means of normalised spectral item vectors, then of the residuals."""
    vectors = behaviour_vectors(data, seed)
    generator = torch.Generator().manual_seed(seed)
    centres = k_means(vectors, k_primary, generator)
    primary = nearest(vectors, centres)
    residuals = vectors - centres[primary]
    secondary = nearest(residuals, k_means(residuals, k_secondary, generator))
    return Codes(primary, secondary, centres, k_secondary, data.item_ids)
