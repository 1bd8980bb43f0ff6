"""The report: a self-contained page with the content of the folders, safe against any name, sortable in a browser."""

from __future__ import annotations

import html
import json
import re
import shlex
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import polars as pl
import pytest

from sparring.cli import main
from sparring.core.figure_style import INK
from sparring.core.workers import Failure
from sparring.data.interactions import Split
from sparring.data.synthetic_world import SyntheticWorld
from sparring.experiments import comparison_tables
from sparring.experiments.comparison import ComparedData, Comparison, compare
from sparring.experiments.report import comparison_page, figures
from sparring.experiments.report.html import Code, Facts, Figures, Page, Paragraph, Points, Section, Sheet
from sparring.experiments.report.tables import Column, Table
from sparring.recipes.setup import Setup
from support.papers import run_here, run_json

NASTY = '</script><b onload="x">&$x$'
NAME = "<b>&$x$"  # of a data set, also used for its folder
LOADS = {"src", "srcset", "href", "xlink:href", "data", "action", "poster", "background", "formaction"}
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Seen(HTMLParser):
    """Attributes and tables (rows of cells) of a page; fails on a closing tag that was not open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.cell: list[str] | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.cell = []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another"
        if tag in ("td", "th") and self.cell is not None:
            self.tables[-1][-1].append("".join(self.cell))
            self.cell = None

    def handle_data(self, data: str) -> None:
        if self.cell is not None:
            self.cell.append(data)


def one_page(words: str) -> Page:
    """A page of every kind of block, with the same words everywhere."""
    columns = (Column(words, "{name}", text=True), Column("n", "{n:.1f}[[ ± {std:.1f}]]"))
    rows = [
        {"name": words, "n": 2.04, "std": None},
        {"name": "b", "n": None, "std": 1.0},
        {"name": "c", "n": 10.0, "std": 0.5},
    ]
    rows += [{"name": "d", "n": 2.01, "std": 1.0}, {"name": "e", "n": -3.0, "std": None}]
    sheet = Sheet(Table(columns, rows, words), words, {"c": "good", words: "bad"})
    drawn = figures.RenderedFigure(words, words, '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"></svg>')
    parts = (
        Paragraph(words),
        Points([words]),
        Code(words),
        Code(words, words),
        Facts({words: words}),
        sheet,
        Figures([drawn]),
    )
    return Page(words, words, [Section(words, parts), Section(words, ())])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, parts: Split, small_world: SyntheticWorld) -> Comparison:
    """A small comparison whose data set has special characters in its name, and its report."""
    shared: dict[str, object] = {"dim": 4, "batch_size": 128, "n": 16, "epochs": 3}
    data = (ComparedData(NAME, parts, world=small_world),)
    plan = Comparison(
        tmp_path_factory.mktemp("report") / "out",
        data,
        ("uns", "pns", "ssl_pop"),
        2,
        "",
        ("recall@5", "ndcg@10"),
        Setup(),
        shared,
    )
    with pytest.MonkeyPatch.context() as patch:
        run_here(patch)
        assert compare(plan, 2) == []
    told = [Failure(NAME, "psl", "seed 1", NASTY)]
    page = comparison_page.write(
        plan,
        comparison_tables.write(plan, told),
        told,
        shlex.join(["sparring", "compare", "--data", NASTY, "--seeds", "2"]),
    )
    assert page == plan.out / "report.html"
    return plan


def test_no_words_break_the_page() -> None:
    """Titles, cells, captions and commands are escaped: every tag closes, and no tag comes from the words."""
    plain, nasty = Seen(one_page("plain").html()), Seen(one_page(NASTY).html())
    assert plain.open == nasty.open == []
    assert len(plain.attributes) == len(nasty.attributes)
    assert not any(name == "onload" for _, name, _ in nasty.attributes)
    assert nasty.tables[0][0] == [NASTY, "n"]
    assert [row[0] for row in nasty.tables[0][1:]] == [NASTY, "b", "c", "d", "e"]
    assert one_page(NASTY).html().count("</script>") == 1


def test_ids_are_unique_and_links_resolve(made: Comparison) -> None:
    """Sections of one title and figures have distinct ids; every inner link and clip path finds its id."""
    for page in (one_page("same").html(), (made.out / "report.html").read_text()):
        ids = re.findall(r'\bid="([^"]*)"', page)
        assert len(ids) == len(set(ids)) > 0
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


def test_the_page_loads_nothing(made: Comparison) -> None:
    """Nothing refers outside the page, and a policy forbids it; the page has both colour schemes and a print style."""
    page = (made.out / "report.html").read_text()
    seen = Seen(page)
    assert seen.open == []
    assert all(value.startswith("#") for _, name, value in seen.attributes if name in LOADS)
    assert not re.search(r"@import|url\((?!#)", page)
    assert not {tag for tag, _, _ in seen.attributes} & {
        "img",
        "link",
        "iframe",
        "object",
        "embed",
        "image",
        "foreignobject",
    }
    assert (
        "meta",
        "content",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
    ) in seen.attributes
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert 'name="viewport"' in page


def test_the_page_equals_the_folders(made: Comparison) -> None:
    """Tables and bars have the means and deviations of the stored values; the page has command, versions and seeds."""
    page = (made.out / "report.html").read_text()
    tables = Seen(page).tables
    svg = ET.parse(made.out / "figures" / f"{NAME}-quality.svg").getroot()
    drawn = ["".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    for table, metric in zip(tables[:2], made.metrics, strict=True):
        rows = {row[0]: row for row in table[1:]}
        assert set(rows) == {"uns", "pns", "ssl_pop"}
        for recipe in rows:
            each = [
                pl.read_parquet(made.out / NAME / recipe / str(seed) / "per_query.parquet")[metric].to_numpy()
                for seed in (0, 1)
            ]
            means = np.array(each, dtype=float).mean(1)
            value = f"{means.mean():.4f} ± {means.std(ddof=1):.4f}"
            assert value in rows[recipe]
            assert value in drawn
    assert {"uns (baseline)", "pns", "ssl_pop", "recall@5", "ndcg@10"} <= set(drawn)
    text = html.unescape(page)
    meta = run_json(made.out / NAME / "uns" / "0")
    device = json.loads((made.out / NAME / "uns" / "0" / "measured.json").read_text())["device"]
    (command,) = [
        block
        for block in re.findall(r"<pre><code>(.*?)</code></pre>", page, flags=re.DOTALL)
        if "sparring compare" in block
    ]
    shell = ["sh", "-c", f"set -- {html.unescape(command)}\nprintf '%s\\n' \"$@\""]
    words = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words == ["sparring", "compare", "--data", NASTY, "--seeds", "2"]
    for expected in (meta["versions"]["torch"], device, "<dt>seeds</dt><dd>0, 1</dd>", "6 of 6 runs"):
        assert expected in text
    assert f"{NAME} psl seed 1: {NASTY}" in text


def test_figures_are_svg_and_png_in_the_colour_of_the_text(made: Comparison) -> None:
    """Each figure is a valid SVG and a non-blank PNG; in the page it takes the colour of the text."""
    folder = made.out / "figures"
    names = {f"{NAME}-{kind}" for kind in ("quality", "learning", "time", "negatives")}
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{suffix}" for name in names for suffix in ("svg", "png")
    }
    for name in names:
        assert ET.parse(folder / f"{name}.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
        image = matplotlib.image.imread(folder / f"{name}.png")
        assert image.shape[1] > 600
        assert image[..., :3].std() > 0.01
    page = (made.out / "report.html").read_text()
    assert page.count("<svg") == len(names)
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ET.fromstring(svg)
        assert "currentColor" in svg
        assert INK not in svg
        assert not re.search(r'id="[^"]*-patch_1"', svg)


def test_names_in_figures_are_plain_text(tmp_path: Path) -> None:
    """Dollar signs are no formulas and angle brackets no markup: the SVG has the name unchanged."""
    rows = [{"metric": "m<1>", "recipe": "a$x$<b>", "mean": 0.5, "std": None}]
    figures.save(figures.bars(rows, ["a$x$<b>"], "none"), tmp_path, "odd", "")
    texts = [
        "".join(text.itertext())
        for text in ET.parse(tmp_path / "odd.svg").getroot().iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"a$x$<b>", "m<1>", "0.5000"} <= set(texts)


def test_curves_are_means_over_the_epochs_of_all_seeds() -> None:
    """With one seed stopped early, the line covers the epochs of both; a recipe without the metric has no line."""
    long = [{"epoch": e, "loss": 1.0, "ndcg@10": 0.1 * e} for e in (1, 2, 3)]
    short = [{"epoch": 1, "ndcg@10": 0.3}, {"epoch": 2, "loss": 1.0, "ndcg@10": 0.5}]
    figure = figures.curves({"a": [long, short], "b": [[{"epoch": 1, "loss": 1.0}]]}, "ndcg@10", ("a", "b"), "b")
    (line,) = figure.axes[0].lines
    assert np.allclose(np.asarray(line.get_xydata()), [[1, 0.2], [2, 0.35]])


def test_a_comparison_without_runs_still_has_a_page(parts: Split, tmp_path: Path) -> None:
    """If every training failed, the page says so and lists the failures."""
    plan = Comparison(tmp_path / "out", (ComparedData("w", parts),), ("uns",), 1)
    failures = [Failure("w", "uns", "seed 0", "out of memory")]
    page = comparison_page.write(plan, comparison_tables.write(plan, failures), failures).read_text()
    assert "nothing to compare" in page
    assert "w uns seed 0: out of memory" in page
    assert Seen(page).open == []


def test_the_command_writes_the_page_and_prints_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sparring compare` on two sets without validation prints the path of a page with a section for each set."""
    run_here(monkeypatch)
    words = shlex.split("compare --data world:60x40 --data world:70x40 --recipes uns,pns --seeds 1 --setup default")
    words += shlex.split("--epochs 1 --metrics ndcg@10 --set dim=4 --set n=8 --valid 0 --device cpu --jobs 2")
    out = tmp_path / "out"
    assert main([*words, "--out", str(out)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert str(out / "report.html") in last
    page = (out / "report.html").read_text()
    for name in ("world-60x40", "world-70x40"):
        assert f"<h2>Quality on {name}</h2>" in page
        assert {path.stem for path in (out / "figures").glob(f"{name}-*.svg")} == {
            f"{name}-{kind}" for kind in ("quality", "time", "negatives")
        }


def test_a_browser_opens_the_page(made: Comparison, tmp_path: Path, browse: Callable[[Path], tuple[str, str]]) -> None:
    """Chromium shows all tables and figures without console messages, and would report a missing resource."""
    page = made.out / "report.html"
    dom, said = browse(page)
    assert said == ""
    assert Seen(dom).tables == Seen(page.read_text()).tables
    assert dom.count("<svg") == 4
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("<main>", '<main><img src="missing.png">'))
    assert "missing.png" in browse(broken)[1]


def test_headings_sort_by_full_precision_and_keep_empty_cells_last(
    tmp_path: Path, browse: Callable[[Path], tuple[str, str]]
) -> None:
    """Clicks sort numbers by full precision, largest first, then smallest first; words from A; empty cells last."""
    expected = {(1,): "cadeb", (1, 1): "edacb", (0,): "abcde", (1, 0, 0): "edcba"}
    for clicks, order in expected.items():
        page = tmp_path / f"{len(clicks)}{clicks[0]}.html"
        script = "".join(f'document.querySelectorAll("th button")[{at}].click();' for at in clicks)
        page.write_text(one_page("a").html().replace("</body>", f"<script>{script}</script></body>"))
        dom, said = browse(page)
        assert said == ""
        assert "".join(row[0] for row in Seen(dom).tables[0][1:]) == order
        (way,) = [value for _, name, value in Seen(dom).attributes if name == "aria-sort"]
        assert way == ("ascending" if clicks in ((1, 1), (0,)) else "descending")
