"""The BEIR layout, and texts repeated on the rows of an interactions table."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from sparring.core.errors import UserError
from sparring.data import Interactions, read, split
from sparring.data.texts.texts import text_of

CORPUS = [
    {"_id": "d1", "title": "Shoes", "text": "red and blue"},
    {"_id": "d2", "text": "a hat"},
    {"_id": "d3", "title": "", "text": "\U0001f600"},
]
QUERIES = [{"_id": f"q{i}", "text": f"question {i}", "metadata": {}} for i in range(5)]
QRELS = {
    "train": "q0\td1\t1\nq0\td2\t2\nq1\td2\t1\nq1\td1\t0\n",
    "dev": "q2\td1\t1\n",
    "test": "q3\td1\t1\nq3\td3\t1\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in CORPUS))
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUERIES))
    (tmp_path / "qrels").mkdir()
    for name, rows in QRELS.items():
        (tmp_path / "qrels" / f"{name}.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)
    return tmp_path


def pairs_of(part: Interactions | None) -> list[tuple[str, str]]:
    assert part is not None
    return list(
        zip(part.query_ids.decode(part.queries).tolist(), part.item_ids.decode(part.items).tolist(), strict=True)
    )


def test_a_folder_with_all_parts(folder: Path) -> None:
    """Every document is an item, each part has its pairs, score 0 is no pair, a text is title plus text."""
    data = read(folder)
    parts = split(data)
    assert pairs_of(parts.train) == [("q0", "d1"), ("q0", "d2"), ("q1", "d2")]
    assert pairs_of(parts.valid) == [("q2", "d1")]
    assert pairs_of(parts.test) == [("q3", "d1"), ("q3", "d3")]
    assert text_of(data, "item").to_list() == ["Shoes red and blue", "a hat", "\U0001f600"]
    assert text_of(data, "query").to_list() == [f"question {i}" for i in range(4)]


def test_without_a_validation_part_whole_queries_are_held_out(folder: Path) -> None:
    """Test queries never train, so validation holds out complete training queries too, and leaves one."""
    (folder / "qrels" / "dev.tsv").unlink()
    parts = split(read(folder), valid=0.5)
    assert {query for query, _ in pairs_of(parts.valid)}.isdisjoint(query for query, _ in pairs_of(parts.train))


def test_only_a_test_part_and_unknown_ids(folder: Path) -> None:
    """Without train.tsv the pairs have no split; judgements of unknown documents are dropped; notes report both."""
    for name in ("train", "dev"):
        (folder / "qrels" / f"{name}.tsv").unlink()
    (folder / "qrels" / "test.tsv").write_text("q0 0 d1 1\nq1 0 d2 1\nq1 0 gone 1\n")  # TREC's form, without a header
    data = read(folder)
    assert data.split is None
    assert pairs_of(data) == [("q0", "d1"), ("q1", "d2")]
    for note, keyword in zip(data.notes[:3], ("'gone'", "3 queries", "train.tsv"), strict=True):
        assert keyword in note


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("qrels/train.tsv", "query-id\tcorpus-id\tscore\nq0\td1\t1\t1\t1\n", "train.tsv line 2 is"),
        (
            "corpus.jsonl",
            '{"_id": "d1", "text": "a"}\n{"_id": "d1", "text": "b"}\n',
            "'d1' more than once",
        ),
        ("corpus.jsonl", '{"_id": "d1", "text": "a"}\nnot json\n', "corpus.jsonl line 2"),
        ("queries.jsonl", '{"text": "a"}\n', "line 1 has no '_id'"),
        ("qrels/train.tsv", "query-id\tcorpus-id\tscore\nq0\td1\tyes\n", "train.tsv line 2 is"),
        ("qrels/train.tsv", "query-id\tcorpus-id\tscore\nq0\n", "a document and a score"),
    ],
)
def test_bad_lines_are_named(folder: Path, name: str, content: str, words: str) -> None:
    """A malformed line raises a one-line error with the file and the line number."""
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=words):
        read(folder)


def test_ids_may_hold_spaces(folder: Path) -> None:
    """With tabs as separators, spaces are part of an id; TREC's form with tabs is read too."""
    (folder / "corpus.jsonl").write_text('{"_id": "doc 1", "text": "a"}\n{"_id": "doc  two", "text": "b"}\n')
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq0\tdoc 1\t1\nq1\tdoc  two\t1\n")
    (folder / "qrels" / "dev.tsv").write_text("q2\t0\tdoc 1\t1\n")
    (folder / "qrels" / "test.tsv").write_text("q3\tdoc 1\t 1\n")
    parts = split(read(folder))
    assert pairs_of(parts.train) == [("q0", "doc 1"), ("q1", "doc  two")]
    assert pairs_of(parts.valid) == [("q2", "doc 1")]
    assert pairs_of(parts.test) == [("q3", "doc 1")]


def test_notes_count_what_is_dropped(folder: Path) -> None:
    """Notes count grades, queries without a relevant document, documents without a text, and repeated lines."""
    more = [{"_id": "d4", "title": " ", "text": ""}, CORPUS[0]]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*CORPUS, *more]))
    data = read(folder)
    assert data.n_items == 4
    for note, keyword in zip(data.notes[:4], ("1 repeated", "up to 2", "1 queries", "1 documents"), strict=True):
        assert keyword in note


def test_texts_in_the_interactions_make_tables(tmp_path: Path) -> None:
    """A table of (query, product, title) rows suffices: titles are the items' texts, queries their own texts."""
    rows = pl.DataFrame(
        {"query": ["red shoes", "hat", "hat"], "product_id": [7, 8, 7], "product_title": ["Shoe", "Hat", "Shoe"]}
    )
    rows.write_csv(tmp_path / "pairs.csv")
    rows.write_parquet(tmp_path / "pairs.parquet")
    for name in ("pairs.csv", "pairs.parquet"):
        data = read(tmp_path / name)
        assert text_of(data, "item", ("product_title",)).to_list() == ["Shoe", "Hat"]
        assert text_of(data, "item").to_list() == ["Shoe", "Hat"]
        assert text_of(data, "query").to_list() == ["hat", "red shoes"]


def test_tables_of_texts_beside_the_interactions(tmp_path: Path) -> None:
    """A folder with interactions, queries and items has the texts of both, also if a text spans lines or is empty."""
    pl.DataFrame({"query_id": [1, 1, 2], "item_id": ["a", "b", "b"]}).write_csv(tmp_path / "interactions.csv")
    pl.DataFrame({"query_id": [1, 2], "text": ["two\nlines, \U0001f600", ""]}).write_csv(tmp_path / "queries.csv")
    pl.DataFrame({"item_id": ["b", "a"], "text": ["B", "A"]}).write_parquet(tmp_path / "items.parquet")
    data = read(tmp_path)
    assert text_of(data, "query").to_list() == ["two\nlines, \U0001f600", ""]
    assert text_of(data, "item").to_list() == ["A", "B"]
