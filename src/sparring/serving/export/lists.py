"""The best items of every query of a run as one Parquet or CSV file, written while they are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import polars as pl
import torch
from polars.io.plugins import register_io_source

from sparring.core import files
from sparring.core.errors import UserError
from sparring.serving.index.search import Index
from sparring.training.trained import How, Trained

_BLOCK = 4096  # queries ranked at once; each block is a row group


def write_lists(
    trained: Trained,
    path: Path,
    k: int = 100,
    with_seen: bool = False,
    index: Index | None = None,
    progress: Callable[[int, int], None] | None = None,
    how: How | None = None,
) -> int:
    """Write query, rank, item, score of the k best items of every query, best first; the number of rows.

    Exact, or through an index, which has the towers alone; `how` is the ranking of `Trained.recommend`. Blocks of queries are ranked and
    written in turn, so memory does not grow with the number of queries. The file appears under its name when it is whole; a stop before
    leaves what was there. CSV where the name ends in .csv, Parquet where it ends in .parquet. `progress(done, total)` counts queries.

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
    rows = 0

    def ranked(at: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        q, taken = trained.model.query_vectors(at), None if with_seen else trained.eligibility.taken(at)
        if ranking is not None:
            scores, best = ranking.best(q, k, taken)
            return scores.cpu().numpy(), best.cpu().numpy()
        assert index is not None
        return index.search(q.float().cpu().numpy(), k, taken, deny=untrained)

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
    files.write(path, lambda file: _stream(tables, schema, file, csv, block * k))
    return rows


def check_file(path: Path) -> None:
    """Refuse a name that no lists can be written under."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file, such as {path / 'lists.parquet'}")
    if path.suffix.lower() not in (".parquet", ".csv"):
        raise UserError(f"{path} does not say what to write: end its name in .parquet or .csv")


def _stream(
    tables: Callable[[], Iterator[pl.DataFrame]], schema: Mapping[str, object], path: Path, csv: bool, group: int
) -> None:
    """One file from tables as they come; no more than a few are in memory."""

    failed: list[Exception] = []

    def source(columns: object, predicate: object, n_rows: object, size: object) -> Iterator[pl.DataFrame]:
        try:
            yield from tables()
        except Exception as error:  # polars would make it one of its own
            failed.append(error)
            raise

    lazy = register_io_source(source, schema=schema)  # type: ignore[arg-type]
    try:
        if csv:
            lazy.sink_csv(path)
        else:
            lazy.sink_parquet(path, row_group_size=group, compression="zstd", compression_level=1)
    except Exception as error:
        raise failed[0] if failed else error from None
