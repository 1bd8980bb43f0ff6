"""Vectors of items from the columns of their table, without an encoder: modalities for clusters that need no file."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from sparring.models.spectral_start import spectral

_WORDS = (pl.String, pl.Categorical, pl.Enum)


def column_vectors(table: pl.DataFrame, dim: int = 64, seed: int = 0) -> dict[str, np.ndarray]:
    """Column -> vectors (N, width) of the items of a table; an item without a value has a row of zeros.

    Texts count by their words and lists of texts by their elements: unit vectors of the truncated SVD of the matrix of
    words and items, as `spectral` makes them of queries and items. Columns of vectors are taken as they are. Other
    numbers, and columns without two words that items share, are left out.

        column_vectors(pl.DataFrame({"title": ["red shoe", "blue shoe", "blue hat"]}), dim=2)
    """
    found: dict[str, np.ndarray] = {}
    for name, kind in table.schema.items():
        if kind in _WORDS:
            lists = table[name].cast(pl.String).str.to_lowercase().str.extract_all(r"\w+")
        elif kind == pl.List(pl.String):
            lists = table[name]
        else:
            if isinstance(kind, pl.List | pl.Array) and kind.inner.is_float():
                vectors = _stacked(table[name])
                found |= {} if vectors is None else {name: vectors}
            continue
        words = _shared_words(lists, dim, seed)
        found |= {} if words is None else {name: words.numpy()}
    return found


def _shared_words(lists: pl.Series, dim: int, seed: int) -> Tensor | None:
    """(N, dim) unit vectors of items by the words that they share; None if fewer than two words are shared."""
    pairs = pl.DataFrame({"item": np.arange(len(lists)), "word": lists}).explode("word").drop_nulls().unique()
    shared = pairs.filter(pl.len().over("word") > 1).with_columns(word=pl.col("word").rank("dense").cast(pl.Int64) - 1)
    if shared["word"].n_unique() < 2:
        return None
    word, item = (
        torch.from_numpy(shared.sort("word", "item")[name].to_numpy(writable=True)) for name in shared.columns[::-1]
    )
    count = torch.bincount(word)
    start = torch.cat([count.new_zeros(1), count.cumsum(0)])
    width = max(1, min(dim, len(lists) // 4, len(count)))  # further directions of a small matrix are noise
    return F.normalize(spectral(start, item, len(lists), width, seed=seed)[1], dim=1)


def _stacked(column: pl.Series) -> np.ndarray | None:
    """(N, width) float32, zero where there is no vector; None if lengths differ."""
    rows = column.cast(pl.List(pl.Float32)).to_list()
    widths = {len(row) for row in rows if row}
    if len(widths) != 1:
        return None
    nothing = [0.0] * widths.pop()
    return np.array([row or nothing for row in rows], dtype=np.float32)
