"""The page of a mining: how much was mined and dropped, and examples that a person can look at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparring.experiments.mining import Mined, Mining
from sparring.experiments.report.html import Code, Facts, Page, Paragraph, Section, Sheet
from sparring.experiments.report.tables import Column, Row, Table, text_columns

TONES = {"positive": "good", "mined": "plain", "dropped": "bad"}
_LONGEST = 240  # characters of a text that the page shows


def write_page(mined: Mined, mining: Mining, command: str, path: Path) -> Path:
    """Write the page to a file."""
    title = "Mined negatives"
    lead = f"{mined.pairs:,} pairs, {mining.n} negatives each, from {' and '.join(mining.source)}"
    page = Page(title, lead, (_summary(mined, mining), _examples(mined, mining), _origin(command, mining)))
    page.write(path)
    return path


def summary(mined: Mined, mining: Mining) -> Table:
    """Counts: what was offered, dropped by each bound, and written."""
    offered = max(mined.offered, 1)
    rows: list[Row] = [{"what": "candidates offered", "count": mined.offered, "share": None}]
    for name in ("relative", "margin", "most"):
        if name in mined.dropped:
            count = mined.dropped[name]
            words = f"dropped by {name} {getattr(mining, name):g}"
            rows.append({"what": words, "count": count, "share": count / offered})
    if mining.bounds() != type(mining.bounds())():
        dropped = mined.offered - mined.left
        rows.append({"what": "dropped in all", "count": dropped, "share": dropped / offered})
    if mined.unknown:
        rows.append({"what": "kept without a score", "count": mined.unknown, "share": mined.unknown / offered})
    short: Row = {"what": f"pairs with fewer than {mining.n}", "count": mined.short, "share": mined.short / mined.pairs}
    rows += [short, {"what": "rows written", "count": mined.rows, "share": None}]
    columns = (*text_columns("what"), Column("count", "{count:,}"), Column("share", "{share:.1%}"))
    return Table(columns, rows)


def _summary(mined: Mined, mining: Mining) -> Section:
    judge = mining.guide or mining.source[0]
    words = (
        f"Each query was offered the candidates of rank {mining.first} to {mining.last - 1}, without its known "
        f"positives. {judge} scored them and the positive; a candidate at or above a bound was dropped as a probable "
        "false negative."
    )
    return Section("Summary", (Paragraph(words), Sheet(summary(mined, mining))))


def _examples(mined: Mined, mining: Mining) -> Section:
    intro = Paragraph(
        "Those with the most dropped texts come first. Read some before you train: a dropped text should answer the "
        "query, a mined one should not. If mined texts do answer, lower the bound or raise --from; if dropped ones do "
        "not, raise it."
    )
    tell = sorted(mined.examples, key=lambda example: -sum(bool(listed["why"]) for listed in example["candidates"]))
    return Section("Examples", (intro, *(_example(example) for example in tell)))


def _example(example: Mapping[str, Any]) -> Sheet:
    """One query: its positive, then its candidates."""
    first: Row = {"rank": "", "fate": "positive", "score": example["score"], "text": _short(example["positive"])}
    rows = [first]
    for listed in example["candidates"]:
        fate = f"dropped ({listed['why']})" if listed["why"] else listed["fate"]
        row: Row = {"rank": str(listed["rank"]), "fate": fate, "score": listed["score"], "text": _short(listed["text"])}
        rows.append(row)
    columns = (
        *text_columns("rank", "fate"),
        Column("score", "{score:.4f}"),
        *text_columns("text"),
    )
    tones = {fate: TONES[fate.split()[0]] for row in rows if (fate := str(row["fate"])).split()[0] in TONES}
    return Sheet(Table(columns, rows), title=_short(example["query"]), tones=tones)


def _origin(command: str, mining: Mining) -> Section:
    facts = {
        "sources": ", ".join(mining.source),
        "guide": mining.guide or mining.source[0],
        "search": mining.index,
        "layout": mining.layout,
        "seed": str(mining.seed),
    }
    return Section("Origin", (Code(command), Facts(facts)))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
