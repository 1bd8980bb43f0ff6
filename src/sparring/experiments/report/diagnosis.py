"""The page and the figures of a diagnosis: OUT/report.html, OUT/figures/*.svg and *.png."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparring.data.interactions import Split
from sparring.evaluation.metrics import STRATA, popularity_strata
from sparring.experiments.diagnose import advice
from sparring.experiments.diagnose.advice import Advice
from sparring.experiments.diagnose.measures import BINS, Diagnosis
from sparring.experiments.report import figures
from sparring.experiments.report.comparison import command_lines, in_words
from sparring.experiments.report.figures import BASE, COLOURS, INK, Drawn, blank, by_decades, style, tidy
from sparring.experiments.report.html import Code, Facts, Figures, Page, Points, Section, Sheet, Text
from sparring.experiments.report.tables import Cell
from sparring.recipes.finding import short
from sparring.recipes.setup import flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CATALOGUE = "all items"  # the row that negatives are held against
GRADIENT = (
    "The gradient is that of the loss with respect to the query vectors, of some training pairs. Cosine: the direction of its mean "
    "over draws against the full softmax; of one step: that of a single draw. Across: the cosine without the pull to the positive, "
    "which all have in common. Bias: how far the mean is off, and noise: how far one draw is from the mean, both in lengths of the "
    "exact gradient. Length: of the mean along the exact one; a length that is off is made up for by the learning rate."
)
NEGATIVES = (
    "Ess, the effective sample size, is how many candidates carry the gradient. Own and other positives are shares of what is "
    "offered, before any is masked; unmasked is what is left of both. Popularity 0.5 is as popular as what people take; head, mid and tail "
    "items each took a third of the interactions. Hardness is the rank of a negative's score among the scores of the whole catalogue "
    "with that query."
)


@dataclass(frozen=True)
class Sample:
    """What was measured on: so many training pairs, each put into so many batches."""

    queries: int
    draws: int
    seed: int


def write(
    out: Path,
    found: Sequence[Diagnosis],
    lines: Sequence[Advice],
    split: Split,
    meta: Mapping[str, Any],
    sample: Sample,
    hardware: str,
    command: str = "",
) -> Path:
    """Draw the figures and write the page; `lines` are the advice on what was found, `meta` the run.json of the run. Where the page is.

    write(Path("out"), found, advise(found), split, runs.read_meta(folder), Sample(256, 20, 0), "cpu")
    """
    tables = advice.tables(found)
    gradient, negatives = _draw(out / "figures", found, split)
    where = Path(str(meta.get("source", {}).get("data", "data of its own"))).name
    sections = [
        Section("Recommendation", (Text(f"{_recommended(lines[0])}."), Points([_line(line) for line in lines[1:]]))),
        Section("Gradient", (Sheet(tables["gradient"]), Figures(gradient))),
        Section("Negatives", (Sheet(tables["negatives"]), Sheet(tables["hardness"]), Figures(negatives))),
        Section("How to read it", (Text(GRADIENT), Text(NEGATIVES))),
        _made(split, meta, sample, hardware, command),
    ]
    lead = f"{len(found)} samplers against the full softmax, on {sample.queries:,} training pairs in {sample.draws:,} batches each."
    path = out / "report.html"
    Page(f"Negatives of {short(meta['recipe'])} on {where}", lead, sections).write(path)
    return path


def _recommended(line: Advice) -> str:
    return line.text[:1].upper() + line.text[1:]


def _line(line: Advice) -> str:
    return f"{line.kind}: {line.text}"


def _made(split: Split, meta: Mapping[str, Any], sample: Sample, hardware: str, command: str) -> Section:
    """The command, what was measured and where, and the run as it was trained."""
    from sparring import __version__

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
        parts.append(Code("\n".join(meta["batch"]), "What a query of a batch is contrasted with in the run"))
    return Section("How it was made", parts)


def _draw(folder: Path, found: Sequence[Diagnosis], split: Split) -> tuple[list[Drawn], list[Drawn]]:
    """The figures, written: those of the gradient, and those of the negatives."""
    caption = (
        "Bias, how far the mean gradient is from that of the full softmax, and noise, how far one draw is from the mean; both in "
        "lengths of the exact gradient, shorter is better."
    )
    if max(each.gradient.noise for each in found) > advice.NOISE:
        caption += f" Noise beyond the dotted line, {advice.NOISE:g}, is too much."
    first = [figures.save(errors(found), folder, "gradient", caption)]
    caption = "Candidates that count against a query, and the effective sample size: how many of them carry the gradient (logarithmic)."
    first.append(figures.save(sizes(found), folder, "sample-size", caption))
    caption = (
        f"What is drawn as negative, beside the catalogue ({CATALOGUE}). Head, mid and tail items each took a third of the "
        "interactions, so negatives as popular as what people take would show three equal parts."
    )
    nothing: dict[str, Cell] = dict.fromkeys((*STRATA, "synthetic"), 0.0)
    rows: list[dict[str, Cell]] = [
        catalogue(split),
        *({"recipe": each.sampler, **nothing, **each.profile} for each in found),
    ]
    drawn = figures.popularity(rows, [str(row["recipe"]) for row in rows], "")
    second = [figures.save(drawn, folder, "popularity", caption)]
    caption = (
        "How hard the negatives are: their shares by the rank of their score among the query's scores of the whole catalogue, hardest "
        "on the right. The dotted line is that of uniform draws, a tenth in each."
    )
    second.append(figures.save(hardness(found), folder, "hardness", caption))
    return first, second


def catalogue(split: Split) -> dict[str, Cell]:
    """The catalogue as if every item were drawn once: its share of each stratum."""
    share = np.bincount(popularity_strata(split.train.counts()), minlength=len(STRATA)) / split.train.n_items
    return {"recipe": CATALOGUE, "synthetic": 0.0, **dict(zip(STRATA, share.tolist(), strict=True))}


def errors(found: Sequence[Diagnosis]) -> Figure:
    """Bias and noise of each sampler as bars, side by side, on one scale."""
    figure = blank(0.9 + 0.34 * len(found))
    with style():
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for axes, name in zip(panels, ("bias", "noise"), strict=True):
            values = [asdict(each.gradient)[name] for each in found]
            axes.barh(range(len(found)), values, 0.66, color=_colours(found))
            for at, value in enumerate(values):
                axes.annotate(
                    f"{value:.3f}", (value, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
                )
            axes.set_title(name, loc="left", fontsize=10)
            _samplers(axes, found)
            tidy(axes, "x")
        if max(each.gradient.noise for each in found) > advice.NOISE:
            panels[1].axvline(advice.NOISE, color=INK, linestyle=":", linewidth=1)
        longest = max(max(each.gradient.bias, each.gradient.noise) for each in found)
        panels[0].set_xlim(0, 1.25 * longest or 1)
    return figure


def sizes(found: Sequence[Diagnosis]) -> Figure:
    """Candidates and effective sample size of each sampler, joined by a line, on a logarithmic scale."""
    figure = blank(1.3 + 0.34 * len(found))
    with style():
        axes = figure.subplots()
        for at, (each, colour) in enumerate(zip(found, _colours(found), strict=True)):
            few, many = max(each.drawn.ess, 1e-3), max(each.drawn.candidates, 1e-3)
            axes.plot([few, many], [at, at], color=colour, linewidth=2)
            axes.plot(
                many, at, "|", color=colour, markersize=11, markeredgewidth=2, label="candidates" if at == 0 else None
            )
            axes.plot(few, at, "o", color=colour, label="effective sample size" if at == 0 else None)
            words = f"{each.drawn.ess:,.1f} of {each.drawn.candidates:,.0f}"
            axes.annotate(words, (many, at), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_xscale("log")
        by_decades(axes.xaxis)
        low, high = axes.get_xlim()
        axes.set_xlim(low, high * (high / low) ** 0.35)  # room for the words
        _samplers(axes, found)
        tidy(axes, "x")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=9)
    return figure


def hardness(found: Sequence[Diagnosis]) -> Figure:
    """Shares of the negatives by the rank of their score in the catalogue, a small histogram for each sampler."""
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure = blank(0.5 + 1.5 * rows)
    with style():
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        for axes, each, colour in zip(panels, found, _colours(found), strict=False):
            axes.bar(np.arange(BINS) + 0.5, each.drawn.hardness, 0.9, color=colour)
            axes.axhline(1 / BINS, color=INK, linestyle=":", linewidth=1)
            axes.set_title(each.sampler, loc="left", fontsize=10)
            axes.set(xlim=(0, BINS), xticks=())
            axes.annotate("easiest", (0, 0), xytext=(0, -11), textcoords="offset points", fontsize=8)
            axes.annotate("hardest", (BINS, 0), xytext=(0, -11), textcoords="offset points", fontsize=8, ha="right")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axes.tick_params(labelsize=8)
            tidy(axes, "y")
        for axes in panels[len(found) :]:
            axes.set_visible(False)
    return figure


def _colours(found: Sequence[Diagnosis]) -> list[str]:
    """The run's own negatives stand out."""
    return [COLOURS[0] if each.sampler == "own" else BASE for each in found]


def _samplers(axes: Axes, found: Sequence[Diagnosis]) -> None:
    axes.set_yticks(range(len(found)), [each.sampler for each in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
