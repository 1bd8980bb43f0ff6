"""The tables of a diagnosis, and its advice on which negatives to train with, by stated rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from sparring.core.errors import UserError
from sparring.experiments.diagnose.measures import BINS, Diagnosis
from sparring.experiments.report.tables import Column, Row, Table, text_columns
from sparring.recipes import RECIPES
from sparring.recipes.finding import find
from sparring.recipes.settings import own_arguments

NOISE = 1.0  # above it, the noise of one draw is longer than the gradient
TIE = 0.01  # cosines that differ by less than this, or by less than two standard errors, are equal
ACROSS = 0.9  # below it, the negatives push in another direction than those of the full softmax
ESS = 0.05  # share of the candidates below which most are wasted
HITS = 0.01  # share of known positives among unmasked candidates
POPULARITY = (0.2, 0.8)  # 0.5: as popular as training positives
FALSE = 0.05
HARDEST = 0.5  # share of the negatives in the hardest tenth


@dataclass(frozen=True)
class Advice:
    """One line: a recommendation, a reason for it, a warning about one sampler, or a note."""

    kind: str
    sampler: str
    text: str


def advise(diagnoses: Sequence[Diagnosis]) -> list[Advice]:
    """The recommendation, its reasons, and warnings.

    1. Only samplers whose noise is at most NOISE are considered; if there is none, the largest step_cosine wins.
    2. Of those, the largest cosine to the full softmax wins. Within max(TIE, 2 standard errors) of it the run's own
       negatives win, otherwise the least noise.
    3. Warnings: `across` below 0.9; effective sample size below 5 % of the candidates; more than 1 % known positives
       among unmasked candidates; popularity outside 0.2 to 0.8; more than 5 % false negatives, if the truth is known;
       more than half of the negatives in the hardest tenth.
    """
    tied: list[Diagnosis] = []
    eligible = [diagnosis for diagnosis in diagnoses if diagnosis.gradient.noise <= NOISE]
    if eligible:
        best = max(eligible, key=lambda diagnosis: diagnosis.gradient.cosine).gradient
        margin = max(TIE, 2 * best.error)
        tied = [diagnosis for diagnosis in eligible if diagnosis.gradient.cosine >= best.cosine - margin]
        quietest = min(tied, key=lambda diagnosis: diagnosis.gradient.noise)
        chosen = next((diagnosis for diagnosis in tied if diagnosis.sampler == "own"), quietest)
    else:
        chosen = max(diagnoses, key=lambda diagnosis: diagnosis.gradient.step_cosine)
    text = "keep the run's own negatives" if chosen.sampler == "own" else f"train with {chosen.sampler}"
    lines = [Advice("recommendation", chosen.sampler, text)]
    reason = f"the mean gradient of {_summary(chosen, ' with the full softmax')}"
    others = [diagnosis.sampler for diagnosis in tied if diagnosis is not chosen]
    if not eligible:
        step = f"a single step of this one has the best direction (cosine {chosen.gradient.step_cosine:.3f})"
        reason += f"; the noise of every sampler is above {NOISE:g}, and {step}"
    elif others:
        reason += f"; {', '.join(others)} {'is' if len(others) == 1 else 'are'} no different within {margin:.3f}"
    lines.append(Advice("reason", chosen.sampler, reason))
    for diagnosis in diagnoses:
        if diagnosis is not chosen and diagnosis not in tied:
            noisy = f": more noise than gradient (above {NOISE:g})" if diagnosis.gradient.noise > NOISE else ""
            lines.append(Advice("reason", diagnosis.sampler, f"{_summary(diagnosis)}{noisy}"))
    for problem, values in warnings(diagnoses):
        text = f"{problem}: {', '.join(f'{sampler} {value}' for sampler, value in values.items())}"
        lines.append(Advice("warning", ", ".join(values), text))
    note = (
        "a diagnosis says how well each sampler estimates the full softmax on this model; `sparring compare` says "
        "which one ranks best after training"
    )
    return [*lines, Advice("note", "", note)]


def _summary(diagnosis: Diagnosis, reference: str = "") -> str:
    g = diagnosis.gradient
    cosine = f"cosine {g.cosine:.3f} ± {g.error:.3f}{reference}"
    return f"{diagnosis.sampler} has {cosine}, noise {g.noise:.2f}, {diagnosis.draws.candidates:,.0f} candidates"


def warnings(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, dict[str, str]]]:
    """Each rule that some sampler breaks: the problem, and the value of each sampler that has it."""
    rows = [row(diagnosis) for diagnosis in diagnoses]

    def broken(field: str, form: str, wrong: Callable[[float], bool]) -> dict[str, str]:
        values = {str(values["sampler"]): values.get(field) for values in rows}
        return {
            name: format(value, form) for name, value in values.items() if isinstance(value, float) and wrong(value)
        }

    low, high = POPULARITY
    rules = [
        (
            f"without the pull to the positive, the gradient has another direction (cosine below {ACROSS:g})",
            broken("across", ".2f", lambda value: value < ACROSS),
        ),
        (f"fewer than {ESS:.0%} of the candidates carry the gradient", broken("ess_share", ".1%", lambda v: v < ESS)),
        *_known_positives(diagnoses),
        (
            "the negatives are mostly rare items (popularity; 0.5 is usual)",
            broken("popularity", ".2f", lambda value: value < low),
        ),
        (
            "the negatives are mostly popular items (popularity; 0.5 is usual)",
            broken("popularity", ".2f", lambda value: value > high),
        ),
        (
            f"the query would like more than {FALSE:.0%} of its negatives",
            broken("false_negatives", ".1%", lambda value: value > FALSE),
        ),
        (
            f"more than {HARDEST:.0%} of the negatives are in the hardest tenth of the catalogue, like unknown "
            "positives",
            broken(f"hardness_{BINS}", ".0%", lambda value: value > HARDEST),
        ),
    ]
    return [(problem, values) for problem, values in rules if values]


def _known_positives(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, dict[str, str]]]:
    """Two rules, because only some recipes have a setting that masks them."""
    problem = f"more than {HITS:.0%} of the negatives are known positives of the query"
    able = ", ".join(name for name in RECIPES if _can_mask(name))
    others = f"no setting of these recipes masks them: use exclude=known of {able}, or in Python of InBatch or Sampled"
    shown: list[dict[str, str]] = [{}, {}]
    for diagnosis in diagnoses:
        if diagnosis.draws.unmasked > HITS:
            shown[_can_mask(diagnosis.recipe)][diagnosis.sampler] = f"{diagnosis.draws.unmasked:.1%}"
    return [(f"{problem} (exclude=known masks them)", shown[True]), (f"{problem} ({others})", shown[False])]


def _can_mask(recipe: str) -> bool:
    try:
        return "exclude" in own_arguments(find(recipe))
    except UserError:  # composed in Python, without a recipe
        return False


def row(diagnosis: Diagnosis) -> Row:
    """All values of a diagnosis under flat names."""
    draws = {key: value for key, value in asdict(diagnosis.draws).items() if key != "hardness"}
    share = diagnosis.draws.ess / diagnosis.draws.candidates if diagnosis.draws.candidates else None
    bins = {f"hardness_{i + 1}": value for i, value in enumerate(diagnosis.draws.hardness)}
    measured = {**asdict(diagnosis.gradient), **draws, "ess_share": share, **diagnosis.profile, **bins}
    return {"sampler": diagnosis.sampler, **measured}


def tables(diagnoses: Sequence[Diagnosis]) -> dict[str, Table]:
    """gradient, negatives, hardness: one row per sampler."""
    rows = [row(diagnosis) for diagnosis in diagnoses]
    (name,) = text_columns("sampler")
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
        Column("dropped", "{dropped:.2%}"),
        Column("popularity", "{popularity:.3f}"),
        *(Column(stratum, f"{{{stratum}:.1%}}") for stratum in ("head", "mid", "tail")),
        Column("synthetic", "{synthetic:.1%}"),
    )
    for title, field in (("false negatives", "false_negatives"), ("dropped", "dropped")):
        if all(getattr(diagnosis.draws, field) is None for diagnosis in diagnoses):
            negatives = tuple(column for column in negatives if column.title != title)
    steps = tuple(
        Column(f"{100 * i // BINS}-{100 * (i + 1) // BINS} %", f"{{hardness_{i + 1}:.1%}}") for i in range(BINS)
    )
    return {
        "gradient": Table(
            (name, *gradient), _picked(rows, gradient), "Gradient by query vectors, against the full softmax"
        ),
        "negatives": Table((name, *negatives), _picked(rows, negatives), "Profile of the negatives"),
        "hardness": Table(
            (name, *steps), _picked(rows, steps), "Share of the negatives by the rank of their score in the catalogue"
        ),
    }


def as_table(lines: Sequence[Advice]) -> Table:
    """The advice as a table."""
    columns = (*text_columns("kind", "sampler"), Column("advice", "{text}", text=True))
    return Table(columns, [asdict(line) for line in lines], "Advice")


def _picked(rows: Sequence[Row], columns: Sequence[Column]) -> list[Row]:
    """The rows with only the fields that a table shows."""
    return [
        {key: value for key, value in row.items() if key == "sampler" or any(f"{{{key}:" in c.form for c in columns)}
        for row in rows
    ]
