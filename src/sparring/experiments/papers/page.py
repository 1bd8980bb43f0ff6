"""The page of a reproduction, OUT/report.html, with its tables as files and README.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sparring import __version__
from sparring.experiments.papers.paper import Reproduction, Results
from sparring.experiments.report.html import Code, Facts, Page, Points, Section, Sheet
from sparring.experiments.report.study_parts import environment, failed_section, settings_of, write_readme
from sparring.experiments.report.tables import Column, Row, Table, text_columns
from sparring.experiments.report.wording import bullets, command_lines, in_words


def write(plan: Reproduction, results: Results) -> Path:
    """Write table.* and the other tables, README.md and the page; return the page's path."""
    tables = {"table": results.table, **results.others}
    for name, table in tables.items():
        table.write(plan.out, name)
    experiment = plan.experiment
    findings = list(results.findings) or ["Nothing has been run yet."]
    sections = [Section("In short", (Points(findings), Facts(_facts(plan)))), *results.sections]
    sections += failed_section(plan.failures)
    if experiment.notes:
        sections.append(Section("How to read it", (Points(list(experiment.notes)),)))
    sections.append(_made(plan))
    path = plan.out / "report.html"
    title, lead = f"{experiment.name}: {experiment.line}", f"{experiment.source}, reproduced."
    Page(title, lead, sections).write(path)
    parts = [f"# {title}", lead, bullets(results.findings)]
    parts += [*(table.markdown().rstrip() for table in tables.values()), bullets(experiment.notes)]
    write_readme(plan.out, parts, plan.failures, plan.command)
    return path


def _facts(plan: Reproduction) -> dict[str, str]:
    facts = {}
    for dataset in plan.data:
        data, paper = dataset.data, "not a data set of the paper"
        known = f"the paper's {dataset.known_as} by its counts" if dataset.known_as else paper
        facts[dataset.name] = (
            f"{data.n_queries:,} queries x {data.n_items:,} items, {len(data):,} interactions; {known}"
        )
    if plan.study.total:
        facts["trained"] = f"{len(plan.study.all_runs())} of {plan.study.total} runs"
    return facts


def _made(plan: Reproduction) -> Section:
    facts = {"sparring": __version__}
    runs = plan.study.all_runs()
    if runs:
        splits = "the same split for all" if plan.experiment.protocol.one_split else "each with its own split"
        facts["seeds"] = f"{', '.join(map(str, plan.seeds))}, {splits}"
    facts |= environment(runs)
    parts: list[Code | Facts | Sheet] = [Code(command_lines(plan.command))] if plan.command else []
    parts.append(Facts(facts))
    if runs:
        columns = (*text_columns("data", "method", "recipe"), Column("seconds of training", "{seconds:.0f}"))
        table = Table((*columns, *text_columns("settings")), _methods(plan), "as resolved; the mean time of a training")
        parts.append(Sheet(table, "Settings"))
    return Section("How it was made", parts)


def _methods(plan: Reproduction) -> list[Row]:
    rows: list[Row] = []
    for dataset in plan.data:
        for method in plan.methods[dataset.name]:
            if runs := plan.runs(dataset, method):
                row: Row = {"data": dataset.name, "method": method.name, "recipe": runs[0].meta["recipe"]}
                row |= {"settings": in_words(settings_of(runs[0]))}
                rows.append(row | {"seconds": float(np.mean([run.result["train_seconds"] for run in runs]))})
    return rows
