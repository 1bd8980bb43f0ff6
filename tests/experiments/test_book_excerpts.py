"""Excerpts of a book in Markdown pages, from a made-up book; and the pages of the repository from its own book."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sparring.core.errors import UserError
from sparring.experiments.book.excerpts import ROWS, fill, main
from sparring.experiments.book.plan import read_plan
from sparring.experiments.book.results import check_alike, plan_record
from sparring.experiments.book.running import Book, stale

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "docs" / "book" / "book.json"
needs_book = pytest.mark.skipif(
    not SHIPPED.is_file(), reason="the repository has no book yet: docs/guide/book.md says how to ship one"
)
CHAPTERS = [("shop", "random", "tables"), ("shop", "temporal", "tables"), ("films", "random", "tables")]
MEANS = {  # by method, one for each chapter
    "popularity": (0.10, 0.12, 0.20),
    "ease": (0.33, 0.11, 0.28),
    "uns": (0.30, 0.10, 0.25),
    "xir": (0.27, 0.13, 0.30),
    "uns again": (0.31, 0.10, 0.25),
}


def made_up(means: dict[str, tuple[float, ...]] | None = None) -> dict[str, Any]:
    """A book of three chapters; a method is better or worse if it differs from uns by more than 10 %."""
    means = means or MEANS
    rows = []
    for place, (where, split, model) in enumerate(CHAPTERS):
        for name, values in means.items():
            base, difference = means["uns"][place], values[place] - means["uns"][place]
            verdict = "no difference shown"
            if abs(difference) > 0.1 * base:
                verdict = "better" if difference > 0 else "worse"
            row = {"set": where, "split": split, "model": model, "method": name, "mean": values[place], "std": 0.001}
            row |= {"difference": difference, "d_low": difference - 0.01, "d_high": difference + 0.01, "p_holm": 0.5}
            row |= {"relative": difference / base, "verdict": verdict, "repetitions": 5, "seconds": 2.0}
            row |= {"solved": name in ("popularity", "ease"), "best_is_last": False, "catalogue_share": None}
            if name == "uns":
                row |= dict.fromkeys(("difference", "d_low", "d_high", "relative", "p_holm"))
                row["verdict"] = "reference"
            rows += [{**row, "metric": "ndcg@20"}, {**row, "metric": "recall@20", "mean": -1.0}]
    methods = {name: {"repeats": "uns" if name == "uns again" else ""} for name in means}
    claims = {"xir": {"statement": "XIR over UNS"}, "ease": {"statement": "EASE over UNS"}}
    effects: list[dict[str, Any]] = [
        {
            "name": "xir",
            "verdict": "not shown",
            "effect": 0.0667,
            "low": -0.02,
            "high": 0.15,
            "sets": ["shop", "films"],
        },
        {"name": "ease", "verdict": "not tested", "effect": None, "low": None, "high": None, "sets": []},
    ]
    return {
        "commits": ["0123456789ab"],
        "environment": {"hardware": "2 CPU cores"},
        "command": "sparring book --data-root data --out book",
        "plan": {
            "metric": "ndcg@20",
            "repetitions": 5,
            "trials": 20,
            "rungs": [[8, 7], [24, 2]],
            "reference": "uns",
            "changes": {"dim": "32"},
            "sets": {"shop": {}, "films": {}},
            "methods": methods,
            "claims": claims,
        },
        "data": [{"set": a, "split": b, "model": c, "usable": True} for a, b, c in CHAPTERS],
        "leaderboards": rows,
        "ranks": [],
        "claims": [{**each, "holds": []} for each in effects],
        "null": {"pairs": 0},
        "left": [],
        "runs": [],
    }


def excerpt(words: str, book: dict[str, Any] | None = None) -> str:
    """The lines of one block, without its marks."""
    text = fill(f"# Page\n\n<!-- book: {words} -->\n<!-- /book -->\n\nEnd.\n", book or made_up())
    found = re.fullmatch(rf"# Page\n\n<!-- book: {words} -->\n(.*)<!-- /book -->\n\nEnd\.\n", text, re.DOTALL)
    assert found
    return found[1]


def table(text: str) -> list[list[str]]:
    """The cells of the first table of a text, headings first, without the rule."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def mean_relative(name: str) -> float:
    """The relative difference to uns: over the chapters of shop, then over both sets."""
    first, second, third = (mine / base - 1 for mine, base in zip(MEANS[name], MEANS["uns"], strict=True))
    return ((first + second) / 2 + third) / 2


def mark(name: str, place: int) -> str:
    relative = MEANS[name][place] / MEANS["uns"][place] - 1
    return f"{MEANS[name][place]:.4f}" + (" ↑" if relative > 0.1 else " ↓" if relative < -0.1 else "")


# Excerpts


