"""All vector stores by name, and what every export to one of them does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import torch

from sparring.core.errors import UserError, did_you_mean
from sparring.serving.export.lance import LanceItems
from sparring.serving.export.milvus import MilvusItems
from sparring.serving.export.opensearch import ElasticsearchItems, OpenSearchItems
from sparring.serving.export.pgvector import PostgresItems
from sparring.serving.export.qdrant import QdrantItems
from sparring.serving.export.rows import Rows, plain_ids, ranked_queries, ranked_vectors
from sparring.serving.export.store import Store
from sparring.training.trained import How, Trained

_BLOCK = 10_000  # rows per upsert
STORES: dict[str, Callable[[str, str, pl.Schema], Store]] = {  # core/choices.py has the forms of their addresses
    "milvus": MilvusItems,
    "pgvector": PostgresItems,
    "qdrant": QdrantItems,
    "lancedb": LanceItems,
    "opensearch": OpenSearchItems,
    "elasticsearch": ElasticsearchItems,
}


def open_store(name: str, address: str, table: str, schema: pl.Schema) -> Store:
    """Open a table of a store for rows of this schema.

    rows = item_rows(load("runs/first"))
    store = open_store("qdrant", "http://localhost:6333", "items", rows.schema)
    """
    if name not in STORES:
        raise UserError(f"unknown store {name!r}{did_you_mean(name, STORES)}: the stores are {', '.join(STORES)}")
    return STORES[name](address, table, schema)


def send(rows: Rows, store: Store, progress: Callable[[int, int], None] | None = None) -> tuple[int, int]:
    """Replace the content of a store by rows: (rows written, rows deleted).

    Rows are written first, then others are deleted. Meanwhile readers see old and new vectors.
    """
    for begin in range(0, len(rows), _BLOCK):
        store.upsert(rows.part(begin, begin + _BLOCK))
        if progress is not None:
            progress(min(begin + _BLOCK, len(rows)), len(rows))
    old = store.ids()
    gone = old.filter(~old.is_in(rows.ids.implode()))
    deleted = store.delete(gone) if len(gone) else 0
    store.finish()
    return len(rows), deleted


def agreement(trained: Trained, store: Store, k: int = 10, queries: int = 100, how: How = "towers") -> float:
    """The share of the run's own lists that a store finds, for some queries, each without the items that it has taken.

    For the fused ranking these are its shortlists.
    An item with the score of the last one of the exact list counts as found: stores break ties in their own ways.
    """
    n = len(trained.ids.query_ids)
    rows = torch.from_numpy(np.unique(np.linspace(0, n - 1, min(queries, n)).round().astype(np.int64)))
    q, taken = ranked_queries(trained, rows, how), trained.eligibility.taken(rows)
    deny = [taken.items[taken.start[row] : taken.start[row + 1]].numpy() for row in range(len(rows))]
    k = min(k, trained.model.n_items)
    scores, best = trained.eligibility.ranking(ranked_vectors(trained, how)).best(q, k, taken)
    ids = plain_ids(trained.ids.item_ids.ids)
    found = store.search(q.float().cpu().numpy(), k, deny=[ids.gather(items).to_list() for items in deny])
    exact = hit = 0
    for row, values, items in zip(found, scores.cpu().numpy(), best.cpu().numpy(), strict=True):
        values = values[items >= 0]
        exact += len(values)
        hit += sum(score >= values[-1] - 1e-5 * max(1.0, abs(values[-1])) for _, score in row) if len(values) else 0
    return hit / exact if exact else 1.0
