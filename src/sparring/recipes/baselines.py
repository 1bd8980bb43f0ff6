"""Baselines that are solved, in closed form or by sweeps, instead of trained by steps; they draw no negatives.

A recipe takes from a Setup what its solver reads (`settings.SOLVED`, and for sweeps `settings.SWEPT`).
"""

from __future__ import annotations

from typing import Annotated

from sparring.core.devices import pick_device
from sparring.data.histories import Histories
from sparring.data.interactions import Interactions
from sparring.models.item_to_item import Ease, ItemKnn, check_square
from sparring.models.least_squares import Ials
from sparring.models.popularity import ItemCounts
from sparring.recipes.arguments import Range
from sparring.recipes.run import Run, solved
from sparring.recipes.setup import Setup

_CLOSED = Setup.of(optimizer="solver", score="dot", tau=1.0, epochs=1, tables="replicated", precision="float32")
CONSTANT = _CLOSED.replaced(query_tower="constant", dim=1)
ITEMS = _CLOSED.replaced(query_tower="items")
# A spectral start is worth several sweeps and costs less than one.
RIDGE = _CLOSED.replaced(query_tower="ridge", epochs=16, init="spectral")


def popularity(
    data: Interactions,
    setup: Setup = CONSTANT,
    *,
    half_life: Annotated[
        float | None, "age at which an interaction counts half, as a share of the training part's time span"
    ] = None,
) -> Run:
    """The items with the most interactions, the same for every query; with half_life, those of late.

    Cremonesi et al., Performance of Recommender Algorithms on Top-N Recommendation Tasks, RecSys 2010 (TopPop).
    """
    counts = ItemCounts(half_life)
    counts.check(data)
    return solved(data, setup, CONSTANT, counts)


def item_knn(
    data: Interactions,
    setup: Setup = ITEMS,
    *,
    neighbours: Annotated[int, Range(10, 500, log=True), "most similar items that are kept for each item"] = 100,
    shrink: Annotated[float, Range(0.0, 100.0), "added to the norms: pairs of rare items count less"] = 10.0,
) -> Run:
    """The items most similar to a query's items, by cosine with shrinkage (item kNN).

    Deshpande and Karypis, Item-Based Top-N Recommendation Algorithms, TOIS 2004.
    """
    return solved(data, setup, ITEMS, ItemKnn(neighbours, shrink), _baskets(data), min(neighbours, data.n_items - 1))


def ease(
    data: Interactions,
    setup: Setup = ITEMS,
    *,
    lam: Annotated[float, Range(30.0, 3000.0, log=True), "L2 regularisation of the item-item matrix"] = 300.0,
    neighbours: Annotated[int | None, "strongest weights that are kept for each item; none keeps all"] = None,
) -> Run:
    """A linear autoencoder: every item regressed on all others, in closed form (EASE).

    Few neighbours suit baskets of things that go together, such as those of a wholesaler.
    Steck, Embarrassingly Shallow Autoencoders for Sparse Data, WWW 2019.
    """
    check_square(data.n_items, pick_device("auto"))
    return solved(data, setup, ITEMS, Ease(lam, neighbours), _baskets(data))


def ials(
    data: Interactions,
    setup: Setup = RIDGE,
    *,
    alpha: Annotated[float, Range(0.01, 1.0, log=True), "weight of every pair of a query and an item"] = 0.1,
    reg: Annotated[float, Range(3e-4, 0.03, log=True), "L2 regularisation, scaled by the weight of a row"] = 0.003,
) -> Run:
    """Matrix factorisation by alternating least squares over all pairs (iALS).

    Rendle et al., Revisiting the Performance of iALS on Item Recommendation Benchmarks, RecSys 2022.
    """
    return solved(data, setup, RIDGE, Ials(alpha, reg))


def _baskets(data: Interactions) -> Histories:
    """The distinct items of every query."""
    taken = data.positives()
    return Histories(taken.start, taken.items)
