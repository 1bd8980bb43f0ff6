"""sparring cluster: codes, a page and tables from files, and updates for the catalogue of the next day."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from sparring.cli import main
from sparring.data.interactions import Vocabulary
from sparring.experiments.report.clusters import project, purity, sizes_table, summary
from sparring.models.clusters import MSAC, Codes

QUICK = ["--k-primary", "6", "--k-secondary", "3", "--device", "cpu"]
QUICK += [word for one in ("dim=8", "warmup=60", "batch_size=64", "lr=0.002") for word in ("--set", one)]


def day(folder: Path, n: int, seed: int) -> list[str]:
    """Write the files of one day: pairs, items i000.. with title and kind, two arrays; the words of the command."""
    fixed, rng = np.random.default_rng(5), np.random.default_rng(seed)
    views = fixed.normal(size=(2, 6, 10))
    centres, kind = 2 * fixed.normal(size=(6, 6)), np.arange(200)[:n] % 6
    latent = (centres[np.arange(200) % 6] + 0.4 * fixed.normal(size=(200, 6)))[:n]
    folder.mkdir()
    for name, view in zip(("look", "words"), views, strict=True):
        np.save(folder / f"{name}.npy", (latent @ view + 0.1 * fixed.normal(size=(200, 10))[:n]).astype(np.float32))
    ids = np.array([f"i{i:03d}" for i in range(n)])
    pl.DataFrame({"user_id": rng.integers(0, 50, 4 * n), "item_id": np.tile(ids, 4)}).write_parquet(
        folder / "pairs.parquet"
    )
    table = pl.DataFrame({"item_id": ids, "title": [f"Title <{i}>" for i in ids], "kind": [f"kind {k}" for k in kind]})
    table.write_parquet(folder / "items.parquet")
    words = [
        "cluster",
        "--data",
        folder / "pairs.parquet",
        "--items",
        folder / "items.parquet",
        "--modality",
        f"look={folder / 'look.npy'}",
    ]
    return [*map(str, words), "--modality", f"words={folder / 'words.npy'}", "--category", "kind"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    assert (
        main(
            [
                *day(folder / "monday", 150, 0),
                *QUICK,
                "--steps",
                "60",
                "--out",
                str(folder / "codes.safetensors"),
                "--quiet",
            ]
        )
        == 0
    )
    return folder


def test_it_leaves_codes_a_page_and_tables(first: Path) -> None:
    """The codes have the ids of the items, the page is self-contained, and the sizes are those of the codes."""
    codes = Codes.load(first / "codes.safetensors")
    assert (len(codes), codes.k_primary, codes.k_secondary) == (150, 6, 3)
    assert codes.ids is not None
    assert codes.ids.ids.to_list() == [f"i{i:03d}" for i in range(150)]
    page = (first / "codes" / "report.html").read_text()
    assert "Title &lt;i00" in page
    assert "Title <i00" not in page
    assert page.count("<svg") == 4
    for name in ("clusters", "categories", "learning", "sizes"):
        assert (first / "codes" / "figures" / f"{name}.png").stat().st_size > 5000
        assert (first / "codes" / "figures" / f"{name}.svg").is_file()
    rows = list(csv.DictReader((first / "codes" / "sizes.csv").read_text().splitlines()))
    for row in rows:
        mine = [i for i in range(150) if int(codes.primary[i]) == int(row["cluster"])]
        assert int(row["items"]) == len(mine)
        kinds = np.bincount([i % 6 for i in mine], minlength=6)
        assert float(row["share"]) == pytest.approx(kinds.max() / len(mine))
        assert kinds[int(row["label"].split()[1])] == kinds.max()
    told = json.loads((first / "codes" / "summary.json").read_text())
    assert told["purity"] > 0.9 > 0.5 > told["purity_by_chance"]
    assert told["smallest"] >= 5
    assert told["history"][-1]["phase"] == "learning"


def test_the_next_day_keeps_codes_and_numbers(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--update --steps 0 assigns new items and keeps old codes; with steps it learns and keeps the cluster numbers."""
    before = Codes.load(first / "codes.safetensors")
    words = [*day(first / "tuesday", 190, 1), "--device", "cpu", "--update", str(first / "codes.safetensors")]
    assert main([*words, "--steps", "0", "--out", str(first / "next.safetensors")]) == 0
    said = capsys.readouterr().out
    assert "40 of 190 items are new." in said
    assert "After the update 0.0% of the known items are in another cluster" in said
    kept = Codes.load(first / "next.safetensors")
    assert torch.equal(kept.cell_of[:150], before.cell_of)
    kind = [np.bincount([i % 6 for i in range(150) if int(before.primary[i]) == p]).argmax() for p in range(6)]
    assert np.mean([kind[int(kept.primary[i])] == i % 6 for i in range(150, 190)]) > 0.9
    assert (
        main(
            [
                *words,
                "--steps",
                "30",
                "--out",
                str(first / "learned.safetensors"),
                "--report",
                str(first / "page"),
                "--quiet",
            ]
        )
        == 0
    )
    after = Codes.load(first / "learned.safetensors")
    assert float((after.primary[:150] == before.primary).double().mean()) > 0.9
    assert len(MSAC.load(first / "learned.safetensors").history) > len(MSAC.load(first / "codes.safetensors").history)
    drift = json.loads((first / "page" / "summary.json").read_text())["drift"]
    assert (drift["items"], drift["new"]) == (190, 40)


