"""NGAME and DEXA against random batches, a popularity correction and ANCE: one encoder, equal epochs and batches.

Every method is ranked by its encoder, by classifiers over frozen query vectors, and by both fused. References without
training are BM25 over the words and the untrained encoder, measured once per data set (OUT/DATA/references.json).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sparring.core import files
from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.files import read_table
from sparring.data.interactions import Split
from sparring.data.propensity import inverse_propensities
from sparring.data.texts.texts import text_of
from sparring.evaluation.bm25 import bm25
from sparring.evaluation.ranking import Evaluation, evaluate, evaluate_lists
from sparring.experiments.papers import drawing
from sparring.experiments.papers.paper import (
    Experiment,
    PaperDataset,
    PaperMethod,
    Reproduction,
    Results,
    SplitProtocol,
)
from sparring.experiments.papers.paper_tables import (
    OVER,
    SEEDS,
    Values,
    correct,
    field,
    gain_cells,
    gain_column,
    mean_cells,
    published_gain,
    relative_row,
    render,
    save_figure,
)
from sparring.experiments.papers.printed import published, published_cells
from sparring.experiments.report.figures import RenderedFigure
from sparring.experiments.report.html import Section, Sheet
from sparring.experiments.report.tables import Column, Row, Table, TableRows, text_columns
from sparring.experiments.report.wording import in_words
from sparring.experiments.study import FinishedRun, query_values, read_json
from sparring.recipes import settings
from sparring.recipes.extreme import LABELS
from sparring.recipes.text import default_encoder, text_setup

SETUP = LABELS.replaced(batch_size=1600, epochs=30, select="ndcg@5", clf_epochs=30)
PROTOCOL = SplitProtocol(
    "auto", valid=0.05, one_split=True, metrics=("precision_xc", "ndcg_xc", "recall_xc", "psp"), cutoffs=(1, 5, 100)
)
PRINTED = {ranking: published_cells("ngame", ranking) for ranking in ("encoder", "fused")}
SLIDES = published("ngame")["slides"]  # the time that mining adds to training, and the gain of DEXA over NGAME
METRICS = ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5")
SHOWN = (*METRICS, "R@100")
OUR_METRICS = {"P": "precision_xc", "nDCG": "ndcg_xc", "PSP": "psp", "R": "recall_xc"}
# Rankings by our names: the stage of training/stages.py, and the file of its values by query.
RANKINGS = {
    "encoder": ("knn", "per_query"),
    "classifiers": ("clf", "classifiers/per_query"),
    "fused": ("fusion", "fusion_per_query"),
}
RANDOM, BM25, UNTRAINED = "random in-batch", "BM25", "encoder, untrained"
CLAIMS = (("NGAME", RANDOM), ("ANCE", RANDOM), ("DEXA", "NGAME"))
ABSENT = "not reproducible here: the data was not given"
MINING = ("cluster_seconds", "list_seconds")  # in the records of the epochs
RARE = 4  # training texts of a label at most
RARE_TITLE = f"Labels of at most {RARE} training texts, and the others"
RARE_CAPTION = (
    f"Test pairs of rare labels and of the others; rare are the bins of labels of at most {RARE} training texts"
)
SOFTMAX: dict[str, object] = {"loss": "softmax", "tau": 0.05}


def methods(dataset: PaperDataset, asked: Mapping[str, object]) -> Sequence[PaperMethod]:
    """Six trainings that differ in their negatives alone, or in the loss if their name says so."""
    for role in ("query", "item"):
        try:
            text_of(dataset.data, role)
        except UserError as error:
            raise UserError(f"{dataset.shown}: {error}") from error
    encoder = str(asked.get("encoder", "auto"))
    suited = text_setup(default_encoder() if encoder == "auto" else encoder)
    epochs = int(str(asked.get("epochs", SETUP.training.epochs)))
    # The authors use 10 and 5, of 300 epochs: in few epochs, the first would be too late and the second too rare.
    start, every = max(1, min(10, epochs // 5)), max(1, min(5, epochs // 2))
    grow = start + every * max(1, round((epochs / 2 - start) / every))  # an epoch that rebuilds the clusters
    taken = ("encoder", "dim", "optimizer", "lr", "weight_decay", "schedule", "precision")
    shared: dict[str, object] = {name: suited.flat()[name] for name in taken}
    mined: dict[str, object] = {**shared, "every": every, "start": start}
    clustered: dict[str, object] = {**mined, "size": 8, "grow": (grow,)}
    return [
        PaperMethod(RANDOM, "dpr", {**shared, "loss": "hinge"}),
        PaperMethod("random in-batch, softmax", "dpr", {**shared, **SOFTMAX}),
        PaperMethod("corrected in-batch, softmax", "dpr", {**shared, **SOFTMAX, "corrected": True}),
        PaperMethod("ANCE", "ance", {**mined, "loss": "hinge"}),
        PaperMethod("NGAME", "ngame", clustered),
        PaperMethod("DEXA", "dexa", {**clustered, "auxiliary": 4, "private": 1000}),
    ]


def our_metric(metric: str) -> str:
    """Our name of a printed metric: nDCG@5 is ndcg_xc@5."""
    name, _, k = metric.partition("@")
    return f"{OUR_METRICS[name]}@{k}"


def evaluations(run: FinishedRun) -> dict[str, dict[str, Any]]:
    """The evaluation of each ranking of a run; only the encoder's for a run without stages."""
    stages = run.result.get("stages") or {"knn": run.result["test"]}
    return {ranking: stages[stage] for ranking, (stage, _) in RANKINGS.items() if stage in stages}


