"""--catalogue all: towers over features list items that no interaction names; a table of ids never does."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from sparring.cli import main
from sparring.training.trained import load
from support.settings import quick_words


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 customers, 12 things that they bought, and a table that describes 4 more."""
    folder = tmp_path_factory.mktemp("shop")
    pairs = [(f"c{u:02}", 100 + i) for u in range(30) for i in range(12) if (u + i) % 3 == 0 or (u * i) % 7 == 1]
    pl.DataFrame(pairs, schema=["customer", "item_id"], orient="row").write_parquet(folder / "sales.parquet")
    table = {"item_id": list(range(100, 116)), "kind": [f"k{n % 3}" for n in range(16)]}
    pl.DataFrame(table).write_csv(folder / "things.csv")
    return folder


def train(shop: Path, out: Path, *more: str) -> int:
    data = ["--data", str(shop / "sales.parquet"), "--query-column", "customer", "--items", str(shop / "things.csv")]
    return main(["train", *data, "--out", str(out), "--quiet", "--k", "5", *quick_words(), *more])


@pytest.mark.parametrize(("towers", "listed"), [("--set item_features=kind --set hidden=8,4", 16), ("", 12)])
def test_all_items_of_the_table(shop: Path, tmp_path: Path, towers: str, listed: int) -> None:
    """The run knows all 16; towers over features list all of them, a table of ids only those with training pairs."""
    out = tmp_path / "run"
    assert train(shop, out, "--catalogue", "all", *towers.split()) == 0
    run = load(out)
    assert len(run.ids.item_ids) == 16
    assert json.loads((out / "run.json").read_text())["source"]["columns"]["catalogue"] is True
    found = run.recommend(["c00"], k=16, with_seen=True)["item"].to_list()
    assert len(found) == listed
    assert ({112, 113, 114, 115} <= set(found)) == (listed == 16)
    assert main(["evaluate", str(out), "--k", "5", "--json"]) == 0  # the data is read in the same way


def test_by_default_only_items_of_interactions(shop: Path, tmp_path: Path) -> None:
    """As before: rows of the table whose id has no interactions are ignored."""
    assert train(shop, tmp_path / "run") == 0
    assert len(load(tmp_path / "run").ids.item_ids) == 12


def test_prepared_data_has_them_too(shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`prepare --catalogue all` writes them; a prepared folder cannot be changed by --catalogue."""
    data = [str(shop / "sales.parquet"), "--query-column", "customer", "--items", str(shop / "things.csv")]
    prepared = tmp_path / "prepared"
    assert main(["prepare", *data, "--catalogue", "all", "--out", str(prepared), "--quiet"]) == 0
    out = tmp_path / "run"
    assert main(["train", "--data", str(prepared), "--out", str(out), "--quiet", "--k", "5", *quick_words()]) == 0
    assert len(load(out).ids.item_ids) == 16
    assert main(["train", "--data", str(prepared), "--catalogue", "all", "--out", str(tmp_path / "no"), "--quiet"]) == 2
    assert "catalogue" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("command", ["train --data", "prepare"])
def test_no_items_table_is_refused(
    shop: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names --items; nothing is written."""
    (tmp_path / "alone.parquet").write_bytes((shop / "sales.parquet").read_bytes())
    words = [*command.split(), str(tmp_path / "alone.parquet"), "--query-column", "customer", "--catalogue", "all"]
    assert main([*words, "--out", str(tmp_path / "out"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "--items" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
