"""The figures that the papers print, read from published/*.toml; each file names the place of every figure in print."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class PublishedFigure:
    """A printed value and, where printed, its deviation over runs."""

    value: float
    std: float | None = None


Cells = dict[tuple[str, str, str], PublishedFigure]  # by data set, metric and method, as the paper names them
Counts = tuple[int, int, int]  # queries, items, interactions


@cache
def published(paper: str) -> dict[str, Any]:
    """The content of published/PAPER.toml."""
    file = resources.files("sparring.experiments.papers") / "published" / f"{paper}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


@cache
def published_cells(paper: str, table: str) -> Cells:
    """The figures of a printed table.

    A line of `rows` starts with the names listed in `row`; each of its values belongs to the entry of `columns` at its
    place, which has the names listed in `column`. `fixed` names the rest. An empty string is a figure not in print.

        published_cells("xir", "table2")["Gowalla", "NDCG@10", "XIR"].value  # 0.1543
    """
    source = published(paper)[table]
    cells: Cells = {}
    for line in source["rows"]:
        names, values = line[: len(source["row"])], line[len(source["row"]) :]
        for column, value in zip(source["columns"], values, strict=True):
            key = dict(zip([*source["row"], *source["column"]], [*names, *column], strict=True)) | source.get(
                "fixed", {}
            )
            if value != "":
                figure = PublishedFigure(*value) if isinstance(value, list) else PublishedFigure(value)
                cells[key["data"], key["metric"], key["method"]] = figure
    return cells


@cache
def published_counts(paper: str) -> Mapping[str, Counts]:
    """The counts of the paper's data sets, by name; none for a paper that does not print them."""
    data = published(paper).get("data", {})
    return {name: (row["queries"], row["items"], row["interactions"]) for name, row in data.items()}