def test_a_rebuilt_modality_needs_a_refit(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rotated vectors would change many codes, so the command suggests --refit, which prevents that."""
    words = day(first / "turned", 150, 2)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(10, 10)))[0].astype(np.float32)
    np.save(first / "turned" / "words.npy", np.load(first / "turned" / "words.npy") @ turn)
    words = [*words, "--update", str(first / "codes.safetensors"), "--steps", "0", "--device", "cpu"]
    drifts = []
    for extra in ([], ["--refit", "words"]):
        assert main([*words, *extra, "--out", str(first / "again.safetensors")]) == 0
        drifts.append(json.loads((first / "again" / "summary.json").read_text())["drift"])
        assert ("--refit NAME" in capsys.readouterr().out) == (not extra)
    assert drifts[0]["changed_cell"] > 0.3 > 0.15 > drifts[1]["changed_cell"]
    assert drifts[1]["changed_primary"] < 0.05


@pytest.mark.parametrize(
    ("words", "keyword"),
    [
        (["--out", "codes.bin"], "codes.bin"),
        (["--k-primary", "100"], "k_primary 100"),
        (["--set", "dims=3"], "did you mean 'dim'?"),
        (["--set", "lr=fast"], "'fast'"),
        (["--category", "colour"], "'colour'"),
        (["--refit", "look"], "--refit"),
        (["--update", "none.safetensors"], "none.safetensors"),
        (["--preset", "robust", "--update", "none.safetensors"], "--preset"),
    ],
)
def test_mistakes_are_one_line(first: Path, words: list[str], keyword: str, refused: Callable[..., str]) -> None:
    """A wrong option is refused in one line that names it."""
    given = [
        "cluster",
        "--data",
        str(first / "monday" / "pairs.parquet"),
        "--items",
        str(first / "monday" / "items.parquet"),
    ]
    given += ["--modality", f"look={first / 'monday' / 'look.npy'}", "--quiet", "--device", "cpu"]
    out = [] if "--out" in words else ["--out", str(first / "x.safetensors")]
    refused([*given, *out, *words], keyword)


def test_the_report_is_never_written_among_other_files(first: Path, refused: Callable[..., str]) -> None:
    """Codes named like a folder of data are refused, and nothing is written to the folder."""
    before = sorted((first / "monday").iterdir())
    words = [
        "cluster",
        "--data",
        str(first / "monday" / "pairs.parquet"),
        "--modality",
        f"look={first / 'monday' / 'look.npy'}",
    ]
    refused([*words, "--out", first / "monday.safetensors", "--device", "cpu"], str(first / "monday"), "--report")
    assert sorted((first / "monday").iterdir()) == before


def test_purity_is_a_count() -> None:
    """Purity equals a loop over clusters, without items that have no label."""
    rng = np.random.default_rng(0)
    labels = pl.Series("kind", [None if x == 3 else "abc"[x] for x in rng.integers(0, 4, 300)])
    codes = Codes(torch.from_numpy(rng.integers(0, 8, 300)), torch.zeros(300), torch.eye(8), 1, Vocabulary(range(300)))
    right = 0
    for p in range(8):
        mine = [labels[i] for i in codes.items(p).tolist() if labels[i] is not None]
        right += max(mine.count(name) for name in "abc")
    assert purity(codes.primary.numpy(), labels) == pytest.approx(right / (300 - labels.null_count()))
    assert purity(codes.primary.numpy(), pl.Series([None] * 300)) is None
    facts = summary(Codes.from_labels(labels), labels)
    assert facts["purity"] == 1.0
    assert facts["used"] == facts["k_primary"] == 4
    assert [row["items"] for row in sizes_table(codes).rows] == codes.sizes.tolist()


def test_the_picture_shows_the_greatest_variance() -> None:
    """The two axes are the leading eigenvectors of the covariance, and codewords are projected on the same axes."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(200, 5)) * [3, 0.1, 2, 0.1, 0.1] + 7
    points, words = project(torch.from_numpy(vectors), torch.from_numpy(vectors[:4]).float())
    np.testing.assert_allclose(points[:4], words, atol=1e-5)
    values = np.sort(np.linalg.eigvalsh(np.cov(vectors.T)))[::-1]
    np.testing.assert_allclose(points.var(0, ddof=1), values[:2], rtol=1e-6)
    assert project(torch.randn(9, 1), torch.randn(2, 1))[0].shape == (9, 2)
