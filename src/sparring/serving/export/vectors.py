"""Vectors of a run, the neighbours of its items, or both of a fused run's sources, as Parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from sparring.core.errors import UserError
from sparring.core.files import write_json, write_table
from sparring.data.remote import place_of, write_remote
from sparring.models.item_to_item import largest_weights
from sparring.serving.export.rows import item_rows, plain_ids, query_rows
from sparring.training.sources import Sources
from sparring.training.trained import How, Trained

NEIGHBOURS = 200  # of each item


def write_parquet(
    trained: Trained, folder: Path | str, neighbours: int = NEIGHBOURS, ranking: How | None = None
) -> list[Path | str]:
    """Write a run as Parquet: vectors, or neighbours, or for a fused run the files of each source and fusion.json.

    `ranking` is that of `Trained.recommend`; see `write_vectors`.

    fusion.json has the way the sources' lists are fused (`Sources`), their depth, and the weight of each source; its
    name is the name of its folder.

        write_parquet(load("runs/fused"), Path("fused"))
    """
    if trained.model.scores_items:
        return write_neighbours(trained, folder, neighbours)
    if not isinstance(trained.model, Sources):
        return write_vectors(trained, folder, ranking)
    if isinstance(folder, str):
        raise UserError(
            f"{trained.name} is fused of several runs: write it to a folder of this machine, not to {folder}"
        )
    paths, model = list[Path | str](), trained.model
    for source in model.sources:
        one = Trained(source.model, trained.ids, source.eligibility, trained.meta, source.folder)
        paths += write_parquet(one, folder / source.name, neighbours, "towers")
    names = (source.name for source in model.sources)
    weights = dict(zip(names, model.weights.tolist(), strict=True))
    write_json(folder / "fusion.json", {"by": model.by, "depth": model.depth, "weights": weights})
    return [*paths, folder / "fusion.json"]


def write_vectors(trained: Trained, folder: Path | str, ranking: How | None = None) -> list[Path | str]:
    """Write items.parquet and queries.parquet: original id, vector (an array of D float32), and all columns (rows.py).

    `folder` may be an address, such as s3://BUCKET/FOLDER. The score of an item is the inner product. Items that lists
    leave out are left out.

    For the fused ranking the inner product orders the shortlist, and two more files score it: scores.parquet has the
    vectors of each item by `tower` and `classifier`, and its inverse `propensity`; fusion.json has beta, the length of
    the shortlist and the nodes of the tree. With the query's vector q,

        clf = q classifier;  knn = q tower;  score = clf + beta (knn + chance of the leaf of (clf, knn, propensity))

    The tree starts at node 0 and goes on to `below` where the feature is at most the threshold, else to `above`, seven
    times; a leaf leads to itself.

        write_vectors(load("runs/first"), Path("vectors"))
    """
    if isinstance(folder, Path) and folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder for the vectors")
    how = trained.how(ranking)
    of_unit_length = trained.model.score == "cosine" and trained.model.dim == trained.model.width
    if how == "fused" and (not of_unit_length or isinstance(folder, str)):
        needs = "needs score=cosine and item_bias=false"
        why = "is written to a folder of this machine" if isinstance(folder, str) else needs
        raise UserError(f"the fused ranking {why}: export --ranking towers or classifiers")
    sides = {"items": item_rows(trained, how), "queries": query_rows(trained, how)}
    paths = [_save(rows.part(0, len(rows)), folder, f"{name}.parquet") for name, rows in sides.items()]
    return [*paths, *_fusion(trained, folder)] if how == "fused" and isinstance(folder, Path) else paths


def _fusion(trained: Trained, folder: Path) -> list[Path | str]:
    """Write scores.parquet and fusion.json of the fused ranking."""
    fused = trained.fused
    assert fused is not None
    by = {"tower": trained.item_vectors(), "classifier": fused.clf.item_vectors(), "propensity": fused.propensity}
    columns = {name: pl.Series(name, values.float().numpy()) for name, values in by.items()}
    scores = pl.DataFrame({"id": plain_ids(trained.ids.item_ids.ids), **columns})
    if fused.listed is not None:
        scores = scores[fused.listed.numpy()]
    write_table(scores, folder / "scores.parquet")
    nodes = {name: getattr(fused, name).tolist() for name in ("feature", "threshold", "below", "above", "chance")}
    write_json(folder / "fusion.json", {"beta": fused.beta, "shortlist": fused.shortlist, "tree": nodes})
    return [folder / "scores.parquet", folder / "fusion.json"]


def _save(table: pl.DataFrame, folder: Path | str, name: str) -> Path | str:
    """Write a table into a folder or below an address; its place."""
    if isinstance(folder, Path):
        write_table(table, folder / name)
        return folder / name
    place = place_of(f"{folder.rstrip('/')}/{name}")
    write_remote(table, str(place))
    return place


def write_neighbours(trained: Trained, folder: Path | str, neighbours: int = NEIGHBOURS) -> list[Path | str]:
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
    return [_save(pl.DataFrame(table), folder, "neighbours.parquet")]
