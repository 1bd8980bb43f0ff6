"""The tables of ESANS: the main comparison with its controls, the ablation, sweeps over settings, and training cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sparring.evaluation.statistics import Summary, equal_variance_t
from sparring.experiments.papers import drawing
from sparring.experiments.papers.paper import (
    MODALITY_NOTES,
    Clustering,
    Experiment,
    PaperDataset,
    PaperMethod,
    Reproduction,
    Results,
    SplitProtocol,
    Unsuited,
    cluster_rows,
    most_clusters,
)
from sparring.experiments.papers.paper_tables import (
    REFERENCE,
    SEEDS,
    agreement,
    beside,
    gain_cells,
    mean_of,
    published_gain,
    relative_columns,
    relative_rows,
    render,
    save_figure,
    unsuited_lines,
    verdicts,
)
from sparring.experiments.papers.printed import Cells, PublishedFigure, published, published_cells
from sparring.experiments.papers.xir import feature_columns
from sparring.experiments.report.html import Points, Section, Sheet
from sparring.experiments.report.study_parts import tuning_table
from sparring.experiments.report.tables import Column, Row, Table, text_columns
from sparring.experiments.report.wording import in_words
from sparring.experiments.study import read_json
from sparring.models.clusters import default_clusters
from sparring.recipes import RECIPES, finding, settings
from sparring.recipes.setup import Setup

PAPER = "ESANS (Xing et al., WWW 2025)"
METRICS = ("Recall@50", "Recall@200")
TABLE_2, FIVE_RUNS = published_cells("esans", "table2"), published_cells("esans", "five_runs")
TABLE_4, TABLE_5 = published_cells("esans", "table4"), published_cells("esans", "table5")
FIGURE_4 = published_cells("esans", "figure4")
RUNS = 5  # of the authors' notes
# Table 6 and appendix C: batch, dimensions, temperature, Adam, its rate. Not given there, and ours: cosines, epochs,
# patience.
SETUP = Setup.of(
    dim=64,
    score="cosine",
    tau=0.05,
    batch_size=512,
    epochs=50,
    optimizer="row-adam",
    lr=2e-4,
    patience=5,
    select="recall@50",
)
TAUS = (0.25, 0.4, 0.15)  # among the first trials: the paper's 0.05 is low for most data
PROTOCOL = SplitProtocol(
    "auto", valid=1 / 9, test=0.1, one_split=True, metrics=("recall", "ndcg"), cutoffs=(20, 50, 200)
)
experiment = partial(Experiment, setup=SETUP, protocol=PROTOCOL, tuning="first", taus=TAUS, paper="esans")
NOTES = (
    "The paper's data sets are private or their split is not stated, so absolute figures cannot be matched: each "
    "figure is relative to the reference of its table, ours on the data given, theirs from the printed figures, as the "
    "mean over the paper's sets with its range.",
    "p is a paired test over seeds and queries together, with Holm's correction over all methods of a data set and "
    "metric; the verdict rests on it. The equal-variance t-test over seeds is the one that the authors used; it does "
    "not generalise to other queries.",
    "The interval after our relative difference is at 95 %. Every method has the same split and seeds; codes are "
    "learned once, from the training part and the modalities, and are the same for all seeds.",
)
VISUAL, TEXT = ("image", "visual", "img", "picture", "poster"), ("text", "textual", "title", "plot")
BEHAVIOUR = ("behaviour", "behavior", "graph")
LABELS = {"visual": VISUAL, "text": TEXT, "behaviour": BEHAVIOUR}  # the paper's modalities, and our names for them
K_P, K_S = 300, 15
FULL = 0.2  # candidates of a batch over items, above which sampling hardly differs from a full softmax
SAME_LOGITS = "UNS, as many logits"
RANDOM, CATEGORY = "ESANS, random clusters", "ESANS, category clusters"


def clustering(
    dataset: PaperDataset,
    modalities: Sequence[str] = (),
    k_primary: int | None = None,
    k_secondary: int = K_S,
    secondary: bool = True,
) -> Clustering:
    """Clusters by all modalities, or by some; as large as the paper's, and no more than the items allow."""
    if dataset.modalities is None or not dataset.modalities.specs:
        raise Unsuited("its items have no modalities (--modality NAME=SPEC)")
    names = tuple(modalities) or tuple(dataset.modalities.specs)
    n = dataset.data.n_items
    sizes = min(k_primary or default_clusters(n), most_clusters(dataset)), min(k_secondary, n)
    return Clustering(names, *sizes, secondary)


