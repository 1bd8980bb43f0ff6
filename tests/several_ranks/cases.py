"""The runs that are trained in one process and in several, for the tests and the ranks that they start."""

from __future__ import annotations

from typing import Any

from sparring.recipes import RECIPES
from sparring.recipes.settings import is_solved
from support.settings import effort

SMALL: dict[str, Any] = {
    "dim": 8,
    "batch_size": 61,
    "epochs": 2,
    "seed": 5,
    "lr": 0.02,
    "patience": None,
    "precision": "float32",
}

# One line for each recipe, and for each way to draw, mask or remember that no recipe uses by default.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {"n": 16}),
    "tables": ("tables", {"n": 16}),
    "quick": ("quick", {"dim": 4}),
    "uns": ("uns", {"n": 16}),
    "uns per query": ("uns", {"n": 5, "per_query": True}),
    "pns": ("pns", {"n": 16}),
    "bpr": ("bpr", {}),
    "ssl": ("ssl", {}),
    "ssl_pop": ("ssl_pop", {}),
    "ssl_pop refined": ("ssl_pop", {"correction": "refined"}),
    "g_tower": ("g_tower", {}),
    "mns": ("mns", {"n": 16}),
    "debiased_mns": ("debiased_mns", {"n": 16}),
    "bir": ("bir", {}),
    "bir drawn": ("bir", {"draw": "multinomial", "n": 20}),
    "bir systematic": ("bir", {"draw": "systematic", "n": 20}),
    "xir": ("xir", {"cache_size": 24}),
    "xir release, drawn": ("xir", {"cache_size": 24, "draw": "multinomial", "form": "release"}),
    "cbns": ("cbns", {"size": 40}),
    "full_softmax": ("full_softmax", {}),
    "shown": ("shown", {}),
    "dns": ("dns", {"n": 8, "optimizer": "adam"}),
    "dns among": ("dns", {"n": 8, "m": 4}),
    "ahns": ("ahns", {"n": 8}),
    "mixgcf": ("mixgcf", {"n": 8, "k": 2}),
    "mixgcf candidate": ("mixgcf", {"n": 8, "k": 2, "mix": "candidate"}),
    "amns": ("amns", {"n": 16, "k": 6}),
    "bmns": ("bmns", {"n": 16}),
    "fairneg": ("fairneg", {"n": 16, "groups": 4, "every": 2}),
    "midx": ("midx", {"n": 6, "words": 4}),
    "sce": ("sce", {"n": 6, "rows": "queries", "batch_size": 21}),
    "sce mixed, known": ("sce", {"n": 6, "mix": True, "exclude": "known", "rows": "queries", "batch_size": 21}),
    "sl": ("sl", {"n": 16}),
    "bsl": ("bsl", {"n": 16}),
    "psl": ("psl", {"n": 16}),
    "slatk": ("slatk", {"n": 16, "k": 5, "every": 1}),
    "ccl": ("ccl", {"n": 16}),
    "gbce": ("gbce", {"n": 16}),
    "ada_tau": ("ada_tau", {"settle": 1}),
    "ada_tau running": ("ada_tau", {"settle": 1, "means": "running"}),
    "esans": ("esans", {"k_primary": 5, "k_secondary": 3}),
    "esans per query": ("esans", {"k_primary": 5, "k_secondary": 3, "shared": False, "normalisation": "dirichlet"}),
    "esans hard shared": ("esans", {"k_primary": 5, "k_secondary": 3, "hard_shared": True, "lam": "learned"}),
    "esans adaptive": ("esans", {"k_primary": 5, "k_secondary": 3, "lam": "learned", "exclude": "known"}),
    "dpr": ("dpr", {"warmup": 2}),
    "ance": ("ance", {"k": 9, "every": 1, "warmup": 2}),
    "ance per query": ("ance", {"k": 9, "n": 2, "per_query": True, "every": 1, "warmup": 2}),
    "ngame": ("ngame", {"size": 4, "every": 1, "k": 4, "warmup": 2}),
    "ngame both ways": ("ngame", {"size": 4, "every": 1, "k": 4, "both_ways": True, "dynamic": True, "warmup": 2}),
    "dexa": ("dexa", {"size": 4, "every": 1, "private": 6, "warmup": 2}),
    "prime": ("prime", {"size": 4, "every": 1, "private": 6, "warmup": 2}),
    "dexml": ("dexml", {"warmup": 2}),
    "filtered, mined": ("topk_percpos", {"k": 9, "n": 2, "every": 1, "start": 0, "warmup": 2}),
    "filtered by a margin": ("topk_marginpos", {"k": 9, "n": 2, "every": 1, "start": 0, "warmup": 2}),
    "denoised": ("rocketqa", {"k": 9, "n": 2, "every": 1, "start": 0, "warmup": 2, "most": 0.2}),
    "filtered, in-batch": ("gist", {"warmup": 2, "margin": 0.1}),
    "history": ("tables", {"n": 16, "query_tower": "history", "history": 6, "pooling": "attention"}),
    "history, in-batch": ("ssl_pop", {"model": "history", "history": 6}),
    "sets": ("default", {"n": 16, "model": "sets", "history": 8}),
    "sets, in-batch": ("ssl_pop", {"model": "sets", "history": 8}),
    "sasrec": ("default", {"n": 16, "model": "sasrec", "history": 6, "model.inner_dropout": 0.0}),
    "ligr, in-batch": ("ssl_pop", {"model": "ligr", "history": 6, "model.inner_dropout": 0.0}),
    "hstu, cached": ("xir", {"cache_size": 24, "model": "hstu", "history": 6, "model.inner_dropout": 0.0}),
    "features": ("esans", {"k_primary": 5, "k_secondary": 3, "item_features": ("category",), "layer": 1}),
    "dropout, bias, clip": ("tables", {"n": 16, "dropout": 0.3, "item_bias": True, "clip": 0.5, "learn_tau": True}),
    "texts": ("tables", {"n": 16, "encoder": "bag", "query_tower": "text", "item_tower": "text", "chunk": 7}),
    "graph": ("tables", {"n": 16, "model": "lightgcn", "item_bias": True}),
    "graph, hops": ("mixgcf", {"n": 8, "k": 2, "model": "lightgcn"}),
    "labels": ("dpr", {"warmup": 2, "draw": "propensity", "optimizer": "adam"}),
    "symmetric, cut": ("mns", {"n": 16, "symmetric": True, "matryoshka": (3, 5)}),
}

