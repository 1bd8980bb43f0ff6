"""Extreme-classification folders in all their layouts, and texts of any content."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from sparring.core.errors import UserError
from sparring.data import read, show, split
from sparring.data.formats.xc import read_labels, read_xc
from sparring.data.lines import read_lines, read_pairs
from sparring.data.propensity import propensity_constants
from sparring.data.texts.texts import text_of, tokenize

POINTS = ["red shoes", "", "a \U0001f600 hat\x0b\x1c\u2028 still one line", "x" * 100_000]
TESTS = ["blue hat", "green"]
LABELS = ["shoe", "hat", "colour"]
TRAIN = {(0, 0), (0, 2), (1, 1), (2, 1), (3, 2)}
TEST = {(0, 1), (0, 2), (1, 2)}


def lines(texts: list[str]) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def npz(path: Path, pairs: set[tuple[int, int]], shape: tuple[int, int], kind: str = "csr") -> None:
    """Write a sparse matrix as scipy does, by hand."""
    if kind == "coo":
        row, col = (np.array(column) for column in zip(*sorted(pairs), strict=True))
        np.savez(path, row=row, col=col, format=b"coo", shape=shape, data=np.ones(len(pairs)))
        return
    first, second = (0, 1) if kind == "csr" else (1, 0)
    ordered = sorted((pair[first], pair[second]) for pair in pairs)
    counts = [sum(major == i for major, _ in ordered) for i in range(shape[first])]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    indices = np.array([minor for _, minor in ordered])
    np.savez(path, indices=indices, indptr=indptr, format=kind.encode(), shape=shape, data=np.ones(len(pairs)))


def sparse_text(pairs: set[tuple[int, int]], shape: tuple[int, int]) -> bytes:
    rows = [" ".join(f"{label}:1.00000" for i, label in sorted(pairs) if i == row) for row in range(shape[0])]
    return lines([f"{shape[0]} {shape[1]}", *rows])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The layout with texts and matrices, gzipped in part, with filters for both parts."""
    (tmp_path / "trn_X.txt.gz").write_bytes(gzip.compress(lines(POINTS)))
    (tmp_path / "tst_X.txt").write_bytes(lines(TESTS))
    (tmp_path / "Y.txt").write_bytes(lines(LABELS))
    npz(tmp_path / "Y.trn.npz", TRAIN, (4, 3))
    npz(tmp_path / "Y.tst.npz", TEST, (2, 3))
    (tmp_path / "filter_labels_train.txt").write_text("1 0\n3 1\n")
    (tmp_path / "filter_labels_test.txt").write_text("0 0\n")
    return tmp_path


def pairs_of(data: object) -> set[tuple[int, int]]:
    return set(zip(data.queries.tolist(), data.items.tolist(), strict=True))  # type: ignore[attr-defined]


def seen(parts: object, part: str, query: int) -> set[int]:
    found = parts.seen_for(part)  # type: ignore[attr-defined]
    return set(found.items[found.start[query] : found.start[query + 1]].tolist())


def test_texts_and_matrices(folder: Path) -> None:
    """Lines are points and labels, test points follow training points, and odd texts are kept."""
    data = read(folder)
    assert (data.n_queries, data.n_items) == (6, 3)
    assert pairs_of(data) == TRAIN | {(4 + row, label) for row, label in TEST}
    assert text_of(data, "query").to_list() == POINTS + TESTS
    assert text_of(data, "item").to_list() == LABELS
    assert data.titles().tolist() == LABELS  # type: ignore[union-attr]
    parts = split(data, valid=0)
    assert pairs_of(parts.train) == TRAIN
    assert "'red shoes' -> 'shoe'" in show(folder)
    assert len(tokenize(text_of(data, "query"), "words", 16)) == 6


def test_filters_are_hidden_in_their_own_part(folder: Path) -> None:
    """A test point masks its filter, a training point its labels and its filter: neither file leaks into the other."""
    parts = split(read(folder), valid=0)
    assert seen(parts, "test", 4) == {0}
    assert seen(parts, "test", 5) == set()
    assert seen(parts, "test", 1) == {0, 1}
    held = split(read(folder), valid=0.5, seed=1)
    assert held.valid is not None
    queries = set(held.valid.queries.tolist())
    assert len(queries) == 2
    assert queries.isdisjoint(held.train.queries.tolist())  # complete points validate
    for query in queries:
        assert seen(held, "valid", query) == {1: {0}, 3: {1}}.get(query, set())
    (folder / "filter_labels_train.txt").write_text("")
    (folder / "filter_labels_test.txt").write_text("")
    assert read(folder).hidden is None


