"""What training costs, as a ratio to uniform negatives: table 3 of ESANS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparring.experiments.papers import drawing
from sparring.experiments.papers.cells import TONES, Row, agreement, beside, named
from sparring.experiments.papers.esans_rows import REFERENCE
from sparring.experiments.papers.plan import Experiment, Given, Method, Plan, Results
from sparring.experiments.papers.published import Figure, esans_ratios
from sparring.experiments.report import figures
from sparring.experiments.report.comparison import read_history
from sparring.experiments.report.html import Figures, Section, Sheet
from sparring.experiments.report.tables import Column, Table
from sparring.recipes import RECIPES
from sparring.recipes.setup import Setup

N = 5120  # shared by the batch: 10 for each of 512 positives
SHARED: dict[str, object] = {"n": N, "per_query": False}
METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "UNS": ("uns", SHARED),
    "PNS": ("pns", SHARED),
    "debiased MNS": ("debiased_mns", {"n": N}),
    "MixGCF": ("mixgcf", {**SHARED, "k": 10}),
    "FairNeg": ("fairneg", {"n": N}),
    "Ada-tau": ("ada_tau", SHARED),
    "ESANS": ("esans", {}),
}
SETUP = Setup.of(
    dim=64, score="cosine", tau=0.05, batch_size=512, epochs=4, optimizer="row-adam", lr=2e-4, patience=None
)
METRIC = "training time / UNS"


def methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    return [Method(name, recipe, settings) for name, (recipe, settings) in METHODS.items() if recipe in RECIPES]


def results(plan: Plan) -> Results:
    """The time of an epoch as a ratio to that of UNS with the same seed, beside the published ratio of hours."""
    rows: list[Row] = []
    sections = []
    for given in plan.data:
        found = {method.name: _epoch_seconds(plan, given, method) for method in plan.methods[given.name]}
        some = [_row(plan, given, name, found) for name in METHODS]
        rows += some
        drawn = []
        if any(row["mean"] is not None for row in some):
            words = f"{given.shown}: time of an epoch as a ratio to that of UNS (bars), and the ratio published for #A2 (diamonds)."
            drawn = [
                figures.save(drawing.ours_and_theirs(some, ".2f"), plan.out / "figures", f"{given.name}-cost", words)
            ]
        sections.append(Section(given.shown, (Sheet(Table(COLUMNS[1:], some), "", TONES), Figures(drawn))))
    asked = ", ".join(f"{name}={value}" for name, value in plan.settings.items())
    said = [*agreement(rows), *([f"With {asked}."] if asked else [])]
    return Results(Table(COLUMNS, rows, plan.caption), said, sections)


def _epoch_seconds(plan: Plan, given: Given, method: Method) -> dict[int, float]:
    """Seed -> mean seconds of an epoch, without the first where there are several: it also allocates and warms up."""
    found = {}
    for folder in plan.folders(given, method):
        ends = [float(record["seconds"]) for record in read_history(folder)]
        found[int(folder.name)] = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]
    return found


def _row(plan: Plan, given: Given, name: str, found: Mapping[str, Mapping[int, float]]) -> Row:
    base, own = found["UNS"], found.get(name, {})
    method = next((method for method in plan.methods[given.name] if method.name == name), None)
    why = plan.error(given, method) if method else f"the recipe `{METHODS[name][0]}` is not there yet"
    row: Row = {"data": given.shown, "metric": METRIC, "method": name}
    row |= beside(
        [own[seed] / base[seed] for seed in own if base.get(seed)], Figure(round(esans_ratios()[name], 2)), why
    )
    if name == "UNS" and row["mean"] is not None:
        row |= {"difference": None, "verdict": REFERENCE}
    return row | {"epoch_seconds": beside(list(own.values()), None)["mean"]}


COLUMNS = (
    *named("data", "method"),
    Column("time / UNS", "{mean:.2f}[[ ± {std:.2f}]]"),
    Column("published, on #A2", "{published:.2f}"),
    Column("difference", "{difference:+.1%}"),
    *named("verdict"),
    Column("seconds per epoch", "{epoch_seconds:.2f}"),
    Column("seeds", "{seeds}"),
)


COST = Experiment(
    "esans-cost",
    "Training cost as a ratio to uniform negatives",
    "ESANS (Xing et al., WWW 2025), table 3",
    methods,
    results,
    (
        "Published: hours of training on the set #A2, which is private, in TensorFlow on CPU workers, with towers over histories and "
        "features, without the offline stage of ESANS. Ours: time of an epoch on plain id tables. Both say what a method adds to a step: "
        "where the towers cost more than the negatives, ratios come nearer to 1.",
        "Batches of 512, d = 64, temperature 0.05, Adam at 2e-4, 5,120 negatives shared by the batch (10 for each positive); MixGCF mixes "
        "the 10 hardest of them. The paper names no number of epochs; a time needs only a few.",
        "One training at a time, whatever --jobs says. The first epoch, which also warms up, does not count where there are others.",
    ),
    setup=SETUP,
    alone=True,
)
