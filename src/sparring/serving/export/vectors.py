"""Vectors and ids of a run: to Parquet, and to vector databases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import polars as pl
import torch

from sparring.core.errors import UserError
from sparring.core.files import write_table
from sparring.models.item_to_item import largest_weights
from sparring.training.trained import Trained

_BLOCK = 10_000  # items per request


class Items(Protocol):
    """A store of item vectors by original id."""

    def upsert(self, ids: pl.Series, vectors: np.ndarray, titles: pl.Series | None = None) -> None: ...
    def delete(self, ids: pl.Series) -> int: ...
    def ids(self) -> pl.Series: ...


def write_vectors(trained: Trained, folder: Path) -> list[Path]:
    """Write items.parquet and queries.parquet: original id, vector (an array of D float32), and the titles of items.

    The vectors are scaled: the score of an item is the inner product.

        write_vectors(load("runs/first"), Path("vectors"))
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder for the vectors")
    n_queries = len(trained.ids.query_ids)
    sides = {
        "items": (trained.ids.item_ids.ids, trained.item_vectors()),
        "queries": (trained.ids.query_ids.ids, trained.model.query_vectors(torch.arange(n_queries))),
    }
    paths = []
    for name, (ids, vectors) in sides.items():
        columns = {
            "id": ids,
            "vector": pl.Series(vectors.float().cpu().numpy(), dtype=pl.Array(pl.Float32, vectors.shape[1])),
        }
        titles = titles_of(trained) if name == "items" else None
        paths.append(folder / f"{name}.parquet")
        write_table(pl.DataFrame(columns if titles is None else {**columns, "title": titles}), paths[-1])
    return paths


def write_neighbours(trained: Trained, folder: Path, neighbours: int = 200) -> list[Path]:
    """Write neighbours.parquet of an item-item matrix: item, neighbour, score; the strongest of each item first.

    The score of an item for a query is the sum over the query's items of their scores for it.

        write_neighbours(load("runs/ease"), Path("lists"), neighbours=100)
    """
    if trained.novelty:
        how = "write lists with `sparring recommend --all`, or export with --novelty 0"
        raise UserError(f"neighbours cannot hold a novelty of {trained.novelty:g}: {how}")
    weight, items = largest_weights(trained.model, neighbours)
    rows, columns = np.nonzero(weight.numpy())
    ids = trained.ids.item_ids.ids
    table = {
        "item": ids.gather(rows),
        "neighbour": ids.gather(items.numpy()[rows, columns]),
        "score": weight.numpy()[rows, columns],
    }
    path = folder / "neighbours.parquet"
    write_table(pl.DataFrame(table), path)
    return [path]


def send(trained: Trained, store: Items, progress: Callable[[int, int], None] | None = None) -> tuple[int, int]:
    """Replace the items of a store by those of a run: (items written, items deleted).

    Items are written first, then those unknown to the run are deleted. Meanwhile readers see old and new vectors.
    """
    ids, vectors, titles = store_ids(trained), trained.item_vectors().float().cpu().numpy(), titles_of(trained)
    for begin in range(0, len(ids), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        store.upsert(ids[part], vectors[part], None if titles is None else titles[part])
        if progress is not None:
            progress(min(begin + _BLOCK, len(ids)), len(ids))
    old = store.ids()
    gone = old.filter(~old.is_in(ids.implode()))
    return len(ids), store.delete(gone) if len(gone) else 0


def store_ids(trained: Trained) -> pl.Series:
    """Item ids for a database: Int64, else text (also for integers beyond Int64)."""
    ids = trained.ids.item_ids.ids
    return ids if ids.dtype == pl.Int64 else ids.cast(pl.String)


def titles_of(trained: Trained) -> pl.Series | None:
    """Titles of the items, None if the run has none."""
    table = trained.ids.item_table
    return table["title"].cast(pl.String) if table is not None and "title" in table.columns else None
