"""One function per published setting, each returning a complete Run.

A recipe takes the training interactions, a Setup (what every recipe shares: towers, optimiser, schedule) and its own arguments. Where a
paper and its released code differ, `form` chooses; docs/methods/ tells the difference. A variant is a call with other arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from sparring.recipes.esans import esans
from sparring.recipes.extreme import ance, dexa, dexml, dpr, ngame, prime
from sparring.recipes.hard import ahns, amns, bmns, dns, fairneg, midx, mixgcf, sce
from sparring.recipes.in_batch import (
    PAPER,
    Form,
    bir,
    bpr,
    cbns,
    debiased_mns,
    default,
    full_softmax,
    g_tower,
    mns,
    pns,
    popularity,
    quick,
    shown,
    ssl,
    ssl_pop,
    uns,
    xir,
)
from sparring.recipes.losses import ada_tau, bsl, ccl, psl, sl, slatk
from sparring.recipes.run import Run

__all__ = ["PAPER", "RECIPES", "Form", "popularity"]

RECIPES: dict[str, Callable[..., Run]] = {
    recipe.__name__: recipe
    for recipe in (
        default,
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
}
RECIPES |= {recipe.__name__: recipe for recipe in (dns, ahns, mixgcf, amns, bmns, fairneg, midx, sce)}
RECIPES |= {recipe.__name__: recipe for recipe in (sl, bsl, psl, slatk, ccl, ada_tau)}
RECIPES |= {esans.__name__: esans}
RECIPES |= {recipe.__name__: recipe for recipe in (dpr, ance, ngame, dexa, prime, dexml)}
__all__ += [*RECIPES]
