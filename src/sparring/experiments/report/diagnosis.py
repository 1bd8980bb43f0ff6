"""The page and the figures of a diagnosis: OUT/report.html, OUT/figures/*.svg and *.png."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparring import __version__
from sparring.core.figure_style import BASE, COLOURS, INK, blank, by_decades, style, tidy
from sparring.data.interactions import Split
from sparring.evaluation.metrics import STRATA, popularity_strata
from sparring.experiments.diagnose import advice
from sparring.experiments.diagnose.advice import Advice
from sparring.experiments.diagnose.measures import BINS, Diagnosis
from sparring.experiments.report import figures
from sparring.experiments.report.figures import RenderedFigure
from sparring.experiments.report.html import Code, Facts, Figures, Page, Paragraph, Points, Section, Sheet
from sparring.experiments.report.tables import Row
from sparring.experiments.report.wording import command_lines, in_words
from sparring.recipes.finding import short
from sparring.recipes.setup import flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CATALOGUE = "all items"  # the row with which negatives are compared
GRADIENT = (
    "The gradient is that of the loss with respect to the query vectors, on a sample of training pairs. Cosine: "
    "between its mean over draws and the gradient of the full softmax; of one step: that of a single draw. Across: the "
    "cosine without the pull to the positive, which all samplers share. Bias: the distance of the mean from the exact "
    "gradient; noise: the distance of one draw from the mean; both in lengths of the exact gradient. Length: of the "
    "mean along the exact gradient; the learning rate makes up for a wrong length."
)
NEGATIVES = (
    "Ess, the effective sample size, is the number of candidates that carry the gradient. Own and other positives are "
    "shares of all candidates, before any is masked; unmasked is the share of both that is left. Popularity 0.5 is as "
    "popular as training positives; head, mid and tail items each have a third of the training interactions. Hardness "
    "is the rank of a negative's score among the scores of the complete catalogue for that query."
)


@dataclass(frozen=True)
class SampleSize:
    """The number of training pairs that were measured, and of batches that each was put into."""

    queries: int
    draws: int
    seed: int


def write(
    out: Path,
    diagnoses: Sequence[Diagnosis],
    lines: Sequence[Advice],
    split: Split,
    meta: Mapping[str, Any],
    sample: SampleSize,
    hardware: str,
    command: str = "",
) -> Path:
    """Draw the figures and write the page; `lines` are the advice, `meta` the run.json. Returns the page's path.

    write(Path("out"), diagnoses, advise(diagnoses), split, read_meta(folder), SampleSize(256, 20, 0), "cpu")
    """
    tables = advice.tables(diagnoses)
    gradient, negatives = _draw(out / "figures", diagnoses, split)
    where = Path(str(meta.get("source", {}).get("data", "custom data"))).name
    recommended = lines[0].text[:1].upper() + lines[0].text[1:]
    reasons = [f"{line.kind}: {line.text}" for line in lines[1:]]
    sections = [
        Section("Recommendation", (Paragraph(f"{recommended}."), Points(reasons))),
        Section("Gradient", (Sheet(tables["gradient"]), Figures(gradient))),
        Section("Negatives", (Sheet(tables["negatives"]), Sheet(tables["hardness"]), Figures(negatives))),
        Section("How to read it", (Paragraph(GRADIENT), Paragraph(NEGATIVES))),
        _made(split, meta, sample, hardware, command),
    ]
    sampled = f"{sample.queries:,} training pairs in {sample.draws:,} batches each"
    lead = f"{len(diagnoses)} samplers against the full softmax, on {sampled}."
    path = out / "report.html"
    Page(f"Negatives of {short(meta['recipe'])} on {where}", lead, sections).write(path)
    return path


def _made(split: Split, meta: Mapping[str, Any], sample: SampleSize, hardware: str, command: str) -> Section:
    """The command, the sample, the hardware and versions, and the settings of the run."""
    train, setup = split.train, flat(meta["setup"])
    facts = {
        "data": f"{train.n_queries:,} queries x {train.n_items:,} items, {len(train):,} training pairs",
        "measured on": f"{sample.queries:,} training pairs, {sample.draws:,} batches of {setup['batch_size']:,} each",
        "seed": f"{sample.seed} of the measurement, {setup['seed']} of the run",
        "hardware": hardware,
        "python": platform.python_version(),
        "sparring": __version__,
        **{name: version(name) for name in ("torch", "polars", "numpy")},
    }
    before = {name: value for name, value in meta.get("versions", {}).items() if facts.get(name) != value}
    facts |= {"trained with": in_words(before)} if before else {}
    parts: list[Code | Facts] = [Code(command_lines(command))] if command else []
    parts += [
        Facts(facts),
        Code(in_words({**meta.get("arguments", {}), **setup}), f"Settings of the run, {short(meta['recipe'])}"),
    ]
    if meta.get("batch"):
        parts.append(Code("\n".join(meta["batch"]), "Candidates of a query in a batch of the run"))
    return Section("How it was made", parts)


def _draw(
    folder: Path, diagnoses: Sequence[Diagnosis], split: Split
) -> tuple[list[RenderedFigure], list[RenderedFigure]]:
    """Write the figures: those of the gradient, and those of the negatives."""
    caption = (
        "Bias, the distance of the mean gradient from that of the full softmax, and noise, the distance of one draw "
        "from the mean; both in lengths of the exact gradient, shorter is better."
    )
    if max(diagnosis.gradient.noise for diagnosis in diagnoses) > advice.NOISE:
        caption += f" Noise beyond the dotted line, {advice.NOISE:g}, is too much."
    first = [figures.save(errors(diagnoses), folder, "gradient", caption)]
    caption = "Candidates of a query that are not masked, and the effective sample size (logarithmic)."
    first.append(figures.save(sizes(diagnoses), folder, "sample-size", caption))
    caption = (
        f"The negatives of each sampler, beside the catalogue ({CATALOGUE}). Head, mid and tail items each have a "
        "third of the training interactions, so negatives as popular as training positives would show three equal "
        "parts."
    )
    nothing: Row = dict.fromkeys((*STRATA, "synthetic"), 0.0)
    rows: list[Row] = [
        catalogue(split),
        *({"recipe": diagnosis.sampler, **nothing, **diagnosis.profile} for diagnosis in diagnoses),
    ]
    popularity = figures.popularity(rows, [str(row["recipe"]) for row in rows], "")
    second = [figures.save(popularity, folder, "popularity", caption)]
    caption = (
        "Hardness of the negatives: their shares by the rank of their score among the query's scores of the complete "
        "catalogue, hardest on the right. The dotted line is that of uniform draws, a tenth in each."
    )
    second.append(figures.save(hardness(diagnoses), folder, "hardness", caption))
    return first, second


def catalogue(split: Split) -> Row:
    """The catalogue as if every item were drawn once: its share of each stratum."""
    share = np.bincount(popularity_strata(split.train.counts()), minlength=len(STRATA)) / split.train.n_items
    return {"recipe": CATALOGUE, "synthetic": 0.0, **dict(zip(STRATA, share.tolist(), strict=True))}


def errors(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Bias and noise of each sampler as bars, side by side, on one scale."""
    figure = blank(0.9 + 0.34 * len(diagnoses))
    with style():
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, name in zip(panels, ("bias", "noise"), strict=True):
            values = [asdict(diagnosis.gradient)[name] for diagnosis in diagnoses]
            axes.barh(range(len(diagnoses)), values, 0.66, color=_colours(diagnoses))
            for y, value in enumerate(values):
                axes.annotate(
                    f"{value:.3f}", (value, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
                )
            axes.set_title(name, loc="left", fontsize=10)
            _samplers(axes, diagnoses)
            tidy(axes, "x")
        if max(diagnosis.gradient.noise for diagnosis in diagnoses) > advice.NOISE:
            panels[1].axvline(advice.NOISE, color=INK, linestyle=":", linewidth=1)
        longest = max(max(diagnosis.gradient.bias, diagnosis.gradient.noise) for diagnosis in diagnoses)
        panels[0].set_xlim(0, 1.25 * longest or 1)
    return figure


def sizes(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Candidates and effective sample size of each sampler, joined by a line, on a logarithmic scale."""
    figure = blank(1.3 + 0.34 * len(diagnoses))
    with style():
        axes = figure.subplots()
        for y, (diagnosis, colour) in enumerate(zip(diagnoses, _colours(diagnoses), strict=True)):
            few, many = max(diagnosis.draws.ess, 1e-3), max(diagnosis.draws.candidates, 1e-3)
            axes.plot([few, many], [y, y], color=colour, linewidth=2)
            axes.plot(
                many, y, "|", color=colour, markersize=11, markeredgewidth=2, label="candidates" if y == 0 else None
            )
            axes.plot(few, y, "o", color=colour, label="effective sample size" if y == 0 else None)
            words = f"{diagnosis.draws.ess:,.1f} of {diagnosis.draws.candidates:,.0f}"
            axes.annotate(words, (many, y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_xscale("log")
        by_decades(axes.xaxis)
        low, high = axes.get_xlim()
        axes.set_xlim(low, high * (high / low) ** 0.35)  # room for the words
        _samplers(axes, diagnoses)
        tidy(axes, "x")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9)
    return figure


def hardness(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Shares of the negatives by the rank of their score in the catalogue, a small histogram for each sampler."""
    columns = min(3, len(diagnoses))
    rows = -(-len(diagnoses) // columns)
    figure = blank(0.5 + 1.5 * rows)
    with style():
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        for axes, diagnosis, colour in zip(panels, diagnoses, _colours(diagnoses), strict=False):
            axes.bar(np.arange(BINS) + 0.5, diagnosis.draws.hardness, 0.9, color=colour)
            axes.axhline(1 / BINS, color=INK, linestyle=":", linewidth=1)
            axes.set_title(diagnosis.sampler, loc="left", fontsize=10)
            axes.set(xlim=(0, BINS), xticks=())
            axes.annotate("easiest", (0, 0), xytext=(0, -11), textcoords="offset points", fontsize=8)
            axes.annotate("hardest", (BINS, 0), xytext=(0, -11), textcoords="offset points", fontsize=8, ha="right")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axes.tick_params(labelsize=8)
            tidy(axes, "y")
        for axes in panels[len(diagnoses) :]:
            axes.set_visible(False)
    return figure


def _colours(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """The run's own negatives stand out."""
    return [COLOURS[0] if diagnosis.sampler == "own" else BASE for diagnosis in diagnoses]


def _samplers(axes: Axes, diagnoses: Sequence[Diagnosis]) -> None:
    axes.set_yticks(range(len(diagnoses)), [diagnosis.sampler for diagnosis in diagnoses])
    axes.set_ylim(len(diagnoses) - 0.4, -0.6)
