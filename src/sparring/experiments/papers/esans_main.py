"""The main comparison of ESANS, with the controls that make it credible, and its ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparring.evaluation.statistics import Summary, equal_variance_t
from sparring.experiments.papers.cells import Row, named
from sparring.experiments.papers.clusterings import most
from sparring.experiments.papers.esans_results import NOTES, PAPER, SETUP, experiment, page_of, relative_results
from sparring.experiments.papers.esans_rows import columns, gain_cells, printed_gain, relative_rows, said
from sparring.experiments.papers.plan import Clustering, Given, Method, Plan, Results, Unsuited
from sparring.experiments.papers.published import Figure
from sparring.experiments.papers.published_esans import FIVE_RUNS, METRICS, RUNS, TABLE_2, TABLE_4
from sparring.experiments.report.html import Section, Sheet
from sparring.experiments.report.tables import Column, Table

VISUAL, TEXT = ("image", "visual", "img", "picture", "poster"), ("text", "textual", "title", "plot")
BEHAVIOUR = ("behaviour", "behavior", "graph")
K_P, K_S = 300, 15
MANY = "UNS, as many logits"
RANDOM, CATEGORY = "ESANS, random clusters", "ESANS, category clusters"


def full(
    given: Given, modalities: Sequence[str] = (), k_primary: int = K_P, k_secondary: int = K_S, secondary: bool = True
) -> Clustering:
    """Clusters of all modalities, or of some; no more of them than the items allow."""
    if given.catalogue is None or not given.catalogue.specs:
        raise Unsuited("its items have no modalities (--modality NAME=SPEC)")
    names = tuple(modalities) or tuple(given.catalogue.specs)
    return Clustering(names, min(k_primary, most(given)), min(k_secondary, given.data.n_items), secondary)


def esans(
    given: Given, name: str, clustering: Clustering, settings: Mapping[str, object] | None = None, control: str = ""
) -> Method:
    """ESANS on learned clusters; control="shuffled:" deals their items anew."""
    assert given.catalogue is not None
    return Method(
        name, "esans", {"codes": f"{control}{clustering.path(given.catalogue)}", **(settings or {})}, clustering
    )


def behaviour_of(given: Given) -> str:
    """The modality that comes from the interactions; "" where none does."""
    specs = given.catalogue.specs if given.catalogue is not None else {}
    return next(
        (name for name, spec in specs.items() if spec.split(":")[0] == "behaviour" or name.lower() in BEHAVIOUR), ""
    )


def candidates(asked: Mapping[str, object]) -> tuple[int, int]:
    """How many real candidates a batch of ESANS shares, and how many logits each of its queries has."""
    own = {"m_c": 2, "m_o": 5, "m_h": 5, "batch_size": SETUP.batches.batch_size}
    m_c, m_o, m_h, batch = (int(str(asked.get(name, default))) for name, default in own.items())
    mixtures = (m_o + 2) * (m_o - 1) // 2
    return batch * m_c * m_o, batch * m_c * (m_o + mixtures) + 2 * m_h


def main_methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    n, logits = candidates(asked)
    shared: dict[str, object] = {"n": n, "per_query": False}
    plain: dict[str, object] = {**shared, "correction": "none"}
    all_of = full(given)
    found = [
        esans(given, "ESANS", all_of),
        Method("UNS", "uns", plain),
        Method("PNS", "pns", plain),
        Method("debiased MNS", "debiased_mns", {"n": n}),
        Method("MixGCF", "mixgcf", {"n": 64, "per_query": True, "exclude": "known"}),
        Method("FairNeg", "fairneg", {"n": n}),
        Method("Ada-tau", "ada_tau", shared),
        Method(MANY, "uns", {**plain, "n": logits}),
        Method("BMNS", "bmns", {"n": n}),
        esans(given, RANDOM, all_of, control="shuffled:"),
    ]
    if not missing(given).get(CATEGORY):
        assert given.catalogue is not None
        found.append(Method(CATEGORY, "esans", {"codes": f"column:{given.catalogue.category}"}))
    return found


def missing(given: Given) -> dict[str, str]:
    """The controls that cannot be run on a data set, and why."""
    table, why = given.data.item_table, {}
    column = given.catalogue.category if given.catalogue is not None else "category"
    if table is None or column not in table.columns:
        why[CATEGORY] = f"no item column {column!r}"
    elif table[column].dtype.is_nested() or not 2 <= table[column].n_unique() <= len(table) / 2:
        why[CATEGORY] = f"the item column {column!r} has no classes"
    return why


def main_results(plan: Plan) -> Results:
    """Every method against ESANS, and its gain over UNS, beside the printed ones."""
    rows: list[Row] = []
    found = []
    for given in plan.data:
        for metric in plan.measured(given, METRICS) if plan.methods[given.name] else []:
            some = relative_rows(plan, given, metric, TABLE_2, absent=missing(given))
            means = {str(row["method"]): row["mean"] for row in some}
            for row in some:
                base, name = means["UNS"], str(row["method"])
                gain = printed_gain(TABLE_2, metric, name, "UNS", given.known_as) if name != "UNS" else None
                over = (
                    float(row["mean"]) / float(base) - 1 if row["mean"] is not None and base and name != "UNS" else None
                )
                row |= {"over_uns": over, **gain_cells("published_uns", gain)}
            rows += some
            if some[0]["over_uns"] is not None:
                found.append(
                    f"{given.shown}, {metric}: ESANS over UNS {some[0]['over_uns']:+.1%}; published {_in_words(metric)}."
                )
    head, published, tests = (
        columns("ESANS", "its six sets")[part] for part in (slice(4), slice(4, 6), slice(7, None))
    )
    gains = (Column("over UNS", "{over_uns:+.1%}"), Column("published", "{published_uns:+.1%}"))
    results = page_of(
        plan,
        rows,
        (*head, *gains, published[0], Column("published", "{published:+.1%}"), *tests),
        [*found, *said(rows, "ESANS")],
        TABLE_2,
    )
    runs = five_runs()
    section = Section("Published: five runs", (Sheet(runs),))
    return replace(results, sections=[*results.sections, section], others={**results.others, "published_runs": runs})


def _in_words(metric: str) -> str:
    gain = printed_gain(TABLE_2, metric, "ESANS", "UNS")
    assert gain is not None
    return f"{gain.value:+.1%} on average, {gain.low:+.1%} to {gain.high:+.1%}"


def five_runs() -> Table:
    """The authors' five runs of ESANS and its two best baselines, with the p-values that their means and deviations give.

    The notes do not say whether a deviation divides by n - 1 or by n, and it matters where p is near 0.01: both are shown.
    """
    rows: list[Row] = []
    for (data, metric, name), figure in FIVE_RUNS.items():
        ours = FIVE_RUNS[data, metric, "ESANS"]
        row: Row = {"data": data, "metric": metric, "method": name, "mean": figure.value, "std": figure.std}
        row |= dict.fromkeys(("gain", "p", "p_by_n"))
        if name != "ESANS":
            row |= {
                "gain": ours.value / figure.value - 1,
                "p": _printed_p(ours, figure),
                "p_by_n": _printed_p(ours, figure, by_n=True),
            }
        rows.append(row)
    printed = (Column("published", "{mean:.4f} ± {std:.4f}"), Column("ESANS over it", "{gain:+.1%}"))
    tests = (Column("p, deviations by n - 1", "{p:.2g}"), Column("p, deviations by n", "{p_by_n:.2g}"))
    return Table(
        (*named("data", "metric", "method"), *printed, *tests),
        rows,
        "Five runs as the authors' notes print them; equal-variance t-tests of what is printed",
    )


def _printed_p(a: Figure, b: Figure, by_n: bool = False) -> float:
    """p of printed means and deviations; `by_n` reads a deviation as the root of the mean square over all n runs."""
    wider = (RUNS / (RUNS - 1)) ** 0.5 if by_n else 1.0
    first, second = (
        Summary(RUNS, each.value, None if each.std is None else wider * each.std, None, None) for each in (a, b)
    )
    return equal_variance_t(first, second).p


def ablation_methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    all_of = full(given)
    found = [
        esans(given, "ESANS", all_of),
        esans(given, "w/o MSAC", all_of, control="shuffled:"),
        esans(given, "w/o EDIS", all_of, {"simple_mixtures": False, "hard_mixtures": False}),
        esans(given, "w/o simple interpolation", all_of, {"simple_mixtures": False}),
        esans(given, "w/o hard interpolation", all_of, {"hard_mixtures": False}),
    ]
    own, absent = behaviour_of(given), not_ablated(given)
    if "w/o multimodal aligning" not in absent:
        found.append(esans(given, "w/o multimodal aligning", full(given, (own,))))
    for name in all_of.modalities:
        if f"w/o {name}" not in absent:
            found.append(
                esans(given, f"w/o {name}", full(given, [other for other in all_of.modalities if other != name]))
            )
    found.append(esans(given, "w/o secondary codebook", full(given, secondary=False), {"m_h": 0}))
    return found


def not_ablated(given: Given) -> dict[str, str]:
    """Rows of the ablation that cannot be run on a data set, and why."""
    names, own, why = full(given).modalities, behaviour_of(given), {}
    if not own:
        why["w/o multimodal aligning"] = "no modality is behaviour"
    elif len(names) == 1:
        why["w/o multimodal aligning"] = "behaviour is the only modality, so this is ESANS itself"
    for name in names:
        if len(names) == 1:
            why[f"w/o {name}"] = "it is the only modality"
        elif len(names) == 2 and own and name != own:
            why[f"w/o {name}"] = "this leaves behaviour alone: see w/o multimodal aligning"
    for label, known in (("visual", VISUAL), ("text", TEXT), ("behaviour", BEHAVIOUR)):
        if not any(name.lower() in known for name in names):
            why[f"w/o {label}"] = f"there is no {label} modality"
    return why


def printed_names(given: Given) -> dict[str, str]:
    """What the paper calls a row: w/o image is its w/o visual."""
    found = {}
    for name in full(given).modalities:
        for label, known in (("visual", VISUAL), ("text", TEXT), ("behaviour", BEHAVIOUR)):
            if name.lower() in known:
                found[f"w/o {name}"] = f"w/o {label}"
    return found


def ablation_results(plan: Plan) -> Results:
    suited = [given for given in plan.data if plan.methods[given.name]]
    names = {given.name: printed_names(given) for given in suited}
    return relative_results(plan, TABLE_4, "#A2", names, {given.name: not_ablated(given) for given in suited})


CANDIDATES = (
    "Every method but MixGCF has the same real candidates: 5,120 shared by a batch of 512, ten for each positive as in the paper, "
    "uncorrected for UNS and PNS. Debiased MNS has the batch besides; BMNS has the batch, and 5,120 mixtures of it; FairNeg's groups are "
    "ten classes of popularity. ESANS has 5 hard negatives for each query besides, and its mixtures. MixGCF is as published: 64 draws for "
    "each query that are no known positives of it, the hardest mixed with the positive; how many of them is tuned."
)
MAIN = experiment(
    "esans-main",
    "UNS, PNS, debiased MNS, MixGCF, FairNeg, Ada-tau, ESANS, and controls",
    f"{PAPER}, table 2",
    main_methods,
    main_results,
    (
        *NOTES,
        CANDIDATES,
        f"Controls, not in the paper: {MANY} (19,466: those of ESANS with its mixtures), BMNS (mixtures without clusters), and ESANS with "
        "random clusters (the sizes of its own, items dealt anew for each seed) and with a cluster for each category; esans-ablation has "
        "clusters of behaviour alone.",
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
        "Without MSAC: the clusters' items are dealt anew, so that what is drawn is random and only the mixtures are left. Without "
        "multimodal aligning: clusters of behaviour alone. Without the secondary codebook: no hard negatives, one cell a cluster.",
    ),
    chosen=("codes", "simple_mixtures", "hard_mixtures"),
)