def test_every_layout_gives_the_same_data(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sparse text, JSON lines and matrices by column or coordinate hold the same pairs, texts and filters."""
    expected = read_xc(folder)
    text, objects = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("objects")
    for name in ("trn_X.txt.gz", "tst_X.txt", "Y.txt"):
        (text / name).write_bytes((folder / name).read_bytes())
    (text / "trn_X_Y.txt").write_bytes(sparse_text(TRAIN, (4, 3)))
    (text / "tst_X_Y.txt.gz").write_bytes(gzip.compress(sparse_text(TEST, (2, 3))))
    (text / "trn_filter_labels.txt").write_text("1 0\n3 1\n")
    (text / "tst_filter_labels.txt").write_text("0 0")
    for name, texts, pairs in (("trn", POINTS, TRAIN), ("tst", TESTS, TEST)):
        own = [sorted(label for row, label in pairs if row == i) for i in range(len(texts))]
        made = [{"uid": f"u{i}", "title": text, "content": "", "target_ind": own[i]} for i, text in enumerate(texts)]
        (objects / f"{name}.json.gz").write_bytes(gzip.compress(lines([json.dumps(each) for each in made])))
    (objects / "lbl.json.gz").write_bytes(gzip.compress(lines([json.dumps({"uid": t, "title": t}) for t in LABELS])))
    for name in ("filter_labels_train.txt", "filter_labels_test.txt"):
        (objects / name).write_bytes((folder / name).read_bytes())
    for other in (text, objects):
        data = read(other)
        assert pairs_of(data) == pairs_of(expected)
        assert text_of(data, "query").to_list() == POINTS + TESTS
        assert text_of(data, "item").to_list() == LABELS
        assert np.array_equal(data.hidden, expected.hidden)  # type: ignore[arg-type]
        np.testing.assert_allclose(data.propensity, expected.propensity)  # type: ignore[arg-type]
    for kind in ("csc", "coo"):
        npz(folder / "Y.trn.npz", TRAIN, (4, 3), kind)
        assert pairs_of(read(folder)) == pairs_of(expected)


def test_test_points_without_labels_are_counted(folder: Path) -> None:
    """A test point without labels stays a query; only the test part carries their number."""
    npz(folder / "Y.tst.npz", {(0, 1)}, (2, 3))
    data = read(folder)
    assert (data.n_queries, data.empty) == (6, 1)
    assert "1 test points have no label" in data.notes
    parts = split(data, valid=0)
    assert (parts.train.empty, parts.test.empty) == (0, 1)  # type: ignore[union-attr]


def test_bytes_that_are_no_text_are_replaced_and_told(folder: Path) -> None:
    """Invalid UTF-8 becomes U+FFFD with a note of the file, the number of lines and the first; only \\n ends a line."""
    (folder / "tst_X.txt").write_bytes(b"\xef\xbb\xbfblue\r\ncaf\xe9 \x00")
    data = read(folder)
    assert text_of(data, "query").to_list()[4:] == ["blue", "caf\ufffd \x00"]
    assert data.notes == ("replaced invalid UTF-8 in 1 lines of tst_X.txt, first in line 2",)


def test_lines_do_not_depend_on_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk may end anywhere, even within a character, and the lines stay the same."""
    (tmp_path / "a.txt").write_bytes("é\n\nüü\n\U0001f600\n".encode() + b"\xff\nlast")
    expected = ["é", "", "üü", "\U0001f600", "\ufffd", "last"]
    for size in (1, 2, 3, 7, 100):
        monkeypatch.setattr("sparring.data.lines._CHUNK", size)
        found, note = read_lines(tmp_path / "a.txt")
        assert found.to_list() == expected
        assert note == "replaced invalid UTF-8 in 1 lines of a.txt, first in line 5"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("filter_labels_test.txt", b"0 0\n0 x\n", "line 2 is '0 x'"),
        ("filter_labels_test.txt", b"0 0\n\n2 0\n", "line 3 is '2 0'"),
        ("filter_labels_train.txt", b"0 3\n", "a label below 3"),
        ("Y.txt", b"one\ntwo\n", "there are 2 labels"),
        ("tst_X.txt", b"one\n", "1 test texts and 2 rows"),
        ("Y.trn.npz", b"no matrix", "sparse matrix"),
        ("trn_X.txt.gz", b"\x1f\x8b\x08\x00 broken", "cannot read"),
    ],
)
def test_bad_files_are_named_with_their_line(folder: Path, name: str, content: bytes, words: str) -> None:
    """A malformed file raises a one-line error with the file and, if there is one, the line number."""
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        read(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"2 3\n0:1\n1:x\n", "line 3 has '1:x'"),
        (b"2 3\n0:1 3:1\n\n", "line 2 has '3:1'.* below 3"),
        (b"2 3\n0:1\n", "says 2 rows, but 1 lines"),
        (b"two 3\n", "line 1 is 'two 3'"),
        (b"", "line 1 is ''"),
    ],
)
def test_bad_sparse_texts_are_named_with_their_line(tmp_path: Path, content: bytes, words: str) -> None:
    """A malformed sparse text raises one line too; empty rows, zero values and repeated labels are accepted."""
    (tmp_path / "trn_X_Y.txt").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_labels(tmp_path / "trn_X_Y.txt")
    (tmp_path / "good.txt").write_bytes(b"3 4\n2:1 0:1.0 2:1\n\n3:0.0 1\n")
    good = read_labels(tmp_path / "good.txt")
    assert list(zip(good.rows.tolist(), good.labels.tolist(), strict=True)) == [(0, 0), (0, 2), (2, 1)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"title": ', "line 3 is not a JSON object"),
        ('{"uid": "u"}', "line 3 has no 'title'"),
        ("[1]", "line 3 is not"),
    ],
)
def test_bad_json_is_named_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    """A line that is no object, or lacks the title, raises an error with its number, blank lines counted."""
    (tmp_path / "trn.json").write_text('{"title": "a", "target_ind": [0]}\n\n' + line + "\n")
    with pytest.raises(UserError, match=words):
        read(tmp_path)


