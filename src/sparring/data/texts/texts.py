"""Texts as tokens: tokenised once, kept on disk by content, padded only as far as a batch needs."""

from __future__ import annotations

import json
import logging
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

from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.manifest import NAME, check_folder, write_manifest
from sparring.data.cache import ItemProgress, cache_folder, hash_of, save_array
from sparring.data.columns import table_text_columns
from sparring.data.interactions import Ids, Interactions
from sparring.data.texts.tokenizers import Tokenizer, find_tokenizer

log = logging.getLogger(__name__)
_BATCH = 16384  # texts tokenised between two reports of progress
_listener: ContextVar[ItemProgress | None] = ContextVar("progress of tokenising", default=None)
IDS = "id"  # among text columns, stands for the ids themselves

Role = Literal["query", "item"]
ROLES: tuple[Role, Role] = ("query", "item")


@dataclass(frozen=True, eq=False)
class Texts:
    """The tokens of n texts in one flat array with offsets: those of text i are tokens[start[i]:start[i + 1]].

    The array may be a memory map. The first use on a device copies the tokens there, 4 bytes each. A text may have no
    tokens: its row of the mask is all False, its bag is empty.

        texts = tokenized(["red shoes", "a hat"], "minilm", 32)
        ids, mask = texts.padded(torch.tensor([1, 0]), 32)     # (2, 4) both: as long as the longest of the two
    """

    tokens: np.ndarray  # (T,) int32
    start: np.ndarray  # (n + 1,) int64
    vocabulary: int  # number of token ids
    pad: int = 0
    end: int = -1  # the token that ends every text, where the tokenizer has one: a truncated text keeps it
    _on: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _lengths: dict[int, tuple[int, float]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.start) - 1

    def __deepcopy__(self, memo: object) -> Texts:
        return self  # immutable: copies of a tower share it

    def lengths(self) -> np.ndarray:
        """(n,) number of tokens of each text."""
        return np.diff(self.start)

    def longest_and_mean(self, max_len: int) -> tuple[int, float]:
        """The largest and the mean number of tokens, when each text is truncated to max_len."""
        if max_len not in self._lengths:
            length = np.minimum(self.lengths(), max_len)
            self._lengths[max_len] = (int(length.max()), float(length.mean())) if len(length) else (0, 0.0)
        return self._lengths[max_len]

    def padded(self, index: Tensor, max_len: int, longest: int | None = None) -> tuple[Tensor, Tensor]:
        """Token ids (n, longest) int64 and mask (n, longest) of the texts at index (n,), each truncated to max_len.

        `longest` is an upper bound on their tokens. Without it, it is computed, which synchronises the device.
        """
        tokens, begin, length, cut = self._spans(index, max_len)
        if longest is None:
            longest = max(int(length.max()), 1) if len(length) else 1
        place = torch.arange(longest, device=index.device)
        mask = place < length[:, None]
        position = (begin[:, None] + place).clamp_(max=max(len(tokens) - 1, 0))
        ids = tokens[position].long() if len(tokens) else torch.zeros_like(position)
        if self.end >= 0:
            ids.masked_fill_(cut[:, None] & (place == length[:, None] - 1), self.end)
        return ids.masked_fill_(~mask, self.pad), mask

    def flat(self, index: Tensor, max_len: int) -> tuple[Tensor, Tensor]:
        """Token ids (t,) int64 of successive texts, and the offset of each text (n,), for nn.EmbeddingBag."""
        tokens, begin, length, cut = self._spans(index, max_len)
        offsets = length.cumsum(0) - length
        ids = tokens[
            torch.arange(int(length.sum()), device=index.device) + (begin - offsets).repeat_interleave(length)
        ].long()
        if self.end >= 0:
            ids[(offsets + length - 1)[cut & (length > 0)]] = self.end
        return ids, offsets

    def _spans(self, index: Tensor, max_len: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All tokens, and for each text of an index: its start, its length, and whether it is truncated."""
        if index.device not in self._on:
            both = torch.from_numpy(self.tokens), torch.from_numpy(self.start)
            self._on[index.device] = both[0].to(index.device), both[1].to(index.device)
        tokens, start = self._on[index.device]
        index = index.long()
        begin = start[index]
        full = start[index + 1] - begin
        return tokens, begin, full.clamp(max=max_len), full > max_len

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write to a folder; `load` accepts it only when it is complete."""
        folder = Path(folder)
        save_array(folder / "start.npy", self.start)
        save_array(folder / "tokens.npy", self.tokens)
        # Last, as an array, because an array is written atomically.
        save_array(folder / "texts.npy", np.array([self.vocabulary, self.pad, self.end], dtype=np.int64))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Texts:
        """The texts of a saved folder, with memory-mapped tokens."""
        folder = Path(folder)
        if not (folder / "texts.npy").is_file():
            raise UserError(f"{folder} holds no tokens: it has no texts.npy")
        about, start = (
            files.read_array(folder / "texts.npy", np.int64),
            files.read_array(folder / "start.npy", np.int64),
        )
        tokens = np.zeros(0, dtype=np.int32)
        if start[-1:].any():  # an empty file cannot be mapped
            tokens = files.read_array(folder / "tokens.npy", np.int32)
        if about.shape != (3,) or start.ndim != 1 or tokens.shape != (start[-1],) or (np.diff(start) < 0).any():
            raise UserError(f"{folder} is corrupt: its files do not belong together")
        return cls(tokens, np.array(start), *about.tolist())


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
    encoder = find_tokenizer(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
    series = as_series(strings)
    parts, lengths = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.int64)]
    for begin in range(0, len(series), _BATCH):
        tokens, length = encoder.encode(series.slice(begin, _BATCH), max_len)
        parts.append(tokens)
        lengths.append(length)
        if progress is not None:
            progress("tokens", min(begin + _BATCH, len(series)), len(series))
    start = np.zeros(len(series) + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=start[1:])
    return Texts(np.concatenate(parts), start, encoder.vocabulary, encoder.pad, encoder.end)


