"""TF-IDF: the nearest texts by the words that they share, the untrained baseline of text retrievers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sparring.core.topk import top_k
from sparring.core.types import Positives
from sparring.data.texts.texts import as_series

COMMON = 0.1  # a word in more than this share of the texts says nothing, as stop words do
_WORD = r"\b\w\w+\b"
_SCORES = 1 << 22  # computed at once


class TfIdf:
    """Items by the cosine of their TF-IDF vectors with those of the queries. Ranked by `evaluate`, as a model is.

        weight(w, text) = (1 + ln f) idf(w),     idf(w) = ln((1 + n) / (1 + n_w)) + 1

    where w occurs f times in the text and in n_w of the n texts that are counted: items and `counted`, such as the
    queries of the training part. Words are in lower case and of at least two letters, without those in more than a
    tenth of the texts. An item that shares no word with a query is not listed.

        TfIdf(text_of(data, "item"), text_of(data, "query")).lists(torch.tensor([0]), 10, None)
    """

    def __init__(
        self,
        items: Sequence[str] | pl.Series,
        queries: Sequence[str] | pl.Series,
        counted: Sequence[str] | pl.Series = (),
    ) -> None:
        item_words, self._queries = _words(as_series(items)), as_series(queries)
        self.n_items = len(items)
        n = self.n_items + len(counted)
        texts = pl.concat([item_words, _words(as_series(counted)).with_columns(pl.col("text") + self.n_items)])
        known = texts.group_by("word").len("texts").filter(pl.col("texts") <= max(1.0, COMMON * n))
        idf = ((1 + n) / (1 + pl.col("texts"))).log() + 1
        self._idf = known.sort("word").select("word", idf.alias("idf")).with_row_index("at")
        weights = _weighted(item_words, self._idf)
        length = pl.col("weight").pow(2).sum().sqrt().over("text")
        postings = weights.with_columns(pl.col("weight") / length).sort("at", "text")
        self._items, self._weights = postings["text"].to_numpy(), postings["weight"].to_numpy()
        count = np.bincount(postings["at"].to_numpy(), minlength=len(self._idf))
        self._start = np.concatenate([[0], np.cumsum(count)])  # of the items of each word

    def to(self, device: torch.device | str) -> Self:
        """Itself: it is computed on the CPU."""
        return self

    def lists(self, ids: Tensor, k: int, seen: Positives | None) -> Tensor:
        """(B, k): the best items of these queries, padded with -1."""
        rows, parts = ids.cpu(), []
        seen = None if seen is None else seen.to(torch.device("cpu"))
        for block in rows.split(max(1, _SCORES // self.n_items)):
            scores, items = top_k(self._scores(block.numpy()), None, k, seen, block)
            parts.append(items.masked_fill(scores <= 0, -1))
        return torch.cat(parts)

    def _scores(self, queries: np.ndarray) -> Tensor:
        """(B, N): cosines, up to the length of each query's vector."""
        asked = _weighted(_words(self._queries.gather(queries)), self._idf)
        row, at, weight = (asked[name].to_numpy() for name in ("text", "at", "weight"))
        first, count = self._start[at], self._start[at + 1] - self._start[at]
        place = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(count.sum())
        cell = np.repeat(row.astype(np.int64) * self.n_items, count) + self._items[place]
        shape = len(queries), self.n_items
        total = np.bincount(cell, np.repeat(weight, count) * self._weights[place], minlength=shape[0] * shape[1])
        return torch.from_numpy(total.reshape(shape).astype(np.float32))


def _words(texts: pl.Series) -> pl.DataFrame:
    """text, word, count: how often each word occurs in each text."""
    found = texts.str.to_lowercase().str.extract_all(_WORD).alias("word").to_frame()
    words = found.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("text")).explode("word").drop_nulls()
    return words.group_by("text", "word").len("count").select("text", "word", "count")


def _weighted(words: pl.DataFrame, idf: pl.DataFrame) -> pl.DataFrame:
    """text, at, weight of the known words."""
    weight = (1 + pl.col("count").log()) * pl.col("idf")
    return words.join(idf, "word").select("text", "at", weight.alias("weight"))
