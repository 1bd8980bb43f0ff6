"""The tables of a comparison, read from its run folders: quality against the baseline, cost, profile of negatives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparring.core.workers import Failure
from sparring.evaluation.statistics import difference, holm, summary
from sparring.experiments.comparison import Comparison
from sparring.experiments.report.study_parts import tuning_table, write_readme
from sparring.experiments.report.tables import Cell, Column, Row, Table, TableRows, text_columns
from sparring.experiments.report.wording import bullets
from sparring.experiments.study import FinishedRun
from sparring.training.baselines import TIE

LEVEL = 0.05  # of the verdict, after Holm's correction
CHEAP = "cheap baseline"  # in place of a verdict
FIELDS = (  # of a row of quality, after the names of its data, metric and recipe
    *("seeds", "mean", "std", "mean_low", "mean_high", "difference", "low", "high", "relative"),
    *("p", "p_holm", "p_seeds", "p_seeds_holm", "p_queries", "p_queries_holm", "p_flip_seeds", "p_flip_queries"),
    *("bootstrap_low", "bootstrap_high", "verdict"),
)

READING = """\
How to read it. Every recipe has the same split, seeds and queries. The difference to the baseline has a 95 % interval
and a p-value over seeds and queries: would newly trained models differ on other queries of the same kind? The
false-positive rate of this test matches its nominal level (checked by comparing a recipe with itself). The verdict
rests on it, after Holm's correction over the recipes of a data set and metric. p (seeds) tests whether newly trained
models would differ on these very queries; p (queries) tests whether these very models would differ on other queries. It
ignores training variance and is significant too often: do not use it to claim that a recipe is better. A cheap baseline
is solved once, with its default settings, and not tested."""


def quality(comparison: Comparison) -> Table:
    """One row per data set, metric and recipe: mean over seeds, difference to the baseline, tests, verdict."""
    rows: list[Row] = []
    baseline = comparison.baseline_name
    for data in comparison.data:
        runs = _runs(comparison, data.name)
        for metric in comparison.metrics:
            tested = [_quality_row(data.name, metric, name, runs, baseline) for name in runs if runs[name]]
            _correct(tested)
            rows += [*tested, *_cheap_rows(comparison, data.name, metric)]
    columns = (
        *_data_column(comparison),
        *text_columns("metric", "recipe"),
        Column("seeds", "{seeds}"),
        Column("mean ± std", "{mean:.4f}[[ ± {std:.4f}]]"),
        Column(f"difference to {baseline}", "{difference:+.4f}[[ [{low:+.4f}, {high:+.4f}]]]"),
        Column("relative", "{relative:+.1%}"),
        Column("p", "{p:.2g}"),
        Column("p (Holm)", "{p_holm:.2g}"),
        Column("p (seeds)", "{p_seeds:.2g}"),
        Column("p (queries)", "{p_queries:.2g}"),
        *text_columns("verdict"),
    )
    seeds = f"{comparison.seeds} seed{'s' if comparison.seeds > 1 else ''}"
    tuning = f"each recipe tuned with {comparison.trials} trials on the validation part"
    names = ", ".join(data.name for data in comparison.data)
    how = tuning if comparison.trials else "default settings of the recipes"
    return Table(columns, rows, f"Test quality on {names}: {seeds}, {how}")


def _cheap_rows(comparison: Comparison, data: str, metric: str) -> list[Row]:
    """A row for each cheap baseline: its metric alone."""
    return [
        {
            "data": data,
            "metric": metric,
            "recipe": name,
            **dict.fromkeys(FIELDS),
            "mean": values[metric],
            "verdict": CHEAP,
        }
        for name, values in comparison.read_baselines(data).items()
    ]


def notes(comparison: Comparison, rows: TableRows) -> list[str]:
    """Lines about recipes that more epochs may improve, and about those that do worse than a cheap baseline."""
    lines = []
    for data in comparison.data:
        on = f" on {data.name}" if len(comparison.data) > 1 else ""
        runs = _runs(comparison, data.name)
        short = [name for name in runs if any(run.result.get("best_is_last") for run in runs[name])]
        if short:
            lines.append(f"the best epoch is the last{on}, so more epochs may do better: {', '.join(short)}")
        for metric in comparison.metrics:
            compared = [row for row in rows if (row["data"], row["metric"]) == (data.name, metric)]
            means = {str(row["recipe"]): float(row["mean"] or 0) for row in compared if row["verdict"] != CHEAP}
            for name, values in comparison.read_baselines(data.name).items():
                behind = ", ".join(recipe for recipe, mean in means.items() if mean < TIE * values[metric])
                lines += (
                    [f"{metric} is behind {name}, a cheap baseline ({values[metric]:.4f}){on}: {behind}"]
                    if behind
                    else []
                )
    return lines


def negatives(comparison: Comparison) -> Table:
    """One row per data set and recipe: time and memory as ratios, and the profile of negatives; means over seeds."""
    rows: list[Row] = []
    baseline = comparison.baseline_name
    for data in comparison.data:
        runs = _runs(comparison, data.name)
        costs = [_cost_row(data.name, name, runs[name]) for name in runs if runs[name]]
        reference = next((row for name in ("uns", baseline) for row in costs if row["recipe"] == name), None)
        for row in costs:
            for name in ("seconds", "epoch_seconds", "peak_bytes"):
                row[f"{name}_ratio"] = _ratio(row[name], reference[name] if reference else None)
        rows += costs
    to = "uns" if any(row["recipe"] == "uns" for row in rows) else baseline
    known = any(data.world is not None for data in comparison.data)
    columns = (
        *_data_column(comparison),
        *text_columns("recipe"),
        Column("seconds", "{seconds:.1f}"),
        Column(f"time / {to}", "{seconds_ratio:.2f}"),
        Column("of one epoch", "{epoch_seconds_ratio:.2f}"),
        Column(f"memory / {to}", "{peak_bytes_ratio:.2f}"),
        Column("popularity", "{popularity:.3f}"),
        Column("head", "{head:.1%}"),
        Column("mid", "{mid:.1%}"),
        Column("tail", "{tail:.1%}"),
        Column("accidental hits", "{accidental:.2%}"),
        *([Column("synthetic", "{synthetic:.1%}")] if any(row["synthetic"] for row in rows) else []),
        *([Column("false negatives", "{false_negatives:.2%}")] if known else []),
    )
    return Table(columns, rows, "Cost and profile of the negatives (popularity 0.5: as popular as training positives)")


def tuned(comparison: Comparison) -> Table:
    """One row per data set and recipe: its trials, and the settings that were best on validation."""
    shown = {data.name: data.name for data in comparison.data}
    return tuning_table(comparison.study, "recipe", shown, data_column=len(comparison.data) > 1)


def write(comparison: Comparison, failures: Sequence[Failure], command: str = "") -> tuple[Table, ...]:
    """Write quality.*, negatives.*, tuned.* (where tuned) and README.md; return the tables."""
    tables = {"quality": quality(comparison), "negatives": negatives(comparison)}
    if comparison.trials:
        tables["tuned"] = tuned(comparison)
    for name, table in tables.items():
        table.write(comparison.out, name)
    told = bullets(notes(comparison, tables["quality"].rows))
    parts = ["# Comparison", *(table.markdown().rstrip() for table in tables.values()), told, READING]
    write_readme(comparison.out, parts, failures, command)
    return tuple(tables.values())


def _runs(comparison: Comparison, data: str) -> dict[str, list[FinishedRun]]:
    return {name: comparison.study.runs(data, method) for name, method in comparison.methods.items()}


def _data_column(comparison: Comparison) -> tuple[Column, ...]:
    return text_columns("data") if len(comparison.data) > 1 else ()


def _quality_row(data: str, metric: str, recipe: str, runs: dict[str, list[FinishedRun]], baseline: str) -> Row:
    values = {run.seed: run.values(metric) for run in runs[recipe]}
    over = summary([float(value.mean()) for value in values.values()])
    row: Row = {"data": data, "metric": metric, "recipe": recipe, **dict.fromkeys(FIELDS)}
    row |= {"seeds": over.n, "mean": over.mean, "std": over.std, "mean_low": over.low, "mean_high": over.high}
    row["verdict"] = "baseline" if recipe == baseline else "baseline failed"
    base = {run.seed: run.values(metric) for run in runs[baseline]}
    common = [seed for seed in values if seed in base]
    if recipe == baseline or not common:
        return row
    test = difference(np.stack([values[seed] for seed in common]), np.stack([base[seed] for seed in common]))
    mean = float(np.mean([base[seed].mean() for seed in common]))
    row |= {"difference": test.mean, "relative": test.mean / mean if mean else None, "verdict": "one seed: no verdict"}
    row |= {"p_queries": test.queries.p, "p_flip_queries": test.p_flip_queries, "p_flip_seeds": test.p_flip_seeds}
    row |= {"bootstrap_low": test.bootstrap[0], "bootstrap_high": test.bootstrap[1]}
    if test.both is not None and test.seeds is not None:
        row |= {"low": test.both.low, "high": test.both.high, "p": test.both.p, "p_seeds": test.seeds.p}
    return row


def _correct(rows: list[Row]) -> None:
    """Apply Holm's correction over the recipes of one data set and metric, test by test; then set the verdicts."""
    for name in ("p", "p_seeds", "p_queries"):
        tested = [row for row in rows if row[name] is not None]
        for row, adjusted in zip(tested, holm([float(row[name] or 0) for row in tested]), strict=True):
            row[f"{name}_holm"] = adjusted
    for row in rows:
        if isinstance(row["p_holm"], float) and isinstance(row["difference"], float):
            better = "better" if row["difference"] > 0 else "worse"
            row["verdict"] = better if row["p_holm"] < LEVEL else "no difference shown"


def _cost_row(data: str, recipe: str, runs: list[FinishedRun]) -> Row:
    seconds = [float(run.result["train_seconds"]) for run in runs]
    epochs = [int(run.result["epochs"]) for run in runs]
    peaks = [run.measured["peak_bytes"] for run in runs if run.measured["peak_bytes"]]
    profiles = [run.measured["negatives"] for run in runs]
    names = ("popularity", "head", "mid", "tail", "accidental", "synthetic", "false_negatives")
    return {
        "data": data,
        "recipe": recipe,
        "seeds": len(runs),
        "device": str(runs[0].measured["device"]),
        "seconds": float(np.mean(seconds)),
        "epochs": float(np.mean(epochs)),
        "epoch_seconds": sum(seconds) / max(sum(epochs), 1),
        "peak_bytes": float(np.mean(peaks)) if peaks else None,
        **{
            name: float(np.mean([shares[name] for shares in profiles]))
            if all(name in shares for shares in profiles)
            else None
            for name in names
        },
    }


def _ratio(value: Cell, reference: Cell) -> float | None:
    return float(value) / float(reference) if value is not None and reference else None
