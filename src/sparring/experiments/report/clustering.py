"""The report of clusters: FOLDER/report.html, figures/*.svg and *.png, sizes.*, summary.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.figure_style import BASE, COLOURS, INK, blank, style, tidy
from sparring.data.interactions import Interactions
from sparring.experiments.report import figures
from sparring.experiments.report.figures import RenderedFigure
from sparring.experiments.report.html import Code, Facts, Figures, Page, Paragraph, Points, Section, Sheet
from sparring.experiments.report.tables import Cell, Column, Row, Table
from sparring.models.clusters.codes import Codes
from sparring.models.clusters.msac import MSAC, Drift
from sparring.models.clusters.stream import ModalityRows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 2000  # items in the scatter plot
PICTURE = (
    "Items are at the mean of their projected vectors, along the two directions of greatest variance: separate "
    "clusters may seem to overlap. A ring is a codeword; its size grows with the number of items of its cluster."
)


def write(
    folder: Path,
    msac: MSAC,
    codes: Codes,
    modalities: ModalityRows,
    labels: pl.Series | None = None,
    titles: pl.Series | None = None,
    drift: Drift | None = None,
    moved: Mapping[str, Cell] | None = None,
    command: str = "",
) -> Path:
    """Write the report and return the page's path.

    `labels` are known categories of the items; `drift` and `moved` describe an update.

    write(Path("codes"), msac, codes, modalities, labels_of(data, "category"))
    """
    facts = summary(codes, labels)
    sizes = sizes_table(codes, labels, titles)
    sizes.write(folder, "sizes")
    drifted = {} if drift is None else {**dataclasses.asdict(drift), **(moved or {})}
    files.write_json(
        folder / "summary.json", {**facts, "learned": msac.learned, "drift": drifted or None, "history": msac.history}
    )
    pictures, curves = _draw(folder / "figures", msac, codes, modalities, labels)
    sections = [
        Section("In short", (Points(findings(facts, msac, drift, moved)), Figures(pictures), Paragraph(PICTURE)))
    ]
    sections.append(Section("Learning and sizes", (Figures(curves),)))
    largest = sorted(sizes.rows, key=lambda row: -float(row["items"] or 0))
    sections.append(Section("Clusters", (Sheet(dataclasses.replace(sizes, rows=largest)),)))
    settings = {name: str(value) for name, value in dataclasses.asdict(msac.settings).items()}
    made = {"modalities": ", ".join(f"{name} ({width})" for name, width in msac.model.widths.items()), **settings}
    sections.append(Section("How it was made", (Facts(made), *([Code(command)] if command else []))))
    lead = f"{len(codes):,} items in {facts['used']} primary clusters of up to {codes.k_secondary} cells each."
    Page("Clusters of items", lead, sections).write(folder / "report.html")
    return folder / "report.html"


def findings(
    facts: Mapping[str, Cell], msac: MSAC, drift: Drift | None, moved: Mapping[str, Cell] | None = None
) -> list[str]:
    """The summary in sentences."""
    lines = [
        f"{facts['used']} of {facts['k_primary']} primary codewords are used; clusters have {facts['smallest']:,} to "
        f"{facts['largest']:,} items, {facts['median']:,.0f} in the median.",
        f"{facts['used_secondary']} of {facts['k_secondary']} secondary codewords are used, in "
        f"{facts['used_cells']:,} cells of up to {facts['largest_cell']:,} items.",
    ]
    if facts.get("purity") is not None:
        lines.append(
            f"{facts['purity']:.1%} of the items are in the commonest of {facts['categories']} categories of their "
            f"cluster ({facts['purity_by_chance']:.1%} if the clusters were shuffled), {facts['cell_purity']:.1%} of "
            f"their cell ({facts['cell_purity_by_chance']:.1%})."
        )
    if msac.history and msac.model.pairs:
        first, last = msac.history[0]["align"], msac.history[-1]["align"]
        lines.append(
            f"Alignment loss, the mean over pairs of modalities: {first:.2f} in the first steps, {last:.2f} in the "
            "last."
        )
    if drift is not None:
        lines += drift_lines(drift)
    if moved:
        lines.append(
            f"After the update {moved['updated_primary']:.1%} of the known items are in another cluster than before."
        )
    return lines


def drift_lines(drift: Drift) -> list[str]:
    """A drift in sentences."""
    lines = [f"{drift.new:,} of {drift.items:,} items are new."]
    for name, error, outside in (
        ("known", drift.error_known, drift.outside_known),
        ("new", drift.error_new, drift.outside_new),
    ):
        if error is not None:
            ratio = error / max(drift.error_learned, 1e-30)
            lines.append(
                f"Before any update, the squared distance of {name} items from their codewords was {ratio:.2f} times "
                f"that of the items from which these were learned; {outside:.1%} were beyond the 95 % quantile of "
                "then."
            )
    if drift.changed_cell is not None:
        lines.append(
            f"{drift.changed_primary:.1%} of the known items would have changed their cluster, "
            f"{drift.changed_cell:.1%} their cell."
        )
    return lines


def labels_of(data: Interactions, column: str) -> pl.Series:
    """A column of categories of the item table, as text."""
    table = data.item_table
    if table is None or column not in table.columns:
        known = "no item table" if table is None else f"columns {', '.join(table.columns)}"
        raise UserError(f"there is no item column {column!r} for the categories: the items have {known}")
    return table[column].cast(pl.String)


def purity(codes: np.ndarray, labels: pl.Series) -> float | None:
    """The share of labelled items whose label is the commonest of their cluster; None if no item has a label.

    It grows with the number of clusters: compare it with that of shuffled codes.
    """
    labelled = pl.DataFrame({"code": codes, "label": labels}).drop_nulls()
    if not len(labelled):
        return None
    most = labelled.group_by("code", "label").len().group_by("code").agg(pl.col("len").max())
    return float(most["len"].sum()) / len(labelled)


def summary(codes: Codes, labels: pl.Series | None = None) -> Row:
    """Sizes and use of the clusters and cells; with labels also their purity, beside that of shuffled codes."""
    sizes, cells = codes.sizes.numpy(), codes.cell_start.diff().numpy()
    filled = sizes[sizes > 0]
    facts: Row = {
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
        shuffled = codes.shuffled()
        facts |= {
            "categories": int(labels.n_unique()),
            "purity": purity(codes.primary.numpy(), labels),
            "purity_by_chance": purity(shuffled.primary.numpy(), labels),
            "cell_purity": purity(codes.cell_of.numpy(), labels),
            "cell_purity_by_chance": purity(shuffled.cell_of.numpy(), labels),
        }
    return facts


def sizes_table(codes: Codes, labels: pl.Series | None = None, titles: pl.Series | None = None) -> Table:
    """One row per primary cluster: items, cells, the commonest label and its share, and some titles."""
    used_cells = (codes.cell_start.diff().view(codes.k_primary, -1) > 0).sum(1).tolist()
    names = _commonest(codes, labels) if labels is not None else {}
    rows: list[Row] = []
    for cluster, (size, cells) in enumerate(zip(codes.sizes.tolist(), used_cells, strict=True)):
        row: Row = {"cluster": cluster, "items": size, "cells": cells}
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
    labelled = pl.DataFrame({"code": codes.primary.numpy(), "label": labels}).drop_nulls()
    counts = labelled.group_by("code", "label").len().sort(["len", "label"], descending=[True, False])
    first = counts.group_by("code", maintain_order=True).agg(
        pl.col("label").first(), (pl.col("len").max() / pl.col("len").sum()).alias("share")
    )
    return {code: (label, share) for code, label, share in first.iter_rows()}


def _examples(titles: pl.Series, items: Sequence[int]) -> str:
    return "; ".join(str(title) for title in titles.gather(list(items)) if title is not None)


def _draw(
    folder: Path, msac: MSAC, codes: Codes, modalities: ModalityRows, labels: pl.Series | None
) -> tuple[list[RenderedFigure], list[RenderedFigure]]:
    """Scatter plots of the items, and curves."""
    items = np.sort(np.random.default_rng(0).choice(len(codes), min(SHOWN, len(codes)), replace=False))
    points, words = project(msac.vectors(modalities, items), codes.codewords)
    figure = picture(points, codes.primary[items].numpy(), words, codes.sizes.numpy())
    pictures = [
        figures.save(figure, folder, "clusters", f"{len(items):,} items, some clusters in colour, and all codewords")
    ]
    if labels is not None:
        caption = f"The same items by {labels.name}, the commonest in colour"
        pictures.append(figures.save(categories(points, labels.gather(items)), folder, "categories", caption))
    least = msac.settings.min_size if msac.settings.revive_every else None
    promise = "" if least is None else "; dotted: the guaranteed minimum"
    curves = [
        figures.save(
            size_curve(codes.sizes.numpy(), least), folder, "sizes", f"Items of every primary cluster{promise}"
        )
    ]
    if msac.history:
        curves.insert(
            0,
            figures.save(
                learning(msac.history), folder, "learning", "The parts of the loss, by passes over the catalogue"
            ),
        )
    return pictures, curves


def project(vectors: torch.Tensor, words: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(n, 2) and (K, 2): vectors and codewords along the two directions of greatest variance of the vectors."""
    centred = vectors.double() - vectors.double().mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    two = axes[:, -2:].flip(1) if axes.shape[1] > 1 else torch.cat([axes, torch.zeros_like(axes)], 1)
    # a fixed sign, which the solver leaves open
    two = two * two.sum(0).sign().where(two.sum(0) != 0, torch.ones(2, dtype=torch.float64))
    return (centred @ two).numpy(), ((words.double() - vectors.double().mean(0)) @ two).numpy()