def by_seed(plan: Reproduction, dataset: PaperDataset, method: PaperMethod, ranking: str, metric: str) -> Values:
    """The values of each test query in every finished run, by seed."""
    values: Values = {}
    for run in plan.runs(dataset, method):
        own = evaluations(run)
        if ranking in own:
            per_query = read_table(run.path(f"{RANKINGS[ranking][1]}.parquet"))
            values[run.seed] = query_values(per_query, own[ranking]["metrics"], our_metric(metric))
    return values


def rankings(plan: Reproduction, dataset: PaperDataset) -> list[str]:
    """The rankings that some finished run has."""
    runs = [run for method in plan.methods[dataset.name] for run in plan.runs(dataset, method)]
    known = {ranking for run in runs for ranking in evaluations(run)}
    return [ranking for ranking in RANKINGS if ranking in known] or ["encoder"]


def quality_rows(plan: Reproduction, dataset: PaperDataset) -> list[Row]:
    """One row per ranking and method: all metrics, P@1 tested against random batches, times, and the printed figure."""
    rows: list[Row] = []
    for name, evaluation in references(plan, dataset, plan.methods[dataset.name][0]).items():
        row: Row = {
            "data": dataset.shown,
            "ranking": "reference",
            "method": name,
            "seeds": None,
            **_means([evaluation]),
        }
        verdict = f"not run: {evaluation['error']}" if "error" in evaluation else ""
        rows.append(row | _costs([]) | _printed("", "", "") | {"verdict": verdict})
    for ranking in rankings(plan, dataset):
        own = [_quality_row(plan, dataset, ranking, method) for method in plan.methods[dataset.name]]
        correct(own)
        rows += own
    return rows


def _quality_row(plan: Reproduction, dataset: PaperDataset, ranking: str, method: PaperMethod) -> Row:
    first = next(other for other in plan.methods[dataset.name] if other.name == RANDOM)
    values, base = (by_seed(plan, dataset, own, ranking, "P@1") for own in (method, first))
    runs = plan.runs(dataset, method)
    measured = [own[ranking] for run in runs if ranking in (own := evaluations(run))]
    row = relative_row(values, base, method.name == RANDOM, "" if values else plan.error(dataset, method))
    row |= {"data": dataset.shown, "ranking": ranking, "method": method.name, **_means(measured)}
    row |= _costs(runs, plan.runs(dataset, first)) if ranking == "encoder" else _costs([])
    return row | _printed(ranking, dataset.name, method.name)


