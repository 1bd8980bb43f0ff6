"""BM25: ranking by words alone, the reference for trained text retrievers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import polars as pl

from sparring.core.errors import UserError
from sparring.core.extras import optional
from sparring.core.types import Positives
from sparring.data.pairs import within
from sparring.data.texts.texts import as_series

_BLOCK = 1 << 24  # scores held at once


Texts = Sequence[str] | pl.Series


class Bm25:
    """An index of the words of items, which scores and ranks them for queries.

        score(q, d) = sum over words w of q of  idf(w) f / (f + k1 (1 - b + b |d| / mean |d|))
        idf(w) = ln(1 + (N - n_w + 0.5) / (n_w + 0.5))

    where w occurs f times in d and in n_w items: Lucene's form, by the library bm25s (the extra `text`). Words are in
    lower case and of at least two letters, without the stop words of a language (None keeps them).

        Bm25(text_of(data, "item")).best(["red shoes"], 10)

    Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009; Lu, BM25S, 2024.
    """

    def __init__(self, items: Texts, k1: float = 1.5, b: float = 0.75, stopwords: str | None = "en") -> None:
        self._library = optional("bm25s", "text", "BM25")
        self._words = {"stopwords": stopwords, "show_progress": False}
        corpus = as_series(items)
        tokens = self._library.tokenize(corpus.to_list(), **self._words)
        if not any(word for word in tokens.vocab):
            raise UserError("no item has a word that BM25 can find: the texts are empty or hold only stop words")
        self._index = self._library.BM25(k1=k1, b=b, method="lucene")
        self._index.index(tokens, show_progress=False)
        self.n_items = len(corpus)

    def scores(self, queries: Texts) -> Iterator[np.ndarray]:
        """The scores (N,) of all items, query by query; 0 without a common word."""
        for query in self._library.tokenize(as_series(queries).to_list(), return_ids=False, **self._words):
            known = [word for word in query if word in self._index.vocab_dict]
            yield self._index.get_scores(known) if known else np.zeros(self.n_items, np.float32)

    def best(
        self, queries: Texts, k: int, seen: Positives | None = None, query_ids: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids (B, k) and scores (B, k) of the best items for each query, equal scores in ascending order of id.

        An item that shares no word with the query is not listed: its place is -1 with score 0. `seen` items of the
        queries `query_ids` (by default 0..B-1) are excluded, as in `evaluate`.
        """
        ids = np.arange(len(queries)) if query_ids is None else np.asarray(query_ids)
        best, scores = np.full((len(ids), k), -1, dtype=np.int64), np.zeros((len(ids), k), dtype=np.float32)
        rows, step = self.scores(queries), max(1, _BLOCK // self.n_items)
        for part in (slice(start, start + step) for start in range(0, len(ids), step)):
            block = np.stack([np.asarray(row, np.float32) for row in islice(rows, len(ids[part]))])
            if seen is not None:
                block[_pairs(seen, ids[part])] = 0
            best[part], scores[part] = _best(block, k)
        return best, scores


def bm25(
    items: Texts,
    queries: Texts,
    k: int,
    seen: Positives | None = None,
    query_ids: np.ndarray | None = None,
    *,
    k1: float = 1.5,
    b: float = 0.75,
    stopwords: str | None = "en",
) -> tuple[np.ndarray, np.ndarray]:
    """The k items that BM25 ranks best for each query: ids (B, k) and scores (B, k), as of `Bm25.best`.

    lists, scores = bm25(text_of(data, "item"), ["red shoes"], 10)
    """
    index = Bm25(items, k1, b, stopwords)
    if not 1 <= k <= index.n_items:
        raise UserError(f"k is {k}; it must be between 1 and the {index.n_items:,} items")
    return index.best(queries, k, seen, query_ids)


def _pairs(seen: Positives, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, items) that the queries have seen."""
    start, items = seen.start.cpu().numpy(), seen.items.cpu().numpy()
    count = start[queries + 1] - start[queries]
    rows = np.repeat(np.arange(len(queries)), count)
    return rows, items[np.repeat(start[queries], count) + within(count)]


def _best(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best of each row by descending score, ties by ascending id; -1 where a score is 0."""
    last = min(k, scores.shape[1]) - 1
    bound = -np.partition(-scores, last, axis=1)[:, last : last + 1]
    rows, items = np.nonzero((scores >= bound) & (scores > 0))
    value = scores[rows, items]
    order = np.lexsort((items, -value, rows))
    rows, items, value = rows[order], items[order], value[order]
    count = np.bincount(rows, minlength=len(scores))
    place = within(count)
    inside = place < k
    best, best_scores = np.full((len(scores), k), -1, dtype=np.int64), np.zeros((len(scores), k), dtype=np.float32)
    best[rows[inside], place[inside]], best_scores[rows[inside], place[inside]] = items[inside], value[inside]
    return best, best_scores
