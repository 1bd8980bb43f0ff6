"""ESANS: negatives by clusters of items, and mixtures of them; with the controls that its clusters are measured against."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions
from sparring.models.clusters.codes import Codes
from sparring.models.clusters.kmeans import k_means, nearest
from sparring.models.spectral import spectral
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
from sparring.recipes.hard import column_classes
from sparring.recipes.in_batch import offered
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.setup import Setup

Preset = Literal["ours", "literal"]

# Xing et al. 2025, table 6 and appendix C. Ours: cosines, as we read tau 0.05, and a small start, from which this rate turns vectors.
ESANS = Setup.of(dim=64, tau=0.05, init_std=0.01, batch_size=512, lr=2e-4)


def esans(
    data: Interactions,
    setup: Setup = ESANS,
    *,
    codes: str | Codes = "behaviour",
    m_c: int = 2,
    m_o: int = 5,
    m_h: int = 5,
    lam: float | LamRule = 0.1,
    eta: float = 0.6,
    gamma: float = 1.0,
    preset: Preset = "ours",
    distance: Distance | None = None,
    normalisation: Normalisation | None = None,
    exclude: Literal["preset", "cell", "known", "positive", "none"] = "preset",
    simple_mixtures: bool = True,
    hard_mixtures: bool = True,
    shared: bool = True,
    correction: CountCorrection = "none",
    renorm: bool = False,
    detach_positive: bool = False,
    offset: float = 0.0,
    layer: int | None = None,
    k_primary: int = 300,
    k_secondary: int = 15,
) -> Run:
    """Easy negatives from other clusters of items, hard ones from the positive's own, and mixtures of both (ESANS).

    codes: a file of `sparring cluster`; behaviour: k_primary x k_secondary clusters of co-interaction vectors, made here; and the controls
    random, shuffled:FILE (the sizes of the file, items dealt anew) and column:NAME (a cluster for each value, cells at random). m_h=0
    leaves out the hard ones, simple_mixtures and hard_mixtures the made-up ones. preset=literal reads equations 9 and 11 to the letter (far
    clusters first, shares by (1 + cos) / 2) and masks of real items the positive alone; ours masks its cell. Both mask the mixtures of the
    positive's primary cluster, neither the query's other known positives: exclude=known does. distance, normalisation, exclude override.
    correction=counts (not the paper's) weighs every draw by 1 / its expected count: real negatives then stand for all items but the cell.
    Xing et al., ESANS: Effective and Semantic-Aware Negative Sampling for Large-Scale Retrieval Systems, WWW 2025.
    """
    ours = preset == "ours"
    masks: CellExcludeKind = exclude if exclude != "preset" else "cell" if ours else "positive"
    near: Distance = distance or ("cosine" if ours else "literal")
    found = clusters(data, codes, k_primary, k_secondary, m_o, setup.seed)
    negatives: list[Negatives] = []
    # corrected hard negatives stand for the rest of the positive's cluster, so that the shared ones must not
    apart: CellExcludeKind = "cluster" if correction == "counts" and masks == "cell" and m_h > 0 else masks
    rows = offered(data, setup)
    others = OtherClusters(found, min(m_c, found.k_primary - 1), m_o, gamma, near, shared, apart, correction, rows)
    if simple_mixtures and m_o > 1:
        scale: Normalisation = normalisation or ("minmax_block" if ours else "affine")
        negatives.append(Interpolated(others, eta, scale, renorm, offset, layer))
    else:
        negatives.append(others)
    if m_h > 0:
        same = SameCluster(found, m_h, exclude=masks, correction=correction)
        negatives.append(TowardsPositive(same, lam, detach_positive, renorm, offset, layer) if hard_mixtures else same)
    return compose(data, setup, Term(1.0, negatives[0] if len(negatives) == 1 else Union(*negatives)))


def set_codes(run: Run, codes: Codes) -> None:
    """Go on with other codes of the same items, in every part of a run that draws by cluster: at any time, without a restart.

    fit(run, split, progress=TrainingProgress(epoch=lambda record: set_codes(run, msac.update(modalities, data.item_ids))))
    """
    for module in run.modules().modules():
        if isinstance(module, ByCluster):
            module.set_codes(codes)


def clusters(
    data: Interactions, codes: str | Codes, k_primary: int = 300, k_secondary: int = 15, m_o: int = 5, seed: int = 0
) -> Codes:
    """The codes that a word or a file names, for the items of this data; k_primary falls to what leaves 2 m_o items to a cluster."""
    n = data.n_items
    if k_primary < 2 or k_secondary < 1 or m_o < 1:
        raise UserError(
            f"clusters need k_primary >= 2, k_secondary >= 1 and m_o >= 1; got {k_primary}, {k_secondary}, {m_o}"
        )
    k_primary, k_secondary = max(2, min(k_primary, n // (2 * m_o))), min(k_secondary, n)
    if isinstance(codes, Codes):
        found = codes
    elif codes == "behaviour":
        found = behaviour_codes(data, k_primary, k_secondary, seed)
    elif codes == "random":
        found = Codes.random(n, k_primary, k_secondary, seed, data.item_ids)
    elif codes.startswith("column:"):
        deal = torch.randperm(n, generator=torch.Generator().manual_seed(seed)) % k_secondary
        found = Codes.from_labels(column_classes(data, codes.removeprefix("column:")), deal, ids=data.item_ids)
    else:
        file = Codes.load(codes.removeprefix("shuffled:")).aligned(data.item_ids)
        found = file.shuffled(seed) if codes.startswith("shuffled:") else file
    if len(found) != n:
        raise UserError(f"there are codes of {len(found):,} items, but the data has {n:,}: give codes of these items")
    if found.k_primary < 2:
        raise UserError(f"{found} has no other cluster to draw negatives from: at least 2 are needed")
    return found


def behaviour_codes(data: Interactions, k_primary: int, k_secondary: int, seed: int = 0, dim: int = 64) -> Codes:
    """Codes from the interactions alone: spectral item vectors of length 1, k-means, and k-means of what it leaves over."""
    positives = data.positives()
    dim = max(
        1, min(dim, data.n_items // 4, data.n_queries // 4)
    )  # beyond that the directions of a small matrix are noise
    vectors = F.normalize(spectral(positives.start, positives.items, data.n_items, dim, seed=seed)[1], dim=1)
    generator = torch.Generator().manual_seed(seed)
    centres = k_means(vectors, k_primary, generator)
    primary = nearest(vectors, centres)
    left = vectors - centres[primary]
    return Codes(primary, nearest(left, k_means(left, k_secondary, generator)), centres, k_secondary, data.item_ids)
