"""The page, the figures and the tables of clusters: FOLDER/report.html, figures/*.svg and *.png, sizes.csv, summary.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch

from sparring.core import files
from sparring.experiments.report import figures
from sparring.experiments.report.cluster_tables import sizes_table, summary
from sparring.experiments.report.figures import BASE, COLOURS, INK, Drawn, style, tidy
from sparring.experiments.report.html import Code, Facts, Figures, Page, Points, Section, Sheet, Text
from sparring.experiments.report.tables import Cell
from sparring.models.clusters.codes import Codes
from sparring.models.clusters.msac import MSAC, Drift
from sparring.models.clusters.stream import ModalityRows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 2000  # items in the picture
PICTURE = (
    "Items lie at the mean of their projected vectors, seen along the two directions in which they differ most: clusters apart may "
    "look as if they overlapped. A ring is a codeword, larger where its cluster has more items."
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
    """Draw, tabulate and write; `labels` are known categories of the items, `drift` and `moved` tell of an update. Where the page is.

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
    sections = [Section("In short", (Points(findings(facts, msac, drift, moved)), Figures(pictures), Text(PICTURE)))]
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
    """The figures in sentences."""
    said = [
        f"{facts['used']} of {facts['k_primary']} primary codewords are used; clusters have {facts['smallest']:,} to {facts['largest']:,} "
        f"items, half of them at least {facts['median']:,.0f}.",
        f"{facts['used_secondary']} of {facts['k_secondary']} secondary codewords are used, in {facts['used_cells']:,} cells of up to "
        f"{facts['largest_cell']:,} items.",
    ]
    if facts.get("purity") is not None:
        said.append(
            f"{facts['purity']:.1%} of the items have the commonest of {facts['categories']} categories in their cluster "
            f"({facts['purity_by_chance']:.1%} if the clusters were shuffled), {facts['cell_purity']:.1%} in their cell "
            f"({facts['cell_purity_by_chance']:.1%})."
        )
    if msac.history and msac.model.pairs:
        first, last = msac.history[0]["align"], msac.history[-1]["align"]
        said.append(
            f"Alignment loss, the mean over pairs of modalities: {first:.2f} in the first steps, {last:.2f} in the last."
        )
    if drift is not None:
        said += drift_lines(drift)
    if moved:
        said.append(
            f"After the update {moved['updated_primary']:.1%} of the known items are in another cluster than before."
        )
    return said


def drift_lines(drift: Drift) -> list[str]:
    """A drift in sentences."""
    said = [f"{drift.new:,} of {drift.items:,} items are new."]
    for name, error, outside in (
        ("known", drift.error_known, drift.outside_known),
        ("new", drift.error_new, drift.outside_new),
    ):
        if error is not None:
            ratio = error / max(drift.error_learned, 1e-30)
            said.append(
                f"Before any update, the squared distance of {name} items from their codewords was {ratio:.2f} times that of the items "
                f"from which these were learned; {outside:.1%} lay farther than 95 % did then."
            )
    if drift.changed_cell is not None:
        said.append(
            f"{drift.changed_primary:.1%} of the known items would have changed their cluster, {drift.changed_cell:.1%} their cell."
        )
    return said


def _draw(
    folder: Path, msac: MSAC, codes: Codes, modalities: ModalityRows, labels: pl.Series | None
) -> tuple[list[Drawn], list[Drawn]]:
    """Pictures of the items, and curves."""
    items = np.sort(np.random.default_rng(0).choice(len(codes), min(SHOWN, len(codes)), replace=False))
    points, words = project(msac.vectors(modalities, items), codes.codewords)
    drawn = picture(points, codes.primary[items].numpy(), words, codes.sizes.numpy())
    pictures = [
        figures.save(drawn, folder, "clusters", f"{len(items):,} items, some clusters in colour, and all codewords")
    ]
    if labels is not None:
        caption = f"The same items by {labels.name}, the commonest in colour"
        pictures.append(figures.save(categories(points, labels.gather(items)), folder, "categories", caption))
    least = msac.settings.min_size if msac.settings.revive_every else None
    promise = "" if least is None else "; dotted: the least that is promised"
    curves = [
        figures.save(
            size_curve(codes.sizes.numpy(), least), folder, "sizes", f"Items of every primary cluster{promise}"
        )
    ]
    if msac.history:
        curves.insert(
            0,
            figures.save(
                learning(msac.history), folder, "learning", "What the loss is made of, by passes over the catalogue"
            ),
        )
    return pictures, curves


def project(vectors: torch.Tensor, words: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(n, 2) and (K, 2): vectors and codewords along the two directions of greatest variance of the vectors."""
    centred = vectors.double() - vectors.double().mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    two = axes[:, -2:].flip(1) if axes.shape[1] > 1 else torch.cat([axes, torch.zeros_like(axes)], 1)
    two = two * two.sum(0).sign().where(
        two.sum(0) != 0, torch.ones(2, dtype=torch.float64)
    )  # else the sign is the solver's whim
    return (centred @ two).numpy(), ((words.double() - vectors.double().mean(0)) @ two).numpy()


def picture(points: np.ndarray, primary: np.ndarray, words: np.ndarray, sizes: np.ndarray) -> Figure:
    """Items in two dimensions with some clusters in colour, and all codewords as rings."""
    figure = figures.blank(4.8)
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
    figure = figures.blank(4.8)
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
        found = figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=9, markerscale=2.2)
        for handle in found.legend_handles:
            if handle is not None:
                handle.set_alpha(1.0)
    return figure


def _bare(axes: Axes) -> None:
    """No frame and no scale: what the axes are has no name."""
    axes.set(xticks=[], yticks=[])
    tidy(axes, "none")
    axes.spines[:].set_visible(False)


def _dots(
    axes: Axes, points: np.ndarray, area: float, colour: str, alpha: float = 1.0, label: str | None = None
) -> None:
    axes.scatter(points[:, 0], points[:, 1], area, color=colour, alpha=alpha, linewidths=0, label=label)


def _apart(words: np.ndarray, sizes: np.ndarray, n: int) -> list[int]:
    """n clusters that lie far from each other in the picture, from the largest on; none smaller than half the median."""
    large = np.flatnonzero(sizes >= 0.5 * np.median(sizes[sizes > 0]))
    chosen = [int(sizes.argmax())]
    while len(chosen) < min(n, len(large)):
        gaps = np.min([np.square(words[large] - words[at]).sum(1) for at in chosen], axis=0)
        chosen.append(int(large[gaps.argmax()]))
    return list(dict.fromkeys(chosen))


def learning(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Alignment loss, where there is any, and squared errors by passes over the catalogue; a dotted line where codebooks join in."""
    figure = figures.blank(4.2)
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
        for at, name in enumerate(("primary", "secondary")):
            lower.plot(
                [row["epoch"] for row in joint],
                [row[f"{name}_error"] for row in joint],
                color=COLOURS[at],
                label=name,
                linewidth=1.7,
            )
        lower.set(xlabel="passes over the catalogue", ylabel="squared error of an item")
        lower.set_ylim(bottom=0)
        lower.legend(fontsize=9)
        began = [row for row in history if row["phase"] == "aligning"]
        for axes in panels:
            tidy(axes, "both")
            if began and joint:
                axes.axvline(float(began[-1]["epoch"]), color=INK, linestyle=":", linewidth=1)
    return figure


def size_curve(sizes: np.ndarray, least: int | None) -> Figure:
    """Items of every cluster, largest first; a dotted line at the least that is promised. Logarithmic where a few are far larger."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = figures.blank(4.2)
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
