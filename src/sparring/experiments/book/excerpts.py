"""Excerpts of a book in Markdown pages: the lines between two marks are made from book.json.

    <!-- book: NAME WORDS -->
    <!-- /book -->

    front           a short table, methods x chapters: the solved methods, the reference and the best others
    findings        the best average ranks, the verdicts on claims, the null rate
    claims          a table of claims: verdict, effect with interval
    leaderboards    a heading and a table for each chapter
    method NAME     a paragraph: the place, mean and difference to the reference in each chapter
    made            commit, repetitions, trials, hardware and command

The words name sets, splits or models, and choose chapters: `front random tables`. Without words all are shown.

    python -m sparring.experiments.book.excerpts docs/book/book.json README.md docs/lab/book.md docs/methods/*.md
    python -m sparring.experiments.book.excerpts book/book.json --ship docs/book README.md docs/lab/book.md
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sparring.core import files
from sparring.core.errors import UserError, did_you_mean
from sparring.experiments.book import pages
from sparring.experiments.book.plan import read_plan
from sparring.experiments.book.results import LEVEL, Chapter, complete
from sparring.experiments.report.tables import Column, Row, Table, shown, text_columns

Results = Mapping[str, Any]
ROWS = 10  # of the front table
MARKS = {"better": " ↑", "worse": " ↓"}
BLOCK = re.compile(r"^<!-- book: ([^\n]*?) -->\n(?:.*?\n)??<!-- /book -->$", re.DOTALL | re.MULTILINE)


def fill(text: str, book: Results) -> str:
    """A Markdown text with every marked block made anew; filling twice changes nothing.

    fill("<!-- book: claims -->\\n<!-- /book -->\\n", json.loads(Path("docs/book/book.json").read_text()))
    """
    marks = re.findall(r"^<!-- (/?book)\b", text, re.MULTILINE)
    if marks != ["book", "/book"] * len(BLOCK.findall(text)):
        raise UserError("a block of the book is not closed: end it with the line <!-- /book -->")

    def block(found: re.Match[str]) -> str:
        name, *words = found[1].split()
        if name not in EXCERPTS:
            hint = did_you_mean(name, EXCERPTS) or f": choose from {', '.join(EXCERPTS)}"
            raise UserError(f"the book has no excerpt {name!r}{hint}")
        made = EXCERPTS[name](book, words).strip()
        return f"<!-- book: {found[1]} -->\n" + (f"\n{made}\n\n" if made else "") + "<!-- /book -->"

    return BLOCK.sub(block, text)


def fill_files(book: Results, paths: Iterable[Path]) -> list[Path]:
    """Fill the blocks of files in place; those that changed."""
    filled = {}
    for path in paths:
        text = files.read_text(path)
        try:
            filled[path] = text, fill(text, book)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
    changed = [path for path, (before, after) in filled.items() if before != after]
    for path in changed:
        files.write_text(path, filled[path][1])
    return changed


def ship(out: Path, to: Path) -> None:
    """Write the part of a book that a repository keeps: book.json, runs.csv and the pages, but no runs.

    Pages hold their figures. Folders of this machine in the command are cut to their names. Pages that the book no
    longer has are deleted.
    """
    book = files.read_json(out / "book.json")
    lines = book["command"].splitlines()
    book["command"] = "\n".join(shlex.join(map(_without_folders, shlex.split(line))) for line in lines)
    with tempfile.TemporaryDirectory() as scratch:
        pages.write(Path(scratch), book)
        written = {path.name: path.read_text(encoding="utf-8") for path in Path(scratch).glob("*.html")}
    for name, text in written.items():
        files.write_text(to / name, text)
    files.write_text(to / "runs.csv", (out / "runs.csv").read_text(encoding="utf-8"))
    files.write_json(to / "book.json", book)
    for path in to.glob("*.html"):
        if path.name not in written:
            path.unlink()


def _without_folders(word: str) -> str:
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else word


# Chapters


def chosen(book: Results, words: Sequence[str]) -> list[Chapter]:
    """The chapters with these sets, splits and models, in the order of the book; all without words.

    chosen(book, ["random", "tables"])  # every set, split at random, with the model of tables
    """
    keys = [(each["set"], each["split"], each["model"]) for each in book["data"]]
    known = {name for key in keys for name in key}
    for word in words:
        if word not in known:
            hint = did_you_mean(word, known) or f": choose from {', '.join(sorted(known))}"
            raise UserError(f"no chapter of the book has the set, split or model {word!r}{hint}")
    for place in range(3):
        asked = {key[place] for key in keys} & {*words}
        keys = [key for key in keys if not asked or key[place] in asked]
    return keys


def board(book: Results, key: Chapter) -> list[Row]:
    """The rows of a chapter for the metric of the plan, the best first."""
    rows = (row for row in book["leaderboards"] if (row["set"], row["split"], row["model"]) == key)
    return sorted((row for row in rows if row["metric"] == book["plan"]["metric"]), key=lambda row: -row["mean"])


def _ranked(book: Results, key: Chapter) -> list[Row]:
    """A board without repeated methods."""
    return [row for row in board(book, key) if not book["plan"]["methods"][row["method"]]["repeats"]]


# Excerpts


def front(book: Results, words: Sequence[str]) -> str:
    """A table of methods x chapters: the solved methods, the reference, and the best others up to ROWS.

    Methods stand in the order of their mean relative difference to the reference: over the chapters of a set, then
    over sets. A chapter on which nothing is ahead of popularity is left out; of the others, those methods and chapters
    are shown that together give the most figures. Empty if the reference is not among them.
    """
    plan, reference = book["plan"], book["plan"]["reference"]
    usable = {(each["set"], each["split"], each["model"]) for each in book["data"] if each["usable"]}
    cells = {
        key: {str(row["method"]): row for row in _ranked(book, key)} for key in chosen(book, words) if key in usable
    }
    found, keys = complete({key: set(own) for key, own in cells.items()})
    methods = [name for name in plan["methods"] if name in found]
    if reference not in methods:
        return ""
    sets = list(dict.fromkeys(key[0] for key in keys))
    relative = {
        name: fmean(fmean(_relative(cells[key][name]) for key in keys if key[0] == each) for each in sets)
        for name in methods
    }
    order = sorted(methods, key=lambda name: -relative[name])
    always = [name for name in order if name == reference or cells[keys[0]][name]["solved"]]
    others = [name for name in order if name not in always]
    kept = {*always, *others[: max(0, ROWS - len(always))]}
    rows: list[Row] = []
    for name in (name for name in order if name in kept):
        row: Row = {"method": f"`{name}`", "relative": None if name == reference else relative[name]}
        for place, key in enumerate(keys):
            cell = cells[key][name]
            row[f"chapter{place}"] = f"{cell['mean']:.4f}{MARKS.get(str(cell['verdict']), '')}"
        rows.append(row)
    varied = [place for place in range(3) if len({key[place] for key in keys}) > 1]
    titles = [" ".join(key[place] for place in varied) or plan["metric"] for key in keys]
    columns = (
        *text_columns("method"),
        *(Column(title, f"{{chapter{place}}}") for place, title in enumerate(titles)),
        Column(f"against `{reference}`", "{relative:+.1%}"),
    )
    fewer = [key for key in cells if key not in keys]
    return Table(columns, rows).markdown() + "\n" + _front_note(book, keys[0], varied, len(kept), len(methods), fewer)


def _relative(row: Mapping[str, Any]) -> float:
    return float(row["relative"] or 0.0)


def _front_note(
    book: Results, key: Chapter, varied: Sequence[int], kept: int, methods: int, fewer: Sequence[Chapter]
) -> str:
    """The reading of the front table: metric, chapters, budget, marks, commit."""
    plan, reference = book["plan"], book["plan"]["reference"]
    fixed = [f"{kind} {key[place]}" for place, kind in enumerate(("set", "split", "model")) if place not in varied]
    lines = [f"Test {plan['metric']}{''.join(f', {words}' for words in fixed)}; {_budget(plan)}."]
    if kept < methods:
        lines.append(f"Rows: the baselines, `{reference}` and the best others, {kept} of {methods} methods.")
    if fewer:
        lines.append(f"Left out, with fewer methods: {', '.join(' '.join(each) for each in fewer)}.")
    lines.append(
        f"↑ and ↓: shown different from `{reference}`, by a test over repetitions and queries together, at "
        f"{100 * LEVEL:g} % after Holm's correction over the methods of a column."
    )
    lines.append(f"Last column: the mean relative difference over sets. Commit {', '.join(book['commits'])}.")
    return _wrapped(" ".join(lines))


def _budget(plan: Mapping[str, Any]) -> str:
    changes = "".join(f", {name}={value}" for name, value in plan["changes"].items())
    return f"every method has {plan['repetitions']} repetitions, each with {plan['trials']} trials{changes}"


def findings(book: Results, words: Sequence[str]) -> str:
    """The findings of the first page, as points."""
    _none(words, "findings")
    return _points(pages.findings(book))


def claims(book: Results, words: Sequence[str]) -> str:
    """A table of claims, with verdicts and effects."""
    _none(words, "claims")
    return pages.claims_table(book).markdown() if book["claims"] else ""


def leaderboards(book: Results, words: Sequence[str]) -> str:
    """A heading, the main points and a table for each chapter."""
    data = {(each["set"], each["split"], each["model"]): each for each in book["data"]}
    parts = []
    for key in chosen(book, words):
        rows = board(book, key)
        told = _points(pages.told_of_set(data[key], rows, book["plan"]))
        table = Table((*pages.QUALITY, Column("seconds", "{seconds:.1f}")), rows, f"Test {book['plan']['metric']}:")
        parts.append(f"### {', '.join(key)}\n\n{told}\n\n{table.markdown()}")
    return "\n".join(parts)


def method(book: Results, words: Sequence[str]) -> str:
    """A paragraph about a method; empty if no chapter of the book has it yet.

    The place is that by the mean, among the methods of a chapter; a repeated method has none.
    """
    name, *more = words or [""]
    known = {*book["plan"]["methods"], *read_plan().methods}
    if name not in known:
        raise UserError(f"no method called {name!r} in the book or the plan{did_you_mean(name, known)}")
    told = []
    for key in chosen(book, more):
        for place, row in enumerate(rows := _ranked(book, key), 1):
            if row["method"] == name:
                form = "{mean:.4f}[[, {difference:+.4f}]][[ [{d_low:+.4f}, {d_high:+.4f}]]]"
                told.append(f"{', '.join(key)}: {place} of {len(rows)}, {shown(form, row)}")
    plan = book["plan"]
    versus = "" if name == plan["reference"] else f", difference to `{plan['reference']}`"
    return _wrapped(f"**In the book** (place, {plan['metric']}{versus}): {'; '.join(told)}.") if told else ""


def made(book: Results, words: Sequence[str]) -> str:
    """The facts of the first page, the hardware and the command."""
    _none(words, "made")
    facts = pages.book_facts(book) | dict(book["environment"])
    command = f"\n\n```\n{pages.commands(book)}\n```" if book["command"] else ""
    return _points(f"{name}: {value}" for name, value in facts.items()) + command


EXCERPTS: dict[str, Callable[[Results, Sequence[str]], str]] = {
    "front": front,
    "findings": findings,
    "claims": claims,
    "leaderboards": leaderboards,
    "method": method,
    "made": made,
}


def _none(words: Sequence[str], name: str) -> None:
    if words:
        raise UserError(f"the excerpt {name!r} takes no words, not {words[0]!r}")


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _points(lines: Iterable[str]) -> str:
    return "\n".join(_wrapped(f"- {line}", "  ") for line in lines)


def main(words: Sequence[str] | None = None) -> int:
    """Fill the files that the command names; 2 and one line for bad input."""
    parser = argparse.ArgumentParser("python -m sparring.experiments.book.excerpts", description=fill_files.__doc__)
    parser.add_argument("book", type=Path, metavar="BOOK.JSON")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE.md")
    parser.add_argument("--ship", type=Path, metavar="FOLDER", help=(ship.__doc__ or "").splitlines()[0])
    args = parser.parse_intermixed_args(words)
    try:
        if args.ship:
            ship(args.book.parent, args.ship)
        book = files.read_json(args.ship / "book.json" if args.ship else args.book)
        changed = fill_files(book, args.files)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(changed)} of {len(args.files)} files changed" + "".join(f"\n{path}" for path in changed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
