"""What a diagnosis says: its tables, and which negatives to train with, by stated rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sparring.core.errors import UserError
from sparring.experiments.diagnose.measures import BINS, Diagnosis
from sparring.experiments.report.tables import Cell, Column, Table
from sparring.recipes import RECIPES
from sparring.recipes.finding import find
from sparring.recipes.settings import own_arguments

NOISE = 1.0  # above it, the noise of one draw is longer than the gradient that it hides
TIE = 0.01  # cosines nearer than this, or than two standard errors, are alike
ACROSS = 0.9  # below it, the negatives push elsewhere than those of the full softmax would
ESS = 0.05  # share of the candidates below which most are scored for nothing
HITS = 0.01  # share of known positives among what counts
POPULARITY = (0.2, 0.8)  # 0.5: as popular as what people take
FALSE = 0.05
HARDEST = 0.5  # share of the negatives in the hardest tenth


@dataclass(frozen=True)
class Advice:
    """One line: a recommendation, a reason for it, a warning about one sampler, or a note."""

    kind: str
    sampler: str
    text: str


def advise(found: Sequence[Diagnosis]) -> list[Advice]:
    """The recommendation, its reasons, and warnings.

    1. Only samplers whose noise is at most NOISE are considered; where there is none, the one with the largest step_cosine is taken.
    2. Of those, the largest cosine to the full softmax wins; within max(TIE, 2 standard errors) of it the run's own negatives win,
       else the least noise.
    3. Warnings: `across` below 0.9; effective sample size below 5 % of the candidates; more than 1 % known positives among what counts;
       popularity outside 0.2 to 0.8; more than 5 % false negatives, where the truth is known; more than half of the negatives in the
       hardest tenth.
    """
    alike: list[Diagnosis] = []
    quiet = [each for each in found if each.gradient.noise <= NOISE]
    if quiet:
        best = max(quiet, key=lambda each: each.gradient.cosine)
        margin = max(TIE, 2 * best.gradient.error)
        alike = [each for each in quiet if each.gradient.cosine >= best.gradient.cosine - margin]
        chosen = next(
            (each for each in alike if each.sampler == "own"), min(alike, key=lambda each: each.gradient.noise)
        )
    else:
        chosen = max(found, key=lambda each: each.gradient.step_cosine)
    g = chosen.gradient
    text = "keep the run's own negatives" if chosen.sampler == "own" else f"train with {chosen.sampler}"
    lines = [Advice("recommendation", chosen.sampler, text)]
    reason = f"the mean gradient of {chosen.sampler} has cosine {g.cosine:.3f} ± {g.error:.3f} with the full softmax, noise {g.noise:.2f}"
    reason += f", {chosen.drawn.candidates:,.0f} candidates"
    if not quiet:
        reason += f"; the noise of every sampler is above {NOISE:g}, and one step of this one points best (cosine {g.step_cosine:.3f})"
    else:
        others = [each.sampler for each in alike if each is not chosen]
        reason += (
            f"; {', '.join(others)} {'is' if len(others) == 1 else 'are'} no different within {margin:.3f}"
            if others
            else ""
        )
    lines.append(Advice("reason", chosen.sampler, reason))
    worse = [each for each in found if each is not chosen and each not in alike]
    lines += [Advice("reason", each.sampler, _against(each)) for each in worse]
    lines += [
        Advice("warning", ", ".join(shown), f"{text}: {', '.join(f'{k} {v}' for k, v in shown.items())}")
        for text, shown in warnings(found)
    ]
    note = "this says how well each estimates the full softmax on this model, not which ranks best in the end: sparring compare tells that"
    return [*lines, Advice("note", "", note)]


def _against(each: Diagnosis) -> str:
    g = each.gradient
    text = f"{each.sampler} has cosine {g.cosine:.3f} ± {g.error:.3f}, noise {g.noise:.2f}, {each.drawn.candidates:,.0f} candidates"
    return text + (f": more noise than gradient (above {NOISE:g})" if g.noise > NOISE else "")


def warnings(found: Sequence[Diagnosis]) -> list[tuple[str, dict[str, str]]]:
    """Each rule that some sampler breaks: what is wrong, and the figure of each sampler of which it is true."""
    low, high = POPULARITY
    popularity = {each.sampler: each.profile["popularity"] for each in found if "popularity" in each.profile}
    false = {each.sampler: each.drawn.false_negatives for each in found if each.drawn.false_negatives is not None}
    few = {each.sampler: each.drawn.ess / each.drawn.candidates for each in found if each.drawn.candidates > 0}
    rules = [
        (
            f"apart from the pull to the positive, the gradient points elsewhere (cosine below {ACROSS:g})",
            {each.sampler: f"{each.gradient.across:.2f}" for each in found if each.gradient.across < ACROSS},
        ),
        (
            f"the gradient rests on fewer than {ESS:.0%} of the candidates",
            {k: f"{v:.1%}" for k, v in few.items() if v < ESS},
        ),
        *_known_positives(found),
        (
            "the negatives are mostly rare items (popularity; 0.5 is usual)",
            {k: f"{v:.2f}" for k, v in popularity.items() if v < low},
        ),
        (
            "the negatives are mostly popular items (popularity; 0.5 is usual)",
            {k: f"{v:.2f}" for k, v in popularity.items() if v > high},
        ),
        (
            f"more than {FALSE:.0%} of what counts as negative the query would like",
            {k: f"{v:.1%}" for k, v in false.items() if v > FALSE},
        ),
        (
            f"more than {HARDEST:.0%} of the negatives are in the hardest tenth of the catalogue, where unknown positives are",
            {each.sampler: f"{each.drawn.hardness[-1]:.0%}" for each in found if each.drawn.hardness[-1] > HARDEST},
        ),
    ]
    return [(text, shown) for text, shown in rules if shown]


def _known_positives(found: Sequence[Diagnosis]) -> list[tuple[str, dict[str, str]]]:
    """Two rules, since only some recipes have a setting that masks them."""
    what = f"known positives of the query are more than {HITS:.0%} of what counts as negative"
    able = ", ".join(name for name in RECIPES if _can_mask(name))
    others = f"no setting of these masks them: exclude=known of {able} does, and in Python that of InBatch, Sampled and others"
    shown: list[dict[str, str]] = [{}, {}]
    for each in found:
        if each.drawn.unmasked > HITS:
            shown[_can_mask(each.recipe)][each.sampler] = f"{each.drawn.unmasked:.1%}"
    return [(f"{what} (exclude=known masks them)", shown[True]), (f"{what} ({others})", shown[False])]


def _can_mask(recipe: str) -> bool:
    try:
        return "exclude" in own_arguments(find(recipe))
    except UserError:  # composed in Python: there is no recipe of that name
        return False


def row(each: Diagnosis) -> dict[str, Cell]:
    """Every figure of a diagnosis under a flat name."""
    drawn = {key: value for key, value in asdict(each.drawn).items() if key != "hardness"}
    share = each.drawn.ess / each.drawn.candidates if each.drawn.candidates else None
    bins = {f"hardness_{i + 1}": value for i, value in enumerate(each.drawn.hardness)}
    return {"sampler": each.sampler, **asdict(each.gradient), **drawn, "ess_share": share, **each.profile, **bins}


def tables(found: Sequence[Diagnosis]) -> dict[str, Table]:
    """gradient, negatives, hardness: one row per sampler."""
    rows = [row(each) for each in found]
    name = Column("sampler", "{sampler}", text=True)
    gradient = (
        Column("cosine", "{cosine:.4f} ± {error:.4f}"),
        Column("of one step", "{step_cosine:.4f}"),
        Column("across", "{across:.4f}"),
        Column("bias", "{bias:.4f}"),
        Column("noise", "{noise:.4f}"),
        Column("length", "{length:.3f}"),
        Column("candidates", "{candidates:,.0f}"),
        Column("ess", "{ess:,.1f}"),
        Column("ess share", "{ess_share:.1%}"),
    )
    negatives = (
        Column("own positive", "{own_positive:.2%}"),
        Column("other positives", "{other_positive:.2%}"),
        Column("unmasked", "{unmasked:.2%}"),
        Column("false negatives", "{false_negatives:.2%}"),
        Column("popularity", "{popularity:.3f}"),
        *(Column(stratum, f"{{{stratum}:.1%}}") for stratum in ("head", "mid", "tail")),
        Column("synthetic", "{synthetic:.1%}"),
    )
    if all(each.drawn.false_negatives is None for each in found):
        negatives = tuple(column for column in negatives if column.title != "false negatives")
    steps = tuple(
        Column(f"{100 * i // BINS}-{100 * (i + 1) // BINS} %", f"{{hardness_{i + 1}:.1%}}") for i in range(BINS)
    )
    return {
        "gradient": Table(
            (name, *gradient), _picked(rows, gradient), "Gradient by query vectors, against the full softmax"
        ),
        "negatives": Table((name, *negatives), _picked(rows, negatives), "What is drawn as negative"),
        "hardness": Table(
            (name, *steps), _picked(rows, steps), "Share of the negatives by the rank of their score in the catalogue"
        ),
    }


def as_table(lines: Sequence[Advice]) -> Table:
    """Advice as rows."""
    columns = (
        Column("kind", "{kind}", text=True),
        Column("sampler", "{sampler}", text=True),
        Column("advice", "{text}", text=True),
    )
    return Table(columns, [asdict(line) for line in lines], "Advice")


def _picked(rows: Sequence[dict[str, Cell]], columns: Sequence[Column]) -> list[dict[str, Cell]]:
    """The fields that a table shows."""
    return [
        {key: value for key, value in each.items() if key == "sampler" or any(f"{{{key}:" in c.form for c in columns)}
        for each in rows
    ]