def tokenized(
    strings: Sequence[str] | pl.Series,
    tokenizer: Tokenizer | str | Path,
    max_len: int,
    cache: str | os.PathLike[str] | None = None,
    progress: ItemProgress | None = None,
) -> Texts:
    """Tokens of texts as a memory map, computed once for the same texts, tokenizer and max_len.

    They are kept in `cache`, by default `texts` in the cache folder ($SPARRING_HOME, else ~/.cache/sparring). The
    tokenizer is `minilm`, `wordllama`, `words` (hashed words, without any package), an installed package, a folder, a
    file, or an object.

        tokenized(text_of(data, "item"), "minilm", 32)
    """
    encoder = find_tokenizer(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
    series, progress = as_series(strings), progress or _listener.get()
    key = hash_of(["tokens 2", encoder.fingerprint, str(max_len), *series.to_list()])
    folder = (Path(cache) if cache is not None else cache_folder() / "texts") / key
    problems = check_folder(folder)
    if problems:
        if (folder / NAME).is_file():
            log.warning("%s is damaged: its texts are tokenised again", problems[0].path)
        tokenize(series, encoder, max_len, progress).save(folder)
        write_manifest(folder)
    elif progress is not None and len(series):
        progress("tokens", len(series), len(series))
    return Texts.load(folder)


@contextmanager
def reporting(progress: ItemProgress) -> Iterator[None]:
    """Report the progress of all tokenising inside the block that has no other listener.

    with reporting(show): build("default", data, {"encoder": "bag"})
    """
    before = _listener.set(progress)
    try:
        yield
    finally:
        _listener.reset(before)


def as_series(strings: Sequence[str] | pl.Series) -> pl.Series:
    """Texts as a polars column without nulls; an error names a value that is not a text."""
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
    """The text of every query or item, in dense order, "" where missing: the named columns, else those of `find_texts`.

    The texts of several columns are joined by spaces; equal ones appear once.

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
    """The text columns of queries or items: a title, a body (`text`, `description`, ...), or both, as in BEIR.

    ("id",) if there are no text columns and the ids themselves are texts: at least a tenth of them contain a space.
    Otherwise an error lists the columns.
    """
    table, ids = (data.query_table, data.query_ids) if role == "query" else (data.item_table, data.item_ids)
    names = _strings(table)
    columns = table_text_columns(role, names)
    if len(columns) > 1 and table is not None:
        head, body = (pl.col(name).fill_null("").str.strip_chars() for name in columns)
        inside = (body == head) | body.str.starts_with(pl.concat_str(head, pl.lit(" "))) | (head == "")
        if table.select(inside.all()).item():  # every text begins with its title
            return columns[1:]
    if columns:
        return columns
    if ids.kind == "text" and not set(names) - {IDS} and _look_like_texts(ids.ids):
        return (IDS,)
    where = "queries" if role == "query" else "items"
    first = f"cannot tell which column is the text of the {where}" if names else f"there are no texts of the {where}"
    raise UserError(f"{first}: {_there_are(role, names)}")


def has_texts(data: Interactions | Ids, role: Role) -> bool:
    """Whether the table of queries or items has a column with the name of a text."""
    return bool(table_text_columns(role, _strings(data.query_table if role == "query" else data.item_table)))


def joined_text(parts: Sequence[str | None]) -> str:
    """The text of one query or item from its columns, joined as in `text_of`.

    >>> joined_text(["Shoes", None, "red and blue"]), joined_text(["Hat", "Hat"])
    ('Shoes red and blue', 'Hat')
    """
    return " ".join(dict.fromkeys(part.strip() for part in parts if part and part.strip()))


def _joined(table: pl.DataFrame, columns: Sequence[str]) -> pl.Series:
    if len(columns) == 1:
        return table[columns[0]].cast(pl.String).fill_null("").alias("text")
    parts = pl.concat_list(pl.col(name).cast(pl.String).str.strip_chars() for name in columns)
    texts = parts.list.eval(pl.element().filter(pl.element().is_not_null() & (pl.element() != ""))).list.unique(
        maintain_order=True
    )
    return table.select(texts.list.join(" ").alias("text"))["text"]


def _strings(table: pl.DataFrame | None) -> list[str]:
    return [] if table is None else [name for name, kind in table.schema.items() if kind == pl.String]


def _look_like_texts(ids: pl.Series) -> bool:
    spaced = ids.str.strip_chars().str.contains(r"\s")
    return int(spaced.sum()) >= 0.1 * len(ids)


def _there_are(role: Role, names: Sequence[str]) -> str:
    """Advice on texts that were not found."""
    if names:
        return f"its columns of text are {', '.join(names)}: name one or more with --set {role}_text=COLUMN,COLUMN"
    file = "--queries FILE" if role == "query" else "--items FILE"
    return f"give a table with a column `text` ({file}), or --set {role}_text=id to read the ids themselves"