def _means(evaluations: Sequence[Mapping[str, Any]]) -> Row:
    """Means and deviations in percent."""
    row: Row = {}
    for metric in SHOWN:
        key = our_metric(metric)
        values = [100 * found["metrics"][key] for found in evaluations if key in found.get("metrics", {})]
        row |= mean_cells(field(metric), values)
    return row


def _costs(runs: Sequence[FinishedRun], base: Sequence[FinishedRun] = ()) -> Row:
    """Training time as a ratio to that of `base` over the same seeds, and mining as a share of the rest of training."""
    row: Row = {"time": None, "mining": None, "train_seconds": None}
    if not runs:
        return row
    times = {run.seed: float(run.result["train_seconds"]) for run in runs}
    mined = sum(float(record.get(name, 0.0)) for run in runs for record in run.history for name in MINING)
    theirs = {run.seed: float(run.result["train_seconds"]) for run in base if run.seed in times}
    row["train_seconds"] = float(np.mean([*times.values()]))
    row["mining"] = mined / max(sum(times.values()) - mined, 1e-9)
    if theirs:
        row["time"] = sum(times[seed] for seed in theirs) / max(sum(theirs.values()), 1e-9)
    return row


def _printed(ranking: str, data: str, method: str) -> Row:
    figures = {metric: PRINTED.get(ranking, {}).get((data, metric, method)) for metric in METRICS}
    return {f"published_{field(metric)}": figure.value if figure else None for metric, figure in figures.items()}


def absent_rows(plan: Reproduction) -> list[Row]:
    """The published figures on data that was not given."""
    given = {dataset.name for dataset in plan.suited}
    rows: list[Row] = []
    for ranking, cells in PRINTED.items():
        for data, method in dict.fromkeys((data, method) for data, _, method in cells):
            if data not in given:
                row: Row = {"data": data, "ranking": ranking, "method": method, "seeds": 0, **_means([]), **_costs([])}
                rows.append(row | _printed(ranking, data, method) | {"verdict": ABSENT})
    return rows


def claim_rows(plan: Reproduction, dataset: PaperDataset) -> list[Row]:
    """The papers' claims on each ranking and metric: our relative gain, tested, beside the published one."""
    rows: list[Row] = []
    methods = {method.name: method for method in plan.methods[dataset.name]}
    for ranking in rankings(plan, dataset):
        for metric in plan.measured(dataset, SHOWN):
            for better, base in CLAIMS:
                values, theirs = (by_seed(plan, dataset, methods[name], ranking, metric) for name in (better, base))
                row = relative_row(values, theirs, False, "" if values else plan.error(dataset, methods[better]))
                row |= {"data": dataset.shown, "ranking": ranking, "metric": metric, "claim": f"{better} over {base}"}
                gain = published_gain(PRINTED.get(ranking, {}), metric, better, base, dataset.name)
                rows.append(row | gain_cells("published", gain))
    correct(rows)
    return rows


def bin_rows(plan: Reproduction, dataset: PaperDataset) -> list[Row]:
    """The test pairs of frequent and rare labels that are found: ten bins of labels by training texts."""
    k = max(plan.cutoffs(dataset))
    small = max(cutoff for cutoff in plan.cutoffs(dataset) if cutoff <= 5)
    rows: list[Row] = []
    for ranking in rankings(plan, dataset):
        for method in plan.methods[dataset.name]:
            measured = [evaluations(run) for run in plan.runs(dataset, method)]
            for bins in zip(*(own[ranking]["bins"] for own in measured if ranking in own), strict=True):
                row: Row = {"data": dataset.shown, "ranking": ranking, "method": method.name, "seeds": len(bins)}
                row |= {name: bins[0][name] for name in ("items", "least", "most", "pairs")}
                row |= {"k": k, "small": small, "recall": float(np.mean([part[f"recall@{k}"] for part in bins]))}
                rows.append(row | {"added": 100 * float(np.mean([part[f"precision@{small}"] for part in bins]))})
    return rows