def esans(
    dataset: PaperDataset, name: str, clusters: Clustering | None = None, control: str = "", **chosen: object
) -> PaperMethod:
    """ESANS on learned clusters, by default of all modalities; control="shuffled:" permutes their items."""
    clusters = clusters or clustering(dataset)
    assert dataset.modalities is not None
    codes = f"{control}{clusters.path(dataset.modalities)}"
    return PaperMethod(name, "esans", {"codes": codes, **chosen}, clustering=clusters)


def candidates(asked: Mapping[str, object]) -> tuple[int, int]:
    """The number of real candidates that a batch of ESANS shares, and the number of logits of each of its queries."""
    defaults = {"m_c": 2, "m_o": 5, "m_h": 5, "batch_size": SETUP.batches.batch_size}
    m_c, m_o, m_h, batch = (int(str(asked.get(name, default))) for name, default in defaults.items())
    mixtures = (m_o + 2) * (m_o - 1) // 2
    return batch * m_c * m_o, batch * m_c * (m_o + mixtures) + 2 * m_h


# Table 2: the main comparison.


def main_methods(dataset: PaperDataset, asked: Mapping[str, object]) -> Sequence[PaperMethod]:
    n, logits = candidates(asked)
    shared: dict[str, object] = {"n": n, "per_query": False}
    plain: dict[str, object] = {**shared, "correction": "none"}
    methods = [
        esans(dataset, "ESANS"),
        PaperMethod("UNS", "uns", plain),
        PaperMethod("PNS", "pns", plain),
        PaperMethod("debiased MNS", "debiased_mns", {"n": n}),
        PaperMethod("MixGCF", "mixgcf", {"n": 64, "per_query": True, "exclude": "known"}),
        PaperMethod("FairNeg", "fairneg", {"n": n}),
        PaperMethod("Ada-tau", "ada_tau", shared),
        PaperMethod(SAME_LOGITS, "uns", {**plain, "n": logits}),
        PaperMethod("BMNS", "bmns", {"n": n}),
        esans(dataset, RANDOM, control="shuffled:"),
    ]
    if CATEGORY not in missing_controls(dataset):
        assert dataset.modalities is not None
        methods.append(PaperMethod(CATEGORY, "esans", {"codes": f"column:{dataset.modalities.category}"}))
    return methods


def missing_controls(dataset: PaperDataset) -> dict[str, str]:
    """The controls that cannot be run on a data set, with the reason."""
    table = dataset.data.item_table
    column = dataset.modalities.category if dataset.modalities is not None else "category"
    if table is None or column not in table.columns:
        return {CATEGORY: f"no item column {column!r}"}
    if table[column].dtype.is_nested() or not 2 <= table[column].n_unique() <= len(table) / 2:
        return {CATEGORY: f"the item column {column!r} has no categories"}
    return {}


