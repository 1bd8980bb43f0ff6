"""ESANS by lambda, by the numbers of negatives and by the sizes of its codebooks; and where mixtures are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparring.experiments.papers.clusterings import most
from sparring.experiments.papers.esans_main import K_P, K_S, esans, full
from sparring.experiments.papers.esans_results import NOTES, PAPER, experiment, relative_results
from sparring.experiments.papers.plan import Given, Method, Plan, Results, Unsuited
from sparring.experiments.papers.published_esans import FIGURE_4, TABLE_5
from sparring.experiments.papers.xir import feature_columns

LAMS = (0.1, 0.5, 0.3, -0.1, -0.3)  # the paper's default first
NEGATIVES = ((2, 5), (2, 4), (2, 6), (1, 5), (3, 5))  # (m_c, m_o)
PRIMARY, SECONDARY = (100, 200, 300, 400, 500), (5, 10, 15, 20, 25)
CHART = "The paper shows a chart; its figures were read off the lines of the PDF, and are of Recall@200 alone."


def lam_methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    lams: list[tuple[str, object]] = [(f"lambda={lam:g}", lam) for lam in LAMS]
    rules: list[tuple[str, object]] = [("lambda adaptive", "adaptive"), ("lambda learned", "learned")]
    return [esans(given, name, full(given), {"lam": lam}) for name, lam in [*lams, *rules]]


def lam_results(plan: Plan) -> Results:
    return relative_results(plan, FIGURE_4, "#A1 to #A4")


def negatives_methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    return [esans(given, f"m_c={m_c}, m_o={m_o}", full(given), {"m_c": m_c, "m_o": m_o}) for m_c, m_o in NEGATIVES]


def negatives_results(plan: Plan) -> Results:
    return relative_results(plan, TABLE_5, "#A2")


def codebooks_methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    default = full(given)
    found = [esans(given, _default(given), default)]
    for k in PRIMARY:
        if k <= most(given) and k != default.k_primary:
            found.append(esans(given, f"K_p={k}", full(given, k_primary=k)))
    for k in SECONDARY:
        if k <= given.data.n_items and k != default.k_secondary:
            found.append(esans(given, f"K_s={k}", full(given, k_secondary=k)))
    return found


def _default(given: Given) -> str:
    default = full(given)
    return f"K_p={default.k_primary}, K_s={default.k_secondary}"


def codebooks_results(plan: Plan) -> Results:
    names, absent = {}, {}
    for given in plan.data:
        if plan.methods[given.name]:
            names[given.name] = {
                _default(given): f"K_p={K_P}"
            }  # the figures at the defaults are the same for both codebooks
            why = f"{given.data.n_items:,} items allow at most {most(given)} clusters"
            absent[given.name] = {f"K_p={k}": why for k in PRIMARY if k > most(given)}
    return relative_results(plan, FIGURE_4, "#A1 to #A4", names, absent)


def open_methods(given: Given, asked: Mapping[str, object]) -> Sequence[Method]:
    names = asked.get("item_features") or ",".join(feature_columns(given.data.item_table)[:3])
    if not names:
        raise Unsuited("its items have no columns for an item tower with layers (--set item_features=COLUMN,COLUMN)")
    tower: dict[str, object] = {"item_features": names, "hidden": "64,64"}
    places: list[tuple[str, dict[str, object]]] = [("mixed after the tower", {}), ("mixed after layer 1", {"layer": 1})]
    places += [
        ("mixed before the layers", {"layer": 0}),
        ("no mixtures", {"simple_mixtures": False, "hard_mixtures": False}),
    ]
    return [esans(given, name, full(given), {**tower, **more}) for name, more in places]


def open_results(plan: Plan) -> Results:
    return relative_results(plan, {}, "no set")


LAMBDA = experiment(
    "esans-lambda",
    "Effect of lambda, set by hand or by two rules of ours",
    f"{PAPER}, figure 4",
    lam_methods,
    lam_results,
    (
        *NOTES,
        CHART,
        "Adaptive and learned lambda are ours: both hold the advantage of a mixture over the negative that it was made of at log 2, for "
        "all items alike or for each cluster (docs/methods/).",
    ),
    chosen=("codes", "lam"),
)
COUNTS = experiment(
    "esans-negatives",
    "Numbers of clusters and of items that negatives are drawn of",
    f"{PAPER}, table 5",
    negatives_methods,
    negatives_results,
    (*NOTES, "Rows differ in how many real candidates they have: m_c x m_o for each positive."),
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
        f"Defaults are K_p = {K_P} and K_s = {K_S}. A primary cluster has at least ten items on average, so small catalogues allow fewer.",
    ),
    chosen=("codes",),
)
OPEN = experiment(
    "esans-open",
    "Where mixtures are made in an item tower with layers",
    f"a question that {PAPER} leaves open",
    open_methods,
    open_results,
    (
        *NOTES[1:],
        "Nothing of this is published. The item tower joins columns of the items to the item's own vector before two layers.",
    ),
    chosen=("codes", "layer", "simple_mixtures", "hard_mixtures"),
)