def test_columns_are_for_tables(folder: Path, tmp_path: Path) -> None:
    """Naming a column for such a folder raises an error, and so does a folder without training labels."""
    with pytest.raises(UserError, match="query is for tables"):
        read(folder, query="user")
    (folder / "Y.trn.npz").unlink()
    with pytest.raises(UserError, match="no training labels"):
        read(folder)


def test_constants_of_propensities() -> None:
    """A and B are the literature's constants for the origin of the data."""
    assert propensity_constants("LF-AmazonTitles-131K") == (0.6, 2.6)
    assert propensity_constants("LF-Wikipedia-500K") == propensity_constants("LF-WikiTitles-500K") == (0.5, 0.4)
    assert propensity_constants("LF-WikiSeeAlso-320K") == propensity_constants("OEWN-Related") == (0.55, 1.5)


def test_pairs_with_any_spaces(tmp_path: Path) -> None:
    """Tabs, several spaces and a missing last line feed do not matter."""
    (tmp_path / "pairs.txt").write_text(" 1\t2\n3   4 \r\n\n0 0")
    assert read_pairs(tmp_path / "pairs.txt", 5, 5).tolist() == [[1, 2], [3, 4], [0, 0]]


@pytest.mark.parametrize(
    ("name", "sizes"), [("OEWN-Hyper3", (68_548, 17_137, 20_560)), ("OEWN-Related", (84_994, 8_371, 106_242))]
)
def test_real_sets(real_data: Path, name: str, sizes: tuple[int, int, int]) -> None:
    """The real sets have their known sizes, a text for every point and label, and no hidden pair that is true."""
    folder = real_data / "xc" / "oewn" / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    data = read(folder)
    assert (data.n_queries, data.n_items) == (sizes[0] + sizes[1], sizes[2])
    assert len(np.unique(data.queries[data.split == 0])) == sizes[0]
    assert len(np.unique(data.queries[data.split == 2])) == sizes[1]
    assert (text_of(data, "query") != "").all()
    assert (text_of(data, "item") != "").all()
    assert data.hidden is not None
    pairs = pl.DataFrame({"q": data.queries, "i": data.items})
    hidden = pl.DataFrame({"q": data.hidden[0], "i": data.hidden[1]})
    assert pairs.join(hidden, on=["q", "i"]).is_empty()
    parts = split(data)
    assert parts.valid is not None
    assert np.intersect1d(parts.valid.queries, parts.train.queries).size == 0
