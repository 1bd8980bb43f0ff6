"""--novelty: every command that ranks takes it, and bad values are one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from sparring.cli.main import main
from sparring.training.trained import load
from support.settings import quick_words


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with novelty=0.5 among its settings, on pairs of a few popular and many rare items."""
    folder = tmp_path_factory.mktemp("novelty")
    rng = np.random.default_rng(0)
    users, items = np.nonzero(rng.random((50, 60)) < 0.6 / (1 + np.arange(60)) ** 0.5)
    pl.DataFrame({"user": users, "item": items}).write_parquet(folder / "pairs.parquet")
    words = ["train", "--data", str(folder / "pairs.parquet"), "--quiet", *quick_words(n=16, novelty=0.5)]
    assert main([*words, "--out", str(folder / "run")]) == 0
    return folder / "run"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    """The records that a command prints with --json."""
    assert main([*words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_setting_and_the_option(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`evaluate` repeats the figures of the training at the run's own novelty; an option replaces it everywhere."""
    then = json.loads((run / "result.json").read_text())["test"]["metrics"]
    (own,) = printed(capsys, "evaluate", str(run))
    assert (own["novelty"], own["metrics"]["ndcg@20"]) == (0.5, pytest.approx(then["ndcg@20"]))  # type: ignore[index]
    (plain,) = printed(capsys, "evaluate", str(run), "--novelty", "0")
    assert plain["novelty"] == 0
    assert plain["metrics"] != own["metrics"]
    for novelty in (None, 0.0, 1.0):
        option = [] if novelty is None else ["--novelty", str(novelty)]
        expected = load(run, novelty=novelty).recommend([7], 5)["item"].to_list()
        assert [
            row["item"] for row in printed(capsys, "recommend", str(run), "--query", "7", "-k", "5", *option)
        ] == expected
    assert main(["index", str(run), "--novelty", "1", "--queries", "20", "--quiet"]) == 0
    lists = tmp_path / "lists.parquet"
    words = ["recommend", str(run), "--all", "--out", str(lists), "-k", "5", "--index"]
    assert main([*words, "--novelty", "1"]) == 0
    assert pl.read_parquet(lists).filter(pl.col("query") == 7)["item"].to_list() == expected
    capsys.readouterr()
    assert main(words) == 2
    assert "novelty 1" in capsys.readouterr().err
    assert main(["export", str(run), "--to", "parquet", "--out", str(tmp_path / "out"), "--novelty", "0"]) == 0
    assert pl.read_parquet(tmp_path / "out" / "items.parquet")["vector"].dtype.shape == (
        load(run, novelty=0).model.dim,
    )  # type: ignore[attr-defined]


def test_the_curve(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record per value, equal to an evaluation at that value; a page on request; every dialect."""
    rows = printed(capsys, "evaluate", str(run), "--novelty", "0.3,0.9", "-k", "5")
    assert [row["novelty"] for row in rows] == [0, 0.3, 0.9]
    (single,) = printed(capsys, "evaluate", str(run), "--novelty", "0.9", "-k", "5")
    for name in ("recall", "ndcg", "coverage"):
        assert rows[2][name] == single["metrics"][f"{name}@5"]  # type: ignore[index]
    words = ["evaluate", str(run), "--novelty", "curve", "--report", str(tmp_path / "report")]
    assert main(words) == 0
    assert "head items" in capsys.readouterr().out
    assert (tmp_path / "report" / "report.html").is_file()
    assert len(pl.read_csv(tmp_path / "report" / "novelty.csv")) == 11
    for dialect in ("xir-release", "xc", "lenskit"):
        rows = printed(capsys, "evaluate", str(run), "--novelty", "0,1", "--dialect", dialect)
        assert float(rows[1]["kept"]) != 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "keyword"),
    [
        (["recommend", "--query", "7", "--novelty", "2"], "between 0 and 1"),
        (["evaluate", "--novelty", "much"], "number"),
        (["evaluate", "--novelty", "0.2", "--report", "page"], "curve"),
        (["evaluate", "--novelty", "curve", "--ranking", "fused"], "towers"),
    ],
)
def test_bad_values_are_one_line(run: Path, words: list[str], keyword: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([words[0], str(run), *words[1:]])
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    assert code == 2
    assert keyword in capsys.readouterr().err.splitlines()[-1]
