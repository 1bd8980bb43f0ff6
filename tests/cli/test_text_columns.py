"""Columns that a text tower reads: detected or named, printed and recorded; ids only on request."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from sparring.cli import main
from sparring.data.reading import read
from sparring.data.texts.texts import tokenize
from sparring.models.text import text_tower
from sparring.training import trained
from sparring.training.folder import read_meta
from support.papers import run_here

COLOURS = ["red", "blue", "green", "black"]
THINGS = ["shoe", "hat", "coat", "sock", "glove"]
QUICK = ["--set=encoder=bag", "--set=dim=8", "--set=batch_size=16", "--epochs=1", "--k=5", "--device=cpu"]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pl.DataFrame:
    """Pairs of meaningless ids, with both texts on every row: 20 items with two queries each."""
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
    items = [(colour, thing) for colour in COLOURS for thing in THINGS]
    table = {
        "query_id": [f"q{at}" for at in range(40)],
        "query_text": [f"wanted {items[at % 20][1]} in {items[at % 20][0]}" for at in range(40)],
        "item_id": [f"i{at % 20}" for at in range(40)],
        "item_text": [" ".join(items[at % 20]) for at in range(40)],
    }
    return pl.DataFrame(table)


def words(folder: Path, side: str) -> list[int]:
    """The tokens of the first text of a run's tower."""
    texts = text_tower(getattr(trained.load(folder).model, side)).texts  # type: ignore[union-attr]
    return texts.tokens[: texts.start[1]].tolist()


def tokens(folder: Path, text: str) -> list[int]:
    return tokenize([text], text_tower(trained.load(folder).model.query).encoder.tokenizer, 32).tokens.tolist()  # type: ignore[union-attr]


def train(path: Path, *more: str) -> int:
    return main(["train", "--data", str(path), *QUICK, "--out", str(path.with_name("run")), *more])


def test_texts_on_the_rows_are_read_said_and_recorded(
    rows: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The towers read query_text and item_text, not the ids; the screen, run.json and `data show` say so."""
    rows.write_parquet(tmp_path / "pairs.parquet")
    assert train(tmp_path / "pairs.parquet") == 0
    out, error = capsys.readouterr()
    assert "note: there is no test part, since no query has enough items" in error
    assert "query texts: query_text" in out
    assert "item texts: item_text" in out
    setup = read_meta(tmp_path / "run")["setup"]
    assert (setup["text"]["query_text"], setup["text"]["item_text"]) == (["query_text"], ["item_text"])
    assert words(tmp_path / "run", "query") == tokens(tmp_path / "run", "wanted shoe in red")
    assert words(tmp_path / "run", "item") == tokens(tmp_path / "run", "red shoe")
    assert main(["data", "show", str(tmp_path / "pairs.parquet")]) == 0
    assert (
        "read as texts, with an encoder: query_text of the queries, item_text of the items" in capsys.readouterr().out
    )


def test_columns_can_be_named(rows: pl.DataFrame, tmp_path: Path) -> None:
    """Named columns are read in the given order, and by a resumed run too."""
    items = rows.select("item_id", blurb="item_text", shop=pl.lit("corner")).unique("item_id")
    items.write_parquet(tmp_path / "items.parquet")
    rows.drop("item_text").write_parquet(tmp_path / "pairs.parquet")
    given = ["--items", str(tmp_path / "items.parquet"), "--quiet"]
    assert train(tmp_path / "pairs.parquet", *given, "--set=item_text=shop,blurb") == 0
    assert words(tmp_path / "run", "item") == tokens(tmp_path / "run", "corner red shoe")
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--quiet"]) == 0


def test_title_and_body_are_one_text(rows: pl.DataFrame, tmp_path: Path) -> None:
    """As in BEIR, a document is its title and its text."""
    items = rows.select("item_id", title="item_text", body=pl.lit("of wool")).unique("item_id")
    items.write_parquet(tmp_path / "items.parquet")
    rows.drop("item_text").write_parquet(tmp_path / "pairs.parquet")
    assert train(tmp_path / "pairs.parquet", "--items", str(tmp_path / "items.parquet"), "--quiet") == 0
    assert words(tmp_path / "run", "item") == tokens(tmp_path / "run", "red shoe of wool")


@pytest.mark.parametrize(
    ("dropped", "named", "message"),
    [
        (
            ["item_text"],
            [],
            "no texts of the items: give a table with a column `text` (--items FILE), or --set item_text=id",
        ),
        (
            ["query_text"],
            [],
            "no texts of the queries: give a table with a column `text` (--queries FILE), or --set query_text=id",
        ),
        (
            [],
            ["--set=item_text=blurb"],
            "the item table has no column of text called 'blurb'; its columns of text are item_text",
        ),
    ],
)
def test_without_a_text_training_does_not_begin(
    rows: pl.DataFrame,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    dropped: list[str],
    named: list[str],
    message: str,
) -> None:
    """The error lists the columns and how to name one; ids are read only on request."""
    rows.drop(dropped).write_parquet(tmp_path / "pairs.parquet")
    assert train(tmp_path / "pairs.parquet", *named) == 2
    *notes, error = capsys.readouterr().err.splitlines()
    assert message in error
    assert all(line.startswith("sparring: note: ") for line in notes)
    assert not (tmp_path / "run").exists()


def test_ids_are_texts_when_asked_for(rows: pl.DataFrame, tmp_path: Path) -> None:
    """item_text=id reads the ids."""
    rows.drop("item_text").write_parquet(tmp_path / "pairs.parquet")
    assert train(tmp_path / "pairs.parquet", "--set=item_text=id", "--quiet") == 0
    assert words(tmp_path / "run", "item") == tokens(tmp_path / "run", "i0")
    assert read(tmp_path / "pairs.parquet").item_table is None


def test_a_comparison_reads_texts_too(
    tmp_path: Path, rows: pl.DataFrame, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no test query is trained on, compare encodes the texts like train, and notes that classifiers are left out."""
    run_here(monkeypatch)
    parts = ["train"] * 28 + ["valid"] * 4 + ["test"] * 8
    rows.with_columns(split=pl.Series(parts)).write_parquet(tmp_path / "asked.parquet")
    quick = [
        "--epochs=1",
        "--seeds=1",
        "--set=dim=8",
        "--metrics=recall@5",
        "--device=cpu",
        "--out",
        str(tmp_path / "compared"),
    ]
    assert main(["compare", "--data", str(tmp_path / "asked.parquet"), "--recipes=dpr,ngame", *quick]) == 0
    out = capsys.readouterr().out
    assert "encoder=auto" in out
    assert "compared by their towers alone, without classifiers and fusion: ngame" in out
    for recipe in ("dpr", "ngame"):
        setup = read_meta(tmp_path / "compared" / "asked" / recipe / "0")["setup"]
        assert (setup["model"]["query_tower"], setup["text"]["item_text"]) == ("text", ["item_text"])
