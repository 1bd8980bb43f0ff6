"""The last tables of the tour: lists with hits, which are held-out purchases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from sparring.cli import main
from sparring.cli.demo import _show_hits
from sparring.data import make_world, read, split
from support.settings import quick_words


def test_hits_are_held_out_purchases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both lists have hits, each hit is a test pair of its household, and the mean is that of precision@10."""
    world = make_world(60, 40, exposure=0.5, relevant=0.4, seed=3).interactions
    pairs, items = tmp_path / "pairs.csv", tmp_path / "items.csv"
    pl.DataFrame({"user_id": world.queries, "item_id": world.items}).write_csv(pairs)
    pl.DataFrame({"item_id": range(40), "title": [f"thing {i}" for i in range(40)]}).write_csv(items)
    words = ["--data", str(pairs), "--items", str(items), "--out", str(tmp_path / "run"), "--quiet", *quick_words()]
    assert main(["train", *words]) == 0
    capsys.readouterr()
    _show_hits(tmp_path / "run")
    head, *examples = capsys.readouterr().out.split("Household ")
    metrics = json.loads((tmp_path / "run" / "result.json").read_text())["test"]["metrics"]
    assert f"hold {10 * metrics['precision@10']:.2f} held-out" in head
    test = split(read(pairs, items=items), "random", valid=0.1, test=0.2, seed=0).test
    assert test is not None
    assert len(examples) == 2
    for example in examples:
        household = int(example.split(",")[0])
        held = {f"thing {item}" for item in test.items[test.queries == household]}
        marked = [line for line in example.splitlines() if line.rstrip().endswith("bought")]
        hits = {" ".join(line.split()[-3:-1]) for line in marked}
        assert int(example.split(",")[1].split()[0]) == len(hits) > 0
        assert hits <= held


def test_a_folder_named_as_the_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """Runs in ./demo would be read as the data of the next command: one line, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    refused(["demo", "--out", "demo"], "demo", "--out")
    assert not any(tmp_path.iterdir())
    (tmp_path / "demo").mkdir()
    refused(["demo"], "demo")
