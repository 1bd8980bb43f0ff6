"""Tokens of texts from the tokens of their words, each computed once: the quick way through a fast tokenizer."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

SPACE = "\u2581"  # stands for a space in sentencepiece's vocabularies
_MOST = 1 << 18  # words that are kept, about 40 MB; then the cache starts anew
_LONGEST = 64  # characters of a word that is kept
_JOINED = 64  # words that the tokenizer reads as one text


class WordCache:
    """The tokens of texts by a tokenizer of the library `tokenizers`, without special tokens, several times as fast.

    A word is what stands between two spaces. `WordCache.of` answers None for a tokenizer that may look beyond a space:
    it knows two kinds that do not, BERT's (a normaliser by character, then WordPiece) and Llama's (byte-pair merges,
    none of them over a space). A text is left to the tokenizer itself if it has a word that may have other tokens
    alone: one with a special token, of more than 64 characters or with unknown characters, and under Llama's two
    spaces in a row. Most words are frequent, so that a corpus needs little more than a look into a dictionary each.

        cache = WordCache.of(tokenizers.Tokenizer.from_file("tokenizer.json"))
        cache.encode(["red shoes", "a hat"], 32)   # the same as encode_batch
    """

    def __init__(self, inner: Any, spec: dict[str, Any], odd: tuple[str, ...], separator: str | None) -> None:
        self.inner, self.odd, self.separator = inner, odd, separator
        self.merges = spec["model"]["type"] == "BPE"
        unknown = spec["model"].get("unk_token")
        self.unknown = inner.token_to_id(unknown) if self.merges and unknown else None  # merged with its neighbours
        self.lock = threading.Lock()
        self._empty()

    @classmethod
    def of(cls, inner: Any) -> WordCache | None:
        """The cache of a tokenizer; None if the tokens of a word may depend on others."""
        spec = json.loads(inner.to_str())
        added = spec["added_tokens"]
        odd = tuple(token["content"] for token in added)
        if any(token["normalized"] or " " in token["content"] for token in added):
            return None
        if not (_is_bert(spec) or _is_llama(spec, inner)):
            return None
        unknown = spec["model"].get("unk_token")
        plain = (
            token["content"] for token in added if not (token["lstrip"] or token["rstrip"] or token["single_word"])
        )
        return cls(inner, spec, odd, next((content for content in plain if content != unknown), None))

    def encode(self, texts: Sequence[str], max_len: int) -> tuple[np.ndarray, np.ndarray]:
        """All tokens (T,) int32 of successive texts, and the number of tokens of each (n,), at most max_len."""
        if not texts:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        with self.lock:
            if len(self.slots) > _MOST:
                self._empty()
            words = [text.split(" ") for text in texts]
            size = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
            every = map(self.slots.__getitem__, chain.from_iterable(words))
            try:
                slot = np.fromiter(every, dtype=np.int64, count=int(size.sum()))
                self._learn()
            except BaseException:  # an interrupt may leave words without tokens
                self._empty()
                raise
            tokens, begin, length = self.tokens, self.begin[slot], self.length[slot]
            first = np.cumsum(size) - size
            left = np.flatnonzero(np.minimum.reduceat(length, first) < 0)
            if len(left):
                own, count = flat_ids(self.inner, [texts[at] for at in left.tolist()], max_len)
        if len(left):  # their first word stands for the text, the others for nothing
            length[np.repeat(np.isin(np.arange(len(size)), left), size)] = 0
            length[first[left]], begin[first[left]] = count, len(tokens) + np.cumsum(count) - count
            tokens = np.concatenate([tokens, own])
        total = np.add.reduceat(length, first)
        found = tokens[_ranges(begin, length)]
        if total.max() > max_len:
            found = found[_ranges(np.zeros_like(total), total) < max_len]
            total = np.minimum(total, max_len)
        return found, total

    def _empty(self) -> None:
        self.slots = _Slots()
        self.tokens = np.zeros(0, dtype=np.int32)
        self.begin, self.length = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)  # length -1: odd

    def _learn(self) -> None:
        """Add the tokens of the words that have a slot and no tokens yet."""
        new, self.slots.new = self.slots.new, []
        if not new:
            return
        odd = np.array([self._is_odd(word) for word in new])
        tokens, count = self._alone([word for word, left in zip(new, odd, strict=True) if not left])
        length = np.zeros(len(new), dtype=np.int64)
        length[~odd] = count
        begin = len(self.tokens) + np.cumsum(length) - length
        if self.unknown is not None:
            odd[np.repeat(np.flatnonzero(~odd), count)[tokens == self.unknown]] = True
        length[odd] = -1
        self.tokens = np.concatenate([self.tokens, tokens])
        self.begin, self.length = np.concatenate([self.begin, begin]), np.concatenate([self.length, length])

    def _is_odd(self, word: str) -> bool:
        if len(word) > _LONGEST or (self.merges and (not word or SPACE in word)):
            return True
        return any(content in word for content in self.odd)

    def _alone(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of words, each as a text of its own; read many at a time, with a special token between."""
        if self.separator is not None and words:
            end = self.inner.token_to_id(self.separator)
            joined = (words[at : at + _JOINED] for at in range(0, len(words), _JOINED))
            every = [self.separator.join([*group, ""]) for group in joined]
            tokens, _ = flat_ids(self.inner, every)
            ends = np.flatnonzero(tokens == end)
            if len(ends) == len(words):
                return tokens[tokens != end], np.diff(ends, prepend=-1) - 1
        return flat_ids(self.inner, words)


class _Slots(dict[str, int]):
    """The number of each word, in the order of first sight; `new` collects those just seen."""

    def __init__(self) -> None:
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        self.new.append(word)
        self[word] = slot = len(self)
        return slot


def flat_ids(
    inner: Any, texts: list[str], max_len: int | None = None, special: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """All tokens (T,) int32 of successive texts by the tokenizer itself, and the number of tokens of each (n,)."""
    if max_len is None:
        inner.no_truncation()
    else:
        inner.enable_truncation(max_len)
    ids = [encoding.ids for encoding in inner.encode_batch_fast(texts, add_special_tokens=special)]
    length = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    return np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(length.sum())), length


def _ranges(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """begin[0], begin[0] + 1, ... length[0] of them, then those of begin[1], ..."""
    return np.arange(int(length.sum())) + np.repeat(begin - (np.cumsum(length) - length), length)


def _is_bert(spec: dict[str, Any]) -> bool:
    parts = (spec[name] or {} for name in ("normalizer", "pre_tokenizer", "model"))
    return [part.get("type") for part in parts] == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]


def _is_llama(spec: dict[str, Any], inner: Any) -> bool:
    prepend = {"type": "Prepend", "prepend": SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizer, model = spec["normalizer"] or {}, spec["model"]
    if normalizer.get("normalizers") != [prepend, replace] or spec["pre_tokenizer"] is not None:
        return False
    if model["type"] != "BPE" or any(
        model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    ):
        return False
    return not any(_crosses(token) for token in inner.get_vocab())


def _crosses(token: str) -> bool:
    return SPACE in token.lstrip(SPACE)