def main_results(plan: Reproduction) -> Results:
    """Every method against ESANS, and its gain over UNS, beside the published ones."""
    rows: list[Row] = []
    findings = []
    for dataset in plan.suited:
        for metric in plan.measured(dataset, METRICS):
            relative = relative_rows(plan, dataset, metric, TABLE_2, absent=missing_controls(dataset))
            base = next(row["mean"] for row in relative if row["method"] == "UNS")
            for row in relative:
                name, over, gain = str(row["method"]), None, None
                if name != "UNS":
                    gain = published_gain(TABLE_2, metric, name, "UNS", dataset.known_as)
                    over = float(row["mean"]) / float(base) - 1 if row["mean"] is not None and base else None
                row |= {"over_uns": over, **gain_cells("published_uns", gain)}
            rows += relative
            if relative[0]["over_uns"] is not None:
                printed = published_gain(TABLE_2, metric, "ESANS", "UNS")
                assert printed is not None
                words = f"{printed.value:+.1%} on average, {printed.low:+.1%} to {printed.high:+.1%}"
                ours = f"ESANS over UNS {relative[0]['over_uns']:+.1%}"
                findings.append(f"{dataset.shown}, {metric}: {ours}; published {words}.")
    columns = relative_columns("ESANS", "its six sets")
    gains = (Column("over UNS", "{over_uns:+.1%}"), Column("published", "{published_uns:+.1%}"))
    to_esans = (columns[4], Column("published", "{published:+.1%}"))
    columns = (*columns[:4], *gains, *to_esans, *columns[7:])
    runs = five_runs()
    more = [Section("Published: five runs", (Sheet(runs),))]
    return esans_results(plan, rows, columns, findings, TABLE_2, more, {"published_runs": runs})


def five_runs() -> Table:
    """The authors' five runs of ESANS and its two best baselines, with p-values from their means and deviations.

    The notes do not say whether a deviation divides by n - 1 or by n, and it matters where p is near 0.01: both are
    shown.
    """
    rows: list[Row] = []
    for (data, metric, name), figure in FIVE_RUNS.items():
        ours = FIVE_RUNS[data, metric, "ESANS"]
        row: Row = {"data": data, "metric": metric, "method": name, "mean": figure.value, "std": figure.std}
        row |= dict.fromkeys(("gain", "p", "p_by_n"))
        if name != "ESANS":
            row |= {"gain": ours.value / figure.value - 1, "p": _printed_p(ours, figure)}
            row["p_by_n"] = _printed_p(ours, figure, by_n=True)
        rows.append(row)
    columns = (
        *text_columns("data", "metric", "method"),
        Column("published", "{mean:.4f} ± {std:.4f}"),
        Column("ESANS over it", "{gain:+.1%}"),
        Column("p, deviations by n - 1", "{p:.2g}"),
        Column("p, deviations by n", "{p_by_n:.2g}"),
    )
    return Table(columns, rows, "Five runs as printed in the authors' notes; equal-variance t-tests of these figures")


def _printed_p(a: PublishedFigure, b: PublishedFigure, by_n: bool = False) -> float:
    """p of printed means and deviations; `by_n` reads a deviation as one that divides by the number of runs."""
    wider = (RUNS / (RUNS - 1)) ** 0.5 if by_n else 1.0
    first, second = (
        Summary(RUNS, figure.value, None if figure.std is None else wider * figure.std, None, None) for figure in (a, b)
    )
    return equal_variance_t(first, second).p


# Table 4: the ablation.


def behaviour_of(dataset: PaperDataset) -> str:
    """The modality derived from the interactions; "" if there is none."""
    specs = dataset.modalities.specs if dataset.modalities is not None else {}
    names = (name for name, spec in specs.items() if spec.split(":")[0] == "behaviour" or name.lower() in BEHAVIOUR)
    return next(names, "")


def ablation_methods(dataset: PaperDataset, asked: Mapping[str, object]) -> Sequence[PaperMethod]:
    methods = [
        esans(dataset, "ESANS"),
        esans(dataset, "w/o MSAC", control="shuffled:"),
        esans(dataset, "w/o EDIS", simple_mixtures=False, hard_mixtures=False),
        esans(dataset, "w/o simple interpolation", simple_mixtures=False),
        esans(dataset, "w/o hard interpolation", hard_mixtures=False),
    ]
    absent, names = missing_ablations(dataset), clustering(dataset).modalities
    if "w/o multimodal aligning" not in absent:
        behaviour = clustering(dataset, (behaviour_of(dataset),))
        methods.append(esans(dataset, "w/o multimodal aligning", behaviour))
    for name in names:
        if f"w/o {name}" not in absent:
            rest = clustering(dataset, [other for other in names if other != name])
            methods.append(esans(dataset, f"w/o {name}", rest))
    methods.append(esans(dataset, "w/o secondary codebook", clustering(dataset, secondary=False), m_h=0))
    return methods


