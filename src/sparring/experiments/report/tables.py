"""One table in four formats: Markdown and LaTeX for people; CSV and JSON, with full precision, for programs."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sparring.core import files

Cell = str | float | int | bool | None
Row = dict[str, Cell]
TableRows = Sequence[Mapping[str, Cell]]
SUFFIXES = ("md", "csv", "tex", "json")


@dataclass(frozen=True)
class Column:
    """A heading, and a format over the fields of a row such as "{mean:.4f} ± {std:.4f}".

    A part of the format in [[ ]] is left out if one of its fields is None; a cell is empty if any other field is None.
    """

    title: str
    form: str
    text: bool = False  # left-aligned


def text_columns(*fields: str) -> tuple[Column, ...]:
    """Columns of text, each headed by the name of its field."""
    return tuple(Column(name, f"{{{name}}}", text=True) for name in fields)


@dataclass(frozen=True)
class Table:
    """Tidy rows, one mapping from field to value each, and the columns that people see.

    table = Table((*text_columns("recipe"), Column("recall", "{mean:.4f}[[ ± {std:.4f}]]")), rows, "Gowalla")
    print(table.markdown());  table.write(Path("out"), "quality")  # quality.md, .csv, .tex, .json
    """

    columns: tuple[Column, ...]
    rows: TableRows
    caption: str = ""

    def cells(self) -> list[list[str]]:
        """The cells that people see, headings first."""
        return [
            [column.title for column in self.columns],
            *([shown(column.form, row) for column in self.columns] for row in self.rows),
        ]

    def markdown(self) -> str:
        """A Markdown table, padded to read well as plain text too."""
        cells = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in line] for line in self.cells()]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        rule = [
            ("-" * max(w, 3)) if column.text else "-" * max(w - 1, 2) + ":"
            for column, w in zip(self.columns, widths, strict=True)
        ]
        lines = [
            [
                cell.ljust(w) if column.text else cell.rjust(w)
                for cell, w, column in zip(line, map(len, rule), self.columns, strict=True)
            ]
            for line in cells
        ]
        body = "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])
        return (f"{self.caption}\n\n" if self.caption else "") + body + "\n"

    def latex(self) -> str:
        """A LaTeX table with booktabs rules."""
        head, *body = [" & ".join(escaped(cell) for cell in line) + r" \\" for line in self.cells()]
        align = "".join("l" if column.text else "r" for column in self.columns)
        caption = [rf"\caption{{{escaped(self.caption)}}}"] if self.caption else []
        lines = [
            r"\begin{table}",
            r"\centering",
            *caption,
            rf"\begin{{tabular}}{{{align}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
        ]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"

    def csv(self) -> str:
        """Every field of every row in full; None is empty."""
        out = io.StringIO()
        writer = csv.DictWriter(out, self.fields(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()

    def json(self) -> str:
        """{"caption", "columns", "rows"}; NaN and infinity are null, as strict JSON readers require."""
        rows = [{key: _finite(value) for key, value in row.items()} for row in self.rows]
        content = {"caption": self.caption, "columns": [asdict(column) for column in self.columns], "rows": rows}
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def fields(self) -> list[str]:
        """The fields of the rows, in order of appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write name.md, name.csv, name.tex and name.json."""
        texts = (self.markdown(), self.csv(), self.latex(), self.json())
        paths = [folder / f"{name}.{suffix}" for suffix in SUFFIXES]
        for path, text in zip(paths, texts, strict=True):
            files.write_text(path, text)
        return paths


def shown(form: str, row: Mapping[str, Cell]) -> str:
    """A cell: a row in the format of a column."""
    kept = re.sub(r"\[\[(.*?)\]\](?!\])", lambda part: part[1] if _complete(part[1], row) else "", form)
    return kept.format_map(row) if _complete(kept, row) else ""


def _complete(form: str, row: Mapping[str, Cell]) -> bool:
    return all(row.get(name) is not None for _, name, _, _ in string.Formatter().parse(form) if name)


def escaped(text: str) -> str:
    """Text escaped for LaTeX."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    special |= {"<": r"$<$", ">": r"$>$", "|": r"$|$"} | {sign: "\\" + sign for sign in "&%$#_{}"}
    return "".join(special.get(sign, sign) for sign in text)


def _finite(value: Cell) -> Cell:
    return None if isinstance(value, float) and not math.isfinite(value) else value
