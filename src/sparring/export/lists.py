"""The best items of every query of a run as one Parquet or CSV file, written while they are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import polars as pl
import torch
from polars.io.plugins import register_io_source

from sparring import disk
from sparring.errors import UserError
from sparring.index.search import Index
from sparring.rank import top_k
from sparring.runs import Trained
from sparring.types import Positives

_BLOCK = 4096  # queries ranked at once; each block is a row group


def write_lists(
    trained: Trained,
    path: Path,
    k: int = 100,
    with_seen: bool = False,
    index: Index | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write query, rank, item, score of the k best items of every query, best first; the number of rows.

    Exact, or through an index. Blocks of queries are ranked and written in turn, so memory does not grow with the number of queries. The
    file appears under its name when it is whole; a stop before leaves what was there. CSV where the name ends in .csv, Parquet where it
    ends in .parquet. `progress(done, total)` counts queries.

        write_lists(load("runs/first"), Path("lists.parquet"), k=100)
    """
    n_queries, n_items = len(trained.ids.query_ids), len(trained.ids.item_ids)
    if not 1 <= k <= n_items:
        raise UserError(f"k is {k}; it must be between 1 and the {n_items:,} items of the catalogue")
    check_file(path)
    block = max(64, min(_BLOCK, (1 << 19) // k))
    queries, items = trained.ids.query_ids.ids, trained.ids.item_ids.ids
    vectors = trained.item_vectors() if index is None else None
    seen = None if with_seen else trained.seen
    rows = 0

    def ranked(at: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        q = trained.model.query_vectors(at)
        if vectors is not None:
            scores, best = top_k(q, vectors, k, seen, at)
            return scores.cpu().numpy(), best.cpu().numpy()
        assert index is not None
        return index.search(q.float().cpu().numpy(), k, None if seen is None else _rows(seen, at))

    def tables() -> Iterator[pl.DataFrame]:
        nonlocal rows
        ranks = np.arange(1, k + 1, dtype=np.int32)
        for begin in range(0, n_queries, block):
            at = torch.arange(begin, min(begin + block, n_queries))
            scores, best = ranked(at)
            table = {
                "query": queries.gather(np.repeat(at.numpy(), k)),
                "rank": np.tile(ranks, len(at)),
                "item": items.gather(best.ravel().clip(min=0)),
                "score": scores.astype(np.float32, copy=False).ravel(),
            }
            found = pl.DataFrame(table)
            if best[:, -1].min(initial=0) < 0:  # some query has fewer than k unseen items
                found = found.filter(pl.Series(best.ravel() >= 0))
            rows += len(found)
            if progress is not None:
                progress(min(begin + block, n_queries), n_queries)
            yield found

    schema = {"query": queries.dtype, "rank": pl.Int32, "item": items.dtype, "score": pl.Float32}
    csv = path.suffix.lower() == ".csv"
    disk.write(path, lambda file: _stream(tables, schema, file, csv, block * k))
    return rows


def check_file(path: Path) -> None:
    """Refuse a name that no lists can be written under."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file, such as {path / 'lists.parquet'}")
    if path.suffix.lower() not in (".parquet", ".csv"):
        raise UserError(f"{path} does not say what to write: end its name in .parquet or .csv")


def _stream(tables: Callable[[], Iterator[pl.DataFrame]], schema: Mapping[str, object], path: Path, csv: bool, group: int) -> None:
    """One file from tables as they come; no more than a few are in memory."""

    def source(columns: object, predicate: object, n_rows: object, size: object) -> Iterator[pl.DataFrame]:
        return tables()

    lazy = register_io_source(source, schema=schema)  # type: ignore[arg-type]
    if csv:
        lazy.sink_csv(path)
    else:
        lazy.sink_parquet(path, row_group_size=group, compression="zstd", compression_level=1)


def _rows(seen: Positives, at: torch.Tensor) -> Positives:
    """What a run of consecutive queries has seen, row i for the i-th of them."""
    begin, end = int(at[0]), int(at[-1]) + 1
    start = seen.start[begin : end + 1]
    return Positives(start - start[0], seen.items[int(start[0]) : int(start[-1])])
