"""What the tables of ESANS share: the setting in words, the page of a data set, the tables of clusters, tuning and print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from sparring.core.errors import UserError
from sparring.experiments.papers import clusterings, drawing
from sparring.experiments.papers.cells import Row, named, read_json
from sparring.experiments.papers.esans_rows import TONES, columns, relative_rows, said
from sparring.experiments.papers.plan import Experiment, Plan, Protocol, Results
from sparring.experiments.papers.published import Cells
from sparring.experiments.papers.published_esans import METRICS, matching
from sparring.experiments.report import figures
from sparring.experiments.report.comparison import in_words
from sparring.experiments.report.html import Figures, Points, Section, Sheet
from sparring.experiments.report.tables import Column, Table
from sparring.recipes import finding, settings
from sparring.recipes.setup import Setup

PAPER = "ESANS (Xing et al., WWW 2025)"
# Table 6 and appendix C: batch, dimensions, temperature, Adam, its rate. Not given there, and ours: cosines, epochs, patience.
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
TAUS = (
    0.25,
    0.4,
    0.15,
)  # tried in tuning: each method has a temperature of its own, and the paper's 0.05 is low for most data
PROTOCOL = Protocol("auto", valid=1 / 9, test=0.1, one_split=True, metrics=("recall", "ndcg"), cutoffs=(20, 50, 200))
experiment = partial(Experiment, setup=SETUP, protocol=PROTOCOL, tuning="first", taus=TAUS, known=matching)
NOTES = (
    "The sets of the paper are private or their split is not stated, so absolute figures cannot be met: each figure is relative to the "
    "reference of its table, ours on the data given, theirs from the printed figures, as the mean over its sets with least and most.",
    "p is a paired test over seeds and queries together, with Holm's correction over all methods of a data set and metric; the verdict "
    "rests on it. The equal-variance t-test over seeds is what the authors used; it knows nothing of other queries.",
    "The interval after our relative difference is of 95 %. Every method has the same split and seeds; codes are learned once, from the "
    "training part and the modalities, and are the same for all seeds.",
)


def setting_said(plan: Plan) -> list[str]:
    """Which setting was used, and how the data was parted."""
    lines = []
    recipe = finding.find("esans")
    setup, _ = settings.resolve(recipe, settings.known(recipe, plan.settings), plan.experiment.setup)
    if plan.trials:
        who = (
            "each method"
            if plan.experiment.tuning == "each"
            else f"{_first(plan)} alone, whose settings the others take over,"
        )
        lines.append(f"Tuned: {who} with {plan.trials} trials on the validation part; table tuned has the settings.")
    else:
        lines.append(
            f"Not tuned: batches of {setup.batches.batch_size}, d = {setup.model.dim}, tau {setup.temperature.tau}, Adam at {setup.training.lr:g}, as {_whose(plan)}; not "
            f"printed there and ours: cosines, at most {setup.training.epochs} epochs, patience {setup.validation.patience} on validation {setup.validation.select}."
        )
    if plan.settings:
        lines.append(f"Asked for, of all methods that know it: {in_words(plan.settings)}.")
    for given in plan.data:
        how = (
            "the file's own split"
            if given.data.split is not None
            else "a random split of each query's items, 80/10/10 (seed 0)"
        )
        lines.append(f"{given.shown}: {how}.")
        if given.catalogue is not None and set(given.catalogue.specs) == {"behaviour"}:
            lines.append(
                f"{given.shown}: no modality was named, so clusters are of behaviour alone (--modality NAME=SPEC adds others)."
            )
    return lines + [f"{name}: not run: {why}." for name, why in plan.unsuited().items()]


def _whose(plan: Plan) -> str:
    changed = [name for name in ("batch_size", "dim", "tau", "lr", "optimizer") if name in plan.settings]
    return f"in the paper but for {', '.join(changed)}" if changed else "in the paper"


def _first(plan: Plan) -> str:
    return next((methods[0].name for methods in plan.methods.values() if methods), "the first method")


def relative_results(
    plan: Plan,
    printed: Cells,
    where: str,
    names: Mapping[str, Mapping[str, str]] | None = None,
    absent: Mapping[str, Mapping[str, str]] | None = None,
) -> Results:
    """A table whose rows are relative to its first method; `names` and `absent` by data set, see relative_rows."""
    rows: list[Row] = []
    for given in plan.data:
        if plan.methods[given.name]:
            for metric in plan.measured(given, METRICS):
                rows += relative_rows(
                    plan, given, metric, printed, (names or {}).get(given.name), (absent or {}).get(given.name)
                )
    return page_of(plan, rows, columns(_first(plan), where), said(rows, _first(plan)), printed)


def page_of(plan: Plan, rows: list[Row], shown: tuple[Column, ...], found: Sequence[str], printed: Cells) -> Results:
    """The table, a section per data set with a figure, and what else there is: clusters, tuning, the printed figures."""
    sections: list[Section] = []
    others: dict[str, Table] = {}
    for given in plan.data:
        some = [row for row in rows if row["data"] == given.shown]
        if not some:
            continue
        drawn = []
        if any(row["over"] is not None for row in some):
            words = f"{given.shown}: ours relative to {_first(plan)} (dots, 95 % intervals), and as published (diamonds, with their range)."
            folder, name = plan.out / "figures", f"{given.name}-{plan.experiment.name}"
            drawn = [figures.save(drawing.gains(some, _first(plan)), folder, name, words)]
        sections.append(Section(given.shown, (Sheet(Table(shown[1:], some), "", TONES), Figures(drawn))))
    clusters = _clusters(plan)
    if clusters.rows:
        others["clusters"] = clusters
        sections.append(Section("Clusters", (Sheet(clusters), Points(_notes(plan)))))
    if plan.trials:
        others["tuned"] = _tuned(plan)
        sections.append(Section("Tuning", (Sheet(others["tuned"]),)))
    if printed:
        others["published"] = _published(printed)
        sections.append(Section("Published, on the paper's own sets", (Sheet(others["published"]),)))
    return Results(Table(shown, rows, plan.caption), [*found, *setting_said(plan)], sections, others)


def _published(printed: Cells) -> Table:
    rows: list[Row] = [
        {"data": data, "metric": metric, "method": name, "value": figure.value}
        for (data, metric, name), figure in printed.items()
    ]
    return Table(
        (*named("data", "metric", "method"), Column("published", "{value:.4f}")),
        rows,
        "As printed; none of these sets was run here",
    )


def _clusters(plan: Plan) -> Table:
    rows = clusterings.table_rows(plan)
    columns = (
        *named("data", "modalities"),
        Column("K_p", "{k_primary}"),
        Column("K_s", "{k_secondary}"),
        Column("used", "{used}"),
        Column("smallest", "{smallest}"),
        Column("median", "{median:.0f}"),
        Column("largest", "{largest}"),
        Column("cells used", "{used_cells}"),
        *(
            [Column("purity (by chance)", "{purity:.3f}[[ ({purity_by_chance:.3f})]]")]
            if any("purity" in row for row in rows)
            else []
        ),
    )
    return Table(columns, rows, "Clusters of items, learned once")


def _notes(plan: Plan) -> list[str]:
    """Where the modalities came from."""
    lines = []
    for given in plan.data:
        path = given.catalogue.folder / clusterings.NOTES if given.catalogue is not None else None
        if path is not None and path.is_file():
            lines += [f"{given.shown}, {note}" for note in read_json(path)["notes"]]
    return lines


def _tuned(plan: Plan) -> Table:
    from sparring.experiments.tuning import best, read_trials

    rows: list[Row] = []
    for given in plan.data:
        for method in plan.tuned_methods(given):
            trials = read_trials(plan.tuning_folder(given, method) / "trials.jsonl")[: plan.trials]
            row: Row = {
                "data": given.shown,
                "method": method.name,
                "trials": len(trials),
                "settings": "",
                "value": None,
            }
            try:
                found = best(method.name, trials)
                row |= {"settings": in_words(found.settings), "value": found.value, "failed": found.failed}
            except UserError:  # told as a failure
                row |= {"failed": len(trials)}
            rows.append(row)
    figures_of = (Column("validation", "{value:.4f}"), Column("trials", "{trials}"), Column("failed", "{failed}"))
    return Table(
        (*named("data", "method", "settings"), *figures_of),
        rows,
        f"The best of {plan.trials} trials each, on the validation part",
    )
