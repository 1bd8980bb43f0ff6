"""The page of a reproduction, OUT/report.html: what was found, how it was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparring.core import files
from sparring.experiments.papers.cells import named, read_json
from sparring.experiments.papers.plan import Plan, Results
from sparring.experiments.report.comparison import command_lines, distinct, in_words
from sparring.experiments.report.html import Code, Facts, Page, Points, Section, Sheet
from sparring.experiments.report.tables import Cell, Column, Table
from sparring.recipes.setup import flat
from sparring.training import trained

Key = tuple[str, str]  # data and method


def write(plan: Plan, results: Results) -> Path:
    """Write table.* and the others, README.md and the page; where the page is."""
    for name, table in {"table": results.table, **results.others}.items():
        table.write(plan.out, name)
    metas = _metas(plan)
    experiment = plan.experiment
    first = Section(
        "In short", (Points(list(results.findings) or ["Nothing has been run yet."]), Facts(_facts(plan, metas)))
    )
    sections = [first, *results.sections]
    if plan.failures:
        sections.append(
            Section("Failed", (Points([f"{bad.data} {bad.recipe} {bad.what}: {bad.error}" for bad in plan.failures]),))
        )
    if experiment.notes:
        sections.append(Section("How to read it", (Points(list(experiment.notes)),)))
    sections.append(_made(plan, metas))
    path = plan.out / "report.html"
    Page(f"{experiment.name}: {experiment.line}", f"{experiment.source}, reproduced.", sections).write(path)
    _readme(plan, results)
    return path


def _readme(plan: Plan, results: Results) -> None:
    experiment = plan.experiment
    parts = [f"# {experiment.name}: {experiment.line}", f"{experiment.source}, reproduced.", _list(results.findings)]
    parts += [table.markdown().rstrip() for table in (results.table, *results.others.values())]
    parts.append(_list(experiment.notes))
    if plan.failures:
        parts.append(
            "Failed:\n\n" + _list([f"{bad.data} {bad.recipe} {bad.what}: {bad.error}" for bad in plan.failures])
        )
    if plan.command:
        parts.append(f"Made by\n\n    {plan.command}")
    text = "\n\n".join(part for part in parts if part) + "\n"
    files.write(plan.out / "README.md", lambda file: file.write_text(text, encoding="utf-8"))


def _list(each: Any) -> str:
    return "\n".join(f"- {one}" for one in each)


def _metas(plan: Plan) -> dict[tuple[str, str, int], dict[str, Any]]:
    """run.json and the device of every finished run, by data, method and seed."""
    found = {}
    for given in plan.data:
        for method in plan.methods[given.name]:
            for folder in plan.folders(given, method):
                device = read_json(folder / "measured.json")["device"]
                seconds = read_json(folder / "result.json")["train_seconds"]
                found[given.name, method.name, int(folder.name)] = {
                    **trained.read_meta(folder),
                    "device": device,
                    "seconds": seconds,
                }
    return found


def _facts(plan: Plan, metas: dict[tuple[str, str, int], dict[str, Any]]) -> dict[str, str]:
    facts = {}
    for given in plan.data:
        data = given.data
        same = f"; the paper's {given.known_as} by its counts" if given.known_as else "; not a data set of the paper"
        facts[given.name] = f"{data.n_queries:,} queries x {data.n_items:,} items, {len(data):,} interactions{same}"
    expected = len(plan.seeds) * sum(map(len, plan.methods.values()))
    if expected:
        facts["trained"] = f"{len(metas)} of {expected} runs"
    return facts


def _made(plan: Plan, metas: dict[tuple[str, str, int], dict[str, Any]]) -> Section:
    from sparring import __version__

    facts = {"sparring": __version__}
    if metas:
        splits = "the same split for all" if plan.experiment.protocol.one_split else "each with a split of its own"
        facts["seeds"] = f"{', '.join(map(str, plan.seeds))}, {splits}"
        facts["hardware"] = distinct(str(meta["device"]) for meta in metas.values())
    for name in dict.fromkeys(key for meta in metas.values() for key in meta.get("versions", {})):
        facts[name] = distinct(str(meta.get("versions", {}).get(name, "unknown")) for meta in metas.values())
    parts: list[Code | Facts | Sheet] = [Code(command_lines(plan.command))] if plan.command else []
    parts.append(Facts(facts))
    rows = _methods(metas)
    if rows:
        columns = (
            *named("data", "method", "recipe"),
            Column("seconds of training", "{seconds:.0f}"),
            *named("settings"),
        )
        parts.append(Sheet(Table(columns, rows, "as resolved; the mean time of one training"), "Settings"))
    return Section("How it was made", parts)


def _methods(metas: dict[tuple[str, str, int], dict[str, Any]]) -> list[dict[str, Cell]]:
    times: dict[Key, list[float]] = {}
    rows: dict[Key, dict[str, Cell]] = {}
    for (data, method, _), meta in metas.items():
        times.setdefault((data, method), []).append(float(meta["seconds"]))
        settings = {
            name: value
            for name, value in {**meta.get("arguments", {}), **flat(meta["setup"])}.items()
            if name != "seed"
        }
        rows.setdefault(
            (data, method), {"data": data, "method": method, "recipe": meta["recipe"], "settings": in_words(settings)}
        )
    return [row | {"seconds": sum(times[key]) / len(times[key])} for key, row in rows.items()]