def missing_ablations(dataset: PaperDataset) -> dict[str, str]:
    """Rows of the ablation that cannot be run on a data set, with the reason."""
    names, behaviour, why = clustering(dataset).modalities, behaviour_of(dataset), {}
    if not behaviour:
        why["w/o multimodal aligning"] = "no modality is behaviour"
    elif len(names) == 1:
        why["w/o multimodal aligning"] = "behaviour is the only modality, so this is ESANS itself"
    for name in names:
        if len(names) == 1:
            why[f"w/o {name}"] = "it is the only modality"
        elif len(names) == 2 and behaviour and name != behaviour:
            why[f"w/o {name}"] = "this leaves behaviour alone: see w/o multimodal aligning"
    for label, known in LABELS.items():
        if not any(name.lower() in known for name in names):
            why[f"w/o {label}"] = f"there is no {label} modality"
    return why


def ablation_results(plan: Reproduction) -> Results:
    names = {  # w/o image is w/o visual in print
        dataset.name: {
            f"w/o {name}": f"w/o {label}"
            for name in clustering(dataset).modalities
            for label, known in LABELS.items()
            if name.lower() in known
        }
        for dataset in plan.suited
    }
    absent = {dataset.name: missing_ablations(dataset) for dataset in plan.suited}
    return relative_results(plan, TABLE_4, "#A2", names, absent)


# Table 5, figure 4 and an open question: sweeps.

LAMS = (0.1, 0.5, 0.3, -0.1, -0.3)  # the paper's default first
NEGATIVES = ((2, 5), (2, 4), (2, 6), (1, 5), (3, 5))  # (m_c, m_o)
PRIMARY, SECONDARY = (100, 200, 300, 400, 500), (5, 10, 15, 20, 25)


def lam_methods(dataset: PaperDataset, asked: Mapping[str, object]) -> Sequence[PaperMethod]:
    values = [esans(dataset, f"lambda={lam:g}", lam=lam) for lam in LAMS]
    return [*values, *(esans(dataset, f"lambda {rule}", lam=rule) for rule in ("adaptive", "learned"))]


def codebooks_methods(dataset: PaperDataset, asked: Mapping[str, object]) -> Sequence[PaperMethod]:
    default = clustering(dataset)
    methods = [esans(dataset, _default_codebooks(dataset))]
    for k in scaled_primary(dataset).values():
        methods.append(esans(dataset, f"K_p={k}", clustering(dataset, k_primary=k)))
    for k in SECONDARY:
        if k <= dataset.data.n_items and k != default.k_secondary:
            methods.append(esans(dataset, f"K_s={k}", clustering(dataset, k_secondary=k)))
    return methods


def scaled_primary(dataset: PaperDataset) -> dict[int, int]:
    """The paper's other sizes of the primary codebook -> ours: the same ratios to the default, which scales with N."""
    default = clustering(dataset).k_primary
    scaled: dict[int, int] = {}
    for k in PRIMARY:
        ours = round(k * default / K_P)
        if 2 <= ours <= most_clusters(dataset) and ours not in (default, *scaled.values()):
            scaled[k] = ours
    return scaled


def _default_codebooks(dataset: PaperDataset) -> str:
    default = clustering(dataset)
    return f"K_p={default.k_primary}, K_s={default.k_secondary}"


def codebooks_results(plan: Reproduction) -> Results:
    names, absent = {}, {}
    for dataset in plan.suited:
        # the published figures at the defaults are the same for both codebooks
        names[dataset.name] = {_default_codebooks(dataset): f"K_p={K_P}"}
        scaled, ours = scaled_primary(dataset), clustering(dataset).k_primary
        names[dataset.name] |= {f"K_p={own}": f"K_p={k}" for k, own in scaled.items()}
        why = f"{dataset.data.n_items:,} items are too few: their default is {ours} clusters"
        absent[dataset.name] = {f"{k} / {K_P} of K_p": why for k in PRIMARY if k != K_P and k not in scaled}
    return relative_results(plan, FIGURE_4, "#A1 to #A4", names, absent)