def picture(points: np.ndarray, primary: np.ndarray, words: np.ndarray, sizes: np.ndarray) -> Figure:
    """Items in two dimensions with some clusters in colour, and all codewords as rings."""
    figure = blank(4.8)
    used = sizes > 0
    chosen = _apart(words, np.where(used, sizes, 0), len(COLOURS))
    area = 8 + 60 * sizes / sizes.max()
    with style():
        axes = figure.subplots()
        _dots(axes, points[~np.isin(primary, chosen)], 7, BASE, alpha=0.25)
        axes.scatter(words[used, 0], words[used, 1], area[used], facecolors="none", edgecolors=BASE, linewidths=0.7)
        for word, colour in zip(chosen, COLOURS, strict=False):
            _dots(axes, points[primary == word], 11, colour)
            axes.scatter(words[word, 0], words[word, 1], area[word], facecolors="none", edgecolors=INK, linewidths=1.2)
        _bare(axes)
    return figure


def categories(points: np.ndarray, labels: pl.Series) -> Figure:
    """The same items with the commonest labels in colour."""
    figure = blank(4.8)
    counts = labels.drop_nulls().alias("label").value_counts(sort=True)
    common = counts.sort(["count", "label"], descending=[True, False])["label"].head(len(COLOURS)).to_list()
    others = ~labels.is_in(common).fill_null(False).to_numpy()
    with style():
        axes = figure.subplots()
        for name, colour in zip(common, COLOURS, strict=False):
            shown = name if len(name) < 24 else f"{name[:22]}…"
            _dots(axes, points[(labels == name).fill_null(False).to_numpy()], 7, colour, alpha=0.7, label=shown)
        if others.any():
            _dots(axes, points[others], 7, BASE, alpha=0.25, label="others")
        _bare(axes)
        legend = figure.legend(
            *axes.get_legend_handles_labels(), loc="outside right upper", fontsize=9, markerscale=2.2
        )
        for handle in legend.legend_handles:
            if handle is not None:
                handle.set_alpha(1.0)
    return figure


