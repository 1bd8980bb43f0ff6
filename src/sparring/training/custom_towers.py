"""Towers of your own: what run.json says of them, and how a run folder is read back when no Setup describes its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.data.interactions import Ids, Interactions
from sparring.models.retriever import Retriever
from sparring.recipes import settings
from sparring.recipes.setup import parse_setup


def own_towers(model: Retriever) -> dict[str, str]:
    """The parts of a model that are not of this package, as MODULE:CLASS; a Setup describes all others."""
    parts = {"model": model, "query": model.query, "item": model.item, "item_bias": model.item_bias}
    kinds = {name: type(part) for name, part in parts.items() if part is not None}
    return {
        name: f"{kind.__module__}:{kind.__qualname__}"
        for name, kind in kinds.items()
        if kind.__module__.split(".")[0] != "sparring"
    }


def own_model(folder: Path, meta: Mapping[str, Any], ids: Ids, seen: Positives) -> Retriever:
    """The model of a run with towers of its own, as its recipe builds it; its weights are still to be read."""
    if meta["recipe"] == "custom":
        names = ", ".join(dict.fromkeys(kind.rpartition(":")[2] for kind in meta["towers"].values()))
        how = "sparring.load(folder, model=...) takes them; a recipe of your own (docs/extending.md) would be found without"
        raise UserError(f"{folder} has towers of its own ({names}) and no recipe that builds them: {how}")
    setup = parse_setup(meta["setup"])
    return settings.build(recipe_of(folder, meta), remembered(ids, seen), meta.get("arguments", {}), setup=setup).model


def recipe_of(folder: Path, meta: Mapping[str, Any]) -> str:
    """The recipe that run.json names. Its file is imported, so it must be one that we would have written: a full path, outside the folder.

    A folder from elsewhere can then not bring along what runs when it is read.
    """
    name = str(meta["recipe"])
    file = name.rpartition(":")[0]
    if file.endswith(".py") and (not Path(file).is_absolute() or Path(file).resolve().is_relative_to(folder.resolve())):
        raise UserError(
            f"{folder / 'run.json'} names the recipe {name!r}, which is not imported: write its full path, outside the folder"
        )
    return name


def remembered(ids: Ids, seen: Positives) -> Interactions:
    """The pairs that a run folder remembers, those of its training and validation, without their times and weights."""
    queries = np.repeat(np.arange(len(ids.query_ids), dtype=np.int32), seen.start.diff().numpy())
    items = seen.items.numpy().astype(np.int32)
    return Interactions(
        queries, items, ids.query_ids, ids.item_ids, query_table=ids.query_table, item_table=ids.item_table
    )