def open_methods(dataset: PaperDataset, asked: Mapping[str, object]) -> Sequence[PaperMethod]:
    names = asked.get("item_features") or ",".join(feature_columns(dataset.data.item_table)[:3])
    if not names:
        raise Unsuited("its items have no columns for an item tower with layers (--set item_features=COLUMN,COLUMN)")
    places: dict[str, dict[str, Any]] = {
        "mixed after the tower": {},
        "mixed after layer 1": {"layer": 1},
        "mixed before the layers": {"layer": 0},
        "no mixtures": {"simple_mixtures": False, "hard_mixtures": False},
    }
    tower: dict[str, Any] = {"item_features": names, "hidden": "64"}
    return [esans(dataset, name, **tower, **chosen) for name, chosen in places.items()]


# The page that these tables share.


def relative_results(
    plan: Reproduction,
    cells: Cells,
    sets: str,
    names: Mapping[str, Mapping[str, str]] | None = None,
    absent: Mapping[str, Mapping[str, str]] | None = None,
) -> Results:
    """A table whose rows are relative to its first method; `names` and `absent` by data set, see relative_rows."""
    rows: list[Row] = []
    for dataset in plan.suited:
        in_print, missing = (names or {}).get(dataset.name), (absent or {}).get(dataset.name)
        for metric in plan.measured(dataset, METRICS):
            rows += relative_rows(plan, dataset, metric, cells, in_print, missing)
    return esans_results(plan, rows, relative_columns(_first(plan), sets), [], cells)


def _first(plan: Reproduction) -> str:
    return next((methods[0].name for methods in plan.methods.values() if methods), "the first method")


def esans_results(
    plan: Reproduction,
    rows: list[Row],
    columns: tuple[Column, ...],
    findings: Sequence[str],
    cells: Cells,
    more: Sequence[Section] = (),
    others: Mapping[str, Table] | None = None,
) -> Results:
    """The table, a section per data set with a figure, and tables of clusters, tuning and published figures."""
    first = _first(plan)
    drawn = {}
    for dataset in plan.data:
        own = [row for row in rows if row["data"] == dataset.shown]
        if any(row["over"] is not None for row in own):
            caption = f"ours relative to {first} (dots, 95 % intervals), and as published (diamonds, with their range)."
            figure = drawing.gains(own, first)
            drawn[dataset.name] = [save_figure(plan, dataset, plan.experiment.name, figure, caption)]
    sections: list[Section] = []
    tables: dict[str, Table] = {}
    clusters = _clusters_table(plan)
    if clusters.rows:
        tables["clusters"] = clusters
        sections.append(Section("Clusters", (Sheet(clusters), Points(_modality_notes(plan)))))
    if plan.trials:
        shown = {dataset.name: dataset.shown for dataset in plan.data}
        tables["tuned"] = tuning_table(plan.study, "method", shown, data_column=True)
        sections.append(Section("Tuning", (Sheet(tables["tuned"]),)))
    if cells:
        tables["published"] = _published_table(cells)
        sections.append(Section("Published, on the paper's own sets", (Sheet(tables["published"]),)))
    lines = [*findings, *verdicts(rows, first), *_settings_lines(plan)]
    tables |= others or {}
    return render(plan, {"": Table(columns, rows)}, lines, drawn, more=[*sections, *more], others=tables)


