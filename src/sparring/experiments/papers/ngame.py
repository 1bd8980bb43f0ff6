"""NGAME and DEXA against random batches, a popularity correction and ANCE: one encoder, the same epochs and batch for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparring.core.errors import UserError
from sparring.data.texts.texts import text_of
from sparring.experiments.papers import drawing
from sparring.experiments.papers.cells import Row
from sparring.experiments.papers.esans_rows import TONES
from sparring.experiments.papers.ngame_rows import (
    BIN_COLUMNS,
    CLAIM_COLUMNS,
    PRINTED_COLUMNS,
    QUALITY_COLUMNS,
    RANDOM,
    SHOWN,
    absent_rows,
    bin_rows,
    claim_rows,
    drawn_rows,
    quality_rows,
    said,
)
from sparring.experiments.papers.plan import Experiment, Given, Method, Plan, Protocol, Results
from sparring.experiments.report import figures
from sparring.experiments.report.comparison import in_words
from sparring.experiments.report.html import Figures, Section, Sheet
from sparring.experiments.report.tables import Table
from sparring.recipes.extreme import LABELS
from sparring.recipes.text import default_encoder, text_setup

SETUP = LABELS.replaced(batch_size=1600, epochs=30, select="ndcg@5", clf_epochs=30)
PROTOCOL = Protocol(
    "auto", valid=0.05, one_split=True, metrics=("precision_xc", "ndcg_xc", "recall_xc", "psp"), cutoffs=(1, 5, 100)
)
SOFTMAX: dict[str, object] = {"loss": "softmax", "tau": 0.05}


def methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    """Six trainings that differ in their negatives alone, or in the loss where that is in the name."""
    for role in ("query", "item"):
        try:
            text_of(given.data, role)
        except UserError as error:
            raise UserError(f"{given.shown}: {error}") from error
    encoder = str(asked.get("encoder", "auto"))
    suited = text_setup(default_encoder() if encoder == "auto" else encoder)
    epochs = int(str(asked.get("epochs", SETUP.training.epochs)))
    # The authors' are 10 and 5, of 300 epochs: in few, the first would come too late and the second hardly ever.
    start, every = max(1, min(10, epochs // 5)), max(1, min(5, epochs // 2))
    larger = start + every * max(1, round((epochs / 2 - start) / every))  # when clusters are made anyway
    shared: dict[str, object] = {"encoder": suited.text.encoder}
    shared |= {
        name: suited.flat()[name] for name in ("dim", "optimizer", "lr", "weight_decay", "schedule", "precision")
    }
    mined: dict[str, object] = {**shared, "every": every, "start": start}
    clustered: dict[str, object] = {**mined, "size": 8, "grow": (larger,)}
    return [
        Method(RANDOM, "dpr", {**shared, "loss": "hinge"}),
        Method("random in-batch, softmax", "dpr", {**shared, **SOFTMAX}),
        Method("corrected in-batch, softmax", "dpr", {**shared, **SOFTMAX, "corrected": True}),
        Method("ANCE", "ance", {**mined, "loss": "hinge"}),
        Method("NGAME", "ngame", clustered),
        Method("DEXA", "dexa", {**clustered, "auxiliary": 4, "private": 1000}),
    ]


def results(plan: Plan) -> Results:
    """The table of all rankings, the claims tested, and rare and frequent labels apart."""
    quality: list[Row] = []
    claims: list[Row] = []
    bins: list[Row] = []
    sections: list[Section] = []
    for given in plan.data:
        if not plan.methods[given.name]:
            continue
        some = quality_rows(plan, given), claim_rows(plan, given), bin_rows(plan, given)
        tables = (
            Table(QUALITY_COLUMNS[1:], some[0]),
            Table(CLAIM_COLUMNS[1:], some[1]),
            Table(BIN_COLUMNS[1:], some[2]),
        )
        names = ("", "Claims", "Rare and frequent labels")
        sheets = [Sheet(table, name, TONES) for table, name in zip(tables, names, strict=True)]
        sections.append(Section(given.shown, (*sheets, Figures(_figures(plan, given, some[0])))))
        quality, claims, bins = quality + some[0], claims + some[1], bins + some[2]
    absent = absent_rows(plan)
    sections.append(Section("Published, on sets that were not given", (Sheet(Table(PRINTED_COLUMNS, absent)),)))
    caption = f"{plan.experiment.line}; percent. {plan.experiment.source}"
    others = {
        "claims": Table(
            CLAIM_COLUMNS,
            claims,
            "What was claimed, relative to the other method; 95 % intervals over seeds and queries",
        ),
        "bins": Table(
            BIN_COLUMNS, bins, "Test pairs by how often their label trains; each bin has a tenth of the training pairs"
        ),
        "published": Table(PRINTED_COLUMNS, absent, "As printed, in percent, on sets that were not given"),
    }
    found = [*said(quality, claims), *_setting(plan)]
    return Results(Table(QUALITY_COLUMNS, [*quality, *absent], caption), found, sections, others)


def _figures(plan: Plan, given: Given, rows: Sequence[Row]) -> list[figures.Drawn]:
    some = drawn_rows(rows)
    if all(row["mean"] is None for row in some):
        return []
    words = f"{given.shown}: P@1 in percent, with one deviation over seeds, and the published figure (diamonds), where there is one."
    return [
        figures.save(
            drawing.ours_and_theirs(some, ".1f"), plan.out / "figures", f"{given.name}-{plan.experiment.name}", words
        )
    ]


def _setting(plan: Plan) -> list[str]:
    lines = []
    for given in plan.data:
        used = plan.methods[given.name][0].settings
        setup = {name: used.get(name, SETUP.flat()[name]) for name in ("encoder", "epochs", "batch_size", "clf_epochs")}
        lines.append(
            f"{given.shown}, the same for all: {in_words(setup)}; the authors train DistilBERT for 300 epochs, B = 1600."
        )
    return lines


NGAME_DEXA = Experiment(
    "ngame-dexa",
    "random in-batch, corrected, ANCE, NGAME, DEXA; encoder, classifiers and both fused",
    "NGAME (Dahiya et al., WSDM 2023), DEXA (Dahiya et al., KDD 2023)",
    methods,
    results,
    (
        f"{', '.join(SHOWN)} as the extreme-classification repository defines them, with the data's filters and propensities; PSP is of "
        "all test points together.",
        "encoder: exact search over the item tower; classifiers: one vector per label, trained over frozen query vectors from there; "
        "fused: both, with a tree learnt from held-out queries. All methods have all three, in the papers NGAME and DEXA alone.",
        "All but the two rows of softmax have NGAME's hinge loss, so that only the batches or the lists differ. Corrected: the log of how "
        "often a batch is expected to hold a label is subtracted from its logits.",
        "time: training of the encoder as a ratio to random batches, over the same seeds; with several trainings at once (--jobs) it "
        "wavers. mining: clustering (NGAME, DEXA), or encoding and ranking everything (ANCE), as a share of the rest of the same training.",
        "p is a paired test over seeds and queries together, corrected by Holm over the methods of a ranking, or over all claims of a set.",
        "5 % of the training texts are held out: the epoch is chosen on them, and the fusion is learnt from them.",
    ),
    setup=SETUP,
    protocol=PROTOCOL,
    known=lambda counts: "",
)
