"""Texts as tokens: tokenised once, kept on disk by content, padded only as far as a batch needs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sparring.core.errors import UserError
from sparring.data.cache import ItemProgress, cache_folder, hash_of, load_array, save_array
from sparring.data.columns import table_text_columns
from sparring.data.interactions import Ids, Interactions
from sparring.data.texts.tokenizers import Tokenizer, find_tokenizer

_BATCH = 16384  # texts tokenised between two reports of progress
_told: ContextVar[ItemProgress | None] = ContextVar("whom tokenising tells of its progress", default=None)
IDS = "id"  # stands for the ids themselves among columns of text

Role = Literal["query", "item"]
ROLES: tuple[Role, Role] = ("query", "item")


@dataclass(frozen=True, eq=False)
class Texts:
    """The tokens of n texts in one flat array with offsets: those of text i are tokens[start[i]:start[i + 1]].

    The array may be a memory map. The first use on another device copies the tokens there once, 4 bytes each. A text without
    any token is allowed: its row of the mask is all False, its bag is empty.

        texts = tokenized(["red shoes", "a hat"], "minilm", 32)
        ids, mask = texts.padded(torch.tensor([1, 0]), 32)     # (2, 4) both: as long as the longest of the two
    """

    tokens: np.ndarray  # (T,) int32
    start: np.ndarray  # (n + 1,) int64
    vocabulary: int  # number of token ids
    pad: int = 0
    end: int = -1  # the token that closes every text, where the tokenizer has one: a text that is cut keeps it
    _on: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _lengths: dict[int, tuple[int, float]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.start) - 1

    def __deepcopy__(self, memo: object) -> Texts:
        return self  # nothing changes them, so that copies of a tower share them

    def lengths(self) -> np.ndarray:
        """(n,) number of tokens of each text."""
        return np.diff(self.start)

    def longest_and_mean(self, max_len: int) -> tuple[int, float]:
        """Tokens of the longest text and of the mean one, when each is cut after max_len."""
        if max_len not in self._lengths:
            length = np.minimum(self.lengths(), max_len)
            self._lengths[max_len] = (int(length.max()), float(length.mean())) if len(length) else (0, 0.0)
        return self._lengths[max_len]

    def padded(self, index: Tensor, max_len: int, longest: int | None = None) -> tuple[Tensor, Tensor]:
        """Token ids (n, longest) int64 and mask (n, longest) of the texts at index (n,), each cut after max_len tokens.

        Without `longest`, at least the tokens of any of them, it is found, which waits for the device.
        """
        tokens, begin, length, cut = self._at(index, max_len)
        if longest is None:
            longest = max(int(length.max()), 1) if len(length) else 1
        place = torch.arange(longest, device=index.device)
        mask = place < length[:, None]
        at = (begin[:, None] + place).clamp_(max=max(len(tokens) - 1, 0))
        ids = tokens[at].long() if len(tokens) else torch.zeros_like(at)
        if self.end >= 0:
            ids.masked_fill_(cut[:, None] & (place == length[:, None] - 1), self.end)
        return ids.masked_fill_(~mask, self.pad), mask

    def flat(self, index: Tensor, max_len: int) -> tuple[Tensor, Tensor]:
        """Token ids (t,) int64, one text after the other, and where each begins (n,): what nn.EmbeddingBag takes."""
        tokens, begin, length, cut = self._at(index, max_len)
        offsets = length.cumsum(0) - length
        ids = tokens[
            torch.arange(int(length.sum()), device=index.device) + (begin - offsets).repeat_interleave(length)
        ].long()
        if self.end >= 0:
            ids[(offsets + length - 1)[cut & (length > 0)]] = self.end
        return ids, offsets

    def _at(self, index: Tensor, max_len: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All tokens, and of each text asked for: where it begins, its length, and whether it was cut."""
        if index.device not in self._on:
            both = torch.from_numpy(self.tokens), torch.from_numpy(self.start)
            self._on[index.device] = both[0].to(index.device), both[1].to(index.device)
        tokens, start = self._on[index.device]
        index = index.long()
        begin = start[index]
        full = start[index + 1] - begin
        return tokens, begin, full.clamp(max=max_len), full > max_len

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write into a folder; `load` sees it only when it is complete."""
        folder = Path(folder)
        save_array(folder / "start.npy", self.start)
        save_array(folder / "tokens.npy", self.tokens)
        # Last, and as an array because that is written at once or not at all.
        save_array(folder / "texts.npy", np.array([self.vocabulary, self.pad, self.end], dtype=np.int64))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Texts:
        """What `save` wrote, the tokens as a memory map."""
        folder = Path(folder)
        if not (folder / "texts.npy").is_file():
            raise UserError(f"{folder} holds no tokens: it has no texts.npy")
        vocabulary, pad, end = (int(value) for value in load_array(folder / "texts.npy"))
        start = np.array(load_array(folder / "start.npy"))
        # Copy-on-write: torch takes only arrays that could be written to, and nobody writes. Nothing cannot be mapped.
        tokens = np.load(folder / "tokens.npy", mmap_mode="c") if start[-1] else np.zeros(0, dtype=np.int32)
        return cls(tokens, start, vocabulary, pad, end)


def tokenize(
    strings: Sequence[str] | pl.Series,
    tokenizer: Tokenizer | str | Path,
    max_len: int,
    progress: ItemProgress | None = None,
) -> Texts:
    """Tokens of texts, in memory; None is an empty text.

    tokenize(["red shoes"], "words", 32)
    """
    if max_len < 1:
        raise UserError(f"max_len is {max_len}; it must be at least 1")
    made = find_tokenizer(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
    series = as_series(strings)
    parts, lengths = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.int64)]
    for begin in range(0, len(series), _BATCH):
        tokens, length = made.encode(series.slice(begin, _BATCH), max_len)
        parts.append(tokens)
        lengths.append(length)
        if progress is not None:
            progress("tokens", min(begin + _BATCH, len(series)), len(series))
    start = np.zeros(len(series) + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=start[1:])
    return Texts(np.concatenate(parts), start, made.vocabulary, made.pad, made.end)


def tokenized(
    strings: Sequence[str] | pl.Series,
    tokenizer: Tokenizer | str | Path,
    max_len: int,
    cache: str | os.PathLike[str] | None = None,
    progress: ItemProgress | None = None,
) -> Texts:
    """Tokens of texts as a memory map, made once for the same texts, tokenizer and max_len.

    They are kept in `cache`, by default `texts` in the cache folder ($SPARRING_HOME, else ~/.cache/sparring). The tokenizer is
    `minilm`, `wordllama`, `words` (hashed words, without any package), an installed package, a folder, a file, or an object.

        tokenized(text_of(data, "item"), "minilm", 32)
    """
    made = find_tokenizer(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
    series, progress = as_series(strings), progress or _told.get()
    key = hash_of(["tokens 1", made.fingerprint, str(max_len), *series.to_list()])
    folder = (Path(cache) if cache is not None else cache_folder() / "texts") / key
    if not (folder / "texts.npy").is_file():
        tokenize(series, made, max_len, progress).save(folder)
    elif progress is not None and len(series):
        progress("tokens", len(series), len(series))
    return Texts.load(folder)


@contextmanager
def reporting(progress: ItemProgress) -> Iterator[None]:
    """Tell this of all tokenising inside, however deep, that was not given a listener of its own.

    with reporting(show): build("default", data, {"encoder": "bag"})
    """
    before = _told.set(progress)
    try:
        yield
    finally:
        _told.reset(before)


def as_series(strings: Sequence[str] | pl.Series) -> pl.Series:
    """Texts as a polars column without nulls; what is no text is named."""
    if isinstance(strings, pl.Series):
        return strings.cast(pl.String).fill_null("")
    try:
        return pl.Series("text", list(strings), dtype=pl.String).fill_null("")
    except (TypeError, UnicodeEncodeError):
        for place, text in enumerate(strings):
            if text is not None and not isinstance(text, str):
                raise UserError(f"text {place} is {json.dumps(text, default=repr)[:60]}, not a text") from None
        return pl.Series(
            "text", [text and text.encode("utf-8", "replace").decode() for text in strings], dtype=pl.String
        ).fill_null("")


def text_of(data: Interactions | Ids, role: Role, columns: Sequence[str] = ()) -> pl.Series:
    """The text of every query or item, in dense order, "" where there is none: the columns named, else those that `find_texts` finds.

    What several columns say is joined by spaces; what two of them say alike is said once.

        text_of(data, "item", ("title", "body"))
    """
    table, ids = (data.query_table, data.query_ids) if role == "query" else (data.item_table, data.item_ids)
    columns = tuple(columns) or find_texts(data, role)
    names = _strings(table)
    if columns == (IDS,) and IDS not in names:
        return ids.ids.cast(pl.String).alias("text")
    wrong = next((name for name in columns if name not in names), None)
    if wrong is not None or table is None:
        raise UserError(f"the {role} table has no column of text called {wrong!r}; {_there_are(role, names)}")
    return _joined(table, columns)


def find_texts(data: Interactions | Ids, role: Role) -> tuple[str, ...]:
    """The columns that the text of a query or item is read from: a title, a body (`text`, `description`, ...), or both, as in BEIR.

    ("id",) where there are no columns of text and the ids are texts themselves, which at least a tenth of them show by a space. Else an
    error names the columns that there are.
    """
    table, ids = (data.query_table, data.query_ids) if role == "query" else (data.item_table, data.item_ids)
    names = _strings(table)
    found = table_text_columns(role, names)
    if len(found) > 1 and table is not None:
        head, body = (pl.col(name).fill_null("").str.strip_chars() for name in found)
        inside = (body == head) | body.str.starts_with(pl.concat_str(head, pl.lit(" "))) | (head == "")
        if table.select(inside.all()).item():  # every text begins with its title
            return found[1:]
    if found:
        return found
    if ids.kind == "text" and not set(names) - {IDS} and _look_like_texts(ids.ids):
        return (IDS,)
    where = "queries" if role == "query" else "items"
    first = f"cannot tell which column is the text of the {where}" if names else f"there are no texts of the {where}"
    raise UserError(f"{first}: {_there_are(role, names)}")


def has_texts(data: Interactions | Ids, role: Role) -> bool:
    """Whether a column of the table of queries or items is a text by its name."""
    return bool(table_text_columns(role, _strings(data.query_table if role == "query" else data.item_table)))


def joined_text(parts: Sequence[str | None]) -> str:
    """What the columns of one query or item make, as `text_of` joins them.

    >>> joined_text(["Shoes", None, "red and blue"]), joined_text(["Hat", "Hat"])
    ('Shoes red and blue', 'Hat')
    """
    return " ".join(dict.fromkeys(part.strip() for part in parts if part and part.strip()))


def _joined(table: pl.DataFrame, columns: Sequence[str]) -> pl.Series:
    if len(columns) == 1:
        return table[columns[0]].cast(pl.String).fill_null("").alias("text")
    parts = pl.concat_list(pl.col(name).cast(pl.String).str.strip_chars() for name in columns)
    said = parts.list.eval(pl.element().filter(pl.element().is_not_null() & (pl.element() != ""))).list.unique(
        maintain_order=True
    )
    return table.select(said.list.join(" ").alias("text"))["text"]


def _strings(table: pl.DataFrame | None) -> list[str]:
    return [] if table is None else [name for name, kind in table.schema.items() if kind == pl.String]


def _look_like_texts(ids: pl.Series) -> bool:
    spaced = ids.str.strip_chars().str.contains(r"\s")
    return int(spaced.sum()) >= 0.1 * len(ids)


def _there_are(role: Role, names: Sequence[str]) -> str:
    """What the user can do about texts that were not found."""
    if names:
        return f"its columns of text are {', '.join(names)}: name one or more with --set {role}_text=COLUMN,COLUMN"
    file = "--queries FILE" if role == "query" else "--items FILE"
    return f"give a table with a column `text` ({file}), or --set {role}_text=id to read the ids themselves"