def _settings_lines(plan: Reproduction) -> list[str]:
    """The settings that were used, and how the data was split."""
    recipe = finding.find("esans")
    setup, _ = settings.resolve(recipe, settings.known(recipe, plan.settings), plan.experiment.setup)
    if plan.trials:
        first = f"{_first(plan)} alone, whose settings the others use,"
        who = "each method" if plan.experiment.tuning == "each" else first
        lines = [f"Tuned: {who} with {plan.trials} trials on the validation part; table tuned has the settings."]
    else:
        changed = [name for name in ("batch_size", "dim", "tau", "lr", "optimizer") if name in plan.settings]
        paper = f"in the paper except for {', '.join(changed)}" if changed else "in the paper"
        used = setup.flat()
        lines = [
            f"Not tuned: batches of {used['batch_size']}, d = {used['dim']}, tau {used['tau']}, Adam at "
            f"{used['lr']:g}, as {paper}; not printed there and ours: cosines, at most {used['epochs']} epochs, "
            f"patience {used['patience']} on validation {used['select']}."
        ]
    if plan.settings:
        lines.append(f"Requested, for all methods that have it: {in_words(plan.settings)}.")
    for dataset in plan.data:
        given = dataset.data.split is not None
        how = "the file's own split" if given else "a random split of each query's items, 80/10/10 (seed 0)"
        lines.append(f"{dataset.shown}: {how}.")
        if dataset.modalities is not None and set(dataset.modalities.specs) == {"behaviour"}:
            alone = "no modality was named, so clusters are of behaviour alone (--modality NAME=SPEC adds others)"
            lines.append(f"{dataset.shown}: {alone}.")
    for dataset in plan.suited:
        n, items = candidates(plan.settings)[0], dataset.data.n_items
        sizes = f"{items / clustering(dataset).k_primary:.0f} items per primary cluster"
        lines.append(f"{dataset.shown}: a batch of ESANS shares {n:,} candidates for {items:,} items; {sizes}.")
        if n > FULL * items:
            lines.append(f"{dataset.shown}: uniform negatives are nearly a full softmax, which no sampler can beat.")
    return lines + unsuited_lines(plan)


def _published_table(cells: Cells) -> Table:
    rows: list[Row] = [
        {"data": data, "metric": metric, "method": name, "value": figure.value}
        for (data, metric, name), figure in cells.items()
    ]
    columns = (*text_columns("data", "metric", "method"), Column("published", "{value:.4f}"))
    return Table(columns, rows, "As printed; none of these sets was run here")


def _clusters_table(plan: Reproduction) -> Table:
    rows = cluster_rows(plan)
    pure = any("purity" in row for row in rows)
    columns = (
        *text_columns("data", "modalities"),
        Column("K_p", "{k_primary}"),
        Column("K_s", "{k_secondary}"),
        Column("used", "{used}"),
        Column("smallest", "{smallest}"),
        Column("median", "{median:.0f}"),
        Column("largest", "{largest}"),
        Column("cells used", "{used_cells}"),
        *([Column("purity (by chance)", "{purity:.3f}[[ ({purity_by_chance:.3f})]]")] if pure else []),
    )
    return Table(columns, rows, "Clusters of items, learned once")


def _modality_notes(plan: Reproduction) -> list[str]:
    """The sources of the modalities."""
    lines = []
    for dataset in plan.data:
        path = dataset.modalities.folder / MODALITY_NOTES if dataset.modalities is not None else None
        if path is not None and path.is_file():
            lines += [f"{dataset.shown}, {note}" for note in read_json(path)["notes"]]
    return lines


# Table 3: training cost.

N = 5120  # shared by the batch: 10 for each of 512 positives
SHARED: dict[str, object] = {"n": N, "per_query": False}
COST_METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "UNS": ("uns", SHARED),
    "PNS": ("pns", SHARED),
    "debiased MNS": ("debiased_mns", {"n": N}),
    "MixGCF": ("mixgcf", {**SHARED, "k": 10}),
    "FairNeg": ("fairneg", {"n": N}),
    "Ada-tau": ("ada_tau", SHARED),
    "ESANS": ("esans", {}),
}
COST_SETUP = Setup.of(
    dim=64,
    score="cosine",
    tau=0.05,
    batch_size=512,
    epochs=4,
    optimizer="row-adam",
    lr=2e-4,
    patience=None,
)


