"""One function per published method, each returning a complete Run; Setup, Run, and recipes and settings by name.

A recipe takes the training interactions, a Setup (settings that every recipe shares) and its own arguments. Where a
paper and its released code differ, `form` chooses. Nothing is trained or evaluated here.
"""

from __future__ import annotations

from collections.abc import Callable

from sparring.recipes.arguments import Form, OneOf, Range
from sparring.recipes.baselines import ease, ials, item_knn, popularity
from sparring.recipes.esans import esans
from sparring.recipes.extreme import ance, dexa, dexml, dpr, ngame, prime
from sparring.recipes.filtered import gist, rocketqa, topk_marginpos, topk_percpos
from sparring.recipes.hard import ahns, amns, bmns, dns, fairneg, midx, mixgcf, sce
from sparring.recipes.in_batch import (
    PAPER,
    bir,
    bpr,
    cbns,
    debiased_mns,
    default,
    full_softmax,
    g_tower,
    item_frequency,
    mns,
    pns,
    quick,
    shown,
    ssl,
    ssl_pop,
    tables,
    uns,
    with_pairs,
    xir,
)
from sparring.recipes.losses import ada_tau, bsl, ccl, gbce, psl, sl, slatk
from sparring.recipes.run import Run

_IN_BATCH = (
    default,
    tables,
    quick,
    uns,
    pns,
    bpr,
    ssl,
    ssl_pop,
    g_tower,
    mns,
    debiased_mns,
    bir,
    xir,
    cbns,
    full_softmax,
    shown,
)
_HARD = (dns, ahns, mixgcf, amns, bmns, fairneg, midx, sce)
_LOSSES = (sl, bsl, psl, slatk, ccl, ada_tau, gbce)
_EXTREME = (dpr, ance, ngame, dexa, prime, dexml)
_FILTERED = (topk_percpos, topk_marginpos, gist, rocketqa)
_BASELINES = (popularity, item_knn, ease, ials)
RECIPES: dict[str, Callable[..., Run]] = {
    recipe.__name__: recipe for recipe in (*_IN_BATCH, *_HARD, *_LOSSES, esans, *_EXTREME, *_FILTERED, *_BASELINES)
}

__all__ = ["PAPER", "RECIPES", "Form", "OneOf", "Range", "item_frequency", "with_pairs", *RECIPES]
