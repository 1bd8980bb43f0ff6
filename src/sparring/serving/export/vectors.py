"""Vectors of a run, the neighbours of its items, or both of a fused run's sources, as Parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from sparring.core.errors import UserError
from sparring.core.files import write_json, write_table
from sparring.models.item_to_item import largest_weights
from sparring.serving.export.rows import item_rows, query_rows
from sparring.training.sources import Sources
from sparring.training.trained import Trained

NEIGHBOURS = 200  # of each item


def write_parquet(trained: Trained, folder: Path, neighbours: int = NEIGHBOURS) -> list[Path]:
    """Write a run as Parquet: vectors, or neighbours, or for a fused run the files of each source and fusion.json.

    fusion.json has the way the sources' lists are fused (`Sources`), their depth, and the weight of each source; its
    name is the name of its folder.

        write_parquet(load("runs/fused"), Path("fused"))
    """
    if trained.model.scores_items:
        return write_neighbours(trained, folder, neighbours)
    if not isinstance(trained.model, Sources):
        return write_vectors(trained, folder)
    paths, model = [], trained.model
    for source in model.sources:
        one = Trained(source.model, trained.ids, source.eligibility, trained.meta, source.folder)
        paths += write_parquet(one, folder / source.name, neighbours)
    names = (source.name for source in model.sources)
    weights = dict(zip(names, model.weights.tolist(), strict=True))
    write_json(folder / "fusion.json", {"by": model.by, "depth": model.depth, "weights": weights})
    return [*paths, folder / "fusion.json"]


def write_vectors(trained: Trained, folder: Path) -> list[Path]:
    """Write items.parquet and queries.parquet: original id, vector (an array of D float32), and all columns (rows.py).

    The vectors are scaled: the score of an item is the inner product. Items that lists leave out are left out.

        write_vectors(load("runs/first"), Path("vectors"))
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder for the vectors")
    sides = {"items": item_rows(trained), "queries": query_rows(trained)}
    for name, rows in sides.items():
        write_table(rows.part(0, len(rows)), folder / f"{name}.parquet")
    return [folder / f"{name}.parquet" for name in sides]


def write_neighbours(trained: Trained, folder: Path, neighbours: int = NEIGHBOURS) -> list[Path]:
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