def time_ratios() -> dict[str, float]:
    """The published training time of each method as a ratio to that of UNS, from the printed hours and minutes."""
    minutes = {name: 60 * hours + rest for name, (hours, rest) in published("esans")["training_time"].items()}
    return {name: value / minutes["UNS"] for name, value in minutes.items()}


def cost_results(plan: Reproduction) -> Results:
    """The time of an epoch as a ratio to that of UNS with the same seed, beside the published ratio of hours."""
    rows: list[Row] = []
    drawn = {}
    for dataset in plan.data:
        methods = {method.name: method for method in plan.methods[dataset.name]}
        seconds = {name: _epoch_seconds(plan, dataset, method) for name, method in methods.items()}
        own = [_cost_row(plan, dataset, name, methods.get(name), seconds) for name in COST_METHODS]
        rows += own
        if any(row["mean"] is not None for row in own):
            caption = "time of an epoch as a ratio to that of UNS (bars), and the ratio published for #A2 (diamonds)."
            figure = drawing.ours_and_theirs(own, ".2f")
            drawn[dataset.name] = [save_figure(plan, dataset, "cost", figure, caption)]
    columns = (
        *text_columns("data", "method"),
        Column("time / UNS", "{mean:.2f}[[ ± {std:.2f}]]"),
        Column("published, on #A2", "{published:.2f}"),
        Column("difference", "{difference:+.1%}"),
        *text_columns("verdict"),
        Column("seconds per epoch", "{epoch_seconds:.2f}"),
        SEEDS,
    )
    asked = [f"With {in_words(plan.settings)}."] if plan.settings else []
    return render(plan, {"": Table(columns, rows)}, [*agreement(rows), *asked], drawn)


def _epoch_seconds(plan: Reproduction, dataset: PaperDataset, method: PaperMethod) -> dict[int, float]:
    """Seed -> mean seconds of an epoch; without the first, which also allocates and warms up, if there are several."""
    seconds = {}
    for run in plan.runs(dataset, method):
        ends = [float(record["seconds"]) for record in run.history]
        seconds[run.seed] = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]
    return seconds


def _cost_row(
    plan: Reproduction,
    dataset: PaperDataset,
    name: str,
    method: PaperMethod | None,
    seconds: Mapping[str, Mapping[int, float]],
) -> Row:
    base, own = seconds["UNS"], seconds.get(name, {})
    why = plan.error(dataset, method) if method else f"there is no recipe `{COST_METHODS[name][0]}` yet"
    ratios = [own[seed] / base[seed] for seed in own if base.get(seed)]
    row: Row = {"data": dataset.shown, "metric": "training time / UNS", "method": name}
    row |= beside(ratios, PublishedFigure(round(time_ratios()[name], 2)), why)
    if name == "UNS" and row["mean"] is not None:
        row |= {"difference": None, "verdict": REFERENCE}
    return row | {"epoch_seconds": mean_of(list(own.values()))}