def rare_rows(plan: Reproduction, dataset: PaperDataset) -> list[Row]:
    """The test pairs of rare labels, and those of all others, for every reference, ranking and method."""
    first = plan.methods[dataset.name][0]
    shown = {("reference", name): [found] for name, found in references(plan, dataset, first).items()}
    for ranking in rankings(plan, dataset):
        for method in plan.methods[dataset.name]:
            measured = (evaluations(run) for run in plan.runs(dataset, method))
            shown[ranking, method.name] = [own[ranking] for own in measured if ranking in own]
    rows: list[Row] = []
    for (ranking, name), found in shown.items():
        own = [rare_and_frequent(evaluation["bins"]) for evaluation in found if "bins" in evaluation]
        for group in own[0] if own else ():
            values = [each[group] for each in own]
            row: Row = {"data": dataset.shown, "ranking": ranking, "method": name, "labels": group}
            row |= {"most": RARE, "seeds": None if ranking == "reference" else len(own)}
            row |= {key: values[0][key] for key in ("items", "pairs", "k")}
            for key in ("found", "first", "added"):
                row |= mean_cells(key, [100 * value[key] for value in values])
            rows.append(row)
    return rows


def rare_and_frequent(bins: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The bins of labels of at most RARE training texts, and all others, each joined; none without test pairs.

    `found` and `first` are the shares of the test pairs in the first k places and in the first; `added` is the part of
    P@1, which both groups add up to.
    """
    groups: dict[str, dict[str, float]] = {}
    for name, rare in (("rare", True), ("frequent", False)):
        own = [each for each in bins if (each["most"] <= RARE) == rare]
        pairs = sum(each["pairs"] for each in own)
        if pairs:
            k = max(int(key.partition("@")[2]) for key in own[0] if key.startswith("recall@"))
            groups[name] = {
                "items": sum(each["items"] for each in own),
                "pairs": pairs,
                "k": k,
                "found": sum(each[f"recall@{k}"] * each["pairs"] for each in own) / pairs,
                "first": sum(each["recall@1"] * each["pairs"] for each in own) / pairs,
                "added": sum(each["precision@1"] for each in own),
            }
    return groups


# In percent; the deviations of the other metrics are in the fields.
QUALITY_COLUMNS = (
    *text_columns("data", "ranking", "method"),
    Column("P@1", "{p_at_1:.2f}[[ ± {p_at_1_std:.2f}]]"),
    *(Column(metric, f"{{{field(metric)}:.2f}}") for metric in SHOWN[1:]),
    Column("P@1 to random", OVER),
    Column("p (Holm)", "{p_holm:.2g}"),
    *text_columns("verdict"),
    Column("time", "{time:.2f}"),
    Column("mining", "{mining:.1%}"),
    Column("published P@1", "{published_p_at_1:.2f}"),
    SEEDS,
)
PRINTED_COLUMNS = (
    *text_columns("data", "ranking", "method"),
    *(Column(metric, f"{{published_{field(metric)}:.2f}}") for metric in METRICS),
    Column("ours", "{verdict}", text=True),
)
CLAIM_COLUMNS = (
    *text_columns("data", "ranking", "metric", "claim"),
    Column("ours", OVER),
    gain_column("published", "published"),
    Column("p", "{p:.2g}"),
    Column("p (Holm)", "{p_holm:.2g}"),
    *text_columns("verdict"),
    SEEDS,
)
BIN_COLUMNS = (
    *text_columns("data", "ranking", "method"),
    Column("training texts of a label", "{least:.0f} to {most:.0f}"),
    Column("labels", "{items:.0f}"),
    Column("test pairs", "{pairs:.0f}"),
    Column("of these found, %", "{recall:.1%} in {k}"),
    Column("adds to precision, points", "{added:.2f} at {small}"),
)
RARE_COLUMNS = (
    *text_columns("data", "ranking", "method", "labels"),
    Column("test pairs", "{pairs:.0f}"),
    Column("of these found, %", "{found:.2f}[[ ± {found_std:.2f}]] in {k}"),
    Column("of these first, %", "{first:.2f}[[ ± {first_std:.2f}]]"),
    Column("adds to P@1, points", "{added:.2f}[[ ± {added_std:.2f}]]"),
    SEEDS,
)


def findings(quality: TableRows, claims: TableRows) -> list[str]:
    """The claims on P@1 and the cost of mining in sentences."""
    lines = []
    for row in claims:
        if row["metric"] == "P@1" and row["over"] is not None:
            printed = "" if row["published"] is None else f"; published {row['published']:+.1%}"
            if row["claim"] == "DEXA over NGAME":
                printed += "; the slides say {:+.1%} to {:+.1%}".format(*SLIDES["dexa_gain"])
            interval = "" if row["over_low"] is None else f" [{row['over_low']:+.1%}, {row['over_high']:+.1%}]"
            claim = f"{row['claim']} {row['over']:+.1%}{interval}, {row['verdict']}{printed}"
            lines.append(f"{row['data']}, {row['ranking']}, P@1: {claim}.")
    for row in quality:
        if row["mining"] is not None and row["method"] in SLIDES["overhead"] and row["ranking"] == "encoder":
            slides = f"the slides say {SLIDES['overhead'][row['method']]:.0%}"
            adds = f"mining of {row['method']} adds {row['mining']:.1%} to the rest of its training"
            lines.append(f"{row['data']}: {adds}; {slides}.")
    return lines


def results(plan: Reproduction) -> Results:
    """The table of all rankings, the claims tested, and rare and frequent labels apart."""
    quality: list[Row] = []
    claims: list[Row] = []
    bins: list[Row] = []
    rare: list[Row] = []
    drawn = {}
    for dataset in plan.suited:
        own = quality_rows(plan, dataset)
        quality, claims, bins = quality + own, claims + claim_rows(plan, dataset), bins + bin_rows(plan, dataset)
        rare += rare_rows(plan, dataset)
        drawn[dataset.name] = _figures(plan, dataset, own)
    tables = {
        "": Table(QUALITY_COLUMNS, quality, f"{plan.experiment.line}; percent. {plan.experiment.source}"),
        "Claims": Table(
            CLAIM_COLUMNS, claims, "Claimed gains over the other method; 95 % intervals over seeds and queries"
        ),
        RARE_TITLE: Table(RARE_COLUMNS, rare, RARE_CAPTION),
        "Rare and frequent labels": Table(
            BIN_COLUMNS, bins, "Test pairs by how often their label trains; each bin has a tenth of the training pairs"
        ),
    }
    absent = absent_rows(plan)
    printed = Table(PRINTED_COLUMNS, absent, "As printed, in percent, on sets that were not given")
    more = [Section("Published, on sets that were not given", (Sheet(replace(printed, caption="")),))]
    others = {"claims": tables["Claims"], "bins": tables["Rare and frequent labels"], "published": printed}
    others["rare"] = tables[RARE_TITLE]
    lines = [*findings(quality, claims), *_settings_lines(plan)]
    return render(plan, tables, lines, drawn, absent=absent, more=more, others=others)


def _figures(plan: Reproduction, dataset: PaperDataset, rows: TableRows) -> list[RenderedFigure]:
    names = {"mean": "p_at_1", "std": "p_at_1_std", "published": "published_p_at_1"}
    shown: list[Row] = [
        {"metric": f"P@1, {row['ranking']}", "method": row["method"], **{to: row[name] for to, name in names.items()}}
        for row in rows
        if row["ranking"] in RANKINGS
    ]
    if all(row["mean"] is None for row in shown):
        return []
    caption = "P@1 in percent, with one deviation over seeds, and the published figure (diamonds), if there is one."
    figure = drawing.ours_and_theirs(shown, ".1f")
    return [save_figure(plan, dataset, plan.experiment.name, figure, caption)]


def _settings_lines(plan: Reproduction) -> list[str]:
    lines = []
    for dataset in plan.data:
        used = plan.methods[dataset.name][0].settings
        names = ("encoder", "epochs", "batch_size", "clf_epochs")
        setup = in_words({name: used.get(name, SETUP.flat()[name]) for name in names})
        authors = "the authors train DistilBERT for 300 epochs, B = 1600"
        lines.append(f"{dataset.shown}, the same for all: {setup}; {authors}.")
    return lines


def references(plan: Reproduction, dataset: PaperDataset, method: PaperMethod) -> dict[str, dict[str, Any]]:
    """The evaluations of BM25 and of the untrained encoder of `method`, or {"error": the reason why there is none}."""
    path = plan.out / dataset.name / "references.json"
    known = read_json(path) if path.is_file() else {}
    split = plan.experiment.protocol.split(dataset.data, 0)
    measured: dict[str, dict[str, Any]] = {}
    for name, measure in ((BM25, _bm25), (UNTRAINED, _untrained)):
        try:
            measured[name] = known[name] if name in known else measure(plan, dataset, method, split).to_dict()
        except UserError as error:
            measured[name] = {"error": str(error)}
    files.write_json(path, {name: found for name, found in measured.items() if "error" not in found})
    return measured


def _bm25(plan: Reproduction, dataset: PaperDataset, method: PaperMethod, split: Split) -> Evaluation:
    assert split.test is not None
    k, seen, counts = plan.cutoffs(dataset), split.seen_for("test"), split.train.counts()
    ids = np.unique(split.test.queries)
    lists, _ = bm25(text_of(dataset.data, "item"), text_of(dataset.data, "query")[ids], max(k), seen, ids)
    weights = split.test.propensity
    if weights is None:  # the same as in `evaluate`
        weights = inverse_propensities(counts, int((seen.start.diff() > 0).sum()))
    metrics = plan.experiment.protocol.metrics
    return evaluate_lists(lists, split.test, dataset.data.n_items, k, metrics, counts=counts, propensity=weights)


def _untrained(plan: Reproduction, dataset: PaperDataset, method: PaperMethod, split: Split) -> Evaluation:
    assert split.test is not None
    device = pick_device(plan.device)
    model = settings.build(method.recipe, split.train, method.settings, setup=plan.experiment.setup).model.to(device)
    seen, k = split.seen_for("test").to(device), plan.cutoffs(dataset)
    with torch.no_grad():
        return evaluate(model, split.test, seen, k, plan.experiment.protocol.metrics, counts=split.train.counts())


NGAME_DEXA = Experiment(
    "ngame-dexa",
    "random in-batch, corrected, ANCE, NGAME, DEXA; encoder, classifiers and both fused",
    "NGAME (Dahiya et al., WSDM 2023), DEXA (Dahiya et al., KDD 2023)",
    methods,
    results,
    (
        f"{', '.join(SHOWN)} as the extreme-classification repository defines them, with the data's filters and "
        "propensities; PSP is of all test points together.",
        "encoder: exact search over the item tower; classifiers: one vector per label, initialised there and trained "
        "over frozen query vectors; fused: both, with a tree learnt from held-out queries. All methods have all three, "
        "in the papers NGAME and DEXA alone.",
        "All but the two rows of softmax have NGAME's hinge loss, so that only the batches or the lists differ. "
        "Corrected: the log of the expected count of a label in a batch is subtracted from its logits.",
        f"Rare labels: the bins whose labels have at most {RARE} training texts each. A bin has about a tenth of the "
        "training pairs, so some labels with as few texts may be in a bin of the others.",
        "time: training of the encoder as a ratio to random batches, over the same seeds; it varies if several "
        "trainings run at once (--jobs). mining: clustering (NGAME, DEXA), or encoding and ranking everything (ANCE), "
        "as a share of the rest of the same training.",
        "p is a paired test over seeds and queries together, corrected by Holm over the methods of a ranking, or over "
        "all claims of a set.",
        "5 % of the training texts are held out: the epoch is chosen on them, and the fusion is learnt from them.",
    ),
    setup=SETUP,
    protocol=PROTOCOL,
    paper="ngame",
)
EXPERIMENTS = (NGAME_DEXA,)
