"""The tables of a comparison, made of its run folders: how good each recipe is and against the baseline; what it costs and draws."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sparring.core import files
from sparring.core.errors import UserError, first_line
from sparring.core.files import read_table
from sparring.core.workers import Failure
from sparring.evaluation.metrics import parse
from sparring.evaluation.statistics import difference, holm, summary
from sparring.experiments.comparison import Plan, finished
from sparring.experiments.report.tables import Cell, Column, Table
from sparring.experiments.tuning import Tuned, best, read_trials

LEVEL = 0.05  # of the verdict, after Holm's correction
Row = dict[str, Cell]

READING = """\
How to read it. Every recipe has the same split, seeds and queries. The difference to the baseline has a 95 % interval and a p-value over
seeds and queries: would newly trained models differ on other queries of the same kind? That test has the size it claims: the same recipe
compared with itself is called different about as often as it should be. The verdict rests on it, after Holm's correction over the recipes
of a data set and metric. p (seeds) asks whether newly trained models would differ on these very queries; p (queries) whether these very
models would differ on other queries, which luck in training answers with yes too often: it is no evidence that a recipe is better."""


@dataclass(frozen=True)
class Finished:
    """What the folder of one run says."""

    seed: int
    result: dict[str, Any]
    measured: dict[str, Any]
    per_query: pl.DataFrame


def quality(plan: Plan) -> Table:
    """One row per data set, metric and recipe: mean and deviation over seeds, difference to the baseline, tests, verdict."""
    rows: list[Row] = []
    for data in plan.data:
        done = {recipe: list(finished_runs(plan, data.name, recipe)) for recipe in plan.recipes}
        for metric in plan.metrics:
            some = [
                _quality_row(data.name, metric, recipe, done, plan.against) for recipe in plan.recipes if done[recipe]
            ]
            _correct(some)
            rows += some
    several = len(plan.data) > 1
    columns = (
        *([Column("data", "{data}", text=True)] if several else []),
        Column("metric", "{metric}", text=True),
        Column("recipe", "{recipe}", text=True),
        Column("seeds", "{seeds}"),
        Column("mean ± std", "{mean:.4f}[[ ± {std:.4f}]]"),
        Column(f"difference to {plan.against}", "{difference:+.4f}[[ [{low:+.4f}, {high:+.4f}]]]"),
        Column("relative", "{relative:+.1%}"),
        Column("p", "{p:.2g}"),
        Column("p (Holm)", "{p_holm:.2g}"),
        Column("p (seeds)", "{p_seeds:.2g}"),
        Column("p (queries)", "{p_queries:.2g}"),
        Column("verdict", "{verdict}", text=True),
    )
    names = ", ".join(data.name for data in plan.data)
    return Table(columns, rows, f"Test quality on {names}: {_seeds(plan)}, {_tuning(plan)}")


def negatives(plan: Plan) -> Table:
    """One row per data set and recipe: time and memory as a ratio, and what its negatives are; means over seeds."""
    rows: list[Row] = []
    for data in plan.data:
        done = {recipe: list(finished_runs(plan, data.name, recipe)) for recipe in plan.recipes}
        some = [_cost_row(data.name, recipe, found) for recipe, found in done.items() if found]
        reference = next((row for name in ("uns", plan.against) for row in some if row["recipe"] == name), None)
        for row in some:
            for name in ("seconds", "epoch_seconds", "peak_bytes"):
                row[f"{name}_ratio"] = _ratio(row[name], reference[name] if reference else None)
        rows += some
    to = "uns" if any(row["recipe"] == "uns" for row in rows) else plan.against
    columns = (
        *([Column("data", "{data}", text=True)] if len(plan.data) > 1 else []),
        Column("recipe", "{recipe}", text=True),
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
        *(
            [Column("false negatives", "{false_negatives:.2%}")]
            if any(data.world is not None for data in plan.data)
            else []
        ),
    )
    return Table(columns, rows, "Cost, and what the negatives are (popularity 0.5: as popular as what people take)")


def tuned(plan: Plan) -> Table:
    """One row per data set and recipe: how many trials it had, how many of them failed, and the settings that did best on validation."""
    rows: list[Row] = []
    for data in plan.data:
        for recipe in plan.recipes:
            trials = read_trials(plan.tuning(data.name, recipe) / "trials.jsonl")[: plan.trials]
            try:
                found = best(recipe, trials)
            except UserError:  # none worked: reported as a failure
                found = Tuned({}, math.nan, tuple(trials))
            settings = ", ".join(
                f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
                for key, value in found.settings.items()
            )
            row: Row = {
                "data": data.name,
                "recipe": recipe,
                "trials": len(trials),
                "failed": found.failed,
                "score": found.value,
            }
            rows.append(row | {"settings": settings, "seconds": sum(trial.seconds for trial in trials)})
    columns = (
        *([Column("data", "{data}", text=True)] if len(plan.data) > 1 else []),
        Column("recipe", "{recipe}", text=True),
        Column("settings", "{settings}", text=True),
        Column("validation", "{score:.4f}"),
        Column("trials", "{trials}"),
        Column("failed", "{failed}"),
    )
    return Table(columns, rows, f"Tuning: the best of {plan.trials} trials each")


def write(plan: Plan, failures: Sequence[Failure], command: str = "") -> tuple[Table, ...]:
    """quality.*, negatives.* and, where tuned, tuned.*, and a README.md with all, in the folder of the comparison; the tables."""
    made = {"quality": quality(plan), "negatives": negatives(plan), **({"tuned": tuned(plan)} if plan.trials else {})}
    for name, table in made.items():
        table.write(plan.out, name)
    parts = ["# Comparison", *(table.markdown().rstrip() for table in made.values()), READING]
    if failures:
        parts.append(
            "Failed:\n\n" + "\n".join(f"- {bad.data} {bad.recipe} {bad.what}: {bad.error}" for bad in failures)
        )
    if command:
        parts.append(f"Made by\n\n    {command}")
    files.write(plan.out / "README.md", lambda file: file.write_text("\n\n".join(parts) + "\n", encoding="utf-8"))
    return tuple(made.values())


def finished_runs(plan: Plan, data: str, recipe: str) -> Iterator[Finished]:
    """The finished runs of a recipe, by seed."""
    for seed in range(plan.seeds):
        folder = plan.folder(data, recipe, seed)
        if finished(folder):
            yield Finished(
                seed,
                _json(folder / "result.json"),
                _json(folder / "measured.json"),
                read_table(folder / "per_query.parquet"),
            )


def values(found: Finished, metric: str) -> np.ndarray:
    """(Q,) values of a metric whose mean is the one that the run reports."""
    if metric not in found.per_query.columns:
        known = ", ".join(name for name in found.per_query.columns if name != "query")
        raise UserError(f"{metric} was not measured by the runs of this comparison; they have {known}")
    each = found.per_query[metric].to_numpy().astype(np.float64)
    if not parse(metric.split("@")[0]).over_all_queries:
        return each
    mean = float(
        found.result["test"]["metrics"][metric]
    )  # a dialect that divides by all queries, those without a test item too
    return each * (mean / each.mean()) if each.mean() > 0 else each


def _quality_row(data: str, metric: str, recipe: str, done: dict[str, list[Finished]], against: str) -> Row:
    mine = {found.seed: values(found, metric) for found in done[recipe]}
    over = summary([float(value.mean()) for value in mine.values()])
    row: Row = {"data": data, "metric": metric, "recipe": recipe, "seeds": over.n, "mean": over.mean, "std": over.std}
    row |= {"mean_low": over.low, "mean_high": over.high}
    names = (
        "difference",
        "low",
        "high",
        "relative",
        "p",
        "p_holm",
        "p_seeds",
        "p_seeds_holm",
        "p_queries",
        "p_queries_holm",
    )
    row |= dict.fromkeys((*names, "p_flip_seeds", "p_flip_queries", "bootstrap_low", "bootstrap_high"))
    row["verdict"] = "baseline" if recipe == against else "baseline failed"
    theirs = {found.seed: values(found, metric) for found in done[against]}
    common = [seed for seed in mine if seed in theirs]
    if recipe == against or not common:
        return row
    found = difference(np.stack([mine[seed] for seed in common]), np.stack([theirs[seed] for seed in common]))
    base = float(np.mean([theirs[seed].mean() for seed in common]))
    row |= {
        "difference": found.mean,
        "relative": found.mean / base if base else None,
        "verdict": "one seed: no verdict",
    }
    row |= {"p_queries": found.queries.p, "p_flip_queries": found.p_flip_queries, "p_flip_seeds": found.p_flip_seeds}
    row |= {"bootstrap_low": found.bootstrap[0], "bootstrap_high": found.bootstrap[1]}
    if found.both is not None and found.seeds is not None:
        row |= {"low": found.both.low, "high": found.both.high, "p": found.both.p, "p_seeds": found.seeds.p}
    return row


def _correct(rows: list[Row]) -> None:
    """Holm over the recipes of one data set and metric, for each test by itself; then the verdict."""
    for name in ("p", "p_seeds", "p_queries"):
        tested = [row for row in rows if row[name] is not None]
        for row, adjusted in zip(tested, holm([float(row[name] or 0) for row in tested]), strict=True):
            row[f"{name}_holm"] = adjusted
    for row in rows:
        if isinstance(row["p_holm"], float) and isinstance(row["difference"], float):
            better = "better" if row["difference"] > 0 else "worse"
            row["verdict"] = better if row["p_holm"] < LEVEL else "no difference shown"


def _cost_row(data: str, recipe: str, done: list[Finished]) -> Row:
    seconds = [float(found.result["train_seconds"]) for found in done]
    epochs = [int(found.result["epochs"]) for found in done]
    peaks = [found.measured["peak_bytes"] for found in done if found.measured["peak_bytes"]]
    row: Row = {"data": data, "recipe": recipe, "seeds": len(done), "device": str(done[0].measured["device"])}
    row |= {
        "seconds": float(np.mean(seconds)),
        "epochs": float(np.mean(epochs)),
        "epoch_seconds": sum(seconds) / max(sum(epochs), 1),
    }
    row["peak_bytes"] = float(np.mean(peaks)) if peaks else None
    drawn = [found.measured["negatives"] for found in done]
    names = ("popularity", "head", "mid", "tail", "accidental", "synthetic", "false_negatives")
    return row | {
        name: float(np.mean([each[name] for each in drawn])) if all(name in each for each in drawn) else None
        for name in names
    }


def _ratio(value: Cell, reference: Cell) -> float | None:
    return float(value) / float(reference) if value is not None and reference else None


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is corrupt: {first_line(error)}; delete its folder to train again") from error


def _seeds(plan: Plan) -> str:
    return f"{plan.seeds} seed{'s' if plan.seeds > 1 else ''}"


def _tuning(plan: Plan) -> str:
    return (
        f"each recipe tuned with {plan.trials} trials on the validation part"
        if plan.trials
        else "settings as the recipes come"
    )
