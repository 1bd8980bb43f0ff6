"""The page of a diagnosis is self-contained, starts with the advice, and shows the values of the tables."""

from __future__ import annotations

import csv
import dataclasses
import html
import re
import shlex
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from experiments.test_report import LOADS, NASTY, Seen
from sparring.cli import main
from sparring.data.interactions import Split
from sparring.experiments.diagnose import advice
from sparring.experiments.diagnose.measures import Diagnosis, DrawSummary, Gradient
from sparring.experiments.report import diagnosis as diagnosis_page
from sparring.experiments.report.diagnosis import SampleSize

FIGURES = {"gradient", "sample-size", "popularity", "hardness"}
META = {
    "recipe": NASTY,
    "source": {"data": f"/x/{NASTY.replace('/', '')}"},
    "setup": {"batch_size": 64, "seed": 3},
    "versions": {"torch": "0"},
}


def diagnosis(name: str, noise: float = 0.5, synthetic: float = 0.0) -> Diagnosis:
    profile = (
        {"synthetic": synthetic}
        if synthetic == 1
        else {"popularity": 0.4, "head": 0.5, "mid": 0.3, "tail": 0.2, "synthetic": synthetic}
    )
    drawn = DrawSummary(100.0, 12.5, 0.01, 0.02, 0.03, None, (0.0,) * 8 + (0.25, 0.75))
    return Diagnosis(name, Gradient(0.9, 0.01, 0.5, 0.95, 0.125, noise, 1.0), drawn, profile)


def texts(path: Path) -> list[str]:
    return ["".join(text.itertext()) for text in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the command writes for a run of two epochs in a world with known truth."""
    folder = tmp_path_factory.mktemp("diagnosis")
    words = ["train", "--data", "world:80x50:1", "--recipe", "ssl_pop", "--epochs", "2", "--quiet", "--device", "cpu"]
    assert (
        main([*words, "--out", str(folder / "run"), "--set", "batch_size=32", "--set", "dim=4", "--set", "dropout=0.1"])
        == 0
    )
    words = shlex.split(f"diagnose {folder / 'run'} --samplers own,uns,sce,mixgcf --queries 20 --draws 3 --device cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sparring", *words, "--out", str(folder / "out")])
        assert main([*words, "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_the_advice_comes_first_and_the_tables_equal_the_files(out: Path) -> None:
    """The page has the recommendation first, then each table cell by cell, then the command, seeds and versions."""
    page = (out / "report.html").read_text()
    first, rest = page.split("<section", 2)[1:]
    lines = list(csv.DictReader((out / "advice.csv").open()))
    assert lines[0]["kind"] == "recommendation"
    text = html.unescape(first)
    assert text.index(lines[0]["text"][1:]) == min(text.index(line["text"][1:]) for line in lines)
    tables = Seen(page).tables
    assert [len(table) for table in tables] == [5, 5, 5]
    for table, name in zip(tables, ("gradient", "negatives", "hardness"), strict=True):
        shown = [line.strip("| \n") for line in (out / f"{name}.md").read_text().splitlines() if line.startswith("|")]
        cells = [re.split(r"\s*\|\s*", line) for line in [shown[0], *shown[2:]]]
        assert [[cell.strip() for cell in row] for row in table] == cells
    for expected in (
        "sparring diagnose",
        "--samplers own,uns,sce,mixgcf",
        "0 of the measurement, 0 of the run",
        "dropout=0.1",
        "CPU cores",
    ):
        assert expected in html.unescape(rest)


def test_the_figures_show_the_tables(out: Path) -> None:
    """Figures label bias, noise and sample sizes as the tables do, and exist as SVG and PNG."""
    folder = out / "figures"
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{suffix}" for name in FIGURES for suffix in ("svg", "png")
    }
    for row in csv.DictReader((out / "gradient.csv").open()):
        drawn = texts(folder / "gradient.svg")
        assert {row["sampler"], f"{float(row['bias']):.3f}", f"{float(row['noise']):.3f}", "bias", "noise"} <= set(
            drawn
        )
        assert f"{float(row['ess']):,.1f} of {float(row['candidates']):,.0f}" in texts(folder / "sample-size.svg")
        assert row["sampler"] in texts(folder / "hardness.svg")
    assert {"all items", "own", "uns", "sce", "mixgcf", "head", "tail", "synthetic"} <= set(
        texts(folder / "popularity.svg")
    )
    for name in FIGURES:
        image = matplotlib.image.imread(folder / f"{name}.png")
        assert image.shape[1] > 600
        assert image[..., :3].std() > 0.01


def test_bars_have_the_height_of_the_shares(parts: Split) -> None:
    """Histograms of hardness and bars of bias and noise are to scale; the catalogue's strata equal a count."""
    found = [diagnosis("own"), diagnosis("a", noise=2.0)]
    panels = diagnosis_page.hardness(found).axes
    assert [round(bar.get_height(), 6) for bar in panels[1].patches] == [0.0] * 8 + [0.25, 0.75]
    bias, noise = diagnosis_page.errors(found).axes
    assert [bar.get_width() for bar in bias.patches] == [0.125, 0.125]
    assert [bar.get_width() for bar in noise.patches] == [0.5, 2.0]
    assert len(noise.lines) == 1
    assert len(diagnosis_page.errors(found[:1]).axes[1].lines) == 0
    order = sorted(range(parts.train.n_items), key=lambda j: (-parts.train.counts()[j], j))
    before, head = 0, 0
    for j in order:
        head += 3 * before < len(parts.train)
        before += int(parts.train.counts()[j])
    assert diagnosis_page.catalogue(parts)["head"] == pytest.approx(head / parts.train.n_items)
    assert np.sum([diagnosis_page.catalogue(parts)[name] for name in ("head", "mid", "tail")]) == pytest.approx(1)  # type: ignore[arg-type]


def test_a_scale_of_less_than_a_decade_has_plain_numbers() -> None:
    """A logarithmic axis of less than a decade has labels that are plain numbers."""
    one = diagnosis("own")
    alike = [
        dataclasses.replace(one, draws=dataclasses.replace(one.draws, ess=ess, candidates=256.0))
        for ess in (40.0, 60.0)
    ]
    figure = diagnosis_page.sizes(alike)
    figure.canvas.draw()
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels(which="both") if label.get_text()]
    assert {float(text.replace(",", "")) for text in shown} >= {50.0, 100.0, 200.0}