def test_front_orders_methods_by_their_difference() -> None:
    """A row for each method, by its mean relative difference over sets, with marks where it is shown to differ."""
    text = excerpt("front")
    head, *rows = table(text)
    order = sorted((name for name in MEANS if name != "uns again"), key=lambda name: -mean_relative(name))
    assert head == ["method", "shop random", "shop temporal", "films random", "against `uns`"]
    assert rows == [
        [
            f"`{name}`",
            *(mark(name, place) for place in range(3)),
            "" if name == "uns" else f"{mean_relative(name):+.1%}",
        ]
        for name in order
    ]
    flat = " ".join(text.split())
    for words in (
        "Test ndcg@20, model tables;",
        "5 repetitions, each with 20 trials, dim=32",
        "0123456789ab",
        "over repetitions and queries",
    ):
        assert words in flat
    assert max(map(len, text.splitlines())) <= 120


def test_words_choose_chapters() -> None:
    """Words name sets, splits and models; columns have the parts of a chapter's name that differ."""
    assert table(excerpt("front random"))[0][1:3] == ["shop", "films"]
    assert table(excerpt("front shop"))[0][1:3] == ["random", "temporal"]
    assert table(excerpt("front films tables"))[0][1:-1] == ["ndcg@20"]
    assert "set films, split random, model tables" in " ".join(excerpt("front films tables").split())
    assert re.findall("^### (.*)", excerpt("leaderboards temporal"), re.MULTILINE) == ["shop, temporal, tables"]


def test_front_is_short() -> None:
    """The baselines and the reference stay, however bad; the best others fill the ten rows, and the text says so."""
    many = MEANS | {f"m{i}": (0.4 - i / 100, 0.2, 0.3) for i in range(20)}
    text = excerpt("front", made_up(many))
    names = [row[0].strip("`") for row in table(text)[1:]]
    assert len(names) == ROWS
    assert set(names) == {"popularity", "ease", "uns", *(f"m{i}" for i in range(ROWS - 3))}
    assert f"{ROWS} of {len(many) - 1} methods" in " ".join(text.split())


def test_front_leaves_out_chapters_and_methods() -> None:
    """A chapter with nothing above popularity has no column; rows and columns are chosen for the most figures."""
    book = made_up()
    book["data"][1]["usable"] = False
    assert table(excerpt("front", book))[0][1:3] == ["shop", "films"]
    kept = [row for row in book["leaderboards"] if (row["method"], row["set"]) != ("xir", "films")]
    assert "`xir`" not in excerpt("front", {**book, "leaderboards": kept})
    kept = [row for row in kept if row["method"] != "uns"]
    assert excerpt("front", {**book, "leaderboards": kept}) == ""
    # 3 chapters of 2 methods are fewer figures than 2 chapters of all 4
    kept = [row for row in made_up()["leaderboards"] if row["set"] != "films" or row["method"] in ("uns", "ease")]
    text = excerpt("front", made_up() | {"leaderboards": kept})
    assert table(text)[0][1:3] == ["random", "temporal"]
    assert len(table(text)) == 1 + len(MEANS) - 1
    assert "Left out, with fewer methods: films random tables." in " ".join(text.split())


def test_a_method_has_its_place_in_each_chapter() -> None:
    """Place by mean among the methods that are no repetition, the mean, and the difference with its interval."""
    told = []
    for place, chapter in enumerate(CHAPTERS):
        mine = MEANS["xir"][place]
        ahead = sum(values[place] > mine for name, values in MEANS.items() if name != "uns again")
        d = mine - MEANS["uns"][place]
        interval = f"[{d - 0.01:+.4f}, {d + 0.01:+.4f}]"
        told.append(f"{', '.join(chapter)}: {ahead + 1} of {len(MEANS) - 1}, {mine:.4f}, {d:+.4f} {interval}")
    expected = f"**In the book** (place, ndcg@20, difference to `uns`): {'; '.join(told)}."
    assert excerpt("method xir").split() == expected.split()
    reference = "**In the book** (place, ndcg@20): films, random, tables: 3 of 4, 0.2500."
    assert excerpt("method uns films").strip() == reference
    assert excerpt("method bpr") == ""  # a method of the plan that this book does not have


def test_leaderboards_claims_and_facts() -> None:
    """A board has every method by its mean; a claim its verdict and interval; the facts name commit and command."""
    boards = excerpt("leaderboards").split("### ")[1:]
    for place, (board, chapter) in enumerate(zip(boards, CHAPTERS, strict=True)):
        assert board.startswith(", ".join(chapter) + "\n")
        order = sorted(MEANS, key=lambda name: -MEANS[name][place])
        assert [row[0] for row in table(board)[1:]] == order
        assert [row[2] for row in table(board)[1:]] == [f"{MEANS[name][place]:.4f} ± 0.0010" for name in order]
    assert [row[:4] for row in table(excerpt("claims"))[1:]] == [
        ["XIR over UNS", "not shown", f"{0.0667:+.1%} [{-0.02:+.1%}, {0.15:+.1%}]", "2"],
        ["EASE over UNS", "not tested", "", "0"],
    ]
    assert "- commit: 0123456789ab\n" in excerpt("made")
    assert "```\nsparring book \\\n    --data-root data \\\n    --out book\n```" in excerpt("made")
    assert excerpt("findings").startswith("\n- ")