MODELS: dict[str, dict[str, Any]] = {
    "ids": {},
    "features": {"item_features": "category"},
    "history": {"history": 6},
    "sets": {"history": 8},
    "sasrec": {"history": 6},
    "ligr": {"history": 6},
    "hstu": {"history": 6},
    "lightgcn": {},
    "hashed": {"model.buckets": 64},
    "text": {"encoder": "bag"},
}
STEPPED = [name for name, recipe in RECIPES.items() if not is_solved(recipe)]
_ALL = [(recipe, model) for recipe in STEPPED for model in MODELS]
# The quick form takes one model for each recipe, so that every model has several recipes.
_SOME = [pair for at, pair in enumerate(_ALL) if (at % len(MODELS) - at // len(MODELS)) % len(MODELS) == 0]
PAIRS = effort(_SOME, _ALL)


def under(recipe: str, model: str) -> dict[str, Any]:
    """The settings of a recipe's first case under a model, with the rows of that model."""
    first = next(settings for name, settings in CASES.values() if name == recipe)
    kept = {name: value for name, value in first.items() if name not in ("rows", "draw")}
    if recipe == "sce":  # buckets take all rows: targets of one set tie, and rounding would say which of them get in
        kept["queries"] = 25
    return {**kept, **MODELS[model], "model": model, "batch_size": 25}


# The masks of dropout inside a network are drawn for the rows of a rank.
MATRIX = {
    f"{recipe} under {model}": (
        recipe,
        {**under(recipe, model), **({"model.inner_dropout": 0.0} if model in ("sasrec", "ligr", "hstu") else {})},
    )
    for recipe, model in PAIRS
}

# Four ranks exchange what two exchange, so every third case shows it; all of them if the proof is full.
BY_FOUR = list(CASES)[:: effort(3, 1)]
