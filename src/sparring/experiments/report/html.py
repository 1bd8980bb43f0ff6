"""One self-contained HTML page of sortable tables, figures, text and commands; it needs no network.

    quality = Section("Quality", (Sheet(table), Figures((figure,)), Paragraph("...")))
    page = Page("Comparison", "three recipes", (quality,))
    page.write(Path("out/report.html"))

All text is escaped; only the SVG of a figure, made by figures.py, is markup. A content security policy forbids the
browser to load anything, so a page that shows all of its content is known to be self-contained.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path

from sparring.core import files
from sparring.experiments.report.figures import RenderedFigure
from sparring.experiments.report.tables import Cell, Column, Table, shown

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_LONG = 48  # characters from which the text of a cell may wrap


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: str

    def html(self) -> str:
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True)
class Points:
    """A list of short findings."""

    lines: Sequence[str]

    def html(self) -> str:
        return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in self.lines) + "</ul>"


@dataclass(frozen=True)
class Code:
    """A command or other preformatted text; folded if it has a title."""

    text: str
    title: str = ""

    def html(self) -> str:
        block = f"<pre><code>{escape(self.text)}</code></pre>"
        return f"<details><summary>{escape(self.title)}</summary>{block}</details>" if self.title else block


@dataclass(frozen=True)
class Facts:
    """Names and values: versions, hardware, seeds."""

    facts: Mapping[str, str]

    def html(self) -> str:
        pairs = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in self.facts.items())
        return "<dl>" + "".join(pairs) + "</dl>"


@dataclass(frozen=True)
class Figures:
    """Figures, side by side where they fit."""

    figures: Sequence[RenderedFigure]

    def html(self) -> str:
        return '<div class="figures">' + "".join(map(_figure, self.figures)) + "</div>"


@dataclass(frozen=True)
class Links:
    """Links to other pages, by their words."""

    links: Mapping[str, str]

    def html(self) -> str:
        listed = (f'<li><a href="{escape(to)}">{escape(words)}</a></li>' for words, to in self.links.items())
        return f'<nav aria-label="Pages"><ul>{"".join(listed)}</ul></nav>'


@dataclass(frozen=True)
class Sheet:
    """A table that its headings sort, by unrounded values; `tones` marks words as good, bad or plain, `links` them.

    Sheet(table, title="recall@20", tones={"better": "good", "worse": "bad", "baseline": "plain"})
    """

    table: Table
    title: str = ""
    tones: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)  # of whole cells of text

    def html(self) -> str:
        head = "".join(
            f'<th{_text(column)} scope="col"><button type="button">{escape(column.title)}</button></th>'
            for column in self.table.columns
        )
        body = "".join(
            "<tr>" + "".join(self._cell(column, row) for column in self.table.columns) + "</tr>\n"
            for row in self.table.rows
        )
        name = (f"<b>{escape(self.title)}</b> " if self.title else "") + escape(self.table.caption)
        label = escape(" ".join(filter(None, (self.title, self.table.caption))) or "table")
        # outside the table, since a table that scrolls would cut its caption
        caption = f'<p class="caption">{name}</p>' if name else ""
        return (
            f'{caption}<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
            f'<table class="sorts" aria-label="{label}">'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
        )

    def _cell(self, column: Column, row: Mapping[str, Cell]) -> str:
        words = shown(column.form, row)
        tone = self.tones.get(words, "")
        inner = f'<span class="tone {escape(tone)}">{escape(words)}</span>' if tone else escape(words)
        if column.text and words in self.links:
            inner = f'<a href="{escape(self.links[words])}">{inner}</a>'
        value = None if column.text else sort_value(column, row)
        known = "" if value is None else f' data-value="{value!r}"'
        return f"<td{_text(column, len(words) > _LONG)}{known}>{inner}</td>"


Block = Paragraph | Points | Code | Facts | Figures | Links | Sheet


@dataclass(frozen=True)
class Section:
    """A heading and the blocks under it."""

    title: str
    parts: Sequence[Block]

    def html(self) -> str:
        return "\n".join([f"<h2>{escape(self.title)}</h2>", *(part.html() for part in self.parts)])


@dataclass(frozen=True)
class Page:
    """A complete page; see the module."""

    title: str
    lead: str
    sections: Sequence[Section]

    def html(self) -> str:
        """The page; equal parts give equal bytes."""
        here = resources.files("sparring.experiments.report")
        css, script = ((here / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
        anchors = [
            f"s{at}-{re.sub(r'[^a-z0-9]+', '-', section.title.lower()).strip('-')}"
            for at, section in enumerate(self.sections)
        ]
        pairs = list(zip(anchors, self.sections, strict=True))
        nav = "".join(f'<li><a href="#{anchor}">{escape(section.title)}</a></li>' for anchor, section in pairs)
        body = "\n".join(f'<section id="{anchor}">\n{section.html()}\n</section>' for anchor, section in pairs)
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(self.title)}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{escape(self.title)}</h1>
<p class="lead">{escape(self.lead)}</p>
<nav aria-label="Sections"><ul>{nav}</ul></nav>
</header>
<main>
{body}
</main>
<footer>Written by Sparring. Everything is in this file; click a heading to sort its table.</footer>
<script>
{script}</script>
</body>
</html>
"""

    def write(self, path: Path) -> None:
        """Write the page atomically."""
        files.write_text(path, self.html())


def sort_value(column: Column, row: Mapping[str, Cell]) -> float | None:
    """The number that a cell is sorted by: the first field of its column's format; None if it is no number."""
    names = [name for _, name, _, _ in string.Formatter().parse(re.sub(r"\[\[|\]\]", "", column.form)) if name]
    value = row.get(names[0]) if names else None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _figure(figure: RenderedFigure) -> str:
    svg = figure.svg.replace("<svg", f'<svg role="img" aria-label="{escape(figure.caption)}"', 1)
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(figure.name)}">{svg}</div>'
    return f"<figure>{scroll}<figcaption>{escape(figure.caption)}</figcaption></figure>"


def _text(column: Column, long: bool = False) -> str:
    return (' class="text long"' if long else ' class="text"') if column.text else ""
