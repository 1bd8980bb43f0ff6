"""The best items for every query of a run as one Parquet or CSV file, streamed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import polars as pl
import torch
from polars.io.plugins import register_io_source

from sparring.core import files
from sparring.core.errors import UserError, one_line
from sparring.core.locks import writing
from sparring.data.remote import place_of
from sparring.serving.index.searchable import Searchable
from sparring.training.trained import How, Trained

_BLOCK = 4096  # queries per block and row group


def write_lists(
    trained: Trained,
    path: Path | str,
    k: int = 100,
    with_seen: bool | None = None,
    index: Searchable | None = None,
    progress: Callable[[int, int], None] | None = None,
    how: How | None = None,
) -> int:
    """Write query, rank, item and score of the k best items for every query, best first; returns the number of rows.

    Exact, by the ranking `how` of `Trained.recommend`, or with an index, by the one it was built for. Queries are
    ranked and written in blocks, so memory does not grow with their number. The file is written atomically, as CSV or
    Parquet according to its suffix; it may be at an address, such as s3://BUCKET/lists.parquet. `progress(done, total)`
    counts queries.

        write_lists(load("runs/first"), Path("lists.parquet"), k=100)
    """
    n_queries, n_items = len(trained.ids.query_ids), len(trained.ids.item_ids)
    if not 1 <= k <= n_items:
        raise UserError(f"k is {k}; it must be between 1 and the {n_items:,} items of the catalogue")
    check_file(path)
    block = max(64, min(_BLOCK, (1 << 19) // k))
    queries, items = trained.ids.query_ids.ids, trained.ids.item_ids.ids
    ranking = trained.ranking(how) if index is None else None
    untrained = trained.eligibility.items.numpy() if len(trained.eligibility.items) else None
    lists_seen, total = trained.lists_seen(with_seen), 0

    def ranked(rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        q, seen = trained.model.query_vectors(rows), None if lists_seen else trained.eligibility.taken(rows)
        if ranking is not None:
            scores, best = ranking.best(q, k, seen)
            return scores.cpu().numpy(), best.cpu().numpy()
        assert index is not None
        return index.search(q.float().cpu().numpy(), k, seen, deny=untrained)

    def tables() -> Iterator[pl.DataFrame]:
        nonlocal total
        ranks = np.arange(1, k + 1, dtype=np.int32)
        for begin in range(0, n_queries, block):
            rows = torch.arange(begin, min(begin + block, n_queries))
            scores, best = ranked(rows)
            table = {
                "query": queries.gather(np.repeat(rows.numpy(), k)),
                "rank": np.tile(ranks, len(rows)),
                "item": items.gather(best.ravel().clip(min=0)),
                "score": scores.astype(np.float32, copy=False).ravel(),
            }
            lists = pl.DataFrame(table)
            if best[:, -1].min(initial=0) < 0:  # some query has fewer than k unseen items
                lists = lists.filter(pl.Series(best.ravel() >= 0))
            total += len(lists)
            if progress is not None:
                progress(min(begin + block, n_queries), n_queries)
            yield lists

    schema = {"query": queries.dtype, "rank": pl.Int32, "item": items.dtype, "score": pl.Float32}
    csv = str(path).lower().endswith(".csv")
    if isinstance(path, str):
        with one_line(f"cannot write {path}", OSError, pl.exceptions.PolarsError):
            _stream(tables, schema, str(place_of(path)), csv, block * k)
        return total
    with writing(path):
        files.write(path, lambda file: _stream(tables, schema, file, csv, block * k))
    return total


def check_file(path: Path | str) -> None:
    """Raise UserError unless lists can be written to this file."""
    if isinstance(path, Path) and path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file, such as {path / 'lists.parquet'}")
    if not str(path).lower().endswith((".parquet", ".csv")):
        raise UserError(f"{path} has no known format: use a name that ends in .parquet or .csv")


def _stream(
    tables: Callable[[], Iterator[pl.DataFrame]], schema: Mapping[str, object], path: Path | str, csv: bool, group: int
) -> None:
    """Stream tables into one file, with only a few of them in memory.

    polars works in another thread: this one would see no signal until the file is complete.
    """
    failed: list[Exception] = []
    stopped = threading.Event()

    def source(columns: object, predicate: object, n_rows: object, size: object) -> Iterator[pl.DataFrame]:
        try:
            for table in tables():
                if stopped.is_set():
                    raise InterruptedError("stopped by a signal")
                yield table
        except Exception as error:  # polars would replace it by one of its own
            failed.append(error)
            raise

    def sink() -> None:
        lazy = register_io_source(source, schema=schema)  # type: ignore[arg-type]
        if csv:
            lazy.sink_csv(path)
        else:
            lazy.sink_parquet(path, row_group_size=group, compression="zstd", compression_level=1)

    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(sink).result()
        except Exception as error:
            raise failed[0] if failed else error from None
        except KeyboardInterrupt:
            stopped.set()
            raise
