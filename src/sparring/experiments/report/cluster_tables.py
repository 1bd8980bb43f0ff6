"""Clusters in figures: how many are used, how large they are, how pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from sparring.core.errors import UserError
from sparring.data.interactions import Interactions
from sparring.experiments.report.tables import Cell, Column, Table
from sparring.models.clusters.codes import Codes


def labels_of(data: Interactions, column: str) -> pl.Series:
    """The column of the item table that holds categories, as text."""
    table = data.item_table
    if table is None or column not in table.columns:
        known = "no item table" if table is None else f"columns {', '.join(table.columns)}"
        raise UserError(f"there is no item column {column!r} for the categories: the items have {known}")
    return table[column].cast(pl.String)


def purity(codes: np.ndarray, labels: pl.Series) -> float | None:
    """The share of labelled items whose label is the commonest of their cluster; None where no item has a label.

    It rises with the number of clusters, so that it means something only beside that of shuffled codes.
    """
    found = pl.DataFrame({"code": codes, "label": labels}).drop_nulls()
    if not len(found):
        return None
    most = found.group_by("code", "label").len().group_by("code").agg(pl.col("len").max())
    return float(most["len"].sum()) / len(found)


def summary(codes: Codes, labels: pl.Series | None = None) -> dict[str, Cell]:
    """What there is to say in one line each; purity where labels are given, and what it is by chance."""
    sizes, cells = codes.sizes.numpy(), codes.cell_start.diff().numpy()
    filled = sizes[sizes > 0]
    said: dict[str, Cell] = {
        "items": len(codes),
        "k_primary": codes.k_primary,
        "k_secondary": codes.k_secondary,
        "used": len(filled),
        "smallest": int(filled.min()) if len(filled) else 0,
        "median": float(np.median(filled)) if len(filled) else 0.0,
        "largest": int(sizes.max()),
        "used_secondary": len(np.unique(codes.secondary.numpy())),
        "used_cells": int((cells > 0).sum()),
        "largest_cell": int(cells.max()),
    }
    if labels is not None:
        other = codes.shuffled()
        said |= {
            "categories": int(labels.n_unique()),
            "purity": purity(codes.primary.numpy(), labels),
            "purity_by_chance": purity(other.primary.numpy(), labels),
            "cell_purity": purity(codes.cell_of.numpy(), labels),
            "cell_purity_by_chance": purity(other.cell_of.numpy(), labels),
        }
    return said


def sizes_table(codes: Codes, labels: pl.Series | None = None, titles: pl.Series | None = None) -> Table:
    """One row per primary cluster: items, cells, the commonest label and its share, and some items by title."""
    used_cells = (codes.cell_start.diff().view(codes.k_primary, -1) > 0).sum(1).tolist()
    names = _commonest(codes, labels) if labels is not None else {}
    rows: list[dict[str, Cell]] = []
    for cluster, (size, cells) in enumerate(zip(codes.sizes.tolist(), used_cells, strict=True)):
        row: dict[str, Cell] = {"cluster": cluster, "items": size, "cells": cells}
        if labels is not None:
            row["label"], row["share"] = names.get(cluster, (None, None))
        if titles is not None:
            row["examples"] = _examples(titles, codes.items(cluster)[:3].tolist())
        rows.append(row)
    columns = [Column("cluster", "{cluster}"), Column("items", "{items:,}"), Column("cells used", "{cells}")]
    if labels is not None:
        columns += [Column("commonest category", "{label}", text=True), Column("its share", "{share:.0%}")]
    if titles is not None:
        columns.append(Column("such as", "{examples}", text=True))
    return Table(tuple(columns), rows)


def _commonest(codes: Codes, labels: pl.Series) -> dict[int, tuple[str, float]]:
    found = pl.DataFrame({"code": codes.primary.numpy(), "label": labels}).drop_nulls()
    counts = found.group_by("code", "label").len().sort(["len", "label"], descending=[True, False])
    first = counts.group_by("code", maintain_order=True).agg(
        pl.col("label").first(), (pl.col("len").max() / pl.col("len").sum()).alias("share")
    )
    return {code: (label, share) for code, label, share in first.iter_rows()}


def _examples(titles: pl.Series, items: Sequence[int]) -> str:
    return "; ".join(str(title) for title in titles.gather(list(items)) if title is not None)