def test_filling_twice_changes_nothing() -> None:
    """Blocks are made anew whatever they hold; the text around them stays; a second time changes nothing."""
    empty = "\n".join(f"Before {n}.\n\n<!-- book: {n} -->\n<!-- /book -->\n" for n in ("front", "claims", "method xir"))
    full = fill(empty, made_up())
    assert full != empty
    assert fill(full, made_up()) == full
    assert fill(empty.replace("-->\n<!-- /", "-->\nold\n\ntext\n<!-- /"), made_up()) == full
    assert fill("A `<!-- book: other -->` within a line.\n", made_up()) == "A `<!-- book: other -->` within a line.\n"
    assert re.sub(r"(<!-- book: [^\n]*\n)\n.*?\n\n(<!-- /)", r"\1\2", full, flags=re.DOTALL) == empty


@pytest.mark.parametrize(
    ("text", "mention"),
    [
        ("<!-- book: frnt -->\n<!-- /book -->\n", "did you mean 'front'"),
        ("<!-- book: method xri -->\n<!-- /book -->\n", "did you mean 'xir'"),
        ("<!-- book: method -->\n<!-- /book -->\n", "method"),
        ("<!-- book: front monthly -->\n<!-- /book -->\n", "'monthly'"),
        ("<!-- book: claims random -->\n<!-- /book -->\n", "'random'"),
        ("<!-- book: front -->\n\n<!-- book: claims -->\n<!-- /book -->\n", "not closed"),
        ("<!-- book: front -->\n", "not closed"),
        ("<!-- /book -->\n", "not closed"),
    ],
)
def test_a_bad_mark_is_one_line(text: str, mention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the file and the word, the code is 2, and no file is touched."""
    with pytest.raises(UserError, match=re.escape(mention)):
        fill(text, made_up())
    good = "<!-- book: front -->\n<!-- /book -->\n"
    (tmp_path / "book.json").write_text(json.dumps(made_up()))
    (tmp_path / "good.md").write_text(good)
    (tmp_path / "bad.md").write_text(text)
    assert main([str(tmp_path / name) for name in ("book.json", "good.md", "bad.md")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "bad.md" in error
    assert ((tmp_path / "good.md").read_text(), (tmp_path / "bad.md").read_text()) == (good, text)


def test_the_command_writes_files_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command fills every file that it names, and says which it changed."""
    (tmp_path / "book.json").write_text(json.dumps(made_up()))
    pages = [tmp_path / "a.md", tmp_path / "b.md"]
    pages[0].write_text("<!-- book: claims -->\n<!-- /book -->\n")
    pages[1].write_text("No block.\n")
    for changed in ([pages[0]], []):
        assert main([str(tmp_path / "book.json"), *map(str, pages)]) == 0
        assert capsys.readouterr().out.splitlines() == [f"{len(changed)} of 2 files changed", *map(str, changed)]
    assert pages[0].read_text() == fill(pages[0].read_text(), made_up())
    assert "XIR over UNS" in pages[0].read_text()
    assert pages[1].read_text() == "No block.\n"


# The book of the repository


def marked() -> list[Path]:
    """The pages of the repository that have a block of the book."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return [path for path in pages if re.search("^<!-- book: ", path.read_text(), re.MULTILINE)]


def test_every_method_of_the_plan_has_a_block() -> None:
    """Each entry of docs/methods whose method is in the plan has the block of that method, and no other."""
    blocks: list[str] = []
    for path in (ROOT / "docs" / "methods").glob("*.md"):
        for entry in re.finditer(r"^## (\w+)\n.*?(?=^## |\Z)", path.read_text(), re.DOTALL | re.MULTILINE):
            found = re.findall(r"^<!-- book: method (\w+)", entry[0], re.MULTILINE)
            assert found in ([], [entry[1]])
            blocks += found
    plan = read_plan()
    entries = {name for name, each in plan.methods.items() if each.recipe == name and not each.repeats}
    assert sorted(blocks) == sorted(entries)


@needs_book
def test_pages_have_the_figures_of_the_book() -> None:
    """Filling the blocks of every page from docs/book/book.json changes nothing."""
    book = json.loads(SHIPPED.read_text())
    pages = marked()
    assert ROOT / "README.md" in pages
    for path in pages:
        assert fill(path.read_text(), book) == path.read_text(), f"{path.name}: fill it as docs/guide/book.md says"


@needs_book
def test_the_book_has_the_defaults_of_today() -> None:
    """The book in docs/book was made with the defaults that recipes have now, and a book of today can join it."""
    made = json.loads(SHIPPED.read_text())
    book = Book(Path("book"), read_plan(), changes=made["plan"]["changes"])
    assert stale(made["defaults"], book.defaults) == []
    check_alike(plan_record(book), book.defaults, made, "docs/book")


@needs_book
def test_the_shipped_pages_stand_alone() -> None:
    """Every link of a shipped page leads to a shipped file; no file but pages and figures is shipped."""
    for path in SHIPPED.parent.iterdir():
        assert path.suffix == ".html" or path.name in ("book.json", "runs.csv")
        for target in re.findall(r'(?:href|src)="([^"#]+)"', path.read_text()) if path.suffix == ".html" else ():
            assert (SHIPPED.parent / target).is_file(), target