def _bare(axes: Axes) -> None:
    """No frame and no scale: the axes have no meaning of their own."""
    axes.set(xticks=[], yticks=[])
    tidy(axes, "none")
    axes.spines[:].set_visible(False)


def _dots(
    axes: Axes, points: np.ndarray, area: float, colour: str, alpha: float = 1.0, label: str | None = None
) -> None:
    axes.scatter(points[:, 0], points[:, 1], area, color=colour, alpha=alpha, linewidths=0, label=label)


def _apart(words: np.ndarray, sizes: np.ndarray, n: int) -> list[int]:
    """n clusters far apart in the plot, starting with the largest; none smaller than half the median."""
    large = np.flatnonzero(sizes >= 0.5 * np.median(sizes[sizes > 0]))
    chosen = [int(sizes.argmax())]
    while len(chosen) < min(n, len(large)):
        gaps = np.min([np.square(words[large] - words[cluster]).sum(1) for cluster in chosen], axis=0)
        chosen.append(int(large[gaps.argmax()]))
    return list(dict.fromkeys(chosen))


def learning(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Alignment loss, if any, and squared errors by passes over the catalogue; dotted: the start of the codebooks."""
    figure = blank(4.2)
    joint = [row for row in history if row["phase"] != "aligning"]
    aligned = any(row["align"] for row in history)  # a single modality has nothing to align with
    with style():
        panels = figure.subplots(1 + aligned, 1, sharex=True, squeeze=False)[:, 0]
        lower = panels[-1]
        if aligned:
            panels[0].plot(
                [float(row["epoch"]) for row in history],
                [row["align"] for row in history],
                color=COLOURS[0],
                linewidth=1.7,
            )
            panels[0].set_ylabel("alignment loss, nats")
        for name, colour in zip(("primary", "secondary"), COLOURS, strict=False):
            lower.plot(
                [row["epoch"] for row in joint],
                [row[f"{name}_error"] for row in joint],
                color=colour,
                label=name,
                linewidth=1.7,
            )
        lower.set(xlabel="passes over the catalogue", ylabel="squared error of an item")
        lower.set_ylim(bottom=0)
        lower.legend(fontsize=9)
        aligning = [row for row in history if row["phase"] == "aligning"]
        for axes in panels:
            tidy(axes, "both")
            if aligning and joint:
                axes.axvline(float(aligning[-1]["epoch"]), color=INK, linestyle=":", linewidth=1)
    return figure


def size_curve(sizes: np.ndarray, least: int | None) -> Figure:
    """Items of every cluster, largest first; dotted: the guaranteed minimum. Logarithmic if a few are far larger."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = blank(4.2)
    ordered = np.sort(sizes)[::-1]
    with style():
        axes = figure.subplots()
        axes.fill_between(
            np.arange(len(ordered) + 1), np.append(ordered, ordered[-1]), step="post", color=COLOURS[0], linewidth=0
        )
        if ordered[0] > 20 * max(np.median(ordered), 1):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set(xlim=(0, len(ordered)), ylim=(0.8 if axes.get_yscale() == "log" else 0, None))
        if least is not None:
            axes.axhline(least, color=INK, linestyle=":", linewidth=1)
            axes.text(1.01, least, f"{least}", transform=axes.get_yaxis_transform(), va="center", fontsize=9)
        axes.set(xlabel="primary clusters, largest first", ylabel="items")
        tidy(axes, "y")
    return figure
