"""`sparring prepare`: interactions of any size into a folder of memory-mapped columns, in bounded memory.

An engine numbers the ids and leaves the rows in buckets of whole queries (encoded.py). From there on everything is the same for every
engine: each bucket is sorted by (query, item) and its duplicates merged, rows are assigned to parts by the rules of `split`, in the order
of queries, and written to the columns of prepared.py. The parts are those that `split` would give in memory, to the row.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from sparring.core.errors import UserError, disk_full
from sparring.data.formats.beir import is_beir
from sparring.data.formats.xc import is_xc
from sparring.data.interactions import Ids
from sparring.data.opening import open_table
from sparring.data.prepared import polars_engine
from sparring.data.prepared.buckets import merge, write_parts
from sparring.data.prepared.encoding import Raw, Tell
from sparring.data.prepared.format import Prepared, is_prepared, read_prepared, write_description
from sparring.data.splits import check_split
from sparring.data.table import align

Engine = Literal["polars", "spark"]


def prepare(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    query: str | None = None,
    item: str | None = None,
    time: str | None = None,
    weight: str | None = None,
    rating: str | None = None,
    min_rating: float | None = None,
    split: str | None = None,
    label: str | None = None,
    items: str | os.PathLike[str] | None = None,
    queries: str | os.PathLike[str] | None = None,
    how: str = "auto",
    valid: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    engine: Engine = "polars",
    overwrite: bool = False,
    progress: Tell | None = None,
) -> Prepared:
    """Interactions of a file, a folder of Parquet parts or a glob, split, as a folder that training reads from disk.

    Columns are found and rows cleaned as `read` does; `how`, `valid`, `test` and `seed` are those of `split`, and give the same parts.
    The engine "spark" reads Parquet on a cluster (the active session, or a local one) and gives the same files bit for bit.
    `out` appears as a whole at the end: what is being made lies beside it, and is deleted when something goes wrong.

        prepare("parts/", "prepared", how="leave-last-out");   fit(run, split(read("prepared")), "runs/a")
    """
    path, out, tell = Path(path), Path(out), progress or (lambda stage, done, total: None)
    if engine not in ("polars", "spark"):
        raise UserError(f"no engine called {engine!r}; choose from polars, spark")
    _check_out(out, overwrite)
    if path.is_dir() and (is_prepared(path) or is_xc(path) or is_beir(path)):
        raise UserError(f"{path} needs no preparing: train on it as it is")
    opened = open_table(path, query, item, items, queries, inner=engine == "polars")
    named = {
        "query": query,
        "item": item,
        "time": time,
        "weight": weight,
        "rating": rating,
        "split": split,
        "label": label,
    }
    raw = Raw(str(path), opened.frame, opened.files, named, min_rating, opened.text, opened.items, opened.queries)
    found = raw.found()
    check_split(how, valid, test, "time" in found, "split" in found)  # before a long read
    with _beside(out) as folder:
        encode = polars_engine.encode
        if engine == "spark":
            from sparring.data.prepared.spark_engine import encode
        encoded = encode(raw, folder / "buckets", tell, lambda n_rows: _check_space(folder, n_rows, found))
        merged = merge(encoded, folder / "merged", raw.source, tell)
        shutil.rmtree(folder / "buckets")
        data = merged.data
        how = how if how != "auto" else "random" if data.split is None else "file"
        check_split(how, valid, test, data.time is not None, data.split is not None)
        sizes = write_parts(merged, data, folder, how, valid, test, seed, tell)
        del data, merged
        shutil.rmtree(folder / "merged")
        tell("ids and checksums", 0, None)
        tables = {}
        for role, table, ids in (
            ("query", encoded.queries, encoded.query_ids),
            ("item", encoded.items, encoded.item_ids),
        ):
            tables[role] = (
                None if table is None else align(table, role, encoded.found[role], ids, raw.source, encoded.notes)
            )
        Ids(encoded.query_ids, encoded.item_ids, tables["query"], tables["item"]).save(folder)
        meta = {"rows": sizes, "queries": len(encoded.query_ids), "items": len(encoded.item_ids), "source": str(path)}
        meta |= {"columns": encoded.found, "min_rating": min_rating, "notes": encoded.notes}
        write_description(folder, {**meta, "split": {"how": how, "valid": valid, "test": test, "seed": seed}})
        if out.exists():
            shutil.rmtree(out)
        os.replace(folder, out)
    return read_prepared(out)


def _check_out(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose another folder for the prepared data")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise UserError(
                f"{out} is not empty: choose another folder, or overwrite what was prepared there (--overwrite)"
            )
        if not is_prepared(out):
            raise UserError(f"{out} does not hold prepared data: it will not be overwritten")


def _check_space(folder: Path, n_rows: int, found: Mapping[str, str]) -> None:
    """Two copies of all columns exist at the same time, and the items that test queries have seen are kept beside them."""
    a_row = 9 + 8 * ("time" in found) + 8 * ("weight" in found) + ("label" in found)
    need, free = n_rows * (2 * a_row + 5), shutil.disk_usage(folder).free
    if free < need:
        have, want = f"{free / 1e9:.1f} GB free", f"{need / 1e9:.1f} GB"
        raise UserError(
            f"the disk of {folder.parent} has {have}, and preparing {n_rows:,} rows takes about {want}: free some first"
        )


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A folder beside `out` to work in; gone when anything fails, and what a kill left there before is deleted."""
    folder = out.absolute().parent / f".{out.name}.preparing"
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        yield folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if disk_full(error):
            raise UserError(
                f"the disk of {folder.parent} is full: nothing was written to {out}; free some, then prepare again"
            ) from None
        raise
