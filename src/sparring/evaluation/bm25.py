"""BM25: ranking by words alone, the reference for trained text retrievers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl

from sparring.core.errors import UserError
from sparring.core.types import Positives
from sparring.data.pairs import within
from sparring.data.texts.texts import as_series

_BLOCK = 1 << 24  # scores held at once


def bm25(
    items: Sequence[str] | pl.Series,
    queries: Sequence[str] | pl.Series,
    k: int,
    seen: Positives | None = None,
    query_ids: np.ndarray | None = None,
    *,
    k1: float = 1.5,
    b: float = 0.75,
    stopwords: str | None = "en",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k items that BM25 ranks best for each query: ids (B, k) and scores (B, k).

        score(q, d) = sum over words w of q of  idf(w) f / (f + k1 (1 - b + b |d| / mean |d|))
        idf(w) = ln(1 + (N - n_w + 0.5) / (n_w + 0.5))

    where w occurs f times in d and in n_w items: Lucene's form, by the library bm25s (the extra `text`). Words are in
    lower case and of at least two letters, without the stop words of a language (None keeps them). Equal scores are in
    ascending order of id. An item that shares no word with the query is not listed: its place is -1 with score 0.
    `seen` items of the queries `query_ids` (by default 0..B-1) are excluded, as in `evaluate`; `progress(done, total)`
    is called after each block.

        lists, scores = bm25(text_of(data, "item"), ["red shoes"], 10)

    Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009; Lu, BM25S, 2024.
    """
    try:
        import bm25s
    except ImportError as error:
        raise UserError('BM25 needs more packages; run: pip install "sparring[text]"') from error
    corpus, texts = as_series(items), as_series(queries)
    if not 1 <= k <= len(corpus):
        raise UserError(f"k is {k}; it must be between 1 and the {len(corpus):,} items")
    words: dict[str, Any] = {"stopwords": stopwords, "show_progress": False}
    tokens = bm25s.tokenize(corpus.to_list(), **words)
    if not any(word for word in tokens.vocab):
        raise UserError("no item has a word that BM25 can find: the texts are empty or hold only stop words")
    index = bm25s.BM25(k1=k1, b=b, method="lucene")
    index.index(tokens, show_progress=False)
    tokens_of_queries = bm25s.tokenize(texts.to_list(), return_ids=False, **words)
    ids = np.arange(len(texts)) if query_ids is None else np.asarray(query_ids)
    best, scores = np.full((len(texts), k), -1, dtype=np.int64), np.zeros((len(texts), k), dtype=np.float32)
    step = max(1, _BLOCK // len(corpus))
    for start in range(0, len(texts), step):
        rows = slice(start, min(start + step, len(texts)))
        block = np.zeros((rows.stop - start, len(corpus)), dtype=np.float32)
        for row, query in enumerate(tokens_of_queries[rows]):
            known = [word for word in query if word in index.vocab_dict]
            if known:
                block[row] = index.get_scores(known)
        if seen is not None:
            block[_pairs(seen, ids[rows])] = 0
        best[rows], scores[rows] = _best(block, k)
        if progress is not None:
            progress(rows.stop, len(texts))
    return best, scores


def _pairs(seen: Positives, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, items) that the queries have seen."""
    start, items = seen.start.cpu().numpy(), seen.items.cpu().numpy()
    count = start[queries + 1] - start[queries]
    rows = np.repeat(np.arange(len(queries)), count)
    return rows, items[np.repeat(start[queries], count) + within(count)]


def _best(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best of each row by descending score, ties by ascending id; -1 where a score is 0."""
    bound = -np.partition(-scores, k - 1, axis=1)[:, k - 1 : k]
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