def test_any_names_and_any_figures_make_a_page(parts: Split, tmp_path: Path) -> None:
    """Names are escaped; a single sampler, one of synthetic vectors and one without draws each have a page."""
    nothing = Diagnosis(
        "none", Gradient(0, 0, 0, 0, 0, 0, 0), DrawSummary(0, 0, 0, 0, 0, None, (0.0,) * 10), {"synthetic": 0.0}
    )
    for number, found in enumerate(
        ([diagnosis(NASTY)], [diagnosis("own"), diagnosis("made up", synthetic=1.0), nothing], [nothing])
    ):
        path = diagnosis_page.write(
            tmp_path / str(number), found, advice.advise(found), parts, META, SampleSize(5, 2, 9), "a machine"
        )
        page = path.read_text()
        seen = Seen(page)
        assert seen.open == []
        assert not any(name == "onload" for _, name, _ in seen.attributes)
        assert all(value.startswith("#") for _, name, value in seen.attributes if name in LOADS)
        assert seen.tables[0][1][0] == found[0].sampler
        assert "a machine" in page
        assert "trained with" in page
        ids = re.findall(r'\bid="([^"]*)"', page)
        assert len(ids) == len(set(ids))


def test_a_browser_opens_the_page(out: Path, tmp_path: Path, browse: Callable[[Path], tuple[str, str]]) -> None:
    """Chromium shows all tables and figures without console messages, and would report a missing resource."""
    page = out / "report.html"
    dom, said = browse(page)
    assert said == ""
    assert Seen(dom).tables == Seen(page.read_text()).tables
    assert dom.count("<svg") == len(FIGURES)
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("<main>", '<main><img src="missing.png">'))
    assert "missing.png" in browse(broken)[1]