CHART = "The paper shows a chart; its figures were read off the lines of the PDF, and are of Recall@200 alone."
MAIN = experiment(
    "esans-main",
    "UNS, PNS, debiased MNS, MixGCF, FairNeg, Ada-tau, ESANS, and controls",
    f"{PAPER}, table 2",
    main_methods,
    main_results,
    (
        *NOTES,
        "Every method but MixGCF has the same real candidates: 5,120 shared by a batch of 512, ten for each positive "
        "as in the paper, uncorrected for UNS and PNS. Debiased MNS adds the batch; BMNS has the batch, and 5,120 "
        "mixtures of it; FairNeg's groups are ten classes of popularity. ESANS adds 5 hard negatives for each query, "
        "and its mixtures. MixGCF is as published: 64 draws for each query, none of them a known positive, the hardest "
        "mixed with the positive; how many of them is tuned.",
        f"Controls, not in the paper: {SAME_LOGITS} (19,466: those of ESANS with its mixtures), BMNS (mixtures without "
        "clusters), and ESANS with random clusters (the sizes of its own, items permuted for each seed) and with a "
        "cluster for each category; esans-ablation has clusters of behaviour alone.",
    ),
    tuning="each",
    chosen=("codes",),
)
ABLATION = experiment(
    "esans-ablation",
    "ESANS without each of its parts, and without each modality",
    f"{PAPER}, table 4",
    ablation_methods,
    ablation_results,
    (
        *NOTES,
        "Without MSAC: the clusters' items are permuted, so draws are random and only the mixtures are left. Without "
        "multimodal aligning: clusters of behaviour alone. Without the secondary codebook: no hard negatives, one cell "
        "per cluster.",
    ),
    chosen=("codes", "simple_mixtures", "hard_mixtures"),
)
LAMBDA = experiment(
    "esans-lambda",
    "Effect of lambda, set by hand or by two rules of ours",
    f"{PAPER}, figure 4",
    lam_methods,
    lambda plan: relative_results(plan, FIGURE_4, "#A1 to #A4"),
    (
        *NOTES,
        CHART,
        "Adaptive and learned lambda are ours: both hold the advantage of a mixture over the negative that it was made "
        "from at log 2, for all items together or for each cluster (docs/methods/).",
    ),
    chosen=("codes", "lam"),
)
COUNTS = experiment(
    "esans-negatives",
    "Numbers of clusters and of items from which negatives are drawn",
    f"{PAPER}, table 5",
    lambda dataset, asked: [esans(dataset, f"m_c={c}, m_o={o}", m_c=c, m_o=o) for c, o in NEGATIVES],
    lambda plan: relative_results(plan, TABLE_5, "#A2"),
    (*NOTES, "Rows differ in the number of real candidates: m_c x m_o for each positive."),
    chosen=("codes", "m_c", "m_o"),
)
CODEBOOKS = experiment(
    "esans-codebooks",
    "Sizes of the primary and the secondary codebook",
    f"{PAPER}, figure 4",
    codebooks_methods,
    codebooks_results,
    (
        *NOTES,
        CHART,
        f"The paper's defaults are K_p = {K_P} and K_s = {K_S}. Ours is one primary cluster for 295 items, as on the "
        f"paper's smallest set, and at most {K_P}; the rows have the paper's ratios to it (100 to 500 of {K_P}).",
    ),
    chosen=("codes",),
)
OPEN = experiment(
    "esans-open",
    "Where mixtures are made in an item tower with layers",
    f"a question that {PAPER} leaves open",
    open_methods,
    lambda plan: relative_results(plan, {}, "no set"),
    (
        *NOTES[1:],
        "None of this is published. The item tower joins item columns to the item's own vector before two layers.",
    ),
    chosen=("codes", "layer", "simple_mixtures", "hard_mixtures"),
)
COST = Experiment(
    "esans-cost",
    "Training cost as a ratio to uniform negatives",
    f"{PAPER}, table 3",
    lambda dataset, asked: [
        PaperMethod(name, recipe, chosen) for name, (recipe, chosen) in COST_METHODS.items() if recipe in RECIPES
    ],
    cost_results,
    (
        "Published: hours of training on the set #A2, which is private, in TensorFlow on CPU workers, with towers over "
        "histories and features, without the offline stage of ESANS. Ours: time of an epoch on plain id tables. Both "
        "show the cost that a method adds to a step: with costly towers, ratios are closer to 1.",
        "Batches of 512, d = 64, temperature 0.05, Adam at 2e-4, 5,120 negatives shared by the batch (10 for each "
        "positive); MixGCF mixes the 10 hardest of them. The paper names no number of epochs; a time needs only a few.",
        "One training at a time, regardless of --jobs. The first epoch, which also warms up, is left out if there are "
        "others.",
    ),
    setup=COST_SETUP,
    alone=True,
)
EXPERIMENTS = (MAIN, ABLATION, LAMBDA, COUNTS, CODEBOOKS, OPEN, COST)
